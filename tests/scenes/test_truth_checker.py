"""The truth checker against cases written by hand."""

import pytest

from hf_captionrl.scenes import Facts, check

PIGS = Facts("pig", 2, "small", "sideways", "top", "blue", "mushroom", "left of")
DUCK = Facts("pig", 1, "small", "upright", "middle", "blue", "duck", "left of")
TREES = Facts("tree", 2, "large", "upright", "top", "blue", "cactus", "above")
APPLE = Facts("apple", 1, "large", "upright", "bottom", "gray")


def claims(items):
    return {(c.attribute, c.value) for c in items}


# caption, facts, right claims, wrong claims
CASES = [
    ("two pigs", PIGS, {("kind", "pig"), ("count", "2")}, set()),
    ("Two PIGS.", PIGS, {("kind", "pig"), ("count", "2")}, set()),
    ("some pigs", PIGS, {("kind", "pig")}, set()),
    ("a pig", PIGS, {("kind", "pig")}, {("count", "1")}),
    ("pig", PIGS, {("kind", "pig")}, set()),
    ("three cows", PIGS, set(), {("count", "3")}),
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
    ("some blue pigs", PIGS, {("kind", "pig")}, {("colour", "blue pig")}),
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
    ("pigs alone", PIGS, {("kind", "pig")}, {("second", "")}),
    ("two pigs left of a pig", PIGS, {("kind", "pig"), ("count", "2"), ("relation", "left of")}, {("second", "pig")}),
    ("an apple on its own", APPLE, {("kind", "apple"), ("count", "1"), ("second", "")}, set()),
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
        "two animals left of a thing",
        PIGS,
        {("category of kind", "animal"), ("count", "2"), ("category of second", "thing"), ("relation", "left of")},
        set(),
    ),
    ("some plants", PIGS, set(), {("kind", "plant")}),
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
    assert result.missed == ("size", "position", "background", "second")  # neither orientation nor relation


def test_unknown_words_are_named():
    assert check("a zebra beside some pigs", PIGS).unknown_words == ("zebra",)


def test_facts_may_be_a_row_of_the_data_set():
    assert check("two pigs", PIGS.to_dict()) == check("two pigs", PIGS)


def test_anything_but_a_string_is_refused():
    with pytest.raises(TypeError, match="not a string"):
        check(["two pigs"], PIGS)
