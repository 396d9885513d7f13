r"""SMILE: head and loss beside Algorithm 1 and cross-entropy; and whole training steps beside MLE.

Legend: B captions, T tokens, V vocabulary, D features.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_captionrl.losses import IGNORE_INDEX, fused_smile_loss, smile_loss
from hf_captionrl.trainers.smile_trainer import SmileObjective
from scripts.benchmarks.models import STEP_SHAPES, build_model, draw_batch, for_device
from scripts.benchmarks.timing import Case, Work

LAMBDA = 0.01
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

# --- head and loss --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Head:
    """A head and a batch: B captions of `mean` +- `std` supervised tokens in [`shortest`, `longest`], after a prompt."""

    B: int
    V: int
    D: int
    prompt: int
    mean: float
    std: float
    shortest: int
    longest: int


# COCO captions are 10.5 words; with sub-words and the end token about 12.5 tokens. BLIP's prompt "a picture of " adds
# three ignored positions. LLaMA: the batch of the SMILE paper's appendix B, with answers of Alpaca's length truncated.
HEADS = {
    "blip-base": Head(B=32, V=30_524, D=768, prompt=3, mean=12.5, std=2.8, shortest=7, longest=24),
    "gpt2": Head(B=32, V=50_257, D=768, prompt=0, mean=12.5, std=2.8, shortest=7, longest=24),
    "llama-32k": Head(B=8, V=32_000, D=4096, prompt=0, mean=48.0, std=24.0, shortest=8, longest=64),
    "llama-3-8b": Head(B=8, V=128_256, D=4096, prompt=0, mean=256.0, std=128.0, shortest=16, longest=512),
    "llama-13b": Head(B=8, V=32_000, D=5120, prompt=0, mean=256.0, std=128.0, shortest=16, longest=512),
    "tiny": Head(B=4, V=300, D=16, prompt=1, mean=5.0, std=1.0, shortest=3, longest=8),
}
"""The last two language models are for a GPU."""

HEAD_BARS = {
    # slower, faster: the least of the ratio with a trainable and with a frozen head
    ("algorithm_1", "smile"): (8.0, 15.0),
    ("cross_entropy", "smile"): (7.0, 12.0),
    ("supervised_cross_entropy", "smile"): (None, None),
    ("naive_mixture", "mixture"): (1.2, 1.2),
    ("cross_entropy", "mixture"): (0.91, 0.91),
}


def _restricted(logits: Tensor, labels: Tensor) -> Tensor:
    """Algorithm 1 of the paper to the letter, on labels with the prompt in front already ignored."""
    B, T, V = logits.shape
    supervised = labels != IGNORE_INDEX
    first = supervised.int().argmax(1)
    # Ignored positions repeat a supervised word, so that the scatter adds nothing.
    words = torch.where(supervised, labels, labels.gather(1, first.unsqueeze(1)))
    mask = torch.zeros(B, V, dtype=torch.bool, device=labels.device).scatter_(1, words, True)
    mask = mask.unsqueeze(1).expand(-1, T, -1).clone()
    mask[torch.arange(B), first] = True
    # An ignored row of -inf everywhere but V_D is harmless here: its label is ignored.
    return _plain(logits.masked_fill(~mask, float("-inf")), labels)


def _plain(logits: Tensor, labels: Tensor) -> Tensor:
    # As transformers computes it: logits in fp32.
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def _supervised(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    # What skipping padding and prompt gives without SMILE.
    supervised = labels != IGNORE_INDEX
    return F.cross_entropy(F.linear(hidden[supervised], weight).float(), labels[supervised])


def _naive_mixture(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return LAMBDA * _plain(logits, labels) + (1 - LAMBDA) * _restricted(logits, labels)


LOSSES: dict[str, Loss] = {
    "algorithm_1": lambda hidden, weight, labels: _restricted(F.linear(hidden, weight), labels),
    "cross_entropy": lambda hidden, weight, labels: _plain(F.linear(hidden, weight), labels),
    "supervised_cross_entropy": _supervised,
    "smile": fused_smile_loss,
    "naive_mixture": _naive_mixture,
    "mixture": functools.partial(fused_smile_loss, mle_weight=LAMBDA),
}


def head_batch(head: Head, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states `(B, T, D)`, weight `(V, D)`, labels `(B, T)` padded to the longest caption."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randn(head.B, generator=generator) * head.std + head.mean
    lengths = lengths.round().clamp(head.shortest, head.longest).long()
    T = head.prompt + int(lengths.max())
    # Ranks drawn from a Zipf-like law, so that words repeat within a caption as they do in English.
    ranks = torch.exp(torch.rand(head.B, T, generator=generator) * torch.tensor(float(head.V)).log()).long()
    labels = torch.randperm(head.V, generator=generator)[ranks.clamp(max=head.V - 1)]
    positions = torch.arange(T)
    labels[(positions < head.prompt) | (positions >= head.prompt + lengths.unsqueeze(1))] = IGNORE_INDEX
    hidden = torch.randn(head.B, T, head.D, generator=generator)
    return hidden, torch.randn(head.V, head.D, generator=generator) * head.D**-0.5, labels


def _backward(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, trainable: bool) -> tuple[Tensor, ...]:
    """Loss, and gradient of the hidden states, after one forward and backward."""
    hidden = hidden.detach().requires_grad_()
    value = loss(hidden, weight.detach().requires_grad_(trainable), labels)
    value.backward()
    assert hidden.grad is not None
    return value.detach(), hidden.grad


def check_head(batch: tuple[Tensor, Tensor, Tensor], tolerance: float) -> dict[str, float]:
    """How far each loss and its gradient lie from plain logits in fp32; a wrong loss is an error."""
    hidden, weight, labels = batch
    rates = {"smile": 0.0, "algorithm_1": 0.0, "mixture": LAMBDA, "naive_mixture": LAMBDA}
    found = {}
    for name, loss in LOSSES.items():

        def exact(h: Tensor, w: Tensor, y: Tensor, rate: float = rates.get(name, 1.0)) -> Tensor:
            return smile_loss(F.linear(h, w), y, mle_weight=rate)

        mine = _backward(loss, hidden, weight, labels, False)
        theirs = _backward(exact, hidden.float(), weight.float(), labels, False)
        found[name] = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(mine, theirs, strict=True))
        if not found[name] <= tolerance:
            raise RuntimeError(f"{name} differs by {found[name]:.1e} from plain logits. Run the tests of the losses.")
    return found


def head_case(name: str, device: str, dtype: torch.dtype, seed: int, *, trainable: bool) -> Case:
    """Forward and backward of every loss at one head. Releasing gradients belongs to the optimizer and is not timed."""
    head = HEADS[name]
    hidden, weight, labels = head_batch(head, seed)
    batch = (hidden.to(device, dtype), weight.to(device, dtype), labels.to(device))
    differences = check_head(batch, 1e-4 if dtype == torch.float32 else 5e-2)
    works: dict[str, Work] = {
        key: functools.partial(_backward, loss, *batch, trainable) for key, loss in LOSSES.items()
    }
    bars = [(slow, fast, least[not trainable]) for (slow, fast), least in HEAD_BARS.items()]
    supervised = int((labels != IGNORE_INDEX).sum())
    size = f"B {head.B}, T {labels.size(1)}, {supervised} supervised, V {head.V}, D {head.D}"
    return Case(size, works, bars, notes={"differences": differences})


# --- whole steps ----------------------------------------------------------------------------------------------------


def _through_tap(mle_weight: float) -> Callable[[Any, dict[str, Tensor]], Tensor]:
    """The loss of `SmileTrainer`: the objective's sum over the supervised tokens, divided by their number."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        output = model(**batch, head_objective=SmileObjective(mle_weight=mle_weight))
        return output["loss"] / (batch["labels"] != IGNORE_INDEX).sum()

    return loss


