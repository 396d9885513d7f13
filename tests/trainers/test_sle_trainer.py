"""SLETrainer: its gradient by enumeration and against a plain loop, and invalid input."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hf_captionrl.captioners.captioner import split_greedy
from hf_captionrl.data import open_image
from hf_captionrl.losses import policy_gradient_loss
from hf_captionrl.rewards import CiderReward, RewardContext, RewardData, WeightedRewards, make_baseline
from hf_captionrl.rewards.advantages import compute_advantages
from hf_captionrl.trainers import SLEConfig
from tests.rewards.conftest import OfContext
from tests.rewards.test_diversity import plain_bleu34, plain_edit
from tests.tolerances import assert_close, close, resolution, within
from tests.trainers.one_step import assert_one_plain_step, captioner, largest_difference, spy_on, weights
from tests.trainers.rl_step import build_sle as build
from tests.trainers.rl_step import train_sle as train

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "diversity.json").read_text())


def plain_ngrams(words):
    return [Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1)) for n in range(1, 5)]


def plain_cider(candidate, references, corpus):
    """CIDEr-D of one caption; `corpus` holds the references of each training image."""
    frequency = Counter()
    for texts in corpus:
        frequency.update({g for words in texts for counts in plain_ngrams(words) for g in counts})

    def vector(words):
        counted = plain_ngrams(words)
        rare = [
            {g: c * (math.log(len(corpus)) - math.log(max(1, frequency[g]))) for g, c in counts.items()}
            for counts in counted
        ]
        return rare, [math.sqrt(sum(v * v for v in part.values())) for part in rare], sum(counted[1].values())

    ours, our_norms, our_length = vector(candidate)
    total = 0.0
    for words in references:
        theirs, their_norms, length = vector(words)
        for n in range(4):
            match = sum(min(v, theirs[n].get(g, 0.0)) * theirs[n].get(g, 0.0) for g, v in ours[n].items())
            if our_norms[n] and their_norms[n]:
                match /= our_norms[n] * their_norms[n]
            total += match * math.exp(-((our_length - length) ** 2) / 72) / 4
    return 10 * total / len(references)


END, LONGEST, VOCABULARY = 0, 5, 3


REFERENCES = [[(1, 2, 1, 2), (2, 2, 1), ()], [(1, 1)], [(2, 1, 2)]]  # the first image is captioned


def all_captions():
    """Every caption that the policy can generate: up to four words and the end, or five words."""
    return [
        words + ((END,) if len(words) < LONGEST else ())
        for length in range(LONGEST + 1)
        for words in itertools.product((1, 2), repeat=length)
    ]


def tensors(captions):
    width = max(map(len, captions))
    ids = torch.tensor([list(c) + [END] * (width - len(c)) for c in captions])
    return ids, torch.arange(width) < torch.tensor([len(c) for c in captions])[:, None]


def token_log_probs(theta, ids):
    """`(N, T)` under a policy with a table of logits for each position and word before."""
    before = torch.cat([torch.full_like(ids[:, :1], END), ids[:, :-1]], 1)
    rows = F.log_softmax(theta[torch.arange(ids.size(1)), before], -1)
    return rows.gather(2, ids[..., None])[..., 0]


def context_of(captions, group_size):
    ids, mask = tensors(captions)
    number = len(captions) // group_size
    return RewardContext(
        captions=[" ".join(map(str, c)) for c in captions],
        ids=ids,
        mask=mask,
        ended=torch.ones(len(ids), dtype=torch.bool),
        rows=torch.zeros(number, dtype=torch.long),
        image_ids=["0"] * number,
        references=[[]] * number,
        candidates=torch.zeros(number, dtype=torch.long),
        positions=torch.zeros(number, dtype=torch.long),
    )


def reward_data():
    return RewardData(
        image_ids=["0", "1", "2"],
        references=[[" ".join(map(str, c)) for c in group] for group in REFERENCES],
        image_features=lambda scorer: torch.zeros(0),
        encode=lambda texts: tensors([(*map(int, text.split()), END) for text in texts]),
        eos_token_id=END,
        device=torch.device("cpu"),
    )


def exact_gradient(theta, alpha, s, plain_distance):
    """Expectation of Eq. 15-16 with the baselines of Section 4.3 over s independent captions.

    Captions j != k are independent and d(y, y) = 0, so two sums over all captions are enough.
    """
    captions = all_captions()
    ids, mask = tensors(captions)
    log_p = (token_log_probs(theta, ids) * mask).sum(1)
    p = log_p.detach().exp().double()
    assert float(p.sum()) == pytest.approx(1.0)
    corpus = [[(*c, END) for c in group] for group in REFERENCES]
    cider = torch.tensor([plain_cider(c, corpus[0], corpus) for c in captions], dtype=torch.float64)
    words = [[w for w in c if w != END] for c in captions]
    d = torch.tensor([[plain_distance(a, b) for b in words] for a in words], dtype=torch.float64)
    # CIDEr: the greedy baseline does not depend on the samples, so it cancels.
    quality = p * cider
    # Eq. 14, s (s - 1) pairs; and its baseline, in which each sample occurs twice.
    diversity = 2 * (s - 1) / s * p * (d @ p) - 2 * (s - 1) / s**2 * p * ((d + d.T) @ p)
    total = ((alpha * quality + (1 - alpha) * diversity) * -log_p.double()).sum()
    return torch.autograd.grad(total, theta)[0].double()


def sampled_gradients(theta, config, batches, images):
    """Gradients of the trainer's loss, one per batch of rollouts."""
    rewards = WeightedRewards(*zip(*config.make_rewards(), strict=True))
    rewards.prepare(reward_data())
    names = {reward.baseline or config.baseline for reward in rewards.rewards}
    baselines = {name: make_baseline(name, config.num_generations) for name in names}
    captions = all_captions()
    ids, mask = tensors(captions)
    p = (token_log_probs(theta, ids) * mask).sum(1).detach().exp()
    greedy = []
    while len(greedy) < LONGEST and (not greedy or greedy[-1] != END):
        greedy.append(int(theta[len(greedy), greedy[-1] if greedy else END].argmax()))
    generator = torch.Generator().manual_seed(0)
    for _ in range(batches):
        drawn = torch.multinomial(p, images * config.num_generations, replacement=True, generator=generator).tolist()
        context = context_of([captions[i] for i in drawn], config.num_generations)
        advantages, _ = compute_advantages(
            rewards, baselines, config.baseline, context, context_of([tuple(greedy)] * images, 1), lambda x: x
        )
        loss = policy_gradient_loss(token_log_probs(theta, context.ids), advantages, context.mask, loss_type="sum")[
            "loss"
        ]
        yield torch.autograd.grad(loss, theta)[0].double()


