"""The one adapter between declared metrics and `evaluate.Metric`."""

import difflib
import inspect
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import datasets
import evaluate

from hf_captionrl.evaluate_modules.metric import Metric, load_metric
from hf_captionrl.evaluate_modules.prediction_columns import (
    KIND_FEATURES,
    KIND_NAMES,
    check_rows,
    column_features,
    kind_of,
)
from hf_captionrl.io import to_plain

__all__ = ["DeclaredMetric"]


class DeclaredMetric:
    """Computes the metric that `declaration` names; mixed into a subclass of `evaluate.Metric`.

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
        return evaluate.MetricInfo(
            description=metric.description,
            citation=metric.citation,
            inputs_description=metric.inputs_description,
            features=column_features(metric.predictions, metric.references),
            reference_urls=list(metric.urls),
        )

    def _compute(self, predictions: Any, references: Any = None, **given: Any) -> dict[str, Any]:
        compute = self.declared.compute
        known = inspect.signature(compute).parameters
        # `evaluate.combine` passes every argument to every module.
        _warn_of_misspelling(given.keys() - known.keys(), known)
        options = {name: value for name, value in (given | {"references": references}).items() if name in known}
        return {key: to_plain(_finite(value), where=key) for key, value in compute(predictions, **options).items()}

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Add a batch of captions (and references)."""
        metric = self.declared
        batch = {"predictions": check_rows(predictions, "predictions", metric.predictions)}
        if metric.references:
            store = metric.store_references
            references = references if store is None else store(references)
            batch["references"] = self._references(references, len(batch["predictions"]))
        kinds = {name: kind_of(rows[0]) for name, rows in batch.items()}
        if getattr(self, "writer", None) is None:
            self._kinds = kinds
        for name, kind in kinds.items():
            if kind != self._kinds[name]:
                raise ValueError(
                    f"{name} are {KIND_NAMES[kind]} each in this batch, but were {KIND_NAMES[self._kinds[name]]} each "
                    "before. Pass all batches in one form."
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
            if self.declared.references_required:
                raise ValueError(f"references are missing. Pass one row per prediction, {count} in all.")
            return [""] * count
        rows = check_rows(references, "references", self.declared.references)
        if len(rows) != count:
            raise ValueError(
                f"{count} predictions and {len(rows)} references. Pass one reference per prediction, in the same order."
            )
        return rows

    def _infer_feature_from_example(self, example: dict[str, Any]) -> datasets.Features:
        # evaluate tries one format after another, and some accept rows of another kind (a list of lists as its text).
        return datasets.Features({name: KIND_FEATURES[kind_of(value)] for name, value in example.items()})


def _finite(value: Any) -> Any:
    """A value with None in place of numbers that JSON cannot hold."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _warn_of_misspelling(unknown: Iterable[str], known: Iterable[str]) -> None:
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if near:
            warnings.warn(f"{name!r} is unknown and has no effect. Did you mean {near[0]!r}?", stacklevel=4)
