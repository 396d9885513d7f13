r"""Chat models with video inputs.

Legend: B videos, F frames of each, M tokens of a video, P tokens of the prefix, D features, L layers that get features of
their own.

Some models have a token for a piece of a video and `get_video_features` (LLaVA-OneVision, Qwen-VL), others read a video's
frames as so many images (InternVL, SmolVLM). Which it is, the processor decides; batches are the same for both.
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

__all__ = ["PLACES_OF_VIDEOS", "VideoInputs", "as_videos", "pixel_kind"]

PLACES_OF_VIDEOS = ("video_grid_thw", "second_per_grid_ts")
"""What Qwen-VL counts the positions of a video's tokens by."""
FRAMES_PER_SECOND = 1.0
"""What processors that reckon with time are told of any video: times of its own would make its text its own."""


def pixel_kind(model: Any, prefix_ids: Tensor) -> tuple[str, int]:
    """As what the model reads the images or videos of a batch.

    Args:
        prefix_ids (`torch.Tensor` of shape `(B, P)`): What stands before the text.
    """
    token = getattr(model.config, "video_token_id", None)
    if token is not None and bool((prefix_ids == token).any()):
        return "video", int(token)
    return "image", int(model.config.image_token_id)


class VideoInputs(Encoding):
    """The part of [`ChatCaptioner`] that prepares videos; `frame_pooling="native"`."""

    processor: Any

    if TYPE_CHECKING:  # what ChatCaptioner has

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
                f"frame_pooling is 'native', but the chat template of {name} does not end alike with a video (token {last}) "
                f"and with an image (token {self.start_token_id}). Use a template that does, or frame_pooling='mean'."
            )
        self.native_frames = num_frames
        if self._fixed_or_none() is None:
            self.native_frames = 0
            raise ValueError(
                f"frame_pooling is 'native', but the processor of {name} makes more tokens of some videos of {num_frames} "
                "frames than of others, so features alone do not say what a video is. Set its video_processor to one size "
                "for all videos, or use frame_pooling='mean'."
            )

    def encode_videos(self, videos: Sequence[Sequence[Image.Image]]) -> dict[str, Tensor]:
        return self._stacked([self._prefix_of_video(frames) for frames in videos])

    def video_signature(self) -> str:
        settings = {key: str(value) for key, value in self.processor.video_processor.to_dict().items()}
        text = json.dumps(settings, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def _prefix_of_video(self, frames: Sequence[Image.Image]) -> dict[str, Any]:
        """What the processor makes of a video and the chat before the caption, as `_prefix_of` does of an image."""
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
                f"frame_pooling is 'native', but the chat template of {type(self.base_model).__name__} has no place for "
                f"a video: it writes {turn!r}. Use a template that knows content of type 'video', or frame_pooling='mean'."
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
        """The side inputs of videos of `native_frames` frames in some sizes, a row each."""
        rows = []
        for size in sizes:
            row = self.encode_videos([[Image.new("RGB", size)] * self.native_frames])
            # Masks of pixels, of no use to features, are as large as the pixels.
            rows.append(
                {name: value for name, value in row.items() if name not in ("pixel_values", "pixel_attention_mask")}
            )
        return rows


def as_videos(model: Any, output: Any) -> Any:
    """Features of videos as the model's own `get_video_features` returns them."""
    if model.config.model_type == "llava_onevision":
        output.pooler_output = torch.stack(output.pooler_output)
    return output
