import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_captionrl.losses import caption_log_probs, policy_gradient_loss
from hf_captionrl.rewards import RunningMeanBaseline, make_baseline
from hf_captionrl.rewards.diversity import edit_distance

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "policy_gradient.json").read_text())
VOCABULARY, LENGTH, END = 3, 3, 0


# A policy small enough to write every sequence it can write: one row of logits for each prefix.

SEQUENCES = [
    sequence
    for length in range(1, LENGTH + 1)
    for sequence in itertools.product(range(VOCABULARY), repeat=length)
    if END not in sequence[:-1] and (sequence[-1] == END or length == LENGTH)
]
PREFIXES = sorted({sequence[:i] for sequence in SEQUENCES for i in range(len(sequence))})


class Tabular:
    """All sequences, padded with NaN log-probabilities, under logits that want a gradient."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(len(PREFIXES), VOCABULARY, generator=generator, dtype=torch.float64)
        self.logits.requires_grad_()
        self.rewards = torch.randn(len(SEQUENCES), generator=generator, dtype=torch.float64)
        self.mask = torch.tensor([[t < len(s) for t in range(LENGTH)] for s in SEQUENCES])
        self.ids = torch.tensor([[*s, *[END] * (LENGTH - len(s))] for s in SEQUENCES])

    def log_probs(self) -> Tensor:
        table = self.logits.log_softmax(1)
        rows = []
        for sequence in SEQUENCES:
            own = [table[PREFIXES.index(sequence[:t]), sequence[t]] for t in range(len(sequence))]
            rows.append(torch.stack([*own, *[torch.tensor(math.nan).double()] * (LENGTH - len(own))]))
        return torch.stack(rows)

    def probabilities(self) -> Tensor:
        return caption_log_probs(self.log_probs(), self.mask, "sum").exp()

    def gradient(self, objective: Tensor) -> Tensor:
        return torch.autograd.grad(objective, self.logits)[0]

    def surrogate(self, rows: list[int], advantages: Tensor) -> Tensor:
        """Gradient of the loss for some of the sequences, as a step would see them."""
        loss = policy_gradient_loss(self.log_probs()[rows], advantages, self.mask[rows], logprob_reduction="sum")
        return self.gradient(loss["loss"])


def test_the_sequences_are_all_there_are():
    policy = Tabular()
    assert len(SEQUENCES) == 1 + 2 + 4 * VOCABULARY
    assert float(policy.probabilities().sum().detach()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", ["none", "greedy", "running_mean"])
def test_the_expected_surrogate_is_the_policy_gradient(name):
    policy = Tabular()
    probabilities = policy.probabilities().detach()
    exact = policy.gradient((policy.probabilities() * policy.rewards).sum())
    baseline = make_baseline(name, 1)
    baseline.update(0.7)
    greedy = policy.rewards[int(probabilities.argmax())].view(1)
    total = torch.zeros_like(exact)
    for row, probability in enumerate(probabilities):
        advantage = baseline(policy.rewards[row].view(1, 1), greedy).flatten()
        total += probability * policy.surrogate([row], advantage)
    torch.testing.assert_close(-total, exact, rtol=0, atol=1e-12)


def expectation_over_pairs(policy: Tabular, advantages) -> Tensor:
    """Of the surrogate's gradient for two captions of one image, all pairs of sequences weighted by their chances."""
    number, log_probs = len(SEQUENCES), policy.log_probs()
    chance = policy.probabilities().detach()
    a, b = (i.flatten() for i in torch.meshgrid(torch.arange(number), torch.arange(number), indexing="ij"))
    pairs = torch.stack([a, b], dim=1)  # (P, 2)
    weight = (chance[a] * chance[b]).repeat_interleave(2)
    # Linear in the advantage: the chance of the pair goes in there, and the normaliser is a pair's.
    loss = policy_gradient_loss(
        log_probs[pairs.flatten()],
        advantages(pairs).flatten() * weight,
        policy.mask[pairs.flatten()],
        logprob_reduction="sum",
        normalizer=2.0,
    )
    return policy.gradient(loss["loss"])


