"""Faithfulness of captions: CHAIR, and a checker that knows the facts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.evaluate_modules import metric
from hf_captionrl.metrics.evaluate_modules.descriptions import DESCRIPTIONS
from hf_captionrl.scenes import check as scene_check

_MAX_WORDS_OF_A_NAME = 4  # a reference caption has more


def compute(
    predictions: Sequence[str],
    references: Sequence[Any] | None = None,
    *,
    objects: Sequence[Any] | None = None,
    facts: Sequence[Any] | None = None,
    synonyms: Mapping[str, Sequence[str]] | Literal["coco"] | None = None,
    check: Callable[[str, Any], Any] | None = None,
) -> dict[str, Any]:
    """Call `chair` on objects and `faithfulness` on facts, whichever are given."""
    if objects is None and facts is None:
        objects, facts = _objects_or_facts(references)
    found: list[dict[str, Any]] = []
    if objects is not None:
        found.append(metrics.chair(predictions, objects, synonyms=synonyms))
    if facts is not None:
        found.append(metrics.faithfulness(predictions, facts, check or scene_check))
    result: dict[str, Any] = {}
    per_sample: dict[str, Any] = {}
    for part in found:
        # Both have a list "wrong": objects in one, numbers of claims in the other.
        prefix = "chair_" if "chair_i" in part else ""
        per_sample |= {prefix + name: values for name, values in part["per_sample"].items()}
        result |= part
    return result | {"per_sample": per_sample, "signature": " + ".join(part["signature"] for part in found)}


def _objects_or_facts(references: Sequence[Any] | None) -> tuple[Sequence[Any] | None, Sequence[Any] | None]:
    if references is None or metric.is_missing(references):
        raise ValueError("There is nothing to compare captions with. Pass references, objects= or facts=.")
    if isinstance(references[0], list):
        for i, names in enumerate(references):
            for name in names:
                if len(name.split()) > _MAX_WORDS_OF_A_NAME:
                    remedy = "Pass lists of objects, or objects= if references are captions for another module."
                    raise ValueError(f"references[{i}] holds {name!r}, which is not the name of an object. {remedy}")
        return references, None
    parsed = []
    for i, text in enumerate(references):
        try:
            parsed.append(json.loads(text))
        except json.JSONDecodeError:
            raise ValueError(f"references[{i}] is {text!r:.60}, neither a list of objects nor JSON.") from None
    return None, parsed


class CaptionFaithfulness(metric.CaptionMetric):
    """Caption Faithfulness."""

    about, function = DESCRIPTIONS["caption_faithfulness"], staticmethod(compute)

    def stored_references(self, references: Any) -> Any:
        """Mappings of facts as JSON, which a column of strings can hold."""
        if references is None or isinstance(references, str | Mapping):
            return references
        return [json.dumps(row) if isinstance(row, Mapping) else row for row in references]
