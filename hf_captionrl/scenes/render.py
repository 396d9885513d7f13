"""Scenes as pixels: sprites or drawn shapes on a 3 x 3 grid, one cell a vision patch."""

from __future__ import annotations

import functools
from pathlib import Path

from PIL import Image, ImageDraw

from hf_captionrl.scenes.moving_world import Clip
from hf_captionrl.scenes.world import EMOJI_KINDS, Scene

__all__ = ["CELL", "IMAGE_SIZE", "SPRITES_DIR", "render_clip", "render_scene"]

CELL = 24
"""Side of a grid cell in pixels; the patch size of the embedded models."""
IMAGE_SIZE = 3 * CELL
"""Side of an image in pixels."""
SPRITES_DIR = Path(__file__).parent / "sprites"

_SIDE = {"small": 14, "large": 23}
_ANGLE = {"upright": 0, "sideways": 90, "upside down": 180}
_RGB = {
    "black": (24, 24, 27),
    "blue": (96, 165, 250),
    "gray": (156, 163, 175),
    "green": (74, 222, 128),
    "pink": (249, 168, 212),
    "purple": (147, 51, 234),
    "white": (250, 250, 250),
    "yellow": (253, 224, 71),
}
_SHAPE_RGB = {"red": (220, 38, 38), "orange": (249, 115, 22), "teal": (13, 148, 136), "brown": (120, 53, 15)}


def _draw_shape(kind: str, side: int) -> Image.Image:
    """A coloured shape on transparent ground, drawn at four times its size and reduced, for smooth edges."""
    colour, shape = kind.split()
    fill = (*_SHAPE_RGB[colour], 255)
    big = Image.new("RGBA", (96, 96))
    draw = ImageDraw.Draw(big)
    if shape == "triangle":
        draw.polygon([(48, 6), (90, 90), (6, 90)], fill=fill)
    elif shape == "arrow":
        draw.polygon([(48, 4), (88, 46), (62, 46), (62, 92), (34, 92), (34, 46), (8, 46)], fill=fill)
    elif shape == "heart":
        draw.ellipse((6, 10, 52, 56), fill=fill)
        draw.ellipse((44, 10, 90, 56), fill=fill)
        draw.polygon([(9, 44), (87, 44), (48, 92)], fill=fill)
    elif shape == "house":
        draw.polygon([(48, 4), (92, 44), (4, 44)], fill=fill)
        draw.rectangle((18, 44, 78, 92), fill=fill)
    elif shape == "crescent":
        draw.ellipse((6, 6, 90, 90), fill=fill)
        draw.ellipse((20, -14, 96, 62), fill=(0, 0, 0, 0))
    elif shape == "flag":
        draw.rectangle((10, 4, 20, 92), fill=fill)
        draw.polygon([(20, 6), (90, 28), (20, 50)], fill=fill)
    else:
        raise ValueError(f"{kind!r} is neither a sprite nor a drawn shape. Use a kind of EMOJI_KINDS or SHAPE_KINDS.")
    return big.resize((side, side), Image.Resampling.LANCZOS)


@functools.cache
def _sprite(kind: str, size: str, orientation: str) -> Image.Image:
    side = _SIDE[size]
    if kind in EMOJI_KINDS:
        with Image.open(SPRITES_DIR / f"{kind}.png") as file:
            sprite = file.convert("RGBA").resize((side, side), Image.Resampling.LANCZOS)
    else:
        sprite = _draw_shape(kind, side)
    return sprite.rotate(_ANGLE[orientation])


def render_scene(scene: Scene) -> Image.Image:
    """Draw a scene.

    Args:
        scene ([`Scene`]): The scene.

    Returns:
        `PIL.Image.Image`: RGB, `IMAGE_SIZE` x `IMAGE_SIZE` pixels.
    """
    facts = scene.facts
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), _RGB[facts.background])
    cells = [(scene.row, scene.column + i, facts.kind, facts.orientation) for i in range(facts.count)]
    second = scene.second_cell()
    if second is not None:
        cells.append((*second, facts.second, "upright"))
    for row, column, kind, orientation in cells:
        sprite = _sprite(kind, facts.size, orientation)
        margin = (CELL - sprite.width) // 2
        image.paste(sprite, (column * CELL + margin, row * CELL + margin), sprite)
    return image


def render_clip(clip: Clip, num_frames: int = 6) -> list[Image.Image]:
    """Draw a clip.

    Args:
        clip ([`Clip`]): The clip.
        num_frames (`int`): Frames; in the first the thing stands where it starts, in the last where it ends.

    Returns:
        `list[PIL.Image.Image]`: RGB, `IMAGE_SIZE` x `IMAGE_SIZE` pixels, in temporal order.
    """
    facts = clip.facts
    sprite = _sprite(facts.kind, facts.size, facts.orientation)
    margin = (CELL - sprite.width) // 2
    frames = []
    for number in range(num_frames):
        row, column = clip.cell(number / max(num_frames - 1, 1))
        frame = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), _RGB[facts.background])
        frame.paste(sprite, (round(column * CELL) + margin, round(row * CELL) + margin), sprite)
        frames.append(frame)
    return frames
