"""CLIPScore and RefCLIPScore with any scorer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.clip_scores import CLIP_SCORE_PRESETS, score_prefix
from hf_captionrl.metrics.evaluate_modules import metric
from hf_captionrl.metrics.evaluate_modules.descriptions import DESCRIPTIONS
from hf_captionrl.metrics.evaluate_modules.inputs import (
    image_pool,
    reference_features_of,
    scorer_signature,
    text_features_of,
    truncation,
)
from hf_captionrl.retrieval.ranking import check_targets


def compute(
    predictions: Sequence[Any],
    references: Sequence[Any] | None = None,
    *,
    scorer: Any = None,
    text_features: Any = None,
    images: Any = None,
    image_features: Any = None,
    image_ids: Sequence[str] | None = None,
    targets: Sequence[int] | None = None,
    reference_captions: Sequence[Sequence[str]] | None = None,
    reference_features: Any = None,
    preset: Any = "hessel",
    scale: float | None = None,
    clamp: bool | None = None,
    prefix: str | None = None,
) -> dict[str, Any]:
    """Call `clip_score`, and `ref_clip_score` if there are reference captions."""
    prefix, name = score_prefix(preset, prefix), scorer_signature(scorer)
    pool: dict[str, Any] = {"images": images, "image_features": image_features, "image_ids": image_ids}
    text = text_features_of(predictions, text_features, scorer, prefix)
    features, rows = image_pool(references, targets=targets, scorer=scorer, dtype=text.dtype, **pool)
    features = features if rows is None else features[check_targets(rows, len(text), len(features))]
    result = metrics.clip_score(text, features, preset=preset, scale=scale, clamp=clamp, prefix=prefix, scorer=name)
    result["per_sample"] = {"clip_score": result["per_sample"]}
    if references is not None and metric.kind_of(references[0]) == "texts" and reference_captions is None:
        reference_captions = references
    if reference_features is None and reference_captions is not None:
        reference_features = reference_features_of(reference_captions, scorer, prefix)
    if reference_features is not None:
        # RefPAC-S has the scale of PAC-S; the other presets only scale CLIPScore.
        factor = {"scale": CLIP_SCORE_PRESETS[preset].scale} if preset == "pac_s" else {}
        with_references = metrics.ref_clip_score(
            text, features, reference_features, prefix=prefix, scorer=name, **factor
        )
        result["ref_clip_score"] = with_references["ref_clip_score"]
        result["per_sample"]["ref_clip_score"] = with_references["per_sample"]
        result["signature"] += " + " + with_references["signature"]
    return result | truncation(predictions, scorer, prefix)


class ClipScore(metric.CaptionMetric):
    """CLIPScore and RefCLIPScore."""

    about, function = DESCRIPTIONS["clip_score"], staticmethod(compute)
