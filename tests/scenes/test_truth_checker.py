"""The truth checker against cases written by hand."""

import pytest

from hf_captionrl.scenes import Facts, check
from tests.scenes.examples import PIGS, RED_CAT

DUCK = Facts("pig", 1, "small", "upright", "middle", "blue", "duck", "left of")
TREES = Facts("tree", 2, "large", "upright", "top", "blue", "cactus", "above")
APPLE = Facts("apple", 1, "large", "upright", "bottom", "gray")
NIGHT = Facts("dog", 2, "small", "upright", "middle", "green", weather="rain", time="night")
RED_CAT_RIGHT = {
    ("kind", "cat"),
    ("count", "1"),
    ("colour", "red"),
    ("second", "dog"),
    ("second_colour", "blue"),
    ("relation", "left of"),
}
NIGHT_RIGHT = {("kind", "dog"), ("count", "2")}


def claims(items):
    return {(c.attribute, c.value) for c in items}


# caption, facts, right claims, wrong claims
CASES = [
    ("two pigs", PIGS, {("kind", "pig"), ("count", "2")}, set()),
    ("Two PIGS.", PIGS, {("kind", "pig"), ("count", "2")}, set()),
    ("some pigs", PIGS, {("kind", "pig")}, set()),
    ("a pig", PIGS, {("kind", "pig")}, {("count", "1")}),
    ("pig", PIGS, {("kind", "pig")}, set()),
    ("three unicorns", PIGS, set(), {("count", "3")}),
    ("two fish", PIGS, {("count", "2")}, {("kind", "fish")}),
    ("tiny pigs", PIGS, {("kind", "pig"), ("size", "small")}, set()),
    ("huge pigs", PIGS, {("kind", "pig")}, {("size", "large")}),
    ("a pair of little pigs", PIGS, {("kind", "pig"), ("count", "2"), ("size", "small")}, set()),
    ("some pigs on their sides", PIGS, {("kind", "pig"), ("orientation", "sideways")}, set()),
    ("some upside-down pigs", PIGS, {("kind", "pig")}, {("orientation", "upside down")}),
    ("some pigs at the top", PIGS, {("kind", "pig"), ("position", "top")}, set()),
    ("some pigs in the middle", PIGS, {("kind", "pig")}, {("position", "middle")}),
    ("some pigs on blue", PIGS, {("kind", "pig"), ("background", "blue")}, set()),
    ("some pigs on a blue background", PIGS, {("kind", "pig"), ("background", "blue")}, set()),
    ("some pigs against a grey backdrop", PIGS, {("kind", "pig")}, {("background", "gray")}),
    ("some blue pigs", PIGS, {("kind", "pig")}, {("colour", "blue")}),
    (
        "pigs to the left of a mushroom",
        PIGS,
        {("kind", "pig"), ("second", "mushroom"), ("relation", "left of")},
        set(),
    ),
    ("pigs above a mushroom", PIGS, {("kind", "pig"), ("second", "mushroom")}, {("relation", "above")}),
    ("pigs with a mushroom", PIGS, {("kind", "pig"), ("second", "mushroom")}, set()),
    ("pigs next to a whale", PIGS, {("kind", "pig")}, {("second", "whale")}),
    ("pigs left of three whales", PIGS, {("kind", "pig"), ("relation", "left of")}, {("second", "whale")}),
    ("a mushroom right of some pigs", PIGS, {("kind", "pig"), ("second", "mushroom"), ("relation", "left of")}, set()),
    (
        "a mushroom left of some pigs",
        PIGS,
        {("kind", "pig"), ("second", "mushroom")},
        {("relation", "left of")},
    ),
    ("a sideways mushroom", PIGS, {("second", "mushroom")}, {("second orientation", "sideways")}),
    ("some mushrooms", PIGS, {("second", "mushroom")}, {("count", "several")}),
    ("pigs alone", PIGS, {("kind", "pig")}, {("alone", "")}),
    ("two pigs left of a pig", PIGS, {("kind", "pig"), ("count", "2"), ("relation", "left of")}, {("second", "pig")}),
    ("an apple on its own", APPLE, {("kind", "apple"), ("count", "1"), ("alone", "")}, set()),
    (
        "an apple left of a tree",
        APPLE,
        {("kind", "apple"), ("count", "1")},
        {("second", "tree"), ("relation", "left of")},
    ),
    ("some apples", APPLE, {("kind", "apple")}, {("count", "several")}),
    ("a sideways apple", APPLE, {("kind", "apple"), ("count", "1")}, {("orientation", "sideways")}),
    ("an upright apple", APPLE, {("kind", "apple"), ("count", "1"), ("orientation", "upright")}, set()),
    # a category is true, and says little
    ("some animals", PIGS, {("category of kind", "animal")}, set()),
    (
        "two animals left of a plant",
        PIGS,
        {("category of kind", "animal"), ("count", "2"), ("category of second", "plant"), ("relation", "left of")},
        set(),
    ),
    ("some vehicles", PIGS, set(), {("kind", "vehicle")}),
    ("an animal", APPLE, {("count", "1")}, {("kind", "animal")}),
    # a category of both objects means the second where the noun after it is the main one's
    (
        "an animal right of a pig",
        DUCK,
        {("category of second", "animal"), ("kind", "pig"), ("count", "1"), ("relation", "left of")},
        set(),
    ),
    (
        "a small animal left of a pig",
        DUCK,
        {("category of second", "animal"), ("second size", "small"), ("kind", "pig"), ("count", "1")},
        {("relation", "left of")},
    ),
    (
        "an animal with a pig left of a duck",
        DUCK,
        {
            ("category of second", "animal"),
            ("kind", "pig"),
            ("count", "1"),
            ("second", "duck"),
            ("relation", "left of"),
        },
        set(),
    ),
    (
        "a plant in the middle below two trees",
        TREES,
        {
            ("category of second", "plant"),
            ("position", "middle"),
            ("kind", "tree"),
            ("count", "2"),
            ("relation", "above"),
        },
        set(),
    ),
    (
        "an animal left of a duck",
        DUCK,
        {("category of kind", "animal"), ("count", "1"), ("second", "duck"), ("relation", "left of")},
        set(),
    ),
    (
        "an animal left of an animal",
        DUCK,
        {("category of kind", "animal"), ("count", "1"), ("category of second", "animal"), ("relation", "left of")},
        set(),
    ),
    (
        "two plants above a tree",
        TREES,
        {("category of kind", "plant"), ("count", "2"), ("relation", "above")},
        {("second", "tree")},
    ),
    # colours belong to the thing that they stand before
    ("a red cat left of a blue dog", RED_CAT, RED_CAT_RIGHT, set()),
    ("a gold kitten", RED_CAT, {("kind", "cat"), ("count", "1")}, {("colour", "golden")}),
    (
        "a blue cat with a red dog",
        RED_CAT,
        {("kind", "cat"), ("count", "1"), ("second", "dog")},
        {("colour", "blue"), ("second_colour", "red")},
    ),
    ("a red apple", APPLE, {("kind", "apple"), ("count", "1"), ("natural colour", "red")}, set()),
    ("a golden apple", APPLE, {("kind", "apple"), ("count", "1")}, {("colour", "golden")}),
    ("a cat on a striped background", RED_CAT, {("kind", "cat"), ("count", "1"), ("pattern", "striped")}, set()),
    (
        "on a dotted white background, a nice cat",
        RED_CAT,
        {("kind", "cat"), ("count", "1"), ("background", "white")},
        {("pattern", "dotted")},
    ),
    ("a striped cat", RED_CAT, {("kind", "cat"), ("count", "1")}, {("pattern of a thing", "striped cat")}),
    ("two puppies in the rain at night", NIGHT, NIGHT_RIGHT | {("time", "night"), ("weather", "rain")}, set()),
    ("two dogs on a snowy day", NIGHT, NIGHT_RIGHT, {("weather", "snow")}),
    ("two dogs in the dark", RED_CAT, {("second", "dog")}, {("second count", "2"), ("time", "night")}),
    # a wrong noun in first place still means the main group
    (
        "a bus with a dog at the top",
        RED_CAT,
        {("count", "1"), ("second", "dog"), ("position", "top")},
        {("kind", "bus")},
    ),
    # said twice, counted once; said both ways, counted both ways
    ("some pigs on blue on a blue background on blue", PIGS, {("kind", "pig"), ("background", "blue")}, set()),
    ("a blue and blue blue blue and yellow blue", PIGS, {("background", "blue")}, {("background", "yellow")}),
    ("small large pigs", PIGS, {("kind", "pig"), ("size", "small")}, {("size", "large")}),
    # breaks off
    ("two small", PIGS, {("count", "2"), ("size", "small")}, set()),
    ("two pigs left of", PIGS, {("kind", "pig"), ("count", "2")}, set()),
    # nonsense
    ("", PIGS, set(), set()),
    ("   \n", PIGS, set(), set()),
    ("colourless ideas sleep furiously", PIGS, set(), set()),
    ("<script>alert(1)</script> \u202e 豚", PIGS, set(), set()),
    ("the the the of of on", PIGS, set(), set()),
]


@pytest.mark.parametrize(("caption", "facts", "right", "wrong"), CASES, ids=[c[0][:40] for c in CASES])
def test_hand_written_cases(caption, facts, right, wrong):
    result = check(caption, facts)
    assert claims(result.right) == right
    assert claims(result.wrong) == wrong


def test_recall_counts_only_facts_that_have_a_word():
    result = check("two small sideways pigs left of a mushroom at the top on a blue background", PIGS)
    assert result.recalled == (
        "kind",
        "count",
        "size",
        "orientation",
        "position",
        "background",
        "second",
        "relation",
    )
    assert result.missed == ()
    result = check("an apple", APPLE)
    assert result.recalled == ("kind", "count")
    assert result.missed == ("size", "position", "background")  # all others have values without a word


def test_unknown_words_are_named():
    assert check("a lovely unicorn beside some pigs", PIGS).unknown_words == ("unicorn",)


def test_facts_may_be_a_row_of_the_data_set():
    assert check("two pigs", PIGS.to_dict()) == check("two pigs", PIGS)


def test_anything_but_a_string_is_refused():
    with pytest.raises(TypeError, match="not a string"):
        check(["two pigs"], PIGS)
