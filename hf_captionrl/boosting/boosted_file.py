"""Rows of boosted captions from the journals, and the Parquet file with all of them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import pyarrow as pa
import pyarrow.parquet

from hf_captionrl.boosting.answers import ANSWER_REMEDIES
from hf_captionrl.boosting.conflicts import scene_conflicts, text_conflicts
from hf_captionrl.boosting.journal import read_journals
from hf_captionrl.boosting.prompts import STAGES
from hf_captionrl.boosting.rows import Known, Row, checked_rows
from hf_captionrl.boosting.shards import INPUT
from hf_captionrl.data.caption_columns import CAPTIONS, undecoded
from hf_captionrl.data.images import ImageError, image_bytes, verify_image
from hf_captionrl.io import atomic_file
from hf_captionrl.language_models.backend import Backend

__all__ = [
    "CAPTIONS_FILE",
    "QUARANTINE_FILE",
    "BoostedFile",
    "UnfinishedError",
    "boosted_rows",
    "write_boosted_captions",
]

CAPTIONS_FILE = "captions.parquet"
"""Name of the result."""

QUARANTINE_FILE = "quarantine.jsonl"
"""Name of the list of quarantined rows."""

_ROWS_AT_ONCE = 100
_ROWS_OF_TEXT = 4096
_GROUP_BYTES = 2**25
"""Bytes of a row group, before compression. Groups of many rows keep the list of groups short."""

_STRING = datasets.Value("string")
_PROVENANCE = dict.fromkeys(("model", "revision", "prompt_hash", "time"), _STRING) | {
    "attempt": datasets.Value("int32")
}


class UnfinishedError(ValueError):
    """Some rows have no answers, or their journals are in another folder."""


@dataclass(frozen=True)
class BoostedFile:
    """The file and its counts.

    Args:
        path (`pathlib.Path`): The Parquet file.
        rows (`int`): Rows in it.
        quarantined (`int`): Rows that are not in it.
        conflicts (`int`): Rows whose HolisticCap contradicts the BlendCap.
    """

    path: Path
    rows: int
    quarantined: int
    conflicts: int


def _image_value(value: Any, embed: bool) -> Any:
    """An image as it is stored: its bytes, or an absolute path."""
    if not isinstance(value, dict):
        return value
    if embed or value.get("bytes") is not None:
        return image_bytes(value)
    return {"bytes": None, "path": os.path.abspath(value["path"])}


def _public(source: dict[str, Any]) -> dict[str, Any]:
    """Source of a caption without the folders of this machine, because the file may be published."""
    model = str(source["model"])
    return {**source, "model": os.path.basename(model.rstrip("/")) if os.path.isabs(model) else model}


def _last_fault(
    row: Row, known: Known, backends: dict[str, Backend], inputs: dict[str, Any], images: datasets.Dataset, at: int
) -> dict[str, Any] | None:
    """Why a row is not done; None if it was not tried. The fault of an image counts until the image is repaired."""
    tried: list[dict[str, Any]] = []
    broken = [inputs[row.image_id]] if row.image_id in inputs else []
    for stage in STAGES:
        if stage in row.answers or (stage == "holistic" and len(row.answers) < 2):
            continue
        for fault in known.faults(row.prompt(stage), backends[stage]):
            (tried if fault["reason"] in ANSWER_REMEDIES else broken).append(fault)
        if tried:
            break
    if broken:
        try:
            verify_image(images[at]["image"])
        except ImageError:
            return broken[-1]
    return tried[-1] if tried else None


def _conflicts(row: Row, facts: Any) -> list[str]:
    blend, holistic = row.answers["blend"]["text"], row.answers["holistic"]["text"]
    found = text_conflicts(blend, holistic) if facts is None else scene_conflicts(blend, holistic, facts)
    return [str(conflict) for conflict in found]


def boosted_rows(
    dataset: datasets.Dataset,
    folder: str | Path,
    *,
    text: Backend,
    vision: Backend,
    rows: range | None = None,
    exact_facts: bool = False,
) -> list[dict[str, Any]]:
    """The captions of rows, from their journals.

    Args:
        dataset (`datasets.Dataset`): The whole data set.
        folder (`str` or `Path`): Folder of the journals.
        text ([`Backend`]): The text backend; answers of other backends are ignored.
        vision ([`Backend`]): The vision backend.
        rows (`range`, *optional*): The rows; by default all.
        exact_facts (`bool`): Find conflicts with the column `facts` of embedded scenes.

    Returns:
        `list[dict[str, Any]]`: One per row, in their order: `row`, `image_id`, and either `references`, `captions` (only the
        HolisticCap), `conflicts` in words, `blend_caption`, `visual_caption`, `holistic_caption`, and `blend_source`,
        `visual_source`, `holistic_source` with model, revision, prompt hash, time (UTC) and attempt; or `quarantine`, the
        reason as JSON.

    Raises:
        UnfinishedError: If a row was not tried.
        ValueError: If a journal is broken.
    """
    mine = range(len(dataset)) if rows is None else rows
    backends = {"blend": text, "visual": vision, "holistic": text}
    entries = read_journals(folder, mine)
    known, inputs = Known(entries), {e["image_id"]: e for e in entries if e["stage"] == INPUT}
    chosen = dataset.select(mine)
    number_of = {str(image_id): number for image_id, number in zip(chosen["image_id"][:], mine, strict=True)}
    # The same cleaning as before the questions, because answers are looked up by the exact prompt.
    good, report = checked_rows(chosen)
    split = str(dataset.split or "train")
    bad = [asdict(entry) | {"row": mine[entry.row]} for entry in report.entries if entry.dropped == "row"]
    found: list[dict[str, Any]] = []
    missing: list[str] = []
    images = undecoded(good).select_columns("image")
    pairs = zip(good["image_id"][:], good["captions"][:], strict=True)
    for at, (image_id, references) in enumerate(pairs):
        row = Row(number_of[str(image_id)], str(image_id), references)
        row.recall(known, backends)
        if row.is_done:
            found.append(_boosted(row, good[at]["facts"] if exact_facts else None))
        elif (fault := _last_fault(row, known, backends, inputs, images, at)) is not None:
            row.fault = fault
            bad.append(row.quarantine_entry(split))
        else:
            missing.append(row.image_id)
    if missing:
        raise UnfinishedError(
            f"{len(missing)} of {len(mine)} rows are unfinished, such as {missing[0]!r}. Give the command again with the same "
            "models."
        )
    # ASCII escapes: a lone surrogate or U+2028 in an answer would break the encoding or the lines.
    found += [
        {"row": entry["row"], "image_id": str(entry["image_id"]), "quarantine": json.dumps(entry)} for entry in bad
    ]
    return sorted(found, key=lambda row: row["row"])


def _boosted(row: Row, facts: Any) -> dict[str, Any]:
    texts = {stage: row.answers[stage]["text"] for stage in STAGES}
    found = {"row": row.number, "image_id": row.image_id, "references": list(row.references)}
    found |= {"captions": [texts["holistic"]], "conflicts": _conflicts(row, facts), "quarantine": None}
    for stage in STAGES:
        found |= {f"{stage}_caption": texts[stage], f"{stage}_source": _public(row.provenance()[stage])}
    return found


def write_boosted_captions(
    dataset: datasets.Dataset,
    folder: str | Path,
    found: Iterable[Mapping[str, Any]],
    *,
    embed_images: bool = False,
    with_images: bool = True,
) -> BoostedFile:
    """Write `captions.parquet` and `quarantine.jsonl`, each atomically.

    Rows are read, and images copied, a hundred at a time. The Parquet file has the rows and columns of the data set (`image`, `image_id`, ...) and those of `boosted_rows`: `captions`
    holds only the HolisticCap, on which `load_captions` trains, and `references` the human captions.

    Args:
        dataset (`datasets.Dataset`): The whole data set.
        folder (`str` or `Path`): Folder of the output.
        found (`Iterable[Mapping[str, Any]]`): [`boosted_rows`], or the rows of the shards.
        embed_images (`bool`): Store the images in the file, not their paths.
        with_images (`bool`): If False, leave out the column `image`, to publish only the captions and the ids.

    Returns:
        [`BoostedFile`]: Path and counts.

    Raises:
        ValueError: If no row is done.
    """
    folder, counts = Path(folder), Counter[str]()
    path = folder / CAPTIONS_FILE
    with atomic_file(path) as file:
        with atomic_file(folder / QUARANTINE_FILE) as quarantine:
            done = _without_quarantine(found, quarantine, counts)
            _write_rows(dataset, done, file, embed_images=embed_images, with_images=with_images)
        if not counts["rows"]:  # the list of reasons is written, and an old file of captions stays
            raise ValueError(
                f"All {len(dataset)} rows are in quarantine. Read the reasons in {folder / QUARANTINE_FILE}."
            )
    return BoostedFile(path, counts["rows"], counts["quarantined"], counts["conflicts"])


def _without_quarantine(
    found: Iterable[Mapping[str, Any]], quarantine: BinaryIO, counts: Counter[str]
) -> Iterator[Mapping[str, Any]]:
    """The finished rows; reasons of the others are written, and all are counted."""
    for row in found:
        if row["quarantine"] is not None:
            counts["quarantined"] += 1
            quarantine.write(row["quarantine"].encode() + b"\n")
            continue
        counts["rows"] += 1
        counts["conflicts"] += bool(row["conflicts"])
        yield row


def _write_rows(
    dataset: datasets.Dataset,
    done: Iterator[Mapping[str, Any]],
    file: BinaryIO,
    *,
    embed_images: bool,
    with_images: bool,
) -> None:
    """Write the finished rows as Parquet, of which one row group is in memory."""
    texts: dict[str, Any] = dict.fromkeys(("references", "captions", "conflicts"), CAPTIONS)
    for stage in STAGES:
        texts |= {f"{stage}_caption": _STRING, f"{stage}_source": _PROVENANCE}
    kept = {name: kind for name, kind in dataset.features.items() if name not in texts and name != "image"}
    image = {"image": datasets.Image()} if with_images else {}
    schema = datasets.Features({**kept, **image, **texts}).arrow_schema
    source = undecoded(dataset).with_format("arrow")
    # As `Dataset.to_parquet`: the pieces of a file that changes little are found again when it is uploaded again.
    chunking = datasets.config.DEFAULT_CDC_OPTIONS
    options = {"use_content_defined_chunking": chunking, "write_page_index": True}
    with pyarrow.parquet.ParquetWriter(file, schema, **options) as writer:
        group: list[pa.Table] = []
        while rows := list(islice(done, _ROWS_AT_ONCE)):
            table = source[[row["row"] for row in rows]]
            columns = {name: table.column(name) for name in kept}
            columns |= {name: pa.array([row[name] for row in rows], schema.field(name).type) for name in texts}
            if with_images:
                images = [_image_value(value, embed_images) for value in table.column("image").to_pylist()]
                columns["image"] = pa.array(images, schema.field("image").type)
            group.append(pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema))
            if sum(part.nbytes for part in group) >= _GROUP_BYTES:
                _write_group(writer, group)
        if group:
            _write_group(writer, group)
        writer.add_key_value_metadata({"content_defined_chunking": json.dumps(chunking)})


def _write_group(writer: pyarrow.parquet.ParquetWriter, group: list[pa.Table]) -> None:
    table = pa.concat_tables(group)
    writer.write_table(table, row_group_size=len(table))
    group.clear()


class CaptionsOf:
    """The captions of a column of the Parquet file, which is read again by each iterator, a few thousand rows at a time."""

    def __init__(self, path: Path, column: str) -> None:
        self._path, self._column = path, column

    def __iter__(self) -> Iterator[str]:
        with pyarrow.parquet.ParquetFile(self._path) as file:
            for batch in file.iter_batches(_ROWS_OF_TEXT, columns=[self._column]):
                values = batch.column(0)
                yield from (values.flatten() if pa.types.is_list(values.type) else values).to_pylist()
