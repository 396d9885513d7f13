"""The leaderboard: methods by rank, and at the end those that are not run yet."""

import re

from scripts.reproduction.pages import RANKED_BY, leaderboard
from scripts.reproduction.runs import Run, world_version


def record(values, world=None):
    rows = [
        {"name": name, RANKED_BY: {"mean": v, "standard_error": 0.01, "values": [v, v, v]}}
        for name, v in values.items()
    ]
    return {"rows": rows, "seeds": [0, 1, 2], "world": world or world_version()}


def test_methods_without_a_result_stand_at_the_end():
    runs = {
        name: Run(name, "p/q", 1, leaderboard={row: f"the {row}" for row in rows})
        for name, rows in {"a": ["low", "high"], "b": ["oracle"], "c": ["old"]}.items()
    }
    results = {"a": record({"low": 0.2, "high": 0.7}), "c": record({"old": 0.9}, world="1")}
    table = leaderboard(runs, results, {RANKED_BY: "R@1", "length": "words"}, ["0.9", ""])
    names = [re.sub(r"[\[*]|\]\(.*", "", line.split("|")[1]).strip() for line in table.splitlines()[2:]]
    assert names == ["full captions", "the high", "the low", "the oracle"]
    assert table.splitlines()[-1] == "| the oracle | not run yet | – |"
    assert "not run yet" not in leaderboard(runs, results | {"b": record({"oracle": 0.8})}, {RANKED_BY: "R@1"})
