"""docs/leaderboard.md: rows of the committed results, the best first."""

from scipy import stats

from scripts.reproduce import DOCS, RESULTS, load_runs
from scripts.reproduction import leaderboard
from scripts.reproduction.runs import Run, world_version


def _row(name, *values):
    return {"name": name, **{key: {"values": list(values)} for key in leaderboard.COLUMNS}}


def test_methods_of_this_world_are_sorted_by_bags_of_7():
    runs = {
        "old": Run("old", "", 1, leaderboard={"a": "never shown"}),
        "new": Run("new", "", 1, leaderboard={"a": "worse", "b": "better"}),
        "missing": Run("missing", "", 1, leaderboard={"a": "not run"}),
    }
    results = {
        "old": {"world": "1", "rows": [_row("a", 0.9, 0.9)]},
        "new": {
            "world": world_version(),
            "rows": [_row("a", 0.1, 0.3), _row("b", 0.5, 0.6, 0.7), _row("not listed", 1.0)],
        },
    }
    found = leaderboard.entries(runs, results)
    assert [(title, name) for title, name, _ in found] == [("better", "new"), ("worse", "new")]
    table = leaderboard.section(runs, results, {"bars": [{"name": "full_captions/bag_7_recall_at_1", "mean": 0.889}]})
    half = stats.t.interval(0.95, 2, loc=0, scale=stats.sem([0.5, 0.6, 0.7]))[1]
    lines = table.splitlines()
    assert lines[2] == "| *full captions* |  |  | 0.889 |  |  |  |"
    assert lines[3].startswith(f"| [better](reproduction.md) | 0.600 ±{half:.3f} |")
    assert len(lines) == 5


def test_listed_rows_exist_in_the_committed_results():
    listed = {name: run for name, run in load_runs().items() if run.leaderboard}
    assert "smile_blip_seeds" in listed
    text = (DOCS / leaderboard.PAGE).read_text(encoding="utf-8")
    for name, run in listed.items():
        if (RESULTS / f"{name}.json").exists():
            assert all(f"[{title}](" in text for title in run.leaderboard.values()), name
