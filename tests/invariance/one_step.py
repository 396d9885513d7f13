"""One optimizer step of SMILE, SLE and SR on the same images and the same captions, however they are split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import TrainerCallback

from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.captioner import Completions
from hf_captionrl.losses import IGNORE_INDEX
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import (
    SelfRetrievalConfig,
    SelfRetrievalTrainer,
    SLEConfig,
    SLETrainer,
    SmileConfig,
    SmileTrainer,
)
from hf_captionrl.trainers.caption_rl_trainer import reference_ids
from hf_captionrl.utils.model_files import model_path
from tests.trainers.one_step import PLAIN_SGD

IMAGES = 8
KINDS = ("smile", "sle", "sr", "sr that sees its own process only")
"""The last is the planted fault."""


def data() -> Any:
    """Eight images."""
    return load_scenes(num_train=IMAGES, num_validation=1, num_test=0)["train"]


class Gradients(TrainerCallback):
    """Keeps what the optimizer was given."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        inner = getattr(model, "module", model)
        self.found = {n: p.grad.detach().clone() for n, p in inner.named_parameters() if p.grad is not None}


def build(kind: str, folder: Path, batch: int, accumulation: int) -> Any:
    """The trainer of one step on all images."""
    settings = {
        **PLAIN_SGD,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "feature_cache_dir": str(folder / "cache"),
    }
    captioner, out = load_captioner(model_path("scenes:blip-mle"), dtype=torch.float32), str(folder / "out")
    if kind == "smile":
        return SmileTrainer(captioner, SmileConfig(out, **settings), data())
    settings |= {"max_completion_length": 12, "guard": "off"}
    if kind == "sle":
        return SLETrainer(captioner, SLEConfig(out, num_generations=3, **settings), data())
    scorer = load_scorer(model_path("scenes:clip-reward"))
    args = SelfRetrievalConfig(out, num_generations=2, baseline="leave_one_out", **settings)
    return SelfRetrievalTrainer(captioner, scorer, args, data())


def force(trainer: Any, seen: dict[str, Any]) -> None:
    """Let captions be given by the row of their image instead of drawn, and keep rows and rewards.

    Caption g of row i is a reference of row i + 3g: other words than the image's own, a set each, of several lengths.
    """
    references = [list(row["captions"]) for row in trainer.rollouts.images]
    captioner, G = trainer.captioner, trainer.args.num_generations
    rolled, record, rows = trainer.rollouts.roll_out, trainer.monitor.record, []

    def text(row: int, g: int) -> str:
        mine = references[(row + 3 * g) % IMAGES]
        return mine[g % len(mine)]

    def write(images, **overrides):
        sampled = [[text(row, g) for g in range(G)] for row in rows]
        greedy = [[text(row, 5 * (G - 1))] for row in rows] if overrides.get("greedy_first") else [[] for _ in rows]
        captions = [caption for pair in zip(greedy, sampled, strict=True) for part in pair for caption in part]
        ids, mask = reference_ids(captioner, captions)
        return Completions(ids=ids, captions=captions, ended=mask.sum(1) > 0, mask=mask)

    def roll_out(batches, *state):
        rows[:] = [int(row) for batch in batches for row in batch["rows"]]
        seen["micro_batches"] = [len(batch["rows"]) for batch in batches]
        return rolled(batches, *state)

    def keep(context, rewards, advantages):
        for i, row in enumerate(rows):
            here = slice(i * G, (i + 1) * G)
            seen["rewards"][str(row)] = rewards[here].tolist()
            seen["advantages"][str(row)] = advantages[here].tolist()
        return record(context, rewards, advantages)

    trainer.rollouts.generate, trainer.rollouts.roll_out, trainer.monitor.record = write, roll_out, keep


def step(kind: str, folder: Path, batch: int, accumulation: int) -> None:
    """Train one step; leaves `rank.json` and, of the first process, `gradients.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    trainer = build(kind, folder, batch, accumulation)
    seen: dict[str, Any] = {"rewards": {}, "advantages": {}, "micro_batches": []}
    gradients = Gradients()
    trainer.add_callback(gradients)
    if kind == "smile":
        loss = trainer.compute_loss

        def counted(model, inputs, **kwargs):
            seen["micro_batches"].append(len(inputs["labels"]))
            seen["tokens"] = seen.get("tokens", 0) + int((inputs["labels"] != IGNORE_INDEX).sum())
            return loss(model, inputs, **kwargs)

        trainer.compute_loss = counted
    else:
        force(trainer, seen)
    if kind == KINDS[-1]:
        inner = trainer.rollouts.reward_context

        def alone(micro_batches, *rest):
            context = inner(micro_batches, *rest)
            rows = torch.cat([inputs["rows"] for inputs in micro_batches])
            context.candidates, context.positions = rows, torch.arange(len(rows))
            return context

        trainer.rollouts.reward_context = alone
    trainer.train()
    seen["processes"] = trainer.accelerator.num_processes
    (folder / f"{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))
    if trainer.accelerator.is_main_process:
        save_file(gradients.found, folder / "gradients.safetensors")


def steps(folder: str, cuts: list[tuple[str, int]], processes: int) -> None:
    """Steps of several trainers and accumulations, one after the other in one group of processes."""
    for kind, accumulation in cuts:
        step(
            kind, place(Path(folder), kind, processes, accumulation), IMAGES // processes // accumulation, accumulation
        )


def place(folder: Path, kind: str, processes: int, accumulation: int) -> Path:
    """Where a step leaves what it found."""
    return folder / f"{kind.replace(' ', '-')}-{processes}-{accumulation}"
