"""`captionrl features`: features of a scorer for every image, in Parquet shards and in the feature cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_captionrl.evaluation.cached_rows import CachedRowsOptions, fill_cache, keys_and_cached, print_summary
from hf_captionrl.evaluation.dataset_options import DatasetOptions, LoadedSplit, SimilarityOptions, source_settings
from hf_captionrl.evaluation.image_stage import ImageStage, run_on_images
from hf_captionrl.options import option

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from hf_captionrl.data import ImageReader

__all__ = ["FeatureStage", "FeaturesOptions", "write_features"]


@dataclass
class FeaturesOptions(CachedRowsOptions, SimilarityOptions, DatasetOptions):
    """Compute the features of a scorer once for every image: in processes of this machine, or on a Ray cluster.

    The output is a folder of Parquet shards with a manifest: image_id, key (of the image in the feature cache), image
    and, with --features multimodal, text, which is the mean feature of the captions. The image features are then put into the feature
    cache of this machine, where training, evaluation and `captionrl bags` find them.

    The same command skips finished shards.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl features --dataset scenes --features image --output features
          captionrl features --dataset OWNER/NAME --split train --scorer openai/clip-vit-base-patch32 --output features \\
              --processes 8
          captionrl features --dataset OWNER/NAME --split train --output /shared/features --engine ray --address auto
    """

    output: Path = option(Path("features"), metavar="DIR", help="folder of the shards")


class FeatureStage(ImageStage):
    """Features of shards: `key`, `image` and `text`."""

    def __init__(self, options: FeaturesOptions, ids: str, *, only: np.ndarray | None = None) -> None:
        super().__init__(options, ids, require_captions=options.features == "multimodal", only=only)

    def load_model(self, split: LoadedSplit) -> ImageReader:
        from hf_captionrl.data import ImageReader
        from hf_captionrl.data.source_keys import file_hashes
        from hf_captionrl.evaluation.similarity import similarity_scorer
        from hf_captionrl.retrieval import FeatureCache

        self._scorer = similarity_scorer(self.options)
        # Only read here: otherwise the features of an image would depend on which process is the first.
        self._cache = FeatureCache.for_scorer(self._scorer, self.options.cache_dir)
        self._hashes = file_hashes(self.options.cache_dir)
        self._captions = split.dataset["captions"] if self.options.features == "multimodal" else None
        return ImageReader(split.dataset, split=split.split, max_bad_fraction=self.options.max_bad_fraction)

    def made_by(self) -> dict[str, Any]:
        return {"scorer": self._scorer.signature}

    def columns(self) -> dict[str, pa.DataType]:
        import pyarrow as pa

        return {"key": pa.string(), "image": pa.list_(pa.float32()), "text": pa.list_(pa.float32())}

    def batch(self, rows: list[int]) -> dict[int, dict[str, Any]]:
        from hf_captionrl.evaluation.similarity import mean_text_features

        keys, features = keys_and_cached(self.reader, self._cache, self._hashes, rows)
        opened = self.reader.open_all([row for row in keys if row not in features])
        if opened:
            computed = self._scorer.image_features(list(opened.values())).float().cpu().numpy()  # (B, D)
            features |= dict(zip(opened, computed, strict=True))
        keys = {row: key for row, key in keys.items() if row in features}
        if not keys:
            return {}
        found: dict[int, dict[str, Any]] = {
            row: {"key": key, "image": features[row].astype("float32")} for row, key in keys.items()
        }
        if self._captions is not None:
            groups = [self._captions[row] for row in keys]
            texts = mean_text_features(self._scorer, groups, [self.reader.ids[row] for row in keys]).numpy()
            for row, feature in zip(keys, texts, strict=True):
                found[row]["text"] = feature
        return found


def write_features(arguments: FeaturesOptions) -> None:
    """Write the features."""
    arguments.check_engine()
    summary = run_on_images(
        arguments,
        arguments.output,
        lambda: source_settings(arguments) | {"scorer": arguments.scorer, "features": arguments.features},
        lambda ids: FeatureStage(arguments, ids),
        require_captions=arguments.features == "multimodal",
    )
    if arguments.fill_cache and summary["finished"]:
        from hf_captionrl.evaluation.similarity import similarity_scorer
        from hf_captionrl.retrieval import FeatureCache

        cache = FeatureCache.for_scorer(similarity_scorer(arguments), arguments.cache_dir)
        summary["cached"] = fill_cache(cache, arguments.output, "image")
    print_summary(arguments, summary, "features")
