"""Judges: an endpoint on this machine that behaves and misbehaves, a local model, files; and the questions."""

from __future__ import annotations

import json

import pytest

from hf_captionrl.apps.instruct import judges
from hf_captionrl.apps.instruct.instructions import tiny_llama
from hf_captionrl.apps.instruct.judges import (
    EndpointJudge,
    FileJudge,
    Judge,
    LocalJudge,
    Question,
    Rating,
    answer_questions,
    answer_statistics,
    judge_prompt,
    load_questions,
    parse_scores,
    relative_scores,
)
from hf_captionrl.captioners.language_models import Truncated

QUESTIONS = [Question("q1", "generic", "Why?", "Because."), Question("q2", "writing", "Write.", "Once upon a time.")]


@pytest.fixture
def replies(monkeypatch):
    """What the endpoint replies, in order; its failures: tests/captioners/test_language_models.py."""
    given, asked = [], []

    class Backend:
        def __init__(self, *arguments, **options):
            asked.append((arguments, options))

        def complete(self, prompts):
            asked.extend(prompt.user for prompt in prompts)
            return [(0, given.pop(0)) for _ in prompts]

    monkeypatch.setattr(judges, "HTTPBackend", Backend)
    return given, asked


def test_both_orders_are_asked_and_undone(replies):
    given, asked = replies
    given += ["8 6\nGood.", "5 9", "7 7", Truncated("2 4\nBecause the")]
    judge = EndpointJudge("http://here/v1", "m", api_key_env="JUDGE_KEY")
    found = judge.rate("SMILE", QUESTIONS, ["Mine.", "Also mine."])
    scores = [(r.question_id, r.candidate, r.reference, r.candidate_first) for r in found.ratings]
    assert scores == [("q1", 8, 6, True), ("q1", 9, 5, False), ("q2", 7, 7, True), ("q2", 4, 2, False)]
    (arguments, options), *prompts = asked
    assert arguments == ("http://here/v1", "m")
    # Some servers refuse a seed.
    assert (options["seed"], options["api_key_env"]) == (None, "JUDGE_KEY")
    assert prompts[0] == judge_prompt("Why?", "Mine.", "Because.")
    assert prompts[1] == judge_prompt("Why?", "Because.", "Mine.")
    assert "SMILE" not in "".join(prompts)  # the judge is not told who answers


def test_nonsense_is_counted_and_empty_answers_are_shown_as_such():
    prompts = []

    class Unsure(Judge):
        def ask(self, prompt):
            prompts.append(prompt)
            return "8 6" if len(prompts) == 1 else "I like both."

    found = Unsure().rate("SMILE", QUESTIONS, ["  ", "Mine."])
    assert len(found.ratings) == 1
    assert len(found.failed) == 3
    assert "I like both" in found.failed[0]
    assert "(no answer)" in prompts[0]


def test_a_file_of_ratings(tmp_path):
    file = tmp_path / "ratings.jsonl"
    rows = [
        {"model": "SMILE", "question_id": "q1", "candidate": 8, "reference": 6},
        {"model": "SMILE", "question_id": "q1", "candidate": 7, "reference": 7, "candidate_first": False},
        {"model": "MLE", "question_id": "q2", "candidate": 3, "reference": 7},
        {"model": "SMILE", "question_id": "unasked", "candidate": 3, "reference": 7},
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    found = FileJudge(file).rate("SMILE", QUESTIONS, ["", ""])
    assert [(r.category, r.candidate, r.candidate_first) for r in found.ratings] == [
        ("generic", 8, True),
        ("generic", 7, False),
    ]
    assert found.failed == ["q2: not in ratings.jsonl"]


@pytest.mark.parametrize(
    "change",
    [
        {"candidate": None},
        {"candidate": 11},
        {"candidate": float("nan")},
    ],
)
def test_bad_ratings_name_the_line(tmp_path, change):
    good = {"model": "m", "question_id": 1, "candidate": 8, "reference": 5}
    bad = {name: value for name, value in {**good, **change}.items() if value is not None}
    (tmp_path / "r.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    with pytest.raises(ValueError, match=r"Line 2 of r\.jsonl"):
        FileJudge(tmp_path / "r.jsonl")


@pytest.fixture(scope="module")
def model():
    return tiny_llama(["Why? Because. Write. 8 6 7"] * 3, vocab_size=280, width=32, layers=1)


def test_a_local_model(model):
    judge = LocalJudge(*model, max_new_tokens=4)
    reply = judge.ask("8 6")
    assert judge.ask("8 6") == reply  # greedy
    found = judge.rate("SMILE", QUESTIONS, ["Mine.", "Mine."])
    assert len(found.ratings) + len(found.failed) == 4  # an untrained model writes nonsense, which is counted


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


def test_a_judge_that_only_sees_the_place_finds_no_difference():
    fair = [Rating(str(i), "fermi", *(9, 3, True) if first else (3, 9, False)) for i in range(6) for first in (0, 1)]
    found = relative_scores(fair)
    assert found["overall"] == 1.0
    assert found["first_place"] == 6.0


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
        "[8, 7]": (8, 7),
        "8-7": (8, 7),
        "": None,
        "11 3": None,
        "0 5": None,
        "3 8 9": None,
        "version1 of 2x": None,
        "[-1, 3]": None,
        "A=-2 B=3": None,
        "**-1** 3": None,
        "\u22121/10 1/10": None,
        "\u0668 \u0669": None,  # digits of another script
    }
    assert {reply: parse_scores(reply) for reply in expected} == expected


def test_statistics_count_empty_answers():
    found = answer_statistics(["one two three", "", "  ", "Two, three four five five"])
    assert found["length"] == pytest.approx(8 / 4)
    assert found["lexical_diversity"] == pytest.approx(6 / 1000)  # one two three Two four five
    assert found["empty"] == 0.5
    assert answer_statistics([""])["length"] == 0.0
