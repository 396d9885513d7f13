"""What the models of the embedded world share: tokenizer, pixels, captions to learn from, facts learnt first."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertTokenizer, GPT2Config

from hf_captionrl.scenes.grammar import Annotator, annotate
from hf_captionrl.scenes.kinds import EMOJI_KINDS
from hf_captionrl.scenes.render import IMAGE_SIZE, render_scene
from hf_captionrl.scenes.vocabulary import vocabulary
from hf_captionrl.scenes.world import FACT_VALUES, Facts, Scene, sample_scene, vary_scene

CHECKPOINTS = Path(__file__).parents[2] / "hf_captionrl" / "scenes" / "checkpoints"
HIDDEN, HEADS, MLP = 128, 4, 256
MEAN = STD = [0.5, 0.5, 0.5]
PATCH = 18
"""Side of a patch in pixels: not that of a grid cell."""

HEADS_OF: dict[str, tuple[Any, ...]] = {
    **FACT_VALUES,
    "kind": EMOJI_KINDS,
    "second": ("", *EMOJI_KINDS),
    "relation": ("", *FACT_VALUES["relation"]),
}
"""What a linear head can tell of each fact."""


class ScenePool:
    """Pictures that models are trained on: groups of one scene and three that differ from it in one fact.

    Drawing a picture takes longer than a step on it, so all of them are drawn once.

    Args:
        seed (`int`): Models that shall not share their data have different ones.
        num_groups (`int`): Groups of four pictures.
    """

    def __init__(self, seed: int, num_groups: int) -> None:
        rng = np.random.default_rng((seed, 0))
        self.scenes: list[Scene] = []
        for _ in range(num_groups):
            base = sample_scene(rng)
            self.scenes += [base, *(vary_scene(rng, base) for _ in range(3))]
        shape = (len(self.scenes), IMAGE_SIZE, IMAGE_SIZE, 3)
        self.images = np.empty(shape, dtype=np.uint8)
        for image, scene in zip(self.images, self.scenes, strict=True):
            image[...] = render_scene(scene)

    def draw(self, rng: np.random.Generator, number: int) -> tuple[list[Scene], Tensor]:
        """Scenes at random, and their pixels `(B, 3, IMAGE_SIZE, IMAGE_SIZE)` in [-1, 1]."""
        return self.take(rng.choice(len(self.scenes), number, replace=False))

    def draw_groups(self, rng: np.random.Generator, number: int) -> tuple[list[Scene], Tensor]:
        """Whole groups at random, one after the other."""
        groups = rng.choice(len(self.scenes) // 4, number, replace=False)
        return self.take((groups[:, None] * 4 + np.arange(4)).ravel())

    def take(self, rows: np.ndarray) -> tuple[list[Scene], Tensor]:
        """Scenes of some rows."""
        pixels = torch.from_numpy(self.images[rows]).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
        return [self.scenes[row] for row in rows], pixels


def make_tokenizer(max_length: int, **special: str) -> BertTokenizer:
    """The shared WordPiece tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocab.txt"
        file.write_text("\n".join(vocabulary()) + "\n", encoding="utf-8")
        return BertTokenizer(str(file), model_max_length=max_length, do_lower_case=True, **special)


def gpt2_config(tokenizer: BertTokenizer, *, positions: int, layers: int) -> GPT2Config:
    """A tiny GPT-2 without dropout."""
    return GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=positions,
        n_embd=HIDDEN,
        n_layer=layers,
        n_head=HEADS,
        n_inner=MLP,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def random_caption(rng: np.random.Generator, facts: Facts, verbosity: tuple[float, float] = (0.3, 3.0)) -> str:
    """A caption of any verbosity in any style."""
    annotator = Annotator(
        float(rng.uniform(*verbosity)),
        generic=0.1,
        setting_first=bool(rng.random() < 0.3),
        alt_text=bool(rng.random() < 0.2),
    )
    return annotate(rng, facts, annotator)


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Linear warm-up over 5 % of the steps, then a cosine to zero."""
    warm = max(1, steps // 20)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm, 0.5 * (1 + np.cos(np.pi * min(1.0, s / steps))))
    )


def fit(
    title: str,
    steps: int,
    loss_of: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    clipped: Iterable[nn.Parameter] = (),
    after: Callable[[], object] | None = None,
    every: int = 100,
) -> tuple[list[float], int]:
    """The training loop of every model here.

    Returns:
        `tuple[list[float], int]`: The losses, and CPU seconds.
    """
    scheduler = one_cycle(optimizer, steps)
    clipped = list(clipped)
    start = time.process_time()
    losses: list[float] = []
    for step in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        if clipped:
            nn.utils.clip_grad_norm_(clipped, 1.0)
        optimizer.step()
        scheduler.step()
        if after is not None:
            after()
        losses.append(loss.item())
        if step % every == 0:
            mean, seconds = np.mean(losses[-every:]), time.process_time() - start
            print(f"{title} {step:5d} loss {mean:.3f} cpu_s {seconds:.0f}", flush=True)
    return losses, round(time.process_time() - start)


def learn_facts(
    tower: nn.Module, pool: ScenePool, names: tuple[str, ...], width: int, seed: int, steps: int, log: dict[str, Any]
) -> None:
    """Teach a vision tower to see: linear heads for some facts on its pooled output.

    Args:
        tower (`nn.Module`): Called with `pixel_values`, returns `pooler_output` of shape `(B, width)`.
        pool ([`ScenePool`]): The images.
        names (`tuple[str, ...]`): The facts.
        width (`int`): Size of the pooled output.
        seed (`int`): Seed of the order and the heads.
        steps (`int`): Updates with 64 images each.
        log (`dict`): Receives accuracy per fact on 1,000 fresh scenes, and CPU seconds.
    """
    rng = np.random.default_rng((seed, 0))
    heads = nn.ModuleDict({name: nn.Linear(width, len(HEADS_OF[name])) for name in names})
    optimizer = torch.optim.AdamW([*tower.parameters(), *heads.parameters()], lr=2e-3, weight_decay=0.01)

    def targets(scenes: list[Scene]) -> dict[str, Tensor]:
        return {name: torch.tensor([HEADS_OF[name].index(getattr(s.facts, name)) for s in scenes]) for name in names}

    def loss_of() -> Tensor:
        scenes, pixels = pool.draw(rng, 64)
        pooled = tower(pixel_values=pixels).pooler_output
        return torch.stack([F.cross_entropy(heads[n](pooled), t) for n, t in targets(scenes).items()]).sum()

    start = time.process_time()
    fit("facts", steps, loss_of, optimizer, clipped=tower.parameters(), every=250)
    scenes, pixels = ScenePool(10_000 + seed, 250).take(np.arange(1000))
    with torch.no_grad():
        pooled = tower(pixel_values=pixels).pooler_output
        accuracy = {n: (heads[n](pooled).argmax(-1) == t).float().mean().item() for n, t in targets(scenes).items()}
    log["fact_accuracy"] = {n: round(a, 4) for n, a in accuracy.items()}
    log["facts_cpu_s"] = round(time.process_time() - start)
    print(log, flush=True)
