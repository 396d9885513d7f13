"""The demo as a Space: the page of `captionrl demo` with the given captioners."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_captionrl.hub.manifest import public_versions
from hf_captionrl.hub.publish_checks import check_card, check_text
from hf_captionrl.hub.push import push_folder
from hf_captionrl.hub.templates import render_template, template_folder
from hf_captionrl.io import atomic_write_text

__all__ = ["DEMO", "EMBEDDED_CAPTIONERS", "demo_scorer", "push_demo", "write_demo_space"]

DEMO = "demo"
"""Name of the demo for `captionrl push`."""

EMBEDDED_CAPTIONERS = {"MLE": "scenes:blip-mle", "SMILE": "scenes:blip-smile", "SR": "scenes:blip-sr"}
"""Default captioners of the demo."""


def demo_scorer(models: Mapping[str, str]) -> str:
    """The default scorer of the demo."""
    from hf_captionrl.scenes.models import PREFIX  # imports datasets, which a push does not need

    embedded = all(model.startswith(PREFIX) for model in models.values())
    return f"{PREFIX}siglip-held-out" if embedded else "openai/clip-vit-base-patch32"


def write_demo_space(
    folder: str | os.PathLike[str], models: Mapping[str, str] | None = None, *, scorer: str | None = None
) -> Path:
    """Write the demo's Space into a folder."""
    from hf_captionrl.scenes.models import model_path

    models = dict(models or EMBEDDED_CAPTIONERS)
    scorer = scorer or demo_scorer(models)
    for model in (*models.values(), scorer):
        if model == model_path(model) and (os.path.exists(model) or model.count("/") > 1):
            raise ValueError(f"{model!r} is a local folder, which a Space does not have. Push it first.")
    arguments = [f"--scorer={scorer}", *(f"--model={name}={model}" for name, model in models.items())]
    for argument in arguments:
        if not argument.isprintable():
            raise ValueError(f"{argument!r} contains a line break or another invisible character. Use another name.")
        check_text("An argument of the demo", argument)
    card = render_template("space/README.md", models=models, scorer=scorer, versions=public_versions())
    check_card(card)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    source = template_folder("space/README.md") / "space"
    for file in ("app.py", "requirements.txt"):
        shutil.copyfile(source / file, folder / file)
    atomic_write_text(folder / "arguments.txt", "\n".join(arguments) + "\n")
    atomic_write_text(folder / "README.md", card)
    return folder


def push_demo(
    repo_id: str,
    models: Mapping[str, str] | None = None,
    *,
    scorer: str | None = None,
    private: bool = True,
    token: str | None = None,
    overwrite: bool = False,
    sleep: Callable[[float], object] | None = None,
) -> str:
    """Publish the demo as a Space."""
    more: dict[str, Any] = {} if sleep is None else {"sleep": sleep}
    with tempfile.TemporaryDirectory() as folder:
        return push_folder(
            write_demo_space(folder, models, scorer=scorer),
            repo_id,
            repo_type="space",
            private=private,
            token=token,
            overwrite=overwrite,
            commit_message="Add the demo",
            marker="arguments.txt",
            again=f"Repeat with `captionrl push demo --type space --repo_id {repo_id}` and the same options.",
            **more,
        )
