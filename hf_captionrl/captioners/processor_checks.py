"""Checks that model and processor match.

They cannot detect a processor that differs only in its vocabulary or colour normalisation.
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
"""Vision towers that accept one image size only; others interpolate their positions, or have none."""
PIXEL_AXES = {"idefics3": 5, "smolvlm": 5, "llava_onevision": 5}
"""Axes of `pixel_values` of models with tiles: images, tiles, channels, H, W."""


def check_special_tokens(tokenizer: Any, model: Any, start: int, end: int | None, *, refuse: bool = False) -> None:
    """Raise if the tokenizer lacks the end token; warn, or raise if `refuse`, if start or end token is an ordinary word."""
    name, special = type(model).__name__, {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    if end is not None and end >= len(tokenizer) and end not in special:
        raise ValueError(
            f"The end token of {name} has the id {end}, but the tokenizer has only {len(tokenizer)} tokens. Pass the "
            "processor of the model."
        )
    for what, token in (("start", start), ("end", end)):
        if token is None or token >= len(tokenizer) or token in special:
            continue
        word = tokenizer.convert_ids_to_tokens(token)
        if re.fullmatch(r"\[.+\]|<.+>", str(word)):  # a special token that the tokenizer does not list as one
            continue
        if refuse:
            raise ValueError(
                f"The {what} token of {name} (id {token}) is the word {word!r} in the tokenizer. Pass the processor of "
                "the model, or correct the id in model.config."
            )
        logger.warning(
            "The %s token of %s (id %d) is the word %r in the tokenizer. Check that this is the processor of the model.",
            what,
            name,
            token,
            word,
        )


def check_image_size(tower: Any, pixels_of: Callable[[Image.Image], Tensor | None], model: Any) -> None:
    """Raise if the image processor's output size is not the input size of the vision tower."""
    config = getattr(getattr(tower, "encoder", tower), "config", getattr(tower, "config", None))  # ClipCap's wraps one
    if config is None or config.model_type not in FIXED_SIZE:
        return
    size = config.image_size
    expected = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    pixels = pixels_of(blank_image())
    if pixels is None:
        raise ValueError(
            f"The image processor returns no pixel_values, which {type(model).__name__} needs. Pass the processor of the "
            "model."
        )
    found = tuple(pixels.shape[-2:])
    if found != expected:
        raise ValueError(
            f"The image processor returns {' x '.join(map(str, found))} pixels, but the vision tower of "
            f"{type(model).__name__} expects {' x '.join(map(str, expected))}. Pass the processor of the model, or set "
            "size (and crop_size) of the image processor."
        )


def blank_image() -> Image.Image:
    """A small image, to inspect the output of a processor."""
    return Image.new("RGB", (32, 32))


def check_chat_processor(processor: Any, model: Any, image_token_id: int, kind: str | None = None) -> None:
    """Raise if the processor does not produce the image tokens that the model expects."""
    name, own = type(model).__name__, type(processor).__name__
    token = getattr(processor, "image_token", None)  # a string, or an AddedToken
    if not callable(processor) or token is None:
        raise ValueError(
            f"The {own} does not process images and text with image tokens together, which {name} needs. Pass the "
            "processor of the model, for instance from AutoProcessor.from_pretrained."
        )
    if kind is not None and kind not in (base.__name__ for base in type(processor).__mro__):
        raise ValueError(f"{name} needs a {kind}, not a {own}. Pass the processor of the model.")
    tokenizer = processor.tokenizer
    known = tokenizer.convert_tokens_to_ids(str(token))
    # Gemma 3's image_token is a placeholder of the template, which the processor replaces with the tokenizer's token.
    if image_token_id not in (known, getattr(tokenizer, "image_token_id", None)):
        raise ValueError(
            f"The token {token} has the id {known} in the tokenizer and {image_token_id} in the configuration of this {name}. "
            "Pass the processor of the model."
        )


def check_chat_row(row: dict[str, Any], model: Any, processor: Any) -> None:
    """Raise if the image outputs of the processor are not the inputs of the model."""
    name, own = type(model).__name__, type(processor).__name__
    axes, expected = row["pixel_values"].dim(), PIXEL_AXES.get(model.config.model_type)
    if expected is not None and axes != expected:
        raise ValueError(
            f"The pixel_values of the {own} have {axes} axes, but {name} expects {expected}. Pass the processor of the "
            "model."
        )
    accepted = inspect.signature(model.model.get_image_features).parameters
    for side in ("image_grid_thw", "image_sizes"):
        grid = side == "image_grid_thw"
        needed = side in accepted and (grid or accepted[side].default is inspect.Parameter.empty)
        if (needed and side not in row) or (grid and not needed and side in row):
            raise ValueError(
                f"The {own} returns {'' if side in row else 'no '}{side}, which {name} "
                f"{'needs' if needed else 'does not accept'}. Pass the processor of the model."
            )
