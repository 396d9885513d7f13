"""Arguments of recipes: presets and rows, how captioners are loaded, defaults that recipes share, and the batch of a step."""

import functools
import importlib
import json
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from hf_captionrl.apps.experiments.arguments import (
    DataArguments,
    ModelArguments,
    describe,
    load_row,
    parse_arguments,
    row_names,
    set_total_batch,
)
from hf_captionrl.apps.experiments.data import load_data
from hf_captionrl.apps.experiments.self_retrieval import runs_of
from hf_captionrl.apps.experiments.smile import runs_of as smile_runs
from hf_captionrl.data import SPLITS
from hf_captionrl.trainers import SmileConfig
from recipes import self_retrieval_clipcap, smile_blip
from tests.apps.experiments.values_of_the_papers import PAPERS
from tests.tiny import tiny_images

CONFIGS = Path(__file__).parents[3] / "recipes" / "configs"
NAMES = row_names(CONFIGS)


# --- Rows of the papers' tables: every row parses, and its settings are those that its title and the paper name ---


def parse(name, *more):
    """The recipe and the arguments of a row, or of a base file."""
    base = CONFIGS / f"{name}.yaml"
    recipe = base.parent.name if base.is_file() else load_row(CONFIGS, name).recipe
    selected = ["--config", str(base)] if base.is_file() else ["--row", name]
    return recipe, importlib.import_module(f"recipes.{recipe}").parse_args([*selected, "--use_cpu", *more])


parsed = functools.cache(parse)


def trainer_config(found):
    return next(a for a in found[1] if isinstance(a, TrainingArguments))


def test_every_row_parses_and_writes_to_the_folder_of_its_name():
    for name in NAMES:
        assert load_row(CONFIGS, name).title != name.partition("/")[2], name
        recipe, arguments = parsed(name)
        assert trainer_config((recipe, arguments)).output_dir == f"outputs/{name}"
        if recipe.startswith("self_retrieval"):  # every variant sets arguments that exist
            variants = arguments[-2].named_variants
            assert list(runs_of(arguments[-1], variants))[:-1] == list(variants), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--row", "ndlb/table5/row88"], "Use 'ndlb/table5/row8'"),
        (["--row", "smile/table4/none"], r"recipes/smile_blip\.py"),
        (["--row", "ndlb/table5/row8", "--config", "x.yaml"], "--config is .* and --row is"),
    ],
)
def test_a_wrong_row_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        self_retrieval_clipcap.parse_args(arguments)
    with pytest.raises(ValueError, match="no rows"):  # of a program without rows
        parse_arguments((smile_blip.SmileBlipConfig,), ["--row", "smile/table4/none"])


# --- How recipes load the captioner ---


def test_weights_are_fp32_unless_told_otherwise():
    assert {p.dtype for p in ModelArguments().load().model.parameters()} == {torch.float32}
    low = ModelArguments(dtype="bfloat16", tune="language").load()
    assert {p.dtype for p in low.model.parameters()} == {torch.bfloat16}
    assert ModelArguments(attn_implementation="eager").load().base_model.config._attn_implementation == "eager"


def test_model_init_kwargs_of_the_command_line_and_of_yaml(tmp_path):
    line = ["--use_cpu", "--model_init_kwargs", '{"attn_implementation": "eager", "dtype": "float32"}']
    model_args, *_, config = smile_blip.parse_args(line)
    assert config.model_init_kwargs is None  # the recipe loads, not the trainer
    assert model_args.load().base_model.config._attn_implementation == "eager"
    assert describe([model_args])["ModelArguments"]["model_init_kwargs"]["attn_implementation"] == "eager"

    (tmp_path / "run.yaml").write_text("use_cpu: true\nmodel_init_kwargs:\n  attn_implementation: eager\n")
    model_args, *_ = smile_blip.parse_args(["--config", str(tmp_path / "run.yaml")])
    assert model_args.model_init_kwargs == {"attn_implementation": "eager"}


def test_a_fresh_language_model_keeps_only_the_vision_tower():
    shipped, fresh = (ModelArguments(fresh_language_model=f).load().base_model.state_dict() for f in (False, True))
    tower = {name for name in shipped if name.startswith("vision_model.")}
    assert tower
    assert all(torch.equal(shipped[name], fresh[name]) for name in tower)
    matrices = [n for n, weight in shipped.items() if n not in tower and weight.dim() == 2]
    assert matrices
    assert not any(torch.equal(shipped[name], fresh[name]) for name in matrices)


