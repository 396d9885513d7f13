"""The policy gradient equals the loss of TRL's GRPOTrainer for the loss types that both have."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from hf_captionrl.losses import policy_gradient_loss
from tests.losses.test_policy_gradient import batch
from tests.tolerances import assert_close

LONGEST = 7


def trl_loss(b: dict[str, Tensor], loss_type: str, *, ratio: bool, beta: float) -> Tensor:
    """`GRPOTrainer._compute_loss` with given log-probabilities instead of a model."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (b["log_probs"], b["entropy"], None),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
        args=SimpleNamespace(use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        current_gradient_accumulation_steps=1,
        loss_type=loss_type,
        beta=beta,
        epsilon_low=0.2,
        epsilon_high=0.2,
        max_completion_length=LONGEST,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
    )
    trainer.args.delta = None  # clips from above, which is off
    mask = b["mask"].long()
    inputs = {
        "prompt_ids": torch.zeros(4, 1).long(),
        "prompt_mask": torch.ones(4, 1).long(),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": b["advantages"],
        "ref_per_token_logps": b["ref"],
        "num_items_in_batch": mask.sum(),
    }
    if ratio:
        inputs["old_per_token_logps"] = b["old"]
    return GRPOTrainer._compute_loss(trainer, None, inputs)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("ratio", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_gradient_equals_that_of_trl(loss_type, ratio, beta):
    """Without a ratio TRL's loss has another value, `A` instead of `A log p`, and the same gradient."""
    b = batch()
    b["log_probs"].requires_grad_()
    ours = policy_gradient_loss(
        b["log_probs"],
        b["advantages"],
        b["mask"],
        loss_type=loss_type,
        old_log_probs=b["old"] if ratio else None,
        epsilon=0.2,
        ref_log_probs=b["ref"],
        beta=beta,
        max_completion_length=LONGEST,
    )["loss"]
    theirs = trl_loss(b, loss_type, ratio=ratio, beta=beta)
    gradients = [torch.autograd.grad(loss, b["log_probs"])[0] for loss in (ours, theirs)]
    assert gradients[0].abs().max() > 1e-2
    assert_close(*gradients)
    if ratio:
        assert_close(ours.detach(), theirs.detach())


def test_other_loss_type_has_another_gradient():
    """Negative control: captions of different lengths distinguish the loss types."""
    b = batch()
    b["log_probs"].requires_grad_()
    losses = [trl_loss(b, loss_type, ratio=True, beta=0.0) for loss_type in ("grpo", "dapo", "dr_grpo")]
    one, two, three = (torch.autograd.grad(loss, b["log_probs"])[0] for loss in losses)
    assert (one - two).abs().max() > 1e-3
    assert (two - three).abs().max() > 1e-3
