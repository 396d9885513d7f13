"""Captions for an album of similar images: several captioners side by side, or one distinct caption per image.

Legend: M images, G candidates per image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.album.distinct_captions import AlbumCaptions, Finding, distinct_captions, found_images
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.data import open_image
from hf_captionrl.metrics.suites.suite_row import spoken
from hf_captionrl.retrieval import Scorer, image_hash
from hf_captionrl.text.degenerate_captions import degenerate
from hf_captionrl.trainers.caption_generation import generate_captions

__all__ = ["album_candidates", "caption_album", "compare_captioners"]

_BATCH_SIZE = 16


def compare_captioners(
    captioners: Mapping[str, Captioner],
    scorer: Scorer,
    images: Sequence[Any],
    *,
    num_beams: int = 3,
    max_new_tokens: int = 40,
    batch_size: int = _BATCH_SIZE,
) -> dict[str, list[Finding]]:
    """Captions of several captioners for the images of an album, and the image that each caption finds."""
    image_features = _image_features(scorer, images, batch_size)
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


def album_candidates(
    captioner: Captioner,
    images: Sequence[Any],
    *,
    num_beams: int = 4,
    num_samples: int = 12,
    temperature: float = 0.7,
    seed: int = 0,
    max_new_tokens: int = 40,
    batch_size: int = _BATCH_SIZE,
) -> list[list[str]]:
    """Candidate captions of each image: all beams, then samples. The caller's random state does not change."""
    if num_beams < 1 or num_samples < 0:
        raise ValueError(f"num_beams is {num_beams} and num_samples is {num_samples}. Use at least 1 and 0.")
    _refuse_none(images)
    shared: dict[str, Any] = {"batch_size": batch_size, "max_new_tokens": max_new_tokens}
    # All settings are explicit, so that the checkpoint's own defaults have no effect.
    sampling = {"do_sample": True, "num_beams": 1, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    decodings: list[dict[str, Any]] = [
        {"do_sample": False, "num_beams": num_beams, "num_return_sequences": num_beams},
        {**sampling, "num_return_sequences": num_samples},
    ]
    candidates: list[list[str]] = []
    device = captioner.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for opened in _opened_batches(images, batch_size):
            batch: list[list[str]] = [[] for _ in opened]
            for decoding in decodings[: 1 + (num_samples > 0)]:
                written = generate_captions(captioner, opened, **shared, **decoding)
                each = len(written) // len(opened)
                for row, mine in enumerate(batch):
                    mine += written[row * each : (row + 1) * each]
            candidates += batch
    return candidates


def caption_album(captioner: Captioner, scorer: Scorer, images: Sequence[Any], **settings: Any) -> AlbumCaptions:
    """One caption per image of an album. The captions differ, and each finds its image, where the candidates allow it.

    Degenerate candidates, which repeat a phrase, are used only if the image has no other.

    Example:
        >>> from hf_captionrl import load_captioner, load_scorer
        >>> from hf_captionrl.scenes import load_scenes
        >>> from hf_captionrl.scenes.models import model_path
        >>> captioner = load_captioner(model_path("scenes:blip-mle"))
        >>> scorer = load_scorer(model_path("scenes:siglip-held-out"))
        >>> album = load_scenes(num_train=0, num_validation=0, num_test=15)["test"]["image"][:3]
        >>> len({found.caption for found in caption_album(captioner, scorer, album).captions})
        3
    """
    candidates = []
    for mine in album_candidates(captioner, images, **settings):
        kept = [text for text, bad in zip(mine, degenerate(mine), strict=True) if not bad and text.strip()]
        candidates.append(kept or mine)
    texts = spoken([text for mine in candidates for text in mine])
    image_features = _image_features(scorer, images, settings.get("batch_size", _BATCH_SIZE))
    return distinct_captions(candidates, scorer.text_features(texts), image_features)


def _refuse_none(images: Sequence[Any]) -> None:
    if len(images) == 0:
        raise ValueError("The album has no images. Use at least one.")


def _opened_batches(images: Sequence[Any], batch_size: int) -> Iterator[list[Image.Image]]:
    """Decoded images, one batch at a time: a photograph of 24 megapixels takes 72 MB."""
    for start in range(0, len(images), batch_size):
        yield [open_image(images[row]) for row in range(start, min(start + batch_size, len(images)))]


def _image_features(scorer: Scorer, images: Sequence[Any], batch_size: int) -> Tensor:
    """`(M, D)`; a copy of an image gets the features of the first, so that the two tie on every processor.

    The same picture at another place of a batch can differ in the last bit, which depends on the processor.
    """
    _refuse_none(images)
    row_of: dict[str, int] = {}
    rows, parts = [], []
    for opened in _opened_batches(images, batch_size):
        keys = [image_hash(image) for image in opened]
        new = {key: image for key, image in zip(keys, opened, strict=True) if key not in row_of}
        if new:
            row_of |= {key: row for row, key in enumerate(new, start=len(row_of))}
            parts.append(scorer.image_features(list(new.values())))
        rows += [row_of[key] for key in keys]
    return torch.cat(parts)[rows]
