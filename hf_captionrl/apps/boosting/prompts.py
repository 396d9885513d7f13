"""Prompts of the paper, and cleaning and checks of answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hf_captionrl.data.columns import clean_caption
from hf_captionrl.utils.prompts import Prompt, Truncated

# --- Prompts and worked examples of the paper, verbatim --------------------------------------------------------------
# Source: Gaur et al. 2024, "No Detail Left Behind: Revisiting Self-Retrieval for Fine-Grained Image Captioning",
# Appendix A.1. Differs from it by: the number of references in the first sentence is that of the data (5 in the
# paper), and turns are separated by one line break, which the printed paper does not show.

STAGES = ("blend", "visual", "holistic")  # BlendCap, VisualCap, HolisticCap: in this order

BLEND_SYSTEM = (
    "You are given a reference set of 5 image captions. Create a holistic caption to describe the same image by "
    "incorporating relevant information from all the reference captions. Ensure that the generated caption minimizes "
    "redundancy by excluding overlapping information found in the reference set. Do not include additional information "
    "and adjectives other than what is given in reference set. Stop after the first period and do not ask any additional "
    "questions. Just complete the text. Three examples are shown below :"
)
VISUAL_PROMPT = "Briefly describe the content of the image."
HOLISTIC_SYSTEM = (
    "In this task, your objective is to improve “Correct caption” by incorporating any additional information present in "
    "“New caption”. If there are conflicting details between the two captions regarding the objects or their attributes, "
    "strictly use information from “Correct caption”. “New caption” can have incorrect information sometimes but “Correct "
    "caption” will always be correct. The focus is on transferring missing information, including adjectives and nouns, "
    "from “New caption” to “Correct caption”. Refrain from seeking further clarification and explanations; simply "
    "generate the caption. Three examples are shown below :"
)


def _references(captions: Sequence[str]) -> str:
    return "\n".join(f"Reference caption {number}: {text}" for number, text in enumerate(captions, start=1))


def _pair(correct: str, new: str) -> str:
    return f"Correct caption: {correct}\nNew noisy caption: {new}"


# Worked examples: what the user says, and the answer.
BLEND_EXAMPLES: tuple[tuple[str, str], ...] = tuple(
    (_references(references), answer)
    for *references, answer in (
        (
            "A plate full of food with an assortment of food on it.",
            "There is meat and vegetables on a white and brown plate.",
            "A plate on a table that has food on it.",
            "A plate with some steak, carrots, and sliced fried potatoes.",
            "A plate of food on a table.",
            "A white and brown plate on a table with an assortment of steak, carrots, sliced fried potatoes, and "
            "vegetables.",
        ),
        (
            "A park bench on the side of a lake.",
            "A lone bench sits atop a hill looking over the river.",
            "A wooden bench sitting on top of a sandy beach.",
            "A bench on a river bank in the countryside.",
            "A wood bench is sitting in front of a river.",
            "A wooden bench sits atop a hill in front of a river overlooking the water and the surrounding "
            "countryside.",
        ),
        (
            "A bathroom with a toilet sitting next to a sink.",
            "A white sink and toilet in a room.",
            "A bathroom with a mirror, sinks, toilet and toilet roll.",
            "A bathroom that has a toilet sink and mirror in it.",
            "A bathroom with a toilet next to a sink.",
            "A bathroom with a toilet next to a white sink, mirror and toilet roll.",
        ),
    )
)
# The paper prints three "for brevity".
HOLISTIC_EXAMPLES: tuple[tuple[str, str], ...] = tuple(
    (_pair(correct, new), answer)
    for correct, new, answer in (
        (
            "A man reaches up with a tennis racquet to hit an approaching ball in a tennis court.",
            "In this image, a woman is playing tennis on a purple court. She is wearing a white shirt and a blue "
            "short, and she is holding a tennis racket. The tennis ball is in the air as she prepares to hit it "
            "with her racket.",
            "A man wearing a white shirt and blue shorts reaches up with a tennis racquet to hit an approaching "
            "ball in a purple tennis court.",
        ),
        (
            "A white fire hydrant sits in front of an old couch on a sidewalk in front of a house.",
            "In this image, there is a black fire hydrant sitting on the sidewalk in front of a brick building. "
            "The fire hydrant is positioned next to a couch, which is placed on the sidewalk in front of the "
            "building.",
            "A white fire hydrant sits in front of an old couch on a sidewalk in front of a brick house.",
        ),
        (
            "A young boy poses next to a wall with writing on it, smiling and holding bags.",
            "In this image, a young girl is sitting in front of a graffiti-covered wall, wearing a red shirt. She"
            " is holding a box of crayons and smiling at the camera.",
            "A young boy wearing a red shirt poses next to a graffiti-covered wall with writing on it. He is "
            "holding bags of crayons and smiling at the camera.",
        ),
    )
)


def blend_prompt(image_id: str, references: Sequence[str]) -> Prompt:
    """Ask for the BlendCap of an image."""
    if isinstance(references, str) or not references:
        raise ValueError(f"references of image {image_id!r} are {references!r}. Pass a list of at least one caption.")
    number = f"{len(references)} image caption" + "s" * (len(references) > 1)
    system = BLEND_SYSTEM.replace("5 image captions", number)
    return Prompt("blend", image_id, _references(references), system, BLEND_EXAMPLES)


def visual_prompt(image_id: str, image: Any) -> Prompt:
    """Ask for the VisualCap of an image."""
    return Prompt("visual", image_id, VISUAL_PROMPT, image=image)


def holistic_prompt(image_id: str, blend: str, visual: str) -> Prompt:
    """Ask for the HolisticCap of an image."""
    return Prompt("holistic", image_id, _pair(blend, visual), HOLISTIC_SYSTEM, HOLISTIC_EXAMPLES)


# --- Cleaning and checks of answers, by word lists and counts --------------------------------------------------------
# The checks find the common formal errors of language models, not whether an answer is true; see `conflicts.py`.

MAX_ANSWER_WORDS = 120  # the paper's VisualCaps have 51 on average, standard deviation 14 (Table 9)

_LABEL = re.compile(
    r"^\W*(?:assistant|answer|caption|(?:holistic|blended|improved|correct|final|generated)\s+caption)\s*:[\s*]*", re.I
)
# "Sure! Here is the caption:", on a separate line or before the caption on the same line.
_PREAMBLE = re.compile(
    r"^\W*(?:[^\n]*:[ \t*]*\n|(?:(?:sure|certainly|of course|absolutely|okay|ok)\b[^:\n]{0,20})?here(?:['’]s| is)"
    r"[^:\n]{0,60}\b(?:caption|description|answer|sentence)\b[^:\n]{0,40}:)\s*(?=\S)",
    re.I,
)
# A model without a stop token continues with another example of the prompt; a chat model may add an explanation.
_NEXT_TURN = re.compile(
    r"\s(?:\*\*)?(?:User|Human|Assistant|Reference caption \d+|Correct caption)(?:\*\*)?\s*:.*|\n\W*(?:Note|Explanation)\b[^\n]{0,20}:.*",
    re.S,
)
_REFUSAL = re.compile(
    r"\b(?:i['’]?m sorry|i am sorry|i apologi[sz]e|as an ai\b|as a language model|i (?:cannot|can['’]?t|can not|am unable|"
    r"am not able|won['’]?t|will not)\b|i['’]m (?:unable|not able)|unable to (?:view|see|process|assist|describe)|"
    r"(?<![\"'“‘])\bi (?:do not|don['’]?t|did not|didn['’]?t) (?:have|see)\b|there (?:is|was|seems to be|appears to be) no image\b|"
    r"(?:no|without (?:an?|the)) image (?:was |is |has been )?(?:provided|attached|given|available|here\b)|"
    r"^\W*(?:error|exception|traceback|warning)\b[^:]{0,40}:)",
    re.I,
)
_REFUSAL_WITHIN = 120  # refusals come first; a quoted "I can't" late in a long caption is not a refusal
_PROMPT_MARKS = re.compile(
    "reference (?:caption|set)|correct caption|new (?:noisy )?caption|system prompt|three examples are shown|"
    "briefly describe the content|holistic caption to describe the same image"
)
_NOTHING = frozenset("none null nil n/a na nan nothing unknown empty error ok okay yes no caption answer".split())


def read_answer(answer: str | Truncated, prompt: Prompt) -> tuple[str, tuple[str, str] | None]:
    """The caption in an answer, and the reason and detail of its first fault, if it has one; lists and limits are above.

    The caption is one line, without a preamble, quotes, or invented further turns.
    """
    is_truncated = isinstance(answer, Truncated)
    body = _PREAMBLE.sub("", _LABEL.sub("", (answer.text if isinstance(answer, Truncated) else answer).strip()))
    text = clean_caption(_NEXT_TURN.sub("", _LABEL.sub("", body)))
    for first, last in (('"', '"'), ("“", "”"), ("'", "'")):
        if len(text) > 1 and text[0] == first and text[-1] == last and first not in text[1:-1]:
            text = text[1:-1].strip()
    lowered, words = text.lower(), len(text.split())
    of_prompt = (prompt.user.lower(), *(example.lower() for _, example in prompt.examples))
    if not any(map(str.isalnum, text)):
        reason, detail = "answer_empty", "has no letter or digit"
    elif lowered.strip(" .!?*\"'()[]<>-") in _NOTHING:
        reason, detail = "answer_empty", "has no content"
    elif _REFUSAL.search(text[:_REFUSAL_WITHIN]):
        reason, detail = "answer_refuses", "is a refusal"
    elif lowered in of_prompt or _PROMPT_MARKS.search(lowered):
        reason, detail = "answer_repeats_prompt", "repeats the prompt"
    # Scripts without spaces make one word of a sentence.
    elif words > MAX_ANSWER_WORDS or len(text) > 20 * MAX_ANSWER_WORDS:
        reason, detail = "answer_too_long", f"has {words} words, more than {MAX_ANSWER_WORDS}"
    # At the length limit, a caption is complete if the model had already begun another turn.
    elif is_truncated and _NEXT_TURN.search(body) is None:
        reason, detail = "answer_truncated", "stops at the length limit"
    else:
        return text, None
    shown = repr(text if len(text) <= 60 else text[:60] + "...")
    return text, (reason, f"the answer {shown} {detail}")
