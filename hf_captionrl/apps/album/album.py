"""A distinct caption for each image of a set: copies of images, candidates, their scores, and the choice.

Legend: M images, L leaders (images that are not copies of an earlier one), S candidates, D features.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import tqdm

from hf_captionrl.apps.album.assignment import Features, confusions_of, distinct_captions, same_text
from hf_captionrl.apps.album.options import AlbumSettings, CandidateOptions, check_words
from hf_captionrl.apps.album.phrases import (
    check_candidates,
    drop_shared,
    meets_constraints,
    shared_of_groups,
    shortened,
)
from hf_captionrl.apps.album.sources import opened_chunks, read_images
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.language_model_clients import BackendError, EndpointCaptioner
from hf_captionrl.captioners.prompts import forbidden_tokens, prompt_without
from hf_captionrl.data import ImageError, open_image
from hf_captionrl.evaluation.pages import embedded_image, render_html
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.retrieval import FeatureCache, Scorer
from hf_captionrl.retrieval.ranking import concept_numbers, unit_rows
from hf_captionrl.utils.io import atomic_write_text, csv_cell, write_jsonl
from hf_captionrl.utils.parts import seed_of_batch

_SIDE = 512  # longest side of a picture on the page
_MOST_PICTURES = 2000

# --- The result ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlbumImage:
    """An image of an album and its caption.

    Args:
        image_id: Name of the image.
        caption: Its caption; empty if it has none.
        old: The caption that it had before.
        rank: Rank of the image among the images compared with the caption, 1 = best; ties count against it. None without a
            caption.
        margin: Similarity to the target minus that to the most similar other image, in [-2, 2].
        is_distinct: Whether no other image, except copies, has the same text.
        confused_with: Rows of up to five other images that the caption fits at least as well, best first.
        copy_of: Row of the first image with the same pixels.
        unreadable: Why the image cannot be read; None if it can.
        meets_constraints: Whether the caption meets the constraints on length and words.
        is_edited: Whether a person has edited the caption in the table of an earlier run.
    """

    image_id: str
    caption: str
    old: str | None = None
    rank: int | None = None
    margin: float | None = None
    is_distinct: bool = False
    confused_with: tuple[int, ...] = ()
    copy_of: int | None = None
    unreadable: str | None = None
    meets_constraints: bool = True
    is_edited: bool = False


@dataclass
class Album:
    """Captions of an album.

    Args:
        images: In the order of the album.
        num_compared: Number of images that each caption was ranked among, the target included; 1 without a scorer.
        shared: Phrases that were removed from the captions of each group.
    """

    images: list[AlbumImage]
    num_compared: int
    shared: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def captions(self) -> list[str]:
        """The caption of each image; empty where there is none."""
        return [image.caption for image in self.images]

    def summary(self) -> dict[str, Any]:
        """Counts of the album, and fractions of the captions of different images."""
        described = [one for one in self.images if one.caption.strip() and one.copy_of is None]
        count = max(len(described), 1)
        return {
            "images": len(self.images),
            "captions": sum(bool(image.caption.strip()) for image in self.images),
            "copies": sum(image.copy_of is not None for image in self.images),
            "unreadable": sum(image.unreadable is not None for image in self.images),
            "compared_with": self.num_compared - 1,
            "distinct": sum(image.is_distinct for image in described) / count,
            "rank_1": sum(image.rank == 1 for image in described) / count,
            "against_constraints": sum(not image.meets_constraints for image in self.images),
            "shared": {group: list(phrases) for group, phrases in self.shared.items()},
        }

    def rows(self) -> list[dict[str, Any]]:
        """The table that the files contain, one row per image.

        `suggested` repeats the caption, so that a caption that a person edits in the table differs from it.
        """
        ids = [image.image_id for image in self.images]
        return [
            {
                "image_id": image.image_id,
                "caption": image.caption,
                "suggested": "" if image.is_edited else image.caption,
                "old_caption": image.old,
                "rank": image.rank,
                "margin": None if image.margin is None else round(image.margin, 4),
                "distinct": image.is_distinct,
                "confused_with": [ids[other] for other in image.confused_with],
                "copy_of": None if image.copy_of is None else ids[image.copy_of],
                "meets_constraints": image.meets_constraints,
                "unreadable": image.unreadable,
            }
            for image in self.images
        ]

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write a table for Excel: UTF-8 with a byte order mark, and no cell that Excel would evaluate as a formula."""
        rows = [row | {"confused_with": " | ".join(row["confused_with"])} for row in self.rows()]
        table = pd.DataFrame(rows, dtype=object).map(csv_cell)
        return atomic_write_text(path, "\ufeff" + table.to_csv(index=False, lineterminator="\r\n"))

    def to_jsonl(self, path: str | os.PathLike[str]) -> Path:
        """Write one JSON object per image."""
        return write_jsonl(path, self.rows())

    def to_html(self, path: str | os.PathLike[str], images: Sequence[Any], *, title: str = "Album") -> Path:
        """Write a page without a server, which has every caption and pictures of the first `images`. Every text is escaped."""
        pictures: dict[int, dict[str, Any]] = {}
        for row in range(min(len(images), _MOST_PICTURES)):
            with suppress(ImageError):
                if self.images[row].unreadable is None:
                    picture = open_image(images[row]).copy()
                    picture.thumbnail((_SIDE, _SIDE))
                    pictures[row] = embedded_image(picture)
        left_out = max(0, len(images) - _MOST_PICTURES)
        shown: dict[str, Any] = {"title": title, "summary": self.summary(), "left_out": left_out, "rows": self.rows()}
        page = render_html(Path(__file__).parent / "templates", "album", **shown, pictures=pictures)
        return atomic_write_text(path, page)


