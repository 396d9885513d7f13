"""One optimizer step has the images of the preset on any number of processes."""

import functools
import importlib
from pathlib import Path

import pytest
from transformers import TrainingArguments

from hf_captionrl.apps.experiments.arguments import set_total_batch
from hf_captionrl.trainers import SmileConfig
from tests.experiments.values_of_the_papers import PAPERS
from tests.processes import run_in_processes

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"


def parse(name, *more):
    base = CONFIGS / f"{name}.yaml"
    recipe = PAPERS[name]["recipe"]
    selected = ["--config", str(base)] if base.is_file() else ["--row", name]
    arguments = importlib.import_module(f"recipes.{recipe}").parse_args([*selected, "--use_cpu", *more])
    return next(a for a in arguments if isinstance(a, TrainingArguments))


def split(config):
    return config.per_device_train_batch_size, config.gradient_accumulation_steps


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_preset_has_the_papers_batch_on_any_number_of_processes(processes, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: processes))
    for name, values in PAPERS.items():
        if "batch" in values and values.get("epochs") != 0:
            size, steps = split(parse(name))
            assert size * steps * processes == values["batch"], name


@pytest.mark.parametrize(
    ("processes", "total", "most", "expected"),
    [
        (1, 128, 32, (32, 4)),
        (4, 128, 32, (32, 1)),
        (8, 128, 32, (16, 1)),
        (2, 100, 25, (25, 2)),
        (1, 100, 30, (25, 4)),
        (1, 100, 3, (2, 50)),
        (5, 5, 9, (1, 1)),
    ],
)
def test_micro_batches_are_as_large_as_the_device_holds(processes, total, most, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: processes))
    config = SmileConfig(str(tmp_path), per_device_train_batch_size=most, use_cpu=True)
    set_total_batch(config, total)
    assert split(config) == expected


@pytest.mark.parametrize(
    ("changes", "total", "said"),
    [
        ({}, 100, r"total_train_batch_size \(100\) must be a positive multiple of the number of processes \(3\)"),
        ({}, 0, "must be a positive multiple"),
        ({"gradient_accumulation_steps": 2}, 99, r"is 99, which sets gradient_accumulation_steps \(2\)"),
    ],
)
def test_a_batch_that_cannot_be_split_is_an_error(changes, total, said, monkeypatch, tmp_path):
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 3))
    with pytest.raises(ValueError, match=said):
        set_total_batch(SmileConfig(str(tmp_path), use_cpu=True, **changes), total)


def test_the_command_line_overrides_the_batch_of_a_preset():
    row, device = "smile/table3/row7", "--per_device_train_batch_size"
    assert split(parse(row)) == (32, 4)
    assert split(parse(row, device, "8")) == (8, 16)  # less memory, the same batch
    assert split(parse(row, device, "8", "--gradient_accumulation_steps", "1")) == (8, 1)
    assert split(parse(row, device, "8", "--total_train_batch_size", "16")) == (8, 2)
    with pytest.raises(ValueError, match="Leave one of them out"):
        parse(row, "--total_train_batch_size", "64", "--gradient_accumulation_steps", "2")


def _share_batches(total):
    config = parse("smile_blip/coco")
    assert config.world_size == 2
    assert split(config) == (32, 2)
    assert split(parse("ndlb/table3/row4")) == (total // 2, 1)


def test_two_processes_share_the_batch(tmp_path):
    run_in_processes(2, functools.partial(_share_batches, 100), folder=tmp_path)
