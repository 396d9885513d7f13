"""One distinct caption per image, and the image that each caption finds.

Legend: M images, N captions, S candidates of all images, k neighbours, D features.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.apps.album.assignment import Choice, choose_candidates
from hf_captionrl.apps.album.candidates import (
    DETERMINERS,
    FUNCTION_WORDS,
    JOINTS,
    CandidateScores,
    Word,
    caption_words,
    confusions_of,
    is_content,
    is_english,
    load_language_identifier,
    score_candidates,
    script_of,
)
from hf_captionrl.apps.album.settings import ConstraintOptions
from hf_captionrl.retrieval.neighbours import normalised
from hf_captionrl.retrieval.ranking import (
    check_features,
    check_targets,
    duplicate_images,
    ranks_from_scores,
    tie_copies,
)
from hf_captionrl.text.degenerate_captions import degenerate
from hf_captionrl.text.tokenize import indefinite_article

# --- What the captions of a group share, and what varies -------------------------------------------------------------

_LONGEST = 8  # words of a phrase
_MIN_IMAGES = 3  # what two captions share is hardly a property of the set
_SHOWN = 30  # varying facts of a group


@dataclass(frozen=True)
class GroupFacts:
    """What the captions of a group of images say."""

    group: str  # name of the group; empty if the whole album is one
    num_images: int  # number of its images
    shared: tuple[str, ...]  # phrases that (nearly) all captions contain, longest first
    # Words or noun phrases of some captions, with the number of captions, most frequent first.
    varying: tuple[tuple[str, int], ...]


def _words(text: str) -> list[str]:
    return [word.folded for word in caption_words(text)]


def _phrases(words: Sequence[str], frequent: Collection[str]) -> set[tuple[str, ...]]:
    """Phrases of frequent words that begin and end with content words, except for a determiner at the start."""
    found = set()
    for start, first in enumerate(words):
        if not (is_content(first) or first in DETERMINERS):
            continue
        for end in range(start + 1, min(start + _LONGEST, len(words)) + 1):
            last = words[end - 1]
            if last not in frequent or not last[0].isalnum():
                break
            if is_content(last):
                found.add(tuple(words[start:end]))
    return found


def shared_phrases(
    captions: Sequence[str], *, min_share: float = 0.9, noun_chunks: Sequence[Collection[str]] | None = None
) -> tuple[str, ...]:
    """Longest phrases that at least a share of the captions contain: phrases of content words, and noun chunks.

    Captions are compared in lower case. Fewer than three captions share nothing. `noun_chunks` are those of each caption; unlike
    other phrases they may contain commas and end with words such as "up".
    """
    if not 0 < min_share <= 1:
        raise ValueError(f"min_share is {min_share}. Use a share in (0, 1].")
    if len(captions) < _MIN_IMAGES:
        return ()
    needed = min_share * len(captions)
    # A shared phrase has shared words. All phrases of 100,000 captions would take gigabytes.
    words = Counter(word for text in captions for word in set(_words(text)))
    frequent = {word for word, count in words.items() if count >= needed}
    chunks = [()] * len(captions) if noun_chunks is None else noun_chunks
    counts = Counter(
        phrase
        for text, mine in zip(captions, chunks, strict=True)
        for phrase in _phrases(_words(text), frequent) | _chunk_phrases(mine)
    )
    found = sorted((p for p, count in counts.items() if count >= needed), key=lambda p: (-len(p), p))
    longest: list[tuple[str, ...]] = []
    for phrase in found:
        # With a determiner and without one, a phrase is the same.
        if not any(_contains(other, phrase) for other in longest):
            longest.append(phrase)
    return tuple(" ".join(phrase).replace(" ,", ",") for phrase in longest)


def _chunk_phrases(chunks: Collection[str]) -> set[tuple[str, ...]]:
    """Noun chunks with and without their determiner; pronouns and others without content words are left out."""
    found = set()
    for words in map(_words, chunks):
        if any(map(is_content, words)):
            found.add(tuple(words))
            found.add(tuple(words[words[0] in DETERMINERS :]))
    return found


def _contains(words: Sequence[str], phrase: Sequence[str]) -> bool:
    return any(tuple(words[at : at + len(phrase)]) == tuple(phrase) for at in range(len(words) - len(phrase) + 1))


def group_facts(
    captions: Sequence[str], groups: Sequence[str], *, min_share: float = 0.9, noun_chunks: bool | None = None
) -> list[GroupFacts]:
    """Shared and varying phrases of each group, in the order of the groups' first captions.

    `noun_chunks=None` uses spaCy's noun chunks if spaCy is installed and no group has more than 5,000 captions.
    """
    members: dict[str, list[str]] = {}
    for caption, group in zip(captions, groups, strict=True):
        members.setdefault(group, []).append(caption)
    parser = _load_parser(noun_chunks, max(map(len, members.values()), default=0))
    found = []
    for group, mine in members.items():
        chunks = None if parser is None else _noun_chunks(mine, parser)
        texts = None if chunks is None else [[text for text, _ in one] for one in chunks]
        shared = shared_phrases(mine, min_share=min_share, noun_chunks=texts)
        known = {word for phrase in shared for word in _words(phrase)}
        counts: Counter[str] = Counter()
        for facts in _facts(mine, chunks):
            counts.update({fact for fact in facts if not set(fact.split()) <= known})
        varying = sorted(((f, n) for f, n in counts.items() if n < len(mine)), key=lambda item: (-item[1], item[0]))
        found.append(GroupFacts(group, len(mine), shared, tuple(varying[:_SHOWN])))
    return found


def _load_parser(noun_chunks: bool | None, most: int) -> Any | None:
    if noun_chunks is False or (noun_chunks is None and most > 5000):
        return None
    from hf_captionrl.text.tokenize import load_spacy

    try:
        return load_spacy(exclude=["ner"])
    except ModuleNotFoundError:
        if noun_chunks:
            raise
        return None


def _noun_chunks(captions: Sequence[str], parser: Any) -> list[list[tuple[str, str]]]:
    """Text of each noun chunk of each caption, and its words without determiners and pronouns."""
    return [
        [
            (chunk.text, " ".join(token.text for token in chunk if token.pos_ not in ("DET", "PRON")))
            for chunk in document.noun_chunks
        ]
        for document in parser.pipe([text.casefold() for text in captions])
    ]


def _facts(captions: Sequence[str], chunks: Sequence[Sequence[tuple[str, str]]] | None) -> list[set[str]]:
    """Content words of each caption, or its noun phrases without determiners."""
    if chunks is None:
        return [{word for word in _words(text) if is_content(word)} for text in captions]
    return [{words for _, words in mine if words} for mine in chunks]


# --- Removes shared phrases from captions, or puts a trigger in their place ------------------------------------------
# Only the characters of the phrases and of what they leave without meaning are removed: spaces and punctuation around them
# and, in English captions, their articles and joining words. All other characters stay as they are.

_SEPARATORS = ",;:、，；：،؛"
_STOPS = ".!?…。．！？।"
_ENDS = frozenset(_SEPARATORS + _STOPS)
_DASHES = "-–—/"
_CLOSING = _SEPARATORS + _STOPS + ")]}%»”’」』）】"
_OPENING = "([{«“‘「『（【"
_PAIRS = frozenset(["()", "[]", "{}", '""', "''", "«»", "“”", "‘’", "„“", "「」", "『』", "（）", "【】"])

# At the start of a caption these join it to something that was removed; "on the grass" stands for itself.
_NEVER_FIRST = frozenset("and or of is are was were has have that which who while as".split())
_PREDICATES = frozenset("is are was were has have that which who".split())
_EXPLETIVES = frozenset("there there's it it's".split())
_NEVER_LAST = FUNCTION_WORDS - {"up", "down"}  # "looking up" is complete
_SINGULAR = frozenset("a an one this that".split())
_MOST_ADJECTIVES = 2
_VERBS = frozenset(
    "sits stands lies lays runs walks plays looks sleeps rests holds wears rides jumps eats carries leans poses swims flies "
    "watches waits plays chases catches drinks hangs faces stares sniffs sat stood ran lay".split()
)
_NOT_VERBS = frozenset(
    "string spring building ceiling painting clothing railing awning wedding crossing bedding evening morning frosting".split()
)


def drop_shared(caption: str, phrases: Sequence[str], *, trigger: str | None = None) -> str:
    """The caption without shared phrases, or with a trigger in place of the first of them.

    A phrase is found as whole words. What remains is repaired only where something was removed: no article without a noun,
    no joining word at an end, no doubled comma, "a" or "an" as the next word needs it. A caption that is nothing but shared
    phrases becomes the trigger; without a trigger it stays as it is.

    Example:
        >>> drop_shared("a photo of a small dog on a red sofa", ["a photo", "dog"], trigger="ohwx dog")
        'ohwx dog, small on a red sofa'
    """
    words = caption_words(caption)
    gone = _found(words, phrases)
    first = gone.index(True) if True in gone else len(words)
    article: dict[int, str] = {}
    if is_english(words):
        _drop_stranded(words, gone)
        _drop_at_ends(words, gone)
        article = _articles_at_seams(words, gone)
    rest = _without(caption, words, gone, article)
    if trigger is None:
        return rest or caption
    if not rest:
        return trigger
    replaces = first < len(words) and not any(
        not out and word.folded not in DETERMINERS for word, out in zip(words[:first], gone, strict=False)
    )
    joined = replaces and caption_words(rest)[0].folded in JOINTS
    return f"{trigger} {rest}" if joined else f"{trigger}, {rest}"


def without_loose_end(text: str) -> str:
    """A truncated text without punctuation and, in English, without joining words and articles at its end."""
    words = caption_words(text)
    if is_english(words):
        while words and (words[-1].folded in _NEVER_LAST or words[-1].folded in _SEPARATORS):
            words.pop()
        text = text[: words[-1].end] if words else ""
    return text.strip(_SEPARATORS + " ")


@lru_cache(4096)
def _folded(phrase: str) -> tuple[str, ...]:
    return tuple(word.folded for word in caption_words(phrase))


def _found(words: Sequence[Word], phrases: Sequence[str]) -> list[bool]:
    """Which words belong to one of the phrases; longer phrases first."""
    lower = tuple(word.folded for word in words)
    gone = [False] * len(words)
    for phrase in sorted(filter(None, map(_folded, phrases)), key=len, reverse=True):
        for at in range(len(words) - len(phrase) + 1):
            end = at + len(phrase)
            if lower[at:end] == phrase and not any(gone[at:end]):
                gone[at:end] = [True] * len(phrase)
    return gone


def _runs(gone: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First and last word of each removed part."""
    start = None
    for at, out in enumerate([*gone, False]):
        if out and start is None:
            start = at
        elif not out and start is not None:
            yield start, at - 1
            start = None


