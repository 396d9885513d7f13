"""The policy gradient equals the numbers of the authors' code."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_captionrl.losses import policy_gradient_loss
from hf_captionrl.rewards import RunningMeanBaseline, make_baseline
from tests.losses.conftest import caption_log_probs
from tests.tolerances import assert_close, close

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "policy_gradient.json").read_text())


def criterion_inputs() -> tuple[Tensor, Tensor, Tensor]:
    given = VECTORS["reward_criterion"]
    distribution, ids = torch.tensor(given["logprobs"]).double(), torch.tensor(given["seq"])
    # The end token is 0; only the first one is scored.
    mask = torch.cat([torch.ones(len(ids), 1, dtype=torch.bool), ids[:, :-1] > 0], dim=1)
    return distribution, distribution.gather(2, ids.unsqueeze(2)).squeeze(2), mask


def test_reward_criterion():
    given = VECTORS["reward_criterion"]
    _, log_probs, mask = criterion_inputs()
    rewards = torch.tensor(given["reward"]).double()
    found = policy_gradient_loss(log_probs, rewards, mask, loss_type="dapo")["loss"]
    assert float(found) == close(given["mean"], dtype="float32")
    for n, expected in enumerate(given["none"]):
        rows = slice(n, n + 1)
        found = policy_gradient_loss(log_probs[rows], rewards[rows], mask[rows])["loss"]
        assert float(found) == close(expected, dtype="float32")


@pytest.mark.parametrize(("key", "weight"), [("new_self_critical", 0.0), ("new_self_critical_entropy_0.5", 0.5)])
def test_self_critical_with_leave_one_out(key, weight):
    """Their entropy is part of the reward and has no gradient, unlike `entropy_weight`."""
    given = VECTORS["new_self_critical"]
    distribution, log_probs, mask = criterion_inputs()
    entropy = -(distribution.exp() * distribution).sum(2)
    scores = torch.tensor(given["scores"]).double() + weight * (entropy * mask).sum(1) / mask.sum(1)
    advantages = make_baseline("leave_one_out", 2)(scores.view(2, 2)).flatten()
    found = policy_gradient_loss(log_probs, advantages, mask, loss_type="dapo")["loss"]
    assert float(found) == close(VECTORS[key]["loss_mean"], dtype="float32")


def test_sle_surrogate():
    given = VECTORS["sle_surrogate"]
    found = policy_gradient_loss(*(torch.tensor(given[n]) for n in ("log_probs", "rewards", "mask")), loss_type="dapo")
    assert float(found["loss"]) == close(given["loss"], dtype="float32")


def own_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.double().log_softmax(2).gather(2, ids.unsqueeze(2)).squeeze(2)


def test_log_probs_of_clipcap_captions():
    """No Detail Left Behind takes the mean up to and including the stop token, at the sampling temperature. DiscriTune
    divides the same sum by n + 1 if there is a stop token, so it differs by a factor n / (n + 1)."""
    given = VECTORS["caption_logprob"]
    ids, steps = torch.tensor(given["indices"]), torch.arange(6)
    logits = torch.tensor(given["logits"])
    expected = given["ndlb_T0.3"]
    lengths = torch.tensor(expected["msg_lengths"])
    found = caption_log_probs(own_log_probs(logits / 0.3, ids), steps < lengths[:, None])
    assert_close(found, torch.tensor(expected["log_probs"]).double(), dtype="float32")

    expected = given["discritune"]
    mask, divisor = torch.tensor(expected["mask"]).bool(), torch.tensor(expected["msg_lengths"])
    assert torch.equal(mask.sum(1), lengths)
    found = caption_log_probs(own_log_probs(logits, ids), mask) * lengths / divisor
    assert_close(found, torch.tensor(expected["log_probs"]).double(), dtype="float32")


def test_log_probs_of_blip_captions():
    given = VECTORS["blip_caption_logprob"]
    ids = torch.tensor(given["captions"])[:, 1:]
    ends = given["prefix_len"] - 1 + torch.tensor(given["msg_lengths"])
    mask = (torch.arange(6) >= given["prefix_len"] - 1) & (torch.arange(6) < ends[:, None])
    found = caption_log_probs(own_log_probs(torch.tensor(given["logits"])[:, :-1], ids), mask)
    assert_close(found, torch.tensor(given["log_probs"]).double(), dtype="float32")


@pytest.mark.parametrize(
    ("key", "update_first"),
    [
        ("discritune_rll_refactor(reward, then update)", False),
        ("ndlb_game.py(predict, update, then reward: alias)", True),
    ],
)
def test_running_mean_in_both_orders(key, update_first):
    """The authors' numbers are losses; a reward is minus a loss."""
    given = VECTORS["mean_baseline"]
    baseline = RunningMeanBaseline(update_first)
    log_probs = torch.tensor(given["log_probs"]).unsqueeze(1)
    for losses, expected in zip(given["batches"], given[key], strict=True):
        rewards = -torch.tensor(losses).unsqueeze(1)
        if update_first:
            baseline.update(float(rewards.mean()))
        assert -baseline.mean == close(expected["baseline_used"], dtype="float32")
        advantages = baseline(rewards).flatten()
        assert_close(-advantages, torch.tensor(expected["reward"]))
        found = policy_gradient_loss(log_probs, advantages, torch.ones(4, 1))["loss"]
        assert float(found) == close(expected["policy_loss"], dtype="float32")
        if not update_first:
            baseline.update(float(rewards.mean()))
