"""Spaces: each metric, for `evaluate.load("owner/name")`, and the demo with chosen captioners."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CardData

from hf_captionrl.hub.cards import render_card
from hf_captionrl.hub.push import push_folder
from hf_captionrl.metrics.evaluate_modules import class_name
from hf_captionrl.metrics.evaluate_modules.descriptions import DESCRIPTIONS
from hf_captionrl.utils.io import atomic_write_text, shipped_path
from hf_captionrl.utils.model_files import PREFIX

# --- A metric: the files of its Space, from its description ----------------------------------------------------------


_PAGE = """from pathlib import Path

import gradio

with gradio.Blocks() as page:
    gradio.Markdown(Path("README.md").read_text(encoding="utf-8").split("---", 2)[2])
page.launch()
"""
"""The page of a metric is its card: it computes nothing for visitors."""


def space_files(name: str, repo_id: str) -> dict[str, str]:
    """File names and contents of a metric's Space."""
    if name not in DESCRIPTIONS:
        raise ValueError(f"There is no metric {name!r}. Use one of {list(DESCRIPTIONS)}.")
    metric, kind = DESCRIPTIONS[name], class_name(name)
    extra = f"[{metric.extra}]" if metric.extra else ""
    return {
        f"{name}.py": f'from hf_captionrl.metrics.evaluate_modules.{name} import {kind}\n\n__all__ = ["{kind}"]\n',
        "README.md": render_card("metric.md", CardData(), name=name, metric=metric, repo_id=repo_id),
        "app.py": _PAGE,
        "requirements.txt": f"hf-captionrl{extra}>=0.1.0\n",
    }


def push_metric(name: str, owner: str, **settings: Any) -> str:
    """Publish a metric as the Space `owner/name`, which `evaluate.load("owner/name")` loads; returns the URL of the commit.

    `settings` are `private`, `token` and `overwrite`, see [`push_folder`].
    """
    repo_id = f"{owner}/{name}"
    with tempfile.TemporaryDirectory() as folder:
        for file, text in space_files(name, repo_id).items():
            Path(folder, file).write_text(text, encoding="utf-8")
        return push_folder(folder, repo_id, repo_type="space", commit_message=f"Add the metric {name}", **settings)


# --- The demo: the page of `captionrl demo` with chosen captioners ---------------------------------------------------

DEMO = "demo"
"""Name of the demo for `captionrl push`."""

EMBEDDED_CAPTIONERS = {"MLE": "scenes:blip-mle", "SMILE": "scenes:blip-smile", "SR": "scenes:blip-sr"}
"""Default captioners of the demo."""


def demo_scorer(models: Mapping[str, str]) -> str:
    """The default scorer of the demo."""
    embedded = all(model.startswith(PREFIX) for model in models.values())
    return f"{PREFIX}siglip-held-out" if embedded else "openai/clip-vit-base-patch32"


def write_demo_space(
    folder: str | os.PathLike[str], models: Mapping[str, str] | None = None, *, scorer: str | None = None
) -> Path:
    """Write the demo's Space into a folder."""
    models = dict(models or EMBEDDED_CAPTIONERS)
    scorer = scorer or demo_scorer(models)
    arguments = [f"--scorer={scorer}", *(f"--model={name}={model}" for name, model in models.items())]
    card = render_card("space/README.md", CardData(), models=models, scorer=scorer)
    folder = Path(folder)
    atomic_write_text(folder / "README.md", card)
    atomic_write_text(folder / "arguments.txt", "\n".join(arguments) + "\n")
    for file in ("app.py", "requirements.txt"):
        shutil.copyfile(shipped_path("hub_cards", "space", file), folder / file)
    return folder


def push_demo(
    repo_id: str, models: Mapping[str, str] | None = None, *, scorer: str | None = None, **settings: Any
) -> str:
    """Publish the demo as a Space. `settings` are `private`, `token` and `overwrite`, see [`push_folder`]."""
    with tempfile.TemporaryDirectory() as folder:
        write_demo_space(folder, models, scorer=scorer)
        return push_folder(folder, repo_id, repo_type="space", commit_message="Add the demo", **settings)
