"""Judges: language and vision-language models that rate captions, by the probabilities of their answers or in writing.

A judge is a backend of `captioners/language_models.py`; wrapped in a [`KeptAnswers`] it is asked nothing twice. A caption that a
judge did not rate is NaN and counted, never 0. Scores of different judges, revisions or prompts cannot be compared; the signature
states them. Legend: N captions, A answers, K images of a bag, O orders of its images.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hf_captionrl.data.images import open_image
from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.metrics.caption_checks import check_captions, check_groups
from hf_captionrl.retrieval.feature_cache import image_hash
from hf_captionrl.utils.io import json_digest
from hf_captionrl.utils.prompts import BackendError, Failure, Prompt, Truncated, image_labels

_VQA = 'Does this picture show what the following sentence says?\n\nSentence: "{caption}"\n\nAnswer with Yes or No.'
_FLEUR = (
    "Rate how well a caption describes this picture. 0.0: nothing in it is true of the picture. 1.0: everything in it is true, "
    "and it mentions what matters.\n\n{references}Caption: {caption}\n\nAnswer with one number from 0.0 to 1.0, with one "
    "decimal and nothing else."
)
_REFERENCES = "Captions that people wrote for this picture:\n{listed}\n\n"
_CLAIR = (
    "You see descriptions that people wrote of one picture, and a new caption. How likely does the caption describe the same "
    'picture?\n\nDescriptions:\n{listed}\n\nCaption: {caption}\n\nAnswer with JSON only: {{"score": N, "reason": "..."}}, where N '
    "is a whole number from 0 (certainly another picture) to 100 (certainly the same)."
)
_LISTENER = 'One of these pictures is described by the sentence "{caption}". Which one? Answer with its letter only.'

YES_NO = ("Yes", "No")
RATINGS = tuple(f"{tenths / 10:.1f}" for tenths in range(11))
"""Answers of [`fleur`]: 0.0, 0.1, ..., 1.0."""

_AT_ONCE = 64  # questions whose images are in memory


def _answered(number: int, make: Callable[[int], Prompt], ask: Callable[[list[Prompt]], Iterable[Any]]) -> list[Any]:
    """The answers to some questions, which are made when they are asked."""
    found: list[Any] = [None] * number
    for start in range(0, number, _AT_ONCE):
        for at, answer in ask([make(row) for row in range(start, min(start + _AT_ONCE, number))]):
            found[start + at] = answer
    if lacking := sum(answer is None for answer in found):
        left = f"{lacking} of {number} prompts"
        raise BackendError(f"The judge left {left} unanswered. Fix the backend: it must answer each.")
    return found


def _scored(
    number: int, make: Callable[[int], Prompt], answers: Sequence[str], backend: Any, value: Callable[..., Any] = list
) -> list[Any]:
    """A value of the log-probabilities `(A,)` of the answers to each question, or a [`Failure`], also if they are not finite."""
    found = _answered(number, make, lambda prompts: backend.score_answers(prompts, answers))
    for at, row in enumerate(found):
        if not isinstance(row, Failure):
            said = f"the log-probabilities of {', '.join(answers)} are {row}"
            found[at] = value(row) if math.isfinite(np.max(row)) else Failure("backend_failed", said)
    return found


def _normalised(log_probs: Sequence[float]) -> np.ndarray:
    array = np.asarray(log_probs, dtype=np.float64)
    return array - np.logaddexp.reduce(array)


def _with_images(captions: Any, images: Sequence[Any], backend: Any) -> list[str]:
    if not backend.is_multimodal:
        raise ValueError(f"The backend {backend.model!r} does not see images. Use a vision-language model.")
    texts = check_captions(captions)
    if len(texts) != len(images):
        raise ValueError(f"{len(texts)} captions and {len(images)} images. Pass one image per caption.")
    return texts


def _asked_of(stage: str, text: str, *images: Any) -> Prompt:
    """A question about some images (paths, or what `open_image` reads)."""
    opened = [open_image(image) for image in images]
    name = "+".join(map(image_hash, opened))
    return Prompt(stage, name, text, image=opened[0] if len(opened) == 1 else opened)


def _listed(references: Sequence[str]) -> str:
    return "\n".join(f"- {text}" for text in references)


def _signature(metric: str, backend: Any, prompt: str, **parts: Any) -> str:
    # Local paths are not meaningful on other machines.
    name = Path(backend.model).name if Path(backend.model).exists() else backend.model
    return signature(metric=metric, judge=name, revision=backend.revision, prompt=json_digest(prompt, size=4), **parts)


def _result(metric: str, values: Sequence[float | Failure], named: str, **more: Any) -> dict[str, Any]:
    """The mean over the captions that have a value, and those that have none."""
    failed = [(row, value.detail) for row, value in enumerate(values) if isinstance(value, Failure)]
    scores = np.array([math.nan if isinstance(value, Failure) else value for value in values], dtype=np.float64)
    result = {metric: float(np.nanmean(scores)) if len(failed) < len(scores) else None, "per_sample": scores, **more}
    if len(failed) == len(scores):
        result[f"{metric}_reason"] = f"the judge rated none of {len(scores)} captions: {failed[0][1]}"
    shown = [f"caption {row}: {detail}" for row, detail in failed[:5]]
    return result | {"num_failed": len(failed), "failures": shown, "signature": named}


# --- Probabilities of answers ----------------------------------------------------------------------------------------


def yes_probability(log_probs: Sequence[float], normalise: bool = True) -> float:
    """P(yes) from the log-probabilities of yes and no."""
    return math.exp(_normalised(log_probs)[0] if normalise else log_probs[0])


def expected_rating(log_probs: Sequence[float]) -> float:
    """Mean of `RATINGS` under their probabilities, which are normalised over them."""
    return float(np.exp(_normalised(log_probs)) @ np.array(RATINGS, dtype=float))


def vqa_score(captions: Any, images: Sequence[Any], backend: Any, *, normalise: bool = True) -> dict[str, Any]:
    r"""Probability with which a vision-language model confirms that the image shows what the caption says.

    Reference: Lin et al. 2024, "Evaluating Text-to-Visual Generation with Image-to-Text Generation" (VQAScore), Eq. 1.
    Differs from it by: the question is worded differently, and by default the probability is `P(Yes) / (P(Yes) + P(No))`. The
    rest of the probability is that of other wordings ("Yes, it ..."), which depends on the judge and not on the caption.

    Args:
        captions: N captions.
        images: The image of each: a PIL image, an array, a path, or encoded bytes.
        backend ([`Backend`]): A vision-language model whose answers have probabilities.
        normalise: Whether to divide by the probability of both answers; False: as in the paper.
    Returns:
        `dict`: `vqa_score`, the mean in [0, 1], higher is better, None (with `vqa_score_reason`) if no caption was rated;
        `per_sample`, NaN for captions without a rating; `num_failed`, their number; `failures`, the first reasons; `signature`.
    Raises:
        ValueError: If the backend does not see images.
        BackendError: If the backend offers no probabilities, or fails for every caption.
    """
    texts = _with_images(captions, images, backend)
    make = lambda row: _asked_of("vqa_score", _VQA.format(caption=texts[row]), images[row])  # noqa: E731
    values = _scored(len(texts), make, YES_NO, backend, lambda row: yes_probability(row, normalise))
    return _result("vqa_score", values, _signature("vqa_score", backend, _VQA, normalise=normalise))


def fleur(captions: Any, images: Sequence[Any], backend: Any, references: Any = None) -> dict[str, Any]:
    r"""Expected rating of a caption between 0 and 1 by a vision-language model.

    Reference: Lee et al. 2024, "FLEUR: An Explainable Reference-Free Evaluation Metric for Image Captioning", section 3 (score
    smoothing), and RefFLEUR with references.
    Differs from it by: the prompt is worded differently, and the expectation runs over the eleven ratings 0.0 to 1.0 with the
    probabilities of whole answers, not over the digits of the answer that the model gave.

    Args:
        captions: N captions.
        images: The image of each.
        backend ([`Backend`]): A vision-language model whose answers have probabilities.
        references (`Sequence[Sequence[str]]`, *optional*): Human captions of each image, shown in the prompt.
    Returns:
        `dict`: `fleur`, the mean in [0, 1], higher is better; the other keys as in [`vqa_score`].
    """
    texts = _with_images(captions, images, backend)
    groups = None if references is None else check_groups(references, "references", len(texts))

    def make(row: int) -> Prompt:
        shown = "" if groups is None else _REFERENCES.format(listed=_listed(groups[row]))
        return _asked_of("fleur", _FLEUR.format(caption=texts[row], references=shown), images[row])

    values = _scored(len(texts), make, RATINGS, backend, expected_rating)
    prompt = _FLEUR + ("" if groups is None else _REFERENCES)
    return _result("fleur", values, _signature("fleur", backend, prompt, references=groups is not None))


# --- Answers in writing ----------------------------------------------------------------------------------------------


def parse_rating(answer: Any) -> tuple[float, str] | Failure:
    """Score in [0, 1] and reason of an answer of [`clair`], which must be one JSON object, alone or in a block of code."""
    if isinstance(answer, Failure):
        return answer
    if isinstance(answer, Truncated):
        return Failure("backend_rejected", f"the answer reached the length limit: {answer.text[:60]!r}")
    fenced = re.fullmatch(r"\s*```(?:json)?\s*(.*?)\s*```\s*", answer, re.S)
    try:
        said = json.loads(fenced[1] if fenced else answer)
        score = said["score"]
        if type(score) not in (int, float) or not 0 <= score <= 100:
            raise ValueError(f"score is {score!r}")
        return score / 100, str(said.get("reason", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        detail = f"the answer {answer[:60]!r} is not JSON with a score from 0 to 100 ({type(error).__name__})"
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
        return Prompt("clair", "", _CLAIR.format(listed=_listed(groups[row]), caption=texts[row]))

    found = list(map(parse_rating, _answered(len(texts), make, backend.complete)))
    # The backend has already repeated a request that failed.
    again = [row for row, rated in enumerate(found) if isinstance(rated, Failure) and rated.reason != "backend_failed"]
    retried = _answered(len(again), lambda at: replace(make(again[at]), attempt=1), backend.complete)
    for row, answer in zip(again, retried, strict=True):
        found[row] = parse_rating(answer)
    values = [rated if isinstance(rated, Failure) else rated[0] for rated in found]
    reasons = ["" if isinstance(rated, Failure) else rated[1] for rated in found]
    return _result("clair", values, _signature("clair", backend, _CLAIR), reasons=reasons)


# --- A chat model as listener ----------------------------------------------------------------------------------------


def listener_log_probs(
    captions: Sequence[str], bags: Sequence[Sequence[Any]], backend: Any, *, together: bool = True, num_orders: int = 1
) -> list[np.ndarray | Failure]:
    """Log-probabilities `(K,)` of the images of each caption's bag, normalised over the bag; see [`listener`]."""
    if num_orders < 1 or any(len(bag) < 2 for bag in bags):
        smallest = min(map(len, bags), default=0)
        given = f"num_orders is {num_orders} and the smallest bag {smallest}"
        raise ValueError(f"{given}. Use at least 1, and bags of 2 or more.")

    def of_size(size: int, rows: list[int]) -> list[np.ndarray | Failure]:
        number = min(num_orders, size) if together else size  # questions per caption

        def first(row: int, turn: int) -> int:
            """The image that is shown first."""
            return (int(json_digest(captions[row]), 16) + turn * size // number) % size if together else turn

        def make(at: int) -> Prompt:
            row, bag = rows[at // number], list(bags[rows[at // number]])
            start = first(row, at % number)
            if not together:
                return _asked_of("vqa_score", _VQA.format(caption=captions[row]), bag[start])
            return _asked_of("listener", _LISTENER.format(caption=captions[row]), *bag[start:], *bag[:start])

        scores = _scored(len(rows) * number, make, image_labels(size) if together else YES_NO, backend, _normalised)
        found: list[np.ndarray | Failure] = []
        for at, row in enumerate(rows):
            own = scores[at * number : (at + 1) * number]  # (O, K), or (K, 2)
            if failures := [one for one in own if isinstance(one, Failure)]:
                found.append(failures[0])
            elif together:
                turned = [np.roll(one, first(row, turn)) for turn, one in enumerate(own)]
                found.append(np.logaddexp.reduce(turned, axis=0) - math.log(number))
            else:
                found.append(_normalised([float(one[0]) for one in own]))
        return found

    found: dict[int, np.ndarray | Failure] = {}
    for size in set(map(len, bags)):
        rows = [row for row, bag in enumerate(bags) if len(bag) == size]
        found |= zip(rows, of_size(size, rows), strict=True)
    return [found[row] for row in range(len(captions))]


def found_target(log_probs: np.ndarray, target: int) -> bool:
    """Whether the target is the most probable image; a tie, to rounding, counts against the caption."""
    return bool((np.delete(log_probs, target) < log_probs[target] - 1e-9).all())


def listener(
    captions: Any,
    images: Sequence[Any],
    backend: Any,
    *,
    bags: Sequence[Sequence[int]],
    together: bool = True,
    num_orders: int = 1,
) -> dict[str, Any]:
    r"""Share of captions from which a chat model finds their image among the images of its bag.

    `together`: one prompt shows all images of the bag, named by letters; the letters are normalised over the bag. Models prefer
    some places, so the bag is rotated by a hash of the caption, and `num_orders` averages the probabilities over several
    rotations. Otherwise each image is shown alone, and `P(image k) = P(Yes | k) / sum_j P(Yes | j)` with the normalised
    probability of [`vqa_score`].

    Args:
        captions: N captions.
        images: The image of each, in the same order.
        backend ([`Backend`]): A vision-language model whose answers have probabilities; several images per prompt if `together`.
        bags (`Sequence[Sequence[int]]`): Rows of the images that are compared; each caption of a bag is one trial.
        together: Whether all images of a bag are in one prompt (num_orders questions per caption) or one at a time (K).
        num_orders: Rotations of the bag, at most K.
    Returns:
        `dict`: `listener`, accuracy in [0, 1], higher is better (ties count against the caption); `chance`, the accuracy of
        guessing; `log_probs`, of the target of each trial in nats; `captions`, the row of each trial; `groups`, its bag; the
        other keys as in [`vqa_score`].
    """
    texts = _with_images(captions, images, backend)
    for number, bag in enumerate(bags):
        if len(set(bag)) != len(bag) or not all(0 <= row < len(texts) for row in bag):
            raise ValueError(f"bags[{number}] is {list(bag)}. Use different rows below {len(texts)}.")
    trials = [(number, place) for number, bag in enumerate(bags) for place in range(len(bag))]
    if not trials:
        raise ValueError("bags is empty. Use at least one bag.")
    rows = [bags[number][place] for number, place in trials]
    shown = [[images[row] for row in bags[number]] for number, _ in trials]
    asked = [texts[row] for row in rows]
    found = listener_log_probs(asked, shown, backend, together=together, num_orders=num_orders)
    pairs = list(zip(found, trials, strict=True))
    values = [one if isinstance(one, Failure) else float(found_target(one, place)) for one, (_, place) in pairs]
    log_probs = [math.nan if isinstance(one, Failure) else float(one[place]) for one, (_, place) in pairs]
    parts = {"together": together, "orders": num_orders if together else None, "ties": "against"}
    named = _signature("listener", backend, _LISTENER if together else _VQA, **parts)
    more = {"chance": float(np.mean([1 / len(bag) for bag in shown])), "log_probs": np.array(log_probs)}
    return _result("listener", values, named, **more, captions=rows, groups=[number for number, _ in trials])
