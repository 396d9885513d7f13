"""Whole steps on a GPU: SMILE, reinforcement, and the generation of captions.

Legend: B images, G captions per image, N = B * G captions.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from typing import Any

import numpy as np
import torch

from scripts.benchmarks import smile_step, step_models
from scripts.benchmarks.generation import LENGTHS, planned_lengths, write
from scripts.benchmarks.gpu_timing import Budget, Work, measure
from scripts.benchmarks.rl_models import RLShape, World, build
from scripts.benchmarks.rl_step import plan_lengths
from scripts.benchmarks.rl_timing import STEPS, Clock, check_equal

TINY = RLShape(
    "blip",
    2,
    group_size=2,
    num_tokens=5,
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
    "tiny": TINY,
}
"""32 images x 5 captions of COCO's lengths; `tiny` is for tests."""

COMPILED_SHAPES = {"gpt2-clipcap": RL_SHAPES["gpt2-clipcap"], "tiny": dataclasses.replace(TINY, kind="clipcap")}
"""Where both ways to compile the decoding step work: BLIP has no static cache."""

STEP_SHAPES = {
    "blip-base": dataclasses.replace(step_models.SHAPES["blip-base"], batch_size=32),
    "gpt2-clipcap": step_models.SHAPES["clipcap"],
    "gpt2-clipcap-frozen": step_models.SHAPES["clipcap-frozen"],
    "llama-32k": step_models.SHAPES["llama-32k"],
    "tiny": step_models.Shape("clipcap", 3, 60, width=32, layers=1, heads=2, intermediate=64, prefix_length=2),
}
"""Training steps with the batches of the papers; `tiny` is for tests."""


def _autocast(device: str, dtype: torch.dtype) -> Any:
    # Trainable weights are fp32; 16 bits are those of autocast.
    return torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32)


def measure_smile_step(
    name: str, device: str, dtype: torch.dtype, *, rounds: int, warm_up: int, seed: int, budget: Budget
) -> dict[str, Any]:
    """Time forward, backward and AdamW with SMILE and with MLE.

    Returns the size, `largest_difference` of the losses from those of full logits in fp32, and under `steps` what
    [`measure`] gives by loss.
    """
    shape = STEP_SHAPES[name]
    model = step_models.build(shape, seed).to(device)
    batch = {k: v.to(device) for k, v in step_models.draw_batch(shape, np.random.default_rng(seed)).items()}
    difference = smile_step.check_losses(model, batch)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-7, fused=True)

    def step(path: Any) -> None:
        with _autocast(device, dtype):
            loss = path(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    works: dict[str, Work] = {key: functools.partial(step, path) for key, path in smile_step.PATHS.items()}
    return {
        "size": f"B {shape.batch_size}, {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M weights",
        "largest_difference": difference,
        "steps": measure(works, device, rounds=rounds, warm_up=warm_up, seed=seed, budget=budget),
    }


def _world(shape: RLShape, seed: int, device: str) -> World:
    """Models and images; all captions of a measurement have the same planned lengths."""
    with tempfile.TemporaryDirectory() as folder:
        world = build(shape, seed, folder, device=device)
    plan_lengths(world)
    return world


def _size(world: World) -> str:
    shape = world.shape
    return f"{shape.num_images} x {shape.group_size} captions"


def measure_rl(
    name: str, device: str, dtype: torch.dtype, *, rounds: int, warm_up: int, seed: int, budget: Budget
) -> dict[str, Any]:
    """Time the reinforcement step as the trainer does it, with and without cached features, beside the usual one.

    Returns the size, `largest_difference` of both steps in fp32, and under `steps` what [`measure`] gives.
    """
    world = _world(RL_SHAPES[name], seed, device)
    # Sums of bf16 in another order differ visibly; whether both are the same step is seen in fp32.
    difference = check_equal(world)
    optimizer = torch.optim.AdamW(list(world.parameters.values()), lr=1e-7, fused=True)

    def step(which: str) -> None:
        with _autocast(device, dtype):
            STEPS[which](world, Clock())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    works = {which: functools.partial(step, which) for which in STEPS}
    return {
        "size": _size(world),
        "largest_difference": difference,
        "steps": measure(works, device, rounds=rounds, warm_up=warm_up, seed=seed, budget=budget),
    }


def _writing_world(shape: RLShape, device: str, dtype: torch.dtype, seed: int) -> World:
    world = _world(shape, seed, device)
    world.captioner.model.to(dtype)
    _ = world.cached_features  # encoded before anything is timed
    return world


def measure_generation(
    name: str, device: str, dtype: torch.dtype, *, rounds: int, warm_up: int, seed: int, budget: Budget
) -> dict[str, Any]:
    """Time sampled captions from cached features by the decoding loop of the package and that of transformers.

    Returns the size, and under `steps` what [`measure`] gives by loop and lengths.
    """
    shape = RL_SHAPES[name]
    world = _writing_world(shape, device, dtype, seed)
    works: dict[str, Work] = {}
    for kind, (mean, deviation) in LENGTHS.items():
        number = shape.num_images * shape.group_size
        lengths = planned_lengths(mean, deviation, number, longest=shape.num_tokens).to(device)
        works |= {
            f"{loop}, {kind}": functools.partial(write, world, loop, lengths) for loop in ("ours", "transformers")
        }
    return {
        "size": _size(world),
        "steps": measure(works, device, rounds=rounds, warm_up=warm_up, seed=seed, budget=budget),
    }


def measure_compiled(
    name: str, device: str, dtype: torch.dtype, *, rounds: int, warm_up: int, seed: int, budget: Budget
) -> dict[str, Any]:
    """Time captions of COCO's lengths whose decoding step is compiled: in our loop, and by transformers with a static cache.

    Returns the size, and under `steps` what [`measure`] gives. Compilation happens in the first round that warms up.
    """
    world = _writing_world(COMPILED_SHAPES[name], device, dtype, seed)
    ours = functools.partial(write, world, "ours", world.lengths)
    works: dict[str, Work] = {
        "ours": ours,
        "ours, compile_decoding": functools.partial(ours, compile_decoding=True),
        "transformers, static cache": functools.partial(
            write, world, "transformers", world.lengths, cache_implementation="static"
        ),
    }
    return {
        "size": _size(world),
        "steps": measure(works, device, rounds=rounds, warm_up=warm_up, seed=seed, budget=budget),
    }
