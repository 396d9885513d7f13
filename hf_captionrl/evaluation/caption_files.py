"""Files of captions and references in the layouts that people have, and their names in tables.

- JSON lines, `{"image_id": ..., "caption": ...}` or `{"image_id": ..., "captions": [...]}`, as `captionrl caption` writes them.
- JSON: results or annotations of COCO, a list of such objects, `{id: caption}`, `{id: [captions]}`, or a Karpathy split.
- CSV, TSV and Parquet with a column of ids and one of captions, also those of `captionrl album`; folders of Parquet shards.
"""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_captionrl.data.columns import CAPTION_COLUMNS, parse_json, printed_list, read_csv, read_text
from hf_captionrl.data.loading import is_json_lines, karpathy_id
from hf_captionrl.metrics.table import REFERENCES
from hf_captionrl.utils.io import FORMULA
from hf_captionrl.utils.parts import read_parts

_SHAPE = 'A line is {"image_id": "...", "caption": "..."}, or has "captions": ["...", ...] instead.'
_ID_COLUMNS = ("image_id", "file_name", "filename", "image", "path", "id")


@dataclass(frozen=True)
class CaptionFile:
    """Captions of one captioner, at least one per image id."""

    name: str
    path: Path
    captions: Mapping[str, list[str]]

    def aligned(self, image_ids: Sequence[str], all_ids: Collection[str]) -> Sequence[list[str]]:
        """Captions in the order of a data set."""
        captions, foreign = self.captions, set(self.captions).difference(all_ids)
        if foreign:  # perhaps only in another normal form of Unicode, as names of files that a Mac wrote
            forms = {unicodedata.normalize("NFC", i): i for i in all_ids}
            captions = {forms.get(unicodedata.normalize("NFC", i), i): group for i, group in captions.items()}
            foreign = set(captions).difference(all_ids)
        if foreign:
            raise ValueError(
                f"{self.path}: image ids that are not in the data set: {len(foreign)} of {len(captions)}, such as "
                f"{_some(sorted(foreign))}; the data set has ids such as {_some(sorted(all_ids))}. Check --dataset and --split."
            )
        missing = [i for i in image_ids if i not in captions]
        if missing:
            raise ValueError(
                f"{self.path} has captions for {len(image_ids) - len(missing)} of the data set's {len(image_ids)} "
                f"images; missing: {len(missing)}, such as {_some(missing)}. Use `captionrl caption` to finish "
                "the file, or compare fewer images with --max_images."
            )
        return [captions[i] for i in image_ids]


def _some(ids: Sequence[str]) -> str:
    return ", ".join(map(repr, ids[:3])) + (", ..." if len(ids) > 3 else "")


_Rows = Iterator[tuple[str, Any]]
"""Objects with an id and captions, and where each stands."""


def _text(value: Any) -> Any:
    """One caption: a text, or an object with a text as in Karpathy's splits."""
    keys = [key for key in ("raw", *CAPTION_COLUMNS) if isinstance(value, Mapping) and key in value]
    return value[keys[0]] if keys else value


