"""Diversity of captions: Div-n, mBLEU, vocabulary, novelty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.evaluate_modules import metric
from hf_captionrl.metrics.evaluate_modules.descriptions import DESCRIPTIONS
from hf_captionrl.text.tokenize import check_tokenize, split_characters


def compute(
    predictions: Sequence[Any], *, image_ids: Sequence[Any] | None = None, tokenize: str = "ptb", **options: Any
) -> dict[str, Any]:
    """Call `caption_diversity` on the captions of each image."""
    if isinstance(predictions[0], str) == (image_ids is None):
        raise ValueError("predictions are one list of captions per image, or single captions with image_ids.")
    groups: dict[Any, list[str]] = {}
    if image_ids is None:
        groups = dict(enumerate(predictions))
    else:
        if len(image_ids) != len(predictions):
            raise ValueError(f"{len(predictions)} predictions and {len(image_ids)} image_ids. Pass one per caption.")
        for image, caption in zip(image_ids, predictions, strict=True):
            groups.setdefault(image, []).append(caption)
    captions = list(groups.values())
    if check_tokenize(tokenize, captions):
        captions = split_characters(captions)
        if options.get("training_captions") is not None:
            options["training_captions"] = split_characters(options["training_captions"])
    from hf_captionrl.text.degenerate_captions import degenerate, is_empty

    result = metrics.caption_diversity(captions, **options)
    texts = [text for group in captions for text in group]
    result |= {"empty": sum(map(is_empty, texts)) / len(texts), "degenerate": sum(degenerate(texts)) / len(texts)}
    return result | {"signature": result["signature"].replace("tok:ptb", f"tok:{tokenize}")}


class CaptionDiversity(metric.CaptionMetric):
    """Caption Diversity."""

    about, function, forwarded = DESCRIPTIONS["caption_diversity"], staticmethod(compute), metrics.caption_diversity
