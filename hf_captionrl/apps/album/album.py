"""A distinct caption for each image of a set: facts of images, candidates, scores, assignment, problems of captions.

Legend: M images, L leaders (images that are not copies of an earlier one), S candidates, k neighbours, D features.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup

from hf_captionrl.apps.album.assignment import Choice, Features, confusions_of, distinct_captions, same_text
from hf_captionrl.apps.album.candidates import generate_candidates
from hf_captionrl.apps.album.options import NEIGHBOURS, SMALL_ALBUM, AlbumSettings, check_words
from hf_captionrl.apps.album.phrases import (
    GroupFacts,
    check_candidates,
    drop_shared,
    group_facts,
    meets_constraints,
    shortened,
)
from hf_captionrl.apps.album.sources import read_images
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.prompts import ImagePrompts
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.retrieval import FeatureCache, Scorer, approximate_neighbours, nearest_neighbours
from hf_captionrl.retrieval.neighbours import rank_rows
from hf_captionrl.retrieval.ranking import unit_rows
from hf_captionrl.text.degenerate_captions import degenerate
from hf_captionrl.utils.io import atomic_write_text, csv_cell, write_jsonl

_MOST_EXACT = 200_000  # images whose neighbours are searched exactly, which takes hours for more
_SHOWN = 50  # captions in a notebook

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
        confused_with: Rows of the other images that the caption fits at least as well, best first.
        copy_of: Row of the first image with the same pixels.
        unreadable: Why the image cannot be read; None if it can.
        meets_constraints: Whether the caption meets the constraints on length and words.
        is_edited: Whether a person has edited the caption in the table of an earlier run.
        problems: What is wrong with the caption, see [`diagnose`].
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
    problems: tuple[str, ...] = ()


@dataclass
class Album:
    """Captions of an album.

    Args:
        images: In the order of the album.
        num_compared: Number of images that each caption was ranked among, the target included.
        choice: How the captions were chosen; None if existing captions were diagnosed.
        shared: What the captions of each group share, and what varies.
    """

    images: list[AlbumImage]
    num_compared: int
    choice: Choice | None = field(default=None, repr=False)
    shared: list[GroupFacts] = field(default_factory=list)

    @property
    def compares_images(self) -> bool:
        """Whether captions were compared with images."""
        return any(one.rank is not None for one in self.images) or not any(self.captions)

    @property
    def captions(self) -> list[str]:
        """The caption of each image; empty where there is none."""
        return [image.caption for image in self.images]

    @property
    def copies(self) -> list[tuple[int, ...]]:
        """Groups of rows that show the same image, the first one first."""
        groups: dict[int, list[int]] = {}
        for row, image in enumerate(self.images):
            if image.copy_of is not None:
                groups.setdefault(image.copy_of, [image.copy_of]).append(row)
        return [tuple(rows) for rows in groups.values()]

    @property
    def confusions(self) -> list[tuple[int, int]]:
        """Pairs (row, other row): the caption of the first image fits the second one at least as well. Copies are left out."""
        images = enumerate(self.images)
        return [(row, other) for row, one in images if one.copy_of is None for other in one.confused_with]

    def summary(self) -> dict[str, Any]:
        """Counts of the album, fractions of the captions of different images, and the phrases that its groups share."""
        described = [one for one in self.images if one.caption.strip() and one.copy_of is None]
        count = max(len(described), 1)
        summary: dict[str, Any] = {
            "images": len(self.images),
            "captions": sum(bool(image.caption.strip()) for image in self.images),
            "copies": sum(image.copy_of is not None for image in self.images),
            "unreadable": sum(image.unreadable is not None for image in self.images),
            "compared_with": self.num_compared - 1,
            "distinct": sum(image.is_distinct for image in described) / count,
            "rank_1": sum(image.rank == 1 for image in described) / count,
            "rank_1_and_distinct": sum(image.is_distinct and image.rank == 1 for image in described) / count,
            "words": sum(len(image.caption.split()) for image in described) / count,
            "problems": dict(sorted(Counter(problem for one in self.images for problem in one.problems).items())),
            "shared": [asdict(fact) for fact in self.shared],
        }
        if self.choice is not None:
            summary |= {"texts_possible_more": self.choice.gap, "rank_1_possible_more": self.choice.rank_gap}
        return summary

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
                "confused_with": [ids[other] for other in image.confused_with[:5]],
                "copy_of": None if image.copy_of is None else ids[image.copy_of],
                "problems": list(image.problems),
                "unreadable": image.unreadable,
            }
            for image in self.images
        ]

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write a table for Excel: UTF-8 with a byte order mark, and no cell that Excel would evaluate as a formula."""
        buffer = io.StringIO(newline="")
        rows = self.rows()
        writer = csv.DictWriter(buffer, list(rows[0]))
        writer.writeheader()
        for row in rows:
            cells = {name: " | ".join(value) if isinstance(value, list) else value for name, value in row.items()}
            writer.writerow({name: csv_cell(value) for name, value in cells.items()})
        return atomic_write_text(path, "\ufeff" + buffer.getvalue())

    def to_jsonl(self, path: str | os.PathLike[str]) -> Path:
        """Write one JSON object per image."""
        return write_jsonl(path, self.rows())

    def _repr_html_(self) -> str:
        """A table of the first captions, for notebooks."""
        row = Markup("<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>")
        images = self.images[:_SHOWN]
        shown = [row.format(one.image_id, one.caption, one.rank or "", ", ".join(one.problems)) for one in images]
        left = len(self.images) - len(shown)
        more = Markup("<p>{} more; write all of them with to_csv or to_jsonl.</p>").format(left) if left else ""
        head = f"<tr><th>image</th><th>caption</th><th>rank of {self.num_compared}</th><th>problems</th></tr>"
        return whole_text(f"<table><thead>{head}</thead><tbody>{''.join(shown)}</tbody></table>{more}")


