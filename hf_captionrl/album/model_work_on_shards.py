"""The parts of `captionrl album` that need models, on shards: in this process, in several, or on a Ray cluster.

Legend: S candidates of all images, G captions of an image, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.album.album_stages import AnswerStage, CandidateStage, ReadStage
from hf_captionrl.album.image_facts import ImageFacts, copy_threshold, joined_facts
from hf_captionrl.album.kept_rows import KeptRows
from hf_captionrl.album.model_work import stage_progress
from hf_captionrl.engine import EngineOptions
from hf_captionrl.evaluation.image_stage import rows_per_shard
from hf_captionrl.io import json_digest
from hf_captionrl.metrics.suites.suite_row import spoken
from hf_captionrl.retrieval import FeatureCache, Scorer

if TYPE_CHECKING:
    from hf_captionrl.album.loading import AlbumModels

__all__ = ["BATCHES_PER_SHARD", "KINDS", "KeptTexts", "ShardWork"]

KINDS = ("images", "candidates", "answers")
"""Kinds of rows that [`ShardWork`] keeps."""
BATCHES_PER_SHARD = 4
"""The default. A killed command loses at most this many batches per process."""


class ShardWork:
    """An `AlbumWork` whose results are kept in shards. The result equals that of one process, row by row.

    Rows are named by the image and its content, so that an image that was replaced is read and captioned again.

    `progress` is called with the name of a stage and the number of images finished since the last call.
    """

    def __init__(
        self,
        models: AlbumModels,
        folder: Path,
        settings: Mapping[str, Any],
        progress: Callable[[str, int], Any] | None = None,
    ) -> None:
        options = models.options
        self.models, self.folder, self.settings, self.progress = models, folder, dict(settings), progress
        self.writes_captions = options.model is not None
        # Without --processes and --engine, the models of this process are used.
        number = options.processes or (1 if options.engine is None else None)
        self.engine = EngineOptions(engine=options.engine, processes=number, address=options.address)
        self.per_shard = rows_per_shard(options, BATCHES_PER_SHARD)
        self._texts: list[tuple[KeptRows, dict[int, str]]] = []
        self._keys: dict[int, str] = {}

    def facts(self) -> ImageFacts:
        scorer, source = self.models.scorer, self.models.source
        stamps = source.stamps(stage_progress(self.progress, "checking"))
        ids = [f"{name} {stamp}" for name, stamp in zip(source.image_ids, stamps, strict=True)]
        kept = KeptRows(self.folder, "images", {"images": self.settings["images"], "scorer": scorer.signature})

        def stage(asked: list[int]) -> ReadStage:
            names, images = [ids[row] for row in asked], [source.image_ids[row] for row in asked]
            return ReadStage(self.models, names, images, kept.made_by)

        kept.complete(ids, stage, self.engine, self.per_shard, stage_progress(self.progress, "reading"))
        facts = _facts(kept, {name: row for row, name in enumerate(ids)})
        cache = self._cache()
        if cache.missing(facts.keys):
            cache.put(facts.keys, facts.features)
        self._keys = dict(zip(facts.rows, facts.keys, strict=True))
        return facts

    def _cache(self) -> FeatureCache:
        return FeatureCache.for_scorer(self.models.scorer, self.models.options.cache_dir)

    def copy_threshold(self, facts: ImageFacts) -> float:
        return copy_threshold(self.models.source.images, facts, self.models.scorer, self._cache())

    def candidates(self, rows: Sequence[int], similar: Sequence[Sequence[int]] | None) -> list[list[str]]:
        images = [self.models.source.image_ids[row] for row in rows]
        ids = [f"{name} {self._keys[row]}" for name, row in zip(images, rows, strict=True)]
        kept = KeptRows(self.folder, "candidates", self.settings)

        def stage(asked: list[int]) -> CandidateStage:
            others = None if similar is None else [similar[at] for at in asked]
            names, mine = [ids[at] for at in asked], [images[at] for at in asked]
            return CandidateStage(self.models, names, mine, kept.made_by, others)

        kept.complete(ids, stage, self.engine, self.per_shard, stage_progress(self.progress, "captioning"))
        return self._captions(kept, rows, ids)

    def answers(self, rows: Sequence[int], said: Sequence[Sequence[str]]) -> list[list[str]]:
        images = [self.models.source.image_ids[row] for row in rows]
        # An answer is kept for its image and prompt: another prompt is asked again.
        keys = [self._keys[row] for row in rows]
        ids = [f"{name} {json_digest([key, *mine])}" for name, key, mine in zip(images, keys, said, strict=True)]
        kept = KeptRows(self.folder, "answers", self.settings)

        def stage(asked: list[int]) -> AnswerStage:
            names, mine = [ids[at] for at in asked], [images[at] for at in asked]
            return AnswerStage(self.models, names, mine, kept.made_by, [said[at] for at in asked])

        kept.complete(ids, stage, self.engine, self.per_shard, stage_progress(self.progress, "contrastive prompts"))
        return self._captions(kept, rows, ids)

    def _captions(self, kept: KeptRows, rows: Sequence[int], ids: Sequence[str]) -> list[list[str]]:
        self._texts.append((kept, dict(zip(rows, ids, strict=True))))
        texts: dict[str, list[str]] = {}
        for table in kept.tables(("id", "captions")):
            texts |= zip(table["id"].to_pylist(), table["captions"].to_pylist(), strict=True)
        return [texts[name] for name in ids]

    def text_features(self, rows: Sequence[int], candidates: Sequence[Sequence[str]]) -> KeptTexts:
        places = [[(kept, names[row]) for kept, names in self._texts] for row in rows]
        return KeptTexts(self.models.scorer, candidates, places)


class KeptTexts:
    """Features of candidates.

    They are read from the shards of a stage; those of edited and existing captions are computed.
    """

    def __init__(
        self,
        scorer: Scorer,
        candidates: Sequence[Sequence[str]],
        places: Sequence[Sequence[tuple[KeptRows, str]]],
    ) -> None:
        self.scorer, self.places = scorer, places
        self.captions = spoken([text for texts in candidates for text in texts])
        self._owner = np.arange(len(candidates)).repeat([len(texts) for texts in candidates])
        self._last: tuple[int, dict[str, np.ndarray]] = -1, {}

    def __getitem__(self, rows: Any) -> Tensor:
        wanted = np.asarray(rows)
        texts = [self.captions[row] for row in wanted.tolist()]
        found = [self._of(owner).get(text) for owner, text in zip(self._owner[wanted].tolist(), texts, strict=True)]
        missing = [at for at, features in enumerate(found) if features is None]
        if missing:
            new = self.scorer.text_features([texts[at] for at in missing]).float().cpu().numpy()
            for at, features in zip(missing, new, strict=True):
                found[at] = features
        return torch.from_numpy(np.stack(found))  # type: ignore[arg-type]

    def _of(self, owner: int) -> dict[str, np.ndarray]:
        """Kept features of the captions of an image."""
        if self._last[0] != owner:
            features: dict[str, np.ndarray] = {}
            for kept, name in self.places[owner]:
                table, row = kept.row(name)
                captions = table["captions"][row].as_py()
                if captions and table["scorer"][row].as_py() == self.scorer.signature:
                    numbers = table["features"][row].values.to_numpy().reshape(len(captions), -1)  # (G, D)
                    features |= zip(spoken(captions), numbers, strict=True)
            self._last = owner, features
        return self._last[1]


def _facts(kept: KeptRows, row_of: Mapping[str, int]) -> ImageFacts:
    """The facts of an album in its order; equal images get bit-equal features."""
    found: dict[int, tuple[str, bytes, np.ndarray]] = {}
    unreadable: dict[int, str] = {}
    for table in kept.tables(("id", "key", "picture", "features", "reason")):
        columns = (table[name].to_pylist() for name in ("id", "key", "picture", "reason"))
        for at, (name, key, picture, reason) in enumerate(zip(*columns, strict=True)):
            if name not in row_of:
                continue
            if reason is None:
                found[row_of[name]] = key, picture, table["features"][at].values.to_numpy()
            else:
                unreadable[row_of[name]] = reason
    if not found:
        return joined_facts([], unreadable)
    rows = sorted(found)
    first: dict[str, np.ndarray] = {}
    for row in rows:
        first.setdefault(found[row][0], found[row][2])
    keys = [found[row][0] for row in rows]
    pictures = np.stack([np.frombuffer(found[row][1], np.uint8) for row in rows])
    return ImageFacts(rows, keys, pictures, torch.from_numpy(np.stack([first[key] for key in keys])), unreadable)
