"""What is wrong with a caption of an album."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_captionrl.apps.album.assignment import Choice
from hf_captionrl.apps.album.distinct import GroupFacts
from hf_captionrl.apps.album.sources import FORMULA, sidecar_of
from hf_captionrl.retrieval.scorer import Scorer
from hf_captionrl.text.degenerate_captions import degenerate
from hf_captionrl.utils.io import atomic_write_text, write_jsonl

# --- The result of [`describe_album`]: captions, copies, confusions, and the files that they are written to ----------

_COLUMNS = (
    "image_id",
    "caption",
    "old_caption",
    "rank",
    "margin",
    "distinct",
    "confused_with",
    "copy_of",
    "problems",
    "number",
)


@dataclass(frozen=True)
class AlbumImage:
    """An image of an album and its caption.

    Args:
        image_id: Name of the image.
        caption: Its caption; empty if it has none.
        old: The caption that it had before.
        rank: Rank of the image among the images compared with the caption, 1 = best; ties count against it. None without a
            caption.
        margin: Similarity to the target minus that to the most similar other image, in [-2, 2].
        is_distinct: Whether no other image, except copies, has the same text.
        confused_with: Rows of the other images that the caption fits at least as well, best first.
        copy_of: Row of the first image that this one is a copy of.
        unreadable: Why the image cannot be read; None if it can.
        meets_constraints: Whether the caption meets the constraints on length, words and language.
        problems: What is wrong with the caption, see [`diagnose`].
        further: The other captions of the image in the same form, if existing captions were diagnosed.
    """

    image_id: str
    caption: str
    old: str | None = None
    rank: int | None = None
    margin: float | None = None
    is_distinct: bool = False
    confused_with: tuple[int, ...] = ()
    copy_of: int | None = None
    unreadable: str | None = None
    meets_constraints: bool = True
    problems: tuple[str, ...] = ()
    further: tuple[AlbumImage, ...] = ()


@dataclass
class Album:
    """Captions of an album.

    Args:
        images: In the order of the album.
        num_compared: Number of images that each caption was ranked among, the target included.
        copy_threshold: Smallest cosine of two images that were compared as possible copies.
        choice: How the captions were chosen; None if existing captions were diagnosed.
        shared: What the captions of each group share, and what varies.
        groups: Name of each image's group.
    """

    images: list[AlbumImage]
    num_compared: int
    copy_threshold: float
    choice: Choice | None = field(default=None, repr=False)
    shared: list[GroupFacts] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)

    @property
    def captions(self) -> list[str]:
        """The caption of each image; empty where there is none."""
        return [image.caption for image in self.images]

    def entries(self) -> list[tuple[int, AlbumImage]]:
        """Every caption with the row of its image: the first caption of each image, then its further ones.

        Returns:
            `list[tuple[int, AlbumImage]]`: One entry per caption; one without caption for an image that has none.
        """
        return [(row, one) for row, image in enumerate(self.images) for one in (image, *image.further)]

    @property
    def copies(self) -> list[tuple[int, ...]]:
        """Groups of rows that show the same image, the first one first."""
        groups: dict[int, list[int]] = {}
        for row, image in enumerate(self.images):
            if image.copy_of is not None:
                groups.setdefault(image.copy_of, [image.copy_of]).append(row)
        return [tuple(rows) for rows in groups.values()]

    @property
    def confusions(self) -> list[tuple[int, int]]:
        """Pairs (row, other row): the caption of the first image fits the second one at least as well. Copies are left out."""
        pairs = ((row, other) for row, one in self.entries() if one.copy_of is None for other in one.confused_with)
        return list(dict.fromkeys(pairs))

    def summary(self) -> dict[str, Any]:
        """Counts and fractions of the album, and the phrases that its groups share.

        Returns:
            `dict`: Counts of images and texts, and fractions of the captions of different images. Problems are counted per text.
        """
        entries = [one for _, one in self.entries()]
        described = [one for one in entries if one.caption.strip() and one.copy_of is None]
        count = max(len(described), 1)
        problems = Counter(problem for one in entries for problem in one.problems)
        found: dict[str, Any] = {
            "images": len(self.images),
            "captions": sum(bool(image.caption.strip()) for image in self.images),
            "texts": sum(bool(one.caption.strip()) for one in entries),
            "copies": sum(image.copy_of is not None for image in self.images),
            "unreadable": sum(image.unreadable is not None for image in self.images),
            "compared_with": self.num_compared - 1,
            "copy_threshold": round(self.copy_threshold, 4),
            "distinct": sum(image.is_distinct for image in described) / count,
            "rank_1": sum(image.rank == 1 for image in described) / count,
            "rank_1_and_distinct": sum(image.is_distinct and image.rank == 1 for image in described) / count,
            "words": sum(len(image.caption.split()) for image in described) / count,
            "problems": dict(sorted(problems.items())),
            "shared": [asdict(fact) for fact in self.shared],
        }
        if self.choice is not None:
            found["texts_possible_more"] = self.choice.gap
            found["rank_1_possible_more"] = self.choice.rank_gap
        return found

    def rows(self) -> list[dict[str, Any]]:
        """The table that the files contain.

        Returns:
            `list[dict]`: One row per caption, in the order of the album; `number` counts the captions of an image, other images are
                named by their ids.
        """
        ids = [image.image_id for image in self.images]
        return [
            {
                "image_id": image.image_id,
                "caption": image.caption,
                "old_caption": image.old,
                "rank": image.rank,
                "margin": None if image.margin is None else round(image.margin, 4),
                "distinct": image.is_distinct,
                "confused_with": [ids[other] for other in image.confused_with[:5]],
                "copy_of": None if image.copy_of is None else ids[image.copy_of],
                "problems": list(image.problems),
                "unreadable": image.unreadable,
                "number": number,
            }
            for first in self.images
            for number, image in enumerate((first, *first.further), start=1)
        ]

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write a table for Excel: UTF-8 with a byte order mark, and no cell that Excel would evaluate as a formula.

        Args:
            path: The file.

        Returns:
            `Path`: The file.
        """
        buffer = io.StringIO(newline="")
        writer = csv.writer(buffer)
        writer.writerow(_COLUMNS)
        for row in self.rows():
            writer.writerow([_safe_cell(row[name]) for name in _COLUMNS])
        return atomic_write_text(path, "\ufeff" + buffer.getvalue())

    def to_jsonl(self, path: str | os.PathLike[str]) -> Path:
        """Write one JSON object per caption.

        Args:
            path: The file.

        Returns:
            `Path`: The file.
        """
        return write_jsonl(path, self.rows())


