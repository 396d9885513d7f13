"""Judges of answers, and the questions."""

from __future__ import annotations

import json

import pytest

from hf_captionrl.apps.instruct.instructions import tiny_llama
from hf_captionrl.apps.instruct.judges import (
    Question,
    Rating,
    answer_questions,
    answer_statistics,
    judge_prompt,
    load_questions,
    parse_scores,
    rate,
    relative_scores,
)
from hf_captionrl.utils.prompts import BackendError, Failure, Truncated

QUESTIONS = [Question("q1", "generic", "Why?", "Because."), Question("q2", "writing", "Write.", "Once upon a time.")]


class Spoken:
    """A backend that gives these replies in order, and records prompts."""

    model, revision, is_multimodal = "a/m", "", False

    def __init__(self, *replies):
        self.replies, self.asked = list(replies), []

    def complete(self, prompts):
        self.asked.extend(prompt.user for prompt in prompts)
        return [(i, self.replies.pop(0)) for i in range(len(prompts))]


def test_both_orders_are_asked_and_undone():
    backend = Spoken("8 6\nGood.", "5 9", "7 7", Truncated("2 4\nBecause the"))
    ratings, _ = rate(backend, QUESTIONS, ["Mine.", "Also mine."])
    scores = [(r.question_id, r.candidate, r.reference, r.candidate_first) for r in ratings]
    assert scores == [("q1", 8, 6, True), ("q1", 9, 5, False), ("q2", 7, 7, True), ("q2", 4, 2, False)]
    assert backend.asked[0] == judge_prompt("Why?", "Mine.", "Because.")
    assert backend.asked[1] == judge_prompt("Why?", "Because.", "Mine.")


def test_nonsense_is_counted_and_empty_answers_are_shown_as_such():
    backend = Spoken("8 6", *["I like both."] * 3)
    ratings, failed = rate(backend, QUESTIONS, ["  ", "Mine."])
    assert (len(ratings), len(failed)) == (1, 3)
    assert "I like both" in failed[0]
    assert "(no answer)" in backend.asked[0]
    with pytest.raises(BackendError, match="gone"):
        rate(Spoken(Failure("backend_failed", "gone")), QUESTIONS, ["a", "b"])


@pytest.fixture(scope="module")
def model():
    return tiny_llama(["Why? Because. Write. 8 6 7"] * 3, vocab_size=280, width=32, layers=1)


def test_answers_do_not_depend_on_the_batch(model):
    prompts = ["Why?", "Write something long, please.", "8"]
    together = answer_questions(*model, prompts, max_new_tokens=6, batch_size=3)
    alone = [answer_questions(*model, [prompt], max_new_tokens=6)[0] for prompt in prompts]
    assert together == alone


def test_vicuna_s_format(tmp_path):
    questions, answers = tmp_path / "question.jsonl", tmp_path / "answer.jsonl"
    rows = [
        {"question_id": 1, "text": "Why?", "category": "generic"},
        {"question_id": 61, "text": "Code!", "category": "coding"},
        {"question_id": 71, "text": "Write.", "category": "writing"},
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers.write_text('{"question_id": 71, "text": "Once.", "model_id": "x"}\n')
    found = load_questions(questions, answers)
    assert found == [Question("1", "generic", "Why?"), Question("71", "writing", "Write.", "Once.")]


RATINGS = [
    Rating("a", "generic", 8, 10),
    Rating("a", "generic", 6, 10, False),
    Rating("b", "generic", 4, 5),
    Rating("b", "generic", 5, 5, False),
    Rating("c", "writing", 9, 6),
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


def test_scores_in_a_reply():
    expected = {
        "8 7": (8, 7),
        "8.5, 7": (8.5, 7),
        "8/10 6 / 10\nBoth are good.": (8, 6),
        "Answer 1 is longer.\n\n9 10": (9, 10),
        "Answer 1 is as good as answer 2.\n8 7": (8, 7),
        "- Answer 1: 8\n- Answer 2: 7": (8, 7),
        "Answer 1: 8, answer 2: 7": (8, 7),
        "Assistant 1: 8": None,
        "": None,
        "0 5": None,
        "3 8 9": None,
        "[-1, 3]": None,
        "\u22121/10 1/10": None,
    }
    assert {reply: parse_scores(reply) for reply in expected} == expected


def test_statistics_count_empty_answers():
    found = answer_statistics(["one two three", "", "  ", "Two, three four five five"])
    assert found["length"] == pytest.approx(8 / 4)
    assert found["lexical_diversity"] == pytest.approx(6 / 1000)  # one two three Two four five
    assert found["empty"] == 0.5
    assert answer_statistics([""])["length"] == 0.0
