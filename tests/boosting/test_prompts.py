"""The paper's prompts, and what identifies a question."""

import dataclasses

import pytest

from hf_captionrl.boosting import blend_prompt, holistic_prompt, visual_prompt
from hf_captionrl.boosting.prompts import BLEND_EXAMPLES, BLEND_SYSTEM, HOLISTIC_EXAMPLES, HOLISTIC_SYSTEM


def test_the_blend_prompt_is_instruction_three_examples_and_the_numbered_references():
    turns = blend_prompt("1", ["A dog.", "A black dog.", "A pet.", "Dog on grass.", "A dog lies."]).turns()
    assert [turn["role"] for turn in turns] == ["system"] + ["user", "assistant"] * 3 + ["user"]
    assert turns[0]["content"] == BLEND_SYSTEM
    assert turns[0]["content"].startswith(
        "You are given a reference set of 5 image captions. Create a holistic caption"
    )
    assert turns[1]["content"].splitlines()[4] == "Reference caption 5: A plate of food on a table."
    assert turns[-1]["content"].splitlines()[1] == "Reference caption 2: A black dog."


def test_the_number_of_references_is_the_data_s():
    assert "reference set of 2 image captions." in blend_prompt("1", ["a", "b"]).system
    assert "reference set of 1 image caption." in blend_prompt("1", ["a"]).system


def test_the_holistic_prompt_names_the_correct_and_the_noisy_caption():
    prompt = holistic_prompt("1", "A dog.", "A cat on a mat.")
    assert prompt.user == "Correct caption: A dog.\nNew noisy caption: A cat on a mat."
    assert prompt.system == HOLISTIC_SYSTEM
    assert "strictly use information from “Correct caption”" in prompt.system
    assert len(prompt.examples) == len(BLEND_EXAMPLES) == len(HOLISTIC_EXAMPLES) == 3


def test_the_vision_model_is_told_one_sentence():
    assert visual_prompt("1", None).turns() == [
        {"role": "user", "content": "Briefly describe the content of the image."}
    ]


def test_the_hash_is_of_everything_that_is_read_and_of_nothing_else():
    prompt = blend_prompt("1", ["A dog."])
    same = dataclasses.replace(prompt, attempt=2, image=object())
    others = [
        dataclasses.replace(prompt, **change)
        for change in ({"user": "x"}, {"system": "x"}, {"image_id": "2"}, {"stage": "visual"}, {"examples": ()})
    ]
    assert same.hash == prompt.hash
    assert len(prompt.hash) == 16
    assert len({prompt.hash, *(other.hash for other in others)}) == 6


@pytest.mark.parametrize("references", [[], "A dog."])
def test_without_references_there_is_nothing_to_blend(references):
    with pytest.raises(ValueError, match="list of one caption or more"):
        blend_prompt("1", references)
