"""Converts any table to the columns `image`, `image_id` and `captions`, without copying images."""

from __future__ import annotations

import csv
import json
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import datasets
import numpy as np
import pyarrow as pa
from datasets.fingerprint import Hasher
from datasets.table import ConcatenationTable, InMemoryTable, concat_tables

from hf_captionrl.data.images import is_address, paths_without_bytes, refuse_outside
from hf_captionrl.data.video import VIDEO_FRAMES, VIDEO_SUFFIXES
from hf_captionrl.retrieval.feature_cache import RowLookup

# --- Reads JSON lines, CSV and Parquet. A file is either read completely or refused; no row is dropped silently ------

logger = logging.getLogger(__name__)

Row = dict[str, Any]

CAPTION_COLUMNS = ("captions", "caption", "text", "sentences", "sentence", "raw")
"""Usual names of the caption column, in the order of the search."""


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}). Save it as UTF-8.") from error


def parse_json(text: str, where: str) -> Any:
    """A value of JSON."""

    def unique(pairs: list[tuple[str, Any]]) -> Row:
        row = dict(pairs)
        if len(row) < len(pairs):
            key = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"{where} has the key {key!r} twice. Write several captions as a list: [..., ...].")
        return row

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON ({error}). Correct or remove it.") from error


def is_json_lines(text: str) -> bool:
    """Whether a text that begins with `{` holds one object per line."""
    first, _, rest = text.strip().partition("\n")
    try:
        json.loads(first)
    except (json.JSONDecodeError, RecursionError):
        return False
    return bool(rest.strip())


def read_json_lines(path: Path) -> list[Row]:
    """The objects of a file of JSON lines."""
    rows = []
    # Not splitlines(), which also splits at U+2028 inside a caption.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            row = parse_json(line, f"Line {number} of {path}")
            if not isinstance(row, dict):
                raise ValueError(
                    f'Line {number} of {path} holds a {type(row).__name__}, not an object. Write {{"file_name": ...}}.'
                )
            rows.append(row)
    return rows


def read_csv(path: Path) -> list[Row]:
    """The rows of a CSV file, whose first line names the columns.

    Several columns with the same name for captions (`caption`, `text`, ...) become a list of captions, without empty cells
    if any is filled.
    """
    rows: list[Row] = []
    finished = 0  # lines of the records that were read completely
    with path.open(encoding="utf-8-sig", newline="") as file:
        # If not strict, an unclosed quote would extend the field to the next quote or the end of the file.
        lines = csv.reader(file, strict=True)
        try:
            names = [name.strip() for name in next(lines, [])]
            repeated = _repeated_columns(names, path)
            finished = lines.line_num
            for values in lines:
                if values and len(values) != len(names):
                    cure = 'Put captions with commas into quotes: a.jpg,"a dog, running".'
                    raise ValueError(
                        f"Line {lines.line_num} of {path} has {len(values)} fields, and the first line {len(names)}. "
                        f"{cure if len(values) > len(names) else 'Write a comma for each empty field too.'}"
                    )
                if values:
                    _warn_of_rows_inside(values, names, f"Line {lines.line_num} of {path}")
                    rows.append(_csv_row(names, values, repeated, f"Line {lines.line_num} of {path}"))
                finished = lines.line_num
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error}). Save it as UTF-8.") from error
        except csv.Error as error:
            begins = f"The row that begins in line {finished + 1} of {path}"
            if "unexpected end" in str(error):
                raise ValueError(f"{begins} has a quote that is never closed. Close it, or remove it.") from error
            if "expected after" in str(error):
                raise ValueError(
                    f"{begins} has text after a closing quote: a quote before it is not closed, or a quote inside a "
                    f'field is not doubled. Close it, or write two: "a ""big"" dog".'
                ) from error
            raise ValueError(f"{begins} is not valid CSV ({error}). Correct it.") from error
    return rows


def _repeated_columns(names: list[str], path: Path) -> frozenset[str]:
    """Names of caption columns that occur several times."""
    repeated = frozenset(name for name, number in Counter(names).items() if number > 1 and name)
    refused = sorted(repeated - set(CAPTION_COLUMNS))
    if refused:
        raise ValueError(
            f"The first line of {path} names the column {refused[0]!r} {names.count(refused[0])} times, and only one "
            f"could be read. Use different names; only several columns 'caption' are read as several captions."
        )
    return repeated


