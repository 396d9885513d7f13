"""Candidate captions of each image: beams, samples, pragmatic beams, answers to a contrastive prompt.

Legend: B images of a batch, G candidates per image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from PIL import Image

from hf_captionrl.album.image_facts import opened_chunks
from hf_captionrl.album.pragmatic_decoding import pragmatic_captions
from hf_captionrl.album.settings import CandidateOptions, check_candidate_options
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.contrastive_prompt import contrastive_prompt, encode_with_prompts
from hf_captionrl.captioners.eval_mode import evaluating
from hf_captionrl.engine import seed_of_batch

__all__ = ["contrastive_answers", "generate_candidates"]


def generate_candidates(
    captioner: Captioner,
    images: Sequence[Any],
    image_ids: Sequence[str],
    options: CandidateOptions,
    *,
    rows: Sequence[int] | None = None,
    similar: Sequence[Sequence[int]] | None = None,
    progress: Callable[[int], Any] | None = None,
) -> list[list[str]]:
    """Candidates of images, without repeated texts. The caller's random state does not change.

    The seed of a batch depends on its first image, so the samples do not depend on earlier batches.

    `similar` are the rows of the images most similar to each of `rows`, for pragmatic decoding.
    """
    check_candidate_options(options, captioner)
    rows = range(len(images)) if rows is None else rows
    found: list[list[str]] = []
    device = captioner.device
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        evaluating(captioner.model),
    ):
        for start in range(0, len(rows), options.batch_size):
            part = slice(start, start + options.batch_size)
            batch = rows[part]
            torch.manual_seed(seed_of_batch(options.seed, image_ids[batch[0]]))
            others = None if similar is None else dict(zip(batch, similar[part], strict=True))
            found += [list(dict.fromkeys(texts)) for texts in _of_batch(captioner, images, batch, options, others)]
            if progress is not None:
                progress(len(batch))
    return found


def contrastive_answers(
    captioner: Captioner,
    images: Sequence[Any],
    rows: Sequence[int],
    said: Sequence[Sequence[str]],
    options: CandidateOptions,
    *,
    progress: Callable[[int], Any] | None = None,
) -> list[list[str]]:
    """Beams of a chat model that is told the captions of the similar images."""
    prompts = {row: contrastive_prompt(captioner.prompt, others) for row, others in zip(rows, said, strict=True)}
    found: list[list[str]] = []
    with evaluating(captioner.model):
        for start in range(0, len(rows), options.batch_size):
            for chunk, opened in opened_chunks(images, rows[start : start + options.batch_size], options.batch_size):
                inputs = encode_with_prompts(captioner, opened, [prompts[row] for row in chunk])
                found += _grouped(captioner.generate(**inputs, **_beams(options)).captions, len(chunk))
                if progress is not None:
                    progress(len(chunk))
    return found


def _grouped(texts: Sequence[str], number: int) -> list[list[str]]:
    each = len(texts) // number
    return [list(texts[start : start + each]) for start in range(0, len(texts), each)]


def _beams(options: CandidateOptions) -> dict[str, Any]:
    # All settings are explicit, so that the checkpoint's defaults have no effect.
    number = {"num_beams": options.num_beams, "num_return_sequences": options.num_beams}
    return {"do_sample": False, "max_new_tokens": options.max_new_tokens, **number}


def _of_batch(
    captioner: Captioner,
    images: Sequence[Any],
    rows: Sequence[int],
    options: CandidateOptions,
    similar: Mapping[int, Sequence[int]] | None,
) -> list[list[str]]:
    found: list[list[str]] = []
    sampling: dict[str, Any] = {
        "do_sample": True,
        "num_beams": 1,
        "temperature": options.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "num_return_sequences": options.num_samples,
        "max_new_tokens": options.max_new_tokens,
    }
    for chunk, opened in opened_chunks(images, rows, options.batch_size):
        inputs = captioner.encode_images(opened)
        if options.decoding == "rsa" and similar is not None:
            mine = _pragmatic(captioner, images, chunk, opened, options, similar)
        else:
            mine = _grouped(captioner.generate(**inputs, **_beams(options)).captions, len(chunk))
        if options.num_samples:
            samples = _grouped(captioner.generate(**inputs, **sampling).captions, len(chunk))
            mine = [beams + more for beams, more in zip(mine, samples, strict=True)]
        found += mine
    return found


def _pragmatic(
    captioner: Captioner,
    images: Sequence[Any],
    rows: Sequence[int],
    opened: Sequence[Image.Image],
    options: CandidateOptions,
    similar: Mapping[int, Sequence[int]],
) -> list[list[str]]:
    """Pragmatic beams, image by image, because each has other distractors."""
    found = []
    for row, image in zip(rows, opened, strict=True):
        others = [i for i in similar[row] if i != row][: options.num_distractors]
        group = [image]
        for _, more in opened_chunks(images, others, len(others) or 1):
            group += more
        found += pragmatic_captions(
            captioner,
            group,
            [list(range(len(group)))],
            rationality=options.rationality,
            num_beams=options.num_beams,
            num_return_sequences=options.num_beams,
            max_new_tokens=options.max_new_tokens,
        )
    return found
