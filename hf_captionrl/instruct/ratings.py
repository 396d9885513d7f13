"""Scores of answers relative to reference answers, by category, with intervals.

Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable MLE", appendix B and Table 7, after
the evaluation of Vicuna (Chiang et al. 2023).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_captionrl.metrics.bootstrap import bootstrap_interval
from hf_captionrl.metrics.caption_checks import listed_texts
from hf_captionrl.metrics.diversity import caption_statistics
from hf_captionrl.metrics.signature import signature

__all__ = [
    "BEST",
    "CATEGORIES",
    "WORST",
    "Rating",
    "answer_statistics",
    "parse_scores",
    "relative_scores",
]

CATEGORIES: dict[str, str] = {
    "generic": "Generic",
    "knowledge": "Knowledge",
    "roleplay": "Roleplay",
    "common-sense": "Common sense",
    "fermi": "Fermi",
    "counterfactual": "Counterfactual",
    "writing": "Writing",
}
"""Categories of Table 7, in its order, with the names of Vicuna's question file; without coding and math, as in the
paper."""

WORST, BEST = 1.0, 10.0
"""Lowest and highest score of the judge."""

# With its sign, so that "-1" does not count as a score; a hyphen between two numbers is not a sign.
_NUMBER = re.compile(r"(?<![\w.])[-\u2212]?[0-9]+(?:\.[0-9]+)?(?:\s*/\s*10\b)?(?![\w]|\.\d)")


@dataclass(frozen=True)
class Rating:
    """The judge's scores, from 1 to 10, of one answer and of the reference answer beside it."""

    question_id: str
    category: str
    candidate: float
    reference: float
    candidate_first: bool = True

    def __post_init__(self) -> None:
        for name in ("candidate", "reference"):
            score = getattr(self, name)
            if isinstance(score, bool) or not isinstance(score, int | float) or not WORST <= score <= BEST:
                raise ValueError(
                    f"The {name} score of question {self.question_id!r} is {score!r}. Scores are numbers from "
                    f"{WORST:g} to {BEST:g}."
                )


def parse_scores(reply: str) -> tuple[float, float] | None:
    """The two scores in a judge's reply: those of the first line with exactly two numbers from 1 to 10.

    Returns scores of the answers shown first and second; None if there is no such line.
    """
    for line in reply.splitlines():
        numbers = [float(found.split("/")[0].replace("\u2212", "-")) for found in _NUMBER.findall(line)]
        if len(numbers) == 2 and all(WORST <= number <= BEST for number in numbers):
            return numbers[0], numbers[1]
    return None


def answer_statistics(answers: Sequence[str]) -> dict[str, Any]:
    """Average length and lexical diversity of answers, and how many are empty."""
    if isinstance(answers, str):
        raise ValueError("answers is one string. Pass a list with one answer per question.")
    answers = listed_texts(answers, "answers, one answer per question,")
    spoken = [answer for answer in answers if not (isinstance(answer, str) and not answer.strip())]
    result: dict[str, Any] = {"length": 0.0, "lexical_diversity": 0.0}
    if spoken:
        found = caption_statistics(spoken)
        result = {
            "length": found["length"] * len(spoken) / len(answers),
            "lexical_diversity": found["lexical_diversity"],
        }
    return result | {
        "empty": 1 - len(spoken) / len(answers),
        "signature": signature(metric="answer_statistics", words="whitespace", answers=len(answers)),
    }


def _ratio(ratings: Sequence[Rating], **settings: Any) -> tuple[float, tuple[float, float] | None]:
    """Sum of the answers' scores divided by that of the references, and its interval over questions."""
    above, below = [r.candidate for r in ratings], [r.reference for r in ratings]
    questions = [r.question_id for r in ratings]
    interval = (
        bootstrap_interval(above, weights=below, groups=questions, **settings) if len(set(questions)) > 1 else None
    )
    return math.fsum(above) / math.fsum(below), interval


def relative_scores(
    ratings: Sequence[Rating],
    *,
    categories: Mapping[str, str] = CATEGORIES,
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Scores of the answers divided by those of the reference answers; above 1 they are better.

    Reference: Yue et al. 2023, appendix B, Table 7, which multiplies by 100. Differs from it by: each pair is judged in
    both orders, because judges prefer a position, and both count. Intervals resample questions, each with all its
    ratings.
    """
    if not ratings:
        raise ValueError("There are no ratings. Ask a judge first, or check why all its replies failed.")
    strange = {r.category for r in ratings} - set(categories)
    if strange:
        raise ValueError(f"Unknown category {sorted(strange)[0]!r}. Use one of {', '.join(categories)}.")
    settings: dict[str, Any] = {"confidence": confidence, "num_resamples": num_resamples, "seed": seed}
    result: dict[str, Any] = {}
    for name in ("overall", *categories):
        mine = [r for r in ratings if name in ("overall", r.category)]
        if not mine:
            continue
        result[name], interval = _ratio(mine, **settings)
        if interval is not None:
            result[f"{name}_ci"] = interval
    of_question: dict[str, dict[bool, list[float]]] = {}
    for rating in ratings:
        orders = of_question.setdefault(rating.question_id, {})
        orders.setdefault(rating.candidate_first, []).append(rating.candidate - rating.reference)
    # Candidate minus reference, shown first and shown second: the position causes half of the difference.
    both = [orders for orders in of_question.values() if len(orders) == 2]
    gaps = [sum(o[True]) / len(o[True]) - sum(o[False]) / len(o[False]) for o in both]
    return result | {
        "first_place": sum(gaps) / len(gaps) / 2 if gaps else None,
        "num_ratings": len(ratings),
        "num_questions": len(of_question),
        "one_order": len(of_question) - len(both),
        "signature": signature(
            metric="relative_scores", scale="1-10", pooled="sum/sum", resampled="questions", resamples=num_resamples
        ),
    }
