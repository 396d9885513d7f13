"""Prompts of the paper, and the hash of a prompt."""

import dataclasses
import hashlib

import pytest

from hf_captionrl.apps.boosting import blend_prompt, holistic_prompt, visual_prompt
from hf_captionrl.apps.boosting.prompts import (
    BLEND_EXAMPLES,
    BLEND_SYSTEM,
    HOLISTIC_EXAMPLES,
    HOLISTIC_SYSTEM,
    VISUAL_PROMPT,
)

# SHA-256, first 16 digits, of each string as it was compared with Appendix A.1, letter by letter and digit by digit.
OF_THE_PAPER = {
    "1430bc0734bddb87": BLEND_SYSTEM,
    "701549ccb672867c": VISUAL_PROMPT,
    "ea875f03e406b81e": HOLISTIC_SYSTEM,
    "c56615d34e27b74a": BLEND_EXAMPLES[0][0],
    "6239c0ba5ee4e7a5": BLEND_EXAMPLES[0][1],
    "58d583c860cfe409": BLEND_EXAMPLES[1][0],
    "379e788e7a56d513": BLEND_EXAMPLES[1][1],
    "3f022be091bfb504": BLEND_EXAMPLES[2][0],
    "5b9b9cb8cae8b8d8": BLEND_EXAMPLES[2][1],
    "1cb7fd13e972133f": HOLISTIC_EXAMPLES[0][0],
    "a19a77119a78875d": HOLISTIC_EXAMPLES[0][1],
    "2df5ec735761a709": HOLISTIC_EXAMPLES[1][0],
    "81de7bb936a1a6f1": HOLISTIC_EXAMPLES[1][1],
    "ec82debdaa5d16b5": HOLISTIC_EXAMPLES[2][0],
    "871ba74f26d52a5d": HOLISTIC_EXAMPLES[2][1],
}


@pytest.mark.parametrize("digest", OF_THE_PAPER)
def test_prompts_equal_the_paper(digest):
    assert hashlib.sha256(OF_THE_PAPER[digest].encode()).hexdigest()[:16] == digest
    assert hashlib.sha256((OF_THE_PAPER[digest] + " ").encode()).hexdigest()[:16] != digest


def test_blend_prompt_has_instruction_examples_and_numbered_references():
    turns = blend_prompt("1", ["A dog.", "A black dog.", "A pet.", "Dog on grass.", "A dog lies."]).turns()
    assert [turn["role"] for turn in turns] == ["system"] + ["user", "assistant"] * 3 + ["user"]
    assert turns[0]["content"] == BLEND_SYSTEM
    assert turns[0]["content"].startswith(
        "You are given a reference set of 5 image captions. Create a holistic caption"
    )
    assert turns[1]["content"].splitlines()[4] == "Reference caption 5: A plate of food on a table."
    assert turns[-1]["content"].splitlines()[1] == "Reference caption 2: A black dog."


def test_blend_prompt_states_the_number_of_references():
    assert "reference set of 2 image captions." in blend_prompt("1", ["a", "b"]).system
    assert "reference set of 1 image caption." in blend_prompt("1", ["a"]).system


def test_holistic_prompt_has_correct_and_noisy_caption():
    prompt = holistic_prompt("1", "A dog.", "A cat on a mat.")
    assert prompt.user == "Correct caption: A dog.\nNew noisy caption: A cat on a mat."
    assert prompt.system == HOLISTIC_SYSTEM
    assert "strictly use information from “Correct caption”" in prompt.system
    assert len(prompt.examples) == len(BLEND_EXAMPLES) == len(HOLISTIC_EXAMPLES) == 3


def test_visual_prompt_is_one_sentence():
    assert visual_prompt("1", None).turns() == [
        {"role": "user", "content": "Briefly describe the content of the image."}
    ]


def test_hash_covers_exactly_what_the_model_reads():
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
def test_blend_prompt_needs_references(references):
    with pytest.raises(ValueError, match="list of at least one caption"):
        blend_prompt("1", references)
