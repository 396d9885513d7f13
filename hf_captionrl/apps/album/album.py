"""A distinct caption for each image of a set: copies of images, candidates, their scores, and the choice.

Legend: M images, L leaders (images that are not copies of an earlier one), S candidates, D features.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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
from hf_captionrl.captioners.language_models import BackendError, EndpointCaptioner
from hf_captionrl.captioners.prompts import forbidden_tokens, prompt_without
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.retrieval import FeatureCache, Scorer
from hf_captionrl.retrieval.ranking import unit_rows
from hf_captionrl.utils.io import atomic_write_text, csv_cell, write_jsonl
from hf_captionrl.utils.parts import seed_of_batch

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


# --- The steps -------------------------------------------------------------------------------------------------------


def describe_album(
    images: Sequence[Any],
    captioner: Captioner | None,
    scorer: Scorer,
    *,
    captions: Sequence[Sequence[str] | str] | None = None,
    image_ids: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    settings: AlbumSettings | None = None,
    cache: FeatureCache | None = None,
    skip_unreadable: bool = False,
    **changes: Any,
) -> Album:
    """Caption every image of a set so that its caption is true of it and of no other image.

    Images with equal pixels share one caption and do not count as confusions of each other. The candidates of an image are
    existing captions, beams and samples. Shared phrases are removed from the candidates, and candidates are truncated, before
    they are compared with the images: ranks and margins are those of the captions that are returned. [`distinct_captions`]
    describes the choice.

    Args:
        images: Anything that `open_image` opens; read one by one.
        captioner ([`Captioner`], *optional*): Generates candidates; None uses only `captions`.
        scorer ([`Scorer`]): Compares captions and images.
        captions: Existing captions: one, several or none per image.
        image_ids: Names of the images; by default their numbers.
        groups: Name of each image's group, inside which shared phrases are searched; by default the album is one group.
            Copies belong to the group of the first copy.
        settings ([`AlbumSettings`], *optional*): Number of candidates, constraints, choice.
        cache ([`FeatureCache`], *optional*): Image features of an earlier run.
        skip_unreadable: Whether images that cannot be read are listed in the result instead of raising an `ImageError`.
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
    existing = [[one] if isinstance(one, str) else list(one) for one in texts]
    if not images or len(existing) != len(images) or (captioner is None and not any(existing)):
        raise ValueError(f"{len(images)} images, captions of {len(existing)}. Pass captions of each, or a captioner.")
    ids = [str(i) for i in (range(len(images)) if image_ids is None else image_ids)]

    def generate(rows: Sequence[int], keys: Sequence[str]) -> list[list[str]]:
        assert captioner is not None
        return generate_candidates(captioner, images, rows, ids, settings)

    return AlbumSteps(
        images,
        ids,
        existing,
        [""] * len(images) if groups is None else list(groups),
        settings,
        scorer,
        None if captioner is None else generate,
        cache,
        skip_unreadable,
    ).album()


