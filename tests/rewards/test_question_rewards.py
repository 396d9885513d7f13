"""The reward of questions and its readers against loops, and questions that a model writes once."""

import json
import math

import numpy as np
import pytest
from PIL import Image

from hf_captionrl.experimental.question_rewards import (
    LanguageModelReader,
    QuestionReward,
    make_questions,
    parse_questions,
    read_questions,
)
from hf_captionrl.scenes.questions import Question
from hf_captionrl.utils.prompts import Failure
from tests.rewards.test_claim_rewards import APPLE, PIGS, Spoken
from tests.scenes.test_questions import share

TWO = [Question("Which animal?", ("cat", "dog", "pig"), 1), Question("How many?", ("one", "two"), 0)]


# --- The reward of scenes ---


def test_the_reward_equals_a_loop_and_subtracts_the_prior(rollouts):
    captions = ["two small pigs", "pigs in the snow", "an apple", "a large apple at the bottom"]
    facts = [PIGS, PIGS, APPLE, APPLE]
    context = rollouts.context(captions, [0, 1], columns={"facts": [PIGS.to_dict(), APPLE.to_dict()]})
    plain = QuestionReward()(context)
    assert plain.tolist() == pytest.approx([share(c, f) for c, f in zip(captions, facts, strict=True)])
    assert len(set(plain.tolist())) == 4
    assert plain[0] > plain[1]
    reward = QuestionReward(prior="prior")
    gained = reward(context)
    guessed = QuestionReward("prior")(context)
    assert gained.tolist() == pytest.approx((plain - guessed).tolist())
    assert guessed[0] == guessed[1] != guessed[2]  # it ignores the caption
    assert np.mean(context.statistics["question_oracle/prior"]) == pytest.approx(float(guessed.mean()))
    assert reward.as_function()(captions, facts=[f.to_dict() for f in facts]) == pytest.approx(gained.tolist())


# --- Language models as readers ---


def reads(prompt):
    """Answers with the letter of the first option that the description contains."""
    head, _, question = prompt.user.partition("\n\nAnswer the question")
    lines = [line.split(". ", 1) for line in question.split("\n") if ". " in line and line[1] == "."]
    letter = next((letter for letter, option in lines if option in head), lines[-1][0])
    return {"shouting": f" {letter.lower()}) ", "mumbling": "I think so"}.get(head.split()[-1], f"{letter}.")


def test_written_answers_are_read_strictly_and_kept(tmp_path, rollouts):
    backend = Spoken(reads)
    reader = LanguageModelReader(backend, tmp_path / "a.jsonl")
    captions = ["two dogs, one dog", "a pig", "dog shouting", "a dog mumbling"]
    asked = [TWO] * 4
    assert reader(captions, asked) == [[1, 0], [2, None], [1, None], [None, None]]
    assert reader.num_unreadable == 2
    number = len(backend.asked)
    assert reader(captions, asked) == [[1, 0], [2, None], [1, None], [None, None]]
    assert len(backend.asked) == number == 8
    reward = QuestionReward(reader, questions={"i0": TWO, "i1": TWO[:1]}, prior=reader)
    context = rollouts.context(["one dog", "a pig", "dog", "dog"], [0, 1])
    assert reward(context).tolist() == pytest.approx([1.0, 0.0, 1.0, 1.0])  # an empty caption answers nothing
    assert reward.name == "question_reader"
    other = rollouts.context(["one dog", "a pig"], [0, 7])
    assert [math.isnan(v) for v in reward(other).tolist()] == [False, True]  # an image without questions


# --- Questions about photographs ---

GOOD = [{"question": "Which animal?", "right": "dog", "wrong": ["cat", "pig", "cow"]}]


@pytest.mark.parametrize(
    ("answer", "readable"),
    [
        (json.dumps(GOOD), True),
        (f"Sure!\n```json\n{json.dumps(GOOD)}\n```", True),
        (json.dumps(GOOD * 2 + [{"question": "?", "right": "dog", "wrong": ["dog", "pig", "cow"]}]), False),
        (json.dumps([{"question": "?", "right": "dog", "wrong": ["pig", "cow"]}]), False),
        (json.dumps([{"question": "?", "right": 1, "wrong": ["a", "b", "c"]}]), False),
        (json.dumps([{"question": " ", "right": "x", "wrong": ["a", "b", "c"]}]), False),
        ("[]", False),
        ("No.", False),
        ("][", False),
        ("[" * 100_000 + "]", False),
        (None, False),
    ],
)
def test_questions_of_a_model_are_read_strictly(answer, readable):
    found = parse_questions(answer)
    assert (found is not None) == readable
    if readable:
        (question,) = found
        assert sorted(question.options) == ["cat", "cow", "dog", "pig"]
        assert question.options[question.answer] == "dog"


def test_questions_are_made_once(tmp_path, caplog):
    images = {f"p{n}": Image.new("RGB", (2, 2), (n, 0, 0)) for n in range(4)}

    def writes(prompt):
        shade = prompt.image.getpixel((0, 0))[0]
        if shade == 3 or (shade == 1 and not prompt.attempt):
            return "I cannot see anything."
        return Failure("backend_failed", "down") if shade == 2 and down[0] else json.dumps(GOOD)

    backend, down = Spoken(writes, is_multimodal=True), [True]
    path = tmp_path / "questions.jsonl"
    assert make_questions(list(images), list(images.values()), backend, path) == 2
    assert "2 of 4 images" in caplog.text
    assert sorted(read_questions(path)) == ["p0", "p1"]
    number, down[0] = len(backend.asked), False
    assert make_questions(list(images), list(images.values()), backend, path) == 1
    assert len(backend.asked) == number + 1  # only the image whose question had failed
    found = read_questions(path)
    assert sorted(found) == ["p0", "p1", "p2"]
    assert found["p0"] == parse_questions(json.dumps(GOOD))
