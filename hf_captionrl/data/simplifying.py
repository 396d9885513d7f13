"""Replaces the captions of a data set by those of a file: boosted, simplified, or from another captioner."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import datasets

from hf_captionrl.data.columns import CAPTIONS, caption_column, id_column, read_rows, replace_column
from hf_captionrl.text.tokenize import indefinite_article, load_spacy

logger = logging.getLogger(__name__)

# --- Captions shortened to their subject, or to subject, verb and object, for SMILE's ablation -----------------------
# Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable Maximum Likelihood Estimation",
# section 4.4 and Figure 4(b): Simplest-COCO ("a girl") and Simpler-COCO ("a man working"), both made with spaCy. The paper
# gives no exact rules; [`spacy_simplifier`] describes those used here.

Level = Literal["simplest", "simpler"]  # the subject with an article; subject, verb and object
Simplifier = Callable[[Sequence[str]], Iterable[str | None]]
"""Function from captions to shortened captions; `None` if nothing remains."""

_NOMINAL = frozenset({"NOUN", "PROPN", "PRON"})


def _with_article(token: Any, *, always: bool) -> str:
    """A noun with its compound nouns ("fire hydrant") and its article, which is adjusted to the shortened phrase."""
    parts = [child for child in token.lefts if child.dep_ == "compound"]
    noun = " ".join(part.text.lower() for part in [*parts, token])
    if token.pos_ == "PRON":
        return noun
    article = next((child.text.lower() for child in token.lefts if child.dep_ == "det"), "")
    plural = token.tag_ in ("NNS", "NNPS")
    if article == "the" or (always and plural):
        return f"the {noun}"  # a plural has no other article
    if plural or not (article in ("a", "an") or always):
        return noun
    return f"{indefinite_article(noun)} {noun}"


def _subject(root: Any) -> Any | None:
    if root.pos_ in _NOMINAL:
        return root  # most captions are not sentences: "a man riding a wave"
    children = list(root.children)
    for wanted in (("nsubj", "nsubjpass"), ("attr", "dobj", "obj") if any(c.dep_ == "expl" for c in children) else ()):
        for child in children:
            if child.dep_ in wanted and child.pos_ in _NOMINAL:
                return child
    return None


def _shortened(document: Any, level: str) -> str | None:
    """The shortened form of one parsed caption, from its first sentence with a subject."""
    for sentence in document.sents:
        root = sentence.root
        subject = _subject(root)
        if subject is None:
            continue
        words = [_with_article(subject, always=True)]
        verb = root
        if root.pos_ != "VERB" or any(child.dep_ == "expl" for child in root.children):
            verb = next((c for c in subject.children if c.dep_ in ("acl", "relcl") and c.pos_ == "VERB"), None)
        if level == "simpler" and verb is not None:
            words.append(verb.text.lower())
            words += [child.text.lower() for child in verb.children if child.dep_ == "prt"]
            objects = (child for child in verb.children if child.dep_ in ("dobj", "obj") and child.pos_ in _NOMINAL)
            words += [_with_article(child, always=False) for child in objects][:1]
        return " ".join(words)
    return None


def spacy_simplifier(level: Level) -> Simplifier:
    """A simplifier by spaCy's English parser (extra `[analysis]`).

    The subject is that of the first sentence, what "there is" introduces, or the head of a noun phrase; with its
    compound nouns, without adjectives and numbers. It keeps "the"; otherwise a singular gets "a" or "an", a plural
    "the". The verb is the sentence's, or the participle or relative clause of the subject ("a man riding"), without
    auxiliaries; forms of "to be" are left out. The object is the direct one, with an article only if it had one.
    """
    pipeline = load_spacy(exclude=["ner", "lemmatizer"])
    return lambda captions: (_shortened(document, level) for document in pipeline.pipe(captions, batch_size=256))


def scene_simplifier(level: Level) -> Simplifier:
    """The same by the grammar of the embedded world: "some pigs" (simplest) or "some pigs left of a mushroom" (simpler)."""
    from hf_captionrl.scenes.scene_claims import SceneClaims, read_claims, write_claims

    def shorten(caption: str) -> str | None:
        claims = read_claims(caption)
        if claims is None:
            return None
        one = claims.count == 1
        more = {"second": claims.second, "relation": claims.relation} if level == "simpler" else {}
        return write_claims(SceneClaims(claims.kind, count=int(one), several=not one, **more))

    return lambda captions: map(shorten, captions)


def simplify_captions(dataset: datasets.Dataset, simplifier: Simplifier) -> datasets.Dataset:
    """Shorten every caption of a data set; captions without a subject are removed, and rows without captions."""
    groups = caption_column(dataset)
    short = list(simplifier([caption for group in groups for caption in group]))
    rest = iter(short)
    captions = [[text for text in itertools.islice(rest, len(group)) if text is not None] for group in groups]
    rows = [row for row, group in enumerate(captions) if group]
    if not rows:
        raise ValueError(f"No caption of {len(dataset)} rows has a subject. Check that they are English sentences.")
    if lost := short.count(None):
        logger.warning(
            "%d of %d captions have no subject and are removed, with %d rows.",
            *(lost, len(short), len(dataset) - len(rows)),
        )
    dataset = replace_column(dataset, "captions", captions, CAPTIONS)
    return dataset if len(rows) == len(dataset) else dataset.select(rows)


# --- Captions of a file: boosted, simplified, or from another captioner ----------------------------------------------


def exchange_captions(
    dataset: datasets.Dataset,
    file: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    column: str = "captions",
) -> datasets.Dataset:
    """Replace the captions of a data set by those of a file, image by image.

    Args:
        dataset (`datasets.Dataset`): Columns `image_id` and `captions`.
        file (path or sequence of paths): Parquet or JSON lines with `image_id`, such as `captions.parquet` of `captionrl
            boost`; or several files of one format, such as the shards of `captionrl caption`.
        column (`str`): Column with the captions, a text or a list of texts per row.

    Returns:
        `datasets.Dataset`: The rows whose image is in the file, in order; the others are removed and counted in a warning.
    """
    paths = [Path(file)] if isinstance(file, str | os.PathLike) else [Path(each) for each in file]
    name = paths[0].name if len(paths) == 1 else f"{paths[0].parent.name} ({len(paths)} files)"
    rows = [row for path in paths for row in read_rows(path)]
    if missing := {"image_id", column} - {key for row in rows for key in row}:
        raise ValueError(f"{name} lacks the column(s) {sorted(missing)}. Use captions.parquet of `captionrl boost`.")
    values = ((str(row["image_id"]), row.get(column)) for row in rows)
    captions_of = {image_id: [value] if isinstance(value, str) else list(value or []) for image_id, value in values}
    if len(captions_of) < len(rows):
        raise ValueError(f"{name} holds {len(rows)} rows for {len(captions_of)} images. Keep one row per image.")
    ids = id_column(dataset)
    matches = [row for row, image_id in enumerate(ids) if captions_of.get(image_id)]
    if not matches:
        raise ValueError(
            f"{name} has none of the {len(ids)} images (ids like {[*captions_of][:1]}, not {ids[:1]}). Use those of "
            "the same split."
        )
    if len(matches) < len(ids):
        logger.warning("%s has captions for %d of %d images; the others are left out.", name, len(matches), len(ids))
    captions = [captions_of[ids[row]] for row in matches]
    return replace_column(dataset.select(matches), "captions", captions, dataset.features["captions"])
