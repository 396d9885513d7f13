"""Learning curves of SMILE, SLE and video recipes: every number of docs, by the scorer that selects and by the held-out one."""

import json

import pytest

import hf_captionrl.scenes as scenes
from hf_captionrl.evaluation.plots import CURVES
from recipes import sle_blip, smile_blip, smile_video
from tests.recipes.short_runs import GENERATION

KEYS = {key for key, _ in CURVES}
SHORT = [
    *(
        "--max_steps",
        "4",
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "2",
        "--save_strategy",
        "steps",
        "--save_steps",
        "2",
    ),
    *("--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "64", "--load_best_model_at_end", "false"),
    *("--learning_curves", "true", "--perplexity_name_or_path", "none", *GENERATION),
]
SIZES = [*("--max_train_images", "16", "--max_eval_images", "8", "--max_test_images", "105")]
RECIPES = {
    "smile": (smile_blip, [*SIZES, "--compare_mle_weights", "1"], ["MLE+MLE", "SMILE"]),
    "sle": (
        sle_blip,
        [
            *(*SIZES, "--compare_alphas", "1.0", "--compare_entropy_weights", "0.01", "--num_generations", "3"),
            *("--num_samples", "2", "--sample_images", "2", "--sample_temperatures", "1.0"),
        ],
        ["SLL", "SLL-ME (entropy=0.01)", "SLE (alpha=0.6)"],
    ),
    # The captioner after the first epochs is not evaluated on the way, so that it has no curve.
    "video": (smile_video, ["--mle_epochs", "1", "--compare_mle_weights", "1"], ["MLE+MLE", "SMILE"]),
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_run_has_a_curve_by_both_scorers(name, tmp_path, monkeypatch):
    recipe, arguments, runs = RECIPES[name]
    if name == "video":
        made = scenes.load_moving_scenes(num_train=16, num_validation=6, num_test=105)
        monkeypatch.setattr(scenes, "load_moving_scenes", lambda: made)
    folders = ["--output_dir", str(tmp_path / "out"), "--feature_cache_dir", str(tmp_path / "cache")]
    results = json.loads(recipe.main([*folders, *SHORT, *arguments]).read_text())
    rows = {row["name"]: row for row in results["rows"]}
    assert list(results["learning_curves"]) == runs
    for run, points in results["learning_curves"].items():
        assert [point["step"] for point in points] == [0, 2, 4]
        for point in points:
            assert point.keys() >= KEYS
            assert point["reward_rd100_recall_at_1"] != point["rd100_recall_at_1"]
        start, end = rows["MLE first" if name == "video" else "MLE"], rows[run]
        for key in KEYS:
            assert points[0][key] == start[key], key
            assert points[-1][key] == end[key], key  # the weights of the last step, which are those of the row
    assert (tmp_path / "out" / "learning_curves.png").stat().st_size > 100


def test_without_learning_curves_the_scorer_that_selects_only_selects(tmp_path):
    folders = ["--output_dir", str(tmp_path / "out"), "--feature_cache_dir", str(tmp_path / "cache")]
    quick = [*SIZES, "--compare_mle_weights", "0", *SHORT, "--learning_curves", "false", "--max_steps", "2"]
    results = json.loads(smile_blip.main([*folders, *quick]).read_text())
    assert not any(key.startswith("reward_") for row in results["rows"] for key in row)
    assert not results.get("learning_curves")