def _is_verb(lower: Sequence[str], at: int) -> bool:
    word = lower[at]
    if word in _VERBS or (len(word) > 5 and word.endswith("ing") and word not in _NOT_VERBS):
        return True
    # "a dog covered in snow", but not "a spotted dog"
    return len(word) > 4 and word.endswith("ed") and not (at + 1 < len(lower) and is_content(lower[at + 1]))


def _drop_stranded(words: Sequence[Word], gone: list[bool]) -> None:
    """Remove determiners that have lost their noun, and joining words that have lost what follows them."""
    lower = [word.folded for word in words]
    for start, end in list(_runs(gone)):
        if end + 1 < len(lower) and is_content(lower[end + 1]) and not _is_verb(lower, end + 1):
            continue  # a determiner before the phrase belongs to this noun now
        joint = start - 1
        if lower[start] not in DETERMINERS:  # else the phrase was removed with its determiner
            at = _determiner_of(lower, gone, start, end)
            if at is not None:
                gone[at] = True
                joint = at - 1 if at == joint else -1
        while joint >= 0 and not gone[joint] and lower[joint] in JOINTS:
            gone[joint] = True
            joint -= 1


def _determiner_of(lower: Sequence[str], gone: Sequence[bool], start: int, end: int) -> int | None:
    """The determiner of a removed noun, before at most two adjectives."""
    at, adjectives = start - 1, 0
    while at >= 0 and not gone[at] and (is_content(lower[at]) or (lower[at] in ("and", "very") and adjectives)):
        adjectives += lower[at] not in ("and", "very")
        # "a sleeping dog", but not "a man walking dogs"
        is_clause = _is_verb(lower, at) and (at == 0 or lower[at - 1] not in DETERMINERS)
        if adjectives > _MOST_ADJECTIVES or is_clause:
            return None
        at -= 1
    if at < 0 or gone[at] or lower[at] not in DETERMINERS:
        return None
    is_plural = lower[end].endswith("s") and not lower[end].endswith(("ss", "us", "is"))
    return None if is_plural and lower[at] in _SINGULAR else at


