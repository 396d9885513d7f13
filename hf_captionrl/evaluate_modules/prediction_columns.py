"""What the modules take as predictions and references, checked row by row.

`evaluate` picks a format by the first row and lets later rows follow: a string among lists becomes its characters, a
number among texts its digits. It also makes every column mandatory. Here every row is checked, and references may be
left out where a module can do without.
"""

import itertools
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, ClassVar

import datasets
import numpy as np
from PIL import Image

__all__ = ["CaptionColumns", "column_features", "is_missing"]

_FEATURES: dict[str, Any] = {
    "text": datasets.Value("string"),
    "texts": datasets.Sequence(datasets.Value("string")),
    "vector": datasets.Sequence(datasets.Value("float32")),
    "matrix": datasets.Sequence(datasets.Sequence(datasets.Value("float32"))),
    "row": datasets.Value("int64"),
    "image": datasets.Image(),
    "images": datasets.Sequence(datasets.Image()),
}
"""How each kind of row is stored."""

_NAMES = {
    "text": "a string",
    "texts": "a list of strings",
    "vector": "a vector of floats",
    "matrix": "a matrix of floats",
    "row": "an integer",
    "image": "an image",
    "images": "a list of images",
}


def column_features(predictions: Sequence[str], references: Sequence[str] = ()) -> list[datasets.Features]:
    """Every combination of formats, as `evaluate.MetricInfo` takes them."""
    columns = {"predictions": tuple(predictions)} | ({"references": tuple(references)} if references else {})
    return [
        datasets.Features({name: _FEATURES[kind] for name, kind in zip(columns, kinds, strict=True)})
        for kinds in itertools.product(*columns.values())
    ]


def is_missing(references: Sequence[Any] | None) -> bool:
    """Whether references were left out."""
    return references is None or all(isinstance(row, str) and row == "" for row in references)


class CaptionColumns:
    """Beside `evaluate.Metric` in a module's class: checks rows, and lets references be left out.

    A subclass states `prediction_kinds`, `reference_kinds` (empty: no such column) and `references_required`.
    """

    prediction_kinds: ClassVar[tuple[str, ...]] = ("text",)
    reference_kinds: ClassVar[tuple[str, ...]] = ()
    references_required: ClassVar[bool] = False

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Add a batch of captions (and references)."""
        batch = {"predictions": _rows(predictions, "predictions", self.prediction_kinds)}
        if self.reference_kinds:
            batch["references"] = self._references(references, len(batch["predictions"]))
        kinds = {name: _kind(rows[0]) for name, rows in batch.items()}
        if getattr(self, "writer", None) is None:
            self._kinds = kinds
        for name, kind in kinds.items():
            if kind != self._kinds[name]:
                raise ValueError(
                    f"{name} are {_NAMES[kind]} each in this batch, but were {_NAMES[self._kinds[name]]} each before. "
                    "Give all batches in one form."
                )
        super().add_batch(**batch, **kwargs)  # type: ignore[misc]

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Add one caption (and its reference)."""
        prediction = kwargs.pop("predictions", prediction)
        reference = kwargs.pop("references", reference)
        self.add_batch(
            predictions=None if prediction is None else [prediction],
            references=None if reference is None else [reference],
            **kwargs,
        )

    def _references(self, references: Any, count: int) -> list[Any]:
        if references is None:
            if self.references_required:
                raise ValueError(f"references are missing. Pass one row each for {count} predictions.")
            return [""] * count
        rows = _rows(references, "references", self.reference_kinds)
        if len(rows) != count:
            raise ValueError(f"{count} predictions and {len(rows)} references: pass one each, in the same order.")
        return rows

    def _infer_feature_from_example(self, example: dict[str, Any]) -> datasets.Features:
        # evaluate tries one format after another; some take what is not theirs (a list of lists becomes its text).
        return datasets.Features({name: _FEATURES[_kind(value)] for name, value in example.items()})


def _rows(values: Any, name: str, kinds: tuple[str, ...]) -> list[Any]:
    """Rows as plain Python values, all of one kind."""
    if values is None:
        raise ValueError(f"{name} are missing. Pass a list.")
    if isinstance(values, str | bytes | dict):
        raise ValueError(f"{name} is one {type(values).__name__}, {values!r:.60}. Pass a list, one row each.")
    rows = [_plain(row, f"{name}[{i}]") for i, row in enumerate(values)]
    if not rows:
        raise ValueError(f"{name} is empty. Pass at least one row (in each process).")
    first = next((kind for row in rows if (kind := _kind(row)) != "texts" or row), "texts")
    for i, row in enumerate(rows):
        kind = _kind(row)
        if kind not in kinds:
            allowed = " or ".join(_NAMES[k] for k in kinds)
            hint = f" Its characters are no captions: write [{row!r:.60}]." if kind == "text" else ""
            raise ValueError(f"{name}[{i}] must be {allowed}, got {row!r:.60}.{hint}")
        if kind != first:
            raise ValueError(f"{name}[{i}] is {_NAMES[kind]}, but the rows before it are {_NAMES[first]} each.")
    return rows


def _plain(row: Any, where: str) -> Any:
    if hasattr(row, "detach"):
        row = row.detach().cpu().float().numpy()
    if isinstance(row, np.ndarray):
        if row.ndim == 3 and row.dtype == np.uint8:
            return Image.fromarray(row)
        return row.tolist()
    if isinstance(row, np.generic):
        return row.item()
    if isinstance(row, dict | bytes | bytearray):
        from hf_captionrl.data.images import open_image

        try:
            return open_image(row)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if isinstance(row, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(row)]
    return row


def _kind(row: Any) -> str:
    """The kind of a plain row, or `"unknown"`."""
    if isinstance(row, str):
        return "text"
    if isinstance(row, Integral) and not isinstance(row, bool):
        return "row"
    if isinstance(row, Image.Image):
        return "image"
    if isinstance(row, list):
        if all(isinstance(item, str) for item in row):
            return "texts"
        if all(isinstance(item, Real) and not isinstance(item, bool) for item in row):
            return "vector"
        if all(isinstance(item, Image.Image) for item in row):
            return "images"
        if all(isinstance(item, list) and _kind(item) == "vector" for item in row):
            return "matrix"
    return "unknown"
