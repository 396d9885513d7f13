"""An image processor in two parts: images to 8-bit pixels, and pixels to inputs of the vision tower.

Legend: B images, H x W the input size of the vision tower.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import PIL
import torch
import torchvision
from PIL import Image
from torch import Tensor

__all__ = ["PreparedPixels", "processor_settings"]

_ONLY_RESIZED: dict[str, Any] = {"do_rescale": False, "do_normalize": False}
_ONLY_SCALED: dict[str, Any] = {
    **dict.fromkeys(("do_resize", "do_center_crop", "do_pad", "do_convert_rgb"), False),
    "input_data_format": "channels_first",
}
_PROBE_SIZES = ((64, 64), (400, 100), (90, 200), (30, 20))


def processor_settings(image_processor: Any) -> str:
    """All settings of an image processor as JSON, with its class: those of Pillow and torchvision round differently."""
    settings = {key: str(value) for key, value in image_processor.to_dict().items()}
    return json.dumps({**settings, "class": type(image_processor).__name__}, sort_keys=True)


class PreparedPixels:
    """The two parts of a captioner's image processor.

    The two parts are compared with the captioner's own `pixel_values` of noise images. If the results are not bit-identical,
    a ValueError states the reason.

    Args:
        processor: The image processor.
        encode: From images to the captioner's `pixel_values`.
    """

    def __init__(self, processor: Any, encode: Callable[[Sequence[Image.Image]], Tensor]) -> None:
        self.processor = processor
        noise = np.random.default_rng(0)
        probes = [Image.fromarray(noise.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in _PROBE_SIZES]
        if "pixel_values" not in (found := self.processor(images=probes[:1], return_tensors="pt")):
            raise self._refusal(f"returns {', '.join(found)}: patches, normalised by the mean of their image")
        whole = encode(probes)
        self.row_shape = whole.shape[1:]
        rows = [self.prepare(torch.from_numpy(np.array(image)).permute(2, 0, 1)) for image in probes]
        self.shape = tuple(rows[0].shape)  # (3, H, W)
        if len({row.shape for row in rows}) > 1 or self.row_shape.numel() != rows[0].numel():
            raise self._refusal("returns tiles or keeps the size of an image")
        self._fused = _fused_normalisation(self.processor)
        if self._fused is not None and not torch.equal(self.normalise(rows), whole):
            self._fused = None  # processors of Pillow and NumPy round differently
        if self._fused is None and not torch.equal(self.normalise(rows), whole):
            raise self._refusal("changes pixels after normalising them")

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(
            f"The {type(self.processor).__name__} cannot be split into pixels and their normalisation: it {reason}. Leave out "
            "cache_pixels and image_decoder."
        )

    @property
    def signature(self) -> str:
        """Hash of all that determines the pixels."""
        parts = [processor_settings(self.processor), PIL.__version__, torchvision.__version__, str(self.shape)]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()

    def prepare(self, image: Any) -> Tensor:
        """`(3, H, W)` uint8: the image as the vision tower reads it, before it is rescaled and normalised."""
        found = self.processor(images=[image], **_ONLY_RESIZED, return_tensors="pt")["pixel_values"]
        pixels = found.to(torch.uint8).flatten(0, -4).squeeze(0)
        if (
            found.dtype != torch.uint8 and not (pixels == found).all()
        ):  # processors that pad return whole numbers as floats
            raise self._refusal("does more with pixels than resize and crop them")
        return pixels

    def normalise(self, pixels: Sequence[Tensor]) -> Tensor:
        """B tensors `(3, H, W)`, uint8 -> `pixel_values`."""
        if self._fused is None:
            rows = self.processor(images=list(pixels), **_ONLY_SCALED, return_tensors="pt")["pixel_values"]
        else:
            mean, std = self._fused
            rows = torch.empty(len(pixels), *self.shape)
            for row, target in zip(pixels, rows, strict=True):  # one at a time, which stays in the CPU's cache
                target.copy_(row).sub_(mean).div_(std)
        return rows.view(-1, *self.row_shape)


def _fused_normalisation(processor: Any) -> tuple[Tensor, Tensor] | None:
    """Mean and standard deviation of 8-bit values, `(3, 1, 1)`, as torchvision's processors compute them."""
    if not (processor.do_rescale and processor.do_normalize):
        return None
    scale = 1.0 / processor.rescale_factor
    mean, std = (torch.tensor(value).view(-1, 1, 1) * scale for value in (processor.image_mean, processor.image_std))
    return mean, std
