"""Results of the truth checker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["CheckResult", "Claim"]


class Claim(NamedTuple):
    """A claim of a caption about a scene.

    Attributes:
        attribute (`str`): Field of [`Facts`] that the claim is about, or another one that recalls no fact, such as
            `"category of kind"` or `"natural colour"`.
        value (`str`): What is claimed, in the world's own words.
        text (`str`): The words of the caption that claim it.
    """

    attribute: str
    value: str
    text: str


@dataclass(frozen=True)
class CheckResult:
    """Outcome of [`check`]. A claim that is made twice counts once.

    Args:
        right (`tuple[Claim, ...]`): True claims.
        wrong (`tuple[Claim, ...]`): False claims: the hallucinations.
        recalled (`tuple[str, ...]`): Names of the facts that a true claim states.
        missed (`tuple[str, ...]`): Names of the facts that no true claim states. Values of `UNMARKED` have no word and
            are never missed.
        unknown_words (`tuple[str, ...]`): Words without any meaning in this world.
    """

    right: tuple[Claim, ...]
    wrong: tuple[Claim, ...]
    recalled: tuple[str, ...]
    missed: tuple[str, ...]
    unknown_words: tuple[str, ...]
