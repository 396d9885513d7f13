"""Decisions on bags: which count, incomplete lines, and invalid ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_captionrl.apps.truematch.build import (
    REASONS,
    Decision,
    DecisionWriter,
    bag_id,
    check_decision,
    drop_bags,
    read_decisions,
)
from hf_captionrl.retrieval.bags import BagFile

BAGS = BagFile([["a", "b", "c"], ["d", "e", "f"], ["g", "h", "i"]], [0.9, 0.8, 0.7], "clip@1f2e")
A, D, G = map(bag_id, BAGS.bags)


def test_bag_id_depends_on_images_and_their_order():
    assert bag_id(("a", "b", "c")) == A
    assert A.startswith("3-")
    assert len({A, D, G, bag_id(["b", "a", "c"]), bag_id(["a", "b"]), bag_id(["a", 'b", "c'])}) == 6


def test_last_decision_counts_and_undecided_bags_stay():
    lines = [Decision(A, "drop"), Decision(D, "drop", "other"), Decision(A, "keep"), Decision("3-unknown", "drop")]
    assert drop_bags(BAGS, lines).bags == [BAGS.bags[0], BAGS.bags[2]]
    assert drop_bags(BAGS, lines).similarities == [0.9, 0.7]
    assert drop_bags(BAGS, [*lines, Decision(D, None)]).bags == BAGS.bags
    with pytest.raises(ValueError, match="All 3 bags are dropped"):
        drop_bags(BAGS, [Decision(bag, "drop") for bag in (A, D, G)])


def test_decisions_are_on_disk_immediately(tmp_path):
    path = tmp_path / "decisions.jsonl"
    with DecisionWriter(path) as writer:
        written = writer.append(Decision(A, "drop", "duplicates"))
        assert read_decisions(path) == [written] == writer.decisions
        assert written.time.endswith("+00:00")
        with pytest.raises(ValueError, match="Another process is writing"):
            DecisionWriter(path)
        writer.append(Decision(D, None))
    assert [d.bag for d in read_decisions(path)] == [A, D]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_incomplete_last_line_is_skipped_and_removed(tmp_path, cut):
    path = tmp_path / "decisions.jsonl"
    line = json.dumps({"bag": A, "decision": "keep", "reason": None}) + "\n"
    path.write_text(line + line[:-cut])
    whole = cut == 1  # only its line break is missing
    assert len(read_decisions(path)) == 1 + whole
    with DecisionWriter(path) as writer:
        assert len(writer.decisions) == 1 + whole
        writer.append(Decision(D, "keep"))
    assert [d.bag for d in read_decisions(path)] == [A] * (1 + whole) + [D]


def test_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "decisions.jsonl"
    path.write_text('{"bag": "3-a", "dec\n{"bag": "3-a", "decision": "keep"}\n')
    with pytest.raises(ValueError, match="line 1, is not JSON"):
        read_decisions(path)
    with pytest.raises(ValueError, match="line 1, is not JSON"):
        DecisionWriter(path)
    path.write_text("")
    DecisionWriter(path).close()  # the failed writer has released the lock


def test_full_disk_leaves_no_partial_line(tmp_path, monkeypatch):
    path = tmp_path / "decisions.jsonl"
    real = os.write
    with DecisionWriter(path) as writer:
        writer.append(Decision(A, "keep"))
        monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:9]) if len(data) > 60 else full())
        with pytest.raises(OSError, match="no space"):
            writer.append(Decision(D, "drop", "text_or_names"))
        monkeypatch.setattr(os, "write", real)
        writer.append(Decision(G, "keep"))
    assert [d.bag for d in read_decisions(path)] == [A, G]


def full():
    raise OSError("no space left")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "does not name a bag"),
        ({"decision": "keep"}, "does not name a bag"),
        ({"bag": "", "decision": "keep"}, "does not name a bag"),
        ({"bag": "3-a"}, "the decision is None"),
        ({"bag": "3-a", "decision": "maybe"}, "the decision is 'maybe'"),
        ({"bag": "3-a", "decision": ["keep"]}, "the decision is"),
        ({"bag": "3-a", "decision": "drop", "reason": "ugly"}, "the reason is 'ugly'"),
        ({"bag": "3-a", "decision": "keep", "reason": "other"}, "Only dropped bags have a reason"),
        ({"bag": "3-a", "decision": "keep", "time": 5}, "the time is 5"),
    ],
)
def test_invalid_decisions_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        check_decision(value, "line 1")


def test_five_reasons_for_five_keys():
    assert len(REASONS) == 5
    for reason in REASONS:
        assert check_decision({"bag": "3-a", "decision": "drop", "reason": reason}, "").reason == reason


WRITES_UNTIL_KILLED = """
import itertools, sys
from hf_captionrl.apps.truematch.build import Decision, DecisionWriter
with DecisionWriter(sys.argv[1]) as writer:
    for number in itertools.count():
        writer.append(Decision(f"3-{number}", "keep"))
        print(number, flush=True)
"""


def test_sigkill_loses_no_confirmed_decision(tmp_path):
    path = tmp_path / "decisions.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES_UNTIL_KILLED, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    confirmed = [int(process.stdout.readline()) for _ in range(50)]
    process.kill()
    process.wait()
    confirmed += [int(line) for line in process.stdout.read().split("\n")[:-1]]
    process.stdout.close()
    found = [int(d.bag.removeprefix("3-")) for d in read_decisions(path)]
    assert found[: len(confirmed)] == confirmed
    assert len(found) <= len(confirmed) + 1
