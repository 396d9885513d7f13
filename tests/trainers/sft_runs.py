"""Trainers of a tiny LLaMA on a few documents."""

from __future__ import annotations

import copy

import datasets
import torch
from torch import Tensor

from hf_captionrl.trainers import SmileSFTConfig, SmileSFTTrainer
from tests.trainers.conftest import ROWS


def make(parts, folder, *, cls=SmileSFTTrainer, config=SmileSFTConfig, rows=ROWS, peft=None, **settings):
    model, tokenizer = parts
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 5,
        "max_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_length": 128,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        **settings,
    }
    return cls(
        copy.deepcopy(model),
        config(**arguments),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=copy.deepcopy(tokenizer),
        peft_config=peft,
    )


def batch_of(trainer) -> dict[str, Tensor]:
    return next(iter(trainer.get_train_dataloader()))


def loss_eval(trainer) -> float:
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model, batch_of(trainer)))