PATHS: dict[str, Callable[[Any, dict[str, Tensor]], Tensor]] = {
    "smile": _through_tap(0.0),
    "mle": lambda model, batch: model(**batch).loss,
    "mle-tapped": _through_tap(1.0),
}
"""From model and batch to the loss: SMILE and MLE through the package's tap, and `mle`, the model's own loss over full logits."""


def check_step(model: Any, batch: dict[str, Tensor], tolerance: float = 1e-3) -> dict[str, float]:
    """Make sure that the paths compute what they are named after, from full logits and without dropout; differences in nats."""
    model.eval()
    try:
        with torch.no_grad():
            losses = {name: float(path(model, batch)) for name, path in PATHS.items()}
            labels = batch["labels"][:, 1:]
            # The encoder-decoder reads the tokens without the last one; the others' last position predicts nothing.
            logits = model(**batch).logits
            logits = logits if model.config.is_encoder_decoder else logits[:, -labels.size(1) - 1 : -1]
            mle = float(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
            expected = {"smile": float(smile_loss(logits, labels)), "mle": mle, "mle-tapped": mle}
    finally:
        model.train()
    for name, loss in losses.items():
        if not abs(loss - expected[name]) <= tolerance:
            raise RuntimeError(
                f"The loss of path {name!r} is {loss:.6f}, but {expected[name]:.6f} from full logits: a time would say "
                "nothing. Compare the captioner's tap with the model's loss (Captioner.self_check)."
            )
    return {name: abs(loss - expected[name]) for name, loss in losses.items()}


def step_case(name: str, device: str, dtype: torch.dtype, seed: int) -> Case:
    """Forward, backward and AdamW; every path trains the same model on the same batches."""
    shape = for_device(STEP_SHAPES[name], device)
    model, rng = build_model(shape, seed).to(device), np.random.default_rng(seed)
    batch: dict[str, Tensor] = {}

    def draw() -> None:
        batch.update({key: value.to(device) for key, value in draw_batch(shape, rng).items()})

    draw()
    differences = check_step(model, batch)
    # The Trainer's default optimizer, at a rate that leaves the model as it is. Trainable weights are fp32; 16 bits are
    # those of autocast.
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-7, fused=True)

    def step(path: Callable[..., Tensor]) -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = path(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    works: dict[str, Work] = {key: functools.partial(step, path) for key, path in PATHS.items()}
    # Bars are 1, within noise, but for the large batches of ClipCap.
    bars = [("mle", "smile", 1.25 if name == "clipcap" else 1.0), ("mle-tapped", "smile", None)]
    size = f"B {shape.batch_size}, {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M weights"
    return Case(size, works, bars, draw, {"differences": differences}, True)
