"""The declaration of a metric, from which its `evaluate` module, its Space, its card and its table columns are made."""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter
from numbers import Integral, Real
from textwrap import dedent, indent
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import datasets
import evaluate
import numpy as np
from PIL import Image

from hf_captionrl.metrics.evaluate_modules.load import MODULES
from hf_captionrl.utils.io import check_unicode, to_plain

if TYPE_CHECKING:
    from hf_captionrl.metrics.columns import Column

_Compute = TypeVar("_Compute", bound=Callable[..., Mapping[str, Any]])


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of `evaluate.load`, declared once as `METRIC` of `<name>.py`."""

    title: str  # heading of the card
    summary: str  # what the Hub shows beside the title, at most 60 characters
    description: str  # what is measured
    arguments: str  # of `compute`, written as the `Args:` of a docstring
    returns: str  # keys of the result, written as the `Returns:` of a docstring
    examples: str  # doctest
    limitations: str  # what a reader of the number must know
    # Maps predictions, references and options to a result; options are the keywords of its signature, see `forwards`.
    compute: Callable[..., Mapping[str, Any]]
    # Arguments of `compute` with the `result` that they must give; the examples of the Space.
    cases: tuple[Mapping[str, Any], ...]
    keys: str  # main keys of the result, in Markdown, for the table of docs/metrics.md
    functions: tuple[str, ...] = ()  # of `hf_captionrl.metrics` that it computes
    citation: str = ""  # BibTeX
    urls: tuple[str, ...] = ()  # of the papers
    predictions: tuple[str, ...] = ("text",)  # kinds of rows that they may be, see `KINDS`
    references: tuple[str, ...] = ()  # the same; empty if there is no such column
    references_required: bool = False
    store_references: Callable[[Any], Any] | None = None  # converts references to what a column can store
    # How `captionrl evaluate` shows its numbers below every suite, if `in_captions_table`. The metric then needs captions
    # only, and returns `per_sample`, one number per caption. All other columns are in `metrics/columns.py`.
    columns: tuple[Column, ...] = ()
    in_captions_table: bool = False
    # Arguments of the cases that a visitor of the Space may change, in addition to predictions and references: numbers and
    # texts that are not opened as files.
    data_arguments: tuple[str, ...] = ()
    extra: str = ""  # of `pip install hf-captionrl[...]` that the Space needs
    emoji: str = "📏"  # shown on the Hub

    @property
    def inputs_description(self) -> str:
        """Arguments, result and examples as `evaluate` shows them."""
        parts = {"Args:\n": self.arguments, "Returns:\n": self.returns, "Examples:\n\n": self.examples}
        return "\n" + "".join(head + indent(dedent(text).strip("\n") + "\n", "    ") for head, text in parts.items())


def forwards(function: Callable[..., Any], *left_out: str) -> Callable[[_Compute], _Compute]:
    """Decorator of `compute(..., **options)`: its signature contains the other keywords of `function` instead of `options`."""

    def decorate(compute: _Compute) -> _Compute:
        own = inspect.signature(compute)
        named = [given for given in own.parameters.values() if given.kind is not Parameter.VAR_KEYWORD]
        known = {*left_out, *(given.name for given in named)}
        more = [
            given
            for given in inspect.signature(function).parameters.values()
            if given.kind is Parameter.KEYWORD_ONLY and given.name not in known
        ]
        compute.__signature__ = own.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
        return compute

    return decorate


def load_metric(name: str) -> Metric:
    """The declaration of a metric."""
    return import_module(f"{__package__}.{name}").METRIC


def all_metrics() -> dict[str, Metric]:
    """All declarations by name."""
    return {name: load_metric(name) for name in MODULES}


# --- Kinds of rows that predictions and references may be, checked row by row ----------------------------------------
# `evaluate` chooses a format by the first row and converts later rows to it: a string among lists becomes its characters,
# a number among texts its digits. Here every row is checked.

_TEXT, _VECTOR = datasets.Value("string"), datasets.Sequence(datasets.Value("float32"))
KINDS: dict[str, tuple[str, Any]] = {
    "text": ("a string", _TEXT),
    "texts": ("a list of strings", datasets.Sequence(_TEXT)),
    "vector": ("a vector of floats", _VECTOR),
    "matrix": ("a matrix of floats", datasets.Sequence(_VECTOR)),
    "row": ("an integer", datasets.Value("int64")),
    "image": ("an image", datasets.Image()),
    "images": ("a list of images", datasets.Sequence(datasets.Image())),
}
"""Name of each kind of row, and how it is stored."""


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
            allowed = " or ".join(KINDS[k][0] for k in kinds)
            hint = f" Write [{row!r:.60}]." if kind == "text" else ""
            raise ValueError(f"{name}[{i}] must be {allowed}, got {row!r:.60}.{hint}")
        if kind != first:
            raise ValueError(f"{name}[{i}] is {KINDS[kind][0]}, but the rows before it are {KINDS[first][0]} each.")
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
    if isinstance(row, str):
        check_unicode(row, where)
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


# BibTeX of a paper that several metrics cite.
SMILE = """\
@inproceedings{yue2023smile,
  title     = {Learning Descriptive Image Captioning via Semipermeable Maximum Likelihood Estimation},
  author    = {Yue, Zihao and Hu, Anwen and Zhang, Liang and Jin, Qin},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {36},
  year      = {2023}
}
"""


class DeclaredMetric:
    """The one adapter to `evaluate.Metric`, whose subclasses it is mixed into: computes the metric that `declaration` names.

    `evaluate` makes every column mandatory and trusts the first row. Here every row is checked, and references may be
    left out if the metric allows it.
    """

    declaration: ClassVar[str]

    @property
    def declared(self) -> Metric:
        """The declaration."""
        return load_metric(self.declaration)

    def _info(self) -> evaluate.MetricInfo:
        metric = self.declared
        columns = {"predictions": metric.predictions}
        if metric.references:
            columns["references"] = metric.references
        return evaluate.MetricInfo(
            description=metric.description,
            citation=metric.citation,
            inputs_description=metric.inputs_description,
            # Every combination of formats.
            features=[_features(columns, kinds) for kinds in itertools.product(*columns.values())],
            reference_urls=list(metric.urls),
        )

    def _compute(self, predictions: Any, references: Any = None, **given: Any) -> dict[str, Any]:
        compute = self.declared.compute
        known = inspect.signature(compute).parameters
        # `evaluate.combine` passes every argument to every module.
        for name in given.keys() - known.keys():
            if near := difflib.get_close_matches(name, known, n=1, cutoff=0.85):
                warnings.warn(f"{name!r} is unknown and has no effect. Did you mean {near[0]!r}?", stacklevel=3)
        options = {name: value for name, value in (given | {"references": references}).items() if name in known}
        return {key: to_plain(_finite(value), where=key) for key, value in compute(predictions, **options).items()}

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Add a batch of captions (and references)."""
        metric = self.declared
        batch = {"predictions": check_rows(predictions, "predictions", metric.predictions)}
        number = len(batch["predictions"])
        if metric.references:
            rows = references if metric.store_references is None else metric.store_references(references)
            if rows is not None:
                batch["references"] = check_rows(rows, "references", metric.references)
            elif metric.references_required:
                raise ValueError(f"references are missing. Pass one row per prediction, {number} in all.")
            else:
                batch["references"] = [""] * number
            if len(batch["references"]) != number:
                count = len(batch["references"])
                raise ValueError(f"{number} predictions and {count} references. Pass one per prediction.")
        kinds = {name: kind_of(rows[0]) for name, rows in batch.items()}
        if getattr(self, "writer", None) is None:
            self._kinds = kinds
        for name, kind in kinds.items():
            if kind != self._kinds[name]:
                forms = f"{KINDS[kind][0]} each in this batch, but were {KINDS[self._kinds[name]][0]} each before"
                raise ValueError(f"{name} are {forms}. Pass all batches in one form.")
        super().add_batch(**batch, **kwargs)  # type: ignore[misc]

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Add one caption (and its reference)."""
        rows = {
            "predictions": kwargs.pop("predictions", prediction),
            "references": kwargs.pop("references", reference),
        }
        self.add_batch(**{name: None if row is None else [row] for name, row in rows.items()}, **kwargs)

    def _infer_feature_from_example(self, example: dict[str, Any]) -> datasets.Features:
        # evaluate tries one format after another, and some accept rows of another kind (a list of lists as its text).
        return _features(example, map(kind_of, example.values()))


def _features(columns: Iterable[str], kinds: Iterable[str]) -> datasets.Features:
    return datasets.Features({name: KINDS[kind][1] for name, kind in zip(columns, kinds, strict=True)})


def _finite(value: Any) -> Any:
    """A value with None in place of numbers that JSON cannot hold."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
