"""Objects, attributes and relations of captions, compared with those of references (CAPTURE).

Legend: N captions, U units (objects, attributes or relations) of a text, D features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.metrics.caption_checks import check_captions, check_groups
from hf_captionrl.text.tokenize import load_spacy

KINDS = ("objects", "attributes", "relations")
Units = Mapping[str, Iterable[tuple[str, ...]]]
"""The units of a text by kind: `(object,)`, `(object, attribute)`, `(object, relation, object)`."""
Extractor = Callable[[Sequence[str]], Iterable[Units]]

_PLACES = "front back top bottom side middle center centre left right edge".split()  # "in front of", no objects
_WEIGHTS = {"objects": 5.0, "attributes": 5.0, "relations": 2.0}


# --- Units of a text by spaCy's parser -------------------------------------------------------------------------------


def spacy_extractor(model: str | None = None, *, batch_size: int = 256) -> Extractor:
    """An extractor with the parser of spaCy's English model (extra `[analysis]`)."""
    pipeline = load_spacy(model, exclude=["ner"])
    return lambda texts: map(units_of, pipeline.pipe(texts, batch_size=batch_size))


def _children(token: Any, *names: str) -> list[Any]:
    return [child for child in token.children if child.dep_ in names]


def _with_conjuncts(tokens: Iterable[Any]) -> Iterator[Any]:
    for token in tokens:
        yield token
        yield from _with_conjuncts(_children(token, "conj"))


def _name(noun: Any) -> str:
    return " ".join(token.lemma_.lower() for token in (*_children(noun, "compound"), noun))


def _is_object(token: Any) -> bool:
    is_noun = token.pos_ in ("NOUN", "PROPN") and token.dep_ != "compound"
    is_place = token.lemma_.lower() in _PLACES and token.dep_ == "pobj"
    return is_noun and not (is_place and any(child.lemma_ == "of" for child in _children(token, "prep")))


