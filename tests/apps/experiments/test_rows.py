"""Rows of the papers' tables: every row parses, and its settings are those that its title and the paper name."""

import importlib
from pathlib import Path

import pytest
from transformers import TrainingArguments

from hf_captionrl.apps.experiments.arguments import load_row, parse_arguments, row_names
from hf_captionrl.apps.experiments.self_retrieval import runs_of
from recipes import self_retrieval_clipcap, smile_blip

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "recipes" / "configs"
NAMES = row_names(CONFIGS)


def parse(name):
    recipe = importlib.import_module(f"recipes.{load_row(CONFIGS, name).recipe}")
    return recipe.parse_args(["--row", name])


def trainer_config(arguments):
    return next(a for a in arguments if isinstance(a, TrainingArguments))


@pytest.mark.parametrize("name", NAMES)
def test_every_row_parses_and_writes_to_the_folder_of_its_name(name):
    row = load_row(CONFIGS, name)
    assert row.title != name.partition("/")[2]
    assert trainer_config(parse(name)).output_dir == f"outputs/{name}"


@pytest.mark.parametrize(
    "name", [name for name in NAMES if load_row(CONFIGS, name).recipe.startswith("self_retrieval")]
)
def test_every_variant_of_a_row_sets_arguments_that_exist(name):
    parsed = parse(name)
    runs = runs_of(parsed[-1], parsed[-2].named_variants)
    assert list(runs)[:-1] == list(parsed[-2].named_variants)


def test_rows_and_base_files_write_to_different_folders():
    folders = [f"outputs/{name}" for name in NAMES]
    for file in CONFIGS.glob("*/*.yaml"):
        if file.parent.name != "rows":
            recipe = importlib.import_module(f"recipes.{file.parent.name}")
            folders.append(trainer_config(recipe.parse_args(["--config", str(file)])).output_dir)
    assert len(set(folders)) == len(folders)


def test_each_table_has_all_its_rows():
    for table, number in {3: 6, 4: 9, 5: 8, 7: 10, 10: 9, 13: 6}.items():
        rows = {name for name in NAMES if name.startswith(f"ndlb/table{table}/")}
        assert rows == {f"ndlb/table{table}/row{n}" for n in range(1, number + 1)}
    for table, number in {
        "discritune/table8": 3,
        "discritune/table9": 3,
        "discritune/table12": 12,
        "smile/table3": 7,
    }.items():
        assert sum(name.startswith(f"{table}/") for name in NAMES) == number, table


@pytest.mark.parametrize(
    "name", [n for n in NAMES if load_row(CONFIGS, n).recipe.startswith("self_retrieval") and "/scenes/" not in n]
)
def test_self_retrieval_rows_have_the_settings_of_their_title(name):
    model, _, _, bags, config = parse(name)
    title = load_row(CONFIGS, name).title
    assert ("an evaluation" in title) == (config.num_train_epochs == 0)
    assert config.generation_num_beams == 5
    if config.num_train_epochs == 0:
        return
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 100
    if name.startswith("discritune"):
        assert (model.tune, config.freeze_vision_tower, config.learning_rate) == (None, True, 1e-7)
        assert not config.do_sample
        assert config.is_exploring == (name == "discritune/table8/greedy")
        return
    steps = 113300 if name.startswith("ndlb/table14/") else 23000  # Figure 3: 100 epochs of 113,287 images
    assert (model.lora_r, model.lora_alpha, config.max_steps, config.temperature) == (32, 16, steps, 0.3)
    tune = "both" if "SR-LV" in title else "vision" if "SR-V" in title else "language"
    assert (model.tune, config.freeze_vision_tower) == (tune, tune == "language")
    # configs/cider.yml of the authors: CIDEr alone has the running mean as baseline.
    greedy = config.cider_weight and name != "ndlb/code/cider"
    assert config.baseline == ("greedy" if greedy else "running_mean")
    assert (config.bag_schedule == "paper") == ("BagCurri" in title)
    # The paper's Table 12; Appendix C.3 gives CIDEr on HolisticCap another rate.
    rate = 1e-7 if config.cider_weight else 9e-8
    assert config.learning_rate == (1e-6 if name in ("ndlb/table7/row3", "ndlb/code/cider") else rate)
    assert config.retrieval_weight == (0 if "CIDEr alone" in title else 1)
    assert bags.named_variants == {}


def test_a_row_of_a_row_has_the_settings_of_the_whole_chain():
    model, data, evaluation, _, config = parse("ndlb/table13/row6")
    assert (model.model_name_or_path, data.dataset_name) == (
        "outputs/ndlb/table11/holisticcap/model",
        "dataset_coco.json",
    )
    assert (model.tune, config.bag_schedule, config.cider_weight, config.baseline) == ("both", "paper", 1.0, "greedy")
    assert (config.learning_rate, config.weight_decay, config.cache_image_features) == (1e-7, 0.01, False)
    assert evaluation.held_out_scorer_name_or_path == "openai/clip-vit-large-patch14"


def test_the_command_line_overrides_a_row():
    *_, config = smile_blip.parse_args(["--row=smile/table5/lambda-0.1", "--learning_rate", "3e-6"])
    assert (config.mle_weight, config.learning_rate, config.num_train_epochs) == (0.1, 3e-6, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--row", "ndlb/table5/row88"], r"no row 'ndlb/table5/row88'\. Use 'ndlb/table5/row8'"),
        (["--row", "gan/x"], r"no row 'gan/x'\. Use "),
        (["--row"], r"--row has no value\. Use --row ndlb/table5/row8"),
        (["--row", "smile/table4/none"], r"belongs to another recipe\. Use recipes/smile_blip\.py"),
        (["--row", "ndlb/table5/row8", "--config", "x.yaml"], r"--config is 'x\.yaml' and --row is .*Use one of them"),
    ],
)
def test_a_wrong_row_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        self_retrieval_clipcap.parse_args(arguments)


def test_a_program_without_rows_refuses_one():
    with pytest.raises(ValueError, match=r"has no rows\. Use --config"):
        parse_arguments((smile_blip.SmileBlipConfig,), ["--row", "smile/table4/none"])


def test_a_base_that_does_not_exist_is_an_error(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "x.yaml").write_text("a: {base: smile/none}")
    with pytest.raises(FileNotFoundError, match="none"):
        load_row(tmp_path, "x/a")
