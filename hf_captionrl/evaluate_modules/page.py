"""The page of a Space: a small gradio app, because the one of `evaluate` is broken. Only this file imports gradio."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_captionrl.evaluate_modules.metric import Metric, load_metric

__all__ = ["build_page", "compute_from_json"]


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
