"""Kinds of rows that predictions and references may be, checked row by row.

`evaluate` chooses a format by the first row and converts later rows to it: a string among lists becomes its characters,
a number among texts its digits. Here every row is checked.
"""

import itertools
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import datasets
import numpy as np
from PIL import Image

__all__ = ["KIND_NAMES", "check_rows", "column_features", "is_missing", "kind_of"]

KIND_FEATURES: dict[str, Any] = {
    "text": datasets.Value("string"),
    "texts": datasets.Sequence(datasets.Value("string")),
    "vector": datasets.Sequence(datasets.Value("float32")),
    "matrix": datasets.Sequence(datasets.Sequence(datasets.Value("float32"))),
    "row": datasets.Value("int64"),
    "image": datasets.Image(),
    "images": datasets.Sequence(datasets.Image()),
}
"""How each kind of row is stored."""

KIND_NAMES = {
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
        datasets.Features({name: KIND_FEATURES[kind] for name, kind in zip(columns, kinds, strict=True)})
        for kinds in itertools.product(*columns.values())
    ]


def is_missing(references: Sequence[Any] | None) -> bool:
    """Whether references were left out."""
    return references is None or all(isinstance(row, str) and row == "" for row in references)


def check_rows(values: Any, name: str, kinds: tuple[str, ...]) -> list[Any]:
    """Rows as plain Python values, all of one kind."""
    if values is None:
        raise ValueError(f"{name} are missing. Pass a list.")
    if isinstance(values, str | bytes | dict):
        raise ValueError(f"{name} is one {type(values).__name__}, {values!r:.60}. Pass a list of rows.")
    rows = [_plain(row, f"{name}[{i}]") for i, row in enumerate(values)]
    if not rows:
        raise ValueError(f"{name} is empty. Pass at least one row (in each process).")
    first = next((kind for row in rows if (kind := kind_of(row)) != "texts" or row), "texts")
    for i, row in enumerate(rows):
        kind = kind_of(row)
        if kind not in kinds:
            allowed = " or ".join(KIND_NAMES[k] for k in kinds)
            hint = f" Write [{row!r:.60}]." if kind == "text" else ""
            raise ValueError(f"{name}[{i}] must be {allowed}, got {row!r:.60}.{hint}")
        if kind != first:
            raise ValueError(
                f"{name}[{i}] is {KIND_NAMES[kind]}, but the rows before it are {KIND_NAMES[first]} each."
            )
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


def kind_of(row: Any) -> str:
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
        if all(isinstance(item, list) and kind_of(item) == "vector" for item in row):
            return "matrix"
    return "unknown"
