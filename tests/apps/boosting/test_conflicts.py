"""Conflicts: known ones are found, agreeing captions have none; the backends of the embedded world."""

import numpy as np
import pytest

from hf_captionrl.apps.boosting.backends import SceneDescriber, SceneWriter
from hf_captionrl.apps.boosting.conflicts import scene_conflicts, source_statistics
from hf_captionrl.apps.boosting.prompts import blend_prompt, holistic_prompt, visual_prompt
from hf_captionrl.captioners.language_model_clients import Failure
from hf_captionrl.scenes import Facts, check, full_caption, sample_scene

FACTS = Facts("pig", 2, "small", "sideways", "top", "blue", "mushroom", "left of")


def test_scene_conflicts_need_a_right_claim_of_the_blend_cap():
    blend = "two animals left of a mushroom"
    assert scene_conflicts(blend, full_caption(FACTS), FACTS) == []
    found = scene_conflicts(blend, "three large pigs left of a teapot on a blue background", FACTS)
    assert "count" in {conflict.attribute for conflict in found}


def test_another_kind_of_the_same_category_is_not_a_conflict():
    assert scene_conflicts("two animals", "two ducks", FACTS) == []
    assert [c.attribute for c in scene_conflicts("two animals", "two teapots", FACTS)] == ["kind"]
    assert [c.attribute for c in scene_conflicts("two pigs", "two ducks", FACTS)] == ["kind"]


def test_preferring_the_noisy_caption_gives_conflicts():
    blend, visual = "two small pigs on a blue background", "three large pigs at the top on a green background"
    right = next(iter(SceneWriter().complete([holistic_prompt("1", blend, visual)])))[1]
    wrong = next(iter(SceneWriter().complete([holistic_prompt("1", visual, blend)])))[1]
    assert right == "two small pigs at the top on a blue background"
    assert scene_conflicts(blend, right, FACTS) == []
    assert {c.attribute for c in scene_conflicts(blend, wrong, FACTS)} == {"count", "size", "background"}


def test_statistics_equal_word_counts(tmp_path):
    sources = {"a": ["a dog", "a big dog, running"], "b": ["one two three"]}
    found = source_statistics(sources, count_tokens=lambda texts: [len(text) for text in texts])
    expected = {"captions": 2, "mean_words": 3, "std_words": 1, "max_words": 4, "vocabulary": 4}
    assert {name: found["a"][name] for name in expected} == expected
    assert found["b"]["vocabulary"] == 3
    assert found["b"]["mean_tokens"] == 13


# --- The embedded world's backends: error rates, and answers that depend only on the prompt ---


def describe(facts, **options):
    prompts = [visual_prompt(image_id, None) for image_id in facts]
    return dict(zip(facts, (text for _, text in SceneDescriber(facts, **options).complete(prompts)), strict=True))


@pytest.fixture(scope="module")
def facts():
    rng = np.random.default_rng(1)
    return {str(i): sample_scene(rng).facts for i in range(1500)}


@pytest.mark.parametrize("rate", [0.0, 0.15])
def test_error_rate_of_facts(facts, rate):
    described = describe(facts, error_rate=rate, mention_rate=1.0)
    results = [check(text, facts[i]) for i, text in described.items()]
    for attribute in ("size", "position", "background", "count"):
        wrong = sum(any(claim.attribute == attribute for claim in result.wrong) for result in results)
        # Five standard errors of a fraction of 1500.
        assert abs(wrong / 1500 - rate) <= 5 * np.sqrt(0.25 / 1500) * (rate > 0)
    if rate == 0:
        assert not any(result.wrong or result.missed for result in results)


def test_description_does_not_depend_on_the_order_of_prompts(facts):
    backwards = describe(dict(reversed(facts.items())))
    assert describe(facts) == backwards
    assert describe(facts, seed=1) != backwards


def test_images_that_are_not_scenes_fail():
    assert isinstance(next(iter(SceneWriter().complete([blend_prompt("1", ["A man."])])))[1], Failure)
    assert isinstance(next(iter(SceneDescriber({}).complete([visual_prompt("1", None)])))[1], Failure)
