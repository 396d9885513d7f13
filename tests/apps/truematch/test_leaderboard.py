"""The leaderboard: order, marks of noise, and escaped names."""

import numpy as np
import pytest

from hf_captionrl.apps.truematch.evaluate import rank_rows, write_leaderboard
from hf_captionrl.metrics.columns import Column
from tests.tolerances import within

KEY = "bag_3_recall_at_1"
COLUMNS = [Column(KEY, "R@1, bags of 3", "higher", is_fraction=True), Column("cider_d", "CIDEr-D", "higher")]


def measured(name, values, groups, cider=1.0):
    mean = float(np.mean(values))
    row = {"name": name, KEY: mean, f"{KEY}_ci": [max(mean - 0.1, 0), min(mean + 0.1, 1)], "cider_d": cider}
    return row, {"values": list(values), "groups": list(groups)}


def table(**hits):
    groups = np.repeat(np.arange(60), 3).tolist()
    pairs = [measured(name, values, groups) for name, values in hits.items()]
    return [row for row, _ in pairs], {row["name"]: values for row, values in pairs}


def test_rows_are_sorted_and_noise_is_marked():
    rng = np.random.default_rng(0)
    best = (rng.random(180) < 0.8).astype(float)
    close = best.copy()
    close[[1, 50, 100]] = 1 - close[[1, 50, 100]]
    far = (rng.random(180) < 0.3).astype(float)
    rows, values = table(far=far, close=close, best=best)
    ranked = rank_rows(rows, values, key=KEY)
    means = [row[KEY] for row in ranked]
    assert means == sorted(means, reverse=True)
    assert [row["place"] for row in ranked] == [1, 2, 3]
    assert {row["name"]: row["within_noise"] for row in ranked[1:]} == {ranked[1]["name"]: True, "far": False}
    assert ranked[0]["difference"] is None
    assert ranked[2]["difference"] == pytest.approx(far.mean() - max(best.mean(), close.mean()))
    # A separate bootstrap over bags gives the same result for the distant row.
    leader = values[ranked[0]["name"]]["values"]
    sums = (far - np.array(leader)).reshape(60, 3).sum(axis=1)
    drawn = sums[rng.integers(60, size=(2000, 60))].mean(axis=1) / 3
    assert ranked[2]["difference_ci"] == within(np.quantile(drawn, [0.025, 0.975]), 0.02)


def test_bootstrap_resamples_bags_not_captions():
    # Two bags decide everything: with captions as the unit, the difference would look significant.
    best = np.ones(180)
    other = best.copy()
    other[:6] = 0
    rows, values = table(best=best, other=other)
    low, high = rank_rows(rows, values, key=KEY)[1]["difference_ci"]
    assert low < -0.07
    assert high == 0.0  # some resamples contain neither bag


def test_ties_are_sorted_by_name():
    same = np.ones(180)
    rows, values = table(b=same, a=same)
    ranked = rank_rows(rows, values, key=KEY)
    assert [row["name"] for row in ranked] == ["a", "b"]
    assert ranked[1]["within_noise"] is True


def test_rows_of_different_bags_cannot_be_paired():
    rows, values = table(a=np.ones(180), b=np.zeros(180))
    values["b"]["groups"] = values["b"]["groups"][::-1]
    with pytest.raises(ValueError, match="'b' and 'a' were measured on different bags"):
        rank_rows(rows, values, key=KEY)


def test_names_are_escaped_in_both_files(tmp_path):
    hostile = "<script>alert(1)</script>|a*b"
    rows, values = table(**{hostile: np.ones(180), "plain": np.zeros(180)})
    options = {"columns": COLUMNS, "key": KEY, "title": "T <b>", "note": "3 & 4"}
    write_leaderboard(tmp_path, rows, values, **options)
    html = (tmp_path / "leaderboard.html").read_text(encoding="utf-8")
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "default-src 'none'" in html
    text = (tmp_path / "leaderboard.md").read_text(encoding="utf-8")
    assert r"\<script\>alert(1)\</script\>\|a\*b" in text
    assert text.count("\n| ") == 3
    with pytest.raises(ValueError, match="has no cider_d"):
        write_leaderboard(tmp_path, [{"name": "a", KEY: 0.5}], {}, **options)
