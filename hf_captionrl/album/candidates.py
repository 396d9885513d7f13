"""Candidate captions of each image: beams, samples, pragmatic beams, answers to a contrastive prompt.

Legend: B images of a batch, G candidates per image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from PIL import Image

from hf_captionrl.album.image_facts import opened_chunks
from hf_captionrl.album.rsa import pragmatic_captions
from hf_captionrl.album.settings import CandidateOptions, check_candidate_options
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.contrastive_prompt import contrastive_prompt, encode_with_prompts
from hf_captionrl.captioners.eval_mode import evaluating

__all__ = ["Journal", "contrastive_candidates", "generate_candidates"]


class Journal(Protocol):
    """Where candidates are kept as soon as they are generated, such as `CaptionWriter`."""

    @property
    def done(self) -> Mapping[str, list[str]]:
        """Captions of the images that were finished before, by their ids."""
        ...

    def append(self, image_ids: Sequence[str], captions: Sequence[Sequence[str]]) -> None:
        """Keep the captions of some images."""
        ...


def generate_candidates(
    captioner: Captioner,
    images: Sequence[Any],
    image_ids: Sequence[str],
    options: CandidateOptions,
    *,
    similar: Sequence[Sequence[int]] | None = None,
    journal: Journal | None = None,
    progress: Callable[[int], Any] | None = None,
) -> list[list[str]]:
    """Candidates of each image, without repeated texts. The caller's random state does not change.

    Batches start at fixed rows, and each has a seed, so that an interrupted run continues with the same samples. Images
    that the journal contains keep their candidates, even if their batch has changed.

    Args:
        similar: Rows of the images most similar to each image, for pragmatic decoding and contrastive prompts.
        journal: Receives every batch; its images are not generated again.
        progress: Called with the number of images finished.
    """
    check_candidate_options(options, captioner)
    done = {} if journal is None else journal.done
    found: list[list[str]] = [list(done.get(image_id, ())) for image_id in image_ids]
    device = captioner.device
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        evaluating(captioner.model),
    ):
        for rows in _batches(len(images), options.batch_size):
            new = [row for row in rows if image_ids[row] not in done]
            if new:
                torch.manual_seed(_seed(options.seed, new[0]))
                for row, texts in zip(new, _of_batch(captioner, images, new, options, similar), strict=True):
                    found[row] = list(dict.fromkeys(texts))
                if journal is not None:
                    journal.append([image_ids[row] for row in new], [found[row] for row in new])
            if progress is not None:
                progress(len(rows))
    return found


def contrastive_candidates(
    captioner: Captioner,
    images: Sequence[Any],
    image_ids: Sequence[str],
    said: Sequence[str],
    options: CandidateOptions,
    similar: Sequence[Sequence[int]],
    *,
    journal: Journal | None = None,
    progress: Callable[[int], Any] | None = None,
) -> list[list[str]]:
    """Beams of a chat model that is told the captions of the similar images.

    Args:
        said: One caption per image, chosen among the first candidates.
        journal: Receives every batch. An answer is kept for its image and prompt: another prompt is asked again.
        progress: Called with the number of images finished.
    """
    prompts = [
        contrastive_prompt(captioner.prompt, [said[i] for i in similar[row][: options.num_distractors]])
        for row in range(len(images))
    ]
    keys = [f"{image_id} {_digest(prompt)}" for image_id, prompt in zip(image_ids, prompts, strict=True)]
    done = {} if journal is None else journal.done
    found = [list(done.get(key, ())) for key in keys]
    with evaluating(captioner.model):
        for rows in _batches(len(images), options.batch_size):
            new = [row for row in rows if keys[row] not in done]
            for chunk, opened in opened_chunks(images, new, options.batch_size):
                inputs = encode_with_prompts(captioner, opened, [prompts[row] for row in chunk])
                answers = _grouped(captioner.generate(**inputs, **_beams(options)).captions, len(chunk))
                for row, texts in zip(chunk, answers, strict=True):
                    found[row] = texts
                if journal is not None:
                    journal.append([keys[row] for row in chunk], answers)
            if progress is not None:
                progress(len(rows))
    return found


def _batches(number: int, size: int) -> Iterator[list[int]]:
    for start in range(0, number, size):
        yield list(range(start, min(start + size, number)))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=7).hexdigest()


def _seed(seed: int, row: int) -> int:
    return int(_digest(f"{seed}/{row}"), 16)


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
    similar: Sequence[Sequence[int]] | None,
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
    similar: Sequence[Sequence[int]],
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
