"""The recipe from the command line's arguments to every file it promises."""

import importlib.util
import json
import sys
from pathlib import Path

import datasets
import pytest
import torch

from hf_captionrl.captioners import load_captioner
from hf_captionrl.recipe.samples import SAMPLE_COLUMNS, SampleArguments, Sampler, keep_long_references
from hf_captionrl.reports.table import COLUMNS
from hf_captionrl.scenes import load_scenes
from hf_captionrl.scenes.models import model_path

RECIPES = Path(__file__).parents[2] / "recipes"
CONFIGS = sorted((RECIPES / "configs" / "sle_blip").glob("*.yaml"))
SHORT = [
    *("--max_train_images", "16", "--max_eval_images", "8", "--max_test_images", "105", "--sample_images", "6"),
    *("--max_steps", "2", "--per_device_train_batch_size", "8", "--num_generations", "3", "--num_samples", "3"),
    *("--generation_max_new_tokens", "12", "--use_cpu", "--disable_tqdm", "true", "--gallery_size", "4"),
    *("--eval_steps", "2", "--save_steps", "2", "--sample_temperatures", "0.5", "--panel_images", "2"),
]


def load_recipe():
    specification = importlib.util.spec_from_file_location("sle_blip", RECIPES / "sle_blip.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["sle_blip"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


recipe = load_recipe()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The default run, made small."""
    folder = tmp_path_factory.mktemp("run")
    recipe.main(["--output_dir", str(folder / "out"), "--feature_cache_dir", str(folder / "cache"), *SHORT])
    return folder / "out"


def names_of(folder):
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return [row["name"] for row in rows if row["name"] != "references"]


def test_results_have_the_promised_shape(run):
    results = json.loads((run / "results.json").read_text())
    names = ["MLE", "XE", "SLL", "SLL-ME (entropy=0.03)", "SLE (alpha=0.5)"]
    assert [row["name"] for row in results["rows"]] == [*names, "references"]
    for row in results["rows"][:-1]:
        for column in (*COLUMNS, *SAMPLE_COLUMNS):
            assert isinstance(row[column.key], float), (row["name"], column.key)
    references = results["rows"][-1]
    assert references["rs_div_2"] is None
    assert "not samples" in references["rs_div_2_reason"]
    assert results["config"]["SLEBlipConfig"]["alpha"] == 0.5


def test_everything_is_written(run):
    for name in ("results.md", "gallery.html", "curves.png", "tradeoff.png", "panel.html", "model/README.md"):
        assert (run / name).stat().st_size > 100, name
    for folder in ("model", "model-xe", "model-sll", "model-sll-me--entropy-0.03"):
        assert (run / folder / "model.safetensors").exists(), folder
    samples = json.loads((run / "samples.json").read_text())
    assert set(samples["points"]) == set(samples["captions"]) == set(names_of(run))
    for points in samples["points"].values():
        assert [point["temperature"] for point in points] == [0.5, 1.0]
    for captions in samples["captions"].values():
        assert [len(group) for group in captions.values()] == [3] * 6
    assert (run / "panel.html").read_text().count("SLE (alpha=0.5)") == 2
    card = (run / "model" / "README.md").read_text()
    assert "CIDEr-D of 3 sampled captions" in card


def test_every_run_goes_on_from_cross_entropy(run):
    """What stands in the table as XE is where the others start."""
    start, *others = (
        dict(load_captioner(str(run / folder), dtype=torch.float32).model.named_parameters())
        for folder in ("model-xe", "model", "model-sll")
    )
    shipped = dict(load_captioner(model_path("scenes:blip-mle"), dtype=torch.float32).model.named_parameters())

    def distance(a, b):
        return sum(float((a[name] - b[name]).detach().square().sum()) for name in a)

    assert distance(start, shipped) > 0
    for other in others:
        assert 0 < distance(other, start) < distance(other, shipped)
    assert json.loads((run / "results.json").read_text())["rows"][1]["cider_d"] is not None


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_is_understood(path):
    *_, arguments, config = recipe.parse_args(["--config", str(path), "--use_cpu"])
    assert [recipe.run_name(run) for run in recipe.runs_of(config, arguments)][-1]
    assert config.output_dir == ("outputs/sle_blip" if path.stem == "scenes" else f"outputs/sle_blip/{path.stem}")


def test_the_papers_tables_are_all_there():
    rows = {}
    for path in CONFIGS:
        *_, arguments, config = recipe.parse_args(["--config", str(path), "--use_cpu"])
        runs = recipe.runs_of(config, arguments)
        rows[path.stem] = recipe.XE if runs[-1].rl_start_epoch else recipe.run_name(runs[-1])
    assert rows["table1_xe"] == "XE"
    assert rows["table1_sll"] == rows["table3_sll"] == "SLL"
    for weight in ("0.1", "0.01", "0.001"):
        assert rows[f"table2_sll_me_{weight}"] == f"SLL-ME (entropy={weight})"
    for alpha in ("0.25", "0.5", "0.75"):
        assert rows[f"table2_sle_{alpha}"] == f"SLE (alpha={alpha})"
    assert rows["code_2018"] == "SLE (alpha=0.75, multi-reference)"
    assert rows["table3_sle"] == "SLE (alpha=0.75)"


def test_videos_are_refused_by_what_is_missing():
    config = RECIPES / "configs" / "sle_blip" / "table3_sle.yaml"
    with pytest.raises(NotImplementedError, match=r"num_frames is 8: 'tgif' holds videos.*no reader"):
        recipe.main(["--config", str(config), "--use_cpu"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tune", "language"], "rl_start_epoch is 1"),
        (["--push_to_hub", "--judge_name_or_path", "none"], "needs a judge"),
        (["--resume_from_checkpoint", "model/checkpoint-40"], "use 'true'"),
        (["--alpha", "2"], "alpha is 2.0"),
        (["--num_samples", "1"], "num_samples is 1"),
        (["--num_frames", "-1"], "num_frames is -1"),
        (["--sample_temperatures", "0"], "sample_temperatures are"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        recipe.main(["--output_dir", str(tmp_path), "--use_cpu", *arguments])


def test_whoever_brings_his_own_gets_the_papers_settings():
    *_, arguments, config = recipe.parse_args(["--dataset_name", "imagefolder", "--data_dir", "photos", "--use_cpu"])
    assert config.learning_rate == 1e-6
    assert config.rl_start_epoch == 0
    assert arguments.min_reference_words == 0


def test_long_references_are_kept_and_of_short_ones_the_longest():
    rows = datasets.Dataset.from_dict({"captions": [["a dog", "a dog on the bed", "a b c d"], ["a", "a cat"]]})
    found = keep_long_references(datasets.DatasetDict(train=rows, test=rows), 4)
    for split in ("train", "test"):
        assert list(found[split]["captions"]) == [["a dog on the bed", "a b c d"], ["a cat"]]
    assert keep_long_references(datasets.DatasetDict(train=rows), 0)["train"] is rows


def test_samples_come_from_their_seed_and_leave_the_random_state_alone():
    test = load_scenes(num_train=0, num_validation=0, num_test=8)["test"]
    captioner = load_captioner(model_path("scenes:blip-mle"), dtype=torch.float32)
    arguments = SampleArguments(num_samples=3, sample_images=4, sample_temperatures=[0.5])

    def samples(seed):
        sampler = Sampler(test, arguments, seed=seed, batch_size=3, max_new_tokens=8)
        row = sampler.measure("MLE", captioner)
        assert [len(group) for group in sampler.samples["MLE"]] == [3] * 4
        return sampler.samples["MLE"], row

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, row = samples(0)
    assert torch.equal(torch.rand(3), expected)
    assert samples(0) == (first, row)
    assert samples(1)[0] != first
    assert {column.key for column in SAMPLE_COLUMNS} <= row.keys()
