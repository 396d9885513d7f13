"""Self-contained HTML pages: a gallery of images and captions.

A page includes images, style and script, and its content security policy forbids requests and other scripts. Captions come from
models and people; they are always escaped.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from hf_captionrl.utils.images import to_rgb
from hf_captionrl.utils.io import atomic_write_text

TEMPLATES = Path(__file__).parent / "templates"
"""Folder of this package's templates, styles and scripts; products keep theirs in their folders."""


def render_html(folder: Path, name: str, *, styles: Sequence[str] = (), sort_keys: bool = True, **values: Any) -> str:
    """Render `name.html.j2` with `style` (`styles` and `name.css`), `script` (`name.js`) and the hashes that its policy allows."""
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    environment = Environment(loader=FileSystemLoader(folder), autoescape=True, **options)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": sort_keys}
    for kind, files in (("style", [*(f"{style}.css" for style in styles), f"{name}.css"]), ("script", [f"{name}.js"])):
        if text := "".join((folder / file).read_text(encoding="utf-8") for file in files if (folder / file).is_file()):
            # The package's files are the only texts that are not escaped; the content security policy allows only
            # their hashes.
            digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
            values |= {kind: Markup(text), f"{kind}_hash": f"sha256-{digest}"}
    return environment.get_template(f"{name}.html.j2").render(**values)


# --- A gallery of images and captions as one HTML file ---------------------------------------------------------------

Verdict = Literal["right", "wrong"]
"""Verdict on a claim."""

_MAX_SIDE = 512
"""Longest side of an image in the file, in pixels."""
_PIXEL_ART_SIDE = 128
"""Images up to this side are enlarged with visible pixels instead of blurred."""
_PNG_PIXELS = 256 * 256
"""Larger images are photographs, which are stored as JPEG: 50 of them as PNG would take 20 megabytes."""


@dataclass(frozen=True)
class Mark:
    """A claim with its verdict."""

    text: str
    verdict: Verdict
    start: int | None = None  # first character of its words in the caption; None if they do not occur there
    end: int | None = None  # character after the last one


@dataclass(frozen=True)
class GalleryCaption:
    """One method's caption of one image."""

    method: str  # as in the results table
    text: str = ""
    marks: Sequence[Mark] = ()
    rank: int | None = None  # rank of the image when the caption retrieves it, 1 = best; None if not ranked
    pool_size: int | None = None
    samples: Sequence[str] = ()  # instead of the text: several captions, of which repeated ones are pale


@dataclass(frozen=True)
class GalleryItem:
    """One image with one caption per method, in the order in which they are shown, and the human captions."""

    image: Image.Image
    image_id: str
    captions: Sequence[GalleryCaption]
    references: Sequence[str] = ()


class Piece(NamedTuple):
    """Words of a caption, and the verdict on their claim; None if they are not a claim."""

    text: str
    verdict: Verdict | None


def split_at_marks(text: str, marks: Sequence[Mark]) -> list[Piece]:
    """A caption in pieces, whose joined texts are `text`. Of claims that overlap the wrong one is marked."""
    taken: list[tuple[int, int, Verdict]] = []
    for mark in sorted(marks, key=lambda mark: mark.verdict == "right"):
        first, last = mark.start, mark.end
        if first is not None and last is not None and all(last <= a or b <= first for a, b, _ in taken):
            taken.append((first, last, mark.verdict))
    pieces: list[Piece] = []
    at = 0
    for start, end, verdict in sorted(taken):
        pieces += [Piece(text[at:start], None), Piece(text[start:end], verdict)]
        at = end
    return [piece for piece in (*pieces, Piece(text[at:], None)) if piece.text]


def write_gallery(path: str | os.PathLike[str], items: Sequence[GalleryItem], title: str, *, note: str = "") -> Path:
    """Write a self-contained HTML gallery of at least one image, atomically; `note` stands below the heading."""
    captions = [caption for item in items for caption in item.captions]
    methods = {name: number for number, name in enumerate(dict.fromkeys(caption.method for caption in captions))}
    html = render_html(
        TEMPLATES,
        "gallery",
        title=title,
        note=note,
        cards=[_gallery_card(item, methods) for item in items],
        has_claims=any(c.marks for c in captions),
        has_ranks=any(c.rank is not None for c in captions),
    )
    return atomic_write_text(path, html)


def _gallery_card(item: GalleryItem, methods: dict[str, int]) -> dict[str, object]:
    """Values of the template for one item."""
    captions = []
    for caption in item.captions:
        rank, texts = caption.rank, [text.strip() for text in caption.samples]
        captions.append(
            vars(caption)
            | {
                "index": methods[caption.method],
                "pieces": split_at_marks(caption.text, caption.marks) if caption.text.strip() else [],
                "samples": [{"text": text, "again": text in texts[:at]} for at, text in enumerate(texts)],
                "distinct": len(set(texts)),
                # In words, for screen readers, and for claims whose words do not occur literally.
                "errors": [mark for mark in caption.marks if mark.verdict != "right"],
                "rank_class": "" if rank is None else "first" if rank == 1 else "near" if rank <= 5 else "far",
            }
        )
    return {
        "image_id": item.image_id,
        **embedded_image(item.image),
        "captions": captions,
        "references": list(item.references),
    }


def embedded_image(image: Image.Image) -> dict[str, Any]:
    """Values of a template that embeds an image: `source` for a `src` (PNG, or JPEG for a photograph), `width`, `height`, and
    whether it is enlarged with visible pixels."""
    image, buffer = to_rgb(image), io.BytesIO()
    small = image.copy()
    small.thumbnail((_MAX_SIDE, _MAX_SIDE))
    kind = "png" if small.width * small.height <= _PNG_PIXELS else "jpeg"
    small.save(buffer, kind, **({"optimize": True} if kind == "png" else {"quality": 85}))
    return {
        "source": f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}",
        "width": image.width,
        "height": image.height,
        "pixelated": max(image.size) <= _PIXEL_ART_SIDE,
    }
