"""A distinct caption for each image of a set: the engine of `captionrl album`.

Legend: M images, L leaders (images that are not copies of an earlier one), S candidates, k neighbours, D features.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.apps.album.assignment import Choice
from hf_captionrl.apps.album.candidates import EncodedTexts, confusions_of
from hf_captionrl.apps.album.distinct import (
    ChosenCaptions,
    GroupFacts,
    check_candidates,
    distinct_captions,
    drop_shared,
    group_facts,
    meets_constraints,
    same_text,
    shortened,
    with_word,
)
from hf_captionrl.apps.album.model_work import AlbumWork, LoadedWork, stage_progress
from hf_captionrl.apps.album.result import Album, AlbumImage, diagnose
from hf_captionrl.apps.album.settings import NEIGHBOURS, SMALL_ALBUM, AlbumSettings, check_candidate_options
from hf_captionrl.apps.album.sources import ImageFacts, copy_leaders
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.metrics.suites import spoken
from hf_captionrl.retrieval import FeatureCache, Scorer, approximate_neighbours, nearest_neighbours
from hf_captionrl.retrieval.neighbours import rank_rows

_MOST_EXACT = 200_000


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

    Raises:
        ImageError: If an image cannot be read, unless `skip_unreadable`.
        ValueError: If there are no images, no captions to diagnose, or settings contradict each other.

    Example:
        >>> from hf_captionrl import load_captioner, load_scorer
        >>> from hf_captionrl.scenes import load_scenes
        >>> from hf_captionrl.utils.model_files import model_path
        >>> captioner = load_captioner(model_path("scenes:blip-mle"))
        >>> scorer = load_scorer(model_path("scenes:siglip-held-out"))
        >>> images = load_scenes(num_train=0, num_validation=0, num_test=15)["test"]["image"][:3]
        >>> album = describe_album(images, captioner, scorer, num_samples=4)
        >>> len(set(album.captions))
        3
    """
    settings = AlbumSettings(**changes) if settings is None else settings
    existing = _existing(images, captions)
    ids = [str(i) for i in range(len(images))] if image_ids is None else [str(i) for i in image_ids]
    diagnoses = captioner is None if diagnose_only is None else diagnose_only
    if diagnoses and not any(existing):
        raise ValueError("There are no captions to diagnose. Pass captions, or a captioner that writes them.")
    check_candidate_options(settings, captioner)
    names = [""] * len(images) if groups is None else list(groups)
    work = LoadedWork(images, ids, captioner, scorer, settings, cache, skip_unreadable, progress)
    return AlbumEngine(images, ids, existing, work, scorer, settings, names, progress).describe(diagnoses)


def _existing(images: Sequence[Any], captions: Sequence[Sequence[str] | str] | None) -> list[list[str]]:
    if len(images) == 0:
        raise ValueError("The album has no images. Use at least one.")
    if captions is None:
        return [[] for _ in images]
    if len(captions) != len(images):
        raise ValueError(
            f"There are {len(images)} images, but captions for {len(captions)}. Pass captions for every image."
        )
    return [[mine] if isinstance(mine, str) else list(mine) for mine in captions]


