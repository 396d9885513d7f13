"""Several iterations over a rollout: a run resumes bit-exactly from every checkpoint, also between two iterations."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from hf_captionrl.trainers import CaptionRLConfig, CaptionRLTrainer
from tests.processes import run_in_processes
from tests.trainers.bits import bits, different
from tests.trainers.policies import SAMPLED, captioner

from .rl_step import GREEDY, build

STEPS = {
    **SAMPLED,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 2,
    "num_iterations": 3,
    "max_completion_length": 5,
    "baseline": "leave_one_out",
    "beta": 0.1,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "max_steps": 8,
    "logging_strategy": "steps",
    "logging_steps": 1,
}
SAVED = {**STEPS, "save_strategy": "steps", "save_steps": 1}


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def through(tmp_path_factory, scenes):
    trainer = build(tmp_path_factory.mktemp("through"), scenes["train"], **SAVED)
    trainer.train()
    return trainer


def checkpoint(trainer, step):
    return str(Path(trainer.args.output_dir) / f"checkpoint-{step}")


@pytest.mark.parametrize("step", [1, 2, 3, 5, 8])
def test_resumed_run_ends_with_the_same_bits(tmp_path, scenes, through, step):
    resumed = build(tmp_path, scenes["train"], **{**SAVED, "save_steps": 100})
    written = []
    roll_out = resumed.rollouts.roll_out
    resumed.rollouts.roll_out = lambda *given: written.append(resumed.state.global_step) or roll_out(*given)
    resumed.train(resume_from_checkpoint=checkpoint(through, step))
    assert resumed.state.global_step == 8
    assert written == [at for at in (0, 3, 6) if at >= step]  # no new captions between two iterations
    assert not different(bits(resumed), bits(through))
    assert losses(resumed) == losses(through)


def test_trained_vision_tower_resumes_too(tmp_path, scenes):
    """Rollouts then hold pixels, instead of the features of a frozen tower."""
    settings = {**SAVED, "freeze_vision_tower": False, "max_steps": 5}
    alone = build(tmp_path / "through", scenes["train"], **settings)
    alone.train()
    resumed = build(tmp_path / "resumed", scenes["train"], **settings)
    resumed.train(resume_from_checkpoint=checkpoint(alone, 2))
    assert not different(bits(resumed), bits(alone))


def test_rollout_is_stored_only_between_iterations(through):
    folder = Path(through.args.output_dir)
    stored = {step for step in range(1, 9) if list((folder / f"checkpoint-{step}").glob("caption_rl_rollout_*"))}
    assert stored == {1, 2, 4, 5, 7, 8}


def test_checkpoint_without_its_rollout_generates_a_new_one(tmp_path, scenes, through, caplog):
    """Like checkpoints of earlier versions, or of another number of processes."""
    copy = Path(shutil.copytree(checkpoint(through, 2), tmp_path / "checkpoint-2"))
    state = copy / "caption_rl_state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "rollout": 2}))
    resumed = build(tmp_path, scenes["train"], **{**SAVED, "save_steps": 100})
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=str(copy))
    assert "New captions are generated" in caplog.text
    assert resumed.state.global_step == 8
    assert different(bits(resumed), bits(through))


@pytest.mark.parametrize("strategy", ["epoch", "best"])
def test_other_save_strategies_resume_between_iterations(tmp_path, scenes, strategy):
    def make(folder, max_steps):
        settings = {**GREEDY, **STEPS, "save_strategy": strategy, "max_steps": max_steps}
        if strategy == "best":  # the first evaluation is the best so far, between two iterations
            settings |= {"metric_for_best_model": "length", "greater_is_better": True, "eval_strategy": "steps"}
            settings |= {"eval_steps": 1, "generation_num_beams": 1, "generation_max_new_tokens": 4}
        args = CaptionRLConfig(str(folder), **settings)
        return CaptionRLTrainer(
            captioner(), "repetition", args, scenes["train"], scenes["validation"].select(range(2))
        )

    make(tmp_path / "stopped", 2).train()
    first = min((tmp_path / "stopped").glob("checkpoint-*"))
    assert first.name == {"epoch": "checkpoint-2", "best": "checkpoint-1"}[strategy]
    resumed, through = make(tmp_path / "resumed", 4), make(tmp_path / "through", 4)
    resumed.train(resume_from_checkpoint=str(first))
    through.train()
    assert not different(bits(resumed), bits(through))


def _run(folder: str) -> None:
    from hf_captionrl.scenes import load_scenes

    data = load_scenes(num_train=16, num_validation=1, num_test=0)["train"]
    settings = {**SAVED, "per_device_train_batch_size": 2, "max_steps": 5}
    trainer = build(Path(folder) / "through", data, **settings)
    trainer.train()
    resumed = build(Path(folder) / "resumed", data, **settings)
    resumed.train(resume_from_checkpoint=str(Path(folder) / "through" / "checkpoint-2"))
    assert not different(bits(resumed), bits(trainer))
    assert torch.distributed.get_world_size() == 2


def test_two_processes_resume_between_iterations(tmp_path):
    run_in_processes(2, _run, str(tmp_path), folder=tmp_path)
