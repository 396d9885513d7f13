"""Decodes JPEGs with torchvision: the pixels of `open_image`, without copies between Pillow, NumPy and torch."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from hf_captionrl.data.images import MAX_PIXELS, check_size, media_source, open_image

__all__ = ["decode_image"]

_ORIENTATION = 0x0112


def decode_image(value: Any) -> Tensor:
    """`(3, H, W)` uint8: the pixels of `open_image`, which opens the images that torchvision might decode differently."""
    source, name = media_source(value)
    if not isinstance(source, Image.Image):
        data = source.getvalue() if isinstance(source, io.BytesIO) else Path(source).read_bytes()
        if _is_plain_jpeg(data, name):
            try:
                return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
            except RuntimeError:  # damaged: `open_image` names the fault
                pass
    return torch.from_numpy(np.array(open_image(value))).permute(2, 0, 1)


def _is_plain_jpeg(data: bytes, name: str) -> bool:
    """Whether this is a complete JPEG in RGB, upright and of a size that `open_image` accepts."""
    if not (data.startswith(b"\xff\xd8\xff") and data.endswith(b"\xff\xd9")):
        return False
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
            check_size(image.size, name, MAX_PIXELS)
            return image.mode == "RGB" and image.getexif().get(_ORIENTATION, 1) == 1
    except Exception:  # a damaged header: `open_image` names the fault
        return False
