"""Uploads a captioner or a folder to the Hub, after checks. A failed push can be repeated."""

from __future__ import annotations

import glob
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import CardData, HfApi, RepoCard, get_token
from huggingface_hub.utils import validate_repo_id

from hf_captionrl.utils.console import error_chain, one_line
from hf_captionrl.utils.io import atomic_write_text, installed_versions, is_secret, plain_config, write_json
from hf_captionrl.utils.model_files import (
    TOKENIZER_FILES,
    adapter_base,
    check_checkpoint,
    load_pretrained,
    read_object,
)

# --- What must not be published: secrets, and cards without metadata -------------------------------------------------

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""`owner/name`."""

# Hugging Face, OpenAI-like services, GitHub, AWS, and private keys.
_TOKEN = re.compile(
    r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}|(?<![A-Za-z0-9])sk-(?:(?:proj|svcacct|admin|ant|or)-[\w-]{20,}|[A-Za-z0-9]{20,})"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{20,}|\bA(?:KIA|SIA)[0-9A-Z]{16}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?:.*?-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|.*)",
    re.DOTALL,
)


def check_secret(name: str, text: str, token: str | None = None) -> None:
    """Raise if a text contains an access token or a private key."""
    # In JSON, Python and YAML, a line break before a key is a backslash and a letter.
    if _TOKEN.search(re.sub(r"\\[nrtbf]", " ", text)) or (token and token in text):
        raise ValueError(
            f"{name} contains an access token or a private key. Remove it, and revoke it if anyone has seen it."
        )


def check_card(text: str) -> CardData:
    """Check that a generated or edited card may be published.

    Args:
        text: Content of a `README.md`: Markdown that begins with metadata.

    Returns:
        [`huggingface_hub.CardData`]: The metadata.

    Raises:
        ValueError: If it lacks metadata or a licence, or contains a token.
    """
    check_secret("The card", text.replace(r"\_", "_"))  # Markdown escapes it
    try:
        data = RepoCard(text).data
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"The card's metadata are not valid YAML ({one_line(error)}). Correct them.") from None
    if not data.get("license"):
        raise ValueError("The card has no licence. Add `license:` to its metadata, or use `captionrl card --license`.")
    return data


# --- The training manifest: versions, command, data and configuration of a published model, without local paths ------

MANIFEST_FILE = "training_manifest.json"
"""File name in a published repository; it identifies repositories that this package has pushed."""

_ABSOLUTE = re.compile(r"(?:/|~|[A-Za-z]:[\\/]|\\\\)[^\s]")


def public_values(value: Any) -> Any:
    """A configuration (a dataclass or mappings) for publication: without secrets, names instead of local paths."""
    value = plain_config(value)
    if isinstance(value, Mapping):
        return {key: public_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [public_values(item) for item in value]
    return _public_text(value) if isinstance(value, str) else value


def _public_text(text: str) -> str:
    """Text without tokens; a local path is reduced to its last part."""
    if _ABSOLUTE.match(text) or ".." in re.split(r"[\\/]", text):
        text = re.split(r"[\\/]", text.rstrip("\\/"))[-1]
    return _TOKEN.sub("[removed]", text)


def public_command(argv: Sequence[str]) -> list[str]:
    """The arguments of a program for publication: `***` instead of secrets, names instead of local paths."""
    command: list[str] = []
    option = ""  # the option whose value is the next argument
    for part in argv:
        name, equals, value = part.partition("=")
        if option and is_secret(option, part):
            command.append("***")
        elif equals and name.startswith("-"):
            command.append(f"{name}={'***' if is_secret(name, value) else _public_text(value)}")
        else:
            command.append(_public_text(part))
        option = part if part.startswith("-") and not equals else ""
    return command


def public_versions(versions: Mapping[str, str] | None = None) -> dict[str, str]:
    """Versions, by default the installed ones, without the revision of a private checkout."""
    versions = installed_versions() if versions is None else versions
    return {name: version for name, version in versions.items() if name != "git_revision"}


def write_manifest(
    folder: str | os.PathLike[str],
    *,
    command: Sequence[str],
    seeds: Mapping[str, int | None],
    data: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write `training_manifest.json`: versions, command, data (name, revision, fingerprints), seeds and configuration."""
    manifest = {
        "made_with": "hf_captionrl",
        "versions": public_versions(),
        "command": public_command(command),
        "data": public_values(data),
        "seeds": dict(seeds),
        "config": public_values(config or {}),
    }
    return write_json(Path(folder) / MANIFEST_FILE, manifest)


# --- Selects the files of a folder that are published ----------------------------------------------------------------

_PUBLISHED = {
    "model": ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.md", "*.html", "*.png"),
    "space": ("*.py", "*.md", "*.txt"),
    "dataset": ("*.parquet", "*.json", "*.jsonl", "*.csv", "*.md", "*.safetensors", "data/*.parquet"),
}
"""Patterns of the files that are published. All other files are omitted."""

_NEVER = (
    *("card.json", "trainer_state.json", "training_images.json"),
    *("*.run.json", "quarantine.jsonl", "skipped.jsonl", "journal-*"),
)
"""Files with the state of a run or a Trainer."""
_NOT_TEXT = (".safetensors", ".png", ".model", ".parquet")

PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""Files of an image processor."""


class Contents(NamedTuple):
    """Files of a folder that are uploaded, and those that are not; relative to it, with `/`."""

    published: Sequence[str]
    left_out: Sequence[str]


def folder_contents(
    folder: str | os.PathLike[str], repo_type: str = "model", *, token: str | None = None, gallery: bool | None = None
) -> Contents:
    """Select and check the files of a folder before anything is uploaded.

    `gallery` is whether to publish HTML pages of a model, which contain the test images; by default only if these are public
    according to the manifest.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {str(folder)!r}. Use the folder of a finished model.")
    if gallery is None and (folder / MANIFEST_FILE).is_file():
        gallery = read_object(folder / MANIFEST_FILE).get("data", {}).get("public_images") is True
    never = _NEVER if gallery else (*_NEVER, "*.html")
    selected = {path for pattern in _PUBLISHED[repo_type] for path in folder.glob(pattern) if path.is_file()}
    selected = {path for path in selected if not any(fnmatch(path.name, pattern) for pattern in never)}
    others = {path for path in folder.rglob("*") if path.is_file() or path.is_symlink()} - selected
    contents = Contents(*(sorted(path.relative_to(folder).as_posix() for path in part) for part in (selected, others)))
    for name in contents.published:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"{name} in {folder} is a link to a place outside the folder. Replace it with the file, or remove it."
            )
        check_secret("The name of a file", name, token)
        if path.suffix == ".parquet":
            _check_image_paths(name, path)
        elif path.suffix not in _NOT_TEXT:
            check_secret(name, path.read_text(encoding="utf-8", errors="replace"), token)
    _check_complete(folder, repo_type, contents.published)
    return contents


