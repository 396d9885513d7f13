"""Every metric on edge cases: pools of one, captions of one word, copies, features of any scale and precision."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from hf_captionrl.metrics import (
    bleu,
    bootstrap_interval,
    caption_diversity,
    caption_perplexity,
    caption_statistics,
    chair,
    cider,
    cider_d,
    clip_score,
    emscore,
    faithfulness,
    length_statistics,
    paired_test,
    ref_clip_score,
    rouge_l,
    self_retrieval,
)
from tests.numerics.drawn import DTYPES, V, few, fewer, seeds
from tests.tolerances import assert_close, close, resolution

texts = st.lists(st.sampled_from(["red", "cat", "sits", "a"]), min_size=1, max_size=6).map(" ".join)
sizes = st.sampled_from([1e-4, 1.0, 1e4])
halves = st.sampled_from([*DTYPES, torch.float64])


def features(rows: int, seed: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> Tensor:
    drawn = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (size * drawn).to(dtype)


# Retrieval


@few
@given(st.integers(1, 8), st.integers(1, 3), halves, seeds, sizes)
def test_retrieval_from_pools_of_any_size(M, G, dtype, seed, size):
    images = features(M, seed, dtype)
    text = features(M * G, seed + 1, dtype, size)
    owners = torch.arange(M).repeat_interleave(G).tolist()
    found = self_retrieval(text, images, targets=owners, ks=(1, 2, 5), num_bootstrap=20)
    assert ((found["ranks"] >= 1) & (found["ranks"] <= M)).all()
    recalls = [found[f"recall_at_{k}"] for k in (1, 2, 5)]
    assert 0 <= recalls[0] <= recalls[1] <= recalls[2] <= 1
    for k in (1, 2, 5):
        low, high = found[f"recall_at_{k}_ci"]
        assert 0 <= low <= high <= 1
    if M == 1:
        assert recalls == [1.0] * 3
        return
    # A pool in another order; rank 1 requires a score above every other one.
    order = torch.randperm(M, generator=torch.Generator().manual_seed(seed))
    place = torch.argsort(order)
    moved = self_retrieval(text, images[order], targets=place[owners].tolist(), num_bootstrap=0)
    scores = (
        torch.nn.functional.normalize(text.double(), dim=1) @ torch.nn.functional.normalize(images.double(), dim=1).T
    )
    own = scores.gather(1, torch.tensor(owners)[:, None])
    assume(float((scores - own).abs().masked_fill(scores == own, 1.0).min()) > 1e-5)
    assert moved["ranks"].tolist() == found["ranks"].tolist() == (scores >= own).sum(1).tolist()
    # With all other images as distractors, the expectation is exact.
    exact = self_retrieval(text, images, targets=owners, num_distractors=M - 1, num_bootstrap=0)
    assert exact["recall_at_1"] == pytest.approx(found["recall_at_1"])
    # An empty caption (a constant) retrieves at most one image.
    constant = self_retrieval(text[:1].expand(M, -1), images, num_bootstrap=0)
    assert constant["recall_at_1"] <= 1 / M


# Texts against references


@fewer
@given(st.lists(st.tuples(texts, st.lists(texts, min_size=1, max_size=3)), min_size=1, max_size=5), seeds)
def test_texts_against_references(images, seed):
    captions, references = [image[0] for image in images], [image[1] for image in images]
    order = np.random.default_rng(seed).permutation(len(images))
    for metric, most in ((bleu, 1.0), (rouge_l, 1.0), (cider_d, 10.0), (cider, 10.0)):
        found, moved = (
            metric([captions[i] for i in rows], [references[i] for i in rows]) for rows in (range(len(images)), order)
        )
        for key, value in found.items():
            if not isinstance(value, float):
                continue
            assert 0 <= value <= most + resolution(most, dtype="float64"), key
            assert moved[key] == close(value, magnitude=most), key
        scores, others = (
            np.array([*part.values()] if metric is bleu else [part])
            for part in (found["per_sample"], moved["per_sample"])
        )
        assert np.isfinite(scores).all()
        assert_close(others, scores[:, order], magnitude=most)
        if len(images) == 1 and metric in (cider, cider_d):
            assert found[metric.__name__] == 0  # with one document every frequency is 0
    same = [texts[0] for texts in references]
    assert rouge_l(same, references)["rouge_l"] == pytest.approx(1.0)
    assert bleu(same, references)["bleu_1"] == close(1.0, dtype="float32")
    assert bleu(captions, references)["bleu_1"] <= 1.0


@few
@given(st.lists(st.lists(texts, min_size=2, max_size=4), min_size=1, max_size=4))
def test_texts_against_each_other(groups):
    found = caption_diversity(groups, training_captions=[groups[0][0]])
    for key in ("div_1", "div_2", "mbleu_1", "mbleu_4", "mbleu_4_per_image", "unique_captions", "novel_captions"):
        assert 0 <= found[key] <= 1, key
    assert found["mbleu_4"] <= found["mbleu_1"] + resolution(1)  # up to pycocoevalcap's constants
    back = caption_diversity([group[::-1] for group in groups[::-1]], training_captions=[groups[0][0]])
    for key in ("div_1", "div_2", "unique_captions", "mbleu_4_per_image", "novel_captions", "vocabulary_size"):
        assert back[key] == close(found[key]), key
    flat = [text for group in groups for text in group]
    counted, lengths = caption_statistics(flat), length_statistics(flat)
    assert counted["length"] == pytest.approx(lengths["mean_words"])
    assert 0 <= lengths["std_words"] <= lengths["max_words"]
    assert 1e-3 <= counted["lexical_diversity"] <= 4e-3


# Features


@few
@given(st.integers(1, 5), halves, seeds, sizes)
def test_clip_scores_of_features_of_any_length(N, dtype, seed, size):
    text, images = features(N, seed, dtype), features(N, seed + 1, dtype)
    references = [features(1 + row % 3, seed + 2 + row, dtype) for row in range(N)]
    found = clip_score(text, images)
    assert 0 <= found["clip_score"] <= 2.5 + resolution(2.5)
    raw = clip_score(text, images, preset="ndlb")["per_sample"]
    assert (np.abs(raw) <= 100 + resolution(100)).all()
    assert clip_score(text, text, preset="ndlb")["clip_score"] == pytest.approx(100, rel=1e-6)
    if dtype in (torch.float32, torch.float64):  # half precision changes by scaling
        assert_close(
            clip_score(text * size, images)["per_sample"], found["per_sample"], dtype="float32", magnitude=2.5
        )
    both = ref_clip_score(text, images, references)
    assert np.isfinite(both["per_sample"]).all()
    assert ((both["per_sample"] >= 0) & (both["per_sample"] <= 2.5 + resolution(2.5))).all()
    # A harmonic mean is between its two parts, here 2.5 cos and the largest cosine with a reference.
    assert (both["per_sample"] <= 2 * found["per_sample"] + resolution(2.5)).all()
    opposite = ref_clip_score(text, -text, [text[row : row + 1] for row in range(N)])
    assert (opposite["per_sample"] == 0).all()


@few
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), halves, seeds, sizes)
def test_emscore_of_one_token_and_one_frame_and_more(N, T, F, dtype, seed, size):
    tokens = [features(T, seed + i, dtype, size) for i in range(N)]
    frames = [features(F, seed + 9 + i, dtype) for i in range(N)]
    found = emscore(tokens, frames)
    off = resolution(1, dtype="float64")
    for key in ("precision", "recall", "fine_precision", "fine_recall", "coarse"):
        assert -1 - off <= found[key] <= 1 + off, key
        assert np.isfinite(found["per_sample"][key]).all()
    turned = emscore(tokens, [rows.flip(0) for rows in frames])
    assert turned["precision"] == close(found["precision"], magnitude=1)
    assert turned["recall"] == close(found["recall"], magnitude=1)
    own = emscore(tokens, [rows[-1:] for rows in tokens])
    assert own["coarse"] == close(1.0, dtype="float32")
    if T == 1:
        assert own["f"] == close(1.0, dtype="float32")
        cosines = [self_cosines(t, f).max() for t, f in zip(tokens, frames, strict=True)]
        assert found["fine_precision"] == close(float(np.mean(cosines)), magnitude=1, dtype="float32")
    # F is a mean of P and R if both are positive; if they cancel it is unbounded but finite.
    positive = (found["per_sample"]["fine_precision"] > 0) & (found["per_sample"]["fine_recall"] > 0)
    pair = np.stack([found["per_sample"]["fine_precision"], found["per_sample"]["fine_recall"]])[:, positive]
    fine = found["per_sample"]["fine_f"][positive]
    assert ((fine >= pair.min(0) - off) & (fine <= pair.max(0) + off)).all()


def self_cosines(a: Tensor, b: Tensor) -> np.ndarray:
    left, right = (torch.nn.functional.normalize(x.double(), dim=1) for x in (a, b))
    return (left @ right.T).numpy()


class Fixed(torch.nn.Module):
    """A language model with the same logits at every position."""

    def __init__(self, row: Tensor) -> None:
        super().__init__()
        self.row = torch.nn.Parameter(row)
        self.config = SimpleNamespace(model_type="fixed")

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.row.expand(*input_ids.shape, -1))


class Letters:
    """A tokenizer of single letters."""

    bos_token_id = 0

    def __call__(self, text):
        return {"input_ids": [1 + ord(letter) % (V - 1) for letter in text]}


@few
@given(
    st.lists(st.text("abcdef", min_size=1, max_size=5), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    seeds,
    st.sampled_from([1.0, 1e4]),
)
def test_perplexity_of_a_certain_and_wrong_model_is_infinite(captions, dtype, seed, scale):
    row = (scale * torch.randn(V, generator=torch.Generator().manual_seed(seed))).to(dtype)
    found = caption_perplexity(captions, Fixed(row), Letters(), bos="prepend", batch_size=2)
    log_probs = row.float().double().log_softmax(0)
    nats = [-sum(float(log_probs[1 + ord(letter) % (V - 1)]) for letter in text) for text in captions]
    assert_close(found["nats"], nats, dtype="float32", magnitude=scale, summands=V)
    mean = sum(nats) / sum(map(len, captions))
    assert found["perplexity"] == (pytest.approx(math.exp(mean), rel=1e-3) if mean < 709 else math.inf)
    assert not math.isnan(found["mean_perplexity"])


# Claims, words, agreement


@few
@given(st.lists(st.tuples(texts, st.sets(st.sampled_from(["cat", "dog", "bus"]))), min_size=1, max_size=4))
def test_shares_of_claims(pairs):
    captions, objects = [pair[0] for pair in pairs], [sorted(pair[1]) for pair in pairs]
    found = chair(captions, objects)
    for key in ("chair_i", "chair_s", "object_recall"):
        assert found[key] is None or 0 <= found[key] <= 1
        assert (found[key] is None) == (found["num_objects" if key == "object_recall" else "num_mentions"] == 0)
    # Without claims and facts nothing is wrong and nothing is recalled.
    silent = chair(["a"] * len(captions), objects)
    assert (silent["chair_i"], silent["chair_s"], silent["num_mentions"]) == (None, None, 0)

    def check(text, facts):
        words = set(text.split())
        return SimpleNamespace(
            right=words & set(facts), wrong=words - set(facts), recalled=set(facts) & words, missed=set(facts) - words
        )

    told = faithfulness(captions, objects, check)
    assert 0 <= told["hallucination"] <= 1
    assert 0 <= told["fact_recall"] <= 1
    assert (
        told["wrong_captions"] >= told["hallucination"] - 1 + resolution(1, dtype="float64")
        or told["wrong_captions"] > 0
    )


# Error bars


values = st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=12)


@few
@given(values, st.integers(1, 60), st.integers(0, 99), st.sampled_from([0.5, 0.95]))
def test_intervals_lie_within_their_numbers(numbers, resamples, seed, confidence):
    size = max(map(abs, numbers))
    low, high = bootstrap_interval(numbers, num_resamples=resamples, seed=seed, confidence=confidence)
    off = resolution(size, dtype="float64")
    assert min(numbers) - off <= low <= high <= max(numbers) + off
    assert (low, high) == bootstrap_interval(numbers, num_resamples=resamples, seed=seed, confidence=confidence)
    constant = bootstrap_interval([numbers[0]] * 40, num_resamples=resamples, seed=seed)
    assert constant == pytest.approx((numbers[0], numbers[0]), rel=1e-9)
    # One group has only one resample.
    alone = bootstrap_interval(numbers, groups=["image"] * len(numbers), num_resamples=resamples, seed=seed)
    assert alone[0] == alone[1]
    if len(numbers) == 1:
        assert alone == (low, high)


@few
@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=10), st.integers(0, 99))
def test_paired_test_is_symmetric(pairs, seed):
    a, b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    one, other = (paired_test(*both, num_resamples=50, seed=seed) for both in ((a, b), (b, a)))
    assert one["difference"] == pytest.approx(-other["difference"])
    assert one["p_value"] == other["p_value"]
    assert 1 / 51 <= one["p_value"] <= 1
    assert paired_test(a, a, num_resamples=50, seed=seed)["p_value"] == 1


# Negative controls
