"""Judges of answers: an OpenAI-compatible endpoint, a local model, or a file of ratings."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hf_captionrl.instruct.questions import Question
from hf_captionrl.instruct.ratings import BEST, WORST, Rating, parse_scores
from hf_captionrl.io import read_jsonl
from hf_captionrl.language_models.backend import BackendError, Failure, Truncated
from hf_captionrl.language_models.endpoint import HTTPBackend
from hf_captionrl.language_models.prompt import Prompt

__all__ = ["EndpointJudge", "FileJudge", "Judge", "JudgeError", "LocalJudge", "Ratings", "judge_prompt", "rate_pairs"]

NO_ANSWER = "(no answer)"
"""Text that replaces an empty answer."""


class JudgeError(RuntimeError):
    """A judge cannot be reached, or its reply cannot be read."""


@contextlib.contextmanager
def _as_judge_error() -> Iterator[None]:
    """An error that would affect every question; it stops the judge."""
    try:
        yield
    except BackendError as error:
        raise JudgeError(str(error)) from None


@dataclass
class Ratings:
    """Ratings and failures of a judge.

    Args:
        ratings (`list[Rating]`): Ratings that could be read.
        failed (`list[str]`): For each reply that could not be read, the question id and the beginning of the reply.
    """

    ratings: list[Rating] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Judge(Protocol):
    """Rates the answers of one model."""

    name: str

    def rate(self, model: str, questions: Sequence[Question], answers: Sequence[str]) -> Ratings:
        """Rate each answer beside its question's reference answer, in both orders."""
        ...


def judge_prompt(question: str, first: str, second: str) -> str:
    """The question to a judge."""
    return (
        "Two assistants were given the same question. Judge how helpful, relevant, accurate and detailed each answer is, "
        f"and give each of them one score from {WORST:g} (worst) to {BEST:g} (best). The order in which they are shown "
        "means nothing, and a longer answer is not better for its length.\n\n"
        f"<question>\n{question}\n</question>\n\n<answer 1>\n{first}\n</answer 1>\n\n<answer 2>\n{second}\n</answer 2>\n\n"
        "Write the two scores on the first line, answer 1 before answer 2, as two numbers with a space between them and "
        "nothing else. Explain them below."
    )


def rate_pairs(ask: Callable[[str], str], questions: Sequence[Question], answers: Sequence[str]) -> Ratings:
    """Ask a text model to judge every answer, in both orders; an empty one is shown as `(no answer)`."""
    if len(questions) != len(answers):
        raise ValueError(
            f"There are {len(answers)} answers to {len(questions)} questions. Pass one answer per question."
        )
    result = Ratings()
    for question, answer in zip(questions, answers, strict=True):
        if not question.reference.strip():
            raise ValueError(
                f"Question {question.question_id!r} has no reference answer to compare with. Pass "
                "--reference_answers, a JSON Lines file with question_id and text."
            )
        shown = answer if answer.strip() else NO_ANSWER
        for candidate_first in (True, False):
            pair = (shown, question.reference) if candidate_first else (question.reference, shown)
            reply = ask(judge_prompt(question.text, *pair))
            scores = parse_scores(reply)
            if scores is None:
                result.failed.append(f"{question.question_id}: {reply[:80]!r}")
                continue
            candidate, reference = scores if candidate_first else scores[::-1]
            result.ratings.append(
                Rating(question.question_id, question.category, candidate, reference, candidate_first)
            )
    return result