def summary_text(summary: dict[str, Any], album: Album) -> str:
    """The summary as sentences."""
    lines = [
        f"{', '.join(summary['outputs'])}: captions of {summary['captions']:,} of {summary['images']:,} images in "
        f"{summary['seconds']:,.0f} s.",
        f"{summary['distinct']:.1%} of the different images have a distinct caption; {summary['rank_1']:.1%} of the captions "
        f"rank their image first among {album.num_compared:,}.",
    ]
    if summary["texts"] > summary["captions"]:
        lines[1] = (
            f"Of {summary['texts']:,} captions, {summary['distinct']:.1%} are distinct, and {summary['rank_1']:.1%} rank their image "
            f"first among {album.num_compared:,}; copies are left out."
        )
    if summary["copies"]:
        lines.append(
            f"{summary['copies']:,} images are copies (cosine of at least {album.copy_threshold:.3f}) and share captions."
        )
    else:
        lines.append(f"No images are copies (cosine of at least {album.copy_threshold:.3f}).")
    if summary["problems"]:
        lines.append(
            "Problems: " + ", ".join(f"{number:,} {name}" for name, number in summary["problems"].items()) + "."
        )
    for fact in album.shared:
        if fact.shared:
            name = f" in {fact.group!r}" if fact.group else ""
            varying = ", ".join(word for word, _ in fact.varying[:8])
            lines.append(f"Shared{name}: {', '.join(fact.shared)}. Varying: {varying}.")
    if summary.get("texts_possible_more") or summary.get("rank_1_possible_more"):
        lines.append(
            f"A better choice could give at most {summary['texts_possible_more']:,} more images a distinct text and "
            f"{summary['rank_1_possible_more']:,} more rank 1. Use a larger --max_component to search longer."
        )
    bad: Sequence[str] = summary["unreadable_images"]
    if bad:
        lines.append(f"{summary['unreadable']:,} images cannot be read, such as {bad[0]!r}.")
    if adapted := summary.get("adapt"):
        lines.append(adapted["sentence"])
    return "\n".join(lines)


def _safe_cell(value: Any) -> Any:
    """A cell that spreadsheets show as text: an apostrophe precedes texts that would be formulas."""
    if value is None:
        return ""
    if isinstance(value, list):
        value = " | ".join(value)
    return "'" + value if isinstance(value, str) and FORMULA.match(value) else value


# --- Files of an album: tables, JSON lines, text files beside the images, metadata -----------------------------------


def write_metadata(album: Album, paths: Sequence[str | None], path: str | os.PathLike[str]) -> Path:
    """Write the `metadata.jsonl` of an image folder: `file_name`, relative to the file, and `text`."""
    path = Path(path)
    rows = []
    for image, file in zip(album.images, paths, strict=True):
        if file is None:
            raise ValueError(
                f"Image {image.image_id!r} is not a file, and metadata name files. Write a .jsonl or .csv file."
            )
        if image.caption:
            name = os.path.relpath(os.path.abspath(file), os.path.abspath(path.parent))
            rows.append({"file_name": Path(name).as_posix(), "text": image.caption})
    return write_jsonl(path, rows)


def check_sidecars(image_ids: Sequence[str], paths: Sequence[str | None]) -> list[Path]:
    """The text file beside each image; refuses images that are not files or would share a text file."""
    owner: dict[Path, str] = {}
    for image_id, file in zip(image_ids, paths, strict=True):
        if file is None:
            raise ValueError(f"Image {image_id!r} is not a file, so no text file can stand beside it. Use --output.")
        target = sidecar_of(file)
        if target in owner:
            raise ValueError(
                f"{owner[target]!r} and {image_id!r} would have the same text file, {str(target)!r}. Rename one of them."
            )
        owner[target] = image_id
    return list(owner)


def write_sidecars(album: Album, paths: Sequence[str | None]) -> int:
    """Write the caption of each image into the text file beside it; returns the number of files.

    A file that has this content is left alone, so that a repeated command changes nothing.
    """
    number = 0
    for image, file in zip(album.images, paths, strict=True):
        if file is None or not image.caption:
            continue
        target, text = sidecar_of(file), image.caption + "\n"
        if not target.is_file() or target.read_text(encoding="utf-8", errors="replace") != text:
            atomic_write_text(target, text)
        number += 1
    return number


# --- What is wrong with a caption of an album ------------------------------------------------------------------------

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
