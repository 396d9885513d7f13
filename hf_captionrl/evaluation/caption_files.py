"""Files of captions: JSON lines, or folders of Parquet shards; and their names in tables.

A line is `{"image_id": ..., "caption": ..., "captions": [...]}`. `captions` is present if an image has several; `caption` is then
the first of them. Lines are appended and flushed batch by batch. If a killed run left an incomplete last line, the next run
truncates it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from hf_captionrl.data.columns import TEXTS, in_arrow
from hf_captionrl.evaluation.scored_captions import REFERENCES
from hf_captionrl.utils.parts import MANIFEST, read_shards

_SHAPE = 'A line is {"image_id": "...", "caption": "..."}, or has "captions": ["...", ...] instead.'


@dataclass(frozen=True)
class CaptionFile:
    """Captions of one captioner, at least one per image id."""

    name: str
    path: Path
    captions: Mapping[str, list[str]]

    def aligned(self, image_ids: Sequence[str], all_ids: Set[str]) -> Sequence[list[str]]:
        """Captions in the order of a data set, in Arrow."""
        # All ids at once, because each look-up in a column is a search.
        foreign = set(self.captions).difference(all_ids)
        if foreign:
            unknown = [i for i in self.captions if i in foreign]
            raise ValueError(
                f"{self.path}: {len(unknown)} of {len(self.captions)} image ids are not in the data set, such as "
                f"{_some(unknown)}; the data set has ids such as {_some(sorted(all_ids))}. Check --dataset and --split."
            )
        missing = [i for i in image_ids if i not in self.captions]
        if missing:
            raise ValueError(
                f"{self.path} has captions for {len(image_ids) - len(missing)} of the data set's {len(image_ids)} "
                f"images; {len(missing)} are missing, such as {_some(missing)}. Use `captionrl caption` to finish "
                "the file, or compare fewer images with --max_images."
            )
        try:
            return in_arrow((self.captions[i] for i in image_ids), TEXTS)
        except UnicodeEncodeError:  # a lone surrogate, which JSON can contain
            return [self.captions[i] for i in image_ids]


def _some(ids: Sequence[str]) -> str:
    return ", ".join(map(repr, ids[:3])) + (", ..." if len(ids) > 3 else "")


def parse_captions(data: bytes, path: Path, *, is_repeatable: bool = False) -> dict[str, list[str]]:
    """Captions of each image id."""
    found: dict[str, list[str]] = {}
    line_of: dict[str, int] = {}
    # Not splitlines: U+2028 in a caption is a line break for Python, but not for JSON.
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}, is not JSON ({error}): {line[:80]!r}. {_SHAPE}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{where}, holds a {type(value).__name__}, not an object. {_SHAPE}")
        image_id = value.get("image_id")
        if isinstance(image_id, bool) or not isinstance(image_id, str | int) or image_id == "":
            raise ValueError(f"{where}: image_id is {image_id!r}; it must be text or a whole number. {_SHAPE}")
        captions = value["captions"] if value.get("captions") is not None else [value.get("caption")]
        if not isinstance(captions, list) or not captions or not all(isinstance(c, str) for c in captions):
            raise ValueError(f"{where}: the caption of image {image_id!r} is {captions!r:.80}, not text. {_SHAPE}")
        image_id = str(image_id)
        if image_id in found and not is_repeatable:
            raise ValueError(f"{where}: image {image_id!r} is already in line {line_of[image_id]}. Keep one of them.")
        found.setdefault(image_id, []).extend(captions)
        line_of[image_id] = number
    return found


def read_caption_file(
    path: str | os.PathLike[str], *, name: str | None = None, is_repeatable: bool = False
) -> CaptionFile:
    """Read a complete file, or a finished folder of shards. An empty caption is a result.

    With `is_repeatable`, lines may name the same image, as `captionrl album` writes them.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        rows = read_shards(path, ["image_id", "captions"])
        captions = {row["image_id"]: row["captions"] for row in rows if row["captions"] is not None}
        if not captions:
            raise ValueError(f"{path} holds no captions: no image could be read. Read its quarantine.jsonl.")
        return CaptionFile(name or path.name, path, captions)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Write one with `captionrl caption`.")
    data = path.read_bytes()
    torn = data.rpartition(b"\n")[2]
    if torn.strip():
        try:
            json.loads(torn)
        except ValueError:
            number = data.count(b"\n") + 1
            raise ValueError(
                f"{path}: the last line ({number}) is incomplete: {torn[:60]!r}. The run that wrote it was killed. Use the same "
                "`captionrl caption` command again to resume."
            ) from None
    captions = parse_captions(data, path, is_repeatable=is_repeatable)
    if not captions:
        raise ValueError(f"{path} holds no captions. {_SHAPE}")
    return CaptionFile(name or path.stem, path, captions)


def training_of(path: Path) -> tuple[str, set[str]]:
    """The captioner of a file of `captionrl caption`, and the ids of images that it was trained on, as far as known."""
    record = path / "run.json" if path.is_dir() else path.with_suffix(".run.json")
    if not record.is_file():
        return "", set()
    found = json.loads(record.read_text(encoding="utf-8"))
    return str(found.get("settings", {}).get("model")), set(found.get("trained_on", ()))


def source_names(sources: Sequence[str | Path], names: Sequence[str] | None) -> list[str]:
    """Names of the sources: `--names`, or the names of files and models."""
    if names and len(names) != len(sources):
        raise ValueError(
            f"There are {len(sources)} sources of captions and {len(names)} --names. Use one name per source."
        )
    found = list(names or map(_own_name, sources))
    if not names:
        # runs/a/captions.jsonl and runs/b/captions.jsonl
        shared = {name for name in found if found.count(name) > 1}
        for place, source in enumerate(map(Path, sources)):
            if found[place] in shared and (source.exists() or source.suffix == ".jsonl"):
                found[place] = f"{source.resolve().parent.name}/{found[place]}"
    for name in found:
        if found.count(name) > 1:
            raise ValueError(f"Two sources of captions are called {name!r}. Use --names to choose different names.")
        if name == REFERENCES:
            raise ValueError(f"{name!r} is reserved for the human captions. Use --names to choose another name.")
    return found


def _own_name(source: str | Path) -> str:
    """Stem of a file, last part of a captioner's folder, or the whole name on the Hub."""
    from hf_captionrl.hub import public_values

    path = Path(source)
    if path.is_file() or path.suffix == ".jsonl":
        return path.stem
    return path.resolve().name if path.is_dir() else str(public_values(str(source)))


def read_files(paths: Sequence[Path], names: Sequence[str] | None) -> list[CaptionFile]:
    """Read files of captions under the given names; by default, the names of the files."""
    return [read_caption_file(path, name=name) for path, name in zip(paths, source_names(paths, names), strict=True)]
