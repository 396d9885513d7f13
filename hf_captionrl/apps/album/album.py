"""A distinct caption for each image of a set: facts of images, candidates, scores, assignment, problems of captions.

Legend: M images, L leaders (images that are not copies of an earlier one), S candidates, k neighbours, D features.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
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
    with_word,
)
from hf_captionrl.apps.album.sources import copy_leaders, copy_threshold, image_facts, read_batch
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
        copy_of: Row of the first image that this one is a copy of.
        unreadable: Why the image cannot be read; None if it can.
        meets_constraints: Whether the caption meets the constraints on length, words and language.
        decorative: Whether a rule of the user says that the image has no content and needs no caption.
        mean_log_prob: Mean log-probability of the caption's tokens in nats, if an endpoint told it and the caption was not edited.
        problems: What is wrong with the caption, see [`diagnose`].
        further: The other captions of the image in the same form: several were chosen, or existing captions were diagnosed.
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
    decorative: bool = False
    mean_log_prob: float | None = None
    problems: tuple[str, ...] = ()
    further: tuple[AlbumImage, ...] = ()


@dataclass
class Album:
    """Captions of an album.

    Args:
        images: In the order of the album.
        num_compared: Number of images that each caption was ranked among, the target included.
        copy_threshold: Smallest cosine of two images that were compared as possible copies.
        choice: How the captions were chosen; None if existing captions were diagnosed.
        shared: What the captions of each group share, and what varies.
        groups: Name of each image's group.
    """

    images: list[AlbumImage]
    num_compared: int
    copy_threshold: float
    choice: Choice | None = field(default=None, repr=False)
    shared: list[GroupFacts] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)

    @property
    def compares_images(self) -> bool:
        """Whether captions were compared with images."""
        return any(one.rank is not None for _, one in self.entries()) or not any(self.captions)

    @property
    def captions(self) -> list[str]:
        """The caption of each image; empty where there is none."""
        return [image.caption for image in self.images]

    def entries(self) -> list[tuple[int, AlbumImage]]:
        """Every caption with the row of its image: the first caption of each image, then its further ones.

        One entry without caption for an image that has none.
        """
        return [(row, one) for row, image in enumerate(self.images) for one in (image, *image.further)]

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
        pairs = ((row, other) for row, one in self.entries() if one.copy_of is None for other in one.confused_with)
        return list(dict.fromkeys(pairs))

    def summary(self) -> dict[str, Any]:
        """Counts and fractions of the album, and the phrases that its groups share.

        Fractions are of the captions of different images; problems are counted per text.
        """
        entries = [one for _, one in self.entries()]
        described = [one for one in entries if one.caption.strip() and one.copy_of is None]
        count = max(len(described), 1)
        problems = Counter(problem for one in entries for problem in one.problems)
        found: dict[str, Any] = {
            "images": len(self.images),
            "captions": sum(bool(image.caption.strip()) for image in self.images),
            "texts": sum(bool(one.caption.strip()) for one in entries),
            "copies": sum(image.copy_of is not None for image in self.images),
            "unreadable": sum(image.unreadable is not None for image in self.images),
            "decorative": sum(image.decorative for image in self.images),
            "compared_with": self.num_compared - 1,
            "copy_threshold": round(self.copy_threshold, 4),
            "distinct": sum(image.is_distinct for image in described) / count,
            "rank_1": sum(image.rank == 1 for image in described) / count,
            "rank_1_and_distinct": sum(image.is_distinct and image.rank == 1 for image in described) / count,
            "words": sum(len(image.caption.split()) for image in described) / count,
            "problems": dict(sorted(problems.items())),
            "shared": [asdict(fact) for fact in self.shared],
        }
        if self.choice is not None:
            found |= {"texts_possible_more": self.choice.gap, "rank_1_possible_more": self.choice.rank_gap}
        return found

    def rows(self) -> list[dict[str, Any]]:
        """The table that the files contain: one row per caption; `number` counts the captions of an image."""
        ids = [image.image_id for image in self.images]
        entries = [one for _, one in self.entries()]
        # Columns that most albums do not have.
        more = [name for name in ("decorative", "mean_log_prob") if any(getattr(one, name) for one in entries)]
        return [
            {
                "image_id": image.image_id,
                "caption": image.caption,
                "old_caption": image.old,
                "rank": image.rank,
                "margin": None if image.margin is None else round(image.margin, 4),
                "distinct": image.is_distinct,
                "confused_with": [ids[other] for other in image.confused_with[:5]],
                "copy_of": None if image.copy_of is None else ids[image.copy_of],
                "problems": list(image.problems),
                "unreadable": image.unreadable,
                "number": number,
                **{name: getattr(image, name) for name in more},
            }
            for first in self.images
            for number, image in enumerate((first, *first.further), start=1)
        ]

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write a table for Excel: UTF-8 with a byte order mark, and no cell that Excel would evaluate as a formula."""

        def cell(value: Any) -> Any:
            return csv_cell(" | ".join(value) if isinstance(value, list) else value)

        buffer = io.StringIO(newline="")
        rows = self.rows()
        writer = csv.DictWriter(buffer, list(rows[0]))
        writer.writeheader()
        writer.writerows({name: cell(value) for name, value in row.items()} for row in rows)
        return atomic_write_text(path, "\ufeff" + buffer.getvalue())

    def _repr_html_(self) -> str:
        """A table of the first captions, for notebooks."""
        row = Markup("<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>")
        shown = [
            row.format(one.image_id, one.caption, one.rank or "", ", ".join(one.problems))
            for _, one in self.entries()[:_SHOWN]
        ]
        left = len(self.entries()) - len(shown)
        more = Markup("<p>{} more; write all of them with to_csv or to_jsonl.</p>").format(left) if left else ""
        head = f"<tr><th>image</th><th>caption</th><th>rank of {self.num_compared}</th><th>problems</th></tr>"
        return whole_text(f"<table><thead>{head}</thead><tbody>{''.join(shown)}</tbody></table>{more}")

    def to_jsonl(self, path: str | os.PathLike[str]) -> Path:
        """Write one JSON object per caption."""
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
    diagnose_only: bool | None = None,
    settings: AlbumSettings | None = None,
    cache: FeatureCache | None = None,
    skip_unreadable: bool = False,
    progress: Callable[[str, int], Any] | None = None,
    **changes: Any,
) -> Album:
    """Caption every image of a set so that its caption is true of it and of no other image.

    Copies share one caption and do not count as confusions of each other. The candidates of an image are existing captions,
    beams and samples. Shared phrases are removed from the candidates, and candidates are truncated, before they are compared
    with the images: ranks and margins are those of the captions that are returned. [`distinct_captions`] describes
    the choice.

    Args:
        images: Anything that `open_image` opens; read one by one.
        captioner ([`Captioner`], *optional*): Generates candidates; None uses only `captions`.
        scorer ([`Scorer`]): Compares captions and images.
        captions: Existing captions: one, several or none per image.
        image_ids: Names of the images; by default their numbers.
        groups: Name of each image's group, inside which shared phrases are searched; by default the album is one group.
            Copies belong to the group of the first copy.
        diagnose_only: Diagnose every existing caption instead of choosing one per image. None: if there is no captioner.
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
    given = [[]] * number if captions is None else captions
    existing = [[mine] if isinstance(mine, str) else list(mine) for mine in given]
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


STAGES = {"images": "reading", "candidates": "captioning", "answers": "contrastive prompts"}
"""Names of the steps for people."""


@dataclass
class AlbumWork:
    """Images and models of an album, and the work of the models; a subclass shares it among processes."""

    images: Sequence[Any]
    image_ids: Sequence[str]
    captioner: Captioner | None
    scorer: Scorer
    settings: AlbumSettings
    cache: FeatureCache | None = None
    skip_unreadable: bool = False
    progress: Callable[[str, int], Any] | None = None
    prompts: ImagePrompts | None = None  # None: only of the settings
    decorative: Collection[int] = ()  # rows of images that get no caption

    @property
    def writes_captions(self) -> bool:
        """Whether there is a captioner."""
        return self.captioner is not None

    @property
    def compares_images(self) -> bool:
        """Whether captions are compared with images; if not, no image is opened, and there are no ranks and copies."""
        return True

    def compute(self, step: str, rows: Sequence[int], extra: Sequence[Any] | None = None) -> list[dict[str, Any]]:
        """The results of a step for some rows of the album, batch by batch.

        "images": facts, or the reason why an image cannot be read. "candidates": `captions`; `extra` are the rows of the images
        most similar to each. "answers": `captions` that answer contrastive prompts; `extra` are the captions of similar images.
        """
        found: list[dict[str, Any]] = []
        for start in range(0, len(rows), self.settings.batch_size):
            part = slice(start, start + self.settings.batch_size)
            batch, more = rows[part], None if extra is None else extra[part]
            if step == "images":
                reasons: dict[int, str] = {}
                unreadable = reasons if self.skip_unreadable else None
                facts = read_batch(self.images, batch, self.scorer, self.cache, unreadable)
                found += [facts[row] if row in facts else {"reason": reasons[row]} for row in batch]
            else:
                assert self.captioner is not None
                similar, said = (more, None) if step == "candidates" else (None, more)
                for mine in generate_candidates(
                    self.captioner, self.images, batch, self.image_ids, self.settings, similar, self.prompts, said
                ):
                    scores = [getattr(text, "mean_log_prob", None) for text in mine]
                    found.append({"captions": mine, **({"scores": scores} if any(scores) else {})})
            self.report(step, len(batch))
        return found

    def report(self, step: str, number: int) -> None:
        """Tell how many images a step has finished since the last call."""
        if self.progress is not None:
            self.progress(STAGES.get(step, step), number)


class AlbumSteps:
    """All steps of [`describe_album`]: the images, their copies and neighbours, and the choice or diagnosis of captions."""

    def __init__(self, work: AlbumWork, existing: list[list[str]], groups: list[str]) -> None:
        self.work, self.settings, self.groups = work, work.settings, groups
        self.leader_of: dict[int, int]  # leader of each readable image, as a number below L
        self.candidates: dict[int, list[str]] = {}  # before any editing, by leader
        self.scores: dict[tuple[int, str], float | None] = {}  # mean log-probabilities, by album row and caption
        rows = [row for row in range(len(work.images)) if row not in work.decorative]
        self.existing = [[whole_text(text) for text in mine] for mine in existing]
        if not work.compares_images:
            self.rows = rows
            self.leader_of = {row: at for at, row in enumerate(rows)}
            self.unreadable, self.threshold, self.neighbours = {}, 2.0, None
            return
        if not rows:
            raise ValueError(
                "All images are decorative. Use fewer patterns of --decorative, or a smaller --decorative_size."
            )
        found = dict(zip(rows, work.compute("images", rows), strict=True))
        self.unreadable = {row: found.pop(row)["reason"] for row in list(found) if "reason" in found[row]}
        images = image_facts(found, self.unreadable, work.cache)
        given = self.settings.copy_threshold
        threshold = copy_threshold(work.images, images, work.scorer, work.cache) if given is None else given
        self.threshold = threshold
        number, near = len(images.rows), None
        k = self.settings.neighbours or (NEIGHBOURS if number > SMALL_ALBUM else number)
        if k < number - 1:
            is_large = number > _MOST_EXACT and importlib.util.find_spec("faiss") is not None
            near = (approximate_neighbours if is_large else nearest_neighbours)(images.features, k)[:2]
        lead = copy_leaders(images.keys, images.pictures, images.features, near, threshold)
        leaders, leader_of = np.unique(lead, return_inverse=True)  # positions among the readable images
        self.rows = [images.rows[at] for at in leaders.tolist()]  # album rows of the leaders
        self.leader_of = dict(zip(images.rows, leader_of.tolist(), strict=True))
        first = torch.from_numpy(leaders)
        self.features = images.features[first]  # (L, D)
        self.neighbours = None
        if near is not None:
            k = min(k, len(first) - 1)
            place = torch.full((number,), -1)
            place[first] = torch.arange(len(first))
            self.neighbours = place[near[0][first, :k]]  # (L, k): numbers of leaders
            again = torch.nonzero((self.neighbours < 0).any(1)).flatten()  # a copy was among them
            if len(again) and k:
                self.neighbours[again] = rank_rows(self.features, k, rows=again)[0]

    def album(self, diagnose_only: bool) -> Album:
        """The captions and what is wrong with them."""
        album = self._existing() if diagnose_only else self._chosen()
        if not album.shared:  # else the phrases were searched to remove them
            rows = [row for row, image in enumerate(album.images) if image.copy_of is None]
            album.shared = self._shared(rows, [album.images[row].caption for row in rows])
        diagnose(album, self.work.scorer if self.work.compares_images else None)
        return album

    def _chosen(self) -> Album:
        """Choose a caption for each leader; copies get the same."""
        settings, work = self.settings, self.work
        old: list[list[str]] = [[] for _ in self.rows]
        for row, leader in self.leader_of.items():
            old[leader] += [text for text in self.existing[row] if text.strip()]
        old = [list(dict.fromkeys(mine)) for mine in old]
        kept = [settings.prefer_existing and bool(mine) for mine in old]
        if work.writes_captions:
            candidates = self._candidates(old, kept)
            self.candidates = dict(enumerate(candidates))
        else:
            candidates = [(mine[:1] if keep else mine) or [""] for mine, keep in zip(old, kept, strict=True)]
        facts: list[GroupFacts] = []
        if settings.drop_shared or settings.trigger:
            facts = self._shared(self.rows, self._unedited(candidates, old))
        edited = self._editing(facts)
        candidates = [
            list(dict.fromkeys(edited(row, text) for text in mine))
            for row, mine in zip(self.rows, candidates, strict=True)
        ]
        candidates = [mine if keep else shortened(mine, settings) for mine, keep in zip(candidates, kept, strict=True)]
        captions, choice = self._distinct(candidates, old, settings)
        rounds = [captions]
        for _ in range(1, settings.captions_per_image):  # choose again among what is left
            candidates = [
                [text for text in mine if same_text(text) != same_text(own)] or [""]
                for mine, own in zip(candidates, rounds[-1], strict=True)
            ]
            rounds.append(self._distinct(candidates, old, settings)[0])
        texts: list[tuple[int, str, str | None]] = []
        for row, leader in self.leader_of.items():
            own = first_text(self.existing[row])
            if settings.prefer_existing and own is not None:  # copies have their own captions
                texts.append((row, edited(row, own), own))
            else:
                texts += [(row, captions[leader], own) for captions in rounds]
        return self._judged(texts, old, choice, facts)

    def _editing(self, facts: Sequence[GroupFacts]) -> Callable[[int, str], str]:
        """What removes the phrases that the group of a row shares from a text, and adds the trigger."""
        settings = self.settings
        phrases = {
            fact.group: [p for p in fact.shared if not any(with_word([p], word)[0] for word in settings.require)]
            for fact in facts
            if settings.drop_shared
        }

        def edited(row: int, text: str) -> str:
            shared = phrases.get(self.groups[row], ())
            if not text.strip() or (not shared and settings.trigger is None):
                return text
            return drop_shared(text, shared, trigger=settings.trigger)

        return edited

    def _candidates(self, old: list[list[str]], kept: list[bool]) -> list[list[str]]:
        """Generated candidates of each leader, then existing captions; an empty text if there is none.

        Leaders in `kept` have only their first existing caption.
        """
        settings, work = self.settings, self.work
        # The leaders most similar to each, as many as the decoding needs.
        similar: list[list[int]] = [[] for _ in self.rows]
        k = min(settings.num_distractors, len(self.rows) - 1)
        if k > 0 and (settings.decoding == "rsa" or settings.contrastive):
            near = nearest_neighbours(self.features, k)[0] if self.neighbours is None else self.neighbours[:, :k]
            similar = near.tolist()
        asked = [at for at, keep in enumerate(kept) if not keep]
        rows = [self.rows[at] for at in asked]
        others = [[self.rows[other] for other in similar[at]] for at in asked] if settings.decoding == "rsa" else None
        candidates = [mine[:1] for mine in old]
        for at, new in zip(asked, work.compute("candidates", rows, others) if rows else (), strict=True):
            candidates[at] = list(dict.fromkeys([*new["captions"], *old[at]])) or [""]
            for text, score in zip(new["captions"], new.get("scores") or (), strict=False):
                self.scores[self.rows[at], text] = score
        if settings.contrastive and rows:
            texts = self._unedited(candidates, old)
            answers = work.compute("answers", rows, [[texts[other] for other in similar[at]] for at in asked])
            for at, answer in zip(asked, answers, strict=True):
                candidates[at] = list(dict.fromkeys([*candidates[at], *answer["captions"]]))
        return candidates

    def _unedited(self, candidates: list[list[str]], old: list[list[str]]) -> list[str]:
        """The captions chosen before any editing; they will be edited or shown to the captioner."""
        unedited = replace(self.settings, max_characters=None, trigger=None)
        return self._distinct(candidates, old, unedited, "comparing unedited captions")[0]

    def _shared(self, rows: Sequence[int], texts: Sequence[str]) -> list[GroupFacts]:
        """What the captions of each group share; blank ones are left out."""
        kept = [(text, self.groups[row]) for row, text in zip(rows, texts, strict=True) if text.strip()]
        share = self.settings.shared_share
        return group_facts([text for text, _ in kept], [group for _, group in kept], min_share=share)

    def _distinct(
        self, candidates: list[list[str]], old: list[list[str]], settings: AlbumSettings, stage: str = "comparing"
    ) -> tuple[list[str], Choice]:
        """Score the candidates, and assign each leader one."""
        allowed = check_candidates(candidates, old, settings, settings.trigger)
        if settings.choice == "first":
            starts = np.cumsum([0, *map(len, candidates)])
            # The first allowed candidate of each leader, or the first one if none is allowed.
            candidates = [
                [mine[int(allowed[at : at + len(mine)].argmax())]]
                for at, mine in zip(starts, candidates, strict=False)
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
        """Every existing caption, also those of copies; shared phrases are removed, and the trigger is added, if asked for."""
        texts = [(row, text) for row in self.leader_of for text in self.existing[row] if text.strip()]
        facts: list[GroupFacts] = []
        if self.settings.drop_shared or self.settings.trigger:
            firsts = dict(reversed(texts))
            facts = self._shared(list(firsts), list(firsts.values()))
        edited = self._editing(facts)
        return self._judged(
            [(row, edited(row, text), text) for row, text in texts], [[]] * len(self.rows), shared=facts
        )

    def _judged(
        self,
        texts: list[tuple[int, str, str | None]],
        languages: list[list[str]],
        choice: Choice | None = None,
        shared: Sequence[GroupFacts] = (),
    ) -> Album:
        """Compare captions of rows with the images; each is (row, caption, caption before it was edited).

        `languages` are texts, by leader, in whose languages its captions should be.
        """
        texts = sorted((one for one in texts if one[1].strip()), key=lambda one: self.leader_of[one[0]])
        captions: list[list[str]] = [[] for _ in self.rows]
        for row, text, _ in texts:
            captions[self.leader_of[row]].append(text)
        fits = meets_constraints(captions, languages, self.settings, self.settings.trigger)
        found: Any = repeat(((), None))
        if self.work.compares_images:
            starts, flat = np.cumsum([0, *map(len, captions)]), [text for _, text, _ in texts]
            found = confusions_of(self._features(flat), starts, unit_rows(self.features).float(), self.neighbours)
        described: dict[int, list[AlbumImage]] = {}
        for (row, text, old), (confused, margin), good in zip(texts, found, fits.tolist(), strict=False):
            one = self._image(
                row,
                caption=text,
                old=old,
                rank=None if margin is None else 1 + len(confused),
                margin=margin if len(self.rows) > 1 else None,
                confused_with=tuple(self.rows[other] for other in confused),
                meets_constraints=good,
            )
            described.setdefault(row, []).append(one)
        images = []
        for row in range(len(self.work.images)):
            first, *further = described.get(row) or [self._image(row)]
            images.append(replace(first, further=tuple(further)))
        number = len(self.rows) if self.neighbours is None else 1 + self.neighbours.shape[1]
        if not self.work.compares_images:
            number = 1  # no caption was compared with another image
        return Album(images, number, self.threshold, choice=choice, shared=list(shared), groups=self.groups)

    def _image(self, row: int, *, caption: str = "", **facts: Any) -> AlbumImage:
        """An image of the album; without facts one that cannot be read, or has no caption."""
        leader = self.leader_of.get(row)
        return AlbumImage(
            self.work.image_ids[row],
            caption,
            copy_of=None if leader is None or self.rows[leader] == row else self.rows[leader],
            unreadable=self.unreadable.get(row),
            decorative=row in self.work.decorative,
            mean_log_prob=None if leader is None else self.scores.get((self.rows[leader], caption)),
            **{"old": first_text(self.existing[row]), **facts},
        )


def whole_text(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair, such as that of a broken emoji, which no tokenizer reads."""
    return text.encode("utf-8", "replace").decode()


