"""The truth checker of captions, and positions of their claims."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, NamedTuple

from hf_captionrl.scenes.grammar import OPINIONS, values_by_phrase
from hf_captionrl.scenes.moving_world import MOTION_PHRASES, MotionReader, MovingFacts
from hf_captionrl.scenes.world import (
    BACKGROUNDS,
    CATEGORIES,
    COLOURS,
    EMOJI_KINDS,
    FACT_VALUES,
    NATURAL_COLOURS,
    OPPOSITES,
    POSITIONS,
    ROWS_TO_SECOND,
    SHAPE_KINDS,
    UNMARKED,
    Facts,
    names_of,
    plural,
)

# --- Results of the truth checker ------------------------------------------------------------------------------------


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


# --- The truth checker: right and wrong claims of a caption, and the facts that it recalls ---------------------------
# A caption is read from left to right as noun phrases, relations, positions and backgrounds. It need not follow the
# world's grammar: synonyms are known, words without a claim are skipped, and the two objects may be swapped
# ("a mushroom right of a pig" is true of every pig left of a mushroom).

_FILLER = frozenset(
    (
        "of in at to is are there it its this that picture image photo scene row part side standing sitting placed "
        "shown which very just"
    ).split()
) | frozenset(OPINIONS)

# Lexicon: phrase -> (type of token, value in the world's words), beside the words of `grammar`. Longer phrases win.
_SYNONYMS: dict[tuple[str, str], tuple[str, ...]] = {
    ("count", "1"): ("a", "an", "one", "1", "single"),
    ("count", "2"): ("two", "2", "a pair of", "a couple of", "pair of", "couple of", "both"),
    ("count", "3"): ("three", "3"),
    ("vague", ""): ("some", "several", "many", "the"),
    ("orientation", "upright"): ("standing upright",),
    ("orientation", "sideways"): ("on its side", "on their sides", "lying", "rotated"),
    ("orientation", "upside down"): ("flipped", "on its head", "on their heads"),
    ("position", "top"): ("in the top row", "on the top row"),
    ("position", "middle"): ("in the middle row", "in the centre", "at the center"),
    ("position", "bottom"): ("in the bottom row", "on the bottom row"),
    ("pattern", "striped"): ("with stripes",),
    ("pattern", "dotted"): ("with dots",),
    ("weather", "rain"): ("in rain", "rainy", "raining"),
    ("weather", "snow"): ("in snow", "snowy", "snowing"),
    ("time", "night"): ("by night", "during the night"),
    ("relation", "left of"): ("on the left of",),
    ("relation", "right of"): ("on the right of",),
    ("relation", "above"): ("on top of",),
    ("relation", "below"): ("beneath", "underneath"),
    ("with", ""): ("with", "and", "next to", "near", "beside", "together with"),
    ("alone", ""): ("alone", "on its own", "on their own", "by itself", "by themselves"),
}
_POSTPOSED = frozenset({"on its side", "on their sides", "on its head", "on their heads", "lying down"})
_OTHER_COLOURS = ("orange", "brown", "teal")


@functools.cache
def _lexicon(moving: bool = False) -> tuple[dict[tuple[str, ...], tuple[str, str]], int]:
    lexicon: dict[tuple[str, ...], tuple[str, str]] = {}
    for token, phrases in {**_SYNONYMS, **(MOTION_PHRASES if moving else {})}.items():
        for phrase in phrases:
            lexicon[tuple(phrase.split())] = token
    worded = {fact: FACT_VALUES[fact] for fact in "size orientation position pattern weather time relation".split()}
    for fact, values in {**worded, "colour": (*BACKGROUNDS, *COLOURS, *_OTHER_COLOURS)}.items():
        for phrase, value in values_by_phrase(values).items():
            lexicon[tuple(phrase.split())] = (fact, value)
    for kind in (*EMOJI_KINDS, *SHAPE_KINDS):
        for name in names_of(kind):
            lexicon[(name,)] = ("kind", kind)
            if plural(name) != name:
                lexicon[(plural(name),)] = ("kinds", kind)
    for category in CATEGORIES:
        lexicon[(category,)] = ("kind", category)
        lexicon[(plural(category),)] = ("kinds", category)
    return lexicon, max(map(len, lexicon))


def _read(caption: str, moving: bool = False) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Caption to (type, value, text) tokens by longest match, and the unknown words."""
    words = re.sub(r"[^a-z0-9]+", " ", caption.lower()).split()
    lexicon, longest = _lexicon(moving)
    tokens: list[tuple[str, str, str]] = []
    unknown: list[str] = []
    at = 0
    while at < len(words):
        for n in range(min(longest, len(words) - at), 0, -1):
            found = lexicon.get(tuple(words[at : at + n]))
            if found:
                tokens.append((*found, " ".join(words[at : at + n])))
                at += n
                break
        else:
            if words[at] in ("background", "backdrop"):
                tokens.append(("background", "", words[at]))
            elif words[at] in ("on", "against"):
                tokens.append(("on", "", words[at]))
            elif words[at] not in _FILLER:
                unknown.append(words[at])
            at += 1
    return tokens, unknown


