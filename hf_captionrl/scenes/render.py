"""Scenes as pixels.

Things stand near the cells of a 3 x 3 grid, not on them. As in photographs, light, colours, sharpness and noise differ
from picture to picture, and there is clutter. All of it follows from the scene's `nuisance`.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from hf_captionrl.scenes.moving_world import Clip
from hf_captionrl.scenes.world import EMOJI_KINDS, Facts, Scene

CELL = 24
"""Side of a grid cell in pixels."""
IMAGE_SIZE = 3 * CELL
"""Side of an image in pixels."""
SPRITES_DIR = Path(__file__).parent / "sprites"

_SIDE = {"small": 17, "large": 24}
_ANGLE = {"upright": 0, "sideways": 90, "upside down": 180}
_RGB = {
    "black": (38, 38, 42),
    "blue": (96, 165, 250),
    "gray": (156, 163, 175),
    "green": (74, 222, 128),
    "pink": (249, 168, 212),
    "purple": (168, 85, 247),
    "white": (250, 250, 250),
    "yellow": (253, 224, 71),
}
_PAINT = {
    "red": (214, 30, 30),
    "blue": (30, 80, 225),
    "green": (12, 140, 60),
    "golden": (225, 165, 10),
    "purple": (125, 35, 205),
}
_UNPAINTED = (70, 72, 80)  # colour of unpainted shapes
_SHADE = 0.86  # of stripes and dots, relative to the background
_STEP = 9  # pixels from stripe to stripe

GROUP_SHIFT, SPRITE_SHIFT = 2.5, 1.5
"""Largest shift of the whole picture and of each sprite, in pixels."""
SCALES = (0.9, 1.12)
BRIGHTNESS = (0.7, 1.15)
SATURATION = (0.5, 1.1)
BLUR = (0.2, 0.6)
"""Standard deviation of the blur, in pixels."""
NOISE = 4.0
"""Standard deviation of the noise; a colour has 256 values."""
CLUTTER = 0.6
"""Mean number of translucent ellipses."""
_NIGHT = np.array([0.5, 0.53, 0.72], dtype=np.float32)


# Polygons by their corners, and "ellipse", "rectangle" and "hole", an ellipse that is cut out, by their box.
_SHAPES: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {
    "triangle": (("polygon", (48, 6, 90, 90, 6, 90)),),
    "arrow": (("polygon", (48, 4, 88, 46, 62, 46, 62, 92, 34, 92, 34, 46, 8, 46)),),
    "heart": (
        ("ellipse", (6, 10, 52, 56)),
        ("ellipse", (44, 10, 90, 56)),
        ("polygon", (9, 44, 87, 44, 48, 92)),
    ),
    "crescent": (("ellipse", (6, 6, 90, 90)), ("hole", (20, -14, 96, 62))),
    "flag": (("rectangle", (10, 4, 20, 92)), ("polygon", (20, 6, 90, 28, 20, 50))),
    "bolt": (("polygon", (58, 4, 20, 54, 44, 54, 34, 92, 78, 38, 52, 38)),),
    "drop": (("ellipse", (18, 36, 78, 94)), ("polygon", (48, 2, 74, 52, 22, 52))),
    "pin": (("ellipse", (20, 4, 76, 60)), ("polygon", (24, 44, 72, 44, 48, 94)), ("hole", (38, 22, 58, 42))),
}


@functools.cache
def _sprite(kind: str, colour: str) -> Image.Image:
    """A kind in a colour, 32 x 32 pixels."""
    if kind in EMOJI_KINDS:
        with Image.open(SPRITES_DIR / f"{kind}.png") as file:
            sprite = file.convert("RGBA").reduce(2)
    else:
        sprite = Image.new("RGBA", (96, 96))  # four times as large and reduced, for smooth edges
        for what, places in _SHAPES[kind]:
            draw = getattr(ImageDraw.Draw(sprite), what.replace("hole", "ellipse"))
            draw(places, fill=(0, 0, 0, 0) if what == "hole" else (*_UNPAINTED, 255))
        sprite = sprite.resize((32, 32), Image.Resampling.LANCZOS)
    if not colour:
        return sprite
    pixels = np.asarray(sprite).astype(np.float32)
    light = pixels[..., :3] @ np.array([0.299, 0.587, 0.114], dtype=np.float32) / 255
    # Shadows stay dark and highlights stay light, so that the thing can still be recognised.
    amount = np.clip(0.45 + light, 0, 1)[..., None]
    shine = np.clip(light - 0.55, 0, 1)[..., None]
    painted = np.array(_PAINT[colour], dtype=np.float32) * amount
    pixels[..., :3] = painted + (255 - painted) * shine
    return Image.fromarray(pixels.round().astype(np.uint8), "RGBA")


@functools.cache
def _background(colour: str, pattern: str, start: int) -> Image.Image:
    rgb = _RGB[colour]
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), rgb)
    # Black has no darker shade.
    shade = tuple(round(c * _SHADE) if max(rgb) > 60 else c + 30 for c in rgb)
    draw = ImageDraw.Draw(image)
    places = range(start - _STEP, IMAGE_SIZE + _STEP, _STEP)
    if pattern == "striped":
        for x in places:
            draw.rectangle((x, 0, x + 3, IMAGE_SIZE), fill=shade)
    elif pattern == "dotted":
        for x in places:
            for y in places:
                draw.ellipse((x, y, x + 4, y + 4), fill=shade)
    return image


@functools.lru_cache(maxsize=20_000)
def _small_sprite(kind: str, colour: str, orientation: str, side: int) -> Image.Image:
    sprite = _sprite(kind, colour).resize((side, side), Image.Resampling.LANCZOS)
    return sprite.rotate(_ANGLE[orientation])


def _paste(image: Image.Image, sprite: Image.Image, centre: tuple[float, float]) -> None:
    corner = (round(centre[0] - sprite.width / 2), round(centre[1] - sprite.height / 2))
    image.paste(sprite, corner, sprite)


def _clutter(image: Image.Image, rng: np.random.Generator) -> None:
    for _ in range(int(rng.poisson(CLUTTER))):
        x, y = rng.uniform(0, IMAGE_SIZE, 2)
        width, height = rng.uniform(6, 22, 2)
        fill = (*(int(c) for c in rng.integers(0, 256, 3)), int(rng.integers(40, 90)))
        layer = Image.new("RGBA", image.size)
        ImageDraw.Draw(layer).ellipse((x - width / 2, y - height / 2, x + width / 2, y + height / 2), fill=fill)
        image.paste(layer, (0, 0), layer)


def _weather(image: Image.Image, facts: Facts, rng: np.random.Generator) -> None:
    """Rain falls from clouds at the upper edge; snow also lies at the lower edge."""
    draw = ImageDraw.Draw(image, "RGBA")
    if facts.weather == "rain":
        for x in np.arange(-4, IMAGE_SIZE + 8, 8) + rng.uniform(-2, 2):
            draw.ellipse((x - 7, -6, x + 7, 3 + rng.uniform(0, 4)), fill=(96, 104, 122, 235))
        for x, y in rng.uniform(-6, IMAGE_SIZE, (22, 2)).tolist():
            draw.line((x, y, x + 2.5, y + 7), fill=(70, 110, 190, 190), width=1)
    elif facts.weather == "snow":
        for x in np.arange(-4, IMAGE_SIZE + 8, 8) + rng.uniform(-2, 2):
            draw.ellipse((x - 8, IMAGE_SIZE - 3 - rng.uniform(0, 3), x + 8, IMAGE_SIZE + 8), fill=(252, 253, 255, 245))
        for x, y in rng.uniform(0, IMAGE_SIZE, (26, 2)).tolist():
            draw.ellipse((x - 1, y - 1, x + 1, y + 1), fill=(255, 255, 255, 235), outline=(190, 205, 225, 200))


@functools.cache
def _noise() -> np.ndarray:
    """A large field of noise, `(256, 256, 3)`. Each picture takes another part of it: drawing its own takes ten times longer."""
    return (np.random.default_rng(0).standard_normal((256, 256, 3)) * NOISE).round().astype(np.int16)


def _photograph(image: Image.Image, facts: Facts, rng: np.random.Generator) -> Image.Image:
    """Light, colours, sharpness and noise."""
    brightness, saturation, blur = rng.uniform(*BRIGHTNESS), rng.uniform(*SATURATION), rng.uniform(*BLUR)
    colours = saturation * np.eye(3) + (1 - saturation) / 3
    light = brightness * (_NIGHT if facts.time == "night" else np.ones(3))
    matrix = np.zeros((3, 4))
    matrix[:, :3] = light[:, None] * colours
    lit = image.filter(ImageFilter.GaussianBlur(blur)).convert("RGB", matrix.ravel().tolist())
    y, x = rng.integers(256 - IMAGE_SIZE, size=2)
    pixels = np.asarray(lit, dtype=np.int16) + _noise()[y : y + IMAGE_SIZE, x : x + IMAGE_SIZE]
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _moon(image: Image.Image, rng: np.random.Generator) -> None:
    x = 6 if rng.random() < 0.5 else IMAGE_SIZE - 12
    layer = Image.new("RGBA", (8, 8))
    draw = ImageDraw.Draw(layer)
    draw.ellipse((0, 0, 7, 7), fill=(255, 250, 205, 255))
    draw.ellipse((3, -1, 9, 5), fill=(0, 0, 0, 0))
    image.paste(layer, (x, 3), layer)


def render_scene(scene: Scene) -> Image.Image:
    """Draw a scene.

    Args:
        scene ([`Scene`]): The scene.

    Returns:
        `PIL.Image.Image`: RGB, `IMAGE_SIZE` x `IMAGE_SIZE` pixels.
    """
    facts = scene.facts
    rng = np.random.default_rng((scene.nuisance, 1))
    image = _background(facts.background, facts.pattern, int(rng.integers(_STEP))).copy()
    _clutter(image, rng)
    things = np.random.default_rng((scene.nuisance, 0))
    main = (facts.kind, facts.colour, facts.orientation)
    looks = [(scene.row, scene.column + i, main) for i in range(facts.count)]
    if (second := scene.second_cell()) is not None:
        looks.append((*second, (facts.second, facts.second_colour, "upright")))
    right, down, *draws = (2 * things.random(2 + 3 * len(looks)) - 1).tolist()  # in [-1, 1]
    mean, spread = (SCALES[0] + SCALES[1]) / 2, (SCALES[1] - SCALES[0]) / 2
    for number, (row, column, look) in enumerate(looks):  # the main group first
        dx, dy, scale = draws[3 * number : 3 * number + 3]
        x = (column + 0.5) * CELL + GROUP_SHIFT * right + SPRITE_SHIFT * dx
        y = (row + 0.5) * CELL + GROUP_SHIFT * down + SPRITE_SHIFT * dy
        _paste(image, _small_sprite(*look, round(_SIDE[facts.size] * (mean + spread * scale))), (x, y))
    _weather(image, facts, rng)
    photograph = _photograph(image, facts, rng)
    if facts.time == "night":
        _moon(photograph, rng)
    return photograph


def render_clip(clip: Clip, num_frames: int = 6) -> list[Image.Image]:
    """Draw the frames of a clip: RGB, in temporal order. In the first the thing stands where it starts, in the last where it
    ends."""
    facts = clip.facts
    frames = []
    rng = np.random.default_rng(clip.nuisance)
    shift = rng.uniform(-GROUP_SHIFT, GROUP_SHIFT, 2)
    side = round(_SIDE[facts.size] * rng.uniform(*SCALES))
    sprite = _small_sprite(facts.kind, facts.colour, facts.orientation, side)
    ground = _background(facts.background, facts.pattern, int(rng.integers(_STEP))).copy()
    _clutter(ground, rng)
    look = int(rng.integers(2**31))
    for number in range(num_frames):
        row, column = clip.cell(number / max(num_frames - 1, 1))
        frame = ground.copy()
        centre = ((column + 0.5) * CELL + shift[0], (row + 0.5) * CELL + shift[1])
        _paste(frame, sprite, centre)
        # Light and colours stay the same during a clip.
        frames.append(_photograph(frame, facts, np.random.default_rng(look)))
    return frames
