"""Conflicts: known ones are found, agreeing captions have none."""

import numpy as np
import pytest

from hf_captionrl.apps.boosting.backends import SceneWriter
from hf_captionrl.apps.boosting.conflicts import (
    scene_conflicts,
    source_statistics,
    text_conflicts,
    write_source_histogram,
)
from hf_captionrl.apps.boosting.prompts import HOLISTIC_EXAMPLES, holistic_prompt
from hf_captionrl.scenes import Facts, full_caption

FACTS = Facts("pig", 2, "small", "sideways", "top", "blue", "mushroom", "left of")


@pytest.mark.parametrize(
    ("blend", "holistic", "attribute"),
    [
        ("Two dogs on grass.", "Three brown dogs lie on grass.", "count"),
        ("A pair of small dogs", "There are 3 dogs", "count"),
        ("A white fire hydrant", "A black fire hydrant", "colour"),
        ("A white plate on a table", "A shiny gray plate with food", "colour"),
        ("A grey cat", "A golden cat", "colour"),
        ("A man hits a ball.", "A woman in white hits a ball.", "kind"),
        ("Two dogs.", "No dogs, just two cats.", "kind"),
        ("Three boys play.", "Girls play in a yard.", "kind"),
        ("A boy plays.", "Three girls play.", "kind"),
        ("Men at work", "A woman at work", "kind"),
        ("A cat to the left of a car", "A cat to the right of a car", "kind"),
        ("A room seen indoors", "An outdoor room", "kind"),
    ],
)
def test_known_conflicts_are_found(blend, holistic, attribute):
    assert [conflict.attribute for conflict in text_conflicts(blend, holistic)] == [attribute]


@pytest.mark.parametrize(
    ("blend", "holistic"),
    [
        ("A dog.", "Two brown dogs."),  # an article is not a number
        ("A white and brown plate", "A white plate"),
        ("A grey cat", "A gray cat on a red mat"),
        ("Two dogs and three cats", "A pair of dogs, three black cats"),
        ("A man and a woman", "A man"),
        ("A cat on the left", "A cat on the left, a dog on the right"),
        ("Two dogs.", "Two dogs without any cats."),
        ("A boy", "Boys with a ball"),
        ("A blue sky over a green field", "A field of green, and the sky is blue"),
        ("A car", "A red car"),
    ],
)
def test_agreeing_captions_have_no_conflict(blend, holistic):
    assert text_conflicts(blend, holistic) == []


def test_examples_of_the_paper_conflict_only_with_noisy_captions():
    for user, answer in HOLISTIC_EXAMPLES:
        correct, noisy = (line.partition(": ")[2] for line in user.splitlines())
        assert text_conflicts(correct, answer) == []
        assert text_conflicts(correct, noisy) != []


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
    assert text_conflicts(blend, right) == []
    assert {c.attribute for c in scene_conflicts(blend, wrong, FACTS)} == {"count", "size", "background"}
    assert {c.attribute for c in text_conflicts(blend, wrong)} == {"count", "colour"}


def test_statistics_equal_word_counts(tmp_path):
    sources = {"a": ["a dog", "a big dog, running"], "b": ["one two three"]}
    found = source_statistics(sources, count_tokens=lambda texts: [len(text) for text in texts])
    expected = {"captions": 2, "mean_words": 3, "std_words": 1, "max_words": 4, "vocabulary": 4}
    assert {name: found["a"][name] for name in expected} == expected
    assert found["b"]["vocabulary"] == 3
    assert found["a"]["percentiles_words"]["95"] == pytest.approx(np.percentile([2, 4], 95))
    assert found["b"]["mean_tokens"] == 13
    assert write_source_histogram(tmp_path / "x.png", sources).read_bytes()[1:4] == b"PNG"
    with pytest.raises(ValueError, match="empty"):
        source_statistics({"a": []})
