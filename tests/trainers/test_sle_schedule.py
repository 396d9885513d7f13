"""SLE's schedule: the switch from cross-entropy to rewards, its learning rate, resuming, and invalid settings."""

import pytest
import torch

from hf_captionrl.trainers import SLEConfig, SLETrainer
from tests.tolerances import resolution
from tests.trainers.one_step import captioner, largest_difference
from tests.trainers.rl_step import SLE
from tests.trainers.rl_step import train_sle as train

from .one_step import train as train_smile
from .one_step import weights


def test_the_first_epochs_are_maximum_likelihood(tmp_path, scenes):
    ours = train(tmp_path / "a", scenes["train"], rl_start_epoch=1, max_steps=2)
    theirs = train_smile(tmp_path / "b", scenes["train"], mle_weight=1.0, per_device_train_batch_size=16)
    # An epoch is two steps of 8 images; one step of all 16 does not depend on their order.
    whole = train(tmp_path / "c", scenes["train"], rl_start_epoch=1, per_device_train_batch_size=16)
    assert largest_difference(weights(whole), weights(theirs)) < resolution(1)
    assert largest_difference(weights(ours), weights(theirs)) > 1e-3


SWITCHED = {
    "rl_start_epoch": 1,
    "xe_learning_rate": 3e-4,
    "learning_rate": 1e-4,
    "optim": "adamw_torch",
    "max_steps": 5,
    "save_strategy": "steps",
    "logging_strategy": "steps",
    "logging_steps": 1,
    "num_generations": 3,
}


def test_the_switch_comes_after_whole_epochs_with_its_learning_rate(tmp_path, scenes):
    trainer = train(tmp_path, scenes["train"], **{**SWITCHED, "save_strategy": "no"})
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert ["reward" in entry for entry in logged] == [False, False, True, True, True]
    assert [entry["learning_rate"] for entry in logged] == pytest.approx([3e-4, 3e-4, 1e-4, 1e-4, 1e-4])


@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_resume_is_bit_exact_before_at_and_after_the_switch(tmp_path, scenes, at):
    through = train(tmp_path / "through", scenes["train"], **{**SWITCHED, "save_strategy": "no"})
    train(tmp_path / "cut", scenes["train"], **{**SWITCHED, "max_steps": at, "save_steps": at})
    resumed = train(tmp_path / "cut", scenes["train"], resume=True, **{**SWITCHED, "save_steps": at})
    assert resumed.state.global_step == 5
    assert largest_difference(weights(resumed), weights(through)) == 0.0
    ours, theirs = (t.optimizer.state_dict() for t in (resumed, through))
    assert all(torch.equal(ours["state"][i]["exp_avg"], theirs["state"][i]["exp_avg"]) for i in ours["state"])
    assert ours["param_groups"][0]["lr"] == theirs["param_groups"][0]["lr"]


def test_two_learning_rates_need_a_schedule_of_the_step(tmp_path, scenes):
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}
    config = SLEConfig(str(tmp_path), **{**SLE, **plateau, "rl_start_epoch": 1, "xe_learning_rate": 1e-4})
    with pytest.raises(ValueError, match="function of the step"):
        SLETrainer(captioner(), config, scenes["train"], scenes["validation"]).train()
