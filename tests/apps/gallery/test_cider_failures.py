"""Hand-made pairs of captions of which CIDEr-D prefers the worse."""

import pytest

from hf_captionrl.apps.gallery.gallery import CiderFailure, cider_failures, unrewarded

SCORES = {"A": [2.0, 0.5, 1.0, 1.0], "B": [0.5, 2.0, 1.0, 0.2]}
# Image 0: B is right and A is wrong. 1: B has one more wrong claim and more facts: neither is more faithful.
# 2: equal CIDEr-D, no pair. 3: A is the more faithful, as CIDEr-D says.
WRONG = {"A": [1, 0, 3, 0], "B": [0, 1, 0, 2]}
RECALLED = {"A": [2, 1, 0, 3], "B": [2, 3, 5, 3]}
RANKS = {"A": [3, 1, 1, 2], "B": [1, 1, 9, 1]}


def test_hand_made_pairs():
    found = cider_failures(SCORES, wrong=WRONG, recalled=RECALLED, ranks=RANKS)
    assert found["pairs"] == 3
    assert (found["faithful_pairs"], found["faithful_failures"]) == (2, 0.5)
    # Images 0 and 3 each have one better rank, and CIDEr-D fails on both.
    assert (found["retrieval_pairs"], found["retrieval_failures"]) == (2, 1.0)
    assert found["failures"] == 1
    assert found["cases"] == [CiderFailure(0, "A", "B", 1.5)]
    assert "rules:faithful+retrieval" in found["signature"]


def test_one_rule_alone():
    by_rank = cider_failures(SCORES, ranks=RANKS)
    assert [(case.row, case.better) for case in by_rank["cases"]] == [(0, "B"), (3, "B")]
    assert by_rank["faithful_pairs"] is None
    assert by_rank["faithful_failures"] is None
    by_truth = cider_failures(SCORES, wrong=WRONG, recalled=RECALLED)
    assert [case.row for case in by_truth["cases"]] == [0]
    assert by_truth["retrieval_pairs"] is None
    assert cider_failures(SCORES, ranks=RANKS, min_gap=1.0)["failures"] == 1


def test_every_pair_of_three_is_compared():
    scores = {"A": [3.0], "B": [2.0], "C": [1.0]}
    found = cider_failures(scores, ranks={"A": [3], "B": [2], "C": [1]})
    assert [(c.preferred, c.better, c.gap) for c in found["cases"]] == [
        ("A", "C", 2.0),
        ("A", "B", 1.0),
        ("B", "C", 1.0),
    ]
    assert cider_failures(scores, ranks={"A": [1], "B": [2], "C": [3]})["failures"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": {"A": [1.0]}}, "at least two"),
        ({"ranks": None}, "nothing to compare CIDEr-D with"),
        ({"wrong": WRONG}, "must be given together"),
        ({"ranks": {"A": [1, 1, 1, 1]}}, "lacks 'B'"),
        ({"ranks": {"A": [1] * 4, "B": [1] * 3}}, "3 numbers for 4"),
        ({"scores": {"A": [1.0], "B": [float("nan")]}}, "is nan"),
        ({"min_gap": -1.0}, "min_gap"),
    ],
)
def test_bad_input_is_refused(changes, message):
    arguments = {"scores": SCORES, "ranks": RANKS, **changes}
    if len(arguments["scores"]["A"]) == 1:
        arguments["ranks"] = {"A": [1], "B": [1]}
    with pytest.raises(ValueError, match=message):
        cider_failures(arguments.pop("scores"), **arguments)


def test_right_captions_with_a_score_near_0():
    scores = {"A": [0.0, 0.05, 0.0, 0.1, 0.02], "B": [3.0, 0.0, 0.0, 0.0, 0.0]}
    right = {"A": [2, 5, 3, 1, 1], "B": [1, 0, 4, 2, 2]}
    wrong = {"A": [0, 0, 1, 0, 0], "B": [0, 0, 0, 2, 1]}
    found = unrewarded(scores, right=right, wrong=wrong)
    # A: image 2 is wrong, image 3 scores the bound. B: image 1 has no claims, 3 and 4 are wrong, 0 is rewarded.
    assert found["cases"] == [(1, "A", 0.05), (2, "B", 0.0), (0, "A", 0.0), (4, "A", 0.02)]
    assert (found["right_captions"], found["unrewarded"]) == (6, 4)
    assert found["share"] == pytest.approx(4 / 6)
    assert unrewarded({"A": [1.0]}, right={"A": [0]}, wrong={"A": [0]})["share"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"below": 0}, "must be above 0"),
        ({"scores": {}}, "empty"),
        ({"wrong": {}}, "lacks 'A'"),
        ({"right": {"A": [1, 2]}}, "2 numbers for 1"),
    ],
)
def test_bad_input_of_the_second_rule_is_refused(changes, message):
    arguments = {"scores": {"A": [0.0]}, "right": {"A": [1]}, "wrong": {"A": [0]}, **changes}
    with pytest.raises(ValueError, match=message):
        unrewarded(arguments.pop("scores"), **arguments)
