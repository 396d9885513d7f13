"""A collapsed policy is never selected: the captions of every evaluation are checked as they are written."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file

from hf_captionrl.captioners.pipeline import GeneratedCaptions
from hf_captionrl.metrics import self_retrieval
from hf_captionrl.trainers import CaptionRLConfig, CaptionRLTrainer
from hf_captionrl.trainers.caption_rl_trainer import STATE_FILE
from hf_captionrl.trainers.checkpoints import SELECTION_FILE, selection_lines
from hf_captionrl.trainers.guard import GuardThresholds
from tests.trainers.policies import SAMPLED, captioner
from tests.trainers.rl_step import build

HACKED = "a blue and blue blue blue and yellow blue"
EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
BEST = {**EVERY_STEP, **SAMPLED, "load_best_model_at_end": True, "learning_rate": 0.01, "generation_num_beams": 1}
QUERY = "text_decoder.bert.encoder.layer.0.attention.self.query.weight"


def evaluated(folder, scenes, recalls, hacked=(), *, samples_hacked=(), resume=False, **arguments):
    """A run with a given R@1 after each step, in which captions of evaluations or of rollouts are hacked."""
    settings = {**BEST, "max_steps": len(recalls), "guard": "warn", **arguments}
    trainer = build(
        folder,
        scenes["train"],
        eval_dataset=scenes["validation"],
        guard_thresholds=GuardThresholds(window=2),
        **settings,
    )
    generate, describe = trainer._generate, trainer._describe
    roll_out = trainer.rollouts.generate

    def generate_or_hack(dataset, **overrides):
        if trainer.state.global_step in hacked:
            return GeneratedCaptions([HACKED] * len(dataset), [True] * len(dataset))
        return generate(dataset, **overrides)

    def describe_as_given(dataset, captions):
        metrics, ranks = describe(dataset, captions)
        return metrics | {"recall_at_1": recalls[trainer.state.global_step - 1]}, ranks

    def roll_out_or_hack(images, **overrides):
        completions = roll_out(images, **overrides)
        if trainer.state.global_step + 1 in samples_hacked:
            completions.captions = [HACKED] * len(completions.captions)
        return completions

    trainer._generate, trainer._describe = generate_or_hack, describe_as_given
    trainer.rollouts.generate = roll_out_or_hack
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def has_weights_of(trainer, folder):
    return torch.equal(trainer.model.state_dict()[QUERY], load_file(folder / "model.safetensors")[QUERY])


def test_an_accepted_checkpoint_is_selected_although_a_collapsed_one_has_a_higher_recall(tmp_path, scenes, capsys):
    trainer = evaluated(tmp_path, scenes, [0.2, 0.9, 0.4, 0.3], hacked=[2])
    assert has_weights_of(trainer, tmp_path / "checkpoint-3")
    assert not has_weights_of(trainer, tmp_path / "checkpoint-2")
    selection = trainer.selection
    assert (selection["step"], selection["value"], selection["evaluations"]) == (3, 0.4, 3)
    assert trainer.collapsed is None
    # The samples of all steps were fine: the greedy captions of the evaluation decided.
    assert selection["guard"]["trips"] == []
    (refused,) = selection["guard"]["refused"]
    assert refused["step"] == 2
    assert refused["reason"].startswith("In 12 evaluated captions the share of degenerate captions was 1, above")
    assert HACKED in refused["reason"]
    assert "Selected checkpoint-3: eval_recall_at_1 = 0.4, the highest of 3 evaluations" in capsys.readouterr().out
    assert selection_lines(selection)[1].startswith("Step 2: the guard refused the evaluation. In 12 evaluated")
    evaluations = {e["step"]: e for e in trainer.state.log_history if "eval_degenerate" in e}
    assert {step: e["eval_degenerate"] for step, e in evaluations.items()} == {1: 0.0, 2: 1.0, 3: 0.0, 4: 0.0}
    assert all(0 <= e["eval_clipped_ratio"] <= 1 for e in evaluations.values())
    trainer.save_model()
    assert json.loads((tmp_path / SELECTION_FILE).read_text())["guard"]["refused"] == [refused]


def test_a_refused_evaluation_is_not_a_tie(tmp_path, scenes):
    trainer = evaluated(tmp_path, scenes, [0.4, 0.4, 0.1], hacked=[2])
    assert (trainer.selection["step"], trainer.selection["ties"]) == (1, [])


def test_without_a_guard_the_highest_recall_is_selected(tmp_path, scenes):
    trainer = evaluated(tmp_path, scenes, [0.2, 0.9, 0.4], hacked=[2], guard="off")
    assert trainer.selection["step"] == 2
    assert "guard" not in trainer.selection
    assert trainer.collapsed is None


def test_no_checkpoint_is_selected_while_the_samples_are_hacked(tmp_path, scenes):
    """Beam search may hide for some steps what the samples already show."""
    trainer = evaluated(tmp_path, scenes, [0.2, 0.3, 0.9, 0.8], samples_hacked=[3, 4])
    assert trainer.selection["step"] == 2
    assert [entry["step"] for entry in trainer.selection["guard"]["refused"]] == [3, 4]
    assert [(trip["step"], trip["action"]) for trip in trainer.selection["guard"]["trips"]] == [(3, "warn")]


def test_if_every_evaluation_is_refused_the_trainer_says_that_the_model_has_collapsed(tmp_path, scenes, caplog):
    with caplog.at_level(logging.WARNING, logger="hf_captionrl"):
        trainer = evaluated(tmp_path, scenes, [0.2, 0.9], hacked=[1, 2])
    assert has_weights_of(trainer, tmp_path / "checkpoint-2")
    assert trainer.selection["step"] is None
    assert trainer.selection["kept_instead"] == (
        "the guard refused 2 evaluations and accepted none, and the weights of step 2 are kept"
    )
    assert trainer.collapsed == trainer.selection["collapsed"]
    assert "degenerate captions was 1" in trainer.collapsed
    assert "The captions have collapsed. Do not use this model." in caplog.text
    # The next training of this trainer is judged anew.
    trainer._generate = lambda data, **_: GeneratedCaptions(["a cat"] * len(data), [True] * len(data))
    trainer.train()
    assert trainer.collapsed is None
    assert trainer.selection["guard"]["refused"] == []


def test_after_a_rollback_the_best_accepted_checkpoint_is_loaded(tmp_path, scenes):
    trainer = evaluated(tmp_path, scenes, [0.9, 0.5, 0.1, 0.1], samples_hacked=[3, 4], guard="rollback")
    assert trainer.state.global_step == 3
    (trip,) = trainer.selection["guard"]["trips"]
    assert (trip["step"], trip["action"], trip["rolled_back_to"]) == (3, "rollback", "checkpoint-2")
    assert trainer.selection["step"] == 1
    assert "kept_instead" not in trainer.selection
    assert has_weights_of(trainer, tmp_path / "checkpoint-1")
    # At step 3 the policy is that of step 2 again: there is nothing to evaluate or save.
    assert [e["step"] for e in trainer.state.log_history if "eval_recall_at_1" in e] == [1, 2]
    assert not (tmp_path / "checkpoint-3").exists()
    assert "The weights were rolled back to checkpoint-2." in selection_lines(trainer.selection)[1]


def test_a_refused_checkpoint_is_not_rolled_back_to(tmp_path, scenes):
    trainer = evaluated(tmp_path, scenes, [0.9, 0.5, 0.1, 0.1], hacked=[2], samples_hacked=[3, 4], guard="rollback")
    assert trainer.selection["guard"]["trips"][0]["rolled_back_to"] == "checkpoint-1"


def test_a_stopped_run_without_selection_says_that_its_weights_have_collapsed(tmp_path, scenes):
    settings = {"guard": "stop", "load_best_model_at_end": False}
    trainer = evaluated(tmp_path, scenes, [0.2, 0.3, 0.9, 0.8], samples_hacked=[3, 4], **settings)
    assert trainer.state.global_step == 3
    assert trainer.collapsed is not None
    assert trainer.selection["kept_instead"] == "load_best_model_at_end is False, and the weights of step 3 are kept"
    assert "Training stopped." in selection_lines(trainer.selection)[1]
    rolled = evaluated(tmp_path / "b", scenes, [0.2, 0.3, 0.9], samples_hacked=[3], **settings | {"guard": "rollback"})
    assert rolled.collapsed is None
    assert (
        rolled.selection["kept_instead"]
        == "load_best_model_at_end is False, and the guard rolled back to checkpoint-2"
    )


def test_a_resumed_run_knows_its_refused_evaluations_and_trips(tmp_path, scenes):
    evaluated(tmp_path, scenes, [0.4, 0.9, 0.3], hacked=[2], samples_hacked=[2])
    state = json.loads((tmp_path / "checkpoint-3" / STATE_FILE).read_text())["guard"]
    assert [entry["step"] for entry in state["refused"]] == [2, 3]
    assert [entry["step"] for entry in state["trips"]] == [2]
    trainer = evaluated(tmp_path, scenes, [0.0, 0.0, 0.0, 0.2, 0.5], resume=True)
    assert trainer.selection["step"] == 5
    assert trainer.selection["guard"]["refused"][:2] == state["refused"]
    assert trainer.selection["guard"]["trips"] == state["trips"]


def test_a_stopped_run_that_is_resumed_stops_again(tmp_path, scenes):
    settings = {"samples_hacked": [2, 3, 4, 5], "guard": "stop"}
    assert evaluated(tmp_path, scenes, [0.2] * 5, **settings).state.global_step == 2
    resumed = evaluated(tmp_path, scenes, [0.2] * 5, resume=True, **settings)
    assert resumed.state.global_step == 3
    assert [trip["step"] for trip in resumed.guard.trips] == [2, 3]
    assert resumed.selection["step"] == 1


def test_a_policy_that_a_reward_makes_repeat_itself_is_not_delivered(tmp_path, scenes, scorer):
    def repeated_words(completions):
        return [float(len(text.split()) - len(set(text.split()))) for text in completions]

    settings = {"num_generations": 4, "baseline": "leave_one_out", "max_completion_length": 12}
    settings |= {
        "cache_image_features": True,
        "feature_cache_dir": str(tmp_path / "cache"),
        "freeze_vision_tower": True,
    }
    settings |= {"learning_rate": 1e-3, "max_steps": 10, "per_device_train_batch_size": 16, "guard": "warn"}
    settings |= {"generation_num_beams": 2, "generation_max_new_tokens": 30, "load_best_model_at_end": True}
    settings |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True, **EVERY_STEP}
    trainer = CaptionRLTrainer(
        captioner(),
        [repeated_words],
        CaptionRLConfig(str(tmp_path / "out"), **settings),
        scenes["train"],
        scenes["validation"],
        scorer=scorer,
    )
    trainer.train()
    collapsed = [e["step"] for e in trainer.state.log_history if e.get("eval_degenerate", 0) > 0.5]
    assert collapsed[-1] == 10  # without the guard, this would be the last policy
    refused = [entry["step"] for entry in trainer.selection["guard"]["refused"]]
    assert set(collapsed) <= set(refused)
    assert trainer.selection["step"] not in refused
    assert trainer.collapsed is None
    written = trainer._generate(scenes["validation"])
    assert trainer.guard.reason_against(written.captions, torch.tensor(written.ended)) is None


# Which scorer selects


def test_the_reward_scorer_selects_and_not_the_held_out_one(tmp_path, scenes, scorer, held_out_scorer):
    both = {"scorer": scorer, "held_out_scorer": held_out_scorer, "guard": "warn"}
    trainer = build(tmp_path, scenes["train"], eval_dataset=scenes["validation"], **both, **BEST)
    assert trainer.args.metric_for_best_model == "reward_recall_at_1"
    assert trainer.args.greater_is_better
    found = trainer.evaluate(scenes["validation"])
    captions = trainer.generate_captions(scenes["validation"])
    for name, used in (("reward_recall_at_1", scorer), ("recall_at_1", held_out_scorer)):
        images = trainer.scorer_image_features(used, trainer._rows_of(scenes["validation"]))
        expected = self_retrieval(torch.as_tensor(used.text_features(captions)), images)["recall_at_1"]
        assert found[f"eval_{name}"] == pytest.approx(float(expected))
    assert "eval_reward_rd100_recall_at_1" not in found  # 12 images


def test_a_metric_that_is_named_stays(tmp_path, scenes, scorer, held_out_scorer):
    both = {"scorer": scorer, "held_out_scorer": held_out_scorer}
    trainer = build(
        tmp_path, scenes["train"], eval_dataset=scenes["validation"], **both, metric_for_best_model="length", **BEST
    )
    assert trainer.args.metric_for_best_model == "length"


def test_a_single_scorer_selects_by_its_recall(tmp_path, scenes, scorer):
    trainer = build(tmp_path, scenes["train"], eval_dataset=scenes["validation"], scorer=scorer, **BEST)
    assert trainer.args.metric_for_best_model == "recall_at_1"
    assert "eval_reward_recall_at_1" not in trainer.evaluate(scenes["validation"])
    config = CaptionRLConfig(str(tmp_path), use_cpu=True, **{k: v for k, v in BEST.items() if k != "learning_rate"})
    with pytest.raises(ValueError, match="chosen by 'recall_at_1', which needs a scorer"):
        CaptionRLTrainer(captioner(), "cider", config, scenes["train"], scenes["validation"])


def test_the_guard_accepts_ordinary_captions(tmp_path, scenes):
    guard = build(tmp_path, scenes["train"], guard="warn", **SAMPLED).guard
    good = ["a cat on a bed", "two dogs", ""]
    assert guard.reason_against(good) is None
    assert guard.reason_against([]) is None
    assert "share of truncated captions was 0.333" in guard.reason_against(good, torch.tensor([True, False, True]))
    long = " ".join(f"word{number}" for number in range(60))
    assert "length in words was" in guard.reason_against([long])
    assert f"for example {long!r}" in guard.reason_against([long, "a cat"] * 2)
