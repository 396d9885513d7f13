"""The truth checker and the places of claims against cases written by hand."""

import itertools

import pytest

from hf_captionrl.scenes import Facts, check
from hf_captionrl.scenes.truth_checker import mark_caption

PIGS = Facts("pig", 2, "small", "sideways", "top", "blue", "mushroom", "left of")
COLOURED = {"colour": "red", "second_colour": "blue", "pattern": "striped"}
RED_CAT = Facts("cat", 1, "large", "upright", "top", "white", "dog", "left of", **COLOURED)
DUCK = Facts("pig", 1, "small", "upright", "middle", "blue", "duck", "left of")
TREES = Facts("tree", 2, "large", "upright", "top", "blue", "cactus", "above")
APPLE = Facts("apple", 1, "large", "upright", "bottom", "gray")
NIGHT = Facts("dog", 2, "small", "upright", "middle", "green", weather="rain", time="night")


def claims(items):
    return {f"{c.attribute}:{c.value}" for c in items}


def listed(text):
    return set(filter(None, text.split(", ")))


# caption, facts, right claims, wrong claims
CASES = [
    ("two pigs", PIGS, "kind:pig, count:2", ""),
    ("some pigs", PIGS, "kind:pig", ""),
    ("a pair of little pigs", PIGS, "kind:pig, count:2, size:small", ""),
    ("some pigs on their sides", PIGS, "kind:pig, orientation:sideways", ""),
    ("some pigs against a grey backdrop", PIGS, "kind:pig", "background:gray"),
    ("pigs to the left of a mushroom", PIGS, "kind:pig, second:mushroom, relation:left of", ""),
    ("a mushroom left of some pigs", PIGS, "kind:pig, second:mushroom", "relation:left of"),
    ("a sideways mushroom", PIGS, "second:mushroom", "second orientation:sideways"),
    ("pigs alone", PIGS, "kind:pig", "alone:"),
    ("an apple on its own", APPLE, "kind:apple, count:1, alone:", ""),
    # a category is true, and says little
    ("some animals", PIGS, "category of kind:animal", ""),
    (
        "two animals left of a plant",
        PIGS,
        "category of kind:animal, count:2, category of second:plant, relation:left of",
        "",
    ),
    # a category of both objects means the second where the noun after it is the main one's
    ("an animal right of a pig", DUCK, "category of second:animal, kind:pig, count:1, relation:left of", ""),
    ("two plants above a tree", TREES, "category of kind:plant, count:2, relation:above", "second:tree"),
    # colours belong to the thing that they stand before
    (
        "a red cat left of a blue dog",
        RED_CAT,
        "kind:cat, count:1, colour:red, second:dog, second_colour:blue, relation:left of",
        "",
    ),
    ("a gold kitten", RED_CAT, "kind:cat, count:1", "colour:golden"),
    ("a blue cat with a red dog", RED_CAT, "kind:cat, count:1, second:dog", "colour:blue, second_colour:red"),
    ("a red apple", APPLE, "kind:apple, count:1, natural colour:red", ""),
    ("on a dotted white background, a nice cat", RED_CAT, "kind:cat, count:1, background:white", "pattern:dotted"),
    ("two puppies in the rain at night", NIGHT, "kind:dog, count:2, time:night, weather:rain", ""),
    # a wrong noun in first place still means the main group
    ("a bus with a dog at the top", RED_CAT, "count:1, second:dog, position:top", "kind:bus"),
    # said twice, counted once; said both ways, counted both ways
    ("some pigs on blue on a blue background on blue", PIGS, "kind:pig, background:blue", ""),
    ("a blue and blue blue blue and yellow blue", PIGS, "background:blue", "background:yellow"),
    # breaks off
    ("two small", PIGS, "count:2, size:small", ""),
    # nonsense
    ("", PIGS, "", ""),
    ("<script>alert(1)</script> \u202e 豚", PIGS, "", ""),
]


@pytest.mark.parametrize(("caption", "facts", "right", "wrong"), CASES, ids=[c[0][:40] for c in CASES])
def test_hand_written_cases(caption, facts, right, wrong):
    result = check(caption, facts)
    assert claims(result.right) == listed(right)
    assert claims(result.wrong) == listed(wrong)


def test_recall_counts_only_facts_that_have_a_word():
    result = check("two small sideways pigs left of a mushroom at the top on a blue background", PIGS)
    assert result.recalled == tuple("kind count size orientation position background second relation".split())
    assert result.missed == ()
    assert check("a lovely unicorn beside some pigs", PIGS.to_dict()).unknown_words == ("unicorn",)
    result = check("an apple", APPLE)
    assert result.recalled == ("kind", "count")
    assert result.missed == ("size", "position", "background")  # all others have values without a word


# --- Places of claims ---

FISH = Facts("fish", 3, "large", "upright", "top", "gray", "tree", "above")
ON_WHITE = Facts("apple", 1, "small", "upright", "middle", "white")

# caption with wrong claims in brackets, facts
PLACES = [
    # Said twice: the second "two" is the wrong one, and so is the second "sideways".
    ("two pigs left of [two] mushrooms", PIGS),
    ("two sideways pigs left of a [sideways] mushroom", PIGS),
    ("[three] pigs left of [three] mushrooms", PIGS),
    # Here the first one is wrong.
    ("some [upright] pigs left of an upright mushroom", PIGS),
    ("two [blue] pigs on a blue background", PIGS),
    ("a [blue] cat left of a [red] dog", RED_CAT),
    ("a [striped] cat", RED_CAT),
    ("two pigs [right of] a mushroom", PIGS),
    ("a mushroom [left of] two pigs", PIGS),
    ("two pigs [above] a mushroom", PIGS),
    ("three fish [in the middle] above a tree", FISH),
    ("Two  pigs, [on a very GREEN background]!", PIGS),
    ("<b>an apple</b> İİ [large]", ON_WHITE),
    ("", ON_WHITE),
]


@pytest.mark.parametrize(("marked", "facts"), PLACES, ids=[c[0][:40] for c in PLACES])
def test_wrong_claims_stand_where_the_brackets_are(marked, facts):
    caption, places, at = "", [], None
    for letter in marked:
        if letter == "[":
            at = len(caption)
        elif letter == "]":
            places.append((at, len(caption)))
        else:
            caption += letter
    wrong = [mark for mark in mark_caption(caption, facts) if mark.verdict == "wrong"]
    assert [(mark.start, mark.end) for mark in wrong] == places


def test_all_claims_of_the_checker_are_there():
    for (marked, *_), facts in itertools.product(PLACES, (PIGS, FISH, ON_WHITE, RED_CAT, PIGS.to_dict())):
        caption = marked.replace("[", "").replace("]", "")
        marks, result = mark_caption(caption, facts), check(caption, facts)
        assert sorted(m.claim for m in marks if m.verdict == "right") == sorted(result.right)
        assert sorted(m.claim for m in marks if m.verdict != "right") == sorted(result.wrong)
        for mark in marks:
            assert mark.start is not None
            said = caption[mark.start : mark.end].lower()
            assert all(word in said for word in mark.claim.text.split())
            assert said.startswith(mark.claim.text.split()[0])
            assert said.endswith(mark.claim.text.split()[-1])
