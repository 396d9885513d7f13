"""The page of a human study: one HTML file that opens from a disk, keeps the answers in the browser and exports them.

The page holds what is asked and nothing that answers it. Captions come from models and from people; they reach the page as
JSON and are shown as text, never as markup; the content security policy lets the browser run no script but the page's own
and fetch nothing from anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from markupsafe import Markup
from PIL import Image

from hf_captionrl.reports.gallery import embedded_image
from hf_captionrl.reports.templating import TEMPLATES, content_hash, html_templates

__all__ = ["SCALE_TEXTS", "render_study_page"]

SCALE_TEXTS: dict[str, tuple[str, str]] = {
    "descriptiveness": ("Descriptiveness", "How much correct detail of the image does it give?"),
    "accuracy": ("Accuracy", "Does everything it says fit the image?"),
    "fluency": ("Fluency", "Is it well-formed and natural?"),
}
"""What a rater reads about each scale of SMILE's study."""

SCORE_WORDS = ("terrible", "poor", "fair", "good", "excellent")
"""From 1 to 5, SMILE, Table 2."""

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
    """One page for one participant.

    Args:
        max_side: Longest side of an image in the page, in pixels.
    """
    if not questions:
        raise ValueError("There are no questions. A page needs at least one.")
    sizes = {len(question["images"]) for question in questions}
    if len(sizes) > 1:
        raise ValueError(f"Questions show {sorted(sizes)} images; on one page all must show as many.")
    place: dict[str, int] = {}

    def places(ids: Sequence[str]) -> list[int]:
        # Numbered as they come: an image's own id may say what it shows.
        return [place.setdefault(image_id, len(place)) for image_id in ids]

    asked = [{"id": q["id"], "caption": q["caption"], "images": places(q["images"])} for q in questions]
    shown = None if example is None else {"caption": example[0], "images": places(example[1]), "right": example[2]}
    pictures = []
    for image_id in place:
        small = image_of(image_id).copy()
        small.thumbnail((max_side, max_side))
        pictures.append(embedded_image(small))
    style = (TEMPLATES / "study.css").read_text(encoding="utf-8")
    script = (TEMPLATES / "study.js").read_text(encoding="utf-8")
    environment = html_templates()
    return environment.get_template("study.html.j2").render(
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
        # Ours: the only two texts that are not escaped. Their hashes are all the policy allows.
        style=Markup(style),
        script=Markup(script),
        style_hash=content_hash(style),
        script_hash=content_hash(script),
    )