def _warn_of_rows_inside(values: list[str], names: list[str], where: str) -> None:
    """Warn if a quote is closed in a later row, which joins the rows between: valid CSV, but usually an error."""
    for value in values:
        inner = [line for line in value.splitlines()[1:] if line.count(",") == len(names) - 1]
        if inner and len(names) > 1:
            logger.warning(
                "%s ends a text of several lines, of which %r looks like a row. Check its quotes.", where, inner[0]
            )


def _csv_row(names: list[str], values: list[str], repeated: frozenset[str], where: str) -> Row:
    row: Row = {name: [] if name in repeated else None for name in names if name}
    for number, (name, value) in enumerate(zip(names, values, strict=True), start=1):
        if name in repeated:
            row[name].append(value)
        elif name:
            row[name] = value
        elif value.strip():
            raise ValueError(
                f"{where} has {value!r:.60} in column {number}, which has no name in the first line. Name it."
            )
    for name in repeated:
        # For images with fewer captions than others. A row without captions keeps its empty cells, so that the check finds it.
        row[name] = [text for text in row[name] if text.strip()] or row[name]
    return row


def read_rows(path: Path) -> list[Row]:
    """The rows of a file by its suffix."""
    suffix = path.suffix.lower()
    if suffix == ".csv":
        return read_csv(path)
    if suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
        if len(set(table.column_names)) < len(table.column_names):
            raise ValueError(f"{path} has two columns with the same name: {table.column_names}. Use different names.")
        return table.to_pylist()
    return read_json_lines(path)


# --- Columns of data sets that stay in Arrow: read row by row or in batches, and made from iterators -----------------

T = TypeVar("T")

_ROWS_AT_ONCE = 1024


class ColumnView(Sequence[T], Generic[T]):
    """Values of a column, read when they are indexed; only a few are Python objects at a time."""

    def __init__(self, ds: datasets.Dataset, name: str, convert: Callable[[Any], T] | None = None) -> None:
        self._rows = ds.select_columns(name).with_format(None)
        self._name, self._convert = name, convert

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int]) -> list[T]: ...
    def __getitem__(self, index: Any) -> Any:
        found = self._rows[index][self._name]
        if self._convert is None:
            return found
        return list(map(self._convert, found)) if isinstance(index, slice | Sequence) else self._convert(found)

    def __iter__(self) -> Iterator[T]:
        for batch in self._rows.iter(_ROWS_AT_ONCE):
            values = batch[self._name]
            yield from values if self._convert is None else map(self._convert, values)