@dataclass
class AlbumEngine:
    """The steps of [`describe_album`], with its arguments."""

    images: Sequence[Any]
    ids: list[str]
    existing: list[list[str]]
    work: AlbumWork
    scorer: Scorer
    settings: AlbumSettings
    groups: list[str]
    progress: Callable[[str, int], Any] | None = None

    def describe(self, diagnose_only: bool) -> Album:
        """All steps."""
        self.read()
        album = self.existing_captions() if diagnose_only else self.choose()
        self.find_shared(album)
        diagnose(album, self.scorer)
        return album

    def read(self) -> None:
        """Read the images, and find copies and neighbours."""
        facts = self.work.facts()
        threshold = self.settings.copy_threshold
        if threshold is None:
            threshold = self.work.copy_threshold(facts)
        self.prepare(facts, threshold)

    def prepare(self, facts: ImageFacts, threshold: float) -> None:
        """Find copies and neighbours among images that have been read."""
        number = len(facts.rows)
        k = self.settings.neighbours
        k = (None if number <= SMALL_ALBUM else NEIGHBOURS) if k is None else (k if k < number - 1 else None)
        near = None if k is None else _nearest(facts.features, k)
        lead = copy_leaders(facts.keys, facts.pictures, facts.features, near, threshold)
        first = np.unique(lead)  # positions of the leaders among the readable images
        self.facts: ImageFacts = facts
        self.threshold = threshold
        self.rows = [facts.rows[at] for at in first.tolist()]  # album rows of the leaders
        place: np.ndarray = np.asarray(
            np.searchsorted(first, lead)
        )  # leader of each readable image, as a number below L
        self.leader_of = dict(zip(facts.rows, place.tolist(), strict=True))
        self.features = facts.features[torch.from_numpy(first)]
        self.neighbours = None if near is None else _among_leaders(near[0], first, self.features, k)

    def similar(self) -> list[list[int]]:
        """The most similar leaders of each leader, as many as the decoding needs."""
        k = min(self.settings.num_distractors, len(self.rows) - 1)
        if k < 1:
            return [[] for _ in self.rows]
        found = nearest_neighbours(self.features, k)[0] if self.neighbours is None else self.neighbours[:, :k]
        return found.tolist()  # type: ignore[no-any-return]

    def _old(self, members: Sequence[int]) -> list[str]:
        return list(dict.fromkeys(text for row in members for text in self.existing[row] if text.strip()))

    def _members(self) -> list[list[int]]:
        members: list[list[int]] = [[] for _ in self.rows]
        for row, leader in self.leader_of.items():
            members[leader].append(row)
        return members

    def choose(self) -> Album:
        """Choose a caption for each leader; copies get the same."""
        settings = self.settings
        old = [self._old(mine) for mine in self._members()]
        candidates = self._candidates(old)
        facts: list[GroupFacts] = []
        if settings.drop_shared or settings.trigger:
            facts = self._shared(self.rows, self._texts(candidates, old))
            candidates = self._edited(candidates, facts)
        found = self._chosen([shortened(mine, settings) for mine in candidates], old, settings)
        texts = [caption.caption for caption in found.captions]
        fits = meets_constraints([[text] for text in texts], old, settings, trigger=settings.trigger)
        made = []
        for row in range(len(self.images)):
            if row not in self.leader_of:
                made.append(self._unread(row))
                continue
            leader = self.leader_of[row]
            one = found.captions[leader]
            made.append(
                AlbumImage(
                    image_id=self.ids[row],
                    caption=one.caption,
                    old=next(iter(self.existing[row]), None),
                    rank=one.rank,
                    margin=one.margin,
                    is_distinct=one.is_distinct,
                    confused_with=tuple(self.rows[other] for other in one.confused_with),
                    copy_of=self._copy_of(row),
                    meets_constraints=bool(fits[leader]),
                )
            )
        return self._album(made, found.choice, facts)

    def _candidates(self, old: list[list[str]]) -> list[list[str]]:
        """Generated candidates of each leader, then existing captions; an empty text if there is none."""
        settings, similar = self.settings, None
        if not self.work.writes_captions:
            return [mine or [""] for mine in old]
        if settings.decoding == "rsa" or settings.contrastive:
            similar = self.similar()
        rows = None
        if settings.decoding == "rsa" and similar is not None:
            rows = [[self.rows[other] for other in mine] for mine in similar]
        generated = self.work.candidates(self.rows, rows)
        candidates = [list(dict.fromkeys([*new, *mine])) or [""] for new, mine in zip(generated, old, strict=True)]
        if settings.contrastive and similar is not None:
            texts = self._texts(candidates, old)
            answers = self.work.answers(self.rows, [[texts[other] for other in mine] for mine in similar])
            candidates = [list(dict.fromkeys([*a, *b])) for a, b in zip(candidates, answers, strict=True)]
        return candidates

    def _texts(self, candidates: list[list[str]], old: list[list[str]]) -> list[str]:
        """The captions chosen before any editing; they will be edited or shown to the captioner."""
        unedited = replace(self.settings, max_characters=None, trigger=None)
        found = self._chosen(candidates, old, unedited, "comparing unedited captions")
        return [caption.caption for caption in found.captions]

    def _shared(self, rows: Sequence[int], texts: Sequence[str]) -> list[GroupFacts]:
        """What the captions of each group share; blank ones are left out."""
        kept = [(text, self.groups[row]) for row, text in zip(rows, texts, strict=True) if text.strip()]
        return group_facts(
            [text for text, _ in kept], [group for _, group in kept], min_share=self.settings.shared_share
        )

    def _edited(self, candidates: list[list[str]], facts: Sequence[GroupFacts]) -> list[list[str]]:
        """Candidates without the phrases that their group shares, and with the trigger."""
        required = self.settings.require
        phrases = {
            fact.group: [
                phrase for phrase in fact.shared if not any(with_word([phrase], word)[0] for word in required)
            ]
            for fact in facts
            if self.settings.drop_shared
        }
        found = []
        for row, mine in zip(self.rows, candidates, strict=True):
            mine_shared = phrases.get(self.groups[row], ())
            texts = (drop_shared(t, mine_shared, trigger=self.settings.trigger) if t.strip() else t for t in mine)
            found.append(list(dict.fromkeys(texts)))
        return found

    def _chosen(
        self, candidates: list[list[str]], old: list[list[str]], settings: AlbumSettings, stage: str = "comparing"
    ) -> ChosenCaptions:
        allowed = check_candidates(candidates, old, settings, trigger=settings.trigger)
        if settings.choice == "first":
            candidates, allowed = _first_allowed(candidates, allowed)
        return distinct_captions(
            candidates,
            self.work.text_features(self.rows, candidates),
            self.features,
            neighbours=self.neighbours,
            allowed=allowed,
            max_component=settings.max_component,
            exclusive=settings.choice == "assignment",
            progress=stage_progress(self.progress, stage),
        )

    def existing_captions(self) -> Album:
        """Compare every existing caption, also those of copies."""
        texts = [(row, text) for row in self.leader_of for text in self.existing[row] if text.strip()]
        texts.sort(key=lambda one: self.leader_of[one[0]])
        leaders = [self.leader_of[row] for row, _ in texts]
        starts: np.ndarray = np.asarray(np.searchsorted(leaders, np.arange(len(self.rows) + 1)))
        features = EncodedTexts(self.scorer, spoken([text for _, text in texts]))
        found = confusions_of(features, range(len(texts)), self.features, self.neighbours, starts=starts)
        holders: dict[str, set[int]] = {}
        for leader, (_, text) in zip(leaders, texts, strict=True):
            holders.setdefault(same_text(text), set()).add(leader)
        fits = meets_constraints([[text] for _, text in texts], [[] for _ in texts], self.settings)
        described: dict[int, list[AlbumImage]] = {}
        for (row, text), (confused, margin), good in zip(texts, found, fits.tolist(), strict=True):
            made = AlbumImage(
                image_id=self.ids[row],
                caption=text,
                old=text,
                rank=1 + len(confused),
                margin=margin if len(self.rows) > 1 else None,
                is_distinct=len(holders[same_text(text)]) == 1,
                confused_with=tuple(self.rows[other] for other in confused),
                copy_of=self._copy_of(row),
                meets_constraints=good,
            )
            described.setdefault(row, []).append(made)
        images = []
        for row in range(len(self.images)):
            first, *further = described.get(row) or [self._unread(row)]
            images.append(replace(first, further=tuple(further)))
        return self._album(images, None, [])

    def find_shared(self, album: Album) -> None:
        """Find what the captions of each group share, unless the choice has done so to remove it."""
        if not album.shared:
            rows = [row for row, image in enumerate(album.images) if image.copy_of is None]
            album.shared = self._shared(rows, [album.images[row].caption for row in rows])

    def _album(self, images: list[AlbumImage], choice: Choice | None, shared: list[GroupFacts]) -> Album:
        number = len(self.rows) if self.neighbours is None else 1 + self.neighbours.shape[1]
        return Album(images, number, self.threshold, choice=choice, shared=shared, groups=self.groups)

    def _copy_of(self, row: int) -> int | None:
        """Row of the leader that an image is a copy of."""
        leader = self.leader_of.get(row)
        return None if leader is None or self.rows[leader] == row else self.rows[leader]

    def _unread(self, row: int) -> AlbumImage:
        """An image that cannot be read or, if existing captions are diagnosed, has no caption."""
        reason = self.facts.unreadable.get(row)
        old = next(iter(self.existing[row]), None)
        return AlbumImage(image_id=self.ids[row], caption="", old=old, unreadable=reason, copy_of=self._copy_of(row))


