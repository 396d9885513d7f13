"""Metrics refuse missing texts and options outside the domain of their formula, by name."""

import math

import numpy as np
import pytest
import torch

from hf_captionrl.apps.instruct.judges import answer_statistics
from hf_captionrl.apps.studies.results import krippendorff_alpha
from hf_captionrl.metrics import (
    bleu,
    bootstrap_interval,
    caption_diversity,
    caption_statistics,
    chair,
    cider,
    cider_d,
    clip_score,
    emscore,
    exact_interval,
    length_statistics,
    local_mutual_information,
    ref_clip_score,
    rouge_l,
    self_retrieval,
)
from hf_captionrl.retrieval.ranking import distractor_recall
from tests.numerics.test_edges import whole

# Texts


MISSING = [None, math.nan, 3, b"a cat"]


@pytest.mark.parametrize("metric", [bleu, cider, cider_d, rouge_l])
@pytest.mark.parametrize("missing", MISSING, ids=repr)
def test_a_missing_candidate_or_reference_is_named(metric, missing):
    references = [["a red cat"], ["a dog"]]
    for candidates, name in (
        (["a cat", missing], r"candidates\[1\]"),
        ([missing, "a cat"], r"candidates\[0\]"),
        ([missing, missing], r"candidates\[0\]"),
        ([["a cat"], missing], r"candidates\[1\]"),
        ([["a cat"], [missing]], r"candidates\[1\]\[0\]"),
        (None, "candidates"),
    ):
        with pytest.raises(ValueError, match=name):
            metric(candidates, references)
    for wrong, name in (
        ([["a red cat"], missing], r"references\[1\]"),
        ([["a", missing], ["a"]], r"references\[0\]\[1\]"),
    ):
        with pytest.raises(ValueError, match=name):
            metric(["a cat", "a dog"], wrong)
    with pytest.raises(ValueError, match="references"):
        metric(["a cat", "a dog"], None)


@pytest.mark.parametrize("missing", MISSING, ids=repr)
def test_a_missing_caption_is_named(missing):
    for metric in (caption_statistics, length_statistics):
        with pytest.raises(ValueError, match=r"captions\[1\]"):
            metric(["a cat", missing])
    with pytest.raises(ValueError, match=r"captions\[1\]"):
        caption_diversity([["a", "b"], missing])
    with pytest.raises(ValueError, match=r"objects\[0\]"):
        chair(["a cat"], [missing] if not isinstance(missing, bytes) else [None])
    for metric in (caption_statistics, length_statistics, caption_diversity, answer_statistics):
        for nothing in (None, 3, [], {}):
            with pytest.raises(ValueError, match=r"captions|answers"):
                metric(nothing)


# Options and other numbers


def test_options_outside_the_domain_are_refused():
    images = torch.eye(4)
    pair = ["a cat"], [["a dog"]]
    for call, said in (
        (lambda: clip_score(images, images, scale=math.inf), "scale"),
        (lambda: clip_score(images, images, scale=math.nan), "scale"),
        (lambda: ref_clip_score(images, images, [images] * 4, scale=0.0), "scale"),
        (lambda: rouge_l(*pair, beta=math.inf), "beta"),
        (lambda: rouge_l(*pair, beta=1e200), "beta"),
        (lambda: cider_d(*pair, sigma=1e-200), "sigma"),
        (lambda: self_retrieval(images, images, num_distractors=2.5), "num_distractors"),
        (lambda: self_retrieval(images, images, targets=[None] * 4), "targets"),
        (lambda: self_retrieval(images, images, bags=[None]), r"bags\[0\]"),
        (lambda: emscore([images], [images], idf=[[math.inf, 1, 1, 1]]), r"idf\[0\]"),
        (lambda: distractor_recall(torch.tensor([5]), 4, num_distractors=2), r"rank\[0\] is 5"),
        (lambda: distractor_recall(torch.tensor([1.0, math.nan]), 4, num_distractors=2), r"rank\[1\] is nan"),
        (lambda: local_mutual_information({"a": {"x": math.nan}, "b": {"x": 1}}), "counts"),
        (lambda: local_mutual_information({"a": {"x": None}, "b": {"x": 1}}), "counts"),
        (lambda: exact_interval(1.5, 3), "1.5 successes"),
        (
            lambda: bootstrap_interval([1.0] * 40, weights=[1.0] + [0.0] * 39, num_resamples=1, seed=2),
            "Raise num_resamples",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_scale_of_the_weights_does_not_matter():
    rows = whole(4, 0)
    wanted = emscore([rows], [rows.flip(0)], idf=[[1, 2, 3, 4]])["precision"]
    for size in (1e-300, 1e307):
        found = emscore([rows], [rows.flip(0)], idf=[[size, 2 * size, 3 * size, 4 * size]])["precision"]
        assert found == pytest.approx(wanted)


@pytest.mark.parametrize("power", [-1060, -600, 600, 1015])
def test_agreement_does_not_depend_on_the_unit(power):
    drawn = np.random.default_rng(0)
    ratings = [(unit, person, float(drawn.integers(-9, 10))) for unit in range(6) for person in range(3)]
    plain = krippendorff_alpha(ratings, level="interval")["alpha"]
    scaled = [(unit, person, math.ldexp(value, power)) for unit, person, value in ratings]
    assert krippendorff_alpha(scaled, level="interval")["alpha"] == pytest.approx(plain, rel=1e-12)
