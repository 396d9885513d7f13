"""Captions and features of many images.

Legend: N images, M image tokens, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import datasets
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.eval_mode import evaluating
from hf_captionrl.data import CachedPixels, cached_features, frames_of, open_image, sample_frames
from hf_captionrl.data.feature_extraction import VideoPooling, pool_frames
from hf_captionrl.retrieval import FeatureCache, Scorer

__all__ = [
    "GeneratedCaptions",
    "LazyImages",
    "VideoFeatures",
    "generate_captions",
    "generate_with_ends",
    "scorer_features",
    "vision_tower_features",
]


class GeneratedCaptions(NamedTuple):
    """N captions, and whether each has an end token: false if it was truncated."""

    captions: list[str]
    ended: list[bool]


class LazyImages(Sequence[Any]):
    """Images, or prepared pixels, of some rows, read on access, because a test split does not fit into memory."""

    def __init__(self, dataset: datasets.Dataset | CachedPixels, rows: Sequence[int]) -> None:
        self.dataset = dataset
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        found = self.dataset[self.rows[index]]
        return found if isinstance(found, Tensor) else found["image"]


def generate_captions(captioner: Captioner, images: Sequence[Any] | None, **settings: Any) -> list[str]:
    """Caption many images, batch by batch, in eval mode; the settings are those of [`generate_with_ends`]."""
    return generate_with_ends(captioner, images, **settings).captions


def generate_with_ends(
    captioner: Captioner,
    images: Sequence[Any] | None,
    *,
    image_features: Any | None = None,
    batch_size: int = 32,
    progress: Callable[[int], Any] | None = None,
    **generate_kwargs: Any,
) -> GeneratedCaptions:
    """As [`generate_captions`], with the captions that the length limit truncated.

    `image_features` `(N, M, D)` is the cached output of the vision tower.
    """
    number = len(image_features) if image_features is not None else len(images or ())
    found = GeneratedCaptions([], [])
    with evaluating(captioner.model):
        for start in range(0, number, batch_size):
            rows = range(start, min(start + batch_size, number))
            inputs: dict[str, Tensor] = {}
            if image_features is not None:
                features = np.stack([np.asarray(image_features[i]) for i in rows])  # (B, M, D)
                inputs["image_features"] = torch.from_numpy(features)
            else:
                assert images is not None
                part = (images[i] for i in rows)
                inputs = captioner.encode_inputs([i if isinstance(i, Tensor) else open_image(i) for i in part])
            completions = captioner.generate(**inputs, **generate_kwargs)
            found.captions.extend(completions.captions)
            found.ended.extend(completions.ended.tolist())
            if progress is not None:
                progress(rows.stop)
    return found


def vision_tower_features(
    captioner: Captioner,
    dataset: datasets.Dataset,
    *,
    cache_dir: str | None = None,
    dtype: str = "float32",
    frame_pooling: str | None = None,
) -> Any:
    """Cached output of the vision tower `(N, M, D)`; of videos with `"concat"` or `"ordered"`, `(N, F * M, D)`."""
    num_frames = frames_of(dataset)
    pooling: VideoPooling = "mean"
    what = "vision_tower"
    if num_frames:
        pooling = cast(VideoPooling, frame_pooling or captioner.frame_pooling)
        captioner.check_frame_pooling(pooling, num_frames)
        if pooling != "mean":
            what = f"vision_tower_{num_frames}_frames"  # of another shape
        if pooling == "native":
            what = f"video_inputs_{num_frames}_frames_{captioner.video_signature()}"
    elif frame_pooling == "native":
        raise ValueError(
            "frame_pooling is 'native', a model's video inputs, but the data are images. Load videos with num_frames, "
            "or leave frame_pooling out."
        )
    captioner.fixed_side_inputs(1)  # raises if the model needs more than features
    model, _, revision = captioner.vision_signature().rpartition("@")
    cache = FeatureCache(cache_dir, model_id=model, revision=revision, what=what, dtype=dtype)

    return cached_features(
        cache, dataset, lambda images: _tower_output(captioner, images, num_frames, pooling), pooling=pooling
    )


def _tower_output(captioner: Captioner, images: list[Image.Image], num_frames: int, pooling: str) -> Tensor:
    """Features of images, `(N, M, D)`; with `"native"`, features of the videos of these frames, one row per video."""
    if pooling == "native":
        starts = range(0, len(images), num_frames)
        inputs = captioner.encode_videos([images[start : start + num_frames] for start in starts])
    else:
        inputs = captioner.encode_images(images)
    with torch.no_grad():
        return captioner.image_features(**inputs).cpu()


class VideoFeatures(Sequence[Any]):
    """Output of the vision tower for videos outside a data set, computed on access.

    `frame_pooling=None` pools as the captioner was trained.
    """

    def __init__(
        self, captioner: Captioner, videos: Sequence[Any], num_frames: int, frame_pooling: str | None = None
    ) -> None:
        self.captioner = captioner
        self.videos = videos
        self.num_frames = num_frames
        self.pooling = cast(VideoPooling, frame_pooling or captioner.frame_pooling)
        captioner.check_frame_pooling(self.pooling, num_frames)
        captioner.fixed_side_inputs(1)  # raises if the model needs more than features

    def __len__(self) -> int:
        return len(self.videos)

    def __getitem__(self, index: Any) -> Any:
        """`(M, D)`, with `"concat"` or `"ordered"` `(F * M, D)`: an array, fp32."""
        F = self.num_frames
        features = _tower_output(self.captioner, sample_frames(self.videos[index], F), F, self.pooling).float()
        return (features if self.pooling == "native" else pool_frames(features, F, self.pooling))[0].numpy()


def scorer_features(scorer: Scorer, dataset: datasets.Dataset, *, cache_dir: str | None = None) -> Tensor:
    """Image features of a scorer, from the cache if possible; of a video the mean of its frames' features.

    Returns `(N, D)`: Unit length, fp32.
    """
    cache = FeatureCache.for_scorer(scorer, cache_dir)
    return cached_features(cache, dataset, scorer.image_features, unit_length=True).tensor().float()