def _names(noun: str, kind: str) -> bool:
    """Whether a noun is the kind, or its category."""
    return bool(kind) and (noun == kind or kind in CATEGORIES.get(noun, ()))


def _begins_with_second(tokens: list[tuple[str, str, str]], facts: Facts) -> bool:
    """Whether a category in first place that both objects have means the second one: the next noun names the main one.

    "An animal right of a pig" is true of a pig left of a duck. There is only one second object, so a plural never means it.
    """
    nouns = [at for at, (token, _, _) in enumerate(tokens) if token in ("kind", "kinds")][:2]
    if len(nouns) < 2 or tokens[nouns[1]][1] != facts.kind:
        return False
    token, noun, _ = tokens[nouns[0]]
    several = token == "kinds" or any(token == "count" and value != "1" for token, value, _ in tokens[: nouns[0]])
    return noun in CATEGORIES and not several and _names(noun, facts.kind) and _names(noun, facts.second)


class _Reader:
    """Takes tokens from left to right and collects claims; knows which of the two objects each noun phrase means.

    Modifiers are kept until the word that they belong to.
    """

    def __init__(self, facts: Facts, begins_with_second: bool) -> None:
        self.facts = facts
        self.begins_with_second = begins_with_second
        self.motion = MotionReader(facts, self.claim) if isinstance(facts, MovingFacts) else None
        self.right: dict[tuple[str, str], Claim] = {}
        self.wrong: dict[tuple[str, str], Claim] = {}
        self.speaks_of_main = False  # some noun phrase, perhaps with a wrong noun
        self.subject: str | None = None  # "main", "second" or "nothing": what the latest noun phrase means
        self.relation: tuple[str, str] | None = None  # (value, text) waiting for its second noun phrase
        self.modifiers: list[tuple[str, str, str]] = []  # numbers and adjectives before their noun
        self.colour: tuple[str, str] | None = None  # may turn out to be the colour of the background
        self.pattern: tuple[str, str] | None = None  # likewise
        self.on = False

    def claim(self, attribute: str, value: str, text: str, truth: bool) -> None:
        claim = Claim(attribute, value, text)
        (self.right if truth else self.wrong).setdefault((attribute, value), claim)

    def take(self, token: str, value: str, text: str) -> None:
        """Read one token."""
        if self.motion is not None and self.motion.read(token, value, text):
            self._close_colour()
        elif token == "colour":
            if self.colour is not None:
                self._close_colour()
            self.colour = (value, text)
        elif token == "background":
            self._close_pattern(f" {text}")
            self._close_colour(f" {text}")
            self.modifiers.clear()  # the article before the colour belonged to the background
        elif token == "on":
            self._close_colour()
            self.on = True
        elif token in ("kind", "kinds"):
            if self.pattern is not None:
                self.modifiers.append(("pattern", *self.pattern))
            if self.colour is not None and self.on:
                self._close_colour()
            elif self.colour is not None:
                self.modifiers.append(("colour", *self.colour))
            self._noun_phrase(value, text, token == "kinds")
            self.modifiers, self.pattern, self.colour, self.on = [], None, None, False
        elif token in ("count", "size", "orientation"):
            self._modifier(token, value, text)
        elif token == "pattern":
            self._close_colour()
            self.pattern = (value, text)
        else:
            self._close_colour()
            self.modifiers = []
            if token == "relation":
                self.relation = (value, text)
            elif token == "with":
                self.relation = None
            elif token == "position":
                self._position(value, text)
            elif token in ("weather", "time"):
                self.claim(token, value, text, value == getattr(self.facts, token))
            elif token == "alone":
                self.claim("alone", "", text, not self.facts.second)

    def close(self) -> None:
        """The caption ends."""
        self._close_pattern()
        self._close_colour()
        if self.motion is not None:
            self.motion.close()
        # The adjectives of a truncated caption count: "two small" is a claim about the main group.
        for attribute, value, text in self.modifiers:
            if attribute in ("size", "orientation") or (attribute == "count" and value != "1"):
                self._about(self.subject or "main", attribute, value, text, "")

    def _close_colour(self, noun: str = "") -> None:
        """A colour that stands alone, or before "background", is the background's."""
        if self.colour is not None:
            value, text = self.colour
            words = f"{'on ' if self.on else ''}{text}{noun}"
            self.claim("background", value, words, value == self.facts.background)
        self.colour, self.on = None, False

    def _close_pattern(self, noun: str = "") -> None:
        """A pattern that stands alone, or before "background", is the background's."""
        if self.pattern is not None:
            value, text = self.pattern
            self.claim("pattern", value, f"{text}{noun}", value == self.facts.pattern)
        self.pattern = None

    def _modifier(self, token: str, value: str, text: str) -> None:
        if self.colour is not None:
            self._close_colour()
        if token == "count" and self.on:
            return  # "on a blue ...": the article is not a number
        if token == "orientation" and text in _POSTPOSED and self.subject is not None and not self.modifiers:
            self._about("main" if self.subject == "nothing" else self.subject, token, value, text, "")
        else:
            self.modifiers.append((token, value, text))

    def _noun_phrase(self, kind: str, text: str, is_plural: bool) -> None:
        facts = self.facts
        first = self.subject is None
        meant = "main" if _names(kind, facts.kind) else "second" if _names(kind, facts.second) else "nothing"
        if first and self.begins_with_second:
            meant = "second"
        if not first and meant == "main" and self.subject in ("main", "nothing"):
            # "a pig left of a pig": the other object is never of the same kind, but "a pig left of an animal" may be true.
            meant = "second" if kind in CATEGORIES and _names(kind, facts.second) else "nothing"
        if meant == "nothing":
            self.claim("kind" if first else "second", kind, text, False)
        else:
            # A category is true but recalls no fact: it does not distinguish the pig from the duck.
            fact = "kind" if meant == "main" else "second"
            self.claim(f"category of {fact}" if kind in CATEGORIES else fact, kind, text, True)
        # A wrong noun in first place still refers to the main group, so that its number and size can be judged.
        about = "main" if meant == "nothing" and first else meant
        self.speaks_of_main |= about == "main"
        for attribute, value, words in self.modifiers:
            self._about(about, attribute, value, words, kind)
        counts = any(attribute == "count" for attribute, _, _ in self.modifiers)
        alone = about == "second" or (about == "main" and facts.count == 1)
        if is_plural and not counts and alone and plural(kind) != kind:
            self.claim("count", "several", text, False)
        if self.relation is not None:
            value, words = self.relation
            truth = facts.relation
            if meant == "main" and self.subject == "second":
                truth = OPPOSITES.get(facts.relation, "")
                self.claim("relation", OPPOSITES[value] if value == truth else value, words, value == truth)
            else:
                # Judged by the relation itself when the noun is wrong: one mistake is counted once.
                self.claim("relation", value, words, bool(truth) and value == truth)
            self.relation = None
        self.subject = meant

    def _about(self, about: str, attribute: str, value: str, text: str, kind: str) -> None:
        """A modifier of an object."""
        facts = self.facts
        if about == "nothing":
            return  # a thing that is not in the scene is one mistake, with or without modifiers
        if attribute == "colour":
            fact, own = ("colour", facts.kind) if about == "main" else ("second_colour", facts.second)
            if not getattr(facts, fact) and value == NATURAL_COLOURS.get(own):
                # True of every such thing, so it recalls no fact.
                self.claim(f"natural {fact}", value, text, True)
            else:
                self.claim(fact, value, text, value == getattr(facts, fact))
        elif attribute == "pattern":
            self.claim("pattern of a thing", f"{value} {kind}", text, False)  # only backgrounds have patterns
        elif about == "second":
            truth = {"count": "1", "size": facts.size, "orientation": "upright"}[attribute]
            if attribute == "count" and value == truth:
                return  # the article of the second object does not count as a claim
            self.claim(f"second {attribute}", value, text, value == truth)
        else:
            self.claim(attribute, value, text, value == str(getattr(facts, attribute)))

    def _position(self, value: str, text: str) -> None:
        truth = ""  # the thing moves through all rows
        if self.facts.position:
            row = POSITIONS.index(self.facts.position)
            if self.subject == "second" and not self.speaks_of_main:
                row += ROWS_TO_SECOND.get(self.facts.relation, 0)
            truth = POSITIONS[row]
        self.claim("position", value, text, value == truth)