def _drop_at_ends(words: Sequence[Word], gone: list[bool]) -> None:
    """Remove joining words between a removed part and an end of the caption, and words that lost their subject."""
    for start, end in list(_runs(gone)):
        at = end + 1
        while start > 0 and words[start - 1].folded in _ENDS and at < len(words) and words[at].folded in _PREDICATES:
            gone[at] = True
            at += 1
    start = gone.index(True) if True in gone else 0
    if all(word.folded in _EXPLETIVES for word in words[:start]):
        gone[:start] = [True] * start
    for order, never in ((range(len(words)), _NEVER_FIRST), (range(len(words) - 1, -1, -1), _NEVER_LAST)):
        is_seam = False
        for at in order:
            is_seam |= gone[at]
            if gone[at] or not words[at].folded[0].isalnum():
                continue
            if not is_seam or words[at].folded not in never:
                break
            gone[at] = True


def _articles_at_seams(words: Sequence[Word], gone: list[bool]) -> dict[int, str]:
    """Correct articles before removed parts, by word; function words that would be repeated there are removed."""
    found = {}
    for start, end in list(_runs(gone)):
        before, after = start - 1, end + 1
        if before < 0 or after == len(words) or not words[after].folded[0].isalnum():
            continue
        left, right = words[before].folded, words[after].folded
        if (left in DETERMINERS and right in DETERMINERS) or (left == right and left in FUNCTION_WORDS):
            gone[before] = True
        elif left in ("a", "an"):
            found[before] = indefinite_article(right)
    return found


