"""Work on every image of a data set in Parquet shards, and features that shards put into the feature store."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.data.options import DatasetOptions, LoadedSplit, SimilarityOptions, ids_digest, load_split
from hf_captionrl.utils.parts import ShardFolder, Stage, read_shards, run_stage

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from hf_captionrl.data import ImageReader, QuarantineReport
    from hf_captionrl.retrieval import FeatureCache


# --- Stages that read the images of a data set, and the part of the commands that runs them --------------------------


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
    """`--rows_per_shard`, by default `batches` batches of `size`, by default `--batch_size`; refuses parts of batches."""
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
) -> tuple[dict[str, Any], QuarantineReport]:
    """Run a stage on the images that the options name; returns the summary, and the images that cannot be read.

    `settings` is called after the split is chosen.
    """
    from tqdm import tqdm

    from hf_captionrl.data.features import image_hashes
    from hf_captionrl.data.quarantine import QuarantineReport, quarantine_entry

    arguments.check_engine()
    per_shard = rows_per_shard(arguments)
    if output.suffix:
        raise ValueError(
            f"--output {str(output)!r} names a file, but Parquet shards are a folder. Use {str(output.with_suffix(''))!r}."
        )
    split = load_split(arguments, quarantine_path=None, require_captions=require_captions)
    ids, number = ids_digest(split.dataset), len(split.dataset)
    content = hashlib.blake2b(digest_size=16)
    for text in image_hashes(split.dataset, getattr(arguments, "cache_dir", None)):
        content.update(text.encode())
    made_from = {"images": ids, "content of the images": content.hexdigest(), "batch_size": arguments.batch_size}
    if require_captions:
        made_from["references"] = ids_digest(split.dataset, "captions")
    sizes = {"num_rows": number, "rows_per_shard": per_shard}
    entries = []
    with ShardFolder(output, {**settings(), **made_from}, **sizes, overwrite=arguments.overwrite) as shards:
        before = number - sum(len(shards.rows(shard)) for shard in shards.unfinished())
        with tqdm(total=number, initial=before, unit=" images", disable=None) as progress:
            done = run_stage(make_stage(ids), shards, arguments, progress=progress.update)
        if done["manifest"] is not None:  # else another launched process is the last
            entries = [
                quarantine_entry(row, found["image_id"], split.split, "image", found["reason"], found["detail"], "row")
                for row, found in enumerate(read_shards(output, ["image_id", "reason", "detail"]))
                if found["reason"] is not None
            ]
    report = QuarantineReport({split.split: number}, tuple(entries), output / "quarantine.jsonl")
    if entries:
        report.write()
    summary = {
        "output": str(output),
        "split": arguments.split,
        "images": number - len(entries),
        "of": len(split.all_ids),
        "written": number - before - len(entries),
        "resumed": before,
        "shards": done["shards"],
        "finished": done["manifest"] is not None,
        "unreadable": [{"image_id": entry.image_id, "reason": entry.reason} for entry in entries],
        **({"trained_on": split.trained} if split.trained else {}),
    }
    return summary, report


def stop_if_unreadable(arguments: DatasetOptions, report: QuarantineReport) -> None:
    """After the work: an error if more images than `--max_bad_fraction` cannot be read."""
    from hf_captionrl.data.quarantine import stop_if_too_many

    for split in report.rows:
        stop_if_too_many(report, split, arguments.max_bad_fraction)


# --- Features of a scorer in shards, and from them in the feature store of this machine -------------------------------

_CACHED_ROWS_AT_ONCE = 256


def keys_and_cached(
    reader: ImageReader, cache: FeatureCache, hashes: FeatureCache, rows: Sequence[int]
) -> tuple[dict[int, str], dict[int, np.ndarray]]:
    """Keys of the images that have a file, and what the cache has of them, both by row of the data set; opens no image.

    Files are hashed in threads; those in the table `hashes` are not read: see `source_keys`. Damaged rows of the cache are
    dropped with a warning.
    """
    from hf_captionrl.data.features import keys_of

    keys = reader.read_all(rows, lambda values: keys_of(values, hashes))
    while known := [row for row, key in keys.items() if key in cache]:
        # Fails after it has dropped damaged rows, whose keys are unknown in the next round.
        with contextlib.suppress(KeyError):
            return keys, dict(zip(known, cache.get([keys[row] for row in known]).tensor().numpy(), strict=True))
    return keys, {}


def fill_cache(cache: FeatureCache, folder: Path) -> None:
    """Put the features of finished shards into a cache, by the column `key`; a row without a key is an unreadable image.

    The check of the images before a training then opens none of them.
    """
    import numpy as np

    from hf_captionrl.data.images import checked_images

    checked = checked_images(cache.root)
    readable = (row for row in read_shards(folder, ["key", "image"]) if row["key"] is not None)
    while part := list(itertools.islice(readable, _CACHED_ROWS_AT_ONCE)):
        keys = [row["key"] for row in part]
        if decoded := [keys[at] for at in checked.missing(keys)]:
            checked.put(decoded, np.ones((len(decoded), 1), np.uint8))
        if new := cache.missing(keys):
            cache.put([keys[at] for at in new], np.array([part[at]["image"] for at in new], np.float32))


@dataclass
class FeaturesOptions(SimilarityOptions, DatasetOptions):
    """The images of a data set, and the scorer that encodes them."""


class FeatureStage(ImageStage):
    """Features of the images of shards: `key` and `image`."""

    def load_model(self, split: LoadedSplit) -> ImageReader:
        from hf_captionrl.data import ImageReader
        from hf_captionrl.data.features import file_hashes
        from hf_captionrl.evaluation.similarity import similarity_scorer
        from hf_captionrl.retrieval import FeatureCache

        self._scorer = similarity_scorer(self.options)
        # Only read here: otherwise the features of an image would depend on which process is the first.
        self._cache = FeatureCache.for_scorer(self._scorer, self.options.cache_dir)
        self._hashes = file_hashes(self.options.cache_dir)
        return ImageReader(split.dataset, split=split.split)

    def made_by(self) -> dict[str, Any]:
        return {"scorer": self._scorer.signature}

    def columns(self) -> dict[str, pa.DataType]:
        import pyarrow as pa

        return {"key": pa.string(), "image": pa.list_(pa.float32())}

    def batch(self, rows: list[int]) -> dict[int, dict[str, Any]]:
        keys, features = keys_and_cached(self.reader, self._cache, self._hashes, rows)
        opened = self.reader.open_all([row for row in keys if row not in features])
        if opened:
            computed = self._scorer.image_features(list(opened.values())).float().cpu().numpy()  # (B, D)
            features |= dict(zip(opened, computed, strict=True))
        return {
            row: {"key": key, "image": features[row].astype("float32")} for row, key in keys.items() if row in features
        }
