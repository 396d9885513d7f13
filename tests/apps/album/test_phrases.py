"""What captions share, and captions without it."""

import pytest

from hf_captionrl.apps.album.phrases import drop_shared, shared_of_groups, shared_phrases, without_loose_end

DOGS = [
    "a photo of a brown dog on a red sofa",
    "a photo of a dog on the grass, running",
    "A photo of the dog with a ball",
    "a photo of a sleeping dog",
]


def test_shared_phrases_by_hand():
    assert shared_phrases(DOGS) == ("a photo", "dog")
    assert shared_phrases([*DOGS, "a cat"]) == ()
    assert shared_phrases([*DOGS, "a cat"], min_share=0.8) == ("a photo", "dog")
    # The longest phrase stands for its parts; function words alone are not shared facts.
    assert shared_phrases(["the old red barn in snow", "the old red barn in fog", "the old red barn"]) == (
        "the old red barn",
    )
    assert shared_phrases(["on the sea", "on the hill", "on the roof"]) == ()
    # Punctuation ends a phrase.
    assert shared_phrases(["a dog, red ball"] * 3) == ("a dog", "red ball")
    assert shared_phrases(DOGS[:2]) == (), "two captions are not a set"


def test_shared_phrases_of_other_scripts_are_whole_words():
    hindi = ["एक कुत्ता घास पर है", "एक कुत्ता सोफ़े पर है", "एक कुत्ता पानी में है"]
    assert shared_phrases(hindi) == ("एक कुत्ता", "है")
    assert shared_phrases(["at 8:30 am", "at 8:30 pm", "until 8:30"]) == ("8:30",)
    assert shared_phrases(["一只狗在草地上", "一只狗在沙发上", "一只狗在水里"]) == ()


def test_phrases_of_groups():
    captions = [*DOGS, "a cat on a mat", "a cat on a hat", "", "a cat on a bat"]
    shared = shared_of_groups(captions, ["dogs"] * 4 + ["cats"] * 4, 0.9)
    assert shared == {"dogs": ("a photo", "dog"), "cats": ("a cat",)}


@pytest.mark.parametrize(
    ("caption", "dropped", "triggered"),
    [
        (DOGS[0], "a brown dog on a red sofa", "ohwx dog, a brown dog on a red sofa"),
        (DOGS[1], "on the grass, running", "ohwx dog on the grass, running"),
        (DOGS[3], "a sleeping dog", "ohwx dog, a sleeping dog"),
        ("a man and a dog", "a man", "a man and ohwx dog"),
        ("a man with a dog, smiling", "a man, smiling", "a man with ohwx dog, smiling"),
        ("a dog is sitting in a car", "sitting in a car", "ohwx dog is sitting in a car"),
        ("there is a dog on the sofa", "on the sofa", "there is ohwx dog on the sofa"),
        ("a dog house", "a dog house", "ohwx dog, a dog house"),
        ("a photo, a dog", "a photo, a dog", "ohwx dog"),
        ("a hotdog stand", "a hotdog stand", "ohwx dog, a hotdog stand"),
        ("", "", "ohwx dog"),
    ],
)
def test_dropping_leaves_correct_text(caption, dropped, triggered):
    phrases = ("a photo", "dog")
    assert drop_shared(caption, phrases) == dropped
    assert drop_shared(caption, phrases, trigger="ohwx dog") == triggered


def test_caption_without_a_shared_phrase_does_not_change():
    for caption in ("  the clock shows  8:30 , not 8 : 31", "il y a un chien et un chat", "एक कुत्ता घास पर बैठा है।"):
        assert drop_shared(caption, ["photo", "狗", "कुत्"]) == caption.strip()
        assert drop_shared(caption, [], trigger="ohwx") == f"ohwx, {caption.strip()}"


@pytest.mark.parametrize(
    ("caption", "phrase", "dropped"),
    [
        # Other languages: the phrase, and spaces and punctuation around it.
        ("एक कुत्ता घास पर बैठा है।", "एक कुत्ता", "घास पर बैठा है।"),
        ("un homme, il y a un chien, l'herbe", "il y a un chien", "un homme, l'herbe"),
        ("一只狗在草地上", "一只狗", "一只狗在草地上"),
        ("собака, дом и собака.", "собака", "дом и."),
        # Numbers, punctuation and spaces outside the phrase.
        ("a clock at 8:30, a dog at 9:15", "dog", "a clock at 8:30, at 9:15"),
        ("a clock at 8:30", "8", "a clock at 8:30"),
        ("A man. A dog. A cat.", "a dog", "A man. A cat."),
        ("a man, a dog.", "a dog", "a man."),
        # Articles and joining words only where something was removed.
        ("a dog sits on a sofa", "dog", "sits on a sofa"),
        ("a man walking dogs in a park", "dogs", "a man walking in a park"),
        ("a very cute dog on a sofa", "dog", "a very cute dog on a sofa"),
        ("three large cars above a cow", "cow", "three large cars"),
        ("a cat behind a table, sleeping", "table", "a cat, sleeping"),
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
