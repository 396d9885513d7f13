"""Captions and features of many images and videos; `pipeline` takes images, paths, lists, data sets and videos in one call.

Legend: N images or videos, F frames, M image tokens, D features.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import datasets
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

import hf_captionrl.data as caption_data  # videos are imported at their first use
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.head_tap import evaluating
from hf_captionrl.captioners.loading import load_captioner
from hf_captionrl.data import cached_features, frames_of, open_image
from hf_captionrl.data.features import pool_frames
from hf_captionrl.retrieval.feature_cache import FeatureCache, tower_in_parts

if TYPE_CHECKING:
    from hf_captionrl.retrieval.scorer import Scorer


class GeneratedCaptions(NamedTuple):
    """N captions, and whether each has an end token: false if it was truncated."""

    captions: list[str]
    ended: list[bool]


class ChosenImages(Sequence[Any]):
    """Some rows of a sequence of images, each read when it is accessed, because a test split does not fit into memory."""

    def __init__(self, images: Any, rows: Sequence[int]) -> None:
        self.images, self.rows = images, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.images[self.rows[index]]


def generate_captions(captioner: Captioner, images: Sequence[Any] | None, **settings: Any) -> list[str]:
    """Caption many images, batch by batch, in eval mode; the settings are those of [`generate_with_ends`]."""
    return generate_with_ends(captioner, images, **settings).captions


def generate_with_ends(
    captioner: Captioner,
    images: Any,
    *,
    image_features: Any | None = None,
    batch_size: int = 32,
    progress: Callable[[int], Any] | None = None,
    **generate_kwargs: Any,
) -> GeneratedCaptions:
    """As [`generate_captions`], with the captions that the length limit truncated.

    `image_features` `(N, M, D)` is the cached output of the vision tower.
    """
    number = len((images or ()) if image_features is None else image_features)
    found = GeneratedCaptions([], [])
    with evaluating(captioner.model):
        for start in range(0, number, batch_size):
            rows = range(start, min(start + batch_size, number))
            if image_features is not None:
                features = np.stack([np.asarray(image_features[i]) for i in rows])  # (B, M, D)
                inputs = {"image_features": torch.from_numpy(features)}
            else:
                part = (images[i] for i in rows)  # images, or rows of `cached_pixels`
                inputs = captioner.encode_inputs(
                    [torch.from_numpy(np.array(i)) if isinstance(i, np.ndarray) else open_image(i) for i in part]
                )
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
    num_frames, what = frames_of(dataset), "vision_tower"
    pooling: Any = "mean"
    if num_frames:
        pooling = frame_pooling or captioner.frame_pooling
        captioner.check_frame_pooling(pooling, num_frames)
        if pooling != "mean":
            what = f"vision_tower_{num_frames}_frames"  # of another shape
    captioner.fixed_side_inputs(1)  # raises if the model needs more than features
    model, _, revision = captioner.vision_signature().rpartition("@")
    cache = FeatureCache(cache_dir, model_id=model, revision=revision, what=what, dtype=dtype)
    return cached_features(cache, dataset, lambda images: _tower_output(captioner, images), pooling=pooling)


def _tower_output(captioner: Captioner, images: list[Image.Image]) -> Tensor:
    """Features of images, `(N, M, D)`."""
    inputs = captioner.encode_images(images)
    with torch.no_grad():
        if inputs.keys() == {"pixel_values"}:
            pixels = inputs["pixel_values"].to(captioner.device)
            return tower_in_parts(lambda part: captioner.image_features(pixel_values=part), pixels).cpu()
        return captioner.image_features(**inputs).cpu()


class VideoFeatures(Sequence[Any]):
    """Output of the vision tower for videos outside a data set, computed on access.

    `frame_pooling=None` pools as the captioner was trained.
    """

    def __init__(
        self, captioner: Captioner, videos: Sequence[Any], num_frames: int, frame_pooling: str | None = None
    ) -> None:
        self.captioner, self.videos, self.num_frames = captioner, videos, num_frames
        self.pooling: Any = frame_pooling or captioner.frame_pooling
        captioner.check_frame_pooling(self.pooling, num_frames)
        captioner.fixed_side_inputs(1)  # raises if the model needs more than features

    def __len__(self) -> int:
        return len(self.videos)

    def __getitem__(self, index: Any) -> Any:
        """`(M, D)`, with `"concat"` or `"ordered"` `(F * M, D)`: an array, fp32."""
        frames = caption_data.sample_frames(self.videos[index], self.num_frames)
        return pool_frames(_tower_output(self.captioner, frames).float(), self.num_frames, self.pooling)[0].numpy()


def scorer_features(scorer: Scorer, dataset: datasets.Dataset, *, cache_dir: str | None = None) -> Tensor:
    """Image features of a scorer, `(N, D)`, unit length, fp32, cached; of a video the mean of its frames' features."""
    cache = FeatureCache.for_scorer(scorer, cache_dir)
    return cached_features(cache, dataset, scorer.image_features, unit_length=True).tensor().float()


