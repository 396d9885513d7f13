"""Checks that model and processor belong together.

They cannot detect a processor with the same shapes and special tokens but other words or colour normalisation.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from typing import Any

from PIL import Image
from torch import Tensor

__all__ = ["blank_image", "check_chat_processor", "check_chat_row", "check_image_size", "check_special_tokens"]

logger = logging.getLogger(__name__)

FIXED_SIZE = frozenset(
    {
        "blip_vision_model",
        "git_vision_model",
        "clip_vision_model",
        "siglip_vision_model",
        "blip_2_vision_model",
        "instructblip_vision_model",
        "kosmos_2_vision_model",
        "vit",
        "deit",
    }
)
"""Image towers that take pixels of one size only, as they are called here; others interpolate, or have no such places."""
PIXEL_AXES = {"idefics3": 5, "smolvlm": 5, "llava_onevision": 5}
"""Axes of the pixels of models that take the tiles of an image apart: images, tiles, channels, H, W."""


def check_special_tokens(tokenizer: Any, model: Any, start: int, end: int | None, *, refuse: bool = False) -> None:
    """Refuse an end token that the tokenizer lacks; warn about start and end tokens that are ordinary words, or refuse them."""
    name, special = type(model).__name__, {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    if end is not None and end >= len(tokenizer) and end not in special:
        raise ValueError(
            f"{name} ends its captions with the token of id {end}, and the tokenizer knows {len(tokenizer)} tokens: they do "
            "not belong together. Pass the model's own processor."
        )
    for what, token in (("start", start), ("end", end)):
        if token is None or token >= len(tokenizer) or token in special:
            continue
        word = tokenizer.convert_ids_to_tokens(token)
        if re.fullmatch(r"\[.+\]|<.+>", str(word)):  # a special token that the tokenizer does not list as one
            continue
        if refuse:
            raise ValueError(
                f"{name} {what}s its captions with the token of id {token}, which is the word {word!r} in the tokenizer: they do "
                "not belong together. Pass the model's own processor, or correct the id in model.config."
            )
        logger.warning(
            "The %s token of %s (id %d) is the word %r in the tokenizer. Check that the processor is the model's own.",
            what,
            name,
            token,
            word,
        )


def check_image_size(tower: Any, pixels_of: Callable[[Image.Image], Tensor | None], model: Any) -> None:
    """Refuse images of a size that the vision tower has no positions for."""
    config = getattr(getattr(tower, "encoder", tower), "config", getattr(tower, "config", None))  # ClipCap's wraps one
    if config is None or config.model_type not in FIXED_SIZE:
        return
    size = config.image_size
    expected = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    pixels = pixels_of(blank_image())
    if pixels is None:
        raise ValueError(
            f"The image processor returns no pixel_values, which {type(model).__name__} needs. Pass the model's own processor."
        )
    found = tuple(pixels.shape[-2:])
    if found != expected:
        raise ValueError(
            f"The image processor makes images of {' x '.join(map(str, found))} pixels, and the vision tower of "
            f"{type(model).__name__} takes {' x '.join(map(str, expected))}. Pass the model's own processor, or set size (and "
            "crop_size) of its image processor."
        )


def blank_image() -> Image.Image:
    """A small image to test the output of a processor."""
    return Image.new("RGB", (32, 32))


def check_chat_processor(processor: Any, model: Any, image_token_id: int, kind: str | None = None) -> None:
    """Refuse a processor that does not write the image tokens that the model expects."""
    name, own = type(model).__name__, type(processor).__name__
    token = getattr(processor, "image_token", None)  # a string, or an AddedToken
    if not callable(processor) or token is None:
        raise ValueError(
            f"The {own} does not read an image and a text that speaks of it together, which {name} needs. Pass the processor "
            "that was made for the model, for instance by AutoProcessor.from_pretrained."
        )
    if kind is not None and kind not in (base.__name__ for base in type(processor).__mro__):
        raise ValueError(f"{name} is given its images by a {kind}, not by a {own}. Pass the model's own processor.")
    tokenizer = processor.tokenizer
    known = tokenizer.convert_tokens_to_ids(str(token))
    # What Gemma 3 calls image_token is what its template writes, and its processor replaces by the tokenizer's.
    if image_token_id not in (known, getattr(tokenizer, "image_token_id", None)):
        raise ValueError(
            f"The token {token} has the id {known} in the tokenizer and {image_token_id} in the configuration of this {name}: "
            "they do not belong together. Pass the model's own processor."
        )


def check_chat_row(row: dict[str, Any], model: Any, processor: Any) -> None:
    """Refuse a processor whose image outputs differ from the inputs of the model."""
    name, own = type(model).__name__, type(processor).__name__
    axes, expected = row["pixel_values"].dim(), PIXEL_AXES.get(model.config.model_type)
    if expected is not None and axes != expected:
        raise ValueError(
            f"The {own} makes pixels of {axes} axes, and {name} takes {expected}: they do not belong together. Pass the "
            "model's own processor."
        )
    accepted = inspect.signature(model.model.get_image_features).parameters
    for side in ("image_grid_thw", "image_sizes"):
        grid = side == "image_grid_thw"
        needed = side in accepted and (grid or accepted[side].default is inspect.Parameter.empty)
        if (needed and side not in row) or (grid and not needed and side in row):
            raise ValueError(
                f"The {own} {'gives' if side in row else 'gives no'} {side}, which {name} {'needs' if needed else 'does not know'}: "
                "they do not belong together. Pass the model's own processor."
            )