class ChunkView(Sequence[T], Generic[T]):
    """Values of an Arrow column that is not part of a data set, read when they are indexed."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            rows = range(*index.indices(len(self)))
            return self.column.take(pa.array(rows, pa.int64())).to_pylist()
        return self.column[range(len(self))[index]].as_py()

    def __iter__(self) -> Iterator[T]:
        return chunk_values(self.column)


class MappedRows(Sequence[T], Generic[T]):
    """`function(row, value)` of the values of a sequence, computed when they are read."""

    def __init__(self, values: Sequence[Any], function: Callable[[int, Any], T]) -> None:
        self._values, self._function = values, function

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: Any) -> Any:
        rows = range(len(self))[index]
        if isinstance(rows, range):
            return list(map(self._function, rows, self._values[index]))
        return self._function(rows, self._values[rows])

    def __iter__(self) -> Iterator[T]:
        return map(self._function, count(), self._values)


def id_column(ds: datasets.Dataset, name: str = "image_id") -> ColumnView[str]:
    """Ids of the rows, as text."""
    return ColumnView(ds, name, str)


def caption_column(ds: datasets.Dataset, name: str = "captions") -> ColumnView[list[str]]:
    """The captions of each row: a list, a single text, or none."""
    return ColumnView(ds, name, _texts)


def _texts(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def arrow_column(values: Iterable[Any], kind: pa.DataType) -> pa.ChunkedArray:
    """A column of the values of an iterator, in chunks."""
    given = iter(values)
    chunks = []
    while part := list(islice(given, _ROWS_AT_ONCE)):
        chunks.append(pa.array(part, kind))
    return pa.chunked_array(chunks, kind)


def chunk_values(column: pa.ChunkedArray) -> Iterator[Any]:
    """The values of a column; only a few are Python objects at a time."""
    for chunk in column.chunks:
        for start in range(0, len(chunk), _ROWS_AT_ONCE):
            yield from chunk.slice(start, _ROWS_AT_ONCE).to_pylist()


def select_rows(ds: datasets.Dataset, rows: np.ndarray) -> datasets.Dataset:
    """`Dataset.select`, which would make a list of the rows; `(N,)` of them."""
    if not len(rows) or (np.diff(rows) == 1).all():
        return ds.select(range(int(rows[0]), int(rows[-1]) + 1) if len(rows) else range(0))
    chosen: Any = pa.array(rows, pa.uint64())
    fingerprint = Hasher.hash((ds._fingerprint, "select_rows", rows.tobytes()))
    if ds._indices is not None:
        chosen = ds._indices.column(0).take(chosen)
    table = InMemoryTable.from_arrays([chosen], names=["indices"])
    return datasets.Dataset(ds.data, info=ds.info.copy(), split=ds.split, indices_table=table, fingerprint=fingerprint)


# --- Arguments of a source of captions, its raw splits before their columns are converted, and the names of splits ---

SPLIT_NAMES: dict[str, str] = {
    "train": "train",
    "training": "train",
    "restval": "train",  # Karpathy's 30,504 validation images, which are used for training
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "validate": "validation",  # MSR-VTT
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
"""Names of splits in data sets, and our name for each."""


@dataclass(frozen=True)
class SourceArguments:
    """Location and columns of a caption data set.

    Args:
        dataset_config (`str`, *optional*): Configuration of a Hub data set, or of the embedded one.
        revision (`str`, *optional*): Revision of a Hub data set.
        data_dir (`str` or `Path`, *optional*): Folder of `"imagefolder"`.
        image_root (`str` or `Path`, *optional*): Folder that paths in the image column are relative to. Paths that
            leave it, by `..`, by a link, or as an absolute path, are refused.
        image_column (`str`): Column with images, bytes or paths. If the default is missing, the only column with a
            usual name (`file_name`, `img`, ...) is used.
        caption_column (`str`): Column with a caption or a list of captions; the default likewise (`caption`, `text`,
            `sentences`, ...). Several usual names are an error.
        image_id_column (`str`, *optional*): Column with ids. Default: a column `image_id`, else the path, else
            `"<split>-<row>"`. Rows of one image are joined; one id for two images is an error.
        num_frames (`int`): 0 for images. For videos the number of frames of each, see `sample_frames`: the splits then
            have a column `video_frames` with that number, and `image` is not decoded on access.
        require_captions (`bool`): False also accepts data without captions; `captions` is then empty.
    """

    dataset_config: str | None = None
    revision: str | None = None
    data_dir: str | Path | None = None
    image_root: str | Path | None = None
    image_column: str = "image"
    caption_column: str = "captions"
    image_id_column: str | None = None
    num_frames: int = 0
    require_captions: bool = True

    def __post_init__(self) -> None:
        if self.num_frames < 0:
            raise ValueError(f"num_frames is {self.num_frames}. Use 0 for images, or the number of frames per video.")


@dataclass
class Source:
    """Raw splits of a source."""

    name: str  # name of the source in messages
    splits: dict[str, datasets.Dataset | list[Row]]  # split name to rows
    root: Path | None = None  # folder that the paths in the image column are relative to, and must not leave
    image_column: str | None = None  # the image column of this kind of source
    has_videos: bool = False  # True if the source is known to contain videos
    has_named_splits: bool = True  # False if the source does not name splits; all rows are then `train`
    has_captions: bool = True  # False for a folder of images without metadata


def split_name(name: Any) -> str | None:
    """Our name for a split."""
    return SPLIT_NAMES.get(name.strip().lower()) if isinstance(name, str) else None


def source_of_rows(
    name: str, rows: list[Row], where: str, root: Path | None, image_column: str | None = None
) -> Source:
    """A source whose rows may name their splits."""
    splits = _by_split(rows, where)
    named = any(split_name(row.get("split")) is not None for row in rows)
    return Source(name, splits, root, image_column, has_named_splits=named)


def _by_split(rows: Iterable[Row], where: str) -> dict[str, datasets.Dataset | list[Row]]:
    """Rows by our split names; all are `train` if no row names a split."""
    rows = list(rows)
    if not rows:
        raise ValueError(f"{where} holds no rows. Check that it is the right file.")
    known = [split_name(row.get("split")) is not None for row in rows]
    if not any(known):
        return {"train": rows}
    if not all(known):
        odd = known.index(False)
        raise ValueError(
            f"{where}: row {odd + 1} (the first is 1) has the split {rows[odd].get('split')!r}; other rows name one of "
            f"{sorted(SPLIT_NAMES)}. Name a split in every row, or rename the column."
        )
    splits: dict[str, datasets.Dataset | list[Row]] = {}
    for row in rows:
        split = splits.setdefault(str(split_name(row["split"])), [])
        split.append({key: value for key, value in row.items() if key != "split"})  # type: ignore[union-attr]
    return splits


def by_split_column(rows: Any) -> dict[str, datasets.Dataset | list[Row]]:
    """The splits named by a column `split`, as in Flickr30k on the Hub."""
    if getattr(rows.features.get("split"), "dtype", None) != "string":
        return {}
    names: ColumnView[Any] = ColumnView(rows, "split")
    ours = {name: split_name(name) for name in dict.fromkeys(names)}
    found = list(dict.fromkeys(ours.values()))
    if None in found or len(found) < 2:
        return {}
    numbers = np.fromiter((found.index(ours[name]) for name in names), np.int8, len(names))  # of the split of each row
    rest = rows.remove_columns("split")
    return {str(name): select_rows(rest, np.flatnonzero(numbers == n)) for n, name in enumerate(found)}


# --- Cleans captions and finds faulty ones ---------------------------------------------------------------------------

MAX_CAPTION_WORDS = 200
"""Longest accepted caption in words: longer than the captions of data sets, shorter than a web page."""

CAPTION_REMEDIES: dict[str, str] = {
    "caption_missing": "give the row at least one caption, or remove the row",
    "caption_not_text": "write the caption as a string, or set caption_column to the column that holds text",
    "caption_empty": "write a caption with at least one letter or digit, or remove it",
    "caption_too_long": "shorten the caption, or raise max_caption_words",
}
"""Faults of captions, and the remedy for each."""

# Without spaces, a Chinese sentence and base64 each count as one word.
_CHARACTERS_PER_WORD = 20
_SURROGATE = re.compile("[\ud800-\udfff]")
# Kept: zero-width (non-)joiners are part of Persian, Indic scripts and emoji; tags (U+E0020-E007F) are part of flags.
_KEPT_FORMAT = {"\u200c", "\u200d"} | {chr(code) for code in range(0xE0020, 0xE0080)}
_KEYS_OF_TEXT = ("raw", "caption", "text", "sentence")


def clean_caption(caption: str) -> str:
    r"""Normalise a caption: Unicode NFC, no control characters, single spaces.

    Control characters (category Cc) and line breaks become spaces; invisible format characters (Cf: byte-order marks,
    soft hyphens, bidirectional overrides) are dropped, except joiners; half surrogate pairs become U+FFFD.

    Args:
        caption (`str`): Any string.

    Returns:
        `str`: The clean caption; empty if nothing remains.
    """
    if caption.isascii():
        if not caption.isprintable():
            caption = "".join(c if c.isprintable() else " " for c in caption)
        return " ".join(caption.split())
    caption = unicodedata.normalize("NFC", _SURROGATE.sub("\ufffd", caption))
    characters = []
    for c in caption:
        category = unicodedata.category(c)
        if category == "Cc":
            characters.append(" ")
        elif category != "Cf" or c in _KEPT_FORMAT:
            characters.append(c)
    return " ".join("".join(characters).split())


def caption_fault(caption: Any, *, max_words: int = MAX_CAPTION_WORDS) -> tuple[str, str] | None:
    """The fault of a cleaned caption, or None."""
    if not isinstance(caption, str):
        return "caption_not_text", "the caption is not a string (empty, a number, or nested too deep)"
    if not any(map(str.isalnum, caption)):
        return "caption_empty", f"the caption {caption[:40]!r} has no letter or digit"
    words = caption.count(" ") + 1
    if words > max_words or len(caption) > max_words * _CHARACTERS_PER_WORD:
        return (
            "caption_too_long",
            f"the caption {caption[:40] + '...'!r} has {words} words and {len(caption)} characters, "
            f"more than {max_words} words or {max_words * _CHARACTERS_PER_WORD} characters",
        )
    return None


def to_caption_list(value: Any) -> list[str | None]:
    """The cleaned captions of one row, in any form that sources use."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        value = _text_of(value)
    captions = value if isinstance(value, list | tuple) else [value]
    clean: list[str | None] = []
    for caption in captions:
        if isinstance(caption, Mapping):
            caption = _text_of(caption)
        clean.append(clean_caption(caption) if isinstance(caption, str) else None)
    return clean