def policy():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(LONGEST, VOCABULARY, VOCABULARY, generator=generator).requires_grad_()


def z_scores(found, exact):
    """Distance of the mean from the exact gradient in standard errors, for parameters with a gradient."""
    found = torch.stack(list(found))
    error = found.std(0) / math.sqrt(len(found))
    used = error > 0
    assert int(used.sum()) > 20
    return ((found.mean(0) - exact) / error)[used]


@pytest.mark.parametrize(
    ("alpha", "s", "distance"),
    [
        (0.75, 5, "bleu34"),
        pytest.param(0.0, 5, "bleu34", marks=pytest.mark.slow),
        pytest.param(0.25, 3, "edit", marks=pytest.mark.slow),
        pytest.param(1.0, 5, "bleu34", marks=pytest.mark.slow),
    ],
)
def test_gradient_equals_the_sum_over_all_captions(tmp_path, alpha, s, distance):
    theta = policy()
    config = SLEConfig(str(tmp_path), alpha=alpha, num_generations=s, distance=distance, use_cpu=True)
    plain = {"bleu34": plain_bleu34, "edit": plain_edit}[distance]
    found = list(sampled_gradients(theta, config, batches=60, images=400))
    z = z_scores(found, exact_gradient(theta, alpha, s, plain))
    assert z.abs().max() < 4.5
    assert float((z**2).mean()) < 2.5
    # Another alpha is distinguished, so the standard error is small enough.
    assert z_scores(found, exact_gradient(theta, abs(alpha - 0.25), s, plain)).abs().max() > 6


def test_baseline_of_a_symmetric_distance_removes_two_in_s(tmp_path):
    """The mean over all captions of an image contains the caption itself: with s = 2 the advantage is 0."""
    theta = policy()
    full, half, none = (exact_gradient(theta, 0.0, s, plain_edit) for s in (10**6, 4, 2))
    # A million captions approximate infinitely many, up to about 1e-6 of the gradient (0.01).
    assert half.numpy() == within((full * (3 / 4) * (1 - 2 / 4)).numpy(), 1e-7)
    assert none.abs().max() < resolution(1, dtype="float64")
    with pytest.warns(UserWarning, match="diversity advantage is 0"):
        config = SLEConfig(str(tmp_path), alpha=0.0, num_generations=2, distance="edit", use_cpu=True)
    for gradient in sampled_gradients(theta, config, batches=2, images=20):
        assert gradient.abs().max() < resolution(1, dtype="float64")


def test_loss_equals_the_authors_surrogate():
    vector = json.loads((Path(__file__).parents[1] / "vectors" / "policy_gradient.json").read_text())["sle_surrogate"]
    log_probs, mask = torch.tensor(vector["log_probs"]), torch.tensor(vector["mask"])
    loss = policy_gradient_loss(log_probs, torch.tensor(vector["rewards"]), mask, loss_type=SLEConfig.loss_type)[
        "loss"
    ]
    assert float(loss) == close(vector["loss"], dtype="float32")


