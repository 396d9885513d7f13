"""A gallery of images and captions as one HTML file.

The file needs nothing else: images, style and script are inside it, and its content security policy lets a browser
fetch nothing and run no script but the gallery's own. Captions come from models and from people; they are escaped
wherever they appear.
"""

import base64
import hashlib
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from hf_captionrl.io import atomic_write_text

__all__ = ["GalleryCaption", "GalleryItem", "content_hash", "embedded_image", "mark_claims", "write_gallery"]

TEMPLATES = Path(__file__).parent / "templates"
_MAX_SIDE = 512
"""Longest side of an image in the file, in pixels."""
_PIXEL_ART_SIDE = 128
"""Up to this side an image is shown with its pixels as they are instead of blurred."""
_PNG_PIXELS = 256 * 256
"""Larger images are photographs: as PNG, fifty of them would be a file of twenty megabytes."""


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
    """

    method: str
    text: str
    right: Sequence[str] = ()
    wrong: Sequence[str] = ()
    rank: int | None = None
    pool_size: int | None = None


@dataclass(frozen=True)
class GalleryItem:
    """One image with everything said about it.

    Args:
        image: The image.
        image_id: Its identifier in the data set.
        captions: One caption per method, in the order in which they are shown.
        references: The human captions.
    """

    image: Image.Image
    image_id: str
    captions: Sequence[GalleryCaption]
    references: Sequence[str] = ()


class Piece(NamedTuple):
    """A stretch of a caption.

    Args:
        text: The words.
        verdict: Whether they claim something right or wrong; None where nothing was judged.
    """

    text: str
    verdict: Literal["right", "wrong"] | None


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
    taken: list[tuple[int, int, Literal["right", "wrong"]]] = []
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
    pieces: list[Piece] = []
    at = 0
    for start, end, verdict in sorted(taken):
        if at < start:
            pieces.append(Piece(text[at:start], None))
        pieces.append(Piece(text[start:end], verdict))
        at = end
    if at < len(text):
        pieces.append(Piece(text[at:], None))
    return pieces, absent


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
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = environment.get_template("gallery.html.j2").render(
        title=title,
        note=note,
        methods=list(methods),
        cards=[_card(item, methods, pixelated) for item in items],
        has_claims=any(caption.right or caption.wrong for item in items for caption in item.captions),
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
        pieces, absent = mark_claims(caption.text, caption.right, caption.wrong)
        rank_class = (
            "" if caption.rank is None else "first" if caption.rank == 1 else "near" if caption.rank <= 5 else "far"
        )
        captions.append(
            {
                "method": caption.method,
                "index": methods[caption.method],
                "pieces": pieces if caption.text.strip() else [],
                "absent": absent,
                "wrong": bool(caption.wrong),
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
        "text": " ".join([item.image_id, *(c.text for c in item.captions), *item.references]).lower(),
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


def content_hash(text: str) -> str:
    """A source as a content security policy names it.

    Args:
        text: Style or script.

    Returns:
        `str`: `sha256-...`.
    """
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}"