class EndpointJudge:
    """A model behind an OpenAI-compatible address, asked at temperature 0 by an [`HTTPBackend`].

    Args:
        base_url (`str`): Address without `/chat/completions`; no other address is contacted.
        model (`str`): Name of the model there.
        api_key_env (`str`, *optional*): Environment variable with the key, which is sent as a bearer token.
        retries (`int`): Number of further attempts after a response of 429 or 5xx, or no response.
        backoff (`float`): Seconds before the first further attempt, doubled before each next one, unless the server
            sends `Retry-After`.
        timeout (`float`): Time limit of a reply in seconds.
        max_tokens (`int`): Maximum length of a reply.
        sleep (`Callable`): Replaces `time.sleep` in tests.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        retries: int = 5,
        backoff: float = 1.0,
        timeout: float = 120.0,
        max_tokens: int = 512,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"judge_base_url is {base_url!r}. Use an address such as 'http://localhost:8000/v1'.")
        if not model:
            raise ValueError("The judge's model has no name. Set --judge_model to its name at the endpoint.")
        self.name = model
        self._url = base_url
        with _as_judge_error():
            self._backend = HTTPBackend(
                base_url,
                model,
                api_key_env=api_key_env,
                max_new_tokens=max_tokens,
                seed=None,
                concurrency=1,
                timeout_s=timeout,
                tries=retries + 1,
                backoff_s=backoff,
                sleep=sleep,
            )

    def ask(self, prompt: str) -> str:
        """Send one prompt."""
        with _as_judge_error():
            [(_, answer)] = self._backend.complete([Prompt("judge", "", prompt)])
        if isinstance(answer, Failure):
            raise JudgeError(
                f"The judge at {self._url} failed: {answer.detail}. Check --judge_base_url and --judge_model, or try again "
                "later; the answers are in answers.jsonl."
            )
        text = answer.text if isinstance(answer, Truncated) else answer
        if not text:
            raise JudgeError(
                f"The judge at {self._url} returned an empty reply. Check that {self.name!r} is a chat model."
            )
        return text

    def rate(self, model: str, questions: Sequence[Question], answers: Sequence[str]) -> Ratings:
        """See [`Judge`]."""
        return rate_pairs(self.ask, questions, answers)


class LocalJudge:
    """A causal language model of transformers, with greedy decoding.

    Args:
        model (`PreTrainedModel`): The model.
        tokenizer: Its tokenizer; its chat template is used if it has one.
        name (`str`): Name in the results.
        max_new_tokens (`int`): Maximum length of a reply.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str = "local", max_new_tokens: int = 64) -> None:
        self.name = name
        self._model, self._tokenizer, self._max_new_tokens = model.eval(), tokenizer, max_new_tokens

    @classmethod
    def from_pretrained(cls, name: str, **kwargs: Any) -> LocalJudge:
        """Load it."""
        from transformers import AutoTokenizer

        from hf_captionrl.checkpoints.loading import load_language_model

        model = load_language_model(name)
        return cls(
            model,
            AutoTokenizer.from_pretrained(name, trust_remote_code=False),
            name=Path(name).name,
            **kwargs,
        )

    def ask(self, prompt: str) -> str:
        """Generate the reply to one prompt."""
        import torch

        if self._tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}]
            prompt = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            encoded = self._tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        else:
            encoded = self._tokenizer(prompt, return_tensors="pt")
        ids = encoded["input_ids"].to(self._model.device)
        with torch.no_grad():
            written = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=self._max_new_tokens,
            )
        return self._tokenizer.decode(written[0, ids.size(1) :], skip_special_tokens=True)

    def rate(self, model: str, questions: Sequence[Question], answers: Sequence[str]) -> Ratings:
        """See [`Judge`]."""
        return rate_pairs(self.ask, questions, answers)


class FileJudge:
    """Ratings from a file, for example by people.

    Args:
        path (`str` or `os.PathLike`): JSON Lines, one rating per line: `model` (row name), `question_id`, `candidate`
            and `reference` (scores from 1 to 10), `candidate_first` (`true` if left out).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = Path(path).name
        self._rows: list[dict[str, Any]] = []
        for number, row in read_jsonl(path):
            try:
                rating = Rating(str(row["question_id"]), "", row["candidate"], row["reference"])
                first = row.get("candidate_first", True)
                if not isinstance(first, bool):
                    raise ValueError("candidate_first is not true or false")
                self._rows.append({"model": str(row["model"]), "rating": rating, "candidate_first": first})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"Line {number} of {self.name} is not a rating ({error}). Write model, question_id, candidate and "
                    "reference, scores from 1 to 10."
                ) from None

    def rate(self, model: str, questions: Sequence[Question], answers: Sequence[str]) -> Ratings:
        """The ratings of one model."""
        category = {question.question_id: question.category for question in questions}
        result = Ratings()
        for row in self._rows:
            rating = row["rating"]
            if row["model"] == model and rating.question_id in category:
                result.ratings.append(
                    Rating(
                        rating.question_id,
                        category[rating.question_id],
                        rating.candidate,
                        rating.reference,
                        row["candidate_first"],
                    )
                )
        rated = {rating.question_id for rating in result.ratings}
        result.failed = [f"{i}: not in {self.name}" for i in category if i not in rated]
        return result