def _as_facts(facts: Facts | Mapping[str, Any]) -> Facts:
    if isinstance(facts, Facts):
        return facts
    kind = MovingFacts if "motion" in facts else Facts
    return kind(**{f.name: facts[f.name] for f in fields(kind) if f.default is MISSING or f.name in facts})


def check(caption: str, facts: Facts | Mapping[str, Any]) -> CheckResult:
    """Judge a caption against the truth: exact for captions of the world's grammar; unknown words are skipped.

    Args:
        caption (`str`): Any text.
        facts ([`Facts`] or `Mapping`): The scene's facts, for instance a row's `facts` column; with those of a clip
            ([`MovingFacts`]) claims of motion are judged too, elsewhere they are ignored. A mapping may omit
            what is absent from a scene, such as `second` or `weather`.

    Returns:
        [`CheckResult`]: Claims right and wrong, facts recalled and missed. A caption without claims has neither right
        nor wrong ones.

    Raises:
        TypeError: If `caption` is not a string.

    Example:
        >>> facts = Facts("pig", 2, "small", "sideways", "top", "blue", "mushroom", "left of")
        >>> result = check("two large pigs on a blue background", facts)
        >>> [c.text for c in result.right], [c.text for c in result.wrong]
        (['pigs', 'two', 'on blue background'], ['large'])
        >>> result.recalled
        ('kind', 'count', 'background')
    """
    if not isinstance(caption, str):
        raise TypeError(f"caption is {type(caption).__name__}, not a string. Check one caption at a time.")
    facts = _as_facts(facts)
    tokens, unknown = _read(caption, isinstance(facts, MovingFacts))
    reader = _Reader(facts, _begins_with_second(tokens, facts))
    for token in tokens:
        reader.take(*token)
    reader.close()
    unknown += reader.motion.unknown if reader.motion is not None else []
    # The facts that a caption can recall or miss; every clip shows one thing.
    names = [name for name in facts.__dataclass_fields__ if getattr(facts, name) not in ("", UNMARKED.get(name))]
    if isinstance(facts, MovingFacts):
        names.remove("count")
    stated = {attribute for attribute, _ in reader.right}
    return CheckResult(
        right=tuple(reader.right.values()),
        wrong=tuple(reader.wrong.values()),
        recalled=tuple(n for n in names if n in stated),
        missed=tuple(n for n in names if n not in stated),
        unknown_words=tuple(unknown),
    )


