"""The page of an album: images with old and new captions, filters, editing with the keyboard, export. One file, no server."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_captionrl.apps.album.result import PROBLEMS, Album
from hf_captionrl.data import ImageError, open_image
from hf_captionrl.evaluation.pages import embedded_image, render_html
from hf_captionrl.utils.io import atomic_write_text

TEMPLATES = Path(__file__).parent / "templates"
"""Folder of the pages of this product."""

_SHOWN = ("image_id", "number", "caption", "old_caption", "rank", "confused_with", "copy_of", "problems", "unreadable")
_SIDE = 192
"""Longest side of an image of the page, in pixels."""


def write_report(
    path: str | os.PathLike[str],
    album: Album,
    images: Sequence[Any],
    *,
    title: str = "Album",
    max_images: int = 2000,
    progress: Callable[[int], Any] | None = None,
) -> Path:
    """Write the page; images are opened one by one."""
    return atomic_write_text(path, render_report(album, images, title=title, max_images=max_images, progress=progress))


def render_report(
    album: Album,
    images: Sequence[Any],
    *,
    title: str = "Album",
    max_images: int = 2000,
    progress: Callable[[int], Any] | None = None,
) -> str:
    """Render the page.

    It shows every caption, and the export has all of them. Pictures are embedded for at most `max_images` images, those with problems
    first.
    """
    problems = [any(one.problems for one in (image, *image.further)) for image in album.images]
    order = sorted(range(len(album.images)), key=lambda row: (not problems[row], row))
    pictures: dict[int, dict[str, Any]] = {}
    for row in sorted(order[:max_images]):
        if album.images[row].unreadable is None and (picture := _picture(images, row)) is not None:
            pictures[row] = picture
        if progress is not None:
            progress(1)
    rows = album.rows()
    cards = [
        {"row": at, **{name: row[name] for name in _SHOWN}} for (at, _), row in zip(album.entries(), rows, strict=True)
    ]
    summary = album.summary()
    texts = json.dumps([[row["image_id"], row["number"], row["caption"]] for row in rows], ensure_ascii=False)
    data = {
        "cards": cards,
        "pictures": pictures,
        "problems": PROBLEMS,
        "compared": album.num_compared,
        "fingerprint": hashlib.blake2b(texts.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest(),
    }
    return render_html(
        TEMPLATES,
        "report",
        sort_keys=False,
        title=title,
        summary=summary,
        groups=album.shared if any(fact.shared for fact in album.shared) else [],
        problems=PROBLEMS,
        left_out=max(0, len(album.images) - max_images),
        data=data,
    )


def _picture(images: Sequence[Any], row: int) -> dict[str, Any] | None:
    try:
        image = open_image(images[row])
    except ImageError:
        return None
    image.thumbnail((_SIDE, _SIDE))
    return embedded_image(image)