def _without(caption: str, words: Sequence[Word], gone: Sequence[bool], article: dict[int, str]) -> str:
    """The caption without the removed words; empty if only punctuation remains."""
    text = caption
    edits = [(words[a].start, words[b].end, "") for a, b in _runs(gone)]
    edits += [(words[at].start, words[at].end, new) for at, new in article.items()]
    for start, end, new in sorted(edits, reverse=True):
        left, old, right = text[:start], text[start:end], text[end:]
        if new:
            text = left + (new.capitalize() if old[0].isupper() else new) + right
        else:
            text = _closed(left, right)
    return text.strip() if any(letter.isalnum() for letter in text) else ""


def _closed(left: str, right: str) -> str:
    """Join the text before and after a removed part with one space, and drop punctuation that would enclose nothing."""
    before, after = left.rstrip(), right.lstrip()
    space = " " if len(before) < len(left) or len(after) < len(right) else ""
    while before and after and before[-1] + after[0] in _PAIRS:
        space = " " if before[:-1] != before[:-1].rstrip() or after[1:] != after[1:].lstrip() else ""
        before, after = before[:-1].rstrip(), after[1:].lstrip()
    if not before.strip(_SEPARATORS + _STOPS + _DASHES + " "):
        return after.lstrip(_SEPARATORS + _STOPS + _DASHES + " ")
    if not after.strip(_CLOSING + " "):
        return before.rstrip(_SEPARATORS + _DASHES + " ") + after.lstrip(_SEPARATORS + " ")
    if before[-1] in _OPENING:
        return before + after.lstrip(_SEPARATORS + " ")
    if before[-1] in _DASHES and after[0] in _DASHES:
        return before + after[1:]
    if after[0] in _CLOSING:
        if after[0] in _STOPS:
            before = before.rstrip(_SEPARATORS + " ")
        doubled = before[-1] in _SEPARATORS + _STOPS and after[0] in _SEPARATORS + _STOPS
        return before + (after[1:] if doubled else after)
    return before + space + after


# --- Constraints on captions: length, words, repetitions, language ---------------------------------------------------
# Legend: S candidates of all images.


def shortened(candidates: Sequence[str], options: ConstraintOptions) -> list[str]:
    """Candidates; those that are too long are truncated after a word, and duplicates are removed."""
    if options.max_characters is None:
        return list(candidates)
    found = []
    for text in candidates:
        if len(text) > options.max_characters:
            start = text[: options.max_characters + 1]
            # Prefer the end of a clause in the second half; else the last whole word.
            clause = max(start.rfind(mark) for mark in (", ", "; ", ". "))
            start = start[:clause] if clause > options.max_characters // 2 else start.rpartition(" ")[0]
            text = without_loose_end(start) or text[: options.max_characters]
        found.append(text)
    return list(dict.fromkeys(found))


_WITHOUT_SPACES = {"CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"}