@pytest.mark.parametrize(("name", "factor"), [("leave_one_out", 1.0), ("group_mean", 0.5)])
def test_group_baselines_over_all_pairs(name, factor):
    """The own reward in the mean shrinks the gradient by (G - 1) / G; without it nothing changes."""
    policy = Tabular(1)
    exact = policy.gradient((policy.probabilities() * policy.rewards).sum())
    found = expectation_over_pairs(policy, lambda pairs: make_baseline(name, 2)(policy.rewards[pairs]))
    torch.testing.assert_close(-found, factor * exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["group", "group_floor"])
def test_baselines_that_do_change_the_gradient(name):
    """Negative control: what the oracle above would say of a baseline that is not one."""
    policy = Tabular(1)
    rewards = 3 * policy.rewards  # so that the floor is met by some pairs
    exact = policy.gradient((policy.probabilities() * rewards).sum())
    found = -expectation_over_pairs(policy, lambda pairs: make_baseline(name, 2)(rewards[pairs]))
    nearest = (found * exact).sum() / (exact * exact).sum()
    assert (found - nearest * exact).abs().max() > 1e-3


def test_the_mean_over_tokens_is_another_gradient():
    policy = Tabular()
    exact = policy.gradient((policy.probabilities() * policy.rewards).sum())
    chance = policy.probabilities().detach()
    loss = policy_gradient_loss(policy.log_probs(), policy.rewards * chance, policy.mask, normalizer=1.0)
    assert (-policy.gradient(loss["loss"]) - exact).abs().max() > 1e-2


# SLE, Eq. 12-16


def pair_distances(policy: Tabular) -> Tensor:
    number = len(SEQUENCES)
    a, b = (i.flatten() for i in torch.meshgrid(torch.arange(number), torch.arange(number), indexing="ij"))
    rows = torch.stack([a, b], dim=1).flatten()
    words = policy.mask[rows] & (policy.ids[rows] != END)
    return edit_distance(policy.ids[rows], words, 2)[:, 0, 1].view(number, number)


@pytest.mark.parametrize(("samples", "baseline"), [(2, False), (3, False), (2, True), (3, True)])
def test_the_diversity_term_is_the_gradient_of_the_expected_distance(samples, baseline):
    """`(2/s) sum_k d(y_j, y_k)` gives (s-1)/s of the gradient of E d; its group mean leaves (1 - 2/s) of that.

    So two samples and the baseline teach nothing, and five keep .48 of the gradient.
    """
    policy = Tabular(2)
    distance = pair_distances(policy)
    chance = policy.probabilities()
    exact = policy.gradient((chance[:, None] * chance[None, :] * distance).sum())
    number = len(SEQUENCES)
    draws = torch.cartesian_prod(*[torch.arange(number)] * samples)  # (P, s)
    weight = chance.detach()[draws].prod(1, keepdim=True)
    rewards = 2 / samples * distance[draws[:, :, None], draws[:, None, :]].sum(2)
    if baseline:
        rewards = make_baseline("group_mean", samples)(rewards)
    loss = policy_gradient_loss(
        policy.log_probs()[draws.flatten()],
        (rewards * weight).flatten(),
        policy.mask[draws.flatten()],
        logprob_reduction="sum",
        normalizer=float(samples),
    )
    factor = (samples - 1) / samples * (1 - 2 / samples if baseline else 1)
    torch.testing.assert_close(-policy.gradient(loss["loss"]), factor * exact, rtol=0, atol=1e-12)