def _check_image_paths(name: str, path: Path) -> None:
    """Raise if a table refers to images by local paths."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        columns = [column.path for column in file.schema if column.path.endswith(".path")]
        for batch in file.iter_batches(columns=columns):
            if any(image and os.path.isabs(image["path"] or "") for c in batch.columns for image in c.to_pylist()):
                raise ValueError(
                    f"{name} refers to images by local paths. Use `captionrl boost ... --embed_images`, or --no_images."
                )


def _check_complete(folder: Path, repo_type: str, published: Sequence[str]) -> None:
    if "README.md" not in published:
        raise FileNotFoundError(f"{folder} has no README.md. Write the card first: captionrl card {folder}")
    metadata = check_card((folder / "README.md").read_text(encoding="utf-8"))
    needed = {"weights": ("*.safetensors",), "tokenizer": TOKENIZER_FILES, "manifest": (MANIFEST_FILE,)}
    if metadata.get("pipeline_tag") != "text-generation":
        needed["image processor"] = PROCESSORS
    for part, patterns in needed.items() if repo_type == "model" else ():
        if not any(fnmatch(name, pattern) for name in published for pattern in patterns):
            raise FileNotFoundError(
                f"{folder} has no {part} ({', '.join(patterns)}). Save it with save_pretrained, then: captionrl card {folder}"
            )


def local_base_model(folder: str | os.PathLike[str]) -> str | None:
    """The base model of an adapter if it is a local folder, which others cannot load; else None."""
    path = Path(folder) / "adapter_config.json"
    base = str(read_object(path).get("base_model_name_or_path") or "") if path.is_file() else ""
    return base if base and (os.path.isabs(base) or base.startswith((".", "~")) or os.path.isdir(base)) else None


# --- Merges an adapter into its base model, for users who do not have the base model ---------------------------------

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def write_merged(folder: Path, target: Path, names: Sequence[str]) -> None:
    """Write a folder with the merged model and the other files."""
    import transformers
    from peft import PeftModel

    from hf_captionrl.captioners import load_captioner
    from hf_captionrl.captioners.captioner import SETTINGS_FILE

    for name in set(names).difference(_ADAPTER):
        shutil.copyfile(folder / name, target / name)
    if (folder / SETTINGS_FILE).is_file():
        captioner = load_captioner(str(folder))
        captioner.model = captioner.model.merge_and_unload()
        captioner.save_pretrained(target)
    else:  # of TRL's trainers
        loader = getattr(transformers, check_checkpoint(str(folder))["config"].architectures[0])
        base, _ = load_pretrained(loader, adapter_base(str(folder), None))
        PeftModel.from_pretrained(base, str(folder)).merge_and_unload().save_pretrained(target)


# --- Uploads a folder to the Hub, after checks -----------------------------------------------------------------------

_STALE = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json", "adapter/*"]
"""Files of an earlier push that are deleted, because they would be loaded together with the new weights."""


class PushError(RuntimeError):
    """A push that the Hub refused or that failed; the folder is unchanged."""


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    repo_type: str = "model",
    private: bool = True,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Add captioner",
    overwrite: bool = False,
    gallery: bool | None = None,
) -> str:
    """Upload a finished folder with its card, in one commit. In the folder, only the card is written.

    An adapter whose base model is a local folder, which others cannot load, is merged into it for the upload. A failed push
    can be repeated; the client of the Hub repeats interrupted requests, and does not send uploaded files again.

    Args:
        folder: Folder with weights in safetensors, processor, card and manifest; or a Space, or a data set.
        repo_id: `owner/name`, or `name` for the owner of the token; created if missing.
        repo_type: `model`, `space` or `dataset`.
        private: Whether a new repository is private; existing ones are not changed.
        token: Access token; by default the one stored by `hf auth login`.
        revision: Branch to push to, created if missing; by default `main`.
        commit_message: Message of the commit.
        overwrite: Also push to a repository that has other content.
        gallery: Whether to upload the HTML pages of a model, which contain the test images. By default only if these
            are public according to the manifest.

    Returns:
        `str`: URL of the commit.

    Raises:
        FileNotFoundError: If the folder is not complete.
        ValueError: If the name is invalid, or something in the folder must not be published.
        FileExistsError: If the repository has other content.
        PermissionError: If the token is missing, invalid, or has no write permission.
        PushError: If the Hub cannot be reached, or the push fails for another reason.
    """
    validate_repo_id(repo_id)
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        # In a header, such a token would fail with a message that contains it.
        raise ValueError("The token contains a space, a line break or another invalid character. Copy it again.")
    secret = token or get_token()
    check_secret("commit_message", commit_message, secret)
    contents = folder_contents(folder, repo_type, token=secret, gallery=gallery)
    try:
        with tempfile.TemporaryDirectory() as merged:
            if repo_type == "model" and local_base_model(folder) is not None:
                write_merged(Path(folder), Path(merged), contents.published)
                folder, contents = merged, folder_contents(merged, token=secret, gallery=gallery)
            api, branch, folder = HfApi(token=token), revision or "main", Path(folder)
            space = {"space_sdk": "gradio"} if repo_type == "space" else {}
            address = api.create_repo(repo_id, repo_type=repo_type, private=private, exist_ok=True, **space).repo_id
            where: dict[str, Any] = {"repo_id": address, "repo_type": repo_type}
            if branch != "main":
                api.create_branch(branch=branch, exist_ok=True, **where)
            present = {file.rfilename for file in api.repo_info(**where, revision=branch).siblings or []}
            # A Space of this package has a metric or the arguments of the demo.
            name = address.rpartition("/")[2]
            ours = {"model": {MANIFEST_FILE}, "dataset": {"README.md"}, "space": {f"{name}.py", "arguments.txt"}}
            others = present - {".gitattributes"}
            if others and not others & ours[repo_type] and not overwrite:
                raise FileExistsError(
                    f"{address!r} exists and has other content ({', '.join(sorted(others)[:3])}). Use another name, or "
                    "allow overwriting (`captionrl push --overwrite`). Nothing was sent."
                )
            text = (folder / "README.md").read_text(encoding="utf-8")
            # The code examples load the folder of the card; there, it is the repository.
            public = re.sub(rf'"(?:\.|{re.escape(name)})"(?=, revision=)', f'"{address}"', text)
            if public != text:
                atomic_write_text(folder / "README.md", public)
            commit = api.upload_folder(
                folder_path=folder,
                commit_message=commit_message,
                allow_patterns=[glob.escape(file) for file in contents.published],
                delete_patterns=_STALE if repo_type == "model" else None,
                revision=branch,
                **where,
            )
            return str(commit)
    except FileExistsError:
        raise
    except Exception as error:
        # Without the client's error, whose text may contain headers with the token.
        raise _failure(error, repo_id, has_token=bool(secret)) from None


def _failure(error: Exception, repo_id: str, *, has_token: bool) -> Exception:
    """The error for users, with the remedy."""
    responses = (getattr(link, "response", None) for link in error_chain(error))
    status = next((response.status_code for response in responses if response is not None), None)
    needs = "does not accept the token (401)" if has_token else "needs a token, but there is none (401)"
    reason = {
        401: f"The Hub {needs}. Log in with `hf auth login`, or set HF_TOKEN.",
        403: "The token may not write to it (403). Use a token with write permission.",
        None: f"{type(error).__name__}: {one_line(error)}.",
    }.get(status, f"The Hub answered {status}.")
    kind = PermissionError if status in (401, 403) else PushError
    return kind(f"Pushing to {repo_id!r} failed. {reason} The files are unchanged, so the push can be repeated.")


def push_captioner(captioner: Any, repo_id: str, **settings: Any) -> str:
    """Save a captioner with a card and push it, with the checks and errors of [`push_folder`].

    Args:
        captioner ([`Captioner`]): The captioner.
        repo_id: `owner/name`; created if missing.
        settings: `private`, `token` and `overwrite`, see [`push_folder`].

    Returns:
        `str`: URL of the commit.
    """
    from hf_captionrl.hub.cards import write_unmeasured_card  # which imports this module

    with tempfile.TemporaryDirectory() as folder:
        captioner.save_pretrained(folder)
        write_unmeasured_card(folder, model_id=repo_id)
        return push_folder(folder, repo_id, **settings)
