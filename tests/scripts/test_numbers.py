"""Numbers of results over seeds, their intervals and differences, and what these say of a finding."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hf_captionrl.utils.io import write_json
from scripts.reproduction import findings
from scripts.reproduction.numbers import Measured, difference, look_up, measured, seed_interval
from scripts.reproduction.runs import world_version
from scripts.run_seeds import (
    aggregate,
    to_markdown,
)

ROOT = Path(__file__).parents[2]


def test_the_interval_is_students_and_differences_are_paired_by_seed():
    found = seed_interval([1.0, 2.0, 4.0])
    error = math.sqrt(((1 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2) / 2 / 3)
    assert found.value == pytest.approx(7 / 3)
    assert found.high - found.value == pytest.approx(4.302653 * error, rel=1e-5)
    assert seed_interval([2.0]).low is None
    assert seed_interval([2.0, 2.0]).low is None
    paired = difference(seed_interval([1.0, 2.0, 3.0]), seed_interval([0.5, 1.5, 2.4]))
    wanted = seed_interval([0.5, 0.5, 0.6])
    assert (paired.value, paired.low, paired.high) == pytest.approx((wanted.value, wanted.low, wanted.high))


def test_places_of_a_result():
    rows = [{"name": "MLE", "x": 1}, {"name": "SLL-ME (entropy=0.03)", "x": 5}, {"name": "SLE (alpha=1)", "x": 6}]
    rows += [{"name": "SLE (alpha=0)", "x": 7}, {"name": "SR", "x": {"values": [1, 3]}}]
    record = {"rows": [*rows, {"name": "references", "x": 9}]}
    assert look_up("rows/MLE/x", record) == look_up("start/x", record) == 1
    assert measured("trained/x", record).value == 2
    assert measured("a", {"a": 0.5, "a_ci": [0.4, 0.7]}) == Measured(0.5, 0.4, 0.7)
    assert measured("a", {"a": {"value": 0.5, "interval": [0.4, 0.7]}}) == Measured(0.5, 0.4, 0.7)
    # A row may be named without its settings if it is the only one.
    assert measured("rows/SLL-ME/x", record).value == 5
    curve = [{"step": 0, "x": {"values": [1, 1]}}, {"step": 10, "x": {"values": [2, 4]}}]
    curves = {"learning_curves": {"SR": curve}}
    assert [measured(f"learning_curves/SR/{step}/x", curves).value for step in ("0", "10", "last")] == [1, 3, 3]
    for place, wrong in (("learning_curves/SR/5/x", "5"), ("rows/GAN/x", "GAN"), ("rows/SLE/x", "SLE")):
        with pytest.raises(KeyError, match=f"leads nowhere at '{wrong}'"):
            look_up(place, {**record, **curves})


def test_verdicts_follow_from_the_interval():
    up, down, both = Measured(1, 0.5, 1.5), Measured(-1, -1.5, -0.5), Measured(0.1, -0.1, 0.3)
    same = seed_interval([0.0, 0.0])
    answers = {
        ">": ["holds", "does not hold", "open", "does not hold"],
        "<": ["does not hold", "holds", "open", "does not hold"],
        "=": ["does not hold", "does not hold", "no difference seen", "no difference seen"],
    }
    for expected, wanted in answers.items():
        assert [findings.verdict(found, expected) for found in (up, down, both, same)] == wanted
    assert findings.verdict(Measured(1.0), ">") == "open"


def test_a_finding_may_compare_two_runs_seed_by_seed():
    def result(*values, seeds=(0, 1, 2)):
        rows = [{"name": "A", "x": {"values": list(values)}}]
        return {"seeds": list(seeds), "rows": rows, "world": world_version()}

    compare = {"what": "x", "run": "one", "second_run": "other", "expect": ">"}
    compare |= {"first": "rows/A/x", "second": "rows/A/x"}
    page = {"smile": {"title": "S", "intro": "I", "findings": [{"claim": "More", "compare": [compare], "why": "So."}]}}

    def said(**results):
        return findings.pages(results, page)["findings_smile.md"]

    # Pairs of seeds: apart, the two intervals would overlap by far.
    text = said(one=result(1.0, 5.0, 9.0), other=result(0.9, 4.8, 8.9))
    assert "| x | 5.00 | 4.87 | 0.133 [-0.010 to 0.277] | 0.057 | first is larger | open (detectable: 0.179) |" in text
    assert "**Holds.** So." in said(one=result(1.0, 5.0, 9.0), other=result(0.9, 4.9, 8.91))
    assert "[one](results/one.json), [other](results/other.json)" in text
    assert "**Not tested.**" in said(one=result(1.0, 2.0, 3.0))
    older = {**result(0.9, 4.8, 8.9), "world": "1"}
    assert "Its runs are not finished." in said(one=result(1.0, 5.0, 9.0), other=older)
    both = said(one={**result(1.0, 5.0, 9.0), "world": "1"}, other=older)
    assert "| x (version 1 of the world) | 5.00 | 4.87 |" in both
    # More, but not three times as much.
    compare["times"] = 3
    thrice = said(one=result(1.0, 5.0, 9.0), other=result(0.4, 1.6, 3.1))
    assert "| x | 5.00 | 5.10 | -0.100 [" in thrice
    del compare["times"]
    with pytest.raises(ValueError, match="one and other have different seeds"):
        said(one=result(1.0, 2.0, 3.0), other=result(1.0, 2.0, seeds=(0, 1)))


def rows(length, other="SMILE"):
    return [{"name": "MLE", "length": 2.0, "length_ci": [1, 3]}, {"name": other, "length": length, "perplexity": None}]


def test_mean_and_standard_error_over_seeds(tmp_path):
    mle, smile = aggregate([rows(10.0), rows(12.0), rows(14.0)])
    assert mle["length"] == {"mean": 2.0, "standard_error": 0.0, "values": [2.0, 2.0, 2.0]}
    assert smile["length"]["mean"] == 12.0
    assert smile["length"]["standard_error"] == pytest.approx(2.0 / 3**0.5)
    assert "length_ci" not in mle
    assert "perplexity" not in smile
    text = to_markdown([mle, smile], [0, 1, 2], "a command")
    assert "| SMILE | 12.00 ±1.15 | –" in text
    assert "seeds 0, 1, 2. Made by `a command`." in text
    # A number of one seed has no standard error, but the interval over images.
    found = aggregate([rows(10.0)])
    write_json(tmp_path / "seeds.json", {"rows": found})  # JSON has no NaN
    assert found[0]["length"] == {"mean": 2.0, "standard_error": None, "values": [2.0], "interval": [1, 3]}
    text = to_markdown(found, [3], "a command")
    assert "| MLE | 2.00 [1.00, 3.00] |" in text
    assert "Seed 3. Made by `a command`." in text
    # One that a seed lacks has no mean, and different rows are refused.
    assert "length" not in aggregate([rows(10.0), [{"name": "MLE"}, {"name": "SMILE", "length": None}]])[1]
    with pytest.raises(ValueError, match="different rows"):
        aggregate([rows(1.0), rows(1.0, "SLE")])
