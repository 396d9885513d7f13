"""The page of a participant: one HTML file that opens from disk, stores the answers in the browser and exports them.

The page does not contain the correct answers. It gets captions as JSON and shows them as text, never as markup. Its content
security policy allows only the page's script and no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from hf_captionrl.reports.gallery import embedded_image
from hf_captionrl.reports.templating import render_html

__all__ = ["SCALE_TEXTS", "TEMPLATES", "render_study_page"]

TEMPLATES = Path(__file__).parent / "templates"
"""Folder of the pages of this product."""

SCALE_TEXTS: dict[str, tuple[str, str]] = {
    "descriptiveness": ("Descriptiveness", "How much correct detail of the image does it give?"),
    "accuracy": ("Accuracy", "Does everything it says fit the image?"),
    "fluency": ("Fluency", "Is it well-formed and natural?"),
}
"""Name and explanation of each scale of SMILE's study."""

SCORE_WORDS = ("terrible", "poor", "fair", "good", "excellent")
"""Ratings from 1 to 5 (SMILE, Table 2)."""

_TITLES = {"retrieval": "Which image is it?", "rating": "How good is the caption?"}


def render_study_page(
    kind: Literal["retrieval", "rating"],
    questions: Sequence[Mapping[str, Any]],
    image_of: Callable[[str], Image.Image],
    *,
    study: str,
    part: str,
    answers_format: str,
    participant_pattern: str,
    example: tuple[str, Sequence[str], int] | None = None,
    consent: str = "",
    max_side: int = 320,
) -> str:
    """Render the page of one participant, with images of at most `max_side` pixels per side."""
    if not questions:
        raise ValueError("There are no questions, but a page needs at least one.")
    sizes = {len(question["images"]) for question in questions}
    if len(sizes) > 1:
        raise ValueError(f"Questions show {sorted(sizes)} images, but all questions of a page must show equally many.")
    place: dict[str, int] = {}

    def places(ids: Sequence[str]) -> list[int]:
        # Numbered in order of appearance, because the id of an image may reveal what it shows.
        return [place.setdefault(image_id, len(place)) for image_id in ids]

    asked = [{"id": q["id"], "caption": q["caption"], "images": places(q["images"])} for q in questions]
    shown = None if example is None else {"caption": example[0], "images": places(example[1]), "right": example[2]}
    pictures = []
    for image_id in place:
        small = image_of(image_id).copy()
        small.thumbnail((max_side, max_side))
        pictures.append(embedded_image(small))
    return render_html(
        TEMPLATES,
        "study",
        title=_TITLES[kind],
        kind=kind,
        part=part,
        num_questions=len(questions),
        set_size=sizes.pop(),
        scales=[] if kind == "retrieval" else [{"name": name, "text": text} for name, text in SCALE_TEXTS.values()],
        words=SCORE_WORDS,
        consent=[paragraph for paragraph in consent.split("\n") if paragraph.strip()],
        pattern=participant_pattern,
        example=shown,
        pictures=pictures,
        data={
            "format": answers_format,
            "kind": kind,
            "study": study,
            "part": part,
            "questions": asked,
            "pictures": pictures,
        },
    )
