"""Stages that read the images of a data set, and the part of the commands that runs them."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.engine import ShardFolder, Stage, read_shards, run_stage
from hf_captionrl.evaluation.dataset_options import LoadedSplit, ids_digest, load_split

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from hf_captionrl.data import ImageReader

__all__ = ["ImageStage", "rows_per_shard", "run_on_images"]


class ImageStage(Stage):
    """A stage whose result has one row per image: `image_id`, [`columns`], and `reason` and `detail` if it is unreadable.

    `ids` is [`ids_digest`] of the images; a process that finds other images stops.
    """

    def __init__(
        self, options: Any, ids: str, *, require_captions: bool = False, only: np.ndarray | None = None
    ) -> None:
        self.options, self.ids, self.require_captions, self.only = copy.copy(options), ids, require_captions, only

    def load(self) -> None:
        split = load_split(
            self.options,
            quarantine_path=None,
            require_captions=self.require_captions,
            expected_ids=self.ids,
            only=self.only,
        )
        self.reader: ImageReader = self.load_model(split)

    @abstractmethod
    def load_model(self, split: LoadedSplit) -> ImageReader:
        """Load the model; returns the reader of the images."""

    @abstractmethod
    def columns(self) -> Mapping[str, pa.DataType]:
        """Names and types of the columns of a readable image."""

    @abstractmethod
    def batch(self, rows: list[int]) -> dict[int, dict[str, Any]]:
        """Columns of the readable images of one batch."""

    @property
    def rows_at_once(self) -> int:
        """Rows of a batch."""
        return int(self.options.batch_size)

    def schema(self) -> pa.Schema:
        import pyarrow as pa

        text = pa.string()
        return pa.schema({"image_id": text, **self.columns(), "reason": text, "detail": text})

    def __call__(self, rows: range) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        size = self.rows_at_once
        for start in range(rows.start, rows.stop, size):
            found |= self.batch(list(range(start, min(start + size, rows.stop))))
        faults = {entry.row: entry for entry in self.reader.report().entries}
        return [
            {"image_id": image_id}
            | (found[row] if row in found else {"reason": faults[row].reason, "detail": faults[row].detail})
            for row, image_id in zip(rows, self.reader.ids[rows.start : rows.stop], strict=True)
        ]


def rows_per_shard(arguments: Any, batches: int = 64, size: int | None = None) -> int:
    """`--rows_per_shard`, by default `batches` batches; refuses a number that is not a multiple of `size`.

    `size` None is `--batch_size`.
    """
    what = f"--batch_size {arguments.batch_size}" if size is None else f"{size}, the captions that are scored together"
    size = arguments.batch_size if size is None else size
    rows = arguments.rows_per_shard or batches * size
    if rows % size:
        raise ValueError(f"--rows_per_shard {rows} is not a multiple of {what}. Use {-(-rows // size) * size}.")
    return int(rows)


def run_on_images(
    arguments: Any,
    output: Path,
    settings: Callable[[], Mapping[str, Any]],
    make_stage: Callable[[str], ImageStage],
    *,
    require_captions: bool = False,
) -> dict[str, Any]:
    """Run a stage on the images that the options name; returns the summary of the command.

    `settings` is called after the split is chosen.
    """
    from tqdm import tqdm

    from hf_captionrl.data.quarantine import QuarantineReport, quarantine_entry, stop_if_too_many

    per_shard = rows_per_shard(arguments)  # before anything slow
    if output.suffix:
        raise ValueError(
            f"--output {str(output)!r} names a file, but Parquet shards are a folder. Use {str(output.with_suffix(''))!r}."
        )
    split = load_split(arguments, quarantine_path=None, require_captions=require_captions)
    ids, number = ids_digest(split.dataset), len(split.dataset)
    made_from = {"images": ids, "batch_size": arguments.batch_size}
    if require_captions:
        made_from["references"] = ids_digest(split.dataset, "captions")
    shards = ShardFolder(
        output,
        {**settings(), **made_from},
        num_rows=number,
        rows_per_shard=per_shard,
        overwrite=arguments.overwrite,
    )
    before = number - sum(len(shards.rows(shard)) for shard in shards.unfinished())
    with tqdm(total=number, initial=before, unit=" images", disable=None) as progress:
        done = run_stage(make_stage(ids), shards, arguments, progress=progress.update)
    entries = []
    if done["manifest"] is not None:  # else another launched process is the last
        entries = [
            quarantine_entry(row, found["image_id"], split.split, "image", found["reason"], found["detail"], "row")
            for row, found in enumerate(read_shards(output, ["image_id", "reason", "detail"]))
            if found["reason"] is not None
        ]
    report = QuarantineReport({split.split: number}, tuple(entries), output / "quarantine.jsonl")
    if entries:
        report.write()
        stop_if_too_many(report, split.split, arguments.max_bad_fraction)
    return {
        "output": str(output),
        "split": arguments.split,
        "images": number - len(entries),
        "of": len(split.all_ids),
        "written": number - before - len(entries),
        "resumed": before,
        "shards": done["shards"],
        "finished": done["manifest"] is not None,
        "unreadable": [{"image_id": entry.image_id, "reason": entry.reason} for entry in entries],
    }
