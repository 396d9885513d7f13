"""The policy gradient equals plain loops, also in edge cases, and rejects invalid input."""

import itertools
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from hf_captionrl.losses import policy_gradient_loss
from tests.tolerances import assert_close, close, within

LONGEST = 7  # tokens that a caption may have; the longest of the batch has five


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Four captions of up to five tokens; one of them is empty."""
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 5)
    lengths = torch.tensor([5, 2, 0, 3])
    named = {n: -torch.rand(shape, generator=generator, dtype=dtype) * 3 for n in ("log_probs", "old", "ref")}
    named["old"] = named["log_probs"] + 0.3 * torch.randn(shape, generator=generator, dtype=dtype)
    named["entropy"] = torch.rand(shape, generator=generator, dtype=dtype)
    named["advantages"] = torch.randn(4, generator=generator, dtype=dtype)
    named["mask"] = torch.arange(5) < lengths[:, None]
    return named


def loop(
    b: dict[str, Tensor], loss_type: str, *, old=False, clip=None, beta=0.0, entropy_weight=0.0
) -> dict[str, float]:
    total, named = 0.0, {"kl": 0.0, "entropy": 0.0, "clipped_share": 0.0}
    advantages = b["advantages"] if b["advantages"].dim() == 2 else b["advantages"][:, None].expand(4, 5)
    for n in range(4):
        tokens = [t for t in range(5) if b["mask"][n, t]]
        for t in tokens:
            log_prob, advantage = float(b["log_probs"][n, t]), float(advantages[n, t])
            gain = advantage * log_prob
            if old:
                ratio = math.exp(log_prob - float(b["old"][n, t]))
                gain = ratio * advantage
                if clip is not None:
                    held = min(max(ratio, 1 - clip), 1 + clip) * advantage
                    named["clipped_share"] += (held < gain) / len(tokens)
                    gain = min(gain, held)
            difference = float(b["ref"][n, t]) - log_prob
            penalty = math.exp(difference) - difference - 1
            named["kl"] += penalty / len(tokens)
            named["entropy"] += float(b["entropy"][n, t]) / len(tokens)
            gain += entropy_weight * float(b["entropy"][n, t]) - beta * penalty
            total += gain / (len(tokens) if loss_type == "grpo" else 1)
    named["loss"] = -total / {"dapo": int(b["mask"].sum()), "dr_grpo": 4 * LONGEST}.get(loss_type, 4)
    return named


def loss_of(b: dict[str, Tensor], *, old=False, clip=None, **more) -> dict[str, Tensor]:
    given = {"old_log_probs": b["old"] if old else None, "epsilon": clip, "ref_log_probs": b["ref"]}
    given |= {"entropy": b["entropy"], "max_completion_length": LONGEST, **more}
    return policy_gradient_loss(b["log_probs"], b["advantages"], b["mask"], **given)


@pytest.mark.parametrize(
    ("loss_type", "old", "clip", "beta", "entropy_weight"),
    [
        ("grpo", False, None, 0.0, 0.0),
        ("grpo", True, 0.2, 0.3, 0.05),
        ("dapo", True, None, 0.3, 0.05),
        ("dr_grpo", True, 0.2, 0.3, 0.05),
        ("sum", False, None, 0.3, 0.05),
    ],
)
@pytest.mark.parametrize("per_token", [False, True])
def test_equals_a_plain_loop(loss_type, old, clip, beta, entropy_weight, per_token):
    b = batch()
    if per_token:  # an advantage of each token
        drawn = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        b["advantages"] = drawn.masked_fill(~b["mask"], torch.nan)
    found = loss_of(b, loss_type=loss_type, old=old, clip=clip, beta=beta, entropy_weight=entropy_weight)
    expected = loop(b, loss_type, old=old, clip=clip, beta=beta, entropy_weight=entropy_weight)
    if clip is None:
        expected.pop("clipped_share")
        assert "clipped_share" not in found
    assert {name: float(value) for name, value in found.items()} == close(expected)
    if clip is not None:
        assert expected["clipped_share"] > 0


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_micro_batches_add_up_to_the_step(loss_type):
    b = batch()

    def of(rows: slice, normalizer) -> float:
        part = {name: value[rows] for name, value in b.items()}
        return float(loss_of(part, loss_type=loss_type, beta=0.1, normalizer=normalizer)["loss"])

    number = {"dapo": b["mask"].sum(), "dr_grpo": 4 * LONGEST}.get(loss_type, torch.tensor(4.0))
    parts = [of(rows, number) for rows in (slice(0, 1), slice(1, 4))]
    assert sum(parts) == close(of(slice(None), None))
    # Dividing each part by its number gives a different value.
    assert sum(of(rows, None) for rows in (slice(0, 1), slice(1, 4))) != within(sum(parts), 1e-3)


@pytest.mark.parametrize("junk", [math.nan, -math.inf])
def test_values_at_padding_affect_neither_loss_nor_gradients(junk):
    """Includes ratio and penalty: the exponential of NaN gives NaN gradients even behind `where`."""
    clean, dirty = batch(), batch()
    for name in ("log_probs", "old", "ref", "entropy"):
        dirty[name] = dirty[name].masked_fill(~dirty["mask"], junk)
    found, gradients = [], []
    for b in (clean, dirty):
        log_probs, entropy = b["log_probs"].requires_grad_(), b["entropy"].requires_grad_()
        b = {**b, "log_probs": log_probs, "entropy": entropy, "mask": b["mask"].long()}
        named = loss_of(b, old=True, clip=0.2, beta=0.1, entropy_weight=0.1)
        found.append({name: float(value.detach()) for name, value in named.items()})
        gradients.append(torch.autograd.grad(named["loss"], (log_probs, entropy)))
    assert found[0] == found[1]
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
        assert not other[~dirty["mask"]].any()


def test_on_policy_ratio_has_the_gradient_of_reinforce():
    b = batch()
    log_probs = b["log_probs"].requires_grad_()
    b["advantages"].requires_grad_()
    one, other = (
        policy_gradient_loss(log_probs, b["advantages"], b["mask"], old_log_probs=old, epsilon=epsilon)["loss"]
        for old, epsilon in ((None, None), (log_probs.detach(), 0.2))
    )
    assert torch.autograd.grad(one, b["advantages"], allow_unused=True, retain_graph=True) == (None,)
    torch.testing.assert_close(*(torch.autograd.grad(loss, log_probs)[0] for loss in (one, other)))


def test_penalty_estimates_kl_and_has_the_gradient_of_the_reverse_kl():
    """The mean over tokens is KL(p, p_ref); the mean of the gradients is that of KL(p_ref, p)."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64).requires_grad_()
    ref = torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64).log_softmax(0)
    p = logits.log_softmax(0)
    mean, given = 0.0, (torch.zeros(1), torch.ones(1, 1))
    for token, own in zip(p.view(3, 1, 1), ref.view(3, 1, 1), strict=True):
        loss = policy_gradient_loss(token, *given, ref_log_probs=own, beta=1.0)["loss"]
        mean = mean + token.detach().exp().squeeze() * loss
    assert_close(mean, (p.exp() * (p - ref)).sum())
    (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
    (reverse,) = torch.autograd.grad((ref.exp() * (ref - p)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((p.exp() * (p - ref)).sum(), logits)
    torch.testing.assert_close(gradient, reverse)
    assert (gradient - forward).abs().max() > 0.05


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_empty_captions_give_loss_zero_not_nan(loss_type):
    log_probs = torch.full((2, 3), -1.0).requires_grad_()
    loss = policy_gradient_loss(log_probs, torch.ones(2), torch.zeros(2, 3), loss_type=loss_type)["loss"]
    assert float(loss.detach()) == 0
    assert (torch.autograd.grad(loss, log_probs)[0] == 0).all()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"loss_type": "median"}, "loss_type"),
        ({"loss_type": "dr_grpo"}, "max_completion_length"),
        ({"mask": torch.ones(4, 4)}, "mask"),
        ({"advantages": torch.ones(4, 1)}, "advantages"),
        *(({name: torch.zeros(4, 1)}, name) for name in ("old_log_probs", "ref_log_probs", "entropy")),  # no broadcast
        ({"beta": 0.1}, "ref_log_probs"),
        ({"entropy_weight": 0.1}, "entropy"),
    ],
)
def test_invalid_arguments_raise(changes, name):
    b = batch()
    with pytest.raises(ValueError, match=name):
        policy_gradient_loss(**{key: b[key] for key in ("log_probs", "advantages", "mask")} | changes)


