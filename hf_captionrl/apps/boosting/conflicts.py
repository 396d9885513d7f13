"""Contradictions between captions of a scene, and lengths and vocabulary by source: Table 9 and Figure 4 of No Detail Left Behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_captionrl.metrics.words import caption_statistics, length_statistics
from hf_captionrl.scenes.truth_checker import check
from hf_captionrl.scenes.world import CATEGORIES, Facts


@dataclass(frozen=True)
class Conflict:
    """One contradiction between a HolisticCap and its BlendCap."""

    attribute: str  # the name of the fact
    blend: str
    holistic: str

    def __str__(self) -> str:
        return f"{self.attribute}: {self.blend!r} became {self.holistic!r}"


def scene_conflicts(blend: str, holistic: str, facts: Facts | Mapping[str, Any]) -> list[Conflict]:
    """Facts of a scene that are right in the BlendCap and wrong in the HolisticCap: exact, by the truth checker.

    A wrong claim about a fact that the BlendCap does not mention is an error of the VisualCap, not a conflict.
    """
    right = {claim.attribute.removeprefix("category of "): claim for claim in check(blend, facts).right}
    conflicts = []
    for wrong in check(holistic, facts).wrong:
        before = right.get(wrong.attribute)
        # "an animal" does not contradict "a pig": calling the duck a pig is an error of the VisualCap.
        if before is not None and wrong.value not in CATEGORIES.get(before.value, ()):
            conflicts.append(Conflict(wrong.attribute, before.value or before.text, wrong.value or wrong.text))
    return conflicts


def source_statistics(
    sources: Mapping[str, Sequence[str]], *, count_tokens: Callable[[list[str]], Sequence[int]] | None = None
) -> dict[str, dict[str, Any]]:
    """Lengths and vocabulary of caption sources, by source; `count_tokens` is optional.

    Reference: Gaur et al. 2024 (No Detail Left Behind), Table 9: mean and deviation of words and of CLIP tokens. Here also
    `captions` (their number), `max_words`, and `vocabulary`, the number of distinct words.
    """
    result: dict[str, dict[str, Any]] = {}
    for name, captions in sources.items():
        lengths = length_statistics(captions, count_tokens=count_tokens)
        numbers = {key: value for key, value in lengths.items() if key not in ("words", "tokens", "signature")}
        # `lexical_diversity` is in thousands.
        vocabulary = round(1000 * caption_statistics(captions)["lexical_diversity"])
        result[name] = {"captions": len(captions), **numbers, "vocabulary": vocabulary}
    return result
