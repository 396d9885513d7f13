"""Questions to language models, what a model that answers them offers, and a file that keeps the answers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from hf_captionrl.utils.io import LineFile, json_digest, say


@dataclass(frozen=True)
class Prompt:
    """One question to a model."""

    stage: str  # name of the task, part of the hash
    image_id: str
    user: str  # the question
    system: str = ""  # the instruction before it
    examples: tuple[tuple[str, str], ...] = ()  # question and answer
    image: Any = field(default=None, compare=False, repr=False)  # a PIL image, or a list of them, for a vision model
    attempt: int = 0  # backends sample at later attempts

    @property
    def hash(self) -> str:
        """Hash of the text that the model reads, 16 hex digits; `image_id` represents the image."""
        return json_digest([self.stage, self.image_id, self.system, self.examples, self.user])

    @property
    def images(self) -> list[Any]:
        """The images in their order."""
        return self.image if isinstance(self.image, list) else [] if self.image is None else [self.image]

    def turns(self) -> list[dict[str, str]]:
        """The question as a chat: system, examples, user, without the image."""
        turns = [{"role": "system", "content": self.system}] if self.system else []
        for user, assistant in self.examples:
            turns += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return [*turns, {"role": "user", "content": self.user}]

    def parts(self, make_image: Callable[[Any], dict[str, Any]], *, image_first: bool) -> list[dict[str, Any]]:
        """The last turn as parts of text and image; several images come first, each after its label (`Image A:`)."""
        text, images = {"type": "text", "text": self.user}, [make_image(image) for image in self.images]
        if len(images) < 2:
            return [*images, text] if image_first else [text, *images]
        labels = [{"type": "text", "text": f"Image {label}: "} for label in image_labels(len(images))]
        return [part for pair in zip(labels, images, strict=True) for part in pair] + [text]


def image_labels(number: int) -> list[str]:
    """Names of the images of a question, `A`, `B`, ...; none is the beginning of another one."""
    if number > 26:
        raise ValueError(f"A question has {number} images. Use at most 26, the letters of their names.")
    return [chr(ord("A") + i) for i in range(number)]


class BackendError(RuntimeError):
    """A backend fails for every prompt: wrong key, model or address. The run stops, but no answer is lost."""


@dataclass(frozen=True)
class Failure:
    """A prompt without an answer."""

    reason: str  # "backend_failed" after all attempts (the next run asks again), or "backend_rejected" (it does not)
    detail: str  # the error in one sentence, never with a key


@dataclass(frozen=True)
class Truncated:
    """An answer that reached the length limit; `text` is incomplete."""

    text: str


Answer: TypeAlias = str | Truncated | Failure
Scores: TypeAlias = list[float] | Failure
"""Natural log-probabilities of some answers to one prompt, in their order."""


@runtime_checkable
class Backend(Protocol):
    """Answers prompts."""

    model: str  # name for the provenance of each answer
    # Commit or hash of the weights, and all settings that change answers; answers of others are not reused.
    revision: str
    is_multimodal: bool  # whether it answers prompts with images

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Answer]]:
        """Yield position and answer of each prompt as soon as the answer arrives, so that it can be stored."""
        ...


class AnswerScores:
    """Base class of backends that offer the probabilities of given answers."""

    def score_answers(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> Iterator[tuple[int, Scores]]:
        """Yield position and log-probabilities of the answers to each prompt, like `complete`.

        They are natural logarithms, summed over the tokens of an answer; the end token is not counted.
        """
        raise BackendError(
            f"{type(self).__name__} offers no probabilities of answers. Use a chat or language model of transformers that "
            "continues its prompt."
        )


class KeptAnswers(LineFile):
    """A backend whose answers are appended to a file of JSON lines when they arrive, so that no question is asked twice.

    A killed process loses only the answers that had not arrived. Equal questions of one call are asked once. A prompt whose
    backend failed is asked again by the next call. Answers of other models, revisions and questions in the file are not used.

    Args:
        max_requests (`int`, *optional*): Questions that this object may ask; a further one raises a [`BackendError`].
        is_kept (`Callable`): Whether an answer is kept; else the next call asks again.
        max_failures (`int`): A backend that fails so often in a row raises a [`BackendError`].
    """

    busy = "Wait until it has finished, or use another file."

    def __init__(
        self,
        backend: Any,
        path: str | os.PathLike[str],
        max_requests: int | None = None,
        *,
        is_kept: Callable[[Any], bool] = lambda answer: True,
        max_failures: int = 20,
    ) -> None:
        self.backend, self.max_requests, self.num_requests = backend, max_requests, 0
        self.max_failures, self._failures = max_failures, 0
        self._is_kept = is_kept
        self.model, self.revision, self.is_multimodal = backend.model, backend.revision, backend.is_multimodal
        self._answers: dict[str, Any] = {}  # by the hash of the question
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path)
        self._earlier, self.num_earlier = frozenset(self._answers), 0  # of earlier runs, and uses of them

    def _begin(self, data: bytes) -> None:
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            try:
                entry = json.loads(line)
                if _is_usable(answer := _read(entry["answer"])):
                    self._answers.setdefault(entry["key"], answer)
                else:
                    say(f"{self.path}, line {number}: {_UNUSABLE}, so its question is asked again.")
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ValueError(
                    f"{self.path}, line {number}, is not a kept answer: {line[:60]!r}. Remove that line; its question is "
                    "asked again."
                ) from None
        self.truncate(data.rfind(b"\n") + 1)

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Answer]]:
        return self._through(prompts, None, self.backend.complete)

    def score_answers(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> Iterator[tuple[int, Scores]]:
        return self._through(prompts, list(answers), lambda some: self.backend.score_answers(some, answers))

    def _through(self, prompts: Sequence[Prompt], answers: list[str] | None, ask: Any) -> Iterator[tuple[int, Any]]:
        keys = [json_digest([self.model, self.revision, p.hash, p.attempt, answers], size=16) for p in prompts]
        waiting: dict[str, list[int]] = {}
        for position, key in enumerate(keys):
            if key in self._answers:
                self.num_earlier += key in self._earlier
                yield position, self._answers[key]
            else:
                waiting.setdefault(key, []).append(position)
        firsts = [places[0] for places in waiting.values()]
        left = len(firsts) if self.max_requests is None else max(self.max_requests - self.num_requests, 0)
        for at, answer in ask([prompts[i] for i in firsts[:left]]) if firsts[:left] else ():
            self.num_requests += 1
            answer = answer if _is_usable(answer) else Failure("backend_failed", _UNUSABLE)
            key, prompt = keys[firsts[at]], prompts[firsts[at]]
            if self._is_kept(answer) and getattr(answer, "reason", "") != "backend_failed":
                entry = {"key": key, "stage": prompt.stage, "image_id": prompt.image_id, "model": self.model}
                line = json.dumps(entry | {"answer": _plain(answer)}) + "\n"
                self.append_bytes(line.encode("ascii"), flush=False)
                self._answers[key] = answer
            self._failures = self._failures + 1 if isinstance(answer, Failure) else 0
            if isinstance(answer, Failure) and self._failures >= self.max_failures:
                raise BackendError(
                    f"{self.backend!r} failed {self._failures} times in a row; the last reason: {answer.detail}"
                )
            for position in waiting[key]:
                yield position, answer
        if len(firsts) > left:
            raise BackendError(
                f"max_requests is {self.max_requests}; questions left: {len(firsts) - left}. The answers so far are in "
                f"{self.path.name!r}; raise max_requests to ask the others."
            )


_UNUSABLE = "the answer has half of a surrogate pair, or log-probabilities that are not finite"


def _is_usable(answer: Any) -> bool:
    """Whether files can hold the text of an answer, and its log-probabilities are numbers; of several, some may be -inf."""
    if isinstance(answer, list):
        return all(value < math.inf for value in answer) and any(value > -math.inf for value in answer)
    text = getattr(answer, "text", answer)
    return not isinstance(text, str) or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _plain(answer: Any) -> Any:
    if isinstance(answer, Failure):
        return {"rejected": answer.detail}
    return {"truncated": answer.text} if isinstance(answer, Truncated) else answer


def _read(answer: Any) -> Any:
    if isinstance(answer, str | list):
        return answer
    return Truncated(answer["truncated"]) if "truncated" in answer else Failure("backend_rejected", answer["rejected"])
