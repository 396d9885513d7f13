"""A metric as a Space: its folder of `evaluate_modules` with a card that names the Space it stands in."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_captionrl.evaluate_modules import MODULES, path
from hf_captionrl.hub.publish_checks import check_card
from hf_captionrl.hub.push import push_folder
from hf_captionrl.hub.templates import render_template
from hf_captionrl.io import atomic_write_text
from hf_captionrl.reports.versions import installed_versions

__all__ = ["push_metric", "render_metric_card", "write_space"]

_OWNER = "ORGANISATION"
"""What stands for the owner in the modules' own cards."""


def render_metric_card(name: str, repo_id: str, *, revision: str = "main") -> str:
    """The card of a metric's Space.

    Args:
        name: One of `evaluate_modules.MODULES`.
        repo_id: `owner/name` of the Space; `evaluate` wants the module's own name behind the owner.
        revision: Branch, tag or commit that the printed example loads.

    Returns:
        `str`: The module's card, with the Space's name, and how to load it at one revision.

    Raises:
        ValueError: If there is no such module, the Space is called otherwise, or the card must not be published.
    """
    folder = Path(path(name))
    owner, slash, last = repo_id.partition("/")
    if not (owner and slash) or last != name:
        raise ValueError(f"The Space is called {repo_id!r}; evaluate.load finds {name}.py only in OWNER/{name}.")
    text = (folder / "README.md").read_text(encoding="utf-8").replace(f"{_OWNER}/", f"{owner}/")
    _, metadata, body = text.split("---\n", 2)
    versions = {key: value for key, value in installed_versions().items() if key != "git_revision"}
    card = render_template(
        "metric.md",
        metadata=metadata.strip(),
        body=body.strip(),
        repo_id=repo_id,
        revision=revision,
        versions=versions,
    )
    check_card(card)
    return card


def write_space(name: str, folder: str | os.PathLike[str], repo_id: str) -> Path:
    """Write a metric's Space into a folder.

    Args:
        name: One of `evaluate_modules.MODULES`.
        folder: Where to.
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
        token: Of the Hub; by default the one stored by `hf auth login`.
        overwrite: Push also into a Space that holds other content.
        sleep: What waits between tries, for tests.

    Returns:
        `str`: Address of the commit.

    Raises:
        ValueError: As `render_metric_card`, or as `push_folder`.
        FileExistsError: If the Space holds other content.
        PermissionError: If the token is missing, wrong, or may not write there.
        PushError: If the Hub cannot be reached or refuses otherwise.
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
