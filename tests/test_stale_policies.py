"""Captions of a policy that is several updates old."""

from collections import deque
from types import SimpleNamespace

import torch
from torch import nn

from hf_captionrl.losses import policy_gradient_loss
from hf_captionrl.trainers import SelfRetrievalTrainer
from hf_captionrl.trainers.caption_rl_trainer import CaptionRLTrainer
from scripts import stale_policies
from scripts.stale_policies import StaleTrainer, table


def stale_trainer(updates, uses_ratio=False):
    trainer = StaleTrainer.__new__(StaleTrainer)
    trainer.model, trainer.uses_ratio = nn.Linear(1, 1, bias=False), uses_ratio
    trainer.past = deque(maxlen=updates + 1)
    return trainer


def test_the_policy_of_two_updates_ago_writes_and_the_present_one_is_trained(monkeypatch):
    trainer, wrote, scored = stale_trainer(updates=2, uses_ratio=True), [], []
    trainer._step_inputs, trainer.captioner, trainer.args = [{}], None, None
    monkeypatch.setattr(SelfRetrievalTrainer, "begin_step", lambda self: wrote.append(self.model.weight.item()))

    def log_probs(captioner, inputs, args):
        scored.append(trainer.model.weight.item())
        return torch.tensor([scored[-1]]), None

    monkeypatch.setattr(stale_policies, "token_log_probs", log_probs)
    for step in range(5):
        nn.init.constant_(trainer.model.weight, step)
        trainer.begin_step()
        assert trainer.model.weight.item() == step
        assert trainer._step_inputs[0]["old_log_probs"].item() == wrote[-1]
    assert wrote == scored == [0, 0, 0, 1, 2]


def test_weights_return_after_an_error(monkeypatch):
    trainer = stale_trainer(updates=1)

    def fail(self):
        raise RuntimeError("stop")

    monkeypatch.setattr(SelfRetrievalTrainer, "begin_step", fail)
    for step in range(2):
        nn.init.constant_(trainer.model.weight, step)
        try:
            trainer.begin_step()
        except RuntimeError:
            assert trainer.model.weight.item() == step


def test_given_log_probs_of_the_writer_are_used_in_the_ratio(monkeypatch):
    log_probs, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    advantages, mask = torch.tensor([2.0]), torch.ones(1, 2, dtype=torch.bool)
    settings = {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.0, "entropy_weight": 0.0}
    trainer = SimpleNamespace(
        args=SimpleNamespace(num_iterations=1, **settings),
        captioner=SimpleNamespace(align_labels=lambda labels: labels),
        rollouts=SimpleNamespace(normalizer=2.0),
        monitor=SimpleNamespace(note=lambda numbers: None),
        accelerator=SimpleNamespace(num_processes=1),
    )
    monkeypatch.setattr(
        "hf_captionrl.trainers.caption_rl_trainer.token_log_probs", lambda *rest: (log_probs, torch.zeros(1, 2))
    )
    inputs = {"labels": torch.ones(1, 2, dtype=torch.long), "advantages": advantages, "old_log_probs": old}
    loss = CaptionRLTrainer.compute_loss(trainer, None, inputs)
    expected = policy_gradient_loss(
        log_probs, advantages, mask, old_log_probs=old, entropy=torch.zeros(1, 2), normalizer=2.0, **settings
    )
    assert loss == expected["loss"]
    del inputs["old_log_probs"]
    assert CaptionRLTrainer.compute_loss(trainer, None, inputs) != loss


def test_table_names_the_age_and_rounds():
    number = {"mean": 0.5, "standard_error": 0.01}
    found = {"rows": [{"name": "8 updates, ratio", **dict.fromkeys(stale_policies.COLUMNS, number)}], "seeds": [0, 1]}
    assert "| 8 updates old, ratio | 0.500 ±0.010 |" in table({**found, "command": "x"})
