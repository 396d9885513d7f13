"""The page on which people keep or drop bags of look-alikes: served by this machine, or as one file without a server.

Captions come from models and from people. They reach the page as JSON and are shown as text, never as markup; the content
security policy lets the browser run no script but the page's own and fetch nothing from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from markupsafe import Markup

from hf_captionrl.reports.templating import TEMPLATES, content_hash, html_templates

__all__ = ["ReviewBag", "ReviewImage", "render_review"]


@dataclass(frozen=True)
class ReviewImage:
    """One image of the page.

    Args:
        image_id: Its identifier in the data set.
        source: For a `src`: a path of the server, or the image itself as `data:`.
        captions: What people wrote about it.
    """

    image_id: str
    source: str
    captions: Sequence[str]


@dataclass(frozen=True)
class ReviewBag:
    """One bag of the page.

    Args:
        id: Its name in the file of decisions.
        similarity: Mean cosine between the query and the others, in [-1, 1].
        images: Keys of its images.
    """

    id: str
    similarity: float
    images: Sequence[str]


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
        raise ValueError("There are no bags to look at. Build a benchmark first.")
    if not 1 <= len(reasons) <= 9:
        raise ValueError(f"There are {len(reasons)} reasons, and keys from 1 to 9.")
    missing = next((key for bag in bags for key in bag.images if key not in images), None)
    if missing is not None:
        raise ValueError(f"There is no image {missing!r}, which a bag holds.")
    environment = html_templates()
    environment.policies["json.dumps_kwargs"] = {
        "sort_keys": False
    }  # the keys 1, 2, ... follow the order of the reasons
    style = (TEMPLATES / "review.css").read_text(encoding="utf-8")
    script = (TEMPLATES / "review.js").read_text(encoding="utf-8")
    data = {
        "bags": [asdict(bag) for bag in bags],
        "images": {key: asdict(image) for key, image in images.items()},
        "reasons": dict(reasons),
        "decisions": {bag: dict(decision) for bag, decision in decisions.items()},
        "fingerprint": fingerprint,
        "token": token,
    }
    return environment.get_template("review.html.j2").render(
        title=title,
        served=token is not None,
        reasons=reasons,
        data=data,
        # Ours: the only two texts that are not escaped. Their hashes are all the policy allows.
        style=Markup(style),
        script=Markup(script),
        style_hash=content_hash(style),
        script_hash=content_hash(script),
    )
