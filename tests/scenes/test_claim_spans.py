"""Places of claims, and whose a misbound claim is: hand-written cases."""

import pytest

from hf_captionrl.scenes import Facts, check
from hf_captionrl.scenes.truth_checker import mark_caption
from tests.scenes.examples import PIGS, RED_CAT

FISH = Facts("fish", 3, "large", "upright", "top", "gray", "tree", "above")
APPLE = Facts("apple", 1, "small", "upright", "middle", "white")

# caption, facts, wrong claims as (place in brackets, verdict, owner)
CASES = [
    ("two [large] pigs", PIGS, [("wrong", "")]),
    # Said twice: the second "two" is the wrong one, and so is the second "sideways".
    ("two pigs left of [two] mushrooms", PIGS, [("misbound", "pig")]),
    ("two sideways pigs left of a [sideways] mushroom", PIGS, [("misbound", "pig")]),
    ("[three] pigs left of [three] mushrooms", PIGS, [("wrong", ""), ("wrong", "")]),
    # Here the first one is wrong.
    ("some [upright] pigs left of an upright mushroom", PIGS, [("misbound", "mushroom")]),
    ("two [blue] pigs on a blue background", PIGS, [("misbound", "background")]),
    ("two [red] pigs on a blue background", PIGS, [("wrong", "")]),
    ("a [blue] cat left of a [red] dog", RED_CAT, [("misbound", "dog"), ("misbound", "cat")]),
    ("a [striped] cat", RED_CAT, [("misbound", "background")]),
    ("a cat [on a red background]", RED_CAT, [("misbound", "cat")]),
    ("two pigs [right of] a mushroom", PIGS, [("misbound", "mushroom")]),
    ("a mushroom [left of] two pigs", PIGS, [("misbound", "pig")]),
    ("two pigs [above] a mushroom", PIGS, [("wrong", "")]),
    ("three fish [in the middle] above a tree", FISH, [("misbound", "tree")]),
    ("three fish [at the bottom] above a tree", FISH, [("wrong", "")]),
    ("Two  pigs, [on a very GREEN background]!", PIGS, [("wrong", "")]),
    ("a [pig] on white", APPLE, [("wrong", "")]),
    ("an apple [with] a [tree]", APPLE, None),
    ("<b>an apple</b> İİ [large]", APPLE, [("wrong", "")]),
    ("an apple", APPLE, []),
    ("", APPLE, []),
]


@pytest.mark.parametrize(("marked", "facts", "errors"), CASES, ids=[c[0][:40] for c in CASES])
def test_wrong_claims_stand_where_the_brackets_are(marked, facts, errors):
    caption, places, at = "", [], None
    for letter in marked:
        if letter == "[":
            at = len(caption)
        elif letter == "]":
            places.append((at, len(caption)))
        else:
            caption += letter
    found = [mark for mark in mark_caption(caption, facts) if mark.verdict != "right"]
    if errors is None:  # the brackets are wrong on purpose
        assert [(mark.start, mark.end) for mark in found] != places
        return
    assert [(mark.start, mark.end) for mark in found] == places
    assert [(mark.verdict, mark.owner) for mark in found] == errors


@pytest.mark.parametrize("marked", [case[0] for case in CASES])
def test_all_claims_of_the_checker_are_there(marked):
    caption = marked.replace("[", "").replace("]", "")
    for facts in (PIGS, FISH, APPLE, RED_CAT, PIGS.to_dict()):
        marks, result = mark_caption(caption, facts), check(caption, facts)
        assert sorted(m.claim for m in marks if m.verdict == "right") == sorted(result.right)
        assert sorted(m.claim for m in marks if m.verdict != "right") == sorted(result.wrong)
        for mark in marks:
            assert mark.start is not None
            said = caption[mark.start : mark.end].lower()
            assert all(word in said for word in mark.claim.text.split())
            assert said.startswith(mark.claim.text.split()[0])
            assert said.endswith(mark.claim.text.split()[-1])


def test_full_and_varied_captions_of_the_world_have_every_place():
    from hf_captionrl.scenes import full_caption, load_scenes

    rows = load_scenes(num_train=0, num_validation=0, num_test=60)["test"]
    facts = rows["facts"][:]
    for number, truth in enumerate(facts):
        other = Facts(**facts[(number + 1) % len(facts)])
        assert all(mark.verdict == "right" for mark in mark_caption(full_caption(Facts(**truth)), truth))
        marks = mark_caption(full_caption(other), truth)
        assert None not in [mark.start for mark in marks]


def test_anything_but_a_string_is_refused():
    with pytest.raises(TypeError, match="not a string"):
        mark_caption(None, PIGS)
