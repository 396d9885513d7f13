"""The caption schema: rows of any source become the columns `image`, `image_id` and `captions`, without copying images."""

from __future__ import annotations

import ast
import codecs
import copy
import csv
import io
import json
import logging
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.fingerprint import Hasher
from datasets.table import ConcatenationTable, InMemoryTable, concat_tables

from hf_captionrl.data.images import is_address, paths_without_bytes, refuse_outside
from hf_captionrl.utils.options import NotNegative, check_values

logger = logging.getLogger(__name__)

Row = dict[str, Any]

CAPTIONS = datasets.List(datasets.Value("string"))
TEXTS = pa.list_(pa.string())

# Usual names of columns, in the order of the search if the default name, the first one, is missing.
CAPTION_COLUMNS = ("captions", "caption", "text", "sentences", "sentence", "raw")
USUAL_NAMES = {
    "image_column": ("image", "file_name", "image_path", "img", "filename", "filepath", "jpg", "png", "video"),
    "caption_column": CAPTION_COLUMNS,
}

# Suffixes of films; `.gif` is not included, because a data set of images may contain GIFs.
VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi", ".mpg", ".mpeg", ".ts", ".flv"})

VIDEO_FRAMES = "video_frames"
"""Column of data sets of videos: the number of frames that are sampled from each video."""


def frames_of(dataset: datasets.Dataset) -> int:
    """Number of frames F that are sampled from each row, or 0 if the rows are images."""
    if VIDEO_FRAMES not in dataset.column_names:
        return 0
    return max(dataset[VIDEO_FRAMES][:], default=0)


# --- Rows of JSON lines, CSV and Parquet -----------------------------------------------------------------------------
# Not by the builders of `datasets`: pandas renames a second column `caption` and reads a caption "7" as a number, and
# Arrow's JSON refuses columns of mixed types. Here a file is read completely, or refused with its line.


def read_text(path: Path, newline: str | None = None) -> str:
    with path.open("rb") as file:
        head = file.read(4)
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or b"\0" in head:
        raise ValueError(f"{path} is UTF-16 or UTF-32, not UTF-8. Save it as UTF-8.")
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}). Save it as UTF-8.") from error


def parse_json(text: str, where: str) -> Any:
    """A value of JSON, in which no object has a key twice."""

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


def read_csv(path: Path, delimiter: str = ",") -> list[Row]:
    """The rows of a CSV file; several columns with one name for captions (`caption`, ...) become a list of captions."""
    rows: list[Row] = []
    finished = 0  # lines of the rows that were read
    # If not strict, an unclosed quote would extend the field to the next quote or the end of the file.
    lines = csv.reader(io.StringIO(read_text(path, newline=""), newline=""), delimiter=delimiter, strict=True)
    try:
        names = [name.strip() for name in next(lines, [])]
        several = [name for name in CAPTION_COLUMNS if names.count(name) > 1]
        finished = lines.line_num
        for values in filter(None, lines):
            if len(values) != len(names):
                raise ValueError(
                    f"Line {lines.line_num} of {path} has {len(values)} fields, and the first line {len(names)}. Put "
                    "captions with commas into quotes, and write a comma for each empty field."
                )
            row: Row = {name: value for name, value in zip(names, values, strict=True) if name}
            for name in several:
                texts = [value for key, value in zip(names, values, strict=True) if key == name]
                # Images may have fewer captions. A row without captions keeps its empty cells for the check.
                row[name] = [text for text in texts if text.strip()] or texts
            rows.append(row)
            finished = lines.line_num
    except csv.Error as error:
        raise ValueError(
            f"The row that begins in line {finished + 1} of {path} is not valid CSV ({error}). Close every quote, and "
            'double those inside a field: "a ""big"" dog".'
        ) from error
    return rows


