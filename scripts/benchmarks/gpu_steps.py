"""Whole steps on a GPU: reinforcement, the scorer, and the search for similar images.

Legend: B images, G captions per image, N = B * G captions, Q queries, D features.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import tempfile
from typing import Any

import torch

from hf_captionrl.retrieval.neighbours import normalised, rank_rows
from hf_captionrl.rewards.self_retrieval import retrieval_rewards
from scripts.benchmarks.bags import _features
from scripts.benchmarks.device_timing import measure
from scripts.benchmarks.rl_models import RLShape, _made_up_images, _scorer, _scorer_pixels, build
from scripts.benchmarks.rl_naive import padded_text
from scripts.benchmarks.rl_timing import STEPS, Clock, check_equal

_TINY = RLShape(
    "blip",
    2,
    group_size=2,
    num_tokens=3,
    vocab_size=60,
    width=32,
    layers=1,
    heads=2,
    image_size=32,
    scorer_text_width=32,
    scorer_layers=1,
    scorer_vocab_size=60,
)
RL_SHAPES = {
    "blip-base": RLShape("blip", 32),
    "gpt2-clipcap": RLShape("clipcap", 32, vocab_size=50_257, patch_size=32),
    "tiny": _TINY,
}
"""32 images x 5 captions of 20 tokens; `tiny` is for tests."""

SCORERS = {"clip-vit-b-32": RLShape("blip", 100), "tiny": _TINY}
"""100 images and 500 captions a call."""


@dataclasses.dataclass(frozen=True)
class Mine:
    """A search: the `top` nearest of `queries` among `images` of `width` features, `block` queries at once."""

    images: int
    width: int
    top: int
    queries: int
    block: int


MINES = {"coco-118k": Mine(118_000, 1024, 200, 8192, 1024), "tiny": Mine(300, 8, 5, 32, 16)}
"""COCO's training images with image and text features of 512 each; `tiny` is for tests."""


def measure_rl(name: str, device: str, dtype: torch.dtype, *, rounds: int, warm_up: int, seed: int) -> dict[str, Any]:
    """Time the reinforcement step as the trainer does it, with and without cached features, beside the usual one.

    Returns the shape, `largest_difference` of both steps in fp32, and under `steps` what [`measure`] gives.
    """
    shape = RL_SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        # Sums of bf16 in another order differ visibly; whether both are the same step is seen in fp32.
        difference = check_equal(build(shape, seed, folder, device=device))
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        world = build(shape, seed, folder, device=device)
    optimizer = torch.optim.AdamW(list(world.parameters.values()), lr=1e-7)

    def step(which: str) -> None:
        # Trainable weights are fp32; 16 bits are those of autocast.
        with torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32):
            STEPS[which](world, Clock())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    works = {which: functools.partial(step, which) for which in STEPS}
    return {
        "shape": dataclasses.asdict(shape),
        "parameters": sum(p.numel() for p in world.captioner.model.parameters()),
        "largest_difference": difference,
        "steps": measure(works, device, rounds=rounds, warm_up=warm_up, seed=seed),
    }


def measure_scorer(
    name: str, device: str, dtype: torch.dtype, *, rounds: int, warm_up: int, seed: int
) -> dict[str, Any]:
    """Time what a scorer does for a rollout.

    Returns the shape, and under `steps` what [`measure`] gives for captions padded to the longest and to the scorer's
    full length, images from pixels and from pictures, and rewards.
    """
    shape = SCORERS[name]
    torch.manual_seed(seed)
    images = _made_up_images(shape, seed)
    scorer = _scorer(shape).to(device)
    scorer.dtype = dtype
    scorer.model.to(dtype)
    pictures = [row["image"] for row in images]
    pixels = _scorer_pixels(scorer, images, range(len(images))).to(device, dtype)
    words = torch.randint(4, shape.scorer_vocab_size, (shape.num_images * shape.group_size, shape.num_tokens)).tolist()
    captions = [" ".join(f"w{word - 4}" for word in row) for row in words]
    similarity = torch.randn(len(captions), len(pictures), device=device)
    columns = torch.arange(len(captions), device=device) // shape.group_size

    def padded() -> Any:
        return scorer.model.get_text_features(**padded_text(scorer, captions).to(device))

    works = {
        "captions, padded to the longest": lambda: scorer.text_features(captions),
        "captions, padded to the full length": padded,
        "images, from pixels on the device": lambda: scorer.model.get_image_features(pixel_values=pixels),
        "images, from pictures": lambda: scorer.image_features(pictures),
        "rewards": lambda: retrieval_rewards(similarity, columns, scale=100.0),
    }
    with torch.no_grad():
        found = measure(works, device, rounds=rounds, warm_up=warm_up, seed=seed)
    return {"shape": dataclasses.asdict(shape), "steps": found}


def measure_mining(
    name: str, device: str, dtype: torch.dtype, *, rounds: int, warm_up: int, seed: int
) -> dict[str, Any]:
    """Time the exact nearest neighbours beside the bare blocked product.

    Returns the sizes, and under `steps` what [`measure`] gives.
    """
    mine = MINES[name]
    unit = normalised(_features(mine.images, mine.width, seed)).to(device)
    rows = torch.randperm(mine.images, generator=torch.Generator().manual_seed(seed))[: mine.queries]
    buffer = torch.empty(mine.block, mine.images, device=device)

    def bare() -> None:
        for part in rows.split(mine.block):
            torch.mm(unit[part.to(device)], unit.T, out=buffer[: len(part)])

    works = {
        "neighbours": lambda: rank_rows(unit, mine.top, rows=rows, block_size=mine.block),
        "bare product": bare,
    }
    found = measure(works, device, rounds=rounds, warm_up=warm_up, seed=seed)
    return {"shape": dataclasses.asdict(mine), "steps": found}
