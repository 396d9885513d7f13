"""Contradictions between captions, and lengths and vocabulary by source: Table 9 and Figure 4 of No Detail Left Behind."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_captionrl.metrics.words import caption_statistics, length_statistics
from hf_captionrl.scenes.truth_checker import check
from hf_captionrl.scenes.world import CATEGORIES, Facts

# --- Contradictions between a HolisticCap and its BlendCap: by word lists in free text, exact on embedded scenes -----
# The word lists find different numbers or colours of the same noun, and pairs of kinds that exclude each other. They know
# neither synonyms nor grammar.


@dataclass(frozen=True)
class Conflict:
    """One contradiction."""

    attribute: str  # "count", "colour" or "kind"; on scenes, the name of the fact
    noun: str
    blend: str
    holistic: str

    def __str__(self) -> str:
        of = f" of {self.noun!r}" if self.noun else ""
        return f"{self.attribute}{of}: {self.blend!r} became {self.holistic!r}"


_NUMBERS = {word: str(n) for n, word in enumerate("one two three four five six seven eight nine ten".split(), start=1)}
_NUMBERS |= {number: number for number in _NUMBERS.values()}
_NUMBERS |= {"single": "1", "pair": "2", "couple": "2", "trio": "3"}
_COLOURS = {
    c: c for c in "black blue brown gray green orange pink purple red white yellow teal gold silver tan beige".split()
}
_COLOURS |= {"grey": "gray", "violet": "purple", "golden": "gold", "silvery": "silver"}
# Kinds (singular) that rarely occur together in an image if people name only one of them.
_EXCLUSIVE = [set(kinds.split()) for kinds in ("man woman", "boy girl", "dog cat", "indoor outdoor", "lake ocean")]
_EXCLUSIVE += [{"day", "night"}, {"left", "right"}]
# Words that can occur between a number or a colour and its noun.
_ADJECTIVES = frozenset(
    "small little tiny large big huge old young new tall short long round square wooden brick metal plastic glass stone "
    "sandy grassy striped spotted shiny bright dark light pale fluffy furry sideways upside down of and".split()
)
_IRREGULAR = {"people": "person", "men": "man", "women": "woman", "children": "child", "mice": "mouse", "buses": "bus"}
_BREAKS = frozenset("a an the on in at with to is are by for from near it its this that".split())


def _singular(noun: str) -> str:
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    if len(noun) > 3 and noun.endswith("s") and not noun.endswith(("ss", "us")):
        return noun[:-3] + "y" if noun.endswith("ies") and len(noun) > 4 else noun[:-1]
    return noun


def _named(text: str) -> set[str]:
    """Words of a caption in the singular, without negated ones ("no dogs", "without any dog")."""
    text = re.sub(r"\b(?:no|not|without)\s+(?:(?:a|an|any)\s+)?[a-z]+", " ", text.lower())
    return {_singular(word) for word in re.findall(r"[a-z]+", text)}


def _attached(text: str, listed: Mapping[str, str]) -> dict[str, set[str]]:
    """For each noun the listed words before it, with only adjectives in between."""
    words = re.findall(r"[a-z0-9]+(?:['’-][a-z]+)*|[.,;]", text.lower())
    found: dict[str, set[str]] = {}
    for at, word in enumerate(words):
        if word not in listed:
            continue
        for after in words[at + 1 : at + 6]:
            if after in _ADJECTIVES or after in _COLOURS or after in _NUMBERS:
                continue
            if after not in _BREAKS and after.isalpha():
                found.setdefault(_singular(after), set()).add(listed[word])
            break
    return found


def text_conflicts(blend: str, holistic: str) -> list[Conflict]:
    """Contradictions between two captions of free text.

    - *count*, *colour*: listed words before the same noun, none in common. "A white and brown plate" and "a white plate" agree.
      Articles are not numbers: a second dog does not contradict "a dog".
    - *kind*: each caption has exactly one, and not the same, of two words that exclude each other.
    """
    found: list[Conflict] = []
    for attribute, listed in (("count", _NUMBERS), ("colour", _COLOURS)):
        ours, theirs = _attached(blend, listed), _attached(holistic, listed)
        for noun in ours:
            if noun in theirs and not ours[noun] & theirs[noun]:
                said = (" ".join(sorted(values)) for values in (ours[noun], theirs[noun]))
                found.append(Conflict(attribute, noun, *said))
    first, second = _named(blend), _named(holistic)
    for group in _EXCLUSIVE:
        if len(first & group) == 1 and len(second & group) == 1 and first & group != second & group:
            found.append(Conflict("kind", "", *(first & group), *(second & group)))
    return found


def scene_conflicts(blend: str, holistic: str, facts: Facts | Mapping[str, Any]) -> list[Conflict]:
    """Facts of a scene that are right in the BlendCap and wrong in the HolisticCap: exact, by the truth checker.

    A wrong claim about a fact that the BlendCap does not mention is an error of the VisualCap, not a conflict.
    """
    right = {claim.attribute.removeprefix("category of "): claim for claim in check(blend, facts).right}
    found = []
    for claim in check(holistic, facts).wrong:
        said = right.get(claim.attribute)
        # "an animal" does not contradict "a pig": calling the duck a pig is an error of the VisualCap.
        if said is not None and claim.value not in CATEGORIES.get(said.value, ()):
            found.append(Conflict(claim.attribute, "", said.value or said.text, claim.value or claim.text))
    return found


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
