"""What all metrics share: names, signatures, intervals and tests; invalid input is refused by the name of the argument."""

import doctest
import importlib
import math

import numpy as np
import pytest
import torch
from scipy.stats import binom, binomtest

import hf_captionrl.metrics as m
from hf_captionrl.metrics import bootstrap, bootstrap_interval, paired_test
from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.metrics.clip_scores import emscore_matrix
from hf_captionrl.scenes import check
from hf_captionrl.text.cider_d import DocumentFrequencies
from tests.tolerances import within


def test_every_public_name_is_a_function_even_after_all_modules_were_imported():
    for name in 2 * m.__all__:  # the second time, a module of the same name would hide the function
        assert callable(getattr(m, name)), name
    with pytest.raises(AttributeError, match="no attribute 'wer'"):
        m.wer  # noqa: B018


def test_signature_keeps_order_and_omits_missing_values():
    text = signature(metric="x", scorer="", seed=None, eos=False, n=4)
    assert text.startswith("metric:x|eos:false|n:4|hf_captionrl:")
    # The signature of a scorer fits into that of the metric.
    text = signature(metric="x", scorer="clip@abc|float32|text:77")
    assert text.startswith("metric:x|scorer:clip@abc,float32,text:77|")


@pytest.mark.parametrize("name", ["metrics.recall", "text.cider_d", "text.tokenize"])
def test_examples_of_docstrings_run(name):
    module = importlib.import_module(f"hf_captionrl.{name}")
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_captions_of_one_image_are_drawn_together():
    values = np.repeat(np.random.default_rng(0).normal(size=100), 5)
    alone = bootstrap_interval(values)
    together = bootstrap_interval(values, groups=np.repeat(np.arange(100), 5))
    assert together[1] - together[0] > 1.8 * (alone[1] - alone[0])


def test_ratio_of_sums_and_the_seed():
    wrong, claims = np.array([0, 1, 2, 0] * 100), np.array([2, 4, 5, 0] * 100)
    low, high = bootstrap_interval(wrong, weights=claims)
    assert low < 3 / 11 < high
    assert bootstrap_interval([1.0], weights=[4.0], num_resamples=10) == (0.25, 0.25)
    again, other = (bootstrap_interval(wrong, weights=claims, seed=seed) for seed in (0, 1))
    assert again == (low, high) != other


def test_interval_of_hits_equals_the_binomial_one():
    values = np.r_[np.ones(60), np.zeros(240)]
    low, high = bootstrap_interval(values, num_resamples=200_000)
    assert low == within(binom.ppf(0.025, 300, 0.2) / 300, 1.01 / 300)
    assert high == within(binom.ppf(0.975, 300, 0.2) / 300, 1.01 / 300)


