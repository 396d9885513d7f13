"""Where a checkpoint has its weights in safetensors: on the revision asked for, or on the Hub's pull request with a copy.

Many older repositories hold pickles alone on their main revision. A bot of the Hub has opened a pull request with the
same weights in safetensors for most of them, which transformers loads too. It is read here under stricter conditions: the
bot wrote it, and the pickle beside the copy is the one of the main revision. Offline, the copy in the cache is used.
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
"""Where transformers looks for weights, in its order."""
ADAPTER_FILES = ("adapter_model.safetensors",)
"""Where PEFT does."""

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin")
"""What older releases of both wrote."""

_BOT = "SFconvertbot"
_TITLE = "Adding `safetensors` variant of this model"
_MAIN = (None, "main")


@dataclass(frozen=True)
class Weights:
    """Weights that were found.

    Args:
        path (`str`): The safetensors file, or the index of several.
        revision (`str`, *optional*): Where they are on the Hub.
    """

    path: str
    revision: str | None

    @property
    def commit(self) -> str | None:
        """Commit on the Hub; None in a folder."""
        from transformers.utils.hub import extract_commit_hash

        return extract_commit_hash(self.path, None)


def convert_command(name: str) -> str:
    """The command that writes safetensors from pickles."""
    return f"`captionrl convert {shlex.quote(name)} OUT`"


def usable_revision(name: str, revision: str | None, files: Sequence[str] = ("config.json",)) -> str | None:
    """The revision to read a checkpoint from, where none is asked for.

    Offline, a repository of which only the pull request with safetensors was downloaded is read from there.
    """
    if revision is not None or hub_name(name) is None or any(find_file(name, file) for file in files):
        return revision
    for pull_request in _cached_pull_requests(name):
        if any(find_file(name, file, pull_request) for file in files):
            return pull_request
    return None


def find_weights(name: str, revision: str | None = None, files: Sequence[str] = WEIGHT_FILES) -> Weights:
    """Find the weights of a checkpoint in safetensors, and check that they are whole."""
    found = _find(name, revision, files)
    pull_request = None
    if found is None and hub_name(name) is not None:
        pull_request = _pull_request(name, files)
        if pull_request is not None and revision in _MAIN:
            found = _find(name, pull_request, files)
    if found is None:
        raise FileNotFoundError(_missing(name, revision, files, pull_request))
    if found.revision != revision:
        _tell(name, str(found.revision))
    _check_whole(name, found)
    return found


@functools.lru_cache(maxsize=64)
def _tell(name: str, revision: str) -> None:
    """Say once where weights come from."""
    logger.warning(
        "%s has no safetensors on its main revision: the weights of %s are used, which the Hub's bot converted.",
        name,
        revision,
    )


def _find(name: str, revision: str | None, files: Sequence[str]) -> Weights | None:
    for file in files:
        path = find_file(name, file, revision)
        if path is not None:
            return Weights(path, revision)
    return None


def _check_whole(name: str, weights: Weights) -> None:
    if not weights.path.endswith(".index.json"):
        check_safetensors(weights.path)
        return
    for shard in check_index(weights.path):
        path = find_file(name, shard, weights.revision)
        if path is None:
            raise FileNotFoundError(
                f"{shown(weights.path)} names {shard}, which is missing. Use an intact copy of the checkpoint."
            )
        check_safetensors(path)


def _missing(name: str, revision: str | None, files: Sequence[str], pull_request: str | None) -> str:
    """Which sentence to raise where there are no safetensors."""
    is_adapter = files is ADAPTER_FILES or files == ADAPTER_FILES
    what = f"The adapter {name!r} has no {files[0]}" if is_adapter else f"{name!r} has no weights in safetensors"
    at = f" on revision {revision!r}" if revision is not None else ""
    others = _other_weights(name, revision)
    found = f"; it has {others[0]}" if others else ""
    lead = f"{what}{at}{found}. Other formats run code where they are opened."
    if pull_request is not None:
        lead += f" Revision {pull_request!r} has the same weights in safetensors."
    elif hub_name(name) is not None and not others:
        lead += " With a connection to the Hub, a copy that its bot converted is found where there is one."
    if os.path.isdir(name) and not others:
        return f"{lead} Save the model there with save_pretrained, or use {convert_command(name)} on pickles."
    return f"{lead} Use {convert_command(name)} and load OUT."


def _other_weights(name: str, revision: str | None) -> list[str]:
    """Weights in other formats, by name; on the Hub only what is in the cache, for pickles are not downloaded here."""
    if os.path.isdir(name):
        endings = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack")
        found = sorted(path.name for path in Path(name).iterdir() if path.suffix in endings)
        return sorted(found, key=lambda file: not file.startswith(("pytorch_model", "adapter_model")))
    from huggingface_hub import try_to_load_from_cache

    return [file for file in PICKLES if isinstance(try_to_load_from_cache(name, file, revision=revision), str)]


def _pull_request(name: str, files: Sequence[str]) -> str | None:
    """The pull request with safetensors: asked of the Hub; where that cannot be reached, looked up in the cache."""
    for pull_request in [*_open_pull_requests(name), *_cached_pull_requests(name)]:
        if _find(name, pull_request, files) is not None:
            return pull_request
    return None


def _open_pull_requests(name: str) -> list[str]:
    """Revisions that the Hub's bot converted from the pickles that the main revision has; newest first."""
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
        logger.info("The Hub was not asked for a copy of %s in safetensors: %s", name, error)
        return []


def _blob(info: object) -> str | None:
    """Content hash of a file on the Hub."""
    lfs = getattr(info, "lfs", None)
    return getattr(lfs, "sha256", None) or getattr(info, "blob_id", None)


def _cached_pull_requests(name: str) -> list[str]:
    """Revisions `refs/pr/N` that the cache of the Hub knows; newest first."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "refs" / "refs" / "pr"
    if not folder.is_dir():
        return []
    numbers = sorted((int(path.name) for path in folder.iterdir() if path.name.isdigit()), reverse=True)
    return [f"refs/pr/{number}" for number in numbers]
