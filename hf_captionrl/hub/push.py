"""Uploads a folder to the Hub, after checks and with retries. A failed push can be repeated."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_captionrl.hub.manifest import MANIFEST_FILE
from hf_captionrl.hub.merge import write_merged
from hf_captionrl.hub.publish_checks import check_name
from hf_captionrl.hub.publishable_files import NEVER, Contents, folder_contents, local_base_model
from hf_captionrl.hub.push_errors import PushError, explain, is_transient
from hf_captionrl.io import atomic_write_text, write_json

__all__ = ["STATE_FILE", "check_name", "pin_examples", "push_folder", "read_push_state"]

STATE_FILE = "push_state.json"
"""State and destination of the last push; saved in the folder of the model, never uploaded."""

_LONGEST_WAIT_S = 60.0
_STALE = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json", "adapter/*")
"""Files of an earlier push that are deleted, because they would be loaded together with the new weights."""


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    repo_type: str = "model",
    private: bool = True,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Add captioner",
    merged: bool | None = None,
    overwrite: bool = False,
    marker: str | None = None,
    gallery: bool | None = None,
    attempts: int = 5,
    first_wait_s: float = 1.0,
    sleep: Callable[[float], object] = time.sleep,
    again: str | None = None,
) -> str:
    """Upload a finished folder with its card. The model files are not modified.

    All files are in one commit. A second commit writes the id of the first one as `revision` into the code examples of the
    card. In the folder, only the card and `push_state.json` are written.

    Args:
        folder: Folder with weights in safetensors, processor, card and manifest; or a Space, or a data set.
        repo_id: `owner/name`, or `name` for the owner of the token; created if missing.
        repo_type: `model`, `space` or `dataset`.
        private: Whether a new repository is private; existing ones are not changed.
        token: Access token; by default the one stored by `hf auth login`.
        revision: Branch to push to, created if missing; by default `main`.
        commit_message: Message of the commit.
        merged: Upload an adapter merged into its base model, with the adapter in `adapter/`. By default only if the
            base model is a local folder, which others cannot load.
        overwrite: Also push to a repository that has other content.
        marker: File that identifies repositories of this package; by default that of the repository type.
        gallery: Whether to upload the HTML pages of a model, which contain the test images. By default only if these
            are public according to the manifest.
        attempts: Maximum number of attempts.
        first_wait_s: Seconds before the second attempt; each further wait is twice as long, at most a minute.
        sleep: Function that waits, for tests.
        again: Remedy after a failure, in one sentence; by default to push the folder again.

    Returns:
        `str`: URL of the commit.

    Raises:
        FileNotFoundError: If the folder is not complete.
        ValueError: If the name is invalid, or something in the folder must not be published.
        FileExistsError: If the repository has other content.
        PermissionError: If the token is missing, invalid, or has no write permission.
        PushError: If the Hub cannot be reached, or the push fails for another reason.
    """
    from huggingface_hub import get_token

    folder = Path(folder)
    check_name(repo_id)
    _check_token(token)
    sent = token or get_token()
    contents = folder_contents(folder, repo_type, token=sent, gallery=gallery)
    state = {"repo_id": repo_id, "repo_type": repo_type, "private": private, "revision": revision}
    state |= {"commit_message": commit_message, "merged": merged, "marker": marker, "gallery": gallery}
    _save_state(folder, {**state, "state": "started"})
    merge = repo_type == "model" and (local_base_model(folder) is not None if merged is None else merged)
    try:
        with contextlib.ExitStack() as stack:
            source = folder
            if merge and (folder / "adapter_config.json").is_file():
                source = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                write_merged(folder, source, contents.published)
                contents = folder_contents(source, repo_type, token=sent, gallery=gallery)
            upload = _Upload(folder, source, contents, state, token, overwrite)
            for attempt in range(1, attempts + 1):
                try:
                    address = upload.run()
                    break
                except Exception as error:  # the client raises a dozen unrelated types for a failed connection
                    if attempt == attempts or not is_transient(error):
                        raise
                    sleep(min(first_wait_s * 2 ** (attempt - 1), _LONGEST_WAIT_S))
    except BaseException as error:
        reason = explain(error, repo_id, has_token=bool(sent)) if isinstance(error, Exception) else "interrupted"
        _save_state(folder, {**state, "state": "failed", "reason": reason})
        if not isinstance(error, Exception) or isinstance(error, FileExistsError):
            raise
        again = again or (
            f"Nothing is lost: all files are still in {folder}. Repeat with `captionrl push {folder}` or "
            f"hf_captionrl.hub.push_folder({str(folder)!r}, {repo_id!r})."
        )
        kind = PermissionError if reason.startswith(("The Hub needs", "The Hub does not", "The token")) else PushError
        # Without the client's error, whose text may contain headers with the token.
        raise kind(f"Pushing to {repo_id!r} failed: {reason} {again}") from None
    _save_state(folder, {**state, "repo_id": upload.repo_id, "state": "pushed", "commit": address})
    return address


class _Upload:
    """A push that can be repeated; uploaded files are not sent again."""

    def __init__(
        self,
        folder: Path,
        source: Path,
        contents: Contents,
        state: Mapping[str, Any],
        token: str | None,
        overwrite: bool,
    ) -> None:
        from huggingface_hub import HfApi

        self.api = HfApi(token=token)
        self.folder, self.source, self.contents, self.state, self.overwrite = (
            folder,
            source,
            contents,
            state,
            overwrite,
        )
        self.repo_id = state["repo_id"]

    def run(self) -> str:
        repo_type, private = self.state["repo_type"], self.state["private"]
        space = {"space_sdk": "gradio"} if repo_type == "space" else {}
        kind = {} if repo_type == "model" else {"repo_type": repo_type}
        made = self.api.create_repo(self.repo_id, private=private, exist_ok=True, **kind, **space)
        self.repo_id = made.repo_id
        branch = self.state["revision"]
        where: dict[str, Any] = {"repo_id": self.repo_id, **kind}
        if branch not in (None, "main"):
            self.api.create_branch(branch=branch, exist_ok=True, **where)
            where["revision"] = branch
        before = self.api.repo_info(**where)
        self._check_others(before)
        commit = self.api.upload_folder(
            folder_path=self.source,
            commit_message=self.state["commit_message"],
            allow_patterns=[glob.escape(name) for name in self.contents.published],
            ignore_patterns=list(NEVER),
            delete_patterns=list(_STALE) if repo_type == "model" else None,
            **where,
        )
        card = (self.source / "README.md").read_text(encoding="utf-8")
        oid = getattr(commit, "oid", None)
        # Without changes, keep the pinned revision.
        pinned = pin_examples(card, self.repo_id, oid, again=oid != before.sha)
        if pinned == card:
            return str(commit)
        second = self.api.upload_file(
            path_or_fileobj=pinned.encode(), path_in_repo="README.md", commit_message="Pin the examples", **where
        )
        # Last, so that after a failure a repeated push finds the original card and pins it.
        with contextlib.suppress(OSError):
            atomic_write_text(self.folder / "README.md", pinned)
        return str(second)

    def _check_others(self, info: Any) -> None:
        """Raise if the repository has files that were not pushed by this package."""
        default = {"model": MANIFEST_FILE, "dataset": "README.md"}.get(self.state["repo_type"])
        marker = self.state["marker"] or default
        files = {file.rfilename for file in info.siblings or []} - {".gitattributes"}
        if files and marker not in files and not self.overwrite:
            raise FileExistsError(
                f"{self.repo_id!r} exists and has other content ({', '.join(sorted(files)[:3])}). Use another name, or "
                "allow overwriting (`captionrl push --overwrite`). Nothing was sent."
            )


def pin_examples(card: str, repo_id: str, commit: str | None, *, again: bool = False) -> str:
    """Make the code examples of a card load the repository at a fixed commit.

    Args:
        card: Markdown. Its code may contain `revision="main"` and the name of the repository without the owner.
        repo_id: `owner/name`.
        commit: The commit of the weights; None to keep the revisions.
        again: Also replace a commit that was pinned by an earlier push.

    Returns:
        `str`: The card with changed code blocks.
    """

    def pin(block: re.Match[str]) -> str:
        text = block.group(0).replace(f'"{repo_id.rpartition("/")[2]}"', f'"{repo_id}"')
        pattern = r'("' + re.escape(repo_id) + r'".*?revision=)' + (r'"(?:main|[0-9a-f]{40})"' if again else '"main"')
        return text if commit is None else re.sub(pattern, rf'\1"{commit}"', text)

    return re.sub(r"^```python\n.*?^```$", pin, card, flags=re.MULTILINE | re.DOTALL)


def read_push_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """State of the last push of a folder.

    Args:
        folder: The folder.

    Returns:
        `dict`: `state` (`started`, `failed` or `pushed`), the destination, and the reason of a failure; empty if there
        was no push.
    """
    path = Path(folder) / STATE_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _save_state(folder: Path, state: Mapping[str, Any]) -> None:
    # A full disk or a read-only folder must not prevent the push.
    with contextlib.suppress(OSError):
        write_json(folder / STATE_FILE, state)


def _check_token(token: str | None) -> None:
    if token is not None and not (token.isascii() and token.isprintable() and token and " " not in token):
        # In a header, such a token would fail with a message that contains it.
        raise ValueError("The token contains a space, a line break or another invalid character. Copy it again.")