# --- The steps -------------------------------------------------------------------------------------------------------


def describe_album(
    images: Sequence[Any],
    captioner: Captioner | Callable[[Sequence[int], Sequence[str]], list[list[str]]] | None,
    scorer: Scorer | None,
    *,
    captions: Sequence[Sequence[str] | str] | None = None,
    image_ids: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    settings: AlbumSettings | None = None,
    cache: FeatureCache | None = None,
    skip_unreadable: bool = False,
    edited: Mapping[int, str] | None = None,
    concepts: Sequence[Any] | None = None,
    **changes: Any,
) -> Album:
    """Caption every image of a set so that its caption is true of it and of no other image.

    Images with equal pixels share one caption and do not count as confusions of each other. The candidates of an image are
    existing captions, beams and samples. Shared phrases are removed from the candidates, and candidates are truncated, before
    they are compared with the images: ranks and margins are those of the captions that are returned. [`distinct_captions`]
    describes the choice.

    Args:
        images: Anything that `open_image` opens; read one by one.
        captioner ([`Captioner`], *optional*): Generates candidates; None uses only `captions`. Or a function that returns the
            candidates of rows of images and hashes of their pixels.
        scorer ([`Scorer`], *optional*): Compares captions and images. None: the first caption of each image is taken, and images
            are not opened.
        captions: Existing captions: one, several or none per image.
        image_ids: Names of the images; by default their numbers.
        groups: Name of each image's group, inside which shared phrases are searched; by default the album is one group.
            Copies belong to the group of the first copy.
        settings ([`AlbumSettings`], *optional*): Number of candidates, constraints, choice.
        cache ([`FeatureCache`], *optional*): Image features of an earlier run.
        skip_unreadable: Whether images that cannot be read are listed in the result instead of raising an `ImageError`.
        edited: Captions that a person has edited, by row of the album: they stay as they are.
        concepts: What each image shows, such as a product number: its images share one caption, which is chosen from the candidates of all
            of them and compared with their mean features.
        changes: Fields of [`AlbumSettings`] as keyword arguments, if `settings` is not passed.

    Returns:
        [`Album`]: Captions, copies, shared phrases, and methods that write them.

    Example:
        >>> from hf_captionrl import load_captioner, load_scorer
        >>> from hf_captionrl.scenes import load_scenes
        >>> captioner, scorer = load_captioner("scenes:blip-mle"), load_scorer("scenes:siglip-held-out")
        >>> images = load_scenes(num_train=0, num_validation=0, num_test=15)["test"]["image"][:3]
        >>> album = describe_album(images, captioner, scorer, num_samples=4)
        >>> len(set(album.captions))
        3
    """
    settings = AlbumSettings(**changes) if settings is None else settings
    check_words(settings)
    texts: Sequence[Sequence[str] | str] = [[]] * len(images) if captions is None else captions
    if not images or len(texts) != len(images) or (captioner is None and not any(texts)):
        raise ValueError(f"{len(images)} images, captions of {len(texts)}. Pass captions of each, or a captioner.")
    ids = [str(i) for i in (range(len(images)) if image_ids is None else image_ids)]
    groups = [""] * len(images) if groups is None else groups
    edited = edited or {}
    lists = (
        [edited[row]] if row in edited else [one] if isinstance(one, str) else one for row, one in enumerate(texts)
    )
    existing = [[text for text in one if text.strip()] for one in lists]
    compared = ComparedImages(images, scorer, cache, settings.batch_size, skip_unreadable, concepts)
    rows, leader_of = compared.rows, compared.leader_of

    # The existing captions of each leader and of its copies, and which images need candidates.
    old: list[list[str]] = [[] for _ in rows]
    for row, leader in leader_of.items():
        old[leader] += existing[row]
    by_person = {leader_of[row]: text for row, text in edited.items() if row in leader_of}
    old = [[by_person[at]] if at in by_person else list(dict.fromkeys(texts)) for at, texts in enumerate(old)]
    is_fixed = [bool(texts) and (settings.prefer_existing or at in by_person) for at, texts in enumerate(old)]
    candidates = [texts[:1] if fixed else texts for texts, fixed in zip(old, is_fixed, strict=True)]
    places = [] if captioner is None else [place for place in compared.different if not is_fixed[place[0]]]
    generated: list[list[str]] = [[] for _ in rows]
    for start in tqdm.trange(0, len(places), settings.batch_size, desc="captioning", unit=" batches", disable=None):
        batch = places[start : start + settings.batch_size]
        chosen = [row for _, row, _ in batch]
        if isinstance(captioner, Captioner):
            new = generate_candidates(captioner, images, chosen, ids, settings)
        else:
            assert captioner is not None
            new = captioner(chosen, [key for _, _, key in batch])
        for (at, _, _), written in zip(batch, new, strict=True):
            generated[at] += written
    pairs = zip(generated, candidates, strict=True)
    candidates = [list(dict.fromkeys([*new, *texts])) or [""] for new, texts in pairs]

    shared: dict[str, tuple[str, ...]] = {}
    if settings.drop_shared:
        unedited = compared.choose(candidates, replace(settings, max_characters=None, trigger=None))
        shared = shared_of_groups(unedited, [groups[row] for row in rows], settings.shared_share)

    def worded(row: int, text: str) -> str:
        phrases = shared.get(groups[row], ())
        is_plain = not text.strip() or (not phrases and settings.trigger is None)
        return text if is_plain else drop_shared(text, phrases, trigger=settings.trigger)

    for at, (row, fixed) in enumerate(zip(rows, is_fixed, strict=True)):
        if at not in by_person:
            candidates[at] = list(dict.fromkeys(worded(row, text) for text in candidates[at]))
            candidates[at] = candidates[at] if fixed else shortened(candidates[at], settings)
    choice = compared.choose(candidates, settings)
    captions_of: dict[int, str] = {}
    for row, leader in leader_of.items():
        first = next(iter(existing[row]), None)
        if first is not None and row in edited:
            captions_of[row] = first
        elif first is not None and settings.prefer_existing:  # copies have their own captions
            captions_of[row] = worded(row, first)
        else:
            captions_of[row] = choice[leader]
    facts, first_of = compared.facts(captions_of, settings), compared.first_of
    made = [
        AlbumImage(
            image_id,
            old=next(iter(existing[row]), None),
            copy_of=None if first_of.get(row, row) == row else first_of[row],
            unreadable=compared.unreadable.get(row),
            **{"caption": "", **facts.get(row, {})},
        )
        for row, image_id in enumerate(ids)
    ]
    number = 1 if scorer is None else len(rows)
    return Album(made, number, {group: phrases for group, phrases in shared.items() if phrases})