# --- The data of recipes ---


def test_the_table_can_show_the_validation_split(tmp_path):
    limits = {"max_train_images": 4, "max_eval_images": 2, "max_test_images": 3}
    plain = load_data(DataArguments(**limits), output_dir=tmp_path)
    swapped = load_data(DataArguments(table_split="validation", **limits), output_dir=tmp_path)
    assert [len(swapped[name]) for name in ("train", "validation", "test")] == [4, 2, 3]  # limits are of the roles
    assert swapped["validation"]["image_id"][:] == plain["test"]["image_id"][:2]
    assert swapped["test"]["image_id"][:2] == plain["validation"]["image_id"][:]


def test_an_evaluation_can_use_data_without_a_training_split(tmp_path):
    """nocaps has a split per domain; the captions are those of the file."""
    domains = ["in-domain", "near-domain", "out-domain", "near-domain"]
    images = [{"id": n, "file_name": f"{n}.png", "domain": domain} for n, domain in enumerate(domains)]
    annotations = [{"image_id": n, "caption": f"caption {n}"} for n in range(4)]
    (tmp_path / "images").mkdir()
    for n, image in enumerate(tiny_images(4)):
        image.save(tmp_path / "images" / f"{n}.png")
    (tmp_path / "nocaps_val_4500_captions.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    source = {"dataset_name": "nocaps", "data_dir": str(tmp_path)}
    near = DataArguments(table_split="near_domain", **source)
    splits = load_data(near, output_dir=tmp_path, is_training=False)
    assert {name: rows["image_id"][:] for name, rows in splits.items()} == {name: ["1", "3"] for name in SPLITS}
    assert splits["test"]["captions"][:] == [["caption 1"], ["caption 3"]]
    with pytest.raises(
        ValueError, match=r"table_split is 'near-domain', but 'nocaps' has \['in_domain', 'near_domain'"
    ):
        load_data(DataArguments(table_split="near-domain", **source), output_dir=tmp_path, is_training=False)


# --- One optimizer step has the images of the preset on any number of processes ---


def split(config):
    return config.per_device_train_batch_size, config.gradient_accumulation_steps


def test_every_preset_has_the_papers_batch_on_any_number_of_processes(monkeypatch):
    """On one process, test_presets.py checks it."""
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 4))
    for name, values in PAPERS.items():
        if "batch" in values and values.get("epochs") != 0:
            size, steps = split(trainer_config(parse(name)))
            assert size * steps * 4 == values["batch"], name


@pytest.mark.parametrize(
    ("processes", "total", "most", "expected"),
    [(1, 128, 32, (32, 4)), (8, 128, 32, (16, 1)), (2, 100, 25, (25, 2)), (1, 100, 30, (25, 4)), (1, 100, 3, (2, 50))],
)
def test_micro_batches_are_as_large_as_the_device_holds(processes, total, most, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: processes))
    config = SmileConfig(str(tmp_path), per_device_train_batch_size=most, use_cpu=True)
    set_total_batch(config, total)
    assert split(config) == expected


@pytest.mark.parametrize(
    ("changes", "total", "name"),
    [({}, 100, r"processes \(3\)"), ({}, 0, "total_train"), ({"gradient_accumulation_steps": 2}, 99, "accumulation")],
)
def test_a_batch_that_cannot_be_split_is_an_error(changes, total, name, monkeypatch, tmp_path):
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 3))
    with pytest.raises(ValueError, match=name):
        set_total_batch(SmileConfig(str(tmp_path), use_cpu=True, **changes), total)


# --- Comparisons are made where they are asked for; --help shows our arguments, --help-all every one ---


def test_one_model_is_trained_unless_a_comparison_is_asked_for():
    photos, coco = ("--data_dir", "photos"), ("--config", str(CONFIGS / "smile_blip/coco.yaml"))
    for given, weights in {
        photos: [],
        (*photos, "--compare_mle_weights", "1", "0.01"): [1.0, 0.01],
        (): [1.0, 0.01],  # the preset of the embedded world, which `make demo` shows
        ("--compare-mle-weights", "--learning_rate", "1e-4"): [],
        coco: [1.0, 0.01],
        (*coco, "--compare_mle_weights"): [],
    }.items():
        _, _, _, smile, config = smile_blip.parse_args([*given, "--use_cpu"])
        assert smile.compare_mle_weights == weights, given
        assert len(smile_runs(config, weights)) == 1 + len(weights)
