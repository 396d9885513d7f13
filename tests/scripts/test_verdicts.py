"""Verdicts on constructed data: reversed, equal, multiple and withdrawn comparisons, p-values, detectable differences."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import stats

from scripts import reproduce
from scripts.reproduction import findings, hacking
from scripts.reproduction.numbers import Measured, detectable, difference, p_value, seed_interval


def result(**rows):
    return {"seeds": [0, 1, 2], "rows": [{"name": name, "x": {"values": values}} for name, values in rows.items()]}


def page_of(results, *compared, **finding):
    compare = [{"what": "x", "run": "r", "first": f"rows/{a}/x", "second": "rows/base/x", **c} for a, c in compared]
    pages = {"p": {"title": "P", "intro": "", "findings": [{"claim": "c", "compare": compare, "why": "w", **finding}]}}
    return findings.pages({"r": results}, pages)["findings_p.md"]


NUMBERS = result(
    base=[1.0, 1.1, 1.2], up=[2.0, 2.2, 2.1], down=[0.0, 0.2, 0.1], near=[1.0, 1.11, 1.19], far=[0.1, 1.9, 1.3]
)
MORE, LESS, NONE, EQUAL = {"expect": ">"}, {"expect": "<"}, {"expect": "="}, {"expect": "=", "margin": 0.1}


@pytest.mark.parametrize(
    ("compared", "said"),
    [
        ([("up", MORE)], "holds"),
        ([("down", MORE)], "does not hold"),
        ([("up", MORE), ("down", MORE)], "mixed"),
        ([("up", MORE), ("down", LESS)], "holds"),
        ([("up", MORE), ("far", MORE)], "holds in part"),
        ([("down", MORE), ("far", MORE)], "open or does not hold"),
        ([("up", MORE), ("near", NONE)], "holds in part"),  # that no difference was seen supports nothing
        ([("up", MORE), ("near", EQUAL)], "holds"),
        ([("near", NONE)], "no difference seen"),
        ([("near", EQUAL)], "holds"),
        ([("far", EQUAL)], "open"),
        ([("up", EQUAL)], "does not hold"),
    ],
)
def test_a_claim_is_what_all_of_its_comparisons_say(compared, said):
    text = page_of(NUMBERS, *compared)
    assert f"**{said}**" in text
    assert f"**{said.capitalize()}.** w" in text
    withdrawn = page_of(NUMBERS, *compared, withdrawn=True)
    assert "**withdrawn**" in withdrawn
    assert "the 0 differences of this page" in withdrawn


def test_a_margin_belongs_to_a_claim_of_equality():
    with pytest.raises(ValueError, match="margin"):
        findings.verdict(Measured(1.0, 0.9, 1.1), ">", 0.1)


def test_p_values_are_scipys():
    first, second = [1.0, 2.5, 3.0, 4.2], [0.8, 1.9, 3.1, 3.7]
    paired = difference(seed_interval(first), seed_interval(second))
    assert p_value(paired) == pytest.approx(stats.ttest_rel(first, second).pvalue)
    assert p_value(Measured(0.5, 0.5 - 1.959964 * 0.2, 0.5 + 1.959964 * 0.2)) == pytest.approx(2 * stats.norm.sf(2.5))
    assert p_value(Measured(0.5)) is None


def test_the_correction_is_benjamini_and_hochbergs():
    """Equals the step-up procedure written as a loop, over the comparisons of the whole page."""
    rng = random.Random(0)
    rows = {f"r{i}": [1 + 0.1 * i * (seed + 1) / 3 + rng.random() * 0.2 for seed in range(3)] for i in range(8)}
    numbers = result(base=[1.0, 1.1, 1.2], **rows)
    text = page_of(numbers, *((name, MORE) for name in rows))
    p = sorted(p_value(difference(seed_interval(values), seed_interval([1.0, 1.1, 1.2]))) for values in rows.values())
    wanted, least = [], 1.0
    for rank in range(len(p), 0, -1):
        least = min(least, p[rank - 1] * len(p) / rank)
        wanted.append(least)
    cells = [line.split("|")[5].strip() for line in text.splitlines() if line.startswith("| x ")]
    assert sorted(cells) == sorted("< 0.001" if q < 0.001 else f"{q:.3f}" for q in wanted)
    significant, survive = sum(q < 0.05 for q in p), sum(q < 0.05 for q in wanted)
    assert survive < significant  # the data would otherwise show nothing
    assert f"{survive} of {significant} intervals" in text.replace("\n", " ")


def test_a_detectable_difference_is_detected_in_four_of_five_experiments():
    found = seed_interval([0.0, 0.3, 0.1, -0.2, 0.15, 0.05, -0.1, 0.2])
    least, deviation = detectable(found), float(np.std(found.values, ddof=1))
    rng = np.random.default_rng(0)
    samples = rng.normal(least, deviation, (20_000, 8))
    share = float((stats.ttest_1samp(samples, 0.0, axis=1).pvalue < 0.05).mean())
    # Of eight seeds the sum of two quantiles is a little optimistic.
    assert 0.77 < share < 0.83
    assert detectable(Measured(0.0, -1.959964, 1.959964)) == pytest.approx(1.959964 + 0.841621)
    assert f"(detectable: {least:.3f})" in page_of(result(base=[0.0] * 8, a=list(found.values)), ("a", MORE))


def test_errors_without_seeds_are_independent():
    apart = difference(Measured(0.9, 0.6, 1.2), Measured(0.2, -0.2, 0.6))
    assert (apart.value, apart.high - apart.value) == pytest.approx((0.7, math.hypot(0.3, 0.4)))
    assert difference(Measured(0.9, 0.6, 1.2), Measured(0.2)).low is None


def test_a_result_of_a_checkout_with_changes_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "installed_versions", lambda: {"git_revision": "0a4a3f1a+changes"})
    monkeypatch.setattr(reproduce, "_run_all", lambda *args: {})
    with pytest.raises(SystemExit):
        reproduce.main(["--only", "smile-table-1"])
    assert "--output" in capsys.readouterr().err
    monkeypatch.setattr(reproduce, "installed_versions", lambda: {"git_revision": "0a4a3f1a"})
    assert reproduce.main(["--only", "smile-table-1"]) == 0


def test_recall_is_also_told_by_the_other_listeners():
    """More images by the held-out scorer, fewer by the reward scorer; by truth in bags of 7, where the comparison is of 100."""
    keys = ("rd100_recall_at_1", "reward_rd100_recall_at_1", "bag_7_truth_recall_at_1")
    numbers = {"base": [0.5, 0.52, 0.51], "up": [0.7, 0.71, 0.72], "down": [0.2, 0.21, 0.23]}

    def row(name, *by):
        return {"name": name} | {key: {"values": numbers[way]} for key, way in zip(keys, by, strict=True)}

    results = {"r": {"seeds": [0, 1, 2], "rows": [row("MLE", *["base"] * 3), row("SR", "up", "down", "up")]}}
    compare = {"what": "x", "run": "r", "expect": ">"}
    compare |= {side: f"rows/{name}/rd100_recall_at_1" for side, name in (("first", "SR"), ("second", "MLE"))}
    finding = {"claim": "c", "compare": [compare], "why": "w"}
    page = {"p": {"title": "P", "intro": "", "findings": [finding]}}
    text = findings.pages(results, page)["findings_p.md"]
    assert "| **holds** | by the reward scorer: does not hold; by truth: holds |" in text
    assert "first is larger | holds | -0.297 [" in text
    for row in results["r"]["rows"]:
        del row["reward_rd100_recall_at_1"]
    assert "| **holds** | by truth: holds |" in findings.pages(results, page)["findings_p.md"]


KEYS = ("fact_recall", "hallucination", hacking.HELD_OUT, "cider_d", "words", "unique")
START = dict(zip(KEYS, (0.3, 0.12, 0.6, 1.8, 4.0, 0.6), strict=True))
AS_PREDICTED = {
    "CIDEr": {"cider_d": 0.1, hacking.HELD_OUT: 0.01},
    "SR": {"fact_recall": 0.2, "hallucination": 0.05, "words": 4, hacking.HELD_OUT: 0.2},
    "SR, bags of 5": {"fact_recall": 0.2, "hallucination": 0.3, hacking.HELD_OUT: 0.3},
    "CLIPScore": {"fact_recall": 0.1, "hallucination": 0.4, "words": 8, hacking.HELD_OUT: 0.25},
    "log-probability": {"fact_recall": -0.1, "unique": -0.2, hacking.HELD_OUT: -0.1},
    "precision of claims": {"hallucination": -0.1},
    "recall of claims": {"words": 9, "hallucination": 0.2},
    "F1 of claims": {"fact_recall": 0.4},
    "questions, exact reader": {"fact_recall": 0.4, "hallucination": 0.05},
    "questions, guessing reader": {},
    "judge with length bias": {"fact_recall": 0.4, "words": 9, "hallucination": 0.1},
    "SR by truth": {"fact_recall": 0.3},
    "random": {},
}


def observed(gains, noise=0.003):
    """Five seeds of every reward, whose ends differ from the start by the gains."""
    curves = {}
    for number, (reward, gained) in enumerate(gains.items()):
        values = {
            # Differences of seeds add up to 0, and no two rewards have the same.
            key: [START[key] + gained.get(key, 0) + noise * np.sin(7 * number + 2 * math.pi * s / 5) for s in range(5)]
            for key in KEYS
        }
        first = {key: {"values": [START[key]] * 5} for key in KEYS}
        curves[reward] = [{"step": 0, **first}, {"step": 200, **{key: {"values": v} for key, v in values.items()}}]
    return curves


def test_predictions_of_the_observatory():
    assert hacking.judged(observed(AS_PREDICTED)) == {f"O{number}": "holds" for number in range(1, 13)}


@pytest.mark.parametrize(
    ("reward", "key", "gain", "broken"),
    [
        ("CIDEr", "fact_recall", -0.1, "O1"),
        ("SR, bags of 5", "hallucination", -0.05, "O2"),
        ("CLIPScore", "words", 2, "O3"),
        ("log-probability", "unique", 0.1, "O4"),
        ("precision of claims", "hallucination", 0.0, "O5"),
        ("recall of claims", "words", 3, "O6"),
        ("F1 of claims", "hallucination", 0.04, "O7"),
        ("questions, exact reader", "fact_recall", 0.2, "O8"),
        ("random", "words", -0.1, "O9"),
        ("judge with length bias", "hallucination", -0.02, "O10"),
        ("SR by truth", "fact_recall", 0.1, "O11"),
    ],
)
def test_a_prediction_fails_alone(reward, key, gain, broken):
    gains = {**AS_PREDICTED, reward: {**AS_PREDICTED[reward], key: gain}}
    assert {name for name, said in hacking.judged(observed(gains)).items() if said != "holds"} == {broken}
    assert hacking.judged(observed(gains))[broken] == "does not hold"


def test_a_prediction_is_open_where_seeds_differ():
    found = hacking.judged(observed(AS_PREDICTED, noise=1.0))
    assert {found[name] for name in ("O1", "O2", "O5", "O8", "O11")} == {"open"}


def test_scorer_that_agrees_with_the_truth_refutes_its_prediction():
    gains = {
        name: {**gained, hacking.HELD_OUT: gained.get("fact_recall", 0) - gained.get("hallucination", 0)}
        for name, gained in AS_PREDICTED.items()
    }
    assert hacking.judged(observed(gains, noise=0.0))["O12"] == "does not hold"
