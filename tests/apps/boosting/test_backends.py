"""The embedded world's backends: error rates, and answers that depend only on the prompt."""

import numpy as np
import pytest

from hf_captionrl.apps.boosting.backends import SceneDescriber, SceneWriter
from hf_captionrl.apps.boosting.prompts import blend_prompt, visual_prompt
from hf_captionrl.captioners.language_models import Failure
from hf_captionrl.scenes import check, sample_scene


def describe(facts, **options):
    prompts = [visual_prompt(image_id, None) for image_id in facts]
    return dict(zip(facts, (text for _, text in SceneDescriber(facts, **options).complete(prompts)), strict=True))


@pytest.fixture(scope="module")
def facts():
    rng = np.random.default_rng(1)
    return {str(i): sample_scene(rng).facts for i in range(1500)}


@pytest.mark.parametrize("rate", [0.0, 0.15, 0.5])
def test_error_rate_of_facts(facts, rate):
    described = describe(facts, error_rate=rate, mention_rate=1.0)
    results = [check(text, facts[i]) for i, text in described.items()]
    for attribute in ("size", "position", "background", "count"):
        wrong = sum(any(claim.attribute == attribute for claim in result.wrong) for result in results)
        # Five standard errors of a fraction of 1500.
        assert abs(wrong / 1500 - rate) <= 5 * np.sqrt(0.25 / 1500) * (rate > 0)
    if rate == 0:
        assert not any(result.wrong or result.missed for result in results)


def test_mention_rate_of_facts(facts):
    described = describe(facts, error_rate=0.0, mention_rate=0.3)
    size = np.mean(["size" in check(text, facts[i]).recalled for i, text in described.items()])
    assert abs(size - 0.3) < 0.06
    assert all("kind" in check(text, facts[i]).recalled for i, text in described.items())


def test_description_does_not_depend_on_the_order_of_prompts(facts):
    backwards = describe(dict(reversed(facts.items())))
    assert describe(facts) == backwards
    assert describe(facts, seed=1) != backwards


def test_writer_reads_only_the_prompt():
    # The same prompt gives the same answer, whatever the image is.
    answers = {next(iter(SceneWriter().complete([blend_prompt(i, ["some animals", "two pigs"])])))[1] for i in "ab"}
    assert answers == {"two pigs"}


def test_images_that_are_not_scenes_fail():
    assert isinstance(next(iter(SceneWriter().complete([blend_prompt("1", ["A man."])])))[1], Failure)
    assert isinstance(next(iter(SceneDescriber({}).complete([visual_prompt("1", None)])))[1], Failure)
