"""reproduction/metric_audit.py: its captions against the truth checker, its numbers against loops, and its calibration."""

import itertools
import random

import numpy as np
import pytest
import torch

from hf_captionrl.data import open_image
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.rewards import SelfRetrieval
from hf_captionrl.scenes import check, full_caption, sample_scene
from reproduction.metric_audit import (
    INVARIANCES,
    KINDS,
    SCORERS,
    audit,
    draw_scenes,
    false_alarms,
    functions_of,
    misranked,
    probe,
    reward_metric,
    scene_captions,
    scene_references,
)

KNOWN = {SCORERS[0]: (0.595, 0.658), SCORERS[1]: (0.906, 0.960)}
"""Intervals of docs/scenes.md, of other scenes, so that intervals have to overlap, not to hold the means."""


def scenes(number, seed=0):
    rng = np.random.default_rng(seed)
    return [(scene, scene_captions(scene.facts, rng)) for scene in (sample_scene(rng) for _ in range(number))]


# --- captions --------------------------------------------------------------------------------------------------------


def test_every_caption_is_as_true_as_its_name_says():
    seen = set()
    for scene, captions in scenes(300):
        facts, true = scene.facts, captions["true"]
        said = check(true, facts)
        assert (true, said.wrong) == (full_caption(facts), ())
        for name in (*INVARIANCES, "identical", "longer 1", "longer 2"):
            if name in captions:
                found = check(captions[name], facts)
                assert (found.wrong, set(found.recalled)) == ((), set(said.recalled)), captions[name]
        for kind in captions.keys() & (KINDS.keys() - {"negation"}):
            found = check(captions[kind], facts)
            assert found.wrong, captions[kind]
            assert len(captions[kind].split()) == len(true.split())
            if not kind.startswith("swapped"):
                assert len(found.wrong) == 1, captions[kind]
            seen.add(kind)
        if facts.second:
            assert captions["negation"].endswith(f" {facts.second}")
            assert not captions["negation, true"].endswith((f" {facts.kind}", f" {facts.second}"))
            assert len(captions["negation"].split()) == len(captions["negation, true"].split())
        claims = [{claim[:2] for claim in check(captions[name], facts).wrong} for name in ("wrong", "wrong, reworded")]
        assert claims[0] == claims[1] != set()
        assert [claim.attribute for claim in check(captions["background, early"], facts).wrong] == ["background"]
        levels = [set(check(captions[f"facts {level}"], facts).recalled) for level in range(3)] + [set(said.recalled)]
        assert all(few < more for few, more in itertools.pairwise(levels)), captions
        words = [len(captions[name].split()) for name in ("true", "padding", "longer 1", "longer 2")]
        assert words == sorted(set(words))
    assert seen == KINDS.keys() - {"negation"}


def test_references_are_of_the_scene_in_other_words():
    rng = np.random.default_rng(3)
    for scene, captions in scenes(50, seed=1):
        full = scene_references(scene.facts, rng, "full")
        assert len(full) == len(scene_references(scene.facts, rng, "short")) == 5
        assert all(
            set(check(text, scene.facts).recalled) == set(check(captions["true"], scene.facts).recalled)
            for text in full
        )
        assert captions["true"] not in full or "paraphrase" not in captions


# --- numbers of scores that are set by hand --------------------------------------------------------------------------


