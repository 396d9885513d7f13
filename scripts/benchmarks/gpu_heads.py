"""Heads and losses on a GPU: SMILE beside plain cross-entropy, Liger-Kernel, cut-cross-entropy and TRL's chunked loss.

Legend: B captions, T tokens, V vocabulary, D features.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_captionrl.losses import IGNORE_INDEX, fused_smile_loss, smile_loss
from scripts.benchmarks.gpu_timing import Budget, in_a_line, measure
from scripts.benchmarks.smile_head import LAMBDA, Shape, _batch

HEADS = {
    "blip-base": Shape(B=32, V=30_524, D=768, prompt=3, mean=12.5, std=2.8, shortest=7, longest=24),
    "gpt2-clipcap": Shape(B=40, V=50_257, D=768, prompt=0, mean=12.5, std=2.8, shortest=7, longest=24),
    "llama-3-8b": Shape(B=8, V=128_256, D=4096, prompt=0, mean=256.0, std=128.0, shortest=16, longest=512),
    "llama-13b": Shape(B=8, V=32_000, D=5120, prompt=0, mean=256.0, std=128.0, shortest=16, longest=512),
    "tiny": Shape(B=4, V=300, D=16, prompt=1, mean=5.0, std=1.0, shortest=3, longest=8),
}
"""Captions of COCO's lengths for the captioners, answers of up to 512 tokens for the language models; `tiny` is for tests."""

Path = Callable[[Tensor, Tensor, Tensor], Tensor]


def _cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    # As transformers computes it: logits in fp32.
    return F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def _supervised_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    supervised = labels != IGNORE_INDEX
    return _cross_entropy(hidden[supervised].unsqueeze(0), weight, labels[supervised])


def _liger() -> Path:
    loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE_INDEX
    )
    return lambda hidden, weight, labels: loss(weight, hidden.flatten(0, 1), labels.flatten())


def _cut() -> Path:
    loss = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, labels: loss(
        hidden.flatten(0, 1), weight, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="mean"
    )


def _trl() -> Path:
    log_probs = importlib.import_module("trl.kernels").ChunkedLogProbFunction
    chunk_size = importlib.import_module("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        # As its SFTTrainer calls it on a GPU: with supervised rows only.
        supervised = labels != IGNORE_INDEX
        found = log_probs.apply(hidden[supervised], weight, None, labels[supervised], 1.0, chunk_size, None, 1.0, ())
        return -found[0].mean()

    return loss


_OPTIONAL = {"Liger-Kernel": _liger, "cut-cross-entropy": _cut, "TRL, chunked": _trl}


def optional_paths() -> tuple[dict[str, Path], list[str]]:
    """Cross-entropy by other libraries. Returns those installed by name, and the names of those that are not."""
    found: dict[str, Path] = {}
    missing = []
    for name, make in _OPTIONAL.items():
        try:
            found[name] = make()
        except (ImportError, AttributeError):  # not installed, or without the loss
            missing.append(name)
    return found, missing


def _step(
    path: Path, hidden: Tensor, weight: Tensor, labels: Tensor, trainable: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One forward and backward; loss and leaves with fresh gradients."""
    hidden = hidden.detach().requires_grad_()
    weight = weight.detach().requires_grad_(trainable)
    loss = path(hidden, weight, labels)
    loss.backward()
    return loss.detach(), hidden, weight


def _check(
    paths: dict[str, Path], batch: tuple[Tensor, Tensor, Tensor], tolerance: float
) -> tuple[dict[str, float], dict[str, str]]:
    """How far each path's loss and gradient of the hidden states lie from plain logits in fp32.

    Returns the distances, and why a loss of another library is not timed. A wrong loss of ours is an error.
    """
    hidden, weight, labels = batch
    exact: dict[str, Path] = {
        "smile": lambda h, w, y: smile_loss(F.linear(h, w), y),
        "mixture": lambda h, w, y: smile_loss(F.linear(h, w), y, mle_weight=LAMBDA),
    }
    worst, refused = {}, {}
    for name, path in paths.items():
        try:
            loss, mine, _ = _step(path, hidden, weight, labels, False)
        except (RuntimeError, TypeError, ValueError) as error:  # an incompatible version, say
            if name not in _OPTIONAL or isinstance(error, torch.OutOfMemoryError):
                raise
            refused[name] = in_a_line(error)
            continue
        plain, theirs, _ = _step(exact.get(name, _cross_entropy), hidden.float(), weight.float(), labels, False)
        assert mine.grad is not None
        assert theirs.grad is not None
        gradient = (mine.grad.float() - theirs.grad).norm() / theirs.grad.norm()
        worst[name] = max(float((loss.float() - plain).abs() / plain.abs()), float(gradient))
        if not worst[name] <= tolerance:
            reason = f"differs from plain logits by {worst[name]:.1e}, more than {tolerance:.0e}"
            if name not in _OPTIONAL:
                raise RuntimeError(f"{name} {reason}; a wrong loss is not timed. Run the tests of the losses.")
            refused[name] = reason
    return worst, refused


def measure_heads(
    name: str, device: str, dtype: torch.dtype, *, rounds: int, warm_up: int, seed: int, budget: Budget
) -> dict[str, Any]:
    """Time forward and backward of every loss at one head, trainable and frozen.

    Returns the shape, `largest_difference` from plain fp32 logits, `not_installed`, `refused` with reasons, and under
    `steps` what [`measure`] gives by head and loss.
    """
    shape = HEADS[name]
    hidden, weight, labels = _batch(shape, seed)
    batch = (hidden.to(device, dtype), weight.to(device, dtype), labels.to(device))
    installed, missing = optional_paths()
    paths: dict[str, Path] = {
        "cross-entropy": _cross_entropy,
        "cross-entropy, supervised rows": _supervised_cross_entropy,
        **installed,
        "smile": fused_smile_loss,
        "mixture": functools.partial(fused_smile_loss, mle_weight=LAMBDA),
    }
    worst, refused = _check(paths, batch, 1e-4 if dtype == torch.float32 else 5e-2)
    steps: dict[str, Any] = {}
    for number, head in ((2, "trainable"), (1, "frozen")):
        works = {
            f"{head}, {key}": functools.partial(_step, path, *batch, head == "trainable")
            for key, path in paths.items()
            if key not in refused
        }
        part = budget.part(number)
        steps |= measure(works, device, rounds=rounds, warm_up=warm_up, seed=seed, budget=part)
    return {
        "size": f"B {shape.B}, T {labels.size(1)}, {int((labels != IGNORE_INDEX).sum())} supervised, V {shape.V}, D {shape.D}",
        "not_installed": missing,
        "refused": refused,
        "largest_difference": worst,
        "steps": steps,
    }
