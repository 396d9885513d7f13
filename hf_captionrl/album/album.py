"""One caption for each image of a set that no other image has: the engine of `captionrl album`.

Legend: M images, L leaders (images that are not copies of an earlier one), S candidates, k neighbours, D features.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.album.album_result import Album, AlbumImage
from hf_captionrl.album.candidate_scores import EncodedTexts, confusions_of
from hf_captionrl.album.candidates import Journal, contrastive_candidates, generate_candidates
from hf_captionrl.album.constraints import check_candidates, shortened
from hf_captionrl.album.copies import calibrate_threshold, copy_leaders
from hf_captionrl.album.diagnosis import diagnose
from hf_captionrl.album.distinct_captions import distinct_captions, same_text
from hf_captionrl.album.image_facts import ImageFacts, opened_chunks, read_images
from hf_captionrl.album.settings import NEIGHBOURS, SMALL_ALBUM, AlbumSettings, check_candidate_options
from hf_captionrl.album.shared_phrases import drop_shared, group_facts
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.metrics.suites.suite_row import spoken
from hf_captionrl.pipelines import ChosenImages
from hf_captionrl.retrieval import FeatureCache, Scorer, approximate_neighbours, nearest_neighbours
from hf_captionrl.retrieval.neighbours import rank_rows

__all__ = ["AlbumEngine", "AlbumSettings", "describe_album", "finish_album"]

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
    journal: Journal | None = None,
    skip_unreadable: bool = False,
    progress: Callable[[str, int], Any] | None = None,
    **changes: Any,
) -> Album:
    """Caption every image of a set so that its caption is true of it and of no other image.

    Copies get one caption and are never confusions of each other. The candidates of an image are the captions that exist,
    beams and samples. The choice is described at [`distinct_captions`].

    Args:
        images: Anything that `open_image` opens; read one by one.
        captioner ([`Captioner`], *optional*): Generates candidates; None uses only `captions`.
        scorer ([`Scorer`]): Compares captions and images.
        captions: Captions that exist, of each image one, several or none.
        image_ids: Names of the images; by default their numbers.
        groups: Name of each image's group, inside which shared phrases are searched; by default the album is one group.
        diagnose_only: Diagnose the first existing caption of each image instead of choosing one. None: if there is no captioner.
        settings ([`AlbumSettings`], *optional*): Or its fields as keyword arguments.
        cache ([`FeatureCache`], *optional*): Image features of an earlier run.
        journal: Keeps candidates, so that an interrupted run can continue; see `evaluation.caption_files.CaptionWriter`.
        skip_unreadable: Whether images that cannot be read are listed in the result instead of raising an `ImageError`.
        progress: Called with the name of a stage and the number of images it has finished since the last call.

    Returns:
        [`Album`]: Captions, copies, confusions, shared phrases, and methods that write them.

    Raises:
        ImageError: If an image cannot be read, unless `skip_unreadable`.
        ValueError: If there are no images, no captions to diagnose, or settings contradict each other.

    Example:
        >>> from hf_captionrl import load_captioner, load_scorer
        >>> from hf_captionrl.scenes import load_scenes
        >>> from hf_captionrl.scenes.models import model_path
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
    engine = AlbumEngine(images, ids, existing, captioner, scorer, settings, journal, progress)
    engine.read(cache, skip_unreadable)
    album = engine.existing_captions() if diagnoses else engine.choose()
    names = [""] * len(images) if groups is None else list(groups)
    finish_album(album, names, settings, changes_texts=not diagnoses)
    diagnose(album, scorer)
    return album


def _existing(images: Sequence[Any], captions: Sequence[Sequence[str] | str] | None) -> list[list[str]]:
    if len(images) == 0:
        raise ValueError("The album has no images. Use at least one.")
    if captions is None:
        return [[] for _ in images]
    if len(captions) != len(images):
        raise ValueError(
            f"There are {len(images)} images and captions of {len(captions)}. Pass captions of every image."
        )
    return [[mine] if isinstance(mine, str) else list(mine) for mine in captions]