def test_probe_equals_plain_loops():
    captions = scenes(60, seed=2)
    names = list(dict.fromkeys(name for _, found in captions for name in found))
    rng = np.random.default_rng(5)
    # Few values, so that there are ties.
    scores = {name: rng.integers(6, size=len(captions)).astype(float) for name in names}
    applies = {name: np.array([name in found for _, found in captions]) for name in names}
    found = probe(scores, applies, seed=0)

    def won(above, below, row):
        a, b = scores[above][row], scores[below][row]
        return 1.0 if a > b else 0.5 if a == b else 0.0

    for kind in KINDS:
        rows = [row for row, (_, texts) in enumerate(captions) if kind in texts]
        shares = [won("negation, true" if kind == "negation" else "true", kind, row) for row in rows]
        got = found["sensitivity"][kind]
        assert got["value"] == pytest.approx(sum(shares) / len(shares))
        assert (got["n"], got["ties"]) == (len(rows), pytest.approx(shares.count(0.5) / len(rows)))
        assert got["interval"][0] <= got["value"] <= got["interval"][1]
    every = range(len(captions))
    for name in INVARIANCES:
        rows = [row for row in every if name in captions[row][1]]
        change = sum(scores[name][row] - scores["true"][row] for row in rows) / len(rows)
        assert found["invariance"][name]["value"] == pytest.approx(change / np.std(scores["true"]))
    steps = ["facts 0", "facts 1", "facts 2", "true"]
    upward = [won(steps[i + 1], steps[i], row) for row in every for i in range(3)]
    assert found["monotonicity"]["value"] == pytest.approx(np.mean(upward))
    longer = ["true", "padding", "longer 1", "longer 2"]
    taus = [2 * won(longer[j], longer[i], row) - 1 for row in every for i in range(4) for j in range(i + 1, 4)]
    assert found["length_bias"]["value"] == pytest.approx(np.mean(taus))
    early = [won("word order", "background, early", row) - won("true", "background", row) for row in every]
    assert found["position_bias"]["value"] == pytest.approx(np.mean(early))
    keys = ("sees", "does_not_see", "prefers_the_error")
    assert sorted(kind for key in keys for kind in found[key]) == sorted(KINDS)


def test_wrong_rankings_equal_a_simulation():
    rng = np.random.default_rng(0)
    true = rng.normal(size=(2, 80))
    wrong = true[::-1] - rng.exponential(0.6, size=(2, 80)) + 0.2
    images, rates, trials = 60, (0.1, 0.3), 4000

    def captioner(rate, at):
        is_wrong = rng.random(len(at)) < rate
        wording = rng.integers(2, size=len(at))
        return np.where(is_wrong, wrong[wording, at], true[wording, at]).mean()

    lost = 0
    for _ in range(trials):
        at = rng.integers(80, size=images)
        lost += captioner(rates[1], at) > captioner(rates[0], at)
    found = misranked(true, wrong, images, rates, seed=0)
    assert found["value"] == pytest.approx(lost / trials, abs=4 * 0.5 / trials**0.5)
    assert found["interval"][0] < found["value"] < found["interval"][1]
    assert misranked(true, wrong, 10 * images, rates, seed=0)["value"] < found["value"]
    # Captions of equal score rank nothing; a metric that prefers errors ranks the wrong way.
    assert misranked(true, true, images, rates, seed=0)["value"] == 0.5
    assert misranked(true, true + 1, 1000, (0.1, 0.4), seed=0)["value"] > 0.99


def test_false_alarms_are_at_the_nominal_level():
    rng = np.random.default_rng(1)
    true = rng.normal(size=(2, 300))
    found = [false_alarms(true, true - 1, 0.1, seed) for seed in range(3)]
    assert all(row["interval"][0] <= 0.05 for row in found)
    total, trials = sum(row["value"] * row["n"] for row in found), sum(row["n"] for row in found)
    assert abs(total / trials - 0.05) < 4 * (0.05 * 0.95 / trials) ** 0.5
    same = np.ones((2, 300))
    assert false_alarms(same, same, 0.1, seed=0)["value"] == 0  # identical captions never differ


# --- calibration -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    drawn, draw = draw_scenes(300, "short", tmp_path_factory.mktemp("scenes")), random.Random(0)
    functions = functions_of(["truth_precision", "truth_f1", "length", "clip_score"], drawn)
    functions["random"] = lambda captions, references, files: [draw.random() for _ in captions]
    functions["constant"] = lambda captions, references, files: [3.0 for _ in captions]
    return audit(functions, drawn)


