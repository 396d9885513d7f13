"""Diverged runs stop before saving, and checkpoints without an exact resume are refused."""

import math

import pytest
import torch
from transformers import TrainerCallback

from hf_captionrl.trainers.checkpoints import first_non_finite
from tests.processes import run_in_processes
from tests.tiny import tiny_captioner
from tests.trainers.test_checkpoints import names
from tests.trainers.toy import Linear, toy


class Diverge(TrainerCallback):
    """Sets a weight to a value after a step."""

    def __init__(self, step, value, rank=None):
        self.step, self.value, self.rank = step, value, rank

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step and self.rank in (None, args.process_index):
            with torch.no_grad():
                model.layer.weight[0, 1] = self.value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_not_saved_and_nothing_is_removed(tmp_path, value):
    trainer = toy(tmp_path, save_total_limit=1, callbacks=[Diverge(3, value)])
    with pytest.raises(FloatingPointError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "Training has diverged: layer.weight is NaN or infinite after step 4. checkpoint-4 is not saved, and no checkpoint is "
        f"removed. The last checkpoint is {str(tmp_path / 'checkpoint-2')!r}. Start from it, with a lower learning_rate or "
        "max_grad_norm: use it as the model of a new run."
    )
    assert names(tmp_path) == ["checkpoint-2"]


def test_a_learning_rate_that_diverges_stops_the_run(tmp_path):
    trainer = toy(tmp_path, learning_rate=1e30, optim="sgd", max_grad_norm=0.0)
    with pytest.raises(FloatingPointError, match=r"diverged: layer\.\w+ is NaN .* This run has no earlier checkpoint"):
        trainer.train()
    assert names(tmp_path) == []


def test_a_run_without_checkpoints_that_diverges_stops_at_its_end(tmp_path):
    trainer = toy(tmp_path, save_strategy="no", max_steps=3, callbacks=[Diverge(3, math.nan)])
    with pytest.raises(FloatingPointError, match=r"NaN or infinite after step 3\. The model is not saved"):
        trainer.train()
    with pytest.raises(FloatingPointError, match=r"The model is not saved.*lower learning_rate"):
        trainer.save_model()
    with pytest.raises(FloatingPointError, match="The model is not saved"):
        trainer.save_model(str(tmp_path / "elsewhere"))
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_weights_are_finite(dtype):
    model = Linear().to(dtype)
    with torch.no_grad():
        model.layer.weight.fill_(torch.finfo(dtype).max)
        model.layer.bias.fill_(-torch.finfo(dtype).max)
    assert first_non_finite(model) is None
    with torch.no_grad():
        model.layer.bias[0] = -math.inf
    assert first_non_finite(model) == "layer.bias"


def test_only_trainable_weights_and_saved_buffers_are_checked():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    model.register_buffer("scratch", torch.tensor([math.nan]), persistent=False)
    model[0].weight.requires_grad_(False)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan  # unchanged
    assert first_non_finite(model) is None
    model[1].running_mean[1] = math.nan
    assert first_non_finite(model) == "1.running_mean"


def test_adapters_and_modules_to_save_are_checked():
    from peft import LoraConfig, get_peft_model

    base = tiny_captioner("blip").model
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["query"], modules_to_save=["fc1"]))
    assert first_non_finite(model) is None
    for part in ("lora_B", "modules_to_save"):
        name, values = next((n, p) for n, p in model.named_parameters() if part in n and p.requires_grad)
        with torch.no_grad():
            before, values.view(-1)[-1] = values.view(-1)[-1].clone(), math.nan
            assert first_non_finite(model) == name
            values.view(-1)[-1] = before


def look_at_shards(folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = torch.nn.Module()
    values = torch.ones(4, 2)
    values[3, 1] = math.nan  # in the shard of the second process
    shards = distribute_tensor(values, init_device_mesh("cpu", (2,)), [Shard(0)])
    model.register_parameter("weight", torch.nn.Parameter(shards))
    assert (first_non_finite(model) is not None) == (torch.distributed.get_rank() == 1)


def diverge_on_one(folder):
    from pathlib import Path

    trainer = toy(Path(folder), callbacks=[Diverge(3, math.nan, rank=1)], ddp_broadcast_buffers=False)
    try:
        trainer.train()
    except FloatingPointError as error:
        (Path(folder) / f"said-{trainer.args.process_index}").write_text(str(error))


def test_each_process_checks_its_shard(tmp_path):
    run_in_processes(2, look_at_shards, str(tmp_path), folder=tmp_path)


def test_all_processes_stop_if_one_has_diverged(tmp_path):
    run_in_processes(2, diverge_on_one, str(tmp_path), folder=tmp_path)
    said = [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)]
    assert said[0] == said[1]
    assert "The last checkpoint is" in said[0]
    assert names(tmp_path) == ["checkpoint-2"]


def test_saving_the_model_only_on_a_signal_is_warned_of(tmp_path, caplog):
    toy(tmp_path, save_only_model=True)
    assert not caplog.records
    toy(tmp_path, save_only_model=True, save_on_signal=True)
    assert "no run can resume from it. Use save_only_model=False" in caplog.text
