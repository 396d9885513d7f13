"""A linear model with `ExactResumeTrainer`, which writes the checkpoints of a real Trainer in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from hf_captionrl.trainers.checkpoints import ExactResumeArguments, ExactResumeTrainer


class KilledError(Exception):
    """Ends a run at any point, like a kill."""


class KillAt(TrainerCallback):
    """Ends training after a step, before its checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KilledError


class Linear(nn.Module):
    """Regression on noise, so that every batch moves the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layer(x)
        return {"loss": ((found[:, 0] - labels) ** 2).mean(), "logits": found}


class ToyTrainer(ExactResumeTrainer):
    """A plain Trainer with `ExactResumeTrainer`."""


@dataclass
class ToyConfig(ExactResumeArguments, TrainingArguments):
    """Its arguments."""


def toy(
    folder: Path,
    *,
    kill_at: int | None = None,
    data: int = 0,
    callbacks: Any = (),
    optimizer: Any = None,
    **settings: Any,
) -> Any:
    """A trainer of 6 steps with a checkpoint every 2 steps; another `data` gives different data, and so another run."""
    drawn = torch.Generator().manual_seed(data)
    rows = [{"x": torch.randn(3, generator=drawn), "labels": torch.randn((), generator=drawn)} for _ in range(24)]
    torch.manual_seed(0)
    common = {
        "max_steps": 6,
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "logging_steps": 1,
    }
    kills = [] if kill_at is None else [KillAt(kill_at)]
    config = ToyConfig(str(folder), **{**common, **settings})
    model = Linear()
    sets = {"train_dataset": rows, "eval_dataset": rows[:4]}
    own = (None if optimizer is None else optimizer(model.parameters()), None)
    return ToyTrainer(model, config, **sets, callbacks=[*kills, *callbacks], optimizers=own)
