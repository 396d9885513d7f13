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

from hf_captionrl.scenes.grammar import Annotator, annotate, vocabulary
from hf_captionrl.scenes.render import IMAGE_SIZE, render_scene
from hf_captionrl.scenes.world import (
    EMOJI_KINDS,
    FACT_VALUES,
    Facts,
    Scene,
    sample_look_alikes,
    sample_scene,
    vary_scene,
)

CHECKPOINTS = Path(__file__).parents[2] / "hf_captionrl" / "scenes" / "checkpoints"
HIDDEN, HEADS, MLP = 128, 4, 256
MEAN = STD = [0.5, 0.5, 0.5]
PATCH = 24
"""Side of a patch in pixels. Smaller ones cost five times as many steps for the same accuracy."""

NUM_GROUPS = 10_000
"""Groups of four images that a model is trained on."""

HEADS_OF: dict[str, tuple[Any, ...]] = {
    **FACT_VALUES,
    "kind": EMOJI_KINDS,
    "second": ("", *EMOJI_KINDS),
    "relation": ("", *FACT_VALUES["relation"]),
}
"""What a linear head can tell of each fact."""


class ScenePool:
    """Pictures that models are trained on: groups of one scene and three that differ from it in one fact, or cliques.

    Drawing a picture takes longer than a step on it, so all of them are drawn once.
    """

    def __init__(self, seed: int, num_groups: int, num_look_alike_sets: int = 0) -> None:
        rng = np.random.default_rng((seed, 0))
        self.scenes: list[Scene] = []
        for _ in range(num_groups - num_look_alike_sets):
            base = sample_scene(rng)
            self.scenes += [base, *(vary_scene(rng, base) for _ in range(3))]
        for _ in range(num_look_alike_sets):
            self.scenes += sample_look_alikes(rng, 4)
        shape = (len(self.scenes), IMAGE_SIZE, IMAGE_SIZE, 3)
        self.images: np.ndarray = np.empty(shape, dtype=np.uint8)
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