def _prepositions(token: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """What a token is related to by prepositions: "in front of" and "next to" are one."""
    for adverb in _children(token, "advmod"):
        yield from _prepositions(adverb, (*before, adverb.lemma_.lower()))
    for preposition in _children(token, "prep"):
        words = (*before, preposition.lemma_.lower())
        yield from _prepositions(preposition, words)  # "out of"
        for noun in _with_conjuncts(_children(preposition, "pobj")):
            if _is_object(noun):
                yield " ".join(words), noun
            else:
                yield from _prepositions(noun, (*words, noun.lemma_.lower()))


def units_of(document: Iterable[Any]) -> dict[str, set[tuple[str, ...]]]:
    """Objects, attributes and relations of a parsed text (spaCy's tokens), as lemmas."""
    found: dict[str, set[tuple[str, ...]]] = {kind: set() for kind in KINDS}
    for token in document:
        if _is_object(token):
            name = _name(token)
            found["objects"].add((name,))
            for word in _with_conjuncts(_children(token, "amod", "nummod")):
                found["attributes"].add((name, word.lemma_.lower()))
            for words, other in _prepositions(token):
                found["relations"].add((name, words, _name(other)))
        if token.pos_ not in ("VERB", "AUX"):
            continue
        subjects = _children(token, "nsubj") or _children(token, "attr")  # "there is a dog"
        if token.dep_ in ("acl", "relcl"):  # "a man wearing a hat", "a cat that is black"
            subjects = [token.head]
        subjects = [noun for noun in _with_conjuncts(subjects) if _is_object(noun)]
        verb = "" if token.lemma_ == "be" else token.lemma_.lower()
        related = [(verb, noun) for noun in _with_conjuncts(_children(token, "dobj", "obj")) if _is_object(noun)]
        related += [(f"{verb} {words}".strip(), noun) for words, noun in _prepositions(token)]
        for subject in subjects:
            for word in _with_conjuncts(_children(token, "acomp")):
                found["attributes"].add((_name(subject), word.lemma_.lower()))
            for words, noun in related:
                found["relations"].add((_name(subject), words, _name(noun)))
    return found


# --- The metric ------------------------------------------------------------------------------------------------------


def _matched(ours: list[tuple[str, ...]], theirs: list[tuple[str, ...]], encoder: Any) -> float:
    """How much of some units others contain: 1 for each equal one, and for the rest the largest cosine with the rest."""
    rest, others = [unit for unit in ours if unit not in theirs], [unit for unit in theirs if unit not in ours]
    total = float(len(ours) - len(rest))
    if encoder is None or not rest or not others:
        return total
    # "brown dog", "dog on grass".
    texts = [" ".join(unit[::-1] if len(unit) == 2 else unit) for unit in (*rest, *others)]
    features = np.asarray(encoder(texts), dtype=np.float64)  # (U, D)
    if features.shape[:1] != (len(texts),) or features.ndim != 2 or not np.isfinite(features).all():
        shape = f"shape {features.shape} for {len(texts)} texts"
        raise ValueError(f"encoder returned {shape}. Return a finite (N, D) array.")
    features /= np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    cosines = features[: len(rest)] @ features[len(rest) :].T
    return total + float(cosines.max(1).clip(0, 1).sum())


def capture(
    captions: Any,
    references: Any,
    *,
    extractor: Extractor | None = None,
    synonyms: Mapping[str, Iterable[str]] | None = None,
    encoder: Callable[[list[str]], Any] | None = None,
) -> dict[str, Any]:
    r"""Precision, recall and F of a caption's objects, attributes and relations against those of its references.

    Reference: Dong et al. 2024, "Benchmarking and Improving Detail Image Caption" (CAPTURE), section 3: equal units, then synonyms,
    then the largest cosine of a sentence encoder; `capture` is `(5 F_objects + 5 F_attributes + 2 F_relations) / 12`.
    Differs from it by: units come from a dependency parse, not from a scene-graph parser; an attribute matches together with
    its object; without an encoder nothing is matched softly; a kind of which neither text has a unit is left out of the
    weighted mean.

    Args:
        captions: N captions.
        references (`Sequence[Sequence[str]]`): Human captions of each image; their units are united.
        extractor: From texts to the units of each, see `Units`; None: spaCy's parser ([`spacy_extractor`]).
        synonyms: Other words of each word, such as `{"couch": ["sofa"]}`.
        encoder: From texts to features `(N, D)`, such as `SentenceTransformer(...).encode`; None: no soft matches.
    Returns:
        `dict`: `capture`, the mean in [0, 1], higher is better; means of `<kind>_precision`, `<kind>_recall` and `<kind>_f` of
        `objects`, `attributes` and `relations` over the captions where they are defined, else None; `per_sample` of all of
        them, NaN where neither text has a unit; `signature`.
    """
    texts = check_captions(captions)
    groups = check_groups(references, "references", len(texts))
    meaning = {other: word for word, others in (synonyms or {}).items() for other in others}
    extract = spacy_extractor() if extractor is None else extractor
    every = list(extract([*texts, *(text for group in groups for text in group)]))
    if len(every) != len(texts) + sum(map(len, groups)):
        raise ValueError(f"extractor returned {len(every)} results. Return the units of each text.")
    of_references = iter(every[len(texts) :])

    def united(parsed: Sequence[Units], kind: str) -> list[tuple[str, ...]]:
        return sorted({tuple(meaning.get(word, word) for word in unit) for one in parsed for unit in one[kind]})

    names = ["capture", *(f"{kind}_{part}" for kind in KINDS for part in ("precision", "recall", "f"))]
    values: dict[str, list[float]] = {name: [] for name in names}
    for own, group in zip(every[: len(texts)], groups, strict=True):
        human = [next(of_references) for _ in group]
        total = weight = 0.0
        for kind in KINDS:
            ours, theirs = united([own], kind), united(human, kind)
            precision = _matched(ours, theirs, encoder) / len(ours) if ours else math.nan
            recall = _matched(theirs, ours, encoder) / len(theirs) if theirs else math.nan
            f = math.nan
            if ours or theirs:
                f = 2 * precision * recall / (precision + recall) if precision > 0 and recall > 0 else 0.0
                total, weight = total + _WEIGHTS[kind] * f, weight + _WEIGHTS[kind]
            for part, value in (("precision", precision), ("recall", recall), ("f", f)):
                values[f"{kind}_{part}"].append(value)
        values["capture"].append(total / weight if weight else math.nan)
    arrays = {name: np.array(column) for name, column in values.items()}
    means = {name: float(np.nanmean(a)) if not np.isnan(a).all() else None for name, a in arrays.items()}
    parts = {"extractor": "spacy" if extractor is None else "given", "soft": encoder is not None}
    named = signature(metric="capture", **parts, synonyms=len(meaning) or None, average="macro")
    return {**means, "per_sample": arrays, "signature": named}
