"""Removing shared phrases leaves correct text, and all other characters as they are."""

import pytest

from hf_captionrl.apps.album.phrases import drop_shared, without_loose_end
from tests.apps.album.test_shared_phrases import DOGS


@pytest.mark.parametrize(
    ("caption", "dropped", "triggered"),
    [
        (DOGS[0], "brown on a red sofa", "ohwx dog, brown on a red sofa"),
        (DOGS[1], "on the grass, running", "ohwx dog on the grass, running"),
        (DOGS[2], "with a ball", "ohwx dog with a ball"),
        (DOGS[3], "sleeping", "ohwx dog, sleeping"),
        ("a dog", "a dog", "ohwx dog"),
        ("a man and a dog", "a man", "ohwx dog, a man"),
        ("a man with a dog, smiling", "a man, smiling", "ohwx dog, a man, smiling"),
        ("a dog is sitting in a dog orange car", "sitting in an orange car", "ohwx dog, sitting in an orange car"),
        ("two pigs on a lawn", "two pigs on a lawn", "ohwx dog, two pigs on a lawn"),
        ("a hotdog stand", "a hotdog stand", "ohwx dog, a hotdog stand"),
        ("", "", "ohwx dog"),
    ],
)
def test_dropping_leaves_correct_text(caption, dropped, triggered):
    phrases = ("a photo", "dog")
    assert drop_shared(caption, phrases) == dropped
    assert drop_shared(caption, phrases, trigger="ohwx dog") == triggered


@pytest.mark.parametrize(
    "caption",
    [
        "the clock shows 8:30 , not 8 : 31",
        "il y a un chien et un chat",
        "एक कुत्ता घास पर बैठा है।",
        "a dog (brown) -- looking up",
        "it is what it is, the sun going down",
        "  an two  spaces;stay ",
        "แมวสองตัวบนโซฟา",
    ],
)
def test_caption_without_a_shared_phrase_does_not_change(caption):
    assert drop_shared(caption, ["photo", "狗", "कुत्"]) == caption.strip()
    assert drop_shared(caption, [], trigger="ohwx") == f"ohwx, {caption.strip()}"


@pytest.mark.parametrize(
    ("caption", "phrase", "dropped"),
    [
        # Other languages: the phrase, and spaces and punctuation around it.
        ("एक कुत्ता घास पर बैठा है।", "एक कुत्ता", "घास पर बैठा है।"),
        ("घास पर एक कुत्ता।", "एक कुत्ता", "घास पर।"),
        ("il y a un petit chien", "petit", "il y a un chien"),
        ("un homme, il y a un chien, l'herbe", "il y a un chien", "un homme, l'herbe"),
        ("une photo à 8:30, il y a deux chats", "deux chats", "une photo à 8:30, il y a"),
        ("一只狗,在草地上", "一只狗", "在草地上"),
        ("一只狗在草地上", "一只狗", "一只狗在草地上"),
        ("собака, дом и собака.", "собака", "дом и."),
        # Numbers, punctuation and spaces outside the phrase.
        ("a clock at 8:30, a dog at 9:15", "dog", "a clock at 8:30, at 9:15"),
        ("a clock at 8:30", "8", "a clock at 8:30"),
        ("a 3.5 inch dog", "3", "a 3.5 inch dog"),
        ('a sign that says "dog" on a wall', "dog", "a sign that says on a wall"),
        ("a man (a dog) on a hill", "a dog", "a man on a hill"),
        ("a man (with a dog) on a hill", "a dog", "a man on a hill"),
        ("A man. A dog. A cat.", "a dog", "A man. A cat."),
        ("a man, a dog.", "a dog", "a man."),
        ("a man - a dog - on a hill", "a dog", "a man - on a hill"),
        ("a man/woman  with a dog", "dog", "a man/woman"),
        # Articles and joining words only where something was removed.
        ("a dog looking up", "a dog", "looking up"),
        ("an small apple", "small", "an apple"),
        ("a small hour glass, a orange", "small", "an hour glass, a orange"),
        ("a small unicorn", "small", "a unicorn"),
        ("An old dog", "old", "A dog"),
        ("a dog sitting on a sofa", "dog", "sitting on a sofa"),
        ("a dog sits on a sofa", "dog", "sits on a sofa"),
        ("a dog house", "dog", "a house"),
        ("a man walking dogs in a park", "dogs", "a man walking in a park"),
        ("a man holding a ball on a hill", "a ball", "a man holding on a hill"),
        ("a man looking up at a dog", "dog", "a man looking up"),
        ("there is a dog on the sofa", "dog", "on the sofa"),
        ("a very cute dog on a sofa", "dog", "very cute on a sofa"),
        ("two cats; one dog is white", "dog", "two cats; white"),
        ("a man, a dog and a cat", "a dog", "a man, and a cat"),
        ("my dog, Rex, at 10:15 p.m.", "dog", "Rex, at 10:15 p.m."),
        ("a cat that is red on a sofa", "red", "a cat on a sofa"),
        ("a café with the dog", "dog", "a café"),
    ],
)
def test_only_the_seams_are_repaired(caption, phrase, dropped):
    assert drop_shared(caption, [phrase]) == dropped


def test_truncated_text_has_no_loose_end():
    assert without_loose_end("a dog, sitting on the") == "a dog, sitting"
    assert without_loose_end("and a dog with a, ") == "and a dog"
    assert without_loose_end("il y a un") == "il y a un"
    assert without_loose_end("of the") == ""
