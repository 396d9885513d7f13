"""The folder of a benchmark: bags, their images and captions, and the decisions of the review.

bags.json          all bags, most similar first (`retrieval.bag_files`)
kept.json          the same without the bags that were dropped
decisions.jsonl    keep or drop, one line per decision (`decisions.py`)
data/*.parquet     image_id, captions, and optionally image and facts; rows that are in no bag are distractors
truematch.json     settings of the build; written last, so a folder without it is unfinished
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from hf_captionrl.data.caption_columns import replace_column, undecoded
from hf_captionrl.data.images import image_bytes
from hf_captionrl.io import atomic_write_bytes, write_json
from hf_captionrl.retrieval.bag_files import BagFile, load_bags, save_bags
from hf_captionrl.truematch.decisions import (
    Decision,
    DecisionWriter,
    bag_id,
    drop_bags,
    read_decisions,
)

__all__ = [
    "BAGS_FILE",
    "DATA_FOLDER",
    "DECISIONS_FILE",
    "KEPT_FILE",
    "MANIFEST_FILE",
    "TrueMatch",
    "apply_decisions",
    "bags_fingerprint",
    "load_truematch",
    "write_data",
    "write_truematch",
]

BAGS_FILE, KEPT_FILE, DECISIONS_FILE = "bags.json", "kept.json", "decisions.jsonl"
DATA_FOLDER, MANIFEST_FILE, _PLAN_FILE = "data", "truematch.json", "building.json"

_ROWS_PER_FILE = 1000
"""Images per Parquet file: about 150 MB of COCO, held in memory while it is written."""
_COLUMNS = ("image", "image_id", "captions", "facts")


@dataclass(frozen=True)
class TrueMatch:
    """A finished benchmark."""

    folder: Path
    manifest: Mapping[str, Any]  # settings of the build, from `truematch.json`
    bags: BagFile  # all bags, also those that were dropped
    decisions: Sequence[Decision]  # decisions on these bags, oldest first
    foreign: int = 0  # number of decisions on bags of other benchmarks

    @property
    def images(self) -> str:
        """Folder of the images, for `load_captions`."""
        if not self.manifest.get("embed_images"):
            raise ValueError(
                f"{self.folder} was built without images. Use --dataset {self.manifest['source']} with the options of the build."
            )
        return str((self.folder / DATA_FOLDER).resolve())

    @property
    def last(self) -> dict[str, Decision]:
        """The last decision on each bag, by its id; undecided bags are left out."""
        found = {decision.bag: decision for decision in self.decisions}
        return {bag: decision for bag, decision in found.items() if decision.decision is not None}

    @property
    def kept(self) -> BagFile:
        """The bags without the dropped ones."""
        return drop_bags(self.bags, self.decisions)

    def status(self) -> dict[str, dict[str, int]]:
        """Numbers of kept, dropped and undecided bags, by bag size."""
        found: dict[str, dict[str, int]] = {}
        last = self.last
        for bag in self.bags.bags:
            counts = found.setdefault(str(len(bag)), {"bags": 0, "kept": 0, "dropped": 0, "undecided": 0})
            decision = last.get(bag_id(bag))
            counts["bags"] += 1
            counts[
                "undecided" if decision is None else {"keep": "kept", "drop": "dropped"}[str(decision.decision)]
            ] += 1
        return found


def bags_fingerprint(bags: BagFile) -> str:
    """Hash of the bags in any order; only results with equal fingerprints can be compared."""
    names = "\n".join(sorted(bag_id(bag) for bag in bags.bags))
    return hashlib.sha256(names.encode("ascii")).hexdigest()[:16]


def _content(dataset: datasets.Dataset) -> str:
    """Hash of ids and captions, in their order."""
    digest = hashlib.sha256()
    for image_id, captions in zip(dataset["image_id"][:], dataset["captions"][:], strict=True):
        digest.update(json.dumps([str(image_id), captions]).encode("ascii"))
    return digest.hexdigest()[:16]


def write_data(folder: str | Path, dataset: datasets.Dataset, *, embed_images: bool = True) -> list[Path]:
    """Write the images and captions, 1,000 per file; keep files that an interrupted run finished.

    Files are recognised by ids and captions. If only images changed, use other ids or another folder.
    """
    folder = Path(folder)
    columns = [c for c in _COLUMNS if c in dataset.column_names and (embed_images or c != "image")]
    table = undecoded(dataset.select_columns(columns))
    plan = {"content": _content(dataset), "embed_images": embed_images, "images": len(dataset)}
    plan_file = folder / _PLAN_FILE
    data = folder / DATA_FOLDER
    try:
        begun = json.loads(plan_file.read_text(encoding="utf-8")) == plan
    except (OSError, ValueError):
        begun = False
    if not begun:
        for path in data.glob("*.parquet"):
            path.unlink()
        write_json(plan_file, plan)
    number = -(-len(table) // _ROWS_PER_FILE)
    paths = [data / f"test-{i:05d}-of-{number:05d}.parquet" for i in range(number)]
    for i, path in enumerate(paths):
        if path.is_file():
            continue
        part = table.select(range(i * _ROWS_PER_FILE, min((i + 1) * _ROWS_PER_FILE, len(table))))
        if "image" in columns:
            part = replace_column(part, "image", [image_bytes(v) for v in part["image"]], datasets.Image())
        buffer = io.BytesIO()
        part.to_parquet(buffer)
        atomic_write_bytes(path, buffer.getvalue())
    return paths


def write_truematch(folder: str | Path, bags: BagFile, manifest: Mapping[str, Any]) -> TrueMatch:
    """Finish a benchmark whose data are written. Existing decisions stay."""
    folder = Path(folder)
    save_bags(folder / BAGS_FILE, bags)
    if not (folder / DECISIONS_FILE).exists():
        atomic_write_bytes(folder / DECISIONS_FILE, b"")
    write_json(folder / MANIFEST_FILE, manifest)
    found = load_truematch(folder)
    save_bags(folder / KEPT_FILE, found.kept)
    (folder / _PLAN_FILE).unlink(missing_ok=True)
    return found


def load_truematch(folder: str | Path) -> TrueMatch:
    """Read a benchmark."""
    folder = Path(folder)
    path = folder / MANIFEST_FILE
    if not path.is_file():
        begun = (folder / _PLAN_FILE).is_file()
        remedy = (
            "Its build was interrupted. Use the same `captionrl truematch build` command again to resume."
            if begun
            else "Build a benchmark with `captionrl truematch build`."
        )
        raise FileNotFoundError(f"There is no {MANIFEST_FILE} in {str(folder)!r}. {remedy}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}). Build the benchmark again.") from None
    if not isinstance(manifest, dict) or not {"source", "seed", "scorer"} <= set(manifest):
        raise ValueError(f"{path} does not describe a benchmark. Build it again.")
    bags = load_bags(folder / BAGS_FILE)
    known = {bag_id(bag) for bag in bags.bags}
    lines = read_decisions(folder / DECISIONS_FILE) if (folder / DECISIONS_FILE).is_file() else []
    own = [line for line in lines if line.bag in known]
    return TrueMatch(folder, manifest, bags, own, len(lines) - len(own))


def apply_decisions(folder: str | Path, decisions: str | Path | None = None) -> tuple[TrueMatch, int]:
    """Add decisions from a file, such as the download of the review page, and write `kept.json` again.

    Existing decisions are not added again, so a file can be applied twice.
    """
    folder = Path(folder)
    found = load_truematch(folder)
    added = 0
    if decisions is not None:
        new = read_decisions(decisions)
        known = {bag_id(bag) for bag in found.bags.bags}
        for number, line in enumerate(new, start=1):
            if line.bag not in known:
                raise ValueError(
                    f"{decisions}: decision {number} is about bag {line.bag!r}, which is not in {folder}. Use a file of "
                    "decisions on this benchmark."
                )
        drop_bags(found.bags, [*found.decisions, *new])  # fails before anything is written if all bags are dropped
        with DecisionWriter(folder / DECISIONS_FILE) as writer:
            existing = set(writer.decisions)
            last = {line.bag: (line.decision, line.reason) for line in writer.decisions}
            for line in new:
                # A line without a time cannot be recognised; it is a repetition if it does not change the decision.
                if line in existing or (line.time is None and last.get(line.bag) == (line.decision, line.reason)):
                    continue
                last[line.bag] = (line.decision, line.reason)
                writer.append(line)
                added += 1
        found = load_truematch(folder)
    save_bags(folder / KEPT_FILE, found.kept)
    return found, added
