"""Step 2 of an album: candidate captions of each image, from beams and samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_captionrl.apps.album.options import CandidateOptions
from hf_captionrl.apps.album.sources import opened_chunks
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.language_models import BackendError, EndpointCaptioner
from hf_captionrl.captioners.prompts import ImagePrompts, encode_with_prompts, forbidden_tokens
from hf_captionrl.utils.parts import seed_of_batch


def generate_candidates(
    captioner: Captioner | EndpointCaptioner,
    images: Sequence[Any],
    rows: Sequence[int],
    image_ids: Sequence[str],
    options: CandidateOptions,
    prompts: ImagePrompts | None = None,
) -> list[list[str]]:
    """Candidates of a batch of images, without repeated texts. The caller's random state does not change.

    The seed depends on the first image, so the samples do not depend on earlier batches. An endpoint gives a greedy caption and
    samples.
    """
    prompts = ImagePrompts(options.do_not_mention) if prompts is None else prompts
    prompt_of = {row: prompts.of(image_ids[row], captioner.prompt) for row in rows}
    candidates: list[list[str]] = []
    if isinstance(captioner, EndpointCaptioner):
        for chunk, opened in opened_chunks(images, rows, options.batch_size):
            ids = [image_ids[row] for row in chunk]
            answers = captioner.describe(ids, opened, [prompt_of[row] for row in chunk], 1 + options.num_samples)
            for image_id, answer in zip(ids, answers, strict=True):
                if not answer:
                    raise BackendError(
                        f"Image {image_id!r} has no answer: {captioner.failed[image_id]}. Use the same command to ask again, or "
                        "leave the image out; other answers are kept."
                    )
                candidates.append(list(dict.fromkeys(map(str, answer))))
        return candidates
    prompts.check(captioner)
    # All settings are explicit, so that the checkpoint's defaults have no effect.
    words = forbidden_tokens(captioner.tokenizer, options.do_not_mention)
    wording: dict[str, Any] = {"max_new_tokens": options.max_new_tokens} | ({"bad_words_ids": words} if words else {})
    if options.min_new_tokens:
        wording["min_new_tokens"] = options.min_new_tokens
    sampling = {"do_sample": True, "num_beams": 1, "num_return_sequences": options.num_samples, **wording}
    sampling |= {"temperature": options.temperature, "top_p": 1.0, "top_k": 0}
    beams = {"do_sample": False, "num_beams": options.num_beams, "num_return_sequences": options.num_beams, **wording}
    device = captioner.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed_of_batch(options.seed, image_ids[rows[0]]))
        for chunk, opened in opened_chunks(images, rows, options.batch_size):
            if prompts and captioner.family == "chat":
                inputs = encode_with_prompts(captioner, opened, [prompt_of[row] for row in chunk])
            else:
                inputs = captioner.encode_images(opened)
            texts = _grouped(captioner.generate(**inputs, **beams).captions, len(chunk))
            if options.num_samples:
                samples = _grouped(captioner.generate(**inputs, **sampling).captions, len(chunk))
                texts = [beam + more for beam, more in zip(texts, samples, strict=True)]
            candidates += [list(dict.fromkeys(one)) for one in texts]
    return candidates


def _grouped(texts: Sequence[str], number: int) -> list[list[str]]:
    each = len(texts) // number
    return [list(texts[start : start + each]) for start in range(0, len(texts), each)]
