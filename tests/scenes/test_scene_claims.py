"""Reading and writing claims, against the grammar that writes captions."""

import numpy as np
import pytest

from hf_captionrl.scenes import check, full_caption, sample_scene
from hf_captionrl.scenes.grammar import ANNOTATORS, annotate
from hf_captionrl.scenes.scene_claims import (
    ALONE,
    SceneClaims,
    blend_claims,
    combine_claims,
    read_claims,
    write_claims,
)
from hf_captionrl.scenes.world import SHAPE_KINDS, category_of


def all_facts(number, **options):
    rng = np.random.default_rng(5)
    return [sample_scene(rng, **options).facts for _ in range(number)]


def test_full_captions_are_read_as_their_facts_and_written_back():
    for facts in all_facts(300) + all_facts(100, kinds=SHAPE_KINDS):
        claims = read_claims(full_caption(facts))
        assert claims == SceneClaims(
            facts.kind,
            facts.count,
            False,
            facts.size,
            "" if facts.orientation == "upright" else facts.orientation,
            facts.position,
            facts.background,
            facts.second or ALONE,
            facts.relation,
        )
        assert write_claims(claims) == full_caption(facts)


def test_what_annotators_write_is_read_and_stays_true_when_blended():
    rng = np.random.default_rng(6)
    for facts in all_facts(300):
        captions = [annotate(rng, facts, annotator) for annotator in ANNOTATORS]
        claims = [read_claims(caption) for caption in captions]
        assert None not in claims
        blended = check(write_claims(blend_claims(claims)), facts)
        assert blended.wrong == ()
        # The union, counted by the truth checker: whatever one of the captions recalls.
        assert set(blended.recalled) == {fact for caption in captions for fact in check(caption, facts).recalled}


@pytest.mark.parametrize(
    "text", ["", "a dog", "two pigs fly", "pigs", "a pig left of a mushroom on blue at the top", "I'm sorry"]
)
def test_other_text_is_not_read(text):
    assert read_claims(text) is None


def test_where_people_differ_the_majority_is_blended():
    claims = [read_claims(text) for text in ("a pig on blue", "a duck on green", "a duck on blue")]
    assert write_claims(blend_claims(claims)) == "a duck on a blue background"
    with pytest.raises(ValueError, match="no claims"):
        blend_claims([])


@pytest.mark.parametrize(
    ("correct", "new", "combined"),
    [
        ("a pig", "three large ducks at the top on a blue background", "a large pig at the top on a blue background"),
        ("some animals", "a duck", "some ducks"),
        ("some animals", "three ducks", "three ducks"),
        ("an animal", "two teapots", "an animal"),
        ("a pig alone", "a pig left of a cake", "a pig alone"),
        ("a pig with a cake", "a pig left of a cake", "a pig left of a cake"),
        ("a pig with a cake", "a pig left of a bus", "a pig with a cake"),
        ("a pig", "a cake left of a pig", "a pig"),
    ],
)
def test_human_text_wins_every_conflict(correct, new, combined):
    assert write_claims(combine_claims(read_claims(correct), read_claims(new))) == combined


def test_combining_never_contradicts_and_never_forgets():
    facts, others = all_facts(400), all_facts(800)[400:]
    rng = np.random.default_rng(7)
    for one, other in zip(facts, others, strict=True):
        correct = annotate(rng, one, ANNOTATORS[4])
        found = check(write_claims(combine_claims(read_claims(correct), read_claims(full_caption(other)))), one)
        before = check(correct, one)
        wrong = {claim.attribute for claim in found.wrong}
        right = {claim.attribute for claim in before.right}
        if "kind" not in wrong:  # with a wrong kind the checker reads a position as the second object's
            assert not wrong & right
            assert set(before.recalled) <= set(found.recalled)
        if category_of(one.kind) != category_of(other.kind):
            assert "kind" not in wrong
