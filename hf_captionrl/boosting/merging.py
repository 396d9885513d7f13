"""From journals to one Parquet file, the list of what was left out, and the statistics of the captions."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets

from hf_captionrl.boosting.answers import ANSWER_REMEDIES
from hf_captionrl.boosting.conflicts import scene_conflicts, text_conflicts
from hf_captionrl.boosting.journal import journals, read_journal
from hf_captionrl.boosting.pipeline import INPUT
from hf_captionrl.boosting.prompts import STAGES
from hf_captionrl.boosting.rows import Known, Row
from hf_captionrl.data.caption_columns import CAPTIONS, replace_column, undecoded
from hf_captionrl.data.images import ImageError, image_bytes, verify_image
from hf_captionrl.data.quarantine import check_captions
from hf_captionrl.io import atomic_write_bytes, atomic_write_text
from hf_captionrl.language_models.backend import Backend

__all__ = ["MERGED_FILE", "QUARANTINE_FILE", "MergeReport", "UnfinishedError", "merge_journals"]

MERGED_FILE = "captions.parquet"
"""Name of the result."""

QUARANTINE_FILE = "quarantine.jsonl"
"""Name of the list of rows that were left out."""

_STRING = datasets.Value("string")
_PROVENANCE = dict.fromkeys(("model", "revision", "prompt_hash", "time"), _STRING) | {
    "attempt": datasets.Value("int32")
}


class UnfinishedError(ValueError):
    """Some rows were never asked for: other shards are not through yet, or their journals are elsewhere."""


@dataclass(frozen=True)
class MergeReport:
    """What was merged.

    Args:
        path (`pathlib.Path`): The Parquet file.
        rows (`int`): Rows in it.
        quarantined (`int`): Rows that were left out.
        conflicts (`int`): Rows whose HolisticCap contradicts the BlendCap.
    """

    path: Path
    rows: int
    quarantined: int
    conflicts: int


def _image_value(value: Any, embed: bool) -> Any:
    """An image as it is stored: its bytes, or a path that holds from any folder."""
    if not isinstance(value, dict):
        return value
    if embed or value.get("bytes") is not None:
        return image_bytes(value)
    return {"bytes": None, "path": os.path.abspath(value["path"])}


def _public(source: dict[str, Any]) -> dict[str, Any]:
    """Where a caption comes from, without this machine's folders: the file may be published."""
    model = str(source["model"])
    return {**source, "model": os.path.basename(model.rstrip("/")) if os.path.isabs(model) else model}


def _last_fault(
    row: Row, known: Known, backends: dict[str, Backend], inputs: dict[str, Any], images: datasets.Dataset, at: int
) -> dict[str, Any] | None:
    """Why a row is not done; None if it was not tried. The fault of an image holds until the image is mended."""
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


def merge_journals(
    dataset: datasets.Dataset,
    folder: str | Path,
    *,
    text: Backend,
    vision: Backend,
    embed_images: bool = False,
    with_images: bool = True,
    exact_facts: bool = False,
) -> MergeReport:
    """Write `captions.parquet` and `quarantine.jsonl` from the journals of all shards, each whole or not at all.

    The Parquet file has the data set's columns (`image`, `image_id`, ...), in its order; `captions` holds the HolisticCap
    alone, so that `load_captions` trains on it; `references` what people wrote; `blend_caption`, `visual_caption`,
    `holistic_caption`; `conflicts`, in words, empty where none is found; `blend_source`, `visual_source` and
    `holistic_source` with model, revision, prompt hash, time (UTC) and attempt.

    Args:
        dataset (`datasets.Dataset`): The whole data set that the shards were given.
        folder (`str` or `Path`): Where the journals are, and where the files go.
        text ([`Backend`]): The text backend of the shards; answers of others do not count.
        vision ([`Backend`]): Their vision backend.
        embed_images (`bool`): Put the images into the file instead of their paths.
        with_images (`bool`): False: without the column `image`, to publish captions whose images others have; their ids stay.
        exact_facts (`bool`): Judge conflicts by the column `facts`, which embedded scenes have.

    Returns:
        [`MergeReport`]: Counts.

    Raises:
        UnfinishedError: If a row was not tried.
        ValueError: If no row is done, or a journal is broken.
    """
    folder = Path(folder)
    backends = {"blend": text, "visual": vision, "holistic": text}
    entries = [entry for path in journals(folder) for entry in read_journal(path)]
    known, inputs = Known(entries), {e["image_id"]: e for e in entries if e["stage"] == INPUT}
    number_of = {str(image_id): number for number, image_id in enumerate(dataset["image_id"][:])}
    # The same cleaning as before the questions, for an answer belongs to the very words that were asked about.
    good, report = check_captions(dataset, check_images=False, max_bad_fraction=1.0)
    split = str(dataset.split or "train")
    quarantined = [asdict(entry) for entry in report.entries if entry.dropped == "row"]
    kept: list[int] = []
    rows: list[Row] = []
    missing: list[str] = []
    pairs = zip(good["image_id"][:], good["captions"][:], strict=True)
    images = undecoded(good).select_columns("image")
    for at, (image_id, references) in enumerate(pairs):
        row = Row(number_of[str(image_id)], str(image_id), references)
        row.recall(known, backends)
        if row.is_done:
            kept.append(at)
            rows.append(row)
        elif (fault := _last_fault(row, known, backends, inputs, images, at)) is not None:
            row.fault = fault
            quarantined.append(row.quarantine_entry(split))
        else:
            missing.append(row.image_id)
    if missing:
        raise UnfinishedError(
            f"{len(missing)} of {len(dataset)} rows are not through yet, such as {missing[0]!r}. Let all shards finish, put "
            f"their journals into one folder, and give the command again with the same models."
        )
    quarantined.sort(key=lambda entry: entry["row"])
    # ASCII escapes keep half surrogates and U+2028 of a hostile answer from breaking lines or the encoding.
    atomic_write_text(folder / QUARANTINE_FILE, "".join(json.dumps(entry) + "\n" for entry in quarantined))
    if not rows:
        raise ValueError(f"All {len(dataset)} rows are in quarantine; the reasons are in {folder / QUARANTINE_FILE}.")
    facts = good.select(kept)["facts"][:] if exact_facts else [None] * len(rows)
    conflicts = [_conflicts(row, truth) for row, truth in zip(rows, facts, strict=True)]
    table = undecoded(good.select(kept))
    columns: list[tuple[str, Sequence[Any], Any]] = []
    if with_images:
        columns.append(("image", [_image_value(value, embed_images) for value in table["image"]], datasets.Image()))
    else:
        table = table.remove_columns("image")
    columns += [
        ("references", [list(row.references) for row in rows], CAPTIONS),
        ("captions", [[row.answers["holistic"]["text"]] for row in rows], CAPTIONS),
        ("conflicts", conflicts, CAPTIONS),
    ]
    for stage in STAGES:
        columns.append((f"{stage}_caption", [row.answers[stage]["text"] for row in rows], _STRING))
        columns.append((f"{stage}_source", [_public(row.provenance()[stage]) for row in rows], _PROVENANCE))
    for name, values, feature in columns:
        table = replace_column(table, name, values, feature)
    buffer = io.BytesIO()
    table.to_parquet(buffer)
    path = atomic_write_bytes(folder / MERGED_FILE, buffer.getvalue())
    return MergeReport(path, len(rows), len(quarantined), sum(map(bool, conflicts)))
