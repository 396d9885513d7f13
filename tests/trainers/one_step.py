"""Trains a few steps, and compares weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from hf_captionrl.captioners import load_captioner
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from hf_captionrl.utils.model_files import model_path
from tests.tiny import tiny_captioner
from tests.tolerances import assert_close

PLAIN_SGD = {
    # After one step of plain SGD the weights show the gradient; Adam would hide its scale.
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "max_steps": 1,
    "disable_tqdm": True,
    "use_cpu": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "freeze_vision_tower": True,
}


SMALL = {**PLAIN_SGD, "per_device_train_batch_size": 8, "generation_max_new_tokens": 4, "generation_num_beams": 1}


def tiny_trainer(folder, scenes, *, cls=SmileTrainer, trainer_arguments=None, **settings):
    """A trainer of a tiny BLIP; `trainer_arguments` may hold another model."""
    given = {"eval_dataset": scenes["validation"], **(trainer_arguments or {})}
    model = given.pop("model", None) or (None if "model_init" in given else tiny_captioner("blip"))
    return cls(model, SmileConfig(str(folder), **{**SMALL, **settings}), scenes["train"], **given)


def train(folder, dataset, *, model="scenes:blip-mle", peft_config=None, resume=False, captioner=None, **arguments):
    config = SmileConfig(str(folder), **{**PLAIN_SGD, **arguments})
    captioner = captioner or load_captioner(model_path(model), dtype=torch.float32)
    trainer = SmileTrainer(captioner, config, train_dataset=dataset, peft_config=peft_config)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def weights(trainer):
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def assert_one_plain_step(trained, model, loss, *, ulps):
    """The trained weights are those of one step of plain SGD along the gradient of a loss, and they moved."""
    parameters = {n: p for n, p in model.named_parameters() if "vision_model" not in n}
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    moved = 0.0
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        expected = parameter.detach() - PLAIN_SGD["learning_rate"] * gradient
        assert_close(trained[name], expected, ulps=ulps, magnitude=1, msg=name)
        moved = max(moved, gradient.abs().max().item())
    assert moved > 1e-2


class At(TrainerCallback):
    """Calls a function after a step, before its checkpoint."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


def spy_on(owner, name):
    """A list of what a method returns from now on."""
    found, method = [], getattr(owner, name)

    def spy(*given, **more):
        found.append(method(*given, **more))
        return found[-1]

    setattr(owner, name, spy)
    return found


def bits(trainer: Any) -> dict[str, torch.Tensor]:
    found = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for index, state in trainer.optimizer.state_dict()["state"].items():
        found |= {f"{index}/{name}": value.clone() for name, value in state.items()}
    return found


def different(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that differ in any bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


SAMPLED = {"do_sample": True, "per_device_train_batch_size": 8, "max_completion_length": 10}


def captioner():
    return load_captioner(model_path("scenes:blip-mle"), dtype=torch.float32)
