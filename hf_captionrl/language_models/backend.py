"""Protocol of backends, and the values that they return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from hf_captionrl.language_models.prompt import Prompt

__all__ = ["RETRY_TEMPERATURE", "Answer", "Backend", "BackendError", "Failure", "Truncated"]

RETRY_TEMPERATURE = 0.7
"""Temperature of later attempts, because greedy decoding repeats a bad answer."""


class BackendError(RuntimeError):
    """A backend fails for every prompt: wrong key, model or address. The run stops, but no answer is lost."""


@dataclass(frozen=True)
class Failure:
    """A prompt without an answer.

    Args:
        reason (`str`): `"backend_failed"` if all attempts failed (the next run asks again), or `"backend_rejected"` if the
            prompt was rejected (it is not asked again).
        detail (`str`): Description of the error in one sentence; never contains a key.
    """

    reason: str
    detail: str


@dataclass(frozen=True)
class Truncated:
    """An answer that reached the length limit; `text` is incomplete."""

    text: str


Answer: TypeAlias = str | Truncated | Failure
"""Result of a backend for one prompt."""


@runtime_checkable
class Backend(Protocol):
    """Answers prompts.

    Attributes:
        model (`str`): Name for the provenance of each answer.
        revision (`str`): Commit, hash of the weights or version, and all settings that change answers. Answers of other
            revisions are not reused.
        is_multimodal (`bool`): Whether it answers prompts with images.
    """

    model: str
    revision: str
    is_multimodal: bool

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Answer]]:
        """Yield position and answer of each prompt as soon as the answer arrives, so that it can be stored."""
        ...
