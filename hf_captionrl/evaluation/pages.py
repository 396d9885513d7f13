"""Self-contained HTML pages: a gallery of images and captions, and all captions of a few images side by side.

A page includes images, style and script, and its content security policy forbids requests and other scripts. Captions come from
models and people; they are always escaped.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from hf_captionrl.utils.io import atomic_write_text

TEMPLATES = Path(__file__).parent / "templates"
"""Folder of this package's templates, styles and scripts; products keep theirs in their folders."""


def html_templates(folder: Path = TEMPLATES) -> Environment:
    """The templates of HTML pages in a folder."""
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render_html(folder: Path, name: str, *, sort_keys: bool = True, **values: Any) -> str:
    """Render `name.html.j2` with `name.css` and, if there is one, `name.js`; `sort_keys` is for JSON in the page."""
    environment = html_templates(folder)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": sort_keys}
    for kind, suffix in (("style", "css"), ("script", "js")):
        path = folder / f"{name}.{suffix}"
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            # The package's files are the only texts that are not escaped; the content security policy allows only
            # their hashes.
            values |= {kind: Markup(text), f"{kind}_hash": content_hash(text)}
    return environment.get_template(f"{name}.html.j2").render(**values)


def render_page(template: str, *, styles: Sequence[str], scripts: Sequence[str] = (), **values: Any) -> str:
    """A self-contained page; the template gets `style`, `script` and the hashes that its policy allows."""
    # Only the package's style and script are not escaped.
    for kind, names in (("style", styles), ("script", scripts)):
        source = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in names)
        values |= {kind: Markup(source), f"{kind}_hash": content_hash(source)}
    return html_templates().get_template(template).render(**values)


def content_hash(text: str) -> str:
    """The hash of a style or script in a content security policy: `sha256-...`."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}"


# --- A gallery of images and captions as one HTML file ---------------------------------------------------------------

Verdict = Literal["right", "wrong", "misbound"]
"""Verdict on a claim; a misbound claim is wrong, but true of another object in the scene."""

_MAX_SIDE = 512
"""Longest side of an image in the file, in pixels."""
_PIXEL_ART_SIDE = 128
"""Images up to this side are enlarged with visible pixels instead of blurred."""
_PNG_PIXELS = 256 * 256
"""Larger images are photographs, which are stored as JPEG: 50 of them as PNG would take 20 megabytes."""


@dataclass(frozen=True)
class Mark:
    """A claim with its verdict.

    Args:
        text: The claim.
        verdict: Whether it is right, wrong, or misbound.
        start: First character of its words in the caption; None if they do not occur there.
        end: Character after the last one.
        owner: The object of which a misbound claim is true.
    """

    text: str
    verdict: Verdict
    start: int | None = None
    end: int | None = None
    owner: str = ""


@dataclass(frozen=True)
class GalleryCaption:
    """One method's caption of one image.

    Args:
        method: Name of the method, as in the results table.
        text: The caption.
        right: True claims, in the words of the caption (`[claim.text for claim in check(...).right]`).
        wrong: False claims.
        rank: Rank of the image when the caption retrieves it, 1 = best; None if not ranked.
        pool_size: Number of images in the pool.
        marks: Claims with their positions. They replace `right` and `wrong`, whose positions are searched for.
        numbers: Further numbers of the caption, for instance `{"CIDEr-D": "0.12"}`.
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
    """One image with its captions.

    Args:
        image: The image.
        image_id: Its identifier in the data set.
        captions: One caption per method, in the order in which they are shown.
        references: The human captions.
        group: Group of the image, such as its bag; consecutive items of one group are shown under its name.
    """

    image: Image.Image
    image_id: str
    captions: Sequence[GalleryCaption]
    references: Sequence[str] = ()
    group: str = ""


class Piece(NamedTuple):
    """Words of a caption, and the verdict on their claim; None if they are not a claim."""

    text: str
    verdict: Verdict | None


def mark_claims(text: str, right: Sequence[str], wrong: Sequence[str]) -> tuple[list[Piece], list[Piece]]:
    """Find the claims in a caption.

    A claim is found if its words occur in the caption in order, with at most one other word between two of them
    ("on blue background" in "on a blue background"). Each claim marks its first free position; wrong claims come first,
    so that a longer true claim hides no error. Returns the caption in pieces, whose joined texts are `text`, and the claims that
    do not occur in it literally.
    """
    taken: list[tuple[int, int, Verdict]] = []
    absent: list[Piece] = []
    verdicts: tuple[tuple[Literal["wrong", "right"], Sequence[str]], ...] = (("wrong", wrong), ("right", right))
    for verdict, claims in verdicts:
        # Longer claims first, so that "small" does not take the word that "two small pigs" needs; `sorted` is stable.
        for claim in sorted((claim for claim in claims if claim.strip()), key=len, reverse=True):
            pattern = r"\W+(?:\w+\W+)?".join(re.escape(word) for word in claim.split())
            for found in re.finditer(rf"(?<!\w){pattern}(?!\w)", text, re.IGNORECASE):
                if all(found.end() <= start or end <= found.start() for start, end, _ in taken):
                    taken.append((*found.span(), verdict))
                    break
            else:
                absent.append(Piece(claim, verdict))
    return _in_pieces(text, taken), absent


