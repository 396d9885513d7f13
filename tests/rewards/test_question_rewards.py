"""Questions about scenes, what captions answer against cases written by hand, and the reward against loops."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from hf_captionrl.experimental.question_rewards import (
    PriorReader,
    Question,
    QuestionReward,
    answers_of_claims,
    scene_questions,
)
from hf_captionrl.scenes import Facts, full_caption, load_moving_scenes, sample_scene

PIGS = Facts("pig", 2, "small", "sideways", "top", "blue", "mushroom", "left of")
APPLE = Facts("apple", 1, "large", "upright", "bottom", "gray")


def share(caption, facts):
    questions = scene_questions(facts)
    answers = answers_of_claims(caption, facts, questions)
    return sum(a == q.answer for a, q in zip(answers, questions, strict=True)) / len(questions)


def answered(caption, facts):
    """What a caption answers, by topic, in words."""
    questions = scene_questions(facts)
    answers = answers_of_claims(caption, facts, questions)
    return {q.topic: None if a is None else q.options[a] for q, a in zip(questions, answers, strict=True)}


def test_questions_have_the_facts_as_answers_and_full_captions_answer_them():
    rng = np.random.default_rng(1)
    places = Counter()
    for _ in range(300):
        facts = sample_scene(rng).facts
        questions = scene_questions(facts)
        assert questions == scene_questions(facts.to_dict())
        for question in questions:
            assert len(set(question.options)) == len(question.options) > 1
            value = str(getattr(facts, question.topic))
            assert question.options[question.answer] == value or not value
            places[question.answer if question.topic == "kind" else "others"] += 1
        topics = {question.topic for question in questions}
        assert len(topics) == 11 + 2 * bool(facts.second)
        assert share(full_caption(facts), facts) == 1.0
    del places["others"]
    assert len(places) == 4
    assert max(places.values()) < 200  # the place of the right kind tells little


ANSWERED = [
    ("two small pigs", PIGS, {"kind": "pig", "count": "2", "size": "small", "position": None, "second": "nothing"}),
    ("a mushroom right of pigs", PIGS, {"second": "mushroom", "relation": "left of"}),
    ("pigs on a blue background on a green background", PIGS, {"background": None}),  # both are claimed
    ("an animal", PIGS, {"kind": None}),
    ("an apple in the rain at night", APPLE, {"weather": "rain", "time": "night", "colour": "its natural one"}),
    ("a red apple", replace(APPLE, colour="blue"), {"colour": "red"}),
    ("", APPLE, {"kind": None, "count": None, "second": "nothing"}),
]


@pytest.mark.parametrize(("caption", "facts", "expected"), ANSWERED, ids=[case[0] for case in ANSWERED])
def test_answers_are_what_the_caption_claims(caption, facts, expected):
    answers = answered(caption, facts)
    assert {topic: answers[topic] for topic in expected} == expected


def test_clips_are_asked_only_what_they_show():
    facts = load_moving_scenes("shapes", num_train=4, num_validation=0, num_test=0)["train"]["facts"][:]
    for one in facts:
        assert {"kind", "background"} <= {question.topic for question in scene_questions(one)}
        assert share(full_caption_of(one), one) == 1.0


def full_caption_of(facts):
    return full_caption(Facts(**{name: facts[name] for name in Facts.__dataclass_fields__}))


def test_the_reward_equals_a_loop_and_subtracts_the_prior(rollouts):
    captions = ["two small pigs", "pigs in the snow", "an apple", "a large apple at the bottom"]
    facts = [PIGS, PIGS, APPLE, APPLE]
    context = rollouts.context(captions, [0, 1], columns={"facts": [PIGS.to_dict(), APPLE.to_dict()]})
    plain = QuestionReward()(context)
    assert plain.tolist() == pytest.approx([share(c, f) for c, f in zip(captions, facts, strict=True)])
    assert len(set(plain.tolist())) == 4
    assert plain[0] > plain[1]
    reward = QuestionReward(prior=True)
    gained = reward(context)
    guessed = QuestionReward("prior")(context)
    assert gained.tolist() == pytest.approx((plain - guessed).tolist())
    assert guessed[0] == guessed[1] != guessed[2]  # it ignores the caption
    assert np.mean(context.statistics["question_oracle/prior"]) == pytest.approx(float(guessed.mean()))
    assert reward.as_function()(captions, facts=[f.to_dict() for f in facts]) == pytest.approx(gained.tolist())


def test_the_prior_guesses_by_frequency():
    two = [
        Question("Which animal?", ("cat", "dog", "pig"), 1, "kind"),
        Question("How many?", ("one", "two"), 0, "count"),
    ]
    reader = PriorReader([[two[0]], [replace(two[0], answer=2)], [replace(two[0], answer=2), two[1]]])
    assert reader("", None, two) == [2, 0]
    # An option that was not right before is not chosen; an unknown question gets its first option.
    others = [Question("Which animal?", ("cat", "dog"), 0, "kind"), Question("?", ("a", "b"), 1, "kind")]
    assert reader("", None, others) == [1, 0]
    rng = np.random.default_rng(7)
    prior, shares, chance = PriorReader.of_scenes(), [], []
    for _ in range(400):
        questions = scene_questions(sample_scene(rng).facts)
        guesses = prior("", None, questions)
        shares.append(np.mean([a == q.answer for a, q in zip(guesses, questions, strict=True)]))
        chance.append(np.mean([1 / len(q.options) for q in questions]))
    assert np.mean(shares) > np.mean(chance) + 0.1


def test_bad_input_is_named(rollouts):
    cases = [
        (lambda: QuestionReward("blind"), "reader"),
        (lambda: QuestionReward().prepare(rollouts.data([["a"]], columns=["image"])), "facts"),
        (lambda: QuestionReward().as_function()(["a"]), "facts"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