@pytest.mark.parametrize("name", ["truth_precision", "truth_f1"])
def test_the_truth_checker_sees_every_error(audited, name):
    found = audited[name]
    assert {row["value"] for row in found["sensitivity"].values()} == {1.0}
    assert (found["does_not_see"], found["prefers_the_error"]) == ([], [])
    assert all(row["value"] == 0 for row in found["invariance"].values())
    assert (found["length_bias"]["value"], found["position_bias"]["value"]) == (0, 0)
    assert found["monotonicity"]["value"] == (1.0 if name == "truth_f1" else 0.5)


def test_length_sees_no_error_and_shows_its_bias(audited):
    found = audited["length"]
    assert {(row["value"], row["ties"]) for row in found["sensitivity"].values()} == {(0.5, 1.0)}
    assert found["length_bias"]["value"] == 1
    assert not found["is_constant"]


def test_random_numbers_have_neither_sight_nor_bias(audited):
    found = audited["random"]
    rows = [*found["sensitivity"].values(), found["identical"], found["monotonicity"]]
    rows += [row | {"value": row["value"] + 0.5} for row in (found["length_bias"], found["position_bias"])]
    errors = [(row["value"] - 0.5) / (0.5 / row["n"] ** 0.5) for row in rows]
    assert max(map(abs, errors)) < 3.5  # of some 13 numbers
    assert np.mean(np.square(errors)) < 2
    assert found["false_alarms"]["interval"][0] <= 0.05


def test_a_constant_metric_has_only_ties(audited):
    found = audited["constant"]
    assert found["is_constant"]
    assert {(row["value"], row["ties"]) for row in found["sensitivity"].values()} == {(0.5, 1.0)}
    assert {row["value"] for row in found["misranked"]} == {0.5}
    assert found["does_not_see"] == list(KINDS)


def test_the_known_difference_of_the_shipped_scorers_reappears(audited):
    intervals = {
        name: audited[f"clip_score ({name})"]["sensitivity"]["swapped objects"]["interval"] for name in SCORERS
    }
    for name, (low, high) in KNOWN.items():
        assert max(low, intervals[name][0]) <= min(high, intervals[name][1]), name
    assert intervals[SCORERS[0]][1] < intervals[SCORERS[1]][0]
    assert audited[f"clip_score ({SCORERS[0]})"]["cost"]["value"] > 0


# --- rewards and scorers as metrics ----------------------------------------------------------------------------------


def test_self_retrieval_as_a_metric_is_a_softmax_over_all_images(tmp_path):
    drawn = draw_scenes(12, "full", tmp_path)
    captions, scorer = [row["word order"] for row in drawn.captions], load_scorer(SCORERS[0], device="cpu")
    pictures = scorer.image_features([open_image(file) for file in drawn.files])
    logits = scorer.logit_scale * scorer.text_features(captions) @ pictures.T
    expected = [float(logits[row, row] - torch.logsumexp(logits[row], 0)) for row in range(12)]
    score = reward_metric("self_retrieval", drawn, scorer)
    for rows in (range(12), [5, 2, 2]):  # some captions only, an image twice: the distractors stay
        scores = score([captions[row] for row in rows], None, [drawn.files[row] for row in rows])
        assert scores == pytest.approx([expected[row] for row in rows], abs=1e-4)
    hits = reward_metric(SelfRetrieval(reward_kind="accuracy"), drawn, scorer)(captions, None, drawn.files)
    assert hits == [float(row.argmax() == at) for at, row in enumerate(logits)]

    def right(completions, facts):  # a reward gets the facts of scenes
        return [len(check(text, fact).right) for text, fact in zip(completions, facts, strict=True)]

    scores = reward_metric(right, drawn)(captions[:3], None, drawn.files[:3])
    assert scores == [len(check(captions[row], drawn.facts[row]).right) for row in range(3)]
