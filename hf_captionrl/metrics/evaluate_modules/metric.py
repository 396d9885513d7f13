"""The base class of the modules of `evaluate`, and the kinds of rows that they take."""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar

import datasets
import evaluate
import numpy as np
from PIL import Image

from hf_captionrl.metrics.caption_checks import text_warnings
from hf_captionrl.metrics.evaluate_modules.descriptions import Description

_TEXT, _VECTOR = datasets.Value("string"), datasets.Sequence(datasets.Value("float32"))
KINDS: dict[str, tuple[str, Any]] = {
    "text": ("a string", _TEXT),
    "texts": ("a list of strings", datasets.Sequence(_TEXT)),
    "vector": ("a vector of floats", _VECTOR),
    "row": ("an integer", datasets.Value("int64")),
    "image": ("an image", datasets.Image()),
}
"""Name of each kind of row, and how it is stored."""


def is_missing(references: Sequence[Any] | None) -> bool:
    """Whether references were left out."""
    return references is None or all(isinstance(row, str) and row == "" for row in references)


def check_rows(values: Any, name: str, kinds: tuple[str, ...]) -> list[Any]:
    """Rows as plain Python values, all of one kind."""
    if values is None or isinstance(values, str | bytes | dict):
        raise ValueError(f"{name} are missing or one value, {values!r:.60}. Pass a list with one row per caption.")
    rows = [_plain(row, f"{name}[{i}]") for i, row in enumerate(values)]
    if not rows:
        raise ValueError(f"{name} is empty. Pass at least one row (in each process).")
    first = next((kind for row in rows if (kind := kind_of(row)) != "texts" or row), "texts")
    for i, row in enumerate(rows):
        if (kind := kind_of(row)) not in kinds or kind != first:
            allowed = " or ".join(KINDS[k][0] for k in kinds)
            hint = f" Write [{row!r:.60}]." if kind == "text" else ""
            raise ValueError(f"{name}[{i}] must be {allowed}, and of the kind of {name}[0]; got {row!r:.60}.{hint}")
    return rows


def _plain(row: Any, where: str) -> Any:
    if hasattr(row, "detach"):
        row = row.detach().cpu().float().numpy()
    if isinstance(row, np.ndarray) and row.ndim in (2, 3) and row.dtype in (np.uint8, np.uint16, np.bool_):
        row = Image.fromarray(row)
    if isinstance(row, np.ndarray | np.generic):
        return row.tolist()
    in_memory = isinstance(row, Image.Image) and not getattr(row, "filename", "")
    if in_memory or isinstance(row, dict | bytes | bytearray):  # stored without EXIF and palette; a file is read again
        from hf_captionrl.data.images import open_image

        try:
            return open_image(row)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return [_plain(item, f"{where}[{i}]") for i, item in enumerate(row)] if isinstance(row, list | tuple) else row


def kind_of(row: Any) -> str:
    """The kind of a plain row, or `"unknown"`."""
    if isinstance(row, list):
        is_texts, is_vector = (all(isinstance(item, kind) for item in row) for kind in (str, Real))
        return "texts" if is_texts else "vector" if is_vector else "unknown"
    of_type = {str: "text", Image.Image: "image", int: "row"}
    return next((kind for cls, kind in of_type.items() if isinstance(row, cls)), "unknown")


class CaptionMetric(evaluate.Metric):
    """A function of predictions, references and keywords as a metric of `evaluate`.

    `evaluate` makes every column mandatory, chooses a format by the first row and converts later rows to it: a string among
    lists becomes its characters. Here every row is checked, and references may be left out if the metric allows it. A
    module imports this class by `metric.CaptionMetric`, because `evaluate` takes the first metric among a module's names.
    """

    about: ClassVar[Description]
    function: ClassVar[Callable[..., Mapping[str, Any]]]
    forwarded: ClassVar[Callable[..., Any] | None] = None  # its keywords are arguments of `function` too

    @classmethod
    def arguments(cls) -> list[str]:
        """Names of the arguments of `compute`."""
        more = inspect.signature(cls.forwarded).parameters.values() if cls.forwarded else ()
        names = [each.name for each in inspect.signature(cls.function).parameters.values() if each.name != "options"]
        return list(dict.fromkeys([*names, *(each.name for each in more if each.kind == each.KEYWORD_ONLY)]))

    def _info(self) -> evaluate.MetricInfo:
        columns = {"predictions": self.about.predictions, "references": self.about.references}
        columns = {name: kinds for name, kinds in columns.items() if kinds}
        return evaluate.MetricInfo(
            description=self.about.description,
            citation=self.about.citation,
            inputs_description=self.about.inputs_description,
            features=[
                datasets.Features({name: KINDS[kind][1] for name, kind in zip(columns, kinds, strict=True)})
                for kinds in itertools.product(*columns.values())
            ],
            reference_urls=list(self.about.urls),
        )

    def _compute(self, predictions: Any, references: Any = None, **options: Any) -> dict[str, Any]:
        names = self.arguments()
        # `evaluate.combine` passes every argument to every module.
        for name in options.keys() - set(names):
            if near := difflib.get_close_matches(name, names, n=1, cutoff=0.85):
                warnings.warn(f"{name!r} is unknown and has no effect. Did you mean {near[0]!r}?", stacklevel=3)
        if kind_of(predictions[0]) in ("text", "texts"):
            for text in text_warnings(predictions, references if self.about.references == ("texts",) else None):
                warnings.warn(text, stacklevel=3)
        options = {name: value for name, value in (options | {"references": references}).items() if name in names}
        return _finite(type(self).function(predictions, **options))

    def stored_references(self, references: Any) -> Any:
        """References in a form that a column can store."""
        return references

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Add a batch of captions (and references)."""
        batch = {"predictions": check_rows(predictions, "predictions", self.about.predictions)}
        number = len(batch["predictions"])
        if self.about.references:
            if references is None and not self.about.references_required:
                batch["references"] = [""] * number
            else:
                rows = self.stored_references(references)
                batch["references"] = check_rows(rows, "references", self.about.references)
            if (count := len(batch["references"])) != number:
                raise ValueError(f"{number} predictions and {count} references. Pass one per prediction.")
        kinds = {name: kind_of(rows[0]) for name, rows in batch.items()}
        if getattr(self, "writer", None) is None:
            self._kinds = kinds
        for name, kind in kinds.items():
            if kind != self._kinds[name]:
                forms = f"{KINDS[kind][0]} each in this batch, but were {KINDS[self._kinds[name]][0]} each before"
                raise ValueError(f"{name} are {forms}. Pass all batches in one form.")
        super().add_batch(**batch, **kwargs)

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Add one caption (and its reference)."""
        rows = {
            "predictions": kwargs.pop("predictions", prediction),
            "references": kwargs.pop("references", reference),
        }
        self.add_batch(**{name: None if row is None else [row] for name, row in rows.items()}, **kwargs)

    def _infer_feature_from_example(self, example: dict[str, Any]) -> datasets.Features:
        # evaluate tries one format after another, and some accept rows of another kind (a list of lists as its text).
        return datasets.Features({name: KINDS[kind_of(row)][1] for name, row in example.items()})


def _finite(value: Any) -> Any:
    """Plain Python with None in place of numbers that JSON cannot hold."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
