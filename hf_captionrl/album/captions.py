"""Captions of several captioners side by side, and the image that each caption finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_captionrl.album.distinct_captions import Finding, found_images
from hf_captionrl.album.image_facts import read_images
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.metrics.suites.suite_row import spoken
from hf_captionrl.retrieval import Scorer
from hf_captionrl.trainers.caption_generation import generate_captions

__all__ = ["compare_captioners"]


def compare_captioners(
    captioners: Mapping[str, Captioner],
    scorer: Scorer,
    images: Sequence[Any],
    *,
    num_beams: int = 3,
    max_new_tokens: int = 40,
    batch_size: int = 16,
) -> dict[str, list[Finding]]:
    """Captions of several captioners for the images of an album, and the image that each caption finds."""
    if len(images) == 0:
        raise ValueError("The album has no images. Use at least one.")
    image_features = read_images(images, scorer, batch_size=batch_size).features
    result = {}
    for name, captioner in captioners.items():
        captions = generate_captions(
            captioner,
            images,
            batch_size=batch_size,
            do_sample=False,
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
        )
        rank, found = found_images(scorer.text_features(spoken(captions)), image_features)
        result[name] = [Finding(*row) for row in zip(captions, rank.tolist(), found.tolist(), strict=True)]
    return result
