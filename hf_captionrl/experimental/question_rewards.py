"""Multiple-choice questions about scenes with exact answers, and the reward of a caption that answers them."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.rewards.base import Reward, RewardContext, RewardData
from hf_captionrl.scenes.truth_checker import check
from hf_captionrl.scenes.world import CATEGORIES, FACT_VALUES, UNMARKED, Facts, category_of, sample_scene
from hf_captionrl.utils.options import check_values


@dataclass(frozen=True)
class Question:
    """A multiple-choice question about a scene."""

    text: str
    options: tuple[str, ...]
    answer: int  # position of the right option
    topic: str  # the fact of the scene that it is about


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
_ABSENT = {"second": "nothing", "pattern": "none", "weather": "dry", "time": "day"}
_ABSENT |= dict.fromkeys(("colour", "second_colour"), "its natural one")
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

    A fact without a word, such as dry weather, has a question, too: a caption that invents rain answers it wrongly. Relation and
    colour of a second object have one only if there is such an object.
    """
    facts = facts if isinstance(facts, Mapping) else facts.to_dict()
    values = {name: facts.get(name) or "" for name in _TEXTS}
    kind, second = str(values["kind"]), str(values["second"])
    questions = []
    for topic, text in _TEXTS.items():
        if topic in ("relation", "second_colour") and not second:
            continue
        options = tuple(_option(topic, value) for value in FACT_VALUES.get(topic, ()))
        if topic in ("kind", "second"):
            options = _kinds(str(values[topic]) or kind, second if topic == "kind" else kind)
            options = (_ABSENT["second"], *options) if topic == "second" else options
        answer = _option(topic, values[topic])
        if answer in options:  # a clip has no position
            questions.append(Question(text, options, options.index(answer), topic))
    return tuple(questions)


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
        option = _option(question.topic, next(iter(values))) if len(values) == 1 else None
        answers.append(question.options.index(option) if option in question.options else None)
    return answers


class PriorReader:
    """Guesses the option that was most often right in other questions, and ignores the caption: what a reward must exceed."""

    def __init__(self, questions: Iterable[Sequence[Question]]) -> None:
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        for question in (question for several in questions for question in several):
            self._counts[question.text][question.options[question.answer]] += 1

    @classmethod
    @functools.cache
    def of_scenes(cls, number: int = 2000, seed: int = 0) -> PriorReader:
        """The frequencies of the answers in scenes that are drawn for this."""
        rng = np.random.default_rng(seed)
        return cls(scene_questions(sample_scene(rng).facts) for _ in range(number))

    def __call__(self, caption: str, facts: Any, questions: Sequence[Question]) -> list[int | None]:
        """The guesses."""
        return [max(range(len(q.options)), key=lambda i: self._counts[q.text][q.options[i]]) for q in questions]


@dataclass(eq=False)
class QuestionReward(Reward):
    """Share of the exact questions about a scene that a reader answers right from the caption alone.

    Reference: the idea of CapRL (2025), rewards by multiple-choice questions. Differs from it by: exact questions and an
    exact reader, on data with the column `facts` of scenes, and the prior.

    Args:
        reader (`str`): `"oracle"` answers what the caption claims, `"prior"` guesses without reading it.
        prior (`bool`): Whether the share of right answers of `"prior"` is subtracted.

    Example:
        >>> QuestionReward("oracle", prior=True).name
        'question_oracle'
    """

    name = "question_oracle"
    summary = "the share of questions that the caption answers"
    reads_only_text = True

    reader: Literal["oracle", "prior"] = "oracle"
    prior: bool = False

    def __post_init__(self) -> None:
        check_values(self)
        self.name = f"question_{self.reader}"

    def prepare(self, data: RewardData) -> None:
        self._check_columns(data.columns)

    def _check_columns(self, columns: Iterable[str]) -> None:
        if "facts" not in columns:
            raise ValueError("The reward of questions needs the column 'facts'. Use data of scenes.")

    def _shares(self, reader: str, context: RewardContext) -> Tensor:
        """Share `(N,)` of right answers."""
        answer = PriorReader.of_scenes() if reader == "prior" else answers_of_claims
        facts = [one for one in context.columns["facts"] for _ in range(context.group_size)]
        shares = []
        for caption, truth in zip(context.captions, facts, strict=True):
            questions = scene_questions(truth)
            answers = answer(caption, truth, questions)
            shares.append(sum(a == q.answer for a, q in zip(answers, questions, strict=True)) / len(questions))
        return torch.tensor(shares, dtype=torch.float64)

    def __call__(self, context: RewardContext) -> Tensor:
        self._check_columns(context.columns)
        shares = self._shares(self.reader, context)
        if self.prior:
            guessed = self._shares("prior", context)
            context.statistics[f"{self.name}/prior"] = guessed.tolist()
            shares = shares - guessed
        return shares
