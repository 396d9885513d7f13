"""Checkpoints are renamed when complete, and a run resumes only from its own configuration."""

import errno
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import datasets
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainingArguments

from hf_captionrl import pipeline
from hf_captionrl.captioners import load_captioner
from hf_captionrl.data import open_image
from hf_captionrl.trainers.checkpoints import PARTIAL, ExactResumeArguments, ExactResumeTrainer, data_digest
from hf_captionrl.trainers.publishing import RUN_FILE, read_run, write_run
from tests.processes import run_in_processes
from tests.trainers import test_reward_functions as rewarding
from tests.trainers.one_step import At, bits, different


class KilledError(Exception):
    """Ends a run at any point, like a kill."""


def die():
    raise KilledError


class Linear(torch.nn.Module):
    """Regression on noise, so that every batch moves the weights, and a checkpoint takes milliseconds."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x, labels):
        found = self.layer(x)
        return {"loss": ((found[:, 0] - labels) ** 2).mean(), "logits": found}


@dataclass
class ToyConfig(ExactResumeArguments, TrainingArguments):
    """Arguments of a plain Trainer with exact resume."""


def toy(folder, *, kill_at=None, data=0, callbacks=(), optimizer=None, **settings):
    """Six steps with a checkpoint every 2 steps; another `data` gives different data, and so another run."""
    drawn = torch.Generator().manual_seed(data)
    rows = [{"x": torch.randn(3, generator=drawn), "labels": torch.randn((), generator=drawn)} for _ in range(24)]
    torch.manual_seed(0)
    model = Linear()
    steps = {"max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 0.1}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    return ExactResumeTrainer(
        model,
        ToyConfig(str(folder), **{**steps, **quiet, **settings}),
        train_dataset=rows,
        eval_dataset=rows[:4],
        callbacks=[*([] if kill_at is None else [At(kill_at, die)]), *callbacks],
        optimizers=(None if optimizer is None else optimizer(model.parameters()), None),
    )


def names(folder):
    return sorted(path.name for path in Path(folder).glob("*checkpoint-*"))


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of six steps that nothing stops, to be read only."""
    trainer = toy(tmp_path_factory.mktemp("alone"))
    trainer.train()
    return trainer


