"""Trains a few steps with rewards and saves the weights; also run by torchrun."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SelfRetrievalConfig, SelfRetrievalTrainer, SLEConfig, SLETrainer
from hf_captionrl.utils.model_files import model_path

from .one_step import PLAIN_SGD, At, captioner, weights

GREEDY = {**PLAIN_SGD, "do_sample": False, "max_completion_length": 12, "guard": "off"}
IMAGES = 16


def neighbours(number=IMAGES, k=8):
    """Made-up ranks: the next images in the data set."""
    rows = torch.arange(number)[:, None]
    return (rows + torch.arange(1, k + 1)) % number


def build(
    folder,
    dataset,
    *,
    policy=None,
    scorer=None,
    held_out_scorer=None,
    kill_at=None,
    bags=False,
    num_neighbours=8,
    peft_config=None,
    guard_thresholds=None,
    eval_dataset=None,
    **kw,
):
    """A trainer of the embedded captioner."""
    return SelfRetrievalTrainer(
        policy or captioner(),
        scorer or load_scorer(model_path("scenes:clip-reward")),
        SelfRetrievalConfig(str(folder), **{**GREEDY, **kw}),
        dataset,
        eval_dataset,
        held_out_scorer=held_out_scorer,
        neighbours=neighbours(len(dataset), num_neighbours) if bags else None,
        peft_config=peft_config,
        guard_thresholds=guard_thresholds,
        # As if the power had failed.
        callbacks=[At(kill_at, lambda: os.kill(os.getpid(), signal.SIGKILL))] if kill_at else None,
    )


def train(folder, dataset, *, resume=False, **arguments):
    """Train and return the trainer."""
    trainer = build(folder, dataset, **arguments)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


SLE = {**PLAIN_SGD, "per_device_train_batch_size": 8, "max_completion_length": 10, "guard": "off"}


def build_sle(folder, dataset, *, trainer_arguments=None, **arguments):
    config = SLEConfig(str(folder), **{**SLE, **arguments})
    return SLETrainer(captioner(), config, dataset, **(trainer_arguments or {}))


def train_sle(folder, dataset, *, resume=False, **arguments):
    trainer = build_sle(folder, dataset, **arguments)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


if __name__ == "__main__":
    output, arguments = Path(sys.argv[1]), json.loads(sys.argv[2])
    scenes = load_scenes(num_train=IMAGES, num_validation=12, num_test=0)["train"]
    trained = train(output.parent, scenes, **arguments)
    if trained.accelerator.is_main_process:
        save_file(weights(trained), output)
