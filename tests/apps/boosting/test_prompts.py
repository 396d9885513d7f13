"""Prompts of the paper, and cleaning and checks of answers."""

import hashlib
import itertools

import pytest

from hf_captionrl.apps.boosting.prompts import (
    BLEND_EXAMPLES,
    BLEND_SYSTEM,
    HOLISTIC_EXAMPLES,
    HOLISTIC_SYSTEM,
    VISUAL_PROMPT,
    blend_prompt,
    holistic_prompt,
    read_answer,
    visual_prompt,
)
from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.prompts import Truncated

# SHA-256, first 16 digits, of each string as it was compared with Appendix A.1, letter by letter and digit by digit.
OF_THE_PAPER = """
    1430bc0734bddb87 701549ccb672867c ea875f03e406b81e c56615d34e27b74a 6239c0ba5ee4e7a5 58d583c860cfe409
    379e788e7a56d513 3f022be091bfb504 5b9b9cb8cae8b8d8 1cb7fd13e972133f a19a77119a78875d 2df5ec735761a709
    81de7bb936a1a6f1 ec82debdaa5d16b5 871ba74f26d52a5d
""".split()


def test_prompts_equal_the_paper():
    texts = [BLEND_SYSTEM, VISUAL_PROMPT, HOLISTIC_SYSTEM, *itertools.chain(*BLEND_EXAMPLES, *HOLISTIC_EXAMPLES)]
    assert [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts] == OF_THE_PAPER


def test_blend_prompt_has_instruction_examples_and_numbered_references():
    turns = blend_prompt("1", ["A dog.", "A black dog.", "A pet.", "Dog on grass.", "A dog lies."]).turns()
    assert [turn["role"] for turn in turns] == ["system"] + ["user", "assistant"] * 3 + ["user"]
    assert turns[0]["content"] == BLEND_SYSTEM
    assert turns[1]["content"].splitlines()[4] == "Reference caption 5: A plate of food on a table."
    assert turns[-1]["content"].splitlines()[1] == "Reference caption 2: A black dog."
    assert "reference set of 2 image captions." in blend_prompt("1", ["a", "b"]).system
    assert "reference set of 1 image caption." in blend_prompt("1", ["a"]).system
    for references in ([], "A dog."):
        with pytest.raises(ValueError, match="references"):
            blend_prompt("1", references)


def test_holistic_prompt_has_correct_and_noisy_caption():
    prompt = holistic_prompt("1", "A dog.", "A cat on a mat.")
    assert prompt.user == "Correct caption: A dog.\nNew noisy caption: A cat on a mat."
    assert prompt.system == HOLISTIC_SYSTEM
    assert len(prompt.examples) == len(BLEND_EXAMPLES) == len(HOLISTIC_EXAMPLES) == 3


BLEND = blend_prompt("1", ["A dog.", "A black dog."])

GOOD = [
    "two small sideways pigs",
    "A man who says he can't swim stands beside a lake, and beside him there is a dog that looks as if it will not go in.",
    "A café sign in front of a façade with the word “Köln” on it.",
    "Skateboarders mid-air, graffiti everywhere",
    "Van parked near den",
    "A television displays no image",
    "A wall with one clock: it is round.",
    *(answer for _, answer in HOLISTIC_EXAMPLES),
]

BAD = {
    "answer_empty": ["...", "N/A"],
    "answer_refuses": [
        "I'm sorry, but I cannot describe this image.",
        "As an AI language model, I do not see images.",
        "Unfortunately I can’t help with that.",
        "Unfortunately, I do not have access to the image.",
        "There is no image provided.",
        "There is no image here.",
        "Error: model overloaded",
    ],
    "answer_repeats_prompt": [
        "In this task, your objective is to create a holistic caption to describe the same image by blending.",
        "The reference caption says that a dog is there.",
        BLEND_EXAMPLES[1][1],
        BLEND.user,
    ],
    "answer_too_long": ["a dog " * 100, "a" * 5000],
}


def test_good_and_bad_answers():
    assert {text: fault for text in GOOD if (fault := read_answer(text, BLEND)[1])} == {}
    scenes = load_scenes(num_train=0, num_validation=0, num_test=200)["test"]
    captions = [*scenes["full_caption"][:], *(text for group in scenes["captions"][:] for text in group)]
    assert [text for text in captions if read_answer(text, BLEND)[1]] == []
    for reason, texts in BAD.items():
        for text in texts:
            _, fault = read_answer(text, BLEND)
            assert fault is not None, text
            assert fault[0] == reason, text
    for prompt in (visual_prompt("1", None), holistic_prompt("1", "A dog.", "A cat.")):
        assert read_answer(prompt.user, prompt)[1][0] == "answer_repeats_prompt"


CLEANED = {
    "  Assistant : A dog.\n": "A dog.",
    'Holistic caption: "A dog on\n grass."': "A dog on grass.",
    "A dog.\n\nUser : Reference caption 1: A cat.": "A dog.",
    "“A dog.”": "A dog.",
    "Sure! Here is the caption:\n\nA dog": "A dog",
    "Sure! Here's the holistic caption: A dog": "A dog",
    "**Improved caption:**\n“A dog.”": "A dog.",
    "A dog.\n\n(Note: the colour is left out because of a conflict.)": "A dog.",
    "A sign reads: stop": "A sign reads: stop",
    "A dog:": "A dog:",
    '"Stop" says a sign, "go" another"': '"Stop" says a sign, "go" another"',
}


def test_labels_quotes_and_invented_turns_are_removed():
    assert {text: read_answer(text, BLEND)[0] for text in CLEANED} == CLEANED


def test_answer_with_an_invented_turn_at_the_limit_is_complete():
    assert read_answer(Truncated("Assistant : A dog that"), BLEND)[1][0] == "answer_truncated"
    assert read_answer(Truncated("A dog.\n\nUser : Reference capt"), BLEND) == ("A dog.", None)
