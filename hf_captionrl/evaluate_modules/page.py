"""The page of a Space: a small gradio app, since the one of `evaluate` is broken. Only here gradio is imported."""

import json
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["build_page", "compute_from_json"]

# What a visitor may change: numbers and texts that nothing is opened for.
_DATA = (
    "predictions",
    "references",
    "bags",
    "idf",
    "image_features",
    "image_ids",
    "reference_features",
    "synonyms",
    "text_features",
    "token_features",
    "training_captions",
)


def compute_from_json(metric: Any, text: str, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute from what a visitor typed.

    A public page must not open the files or start the programs of its server for everybody. So it takes only the
    arguments of its examples; captions, features and what else is data as they come, but no string in their place and
    no files; and of options (names of models, of metrics) only the examples' values.
    """
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"This is not JSON: {error}.") from None
    if not isinstance(arguments, dict):
        raise ValueError("Write one JSON object with the arguments, such as those of the examples.")
    for name, value in arguments.items():
        allowed = [case[name] for case in cases if name in case]
        if name == "result" or not allowed:
            known = sorted({key for case in cases for key in case} - {"result"})
            raise ValueError(f"This page takes {known}, not {name!r}. Install the package for everything else.")
        if value not in allowed and (name not in _DATA or isinstance(value, str)):
            raise ValueError(f"This page takes {name} {allowed} only, not {value!r}.")
        if _holds_file(value):
            raise ValueError(
                f"This page opens no files, and {name} hold a mapping with 'path' or 'bytes'. Leave it out."
            )
    return metric.compute(**arguments)


def _holds_file(value: Any) -> bool:
    """Whether a mapping is in there that would be opened as an image."""
    if isinstance(value, Mapping):
        return "path" in value or "bytes" in value or any(map(_holds_file, value.values()))
    return isinstance(value, list) and any(map(_holds_file, value))


def build_page(name: str, folder: Path) -> Any:
    """The page: description, arguments as JSON, examples, result."""
    import evaluate
    import gradio

    metric = evaluate.load(str(folder / f"{name}.py"))
    cases = runpy.run_path(str(folder / "tests.py"))["test_cases"]
    examples = [json.dumps({k: v for k, v in case.items() if k != "result"}, indent=1) for case in cases]

    def run(text: str) -> dict[str, Any]:
        try:
            return compute_from_json(metric, text, cases)
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
