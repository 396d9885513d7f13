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


def build(folder, dataset, *, policy=None, kill_at=None, bags=False, num_neighbours=8, **settings):
    """A trainer of the embedded captioner; the settings are those of the trainer and of its configuration."""
    own = {"scorer", "held_out_scorer", "peft_config", "guard_thresholds", "eval_dataset"} & settings.keys()
    given = {name: settings.pop(name) for name in own}
    if kill_at:  # as if the power had failed
        given["callbacks"] = [At(kill_at, lambda: os.kill(os.getpid(), signal.SIGKILL))]
    if bags:
        given["neighbours"] = neighbours(len(dataset), num_neighbours)
    given.setdefault("scorer", load_scorer(model_path("scenes:clip-reward")))
    args = SelfRetrievalConfig(str(folder), **{**GREEDY, **settings})
    return SelfRetrievalTrainer(policy or captioner(), args=args, train_dataset=dataset, **given)


def train(folder, dataset, *, resume=False, **arguments):
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
