"""The epoch of the bag curriculum is set only by a callback, not by Trainer or accelerate."""

import numpy as np
import pytest

from hf_captionrl.trainers.caption_rl_trainer import CurriculumCallback
from tests.trainers.grpo_worker import make_trainer
from tests.trainers.policies import SAMPLED

from .rl_step import build

BAGS = {"bags": True, "bag_schedule": {1: 2, 2: 4}, **SAMPLED, "max_completion_length": 3}


def self_retrieval(folder, scenes, **settings):
    """Two rollouts per epoch; bags of 2 in the first epoch, of 4 later."""
    return build(folder, scenes["train"], **{**BAGS, "max_steps": 4, **settings})


def grpo(folder, scenes, **settings):
    """Likewise."""
    return make_trainer(
        str(folder),
        per_device_train_batch_size=8,
        bag_schedule={1: 2, 2: 4},
        max_completion_length=3,
        max_steps=4,
        trainer_arguments={"neighbours": np.stack([np.r_[0:row, row + 1 : 8] for row in range(8)])},
        **settings,
    )


def bag_sizes(trainer, **arguments):
    sizes = []
    maker = getattr(trainer, "rollouts", trainer)  # TRL's trainer makes its rollouts itself
    inner = maker.reward_context

    def spy(*given):
        context = inner(*given)
        sizes.append(context.bag_size)
        return context

    maker.reward_context = spy
    trainer.train(**arguments)
    return sizes


@pytest.mark.parametrize("make", [self_retrieval, grpo])
def test_epoch_is_set_only_by_the_callback(tmp_path, scenes, make):
    assert bag_sizes(make(tmp_path / "with", scenes)) == [2, 2, 4, 4]
    without = make(tmp_path / "without", scenes)
    without.remove_callback(CurriculumCallback)
    assert bag_sizes(without) == [2, 2, 2, 2]


def test_epoch_is_set_when_a_run_resumes_within_it(tmp_path, scenes):
    saving = {"save_strategy": "steps", "save_steps": 3}
    self_retrieval(tmp_path, scenes, **saving, max_steps=3).train()
    assert bag_sizes(self_retrieval(tmp_path, scenes, **saving, max_steps=5), resume_from_checkpoint=True) == [4, 4]
