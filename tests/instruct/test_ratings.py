"""Relative scores against plain sums, and what a judge may write."""

from __future__ import annotations

import pytest

from hf_captionrl.apps.instruct.judges import CATEGORIES, Rating, answer_statistics, parse_scores, relative_scores


def rating(question, category, candidate, reference, first=True):
    return Rating(question, category, candidate, reference, first)


RATINGS = [
    rating("a", "generic", 8, 10),
    rating("a", "generic", 6, 10, False),
    rating("b", "generic", 4, 5),
    rating("b", "generic", 5, 5, False),
    rating("c", "writing", 9, 6),
]


def test_shares_of_the_references():
    found = relative_scores(RATINGS)
    assert found["generic"] == pytest.approx((8 + 6 + 4 + 5) / (10 + 10 + 5 + 5))
    assert found["writing"] == pytest.approx(9 / 6)  # better than the reference
    assert found["overall"] == pytest.approx(32 / 36)
    assert "fermi" not in found
    assert "writing_ci" not in found  # one question has no spread
    low, high = found["generic_ci"]
    assert low == pytest.approx(0.7)  # question a alone
    assert high == pytest.approx(0.9)  # question b alone
    assert (found["num_ratings"], found["num_questions"], found["one_order"]) == (5, 3, 1)


def test_first_place_is_half_the_gap_between_orders():
    # a: -2 first, -4 second; b: -1 first, 0 second.
    assert relative_scores(RATINGS)["first_place"] == pytest.approx(((-2 + 4) + (-1 - 0)) / 2 / 2)
    assert relative_scores(RATINGS[-1:])["first_place"] is None


def test_a_judge_that_only_sees_the_place_finds_no_difference():
    fair = [rating(str(i), "fermi", *(9, 3, True) if first else (3, 9, False)) for i in range(6) for first in (0, 1)]
    found = relative_scores(fair)
    assert found["overall"] == 1.0
    assert found["first_place"] == 6.0


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("8 7", (8, 7)),
        ("8.5, 7", (8.5, 7)),
        ("8/10 6 / 10\nBoth are good.", (8, 6)),
        ("Answer 1 is longer.\n\n9 10", (9, 10)),
        ("Scores: 8 and 7.", (8, 7)),
        ("I cannot judge this.", None),
        ("11 3", None),
        ("0 5", None),
        ("8", None),
        ("3 8 9", None),
        ("version1 of 2x", None),
        ("-1 3", None),
        ("[-1, 3]", None),
        ("A:-1, B:3", None),
        ("A=-2 B=3", None),
        ("**-1** 3", None),
        ("[8, 7]", (8, 7)),
        ("\u22121/10 1/10", None),
        ("8-7", (8, 7)),
        ("\u0668 \u0669", None),  # digits of another script
        ("", None),
    ],
)
def test_scores_in_a_reply(reply, expected):
    assert parse_scores(reply) == expected


def test_statistics_count_empty_answers():
    found = answer_statistics(["one two three", "", "  ", "Two, three four five five"])
    assert found["length"] == pytest.approx(8 / 4)
    assert found["lexical_diversity"] == pytest.approx(6 / 1000)  # one two three Two four five
    assert found["empty"] == 0.5
    assert answer_statistics([""])["length"] == 0.0


@pytest.mark.parametrize("score", [0, 10.5, "8", None, True, float("nan")])
def test_scores_outside_the_scale_are_refused(score):
    with pytest.raises(ValueError, match="Scores are numbers from 1 to 10"):
        rating("a", "generic", score, 5)


def test_bad_input():
    with pytest.raises(ValueError, match="no ratings"):
        relative_scores([])
    with pytest.raises(ValueError, match="Unknown category 'coding'"):
        relative_scores([rating("a", "coding", 5, 5)])
    with pytest.raises(ValueError, match="one answer per question"):
        answer_statistics([])
    with pytest.raises(ValueError, match="must be a string"):
        answer_statistics([None])
    assert len(CATEGORIES) == 7
