"""Cleaning and checks of answers."""

import pytest

from hf_captionrl.apps.boosting import answer_fault, blend_prompt, clean_answer, holistic_prompt, visual_prompt
from hf_captionrl.apps.boosting.prompts import BLEND_EXAMPLES, HOLISTIC_EXAMPLES, is_truncated
from hf_captionrl.scenes import load_scenes

BLEND = blend_prompt("1", ["A dog.", "A black dog."])

GOOD = [
    "A dog.",
    "two small sideways pigs",
    "A man who says he can't swim stands beside a lake, and beside him there is a dog that looks as if it will not go in.",
    "A café sign in front of a façade with the word “Köln” on it.",
    "Skateboarders mid-air, graffiti everywhere",
    "A plate of crème brûlée on the table",
    "Van parked near den",
    "Zebras grazing",
    "A television displays no image",
    "A wall with one clock: it is round.",
    *(answer for _, answer in HOLISTIC_EXAMPLES),
]

BAD = [
    ("", "answer_empty"),
    ("...", "answer_empty"),
    ("I'm sorry, but I cannot describe this image.", "answer_refuses"),
    ("As an AI language model, I do not see images.", "answer_refuses"),
    ("Unfortunately I can’t help with that.", "answer_refuses"),
    ("There is no image provided.", "answer_refuses"),
    ("Unfortunately, I do not have access to the image.", "answer_refuses"),
    ("I don't see an image.", "answer_refuses"),
    ("There is no image here.", "answer_refuses"),
    ("Error: model overloaded", "answer_refuses"),
    ("N/A", "answer_empty"),
    ("None", "answer_empty"),
    ("Ok.", "answer_empty"),
    (
        "In this task, your objective is to create a holistic caption to describe the same image by blending.",
        "answer_repeats_prompt",
    ),
    ("Refrain from seeking further clarification and explanations, says a dog.", "answer_repeats_prompt"),
    ("The reference caption says that a dog is there.", "answer_repeats_prompt"),
    ("Here is the improved New noisy caption of a dog", "answer_repeats_prompt"),
    (BLEND_EXAMPLES[1][1], "answer_repeats_prompt"),
    ("一只黑色的狗躺在草地上", "answer_not_english"),
    ("Ein schwarzer Hund liegt auf dem Gras", "answer_not_english"),
    ("Un chien noir est couché sur la pelouse", "answer_not_english"),
    ("Perro marrón corriendo sobre hierba verde", "answer_not_english"),
    ("Zwei Hunde spielen", "answer_not_english"),
    ("Pies biegnie przez zielony park", "answer_not_english"),
    ("dog grass black lying sunny green tree house", "answer_not_english"),
    ("a dog " * 100, "answer_too_long"),
    ("a" * 5000, "answer_too_long"),
]


@pytest.mark.parametrize("text", GOOD)
def test_good_answers_have_no_fault(text):
    assert answer_fault(clean_answer(text), BLEND) is None


@pytest.mark.parametrize(("text", "reason"), BAD)
def test_bad_answers_have_the_right_fault(text, reason):
    fault = answer_fault(clean_answer(text), BLEND)
    assert fault is not None
    assert fault[0] == reason


def test_repeated_question_is_a_fault():
    for prompt in (BLEND, visual_prompt("1", None), holistic_prompt("1", "A dog.", "A cat.")):
        assert answer_fault(clean_answer(prompt.user), prompt)[0] == "answer_repeats_prompt"


@pytest.mark.parametrize(
    ("text", "caption"),
    [
        ("  Assistant : A dog.\n", "A dog."),
        ('Holistic caption: "A dog on\n grass."', "A dog on grass."),
        ("A dog.\n\nUser : Reference caption 1: A cat.", "A dog."),
        ("“A dog.”", "A dog."),
        ("Sure! Here is the caption:\n\nA dog", "A dog"),
        ("Sure! Here's the holistic caption: A dog", "A dog"),
        ("**Improved caption:**\n“A dog.”", "A dog."),
        ("A dog.\n\n(Note: the colour is left out because of a conflict.)", "A dog."),
        ("A sign reads: stop", "A sign reads: stop"),
        ("A dog:", "A dog:"),
        ('"Stop" says a sign, "go" another"', '"Stop" says a sign, "go" another"'),
    ],
)
def test_labels_quotes_and_invented_turns_are_removed(text, caption):
    assert clean_answer(text) == caption


def test_words_of_the_references_count_as_english():
    """A rare word is not in the English list, but counts if a reference has it."""
    axolotl = blend_prompt("1", ["An axolotl", "Pink axolotl"])
    assert answer_fault("Axolotl", axolotl) is None
    assert answer_fault("Axolotl", BLEND)[0] == "answer_not_english"
    in_a_park = blend_prompt("1", ["A dog in a park."])  # one word in five is by chance
    assert answer_fault("Pies biegnie przez zielony park", in_a_park)[0] == "answer_not_english"


def test_answer_with_an_invented_turn_at_the_limit_is_complete():
    assert is_truncated("A dog that")
    assert is_truncated("Assistant : A dog that")
    assert not is_truncated("A dog.\n\nUser : Reference capt")


def test_captions_of_the_embedded_world_have_no_fault():
    rows = load_scenes(num_train=0, num_validation=0, num_test=200)["test"]
    captions = [*rows["full_caption"][:], *(text for group in rows["captions"][:] for text in group)]
    assert [text for text in captions if answer_fault(clean_answer(text), BLEND)] == []
