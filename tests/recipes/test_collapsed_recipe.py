"""A recipe delivers no collapsed model: exit code, folders, console, results, card and gallery."""

import json

import pytest

from hf_captionrl.captioners.pipeline import GeneratedCaptions
from hf_captionrl.trainers import caption_trainer as caption_evaluation
from hf_captionrl.utils.console import run_main
from recipes import self_retrieval_blip as recipe
from recipes import sle_blip
from tests.recipes.test_self_retrieval_blip import SHORT
from tests.recipes.test_sle_blip import SHORT as SHORT_SLE

HACKED = "a blue and blue blue blue and yellow blue"
ONE_RUN = [*SHORT, "--variants", "{}", "--perplexity_name_or_path", "none"]


@pytest.fixture
def hack(monkeypatch):
    """Replaces the captions of the given calls of beam search; training samples are as they are."""
    generate, calls = caption_evaluation.generate_with_ends, []

    def install(is_hacked):
        def generate_or_hack(*args, **kwargs):
            calls.append(1)
            found = generate(*args, **kwargs)
            if is_hacked(len(calls)):
                return GeneratedCaptions([HACKED] * len(found.captions), found.ended)
            return found

        monkeypatch.setattr(caption_evaluation, "generate_with_ends", generate_or_hack)

    return install


def arguments(tmp_path, *more):
    return ["--output_dir", str(tmp_path / "out"), "--feature_cache_dir", str(tmp_path / "cache"), *more]


def test_a_collapsed_recipe_writes_no_model_and_fails(tmp_path, hack, capsys):
    hack(lambda call: call > 2)  # all but the initial captioner on test and validation
    out = tmp_path / "out"
    (out / "model").mkdir(parents=True)
    (out / "model" / "model.safetensors").write_text("of an earlier start")
    with pytest.raises(SystemExit) as stop:
        run_main(lambda: recipe.main(arguments(tmp_path, *ONE_RUN)))
    assert stop.value.code == 1
    assert not (out / "model").exists()
    assert sorted(path.name for path in (out / "model-collapsed").iterdir()) == ["checkpoint-3", "checkpoint-6"]

    results = json.loads((out / "results.json").read_text())
    selected = results["selected"]["SR (bag curriculum)"]
    assert selected["step"] is None
    assert [entry["step"] for entry in selected["guard"]["refused"]] == [3, 6]
    assert "In 12 evaluated captions the share of degenerate captions was 1" in selected["collapsed"]
    rows = {row["name"]: row for row in results["rows"]}
    assert rows["SR (bag curriculum)"]["note"] == f"the captions have collapsed. {selected['collapsed']}"
    assert "note" not in rows["MLE"]
    assert (rows["MLE"]["degenerate"], rows["SR (bag curriculum)"]["degenerate"]) == (0.0, 1.0)
    assert "SR (bag curriculum): the captions have collapsed. In 12" in (out / "results.md").read_text()
    assert "The captions have collapsed, so this model is not delivered." in (out / "gallery.html").read_text()

    printed = capsys.readouterr()
    lines = printed.out.rstrip().splitlines()
    assert "; there is no model" in printed.out
    start = next(number for number, line in enumerate(lines) if line.startswith("-- Checkpoints"))
    shown = lines[start + 1 :]
    assert shown[0] == "SR (bag curriculum) (no model)"
    assert shown[1].startswith(
        "  No checkpoint was selected: the guard refused 2 evaluations and accepted none, and the"
    )
    assert shown[2].startswith("  Step 3: the guard refused the evaluation. In 12 evaluated captions")
    assert shown[3].startswith("  Step 6: the guard refused the evaluation.")
    assert shown[4].startswith("  The captions have collapsed, so this model is not delivered. In 12")
    assert len(shown) == 5
    # Degenerate is the first column, which no terminal hides.
    header = next(line for line in lines if "Degene-" in line)
    assert header.split()[0] == "Degene-"
    assert "The captions of 'SR (bag curriculum)' have collapsed, so model/ was not written." in printed.err


