"""A gallery of images and captions as one HTML file.

The file needs nothing else: images, style and script are inside it, and its content security policy lets a browser
fetch nothing and run no script but the gallery's own. Captions come from models and from people; they are escaped
wherever they appear.
"""

import base64
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from markupsafe import Markup
from PIL import Image

from hf_captionrl.io import atomic_write_text
from hf_captionrl.reports.templating import TEMPLATES, content_hash, html_templates

__all__ = [
    "GalleryCaption",
    "GalleryItem",
    "Mark",
    "Verdict",
    "content_hash",
    "cut_at_marks",
    "embedded_image",
    "mark_claims",
    "write_gallery",
]

Verdict = Literal["right", "wrong", "misbound"]
"""Of a claim; a misbound one is wrong here and true of something else in the scene."""

_MAX_SIDE = 512
"""Longest side of an image in the file, in pixels."""
_PIXEL_ART_SIDE = 128
"""Up to this side an image is shown with its pixels as they are instead of blurred."""
_PNG_PIXELS = 256 * 256
"""Larger images are photographs: as PNG, fifty of them would be a file of twenty megabytes."""


@dataclass(frozen=True)
class Mark:
    """A judged claim.

    Args:
        text: The claim.
        verdict: Whether it is right, wrong, or wrong and true of something else.
        start: Where its words begin in the caption, in characters; None where they do not stand there.
        end: Where they end.
        owner: What a misbound claim is true of.
    """

    text: str
    verdict: Verdict
    start: int | None = None
    end: int | None = None
    owner: str = ""


@dataclass(frozen=True)
class GalleryCaption:
    """What one method writes about one image.

    Args:
        method: Name of the method, as in the results table.
        text: The caption.
        right: Claims of the caption that are true, in its own words (`[claim.text for claim in check(...).right]`).
        wrong: Claims that are false.
        rank: Place of the image when the caption retrieves it, 1 = best; None if not ranked.
        pool_size: Number of images it is ranked among.
        marks: The claims with their places, in place of `right` and `wrong`, whose places are looked for.
        numbers: What else is known of the caption, for instance `{"CIDEr-D": "0.12"}`.
    """

    method: str
    text: str
    right: Sequence[str] = ()
    wrong: Sequence[str] = ()
    rank: int | None = None
    pool_size: int | None = None
    marks: Sequence[Mark] | None = None
    numbers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GalleryItem:
    """One image with everything said about it.

    Args:
        image: The image.
        image_id: Its identifier in the data set.
        captions: One caption per method, in the order in which they are shown.
        references: The human captions.
        group: What it belongs to, such as a bag; items in a row of one group stand under its name.
    """

    image: Image.Image
    image_id: str
    captions: Sequence[GalleryCaption]
    references: Sequence[str] = ()
    group: str = ""


class Piece(NamedTuple):
    """A stretch of a caption.

    Attributes:
        text: The words.
        verdict: Whether they claim something right or wrong; None where nothing was judged.
    """

    text: str
    verdict: Verdict | None


def mark_claims(text: str, right: Sequence[str], wrong: Sequence[str]) -> tuple[list[Piece], list[Piece]]:
    """Find the claims in a caption.

    A claim is found where its words stand in the caption in order, with at most one other word between two of them
    ("on blue background" in "on a blue background"). Each claim marks its first free place; wrong ones choose first,
    so that no error is hidden by a longer true claim.

    Args:
        text: The caption.
        right: True claims.
        wrong: False claims.

    Returns:
        `tuple[list[Piece], list[Piece]]`: The caption cut into pieces (their texts joined are `text`), and the claims
        that do not stand in it literally.
    """
    taken: list[tuple[int, int, Verdict]] = []
    absent: list[Piece] = []
    verdicts: tuple[tuple[Literal["wrong", "right"], Sequence[str]], ...] = (("wrong", wrong), ("right", right))
    for verdict, claims in verdicts:
        # Longer claims first: "small" must not take the word that "two small pigs" needs. `sorted` keeps ties in
        # order.
        for claim in sorted((claim for claim in claims if claim.strip()), key=len, reverse=True):
            pattern = r"\W+(?:\w+\W+)?".join(re.escape(word) for word in claim.split())
            for found in re.finditer(rf"(?<!\w){pattern}(?!\w)", text, re.IGNORECASE):
                if all(found.end() <= start or end <= found.start() for start, end, _ in taken):
                    taken.append((*found.span(), verdict))
                    break
            else:
                absent.append(Piece(claim, verdict))
    return _cut(text, taken), absent


def cut_at_marks(text: str, marks: Sequence[Mark]) -> tuple[list[Piece], list[Piece]]:
    """Cut a caption where its claims stand. Where two overlap the wrong one is marked, so that no error is hidden.

    Args:
        text: The caption.
        marks: Its claims.

    Returns:
        `tuple[list[Piece], list[Piece]]`: The caption cut into pieces (their texts joined are `text`), and the claims
        that are not marked in it.

    Raises:
        ValueError: If a claim's place is not in the caption.
    """
    taken: list[tuple[int, int, Verdict]] = []
    absent: list[Piece] = []
    for mark in sorted(marks, key=lambda mark: mark.verdict == "right"):
        if mark.start is None or mark.end is None:
            absent.append(Piece(mark.text, mark.verdict))
            continue
        if not 0 <= mark.start < mark.end <= len(text):
            raise ValueError(
                f"The claim {mark.text!r} stands at {mark.start} to {mark.end} of a caption of {len(text)} characters. "
                "Give the caption that was checked."
            )
        if all(mark.end <= start or end <= mark.start for start, end, _ in taken):
            taken.append((mark.start, mark.end, mark.verdict))
        else:
            absent.append(Piece(mark.text, mark.verdict))
    return _cut(text, taken), absent