def read_rows(path: Path) -> list[Row]:
    """The rows of a file by its suffix: Parquet, CSV, else JSON lines."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return pq.read_table(path).to_pylist()  # type: ignore[no-any-return]
    if suffix == ".csv":
        return read_csv(path)
    rows: list[Row] = []
    # Not splitlines(), which also splits at U+2028 inside a caption.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            rows.append(parse_json(line, f"Line {number} of {path}"))
            if not isinstance(rows[-1], dict):
                raise ValueError(f'Line {number} of {path} is not an object. Write {{"file_name": ...}}.')
    return rows


# --- Columns ---------------------------------------------------------------------------------------------------------


def id_column(ds: datasets.Dataset) -> list[str]:
    """Ids of the rows, as text."""
    return [str(value) for value in ds.with_format(None)["image_id"][:]]


def concept_column(ds: datasets.Dataset) -> list[int] | None:
    """[`concept_numbers`] of the column `concept`; None without one."""
    from hf_captionrl.retrieval.ranking import concept_numbers  # late: help texts need no torch

    return concept_numbers(ds.with_format(None)["concept"][:]) if "concept" in ds.column_names else None


def caption_column(ds: datasets.Dataset, name: str = "captions") -> list[list[str]]:
    """The captions of each row: a list, from a list, a single text, or nothing."""
    return [[value] if isinstance(value, str) else list(value or []) for value in ds.with_format(None)[name][:]]


def undecoded(ds: datasets.Dataset, column: str = "image") -> datasets.Dataset:
    """The same data set with images as `{"bytes", "path"}`, not decoded on every access."""
    if isinstance(ds.features.get(column), datasets.Image):
        return ds.cast_column(column, datasets.Image(decode=False))
    return ds


def replace_column(ds: datasets.Dataset, name: str, values: Sequence[Any], feature: Any) -> datasets.Dataset:
    """Set one column without copying the others, as `add_column` would after `select`."""
    if ds._indices is not None:
        rows = ds._indices.column(0).to_pylist()
        if len(set(rows)) < len(rows):  # a row that is selected twice may get two values
            return replace_column(ds.flatten_indices(), name, values, feature)
        value_of = dict(zip(rows, values, strict=True))
        values = [value_of.get(row) for row in range(ds.data.num_rows)]
    table = ds.data.drop([name]) if name in ds.column_names else ds.data
    if isinstance(table, ConcatenationTable):  # which keeps blocks without columns, and these have no rows
        blocks = [[block for block in row if block.num_columns] for row in table.blocks]
        table = ConcatenationTable.from_blocks([row for row in blocks if row]) if any(blocks) else table
    schema = datasets.Features({name: feature}).arrow_schema
    column = InMemoryTable.from_pydict({name: values}, schema=schema)
    info = ds.info.copy()
    info.features = datasets.Features({k: v for k, v in ds.features.items() if k != name} | {name: feature})
    return datasets.Dataset(
        concat_tables([table, column], axis=1) if table.num_columns else column,
        info=info,
        split=ds.split,
        indices_table=ds._indices,
        # Without a fingerprint, `datasets` would read every image to compute one.
        fingerprint=Hasher.hash((ds._fingerprint, str(schema), column.table)),
    )


def with_split(ds: datasets.Dataset, split: str) -> datasets.Dataset:
    """The same data set under the name of another split."""
    ds = copy.copy(ds)
    ds._split = datasets.NamedSplit(split)
    return ds


# --- Sources and their splits ----------------------------------------------------------------------------------------

# Names of splits in data sets, and our name for each.
SPLIT_NAMES: dict[str, str] = {
    # restval: Karpathy's 30,504 validation images, which are used for training; validate: MSR-VTT.
    **dict.fromkeys(("train", "training", "restval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "validate", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}


@dataclass(frozen=True)
class SourceArguments:
    """Location and columns of a caption data set.

    If a default column is missing, the only column with a usual name (`file_name`, `img`, ...; `caption`, `text`,
    `sentences`, ...) is used; several are an error.
    """

    dataset_config: str | None = None  # of a Hub data set, or of the embedded one
    revision: str | None = None  # of a Hub data set
    data_dir: str | Path | None = None  # folder of "imagefolder"
    # Folder that paths in the image column are relative to. Paths that leave it, by `..`, by a link, or as an absolute
    # path, are refused.
    image_root: str | Path | None = None
    image_column: str = "image"  # images, bytes or paths
    caption_column: str = "captions"  # a caption or a list of captions
    # Default: a column `image_id`, else the path, else "<split>-<row>". Rows of one image are joined.
    image_id_column: str | None = None
    # What an image shows, such as a product number, which other images may show, too; "folder": its subfolder. Default: a
    # column `concept`.
    concept_column: str | None = None
    # 0 for images. For videos the number of frames of each, see `sample_frames`: the splits then have a column
    # `video_frames` with that number, and `image` is not decoded on access.
    num_frames: NotNegative = 0
    require_captions: bool = True  # False also accepts data without captions; `captions` is then empty
    text_files: str | None = None  # extension of text files beside images that the caller reads

    def __post_init__(self) -> None:
        check_values(self)


@dataclass
class Source:
    """Splits of a source: first as they are, then in our columns."""

    name: str  # in messages
    splits: dict[str, Any]  # split name to a data set or a list of rows
    root: Path | None = None  # folder that the paths in the image column are relative to, and must not leave
    image_column: str | None = None  # the image column of this kind of source
    has_named_splits: bool = True  # False if the source does not name splits; all rows are then `train`
    has_captions: bool = True  # False for a folder of images without metadata
    in_memory: bool = False


def source_of_rows(
    name: str, rows: list[Row], where: str, root: Path | None, image_column: str | None = None, **more: Any
) -> Source:
    """A source whose rows may name their splits; all are `train` if no row does."""
    if not rows:
        raise ValueError(f"{where} holds no rows. Check that it is the right file.")
    numbers_of = _rows_of_splits([row.get("split") for row in rows])
    if [*numbers_of] == [None]:
        return Source(name, {"train": rows}, root, image_column, has_named_splits=False, **more)
    if None in numbers_of:
        number = numbers_of[None][0]
        raise ValueError(
            f"{where}: row {number + 1} has the split {rows[number].get('split')!r}, other rows known ones. Name one "
            f"of {sorted(SPLIT_NAMES)} in every row, or rename the column."
        )
    rest = [{key: value for key, value in row.items() if key != "split"} for row in rows]
    splits = {str(split): [rest[number] for number in numbers] for split, numbers in numbers_of.items()}
    return Source(name, splits, root, image_column, **more)


def by_split_column(rows: datasets.Dataset) -> dict[str, Any]:
    """The splits named by a column `split`, as in Flickr30k on the Hub."""
    if getattr(rows.features.get("split"), "dtype", None) != "string":
        return {}
    numbers_of = _rows_of_splits(rows.with_format(None)["split"][:])
    if None in numbers_of or len(numbers_of) < 2:
        return {}
    rest = rows.remove_columns("split")
    return {str(split): rest.select(numbers) for split, numbers in numbers_of.items()}


def _rows_of_splits(names: list[Any]) -> dict[str | None, list[int]]:
    """Row numbers by our name for their split; None for other names."""
    numbers_of: dict[str | None, list[int]] = {}
    for number, name in enumerate(names):
        numbers_of.setdefault(SPLIT_NAMES.get(str(name).strip().lower()), []).append(number)
    return numbers_of


# --- Captions --------------------------------------------------------------------------------------------------------

_MAX_CAPTION_WORDS = 200  # longer than the captions of data sets, shorter than a web page
_MAX_CAPTION_CHARACTERS = (
    20 * _MAX_CAPTION_WORDS
)  # without spaces, a Chinese sentence and base64 each count as one word

_SURROGATE = re.compile("[\ud800-\udfff]")
# Kept: zero-width (non-)joiners are part of Persian, Indic scripts and emoji; tags (U+E0020-E007F) are part of flags.
_KEPT_FORMAT = {"\u200c", "\u200d"} | {chr(code) for code in range(0xE0020, 0xE0080)}
_KEYS_OF_TEXT = ("raw", "caption", "text", "sentence")


def clean_caption(caption: str) -> str:
    """A caption in Unicode NFC, with single spaces.

    Control characters (category Cc) and line breaks become spaces; invisible format characters (Cf: byte-order marks,
    soft hyphens, bidirectional overrides) are dropped, except joiners; half surrogate pairs become U+FFFD.
    """
    if caption.isascii():
        if not caption.isprintable():
            caption = "".join(c if c.isprintable() else " " for c in caption)
        return " ".join(caption.split())
    caption = unicodedata.normalize("NFC", _SURROGATE.sub("\ufffd", caption))
    kinds = ((c, unicodedata.category(c)) for c in caption)
    kept = (" " if kind == "Cc" else c for c, kind in kinds if kind != "Cf" or c in _KEPT_FORMAT)
    return " ".join("".join(kept).split())


def caption_fault(caption: Any) -> tuple[str, str] | None:
    """The fault of a cleaned caption and its detail, or None."""
    if not isinstance(caption, str):
        return "caption_not_text", "the caption is not a string (empty, a number, or nested too deep)"
    if not any(map(str.isalnum, caption)):
        return "caption_empty", f"the caption {caption[:40]!r} has no letter or digit"
    words = caption.count(" ") + 1
    if words > _MAX_CAPTION_WORDS or len(caption) > _MAX_CAPTION_CHARACTERS:
        sizes = (
            f"{words} words and {len(caption)} characters, more than {_MAX_CAPTION_WORDS} or {_MAX_CAPTION_CHARACTERS}"
        )
        return "caption_too_long", f"the caption {caption[:40] + '...'!r} has {sizes}"
    return None


_LITERAL = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_PRINTED = re.compile(rf"\[\s*{_LITERAL}(?:(?:\s*,\s*|\s+){_LITERAL})*\s*,?\s*\]", re.DOTALL)


def printed_list(value: Any) -> list[str] | None:
    """The texts of a list that was printed into one cell, by JSON, Python (pandas) or NumPy; None for other values."""
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(text, str) or not text.startswith("[") or not _PRINTED.fullmatch(text.strip()):
        return None
    try:
        return list(json.loads(text))
    except json.JSONDecodeError:
        return [str(ast.literal_eval(part.replace("\n", " "))) for part in re.findall(_LITERAL, text, re.DOTALL)]


def to_caption_list(value: Any) -> list[str | None]:
    """The cleaned captions of one row, in any form that sources use: a text, a mapping with a text, or a list of them."""

    def text_of(value: Any) -> Any:
        if isinstance(value, Mapping):
            return next((value[key] for key in _KEYS_OF_TEXT if key in value), None)
        return value

    if value is None:
        return []
    value = text_of(value)
    texts = map(text_of, value if isinstance(value, list | tuple) else [value])
    return [clean_caption(text) if isinstance(text, str) else None for text in texts]


# --- The conversion --------------------------------------------------------------------------------------------------


def pick_column(names: Sequence[str], wanted: str, argument: str, where: str) -> str:
    """The column that an argument names; if its default is missing, the only column with a usual name."""
    if wanted in names:
        return wanted
    usual = USUAL_NAMES.get(argument, ("",))
    found = [name for name in usual if name in names and wanted == usual[0]]
    if len(found) == 1:
        logger.info("%s: no column %r, taking %r (%s).", where, wanted, found[0], argument)
        return found[0]
    fault = f"could be any of {found}" if found else f"is {wanted!r}, no column {wanted!r} of {sorted(names)}"
    raise ValueError(f"{where}: {argument} {fault}. Set {argument} (--{argument}) to one of them.")


def to_caption_columns(
    rows: datasets.Dataset | list[Row], arguments: SourceArguments, *, split: str, where: str, in_memory: bool = False
) -> datasets.Dataset:
    """Convert one split to the columns `image`, `image_id` and `captions`, and keep its other columns.

    Captions are cleaned (`clean_caption`). Rows with the same id (see `SourceArguments.image_id_column`) and image, one caption per
    row, are joined; the same id for two images is an error.
    """
    where = f"{where}, split {split!r}"
    names = list(dict.fromkeys(chain.from_iterable(rows))) if isinstance(rows, list) else rows.column_names
    image = pick_column(names, arguments.image_column, "image_column", where)
    usual = [name for name in CAPTION_COLUMNS if name in names]
    captions = usual[0] if len(usual) == 1 else None
    if arguments.require_captions or arguments.caption_column != "captions" or "captions" in names:
        captions = pick_column(names, arguments.caption_column, "caption_column", where)
    ids = arguments.image_id_column or ("image_id" if "image_id" in names else None)
    if ids is not None:
        pick_column(names, ids, "image_id_column", where)
    ds = _table_of(rows, image, captions) if isinstance(rows, list) else rows.with_format(None)
    ds = with_concepts(ds, arguments.concept_column, image, where)

    values: list[Any] = [[]] * len(ds) if captions is None else ds[captions][:]
    texts = _cleaned(values, where)
    if arguments.require_captions and len(ds) and not any(text is not None for group in texts for text in group):
        raise ValueError(
            f"{where}: column {captions!r} holds {ds.features[str(captions)]} and no text. Set caption_column "
            f"to one of {sorted(names)}."
        )
    id_source = ids or (image if _is_text(ds.features[image]) else None)
    image_ids = []
    for row, value in enumerate([None] * len(ds) if id_source is None else ds[id_source][:]):
        if isinstance(value, float) and value.is_integer():  # a table has integers with a missing value as floats
            value = int(value)
        image_ids.append(f"{split}-{row:06d}" if value is None or value == "" else str(value))
    # A column that has one of our names but was not chosen for it is dropped.
    has_captions = captions == "captions" and ds.features[captions] == CAPTIONS and texts == values
    unused = {"image", "image_id", "captions", captions, ids} - {image, "captions" if has_captions else None}
    ds = ds.remove_columns([name for name in ds.column_names if name in unused])
    ds = _with_images(ds.rename_columns({image: "image"}), image, arguments, where, names, in_memory)
    ds = replace_column(ds, "image_id", image_ids, datasets.Value("string"))
    if not has_captions:
        ds = replace_column(ds, "captions", texts, CAPTIONS)
    if arguments.num_frames:
        ds = replace_column(ds, VIDEO_FRAMES, [arguments.num_frames] * len(ds), datasets.Value("int32"))
    ds = merge_rows_of_one_image(ds, where)
    ours = ["image", "image_id", "captions"]
    return ds.select_columns([*ours, *(name for name in ds.column_names if name not in ours)])


def with_concepts(ds: datasets.Dataset, name: str | None, image: str, where: str) -> datasets.Dataset:
    """The column `concept`, of a column or of the folders of the images."""
    if name == "folder" and name not in ds.column_names and _is_text(ds.features[image]):
        folders = [os.path.dirname(path or "") for path in ds[image][:]]
        return replace_column(ds, "concept", folders, datasets.Value("string"))
    if name is None:
        return ds
    pick_column(ds.column_names, name, "concept_column", where)
    return ds if name == "concept" else replace_column(ds, "concept", ds[name][:], ds.features[name])


def _cleaned(values: list[Any], where: str) -> list[list[str | None]]:
    """The cleaned captions of each row; either all rows or none may be lists that were printed as text."""
    texts: list[list[str | None]] = []
    first: dict[bool, int] = {}  # first row with and without a printed list
    for row, value in enumerate(values):
        literals = printed_list(value)
        texts.append(to_caption_list(value if literals is None else literals))
        if any(texts[-1]):
            first.setdefault(literals is not None, row)
    if len(first) == 2:
        raise ValueError(
            f"{where}, row {first[True]}: the captions are a list that was printed as text, and those of row {first[False]} "
            "are not. Write all rows alike, as lists or as one caption each."
        )
    return texts


def _table_of(rows: list[Row], image: str, captions: str | None) -> datasets.Dataset:
    """A table of JSON rows, which may have different keys and values of mixed types."""

    def text(value: Any) -> str | None:
        """Any JSON value as a string for a table; a half surrogate pair becomes a question mark."""
        value = value if isinstance(value, str) or value is None else json.dumps(value)
        return None if value is None else value.encode("utf-8", "replace").decode()

    columns: dict[str, Any] = {}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        values = [row.get(name) for row in rows]
        if name == image:
            paths = (value.get("path") if isinstance(value, dict) else value for value in values)
            values = [text(path) if isinstance(path, str) and path else None for path in paths]
            columns[name] = pa.array(values, pa.string())
        elif name == captions:
            columns[name] = pa.array(map(to_caption_list, values), TEXTS)
        else:
            try:
                columns[name] = pa.array(values)
            except (pa.ArrowException, UnicodeError, OverflowError):
                columns[name] = pa.array(map(text, values), pa.string())  # mixed types
    return datasets.Dataset(pa.table(columns))


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in {"string", "large_string"}


def _with_images(
    ds: datasets.Dataset, column: str, arguments: SourceArguments, where: str, names: list[str], in_memory: bool
) -> datasets.Dataset:
    """The column `image`, called `column` in the source, as `datasets.Image`; videos and addresses are not decoded."""
    feature = ds.features["image"]
    root = None if arguments.image_root is None else Path(arguments.image_root)
    is_text = _is_text(feature)

    def joined(path: str | None) -> str | None:
        # Here, because the reader of a row does not know the root. Absolute paths and addresses are unchanged.
        if not path or is_address(path):
            return path or None
        forms = [path]
        if not path.isascii():
            forms += [unicodedata.normalize(form, path) for form in ("NFC", "NFD")]  # a Mac writes names in NFD
        files = [form if root is None else str(root / form) for form in forms]
        return files[0] if path.isascii() else next(filter(os.path.exists, files), files[0])

    paths = [*map(joined, ds["image"][:])] if is_text else paths_without_bytes(ds.data.column("image")).to_pylist()
    # Files of an image column in memory are opened wherever they are; a text column needs a root.
    if is_text or root is not None or not in_memory:
        refuse_outside(paths, root, f"{where}, column {column!r}")
    # On access, datasets.Image would fetch an address, which open_image refuses.
    fetches = any(path and "://" in path for path in paths)
    result = datasets.Image(decode=not (arguments.num_frames or fetches))
    if not is_text:
        holds_bytes = isinstance(feature, dict) and {"bytes", "path"} >= set(feature)
        if isinstance(feature, datasets.Image) or holds_bytes or feature.dtype in {"binary", "large_binary"}:
            return ds.cast_column("image", result)
        raise ValueError(
            f"{where}: column {column!r} holds {feature}, not images, paths or bytes. Set image_column to one of "
            f"{names}."
        )
    films = (path for path in paths if path and os.path.splitext(path)[1].lower() in VIDEO_SUFFIXES)
    if not arguments.num_frames and (film := next(films, None)) is not None:
        raise ValueError(f"{where}: column {column!r} holds videos ({film!r}). Set num_frames, e.g. to 8 per video.")
    return replace_column(ds, "image", [{"bytes": None, "path": path} for path in paths], result)


def merge_rows_of_one_image(ds: datasets.Dataset, where: str) -> datasets.Dataset:
    """Join rows with the same id into the first of them, which gets all captions."""
    rows_of: dict[str, list[int]] = {}
    for row, image_id in enumerate(id_column(ds)):
        rows_of.setdefault(image_id, []).append(row)
    if len(rows_of) == len(ds):
        return ds
    images, captions = undecoded(ds).select_columns("image"), caption_column(ds)
    for image_id, (first, *repeated) in rows_of.items():
        for row in repeated:
            if images[row]["image"] != images[first]["image"]:
                raise ValueError(
                    f"{where}: image_id {image_id!r} is used for different images in rows {first} and {row}. Set "
                    "image_id_column to a column with unique ids, or leave it out."
                )
    logger.warning(
        "%s: rows that repeat an image: %d; their captions are joined to its first.", where, len(ds) - len(rows_of)
    )
    joined = [[text for row in rows for text in captions[row]] for rows in rows_of.values()]
    return replace_column(ds.select([rows[0] for rows in rows_of.values()]), "captions", joined, CAPTIONS)
