"""Reading and writing claims, against the grammar that writes captions."""

import numpy as np
import pytest

from hf_captionrl.scenes import check, full_caption, sample_scene
from hf_captionrl.scenes.grammar import ALT_TEXT_ANNOTATORS, ANNOTATORS, annotate
from hf_captionrl.scenes.scene_claims import SceneClaims, blend_claims, combine_claims, read_claims, write_claims
from hf_captionrl.scenes.world import CATEGORIES, SHAPE_KINDS, UNMARKED, category_of


def all_facts(number, **options):
    rng = np.random.default_rng(5)
    return [sample_scene(rng, **options).facts for _ in range(number)]


def test_full_captions_are_read_as_their_facts_and_written_back():
    for facts in all_facts(300) + all_facts(100, kinds=SHAPE_KINDS):
        claims = read_claims(full_caption(facts))
        marked = {name: value for name, value in facts.to_dict().items() if value != UNMARKED.get(name)}
        assert claims == SceneClaims(**marked)
        assert write_claims(claims) == full_caption(facts)


def test_the_checker_agrees_with_a_second_reading_of_every_caption():
    """A regular expression of the grammar, and the checker's tokens, find the same errors."""
    rng = np.random.default_rng(6)
    errors = 0
    for facts in all_facts(400):
        for annotator in (*ANNOTATORS, *ALT_TEXT_ANNOTATORS):
            caption = annotate(rng, facts, annotator)
            claims = read_claims(caption)
            wrong = set()
            for name, truth in facts.to_dict().items():
                said = getattr(claims, name)
                if said and said != truth and truth not in CATEGORIES.get(said, ()):
                    wrong.add(name)
            assert {claim.attribute for claim in check(caption, facts).wrong} == wrong, caption
            errors += len(wrong)
    assert errors > 100


def test_what_annotators_write_stays_true_when_blended():
    """But for their mistakes, a blend recalls what any of the captions recalls."""
    rng = np.random.default_rng(6)
    blended = 0
    for facts in all_facts(300):
        captions = [annotate(rng, facts, annotator) for annotator in ANNOTATORS]
        if any(check(caption, facts).wrong for caption in captions):
            continue
        result = check(write_claims(blend_claims([read_claims(caption) for caption in captions])), facts)
        assert result.wrong == ()
        assert set(result.recalled) == {fact for caption in captions for fact in check(caption, facts).recalled}
        blended += 1
    assert blended > 100


@pytest.mark.parametrize(
    "text", ["", "a unicorn", "two pigs fly", "pigs", "a pig on a blue background left of a mushroom", "I'm sorry"]
)
def test_other_text_is_not_read(text):
    assert read_claims(text) is None


def test_where_people_differ_the_majority_is_blended():
    texts = "a pig on a blue background", "a duck on a green background", "on a blue background, a duck"
    assert write_claims(blend_claims(list(map(read_claims, texts)))) == "a duck on a blue background"


@pytest.mark.parametrize(
    ("correct", "new", "combined"),
    [
        ("a pig", "three large ducks at the top on a blue background", "a large pig at the top on a blue background"),
        ("some animals", "a duck", "some ducks"),
        ("a pig with a cake", "a pig left of a cake", "a pig left of a cake"),
        ("a pig with a cake", "a pig left of a bus", "a pig with a cake"),
    ],
)
def test_human_text_wins_every_conflict(correct, new, combined):
    assert write_claims(combine_claims(read_claims(correct), read_claims(new))) == combined


def test_combining_never_contradicts_and_never_forgets():
    facts, others = all_facts(400), all_facts(800)[400:]
    rng = np.random.default_rng(7)
    for one, other in zip(facts, others, strict=True):
        correct = annotate(rng, one, ANNOTATORS[4])
        if check(correct, one).wrong:
            continue
        found = check(write_claims(combine_claims(read_claims(correct), read_claims(full_caption(other)))), one)
        before = check(correct, one)
        wrong = {claim.attribute for claim in found.wrong}
        right = {claim.attribute for claim in before.right}
        assert not wrong & right
        assert set(before.recalled) <= set(found.recalled)
        if category_of(one.kind) != category_of(other.kind):
            assert "kind" not in wrong
