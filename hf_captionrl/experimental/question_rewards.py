"""Rewards of questions that a reader answers from a caption alone, the readers, and questions about photographs."""

from __future__ import annotations

import json
import logging
import math
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.experimental.claim_rewards import answer_file, ask
from hf_captionrl.retrieval.feature_cache import image_hash
from hf_captionrl.rewards.base import CompletionReward, Reward, RewardContext, RewardData
from hf_captionrl.scenes.questions import Question, answers_of_claims, scene_questions
from hf_captionrl.scenes.world import sample_scene
from hf_captionrl.utils.io import read_jsonl, write_jsonl
from hf_captionrl.utils.prompts import AnswerScores, Backend, Failure, Prompt

logger = logging.getLogger(__name__)

Answers = Sequence[int | None]
Reader = Callable[..., Sequence[Answers]]
"""Called as `reader(completions, asked=questions of each caption, **columns)`; positions of options, None for no answer."""

# --- Readers ---------------------------------------------------------------------------------------------------------


def oracle_reader(
    completions: Sequence[str], facts: Sequence[Any], asked: Sequence[Sequence[Question]] = ()
) -> list[list[int | None]]:
    """Answers exactly what the captions claim; the facts only tell which object a claim is about. Scenes only."""
    return [answers_of_claims(*one) for one in zip(completions, facts, asked, strict=True)]


class PriorReader:
    """Guesses the option that was most often right in other questions, and ignores the captions: what a reward must exceed."""

    def __init__(self, questions: Iterable[Sequence[Question]]) -> None:
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        for one in (question for several in questions for question in several):
            self._counts[one.text][one.options[one.answer]] += 1

    @classmethod
    def of_scenes(cls, number: int = 2000, seed: int = 0) -> PriorReader:
        """The frequencies of the answers in scenes that are drawn for this."""
        rng = np.random.default_rng(seed)
        return cls(scene_questions(sample_scene(rng).facts) for _ in range(number))

    def __call__(self, completions: Sequence[str], asked: Sequence[Sequence[Question]] = ()) -> list[list[int | None]]:
        """The guesses."""
        return [
            [max(range(len(q.options)), key=lambda i: self._counts[q.text][q.options[i]]) for q in several]
            for several in asked
        ]


_READ = "Description of a picture: {}\n\nAnswer the question from the description alone.\n\nQuestion: {}\n{}\n\nAnswer with the letter only."
_UNTOLD = "the description does not tell"


class LanguageModelReader:
    """Answers questions from captions with a language model; its answers are kept in `cache_file`.

    The answer is the letter with the highest log-probability, by default (`log_probs=None`) where the backend offers them, else the
    letter that it writes; a question without a letter is counted (`num_unreadable`).
    """

    def __init__(self, backend: Backend, cache_file: str | os.PathLike[str], log_probs: bool | None = None) -> None:
        asked = getattr(type(getattr(backend, "backend", backend)), "score_answers", AnswerScores.score_answers)
        self.log_probs = asked is not AnswerScores.score_answers if log_probs is None else log_probs
        self.backend, self.num_unreadable = answer_file(backend, cache_file), 0

    def __call__(self, completions: Sequence[str], asked: Sequence[Sequence[Question]] = ()) -> list[list[int | None]]:
        """Read N captions."""
        answers: list[list[int | None]] = [[None] * len(several) for several in asked]
        by_size: dict[int, list[tuple[int, int]]] = defaultdict(list)  # places of questions by the number of options
        for n, several in enumerate(asked):
            for q, question in enumerate(several):
                by_size[len(question.options)].append((n, q))
        for size, places in by_size.items():
            letters = [chr(ord("A") + i) for i in range(size + 1)]  # the last one: it cannot be told
            prompts = []
            for n, q in places:
                options = zip(letters, (*asked[n][q].options, _UNTOLD), strict=True)
                listed = "\n".join(f"{letter}. {option}" for letter, option in options)
                prompts.append(Prompt("read", "", _READ.format(completions[n], asked[n][q].text, listed)))
            if self.log_probs:
                scores = dict(self.backend.score_answers(prompts, letters))
                rows = [scores[place] for place in range(len(prompts))]
                chosen = ["" if isinstance(row, Failure) else letters[int(np.argmax(row))] for row in rows]
            else:
                chosen = [(text or "").strip().rstrip(".):").upper() for text in ask(self.backend, prompts)]
            self.num_unreadable += sum(letter not in letters for letter in chosen)
            for (n, q), letter in zip(places, chosen, strict=True):
                answers[n][q] = letters.index(letter) if letter in letters[:size] else None
        return answers


# --- Questions about photographs, which a vision-language model writes once ------------------------------------------

_WRITE = (
    "Write {} multiple-choice questions about details that this picture shows, which cannot be answered without it. Answer with a JSON "
    'list only, of objects with the keys "question", "right" (the right answer) and "wrong" (a list of three wrong answers).'
)