def split_at_marks(text: str, marks: Sequence[Mark]) -> tuple[list[Piece], list[Piece]]:
    """Split a caption at its claims, as `mark_claims`. If two overlap, the wrong one is marked, so that no error is hidden."""
    taken: list[tuple[int, int, Verdict]] = []
    absent: list[Piece] = []
    for mark in sorted(marks, key=lambda mark: mark.verdict == "right"):
        if mark.start is None or mark.end is None:
            absent.append(Piece(mark.text, mark.verdict))
            continue
        if not 0 <= mark.start < mark.end <= len(text):
            raise ValueError(
                f"The claim {mark.text!r} is at {mark.start} to {mark.end} of a caption of {len(text)} characters. "
                "Pass the caption that was checked."
            )
        if all(mark.end <= start or end <= mark.start for start, end, _ in taken):
            taken.append((mark.start, mark.end, mark.verdict))
        else:
            absent.append(Piece(mark.text, mark.verdict))
    return _in_pieces(text, taken), absent


def _in_pieces(text: str, taken: Sequence[tuple[int, int, Verdict]]) -> list[Piece]:
    """The whole text in pieces, one of them per claim."""
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
        path: File to write.
        items: The images, in the order in which they are shown.
        title: Heading.
        note: Sentence below the heading: data set, split, scorer.
        pixelated: Whether to enlarge with visible pixels; None: only images of up to 128 pixels per side.

    Returns:
        `pathlib.Path`: The file written.

    Raises:
        ValueError: If there is no item, an item has no caption or two of one method, or a rank is outside its pool.
    """
    items = list(items)
    if not items:
        raise ValueError("There are no items. Pass at least one image with a caption.")
    methods: dict[str, int] = {}
    for item in items:
        _check_item(item)
        for caption in item.captions:
            methods.setdefault(caption.method, len(methods))
    html = render_page(
        "gallery.html.j2",
        styles=("gallery.css",),
        scripts=("gallery.js",),
        title=title,
        note=note,
        methods=list(methods),
        groups=[
            (name, [_gallery_card(item, methods, pixelated) for item in members])
            for name, members in groupby(items, key=lambda item: item.group)
        ],
        has_claims=any(c.right or c.wrong or c.marks for item in items for c in item.captions),
        has_misbound=any(
            mark.verdict == "misbound" for item in items for c in item.captions for mark in c.marks or ()
        ),
        has_ranks=any(caption.rank is not None for item in items for caption in item.captions),
    )
    return atomic_write_text(path, html)


def _check_item(item: GalleryItem) -> None:
    names = [caption.method for caption in item.captions]
    if not names or len(set(names)) != len(names):
        raise ValueError(
            f"Image {item.image_id!r} has captions by {names}; it needs at least one. Pass one caption per method."
        )
    for caption in item.captions:
        rank, size = caption.rank, caption.pool_size
        if rank is not None and (rank < 1 or (size is not None and rank > size)):
            raise ValueError(
                f"Image {item.image_id!r} has rank {rank} of {size} for {caption.method!r}; "
                "ranks run from 1 (best) to pool_size."
            )


def _gallery_card(item: GalleryItem, methods: dict[str, int], pixelated: bool | None) -> dict[str, object]:
    """Values of the template for one item."""
    captions = []
    for caption in item.captions:
        if caption.marks is None:
            pieces, absent = mark_claims(caption.text, caption.right, caption.wrong)
        else:
            pieces, absent = split_at_marks(caption.text, caption.marks)
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
                # The marks in words, for screen readers.
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
    """Values of a template that embeds an image: `source` for a `src` (PNG, or JPEG for a photograph), `width`, `height`,
    `pixelated`, by default only of images of up to 128 pixels per side."""
    small, buffer = image.convert("RGB"), io.BytesIO()
    small.thumbnail((_MAX_SIDE, _MAX_SIDE))
    kind = "png" if small.width * small.height <= _PNG_PIXELS else "jpeg"
    small.save(buffer, kind, **({"optimize": True} if kind == "png" else {"quality": 85}))
    return {
        "source": f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}",
        "width": image.width,
        "height": image.height,
        "pixelated": max(image.size) <= _PIXEL_ART_SIDE if pixelated is None else pixelated,
    }


# --- Several captions per captioner for a few images, side by side in one HTML file ----------------------------------


@dataclass(frozen=True)
class PanelItem:
    """One image with the captions that each captioner sampled, in order, and its references."""

    image: Image.Image
    image_id: str
    captions: Mapping[str, Sequence[str]]
    references: Sequence[str] = ()


def write_panel(path: str | os.PathLike[str], items: Sequence[PanelItem], title: str, *, note: str = "") -> Path:
    """Write a self-contained page with all captions of each captioner, atomically.

    Reference: Chen and Jin 2020, Figures 1, 2 and 4. A caption that repeats an earlier one of its captioner is pale.
    Each captioner is shown with its number of distinct captions.
    """
    items = list(items)
    if not items:
        raise ValueError("There are no items. Pass at least one image with captions.")
    names = list(items[0].captions)
    for item in items:
        if not names or list(item.captions) != names or not all(item.captions.values()):
            found = {name: len(captions) for name, captions in item.captions.items()}
            raise ValueError(
                f"Image {item.image_id!r} has captions by {found}; every image needs at least one by each of {names}. Pass "
                "them in this order."
            )
    html = render_page(
        "panel.html.j2",
        styles=("gallery.css", "panel.css"),
        title=title,
        note=note,
        cards=[_card(item) for item in items],
    )
    return atomic_write_text(path, html)


def _card(item: PanelItem) -> dict[str, Any]:
    """Values of the template for one image."""
    models = []
    for index, (name, captions) in enumerate(item.captions.items()):
        texts = [caption.strip() for caption in captions]
        shown = [{"text": text, "again": text in texts[:at]} for at, text in enumerate(texts)]
        models.append({"name": name, "index": index, "captions": shown, "distinct": len(set(texts))})
    return {
        **embedded_image(item.image),
        "image_id": item.image_id,
        "models": models,
        "references": list(item.references),
    }