# --- Positions of claims in a caption --------------------------------------------------------------------------------

_MOST_BETWEEN = 4
"""Largest number of words between two words of one claim, as in "on a very pale blue background"."""


class ClaimMark(NamedTuple):
    """A claim, its verdict and its position in the caption."""

    claim: Claim
    verdict: Literal["right", "wrong"]
    # First character of its words in the caption, and the one after the last; None if the caption does not contain them literally.
    start: int | None
    end: int | None


def _places(words: list[str], wanted: list[str]) -> list[tuple[int, int]]:
    """First and last word of each occurrence of the wanted words in this order; each earlier word is the nearest one."""
    found = []
    for last, word in enumerate(words):
        if word != wanted[-1]:
            continue
        at = last
        for earlier in reversed(wanted[:-1]):
            near = range(at - 1, max(at - 2 - _MOST_BETWEEN, -1), -1)
            at = next((place for place in near if words[place] == earlier), -1)
            if at < 0:
                break
        else:
            found.append((at, last))
    return found


def mark_caption(caption: str, facts: Facts | Mapping[str, Any]) -> list[ClaimMark]:
    """Judge a caption, and locate each of its claims.

    The same words can make two claims ("two pigs left of two ducks"). A claim is therefore searched only up to the word
    that completes it: the first word from which on every longer beginning of the caption makes the claim.
    """
    facts = _as_facts(facts)
    result = check(caption, facts)
    # The lower case of one letter may have two letters, so each of them keeps the position of the original.
    letters = [(small, place) for place, letter in enumerate(caption) for small in letter.lower()]
    found = list(re.finditer(r"[a-z0-9]+", "".join(small for small, _ in letters)))
    words = [word.group() for word in found]
    placed = [(letters[word.start()][1], letters[word.end() - 1][1] + 1) for word in found]
    # Claims of the caption up to and including each word.
    prefixes = [check(caption[:end], facts) for _, end in placed]
    marks = []
    verdicts: list[tuple[Literal["right", "wrong"], tuple[Claim, ...]]]
    verdicts = [("right", result.right), ("wrong", result.wrong)]
    for verdict, claims in verdicts:
        for claim in claims:
            complete = len(prefixes)
            while complete and claim in getattr(prefixes[complete - 1], verdict):
                complete -= 1
            # Word `complete` completes the claim: every beginning of the caption that includes it makes the claim.
            places = _places(words, claim.text.split())
            before = [place for place in places if place[1] <= complete]
            place = before[-1] if before else places[0] if places else None
            start, end = (None, None) if place is None else (placed[place[0]][0], placed[place[1]][1])
            marks.append(ClaimMark(claim, verdict, start, end))
    return sorted(marks, key=lambda mark: len(caption) if mark.start is None else mark.start)
