"""The page of `captionrl album`: one file without a server. Captions and names are escaped everywhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_captionrl.apps.album.album import Album
from hf_captionrl.data import ImageError, open_image
from hf_captionrl.evaluation.pages import embedded_image, render_html
from hf_captionrl.utils.io import atomic_write_text

TEMPLATES = Path(__file__).parent / "templates"
"""Folder of the pages."""

_SIDE = 512  # longest side of a picture
_MOST_PICTURES = 2000


def write_report(
    path: str | os.PathLike[str],
    album: Album,
    images: Sequence[Any],
    *,
    title: str = "Album",
) -> Path:
    """Write the page, which has every caption, and pictures of the first images."""
    pictures: dict[int, dict[str, Any]] = {}
    for row in range(min(len(images), _MOST_PICTURES)):
        with suppress(ImageError):
            if album.images[row].unreadable is None:
                picture = open_image(images[row]).copy()
                picture.thumbnail((_SIDE, _SIDE))
                pictures[row] = embedded_image(picture)
    page = render_html(
        TEMPLATES,
        "album",
        title=title,
        summary=album.summary(),
        left_out=max(0, len(images) - _MOST_PICTURES),
        rows=album.rows(),
        pictures=pictures,
    )
    return atomic_write_text(path, page)
