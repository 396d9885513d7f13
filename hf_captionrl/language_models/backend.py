"""What answers prompts: the one small protocol of every backend, and what may stand in place of a whole answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from hf_captionrl.language_models.prompt import Prompt

__all__ = ["RETRY_TEMPERATURE", "Answer", "Backend", "BackendError", "Failure", "Truncated"]

RETRY_TEMPERATURE = 0.7
"""Of sampling a bad answer anew, for greedy decoding would give it again."""


class BackendError(RuntimeError):
    """A backend that cannot answer at all: wrong key, no such model, nobody there. The run stops; nothing is lost."""


@dataclass(frozen=True)
class Failure:
    """What stands in place of an answer that did not come.

    Args:
        reason (`str`): `"backend_failed"` where nothing came back however often it was asked (asked again by the next
            run), or `"backend_rejected"` where the question itself was refused (not asked again).
        detail (`str`): What happened, in a sentence; never a key.
    """

    reason: str
    detail: str


@dataclass(frozen=True)
class Truncated:
    """An answer that stopped at the length limit: its end is missing.

    Args:
        text (`str`): What there is of it.
    """

    text: str


Answer: TypeAlias = str | Truncated | Failure
"""What a backend may give for a prompt."""


@runtime_checkable
class Backend(Protocol):
    """Something that answers prompts.

    Attributes:
        model (`str`): Name for the provenance of each answer.
        revision (`str`): Commit, hash of the weights, version or seed of it; settings that change answers are named here,
            too. Answers of another revision are not taken for this one's.
        sees_images (`bool`): Whether it answers prompts with images.
    """

    model: str
    revision: str
    sees_images: bool

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Answer]]:
        """Answer prompts, each as soon as its answer is there, so that what is paid for can be written down at once."""
        ...
