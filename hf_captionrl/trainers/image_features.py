"""What a trainer computes once per data set: features of its frozen vision tower and of scorers, or prepared pixels."""

from __future__ import annotations

from typing import Any, cast

import datasets
from torch import Tensor

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.data import CachedPixels, DecodedPixels, PixelForm, cached_pixels, frames_of
from hf_captionrl.retrieval import Scorer
from hf_captionrl.trainers.caption_config import CaptionConfig
from hf_captionrl.trainers.caption_generation import scorer_features, vision_tower_features

__all__ = ["ImageFeatures"]


class ImageFeatures:
    """Features by data set; data sets and scorers are kept alive so that their ids are not reused."""

    def __init__(self) -> None:
        self.of_vision_tower: dict[int, tuple[datasets.Dataset, Any]] = {}
        self._pixels: dict[int, tuple[datasets.Dataset, CachedPixels | DecodedPixels]] = {}
        self._of_scorers: dict[tuple[int, int], tuple[Any, Any, Tensor]] = {}

    def vision_tower(self, captioner: Captioner, dataset: datasets.Dataset, args: CaptionConfig) -> Any:
        """`(N, M, D)` output of the frozen vision tower; None where images are read in each step."""
        if not args.cache_image_features:
            if number := frames_of(dataset):
                raise ValueError(
                    f"The data are videos ({number} frames each), and features of frames are pooled once for the whole run. "
                    "Set freeze_vision_tower=True and cache_image_features=True."
                )
            return None
        if id(dataset) not in self.of_vision_tower:
            features = vision_tower_features(
                captioner,
                dataset,
                cache_dir=args.feature_cache_dir,
                dtype=args.feature_cache_dtype,
                frame_pooling=args.frame_pooling,
            )
            self.of_vision_tower[id(dataset)] = (dataset, features)
        return self.of_vision_tower[id(dataset)][1]

    def pixels(
        self, captioner: Captioner, dataset: datasets.Dataset, args: CaptionConfig
    ) -> CachedPixels | DecodedPixels | None:
        """Prepared pixels of the images; None where Pillow reads images in each step, or features replace them."""
        if args.cache_pixels is None and (args.image_decoder == "pillow" or args.cache_image_features):
            return None
        if id(dataset) not in self._pixels:
            parts, folder = captioner.prepared_pixels, args.feature_cache_dir
            if args.cache_pixels is None:
                self._pixels[id(dataset)] = (dataset, DecodedPixels(dataset, parts))
            else:
                form = cast(PixelForm, args.cache_pixels)
                self._pixels[id(dataset)] = (dataset, cached_pixels(dataset, parts, form=form, directory=folder))
        return self._pixels[id(dataset)][1]

    def inputs(self, captioner: Captioner, dataset: datasets.Dataset, args: CaptionConfig) -> dict[str, Any]:
        """`image_features` or `pixels` of a [`CaptionDataset`]; both None where images are read in each step."""
        pixels = self.pixels(captioner, dataset, args)
        return {"image_features": self.vision_tower(captioner, dataset, args), "pixels": pixels}

    def forget_inputs(self) -> None:
        """Compute the inputs again, because the captioner is another one."""
        self.of_vision_tower.clear()
        self._pixels.clear()

    def scorer(self, scorer: Scorer, dataset: datasets.Dataset, cache_dir: str | None) -> Tensor:
        """`(N, D)` features of a scorer, unit length, fp32; of a video the mean of its frames'."""
        key = (id(scorer), id(dataset))
        if key not in self._of_scorers:
            features = scorer_features(scorer, dataset, cache_dir=cache_dir)
            self._of_scorers[key] = (scorer, dataset, features)
        return self._of_scorers[key][2]