def _collected(rows: _Rows, *, is_repeatable: bool) -> dict[str, list[str]]:
    """Captions of each image id. The rows of an album may repeat an image, because they count its captions."""
    collected: dict[str, list[str]] = {}
    first: dict[bool, str] = {}  # the first place with and without a list that was printed as text
    for where, row in rows:
        if not isinstance(row, Mapping):
            raise ValueError(f"{where}, holds a {type(row).__name__}, not an object. {_SHAPE}")
        if row.get("unreadable"):  # an image that `captionrl album` could not open
            continue
        name = next((name for name in _ID_COLUMNS if name in row), "image_id")
        image_id = row.get(name)
        if isinstance(image_id, float) and image_id.is_integer():
            image_id = int(image_id)  # a column of integers with a missing value
        if isinstance(image_id, bool) or not isinstance(image_id, str | int) or image_id == "":
            columns = ", ".join(map(str, list(row)[:8]))
            raise ValueError(f"{where}: {name} is {image_id!r} (of {columns}). Use text or a whole number. {_SHAPE}")
        value = next((row[name] for name in CAPTION_COLUMNS if row.get(name) is not None), None)
        literals = printed_list(value)
        if isinstance(value, str) and value.strip():
            first.setdefault(literals is not None, where)
        values: list[Any] = literals if literals is not None else (value if isinstance(value, list) else [value])
        captions = [_text(each) for each in values]
        if not captions or not all(isinstance(c, str) for c in captions):
            raise ValueError(f"{where}: the caption of image {image_id!r} is {captions!r:.80}, not text. {_SHAPE}")
        before = collected.setdefault(str(image_id), [])
        if before and not is_repeatable and str(row.get("number")) != str(len(before) + 1):
            raise ValueError(
                f"{where}: image {str(image_id)!r} occurs twice. Keep one of them, or write several captions of an image as a list, "
                '"captions": ["...", ...].'
            )
        before.extend(captions)
    if len(first) == 2:
        raise ValueError(
            f"{first[True]}: the captions are a list that was printed as text, and those of {first[False]} are not. Write all "
            "rows in one way."
        )
    return collected


def _json_lines(data: bytes, path: Path) -> _Rows:
    # Not splitlines: U+2028 in a caption is a line break for Python, but not for JSON.
    for number, line in enumerate(data.split(b"\n"), start=1):
        where = f"{path}, line {number}"
        try:
            if line.strip():
                yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}, is not JSON ({error}): {line[:80]!r}. {_SHAPE}") from None


def _json(path: Path) -> _Rows:
    """The rows of one JSON value."""
    value = parse_json(read_text(path), str(path))
    if isinstance(value, Mapping) and isinstance(value.get("annotations"), list):
        return ((f"{path}, annotation {n}", row) for n, row in enumerate(value["annotations"], start=1))
    images = value.get("images") if isinstance(value, Mapping) else None
    if isinstance(images, list) and all(isinstance(image, Mapping) and "sentences" in image for image in images):
        rows = ({"image_id": karpathy_id(image), "captions": image["sentences"]} for image in images)
        return ((f"{path}, image {n}", row) for n, row in enumerate(rows, start=1))
    if isinstance(value, Mapping) and not ("image_id" in value and set(CAPTION_COLUMNS) & set(value)):
        rows = ({"image_id": key, "captions": captions} for key, captions in value.items())
        return ((f"{path}, image {row['image_id']!r}", row) for row in rows)
    entries = value if isinstance(value, list) else [value]
    return ((f"{path}, entry {n}", row) for n, row in enumerate(entries, start=1))


def table_rows(path: Path) -> _Rows:
    """The rows of a CSV or TSV file, whose first line names the columns."""

    def cell(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(cell, value))
        # `Album.to_csv` puts an apostrophe before formulas.
        return value[1:] if FORMULA.match(value) and value[0] == "'" else value

    rows = read_csv(path, "\t" if path.suffix.lower() == ".tsv" else ",")
    return ((f"{path}, row {n}", {k: cell(v) for k, v in row.items()}) for n, row in enumerate(rows, start=1))


def _parquet(path: Path) -> _Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.ParquetFile(path).schema_arrow.names
        # Other columns may hold images.
        ids = ["image_id"] if "image_id" in names else [name for name in _ID_COLUMNS if name in names]
        columns = ids + [name for name in (*CAPTION_COLUMNS, "number", "unreadable") if name in names]
        rows = pyarrow.parquet.read_table(path, columns=columns).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a Parquet file that can be read ({error}). Write it again.") from error
    return ((f"{path}, row {n}", row) for n, row in enumerate(rows, start=1))


def parse_captions(data: bytes, path: Path, *, is_repeatable: bool = False) -> dict[str, list[str]]:
    """Captions of each image id in JSON lines."""
    return _collected(_json_lines(data, path), is_repeatable=is_repeatable)


