"""Converts images and captions to batches, and token ids to captions.

Legend: B images or captions, N captions, T tokens, M image tokens, D features, H x W pixels of the vision tower's input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.captioners.caption_tokens import completion_mask, encode, pad_rows, prompt_token_ids
from hf_captionrl.captioners.prepared_pixels import PreparedPixels

__all__ = ["Encoding"]


class Encoding(ABC):
    """The part of [`Captioner`] that creates batches and decodes completions."""

    side_inputs: ClassVar[tuple[str, ...]] = ()
    """Names of the inputs per image other than the pixels; each has one row per image."""
    lead: str = ""
    """Separator between a caption and the text before it, if the prompt does not define it."""
    forced_token_ids: tuple[int, ...] = ()
    """Tokens that always follow the start token; they are neither generated nor supervised."""

    can_join_frames: ClassVar[bool] = False
    """Whether the model accepts the concatenated image tokens of several frames."""
    native_frames: int = 0
    """Number of frames of the videos in `image_features`; 0 for images."""
    frame_pooling: str = "mean"
    """Frame pooling in training, see `check_frame_pooling`; saved with models that were trained on videos."""
    num_frames: int = 0
    """Frames per video in training; 0 if the model was trained on images."""

    base_model: Any
    tokenizer: Any
    image_processor: Any
    prompt: str
    start_token_id: int
    eos_token_id: int
    pad_token_id: int
    _prepared: PreparedPixels | None = None

    @property
    @abstractmethod
    def max_text_tokens(self) -> int:
        """Longest text that the model has positions for, in tokens."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generated caption; the first one, `eos_token_id`, ends captions in training."""
        return (self.eos_token_id,)

    @property
    def image_inputs(self) -> tuple[str, ...]:
        """Names of the image inputs of a batch; each has one row per image."""
        return ("pixel_values", "image_features", *self.side_inputs)

    @property
    def text_prompt(self) -> str:
        """The part of the prompt that is in the same sequence as the caption."""
        return self.prompt

    def prompt_ids(self) -> list[int]:
        """Token ids before every caption.

        Returns:
            `list[int]`: Ids of the start token, of `forced_token_ids`, and of the prompt.
        """
        return [self.start_token_id, *self.forced_token_ids, *prompt_token_ids(self.tokenizer, self.text_prompt)]

    def encode_images(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """Prepare images for the model.

        Args:
            images (`Sequence[PIL.Image.Image]`): B images.

        Returns:
            `dict`: `pixel_values` of shape `(B, 3, H, W)` (chat models: `(B, tiles, ...)`), and the other inputs
            named in `side_inputs`; each has one row per image.
        """
        pixels = self.image_processor(images=list(images), return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, **self.fixed_side_inputs(len(images))}

    @property
    def prepared_pixels(self) -> PreparedPixels:
        """The image processor in two parts; raises ValueError, with the reason, if it cannot be split."""
        if self._prepared is None or self._prepared.processor is not self.image_processor:
            self.fixed_side_inputs(1)  # raises if inputs besides the pixels depend on the image
            self._prepared = PreparedPixels(
                self.image_processor, lambda images: self.encode_images(images)["pixel_values"]
            )
        return self._prepared

    def prepare_pixels(self, images: Sequence[Image.Image]) -> Tensor:
        """Resize and crop images as the vision tower reads them, without rescaling and normalising them.

        Args:
            images (`Sequence[PIL.Image.Image]`): B images.

        Returns:
            `torch.Tensor` of shape `(B, 3, H, W)`: uint8.

        Raises:
            ValueError: If the image processor does more than resize, crop, rescale and normalise.
        """
        return torch.stack([self.prepared_pixels.prepare(image) for image in images])

    def encode_pixels(self, pixels: Sequence[Tensor]) -> dict[str, Tensor]:
        """Prepare pixels for the model; with `prepare_pixels` bit-exactly `encode_images`.

        Args:
            pixels (`Sequence[torch.Tensor]`): B tensors of shape `(3, H, W)`, rows of `prepare_pixels`.

        Returns:
            `dict`: As for `encode_images`.

        Raises:
            ValueError: As for `prepare_pixels`.
        """
        return {"pixel_values": self.prepared_pixels.normalise(pixels), **self.fixed_side_inputs(len(pixels))}

    def encode_inputs(self, images: Sequence[Any]) -> dict[str, Tensor]:
        """`encode_images`, or `encode_pixels` if the images are prepared.

        Args:
            images (`Sequence`): B images, or rows of `prepare_pixels`.

        Returns:
            `dict`: As for `encode_images`.
        """
        return self.encode_pixels(images) if isinstance(images[0], Tensor) else self.encode_images(images)

    def check_frame_pooling(self, pooling: str, num_frames: int) -> None:
        """Check that the model supports a frame pooling.

        Args:
            pooling (`str`): `"mean"`, `"concat"` or `"ordered"`, see `data.pool_frames`; or `"native"`, the model's own
                video inputs. After `"native"`, features without side inputs are those of videos (`native_frames`).
            num_frames (`int`): F.

        Raises:
            ValueError: If it does not.
        """
        name = type(self.base_model).__name__
        if pooling == "native":
            raise ValueError(
                f"frame_pooling is 'native', but {name} is only supported with image inputs, not with video inputs. Use "
                "frame_pooling='mean'."
            )
        if pooling != "mean" and not self.can_join_frames:
            raise ValueError(
                f"frame_pooling is {pooling!r}, but {name} accepts the image tokens of one frame, not of {num_frames}. "
                "Use frame_pooling='mean', or a captioner with cross-attention (BLIP, VisionEncoderDecoder)."
            )

    def encode_videos(self, videos: Sequence[Sequence[Image.Image]]) -> dict[str, Tensor]:
        """Prepare videos for a model with video inputs.

        Args:
            videos (`Sequence`): B videos of F frames each, in temporal order.

        Returns:
            `dict`: As for `encode_images`, one row per video.

        Raises:
            ValueError: If the model has no video inputs.
        """
        raise ValueError(f"{type(self.base_model).__name__} has no video inputs. Use frame_pooling='mean'.")

    def video_signature(self) -> str:
        """Identifies how the model's processor prepares videos.

        Returns:
            `str`: A hash of its settings; empty if the model has no video inputs.
        """
        return ""

    def fixed_side_inputs(self, number: int) -> dict[str, Tensor]:
        """The side inputs, if they are the same for all images.

        Args:
            number (`int`): B.

        Returns:
            `dict`: The tensors named in `side_inputs`, each with B rows; empty if the family has none.

        Raises:
            ValueError: If they depend on the image, so that features alone do not determine the inputs.
        """
        return {}

    def encode_captions(self, captions: Sequence[str], *, max_length: int = 40) -> dict[str, Tensor]:
        """Token ids and labels of captions, with the prompt.

        Args:
            captions (`Sequence[str]`): B captions.
            max_length (`int`): Longest row in tokens; longer captions are truncated and then lack the end token.

        Returns:
            `dict`: `input_ids`, `attention_mask`, `labels`, each `(B, T)`. The caption and the end token are
            supervised; start token, prompt and padding are not.

        Raises:
            TypeError: If a caption is not a string.
            ValueError: If a caption is empty or the prompt leaves no room for one.
        """
        return encode(
            self.tokenizer,
            captions,
            prompt=self.text_prompt,
            lead=self.lead,
            start_id=self.start_token_id,
            forced_ids=self.forced_token_ids,
            end_id=self.eos_token_id,
            pad_id=self.pad_token_id,
            max_length=min(max_length, self.max_text_tokens),
        )

    def encode_completions(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Token ids and labels of generated completions, to score them with `log_probs`.

        Args:
            ids (`torch.Tensor` of shape `(N, T)`): Ids after the prompt, as `generate` returns them.
            mask (`torch.Tensor` of shape `(N, T)`, *optional*): True for ids of the caption; by default those up to
                the end token.

        Returns:
            `dict`: `input_ids`, `attention_mask`, `labels`, on the device of `ids`.
        """
        if mask is None:
            mask, _ = completion_mask(ids, end_ids=self.end_token_ids, pad_id=self.pad_token_id)
        before = self.prompt_ids()
        rows = [before + row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
        batch = pad_rows(rows, ignored=len(before), pad_id=self.pad_token_id)
        return {name: value.to(ids.device) for name, value in batch.items()}

    def collate(
        self,
        images: Sequence[Image.Image] | Sequence[Tensor] | None,
        captions: Sequence[str],
        *,
        image_features: Tensor | None = None,
        max_length: int = 40,
    ) -> dict[str, Tensor]:
        """Create a batch from images, or their features, and captions.

        Args:
            images (`Sequence`, *optional*): B images (`PIL.Image.Image`), or rows of `prepare_pixels`.
            captions (`Sequence[str]`): B captions, or a multiple of B; the captions of one image are consecutive.
            image_features (`torch.Tensor` of shape `(B, M, D)`, *optional*): Features to use instead of images.
            max_length (`int`): Longest row in tokens, including start token, prompt and end token.

        Returns:
            `dict`: The inputs of the model.

        Raises:
            ValueError: If both or neither of images and features are given.
        """
        if (images is None) == (image_features is None):
            raise ValueError("A batch needs images once. Pass either images or image_features.")
        batch = self.encode_captions(captions, max_length=max_length)
        if images is not None:
            batch |= self.encode_inputs(images)
        elif image_features is not None:
            batch |= {"image_features": image_features, **self.fixed_side_inputs(len(image_features))}
        return batch

    @staticmethod
    def align_labels(labels: Tensor) -> Tensor:
        """The labels as a head objective gets them: position t of the hidden states predicts position t.

        Args:
            labels (`torch.Tensor` of shape `(B, T)`): Labels of a batch.

        Returns:
            `torch.Tensor` of shape `(B, T - 1)`.
        """
        return labels[:, 1:]

    def decode(self, ids: Tensor, mask: Tensor | None = None) -> list[str]:
        """Decode completions to captions.

        Args:
            ids (`torch.Tensor` of shape `(N, T)`): Ids after the prompt.
            mask (`torch.Tensor` of shape `(N, T)`, *optional*): True for ids of the caption; by default those up to
                the end token.

        Returns:
            `list[str]`: Stripped captions without special tokens.
        """
        if mask is None:
            mask, _ = completion_mask(ids, end_ids=self.end_token_ids, pad_id=self.pad_token_id)
        rows = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
        return [self.tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]
