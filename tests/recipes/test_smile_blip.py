"""The recipe from the command line's arguments to every file it promises."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from hf_captionrl.captioners import load_captioner
from hf_captionrl.cli import main
from hf_captionrl.evaluation.plots import CURVES
from hf_captionrl.metrics.columns import COLUMNS
from hf_captionrl.trainers import SmileConfig
from recipes import smile_blip as recipe
from tests.data.photos import make_folder
from tests.recipes.conftest import GENERATION, train
from tests.tiny import tiny_captioner

RECIPES = Path(__file__).parents[2] / "recipes"
ONE_EPOCH = [
    *("--num_train_epochs", "1", "--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "32"),
    *GENERATION,
]
SHORT = [*("--max_train_images", "16", "--max_eval_images", "12", "--max_test_images", "105"), *ONE_EPOCH]


def test_results_have_the_expected_rows_and_columns(run):
    results = json.loads((run / "results.json").read_text())
    assert [row["name"] for row in results["rows"]] == ["MLE", "MLE+MLE", "SMILE", "SMILE (lambda=0.01)", "references"]
    assert {"rows", "seed", "config", "versions"} <= results.keys()
    for row in results["rows"]:
        for column in COLUMNS:
            assert isinstance(row[column.key], float), (row["name"], column.key)
        for size in (3, 5, 7):
            assert 0 <= row[f"bag_{size}_recall_at_1"] <= 1
            assert 0 <= row[f"reward_bag_{size}_recall_at_1"] <= 1  # by the scorer that selects
    assert not results.get("learning_curves")
    references = results["rows"][-1]
    assert 0 < references["hallucination"] < 0.06  # annotators make mistakes
    assert results["config"]["SmileBlipConfig"]["mle_weight"] == 0.0
    assert {"torch", "transformers"} <= results["versions"].keys()


def test_everything_is_written(run):
    for name in ("results.md", "gallery.html", "curves.png", "model/README.md", "model/model.safetensors"):
        assert (run / name).stat().st_size > 100, name
    assert "reward scorer" in (run / "results.md").read_text()
    for row in json.loads((run / "results.json").read_text())["rows"][:2]:
        text = (run / "captions" / f"{row['name'].lower().replace('+', '-')}.jsonl").read_text()
        words = [len(json.loads(line)["caption"].split()) for line in text.splitlines()]
        assert sum(words) / len(words) == row["length"], row["name"]
    assert "SMILE (lambda=0.01)" in (run / "gallery.html").read_text()
    card = (run / "model" / "README.md").read_text()
    assert "model-index" in card
    assert "hallucination" in card.lower()
    captioner = load_captioner(str(run / "model"), dtype=torch.float32)
    assert captioner.generate(**captioner.encode_images([Image.new("RGB", (72, 72), "white")])).captions[0]


def test_a_folder_of_photographs_with_bad_rows(tmp_path):
    photos = make_folder(tmp_path / "photos", 40, rows={3: {"captions": ["", "   "]}})
    (photos / "7.png").write_bytes(b"no image")
    # In a folder of this machine whose path must not get into the card.
    tiny_captioner("blip").save_pretrained(tmp_path / "small-blip")
    data = ["--dataset_name", "imagefolder", "--data_dir", str(photos)]
    data += ["--model_name_or_path", str(tmp_path / "small-blip")]
    more = "--max_bad_fraction 0.5 --scorer_name_or_path scenes:clip-reward --perplexity_name_or_path none --learning_rate 1e-3 "
    more += "--held_out_scorer_name_or_path scenes:siglip-held-out --compare_mle_weights 1.0 --prompt 'a picture of '"
    path = train(recipe, tmp_path, [*ONE_EPOCH, *data], more)
    results = json.loads(path.read_text())
    assert [row["name"] for row in results["rows"]] == ["MLE", "MLE+MLE", "SMILE", "references"]
    smile = results["rows"][2]
    assert smile["hallucination"] is None
    assert "no facts" in smile["hallucination_reason"]
    assert smile["perplexity"] is None
    assert smile["rd100_recall_at_1"] is None  # fewer than 100 images
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert "small-blip" in card
    assert str(tmp_path) not in card
    quarantined = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert {"3", "7"} <= {entry["image_id"].split("/")[-1].split(".")[0] for entry in quarantined}


def test_real_data_and_model_get_the_settings_of_the_paper():
    for arguments in (
        ["--model-name-or-path", "Salesforce/blip-image-captioning-base"],
        ["--data_dir", "photos"],
        [f"--config={RECIPES / 'configs/smile_blip/coco.yaml'}"],
    ):
        *_, config = recipe.parse_args(arguments)
        assert (config.learning_rate, config.freeze_vision_tower, config.cache_image_features) == (1e-5, False, False)
    *_, config = recipe.parse_args(["--seed", "3"])
    assert config.learning_rate == 2e-4  # the embedded world


def test_row_names(tmp_path):
    for settings, name in (
        ({"mle_weight": 1.0}, "MLE+MLE"),
        ({}, "SMILE"),
        ({"mle_weight": 0.05}, "SMILE (lambda=0.05)"),
        ({"subset": "reverse"}, "SMILE (reverse subset)"),
        ({"first_token": "shift"}, "SMILE (first token: shift)"),
    ):
        assert recipe.run_name(SmileConfig(str(tmp_path), **settings)) == name


def test_a_row_without_further_training(tmp_path):
    more = "--max_train_images 8 --max_eval_images 8 --max_test_images 12 --num_train_epochs 0"
    path = train(recipe, tmp_path, ONE_EPOCH, more)
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == ["MLE", "references"]
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    card = tmp_path / "out" / "model" / "README.md"
    assert "maximum likelihood" in card.read_text().lower()
    card.unlink()
    more += " --scorer none --held_out_scorer none --model_license 'research use'"
    results = json.loads(train(recipe, tmp_path, ONE_EPOCH, more).read_text())
    text = card.read_text()
    assert "research use" in text
    assert "No scorer ranked the captions" in text
    assert f"value: {round(results['rows'][0]['cider_d'], 6)}" in text
    assert main(["card", str(card.parent)]) == 0  # keeps what was measured
    assert card.read_text() == text
    assert main(["push", str(card.parent), "--dry_run"]) == 0


# --- Learning curves: every number of docs, by the scorer that selects and by the held-out one ---

CURVES_OF_TWO = [
    *"--max_steps 4 --eval_strategy steps --eval_steps 2 --save_strategy steps --save_steps 2".split(),
    *"--per_device_train_batch_size 8 --per_device_eval_batch_size 64 --load_best_model_at_end false".split(),
    *"--learning_curves true --perplexity_name_or_path none --compare_mle_weights 1 --early_evaluations".split(),
    *("--max_train_images", "16", "--max_eval_images", "8", "--max_test_images", "105", *GENERATION),
]


def test_every_run_has_a_curve_by_both_scorers(tmp_path):
    results = json.loads(train(recipe, tmp_path, CURVES_OF_TWO).read_text())
    rows, keys = {row["name"]: row for row in results["rows"]}, {key for key, _ in CURVES}
    assert list(results["learning_curves"]) == ["MLE+MLE", "SMILE"]
    for run, points in results["learning_curves"].items():
        assert [point["step"] for point in points] == [0, 2, 4]
        for point in points:
            assert point.keys() >= keys
            assert point["reward_rd100_recall_at_1"] != point["rd100_recall_at_1"]
        for key in keys:
            assert points[0][key] == rows["MLE"][key], key
            assert points[-1][key] == rows[run][key], key  # the weights of the last step, which are those of the row
    assert (tmp_path / "out" / "learning_curves.png").stat().st_size > 100


@pytest.mark.parametrize(
    ("images", "steps"),
    [pytest.param(["--max_train_images", "1280", "--max_eval_images", "100", "--num_train_epochs", "1"], {5, 10, 15, 20}),
     pytest.param([], set(range(5, 31)), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    ids=["short", "the demo"],
)  # fmt: skip
def test_the_defaults_end_at_the_best_dose_and_compare_with_the_starts_better_decoding(
    tmp_path, capsys, images, steps
):
    out = tmp_path / "out"
    few = ["--max_test_images", "100", "--compare_mle_weights", "--perplexity_name_or_path", "none"]
    recipe.main([*images, *few, "--report_to", "none", "--use_cpu", "--output_dir", str(out)])
    (line,) = (text for text in capsys.readouterr().out.splitlines() if text.startswith("Best after"))
    results = json.loads((out / "results.json").read_text())
    start, trained = results["rows"][:2]
    assert start["note"] == "with 3 beams, which is better for the start than 1"
    selection = results["selected"]["SMILE"]
    assert line.startswith(f"Best after {selection['step']} steps: {selection['length']:.1f} words")
    assert selection["step"] in steps
    assert selection["value"] > selection["start"]["value"]
    assert not selection["start"]["delivered"]
    assert trained["length"] > start["length"]
    with Image.open(out / "curves.png") as curves:
        assert curves.width > 300