def _text_of(value: Mapping[str, Any]) -> Any:
    return next((value[key] for key in _KEYS_OF_TEXT if key in value), None)


# --- Converts any table to the columns `image`, `image_id` and `captions`, without copying images --------------------

CAPTIONS = datasets.List(datasets.Value("string"))
"""Feature of the `captions` column."""

USUAL_NAMES = {
    "image_column": ("image", "file_name", "image_path", "img", "filename", "filepath", "jpg", "png", "video"),
    "caption_column": CAPTION_COLUMNS,
}
"""Usual names of columns, in the order of the search if the default name is missing."""

_TEXTS = pa.list_(pa.string())
_ROWS_OF_CHUNK = 16_384

_DEFAULTS = {"image_column": "image", "caption_column": "captions"}


def caption_lists(ds: datasets.Dataset, column: str = "captions") -> list[list[str]]:
    """The captions of each row: a list, a single text, or none."""
    return list(caption_column(ds, column))


def undecoded(ds: datasets.Dataset, column: str = "image") -> datasets.Dataset:
    """The same data set with images as `{"bytes", "path"}`, not decoded on every access."""
    if isinstance(ds.features.get(column), datasets.Image):
        return ds.cast_column(column, datasets.Image(decode=False))
    return ds


def replace_column(
    ds: datasets.Dataset, name: str, values: Sequence[Any] | pa.ChunkedArray, feature: Any
) -> datasets.Dataset:
    """Set one column without copying the others.

    `Dataset.map` and `add_column` after `select` would rewrite every image; here only selections that repeat rows are
    copied.
    """
    if len(values) != len(ds):
        raise ValueError(f"{len(values)} values for {len(ds)} rows of column {name!r}. Pass one per row.")
    table, indices = ds.data, ds._indices
    schema = datasets.Features({name: feature}).arrow_schema
    if not isinstance(values, pa.ChunkedArray):
        values = arrow_column(values, schema.field(name).type)
    if indices is not None:
        spread = _spread(values, indices.column(0).to_numpy().astype(np.int64), table.num_rows)
        if spread is None:
            # A row that is selected twice may get two values, so it is copied.
            table, indices = InMemoryTable(ds.with_format("arrow")[:]), None
        else:
            values = spread
    if name in table.column_names:
        table = table.drop([name])
    column = InMemoryTable.from_pydict({name: values}, schema=schema)
    if isinstance(table, ConcatenationTable):
        # If all columns of a block are removed, `datasets` keeps a table without columns and rows.
        blocks = [[block for block in row if block.num_columns] for row in table.blocks]
        table = ConcatenationTable.from_blocks([row for row in blocks if row]) if any(blocks) else None
    table = column if table is None or not table.num_columns else concat_tables([table, column], axis=1)
    info = ds.info.copy()
    kept = {column: kind for column, kind in ds.features.items() if column != name}
    info.features = datasets.Features({**kept, name: feature})
    # Without a fingerprint, `datasets` would read every image in memory to compute one. Chunk by chunk, because the hasher
    # copies what it hashes.
    hasher = Hasher()
    for part in (ds._fingerprint, str(schema), *column.column(0).chunks):
        hasher.update(part)
    return datasets.Dataset(table, info=info, split=ds.split, indices_table=indices, fingerprint=hasher.hexdigest())


