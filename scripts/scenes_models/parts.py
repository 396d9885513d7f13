"""What the models of the embedded world share: tokenizer, pixels, captions to learn from, facts learnt first."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertTokenizer, GPT2Config

from hf_captionrl.scenes.grammar import Annotator, annotate, full_caption
from hf_captionrl.scenes.render import render_scene
from hf_captionrl.scenes.vocabulary import vocabulary
from hf_captionrl.scenes.world import (
    BACKGROUNDS,
    COUNTS,
    EMOJI_KINDS,
    ORIENTATIONS,
    POSITIONS,
    RELATIONS,
    SIZES,
    Facts,
    Scene,
    sample_scene,
    vary_scene,
)

CHECKPOINTS = Path(__file__).parents[2] / "hf_captionrl" / "scenes" / "checkpoints"
HIDDEN, HEADS, MLP = 128, 4, 256
MEAN = STD = [0.5, 0.5, 0.5]
FACT_VALUES: dict[str, tuple[Any, ...]] = {
    "kind": EMOJI_KINDS,
    "count": COUNTS,
    "size": SIZES,
    "orientation": ORIENTATIONS,
    "position": POSITIONS,
    "background": BACKGROUNDS,
    "second": ("", *EMOJI_KINDS),
    "relation": ("", *RELATIONS),
}


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


def to_pixels(scenes: list[Scene]) -> Tensor:
    """Scenes as the image processors would give them.

    Returns:
        `torch.Tensor` of shape `(B, 3, IMAGE_SIZE, IMAGE_SIZE)`: In [-1, 1].
    """
    array = np.stack([np.asarray(render_scene(scene)) for scene in scenes])
    return torch.from_numpy(array).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


def random_caption(rng: np.random.Generator, facts: Facts) -> str:
    """A true caption of any verbosity in any annotator's words."""
    small, large = (("small", "large"), ("little", "big"), ("tiny", "huge"))[int(rng.integers(3))]
    generic = float(rng.random() < 0.25)
    return annotate(rng, facts, Annotator(float(rng.random()), generic, small, large, bool(rng.random() < 0.3)))


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


def learn_facts(tower: nn.Module, seed: int, steps: int, log: dict[str, Any]) -> None:
    """Teach a vision tower to see: linear heads for every fact on its pooled output.

    Args:
        tower (`nn.Module`): Called with `pixel_values`, returns `pooler_output` of shape `(B, HIDDEN)`.
        log (`dict`): Receives accuracy per fact on 1,000 fresh scenes, and CPU seconds.
    """
    rng = np.random.default_rng((seed, 0))
    heads = nn.ModuleDict({name: nn.Linear(HIDDEN, len(values)) for name, values in FACT_VALUES.items()})
    optimizer = torch.optim.AdamW([*tower.parameters(), *heads.parameters()], lr=2e-3, weight_decay=0.01)

    def targets(scenes: list[Scene]) -> dict[str, Tensor]:
        return {
            name: torch.tensor([values.index(getattr(s.facts, name)) for s in scenes])
            for name, values in FACT_VALUES.items()
        }

    def loss_of() -> Tensor:
        scenes = [sample_scene(rng) for _ in range(64)]
        pooled = tower(pixel_values=to_pixels(scenes)).pooler_output
        return torch.stack([F.cross_entropy(heads[n](pooled), t) for n, t in targets(scenes).items()]).sum()

    start = time.process_time()
    fit("facts", steps, loss_of, optimizer, clipped=tower.parameters(), every=250)
    scenes = [sample_scene(rng) for _ in range(1000)]
    with torch.no_grad():
        pooled = tower(pixel_values=to_pixels(scenes)).pooler_output
        accuracy = {n: (heads[n](pooled).argmax(-1) == t).float().mean().item() for n, t in targets(scenes).items()}
    log["fact_accuracy"] = {n: round(a, 4) for n, a in accuracy.items()}
    log["facts_cpu_s"] = round(time.process_time() - start)
    print(log, flush=True)


def caption_batches(seed: int) -> Iterator[tuple[list[Scene], list[str]]]:
    """Batches that only details can solve: 32 scenes, each with three near-duplicates; half of the captions are full.

    Returns:
        `Iterator`: Scenes and captions, 128 of each.
    """
    rng = np.random.default_rng((seed, 1))
    while True:
        scenes: list[Scene] = []
        for _ in range(32):
            base = sample_scene(rng)
            scenes += [base, *(vary_scene(rng, base) for _ in range(3))]
        yield (
            scenes,
            [full_caption(s.facts) if rng.random() < 0.5 else random_caption(rng, s.facts) for s in scenes],
        )