# --- The steps -------------------------------------------------------------------------------------------------------


def describe_album(
    images: Sequence[Any],
    captioner: Captioner | None,
    scorer: Scorer,
    *,
    captions: Sequence[Sequence[str] | str] | None = None,
    image_ids: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    diagnose_only: bool | None = None,
    settings: AlbumSettings | None = None,
    cache: FeatureCache | None = None,
    skip_unreadable: bool = False,
    progress: Callable[[str, int], Any] | None = None,
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
        diagnose_only: Diagnose the first existing caption of each image instead of choosing one. None: if there is no captioner.
        settings ([`AlbumSettings`], *optional*): Number of candidates, constraints, choice.
        cache ([`FeatureCache`], *optional*): Image features of an earlier run.
        skip_unreadable: Whether images that cannot be read are listed in the result instead of raising an `ImageError`.
        progress: Called with the name of a stage and the number of images it has finished since the last call.
        changes: Fields of [`AlbumSettings`] as keyword arguments, if `settings` is not passed.

    Returns:
        [`Album`]: Captions, copies, confusions, shared phrases, and methods that write them.

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
    number = len(images)
    texts = [[]] * number if captions is None else captions
    existing = [[one] if isinstance(one, str) else list(one) for one in texts]
    if number == 0 or len(existing) != number:
        raise ValueError(
            f"There are {number} images and captions of {len(existing)}. Use at least one, and captions of each."
        )
    diagnoses = captioner is None if diagnose_only is None else diagnose_only
    if diagnoses and not any(existing):
        raise ValueError("There are no captions to diagnose. Pass captions, or a captioner that writes them.")
    ids = [str(i) for i in (range(number) if image_ids is None else image_ids)]
    names = [""] * number if groups is None else list(groups)
    work = AlbumWork(images, ids, captioner, scorer, settings, cache, skip_unreadable, progress)
    return AlbumSteps(work, existing, names).album(diagnoses)


@dataclass
class AlbumWork:
    """Images and models of an album; a subclass keeps the candidates."""

    images: Sequence[Any]
    image_ids: Sequence[str]
    captioner: Any  # a `Captioner`, an `EndpointCaptioner` or None
    scorer: Any  # None: captions are not compared with images, which are not opened
    settings: AlbumSettings
    cache: FeatureCache | None = None
    skip_unreadable: bool = False
    progress: Callable[[str, int], Any] | None = None
    prompts: ImagePrompts | None = None  # None: only of the settings

    def candidates(self, rows: Sequence[int], keys: Sequence[str]) -> list[list[str]]:
        """Generated candidates of some rows of the album, whose pixels have the hashes `keys`, batch by batch."""
        size = self.settings.batch_size
        texts = []
        for start in range(0, len(rows), size):
            texts += self.batch(rows[start : start + size], keys[start : start + size])
            self.report("captioning", len(rows[start : start + size]))
        return texts

    def batch(self, rows: Sequence[int], keys: Sequence[str]) -> list[list[str]]:
        """Candidates of one batch."""
        return generate_candidates(self.captioner, self.images, rows, self.image_ids, self.settings, self.prompts)

    def report(self, stage: str, number: int) -> None:
        """Tell how many images a stage has finished since the last call."""
        if self.progress is not None:
            self.progress(stage, number)


class AlbumSteps:
    """All steps of [`describe_album`]: the images, their copies and neighbours, and the choice or diagnosis of captions.

    `edited` are captions that a person has edited after an earlier run, by row; they stay as they are.
    """

    def __init__(
        self, work: AlbumWork, existing: list[list[str]], groups: list[str], edited: Mapping[int, str] | None = None
    ) -> None:
        self.work, self.settings, self.groups, self.edited = work, work.settings, groups, edited or {}
        texts = ([self.edited[row]] if row in self.edited else mine for row, mine in enumerate(existing))
        self.existing = [[whole for text in mine if (whole := whole_text(text)).strip()] for mine in texts]
        self.unreadable: dict[int, str] = {}
        self.neighbours = None
        number = len(work.images)
        if work.scorer is None:
            self.rows, self.keys = list(range(number)), [""] * number
            self.leader_of = {row: row for row in self.rows}
            return
        images = read_images(
            work.images,
            work.scorer,
            cache=work.cache,
            batch_size=self.settings.batch_size,
            unreadable=self.unreadable if work.skip_unreadable else None,
            progress=lambda number: work.report("reading", number),
        )
        number, near = len(images.rows), None
        k = self.settings.neighbours or (NEIGHBOURS if number > SMALL_ALBUM else number)
        if k < number - 1:
            is_large = number > _MOST_EXACT and importlib.util.find_spec("faiss") is not None
            near = (approximate_neighbours if is_large else nearest_neighbours)(images.features, k)[0]
        first_of: dict[str, int] = {}
        lead = np.array([first_of.setdefault(key, at) for at, key in enumerate(images.keys)])
        leaders, leader_of = np.unique(lead, return_inverse=True)  # positions among the readable images
        self.rows = [images.rows[at] for at in leaders.tolist()]  # album rows of the leaders
        self.keys = [images.keys[at] for at in leaders.tolist()]
        self.leader_of = dict(zip(images.rows, leader_of.tolist(), strict=True))  # by album row, a number below L
        first = torch.from_numpy(leaders)
        self.features = images.features[first]  # (L, D)
        if near is not None:
            k = min(k, len(first) - 1)
            place = torch.full((number,), -1)
            place[first] = torch.arange(len(first))
            self.neighbours = place[near[first, :k]]  # (L, k): numbers of leaders
            again = torch.nonzero((self.neighbours < 0).any(1)).flatten()  # a copy was among them
            if len(again) and k:
                self.neighbours[again] = rank_rows(self.features, k, rows=again)[0]

    def album(self, diagnose_only: bool) -> Album:
        """The captions and what is wrong with them."""
        album = self._existing() if diagnose_only else self._chosen()
        if not album.shared:  # else the phrases were searched to remove them
            rows = [row for row, image in enumerate(album.images) if image.copy_of is None]
            album.shared = self._shared(rows, [album.images[row].caption for row in rows])
        diagnose(album, self.work.scorer)
        return album

    def _chosen(self) -> Album:
        """Choose a caption for each leader; copies get the same."""
        settings = self.settings
        old: list[list[str]] = [[] for _ in self.rows]
        for row, leader in self.leader_of.items():
            old[leader] += self.existing[row]
        by_person = {self.leader_of[row]: text for row, text in self.edited.items() if row in self.leader_of}
        old = [[by_person[at]] if at in by_person else list(dict.fromkeys(texts)) for at, texts in enumerate(old)]
        kept = [bool(texts) and (settings.prefer_existing or at in by_person) for at, texts in enumerate(old)]
        candidates = [texts[:1] if keep else texts for texts, keep in zip(old, kept, strict=True)]
        if self.work.captioner is not None:
            places = [at for at, keep in enumerate(kept) if not keep]
            rows, keys = [self.rows[at] for at in places], [self.keys[at] for at in places]
            for at, new in zip(places, self.work.candidates(rows, keys), strict=True):
                candidates[at] = list(dict.fromkeys([*new, *old[at]]))
        candidates = [texts or [""] for texts in candidates]
        facts: list[GroupFacts] = []
        if settings.drop_shared or settings.trigger:
            plain = replace(settings, max_characters=None, trigger=None)
            facts = self._shared(self.rows, self._distinct(candidates, plain, "comparing unedited captions")[0])
        worded = self._wording(facts)
        for at, (row, keep) in enumerate(zip(self.rows, kept, strict=True)):
            if at not in by_person:
                texts = list(dict.fromkeys(worded(row, text) for text in candidates[at]))
                candidates[at] = texts if keep else shortened(texts, settings)
        captions, choice = self._distinct(candidates, settings)
        texts_of: dict[int, str] = {}
        for row, leader in self.leader_of.items():
            own = next(iter(self.existing[row]), None)
            if own is not None and row in self.edited:
                texts_of[row] = own
            elif own is not None and settings.prefer_existing:  # copies have their own captions
                texts_of[row] = worded(row, own)
            else:
                texts_of[row] = captions[leader]
        return self._judged(texts_of, choice, facts)

    def _wording(self, facts: Sequence[GroupFacts]) -> Callable[[int, str], str]:
        """What removes the phrases that the group of a row shares from a text, and adds the trigger."""
        settings = self.settings
        phrases = {fact.group: fact.shared for fact in facts if settings.drop_shared}

        def worded(row: int, text: str) -> str:
            shared = phrases.get(self.groups[row], ())
            if not text.strip() or (not shared and settings.trigger is None):
                return text
            return drop_shared(text, shared, trigger=settings.trigger)

        return worded

    def _shared(self, rows: Sequence[int], texts: Sequence[str]) -> list[GroupFacts]:
        """What the captions of each group share; blank ones are left out."""
        kept = [(text, self.groups[row]) for row, text in zip(rows, texts, strict=True) if text.strip()]
        share = self.settings.shared_share
        return group_facts([text for text, _ in kept], [group for _, group in kept], min_share=share)

    def _distinct(
        self, candidates: list[list[str]], settings: AlbumSettings, stage: str = "comparing"
    ) -> tuple[list[str], Choice]:
        """Score the candidates, and assign each leader one."""
        allowed = check_candidates([text for texts in candidates for text in texts], settings)
        if settings.choice == "first":
            starts = np.cumsum([0, *map(len, candidates)])
            # The first allowed candidate of each leader, or the first one if none is allowed.
            candidates = [
                [texts[int(allowed[at : at + len(texts)].argmax())]]
                for at, texts in zip(starts, candidates, strict=False)
            ]
            allowed = np.ones(len(candidates), bool)
        return distinct_captions(
            candidates,
            self._features([text for texts in candidates for text in texts]),
            self.features,
            neighbours=self.neighbours,
            allowed=allowed,
            max_component=settings.max_component,
            exclusive=settings.choice == "assignment",
            progress=lambda number: self.work.report(stage, number),
        )

    def _features(self, captions: Sequence[str]) -> Features:
        texts = spoken(captions)
        return lambda rows: self.work.scorer.text_features([texts[row] for row in rows.tolist()])

    def _existing(self) -> Album:
        """The first existing caption of each image, also of copies; shared phrases are removed and the trigger added on request."""
        texts = {row: self.existing[row][0] for row in self.leader_of if self.existing[row]}
        facts: list[GroupFacts] = []
        if self.settings.drop_shared or self.settings.trigger:
            facts = self._shared(list(texts), list(texts.values()))
        worded = self._wording(facts)
        return self._judged({row: worded(row, text) for row, text in texts.items()}, shared=facts)

    def _judged(
        self, texts: Mapping[int, str], choice: Choice | None = None, shared: Sequence[GroupFacts] = ()
    ) -> Album:
        """Compare captions, by row of the album, with the images."""
        rows = sorted((row for row, text in texts.items() if text.strip()), key=self.leader_of.__getitem__)
        flat = [texts[row] for row in rows]
        results: Any = repeat(((), None))
        if self.work.scorer is not None:
            counts = np.bincount(np.array([self.leader_of[row] for row in rows], np.int64), minlength=len(self.rows))
            starts = np.cumsum([0, *counts])
            results = confusions_of(self._features(flat), starts, unit_rows(self.features).float(), self.neighbours)
        facts: dict[int, dict[str, Any]] = {}
        for row, text, (others, margin), fits in zip(
            rows, flat, results, meets_constraints(flat, self.settings).tolist(), strict=False
        ):
            facts[row] = {
                "caption": text,
                "rank": None if margin is None else 1 + len(others),
                "margin": margin if len(self.rows) > 1 else None,
                "confused_with": tuple(self.rows[other] for other in others),
                "meets_constraints": fits,
            }
        images = []
        for row, image_id in enumerate(self.work.image_ids):
            leader = self.leader_of.get(row)
            images.append(
                AlbumImage(
                    image_id,
                    old=next(iter(self.existing[row]), None),
                    copy_of=None if leader is None or self.rows[leader] == row else self.rows[leader],
                    unreadable=self.unreadable.get(row),
                    **{"caption": "", **facts.get(row, {})},
                )
            )
        number = len(self.rows) if self.neighbours is None else 1 + self.neighbours.shape[1]
        # Without a scorer, no caption was compared with another image.
        return Album(images, 1 if self.work.scorer is None else number, choice=choice, shared=list(shared))


def whole_text(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair, such as that of a broken emoji, which no tokenizer reads."""
    return text.encode("utf-8", "replace").decode()


# --- What is wrong with a caption ------------------------------------------------------------------------------------

PROBLEMS = {
    "missing": "the image has no caption",
    "duplicate": "another image, which is not a copy, has the same text",
    "generic": "the caption fits at least half of the images that it was compared with, and at least three",
    "ambiguous": "the caption fits another image at least as well",
    "unread": "the scorer truncates the caption, so the rank applies only to its beginning",
    "repetitive": "a phrase or word is repeated",
    "constraint": "the caption does not meet the constraints on length and words, because no candidate does",
}
"""Problems of captions; a caption may have several."""


def diagnose(album: Album, scorer: Scorer | None) -> None:
    """Set `is_distinct` and `problems` of every caption whose image can be read."""
    holders: dict[str, set[int]] = {}
    for row, one in enumerate(album.images):
        holders.setdefault(same_text(one.caption), set()).add(row if one.copy_of is None else one.copy_of)
    texts = album.captions
    count = getattr(scorer, "count_tokens", None)
    if scorer is None:
        is_truncated = [False] * len(texts)
    elif count is None:
        is_truncated = [scorer.count_truncated([text]) > 0 for text in texts]
    else:
        is_truncated = [number > scorer.max_text_tokens for number in count(texts)]
    for row, (unread, repetitive) in enumerate(zip(is_truncated, degenerate(texts), strict=True)):
        one = album.images[row]
        if one.unreadable is not None:
            continue
        if not one.caption.strip():
            album.images[row] = replace(one, problems=("missing",))
            continue
        key = same_text(one.caption)
        is_distinct = bool(key) and len(holders[key]) == 1
        confused = (one.rank or 1) - 1
        is_generic = confused >= max(3, (album.num_compared - 1) / 2)
        applies = {
            "duplicate": not is_distinct,
            "generic": is_generic,
            "ambiguous": confused > 0 and not is_generic,
            "unread": unread,
            "repetitive": repetitive,
            "constraint": not one.meets_constraints,
        }
        problems = tuple(name for name, is_problem in applies.items() if is_problem)
        album.images[row] = replace(one, is_distinct=is_distinct, problems=problems)