def trl_loss(b: dict[str, Tensor], loss_type: str, *, ratio: bool, beta: float, high: float = 0.2) -> Tensor:
    """`GRPOTrainer._compute_loss` with given log-probabilities instead of a model."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (b["log_probs"], b["entropy"], None),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
        args=GRPOConfig("out", use_cpu=True, bf16=False, steps_per_generation=1, use_bias_correction_kl=False),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        current_gradient_accumulation_steps=1,
        loss_type=loss_type,
        beta=beta,
        epsilon_low=0.2,
        epsilon_high=high,
        max_completion_length=LONGEST,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
    )
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


@pytest.mark.parametrize(
    ("loss_type", "ratio", "beta", "high"),
    [
        ("grpo", False, 0.3, 0.2),
        ("grpo", True, 0.3, 0.2),
        ("grpo", True, 0.3, 0.5),
        ("dapo", True, 0.0, 0.2),
        ("dr_grpo", True, 0.3, 0.2),
        ("bnpo", True, 0.3, 0.5),
        ("cispo", True, 0.3, 1.1),
        ("cispo", False, 0.3, 5.0),
        ("sapo", True, 0.3, 0.2),
        ("sapo", False, 0.3, 0.2),
    ],
)
def test_gradient_equals_that_of_trl(loss_type, ratio, beta, high):
    """Without a ratio TRL's loss has another value, `A` instead of `A log p`, and the same gradient."""
    b = batch()
    b["log_probs"].requires_grad_()
    ours = loss_of(b, loss_type=loss_type, old=ratio, clip=0.2, epsilon_high=high, beta=beta)["loss"]
    theirs = trl_loss(b, loss_type, ratio=ratio, beta=beta, high=high)
    gradients = [torch.autograd.grad(loss, b["log_probs"])[0] for loss in (ours, theirs)]
    assert gradients[0].abs().max() > 1e-2
    assert_close(*gradients)
    if ratio:
        assert_close(ours.detach(), theirs.detach())


def test_other_loss_type_has_another_gradient():
    """Negative control: captions of different lengths distinguish the loss types."""
    b = batch()
    b["log_probs"].requires_grad_()
    kinds = {"grpo": 0.2, "dapo": 0.2, "dr_grpo": 0.2, "cispo": 1.1, "sapo": 0.2}
    losses = [trl_loss(b, loss_type, ratio=True, beta=0.0, high=high) for loss_type, high in kinds.items()]
    losses.append(trl_loss(b, "dapo", ratio=True, beta=0.0, high=0.5))
    gradients = [torch.autograd.grad(loss, b["log_probs"])[0] for loss in losses]
    for one, other in itertools.combinations(gradients, 2):
        assert (one - other).abs().max() > 1e-4
