"""Neighbours of every image on shards: exact in blocks, or from a compressed index."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.engine import EngineOptions, ShardFolder, Stage, read_manifest, read_shards, read_tables, run_stage

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from hf_captionrl.data.arrow_columns import ColumnView

__all__ = ["EXACT_ROWS", "NeighbourStage", "neighbours_on_shards", "read_feature_shards"]

EXACT_ROWS = 200_000
"""Largest number of images whose neighbours are searched exactly; above it, and with --approximate, by IVF-PQ."""

_SAMPLE = 256
_ROWS_PER_SHARD = 4096
_FEATURES, _INDEX = "features.npy", "index.faiss"


def read_feature_shards(folder: Path, kind: str) -> tuple[ColumnView[str], Tensor, str]:
    """Ids, features `(N, D)` or `(N, 2 D)`, and signature of the scorer, from `captionrl features`; readable images only."""
    import datasets
    import numpy as np
    import pyarrow as pa
    import torch

    from hf_captionrl.data.arrow_columns import id_column
    from hf_captionrl.retrieval.bags import multimodal_features

    names: list[pa.ChunkedArray] = []
    columns: dict[str, list[Any]] = {"image": [], "text": []} if kind == "multimodal" else {"image": []}
    for table in read_tables(folder, ["image_id", *columns]):
        table = table.filter(table["image"].is_valid())
        names.append(table["image_id"])
        for name, parts in columns.items():
            if table[name].null_count:
                raise ValueError(f"{str(folder)!r} has features of images alone. Use --features image.")
            if table.num_rows:
                parts.append(table[name].combine_chunks().flatten().to_numpy().reshape(table.num_rows, -1))
    found = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}  # each (N, D)
    chunks = [chunk for part in names for chunk in part.chunks]
    ids = id_column(datasets.Dataset(pa.table({"image_id": pa.chunked_array(chunks, pa.string())})))
    features = found["image"] if kind == "image" else multimodal_features(found["image"], found["text"])
    return ids, features, str(read_manifest(folder)["made_by"]["scorer"])


class NeighbourStage(Stage):
    """Neighbours of shards: rows and similarities, most similar first.

    `folder` holds the features of all images, and the compressed index if there is one.
    """

    def __init__(self, folder: Path, top: int, is_exact: bool) -> None:
        self.folder, self.top, self.is_exact = folder.absolute(), top, is_exact
        self.needs_gpu = is_exact  # faiss searches the compressed index on the CPU

    def load(self) -> None:
        import numpy as np
        import torch

        from hf_captionrl.retrieval.compressed_index import CompressedIndex
        from hf_captionrl.retrieval.neighbours import rank_rows

        features = np.load(self.folder / _FEATURES, mmap_mode="r")
        self._search: Callable[[range, int], tuple[Tensor, Tensor]]
        if not self.is_exact:
            self._search = CompressedIndex(self.folder / _INDEX, features).search
            return
        unit = torch.from_numpy(np.asarray(features).copy()).to("cuda" if torch.cuda.is_available() else "cpu")
        self._search = lambda rows, k: rank_rows(unit, k, rows=list(rows))

    def schema(self) -> pa.Schema:
        import pyarrow as pa

        return pa.schema({"neighbours": pa.list_(pa.int64()), "similarities": pa.list_(pa.float32())})

    def __call__(self, rows: range) -> list[dict[str, Any]]:
        indices, similarities = self._search(rows, self.top)
        pairs = zip(indices.tolist(), similarities.tolist(), strict=True)
        return [{"neighbours": found, "similarities": values} for found, values in pairs]


def neighbours_on_shards(
    features: Tensor, top: int, folder: Path, options: EngineOptions, *, approximate: bool, settings: dict[str, Any]
) -> tuple[Tensor, Tensor, float | None]:
    """Neighbours `(N, top)` of all images, their similarities, and the measured recall of the compressed index."""
    import hashlib

    import numpy as np
    import torch

    from hf_captionrl.io import atomic_write_bytes
    from hf_captionrl.retrieval.compressed_index import build_compressed_index
    from hf_captionrl.retrieval.neighbours import neighbour_recall, normalised, rank_rows

    unit = normalised(features).cpu().contiguous()
    is_exact = not approximate and len(unit) <= EXACT_ROWS
    digest = hashlib.blake2b(unit.numpy(), digest_size=16).hexdigest()
    shards = ShardFolder(
        folder,
        settings | {"rows": digest, "top": top, "exact": is_exact},
        num_rows=len(unit),
        rows_per_shard=options.rows_per_shard or _ROWS_PER_SHARD,
    )
    if not (folder / _FEATURES).is_file():
        buffer = io.BytesIO()
        np.save(buffer, unit.numpy())
        atomic_write_bytes(folder / _FEATURES, buffer.getvalue())
    if not is_exact and not (folder / _INDEX).is_file():
        build_compressed_index(unit.numpy(), folder / _INDEX)
    run_stage(NeighbourStage(folder, top, is_exact), shards, options)
    indices = torch.empty(len(unit), top, dtype=torch.long)
    similarities = torch.empty(len(unit), top)
    for number, row in enumerate(read_shards(folder)):
        indices[number], similarities[number] = torch.tensor(row["neighbours"]), torch.tensor(row["similarities"])
    if is_exact:
        return indices, similarities, None
    sample = torch.randperm(len(unit), generator=torch.Generator().manual_seed(0))[:_SAMPLE]
    recall = neighbour_recall(indices[sample], rank_rows(unit, top, rows=sample)[0])
    return indices, similarities, recall