def _spread(values: pa.ChunkedArray, shown: np.ndarray, num_rows: int) -> pa.ChunkedArray | None:
    """The values at the selected rows of the table, and no value at the others; None if a row is selected twice."""
    place: np.ndarray = np.full(num_rows, -1, np.int64)  # of each row of the table among the values
    place[shown] = np.arange(len(shown))
    if np.count_nonzero(place >= 0) < len(shown):
        return None
    if (np.diff(shown) < 0).any():
        # Once, not for every chunk below.
        joined = values.combine_chunks()
        values = joined if isinstance(joined, pa.ChunkedArray) else pa.chunked_array([joined])
    chunks = []
    for start in range(0, num_rows, _ROWS_OF_CHUNK):
        part = place[start : start + _ROWS_OF_CHUNK]
        found = part[part >= 0]
        first, end = (int(found.min()), int(found.max()) + 1) if len(found) else (0, 0)
        rows = pa.array(part - first, mask=part < 0)
        # Applied to a slice, because `take` may copy all chunks.
        chunks.append(values.slice(first, end - first).combine_chunks().take(rows))
    return pa.chunked_array(chunks, values.type)


def with_split(ds: datasets.Dataset, split: str) -> datasets.Dataset:
    """The same data set under the name of another split."""
    return datasets.Dataset(
        ds.data,
        info=ds.info,
        split=datasets.NamedSplit(split),
        indices_table=ds._indices,
        fingerprint=Hasher.hash((ds._fingerprint, split)),
    )


