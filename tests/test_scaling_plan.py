"""Every number of the plan in docs/scaling.md is calculated again, and the measured tables are those of the numbers."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from tests.tolerances import within

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "scaling.json"
ROW = re.compile(r"^\| (?P<what>[^|]+?) \| `(?P<sum>[^`]+)` \| (?P<result>[\d,.]+) (?P<unit>[^|]+?) \|$", re.MULTILINE)
TEXT = (RESULTS.parents[1] / "scaling.md").read_text(encoding="utf-8")
ROWS = [match.groupdict() for match in ROW.finditer(TEXT)]


def calculate(text):
    """Numbers and + - * / ** ( ) alone."""
    if not re.fullmatch(r"[\d.e+\-*/() ]+", text):
        raise ValueError(f"{text!r} is not arithmetic")
    return eval(text, {"__builtins__": {}})


def wrong(row):
    """Whether a result is not its sum, rounded as it is written."""
    written = row["result"].replace(",", "")
    digits = len(written.partition(".")[2])
    return calculate(row["sum"]) != within(float(written), 0.5000001 * 10**-digits, dtype="float64")


def exponent(sizes, values):
    """Slope of the least-squares line through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def result(what, after=""):
    part = TEXT.partition(after)[2] if after else TEXT
    found = next(match for match in ROW.finditer(part) if match["what"].startswith(what))
    return float(found["result"].replace(",", "")), found["unit"]


def test_total_of_every_row_is_the_sum_of_its_parts():
    assert len(ROWS) == len([line for line in TEXT.splitlines() if line.startswith("| ") and "`" in line])
    assert len(ROWS) > 40
    assert [row["what"] for row in ROWS if wrong(row)] == []


def test_a_wrong_sum_is_seen():
    row = dict(ROWS[0])
    assert not wrong(row)
    assert wrong({**row, "result": "99.3"})
    with pytest.raises(ValueError, match="not arithmetic"):
        calculate("__import__('os')")


def test_the_sums_say_what_is_assumed():
    # From the assumptions, in the test's code.
    gpu, tower, decoder, tokens = 4e14, 86e6, 138e6, 577
    assert gpu == pytest.approx(0.4 * 989e12, rel=0.02)
    cross = 12 * 2 * (2 * 768 * 768) * tokens
    smile = 2 * tower * tokens + 3 * (cross + 2 * decoder * 12)
    assert result("SMILE, an epoch") == (pytest.approx(113_287 * smile / gpu, rel=0.01), "s")
    sampled = 2 * decoder * 20
    rl = 2 * tower * tokens + 2 * sampled + cross + 3 * (cross + sampled)
    assert result("Self-retrieval, an epoch, arithmetic")[0] == pytest.approx(113_287 * rl / gpu, rel=0.01)
    assert result("SMILE, an epoch", "### CC3M") == (pytest.approx(3.3e6 * smile / (8 * gpu) / 60, rel=0.02), "min")
    assert result("Exact neighbours", "### A pool")[0] == pytest.approx(2 * 4e8**2 * 512 / (8 * gpu) / 3600, rel=0.01)
    assert result("Boosting all")[0] == pytest.approx(4e8 * 300 / 2500 / 3600, rel=1e-4)
    assert result("7B, all trained")[0] == 7e9 * (4 + 4 + 8) / 8 / 1e9
    lists, _ = result("Lists")
    assert lists == 4 * math.isqrt(400_000_000)
    assert result("Codes looked at")[0] == 4e8 * 32 / lists
    assert result("... a shard of 8")[0] * 8 == within(result("IVF-PQ")[0], 0.1)


def test_the_text_uses_its_tables():
    assert f"{result('Exact neighbours', '### A pool')[0]:.0f} hours of eight GPUs" in TEXT
    assert f"{result('All queries')[0]:.0f} core hours" in TEXT
    assert f"{result('Boosting all')[0]:,.0f} GPU hours are ten weeks" in TEXT
    assert round(result("Boosting all")[0] / 8 / 24 / 7) == 10
    assert f"takes {result('13B, likewise')[0]:.0f} GB of each of eight" in TEXT
    assert f"decodes for {result('JPEG, an epoch, one core')[0]:.0f} minutes" in TEXT
    assert f"about {result('Cores that keep up with SMILE')[0]:.0f} cores" in TEXT
    assert f"the 95 % interval of recall is at most ±{1.96 * math.sqrt(0.25 / 5000):.3f}" in TEXT


def test_the_measured_exponents_are_those_of_the_page():
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    slopes = {
        name: exponent([run["rows"] for run in runs], [run["cpu_s"] for run in runs])
        for name, runs in results["stages"].items()
    }
    # What the page says: blocks of everything against everything, and the rest by the row.
    assert slopes["bags_exact"] > 1.3
    assert slopes["retrieval"] > 1.3
    # The page bounds a search by sqrt(N) and the index by N sqrt(N).
    runs = results["stages"]["ivf_pq"]
    rows = [run["rows"] for run in runs]
    assert exponent(rows, [run["search_s"] / run["rows"] for run in runs]) < 0.5
    assert exponent(rows, [run["build_s"] for run in runs]) < 1.5
    assert min(run["recall"] for run in runs) > 0.99
    # Row groups of the file of boosted captions.
    assert max(run["peak_mib"] for run in results["stages"]["boosted_file"]) < 150
    by_row = ("features_write", "features_read", "cider")
    assert all(slopes[name] < 1.3 for name in by_row)


def test_the_million_uses_the_measured_numbers():
    results = json.loads(RESULTS.read_text(encoding="utf-8"))["stages"]
    last = {name: runs[-1] for name, runs in results.items()}
    found = last["ivf_pq"]
    times = 1e6 / found["rows"]
    assert result("Neighbours by IVF-PQ")[0] == within(found["build_s"] * times**1.5 / 3600, 0.01)
    assert result("... 50 neighbours of every row")[0] == within(found["search_s"] * times**1.5 / 3600, 0.01)
    assert result("... memory besides the features")[0] == within(found["peak_mib"] * times / 1024, 0.1)
    ranks = last["retrieval"]["cpu_s"] * (1e6 / last["retrieval"]["rows"]) ** 2 / 3600
    assert result("Evaluation: ranks among all")[0] == within(ranks, 0.01)
    memory = last["cider"]["peak_mib"] / last["cider"]["rows"] * 1e6 / 1024
    assert result("... its memory, in one process")[0] == within(memory, 0.1)
    tables = last["tables"]["peak_mib"] / last["tables"]["rows"] * 1e6 / 1024
    assert result("... of the tables of a file and of its references")[0] == within(tables, 0.1)
    album = json.loads((RESULTS.parent / "album_speed.json").read_text(encoding="utf-8"))["rows"][-1]
    pixels = last["pixel_shards"]
    both = result("... and in the shards, until you remove them")[0]
    assert both == within((pixels["shards_bytes"] + pixels["cache_bytes"]) / pixels["rows"] * 1e6 / 1e9, 1)
    assert result("... on disk in the cache, exact")[0] == within(both / 2, 0.1)
    hours = (album["choice_s"] + album["report_s"]) / album["images"] * 1e6 / 3600
    assert result("Album: compare, choose")[0] == within(hours, 0.01)
