"""reproduction/free_claims.py: claims are matched as by hand."""

import json

import pytest

from hf_captionrl.scenes import Claim
from reproduction import free_claims
from reproduction.free_reader import FreeResult

GOLD = [
    {"kind": "object", "text": "red dogs", "about": "dogs", "verdict": "true"},
    {"kind": "count", "text": "two", "about": "cats", "verdict": "true"},
    {"kind": "count", "text": "two", "about": "dogs", "verdict": "false"},
    {"kind": "other", "text": "the mood is calm", "about": "", "verdict": "undecided"},
    {"kind": "background", "text": "blue", "about": "wall", "verdict": "true"},
]


def result(right=(), wrong=(), undecided=()):
    return FreeResult(right, wrong, (), (), (), undecided)


def test_claims_match_by_kind_and_words_and_once():
    dogs, two = Claim("kind", "dog", "dogs"), Claim("count", "2", "two")
    colour = Claim("colour", "blue", "blue")  # an attribute, no background
    pairs = free_claims.match(
        GOLD, result((two, dogs, colour), (Claim("second count", "2", "two"),), (Claim("other", "", "mood"),))
    )
    assert sorted(pairs) == [
        ("attribute", "", "true"),
        ("background", "true", ""),
        ("count", "false", "false"),
        ("count", "true", "true"),
        ("object", "true", "true"),
        ("other", "undecided", "undecided"),
    ]
    # "a" and "of" are no overlap, and the larger overlap wins
    gold = [
        {"kind": "object", "text": text, "about": "", "verdict": "true"} for text in ("a dog", "a red car of wood")
    ]
    found = free_claims.match(
        gold, result((Claim("kind", "", "a cat"),), (Claim("object", "", "red car"), Claim("object", "", "car")))
    )
    assert found == [
        ("object", "true", ""),
        ("object", "true", "false"),
        ("object", "", "true"),
        ("object", "", "false"),
    ]


def test_numbers_of_two_captions(monkeypatch):
    dogs, two = Claim("kind", "dog", "dogs"), Claim("count", "2", "two")
    answers = {
        "good": result((dogs, two), (two,), (Claim("other", "", "mood"),)),
        "bad": result((), (dogs, Claim("object", "", "car"))),
    }
    monkeypatch.setitem(free_claims.CHECKERS, "open", lambda caption, facts: answers[caption])
    rows = [{"caption": caption, "facts": {}, "claims": GOLD, "style": caption} for caption in answers]
    numbers = free_claims.evaluate(rows)
    assert {name: cell["value"] for name, cell in numbers.items() if "value" in cell} == {
        "precision": 4 / 5,  # the car has no gold claim
        "recall": 4 / 8,
        "verdict_accuracy": 4 / 5,  # the dogs are there
        "precision_false": 1 / 3,
        "recall_false": 1 / 2,
        "recall_undecided": 1 / 2,
    }
    assert numbers["kinds"]["count"]["recall"]["value"] == 2 / 4
    assert numbers["styles"]["bad"]["precision"]["value"] == 1 / 2
    assert numbers["recall"]["interval"] == pytest.approx((1 / 4, 3 / 4))
    assert numbers["verdicts"]["no claim read as false"] == 1
    assert free_claims.evaluate(rows[:1] * 2)["recall"]["interval"] == (3 / 4, 3 / 4)


def test_the_program_writes_both_vocabularies(tmp_path, capsys):
    claims = [GOLD[4] | {"kind": "object", "text": "yellow taxi", "verdict": "false"}]
    row = {"id": "a", "style": "coco", "caption": "a car next to a yellow taxi", "claims": claims}
    row["facts"] = {"kind": "car", "count": 1, "size": "large", "orientation": "upright"}
    row["facts"] |= {"position": "top", "background": "blue"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    free_claims.main([str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text("utf-8"))["files"]["rows"]
    assert [written[name]["recall"]["value"] for name in ("grammar", "open")] == [0, 1]
    assert "open, 1 captions" in capsys.readouterr().out
