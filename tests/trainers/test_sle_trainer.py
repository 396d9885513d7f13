"""SLETrainer: its gradient against a plain loop, and its parts alone."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from hf_captionrl.captioners.captioner import split_greedy
from hf_captionrl.data import open_image
from hf_captionrl.rewards import CiderReward
from hf_captionrl.trainers import SLEConfig
from tests.rewards.test_diversity import plain_bleu34, plain_edit
from tests.trainers.one_step import assert_one_plain_step, captioner, largest_difference, spy_on, weights
from tests.trainers.rl_step import build_sle as build
from tests.trainers.rl_step import train_sle as train


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
    with pytest.warns(UserWarning, match="diversity advantage is 0"):
        SLEConfig(str(tmp_path), num_generations=2, distance="edit", use_cpu=True)
