"""What the processes of an album compute: facts of images, candidates, answers to contrastive prompts.

Legend: B images of a batch, G captions of an image, D features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_captionrl.engine import Stage, refuse_other_settings
from hf_captionrl.io import to_plain

if TYPE_CHECKING:
    import pyarrow as pa

    from hf_captionrl.album.loading import AlbumModels
    from hf_captionrl.retrieval import FeatureCache

__all__ = ["AnswerStage", "CandidateStage", "ReadStage"]


class _AlbumStage(Stage):
    """A stage on some images of an album.

    Rows that other models made in an earlier run are refused.
    """

    def __init__(
        self, models: AlbumModels, ids: Sequence[str], images: Sequence[str], made_by: Mapping[str, Any] | None
    ) -> None:
        self.models, self.ids, self.images, self.expected = models, list(ids), list(images), made_by

    def load(self) -> None:
        self._rows = self.models.rows_of(self.images)
        if self.expected is not None:
            refuse_other_settings(self.expected, to_plain(self.made_by()))

    def batches(self, rows: range) -> Iterator[range]:
        """Batches start at fixed rows: the result does not depend on the size of the shards."""
        size = self.models.options.batch_size
        for start in range(rows.start, rows.stop, size):
            yield range(start, min(start + size, rows.stop))


class ReadStage(_AlbumStage):
    """Hash, small picture and features of each image, or the `reason` why it cannot be read."""

    def load(self) -> None:
        from hf_captionrl.retrieval import FeatureCache

        super().load()
        # The stage only reads the cache: otherwise the features of an image would depend on which process is the first.
        self._cache: FeatureCache = FeatureCache.for_scorer(self.models.scorer, self.models.options.cache_dir)

    def made_by(self) -> dict[str, Any]:
        return {"scorer": self.models.scorer.signature}

    def schema(self) -> pa.Schema:
        import pyarrow as pa

        columns = {"id": pa.string(), "key": pa.string(), "picture": pa.binary(), "features": pa.list_(pa.float32())}
        return pa.schema({**columns, "reason": pa.string()})

    def __call__(self, rows: range) -> list[dict[str, Any]]:
        from hf_captionrl.album.image_facts import read_chunks

        found: dict[int, dict[str, Any]] = {}
        unreadable: dict[int, str] = {}
        for batch in self.batches(rows):
            for facts in read_chunks(
                self.models.source.images,
                self._rows[batch.start : batch.stop],
                self.models.scorer,
                cache=self._cache,
                batch_size=len(batch),
                unreadable=unreadable,
            ):
                values = zip(facts.rows, facts.keys, facts.pictures, facts.features.numpy(), strict=True)
                for row, key, picture, features in values:
                    found[row] = {"key": key, "picture": picture.tobytes(), "features": features}
        album_rows = self._rows[rows.start : rows.stop]
        return [
            {"id": self.ids[row], **(found.get(at) or {"reason": unreadable[at]})}
            for row, at in zip(rows, album_rows, strict=True)
        ]


class _TextStage(_AlbumStage):
    """Captions of each image and their features, `(G * D,)`; the column `scorer` names the scorer."""

    def made_by(self) -> dict[str, Any]:
        from hf_captionrl.retrieval import model_fingerprint

        captioner = self.models.captioner
        return {"weights": model_fingerprint(captioner.base_model), "prompt": captioner.prompt}

    def schema(self) -> pa.Schema:
        import pyarrow as pa

        columns = {"id": pa.string(), "captions": pa.list_(pa.string()), "features": pa.list_(pa.float32())}
        return pa.schema({**columns, "scorer": pa.string()})

    @abstractmethod
    def captions(self, batch: range) -> list[list[str]]:
        """Captions of a batch."""

    def __call__(self, rows: range) -> list[dict[str, Any]]:
        from hf_captionrl.metrics.suites.suite_row import spoken

        scorer = self.models.scorer
        found = []
        for batch in self.batches(rows):
            groups = self.captions(batch)
            flat = spoken([text for texts in groups for text in texts])
            features = scorer.text_features(flat).float().cpu().numpy()  # (B * G, D)
            at = 0
            for row, texts in zip(batch, groups, strict=True):
                mine = features[at : at + len(texts)].reshape(-1)
                at += len(texts)
                found.append({"id": self.ids[row], "captions": texts, "features": mine, "scorer": scorer.signature})
        return found


class CandidateStage(_TextStage):
    """Candidates from beam search and sampling."""

    def __init__(
        self,
        models: AlbumModels,
        ids: Sequence[str],
        images: Sequence[str],
        made_by: Mapping[str, Any] | None,
        similar: Sequence[Sequence[int]] | None,
    ) -> None:
        super().__init__(models, ids, images, made_by)
        self.similar = similar

    def captions(self, batch: range) -> list[list[str]]:
        from hf_captionrl.album.candidates import generate_candidates

        part = slice(batch.start, batch.stop)
        source = self.models.source
        return generate_candidates(
            self.models.captioner,
            source.images,
            source.image_ids,
            self.models.options,
            rows=self._rows[part],
            similar=None if self.similar is None else self.similar[part],
        )


class AnswerStage(_TextStage):
    """Answers to contrastive prompts."""

    def __init__(
        self,
        models: AlbumModels,
        ids: Sequence[str],
        images: Sequence[str],
        made_by: Mapping[str, Any] | None,
        said: Sequence[Sequence[str]],
    ) -> None:
        super().__init__(models, ids, images, made_by)
        self.said = said

    def captions(self, batch: range) -> list[list[str]]:
        from hf_captionrl.album.candidates import contrastive_answers

        part = slice(batch.start, batch.stop)
        images, options = self.models.source.images, self.models.options
        return contrastive_answers(self.models.captioner, images, self._rows[part], self.said[part], options)
