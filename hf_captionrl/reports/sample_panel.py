"""Several captions per captioner for a few images, side by side in one HTML file.

The file is self-contained, has no script, and its content security policy forbids requests. Captions come from models and
people; they are always escaped.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from hf_captionrl.io import atomic_write_text
from hf_captionrl.reports.gallery import embedded_image
from hf_captionrl.reports.templating import render_page

__all__ = ["PanelItem", "write_panel"]


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
        if list(item.captions) != names or not all(item.captions.values()):
            found = {name: len(captions) for name, captions in item.captions.items()}
            raise ValueError(
                f"Image {item.image_id!r} has captions by {found}; every image needs at least one by each of {names}. Pass "
                "them in this order."
            )
    if not names:
        raise ValueError(f"Image {items[0].image_id!r} has no captioner. Pass at least one with its captions.")
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
