"""The parts of an album that need models.

Legend: S candidates of all images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hf_captionrl.apps.album.candidates import EncodedTexts, contrastive_answers, generate_candidates
from hf_captionrl.apps.album.settings import AlbumSettings
from hf_captionrl.apps.album.sources import ImageFacts, copy_threshold, read_images
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.metrics.suites import spoken
from hf_captionrl.retrieval import FeatureCache, Scorer


class AlbumWork(Protocol):
    """What the engine of an album needs; `rows` are rows of the album."""

    @property
    def writes_captions(self) -> bool:
        """Whether there is a captioner."""
        ...

    def facts(self) -> ImageFacts:
        """Facts of all images."""
        ...

    def copy_threshold(self, facts: ImageFacts) -> float:
        """Cosine from which two images may be copies."""
        ...

    def candidates(self, rows: Sequence[int], similar: Sequence[Sequence[int]] | None) -> list[list[str]]:
        """Generated candidates of some images; `similar`: rows of the images most similar to each."""
        ...

    def answers(self, rows: Sequence[int], said: Sequence[Sequence[str]]) -> list[list[str]]:
        """Answers to contrastive prompts with the captions of the similar images."""
        ...

    def text_features(self, rows: Sequence[int], candidates: Sequence[Sequence[str]]) -> Any:
        """Features of the candidates, read with an array of row numbers below S."""
        ...


@dataclass
class LoadedWork:
    """The arguments of [`describe_album`]."""

    images: Sequence[Any]
    ids: Sequence[str]
    captioner: Captioner | None
    scorer: Scorer
    settings: AlbumSettings
    cache: FeatureCache | None = None
    skip_unreadable: bool = False
    progress: Callable[[str, int], Any] | None = None

    @property
    def writes_captions(self) -> bool:
        return self.captioner is not None

    def facts(self) -> ImageFacts:
        return read_images(
            self.images,
            self.scorer,
            cache=self.cache,
            batch_size=self.settings.batch_size,
            skip_unreadable=self.skip_unreadable,
            progress=stage_progress(self.progress, "reading"),
        )

    def copy_threshold(self, facts: ImageFacts) -> float:
        return copy_threshold(self.images, facts, self.scorer, self.cache)

    def candidates(self, rows: Sequence[int], similar: Sequence[Sequence[int]] | None) -> list[list[str]]:
        assert self.captioner is not None
        progress = stage_progress(self.progress, "captioning")
        return generate_candidates(
            self.captioner, self.images, self.ids, self.settings, rows=rows, similar=similar, progress=progress
        )

    def answers(self, rows: Sequence[int], said: Sequence[Sequence[str]]) -> list[list[str]]:
        assert self.captioner is not None
        progress = stage_progress(self.progress, "contrastive prompts")
        return contrastive_answers(self.captioner, self.images, rows, said, self.settings, progress=progress)

    def text_features(self, rows: Sequence[int], candidates: Sequence[Sequence[str]]) -> Any:
        return EncodedTexts(self.scorer, spoken([text for texts in candidates for text in texts]))


def stage_progress(progress: Callable[[str, int], Any] | None, stage: str) -> Callable[[int], Any] | None:
    """The progress of one stage."""
    return None if progress is None else lambda number: progress(stage, number)
