"""The page of an album: images with old and new captions, filters, editing with the keyboard, export. One file, no server."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_captionrl.album.album_result import Album
from hf_captionrl.album.diagnosis import PROBLEMS
from hf_captionrl.data import ImageError, open_image
from hf_captionrl.io import atomic_write_text
from hf_captionrl.reports.gallery import embedded_image
from hf_captionrl.reports.templating import render_html

__all__ = ["TEMPLATES", "render_report", "write_report"]

TEMPLATES = Path(__file__).parent / "templates"
"""Folder of the pages of this product."""

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
    """Render the page. Of a larger album it shows the images with problems first; the export contains those that are shown."""
    order = sorted(range(len(album.images)), key=lambda row: (not album.images[row].problems, row))
    shown = sorted(order[:max_images])
    rows = album.rows()
    cards = []
    for row in shown:
        picture = _picture(images, row) if album.images[row].unreadable is None else None
        cards.append({**rows[row], "picture": picture})
        if progress is not None:
            progress(1)
    summary = album.summary()
    texts = json.dumps([[row["image_id"], row["caption"]] for row in rows], ensure_ascii=False)
    data = {
        "cards": cards,
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
        left_out=len(rows) - len(shown),
        data=data,
    )


def _picture(images: Sequence[Any], row: int) -> dict[str, Any] | None:
    try:
        image = open_image(images[row])
    except ImageError:
        return None
    image.thumbnail((_SIDE, _SIDE))
    return embedded_image(image)