def _cut(text: str, taken: Sequence[tuple[int, int, Verdict]]) -> list[Piece]:
    """The whole text in pieces, with the taken places as pieces of their own."""
    pieces: list[Piece] = []
    at = 0
    for start, end, verdict in sorted(taken):
        if at < start:
            pieces.append(Piece(text[at:start], None))
        pieces.append(Piece(text[start:end], verdict))
        at = end
    if at < len(text):
        pieces.append(Piece(text[at:], None))
    return pieces


def write_gallery(
    path: str | os.PathLike[str],
    items: Sequence[GalleryItem],
    title: str,
    *,
    note: str = "",
    pixelated: bool | None = None,
) -> Path:
    """Write a self-contained HTML gallery, atomically.

    Args:
        path: Where to write.
        items: The images, in the order in which they are shown.
        title: Heading.
        note: A sentence under the heading: data set, split, scorer.
        pixelated: Whether to enlarge with visible pixels; None decides by each image's size (up to 128 pixels a side).

    Returns:
        `pathlib.Path`: The file written.

    Raises:
        ValueError: If there is no item, an item has no caption or two of one method, or a rank is outside its pool.
    """
    items = list(items)
    if not items:
        raise ValueError("There are no items. A gallery needs at least one image with a caption.")
    methods: dict[str, int] = {}
    for item in items:
        _check_item(item)
        for caption in item.captions:
            methods.setdefault(caption.method, len(methods))
    style = (TEMPLATES / "gallery.css").read_text(encoding="utf-8")
    script = (TEMPLATES / "gallery.js").read_text(encoding="utf-8")
    environment = html_templates()
    html = environment.get_template("gallery.html.j2").render(
        title=title,
        note=note,
        methods=list(methods),
        groups=[
            (name, [_card(item, methods, pixelated) for item in members])
            for name, members in groupby(items, key=lambda item: item.group)
        ],
        has_claims=any(c.right or c.wrong or c.marks for item in items for c in item.captions),
        has_misbound=any(
            mark.verdict == "misbound" for item in items for c in item.captions for mark in c.marks or ()
        ),
        has_ranks=any(caption.rank is not None for item in items for caption in item.captions),
        # Ours, not a caption's: the only two texts that are not escaped. Their hashes are all the policy allows.
        style=Markup(style),
        script=Markup(script),
        style_hash=content_hash(style),
        script_hash=content_hash(script),
    )
    return atomic_write_text(path, html)


def _check_item(item: GalleryItem) -> None:
    names = [caption.method for caption in item.captions]
    if not names or len(set(names)) != len(names):
        raise ValueError(
            f"Image {item.image_id!r} has captions by {names}; it needs one or more, each by another method."
        )
    for caption in item.captions:
        rank, size = caption.rank, caption.pool_size
        if rank is not None and (rank < 1 or (size is not None and rank > size)):
            raise ValueError(
                f"Image {item.image_id!r} has rank {rank} of {size} for {caption.method!r}; "
                "ranks run from 1 (best) to pool_size."
            )


def _card(item: GalleryItem, methods: dict[str, int], pixelated: bool | None) -> dict[str, object]:
    """What the template shows of one item."""
    captions = []
    for caption in item.captions:
        if caption.marks is None:
            pieces, absent = mark_claims(caption.text, caption.right, caption.wrong)
        else:
            pieces, absent = cut_at_marks(caption.text, caption.marks)
        marks = caption.marks or ()
        rank_class = (
            "" if caption.rank is None else "first" if caption.rank == 1 else "near" if caption.rank <= 5 else "far"
        )
        captions.append(
            {
                "method": caption.method,
                "index": methods[caption.method],
                "pieces": pieces if caption.text.strip() else [],
                "absent": absent,
                "wrong": bool(caption.wrong) or any(mark.verdict != "right" for mark in marks),
                # In words what the marks show, for those who do not see them.
                "wrong_claims": [mark for mark in marks if mark.verdict == "wrong"],
                "misbound_claims": [mark for mark in marks if mark.verdict == "misbound"],
                "numbers": dict(caption.numbers),
                "rank": caption.rank,
                "rank_class": rank_class,
                "pool_size": caption.pool_size,
            }
        )
    return {
        "image_id": item.image_id,
        **embedded_image(item.image, pixelated),
        "captions": captions,
        "references": list(item.references),
        "text": " ".join([item.image_id, item.group, *(c.text for c in item.captions), *item.references]).lower(),
    }


def embedded_image(image: Image.Image, pixelated: bool | None = None) -> dict[str, Any]:
    """What a template needs to show an image inside its page.

    Args:
        image: The image.
        pixelated: Whether to enlarge with visible pixels; None decides by its size (up to 128 pixels a side).

    Returns:
        `dict`: `source` for a `src`, `width`, `height`, `pixelated`.
    """
    small = max(image.size) <= _PIXEL_ART_SIDE
    return {
        "source": _data_uri(image),
        "width": image.width,
        "height": image.height,
        "pixelated": small if pixelated is None else pixelated,
    }


def _data_uri(image: Image.Image) -> str:
    """The image inside a `src`: PNG, or JPEG for a photograph."""
    image = image.convert("RGB")
    image.thumbnail((_MAX_SIDE, _MAX_SIDE))
    buffer = io.BytesIO()
    if image.width * image.height <= _PNG_PIXELS:
        image.save(buffer, "PNG", optimize=True)
        kind = "png"
    else:
        image.save(buffer, "JPEG", quality=85)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
