"""The embedded world as a `datasets.DatasetDict`: scenes as PNGs, and short clips of one sprite as GIFs."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow as pa
from datasets.table import InMemoryTable
from PIL import Image

from hf_captionrl.scenes.grammar import ALT_TEXT_ANNOTATORS, ANNOTATORS, Annotator, annotate, full_caption
from hf_captionrl.scenes.moving_world import Clip, MovingFacts, sample_clip, sample_clips_alike
from hf_captionrl.scenes.render import SPRITES_DIR, render_clip, render_scene
from hf_captionrl.scenes.world import (
    EMOJI_KINDS,
    SHAPE_KINDS,
    Facts,
    Scene,
    goes_against_preferences,
    sample_look_alikes,
    sample_scene,
)
from hf_captionrl.utils.io import temporary_path

# --- The embedded world as a `datasets.DatasetDict` ------------------------------------------------------------------

BAG_SIZES: tuple[int, ...] = (3, 5, 7)
"""Sizes of the bags of similar images of the test split, as in TrueMatch."""

WORLD_VERSION = "2"
"""Part of the name of the files on disk: each version has other scenes."""


def facts_features(kind: type[Facts], *, decode: bool = True) -> datasets.Features:
    """Columns of a split."""
    return datasets.Features(
        {
            "image": datasets.Image(decode=decode),
            "image_id": datasets.Value("string"),
            "captions": datasets.List(datasets.Value("string")),
            "full_caption": datasets.Value("string"),
            "facts": {
                name: datasets.Value("int32" if name == "count" else "string") for name in kind.__dataclass_fields__
            },
            "bag_id": datasets.Value("string"),
            "against_preferences": datasets.Value("bool"),
        }
    )


FEATURES = facts_features(Facts)
"""Columns of every split. `bag_id` is the number of a bag of similar images, and `""` outside of bags.
`against_preferences`: background, position and partner all differ from what the kind prefers."""

DOMAINS: dict[str, tuple[Annotator, ...]] = {"captions": ANNOTATORS, "alt_text": ALT_TEXT_ANNOTATORS}
"""Annotators by the name of their domain."""

KINDS: dict[str, tuple[str, ...]] = {"emoji": EMOJI_KINDS, "shapes": SHAPE_KINDS}
"""Kinds of things by the name of their set."""

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "captions": {},
    "alt_text": {"annotators": "alt_text"},
    "shapes": {"kind": "shapes"},
    "held_back": {"annotators": "alt_text", "seed": 2027},  # nothing was ever tuned on it
}
"""Arguments of [`load_scenes`] by the name of the configuration of the data set."""


def _unique(draw: Callable[[], Any], seen: set[Facts], number: int) -> list[Any]:
    """Scenes that were not seen before."""
    scenes: list[Any] = []
    while len(scenes) < number:
        scene = draw()
        if scene.facts not in seen:
            seen.add(scene.facts)
            scenes.append(scene)
    return scenes


def _png(scene: Scene) -> dict[str, Any]:
    buffer = io.BytesIO()
    # Noise has no repeated strings to search for: with run lengths alone, files are smaller and made faster.
    render_scene(scene).save(buffer, "PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return {"bytes": buffer.getvalue(), "path": None}


def compose_splits(
    draw: Callable[[], Any],
    draw_bag: Callable[[int, bool], list[Any]],
    encode: Callable[[Any], dict[str, Any]],
    features: datasets.Features,
    seed: int,
    sizes: Sequence[int],
    *,
    kinds: tuple[str, ...] = EMOJI_KINDS,
    annotators: Sequence[Annotator] = ANNOTATORS,
) -> datasets.DatasetDict:
    """Make the splits of a world, `sizes` of train, validation and test; no two scenes share their facts.

    `draw_bag` gets a size, and whether the bag goes against the preferences of kinds.
    """
    num_train, num_validation, num_test = sizes
    seen: set[Facts] = set()
    test: list[Any] = []
    bag_ids: list[str] = []
    size = max(BAG_SIZES)
    for number in range(num_test // size):
        against_preferences = (number + 1) % 4 == 0
        bag = draw_bag(size, against_preferences)
        while any(scene.facts in seen for scene in bag):
            bag = draw_bag(size, against_preferences)
        seen.update(scene.facts for scene in bag)
        test += bag
        bag_ids += [f"{number:03d}"] * size
    test += _unique(draw, seen, num_test - len(test))
    validation = _unique(draw, seen, num_validation)
    train = _unique(draw, seen, num_train)
    splits = datasets.DatasetDict()
    for split, (name, scenes) in enumerate({"train": train, "validation": validation, "test": test}.items()):
        columns: dict[str, list[Any]] = {column: [] for column in features}
        for row, scene in enumerate(scenes):
            # One generator per scene, so that a larger split begins with the captions of a smaller one.
            rng = np.random.default_rng((seed, split, row))
            columns["image"].append(encode(scene))
            columns["image_id"].append(f"{name}-{row:05d}")
            columns["captions"].append([annotate(rng, scene.facts, annotator) for annotator in annotators])
            columns["full_caption"].append(full_caption(scene.facts))
            columns["facts"].append(scene.facts.to_dict())
            columns["bag_id"].append(bag_ids[row] if name == "test" and row < len(bag_ids) else "")
            columns["against_preferences"].append(goes_against_preferences(scene.facts, kinds))
        # Not Dataset.from_dict, which visits each value of each row in Python before Arrow does.
        splits[name] = datasets.Dataset(InMemoryTable(pa.Table.from_pydict(columns, schema=features.arrow_schema)))
    return splits


def load_scenes(
    kind: Literal["emoji", "shapes"] = "emoji",
    *,
    annotators: Literal["captions", "alt_text"] = "captions",
    seed: int = 0,
    num_train: int = 5000,
    num_validation: int = 500,
    num_test: int = 1000,
) -> datasets.DatasetDict:
    """Make the embedded data set; no two scenes of it share their facts.

    It is made once and kept on disk, in the folder of `datasets`' cache.

    Args:
        kind (`str`): `"emoji"` for the committed sprites, `"shapes"` for shapes that need no asset.
        annotators (`str`): Writers of the references: `"captions"`, or `"alt_text"` for alternative texts.
        seed (`int`): The same seed gives the same bytes.
        num_train (`int`): Scenes in `train`.
        num_validation (`int`): Scenes in `validation`.
        num_test (`int`): Scenes in `test`: bags of 7 similar images, and what is left over as single scenes. The bags of 3
            and 5 are parts of those of 7. A quarter of the bags goes against what their kind prefers on purpose.

    Returns:
        `datasets.DatasetDict`: `train`, `validation` and `test` with the columns of `FEATURES`.
    """
    # The copy has its own format settings; the tables are immutable and are shared.
    return copy.deepcopy(_kept(kind, annotators, seed, num_train, num_validation, num_test))


@functools.lru_cache(maxsize=4)
def _kept(kind: str, domain: str, seed: int, *sizes: int) -> datasets.DatasetDict:
    """What [`load_scenes`] returns, from disk if it was made before."""
    name = "-".join(map(str, (WORLD_VERSION, _rules_digest(), kind, domain, seed, *sizes)))
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_captionrl_scenes" / name
    if folder.is_dir():
        kept = datasets.DatasetDict()
        for split in ("train", "validation", "test"):
            if (folder / split).is_dir():
                kept[split] = datasets.load_from_disk(str(folder / split))
            else:
                kept[split] = datasets.Dataset.from_dict({column: [] for column in FEATURES}, features=FEATURES)
        return kept
    rng, kinds = np.random.default_rng(seed), KINDS[kind]
    made = compose_splits(
        lambda: sample_scene(rng, kinds),
        lambda size, against: sample_look_alikes(rng, size, kinds, against_preferences=against),
        _png,
        FEATURES,
        seed,
        sizes,
        kinds=kinds,
        annotators=DOMAINS[domain],
    )
    # A read-only or full disk: the data are made again in the next process.
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        if not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        whole = stack.enter_context(temporary_path(folder.parent, is_folder=True)) / "made"
        whole.mkdir()
        for split, rows in made.items():
            if len(rows):  # a table without rows cannot be read back
                rows.save_to_disk(str(whole / split))
        # A second process keeps the files of the first one, which are the same.
        os.rename(whole, folder)
    return made


@functools.cache
def _rules_digest() -> str:
    """Digest of the code and the sprites that scenes are made of, so that files of older code are never read."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.py"), *SPRITES_DIR.glob("*.png")]):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def bags(bag_ids: list[str], size: int) -> list[list[int]]:
    """Rows of each bag of similar images of one size.

    Args:
        bag_ids (`list[str]`): The `bag_id` column.
        size (`int`): Bag size, one of `BAG_SIZES`.

    Returns:
        `list[list[int]]`: For each complete bag of 7 its first `size` rows.

    Raises:
        ValueError: If the size is none of `BAG_SIZES`, or there is no complete bag.
    """
    found: dict[str, list[int]] = {}
    for row, bag_id in enumerate(bag_ids):
        if bag_id:
            found.setdefault(bag_id, []).append(row)
    # An incomplete split may end within a bag; an incomplete bag would be easier.
    complete = [rows[:size] for rows in found.values() if len(rows) == max(BAG_SIZES)]
    if size not in BAG_SIZES or not complete:
        raise ValueError(f"No bag of {size} here. Use one of {BAG_SIZES}, on the test split.")
    return complete


# --- The moving world as a `datasets.DatasetDict`: short clips of one sprite, as GIFs --------------------------------

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
    num_validation: int = 300,
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
    """
    rng = np.random.default_rng((seed, 1))  # not the scenes of `load_scenes`
    kinds = KINDS[kind]
    return compose_splits(
        lambda: sample_clip(rng, kinds),
        lambda size, against: sample_clips_alike(rng, size, kinds, against_preferences=against),
        _gif,
        MOVING_FEATURES,
        seed,
        (num_train, num_validation, num_test),
        kinds=kinds,
    )