def read_caption_file(
    path: str | os.PathLike[str], *, name: str | None = None, is_repeatable: bool = False
) -> CaptionFile:
    """Read a complete file or folder of shards of any layout above, in which, if `is_repeatable`, rows may name the same image.

    An empty caption is a result.
    """
    path = Path(path)
    if path.is_dir():
        shards = read_parts(path, ["image_id", "captions"])
        captions = {row["image_id"]: row["captions"] for row in shards if row["captions"] is not None}
        if not captions:
            raise ValueError(f"{path} holds no captions: no image could be read. Read its quarantine.jsonl.")
        return CaptionFile(name or path.name, path, captions)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Write one with `captionrl caption`.")
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        rows = table_rows(path)
    elif suffix == ".parquet":
        rows = _parquet(path)
    elif suffix == ".json" and path.stat().st_size and not is_json_lines(read_text(path)):
        rows = _json(path)
    else:
        rows = _json_lines(read_text(path).encode(), path)
    captions = _collected(rows, is_repeatable=is_repeatable)
    if not captions:
        raise ValueError(f"{path} holds no captions. {_SHAPE}")
    return CaptionFile(name or path.stem, path, captions)


def training_of(path: Path) -> tuple[str, set[str]]:
    """The captioner of a file of `captionrl caption`, and the ids of images that it was trained on, as far as known."""
    record = path / "run.json" if path.is_dir() else path.with_suffix(".run.json")
    if not record.is_file():
        return "", set()
    found = parse_json(read_text(record), str(record))
    return str(found.get("settings", {}).get("model")), set(found.get("trained_on", ()))


def read_references(path: Path) -> CaptionFile:
    """References of images: every layout of [`read_caption_file`], where rows may name the same image."""
    file = read_caption_file(path, name=REFERENCES, is_repeatable=True)
    blank = next((i for i, group in file.captions.items() if not all(text.strip() for text in group)), None)
    if blank is not None:
        raise ValueError(f"{path}: a reference of image {blank!r} is empty. Leave it out.")
    return file


def measured_images(files: Sequence[CaptionFile], references: CaptionFile | None) -> list[str]:
    """Ids of the images that all files caption: captioners are compared on the same images, and all need references if any has."""
    first = files[0]
    for file in files[1:]:
        alone = first.captions.keys() ^ file.captions.keys()
        if alone:
            examples = [i for each in (first, file) for i in each.captions if i in alone]
            raise ValueError(
                f"{first.path} has captions of {len(first.captions)} images and {file.path} of {len(file.captions)}; "
                f"in only one of them: {len(alone)}, such as {_some(examples)}. Use files with captions of the same images."
            )
    if references is None:
        return list(first.captions)
    if lacking := [i for i in first.captions if i not in references.captions]:
        raise ValueError(
            f"{references.path} has no references of {len(lacking)} of the {len(first.captions)} images of {first.path}, such as "
            f"{_some(lacking)}; it has ids such as {_some(list(references.captions))}. Use references with the same ids."
        )
    return [i for i in references.captions if i in first.captions]


def source_names(sources: Sequence[str | Path], names: Sequence[str] | None) -> list[str]:
    """Names of the sources: `--names`, or the stem of a file, the last part of a captioner's folder, or the name on the Hub."""
    if names and len(names) != len(sources):
        raise ValueError(f"There are {len(sources)} sources of captions and {len(names)} --names. Use one per source.")
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
    from hf_captionrl.hub import public_values

    path = Path(source)
    if path.is_file() or path.suffix == ".jsonl":
        return path.stem
    return path.resolve().name if path.is_dir() else str(public_values(str(source)))


def read_files(paths: Sequence[Path], names: Sequence[str] | None) -> list[CaptionFile]:
    """Read files of captions under the given names; by default, the names of the files."""
    return [read_caption_file(path, name=name) for path, name in zip(paths, source_names(paths, names), strict=True)]