def check_candidates(
    candidates: Sequence[Sequence[str]],
    old: Sequence[Sequence[str]],
    options: ConstraintOptions,
    *,
    trigger: str | None = None,
) -> np.ndarray:
    """Mask of the candidates that may be chosen, `(S,)`: not blank, not degenerate, and accepted by [`meets_constraints`]."""
    flat = [text for mine in candidates for text in mine]
    good = meets_constraints(candidates, old, options, trigger=trigger)
    good &= np.array([bool(text.strip()) for text in flat], dtype=bool)
    return good & ~np.array(degenerate(flat), dtype=bool)


def meets_constraints(
    candidates: Sequence[Sequence[str]],
    old: Sequence[Sequence[str]],
    options: ConstraintOptions,
    *,
    trigger: str | None = None,
) -> np.ndarray:
    """Mask of the candidates that meet the constraints of the options, `(S,)`.

    With `language="auto"`, a candidate must also have the script and, if py3langid is installed, the language of an existing
    caption of its image, if there are any. The trigger does not count.
    """
    flat = [text for mine in candidates for text in mine]
    good: np.ndarray = np.ones(len(flat), dtype=bool)
    if options.max_characters is not None:
        good &= np.array([len(text) <= options.max_characters for text in flat], dtype=bool)
    for word in options.require:
        good &= with_word(flat, word)
    for word in options.forbid:
        good &= ~with_word(flat, word)
    if options.language == "any" or (
        options.language == "auto" and not any(text.strip() for mine in old for text in mine)
    ):
        return good
    own = [[text.removeprefix(trigger or "") for text in mine] for mine in candidates]
    return good & (
        _in_scripts(own, old) & _in_languages(own, old)
        if options.language == "auto"
        else _in_language(own, options.language)
    )


def _in_scripts(candidates: Sequence[Sequence[str]], old: Sequence[Sequence[str]]) -> np.ndarray:
    wanted = [{script_of(text) for text in mine} - {None} for mine in old]
    pairs = ((text, scripts) for mine, scripts in zip(candidates, wanted, strict=True) for text in mine)
    return np.array([not scripts or script_of(text) in scripts for text, scripts in pairs], dtype=bool)


def _in_languages(candidates: Sequence[Sequence[str]], old: Sequence[Sequence[str]]) -> np.ndarray:
    flat = [text for mine in candidates for text in mine]
    identifier = load_language_identifier()
    if identifier is None:
        return np.ones(len(flat), dtype=bool)
    wanted = identifier.languages_of(old)
    languages = (wanted[row] for row, mine in enumerate(candidates) for _ in mine)
    return np.array([not identifier.is_foreign(*pair) for pair in zip(flat, languages, strict=True)], dtype=bool)


def _in_language(candidates: Sequence[Sequence[str]], language: str) -> np.ndarray:
    identifier = load_language_identifier(language)
    assert identifier is not None
    return np.array([not identifier.is_foreign(text, [language]) for mine in candidates for text in mine], dtype=bool)


def with_word(texts: Sequence[str], word: str) -> np.ndarray:
    """Mask of the texts that contain a word, `(S,)`; in scripts without spaces between words, its letters."""
    wanted = re.escape(word)
    pattern = re.compile(wanted if script_of(word) in _WITHOUT_SPACES else rf"(?<!\w){wanted}(?!\w)", re.IGNORECASE)
    return np.array([pattern.search(text) is not None for text in texts], dtype=bool)


# --- One distinct caption per image, and the image that each caption finds -------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A caption and the image that it finds in the album."""

    caption: str
    rank: int  # rank of its target among the images of the album, 1 = best; ties count against it
    found: int  # row of the image that it finds


@dataclass(frozen=True)
class AlbumCaption:
    """The caption chosen for an image of an album."""

    caption: str
    candidate: int  # its index among the image's candidates
    rank: int  # rank of the image among the images compared, 1 = best; ties count against it
    # Similarity to its image minus that to the most similar other image; None in an album of one image.
    margin: float | None
    is_distinct: bool  # whether it is not blank and no other image of the album has the same text
    confused_with: tuple[int, ...]  # rows of the other images that the caption fits at least as well, best first


@dataclass(frozen=True)
class ChosenCaptions:
    """One caption for each image, with the choice and the scores of all candidates."""

    captions: list[AlbumCaption]
    choice: Choice = field(repr=False)
    scores: CandidateScores = field(repr=False)


