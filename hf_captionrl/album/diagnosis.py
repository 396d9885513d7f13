"""What is wrong with a caption of an album."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_captionrl.album.album_result import Album, AlbumImage
from hf_captionrl.retrieval.scorer_base import Scorer
from hf_captionrl.text.degenerate_captions import degenerate

__all__ = ["PROBLEMS", "diagnose"]

PROBLEMS = {
    "missing": "the image has no caption",
    "duplicate": "another image, which is not a copy, has the same text",
    "generic": "the caption fits at least half of the images that it was compared with, and at least three",
    "ambiguous": "the caption fits another image at least as well",
    "unread": "the scorer truncates the caption, so the rank applies only to its beginning",
    "repetitive": "a phrase or word is repeated",
    "constraint": "the caption does not meet the constraints on length, words and language, because no candidate does",
}
"""Problems of captions; a caption may have several."""


def diagnose(album: Album, scorer: Scorer) -> None:
    """Set `problems` of every caption whose image can be read."""
    entries = [one for _, one in album.entries()]
    texts = [one.caption for one in entries]
    made = iter(
        one if one.unreadable is not None else replace(one, problems=_problems(one, album.num_compared, *facts))
        for one, *facts in zip(entries, degenerate(texts), _truncated(scorer, texts), strict=True)
    )
    album.images = [replace(next(made), further=tuple(next(made) for _ in image.further)) for image in album.images]


def _problems(image: AlbumImage, num_compared: int, is_repetitive: bool, is_unread: bool) -> tuple[str, ...]:
    if not image.caption.strip():
        return ("missing",)
    found = [] if image.is_distinct else ["duplicate"]
    confused = (image.rank or 1) - 1
    if confused >= max(3, (num_compared - 1) / 2):
        found.append("generic")
    elif confused:
        found.append("ambiguous")
    rest = {"unread": is_unread, "repetitive": is_repetitive, "constraint": not image.meets_constraints}
    return (*found, *(name for name, applies in rest.items() if applies))


def _truncated(scorer: Scorer, texts: Sequence[str]) -> list[bool]:
    """Whether the scorer truncates each caption."""
    count = getattr(scorer, "count_tokens", None)
    if count is None:
        return [bool(scorer.count_truncated([text])) for text in texts]
    return [number > scorer.max_text_tokens for number in count(texts)]