def first_text(captions: Sequence[str]) -> str | None:
    """The first caption that is not blank; None without one."""
    return next((text for text in captions if text.strip()), None)


# --- What is wrong with a caption ------------------------------------------------------------------------------------

PROBLEMS = {
    "missing": "the image has no caption",
    "duplicate": "another image, which is not a copy, has the same text",
    "generic": "the caption fits at least half of the images that it was compared with, and at least three",
    "ambiguous": "the caption fits another image at least as well",
    "unread": "the scorer truncates the caption, so the rank applies only to its beginning",
    "repetitive": "a phrase or word is repeated",
    "constraint": "the caption does not meet the constraints on length, words and language, because no candidate does",
}
"""Problems of captions; a caption may have several."""


def diagnose(album: Album, scorer: Scorer | None) -> None:
    """Set `is_distinct` and `problems` of every caption whose image can be read."""
    holders: dict[str, set[int]] = {}
    for row, one in album.entries():
        holders.setdefault(same_text(one.caption), set()).add(row if one.copy_of is None else one.copy_of)
    texts = [one.caption for _, one in album.entries()]
    count = getattr(scorer, "count_tokens", None)
    if scorer is None:
        is_truncated = [False] * len(texts)
    elif count is None:
        is_truncated = [scorer.count_truncated([text]) > 0 for text in texts]
    else:
        is_truncated = [number > scorer.max_text_tokens for number in count(texts)]
    facts = zip(is_truncated, degenerate(texts), strict=True)

    def diagnosed(one: AlbumImage) -> AlbumImage:
        unread, repetitive = next(facts)
        if one.unreadable is not None or one.decorative:
            return one
        if not one.caption.strip():
            return replace(one, problems=("missing",))
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
        return replace(one, is_distinct=is_distinct, problems=problems)

    # In the order of the entries.
    album.images = [replace(diagnosed(one), further=tuple(map(diagnosed, one.further))) for one in album.images]