def parse_questions(answer: str | None) -> list[Question] | None:
    """The questions of a model's answer, their options shuffled by their text; None if any part of it is not as asked for."""
    found = []
    try:
        text = answer or ""
        for entry in json.loads(text[text.index("[") : text.rindex("]") + 1]):
            right, options = entry["right"].strip(), [str(option).strip() for option in entry["wrong"]]
            options.append(right)
            random.Random(entry["question"] + right).shuffle(options)
            if len(options) != 4 or len(set(options)) != 4 or not all(options) or not entry["question"].strip():
                return None
            found.append(Question(entry["question"].strip(), tuple(options), options.index(right)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return found or None


def make_questions(
    image_ids: Sequence[str],
    images: Sequence[Any],
    backend: Backend,
    path: str | os.PathLike[str],
    *,
    number: int = 5,
    attempts: int = 2,
) -> int:
    """Let a vision-language model write questions about images, for [`QuestionReward`].

    Its answers are kept in `<path>.answers`; one that cannot be read is asked for again, up to `attempts` times. Returns the number
    of images without questions, which are left out. Questions may be wrong, or answered without the picture: compare with `prior`.
    """
    if not backend.is_multimodal:
        raise ValueError(f"backend is {backend.model!r}, which does not see images. Use a vision-language model.")
    found: dict[str, list[Question]] = {}
    with answer_file(backend, f"{path}.answers") as kept:
        for start in range(0, len(image_ids), 64):  # images that are open at a time
            left = {str(image_ids[i]): images[i] for i in range(start, min(start + 64, len(image_ids)))}
            for attempt in range(attempts):
                prompts = [
                    Prompt("questions", image_hash(image), _WRITE.format(number), image=image, attempt=attempt)
                    for image in left.values()
                ]
                read = zip(left, map(parse_questions, ask(kept, prompts)), strict=True)
                found |= {image_id: questions for image_id, questions in read if questions}
                left = {image_id: image for image_id, image in left.items() if image_id not in found}
    write_jsonl(path, ({"image_id": i, "questions": [asdict(q) for q in several]} for i, several in found.items()))
    if missing := len(image_ids) - len(found):
        logger.warning("%d of %d images got no questions that can be read.", missing, len(image_ids))
    return missing


def read_questions(path: str | os.PathLike[str]) -> dict[str, list[Question]]:
    """The questions of a file of [`make_questions`] by image id."""
    found = {}
    for number, row in read_jsonl(path):
        try:
            several = [Question(q["text"], tuple(q["options"]), q["answer"]) for q in row["questions"]]
            if any(q.answer not in range(len(q.options)) for q in several):
                raise ValueError
            found[str(row["image_id"])] = several
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{Path(path)}, line {number}, has no questions. Use make_questions.") from None
    return found


# --- The reward ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class QuestionReward(Reward):
    """Share of the questions about an image that a reader answers right from the caption alone.

    Reference: the idea of CapRL (2025), rewards by multiple-choice questions. Differs from it by: exact questions and an
    exact reader on scenes, and the prior.

    Args:
        reader (`Callable` or `str`): `"oracle"` and `"prior"` of scenes, or a reader such as [`LanguageModelReader`].
        questions (`str`, `os.PathLike` or `Mapping`, *optional*): A file of [`make_questions`], or lists of [`Question`] by image id
            (column `image_id`). None: the exact questions about a scene (column `facts`). An image without questions has no reward.
        prior (`Callable` or `str`, *optional*): A reader that gets an empty caption; its share of right answers is subtracted.

    Example:
        >>> reward = QuestionReward("oracle", prior="prior")
        >>> reward.name
        'question_oracle'
    """

    name = "question_oracle"
    summary = "the share of questions that the caption answers"
    reads_only_text = True

    reader: Reader | str = "oracle"
    questions: str | os.PathLike[str] | Mapping[str, Sequence[Question]] | None = None
    prior: Reader | str | None = None

    def __post_init__(self) -> None:
        self._reader = self._resolved("reader", self.reader)
        self._prior = None if self.prior is None else self._resolved("prior", self.prior)
        self.name = f"question_{self.reader}" if isinstance(self.reader, str) else "question_reader"
        given = self.questions
        self._of_images = given if given is None or isinstance(given, Mapping) else read_questions(given)

    def _resolved(self, argument: str, reader: Reader | str) -> Reader:
        if not isinstance(reader, str):
            return reader
        if reader not in ("oracle", "prior") or self.questions is not None:
            given = "" if self.questions is None else ", and questions are given"
            raise ValueError(
                f"{argument} is {reader!r}{given}. Use a reader; of scenes' questions also 'oracle' or 'prior'."
            )
        return oracle_reader if reader == "oracle" else PriorReader.of_scenes()

    def prepare(self, data: RewardData) -> None:
        self._check_columns(data.columns)
        if self._of_images is not None and not any(self._of_images.get(image_id) for image_id in data.image_ids):
            raise ValueError("questions have none about an image of the data. Use make_questions with their image_id.")
        for reader in filter(None, (self._reader, self._prior)):
            CompletionReward(partial(reader, asked=()), self.name).prepare(data)

    def _check_columns(self, columns: Iterable[str]) -> None:
        if self._of_images is None and "facts" not in columns:
            raise ValueError("questions is None, and the data have no column 'facts' of scenes. Pass questions.")

    def _share(self, reader: Reader, context: RewardContext, asked: Sequence[Sequence[Question]]) -> Tensor:
        """Share `(N,)` of right answers; NaN for an image without questions."""
        found = CompletionReward(partial(reader, asked=asked), self.name, conversational=False).call(context)
        shares = [
            sum(a == q.answer for a, q in zip(answers, several, strict=True)) / len(several) if several else math.nan
            for answers, several in zip(found, asked, strict=True)
        ]
        return torch.tensor(shares, dtype=torch.float64)

    def __call__(self, context: RewardContext) -> Tensor:
        self._check_columns(context.columns)
        if self._of_images is None:
            of_images = [scene_questions(facts) for facts in context.columns["facts"]]
        else:
            of_images = [tuple(self._of_images.get(image_id, ())) for image_id in context.image_ids]
        asked = [several for several in of_images for _ in range(context.group_size)]
        shares = self._share(self._reader, context, asked)
        if self._prior is not None:
            empty = replace(context, captions=[""] * len(context.captions), arguments={})
            guessed = self._share(self._prior, empty, asked)
            context.statistics[f"{self.name}/prior"] = guessed[~guessed.isnan()].tolist()
            shares = shares - guessed
        return shares
