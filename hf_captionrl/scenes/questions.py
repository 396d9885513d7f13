"""Multiple-choice questions about scenes with exact answers, and the answers that follow from the claims of a caption."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_captionrl.scenes.truth_checker import check
from hf_captionrl.scenes.world import CATEGORIES, FACT_VALUES, UNMARKED, Facts, category_of


@dataclass(frozen=True)
class Question:
    """A multiple-choice question about an image."""

    text: str
    options: tuple[str, ...]
    answer: int  # position of the right option
    topic: str = ""  # the fact of a scene that it is about


_TEXTS = {
    "kind": "What is the main thing in the picture?",
    "count": "How many of the main thing are there?",
    "size": "How large are the things?",
    "orientation": "How does the main thing stand?",
    "position": "In which row of the picture is the main thing?",
    "background": "Which colour does the background have?",
    "second": "What else is in the picture?",
    "relation": "Where is the main thing, seen from the other one?",
    "colour": "In which colour is the main thing painted?",
    "second_colour": "In which colour is the other thing painted?",
    "pattern": "Which pattern does the background have?",
    "weather": "How is the weather?",
    "time": "Is it day or night?",
}
_ABSENT = {
    "second": "nothing",
    "colour": "its natural one",
    "second_colour": "its natural one",
    "pattern": "none",
    "weather": "dry",
    "time": "day",
}
"""Options for values without a word."""


def _option(topic: str, value: Any) -> str:
    return str(value) or _ABSENT.get(topic, "")


def _kinds(kind: str, other: str) -> tuple[str, ...]:
    """A kind and the next three of its category, in alphabetical order, so that the place of the right one tells nothing."""
    kinds = CATEGORIES[category_of(kind)]
    start = kinds.index(kind)
    following = [k for k in (*kinds[start:], *kinds[:start]) if k != other]
    return tuple(sorted(following[:4]))


def scene_questions(facts: Facts | Mapping[str, Any]) -> tuple[Question, ...]:
    """Questions about every fact of a scene, with all its values as options; of kinds, four of the same category.

    A fact without a word, such as dry weather, is asked, too: a caption that invents rain answers it wrongly. Relation and
    colour of a second object are asked only if there is one.
    """
    known = facts if isinstance(facts, Mapping) else facts.to_dict()
    values = {name: known.get(name) or "" for name in _TEXTS}
    kind, second = str(values["kind"]), str(values["second"])
    found = []
    for topic, text in _TEXTS.items():
        if topic in ("relation", "second_colour") and not second:
            continue
        options = tuple(_option(topic, value) for value in FACT_VALUES.get(topic, ()))
        if topic in ("kind", "second"):
            options = _kinds(str(values[topic]) or kind, second if topic == "kind" else kind)
            options = (_ABSENT["second"], *options) if topic == "second" else options
        answer = _option(topic, values[topic])
        if answer in options:  # a clip has no position
            found.append(Question(text, options, options.index(answer), topic))
    return tuple(found)


def answers_of_claims(
    caption: str, facts: Facts | Mapping[str, Any], questions: Sequence[Question]
) -> list[int | None]:
    """The answers of a perfect reader of a caption: what it claims, and for facts without a word what goes without saying.

    Two claims that contradict each other answer nothing, so that listing all values does not pay. The facts are read only to
    tell which of the two objects a claim is about.
    """
    result = check(caption, facts)
    claimed: dict[str, set[str]] = defaultdict(set)
    for claim in (*result.right, *result.wrong):
        claimed[claim.attribute].add(claim.value)
    silent = {**UNMARKED, "second": ""}
    answers: list[int | None] = []
    for question in questions:
        values = claimed[question.topic] or {silent[t] for t in [question.topic] if t in silent}
        said = _option(question.topic, next(iter(values))) if len(values) == 1 else None
        answers.append(question.options.index(said) if said in question.options else None)
    return answers
