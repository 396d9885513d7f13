"""reproduction/free_claims.py: claims are matched as by hand."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_captionrl.scenes import Claim
from reproduction import RESULTS, free_claims

GOLD = [
    {"kind": "object", "text": "red dogs", "about": "dogs", "verdict": "true"},
    {"kind": "count", "text": "two", "about": "cats", "verdict": "true"},
    {"kind": "count", "text": "two", "about": "dogs", "verdict": "false"},
    {"kind": "other", "text": "the mood is calm", "about": "", "verdict": "undecided"},
    {"kind": "background", "text": "blue", "about": "wall", "verdict": "true"},
]


def result(right=(), wrong=(), undecided=()):
    return SimpleNamespace(right=right, wrong=wrong, undecided=undecided)


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


def test_numbers_of_two_captions():
    dogs, two = Claim("kind", "dog", "dogs"), Claim("count", "2", "two")
    answers = {
        "good": result((dogs, two), (two,), (Claim("other", "", "mood"),)),
        "bad": result((), (dogs, Claim("object", "", "car"))),
    }
    rows = [{"caption": caption, "facts": {}, "claims": GOLD, "style": caption} for caption in answers]
    numbers = free_claims.evaluate(rows, lambda caption, facts: answers[caption])
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
    same = free_claims.evaluate(rows[:1] * 2, lambda caption, facts: answers[caption])
    assert same["recall"]["interval"] == (3 / 4, 3 / 4)


def test_the_program_gives_the_committed_numbers(tmp_path, capsys):
    texts = Path(__file__).parents[1] / "scenes"
    files = [texts / f"{name}.jsonl" for name in ("free_captions", "free_captions_held_back")]
    free_claims.main([*map(str, files), "--output", str(tmp_path / "out.json")])
    written, committed = (
        json.loads(path.read_text("utf-8"))["files"] for path in (tmp_path / "out.json", RESULTS / "free_claims.json")
    )
    assert {name: row["grammar"] for name, row in written.items()} == {
        name: row["grammar"] for name, row in committed.items()
    }
    assert "free_captions.jsonl, 150 captions" in capsys.readouterr().out.replace(":", ",")
