"""Collates items of a `CaptionDataset` to a batch of a captioner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from PIL import Image

from hf_captionrl.data.caption_dataset import CaptionItem
from hf_captionrl.data.images import open_image

__all__ = ["CaptionCollator", "Collates"]


class Collates(Protocol):
    """Protocol of a captioner for the collator."""

    def collate(
        self,
        images: Sequence[Image.Image] | Sequence[torch.Tensor] | None,
        captions: Sequence[str],
        *,
        image_features: torch.Tensor | None = None,
        max_length: int = 40,
    ) -> dict[str, Any]:
        """Make one batch.

        Args:
            images (`Sequence`, *optional*): B images, or their prepared pixels, `(3, H, W)` each.
            image_features (`torch.Tensor` of shape `(B, M, D)`, *optional*): In place of the images.
        """
        ...


@dataclass
class CaptionCollator:
    """Collate items of a `CaptionDataset` with a captioner.

    Args:
        captioner (`Collates`): The captioner whose `collate` makes the batch.
        max_length (`int`): Longest caption in tokens, with the prompt (40 in the papers).

    Raises:
        ValueError: If `max_length` is below 1.
    """

    captioner: Collates
    max_length: int = 40

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"max_length ({self.max_length}) must be 1 or more. The papers use 40.")

    def __call__(self, items: Sequence[CaptionItem]) -> dict[str, Any]:
        """Collate B items, all with images or all with features of the same shape."""
        captions = [item["caption"] for item in items]
        features = [item["image_features"] for item in items if item["image_features"] is not None]
        if not features:
            # Images of a stream are decoded here.
            images = [
                item["image"] if isinstance(item["image"], Image.Image | torch.Tensor) else open_image(item["image"])
                for item in items
                if item["image"] is not None
            ]
            if len(images) != len(items):
                raise ValueError(
                    f"{len(items) - len(images)} of {len(items)} items have neither image nor image_features, "
                    f"and each needs one. Use the items of a CaptionDataset."
                )
            return self.captioner.collate(images, captions, image_features=None, max_length=self.max_length)
        shapes = sorted({tuple(feature.shape) for feature in features})
        if len(features) != len(items) or len(shapes) > 1:
            raise ValueError(
                f"{len(features)} of {len(items)} items have image_features, of shapes {shapes}; a batch needs them "
                f"for all, of one shape. Use one CaptionDataset and one image processor for the whole run."
            )
        return self.captioner.collate(None, captions, image_features=torch.stack(features), max_length=self.max_length)
