"""The open-vocabulary reader of claims: free text about a scene, as published captioners and chat models write it.

It reads phrases by rules, without a tagger: a noun phrase ends with its head, adjectives belong to the noun that they stand
with, and every noun of a thing is a claim. It makes mistakes; docs/scenes.md has its precision and recall.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hf_captionrl.scenes.truth_checker import CheckResult, Claim
from hf_captionrl.scenes.world import (
    CATEGORIES,
    EMOJI_KINDS,
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

# --- Words -----------------------------------------------------------------------------------------------------------

_PAINTED = ("red", "blue", "green", "golden", "purple")
_ORDINALS = {"second": 2, "third": 3, "fourth": 4, "another": 2}
_SHOWING = frozenset("show depict feature present portray contain display showcase include capture illustrate".split())
_ABSTRACT_ENDING = re.compile(r".{3,}(?:ness|tion|sion|ity|ism|ance|ence|hood|ship)s?|.{5,}ments?")
_ON = r"(?:(?:at|in|near|along|on|toward|towards|to) (?:the )?|the )(?:very |exact |far )?"
_PART = r"(?: (?:row|part|half|edge|third|portion|area|section|left|right|end|corner|side|hand))*"
_SIDES = r"(?:on|onto|to) (?:its|their|his|her|the|one) sides?"


class _Token(NamedTuple):
    kind: str
    value: str
    start: int
    end: int


class _Noun(NamedTuple):
    kinds: frozenset[str]
    name: str  # the kind, the category or the word itself
    is_plural: bool
    exact: bool  # whether it names one kind


@functools.cache
def _words() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@functools.cache
def _pattern() -> re.Pattern[str]:
    """Phrases, as groups `p0`, `p1`, ..., and words."""
    groups = []
    for i, (kind, _, pattern) in enumerate(_words()["phrases"]):
        pattern = "".join(line.strip() for line in pattern.splitlines())
        for name, part in (("{ON}", _ON), ("{PART}", _PART), ("{SIDES}", _SIDES)):
            pattern = pattern.replace(name, part)
        groups.append(rf"(?P<p{i}>{pattern})" + ("" if kind in ("stop", "comma") else r"(?![\w'-])"))
    return re.compile("|".join([*groups, r"(?P<word>[a-z0-9]+(?:[-']{1,2}[a-z0-9]+)*)"]))


def _plural(name: str) -> str:
    irregular = _words()["plurals"]
    if name in irregular or plural(name) != name + "s":
        return str(irregular.get(name, plural(name)))
    if re.search(r"(?:s|x|ch|sh)$", name):
        return name + "es"
    return re.sub(r"(?<=[^aeiou])y$", "ie", name) + "s"


@functools.cache
def _nouns() -> dict[str, _Noun]:
    """Names of kinds and of groups of kinds, the exact ones first."""
    names = [(kind, name, True) for kind in (*EMOJI_KINDS, *SHAPE_KINDS) for name in names_of(kind)]
    names += [(kind, name, True) for kind, more in _words()["names"].items() for name in more.split(", ")]
    names += [(kinds, name, False) for more, kinds in _words()["hypernyms"].items() for name in more.split(", ")]
    names += [(name, name, False) for name in CATEGORIES if name != "thing"]
    anything = " ".join((*EMOJI_KINDS, *SHAPE_KINDS))
    names += [(anything, name, False) for name in "thing object item element subject figure".split()]
    nouns: dict[str, _Noun] = {}
    for covered, name, exact in names:
        kinds = frozenset(CATEGORIES.get(covered, covered.split()))
        for text, is_plural in ((_plural(name), _plural(name) != name), (name, False)):
            noun = nouns.setdefault(text, _Noun(kinds, covered if exact else name, is_plural, exact))
            nouns.setdefault(text.replace("-", " "), noun)
    return nouns


@functools.cache
def _classes() -> dict[str, tuple[str, str]]:
    """Class and value of each word that is not the name of a thing."""
    words = _words()
    classes = {
        word: (kind, word) for kind, said in words["classes"].items() for word in said.split() if kind != "action"
    }
    classes |= {word: ("action", word) for word in words["classes"]["participle"].split()}
    for kind in ("background", "picture", "measure", "general", "part", "abstract"):
        for word in words["classes"][kind].split():
            classes.setdefault(_plural(word), (kind, _plural(word)))
    for verb in words["classes"]["action"].split():
        stem, last = verb.removesuffix("e"), verb[-1]
        double = verb + last if re.fullmatch(r".*[^aeiou][aeiou][bdgmnpt]", verb) else stem
        for form in (_plural(verb), f"{double}ing", f"{stem}ing", f"{double}ed", f"{stem}ed"):
            classes.setdefault(form, ("action", form))
        classes.setdefault(verb, ("base", verb))
    classes |= {word: ("ordinal", word) for word in _ORDINALS}
    for kind, table in (("colour", "shades"), ("size", "sizes"), ("number", "numbers")):
        classes |= {word: (kind, value) for value, said in words[table].items() for word in (value, *said.split())}
    return classes


# --- The reader ------------------------------------------------------------------------------------------------------

_NOUN_LIKE = frozenset("noun word background picture hue measure general part abstract".split())
_PHRASE_WORDS = _NOUN_LIKE | frozenset("det number ordinal size colour adjective".split())
_MODIFIERS = frozenset("colour size orientation pattern adjective word noun part".split())
_Sides = tuple[str, ...]
"""What words mean: `("main",)`, `("second",)`, both, `("background",)`, or `()`, a thing that the scene does not show."""
_BACKGROUND: _Sides = ("background",)


class _Relation(NamedTuple):
    value: str
    start: int
    negated: int | None  # where a negation of it begins
    subject: _Sides | None  # None: said before its subject, "below it there is a cake"
    object: _Sides | None = None
    end: int = 0


def _tokens(text: str) -> list[_Token]:
    tokens = []
    for match in _pattern().finditer(text):
        word, (start, end) = match.group(), match.span()
        if match.lastgroup != "word":
            kind, value, _ = _words()["phrases"][int(str(match.lastgroup)[1:])]
            value = value or word
        elif word in _nouns():
            kind, value = "noun", word
        else:
            kind, value = "adjective" if word.endswith("'s") else "skip" if word.endswith("ly") else "word", word
            last = _classes().get(word.rpartition("-")[2], ("", ""))  # "pumpkin-orange"
            kind, value = _classes().get(word, last if last[0] == "colour" else (kind, value))
        tokens.append(_Token(kind, value, start, end))
    return [*tokens, *[_Token("stop", "", len(text), len(text))] * 3]  # so that there is always a next one


def _is_plural(token: _Token) -> bool:
    if token.kind == "noun":
        return _nouns()[token.value].is_plural
    return token.kind not in ("word", "measure") and token.value.endswith("s")


class FreeReader:
    """Reads a caption from left to right; `right`, `wrong` and `undecided` are its claims by `(attribute, value)`."""

    def __init__(self, caption: str, facts: Facts) -> None:
        self.caption, self.facts = caption, facts
        self.right: dict[tuple[str, str], Claim] = {}
        self.wrong: dict[tuple[str, str], Claim] = {}
        self.undecided: dict[tuple[str, str], Claim] = {}
        self.unknown: list[str] = []
        self.kinds = {side: kind for side, kind in (("main", facts.kind), ("second", facts.second)) if kind}
        self.mentions: list[tuple[_Sides, bool]] = []  # what was spoken of, and whether as a plural
        self.subject: _Sides | None = None  # what predicates are about
        self.last: _Sides | None = None  # the latest noun phrase
        self.phrase: list[_Token] = []  # the noun phrase that is being read
        self.role = ""  # how it is joined to what came before: "", "object", or a preposition
        self.relation: _Relation | None = None
        self.position: _Token | None = None  # said before its subject
        self.negation: int | None = None  # where it begins
        self.behind = False  # the latest noun phrase is the background
        self.copula = self.begun = False  # after "is"; after the first noun phrase of a clause
        self.plain_of = -1  # where "of" begins a place, "at the top of a hill"
        self.scenery: int | None = None  # start of "the mood", "the picture", which may begin a flourish
        # Lower case letter by letter, because that of one letter may have two.
        text = "".join(small if len(small := letter.lower()) == 1 else letter for letter in caption).replace("’", "'")
        self.tokens = _tokens(text)
        named = [_nouns()[token.value].kinds for token in self.tokens if token.kind == "noun"]
        self.names_both = bool(facts.second) and all(any(k in kinds for kinds in named) for k in self.kinds.values())
        flourish: int | None = None
        for at, token in enumerate(self.tokens[:-2]):
            if flourish is None:
                flourish = self._take(at, token)
            elif self._ends_flourish(at):
                self._claim("other", "", flourish, token.start, None)
                flourish = self._take(at, token)
            elif token.kind in ("weather", "time"):
                self._setting(token)

    def _ends_flourish(self, at: int) -> bool:
        token, following = self.tokens[at : at + 2]
        if token.kind == "conj":
            return token.value in ("but", "while") or following.value in ("the", "it", "they", "there")
        return token.kind == "stop" or (token.kind == "comma" and following.kind in ("conj", "rel"))

    def _claim(self, attribute: str, value: str, start: int, end: int, truth: bool | None) -> None:
        """Record a claim; a negation before it negates it."""
        text = self.caption[start:end]
        if self.negation is not None and truth is not None and attribute != "object":
            attribute, truth, text = f"no {attribute}", not truth, self.caption[self.negation : end]
        claims = self.undecided if truth is None else self.right if truth else self.wrong
        claims.setdefault((attribute, value or text.lower()), Claim(attribute, value, text.strip()))

    # --- Tokens

    def _take(self, at: int, token: _Token) -> int | None:
        """Read one token; the place where a flourish begins."""
        kind, value = token.kind, token.value
        following = self.tokens[at + 1]
        before = self.tokens[at - 1].kind if at else "stop"
        has_noun = any(t.kind in _NOUN_LIKE for t in self.phrase)
        after_plural = has_noun and _is_plural(self.phrase[-1])
        if kind == "base":
            to = self.tokens[at - 1].value == "to"
            kind = "word" if self.phrase and not after_plural and before != "modal" and not to else "action"
        elif kind == "word":
            verb_form = value.endswith(("ing", "ed")) and value not in _words()["noun_in_ing"]
            single = self.phrase and self.phrase[0].kind == "det" and self.phrase[-1].kind == "noun"  # "a dog barks"
            has_object = value.endswith("s") and (single or following.kind in ("det", "pron", "number"))
            after_setting = not self.phrase and before in ("weather", "time")
            verb = (verb_form and (has_noun or not self.phrase)) or (has_noun and has_object)
            kind = "action" if verb or before == "modal" or after_plural or after_setting else kind
        inside = bool(self.phrase) and not has_noun
        if kind == "action" and inside:
            kind = "adjective" if following.kind in _PHRASE_WORDS else "word"  # "a sleeping dog", "a park"
        elif value == "look" and self.phrase and self.phrase[0].value in ("a", "an", "the"):
            kind = "abstract"
        elif value == "leaves" and has_noun:
            kind = "action"
        before_noun = kind in ("pattern", "orientation") and following.kind in _NOUN_LIKE | {"colour", "size"}
        if kind in _PHRASE_WORDS or before_noun:
            if kind == "det" and has_noun:
                self._end_phrase(at)
            self.phrase.append(token._replace(kind=kind))
            return None
        guessed = bool(self.phrase) and not any(t.kind in _NOUN_LIKE - {"word"} for t in self.phrase)
        if kind == "skip" and guessed and following.kind in _PHRASE_WORDS - {"det"}:
            return None
        listing = kind in ("comma", "conj") and before in ("colour", "pattern", "size") and not self.copula
        if inside and (listing or kind in ("skip", "orientation", "pattern", "weather", "time")):
            if kind in ("orientation", "pattern"):
                self.phrase.append(token)
            elif kind in ("weather", "time"):
                self._setting(token)
            return None
        if value == "of" and self.phrase and self.phrase[-1].kind == "measure":
            return None  # "three slices of cake" are about cake
        self._end_phrase(at)
        scenery, self.scenery = self.scenery, None
        predicate = kind in ("be", "action", "place", "skip") and before != "comma" and value not in _SHOWING
        if kind == "flourish" or (scenery is not None and predicate):
            return token.start if scenery is None else scenery
        self.copula = kind == "be" or (self.copula and kind in ("skip", "conj", "neg", "pattern", "orientation"))
        if kind == "stop":
            self.relation = self.position = self.negation = None
            self.begun, self.role = False, ""
        elif kind in ("comma", "conj"):
            if value not in ("or", "nor"):
                self.negation = None
            self.role = self.role if kind == "conj" and self.role == "object" else ""
        elif kind == "neg":
            self.negation = token.start
            if value == "nobody":
                self._absence("person", token.start, token.end, True)
                self.negation = None
        elif kind == "pron":
            self._pronoun(token)
        elif kind == "rel":
            self.subject = self.last
        elif kind == "prep":
            if value == "on" and self.begun:
                self._relate(token, "above", before)
            elif value != "of" and (self.relation is None or self.relation.value != "undecided"):
                self.relation = None
            self.role = "" if at == self.plain_of else value
        elif kind == "relation":
            self._relate(token, value, before)
        elif kind == "position":
            self._place(at, token)
        elif kind in ("orientation", "pattern", "posture"):
            sides = self.last if before in _PHRASE_WORDS or before == "rel" else self.subject
            of_thing = kind != "pattern" or (self.tokens[at - 1].value == "with" and not self.behind)
            self._about(kind, value, sides if of_thing else _BACKGROUND, token)
        elif kind in ("weather", "time", "alone", "row"):
            self._setting(token)
            self.relation = None
        elif kind == "action":
            self.negation = None
            if self.subject:
                self._claim("attribute", "", token.start, token.end, None)
            self.relation = _Relation("undecided", token.start, None, self.subject) if self.begun else None
            self.role = "object"
        elif kind in ("place", "show"):
            self.role = ""
        return None

    def _setting(self, token: _Token) -> None:
        kind, value, facts = token.kind, token.value, self.facts
        truth: bool | None
        if kind == "time":
            truth = (facts.time == "night") == (value == "night")
        elif kind == "row":
            truth = facts.count > 1 or facts.relation in ("left of", "right of")
        elif kind == "alone":
            truth = not facts.second and (facts.count == 1 or bool(self.mentions and self.mentions[-1][1]))
        elif value == "sun":
            truth = False if facts.weather or facts.time else None
        else:
            value = value if value in ("rain", "snow", "any") else ""
            truth = bool(facts.weather) if value == "any" else facts.weather == value
        self._claim(kind, value if kind in ("weather", "time") else "", token.start, token.end, truth)

    def _pronoun(self, token: _Token) -> None:
        several = token.value in ("they", "them", "themselves")
        agreeing = [sides for sides, is_plural in self.mentions if is_plural == several]
        if self.relation is None and self.subject in agreeing:
            agreeing.append(self.subject)
        others = [sides for sides in agreeing if self.relation is None or sides != self.relation.subject]
        sides = (others or agreeing or [self.subject or ()])[-1]  # "the stallion beneath it": not the stallion
        if not self._join(sides, token.end):
            self.subject = sides
        self.last, self.begun = sides, True

    # --- Places

    def _relate(self, token: _Token, value: str, before: str) -> None:
        words = self.caption[token.start : token.end].lower()
        subject = self.subject if before in ("comma", "conj", "stop") or not self.last else self.last
        relation = _Relation(value, token.start, self.negation, subject if self.begun else None)
        self.negation = None
        if value in ("left of", "right of") and not words.endswith("of"):
            if self.relation is not None and self.relation.subject is None:  # "beside them on the right there is"
                self.relation = self.relation._replace(value=value)
                return
            if re.search(r"\b(?:its|their)\b", words):
                several = "their" in words
                owners = [m for m, plural in self.mentions if plural == several and not (self.begun and m == subject)]
                relation = relation._replace(object=owners[-1] if owners else (), end=token.end)
            elif subject and len(subject) == 1 and self.names_both:
                other = ("second",) if subject == ("main",) else ("main",)
                relation = relation._replace(object=other, end=token.end)
            elif subject:
                self._claim("column", "", token.start, token.end, None)
                return
            if relation.subject is not None and relation.object is not None:
                self._judge(relation)
                return
        self.relation, self.role = relation, "relation"

    def _join(self, sides: _Sides, end: int) -> bool:
        """Give a noun phrase to the relation that waits for it; whether it is its object."""
        relation = self.relation
        if relation is None or sides == _BACKGROUND:
            return False
        if relation.object is not None:  # the subject comes last
            self._judge(relation._replace(subject=sides))
            self.relation = None
            return False
        if relation.subject is None:
            self.relation = relation._replace(object=sides, end=end)
        elif sides == relation.subject:  # "a bell, and right of it a cake"
            self.relation = relation._replace(subject=None, object=sides, end=end)
        else:
            self._judge(relation._replace(object=sides, end=end))
            self.relation = relation if not sides else None  # "left of a lamp and a dog"
        return True

    def _judge(self, relation: _Relation) -> None:
        subject, other = relation.subject, relation.object
        if not subject or not other or {*subject, *other} != {"main", "second"} or len(subject) + len(other) > 2:
            return
        kept, self.negation = self.negation, relation.negated
        span = (relation.start, relation.end)
        truth, value = self.facts.relation, relation.value
        if value == "undecided":
            self._claim("interaction", "", *span, None)
        elif value in ("beside", "near"):
            self._claim("side", value, *span, value == "near" or truth in ("left of", "right of"))
        elif subject == ("second",):
            truth = OPPOSITES[truth]
            self._claim("relation", OPPOSITES[value] if value == truth else value, *span, value == truth)
        else:
            self._claim("relation", value, *span, value == truth)
        self.negation = kept

    def _place(self, at: int, token: _Token) -> None:
        """The row of the subject; "at the top of a hill" does not name a row of the picture."""
        after = self.tokens[at + 1 : at + 6]
        if after[0].value == "of":
            of = next((t.kind for t in after[1:] if t.kind in _NOUN_LIKE), "picture")
            if of not in ("picture", "background", "general", "abstract"):
                self.plain_of = at + 1
                return
        if not self.begun:
            self.position = token
            return
        self._row(token, self.subject if self.subject is not None else self.last)

    def _row(self, token: _Token, sides: _Sides | None) -> None:
        if not sides or sides == _BACKGROUND:
            return
        row = POSITIONS.index(self.facts.position)
        rows = {"main": row, "second": row + ROWS_TO_SECOND.get(self.facts.relation, 0)}
        truth = all(POSITIONS[rows[side]] == token.value for side in sides)
        self._claim("position", token.value, token.start, token.end, truth)

    # --- Noun phrases

    def _about(self, kind: str, value: str, sides: _Sides | None, token: _Token) -> None:
        """An adjective, judged of what it belongs to."""
        facts, span = self.facts, (token.start, token.end)
        if sides == _BACKGROUND or (sides is None and kind == "colour"):
            if kind == "colour":
                value = "yellow" if value == "golden" else value
                self._claim("background", value, *span, value == facts.background)
            elif kind == "pattern":
                self._claim("pattern", value, *span, value == (facts.pattern or "plain"))
            return
        if not sides:
            return
        truth: bool | None = None
        attribute = "attribute"
        if kind in ("size", "orientation", "colour"):
            truths = [self._is(kind, value, side) for side in sides]
            truth = None if None in truths else all(truths)
            attribute = kind if "main" in sides else f"second_{kind}" if kind == "colour" else f"second {kind}"
            if kind == "colour" and truth and not (facts.colour if "main" in sides else facts.second_colour):
                attribute = f"natural {attribute}"
        elif kind in ("word", "adjective"):
            self.unknown.append(value)
        self._claim(attribute, value if truth is not None else "", *span, truth)

    def _is(self, kind: str, value: str, side: str) -> bool | None:
        facts = self.facts
        if kind == "size":
            return value == facts.size
        if kind == "orientation":
            return value == (facts.orientation if side == "main" else "upright")
        painted = facts.colour if side == "main" else facts.second_colour
        natural = NATURAL_COLOURS.get(self.kinds[side])
        if painted or natural:
            return value == (painted or natural)
        return False if value in _PAINTED else None  # the facts do not say which brown a dog has

    def _end_phrase(self, at: int) -> None:
        """Read the noun phrase that ends before a token."""
        if not self.phrase:
            return
        (phrase, self.phrase), (role, self.role) = (self.phrase, []), (self.role, "")
        bare = phrase[0].kind != "det"
        like = _NOUN_LIKE - {"word"} if self.copula and bare else _NOUN_LIKE
        heads = [i for i, t in enumerate(phrase) if t.kind in like]
        if heads and phrase[-1].kind == "colour" and phrase[heads[-1]].kind == "word":
            phrase, heads = phrase[-1:], []  # "in grass green"
        if not heads:
            self._predicate(phrase, at, role)
            return
        head = heads[-1]
        modifiers = [t for i, t in enumerate(phrase) if i != head and t.kind != "det"]
        kind, end = phrase[head].kind, phrase[head].end
        start = next(t.start for t in phrase if t.kind != "det")
        self.behind = kind == "background"
        if kind == "background":
            for t in modifiers:
                self._about(t.kind, t.value, _BACKGROUND, t)
            if not role:
                self.subject = _BACKGROUND
                self.begun = True
        elif kind == "hue":
            ahead = self.tokens[at : at + 8]
            stop = next((i for i, t in enumerate(ahead) if t.kind in ("stop", "comma", "rel")), len(ahead))
            sides = _BACKGROUND if any(t.kind == "background" for t in ahead[:stop]) else self.subject
            for t in modifiers:
                if t.kind == "colour":
                    self._about("colour", t.value, sides, t)
        elif kind in ("picture", "abstract", "measure", "general"):
            begins = kind in ("picture", "abstract") and role in ("", "relation") and not self.begun
            self.scenery = phrase[0].start if begins else None
        elif kind == "part":
            if self.subject and self.negation is None:
                self._about("part", "", self.subject, _Token("part", "", start, end))
        else:
            self._thing(phrase, head, modifiers, start, end, role, at)
        if self.tokens[at].value not in ("or", "nor"):
            self.negation = None

    def _predicate(self, phrase: list[_Token], at: int, role: str) -> None:
        """Adjectives without a noun: "is red", "two of them", "with blue stripes"."""
        pattern = any(t.kind == "pattern" for t in phrase)
        subject = _BACKGROUND if pattern and self.behind else self.subject
        for token in phrase:
            if token.kind == "number":
                partial = self.tokens[at].value == "of" and self.tokens[at + 2].kind not in ("stop", "comma", "conj")
                if self.subject and not partial and not (token.value == "1" and bool(role)):
                    self._count(token.value, self.subject, token.start, token.end)
            elif token.kind != "det" and not (pattern and role and token.kind in ("colour", "size")):
                self._about(token.kind, token.value, subject, token)
        self.role = role if all(t.kind == "det" for t in phrase) else ""

    def _count(self, value: str, sides: _Sides, start: int, end: int) -> None:
        count = sum(self.facts.count if side == "main" else 1 for side in sides if side != "background")
        truth = count > 2 if value == "some" else count > 1 if value == "plural" else count == int(value)
        exact = value.isdigit() and len(sides) == 1
        attribute = "plural" if not exact else "count" if sides == ("main",) else "second count"
        self._claim(attribute, value, start, end, truth)

    def _absence(self, name: str, start: int, end: int, truth: bool) -> None:
        kept, start, self.negation = self.negation, start if self.negation is None else self.negation, None
        self._claim("absence", name, start, end, truth)
        self.negation = kept

    def _thing(
        self, phrase: list[_Token], head: int, modifiers: list[_Token], start: int, end: int, role: str, at: int
    ) -> None:
        token = phrase[head]
        noun, first = _nouns().get(token.value), head
        for n in (3, 2):  # "palm tree", "jack o lantern"
            name = " ".join(t.value for t in phrase[max(head + 1 - n, 0) : head + 1])
            if name in _nouns() and head + 1 >= n:
                noun, first = _nouns()[name], head + 1 - n
                modifiers = [t for t in modifiers if t not in phrase[first:head]]
                break
        kinds = noun.kinds if noun is not None else frozenset()
        is_plural = noun.is_plural if noun is not None else bool(re.search(r"[^s]s$", token.value))
        sides: _Sides = tuple(side for side, kind in self.kinds.items() if kind in kinds)
        if self.negation is not None:
            if noun is None and len(phrase) == 1 and self.caption[self.negation :].lower().startswith("not"):
                return  # "has not risen"
            said = [t for t in modifiers if t.kind in ("colour", "size", "orientation")]
            there = [side for side in sides if all(self._is(t.kind, t.value, side) is not False for t in said)]
            if "other" in self.caption[self.negation : end].lower().split():
                mentioned = {side for both, _ in self.mentions for side in both}
                there = [side for side in sides if side not in mentioned]
            self._absence(token.value, start, end, not there)
            return
        number = next((t for t in modifiers if t.kind == "number"), None)
        ordinal = next((t for t in phrase if t.kind == "ordinal"), None)
        several = is_plural or (number is not None and number.value != "1")
        if len(sides) == 2:
            total = self.facts.count + 1
            if phrase[0].value not in ("both", "all") and (number is None or number.value != str(total)):
                ahead = next((t for t in self.tokens[at:] if t.kind == "noun"), None)
                next_main = ahead is not None and _nouns()[ahead.value].kinds == {self.facts.kind}
                sides = ("second",) if next_main and not several else ("main",)
        indefinite = phrase[0].value in ("a", "an")
        same = self.relation is not None and self.relation.subject == sides and self.relation.object is None
        if ordinal is not None and sides == ("main",) and any("main" in m for m, _ in self.mentions):
            self._claim("count", ordinal.value, phrase[0].start, end, self.facts.count >= _ORDINALS[ordinal.value])
        elif sides and same and indefinite:
            sides = ()  # "an umbrella on top of a striped umbrella"
        if not sides:
            self._absent(token, start, end, role, noun, at)
        else:
            new = not any(set(sides) <= set(m) for m, _ in self.mentions)
            side = "kind" if "main" in sides else "second"
            # A category does not name the kind, so the name after it is another claim.
            named = noun is not None and noun.exact and (side, noun.name) not in self.right
            anything = noun is not None and len(noun.kinds) > len(EMOJI_KINDS)  # "both objects"
            if noun is not None and (new or named) and not anything:
                self._claim(side if noun.exact else f"category of {side}", noun.name, phrase[first].start, end, True)
            for t in modifiers:
                if t.kind in _MODIFIERS:
                    self._about("word" if t.kind in ("noun", "part") else t.kind, t.value, sides, t)
            if number is not None:
                self._count(number.value, sides, number.start, number.end)
            elif is_plural and new and not anything:
                self._count("plural", sides, token.start, end)
        if self.position is not None:
            self._row(self.position, sides)
            self.position = None
        is_object = self._join(sides, end)
        self.mentions.append((sides, several))
        self.last = sides
        if not is_object and role in ("", "with", "of") and (role == "" or self.subject is None):
            self.subject = sides
        self.begun = True

    def _absent(self, token: _Token, start: int, end: int, role: str, noun: _Noun | None, at: int) -> None:
        """A thing that is not there is one wrong claim, with all that is said of it; "of coffee" belongs to the cup."""
        if noun is None:
            self.unknown.append(token.value)
            several = token.value.endswith("s") or token.value in _words()["plurals"].values()
            shown = self.tokens[max(at - 2, 0)].kind in ("det", "show")
            if start == token.start > 0 and not several and not shown and not role:
                return  # an adjective or verb rather than a thing
            if _ABSTRACT_ENDING.fullmatch(token.value):
                return
        if role == "of" and self.last is not None and noun is None:
            if self.last:
                self._claim("attribute", "", start, end, None)
            return
        self._claim("object", token.value, start, end, False)


@dataclass(frozen=True)
class FreeResult(CheckResult):
    """What `check` returns, and the claims that the facts cannot decide, such as opinions, moods and actions."""

    undecided: tuple[Claim, ...] = ()


def check_free(caption: str, facts: Facts | Mapping[str, Any]) -> FreeResult:
    """Judge free text about a scene, with mistakes; negations are read, and "a" makes no claim of a number.

    Example:
        >>> facts = Facts("pig", 2, "small", "sideways", "top", "blue", "mushroom", "left of")
        >>> result = check_free("a dinosaur wearing a top hat, and no mushroom", facts)
        >>> [c.text for c in result.right], [c.text for c in result.wrong]
        ([], ['dinosaur', 'top hat', 'no mushroom'])
    """
    facts = facts if isinstance(facts, Facts) else Facts(**{name: value for name, value in facts.items() if value})
    reader = FreeReader(caption, facts)
    stated = {attribute for attribute, _ in reader.right}
    names = [name for name, value in facts.to_dict().items() if value not in ("", UNMARKED.get(name))]
    return FreeResult(
        tuple(reader.right.values()),
        tuple(reader.wrong.values()),
        tuple(name for name in names if name in stated),
        tuple(name for name in names if name not in stated),
        tuple(reader.unknown),
        tuple(reader.undecided.values()),
    )
