"""Spaces: each metric, for `evaluate.load("owner/name")`, and the demo with the given captioners."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CardData

from hf_captionrl.hub.cards import render_card
from hf_captionrl.hub.push import check_text, push_folder
from hf_captionrl.metrics.evaluate_modules import MODULES, path
from hf_captionrl.metrics.evaluate_modules.load import class_name
from hf_captionrl.metrics.evaluate_modules.metric import Metric, load_metric
from hf_captionrl.utils.io import atomic_write_text, shipped_path
from hf_captionrl.utils.model_files import PREFIX, model_path

# --- The files of a metric's Space, generated from its declaration ---------------------------------------------------

_MODULE = '''\
"""{title} as a module of `evaluate`."""

from hf_captionrl.metrics.evaluate_modules.{name} import {kind}

__all__ = ["{kind}"]
'''

_APP = '''\
"""Page of the Space."""

from pathlib import Path

from hf_captionrl.hub.spaces import build_page

if __name__ == "__main__":
    build_page("{name}", Path(__file__).parent).launch()
'''

_TESTS = '''\
"""Cases of the metric: arguments of `compute`, and numbers that the result must hold."""

from hf_captionrl.metrics.evaluate_modules.metric import load_metric

test_cases = load_metric("{name}").cases
'''

_PARENTHESES_OR_NAME = re.compile(r"\((?:[^()]|\([^()]*\))*\)|\w+")


def space_files(name: str, owner: str = "ORGANISATION") -> dict[str, str]:
    """File names and contents of a metric's Space."""
    metric, names = load_metric(name), {"name": name, "kind": class_name(name)}
    extra = f"[{metric.extra}]" if metric.extra else ""
    return {
        f"{name}.py": _MODULE.format(title=metric.title, **names),
        "README.md": render_metric_card(name, f"{owner}/{name}"),
        "app.py": _APP.format(**names),
        "requirements.txt": f"hf-captionrl{extra}>=0.1.0\n",
        "tests.py": _TESTS.format(**names),
    }


def render_metric_card(name: str, repo_id: str, *, revision: str = "main") -> str:
    """The card of a metric's Space, with its name and a code example with a fixed revision."""
    path(name)  # refuses other names
    owner, _, last = repo_id.partition("/")
    if not owner or last != name:
        raise ValueError(
            f"repo_id is {repo_id!r}, but evaluate.load finds {name}.py only in OWNER/{name}. Use that name."
        )
    metric = load_metric(name)
    return render_card(
        "metric.md",
        CardData(),
        name=name,
        metric=metric,
        inputs="\n".join(_input_items(metric.arguments)),
        returns=textwrap.dedent(metric.returns).strip(),
        examples=textwrap.dedent(metric.examples),
        repo_id=repo_id,
        revision=revision,
    )


def write_space(name: str, folder: str | os.PathLike[str], repo_id: str) -> Path:
    """Write a metric's Space into a folder."""
    for file, text in {**space_files(name), "README.md": render_metric_card(name, repo_id)}.items():
        atomic_write_text(Path(folder, file), text)
    return Path(folder)


def _input_items(arguments: str) -> list[str]:
    """The arguments of a docstring as a Markdown list."""
    items = []
    for item in re.split(r"\n(?=\S)", textwrap.dedent(arguments).strip()):
        head, _, text = " ".join(item.split()).partition(": ")
        names = _PARENTHESES_OR_NAME.sub(lambda found: found[0] if found[0][0] == "(" else f"`{found[0]}`", head)
        items.append(textwrap.fill(f"- {names}: {text}", 110, subsequent_indent="  ", break_on_hyphens=False))
    return items


# --- The page of a Space: a small gradio app, because the one of `evaluate` is broken. Only this file imports gradio ---


