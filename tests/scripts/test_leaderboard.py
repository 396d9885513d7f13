"""docs/leaderboard.md: rows of the committed results, the best first."""

import json

from scipy import stats

from scripts.reproduce import DOCS, RESULTS, load_runs
from scripts.reproduction import pages as leaderboard
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
    table = leaderboard.leaderboard(runs, results, leaderboard.COLUMNS, ["", "", "0.889", "", "", ""])
    half = stats.t.interval(0.95, 2, loc=0, scale=stats.sem([0.5, 0.6, 0.7]))[1]
    lines = table.splitlines()
    assert lines[2] == "| *full captions* |  |  | 0.889 |  |  |  |"
    assert lines[3].startswith(f"| [better](reproduction.md) | 0.600 ±{half:.3f} |")
    assert lines[4].startswith("| [worse](reproduction.md) | 0.200 ")
    assert len(lines) == 5


def test_parts_are_shown_in_the_order_of_the_leaderboard_and_older_results_have_none():
    runs = {"run": Run("run", "", 1, leaderboard={"a": "worse", "b": "better"})}
    parts = dict(zip(leaderboard.PARTS, (0.1, 0.2, 0.7, 0.6), strict=True))
    row = _row("b", 0.5, 0.7) | {key: {"values": [value, value]} for key, value in parts.items()}
    results = {"run": {"world": world_version(), "rows": [_row("a", 0.1, 0.3), row]}}
    assert leaderboard.leaderboard(runs, results, leaderboard.PARTS).splitlines()[2:] == [
        "| [better](reproduction.md) | 0.100 | 0.200 | 0.700 | 0.600 |",
        "| [worse](reproduction.md) | – | – | – | – |",
    ]


def test_the_page_shows_the_parts_of_the_results_that_have_them():
    record = json.loads((RESULTS / "smile_blip_seeds.json").read_text(encoding="utf-8"))
    row = next(row for row in record["rows"] if row["name"] == "SMILE")
    text = (DOCS / "leaderboard.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.partition("begin leaderboard of parts")[2].splitlines() if "[SMILE](" in line]
    found = [cell.split()[0] for cell in line.split("|")[2:-1]]
    assert found == [f"{row[key]['mean']:.3f}" for key in leaderboard.PARTS]
    assert float(found[1]) > float(found[0])


def test_listed_rows_exist_in_the_committed_results():
    listed = {name: run for name, run in load_runs().items() if run.leaderboard}
    assert "smile_blip_seeds" in listed
    text = (DOCS / "leaderboard.md").read_text(encoding="utf-8")
    for name, run in listed.items():
        if (RESULTS / f"{name}.json").exists():
            assert all(f"[{title}](" in text for title in run.leaderboard.values()), name