# --- Captions images, paths, lists, data sets and videos in one call -------------------------------------------------


def pipeline(
    model: str | os.PathLike[str] | Captioner,
    *,
    revision: str | None = None,
    prompt: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> CaptionPipeline:
    """Load a captioner for inference.

    Args:
        model: A name on the Hub, a folder, a shipped model (`scenes:blip-mle`), or a captioner.
        revision: Branch, tag or commit on the Hub.
        prompt: Text that every caption continues; by default the model's prompt.
        dtype: Dtype of the weights; by default the checkpoint's.
        device: By default a GPU if there is one. A captioner object stays on its device.
        model_kwargs: More arguments of `load_captioner`, such as `{"attn_implementation": "sdpa"}`.
        settings: Arguments of [`CaptionPipeline`]: `num_frames`, `frame_pooling`, `batch_size`, and defaults for `generate`.

    Returns:
        [`CaptionPipeline`]: Call it with images or videos.

    Raises:
        FileNotFoundError: If the model does not exist, or has no weights in safetensors.
        ValueError: If the model is not a captioner.
    """
    loading: dict[str, Any] = {"prompt": prompt, "device": device}
    if not isinstance(model, Captioner):
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        loading |= {"revision": revision, "dtype": dtype, "device": device}
    return CaptionPipeline(load_captioner(model, **loading, **(model_kwargs or {})), **settings)


class CaptionPipeline:
    """Captions images and videos.

    Args:
        captioner ([`Captioner`]): The captioner.
        num_frames (`int`, *optional*): Number of frames per video. None: as in training, or 8 if the captioner was
            trained on images. A data set of videos stores its number of frames.
        frame_pooling (`str`, *optional*): How the features of frames are pooled, see `data.pool_frames`. None: as in
            training, or the mean if the captioner was trained on images.
        batch_size (`int`): Images per batch.
        generation: Default arguments of the captioner's `generate`, such as `num_beams`.

    Example:
        >>> from hf_captionrl.scenes import load_scenes
        >>> caption = pipeline("scenes:blip-mle", max_new_tokens=12)
        >>> test = load_scenes(num_train=0, num_validation=0, num_test=2)["test"]
        >>> isinstance(caption(test[0]["image"]), str), len(caption(test))
        (True, 2)
    """

    def __init__(
        self,
        captioner: Captioner,
        *,
        num_frames: int | None = None,
        frame_pooling: str | None = None,
        batch_size: int = 16,
        **generation: Any,
    ) -> None:
        self.captioner = captioner
        self.num_frames = (captioner.num_frames or 8) if num_frames is None else num_frames
        self.frame_pooling = frame_pooling
        self.batch_size = batch_size
        self.generation = generation

    def __call__(
        self,
        inputs: Any,
        *,
        batch_size: int | None = None,
        progress: bool = False,
        **generation: Any,
    ) -> Any:
        """Caption one input (`str`) or several (`list[str]`, or lists of captions with `num_return_sequences` above 1).

        Args:
            inputs: An image (PIL, path, bytes, or what an undecoded `datasets.Image` holds), a video (path or bytes), a list
                of these, or a `datasets.Dataset` with a column `image`.
            batch_size: Images per batch; by default the pipeline's.
            progress: Whether to show a progress bar.
            generation: Arguments of `generate`, which override the pipeline's defaults.
        """
        settings = {**self.generation, **generation}
        size = self.batch_size if batch_size is None else batch_size
        single = isinstance(inputs, str | os.PathLike | bytes | bytearray | memoryview | Image.Image | Mapping)
        images: Sequence[Any] = [inputs] if single else inputs
        if isinstance(inputs, datasets.Dataset):
            images, frames = inputs["image"], frames_of(inputs)
            videos = list(range(len(images))) if frames else []
        elif isinstance(images, Sequence):
            frames = self.num_frames
            videos = [
                i
                for i, image in enumerate(images)
                if not isinstance(image, Image.Image) and caption_data.is_video(image)
            ]
        else:
            raise TypeError(f"The inputs are a {type(inputs).__name__}. Pass images, paths, or a datasets.Dataset.")
        stills = sorted(set(range(len(images))) - set(videos))
        each = int(settings.get("num_return_sequences") or 1)
        done: dict[int, list[str]] = {}
        with tqdm(total=len(images), unit=" images", desc="Captioning", disable=not progress) as bar:
            for rows, is_video in ((stills, False), (videos, True)):
                chosen = ChosenImages(images, rows)
                features = (
                    VideoFeatures(self.captioner, chosen, frames, self.frame_pooling) if is_video and rows else None
                )
                before = len(done)
                report = lambda number, before=before: bar.update(before + number - bar.n)  # noqa: E731
                further = {"image_features": features, "batch_size": size, "progress": report, **settings}
                captions = generate_captions(self.captioner, chosen, **further)
                done |= {row: captions[at * each : (at + 1) * each] for at, row in enumerate(rows)}
        result: list[Any] = [done[i] if each > 1 else done[i][0] for i in range(len(images))]
        return result[0] if single else result
