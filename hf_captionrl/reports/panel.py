"""Several captions of each captioner for a few images, side by side in one HTML file.

The file needs nothing else, holds no script, and its content security policy lets a browser fetch nothing. Captions
come from models and from people; they are escaped wherever they appear.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image

from hf_captionrl.io import atomic_write_text
from hf_captionrl.reports.gallery import embedded_image
from hf_captionrl.reports.templating import TEMPLATES, content_hash, html_templates

__all__ = ["PanelItem", "write_panel"]


@dataclass(frozen=True)
class PanelItem:
    """One image with several captions by each captioner.

    Args:
        image: The image.
        image_id: Its identifier in the data set.
        captions: For each captioner its captions, in the order in which they were sampled.
        references: The human captions.
    """

    image: Image.Image
    image_id: str
    captions: Mapping[str, Sequence[str]]
    references: Sequence[str] = ()


def write_panel(path: str | os.PathLike[str], items: Sequence[PanelItem], title: str, *, note: str = "") -> Path:
    """Write a self-contained page with all captions of each captioner, atomically.

    Reference: Chen and Jin 2020, Figures 1, 2 and 4. A caption that repeats an earlier one of its captioner is pale, and
    beside each captioner stands how many of its captions differ.
    """
    items = list(items)
    if not items:
        raise ValueError("There are no items. A panel needs at least one image with captions.")
    names = list(items[0].captions)
    for item in items:
        if list(item.captions) != names or not all(item.captions.values()):
            found = {name: len(captions) for name, captions in item.captions.items()}
            raise ValueError(
                f"Image {item.image_id!r} has captions by {found}; every image needs one or more by each of {names}, in "
                "this order."
            )
    if not names:
        raise ValueError(f"Image {items[0].image_id!r} has no captioner. Give at least one with its captions.")
    style = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in ("gallery.css", "panel.css"))
    environment = html_templates()
    html = environment.get_template("panel.html.j2").render(
        title=title,
        note=note,
        cards=[_card(item) for item in items],
        # Ours, not a caption's: the only text that is not escaped. Its hash is all the policy allows.
        style=Markup(style),
        style_hash=content_hash(style),
    )
    return atomic_write_text(path, html)


def _card(item: PanelItem) -> dict[str, Any]:
    """What the template shows of one image."""
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