def test_drawing_counts_equals_drawing_samples_in_distribution(monkeypatch):
    rng = np.random.default_rng(3)
    values, weights = rng.integers(0, 3, 800) * 1.0, rng.integers(1, 3, 800) * 1.0
    options = {"weights": weights, "groups": (np.arange(800) // 2).tolist(), "num_resamples": 40_000}
    counts = bootstrap_interval(values, **options)
    monkeypatch.setattr(bootstrap, "_SAMPLES_PER_VALUE", 10**9)
    samples = bootstrap_interval(values, **options)
    assert counts != samples  # two different methods
    assert counts == within(samples, 0.05 * (samples[1] - samples[0]))


def test_paired_test_of_hits_equals_the_sign_test():
    wins, losses = 40, 22
    a, b = np.zeros(500), np.zeros(500)
    a[:wins], b[wins : wins + losses] = 1.0, 1.0
    found = paired_test(a, b, num_resamples=100_000)
    assert found["p_value"] == within(binomtest(wins, wins + losses).pvalue, 0.006)
    assert found["difference"] == pytest.approx((wins - losses) / 500)


def test_labels_of_every_kind_are_groups():
    values = [1.0, 2.0, 3.0, 5.0]
    pairs = [("p", 0), ("q", 0), ("p", 0), ("q", 1)]
    assert bootstrap_interval(values, groups=pairs) == bootstrap_interval(values, groups=[0, 1, 0, 2])
    mixed = bootstrap_interval(values, groups=[1, "1", 1, (1,)])
    assert mixed == bootstrap_interval(values, groups=[0, 1, 0, 2])
    for kind in (np.array, torch.tensor, list):
        assert bootstrap_interval(values, groups=kind([7, 3, 7, 5])) == bootstrap_interval(values, groups=[2, 0, 2, 1])
    assert paired_test(values, [0.0] * 4, groups=pairs)["p_value"] > 0


EYE = torch.eye(4)
ZERO = EYE * torch.tensor([1.0, 1, 0, 1])[:, None]
VIDEO = np.ones((3, 4))
NAN = float("nan")
PAIR = (["a", "b"], [["a"], ["b"]])
WITH_EOS = DocumentFrequencies.from_references([[["a"]], [["b"]]], eos=True)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        # texts: the metrics of references share the checks
        *((lambda metric=metric: metric("a dog", [["a dog"]]), "candidates") for metric in (m.bleu, m.cider, m.rouge_l)),
        (lambda: m.cider_d([], []), "candidates"),
        (lambda: m.cider_d(["a", ""], [["a"], ["a"]]), r"candidates\[1\]"),
        (lambda: m.cider_d(["a dog"], "a dog"), "references"),
        (lambda: m.cider_d(["a dog"], ["a dog"]), r"references\[0\]"),
        (lambda: m.cider_d(["a"], [[]]), r"references\[0\]"),
        (lambda: m.cider_d(["a", "b"], [["a"], [" "]]), r"references\[1\]\[0\]"),
        (lambda: m.cider_d(["a"], [["a"], ["b"]]), "2 lists of references"),
        (lambda: m.meteor(["a", ""], [["a"], ["b"]]), r"candidates\[1\]"),  # before anything starts
        (lambda: m.cider_d(*PAIR, frequencies=WITH_EOS), "eos"),
        *((lambda sigma=sigma: m.cider_d(*PAIR, sigma=sigma), "sigma") for sigma in (0, 1e-200)),
        # intervals
        (lambda: m.bootstrap_interval([1.0, NAN]), r"values\[1\]"),
        (lambda: m.bootstrap_interval([]), "values"),
        (lambda: m.bootstrap_interval([1.0, 2.0], weights=[1.0]), "weights"),
        (lambda: m.bootstrap_interval([1.0], weights=[0.0]), "weights"),
        (lambda: m.bootstrap_interval([1.0, 2.0], groups=["a"]), "groups"),
        (lambda: m.bootstrap_interval([1.0], confidence=95), "confidence"),
        (lambda: m.paired_test([1.0, 2.0], [1.0]), "2 scores and b 1"),
        (lambda: m.exact_interval(1.5, 3), "1.5 successes"),
        # words
        (lambda: m.caption_diversity([["a", "b"], ["a"]]), r"captions\[1\]"),
        (lambda: m.caption_diversity(["a dog"]), r"captions\[0\]"),
        (lambda: m.caption_diversity([["a", "b"]], training_captions="a b"), "training_captions"),
        (lambda: m.caption_statistics("a dog"), "captions"),
        (lambda: m.caption_statistics(["a dog", "\n"]), r"captions\[1\]"),
        (lambda: m.local_mutual_information({"one": {"a": 1}}), "two"),
        (lambda: m.characteristic_words({"a": ["x"]}, tagger=list), "sources"),
        (lambda: m.characteristic_words({"a": ["x"], "b": [" "]}, tagger=lambda c: [[("x", "NOUN")]]), r"sources\['b'\]"),
        # faithfulness
        (lambda: m.faithfulness(["a"], [{}] * 3, check), "3 facts"),
        (lambda: m.faithfulness(["a", ""], [{}] * 2, check), r"captions\[1\]"),
        (lambda: m.faithfulness(["a pig"], [{"kind": "pig"}], check), r"facts\[0\].*KeyError"),
        (lambda: m.chair(["a"], ["dog"]), r"objects\[0\]"),
        (lambda: m.chair(["a", "b"], [["dog"]]), "1 lists of objects"),
        (lambda: m.chair(["a"], [["dog"]], synonyms={"dog": [], "animal": ["dogs"]}), "'dog' and 'animal'"),
        # features
        (lambda: m.clip_score(EYE, ZERO), r"image_features\[2\]"),
        (lambda: m.clip_score(EYE, EYE[:2]), "image_features"),
        (lambda: m.clip_score(EYE, EYE.half()), "dtypes"),
        (lambda: m.clip_score(EYE, EYE, preset="mine"), "preset"),
        (lambda: m.ref_clip_score(EYE, EYE, [EYE, EYE]), "2 sets of references"),
        (lambda: m.ref_clip_score(EYE, EYE, [EYE, ZERO, EYE, EYE]), r"reference_features\[1\]\[2\]"),
        (lambda: m.emscore([VIDEO] * 2, [VIDEO]), "1 videos"),
        (lambda: m.emscore([VIDEO] * 2, [VIDEO, 0 * VIDEO]), r"frame_features\[1\]\[0\]"),
        (lambda: emscore_matrix([VIDEO], [VIDEO, 0 * VIDEO]), r"frame_features\[1\]\[0\]"),
        *((lambda idf=idf: m.emscore([VIDEO], [VIDEO], idf=[idf]), r"idf\[0\]") for idf in ([1.0], [math.inf, 1, 1])),
        (lambda: m.emscore([VIDEO[:, :3]], [VIDEO]), "token_features"),
        (lambda: m.emscore([VIDEO], [VIDEO], reference_features=[[]]), "reference_features"),
        (lambda: m.emscore([VIDEO], [VIDEO], reference_features=[[VIDEO[:, :3]]]), r"reference_features\[0\]\[0\]"),
        # self-retrieval
        (lambda: m.self_retrieval([[1.0, 0.0, 0.0], [1.0, 0.0]], EYE), "text_features is not a matrix"),
        (lambda: m.self_retrieval(EYE[:2], [["a"], ["b"]]), "image_features"),
        (lambda: m.self_retrieval(EYE.half(), EYE), "text_features"),
        (lambda: m.self_retrieval(EYE, ZERO), r"image_features\[2\]"),
        *((lambda bag=bag: m.self_retrieval(EYE, EYE, bags=[bag]), r"bags\[0\]") for bag in ([0, 1.5], None)),
        (lambda: m.self_retrieval(EYE, EYE, targets=[None] * 4), "targets"),
        (lambda: m.self_retrieval(EYE, EYE, bags=[[0, 1], [9, 0]], duplicates="merge"), r"bags\[1\]"),
        (lambda: m.self_retrieval(EYE, EYE, sets=[[0, 1.5], *[[0, 1]] * 3], duplicates="merge"), r"sets\[0\]"),
        (lambda: m.self_retrieval(EYE, EYE, num_distractors=5, protocol="blocks"), "num_distractors"),
        *((lambda ks=ks: m.self_retrieval(EYE, EYE, ks=ks), "ks") for ks in ((), (0,), (1.5,), (10**30,))),
        (lambda: m.self_retrieval(EYE, EYE, bags=[[0, 1]], num_distractors=3), "bags, sets and num_distractors"),
        (lambda: m.self_retrieval(EYE, EYE, num_distractors=99), "num_distractors"),
        (lambda: m.self_retrieval(EYE, EYE, protocol="hard"), "protocol"),
        (lambda: m.self_retrieval(EYE, EYE, duplicates="drop"), "duplicates"),
        (lambda: m.self_retrieval(EYE[:2], EYE, targets=[0, 2], num_distractors=1, protocol="blocks"), "image 1"),
        (lambda: m.self_retrieval(EYE, EYE, pool_ranks=[1, 2, 3]), "pool_ranks"),
        (lambda: m.self_retrieval(EYE, EYE, pool_ranks=[1] * 4, bags=[[0, 1]]), "pool_ranks"),
    ],
)  # fmt: skip
def test_the_argument_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()
