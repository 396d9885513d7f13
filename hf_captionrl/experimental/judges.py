"""Judges: language and vision-language models that rate captions, by the probabilities of their answers or in writing.

A judge is a backend of `captioners/language_model_clients.py`; wrapped in a [`KeptAnswers`] it is asked nothing twice. A caption that a
judge did not rate is NaN and counted, never 0. Scores of different judges, revisions or prompts cannot be compared; the signature
states them. Legend: N captions, A answers, K images of a bag, O orders of its images.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hf_captionrl.data.images import open_image
from hf_captionrl.evaluation.metric_functions import MetricFunction
from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.metrics.caption_checks import check_captions, check_groups
from hf_captionrl.retrieval.feature_cache import image_hash
from hf_captionrl.utils.io import json_digest
from hf_captionrl.utils.prompts import BackendError, Failure, Prompt, Truncated, image_labels

_VQA = 'Does this picture show what the following sentence says?\n\nSentence: "{caption}"\n\nAnswer with Yes or No.'
_CLAIR = (
    "You see descriptions that people wrote of one picture, and a new caption. How likely does the caption describe the same "
    'picture?\n\nDescriptions:\n{listed}\n\nCaption: {caption}\n\nAnswer with JSON only: {{"score": N, "reason": "..."}}, where N '
    "is a whole number from 0 (certainly another picture) to 100 (certainly the same)."
)
_LISTENER = 'One of these pictures is described by the sentence "{caption}". Which one? Answer with its letter only.'
_YES_NO = ("Yes", "No")
_AT_ONCE = 64  # questions whose images are in memory


def judge_metric(name: str, judge: Any) -> MetricFunction:
    """`vqa_score` or `clair` as a function; a caption that the judge does not rate is an error."""

    def scores(candidates: Sequence[str], references: Sequence[Sequence[str]], images: Sequence[Any]) -> Any:
        result = clair(candidates, references, judge) if name == "clair" else vqa_score(candidates, images, judge)
        if result["num_failed"]:
            raise ValueError(f"{name}: captions without a rating: {result['num_failed']}; {result['failures'][0]}.")
        return result["per_sample"]

    if judge is None:
        raise ValueError(f"{name} needs a judge. Use --judge transformers:NAME.")
    return scores


def _answered(number: int, make: Callable[[int], Prompt], ask: Callable[[list[Prompt]], Iterable[Any]]) -> list[Any]:
    """The answers to some questions, which are made when they are asked."""
    answers: list[Any] = [None] * number
    for start in range(0, number, _AT_ONCE):
        for at, answer in ask([make(row) for row in range(start, min(start + _AT_ONCE, number))]):
            answers[start + at] = answer
    if lacking := sum(answer is None for answer in answers):
        raise BackendError(f"The judge left {lacking} of {number} prompts unanswered. Fix the backend.")
    return answers


def _normalised_scores(
    number: int, make: Callable[[int], Prompt], answers: Sequence[str], backend: Any
) -> list[np.ndarray | Failure]:
    """Log-probabilities `(A,)` of the answers to each question, normalised over them, or a [`Failure`]."""
    scores = _answered(number, make, lambda prompts: backend.score_answers(prompts, answers))
    for at, row in enumerate(scores):
        if not isinstance(row, Failure):
            array = np.asarray(row, dtype=np.float64)
            is_finite = math.isfinite(array.max())
            detail = f"the log-probabilities of {', '.join(answers)} are {row}"
            scores[at] = array - np.logaddexp.reduce(array) if is_finite else Failure("backend_failed", detail)
    return scores


def _question(stage: str, text: str, *images: Any) -> Prompt:
    """A question about some images (paths, or what `open_image` reads)."""
    opened = [open_image(image) for image in images]
    name = "+".join(map(image_hash, opened))
    return Prompt(stage, name, text, image=opened[0] if len(opened) == 1 else opened)


def _result(metric: str, values: Sequence[float | Failure], backend: Any, prompt: str, **more: Any) -> dict[str, Any]:
    """The mean over the captions that have a value, and those that have none."""
    failed = [(row, value.detail) for row, value in enumerate(values) if isinstance(value, Failure)]
    scores = np.array([math.nan if isinstance(value, Failure) else value for value in values], dtype=np.float64)
    # Local paths are not meaningful on other machines.
    judge = Path(backend.model).name if Path(backend.model).exists() else backend.model
    parts = {"judge": judge, "revision": backend.revision, "prompt": json_digest(prompt, size=4)}
    return {
        metric: float(np.nanmean(scores)) if len(failed) < len(scores) else None,
        "per_sample": scores,
        "num_failed": len(failed),
        "failures": [f"caption {row}: {detail}" for row, detail in failed[:5]],
        "signature": signature(metric=metric, **parts),
    } | more


def vqa_score(captions: Any, images: Sequence[Any], backend: Any) -> dict[str, Any]:
    r"""Probability with which a vision-language model confirms that the image shows what the caption says.

    Reference: Lin et al. 2024, "Evaluating Text-to-Visual Generation with Image-to-Text Generation" (VQAScore), Eq. 1.
    Differs from it by: the question is worded differently, and the probability is `P(Yes) / (P(Yes) + P(No))`. The rest of the
    probability is that of other wordings ("Yes, it ..."), which depends on the judge and not on the caption.

    Args:
        captions: N captions.
        images: The image of each: a PIL image, an array, a path, or encoded bytes.
        backend ([`Backend`]): A vision-language model whose answers have probabilities.
    Returns:
        `dict`: `vqa_score`, the mean in [0, 1], higher is better, None if no caption was rated; `per_sample`, NaN for captions
        without a rating; `num_failed`, their number; `failures`, the first reasons; `signature`.
    """
    texts = check_captions(captions)
    if len(texts) != len(images):
        raise ValueError(f"{len(texts)} captions and {len(images)} images. Pass one image per caption.")
    make = lambda row: _question("vqa_score", _VQA.format(caption=texts[row]), images[row])  # noqa: E731
    scores = _normalised_scores(len(texts), make, _YES_NO, backend)
    values = [row if isinstance(row, Failure) else math.exp(row[0]) for row in scores]
    return _result("vqa_score", values, backend, _VQA)


def _parsed_rating(answer: Any) -> tuple[float, str] | Failure:
    """Score in [0, 1] and reason of an answer of [`clair`], which must be one JSON object, alone or in a block of code."""
    if isinstance(answer, Failure):
        return answer
    text = answer.text if isinstance(answer, Truncated) else answer
    try:
        rating = json.loads(text.strip().removeprefix("```json").removeprefix("```").removesuffix("```"))
        score = rating["score"]
        if type(score) not in (int, float) or not 0 <= score <= 100:
            raise ValueError(f"score is {score!r}")
        return score / 100, str(rating.get("reason", ""))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        detail = f"the answer {text[:60]!r} is not JSON with a score from 0 to 100 ({type(error).__name__})"
        return Failure("backend_rejected", detail)


def clair(captions: Any, references: Any, backend: Any) -> dict[str, Any]:
    """How likely a caption describes the same image as the references, as written by a language model, which sees no image.

    Reference: Chan et al. 2023, "CLAIR: Evaluating Image Captions with Large Language Models".
    Differs from it by: the prompt is worded differently, and an answer that is not the JSON that was asked for is asked for
    once more (sampled) and then counted as failed; no number is read from other text.

    Args:
        captions: N captions.
        references (`Sequence[Sequence[str]]`): Human captions of each image.
        backend ([`Backend`]): A language model; it needs no probabilities.
    Returns:
        `dict`: `clair`, the mean in [0, 1], higher is better; `reasons`, the judge's reason for each caption; the other keys as
        in [`vqa_score`].
    """
    texts = check_captions(captions)
    groups = check_groups(references, "references", len(texts))

    def make(row: int) -> Prompt:
        descriptions = "\n".join(f"- {text}" for text in groups[row])
        return Prompt("clair", "", _CLAIR.format(listed=descriptions, caption=texts[row]))

    ratings = list(map(_parsed_rating, _answered(len(texts), make, backend.complete)))
    # The backend has already repeated a request that failed.
    again = [at for at, rated in enumerate(ratings) if isinstance(rated, Failure) and rated.reason != "backend_failed"]
    retried = _answered(len(again), lambda at: replace(make(again[at]), attempt=1), backend.complete)
    for row, answer in zip(again, retried, strict=True):
        ratings[row] = _parsed_rating(answer)
    values = [rated if isinstance(rated, Failure) else rated[0] for rated in ratings]
    reasons = ["" if isinstance(rated, Failure) else rated[1] for rated in ratings]
    return _result("clair", values, backend, _CLAIR, reasons=reasons)


# --- A chat model as listener ----------------------------------------------------------------------------------------


def listener_log_probs(
    captions: Sequence[str], bags: Sequence[Sequence[Any]], backend: Any, *, num_orders: int = 1
) -> list[np.ndarray | Failure]:
    r"""Log-probabilities `(K,)` of the images of each caption's bag by a chat model, normalised over the bag.

    One prompt shows all images of the bag, named by letters. Models prefer some places, so the bag is rotated by a hash of the
    caption, and `num_orders` averages the probabilities over several rotations.
    """

    def of_size(size: int, rows: list[int]) -> list[np.ndarray | Failure]:
        number = min(num_orders, size)  # questions per caption

        def first(row: int, turn: int) -> int:
            """The image that is shown first."""
            return (int(json_digest(captions[row]), 16) + turn * size // number) % size

        def make(at: int) -> Prompt:
            row, bag = rows[at // number], list(bags[rows[at // number]])
            start = first(row, at % number)
            return _question("listener", _LISTENER.format(caption=captions[row]), *bag[start:], *bag[:start])

        scores = _normalised_scores(len(rows) * number, make, image_labels(size), backend)
        log_probs: list[np.ndarray | Failure] = []
        for at, row in enumerate(rows):
            some = scores[at * number : (at + 1) * number]  # (O, K)
            if failures := [one for one in some if isinstance(one, Failure)]:
                log_probs.append(failures[0])
            else:
                turned = [np.roll(one, first(row, turn)) for turn, one in enumerate(some)]
                log_probs.append(np.logaddexp.reduce(turned, axis=0) - math.log(number))
        return log_probs

    by_row: dict[int, np.ndarray | Failure] = {}
    for size in set(map(len, bags)):
        rows = [row for row, bag in enumerate(bags) if len(bag) == size]
        by_row |= zip(rows, of_size(size, rows), strict=True)
    return [by_row[row] for row in range(len(captions))]


def found_target(log_probs: np.ndarray, target: int) -> bool:
    """Whether the target is the most probable image; a tie, to rounding, counts against the caption."""
    return bool((np.delete(log_probs, target) < log_probs[target] - 1e-9).all())