class AlbumEngine:
    """The steps of [`describe_album`]."""

    def __init__(
        self,
        images: Sequence[Any],
        ids: list[str],
        existing: list[list[str]],
        captioner: Captioner | None,
        scorer: Scorer,
        settings: AlbumSettings,
        journal: Journal | None,
        progress: Callable[[str, int], Any] | None,
    ) -> None:
        self.images = images
        self.ids = ids
        self.existing = existing
        self.captioner = captioner
        self.scorer = scorer
        self.settings = settings
        self.journal = journal
        self.progress = progress

    def _report(self, stage: str) -> Callable[[int], Any] | None:
        progress = self.progress
        return None if progress is None else lambda number: progress(stage, number)

    def read(self, cache: FeatureCache | None, skip_unreadable: bool) -> None:
        """Read the images, and find copies and neighbours."""
        size = self.settings.batch_size
        facts = read_images(
            self.images,
            self.scorer,
            cache=cache,
            batch_size=size,
            skip_unreadable=skip_unreadable,
            progress=self._report("reading"),
        )
        threshold = self.settings.copy_threshold
        if threshold is None:
            opened = (image for _, chunk in opened_chunks(self.images, facts.rows[:64], size) for image in chunk)
            threshold = calibrate_threshold(self.scorer, opened)
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

    def _old(self, leader: int, members: Sequence[int]) -> list[str]:
        return list(dict.fromkeys(text for row in members for text in self.existing[row] if text.strip()))

    def _members(self) -> list[list[int]]:
        members: list[list[int]] = [[] for _ in self.rows]
        for row, leader in self.leader_of.items():
            members[leader].append(row)
        return members

    def choose(self) -> Album:
        """Choose a caption for each leader; copies get the same."""
        settings, members = self.settings, self._members()
        old = [self._old(n, mine) for n, mine in enumerate(members)]
        generated: list[list[str]] = [[] for _ in self.rows]
        needs_similar = settings.decoding == "rsa" or settings.contrastive
        similar = self.similar() if needs_similar and self.captioner is not None else None
        if self.captioner is not None:
            generated = generate_candidates(
                self.captioner,
                ChosenImages(self.images, self.rows),
                [self.ids[row] for row in self.rows],
                settings,
                similar=similar,
                journal=self.journal,
                progress=self._report("captioning"),
            )
        candidates = [list(dict.fromkeys([*new, *mine])) or [""] for new, mine in zip(generated, old, strict=True)]
        candidates = [shortened(mine, settings) for mine in candidates]
        found = self._chosen(candidates, old)
        if settings.contrastive and self.captioner is not None and similar is not None:
            said = [caption.caption for caption in found.captions]
            images = ChosenImages(self.images, self.rows)
            ids = [self.ids[row] for row in self.rows]
            more = contrastive_candidates(
                self.captioner, images, ids, said, settings, similar, self._report("asking again")
            )
            candidates = [
                list(dict.fromkeys([*a, *shortened(b, settings)])) for a, b in zip(candidates, more, strict=True)
            ]
            found = self._chosen(candidates, old)
        made = []
        for row in range(len(self.images)):
            if row not in self.leader_of:
                made.append(self._unread(row))
                continue
            leader = self.leader_of[row]
            one, own = found.captions[leader], self.rows[leader]
            made.append(
                AlbumImage(
                    image_id=self.ids[row],
                    caption=one.caption,
                    old=next(iter(self.existing[row]), None),
                    rank=one.rank,
                    margin=one.margin,
                    is_distinct=one.is_distinct,
                    confused_with=tuple(self.rows[other] for other in one.confused_with),
                    copy_of=None if row == own else own,
                )
            )
        return Album(made, num_compared=self._num_compared(), copy_threshold=self.threshold, choice=found.choice)

    def _chosen(self, candidates: list[list[str]], old: list[list[str]]) -> Any:
        allowed = check_candidates(candidates, old, self.settings)
        if self.settings.choice == "first":
            candidates = [mine[:1] for mine in candidates]
            allowed = np.ones(len(candidates), bool)
        flat = [text for mine in candidates for text in mine]
        return distinct_captions(
            candidates,
            EncodedTexts(self.scorer, spoken(flat)),
            self.features,
            neighbours=self.neighbours,
            allowed=allowed,
            max_component=self.settings.max_component,
            assigns=self.settings.choice == "assignment",
            progress=self._report("comparing"),
        )

    def existing_captions(self) -> Album:
        """Compare the first existing caption of each image, copies included."""
        rows = [row for row in self.leader_of if any(text.strip() for text in self.existing[row][:1])]
        rows.sort(key=lambda row: self.leader_of[row])
        texts = [self.existing[row][0] for row in rows]
        starts: np.ndarray = np.asarray(
            np.searchsorted([self.leader_of[row] for row in rows], np.arange(len(self.rows) + 1))
        )
        features = EncodedTexts(self.scorer, spoken(texts))
        found = confusions_of(features, range(len(rows)), self.features, self.neighbours, starts=starts)
        holders: dict[str, set[int]] = {}
        for row, text in zip(rows, texts, strict=True):
            holders.setdefault(same_text(text), set()).add(self.leader_of[row])
        described = {}
        for row, text, (confused, margin) in zip(rows, texts, found, strict=True):
            own = self.rows[self.leader_of[row]]
            described[row] = AlbumImage(
                image_id=self.ids[row],
                caption=text,
                old=text,
                rank=1 + len(confused),
                margin=margin if len(self.rows) > 1 else None,
                is_distinct=len(holders[same_text(text)]) == 1,
                confused_with=tuple(self.rows[other] for other in confused),
                copy_of=None if row == own else own,
            )
        made = [described.get(row) or self._unread(row) for row in range(len(self.images))]
        return Album(made, num_compared=self._num_compared(), copy_threshold=self.threshold, choice=None)

    def _num_compared(self) -> int:
        return len(self.rows) if self.neighbours is None else 1 + self.neighbours.shape[1]

    def _unread(self, row: int) -> AlbumImage:
        """An image that cannot be read or, if captions are described, has none."""
        reason = self.facts.unreadable.get(row)
        leader = self.leader_of.get(row)
        own = None if leader is None or self.rows[leader] == row else self.rows[leader]
        old = next(iter(self.existing[row]), None)
        return AlbumImage(image_id=self.ids[row], caption="", old=old, unreadable=reason, copy_of=own)


