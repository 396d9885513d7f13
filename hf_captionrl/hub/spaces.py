"""Spaces: each metric, for `evaluate.load("owner/name")`, and the demo with chosen captioners."""

from __future__ import annotations

import json
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
from hf_captionrl.metrics.evaluate_modules.descriptions import DESCRIPTIONS, Description
from hf_captionrl.utils.io import atomic_write_text, shipped_path
from hf_captionrl.utils.model_files import PREFIX, model_path

# --- A metric: the files of its Space, from its description, and the page --------------------------------------------


def space_files(name: str, repo_id: str) -> dict[str, str]:
    """File names and contents of a metric's Space."""
    if name not in DESCRIPTIONS:
        raise ValueError(f"There is no metric {name!r}. Use one of {list(DESCRIPTIONS)}.")
    if repo_id.rpartition("/")[2] != name:
        raise ValueError(
            f"repo_id is {repo_id!r}, but evaluate.load finds {name}.py only in OWNER/{name}. Use that name."
        )
    metric, kind = DESCRIPTIONS[name], class_name(name)
    extra = f"[{metric.extra}]" if metric.extra else ""
    return {
        f"{name}.py": f'from hf_captionrl.metrics.evaluate_modules.{name} import {kind}\n\n__all__ = ["{kind}"]\n',
        "README.md": render_card("metric.md", CardData(), name=name, metric=metric, repo_id=repo_id),
        "app.py": f'from hf_captionrl.hub.spaces import build_page\n\nbuild_page("{name}").launch()\n',
        "requirements.txt": f"hf-captionrl{extra}>=0.1.0\n",
    }


def compute_from_json(metric: Any, text: str, about: Description) -> dict[str, Any]:
    """Compute from the JSON that a visitor typed.

    A public page must not let visitors open files or start programs of its server. It therefore accepts only the arguments
    of its examples. Captions and `data_arguments` may have any value except strings and files. Options (names of models or
    metrics) may have only the values of the examples.
    """
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"This is not JSON: {error}.") from None
    if not isinstance(arguments, dict):
        raise ValueError("Write one JSON object with the arguments, such as those of the examples.")
    for name, value in arguments.items():
        allowed = [case[name] for case in about.cases if name in case]
        if name == "result" or not allowed:
            raise ValueError(f"This page does not take {name!r}. Install the package to use it.")
        is_data = name in ("predictions", "references", *about.data_arguments) and not isinstance(value, str)
        if value not in allowed and not is_data:
            raise ValueError(f"This page takes {name} {allowed} only, not {value!r}.")
        if _holds_file(value):
            raise ValueError(f"This page does not open files, but {name} contain a mapping with 'path' or 'bytes'.")
    return metric.compute(**arguments)


def _holds_file(value: Any) -> bool:
    """Whether the value contains a mapping that would be opened as an image."""
    if isinstance(value, Mapping):
        return "path" in value or "bytes" in value or any(map(_holds_file, value.values()))
    return isinstance(value, list) and any(map(_holds_file, value))


def build_page(name: str) -> Any:
    """The page: description, arguments as JSON, examples, result. The one of `evaluate` is broken."""
    import evaluate
    import gradio

    metric, about = evaluate.load(name), DESCRIPTIONS[name]
    examples = [json.dumps({k: v for k, v in case.items() if k != "result"}, indent=1) for case in about.cases]

    def run(text: str) -> dict[str, Any]:
        try:
            return compute_from_json(metric, text, about)
        except (ValueError, TypeError) as error:
            raise gradio.Error(str(error)) from None

    with gradio.Blocks(title=name) as page:
        gradio.Markdown(f"# {name}\n\n{metric.description}")
        arguments = gradio.Code(value=examples[0], language="json", label="Arguments of compute")
        button = gradio.Button("Compute", variant="primary")
        result = gradio.JSON(label="Result")
        gradio.Examples([[example] for example in examples], inputs=[arguments])
        button.click(run, inputs=[arguments], outputs=[result])
        gradio.Markdown(f"```\n{metric.inputs_description}\n```")
    return page


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
    for model in (*models.values(), scorer):
        if model == model_path(model) and (os.path.exists(model) or model.count("/") > 1):
            raise ValueError(f"{model!r} is a local folder, which a Space does not have. Push it first.")
    arguments = [f"--scorer={scorer}", *(f"--model={name}={model}" for name, model in models.items())]
    for argument in arguments:
        if not argument.isprintable():
            raise ValueError(f"{argument!r} contains a line break or another invisible character. Use another name.")
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
