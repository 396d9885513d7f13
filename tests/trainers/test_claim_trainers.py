"""Rewards of claims and questions in every trainer, and the gradient of credit per claim against a loop."""

import pytest
import torch

from hf_captionrl.experimental.claim_rewards import ClaimReward
from hf_captionrl.experimental.question_rewards import QuestionReward
from hf_captionrl.rewards.base import function_context
from hf_captionrl.scenes import load_scenes
from hf_captionrl.scenes.truth_checker import mark_caption
from hf_captionrl.trainers import (
    CaptionRLConfig,
    CaptionRLTrainer,
    SelfRetrievalConfig,
    SelfRetrievalTrainer,
    SLEConfig,
    SLETrainer,
)
from tests.trainers.grpo_worker import make_trainer, trainer_of_trl
from tests.trainers.one_step import PLAIN_SGD, assert_one_plain_step, captioner, spy_on, weights

SHORT = {"max_completion_length": 12, "guard": "off", "num_generations": 3, "per_device_train_batch_size": 4}
SETTINGS = {**PLAIN_SGD, **SHORT, "logging_strategy": "steps", "logging_steps": 1, "report_to": "none"}


@pytest.fixture(scope="module")
def data():
    return load_scenes(num_train=8, num_validation=1, num_test=0)["train"]


def of_captions(name, captions, facts):
    """The reward of each caption alone."""
    reward = ClaimReward() if name == "claim_f1" else QuestionReward()
    found = [
        reward(function_context([c], torch.tensor([0]), ["0"], {"facts": [f]}))
        for c, f in zip(captions, facts, strict=True)
    ]
    return [float(value) for value in found]


def make(kind, folder, data, rewards):
    if kind == "caption_rl":
        args = CaptionRLConfig(str(folder), **SETTINGS, baseline="leave_one_out")
        return CaptionRLTrainer(captioner(), rewards, args, data)
    if kind == "sle":
        return SLETrainer(captioner(), SLEConfig(str(folder), **SETTINGS), data, reward_funcs=rewards)
    args = SelfRetrievalConfig(str(folder), **SETTINGS, baseline="leave_one_out", do_sample=True)
    return SelfRetrievalTrainer(captioner(), None, args, data, reward_funcs=rewards)


@pytest.mark.parametrize("kind", ["caption_rl", "sle", "self_retrieval"])
def test_rewards_by_name_reach_the_trainer(tmp_path, data, kind):
    trainer = make(kind, tmp_path, data, ["claim_f1", "question_oracle"])
    rollouts = spy_on(trainer.rollouts, "roll_out")
    trainer.train()
    ((context, rewards, _),) = rollouts
    facts = [f for f in context.columns["facts"] for _ in range(3)]
    for column, name in enumerate(["claim_f1", "question_oracle"]):
        expected = of_captions(name, context.captions, facts)
        assert rewards[:, column].tolist() == pytest.approx(expected)
        assert len(set(expected)) > 3
        (logged,) = [entry for entry in trainer.state.log_history if f"rewards/{name}/mean" in entry]
        assert logged[f"rewards/{name}/mean"] == pytest.approx(sum(expected) / len(expected))
    assert "claims/wrong" in logged


def test_credit_per_claim_is_the_gradient_of_a_loop(tmp_path, data):
    """One step of SGD, with micro-batches of different widths; every token is weighted by hand."""
    settings = SETTINGS | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "loss_type": "sum"}
    args = CaptionRLConfig(str(tmp_path), **settings, baseline="group_mean")
    policy = captioner()
    trainer = CaptionRLTrainer(policy, ClaimReward(score="precision", credit="claim"), args, data)
    rollouts, start = spy_on(trainer.rollouts, "roll_out"), captioner()
    trainer.train()
    ((context, rewards, advantages),) = rollouts
    loss = torch.zeros(())
    rows = [data[int(row)] for row in context.rows]
    credited = 0
    for n, caption in enumerate(context.captions):
        row = rows[n // 3]
        ids = context.ids[n][context.mask[n]]
        batch = start.encode_completions(ids[None]) | start.encode_images([row["image"]])
        log_probs = start.log_probs(batch)[0]
        log_probs = log_probs[start.align_labels(batch["labels"])[0] != -100]
        group = rewards[n // 3 * 3 : n // 3 * 3 + 3, 0]
        assert float(advantages[n]) == pytest.approx(float(rewards[n, 0] - group.mean()))
        marks, before = mark_caption(caption, row["facts"]), ""
        for t in range(len(ids)):
            so_far = start.tokenizer.decode(ids[: t + 1], skip_special_tokens=True).strip()
            mine = [m for m in marks if len(before) < m.end and m.start < len(so_far) and so_far != before]
            truth = sum(m.verdict == "right" for m in mine) / max(len(mine), 1)
            weight = truth - float(group.mean()) if mine else float(advantages[n])
            credited += abs(weight - float(advantages[n])) > 1e-3
            loss = loss - weight * log_probs[t] / len(context.captions)
            before = so_far
    assert credited > 5
    assert_one_plain_step(weights(trainer), start.model, loss, ulps=256)


def test_credit_has_the_units_of_the_reward(tmp_path, data):
    args = CaptionRLConfig(str(tmp_path), **SETTINGS, baseline="group_mean", scale_rewards="group")
    with pytest.raises(ValueError, match="scale_rewards"):
        CaptionRLTrainer(captioner(), ClaimReward(credit="claim"), args, data)


def test_grpo_and_the_trainer_of_trl(tmp_path, data):
    rewards = ["claim_f1", QuestionReward("oracle", prior=True)]
    trainer = make_trainer(str(tmp_path), scorer=None, max_steps=1, trainer_arguments={"reward_funcs": rewards})
    seen = spy_on(trainer, "_calculate_rewards")
    contexts = spy_on(trainer, "reward_context")
    trainer.train()
    facts = [f for f in contexts[0].columns["facts"] for _ in range(2)]
    assert seen[0][:, 0].tolist() == pytest.approx(of_captions("claim_f1", contexts[0].captions, facts), abs=1e-6)
    arguments = {"reward_funcs": ClaimReward(credit="claim")}
    with pytest.raises(ValueError, match="credit"):
        make_trainer(str(tmp_path), scorer=None, trainer_arguments=arguments)

    own = trainer_of_trl(tmp_path, data, [ClaimReward().as_function(), QuestionReward().as_function()])
    own.train()
    assert {"rewards/claim_f1/mean", "rewards/question_oracle/mean"} <= own.state.log_history[0].keys()
