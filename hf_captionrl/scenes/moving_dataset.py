"""The moving world as a `datasets.DatasetDict`: short clips of one sprite, as GIFs."""

from __future__ import annotations

import io
from typing import Any, Literal

import datasets
import numpy as np
from PIL import Image

from hf_captionrl.scenes.dataset import KINDS, compose_splits, facts_features
from hf_captionrl.scenes.moving_world import Clip, MovingFacts, sample_clip, sample_clips_alike
from hf_captionrl.scenes.render import render_clip

__all__ = ["CLIP_FRAMES", "FRAME_MS", "MOVING_FEATURES", "load_moving_scenes"]

CLIP_FRAMES = 6
"""Frames of a clip."""
FRAME_MS = 100
"""Duration of a frame in milliseconds."""

MOVING_FEATURES = facts_features(MovingFacts, decode=False)
"""Columns of every split: those of `load_scenes`, with the bytes of a GIF in `image`, and motion and speed among the facts."""


def _gif(clip: Clip) -> dict[str, Any]:
    # A GIF without motion has one frame of the whole duration, and is still read as a video; WebP and PNG would become images.
    frames = render_clip(clip, CLIP_FRAMES)
    side = frames[0].width
    strip = Image.new("RGB", (side * CLIP_FRAMES, side))
    for number, frame in enumerate(frames):
        strip.paste(frame, (side * number, 0))
    # One palette for the clip: computing one per frame takes five times as long.
    strip = strip.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    first, *others = (strip.crop((x, 0, x + side, side)) for x in range(0, strip.width, side))
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=others, duration=FRAME_MS, loop=0, optimize=False)
    return {"bytes": buffer.getvalue(), "path": None}


def load_moving_scenes(
    kind: Literal["emoji", "shapes"] = "emoji",
    *,
    seed: int = 0,
    num_train: int = 1200,
    num_validation: int = 100,
    num_test: int = 300,
) -> datasets.DatasetDict:
    """Make the moving data set; no two clips of it share their facts.

    Args:
        kind (`str`): `"emoji"` for the committed sprites, `"shapes"` for coloured shapes that need no asset.
        seed (`int`): The same seed gives the same bytes.
        num_train (`int`): Clips in `train`.
        num_validation (`int`): Clips in `validation`.
        num_test (`int`): Clips in `test`: bags of 7 similar clips, and what is left over as single clips.

    Returns:
        `datasets.DatasetDict`: `train`, `validation` and `test` with the columns of `MOVING_FEATURES`.

    Raises:
        ValueError: If `kind` is unknown or a size is negative.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}. Use one of {sorted(KINDS)}.")
    rng = np.random.default_rng((seed, 1))  # not the scenes of `load_scenes`
    kinds = KINDS[kind]
    return compose_splits(
        lambda: sample_clip(rng, kinds),
        lambda size, against_preferences: sample_clips_alike(
            rng, size, kinds, against_preferences=against_preferences
        ),
        _gif,
        MOVING_FEATURES,
        seed=seed,
        num_train=num_train,
        num_validation=num_validation,
        num_test=num_test,
        kinds=kinds,
    )