def compute_from_json(metric: Any, text: str, declared: Metric) -> dict[str, Any]:
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
    data = ("predictions", "references", *declared.data_arguments)
    for name, value in arguments.items():
        allowed = [case[name] for case in declared.cases if name in case]
        if name == "result" or not allowed:
            known = sorted({key for case in declared.cases for key in case} - {"result"})
            raise ValueError(f"This page takes {known}, not {name!r}. Install the package for everything else.")
        if value not in allowed and (name not in data or isinstance(value, str)):
            raise ValueError(f"This page takes {name} {allowed} only, not {value!r}.")
        if _holds_file(value):
            raise ValueError(
                f"This page does not open files, but {name} contain a mapping with 'path' or 'bytes'. Leave it out."
            )
    return metric.compute(**arguments)


def _holds_file(value: Any) -> bool:
    """Whether the value contains a mapping that would be opened as an image."""
    if isinstance(value, Mapping):
        return "path" in value or "bytes" in value or any(map(_holds_file, value.values()))
    return isinstance(value, list) and any(map(_holds_file, value))


def build_page(name: str, folder: Path) -> Any:
    """The page: description, arguments as JSON, examples, result."""
    import evaluate
    import gradio

    metric = evaluate.load(str(folder / f"{name}.py"))
    declared = load_metric(name)
    examples = [json.dumps({k: v for k, v in case.items() if k != "result"}, indent=1) for case in declared.cases]

    def run(text: str) -> dict[str, Any]:
        try:
            return compute_from_json(metric, text, declared)
        except (ValueError, TypeError) as error:
            raise gradio.Error(str(error)) from None

    with gradio.Blocks(title=name) as page:
        gradio.Markdown(f"# {name}\n\n{metric.description}")
        given = gradio.Code(value=examples[0], language="json", label="Arguments of compute")
        button = gradio.Button("Compute", variant="primary")
        result = gradio.JSON(label="Result")
        gradio.Examples([[example] for example in examples], inputs=[given])
        button.click(run, inputs=[given], outputs=[result])
        gradio.Markdown(f"```\n{metric.inputs_description}\n```")
    return page


def push_metric(name: str, owner: str, **settings: Any) -> str:
    """Publish a metric as the Space `owner/name`, which `evaluate.load("owner/name")` loads; returns the URL of the commit.

    `settings` are `private`, `token` and `overwrite`, see [`push_folder`].
    """
    if name not in MODULES:
        raise ValueError(f"There is no metric {name!r}. Use one of {sorted(MODULES)}.")
    with tempfile.TemporaryDirectory() as folder:
        return push_folder(
            write_space(name, folder, f"{owner}/{name}"),
            f"{owner}/{name}",
            repo_type="space",
            commit_message=f"Add the metric {name}",
            marker=f"{name}.py",
            again=f"Repeat with `captionrl push {name} --type space --repo_id {owner}/{name}`.",
            **settings,
        )


# --- The demo as a Space: the page of `captionrl demo` with the given captioners -------------------------------------

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
        check_text("An argument of the demo", argument)
    card = render_card("space/README.md", CardData(), models=models, scorer=scorer)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("app.py", "requirements.txt"):
        shutil.copyfile(shipped_path("hub_cards", "space", file), folder / file)
    atomic_write_text(folder / "arguments.txt", "\n".join(arguments) + "\n")
    atomic_write_text(folder / "README.md", card)
    return folder


def push_demo(
    repo_id: str, models: Mapping[str, str] | None = None, *, scorer: str | None = None, **settings: Any
) -> str:
    """Publish the demo as a Space. `settings` are `private`, `token` and `overwrite`, see [`push_folder`]."""
    with tempfile.TemporaryDirectory() as folder:
        return push_folder(
            write_demo_space(folder, models, scorer=scorer),
            repo_id,
            repo_type="space",
            commit_message="Add the demo",
            marker="arguments.txt",
            again=f"Repeat with `captionrl push demo --type space --repo_id {repo_id}` and the same options.",
            **settings,
        )