def pick_column(names: Sequence[str], wanted: str, argument: str, where: str) -> str:
    """The column that an argument names; if its default is missing, the only column with a usual name."""
    if wanted in names:
        return wanted
    if wanted == _DEFAULTS[argument]:
        found = [name for name in USUAL_NAMES[argument] if name in names]
        if len(found) == 1:
            logger.info("%s: no column %r, taking %r (%s).", where, wanted, found[0], argument)
            return found[0]
        if found:
            raise ValueError(
                f"{where}: {argument} could be any of {found}. Set {argument} (--{argument}) to one of them."
            )
    names = sorted(names)
    raise ValueError(
        f"{where} has no column {wanted!r}; its columns are {names}. Set {argument} (--{argument}) to one of them."
    )


def _pick_captions(names: Sequence[str], wanted: str, where: str, required: bool) -> str | None:
    """The column with captions; `None` if captions are not required and no or several columns match."""
    if not required and wanted == _DEFAULTS["caption_column"] and wanted not in names:
        found = [name for name in CAPTION_COLUMNS if name in names]
        return found[0] if len(found) == 1 else None
    return pick_column(names, wanted, "caption_column", where)


def _as_text(value: Any) -> str | None:
    """Any JSON value as a string for a table; a half surrogate pair becomes a question mark."""
    text = value if isinstance(value, str) or value is None else json.dumps(value)
    return None if text is None else text.encode("utf-8", "replace").decode()