def test_the_delivered_checkpoint_is_the_accepted_one_and_card_and_gallery_say_so(tmp_path, hack, capsys):
    # Calls: test and validation before training, epochs 1 and 2, test.
    hack(lambda call: call == 4)
    path = recipe.main(arguments(tmp_path, *ONE_RUN))
    selected = json.loads(path.read_text())["selected"]["SR (bag curriculum)"]
    assert (selected["step"], selected["metric"]) == (3, "eval_reward_recall_at_1")
    assert "collapsed" not in selected
    delivered = (path.parent / "model" / "model.safetensors").read_bytes()
    assert delivered == (path.parent / "model" / "checkpoint-3" / "model.safetensors").read_bytes()
    for shown in (
        (path.parent / "gallery.html").read_text(),
        (path.parent / "model" / "README.md").read_text().replace("\\_", "_"),
    ):
        assert "Selected checkpoint-3: eval_reward_recall_at_1 = " in shown
        assert "Step 6: the guard refused the evaluation." in shown
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert lines[-3] == "SR (bag curriculum) (model/)"
    assert lines[-2].startswith("  Selected checkpoint-3: eval_reward_recall_at_1 = ")
    assert lines[-1].startswith("  Step 6: the guard refused the evaluation.")
    assert "model/" in next(line for line in lines if line.startswith("Written to"))


def test_without_evaluations_the_captions_of_the_test_split_decide(tmp_path, hack):
    hack(lambda call: call > 2)
    with pytest.raises(SystemExit, match="have collapsed"):
        recipe.main(arguments(tmp_path, *ONE_RUN, "--eval_strategy", "no", "--save_strategy", "no"))
    assert not (tmp_path / "out" / "model").exists()
    selected = json.loads((tmp_path / "out" / "results.json").read_text())["selected"]["SR (bag curriculum)"]
    assert "In 105 evaluated captions" in selected["collapsed"]


def test_a_collapsed_variant_is_a_row_with_a_note(tmp_path, hack, capsys):
    # Calls: test and validation before training, 2 epochs and test of the variant, then those of the recipe's run.
    hack(lambda call: call in (3, 4, 5))
    variants = json.dumps({"SR (random)": {"bag_schedule": None}})
    path = recipe.main(arguments(tmp_path, *SHORT, "--variants", variants, "--perplexity_name_or_path", "none"))
    results = json.loads(path.read_text())
    assert [row["name"] for row in results["rows"] if "note" in row] == ["SR (random)"]
    assert results["selected"]["SR (bag curriculum)"]["step"] is not None
    assert (path.parent / "model" / "model.safetensors").exists()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("SR (random): the captions have collapsed.") for line in lines)
    assert lines.index("SR (random)") < lines.index("SR (bag curriculum) (model/)")


def test_a_collapsed_run_of_sle_has_no_samples_and_no_model(tmp_path, hack):
    two = ["--compare_alphas", "1", "--compare_entropy_weights", "0", "--rl_start_epoch", "0"]
    two += ["--report_best_alpha", "false"]
    # Calls: test and validation before training, evaluation and test of SLL, then those of SLE.
    hack(lambda call: call > 4)
    with pytest.raises(SystemExit, match="have collapsed"):
        sle_blip.main(arguments(tmp_path, *SHORT_SLE, *two, "--perplexity_name_or_path", "none"))
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    other, row = (row for row in results["rows"] if row["name"].startswith("SL"))
    assert isinstance(other["rs_div_2"], float)
    assert row["rs_div_2"] is None
    assert row["rs_div_2_reason"] == "the captions have collapsed"
    assert not (tmp_path / "out" / "model").exists()


def test_recipes_go_back_and_select_by_default():
    *_, config = recipe.parse_args(["--use_cpu"])
    assert (config.guard, config.load_best_model_at_end) == ("rollback", True)
    assert config.metric_for_best_model == "reward_recall_at_1"
    *_, config = recipe.parse_args(["--use_cpu", "--save_strategy", "steps"])
    assert config.load_best_model_at_end is False
    *_, config = recipe.parse_args(["--use_cpu", "--eval_strategy", "no", "--save_strategy", "no"])
    assert config.load_best_model_at_end is False
    *_, config = recipe.parse_args(["--use_cpu", "--load_best_model_at_end", "false"])
    assert config.load_best_model_at_end is False
    *_, config = sle_blip.parse_args(["--use_cpu"])
    assert (config.guard, config.load_best_model_at_end) == ("rollback", True)
    # The study of what collapses trains every run to its end.
    *_, config = recipe.parse_args(["--row", "ndlb/scenes/hacking", "--use_cpu"])
    assert (config.guard, config.load_best_model_at_end) == ("warn", False)
