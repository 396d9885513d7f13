"""Captions of an album as HTML for a page: captioners side by side, or one caption per image.

Captions come from models and names from the user, so both are escaped everywhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from hf_captionrl.album.album_result import Album
from hf_captionrl.album.distinct_captions import Finding
from hf_captionrl.reports.gallery import embedded_image
from hf_captionrl.reports.templating import TEMPLATES, html_templates

__all__ = ["album_style", "album_thumbnail", "render_album", "render_comparison", "spoken_list"]

_SIDE = 256
_SMALL_SIDE = 72
"""Longest side of an image, and of the thumbnail of a wrong image that was found, in pixels."""


def album_style() -> str:
    """The style of both views."""
    return (TEMPLATES / "album.css").read_text(encoding="utf-8")


def album_thumbnail(image: Image.Image) -> Image.Image:
    """An image at the size of the pages."""
    copy = image.copy()
    copy.thumbnail((_SIDE, _SIDE))
    return copy


def render_comparison(images: Sequence[Image.Image], findings: Mapping[str, Sequence[Finding]]) -> str:
    """Captions of several captioners side by side, each with its rank and the image that it finds."""
    for name, mine in findings.items():
        if len(mine) != len(images):
            raise ValueError(f"{name!r} has {len(mine)} findings for {len(images)} images. Use one per image.")
    columns = [
        {"name": name, "found": sum(finding.rank == 1 for finding in mine), "findings": mine}
        for name, mine in findings.items()
    ]
    small = [_shown(image, _SMALL_SIDE) for image in images]
    return _render("comparison", images, columns=columns, small=small)


def render_album(images: Sequence[Image.Image], album: Album) -> str:
    """One caption per image, its copies, and the images that it also fits."""
    if len(album.images) != len(images):
        raise ValueError(f"There are {len(album.images)} captions for {len(images)} images. Use one per image.")
    copies = [spoken_list([row + 1 for row in rows]) for rows in album.copies]
    fits = [
        spoken_list([other + 1 for other in image.confused_with]) if image.confused_with else ""
        for image in album.images
    ]
    return _render("album", images, album=album, summary=album.summary(), copies=copies, fits=fits)


def spoken_list(items: Sequence[object]) -> str:
    """Items as in a sentence: "a, b and c"."""
    *before, last = map(str, items)
    return f"{', '.join(before)} and {last}" if before else last


def _shown(image: Image.Image, side: int) -> dict[str, Any]:
    copy = image.copy()
    copy.thumbnail((side, side))
    return embedded_image(copy)


def _render(view: str, images: Sequence[Image.Image], **values: Any) -> str:
    environment = html_templates()
    shown = [_shown(image, _SIDE) for image in images]
    return environment.get_template("album.html.j2").render(view=view, images=shown, **values)
