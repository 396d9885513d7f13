"""Checkpoints are renamed when complete, and a run resumes only from its own configuration."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

import hf_captionrl.trainers as trainers
from hf_captionrl.trainers.checkpoints import CONFIGURATION_FILE, PARTIAL, ExactResumeTrainer, has_checkpoint
from tests.processes import run_in_processes
from tests.trainers.bits import bits, different
from tests.trainers.toy import KilledError, toy


def names(folder):
    return sorted(path.name for path in Path(folder).glob("*checkpoint-*"))


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def fail_in_save(trainer, step, error):
    """The next save of this step ends with an error after its weights are written."""
    save = trainer._save_rng_state

    def interrupted(folder):
        if trainer.state.global_step == step:
            raise error
        save(folder)

    trainer._save_rng_state = interrupted
    return trainer


@pytest.mark.parametrize("at", [3, 5])
def test_a_killed_run_resumes_with_the_same_bits(tmp_path, at):
    alone = toy(tmp_path / "alone")
    alone.train()
    with pytest.raises(KilledError):
        toy(tmp_path / "killed", kill_at=at).train()
    resumed = toy(tmp_path / "killed")
    resumed.train(resume_from_checkpoint=True)
    assert not different(bits(resumed), bits(alone))
    assert losses(resumed) == losses(alone)


@pytest.mark.parametrize("error", [KilledError(), SystemExit(1), OSError(errno.ENOSPC, "No space left on device")])
def test_a_save_that_is_interrupted_leaves_no_checkpoint(tmp_path, error):
    alone = toy(tmp_path / "alone")
    alone.train()
    with pytest.raises(type(error)):
        fail_in_save(toy(tmp_path / "killed"), 4, error).train()
    assert names(tmp_path / "killed") == ["checkpoint-2"]
    assert (tmp_path / "killed" / PARTIAL).exists() == isinstance(error, SystemExit)  # a kill removes nothing
    resumed = toy(tmp_path / "killed")
    resumed.train(resume_from_checkpoint=True)
    assert not different(bits(resumed), bits(alone))
    assert not (tmp_path / "killed" / PARTIAL).exists()


def test_a_checkpoint_of_the_same_step_is_replaced_as_a_whole(tmp_path):
    toy(tmp_path).train()
    (tmp_path / "checkpoint-4" / "old").touch()
    with pytest.raises(KilledError):
        toy(tmp_path, kill_at=5, data=1).train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert not (tmp_path / "checkpoint-4" / "old").exists()
    assert (tmp_path / "checkpoint-4" / "rng_state.pth").exists()


@pytest.mark.parametrize(
    ("name", "value"), [("learning_rate", 0.01), ("seed", 7), ("lr_scheduler_type", "cosine"), ("weight_decay", 0.5)]
)
def test_a_run_of_another_configuration_does_not_resume(tmp_path, name, value):
    toy(tmp_path, max_steps=2).train()
    with pytest.raises(ValueError, match=f"another run: its {name} is"):
        toy(tmp_path, **{name: value}).train(resume_from_checkpoint=True)


def test_a_run_may_resume_with_other_lengths_logs_and_saves(tmp_path):
    alone = toy(tmp_path / "alone")
    alone.train()
    settings = {"max_steps": 4, "save_steps": 4, "logging_steps": 4, "num_train_epochs": 2}
    toy(tmp_path / "short", lr_scheduler_type="constant", **settings).train()
    longer = toy(tmp_path / "short", lr_scheduler_type="constant")
    longer.train(resume_from_checkpoint=True)
    through = toy(tmp_path / "through", lr_scheduler_type="constant")
    through.train()
    assert not different(bits(longer), bits(through))
    assert different(bits(longer), bits(alone))  # the control: another schedule is another run


def test_another_number_of_rows_or_another_trainer_does_not_resume(tmp_path):
    toy(tmp_path, max_steps=2).train()
    path = tmp_path / "checkpoint-2" / CONFIGURATION_FILE
    saved = json.loads(path.read_text())
    assert saved["rows"] == 24
    for name, value in (("rows", 8), ("trainer", "SmileTrainer"), ("alpha", 0.5)):
        path.write_text(json.dumps({**saved, name: value}))
        with pytest.raises(ValueError, match=f"another run: its {name} is"):
            toy(tmp_path).train(resume_from_checkpoint=True)


def model_only(folder):
    toy(folder, max_steps=2, save_only_model=True).train()


def pickled(folder):
    toy(folder, max_steps=2).train()
    torch.save({}, folder / "checkpoint-2" / "pytorch_model.bin")


def outside(folder):
    toy(folder, max_steps=2).train()
    index = {"weight_map": {"layer.weight": "../model.safetensors"}}
    (folder / "checkpoint-2" / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "no checkpoint"),
        (model_only, "save_only_model"),
        (pickled, "captionrl convert"),
        (outside, "model.safetensors"),
    ],
)
def test_what_no_run_resumes_from(tmp_path, make, said):
    make(tmp_path)
    with pytest.raises(ValueError, match=said):
        toy(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="checkpoint-7"):
        toy(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))


def test_the_newest_checkpoint_is_found_by_number(tmp_path):
    assert not has_checkpoint(tmp_path / "missing")
    assert not has_checkpoint(tmp_path)
    toy(tmp_path, max_steps=10, save_steps=1).train()
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-99").write_text("a file")
    assert has_checkpoint(tmp_path)
    resumed = toy(tmp_path, max_steps=11)
    resumed.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry][-2:] == [10, 11]


def test_checkpoints_of_a_plain_trainer_can_be_resumed(tmp_path):
    trainer = toy(tmp_path)
    settings = {"max_steps": 2, "save_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    Trainer(trainer.model, TrainingArguments(str(tmp_path), **settings), train_dataset=trainer.train_dataset).train()
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6


@pytest.mark.parametrize("best", [False, True])
def test_older_checkpoints_are_removed_but_not_the_best(tmp_path, best):
    rest = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2} if best else {}
    rest |= {"metric_for_best_model": "loss", "greater_is_better": True} if best else {}
    trainer = toy(tmp_path, max_steps=10, save_total_limit=1, **rest)
    trainer.train()
    if best:
        step = trainer.selection["step"]
        assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{step}")
        assert names(tmp_path) == [f"checkpoint-{step}"]
    else:
        assert names(tmp_path) == ["checkpoint-10"]


def test_a_moved_checkpoint_resumes(tmp_path):
    alone = toy(tmp_path / "alone")
    alone.train()
    shutil.copytree(tmp_path / "alone" / "checkpoint-4", tmp_path / "copy")
    resumed = toy(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "copy"))
    assert not different(bits(resumed), bits(alone))


def test_every_trainer_saves_and_resumes_in_this_way():
    kinds = [trainers.SmileTrainer, trainers.SLETrainer, trainers.SelfRetrievalTrainer, trainers.CaptionRLTrainer]
    for kind in (*kinds, trainers.SelfRetrievalGRPOTrainer, trainers.SmileSFTTrainer):
        for method in ("train", "_save_checkpoint", "_init_training_state"):
            assert getattr(kind, method) is getattr(ExactResumeTrainer, method), (kind, method)


def in_two_processes(folder):
    alone = toy(Path(folder) / "alone", max_steps=4)
    alone.train()
    resumed = toy(Path(folder) / "resumed", max_steps=4)
    resumed.train(resume_from_checkpoint=str(Path(folder) / "alone" / "checkpoint-2"))
    assert not different(bits(resumed), bits(alone))


def test_processes_write_one_checkpoint(tmp_path):
    run_in_processes(2, in_two_processes, str(tmp_path), folder=tmp_path)
    assert {path.name for path in (tmp_path / "alone" / "checkpoint-2").glob("rng_state*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }
    assert not (tmp_path / "alone" / PARTIAL).exists()