def test_advantages_equal_those_of_the_code_of_2018(tmp_path):
    config = SLEConfig(str(tmp_path), diversity="multi_reference", use_cpu=True)
    (_, diversity) = config.make_rewards()
    quality = OfContext(lambda context: torch.tensor(VECTORS["quality_advantage"]).flatten(), "quality")
    quality.baseline = "none"  # the authors' example returns advantages
    rewards = WeightedRewards([quality, diversity[0]], [config.alpha, diversity[1]])
    ids: dict[str, int] = {"<end>": END}
    captions = [
        (*(ids.setdefault(w, len(ids)) for w in caption.split()), END)
        for group in VECTORS["caption_sets"]
        for caption in group
    ]
    rewards.rewards[1].prepare(reward_data())
    baselines = {name: make_baseline(name, 5) for name in ("none", "group_floor")}
    found, _ = compute_advantages(rewards, baselines, "greedy", context_of(captions, 5), None, lambda x: x)
    expected = torch.tensor(VECTORS["combined_reward_alpha_div_0.25"], dtype=torch.float64).flatten()
    assert_close(found, expected, dtype="float32")


@pytest.mark.parametrize(
    ("arguments", "cut"),
    [({}, 1), ({"alpha": 1.0, "entropy_weight": 0.05, "num_generations": 2}, 1), ({"distance": "edit"}, 2)],
    ids=["sle", "sll-me", "edit in two micro-batches"],
)
def test_one_step_equals_a_plain_loop(tmp_path, scenes, arguments, cut):
    dataset = scenes["train"]
    split = {"per_device_train_batch_size": 8 // cut, "gradient_accumulation_steps": cut}
    trainer = build(tmp_path, dataset, **split, **arguments)
    written, contexts = (spy_on(trainer.rollouts, name) for name in ("generate", "reward_context"))
    trainer.train()
    rows = contexts[0].rows.tolist()
    args, model = trainer.args, captioner()
    s, end = args.num_generations, model.eos_token_id
    sampled, greedy = ([o.ids[i][o.mask[i]].tolist() for i in range(len(o.ids))] for o in split_greedy(written[0], s))
    assert len(sampled) == s * len(rows) == s * 8

    def encode(texts):
        labels = model.encode_captions(list(texts), max_length=100)["labels"][:, len(model.prompt_ids()) :]
        return [[t for t in row if t != -100] for row in labels.tolist()]

    corpus = [encode(row["captions"]) for row in dataset]
    distance = plain_edit if args.distance == "edit" else plain_bleu34
    loss, tokens = torch.zeros(()), 0
    for i, row in enumerate(rows):
        mine = sampled[s * i : s * i + s]
        words = [[t for t in c if t != end] for c in mine]
        apart = [[distance(a, b) for b in words] for a in words]
        mean = sum(map(sum, apart)) / s**2
        pixels = model.encode_images([open_image(dataset[row]["image"])])["pixel_values"]
        for j, caption in enumerate(mine):
            better = plain_cider(caption, corpus[row], corpus) - plain_cider(greedy[i], corpus[row], corpus)
            advantage = args.alpha * better + (1 - args.alpha) * (2 / s * sum(apart[j]) - 2 * mean)
            whole = [*model.prompt_ids(), *caption]
            ids = torch.tensor([whole])
            logits = model.model(pixel_values=pixels, input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
            start = len(model.prompt_ids())
            every = F.log_softmax(logits[start - 1 : len(whole) - 1], -1)
            loss = loss - advantage * every[torch.arange(len(caption)), ids[0, start:]].sum()
            loss = loss - args.entropy_weight * -(every.exp() * every).sum()
            tokens += len(caption)
    assert_one_plain_step(weights(trainer), model.model, loss / tokens, ulps=128)


def test_alpha_one_is_self_critical_training(tmp_path, scenes):
    sll = build(tmp_path, scenes["train"], alpha=1.0)
    assert [type(r) for r in sll.rewards.rewards] == [CiderReward]
    assert sll.rollouts.baselines.keys() == {"greedy"}
    sll.train()
    given = train(tmp_path, scenes["train"], alpha=0.5, trainer_arguments={"reward_funcs": [(CiderReward(), 1.0)]})
    assert largest_difference(weights(sll), weights(given)) == 0.0
    assert largest_difference(weights(sll), weights(train(tmp_path, scenes["train"], alpha=0.75))) > 1e-4


def test_alpha_zero_rewards_only_diversity(tmp_path, scenes):
    trainer = build(tmp_path, scenes["train"].map(lambda row: {"captions": []}), alpha=0.0)
    assert trainer.rewards.names == ["diversity"]
