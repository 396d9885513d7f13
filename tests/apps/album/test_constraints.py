"""Constraints, shared phrases and triggers: what is delivered is what was checked and compared."""

import pytest
import torch

from hf_captionrl.apps.album.album import describe_album
from hf_captionrl.apps.album.options import AlbumSettings
from hf_captionrl.apps.album.phrases import check_candidates, script_of, with_word
from tests.tolerances import assert_close


def test_captions_meet_required_words_forbidden_words_and_length(scorer, images):
    texts = [["a red pig", "a very small pig in the corner"], ["a red cow", "a cow"], ["a dog, sitting on a red sofa"]]
    settings = {"captions": texts, "diagnose_only": False}
    found = describe_album(images, None, scorer, **settings, require=["red"])
    assert found.captions == ["a red pig", "a red cow", "a dog, sitting on a red sofa"]
    found = describe_album(images, None, scorer, **settings, forbid=["Red"])
    assert found.captions[:2] == ["a very small pig in the corner", "a cow"]
    found = describe_album(images, None, scorer, **settings, max_characters=17)
    assert all(0 < len(caption) <= 17 for caption in found.captions)
    assert found.captions[2] == "a dog, sitting"


@pytest.mark.parametrize(
    ("word", "texts", "expected"),
    [
        ("cat", ["a cat", "a Cat.", "cats", "concatenate"], [True, True, False, False]),
        ("猫", ["一只猫坐着", "一只狗"], [True, False]),
        ("แมว", ["มีแมวนั่งอยู่", "หมา"], [True, False]),
        ("ねこ", ["このねこは", "いぬ"], [True, False]),
        ("кот", ["чёрный кот", "который"], [True, False]),
    ],
)
def test_words_are_found_in_scripts_with_and_without_spaces(word, texts, expected):
    assert with_word(texts, word).tolist() == expected


def test_broken_constraint_is_a_problem(scorer, images):
    texts = [["a red pig"], ["a cow"], ["a dog"]]
    found = describe_album(images, None, scorer, captions=texts, diagnose_only=False, require=["red"])
    assert ["constraint" in image.problems for image in found.images] == [False, True, True]
    found = describe_album(images, None, scorer, captions=[mine[0] for mine in texts], max_characters=5)
    assert ["constraint" in image.problems for image in found.images] == [True, False, False]


PHOTOS = [
    ["a photo of a dog on a red sofa, sleeping", "a photo of a dog beside a red wall"],
    ["a photo of a dog near a small blue house, running"],
    ["a photo of a dog with a ball, barking at people"],
]


@pytest.mark.parametrize("choice", ["assignment", "margin", "first"])
def test_constraints_and_ranks_are_those_of_the_edited_captions(scorer, images, choice):
    settings = {"diagnose_only": False, "choice": choice, "copy_threshold": 2}
    found = describe_album(
        images, None, scorer, captions=PHOTOS, drop_shared=True, trigger="ohwx dog", max_characters=40, **settings
    )
    assert all(text.startswith("ohwx dog") and len(text) <= 40 for text in found.captions)
    assert found.shared[0].shared == ("a photo of a dog",)
    assert all("constraint" not in image.problems for image in found.images)
    # What is measured is what is written: a diagnosis of the texts finds the same ranks and margins.
    again = describe_album(images, None, scorer, captions=found.captions, copy_threshold=2)
    for first, second in zip(found.images, again.images, strict=True):
        assert (first.rank, first.confused_with, first.is_distinct) == (
            second.rank,
            second.confused_with,
            second.is_distinct,
        )
        assert_close(first.margin, second.margin, dtype=torch.float32, magnitude=1)


def test_shared_phrases_with_a_required_word_stay(scorer, images):
    settings = {"diagnose_only": False, "drop_shared": True, "copy_threshold": 2}
    found = describe_album(images, None, scorer, captions=PHOTOS, require=["DOG"], **settings)
    assert all(text in mine for text, mine in zip(found.captions, PHOTOS, strict=True))
    assert all("constraint" not in image.problems for image in found.images)
    without = describe_album(images, None, scorer, captions=PHOTOS, **settings)
    assert not any("dog" in text for text in without.captions)


def test_texts_that_become_equal_are_not_distinct_captions(scorer, images):
    texts = [["a dog", "a red dog"], ["the dog", "a blue dog"], ["dog", "a green dog"]]
    found = describe_album(images, None, scorer, captions=texts, diagnose_only=False, trigger="x", drop_shared=True)
    assert sorted(found.captions) == ["x, blue", "x, green", "x, red"]


def test_trigger_in_another_script_does_not_count_as_a_script(scorer, images):
    texts = ["два кота", "кот", "кит"]
    found = describe_album(images, None, scorer, captions=texts, diagnose_only=False, trigger="ohwx animal")
    assert found.captions == [f"ohwx animal, {text}" for text in texts]
    assert all("constraint" not in image.problems for image in found.images)


def test_copies_in_different_folders_get_one_caption(scorer, images):
    groups = ["dogs", "dogs", "dogs", "cats", "cats", "cats", "cats"]
    flipped = [image.transpose(0) for image in images]
    album = [*images, images[0], *flipped]
    texts = [*(f"a photo of a dog, {place}" for place in ("asleep", "awake", "alone"))]
    texts += [[], *(f"a drawing of a cat, {place}" for place in ("asleep", "awake", "alone"))]
    found = describe_album(
        album, None, scorer, captions=texts, groups=groups, diagnose_only=False, copy_threshold=2, drop_shared=True
    )
    assert found.copies == [(0, 3)]
    assert found.captions[3] == found.captions[0] == "asleep"
    assert found.captions[5] == "awake"


def test_first_choice_takes_the_first_candidate_that_meets_the_constraints(scorer, images):
    texts = [["a very small pig in a corner", "a pig", "a red pig"], ["", "a cow"], ["a very large dog"]]
    settings = {"captions": texts, "diagnose_only": False, "choice": "first"}
    found = describe_album(images, None, scorer, forbid=["very"], **settings)
    assert found.captions == ["a pig", "a cow", "a very large dog"]
    assert found.images[2].problems[-1] == "constraint"


def test_script_of_existing_captions_is_kept(scorer, images):
    texts = [["два кота", "two cats"], ["three cats"], ["four cats"]]
    allowed = check_candidates([["two cats", "один кот"], *texts[1:]], [["кот"], [], []], AlbumSettings())
    assert allowed.tolist() == [False, True, True, True]
    assert script_of("два кота, 2") == "CYRILLIC"
    assert script_of("2 + 2") is None
    assert script_of("2 é") == "LATIN"
    assert script_of("2 x") == "LATIN"
    assert script_of("猫 is猫猫") == "CJK"
    assert script_of("is 猫") == "LATIN"
    assert script_of("\ue000 2") is None
