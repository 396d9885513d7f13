"""Prompts and worked examples of the paper, verbatim.

Source: Gaur et al. 2024, "No Detail Left Behind: Revisiting Self-Retrieval for Fine-Grained Image Captioning",
Appendix A.1. Differs from it by: the number of references in the first sentence is that of the data (5 in the
paper), and turns are separated by one line break, which the printed paper does not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_captionrl.language_models.prompt import Prompt

__all__ = [
    "BLEND_EXAMPLES",
    "BLEND_SYSTEM",
    "HOLISTIC_EXAMPLES",
    "HOLISTIC_SYSTEM",
    "STAGES",
    "VISUAL_PROMPT",
    "blend_prompt",
    "holistic_prompt",
    "visual_prompt",
]

STAGES: tuple[str, ...] = ("blend", "visual", "holistic")
"""BlendCap, VisualCap, HolisticCap: in this order."""

BLEND_SYSTEM = (
    "You are given a reference set of 5 image captions. Create a holistic caption to describe the same image by "
    "incorporating relevant information from all the reference captions. Ensure that the generated caption minimizes "
    "redundancy by excluding overlapping information found in the reference set. Do not include additional information "
    "and adjectives other than what is given in reference set. Stop after the first period and do not ask any additional "
    "questions. Just complete the text. Three examples are shown below :"
)
"""System prompt of BlendCap."""

VISUAL_PROMPT = "Briefly describe the content of the image."
"""Prompt of VisualCap."""

HOLISTIC_SYSTEM = (
    "In this task, your objective is to improve “Correct caption” by incorporating any additional information present in "
    "“New caption”. If there are conflicting details between the two captions regarding the objects or their attributes, "
    "strictly use information from “Correct caption”. “New caption” can have incorrect information sometimes but “Correct "
    "caption” will always be correct. The focus is on transferring missing information, including adjectives and nouns, "
    "from “New caption” to “Correct caption”. Refrain from seeking further clarification and explanations; simply "
    "generate the caption. Three examples are shown below :"
)
"""System prompt of HolisticCap."""


def _references(captions: Sequence[str]) -> str:
    return "\n".join(f"Reference caption {number}: {text}" for number, text in enumerate(captions, start=1))


def _pair(correct: str, new: str) -> str:
    return f"Correct caption: {correct}\nNew noisy caption: {new}"


BLEND_EXAMPLES: tuple[tuple[str, str], ...] = (
    (
        _references(
            (
                "A plate full of food with an assortment of food on it.",
                "There is meat and vegetables on a white and brown plate.",
                "A plate on a table that has food on it.",
                "A plate with some steak, carrots, and sliced fried potatoes.",
                "A plate of food on a table.",
            )
        ),
        "A white and brown plate on a table with an assortment of steak, carrots, sliced fried potatoes, and vegetables.",
    ),
    (
        _references(
            (
                "A park bench on the side of a lake.",
                "A lone bench sits atop a hill looking over the river.",
                "A wooden bench sitting on top of a sandy beach.",
                "A bench on a river bank in the countryside.",
                "A wood bench is sitting in front of a river.",
            )
        ),
        "A wooden bench sits atop a hill in front of a river overlooking the water and the surrounding countryside.",
    ),
    (
        _references(
            (
                "A bathroom with a toilet sitting next to a sink.",
                "A white sink and toilet in a room.",
                "A bathroom with a mirror, sinks, toilet and toilet roll.",
                "A bathroom that has a toilet sink and mirror in it.",
                "A bathroom with a toilet next to a sink.",
            )
        ),
        "A bathroom with a toilet next to a white sink, mirror and toilet roll.",
    ),
)
"""Worked examples of BlendCap: what the user says, and the answer."""

HOLISTIC_EXAMPLES: tuple[tuple[str, str], ...] = (
    (
        _pair(
            "A man reaches up with a tennis racquet to hit an approaching ball in a tennis court.",
            "In this image, a woman is playing tennis on a purple court. She is wearing a white shirt and a blue short, "
            "and she is holding a tennis racket. The tennis ball is in the air as she prepares to hit it with her racket.",
        ),
        "A man wearing a white shirt and blue shorts reaches up with a tennis racquet to hit an approaching ball in a "
        "purple tennis court.",
    ),
    (
        _pair(
            "A white fire hydrant sits in front of an old couch on a sidewalk in front of a house.",
            "In this image, there is a black fire hydrant sitting on the sidewalk in front of a brick building. The fire "
            "hydrant is positioned next to a couch, which is placed on the sidewalk in front of the building.",
        ),
        "A white fire hydrant sits in front of an old couch on a sidewalk in front of a brick house.",
    ),
    (
        _pair(
            "A young boy poses next to a wall with writing on it, smiling and holding bags.",
            "In this image, a young girl is sitting in front of a graffiti-covered wall, wearing a red shirt. She is "
            "holding a box of crayons and smiling at the camera.",
        ),
        "A young boy wearing a red shirt poses next to a graffiti-covered wall with writing on it. He is holding bags of "
        "crayons and smiling at the camera.",
    ),
)
"""Worked examples of HolisticCap; the paper prints three "for brevity"."""


def blend_prompt(image_id: str, references: Sequence[str]) -> Prompt:
    """Ask for the BlendCap of an image.

    Args:
        image_id (`str`): The image.
        references (`Sequence[str]`): Its human captions, at least one.

    Returns:
        [`Prompt`]: For a language model.

    Raises:
        ValueError: If there is no reference.
    """
    if isinstance(references, str) or not references:
        raise ValueError(f"references of image {image_id!r} are {references!r}. Pass a list of at least one caption.")
    number = f"{len(references)} image caption" + "s" * (len(references) > 1)
    system = BLEND_SYSTEM.replace("5 image captions", number)
    return Prompt("blend", image_id, _references(references), system, BLEND_EXAMPLES)


def visual_prompt(image_id: str, image: Any) -> Prompt:
    """Ask for the VisualCap of an image.

    Args:
        image_id (`str`): The image.
        image (`PIL.Image.Image`): The image to describe.

    Returns:
        [`Prompt`]: For a vision model.
    """
    return Prompt("visual", image_id, VISUAL_PROMPT, image=image)


def holistic_prompt(image_id: str, blend: str, visual: str) -> Prompt:
    """Ask for the HolisticCap of an image.

    Args:
        image_id (`str`): The image.
        blend (`str`): Its BlendCap, which wins conflicts.
        visual (`str`): Its VisualCap.

    Returns:
        [`Prompt`]: For a language model.
    """
    return Prompt("holistic", image_id, _pair(blend, visual), HOLISTIC_SYSTEM, HOLISTIC_EXAMPLES)
