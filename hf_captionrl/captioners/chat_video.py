r"""Chat models with video inputs.

Legend: B videos, F frames per video, M tokens per video, P tokens of the prefix, D features.

Some models have a video token and `get_video_features` (LLaVA-OneVision, Qwen-VL); others read the frames of a video as
images (InternVL, SmolVLM). The processor decides which one applies; batches are the same for both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.captioners.model_inputs import Encoding
from hf_captionrl.captioners.processor_checks import blank_image

__all__ = ["VIDEO_POSITION_INPUTS", "VideoInputs", "as_videos", "pixel_kind"]

VIDEO_POSITION_INPUTS = ("video_grid_thw", "second_per_grid_ts")
"""Inputs from which Qwen-VL computes the positions of video tokens."""
FRAMES_PER_SECOND = 1.0
"""Frame rate passed to processors for every video, so that the text before the caption is the same for all videos."""


def pixel_kind(model: Any, prefix_ids: Tensor) -> tuple[str, int]:
    """Whether `prefix_ids` `(B, P)` contain video or image tokens, and the id of that token."""
    token = getattr(model.config, "video_token_id", None)
    if token is not None and bool((prefix_ids == token).any()):
        return "video", int(token)
    return "image", int(model.config.image_token_id)


class VideoInputs(Encoding):
    """The part of [`ChatCaptioner`] that prepares videos; `frame_pooling="native"`."""

    processor: Any

    if TYPE_CHECKING:  # members of ChatCaptioner

        def _render(self, kind: str = "image") -> tuple[str, str]: ...

        @property
        def processor_settings(self) -> dict[str, Any]: ...

        def _read(self, found: Any) -> dict[str, Any]: ...

        def _stacked(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]: ...

        def _fixed_or_none(self) -> dict[str, Tensor] | None: ...

    def check_frame_pooling(self, pooling: str, num_frames: int) -> None:
        self.native_frames = 0
        if pooling != "native":
            super().check_frame_pooling(pooling, num_frames)
            return
        name = type(self.base_model).__name__
        if getattr(self.processor, "video_processor", None) is None:
            raise ValueError(
                f"frame_pooling is 'native', but {name} has no video inputs: its {type(self.processor).__name__} has no "
                "video_processor. Use frame_pooling='mean'."
            )
        last = self._prefix_of_video([blank_image()] * num_frames)["input_ids"][-1]
        if last != self.start_token_id:
            raise ValueError(
                f"frame_pooling is 'native', but the chat of {name} ends with token {last} after a video and with token "
                f"{self.start_token_id} after an image. Use a template with the same ending, or frame_pooling='mean'."
            )
        self.native_frames = num_frames
        if self._fixed_or_none() is None:
            self.native_frames = 0
            raise ValueError(
                f"frame_pooling is 'native', but the processor of {name} returns different numbers of tokens for videos of "
                f"{num_frames} frames, so that features alone do not determine its inputs. Set its video_processor to one "
                "size for all videos, or use frame_pooling='mean'."
            )

    def encode_videos(self, videos: Sequence[Sequence[Image.Image]]) -> dict[str, Tensor]:
        return self._stacked([self._prefix_of_video(frames) for frames in videos])

    def video_signature(self) -> str:
        settings = {key: str(value) for key, value in self.processor.video_processor.to_dict().items()}
        text = json.dumps(settings, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def _prefix_of_video(self, frames: Sequence[Image.Image]) -> dict[str, Any]:
        """The processor's output for a video and the chat before the caption, like `_prefix_of` for an image."""
        times = {
            "total_num_frames": len(frames),
            "fps": FRAMES_PER_SECOND,
            "duration": len(frames) / FRAMES_PER_SECOND,
            "frames_indices": list(range(len(frames))),
        }
        token = getattr(self.processor, "video_token", None)
        turn = "" if token is None else self._render("video")[0]
        if token is None or turn.count(token) != 1:
            raise ValueError(
                f"frame_pooling is 'native', but the chat template of {type(self.base_model).__name__} does not render "
                f"one video token: {turn!r}. Use a template with content of type 'video', or frame_pooling='mean'."
            )
        found = self.processor(
            text=[turn],
            videos=[[frame.convert("RGB") for frame in frames]],
            video_metadata=[times],
            do_sample_frames=False,
            return_tensors="pt",
            **self.processor_settings,
        )
        if "pixel_values_videos" in found:
            found["pixel_values"] = found.pop("pixel_values_videos")
        return self._read(found)

    def _rows_of_blank_videos(self, sizes: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
        """The side inputs of blank videos with `native_frames` frames, one row per size."""
        pixels = ("pixel_values", "pixel_attention_mask")  # features replace both
        videos = (self.encode_videos([[Image.new("RGB", size)] * self.native_frames]) for size in sizes)
        return [{name: value for name, value in row.items() if name not in pixels} for row in videos]


def as_videos(model: Any, output: Any) -> Any:
    """Features of videos in the form that the model's `get_video_features` returns."""
    if model.config.model_type == "llava_onevision":
        output.pooler_output = torch.stack(output.pooler_output)
    return output