def same_text(caption: str) -> str:
    """A caption without case, extra blanks and a final full stop, to compare texts."""
    return " ".join(caption.casefold().split()).rstrip(" .")


def found_images(text_features: Any, image_features: Any, targets: Any = None) -> tuple[Tensor, Tensor]:
    """Rank of each caption's target, and the image that it finds.

    Shapes: `text_features` `(N, D)`, `image_features` `(M, D)`. Returns int64 tensors `(N,)`: ranks of the targets, 1
    = best, and rows of the images found.
    """
    scores, columns = _scores(text_features, image_features, targets)
    rank = ranks_from_scores(scores, columns)
    best_other = scores.scatter(1, columns[:, None], -torch.inf).argmax(1)
    return rank.cpu(), torch.where(rank == 1, columns, best_other).cpu()


def distinct_captions(
    candidates: Sequence[Sequence[str]],
    text_features: Any,
    image_features: Any,
    *,
    neighbours: Tensor | None = None,
    allowed: np.ndarray | None = None,
    max_component: int = 2000,
    exclusive: bool = True,
    progress: Any = None,
) -> ChosenCaptions:
    r"""Choose one candidate for each image so that the texts differ and each retrieves its target.

    The margin of a caption t of image i is `m_i(t) = s(t, i) - max_{j != i} s(t, j)`; it is positive exactly if the rank
    is 1. The choice is the exact optimum of, in this order:

    1. the number of different texts, each used by one image,
    2. the number of these texts with rank 1,
    3. the sum of their margins.

    See [`choose_candidates`]. An image for which no text is left gets its candidate with the largest margin. This text
    is blank or belongs to another image as well; `is_distinct` is then False for both. In an album of one image the similarity replaces
    the margin.

    Shapes: `image_features` `(M, D)`, `neighbours` `(M, k)`, `allowed` `(S,)`. `text_features` may be an object that
    gives the rows of an array of numbers, such as `EncodedTexts`.
    """
    for row, texts in enumerate(candidates):
        if isinstance(texts, str) or not texts:
            raise ValueError(f"candidates[{row}] is {texts!r}. Use a list of at least one caption per image.")
    images = normalised(image_features, "image_features")
    number = len(candidates)
    if number != len(images):
        raise ValueError(
            f"There are candidates for {number} images, but features of {len(images)}. Use the same images for both."
        )
    if isinstance(text_features, Tensor | np.ndarray | list):
        text_features = normalised(text_features, "text_features")
    starts = np.cumsum([0, *map(len, candidates)])
    flat = [text for texts in candidates for text in texts]
    keys, numbers = _number_texts(flat)
    scores = score_candidates(text_features, starts, images, neighbours, progress)
    choice = choose_candidates(
        starts, numbers, scores, allowed=allowed, max_component=max_component, exclusive=exclusive
    )
    taken = choice.chosen.tolist()
    confusions = confusions_of(text_features, taken, images, neighbours)
    holders = Counter(keys[i] for i in taken)
    found = [
        AlbumCaption(
            caption=flat[i],
            candidate=i - int(starts[row]),
            rank=int(scores.rank[i]),
            margin=float(scores.margin[i]) if number > 1 else None,
            is_distinct=holders[keys[i]] == 1 and bool(keys[i]),
            confused_with=confusions[row][0],
        )
        for row, i in enumerate(taken)
    ]
    return ChosenCaptions(found, choice, scores)


def _number_texts(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Texts as they are compared, and their numbers: equal for equal texts, -1 for blank ones."""
    keys = [same_text(text) for text in texts]
    number_of = {"": -1}
    for key in keys:
        number_of.setdefault(key, len(number_of) - 1)
    return keys, np.fromiter((number_of[key] for key in keys), np.int64, len(keys))


def _scores(text_features: Any, image_features: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Similarities `(N, M)`, and the column of each caption's target."""
    text = check_features(text_features, "text_features")
    images = check_features(image_features, "image_features").to(text)
    if text.shape[1] != images.shape[1]:
        raise ValueError(
            f"text_features have {text.shape[1]} features and image_features {images.shape[1]}. "
            "Use features of one scorer."
        )
    columns = check_targets(targets, len(text), len(images)).to(text.device)
    scores = text @ images.T
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("Products of text_features and image_features overflow. Use features of unit length.")
    return tie_copies(scores, duplicate_images(images)), columns
