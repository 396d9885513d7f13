"""The review page: served locally, or as one file without a server.

The page gets captions as JSON and shows them as text, never as markup. Its content security policy allows only the page's
script and no external requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_captionrl.reports.templating import render_html

__all__ = ["TEMPLATES", "ReviewBag", "ReviewImage", "render_review"]

TEMPLATES = Path(__file__).parent / "templates"
"""Folder of the pages of this product."""


@dataclass(frozen=True)
class ReviewImage:
    """One image of the page; `source` is a path on the server or a data URL."""

    image_id: str
    source: str
    captions: Sequence[str]


@dataclass(frozen=True)
class ReviewBag:
    """One bag of the page."""

    id: str  # id in the file of decisions
    similarity: float  # mean cosine similarity of the query and the others, in [-1, 1]
    images: Sequence[str]  # keys of its images


def render_review(
    title: str,
    bags: Sequence[ReviewBag],
    images: Mapping[str, ReviewImage],
    *,
    reasons: Mapping[str, str],
    decisions: Mapping[str, Mapping[str, Any]],
    fingerprint: str,
    token: str | None = None,
) -> str:
    """Render the page."""
    if not bags:
        raise ValueError("There are no bags to review. Build a benchmark first.")
    if not 1 <= len(reasons) <= 9:
        raise ValueError(f"There are {len(reasons)} reasons, but only the keys 1 to 9. Use 1 to 9 reasons.")
    missing = next((key for bag in bags for key in bag.images if key not in images), None)
    if missing is not None:
        raise ValueError(f"There is no image {missing!r}, but a bag contains it. Pass the images of all bags.")
    data = {
        "bags": [asdict(bag) for bag in bags],
        "images": {key: asdict(image) for key, image in images.items()},
        "reasons": dict(reasons),
        "decisions": {bag: dict(decision) for bag, decision in decisions.items()},
        "fingerprint": fingerprint,
        "token": token,
    }
    # Unsorted, because the keys 1, 2, ... follow the order of the reasons.
    return render_html(
        TEMPLATES, "review", sort_keys=False, title=title, served=token is not None, reasons=reasons, data=data
    )
