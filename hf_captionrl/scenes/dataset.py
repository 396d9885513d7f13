"""The embedded world as a `datasets.DatasetDict`."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import datasets
import numpy as np

from hf_captionrl.scenes.grammar import ANNOTATORS, annotate, full_caption
from hf_captionrl.scenes.render import render_scene
from hf_captionrl.scenes.world import EMOJI_KINDS, SHAPE_KINDS, Facts, Scene, sample_scene, vary_scene

__all__ = ["BAG_SIZES", "FEATURES", "KINDS", "bags", "compose_splits", "facts_features", "load_scenes", "scene_stream"]

BAG_SIZES: tuple[int, ...] = (3, 5, 7)
"""Sizes of the near-duplicate bags of the test split, as in TrueMatch."""


_DRAWS_A_SCENE = 100


def facts_features(kind: type[Facts], *, decode: bool = True) -> datasets.Features:
    """Columns of a split."""
    fields = kind.__dataclass_fields__
    return datasets.Features(
        {
            "image": datasets.Image(decode=decode),
            "image_id": datasets.Value("string"),
            "captions": datasets.List(datasets.Value("string")),
            "full_caption": datasets.Value("string"),
            "facts": {name: datasets.Value("int32" if name == "count" else "string") for name in fields},
            "bag_id": datasets.Value("string"),
        }
    )


FEATURES = facts_features(Facts)
"""Columns of every split. `bag_id` is `"<size>-<number>"` inside a near-duplicate bag and `""` elsewhere."""

KINDS: dict[str, tuple[str, ...]] = {"emoji": EMOJI_KINDS, "shapes": SHAPE_KINDS}
"""Kinds of things by the name of their set."""


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


def _unique(draw: Callable[[], Any], seen: set[Facts], number: int) -> list[Any]:
    """Scenes that were not seen before.

    It gives up after 100 draws in vain for each scene that was seen: where one is missing that is drawn a third as often as
    the others are on average, the chance to give up wrongly is exp(-100 / 3).
    """
    scenes: list[Any] = []
    in_vain = 0
    while len(scenes) < number:
        scene = draw()
        if scene.facts not in seen:
            seen.add(scene.facts)
            scenes.append(scene)
            in_vain = 0
        elif (in_vain := in_vain + 1) > _DRAWS_A_SCENE * len(seen):
            raise ValueError(
                f"This world has {len(seen)} different scenes, and more are asked for. Lower num_train, num_validation or "
                "num_test."
            )
    return scenes


def _bag(draw: Callable[[], Any], vary: Callable[[Any], Any], seen: set[Facts], size: int) -> list[Any]:
    """`size` scenes, all but the first of which differ from the first in one fact."""
    while True:
        bag = _unique(draw, seen, 1)
        for _ in range(50 * size):
            if len(bag) == size:
                return bag
            other = vary(bag[0])
            if other.facts not in seen:
                seen.add(other.facts)
                bag.append(other)


def _png(scene: Scene) -> dict[str, Any]:
    buffer = io.BytesIO()
    render_scene(scene).save(buffer, "PNG", compress_level=1)
    return {"bytes": buffer.getvalue(), "path": None}


def _split(
    name: str,
    key: Sequence[int],
    scenes: list[Any],
    bag_ids: list[str],
    encode: Callable[[Any], dict[str, Any]],
    features: datasets.Features,
) -> datasets.Dataset:
    columns: dict[str, list[Any]] = {column: [] for column in features}
    for number, (scene, bag_id) in enumerate(zip(scenes, bag_ids, strict=True)):
        # One generator a scene, so that a larger split begins with the smaller one's captions.
        rng = np.random.default_rng((*key, number))
        columns["image"].append(encode(scene))
        columns["image_id"].append(f"{name}-{number:05d}")
        columns["captions"].append([annotate(rng, scene.facts, annotator) for annotator in ANNOTATORS])
        columns["full_caption"].append(full_caption(scene.facts))
        columns["facts"].append(scene.facts.to_dict())
        columns["bag_id"].append(bag_id)
    return datasets.Dataset.from_dict(columns, features=features)


def compose_splits(
    draw: Callable[[], Any],
    vary: Callable[[Any], Any],
    encode: Callable[[Any], dict[str, Any]],
    features: datasets.Features,
    *,
    seed: int,
    num_train: int,
    num_validation: int,
    num_test: int,
) -> datasets.DatasetDict:
    """Make the splits of a world; no two scenes share their facts.

    Args:
        encode (`Callable`): From a scene to its file, the `{"bytes": ..., "path": None}` of an image column.
    """
    if min(num_train, num_validation, num_test) < 0:
        raise ValueError(f"Split sizes are {(num_train, num_validation, num_test)}. Use sizes of 0 or more.")
    seen: set[Facts] = set()
    test: list[Any] = []
    bag_ids: list[str] = []
    for number in range(num_test // sum(BAG_SIZES)):
        for size in BAG_SIZES:
            test += _bag(draw, vary, seen, size)
            bag_ids += [f"{size}-{number:03d}"] * size
    single = _unique(draw, seen, num_test - len(test))
    test += single
    bag_ids += [""] * len(single)
    validation = _unique(draw, seen, num_validation)
    train = _unique(draw, seen, num_train)
    parts = {
        "train": (0, train, [""] * num_train),
        "validation": (1, validation, [""] * num_validation),
        "test": (2, test, bag_ids),
    }
    return datasets.DatasetDict(
        {
            name: _split(name, (seed, split), scenes, ids, encode, features)
            for name, (split, scenes, ids) in parts.items()
        }
    )


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
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}. Use one of {sorted(KINDS)}.")
    # Copies of what says how a table is shown; tables never change, and are shared.
    return copy.deepcopy(_composed(kind, seed, num_train, num_validation, num_test))


@functools.lru_cache(maxsize=4)
def _composed(kind: str, seed: int, num_train: int, num_validation: int, num_test: int) -> datasets.DatasetDict:
    """What [`load_scenes`] gives, made once a process: drawing and encoding it takes seconds."""
    rng = np.random.default_rng(seed)
    kinds = KINDS[kind]
    return compose_splits(
        lambda: sample_scene(rng, kinds),
        lambda scene: vary_scene(rng, scene, kinds),
        _png,
        FEATURES,
        seed=seed,
        num_train=num_train,
        num_validation=num_validation,
        num_test=num_test,
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