class ComparedImages:
    """The readable images of an album, of which equal ones, or with concepts those of one concept, share a leader, and what a scorer says about captions.

    Without a scorer, the images are not opened, and the first caption of each is as good as any.
    """

    def __init__(
        self,
        images: Sequence[Any],
        scorer: Scorer | None,
        cache: FeatureCache | None,
        batch_size: int,
        skip_unreadable: bool,
        concepts: Sequence[Any] | None = None,
    ) -> None:
        self.scorer = scorer
        self.unreadable: dict[int, str] = {}
        numbers = None if concepts is None else concept_numbers(concepts)
        readable = [*range(len(images))]
        keys = [*map(str, readable)]  # of pixels, if they are read
        if scorer is not None:
            unreadable = self.unreadable if skip_unreadable else None
            facts = read_images(images, scorer, cache=cache, batch_size=batch_size, unreadable=unreadable)
            readable, keys = facts.rows, facts.keys
        first_row, first_at = dict[Any, int](), dict[Any, int]()
        self.first_of = {row: first_row.setdefault(key, row) for row, key in zip(readable, keys, strict=True)}
        things: Sequence[Any] = keys if numbers is None else [numbers[row] for row in readable]
        lead = np.array([first_at.setdefault(thing, at) for at, thing in enumerate(things)])
        leaders, leader_of = np.unique(lead, return_inverse=True)  # positions among the readable images
        self.rows = [readable[at] for at in leaders.tolist()]  # album rows of the leaders
        self.leader_of = dict(zip(readable, leader_of.tolist(), strict=True))  # by album row, a number below L
        different = {(self.leader_of[row], key): row for row, key in reversed([*zip(readable, keys, strict=True)])}
        self.different = sorted((at, row, key) for (at, key), row in different.items())
        """Leader, first row and key of images with different pixels."""
        if scorer is None:
            return
        self.image_features = facts.features[torch.from_numpy(leaders)]  # (L, D)
        if numbers is not None:
            unit = unit_rows(facts.features)
            self.image_features = unit.new_zeros(len(leaders), unit.size(1))
            self.image_features.index_add_(0, torch.from_numpy(leader_of), unit)

    def text_features(self, captions: Sequence[str]) -> Features:
        texts, scorer = spoken(captions), self.scorer
        assert scorer is not None
        return lambda rows: scorer.text_features([texts[row] for row in rows.tolist()])

    def choose(self, candidates: list[list[str]], settings: AlbumSettings) -> list[str]:
        """One of its candidates for each leader."""
        if self.scorer is None:
            return [texts[0] for texts in candidates]
        flat = [text for texts in candidates for text in texts]
        allowed = check_candidates(flat, settings)
        return distinct_captions(candidates, self.text_features(flat), self.image_features, allowed=allowed)

    def facts(self, captions: Mapping[int, str], settings: AlbumSettings) -> dict[int, dict[str, Any]]:
        """Compare captions, by row of the album, with the images and with each other; blank ones are left out."""
        rows = sorted((row for row, text in captions.items() if text.strip()), key=self.leader_of.__getitem__)
        flat = [captions[row] for row in rows]
        results: Sequence[tuple[Any, Any, tuple[int, ...]]] = [(None, None, ())] * len(rows)
        if self.scorer is not None:
            counts = np.bincount(np.array([self.leader_of[row] for row in rows], np.int64), minlength=len(self.rows))
            starts = np.cumsum([0, *counts])
            results = confusions_of(self.text_features(flat), starts, unit_rows(self.image_features).float())
        holders: dict[str, set[int]] = {}
        for row, text in zip(rows, flat, strict=True):
            holders.setdefault(same_text(text), set()).add(self.leader_of[row])
        fits = meets_constraints(flat, settings).tolist()
        return {
            row: {
                "caption": text,
                "rank": rank,
                "margin": margin if len(self.rows) > 1 else None,
                "is_distinct": bool(same_text(text)) and len(holders[same_text(text)]) == 1,
                "confused_with": tuple(self.rows[other] for other in others),
                "meets_constraints": is_fit,
            }
            for row, text, (rank, margin, others), is_fit in zip(rows, flat, results, fits, strict=True)
        }


