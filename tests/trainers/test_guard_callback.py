"""GuardCallback: warn, stop, or roll back to the newest good checkpoint."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_captionrl.trainers.guard import GuardCallback, GuardThresholds
from tests.text.test_degenerate_captions import GOOD, HACKED


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return {"loss": ((self.weight - x) ** 2).mean()}


class Speaker(TrainerCallback):
    """Replaces the trainer: passes captions to the guard, good ones first."""

    def __init__(self, guard, captions_of):
        self.guard, self.captions_of = guard, captions_of

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.guard.observe(self.captions_of(state.global_step + 1))


def make_trainer(folder, action, hacked_from, *, window=2, max_steps=8, hacked_until=99, **more):
    callback = GuardCallback(GuardThresholds(window=window), action)
    bad = lambda step: [HACKED if hacked_from <= step < hacked_until else GOOD]  # noqa: E731
    arguments = {"save_steps": 1, "per_device_train_batch_size": 1, "learning_rate": 0.1, "report_to": [], **more}
    trainer = Trainer(
        Line(),
        TrainingArguments(str(folder), max_steps=max_steps, use_cpu=True, disable_tqdm=True, **arguments),
        train_dataset=[{"x": torch.full((2,), float(i))} for i in range(1, 9)],
        callbacks=[Speaker(callback, bad), callback],
    )
    callback.load = trainer._load_from_checkpoint
    return trainer, callback


def test_rollback_loads_the_newest_good_checkpoint(tmp_path, caplog):
    trainer, callback = make_trainer(tmp_path, "rollback", hacked_from=4)
    with caplog.at_level(logging.WARNING, logger="hf_captionrl"):
        trainer.train()
    # The window of two is bad at step 4 already: its mean is .5.
    assert trainer.state.global_step == 4
    assert callback.rolled_back_to == str(tmp_path / "checkpoint-3")
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert torch.equal(trainer.model.weight.detach(), saved["weight"])
    assert not torch.equal(saved["weight"], load_file(tmp_path / "checkpoint-2" / "model.safetensors")["weight"])
    assert not (tmp_path / "checkpoint-4").exists()
    assert "checkpoint-3" in caplog.text
    assert HACKED in caplog.text


def test_another_run_of_the_same_trainer_saves_again(tmp_path):
    trainer, callback = make_trainer(
        tmp_path, "rollback", 10, max_steps=-1, num_train_epochs=3, save_strategy="epoch", hacked_until=11
    )
    trainer.train()
    assert callback.rolled_back_to is not None
    trainer.train()  # from step 1 again, hacked at step 10 again
    assert callback.rolled_back_to == str(tmp_path / "checkpoint-8")
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert callback.rolled_back_to is None


@pytest.mark.parametrize("hacked_from", [10, 12])
def test_rollback_prevents_the_save_at_the_end_of_the_epoch(tmp_path, hacked_from):
    """After a stop the Trainer ends the epoch, and saves if it saves every epoch (8 steps here)."""
    trainer, callback = make_trainer(
        tmp_path, "rollback", hacked_from, max_steps=-1, num_train_epochs=3, save_strategy="epoch"
    )
    trainer.train()
    assert trainer.state.global_step == hacked_from
    assert callback.rolled_back_to == str(tmp_path / "checkpoint-8")
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-8"]


def test_rollback_skips_removed_checkpoints(tmp_path):
    trainer, callback = make_trainer(tmp_path, "rollback", hacked_from=6, window=4)
    # One hacked step of four is above the limit, also in the newest quarter.
    trainer.add_callback(Remover(tmp_path / "checkpoint-5"))
    trainer.train()
    assert callback.rolled_back_to == str(tmp_path / "checkpoint-4")


class Remover(TrainerCallback):
    def __init__(self, folder):
        self.folder = folder

    def on_save(self, args, state, control, **kwargs):
        if self.folder.exists():
            self.folder.rename(self.folder.with_name("moved"))


@pytest.mark.parametrize("save_steps", [1, 100])
def test_rollback_without_a_good_checkpoint_stops_training(tmp_path, caplog, save_steps):
    trainer, callback = make_trainer(tmp_path, "rollback", hacked_from=1, save_steps=save_steps)
    with caplog.at_level(logging.WARNING, logger="hf_captionrl"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert callback.rolled_back_to is None
    assert "No checkpoint was saved while the captions were good" in caplog.text
    assert trainer.model.weight.abs().sum() > 0


def test_guard_stops_training_without_rollback(tmp_path, caplog):
    trainer, callback = make_trainer(tmp_path, "stop", hacked_from=4)
    with caplog.at_level(logging.WARNING, logger="hf_captionrl"):
        trainer.train()
    assert trainer.state.global_step == 4
    assert callback.rolled_back_to is None
    assert "Training stops" in caplog.text


def test_warn_logs_once_per_broken_limit(tmp_path, caplog):
    trainer, _ = make_trainer(tmp_path, "warn", hacked_from=3, hacked_until=6, save_steps=100)
    with caplog.at_level(logging.WARNING, logger="hf_captionrl"):
        trainer.train()
    assert trainer.state.global_step == 8
    assert sum("seems to be hacked" in r.getMessage() for r in caplog.records) == 1


def test_ordinary_captions_do_not_stop_training(tmp_path, caplog):
    trainer, callback = make_trainer(tmp_path, "rollback", hacked_from=99, save_steps=100)
    with caplog.at_level(logging.WARNING, logger="hf_captionrl"):
        trainer.train()
    assert trainer.state.global_step == 8
    assert callback.rolled_back_to is None
    assert "hacked" not in caplog.text


def test_a_resumed_run_knows_its_good_checkpoints(tmp_path):
    first, before = make_trainer(tmp_path, "rollback", hacked_from=99, max_steps=3)
    states = {}
    first._save_optimizer_and_scheduler = _saving(first, before, states)
    first.train()
    second, after = make_trainer(tmp_path, "rollback", hacked_from=4)
    after.load_state_dict(json.loads(json.dumps(states[3])))
    assert 3 not in after.state_dict()["good"]  # saved before it was known to be good
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert second.state.global_step == 4
    assert after.rolled_back_to == str(tmp_path / "checkpoint-3")


def _saving(trainer, callback, states):
    """Save the callback's state before on_save, as the trainer does."""
    save = trainer._save_optimizer_and_scheduler

    def wrapped(output_dir):
        states[trainer.state.global_step] = callback.state_dict()
        save(output_dir)

    return wrapped
