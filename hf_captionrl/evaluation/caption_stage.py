"""Captions of the rows of a data set, batch by batch: for one file of lines, and for Parquet shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hf_captionrl.engine import seed_of_batch
from hf_captionrl.evaluation.dataset_options import LoadedSplit
from hf_captionrl.evaluation.image_stage import ImageStage

if TYPE_CHECKING:
    import pyarrow as pa

    from hf_captionrl.data import ImageReader
    from hf_captionrl.evaluation.caption_options import CaptionOptions
    from hf_captionrl.pipelines import CaptionPipeline
    from hf_captionrl.retrieval import Scorer

__all__ = ["BatchCaptioner", "CaptionStage", "load_batch_captioner"]


class BatchCaptioner:
    """A loaded captioner and the images of a split; captions them batch by batch."""

    def __init__(
        self,
        options: CaptionOptions,
        decoding: dict[str, Any],
        split: LoadedSplit,
        pipeline: CaptionPipeline,
        reader: ImageReader,
        scorer: Scorer | None,
    ) -> None:
        from hf_captionrl.data import frames_of

        self.options, self.decoding, self.dataset = options, decoding, split.dataset
        self.pipeline, self.reader, self.scorer = pipeline, reader, scorer
        self.has_videos = bool(frames_of(split.dataset))

    def batches(self, rows: range, done: set[str]) -> Iterator[tuple[list[int], list[int]]]:
        """Rows to caption together, and those of them whose captions are missing.

        Batches start at fixed rows of the data set. Samples depend on the whole batch, so an incomplete batch is sampled
        again as a whole: a resumed output equals that of an uninterrupted run.
        """
        size, ids = self.options.batch_size, self.reader.ids
        for start in range(rows.start, rows.stop, size):
            batch = range(start, min(start + size, rows.stop))
            names = ids[batch.start : batch.stop]
            wanted = [row for row, name in zip(batch, names, strict=True) if name not in done]
            if wanted:
                yield (list(batch) if self.options.do_sample else wanted), wanted

    def __call__(self, rows: Sequence[int]) -> dict[int, list[str]]:
        """Captions of the rows of one batch, without those that cannot be read."""
        import torch

        images: dict[int, Any] = dict.fromkeys(rows) if self.has_videos else self.reader.open_all(rows)
        good = list(images)
        if not good:
            return {}
        if self.options.do_sample:
            torch.manual_seed(seed_of_batch(self.options.seed, self.reader.ids[rows[0]]))
        # No variable holds the list, so the images are freed before the next batch is opened.
        if self.scorer is None:
            texts = self._generate([images.pop(row) for row in good], good)
        else:
            texts = self._generate([images[row] for row in good], good)
            texts = _reranked(self.scorer, [images.pop(row) for row in good], texts)
        return dict(zip(good, texts, strict=True))

    def _generate(self, images: list[Any], rows: list[int]) -> list[list[str]]:
        from hf_captionrl.captioners.eval_mode import evaluating

        number = self.decoding["num_return_sequences"]
        if self.has_videos:
            found = self.pipeline(self.dataset.select(rows), batch_size=len(rows), **self.decoding)
            return found if number > 1 else [[text] for text in found]
        captioner = self.pipeline.captioner
        with evaluating(captioner.model):
            texts = captioner.generate(**captioner.encode_images(images), **self.decoding).captions
        return [texts[start : start + number] for start in range(0, len(texts), number)]


def _reranked(scorer: Scorer, images: Sequence[Any], texts: Sequence[Sequence[str]]) -> list[list[str]]:
    """The caption of each image that is most similar to it; the first of equal ones."""
    from hf_captionrl.metrics.suites.suite_row import spoken

    features = scorer.image_features(list(images))
    best = []
    for image, group in zip(features, texts, strict=True):
        similarity = scorer.text_features(spoken(group)) @ image
        best.append([group[int(similarity.argmax())]])
    return best


def load_batch_captioner(
    options: CaptionOptions, decoding: dict[str, Any], split: LoadedSplit, quarantine_path: Any = None
) -> BatchCaptioner:
    """Load the captioner, the scorer of `--rerank`, and a reader of the images."""
    import torch

    from hf_captionrl.data import ImageReader, frames_of
    from hf_captionrl.evaluation.arguments import optional_scorer
    from hf_captionrl.pipelines import pipeline

    scorer = None
    if options.rerank is not None:
        if frames_of(split.dataset):
            raise ValueError("--rerank is for images, but the data are videos. Leave it out.")
        scorer = optional_scorer(options.rerank)
    loaded = pipeline(
        options.model,
        revision=options.revision,
        prompt=options.prompt,
        dtype=getattr(torch, options.dtype),
        device=options.device,
        model_kwargs=options.loading,
    )
    reader = ImageReader(
        split.dataset,
        split=split.split,
        quarantine_path=quarantine_path,
        max_bad_fraction=options.max_bad_fraction,
    )
    return BatchCaptioner(options, decoding, split, loaded, reader, scorer)


class CaptionStage(ImageStage):
    """Captions of shards, in the column `captions`."""

    def __init__(self, options: CaptionOptions, decoding: dict[str, Any], ids: str) -> None:
        super().__init__(options, ids)
        self.decoding = decoding

    def load_model(self, split: LoadedSplit) -> ImageReader:
        self._captioner = load_batch_captioner(self.options, self.decoding, split)
        return self._captioner.reader

    def made_by(self) -> dict[str, Any]:
        from hf_captionrl.retrieval import model_fingerprint

        captioner = self._captioner.pipeline.captioner
        return {"weights": model_fingerprint(captioner.base_model), "prompt": captioner.prompt}

    def columns(self) -> dict[str, pa.DataType]:
        import pyarrow as pa

        return {"captions": pa.list_(pa.string())}

    def batch(self, rows: list[int]) -> dict[int, dict[str, Any]]:
        return {row: {"captions": texts} for row, texts in self._captioner(rows).items()}
