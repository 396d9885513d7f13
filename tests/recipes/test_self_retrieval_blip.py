"""The self-retrieval recipe from the command line's arguments to every file it promises."""

import json

import pytest
import torch

from hf_captionrl.apps.experiments.self_retrieval import BagArguments, describe_reward, run_name, runs_of
from hf_captionrl.captioners import load_captioner
from hf_captionrl.metrics.columns import COLUMNS, REWARD_COLUMNS
from hf_captionrl.utils.model_files import model_path
from recipes import self_retrieval_blip as recipe
from tests.recipes.short_runs import GENERATION

SHORT = [
    *("--max_train_images", "24", "--max_eval_images", "12", "--max_test_images", "105", "--num_train_epochs", "2"),
    *("--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "32", "--max_completion_length", "10"),
    *GENERATION,
    *("--bag_schedule", '{"1": 2, "2": 4}', "--num_neighbours", "8", "--logging_steps", "1"),
]


def test_table_has_columns_of_reward_scorer_and_held_out_scorer(run):
    results = json.loads((run / "results.json").read_text())
    assert [row["name"] for row in results["rows"]] == ["MLE", "SR (random)", "SR (bag curriculum)", "references"]
    for row in results["rows"]:
        for column in (*COLUMNS, *REWARD_COLUMNS):
            assert isinstance(row[column.key], float), (row["name"], column.key)
    start, curriculum = results["rows"][0], results["rows"][2]
    # Two scorers of different seeds do not agree on everything; were they one, these would be equal.
    assert any(start[f"bag_{k}_recall_at_1"] != start[f"reward_bag_{k}_recall_at_1"] for k in (3, 5, 7))
    assert results["config"]["SelfRetrievalRecipeConfig"]["bag_schedule"] == {"1": 2, "2": 4}
    assert curriculum["cider_d"] is not None


def test_everything_is_written(run):
    for name in ("results.md", "gallery.html", "curves.png", "model/README.md", "model/model.safetensors"):
        assert (run / name).stat().st_size > 100, name
    card = (run / "model" / "README.md").read_text()
    assert "REINFORCE" in card
    assert "log-probability that the scorer gives the image" in card
    assert "bags of look-alikes" in card
    assert load_captioner(str(run / "model"), dtype=torch.float32).family == "blip"
    assert (run / "model-sr--random").is_dir()


def test_curriculum_increases_the_bag_size(run):
    checkpoints = sorted((run / "model").glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    history = json.loads((checkpoints[-1] / "trainer_state.json").read_text())["log_history"]
    sizes = [entry["bag_size"] for entry in history if "bag_size" in entry]
    assert sizes == [2, 2, 2, 4, 4, 4]


def test_adapters_and_cider(tmp_path):
    path = recipe.main(
        [
            *("--output_dir", str(tmp_path / "out"), "--feature_cache_dir", str(tmp_path / "cache"), *SHORT),
            *("--tune", "both", "--lora_r", "4", "--cider_weight", "0.5", "--variants", "{}"),
            *("--freeze_vision_tower", "false", "--cache_image_features", "false", "--max_steps", "1"),
            *("--bag_features", "image", "--perplexity_name_or_path", "none"),
        ]
    )
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["MLE", "SR (bag curriculum, CIDEr 0.5)", "references"]
    assert (path.parent / "model" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_cider_alone(tmp_path):
    path = recipe.main(
        [
            *("--output_dir", str(tmp_path / "out"), "--feature_cache_dir", str(tmp_path / "cache"), *SHORT),
            *("--retrieval_weight", "0", "--cider_weight", "1", "--variants", "{}", "--max_steps", "1"),
            *("--repetition_weight", "0", "--truncation_weight", "0"),
            *("--perplexity_name_or_path", "none"),
        ]
    )
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["MLE", "CIDEr (bag curriculum)", "references"]
    (state,) = (path.parent / "model").glob("checkpoint-*/trainer_state.json")
    logged = {name for entry in json.loads(state.read_text())["log_history"] for name in entry}
    assert {name for name in logged if name.startswith("rewards/") and name.endswith("/mean")} == {
        "rewards/cider/mean"
    }
    assert "Reward: CIDEr-D with the end token; batches" in (path.parent / "model" / "README.md").read_text()


def test_an_evaluation_trains_nothing(tmp_path):
    path = recipe.main(
        [
            *("--output_dir", str(tmp_path / "out"), "--feature_cache_dir", str(tmp_path / "cache"), *SHORT),
            *("--num_train_epochs", "0", "--perplexity_name_or_path", "none"),
        ]
    )
    rows = json.loads(path.read_text())["rows"]
    # Of the variants, too, nothing is left: they would all be the captioner that was named.
    assert [row["name"] for row in rows] == ["MLE", "references"]
    assert isinstance(rows[0]["reward_rd100_recall_at_1"], float)
    assert not list(path.parent.glob("model*/checkpoint-*"))
    # A card would have to say how the captioner was made, which is unknown here.
    assert not (path.parent / "model" / "README.md").exists()
    start = load_captioner(model_path("scenes:blip-mle"), dtype=torch.float32).model.state_dict()
    same = load_captioner(str(path.parent / "model"), dtype=torch.float32).model.state_dict()
    assert all(torch.equal(value, same[name]) for name, value in start.items())


def parsed(*argv):
    return recipe.parse_args(list(argv))[-1]


def changed(config, changes):
    """The configuration of a variant."""
    return runs_of(config, {"variant": changes})["variant"]


def test_names_of_rows():
    assert run_name(parsed()) == "SR (bag curriculum)"
    assert run_name(parsed("--bag_schedule", "20", "--beta", "0.1")) == "SR (bags of 20, KL 0.1)"
    config = parsed("--config", "recipes/configs/self_retrieval_blip/scenes.yaml")
    other = changed(config, {"bag_schedule": None, "distractor_scope": "hard", "num_hard_distractors": 5})
    assert run_name(other) == "SR (5 hard)"
    assert run_name(changed(config, {"cider_weight": 0.5, "baseline": "none"})) == (
        "SR (bag curriculum, CIDEr 0.5, baseline none)"
    )
    assert run_name(changed(config, {"bag_distractors": "random"})) == "SR (bag curriculum of random images)"
    assert config.bag_schedule is not None  # a variant is a copy
    alone = changed(config, {"retrieval_weight": 0, "cider_weight": 1.0, "bag_schedule": None})
    assert run_name(alone) == "CIDEr (random)"
    assert (alone.baseline, alone.do_sample) == (config.baseline, config.do_sample)  # nothing follows from a change
    assert run_name(changed(config, {"retrieval_weight": 2.0})) == "SR (bag curriculum, SR 2)"


class NamedScorer:
    signature = "tiny-clip@main|RN"


def test_the_card_says_what_was_rewarded():
    config = parsed("--config", "recipes/configs/self_retrieval_blip/scenes.yaml")

    def said(**changes):
        return describe_reward(changed(config, changes), [NamedScorer()])

    penalties = "plus the penalty on repetition, plus the penalty on truncated captions"
    plain = said(bag_schedule=None)
    assert plain.startswith(
        f"The log-probability that the scorer gives the image after reading the caption, {penalties}; scorer tiny"
    )
    assert plain.endswith("batches of 100 images per process, from random images.")
    assert said(cider_weight=0.5, reward_kind="cosine") == (
        "The cosine between caption and image under the scorer, plus 0.5 times CIDEr-D with the end token, "
        f"{penalties}; scorer tiny-clip@main; "
        "batches of 100 images per process, from bags of look-alikes."
    )
    assert said(cider_weight=1.0, retrieval_weight=0, bag_schedule=None) == (
        f"CIDEr-D with the end token, {penalties}; batches of 100 images per process, from random images."
    )
    assert said(bag_distractors="random").endswith("from random images.")
    assert (
        ", plus 0.25 times the penalty on repetition, plus 0.5 times the penalty on tokens beyond the 20th;"
        in said(length_weight=0.5, max_tokens=20, repetition_weight=0.25, truncation_weight=0.0)
    )
    assert said(retrieval_weight=2.0, reward_kind="accuracy").startswith("2 times 1 where the scorer finds")


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has the name of the recipe's own run\. Use another name"):
        runs_of(parsed(), {run_name(parsed()): {"beta": 0.1}})
    with pytest.raises(ValueError, match="'variant' sets 'bag_shedule'"):
        changed(parsed(), {"bag_shedule": 3})
    with pytest.raises(ValueError, match="needs 2 of them"):
        changed(parsed(), {"baseline": "leave_one_out"})
    with pytest.raises(ValueError, match="variant 'x' is 3"):
        BagArguments(variants='{"x": 3}')
    with pytest.raises(ValueError, match="'multimodal' or 'image'"):
        BagArguments(bag_features="text")
    with pytest.raises(ValueError, match="needs a reward scorer and a held-out scorer"):
        recipe.main(["--held_out_scorer_name_or_path", "none", "--output_dir", str(tmp_path), *SHORT])
    with pytest.raises(ValueError, match="num_train_epochs=0 only evaluates"):
        recipe.main(["--output_dir", str(tmp_path), *SHORT, "--num_train_epochs", "0", "--push_to_hub", "true"])
