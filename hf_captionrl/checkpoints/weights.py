"""Finds the weights of a checkpoint in safetensors, on the requested revision or in a pull request on the Hub.

Many older repositories have only pickles on their main revision. For most of them, a bot of the Hub has opened a pull
request with the same weights in safetensors, which transformers loads too. Here the conditions are stricter: the bot is
the author, and the pull request contains the same pickle as the main revision. Offline, the cache is used.
"""

from __future__ import annotations

import functools
import logging
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_captionrl.checkpoints.files import check_index, check_safetensors, find_file, hub_name, shown

__all__ = ["ADAPTER_FILES", "WEIGHT_FILES", "Weights", "convert_command", "find_weights", "usable_revision"]

logger = logging.getLogger(__name__)

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
"""Weight files of transformers, in the order in which it looks for them."""
ADAPTER_FILES = ("adapter_model.safetensors",)
"""Weight files of PEFT."""

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin")
"""Weight files of older releases of both."""

_BOT = "SFconvertbot"
_TITLE = "Adding `safetensors` variant of this model"
_MAIN = (None, "main")


@dataclass(frozen=True)
class Weights:
    """Weights that were found."""

    path: str
    """The safetensors file, or the index of several files."""
    revision: str | None
    """Revision on the Hub."""

    @property
    def commit(self) -> str | None:
        """Commit on the Hub; None in a folder."""
        from transformers.utils.hub import extract_commit_hash

        return extract_commit_hash(self.path, None)


def convert_command(name: str) -> str:
    """The command that converts pickles to safetensors."""
    return f"`captionrl convert {shlex.quote(name)} OUT`"


def usable_revision(name: str, revision: str | None, files: Sequence[str] = ("config.json",)) -> str | None:
    """The revision to read a checkpoint from; offline, this may be a cached pull request."""
    if revision is not None or hub_name(name) is None or any(find_file(name, file) for file in files):
        return revision
    for pull_request in _cached_pull_requests(name):
        if any(find_file(name, file, pull_request) for file in files):
            return pull_request
    return None


def find_weights(name: str, revision: str | None = None, files: Sequence[str] = WEIGHT_FILES) -> Weights:
    """Find the weights of a checkpoint in safetensors, and check that they are complete."""
    found = _find(name, revision, files)
    pull_request = None
    if found is None and hub_name(name) is not None:
        pull_request = _pull_request(name, files)
        if pull_request is not None and revision in _MAIN:
            found = _find(name, pull_request, files)
    if found is None:
        raise FileNotFoundError(_missing(name, revision, files, pull_request))
    if found.revision != revision:
        _warn_once(name, str(found.revision))
    _check_shards(name, found)
    return found


@functools.lru_cache(maxsize=64)
def _warn_once(name: str, revision: str) -> None:
    logger.warning(
        "%s has no safetensors on its main revision. Using the weights of %s, converted by the Hub's bot.",
        name,
        revision,
    )


def _find(name: str, revision: str | None, files: Sequence[str]) -> Weights | None:
    for file in files:
        path = find_file(name, file, revision)
        if path is not None:
            return Weights(path, revision)
    return None


def _check_shards(name: str, weights: Weights) -> None:
    if not weights.path.endswith(".index.json"):
        check_safetensors(weights.path)
        return
    for shard in check_index(weights.path):
        path = find_file(name, shard, weights.revision)
        if path is None:
            raise FileNotFoundError(
                f"{shown(weights.path)} lists {shard}, which is missing. Use an intact copy of the checkpoint."
            )
        check_safetensors(path)


def _missing(name: str, revision: str | None, files: Sequence[str], pull_request: str | None) -> str:
    """The error message if there are no safetensors."""
    is_adapter = files is ADAPTER_FILES or files == ADAPTER_FILES
    what = f"The adapter {name!r} has no {files[0]}" if is_adapter else f"{name!r} has no weights in safetensors"
    at = f" on revision {revision!r}" if revision is not None else ""
    others = _other_weights(name, revision)
    found = f"; it has {others[0]}" if others else ""
    lead = f"{what}{at}{found}. Other formats can execute code when they are opened."
    if pull_request is not None:
        lead += f" Revision {pull_request!r} has the same weights in safetensors."
    elif hub_name(name) is not None and not others:
        lead += " With a connection to the Hub, a copy converted by its bot would be used, if there is one."
    if os.path.isdir(name) and not others:
        return f"{lead} Use save_pretrained to save the model there, or {convert_command(name)} on pickles."
    return f"{lead} Use {convert_command(name)} and load OUT."


def _other_weights(name: str, revision: str | None) -> list[str]:
    """Names of weights in other formats; for the Hub only those in the cache, because pickles are not downloaded."""
    if os.path.isdir(name):
        endings = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack")
        found = sorted(path.name for path in Path(name).iterdir() if path.suffix in endings)
        return sorted(found, key=lambda file: not file.startswith(("pytorch_model", "adapter_model")))
    from huggingface_hub import try_to_load_from_cache

    return [file for file in PICKLES if isinstance(try_to_load_from_cache(name, file, revision=revision), str)]


def _pull_request(name: str, files: Sequence[str]) -> str | None:
    """The pull request with safetensors, from the Hub or, if it cannot be reached, from the cache."""
    for pull_request in [*_open_pull_requests(name), *_cached_pull_requests(name)]:
        if _find(name, pull_request, files) is not None:
            return pull_request
    return None


def _open_pull_requests(name: str) -> list[str]:
    """Revisions that the Hub's bot converted from the pickles of the main revision; newest first."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import httpx

    if constants.HF_HUB_OFFLINE:
        return []
    api = HfApi()
    try:
        asked = api.get_repo_discussions(name, author=_BOT, discussion_type="pull_request", discussion_status="open")
        numbers = [f"refs/pr/{d.num}" for d in asked if d.is_pull_request and d.author == _BOT and d.title == _TITLE]
        if not numbers:
            return []
        current = {(info.path, _blob(info)) for info in api.get_paths_info(name, list(PICKLES))}
        return [
            revision
            for revision in sorted(numbers, key=lambda r: int(r.rpartition("/")[2]), reverse=True)
            if current
            & {(info.path, _blob(info)) for info in api.get_paths_info(name, list(PICKLES), revision=revision)}
        ]
    except (OSError, httpx.HTTPError, ValueError, RuntimeError) as error:
        logger.info("Could not look for a copy of %s in safetensors on the Hub: %s", name, error)
        return []


def _blob(info: object) -> str | None:
    """Content hash of a file on the Hub."""
    lfs = getattr(info, "lfs", None)
    return getattr(lfs, "sha256", None) or getattr(info, "blob_id", None)


def _cached_pull_requests(name: str) -> list[str]:
    """Revisions `refs/pr/N` in the cache of the Hub; newest first."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "refs" / "refs" / "pr"
    if not folder.is_dir():
        return []
    numbers = sorted((int(path.name) for path in folder.iterdir() if path.name.isdigit()), reverse=True)
    return [f"refs/pr/{number}" for number in numbers]