@dataclass
class AlbumSteps:
    """All steps of [`describe_album`]: the images and their copies, and the choice of captions."""

    images: Sequence[Any]
    image_ids: Sequence[str]
    existing: list[list[str]]
    groups: Sequence[str]
    settings: AlbumSettings
    scorer: Scorer | None  # None: captions are not compared with images, which are not opened
    generate: (
        Callable[[Sequence[int], Sequence[str]], list[list[str]]] | None
    )  # candidates of rows with hashes of pixels
    cache: FeatureCache | None = None
    skip_unreadable: bool = False
    edited: Mapping[int, str] = field(default_factory=dict)  # captions that a person has edited, by row: they stay

    def __post_init__(self) -> None:
        texts = ([self.edited[row]] if row in self.edited else texts for row, texts in enumerate(self.existing))
        self.existing = [[text for text in row if text.strip()] for row in texts]
        self.unreadable: dict[int, str] = {}
        if self.scorer is None:
            self.rows, self.keys = list(range(len(self.images))), [""] * len(self.images)
            self.leader_of = {row: row for row in self.rows}
            return
        images = read_images(
            self.images,
            self.scorer,
            cache=self.cache,
            batch_size=self.settings.batch_size,
            unreadable=self.unreadable if self.skip_unreadable else None,
        )
        first_of: dict[str, int] = {}
        lead = np.array([first_of.setdefault(key, at) for at, key in enumerate(images.keys)])
        leaders, leader_of = np.unique(lead, return_inverse=True)  # positions among the readable images
        self.rows = [images.rows[at] for at in leaders.tolist()]  # album rows of the leaders
        self.keys = [images.keys[at] for at in leaders.tolist()]
        self.leader_of = dict(zip(images.rows, leader_of.tolist(), strict=True))  # by album row, a number below L
        self.features = images.features[torch.from_numpy(leaders)]  # (L, D)

    def album(self) -> Album:
        """Choose a caption for each leader; copies get the same."""
        settings = self.settings
        old: list[list[str]] = [[] for _ in self.rows]
        for row, leader in self.leader_of.items():
            old[leader] += self.existing[row]
        by_person = {self.leader_of[row]: text for row, text in self.edited.items() if row in self.leader_of}
        old = [[by_person[at]] if at in by_person else list(dict.fromkeys(texts)) for at, texts in enumerate(old)]
        is_kept = [bool(texts) and (settings.prefer_existing or at in by_person) for at, texts in enumerate(old)]
        candidates = [texts[:1] if keep else texts for texts, keep in zip(old, is_kept, strict=True)]
        places = [at for at, keep in enumerate(is_kept) if not keep and self.generate is not None]
        for at, new in zip(places, self._generated(places), strict=True):
            candidates[at] = list(dict.fromkeys([*new, *old[at]]))
        candidates = [texts or [""] for texts in candidates]
        shared: dict[str, tuple[str, ...]] = {}
        if settings.drop_shared:
            unedited = self._distinct(candidates, replace(settings, max_characters=None, trigger=None))
            shared = shared_of_groups(unedited, [self.groups[row] for row in self.rows], settings.shared_share)

        def worded(row: int, text: str) -> str:
            phrases = shared.get(self.groups[row], ())
            is_plain = not text.strip() or (not phrases and settings.trigger is None)
            return text if is_plain else drop_shared(text, phrases, trigger=settings.trigger)

        for at, (row, keep) in enumerate(zip(self.rows, is_kept, strict=True)):
            if at not in by_person:
                texts = list(dict.fromkeys(worded(row, text) for text in candidates[at]))
                candidates[at] = texts if keep else shortened(texts, settings)
        captions = self._distinct(candidates, settings)
        texts_of: dict[int, str] = {}
        for row, leader in self.leader_of.items():
            own = next(iter(self.existing[row]), None)
            if own is not None and row in self.edited:
                texts_of[row] = own
            elif own is not None and settings.prefer_existing:  # copies have their own captions
                texts_of[row] = worded(row, own)
            else:
                texts_of[row] = captions[leader]
        number = 1 if self.scorer is None else len(self.rows)
        return Album(self._judged(texts_of), number, {group: phrases for group, phrases in shared.items() if phrases})

    def _generated(self, places: Sequence[int]) -> list[list[str]]:
        """Candidates of some leaders, batch by batch."""
        texts, size = [], self.settings.batch_size
        for start in tqdm.trange(0, len(places), size, desc="captioning", unit=" batches", disable=None):
            batch = places[start : start + size]
            assert self.generate is not None
            texts += self.generate([self.rows[at] for at in batch], [self.keys[at] for at in batch])
        return texts

    def _distinct(self, candidates: list[list[str]], settings: AlbumSettings) -> list[str]:
        """Score the candidates, and assign each leader one; without a scorer, its first."""
        if self.scorer is None:
            return [texts[0] for texts in candidates]
        flat = [text for texts in candidates for text in texts]
        return distinct_captions(
            candidates,
            self._features(flat),
            self.features,
            allowed=check_candidates(flat, settings),
        )

    def _features(self, captions: Sequence[str]) -> Features:
        texts, scorer = spoken(captions), self.scorer
        assert scorer is not None
        return lambda rows: scorer.text_features([texts[row] for row in rows.tolist()])

    def _judged(self, texts: Mapping[int, str]) -> list[AlbumImage]:
        """Compare captions, by row of the album, with the images and with each other."""
        rows = sorted((row for row, text in texts.items() if text.strip()), key=self.leader_of.__getitem__)
        flat = [texts[row] for row in rows]
        results: Sequence[tuple[Any, Any, tuple[int, ...]]] = [(None, None, ())] * len(rows)
        if self.scorer is not None:
            counts = np.bincount(np.array([self.leader_of[row] for row in rows], np.int64), minlength=len(self.rows))
            starts = np.cumsum([0, *counts])
            results = confusions_of(self._features(flat), starts, unit_rows(self.features).float())
        holders: dict[str, set[int]] = {}
        for row, text in zip(rows, flat, strict=True):
            holders.setdefault(same_text(text), set()).add(self.leader_of[row])
        facts: dict[int, dict[str, Any]] = {}
        fits = meets_constraints(flat, self.settings).tolist()
        for row, text, (rank, margin, others), is_fit in zip(rows, flat, results, fits, strict=True):
            facts[row] = {
                "caption": text,
                "rank": rank,
                "margin": margin if len(self.rows) > 1 else None,
                "is_distinct": bool(same_text(text)) and len(holders[same_text(text)]) == 1,
                "confused_with": tuple(self.rows[other] for other in others),
                "meets_constraints": is_fit,
            }
        first = {row: self.rows[leader] for row, leader in self.leader_of.items()}
        return [
            AlbumImage(
                image_id,
                old=next(iter(self.existing[row]), None),
                copy_of=None if first.get(row, row) == row else first[row],
                unreadable=self.unreadable.get(row),
                **{"caption": "", **facts.get(row, {})},
            )
            for row, image_id in enumerate(self.image_ids)
        ]


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
