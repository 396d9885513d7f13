"""Questions about scenes against their facts, and what captions answer against cases written by hand."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from hf_captionrl.scenes import Facts, full_caption, load_moving_scenes, sample_scene
from hf_captionrl.scenes.questions import answers_of_claims, scene_questions

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
    found = answered(caption, facts)
    assert {topic: found[topic] for topic in expected} == expected


def test_clips_are_asked_only_what_they_show():
    facts = load_moving_scenes("shapes", num_train=4, num_validation=0, num_test=0)["train"]["facts"][:]
    for one in facts:
        assert {"kind", "background"} <= {question.topic for question in scene_questions(one)}
        assert share(full_caption_of(one), one) == 1.0


def full_caption_of(facts):
    return full_caption(Facts(**{name: facts[name] for name in Facts.__dataclass_fields__}))
