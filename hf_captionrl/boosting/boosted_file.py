"""Rows of boosted captions from the journals, and the Parquet file with all of them."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets

from hf_captionrl.boosting.answers import ANSWER_REMEDIES
from hf_captionrl.boosting.conflicts import scene_conflicts, text_conflicts
from hf_captionrl.boosting.journal import read_journals
from hf_captionrl.boosting.prompts import STAGES
from hf_captionrl.boosting.rows import Known, Row, checked_rows
from hf_captionrl.boosting.shards import INPUT
from hf_captionrl.data.caption_columns import CAPTIONS, replace_column, undecoded
from hf_captionrl.data.images import ImageError, image_bytes, verify_image
from hf_captionrl.io import atomic_write_bytes, atomic_write_text
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

    The Parquet file has the rows and columns of the data set (`image`, `image_id`, ...) and those of `boosted_rows`: `captions`
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
    folder, rows, quarantined = Path(folder), [], []
    for row in found:
        if row["quarantine"] is None:
            rows.append(row)
        else:
            quarantined.append(row["quarantine"])
    atomic_write_text(folder / QUARANTINE_FILE, "".join(line + "\n" for line in quarantined))
    if not rows:
        raise ValueError(f"All {len(dataset)} rows are in quarantine. Read the reasons in {folder / QUARANTINE_FILE}.")
    table = undecoded(dataset.select([row["row"] for row in rows]))
    columns: list[tuple[str, Sequence[Any], Any]] = []
    if with_images:
        columns.append(("image", [_image_value(value, embed_images) for value in table["image"]], datasets.Image()))
    else:
        table = table.remove_columns("image")
    features = dict.fromkeys(("references", "captions", "conflicts"), CAPTIONS)
    for stage in STAGES:
        features |= {f"{stage}_caption": _STRING, f"{stage}_source": _PROVENANCE}
    columns += [(name, [row[name] for row in rows], feature) for name, feature in features.items()]
    for name, values, feature in columns:
        table = replace_column(table, name, values, feature)
    buffer = io.BytesIO()
    table.to_parquet(buffer)
    path = atomic_write_bytes(folder / CAPTIONS_FILE, buffer.getvalue())
    return BoostedFile(path, len(rows), len(quarantined), sum(bool(row["conflicts"]) for row in rows))