# --- Candidates from beams and samples -------------------------------------------------------------------------------


def generate_candidates(
    captioner: Captioner | EndpointCaptioner,
    images: Sequence[Any],
    rows: Sequence[int],
    image_ids: Sequence[str],
    options: CandidateOptions,
) -> list[list[str]]:
    """Candidates of a batch of images, without repeated texts. The caller's random state does not change.

    The seed depends on the first image, so the samples do not depend on earlier batches. An endpoint gives a greedy caption and
    samples.
    """
    candidates: list[list[str]] = []
    if isinstance(captioner, EndpointCaptioner):
        for chunk, opened in opened_chunks(images, rows, options.batch_size):
            ids = [image_ids[row] for row in chunk]
            answers = captioner.describe(ids, opened, 1 + options.num_samples)
            for image_id, answer in zip(ids, answers, strict=True):
                if not answer:
                    raise BackendError(
                        f"Image {image_id!r} has no answer: {captioner.failed[image_id]}. Use the same command to ask again, or "
                        "leave the image out; other answers are kept."
                    )
                candidates.append(list(dict.fromkeys(map(str, answer))))
        return candidates
    # All settings are explicit, so that the checkpoint's defaults have no effect.
    words = forbidden_tokens(captioner.tokenizer, options.do_not_mention)
    wording: dict[str, Any] = {"max_new_tokens": options.max_new_tokens} | ({"bad_words_ids": words} if words else {})
    if options.min_new_tokens:
        wording["min_new_tokens"] = options.min_new_tokens
    sampling = {"do_sample": True, "num_beams": 1, "num_return_sequences": options.num_samples, **wording}
    sampling |= {"temperature": options.temperature, "top_p": 1.0, "top_k": 0}
    beams = {"do_sample": False, "num_beams": options.num_beams, "num_return_sequences": options.num_beams, **wording}
    device = captioner.device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), prompt_without(captioner, options.do_not_mention):
        torch.manual_seed(seed_of_batch(options.seed, image_ids[rows[0]]))
        for chunk, opened in opened_chunks(images, rows, options.batch_size):
            inputs = captioner.encode_images(opened)
            texts = _grouped(captioner.generate(**inputs, **beams).captions, len(chunk))
            if options.num_samples:
                samples = _grouped(captioner.generate(**inputs, **sampling).captions, len(chunk))
                texts = [beam + more for beam, more in zip(texts, samples, strict=True)]
            candidates += [list(dict.fromkeys(one)) for one in texts]
    return candidates


def _grouped(texts: Sequence[str], number: int) -> list[list[str]]:
    each = len(texts) // number
    return [list(texts[start : start + each]) for start in range(0, len(texts), each)]