def test_a_one_sided_distance_needs_its_mirror_image():
    """Eq. 13 has d(y, y') and d(y', y); Eq. 14 takes them for equal, which BLEU of a pair is not."""
    policy = Tabular(3)
    generator = torch.Generator().manual_seed(0)
    distance = torch.rand(len(SEQUENCES), len(SEQUENCES), generator=generator, dtype=torch.float64)
    chance = policy.probabilities()
    exact = policy.gradient((chance[:, None] * chance[None, :] * distance).sum())

    def expected(d: Tensor) -> Tensor:
        return -expectation_over_pairs(
            policy, lambda pairs: torch.stack([d[tuple(p.T)] for p in (pairs, pairs.flip(1))], 1)
        )

    torch.testing.assert_close(expected(distance + distance.T), exact, rtol=0, atol=1e-12)
    assert (expected(2 * distance) - exact).abs().max() > 1e-3


# Plain loops


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Four captions of up to five tokens, one of them without any."""
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
    b: dict[str, Tensor], reduction: str, *, old=False, clip=None, beta=0.0, entropy_weight=0.0
) -> dict[str, float]:
    total, named = 0.0, {"kl": 0.0, "entropy": 0.0, "clipped_share": 0.0}
    for n in range(4):
        tokens = [t for t in range(5) if b["mask"][n, t]]
        for t in tokens:
            log_prob, advantage = float(b["log_probs"][n, t]), float(b["advantages"][n])
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
            total += gain / (len(tokens) if reduction == "mean" else 1)
    named["loss"] = -total / (int(b["mask"].sum()) if reduction == "token_mean" else 4)
    return named


@pytest.mark.parametrize("reduction", ["mean", "sum", "token_mean"])
@pytest.mark.parametrize(("old", "clip"), [(False, None), (True, None), (True, 0.2)])
@pytest.mark.parametrize(("beta", "entropy_weight"), [(0.0, 0.0), (0.3, 0.05)])
def test_equals_a_plain_loop(reduction, old, clip, beta, entropy_weight):
    b = batch()
    found = policy_gradient_loss(
        b["log_probs"],
        b["advantages"],
        b["mask"],
        logprob_reduction=reduction,
        old_log_probs=b["old"] if old else None,
        clip_range=clip,
        ref_log_probs=b["ref"],
        beta=beta,
        entropy=b["entropy"],
        entropy_weight=entropy_weight,
    )
    expected = loop(b, reduction, old=old, clip=clip, beta=beta, entropy_weight=entropy_weight)
    if clip is None:
        expected.pop("clipped_share")
        assert "clipped_share" not in found
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected, abs=1e-12)
    if clip is not None:
        assert expected["clipped_share"] > 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "token_mean"])
def test_log_probs_of_captions_equal_a_plain_loop(reduction):
    b = batch()
    found = caption_log_probs(b["log_probs"], b["mask"], reduction)
    for n in range(4):
        kept = [float(b["log_probs"][n, t]) for t in range(5) if b["mask"][n, t]]
        expected = sum(kept) / (len(kept) if reduction == "mean" and kept else 1)
        assert float(found[n]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "token_mean"])
def test_micro_batches_add_up_to_the_step(reduction):
    b = batch()
    names = ("log_probs", "advantages", "mask")

    def of(rows: slice, normalizer) -> float:
        part = {n: b[n][rows] for n in names}
        loss = policy_gradient_loss(
            *(part[n] for n in names),
            logprob_reduction=reduction,
            ref_log_probs=b["ref"][rows],
            beta=0.1,
            normalizer=normalizer,
        )
        return float(loss["loss"])

    number = b["mask"].sum() if reduction == "token_mean" else torch.tensor(4.0)
    parts = [of(rows, number) for rows in (slice(0, 1), slice(1, 4))]
    assert sum(parts) == pytest.approx(of(slice(None), None), abs=1e-12)
    # Each part by its own number is something else.
    assert sum(of(rows, None) for rows in (slice(0, 1), slice(1, 4))) != pytest.approx(sum(parts), abs=1e-3)


@pytest.mark.parametrize("junk", [math.nan, -math.inf, math.inf])
def test_padding_may_hold_anything(junk):
    """Values and gradients, of the ratio and of the penalty too: an exponential of NaN poisons behind `where`."""
    clean, dirty = batch(), batch()
    for name in ("log_probs", "old", "ref", "entropy"):
        dirty[name] = dirty[name].masked_fill(~dirty["mask"], junk)
    found, gradients = [], []
    for b in (clean, dirty):
        log_probs, entropy = b["log_probs"].requires_grad_(), b["entropy"].requires_grad_()
        named = policy_gradient_loss(
            log_probs,
            b["advantages"],
            b["mask"].long(),
            old_log_probs=b["old"],
            clip_range=0.2,
            ref_log_probs=b["ref"],
            beta=0.1,
            entropy=entropy,
            entropy_weight=0.1,
        )
        named["caption"] = caption_log_probs(log_probs, b["mask"]).sum()
        found.append({name: float(value.detach()) for name, value in named.items()})
        gradients.append(torch.autograd.grad(named["loss"] + named["caption"], (log_probs, entropy)))
    assert found[0] == found[1]
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
        assert (other[~dirty["mask"]] == 0).all()


def test_gradcheck():
    b = batch(3)

    def loss(log_probs: Tensor, entropy: Tensor) -> Tensor:
        return policy_gradient_loss(
            log_probs,
            b["advantages"],
            b["mask"],
            old_log_probs=b["old"],
            clip_range=0.2,
            ref_log_probs=b["ref"],
            beta=0.1,
            entropy=entropy,
            entropy_weight=0.1,
        )["loss"]

    assert torch.autograd.gradcheck(loss, (b["log_probs"].requires_grad_(), b["entropy"].requires_grad_()))


def test_on_policy_ratio_has_the_gradient_of_reinforce():
    b = batch()
    log_probs = b["log_probs"].requires_grad_()
    one = policy_gradient_loss(log_probs, b["advantages"], b["mask"])["loss"]
    other = policy_gradient_loss(
        log_probs, b["advantages"], b["mask"], old_log_probs=log_probs.detach(), clip_range=0.2
    )["loss"]
    torch.testing.assert_close(*(torch.autograd.grad(x, log_probs)[0] for x in (one, other)))


def test_a_clipped_token_does_not_learn_unless_it_went_the_wrong_way():
    log_probs = torch.tensor([[0.0, -1.0]], dtype=torch.float64).requires_grad_()  # ratios e and 1/e
    old = torch.tensor([[-1.0, 0.0]], dtype=torch.float64)
    for advantage, learns in ((1.0, [False, True]), (-1.0, [True, False])):
        found = policy_gradient_loss(
            log_probs, torch.tensor([advantage]), torch.ones(1, 2), old_log_probs=old, clip_range=0.2
        )
        assert (torch.autograd.grad(found["loss"], log_probs)[0] != 0).tolist() == [learns]
        assert float(found["clipped_share"]) == 0.5


def test_advantages_are_not_differentiated():
    b = batch()
    advantages = b["advantages"].requires_grad_()
    loss = policy_gradient_loss(b["log_probs"].requires_grad_(), advantages, b["mask"])["loss"]
    assert torch.autograd.grad(loss, advantages, allow_unused=True) == (None,)


def test_the_penalty_estimates_one_divergence_and_pulls_along_the_other():
    """Its mean over tokens is KL(p, p_ref); the mean of its gradient is that of KL(p_ref, p)."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64).requires_grad_()
    ref = torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64).log_softmax(0)
    p = logits.log_softmax(0)
    chance = p.exp().detach()
    found = [
        policy_gradient_loss(
            p[i].view(1, 1), torch.zeros(1), torch.ones(1, 1), ref_log_probs=ref[i].view(1, 1), beta=1.0
        )["loss"]
        for i in range(3)
    ]
    mean = sum(chance[i] * found[i] for i in range(3))
    torch.testing.assert_close(mean, (p.exp() * (p - ref)).sum(), rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
    (reverse,) = torch.autograd.grad((ref.exp() * (ref - p)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((p.exp() * (p - ref)).sum(), logits)
    torch.testing.assert_close(gradient, reverse)
    assert (gradient - forward).abs().max() > 0.05


def test_low_precision_is_summed_in_high():
    b = batch()
    low = {name: b[name].bfloat16() for name in ("log_probs", "advantages")}
    found = caption_log_probs(low["log_probs"], b["mask"])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, caption_log_probs(low["log_probs"].float(), b["mask"]))
    assert policy_gradient_loss(low["log_probs"], low["advantages"], b["mask"])["loss"].dtype == torch.float32


# The authors' numbers


def criterion_inputs() -> tuple[Tensor, Tensor, Tensor]:
    given = VECTORS["reward_criterion"]
    distribution, ids = torch.tensor(given["logprobs"]).double(), torch.tensor(given["seq"])
    # Their end token is 0; the first of them is scored.
    mask = torch.cat([torch.ones(len(ids), 1, dtype=torch.bool), ids[:, :-1] > 0], dim=1)
    return distribution, distribution.gather(2, ids.unsqueeze(2)).squeeze(2), mask


def test_reward_criterion():
    given = VECTORS["reward_criterion"]
    _, log_probs, mask = criterion_inputs()
    rewards = torch.tensor(given["reward"]).double()
    found = policy_gradient_loss(log_probs, rewards, mask, logprob_reduction="token_mean")["loss"]
    assert float(found) == pytest.approx(given["mean"], abs=1e-6)
    for n, expected in enumerate(given["none"]):
        rows = slice(n, n + 1)
        assert float(policy_gradient_loss(log_probs[rows], rewards[rows], mask[rows])["loss"]) == pytest.approx(
            expected, abs=1e-6
        )


@pytest.mark.parametrize(("key", "weight"), [("new_self_critical", 0.0), ("new_self_critical_entropy_0.5", 0.5)])
def test_self_critical_with_leave_one_out(key, weight):
    """Their entropy is part of the reward, without a gradient of its own: another thing than `entropy_weight`."""
    given = VECTORS["new_self_critical"]
    distribution, log_probs, mask = criterion_inputs()
    entropy = -(distribution.exp() * distribution).sum(2)
    scores = torch.tensor(given["scores"]).double() + weight * (entropy * mask).sum(1) / mask.sum(1)
    advantages = make_baseline("leave_one_out", 2)(scores.view(2, 2)).flatten()
    found = policy_gradient_loss(log_probs, advantages, mask, logprob_reduction="token_mean")["loss"]
    assert float(found) == pytest.approx(VECTORS[key]["loss_mean"], abs=1e-6)


def test_sle_surrogate():
    given = VECTORS["sle_surrogate"]
    found = policy_gradient_loss(
        *(torch.tensor(given[n]) for n in ("log_probs", "rewards", "mask")), logprob_reduction="token_mean"
    )
    assert float(found["loss"]) == pytest.approx(given["loss"], abs=1e-6)


def own_log_probs(logits: list, ids: Tensor) -> Tensor:
    return torch.tensor(logits).double().log_softmax(2).gather(2, ids.unsqueeze(2)).squeeze(2)


def test_log_probs_of_clipcap_captions():
    """No Detail Left Behind: the mean up to and including the stop token, at the sampling temperature. DiscriTune:
    the same sum over one token more, where there was a stop token; so it differs from a mean by a factor n / (n + 1)."""
    given = VECTORS["caption_logprob"]
    ids, steps = torch.tensor(given["indices"]), torch.arange(6)
    logits = torch.tensor(given["logits"])
    expected = given["ndlb_T0.3"]
    lengths = torch.tensor(expected["msg_lengths"])
    found = caption_log_probs(own_log_probs((logits / 0.3).tolist(), ids), steps < lengths[:, None])
    torch.testing.assert_close(found, torch.tensor(expected["log_probs"]).double(), rtol=0, atol=1e-5)

    expected = given["discritune"]
    mask, divisor = torch.tensor(expected["mask"]).bool(), torch.tensor(expected["msg_lengths"])
    assert torch.equal(mask.sum(1), lengths)
    found = caption_log_probs(own_log_probs(given["logits"], ids), mask) * lengths / divisor
    torch.testing.assert_close(found, torch.tensor(expected["log_probs"]).double(), rtol=0, atol=1e-5)


def test_log_probs_of_blip_captions():
    given = VECTORS["blip_caption_logprob"]
    ids = torch.tensor(given["captions"])[:, 1:]
    ends = given["prefix_len"] - 1 + torch.tensor(given["msg_lengths"])
    mask = (torch.arange(6) >= given["prefix_len"] - 1) & (torch.arange(6) < ends[:, None])
    logits = torch.tensor(given["logits"])[:, :-1]
    found = caption_log_probs(own_log_probs(logits.tolist(), ids), mask)
    torch.testing.assert_close(found, torch.tensor(given["log_probs"]).double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "update_first"),
    [
        ("discritune_rll_refactor(reward, then update)", False),
        ("ndlb_game.py(predict, update, then reward: alias)", True),
    ],
)
def test_running_mean_in_both_orders(key, update_first):
    """Their numbers are of losses; a reward is minus a loss."""
    given = VECTORS["mean_baseline"]
    baseline = RunningMeanBaseline(update_first)
    log_probs = torch.tensor(given["log_probs"]).unsqueeze(1)
    for losses, expected in zip(given["batches"], given[key], strict=True):
        rewards = -torch.tensor(losses).unsqueeze(1)
        if update_first:
            baseline.update(float(rewards.mean()))
        assert -baseline.mean == pytest.approx(expected["baseline_used"], abs=1e-6)
        advantages = baseline(rewards).flatten()
        torch.testing.assert_close(-advantages, torch.tensor(expected["reward"]), rtol=0, atol=1e-6)
        found = policy_gradient_loss(log_probs, advantages, torch.ones(4, 1))["loss"]
        assert float(found) == pytest.approx(expected["policy_loss"], abs=1e-6)
        if not update_first:
            baseline.update(float(rewards.mean()))


# Bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprob_reduction": "median"}, "logprob_reduction is 'median'"),
        ({"mask": torch.ones(4, 4)}, r"must both be \(N, T\)"),
        ({"advantages": torch.ones(4, 1)}, r"advantages must be \(4\,\)"),
        ({"beta": 0.1}, "needs ref_log_probs"),
        ({"entropy_weight": 0.1}, "needs entropy"),
    ],
)
def test_bad_input_is_refused(changes, message):
    b = batch()
    arguments = {name: b[name] for name in ("log_probs", "advantages", "mask")} | changes
    with pytest.raises(ValueError, match=message):
        policy_gradient_loss(**arguments)


def test_log_probs_of_captions_refuse_bad_input():
    b = batch()
    with pytest.raises(ValueError, match="logprob_reduction"):
        caption_log_probs(b["log_probs"], b["mask"], "max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must both be"):
        caption_log_probs(b["log_probs"][0], b["mask"][0])


def test_nothing_to_learn_from_is_zero_not_nan():
    log_probs = torch.full((2, 3), -1.0).requires_grad_()
    for reduction in ("mean", "sum", "token_mean"):
        loss = policy_gradient_loss(log_probs, torch.ones(2), torch.zeros(2, 3), logprob_reduction=reduction)["loss"]
        assert float(loss.detach()) == 0
        assert (torch.autograd.grad(loss, log_probs)[0] == 0).all()
