"""The embedded world as a `datasets.DatasetDict`."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, Literal

import datasets
import numpy as np

from hf_captionrl.scenes.grammar import ANNOTATORS, annotate, full_caption
from hf_captionrl.scenes.render import render_scene
from hf_captionrl.scenes.world import EMOJI_KINDS, SHAPE_KINDS, Facts, Scene, sample_scene, vary_scene

__all__ = ["BAG_SIZES", "FEATURES", "bags", "load_scenes", "scene_stream"]

BAG_SIZES: tuple[int, ...] = (3, 5, 7)
"""Sizes of the near-duplicate bags of the test split, as in TrueMatch."""

FEATURES = datasets.Features(
    {
        "image": datasets.Image(),
        "image_id": datasets.Value("string"),
        "captions": datasets.List(datasets.Value("string")),
        "full_caption": datasets.Value("string"),
        "facts": {
            name: datasets.Value("int32" if name == "count" else "string") for name in Facts.__dataclass_fields__
        },
        "bag_id": datasets.Value("string"),
    }
)
"""Columns of every split. `bag_id` is `"<size>-<number>"` inside a near-duplicate bag and `""` elsewhere."""

_KINDS = {"emoji": EMOJI_KINDS, "shapes": SHAPE_KINDS}


def scene_stream(seed: int, kinds: tuple[str, ...] = EMOJI_KINDS) -> Iterator[Scene]:
    """Endless scenes, for training models on more than the data set holds.

    Args:
        seed (`int`): Seed of the stream.
        kinds (`tuple[str, ...]`): Kinds to choose from.

    Returns:
        `Iterator[Scene]`: Scenes in the order of their drawing; facts may repeat.
    """
    rng = np.random.default_rng(seed)
    while True:
        yield sample_scene(rng, kinds)


def _unique(rng: np.random.Generator, kinds: tuple[str, ...], seen: set[Facts], number: int) -> list[Scene]:
    scenes: list[Scene] = []
    while len(scenes) < number:
        scene = sample_scene(rng, kinds)
        if scene.facts not in seen:
            seen.add(scene.facts)
            scenes.append(scene)
    return scenes


def _bag(rng: np.random.Generator, kinds: tuple[str, ...], seen: set[Facts], size: int) -> list[Scene]:
    """`size` scenes, all but the first of which differ from the first in one fact."""
    while True:
        bag = _unique(rng, kinds, seen, 1)
        for _ in range(50 * size):
            if len(bag) == size:
                return bag
            other = vary_scene(rng, bag[0], kinds)
            if other.facts not in seen:
                seen.add(other.facts)
                bag.append(other)


def _png(scene: Scene) -> dict[str, Any]:
    buffer = io.BytesIO()
    render_scene(scene).save(buffer, "PNG", compress_level=1)
    return {"bytes": buffer.getvalue(), "path": None}


def _split(name: str, seed: int, split: int, scenes: list[Scene], bag_ids: list[str]) -> datasets.Dataset:
    columns: dict[str, list[Any]] = {column: [] for column in FEATURES}
    for number, (scene, bag_id) in enumerate(zip(scenes, bag_ids, strict=True)):
        # One generator a scene, so that a larger split begins with the smaller one's captions.
        rng = np.random.default_rng((seed, split, number))
        columns["image"].append(_png(scene))
        columns["image_id"].append(f"{name}-{number:05d}")
        columns["captions"].append([annotate(rng, scene.facts, annotator) for annotator in ANNOTATORS])
        columns["full_caption"].append(full_caption(scene.facts))
        columns["facts"].append(scene.facts.to_dict())
        columns["bag_id"].append(bag_id)
    return datasets.Dataset.from_dict(columns, features=FEATURES)


def load_scenes(
    kind: Literal["emoji", "shapes"] = "emoji",
    *,
    seed: int = 0,
    num_train: int = 5000,
    num_validation: int = 500,
    num_test: int = 1000,
) -> datasets.DatasetDict:
    """Make the embedded data set; no two scenes of it share their facts.

    Args:
        kind (`str`): `"emoji"` for the committed sprites, `"shapes"` for coloured shapes that need no asset.
        seed (`int`): The same seed gives the same bytes.
        num_train (`int`): Scenes in `train`.
        num_validation (`int`): Scenes in `validation`.
        num_test (`int`): Scenes in `test`: near-duplicate bags of 3, 5 and 7 in equal numbers, a few single scenes.

    Returns:
        `datasets.DatasetDict`: `train`, `validation` and `test` with the columns of `FEATURES`.

    Raises:
        ValueError: If `kind` is unknown or a size is negative.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind is {kind!r}. Use one of {sorted(_KINDS)}.")
    if min(num_train, num_validation, num_test) < 0:
        raise ValueError(f"Split sizes are {(num_train, num_validation, num_test)}. Use sizes of 0 or more.")
    kinds = _KINDS[kind]
    seen: set[Facts] = set()
    rng = np.random.default_rng(seed)
    test: list[Scene] = []
    bag_ids: list[str] = []
    for number in range(num_test // sum(BAG_SIZES)):
        for size in BAG_SIZES:
            test += _bag(rng, kinds, seen, size)
            bag_ids += [f"{size}-{number:03d}"] * size
    single = _unique(rng, kinds, seen, num_test - len(test))
    test += single
    bag_ids += [""] * len(single)
    validation = _unique(rng, kinds, seen, num_validation)
    train = _unique(rng, kinds, seen, num_train)
    return datasets.DatasetDict(
        {
            "train": _split("train", seed, 0, train, [""] * num_train),
            "validation": _split("validation", seed, 1, validation, [""] * num_validation),
            "test": _split("test", seed, 2, test, bag_ids),
        }
    )


def bags(bag_ids: list[str], size: int) -> list[list[int]]:
    """Rows of each near-duplicate bag of one size.

    Args:
        bag_ids (`list[str]`): The `bag_id` column.
        size (`int`): Bag size, one of `BAG_SIZES`.

    Returns:
        `list[list[int]]`: For each complete bag its row numbers.

    Raises:
        ValueError: If no bag has that size.
    """
    found: dict[str, list[int]] = {}
    for row, bag_id in enumerate(bag_ids):
        if bag_id.startswith(f"{size}-"):
            found.setdefault(bag_id, []).append(row)
    # A split that was cut short may end in the middle of a bag: an easier bag, and not one of this size.
    complete = [rows for rows in found.values() if len(rows) == size]
    if not complete:
        raise ValueError(f"No bag of {size} here. Use one of {BAG_SIZES}, on the test split.")
    return complete