def test_a_killed_run_resumes_with_the_same_bits(tmp_path, alone):
    with pytest.raises(KilledError):
        toy(tmp_path, kill_at=5).train()
    resumed = toy(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert not different(bits(resumed), bits(alone))
    assert losses(resumed) == losses(alone)
    again = toy(tmp_path)  # after the last step, if a run is killed before it has finished
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert again.state.global_step == 6
    assert not different(bits(again), bits(alone))


@pytest.mark.parametrize("error", [SystemExit(1), OSError(errno.ENOSPC, "No space left on device")])
def test_a_save_that_is_interrupted_leaves_no_checkpoint(tmp_path, alone, error):
    trainer = toy(tmp_path)
    save = trainer._save_rng_state  # after the weights are written

    def interrupted(folder):
        if trainer.state.global_step == 4:
            raise error
        save(folder)

    trainer._save_rng_state = interrupted
    with pytest.raises(type(error)):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-2"]
    assert (tmp_path / PARTIAL).exists() == isinstance(error, SystemExit)  # a kill removes nothing
    resumed = toy(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert not different(bits(resumed), bits(alone))
    assert not (tmp_path / PARTIAL).exists()


def test_checkpoints_of_an_earlier_start_are_not_mixed_with_those_of_a_new_one(tmp_path, caplog):
    foreign = toy(tmp_path)
    foreign.train()
    (tmp_path / "checkpoint-4" / "old").touch()
    with pytest.raises(KilledError):  # before it has saved anything
        toy(tmp_path, kill_at=1, data=1).train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    with pytest.raises(KilledError):
        toy(tmp_path, kill_at=5, data=1, save_total_limit=1, callbacks=[SameTime(tmp_path)]).train()
    assert names(tmp_path) == ["checkpoint-4"]
    assert names(tmp_path / "earlier-1") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert (tmp_path / "earlier-1" / "checkpoint-4" / "old").exists()
    assert f"Checkpoints of an earlier start (3) are moved to {tmp_path / 'earlier-1'}" in caplog.text
    through = toy(tmp_path / "through", data=1)
    through.train()
    resumed = toy(tmp_path, data=1)
    resumed.train(resume_from_checkpoint=True)
    assert not different(bits(resumed), bits(through))
    assert different(bits(resumed), bits(foreign))
    assert not (tmp_path / "earlier-2").exists()


class SameTime(TrainerCallback):
    """Gives all checkpoints one time, as a file system with a coarse clock does."""

    def __init__(self, folder):
        self.folder = folder

    def on_save(self, args, state, control, **kwargs):
        for path in self.folder.rglob("checkpoint-*"):
            os.utime(path, (1e9, 1e9))


def test_a_run_that_resumes_from_an_earlier_checkpoint_does_not_keep_the_later_ones(tmp_path):
    toy(tmp_path).train()
    again = toy(tmp_path, kill_at=5)
    with pytest.raises(KilledError):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    assert names(tmp_path / "earlier-1") == ["checkpoint-4", "checkpoint-6"]


def test_the_digest_of_data_is_of_their_content(tmp_path):
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    for number, path in enumerate(paths):
        Image.new("RGB", (8, 8), (number * 80, 0, 0)).save(path)
    columns = {"image": paths, "image_id": ["a", "b", "c"], "captions": [["one"], ["two"], ["three"]]}

    def digest(**changed):
        rows = datasets.Dataset.from_dict(columns | changed)
        return data_digest(rows.cast_column("image", datasets.Image()))

    first = digest()
    os.utime(paths[0], (1e9, 1e9))
    assert digest() == first
    assert digest(image_id=["a", "b", "d"]) != first
    assert digest(captions=[["one"], ["two"], ["four"]]) != first
    Image.new("RGB", (8, 8), (9, 9, 9)).save(paths[1])
    assert digest() != first
    assert data_digest(iter(paths)) is None


def test_a_run_of_another_configuration_does_not_resume(tmp_path):
    toy(tmp_path, max_steps=2).train()
    others: dict = {"learning_rate": {"learning_rate": 0.01}, "training_data": {"data": 1}}
    others["rows per step"] = {"gradient_accumulation_steps": 2}  # rows would be read twice or never
    for name, changed in others.items():
        with pytest.raises(ValueError, match=f"another run: its {name} is"):
            toy(tmp_path, **changed).train(resume_from_checkpoint=True)
    folder = tmp_path / "checkpoint-2"
    saved = read_run(folder)["configuration"]
    assert saved["rows"] == 24
    for name, value in (("rows", 8), ("trainer", "SmileTrainer"), ("alpha", 0.5)):
        write_run(folder, configuration={**saved, name: value})
        with pytest.raises(ValueError, match=f"another run: its {name} is"):
            toy(tmp_path).train(resume_from_checkpoint=True)
    # A checkpoint that recorded nothing, such as that of a plain Trainer, resumes.
    (folder / RUN_FILE).unlink()
    assert toy(tmp_path).train(resume_from_checkpoint=True).global_step == 6


def test_a_run_may_resume_with_other_lengths_logs_and_saves(tmp_path, alone):
    settings = {"max_steps": 4, "save_steps": 4, "logging_steps": 4, "num_train_epochs": 2}
    toy(tmp_path / "short", lr_scheduler_type="constant", **settings).train()
    longer = toy(tmp_path / "short", lr_scheduler_type="constant")
    longer.train(resume_from_checkpoint=True)
    through = toy(tmp_path / "through", lr_scheduler_type="constant")
    through.train()
    assert not different(bits(longer), bits(through))
    assert different(bits(longer), bits(alone))  # the control: another schedule is another run


def pickled(checkpoint):
    torch.save({}, checkpoint / "pytorch_model.bin")


def outside(checkpoint):
    index = {"weight_map": {"layer.weight": "../model.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("settings", "change", "wanted", "said"),
    [
        ({"save_strategy": "no"}, None, True, "no checkpoint"),
        ({}, None, "checkpoint-7", "checkpoint-7"),
        ({"save_only_model": True}, None, True, "save_only_model"),
        ({}, pickled, True, "captionrl convert"),
        ({}, outside, True, "model.safetensors"),
    ],
)
def test_what_no_run_resumes_from(tmp_path, settings, change, wanted, said):
    toy(tmp_path, max_steps=2, **settings).train()
    if change is not None:
        change(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match=said):
        toy(tmp_path).train(resume_from_checkpoint=wanted)


def in_two_processes(folder):
    alone = toy(Path(folder) / "alone", max_steps=4)
    alone.train()
    resumed = toy(Path(folder) / "resumed", max_steps=4)
    resumed.train(resume_from_checkpoint=str(Path(folder) / "alone" / "checkpoint-2"))
    assert not different(bits(resumed), bits(alone))


def test_processes_write_one_checkpoint(tmp_path):
    run_in_processes(2, in_two_processes, str(tmp_path), folder=tmp_path)
    states = {path.name for path in (tmp_path / "alone" / "checkpoint-2").glob("rng_state*")}
    assert states == {"rng_state_0.pth", "rng_state_1.pth"}
    assert not (tmp_path / "alone" / PARTIAL).exists()


def diverging(folder, rank=None, **settings):
    """A trainer of which a weight becomes NaN after step 3."""
    trainer = toy(folder, **settings)

    def spoil():
        if rank in (None, trainer.args.process_index):
            trainer.accelerator.unwrap_model(trainer.model).layer.weight.data[0, 1] = math.nan

    trainer.add_callback(At(3, spoil))
    return trainer


def test_weights_that_are_not_finite_are_not_saved_and_nothing_is_removed(tmp_path):
    trainer = diverging(tmp_path, save_total_limit=1)
    with pytest.raises(FloatingPointError) as caught:
        trainer.train()
    assert all(part in str(caught.value) for part in ("layer.weight", "step 4", "learning_rate"))
    with pytest.raises(FloatingPointError, match=r"The model is not saved"):
        trainer.save_model(str(tmp_path / "elsewhere"))
    assert names(tmp_path) == ["checkpoint-2"]


def diverge_on_one(folder):
    trainer = diverging(Path(folder), rank=1, ddp_broadcast_buffers=False)
    try:
        trainer.train()
    except FloatingPointError as error:
        (Path(folder) / f"said-{trainer.args.process_index}").write_text(str(error))


def test_all_processes_stop_if_one_has_diverged(tmp_path):
    run_in_processes(2, diverge_on_one, str(tmp_path), folder=tmp_path)
    said = [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)]
    assert said[0] == said[1]
    assert names(tmp_path) == ["checkpoint-2"]


def trained(folder, values, resume=False, **settings):
    """One evaluation and checkpoint per step; the value of step 0 is that before training."""
    selecting = {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}
    steps = {"max_steps": len(values) - 1, "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = toy(folder, **{**selecting, **steps, **settings})

    def evaluate(*args, **kwargs):
        metrics = {"eval_score": values[trainer.state.global_step]}
        trainer.log(metrics)
        return metrics

    trainer.evaluate = evaluate
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def test_selection_is_printed_and_stored_with_the_model(tmp_path, capsys):
    trainer = trained(tmp_path, [9.0, 0.25, 0.5, 0.5, 0.125, 0.5], eval_on_start=True)
    expected = {"step": 2, "metric": "eval_score", "value": 0.5, "greater_is_better": True}
    expected |= {"evaluations": 5, "ties": [3, 5], "tie_rule": "earliest"}
    assert "Selected checkpoint-2: eval_score = 0.5, the best of 5 evaluations." in capsys.readouterr().out
    assert trainer.selection == expected
    trainer.save_model()
    assert read_run(tmp_path)["selection"] == expected
    kept, best, last = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path, tmp_path / "checkpoint-2", tmp_path / "checkpoint-5")
    )
    assert all(torch.equal(kept[name], best[name]) for name in best)
    assert any(not torch.equal(kept[name], last[name]) for name in last)
    assert "selection" not in read_run(tmp_path / "checkpoint-2")


def test_a_selection_counts_evaluations_before_a_resume_and_says_what_was_kept(tmp_path):
    trained(tmp_path, [0.0, 3.0, 1.0], greater_is_better=False)
    selection = trained(tmp_path, [0.0, 3.0, 1.0, 1.0], resume=True, greater_is_better=False).selection
    assert (selection["step"], selection["evaluations"], selection["ties"]) == (2, 3, [3])
    plain = trained(tmp_path / "plain", [0.0, 1.0, 2.0], load_best_model_at_end=False)
    assert plain.selection is None
    settings = {"load_best_model_at_end": False, "save_strategy": "best"}
    selection = trained(tmp_path / "best", [0.0, 1.0, 3.0, 2.0], **settings).selection
    assert (selection["step"], selection["kept_instead"]) == (2, "the weights of step 3 are kept")
    assert "kept_instead" not in trained(tmp_path / "last", [0.0, 1.0, 2.0], **settings).selection


def test_saved_folder_can_caption_and_records_its_training(tmp_path):
    data = rewarding.marked()
    trainer = rewarding.self_retrieval(tmp_path, data, rewarding.Recorder(), learning_rate=1e-2)
    trainer.train()
    trainer.save_model()
    written = trainer.generate_captions(data, num_beams=1, max_new_tokens=12)
    loaded = load_captioner(str(tmp_path))
    pixels = loaded.encode_images([open_image(row["image"]) for row in data])["pixel_values"]
    assert loaded.generate(pixel_values=pixels, num_beams=1, max_new_tokens=12).captions == written
    assert pipeline(str(tmp_path), num_beams=1, max_new_tokens=12)(data[0]["image"]) == written[0]
    files = {path.name for path in tmp_path.iterdir()}
    assert {"model.safetensors", "config.json", "captioner.json", "tokenizer_config.json", RUN_FILE} <= files
    assert files & {"processor_config.json", "preprocessor_config.json"}
    assert "training_args.bin" not in files
    text = (tmp_path / RUN_FILE).read_text()
    facts = read_run(tmp_path)["training"]
    assert facts["trainer"] == type(trainer).__name__
    assert facts["objective"] == "self_retrieval"
    assert "the reward 'marks'" in facts["reward"]
    assert (facts["family"], facts["base_model"]) == ("blip", "blip-mle")
    assert (facts["steps"], facts["train_images"]) == (1, 8)
    assert str(tmp_path) not in text
    assert '"/' not in text  # no local path
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name]), name
