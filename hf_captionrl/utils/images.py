"""The one conversion of images to RGB, of files and of images in memory."""

from __future__ import annotations

import contextlib

import numpy as np
from PIL import Image, ImageOps


def _deep_to_8_bit(image: Image.Image) -> Image.Image:
    """Greyscale of 16 or 32 bits or floats to 8 bits; Pillow's conversion would clip most of it to white."""
    values = np.nan_to_num(np.asarray(image).astype(np.float32), posinf=0.0, neginf=0.0)
    top = 65535.0 if image.mode.startswith("I;16") else float(values.max())
    # Guess the scale of floats and 32-bit integers from their range: [0, 1], [0, 255], [0, 65535], anything.
    limits = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
    scale = next((limit for limit in limits if top <= limit), top)
    return Image.fromarray((values.clip(0, scale) * (255.0 / scale)).round().astype(np.uint8), "L")


def to_rgb(image: Image.Image) -> Image.Image:
    """An image as RGB: upright, transparency over white, 8 bits, no metadata. Every image that a model reads comes from here."""
    if type(image) is Image.Image and image.mode == "RGB" and not image.info and not image.getexif():
        return image  # has been here before
    # A damaged EXIF block does not spoil the pixels.
    with contextlib.suppress(Exception):
        image = ImageOps.exif_transpose(image)
    if image.mode in {"I", "F"} or image.mode.startswith("I;16"):
        image = _deep_to_8_bit(image)
    if image.mode == "La":
        image = image.convert("LA")  # Pillow cannot convert premultiplied grey to RGBA directly
    has_rgba_palette = image.mode == "P" and image.palette is not None and image.palette.mode.endswith("A")
    if image.mode in {"RGBA", "RGBa", "LA", "PA"} or "transparency" in image.info or has_rgba_palette:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, layer)
    rgb = image.convert("RGB")
    if rgb is image:
        rgb = image.copy()
    # Orientation and transparency are applied: left in place they would be applied again by the next reader.
    rgb.info = {}
    return rgb
