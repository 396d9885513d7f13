"""Publishes a metric as a Space: its folder in `evaluate_modules`, with a card for the Space."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_captionrl.evaluate_modules import MODULES, path
from hf_captionrl.hub.manifest import public_versions
from hf_captionrl.hub.publish_checks import check_card
from hf_captionrl.hub.push import push_folder
from hf_captionrl.hub.templates import render_template
from hf_captionrl.io import atomic_write_text

__all__ = ["push_metric", "render_metric_card", "write_space"]

_OWNER = "ORGANISATION"
"""Placeholder for the owner in the cards of the modules."""


def render_metric_card(name: str, repo_id: str, *, revision: str = "main") -> str:
    """The card of a metric's Space.

    Args:
        name: One of `evaluate_modules.MODULES`.
        repo_id: `owner/name` of the Space; `evaluate` needs the name of the module after the owner.
        revision: Branch, tag or commit in the code example.

    Returns:
        `str`: The card of the module, with the name of the Space and a code example with a fixed revision.

    Raises:
        ValueError: If there is no such module, the Space has another name, or the card must not be published.
    """
    folder = Path(path(name))
    owner, slash, last = repo_id.partition("/")
    if not (owner and slash) or last != name:
        raise ValueError(
            f"repo_id is {repo_id!r}, but evaluate.load finds {name}.py only in OWNER/{name}. Use that name."
        )
    text = (folder / "README.md").read_text(encoding="utf-8").replace(f"{_OWNER}/", f"{owner}/")
    _, metadata, body = text.split("---\n", 2)
    card = render_template(
        "metric.md",
        metadata=metadata.strip(),
        body=body.strip(),
        repo_id=repo_id,
        revision=revision,
        versions=public_versions(),
    )
    check_card(card)
    return card


def write_space(name: str, folder: str | os.PathLike[str], repo_id: str) -> Path:
    """Write a metric's Space into a folder.

    Args:
        name: One of `evaluate_modules.MODULES`.
        folder: Output folder.
        repo_id: `owner/name` of the Space.

    Returns:
        `pathlib.Path`: The folder.

    Raises:
        ValueError: As `render_metric_card`.
    """
    card = render_metric_card(name, repo_id)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file in (f"{name}.py", "app.py", "tests.py", "requirements.txt"):
        shutil.copyfile(Path(path(name)) / file, folder / file)
    atomic_write_text(folder / "README.md", card)
    return folder


def push_metric(
    name: str,
    owner: str,
    *,
    private: bool = True,
    token: str | None = None,
    overwrite: bool = False,
    sleep: Callable[[float], object] | None = None,
) -> str:
    """Publish a metric as the Space `owner/name`, which `evaluate.load("owner/name")` loads.

    Args:
        name: One of `evaluate_modules.MODULES`.
        owner: User or organisation.
        private: Whether a new Space is private.
        token: Access token; by default the one stored by `hf auth login`.
        overwrite: Also push to a Space that has other content.
        sleep: Function that waits between attempts, for tests.

    Returns:
        `str`: URL of the commit.

    Raises:
        ValueError: As `render_metric_card` or `push_folder`.
        FileExistsError: If the Space has other content.
        PermissionError: If the token is missing, invalid, or has no write permission.
        PushError: If the Hub cannot be reached, or the push fails for another reason.
    """
    if name not in MODULES:
        raise ValueError(f"There is no metric {name!r}. Use one of {sorted(MODULES)}.")
    more: dict[str, Any] = {} if sleep is None else {"sleep": sleep}
    with tempfile.TemporaryDirectory() as folder:
        return push_folder(
            write_space(name, folder, f"{owner}/{name}"),
            f"{owner}/{name}",
            repo_type="space",
            private=private,
            token=token,
            overwrite=overwrite,
            commit_message=f"Add the metric {name}",
            marker=f"{name}.py",
            again=f"Repeat with `captionrl push {name} --type space --repo_id {owner}/{name}`.",
            **more,
        )