def _nearest(features: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Neighbours and their cosines; approximate if the exact search would take hours and faiss is installed."""
    if len(features) > _MOST_EXACT and importlib.util.find_spec("faiss") is not None:
        return approximate_neighbours(features, k)[:2]
    return nearest_neighbours(features, k)


def _among_leaders(neighbours: Tensor, first: np.ndarray, features: Tensor, k: int | None) -> Tensor:
    """Neighbours of the leaders among the leaders, `(L, k)`; searched again if a copy was among them."""
    count = len(first)
    k = min(int(k or 0), count - 1)
    place = torch.full((len(neighbours),), -1)
    place[torch.from_numpy(first)] = torch.arange(count)
    found = place[neighbours[torch.from_numpy(first)][:, :k]]
    again = torch.nonzero((found < 0).any(1)).flatten()
    if len(again) and k:
        found[again] = rank_rows(features, k, rows=again)[0]
    return found


def _first_allowed(candidates: list[list[str]], allowed: np.ndarray) -> tuple[list[list[str]], np.ndarray]:
    """Only the first allowed candidate of each image, or the first one if none is allowed."""
    kept, start = [], 0
    for mine in candidates:
        good = np.flatnonzero(allowed[start : start + len(mine)])
        kept.append([mine[int(good[0]) if len(good) else 0]])
        start += len(mine)
    return kept, np.ones(len(kept), bool)
