"""CaptionRLTrainer: the guard, the held-out scorer, the printed completions, and errors before training."""

import copy

import pytest
import torch
from safetensors.torch import load_file

from hf_captionrl.rewards import CiderReward
from hf_captionrl.trainers import CaptionRLConfig, CaptionRLTrainer, SelfRetrievalConfig, SelfRetrievalTrainer
from hf_captionrl.trainers.guard import GuardThresholds
from tests.trainers.policies import SAMPLED, captioner

from .rl_step import GREEDY, build


def looping(trainer):
    """Make the policy generate hacked captions from its third rollout on."""
    write, calls = trainer.rollouts.generate, []

    def hacked(images, **overrides):
        calls.append(1)
        completions = write(images, **overrides)
        if len(calls) > 2:
            completions.captions = ["a blue and blue blue blue and yellow blue"] * len(completions.captions)
        return completions

    trainer.rollouts.generate = hacked


@pytest.mark.parametrize("action", ["off", "warn", "stop", "rollback"])
def test_the_guard_acts_on_degenerate_captions(tmp_path, scenes, action, caplog):
    arguments = {
        **SAMPLED,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 1,
        "learning_rate": 0.01,
        "seed": 1,
    }
    trainer = build(tmp_path, scenes["train"], guard=action, guard_thresholds=GuardThresholds(window=2), **arguments)
    looping(trainer)
    trainer.train()
    # Two healthy rollouts, then one of a window of two is degenerate.
    assert trainer.state.global_step == (6 if action in ("off", "warn") else 3)
    assert ("hacked" in caplog.text) == (action != "off")
    if action != "off":
        assert "blue blue" in caplog.text
    saved = {n.name: load_file(n / "model.safetensors") for n in tmp_path.glob("checkpoint-*")}
    now = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    name = "text_decoder.bert.encoder.layer.0.attention.self.query.weight"
    assert torch.equal(now[name], saved["checkpoint-2"][name]) == (action == "rollback")


def test_the_held_out_scorer_is_compared_at_every_step(tmp_path, scenes, scorer, held_out_scorer):
    trainer = build(
        tmp_path,
        scenes["train"],
        scorer=scorer,
        held_out_scorer=held_out_scorer,
        guard="warn",
        **SAMPLED,
        logging_steps=1,
        max_steps=3,
    )
    trainer.args.logging_strategy = "steps"
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(entries) == 3
    for entry in entries:
        gap = entry["guard/reward_minus_held_out"]
        assert -1 <= gap <= 1
        # Shares of eight captions.
        assert round(gap * 8, 6) == round(gap * 8)
        assert entry["guard/length_p10"] <= entry["guard/length_p50"] <= entry["guard/length_p90"]
        assert {
            "guard/distinct_2",
            "guard/longest_repeat_max",
            "guard/degenerate",
            "guard/truncated_by_scorer",
        } <= entry.keys()


def test_completions_are_shown_with_their_rewards(tmp_path, scenes, capsys):
    arguments = {**SAMPLED, "log_completions": True, "num_completions_to_print": 3, "logging_steps": 1}
    trainer = build(tmp_path, scenes["train"], **arguments)
    trainer.args.logging_strategy = "steps"
    trainer.train()
    shown = capsys.readouterr().out
    assert "self_retrieval" in shown
    assert sum(f"train-{i:05d}" in shown for i in range(16)) == 3


def bad(tmp_path, scenes, match, *, dataset=None, **arguments):
    with pytest.raises(ValueError, match=match):
        build(tmp_path, dataset or scenes["train"], **arguments)


def test_bad_input_is_refused_before_training(tmp_path, scenes, scorer):
    bad(tmp_path, scenes, "larger than the batch", bags=True, bag_schedule=9, **SAMPLED)
    bad(tmp_path, scenes, "needs 32 different images", per_device_train_batch_size=32)
    bad(tmp_path, scenes, "no neighbours to make bags of", bag_schedule=2, **SAMPLED)
    bad(tmp_path, scenes, "needs batches of bags", distractor_scope="bag", **SAMPLED)
    bad(tmp_path, scenes, "every advantage is 0", baseline="greedy")
    bad(tmp_path, scenes, "needs 2 of them", baseline="leave_one_out", **SAMPLED)
    bad(tmp_path, scenes, "same caption 3 times", num_generations=3)
    bad(tmp_path, scenes, "temperature is 0", **{**SAMPLED, "temperature": 0.0})
    bad(tmp_path, scenes, "similarity_scale is 'big'", similarity_scale="big")
    with pytest.raises(ValueError, match="neighbours of 5 images"):
        SelfRetrievalTrainer(
            captioner(),
            scorer,
            SelfRetrievalConfig(str(tmp_path), **{**GREEDY, **SAMPLED}),
            scenes["train"],
            neighbours=torch.tensor([[1, 2], [0, 2], [0, 1], [0, 1], [0, 1]]),
        )
    config = CaptionRLConfig(str(tmp_path), **{**GREEDY, **SAMPLED})
    with pytest.raises(ValueError, match="no reward 'sider'"):
        CaptionRLTrainer(captioner(), "sider", config, scenes["train"])
    without = scenes["train"].remove_columns("captions").add_column("captions", [[]] + [["a cat"]] * 15)
    with pytest.raises(ValueError, match="1 training images have no reference"):
        CaptionRLTrainer(captioner(), CiderReward(), config, without)


def test_a_scorer_inside_the_policy_is_refused(tmp_path, scenes, scorer):
    model, twin = captioner(), copy.copy(scorer)
    twin.model = copy.deepcopy(scorer.model)
    twin.model.visual_projection.weight = next(iter(model.model.parameters()))
    bad(tmp_path, scenes, "scorer's parameter visual_projection.weight is the policy's", captioner=model, scorer=twin)


def test_the_held_out_scorer_evaluates(tmp_path, scenes, scorer, held_out_scorer):
    trainer = build(tmp_path, scenes["train"], scorer=scorer, held_out_scorer=held_out_scorer, **SAMPLED)
    assert trainer.scorer is held_out_scorer
    assert trainer.reward_scorer is scorer
    assert set(trainer.evaluate(scenes["validation"])) >= {"eval_recall_at_1", "eval_length"}
