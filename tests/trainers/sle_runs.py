"""Runs of SLE on a small piece of the embedded world."""

import torch

from hf_captionrl.captioners import load_captioner
from hf_captionrl.trainers import SLEConfig, SLETrainer
from hf_captionrl.utils.model_files import model_path

from .one_step import PLAIN_SGD

SLE = {**PLAIN_SGD, "per_device_train_batch_size": 8, "max_completion_length": 10, "guard": "off"}


def captioner():
    return load_captioner(model_path("scenes:blip-mle"), dtype=torch.float32)


def build(folder, dataset, *, trainer_arguments=None, **arguments):
    config = SLEConfig(str(folder), **{**SLE, **arguments})
    return SLETrainer(captioner(), config, dataset, **(trainer_arguments or {}))


def train(folder, dataset, *, resume=False, **arguments):
    trainer = build(folder, dataset, **arguments)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer
