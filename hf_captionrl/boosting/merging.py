"""Merge journals into one Parquet file and the list of quarantined rows."""

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
from hf_captionrl.boosting.journal import read_journals
from hf_captionrl.boosting.prompts import STAGES
from hf_captionrl.boosting.rows import Known, Row
from hf_captionrl.boosting.shards import INPUT
from hf_captionrl.data.caption_columns import CAPTIONS, replace_column, undecoded
from hf_captionrl.data.images import ImageError, image_bytes, verify_image
from hf_captionrl.data.quarantine import check_captions
from hf_captionrl.io import atomic_write_bytes, atomic_write_text
from hf_captionrl.language_models.backend import Backend

__all__ = ["MERGED_FILE", "QUARANTINE_FILE", "MergeReport", "UnfinishedError", "merge_journals"]

MERGED_FILE = "captions.parquet"
"""Name of the result."""

QUARANTINE_FILE = "quarantine.jsonl"
"""Name of the list of quarantined rows."""

_STRING = datasets.Value("string")
_PROVENANCE = dict.fromkeys(("model", "revision", "prompt_hash", "time"), _STRING) | {
    "attempt": datasets.Value("int32")
}


class UnfinishedError(ValueError):
    """Some rows have no answers: other shards are unfinished, or their journals are in another folder."""


@dataclass(frozen=True)
class MergeReport:
    """Counts of a merge.

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
    """Write `captions.parquet` and `quarantine.jsonl` from the journals of all shards, each atomically.

    The Parquet file has the rows and columns of the data set (`image`, `image_id`, ...), except that `captions` holds only the
    HolisticCap, on which `load_captions` trains, and `references` the human captions. It adds `blend_caption`,
    `visual_caption`, `holistic_caption`; `conflicts` in words, possibly empty; and `blend_source`, `visual_source`,
    `holistic_source` with model, revision, prompt hash, time (UTC) and attempt.

    Args:
        dataset (`datasets.Dataset`): The whole data set of the shards.
        folder (`str` or `Path`): Folder of the journals, and of the output.
        text ([`Backend`]): The text backend of the shards; answers of other backends are ignored.
        vision ([`Backend`]): Their vision backend.
        embed_images (`bool`): Store the images in the file, not their paths.
        with_images (`bool`): If False, leave out the column `image`, to publish only the captions and the ids.
        exact_facts (`bool`): Find conflicts with the column `facts` of embedded scenes.

    Returns:
        [`MergeReport`]: Counts.

    Raises:
        UnfinishedError: If a row was not tried.
        ValueError: If no row is done, or a journal is broken.
    """
    folder = Path(folder)
    backends = {"blend": text, "visual": vision, "holistic": text}
    entries = read_journals(folder)
    known, inputs = Known(entries), {e["image_id"]: e for e in entries if e["stage"] == INPUT}
    number_of = {str(image_id): number for number, image_id in enumerate(dataset["image_id"][:])}
    # The same cleaning as before the questions, because answers are looked up by the exact prompt.
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
            f"{len(missing)} of {len(dataset)} rows are unfinished, such as {missing[0]!r}. Finish all shards, copy their "
            "journals into one folder, and give the command again with the same models."
        )
    quarantined.sort(key=lambda entry: entry["row"])
    # ASCII escapes: a lone surrogate or U+2028 in an answer would break the encoding or the lines.
    atomic_write_text(folder / QUARANTINE_FILE, "".join(json.dumps(entry) + "\n" for entry in quarantined))
    if not rows:
        raise ValueError(f"All {len(dataset)} rows are in quarantine. Read the reasons in {folder / QUARANTINE_FILE}.")
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