def make_optimizers(
    model: nn.Module, lr: float, weight_decay: float, *extra: nn.Module, slow: nn.Module | None = None
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the transformer layers that are trained, AdamW for all other parameters.

    A tower learns the facts in half as many steps as with AdamW alone. Parameters of `slow` have 0.3 of the learning rate.
    """
    named = [(name, p) for module in (model, *extra) for name, p in module.named_parameters() if p.requires_grad]
    is_slow = {id(p) for p in slow.parameters()} if slow is not None else set()

    def groups(of_matrices: bool, rate: float) -> list[dict[str, Any]]:
        chosen = [p for name, p in named if (p.ndim == 2 and ".layer" in name) == of_matrices]
        parts = [([p for p in chosen if (id(p) in is_slow) == s], rate * (0.3 if s else 1.0)) for s in (False, True)]
        return [{"params": params, "lr": lr} for params, lr in parts if params]

    return [
        torch.optim.AdamW(groups(False, lr), weight_decay=weight_decay),
        torch.optim.Muon(groups(True, 10 * lr), weight_decay=weight_decay),
    ]


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
    optimizers: list[torch.optim.Optimizer],
    *,
    clipped: Iterable[nn.Parameter] = (),
    after: Callable[[], object] | None = None,
    every: int = 100,
) -> tuple[list[float], int]:
    """The training loop of every model here.

    Returns the losses, and CPU seconds.
    """
    schedulers = [one_cycle(optimizer, steps) for optimizer in optimizers]
    clipped = list(clipped)
    start = time.process_time()
    losses: list[float] = []
    for step in range(steps):
        loss = loss_of()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        if clipped:
            nn.utils.clip_grad_norm_(clipped, 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        if after is not None:
            after()
        losses.append(loss.item())
        if step % every == 0:
            mean, seconds = np.mean(losses[-every:]), time.process_time() - start
            print(f"{title} {step:5d} loss {mean:.3f} cpu_s {seconds:.0f}", flush=True)
    return losses, round(time.process_time() - start)


def augment(pixels: Tensor, rng: np.random.Generator, largest: int = 2) -> Tensor:
    """Move a batch of images by a few pixels, the same for all, and change the light of each; edges repeat."""
    padded = F.pad(pixels, (largest,) * 4, mode="replicate")
    y, x = rng.integers(2 * largest + 1, size=2)
    moved = padded[..., y : y + pixels.shape[-2], x : x + pixels.shape[-1]]
    light = torch.from_numpy(rng.uniform(0.85, 1.15, (len(pixels), 3, 1, 1)).astype(np.float32))
    return ((moved + 1) * light - 1).clamp(-1, 1)


def _in_cells(scenes: list[Scene]) -> dict[str, Tensor]:
    """Kind, colour and orientation of the thing in each cell.

    Indices `(B, 9)`; in an empty cell `second`, the kind, is 0, and the others are -100.
    """
    found = {"second": torch.zeros(len(scenes), 9, dtype=torch.long)}
    found |= {name: torch.full((len(scenes), 9), -100) for name in ("colour", "orientation")}
    for row, scene in enumerate(scenes):
        facts = scene.facts
        main = {"second": facts.kind, "colour": facts.colour, "orientation": facts.orientation}
        cells = [(scene.row, scene.column + i, main) for i in range(facts.count)]
        if (second := scene.second_cell()) is not None:
            look = {"second": facts.second, "colour": facts.second_colour, "orientation": "upright"}
            cells.append((*second, look))
        for y, x, look in cells:
            for name, value in look.items():
                found[name][row, 3 * y + x] = HEADS_OF[name].index(value)
    return found


def learn_facts(
    tower: nn.Module,
    pool: ScenePool,
    names: tuple[str, ...],
    width: int,
    seed: int,
    steps: int,
    log: dict[str, Any],
) -> None:
    """Teach a vision tower to see, with linear heads that are discarded: facts from its pooled output, things from its patches.

    The tower's `pooler_output` is `(B, width)`; the last nine vectors of its `last_hidden_state` belong to the cells.
    `log` receives the accuracy per fact on 1,000 fresh scenes, and CPU seconds.
    """
    rng = np.random.default_rng((seed, 0))
    heads = nn.ModuleDict({name: nn.Linear(width, len(HEADS_OF[name])) for name in names})
    in_cells = _in_cells(pool.scenes)
    if "orientation" not in names:
        del in_cells["orientation"]
    cells = nn.ModuleDict({name: nn.Linear(width, len(HEADS_OF[name])) for name in in_cells})

    def targets(scenes: list[Scene]) -> dict[str, Tensor]:
        return {name: torch.tensor([HEADS_OF[name].index(getattr(s.facts, name)) for s in scenes]) for name in names}

    pooled_targets = targets(pool.scenes)

    def loss_of() -> Tensor:
        rows = rng.choice(len(pool.scenes), 128, replace=False)
        _, pixels = pool.take(rows)
        out = tower(pixel_values=augment(pixels, rng))
        patches = out.last_hidden_state[:, -9:]
        seen = [F.cross_entropy(heads[n](out.pooler_output), t[rows]) for n, t in pooled_targets.items()]
        seen += [
            (4 if name == "second" else 1) * F.cross_entropy(cells[name](patches).flatten(0, 1), t[rows].flatten())
            for name, t in in_cells.items()
        ]
        return torch.stack(seen).sum()

    start = time.process_time()
    fit(
        "facts",
        steps,
        loss_of,
        make_optimizers(tower, 2e-3, 0.01, heads, cells),
        clipped=tower.parameters(),
        every=250,
    )
    scenes, pixels = ScenePool(10_000 + seed, 250).take(np.arange(1000))
    with torch.no_grad():
        out = tower(pixel_values=pixels)
        accuracy = {
            n: (heads[n](out.pooler_output).argmax(-1) == t).float().mean().item() for n, t in targets(scenes).items()
        }
        kinds = _in_cells(scenes)["second"]
        right = cells["second"](out.last_hidden_state[:, -9:]).argmax(-1) == kinds
        accuracy["kind in its cell"] = right[kinds > 0].float().mean().item()
    log["fact_accuracy"] = {n: round(a, 4) for n, a in accuracy.items()}
    log["facts_cpu_s"] = round(time.process_time() - start)
    print(log, flush=True)
