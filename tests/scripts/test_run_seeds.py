"""Means and standard errors over seeds against numbers computed by hand."""

import pytest

from hf_captionrl.utils.io import write_json
from scripts.run_seeds import (
    BEST_ALPHA,
    _of_any_machine,
    aggregate,
    aggregate_curves,
    guard_steps,
    of_best_alpha,
    to_markdown,
)


def rows(length, other="SMILE"):
    return [{"name": "MLE", "length": 2.0, "length_ci": [1, 3]}, {"name": other, "length": length, "perplexity": None}]


def test_one_seed_has_no_standard_error(tmp_path):
    found = aggregate([rows(10.0)])
    write_json(tmp_path / "seeds.json", {"rows": found})  # JSON has no NaN
    assert found[0]["length"]["standard_error"] is None
    text = to_markdown(found, [3], "a command")
    assert "±" not in text
    assert "Seed 3. Made by `a command`." in text


def test_mean_and_standard_error():
    mle, smile = aggregate([rows(10.0), rows(12.0), rows(14.0)])
    assert mle["length"] == {"mean": 2.0, "standard_error": 0.0, "values": [2.0, 2.0, 2.0]}
    assert smile["length"]["mean"] == 12.0
    assert smile["length"]["standard_error"] == pytest.approx(2.0 / 3**0.5)
    assert "length_ci" not in mle
    assert "perplexity" not in smile


def test_a_number_that_one_seed_lacks_has_no_mean():
    _, smile = aggregate([rows(10.0), [{"name": "MLE"}, {"name": "SMILE", "length": None}]])
    assert "length" not in smile


def test_different_rows_are_refused():
    with pytest.raises(ValueError, match="different rows"):
        aggregate([rows(1.0), rows(1.0, "SLE")])


def test_the_first_alarm_of_each_seed_is_recorded():
    def run(**selected):
        return {"learning_curves": {"SR": [], "CIDEr": []}, "selected": selected}

    trips = {"guard": {"trips": [{"step": 132}, {"step": 150}], "refused": [{"step": 100}]}}
    quiet = {"guard": {"trips": [], "refused": []}}
    assert guard_steps([run(SR=trips, CIDEr=quiet), run(SR=quiet)]) == {"SR": [100, None], "CIDEr": [None, None]}


def test_the_best_alpha_of_each_seed_makes_a_row():
    runs = [[{"name": "SLL", "x": 1.0}, {"name": "a", "x": 2.0}, {"name": "b", "x": 3.0}] for _ in range(2)]
    found = aggregate(of_best_alpha(runs, [{"best_alpha": {"name": "a"}}, {"best_alpha": {"name": "b"}}]))
    assert [row["name"] for row in found] == ["SLL", "a", "b", BEST_ALPHA]
    assert found[-1]["x"]["values"] == [2.0, 3.0]
    for undecided in ({}, {"best_alpha": None}, {"best_alpha": {"name": None}}):
        assert of_best_alpha(runs, [{"best_alpha": {"name": "a"}}, undecided]) == runs


def test_curves_over_temperatures_keep_common_points():
    runs = [{"MLE": [{"temperature": t, "div_2": t + seed} for t in (0.5, 1.0)][seed:]} for seed in (0, 1)]
    (point,) = aggregate_curves(runs, x="temperature")["MLE"]
    assert point == {"temperature": 1.0, "div_2": {"mean": 1.5, "standard_error": 0.5, "values": [1.0, 2.0]}}
    assert aggregate_curves([{}, *runs], x="temperature") == {}  # a captioner that one seed lacks


def test_markdown_shows_what_is_missing():
    text = to_markdown(aggregate([rows(10.0), rows(12.0)]), [0, 1], "python scripts/run_seeds.py")
    assert "| SMILE | 11.00 ±1.00 |" in text
    assert "–" in text
    assert "seeds 0, 1" in text


def test_recorded_command_omits_absolute_runs_dir():
    words = "smile_blip --runs_dir outputs/a --runs_dir /somewhere/b --seeds 0 -- --config c".split()
    assert _of_any_machine(words) == "smile_blip --runs_dir outputs/a --seeds 0 -- --config c".split()
    assert _of_any_machine(["--runs_dir"]) == ["--runs_dir"]
    assert _of_any_machine(["x", "--runs_dir=/b", "--runs_dir=b"]) == ["x", "--runs_dir=b"]