def _rows_to_dataset(rows: list[Row], image_column: str, caption_column: str | None) -> datasets.Dataset:
    """A table of JSON rows, which may have different keys and values of mixed types."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns: dict[str, Any] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if name == image_column:
            values = [value.get("path") if isinstance(value, dict) else value for value in values]
            paths = [_as_text(value) if isinstance(value, str) and value else None for value in values]
            columns[name] = pa.array(paths, pa.string())
        elif name == caption_column:
            columns[name] = pa.array([to_caption_list(value) for value in values], pa.list_(pa.string()))
        else:
            try:
                columns[name] = pa.array(values)
            except (pa.ArrowException, UnicodeError, OverflowError):
                columns[name] = pa.array([_as_text(value) for value in values], pa.string())  # mixed types
    return datasets.Dataset(pa.table(columns))


def _with_images(
    ds: datasets.Dataset, column: str, root: Path | None, where: str, num_frames: int, in_memory: bool
) -> datasets.Dataset:
    """The column `column` as a `datasets.Image` column `image`, which is not decoded if it holds videos."""
    feature = ds.features[column]
    kind = getattr(feature, "dtype", None)
    is_text = kind in {"string", "large_string"}
    # Joined here, because the reader of a row does not know the root. Absolute paths and addresses are unchanged.
    paths = paths_without_bytes(ds.data.column(column))
    if is_text:
        raw: ColumnView[str | None] = ColumnView(ds, column)
        paths = arrow_column((_join(root, path) for path in raw), pa.string())
    # Files of an image column in memory are opened wherever they are; a text column needs a root.
    if is_text or root is not None or not in_memory:
        refuse_outside(chunk_values(paths), root, f"{where}, column {column!r}")
    # On access, datasets.Image would fetch an address, which open_image refuses.
    fetches = any(path and "://" in path for path in chunk_values(paths))
    result = datasets.Image(decode=not (num_frames or fetches))
    if is_text:
        film = next(
            (path for path in chunk_values(paths) if path and Path(path).suffix.lower() in VIDEO_SUFFIXES), None
        )
        if film is not None and not num_frames:
            raise ValueError(
                f"{where}: column {column!r} holds videos ({film!r}). Set num_frames to the number of frames per video, e.g. 8."
            )
        files = [
            pa.StructArray.from_arrays([pa.nulls(len(p), pa.binary()), p], ["bytes", "path"]) for p in paths.chunks
        ]
        image = pa.chunked_array(files, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
        with_image = replace_column(ds, "image", image, result)
        # In this order, because a table without columns loses its number of rows.
        return with_image if column == "image" else with_image.remove_columns(column)
    if column != "image":
        ds = ds.rename_column(column, "image")
    if isinstance(feature, datasets.Image):
        return ds.cast_column("image", result)
    holds_bytes = isinstance(feature, dict) and {"bytes", "path"} >= set(feature)
    if kind in {"binary", "large_binary"} or holds_bytes:
        return ds.cast_column("image", result)
    raise ValueError(
        f"{where}: column {column!r} holds {feature}, not images, paths or bytes; the columns are {ds.column_names}. "
        f"Set image_column to the column with images."
    )


def _may_stay(name: str, source: str | None, *others: str | None) -> bool:
    """Whether a column can become the column `name` as it is: it has no other use, and no other of our names."""
    return source == name or (source is not None and source not in (*others, "image", "image_id", "captions"))


def _clean_captions(ds: datasets.Dataset, column: str | None, may_stay: bool) -> pa.ChunkedArray | None:
    """The cleaned captions of each row; None if the column is clean and may stay where it is, perhaps on disk."""
    if column is None:
        return arrow_column(([] for _ in range(len(ds))), _TEXTS)
    raw: ColumnView[Any] = ColumnView(ds, column)
    if may_stay and ds.features[column] == CAPTIONS and all(value == to_caption_list(value) for value in raw):
        return None
    return arrow_column(map(to_caption_list, raw), _TEXTS)


def _image_ids(ds: datasets.Dataset, column: str | None, split: str, may_stay: bool) -> pa.ChunkedArray | None:
    """The ids; None if the column holds them and may stay where it is."""
    values: Iterable[Any] = repeat(None, len(ds)) if column is None else ColumnView(ds, column)
    if column is not None and may_stay and ds.features[column] == datasets.Value("string") and all(values):
        return None

    def text(row: int, value: Any) -> str:
        if isinstance(value, float) and value.is_integer():
            # A table returns integers with a missing value among them as floats: 7.0 is the id 7.
            value = int(value)
        return f"{split}-{row:06d}" if value is None or value == "" else str(value)

    return arrow_column(map(text, count(), values), pa.string())


def _with_column(
    ds: datasets.Dataset, name: str, source: str | None, values: pa.ChunkedArray | None, feature: Any
) -> datasets.Dataset:
    """The values as a column; without them the column `source` under another name."""
    if values is not None:
        return replace_column(ds, name, values, feature)
    return ds if source == name else ds.rename_column(str(source), name)


def _join(root: Path | None, path: str | None) -> str | None:
    if not path or root is None or is_address(path):
        return path or None
    return str(root / path)


def to_caption_columns(
    rows: datasets.Dataset | list[Row],
    arguments: SourceArguments,
    *,
    split: str,
    where: str,
    in_memory: bool = False,
) -> datasets.Dataset:
    """Convert one split to the columns `image`, `image_id` and `captions`, and keep its other columns.

    Captions are cleaned (`clean_caption`). Ids are taken from `image_id_column`, else from a column `image_id`, else
    from the path as written in the source, else they are `"<split>-<row>"`. Rows with the same id and image (one
    caption per row) are joined; the same id for two images is an error.
    """
    where = f"{where}, split {split!r}"
    if isinstance(rows, datasets.Dataset):
        names = rows.column_names
    else:
        names = list(dict.fromkeys(name for row in rows for name in row))
    image_column = pick_column(names, arguments.image_column, "image_column", where)
    chosen_captions = _pick_captions(names, arguments.caption_column, where, arguments.require_captions)
    image_id_column, num_frames = arguments.image_id_column, arguments.num_frames
    if image_id_column is not None and image_id_column not in names:
        raise ValueError(
            f"{where} has no column {image_id_column!r}; its columns are {sorted(names)}. Set image_id_column to one "
            f"of them, or leave it out."
        )
    if image_id_column is None and "image_id" in names:
        image_id_column = "image_id"
    ds = rows if isinstance(rows, datasets.Dataset) else _rows_to_dataset(rows, image_column, chosen_captions)
    ds = ds.with_format(None)

    captions = _clean_captions(
        ds, chosen_captions, _may_stay("captions", chosen_captions, image_column, image_id_column)
    )
    texts = chain.from_iterable(ColumnView(ds, str(chosen_captions)) if captions is None else chunk_values(captions))
    if arguments.require_captions and len(ds) and not any(text is not None for text in texts):
        raise ValueError(
            f"{where}: column {chosen_captions!r} holds {ds.features[str(chosen_captions)]} and no text; the columns "
            f"are {sorted(names)}. Set caption_column to one that holds captions."
        )
    is_path = getattr(ds.features[image_column], "dtype", None) in {"string", "large_string"}
    may_stay = _may_stay("image_id", image_id_column, image_column, chosen_captions)
    ids = _image_ids(ds, image_id_column or (image_column if is_path else None), split, may_stay)

    # A column that has one of our names but was not chosen for it is dropped.
    taken = {"image": image_column, "captions": chosen_captions, "image_id": image_id_column}
    clash = [name for name, chosen in taken.items() if name in ds.column_names and name != chosen]
    if clash:
        logger.info("%s: the columns %s are dropped; image_column and caption_column chose others.", where, clash)
    kept = {name for name, values in ((chosen_captions, captions), (image_id_column, ids)) if values is None}
    used = {*clash, chosen_captions, image_id_column} - {image_column, *kept}
    ds = ds.remove_columns([name for name in ds.column_names if name in used])
    root = None if arguments.image_root is None else Path(arguments.image_root)
    ds = _with_images(ds, image_column, root, where, num_frames, in_memory)
    ds = _with_column(ds, "image_id", image_id_column, ids, datasets.Value("string"))
    ds = _with_column(ds, "captions", chosen_captions, captions, CAPTIONS)
    if num_frames:
        ds = replace_column(ds, VIDEO_FRAMES, [num_frames] * len(ds), datasets.Value("int32"))
    ds = merge_rows_of_one_image(ds, where)
    others = [name for name in ds.column_names if name not in taken]
    return ds.select_columns(["image", "image_id", "captions", *others])


def merge_rows_of_one_image(ds: datasets.Dataset, where: str) -> datasets.Dataset:
    """Join rows with the same id into the first of them, which gets all captions."""
    ids = id_column(ds)
    first = RowLookup(ids).first_rows()  # (N,)
    repeated = np.flatnonzero(first != np.arange(len(first)))
    if not len(repeated):
        return ds
    images = undecoded(ds).select_columns("image")
    for row in repeated.tolist():
        earlier = int(first[row])
        if images[row]["image"] != images[earlier]["image"]:
            raise ValueError(
                f"{where}: image_id {ids[row]!r} is used for different images in rows {earlier} and {row}; an id "
                f"must name one image. Set image_id_column to a column with unique ids, or leave it out."
            )
    logger.warning("%s: %d rows repeat an image; their captions are joined to its first.", where, len(repeated))
    captions = arrow_column(_joined_captions(ds, first), _TEXTS)
    return replace_column(select_rows(ds, np.unique(first)), "captions", captions, CAPTIONS)


def _joined_captions(ds: datasets.Dataset, first: np.ndarray) -> Iterator[list[str | None]]:
    """Captions of all rows of each image; `first` is the first row of the image of each row, `(N,)`."""
    captions = caption_column(ds)
    order = np.argsort(first, kind="stable")  # the rows of an image are adjacent
    ends: np.ndarray = np.append(np.flatnonzero(np.diff(first[order])) + 1, len(order))  # of each image, in `order`
    for start in range(0, len(ends), _ROWS_OF_CHUNK):
        part = ends[start : start + _ROWS_OF_CHUNK]
        begin = int(ends[start - 1]) if start else 0
        groups = iter(captions[order[begin : part[-1]].tolist()])
        for size in np.diff(part, prepend=begin).tolist():
            yield list(chain.from_iterable(islice(groups, size)))
