"""Converts any table to the columns `image`, `image_id` and `captions`, without copying images."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.fingerprint import Hasher
from datasets.table import ConcatenationTable, InMemoryTable, concat_tables

from hf_captionrl.data.arrow_columns import (
    ColumnView,
    arrow_column,
    caption_column,
    chunk_values,
    id_column,
    select_rows,
)
from hf_captionrl.data.caption_cleaning import to_caption_list
from hf_captionrl.data.image_paths import is_address, paths_without_bytes, refuse_outside
from hf_captionrl.data.raw_splits import SourceArguments
from hf_captionrl.data.row_files import CAPTION_COLUMNS, Row
from hf_captionrl.data.video import VIDEO_FRAMES
from hf_captionrl.data.video_files import VIDEO_SUFFIXES
from hf_captionrl.retrieval.row_lookup import RowLookup

__all__ = [
    "CAPTIONS",
    "USUAL_NAMES",
    "caption_lists",
    "merge_rows_of_one_image",
    "pick_column",
    "replace_column",
    "to_caption_columns",
    "undecoded",
    "with_split",
]

logger = logging.getLogger(__name__)

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