def _nearest(features: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Neighbours and their cosines: exact, but in albums for which that takes hours, approximate if faiss is installed."""
    if len(features) > _MOST_EXACT and importlib.util.find_spec("faiss") is not None:
        return approximate_neighbours(features, k)[:2]
    return nearest_neighbours(features, k)


def _among_leaders(neighbours: Tensor, first: np.ndarray, features: Tensor, k: int | None) -> Tensor:
    """Neighbours of the leaders among the leaders, `(L, k)`; searched again where a copy was among them."""
    count = len(first)
    k = min(int(k or 0), count - 1)
    place = torch.full((len(neighbours),), -1)
    place[torch.from_numpy(first)] = torch.arange(count)
    found = place[neighbours[torch.from_numpy(first)][:, :k]]
    again = torch.nonzero((found < 0).any(1)).flatten()
    if len(again) and k:
        found[again] = rank_rows(features, k, rows=again)[0]
    return found


def finish_album(album: Album, groups: list[str], settings: AlbumSettings, *, changes_texts: bool) -> None:
    """Find what is shared, and remove it if that is wanted."""
    rows = [row for row, image in enumerate(album.images) if image.caption.strip() and image.copy_of is None]
    facts = group_facts(
        [album.images[row].caption for row in rows], [groups[row] for row in rows], min_share=settings.shared_share
    )
    album.shared = facts
    album.groups = groups
    if changes_texts and (settings.drop_shared or settings.trigger):
        phrases = {fact.group: fact.shared if settings.drop_shared else () for fact in facts}
        album.replace_captions(
            [
                drop_shared(image.caption, phrases.get(group, ()), trigger=settings.trigger) if image.caption else ""
                for image, group in zip(album.images, groups, strict=True)
            ]
        )
