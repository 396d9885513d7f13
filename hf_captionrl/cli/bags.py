"""`captionrl bags`: mine bags of similar images for evaluation and for training."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from hf_captionrl.data.options import DatasetOptions, SimilarityOptions, load_split
from hf_captionrl.utils.io import atomic_write_bytes, temporary_path
from hf_captionrl.utils.options import EngineOptions, Positive, Range, SeedOptions, option
from hf_captionrl.utils.parts import MakePart, check_settings, read_parts, run_parts, split_rows

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor


# --- Neighbours of every image in parts: exact in blocks, or from a compressed index --------------------------------

EXACT_ROWS = 200_000
"""Largest number of images whose neighbours are searched exactly; above it, and with --approximate, by IVF-PQ."""

_SAMPLE = 256
_ROWS_PER_PART = 4096


class NeighbourParts(MakePart):
    """Neighbours of rows, most similar first. `folder` holds the features of all images, and the compressed index if any.

    Their names have the `digest` of the features, so that those of an earlier run with other features are not used.
    """

    def __init__(self, folder: Path, top: int, is_exact: bool, digest: str = "") -> None:
        self.top, self.is_exact = top, is_exact
        self.features = folder.absolute() / f"features-{digest}.npy"
        self.index = folder.absolute() / f"index-{digest}.faiss"
        self.needs_gpu = is_exact  # faiss searches the compressed index on the CPU

    def load(self) -> dict[str, Any]:
        import numpy as np
        import torch

        from hf_captionrl.retrieval.neighbours import CompressedIndex, rank_rows

        features = np.load(self.features, mmap_mode="r")
        self._search: Callable[[range, int], tuple[Tensor, Tensor]]
        if not self.is_exact:
            self._search = CompressedIndex(self.index, features).search
            return {}
        unit = torch.from_numpy(np.asarray(features).copy()).to("cuda" if torch.cuda.is_available() else "cpu")
        self._search = lambda rows, k: rank_rows(unit, k, rows=list(rows))
        return {}

    def __call__(self, rows: range) -> pa.Table:
        import pyarrow as pa

        indices, similarities = self._search(rows, self.top)
        schema = pa.schema({"neighbours": pa.list_(pa.int64()), "similarities": pa.list_(pa.float32())})
        return pa.table([indices.tolist(), similarities.tolist()], schema=schema)


def neighbours_in_parts(
    features: Tensor, top: int, folder: Path, options: EngineOptions, *, approximate: bool, settings: dict[str, Any]
) -> tuple[Tensor, Tensor, float | None]:
    """Neighbours `(N, top)` of all images, their similarities, and the measured recall of the compressed index."""
    import hashlib

    import numpy as np
    import torch

    from hf_captionrl.retrieval.neighbours import build_compressed_index, neighbour_recall, normalised, rank_rows

    unit = normalised(features).cpu().contiguous()
    is_exact = not approximate and len(unit) <= EXACT_ROWS
    digest = hashlib.blake2b(unit.numpy(), digest_size=16).hexdigest()
    made_from = settings | {"rows": digest, "top": top, "exact": is_exact}
    parts = split_rows(len(unit), options.rows_per_shard or _ROWS_PER_PART)
    check_settings(folder, parts, made_from)  # before files of other settings are written
    make_part = NeighbourParts(folder, top, is_exact, digest)
    if not make_part.features.is_file():
        buffer = io.BytesIO()
        np.save(buffer, unit.numpy())
        atomic_write_bytes(make_part.features, buffer.getvalue())
    if not is_exact and not make_part.index.is_file():
        build_compressed_index(unit.numpy(), make_part.index)
    run_parts(folder, parts, make_part, options, settings=made_from)
    indices = torch.empty(len(unit), top, dtype=torch.long)
    similarities = torch.empty(len(unit), top)
    for number, row in enumerate(read_parts(folder)):
        indices[number], similarities[number] = torch.tensor(row["neighbours"]), torch.tensor(row["similarities"])
    if is_exact:
        return indices, similarities, None
    sample = torch.randperm(len(unit), generator=torch.Generator().manual_seed(0))[:_SAMPLE]
    recall = neighbour_recall(indices[sample], rank_rows(unit, top, rows=sample)[0])
    return indices, similarities, recall


# --- `captionrl bags`: mine bags of similar images for evaluation and for training -----------------------------------

_SIZES = {"truematch": (3, 5, 7), "training": (2, 3, 5, 7, 10, 15, 20)}


@dataclass
class BagsOptions(SeedOptions, EngineOptions, SimilarityOptions, DatasetOptions):
    """Find images that look alike, by a scorer's features of images, or of images and captions.

    The file holds image ids, similarities, and the scorer's name and revision. Readers refuse bags of other features.
    """

    examples: ClassVar[str] = """
        modes:
          truematch    the most similar bag of each visual concept, disjoint (No Detail Left Behind, Algorithms 1 and 2)
          training     one epoch of disjoint bags over all images (section B.2), for inspection
          neighbours   the ranked neighbours of each image, from which a trainer draws new training bags every epoch

        examples:
          captionrl bags --dataset scenes --output truematch.parquet
          captionrl bags --dataset scenes --split train --mode neighbours --output neighbours.safetensors
          captionrl bags --dataset dataset_coco.json --image_root coco --split train --scorer openai/clip-vit-base-patch32 \\
              --features image --mode training --bag_sizes 20 --output bags.json
          captionrl bags --dataset OWNER/NAME --split train --mode neighbours --output neighbours.safetensors --processes 8
    """

    output: Path | None = option(
        None,
        metavar="FILE",
        help="bags: .parquet or .json; neighbours: .safetensors (default: bags.parquet, neighbours.safetensors)",
    )
    mode: Literal["truematch", "training", "neighbours"] = option("truematch", help="what to mine, as listed below")
    approximate: bool = option(
        False,
        group="similarity",
        help="search with faiss' IVF-PQ, and print the measured recall, as always for more than 200,000 images",
    )
    bag_sizes: list[Annotated[int, Range(at_least=2)]] | None = option(
        None,
        metavar="K",
        group="bags",
        aliases=["--bag_size"],
        help="images per bag, one size or several (default: 3 5 7; for training 2 3 5 7 10 15 20)",
    )
    top: Positive = option(200, group="bags", help="number of neighbours per image")


def _check(arguments: BagsOptions) -> tuple[Path, list[int]]:
    """Output file and bag sizes, checked before anything slow."""
    arguments.check_engine()
    neighbours = arguments.mode == "neighbours"
    if arguments.uses_shards and not neighbours:
        raise ValueError(f"--mode {arguments.mode} runs in one process. Leave --processes and --engine out.")
    output = arguments.output or Path("neighbours.safetensors" if neighbours else "bags.parquet")
    endings = (".safetensors",) if neighbours else (".parquet", ".json")
    if output.is_dir() or output.suffix not in endings:
        raise ValueError(f"--output {str(output)!r} must name a file that ends in {' or '.join(endings)}.")
    if neighbours:
        if arguments.bag_sizes:
            raise ValueError(
                "--bag_sizes has no effect with --mode neighbours, because the trainer chooses the sizes. Leave it out."
            )
        return output, []
    if arguments.approximate and arguments.mode == "truematch":
        raise ValueError("--approximate can miss the most similar images, of which TrueMatch consists. Leave it out.")
    sizes = sorted(set(arguments.bag_sizes or _SIZES[arguments.mode]))
    if arguments.mode == "training" and sizes[-1] - 1 > arguments.top:
        raise ValueError(f"--bag_sizes {sizes[-1]} needs {sizes[-1] - 1} neighbours per image. Raise --top.")
    return output, sizes


def mine_bags(arguments: BagsOptions) -> None:
    """Mine bags or neighbours and write them."""
    output, sizes = _check(arguments)

    import torch

    from hf_captionrl.data.columns import id_column
    from hf_captionrl.evaluation.similarity import features_of, similarity_scorer
    from hf_captionrl.retrieval.bags import (
        BagFile,
        NeighbourFile,
        bag_similarities,
        candidate_bags,
        curate_bags,
        load_bags,
        load_neighbours,
        save_bags,
        save_neighbours,
        training_bags,
    )
    from hf_captionrl.retrieval.neighbours import nearest_neighbours

    if output.exists():
        try:
            (load_neighbours if arguments.mode == "neighbours" else load_bags)(output)
        except ValueError as error:
            raise ValueError(
                f"--output {str(output)!r} exists and is no file of --mode {arguments.mode}. Use another --output."
            ) from error
    split = load_split(
        arguments,
        quarantine_path=output.with_suffix(".quarantine.jsonl"),
        require_captions=arguments.features != "image",
    )
    ids = id_column(split.dataset)
    least = max(sizes, default=2)
    if len(ids) < least:
        raise ValueError(f"the split has {len(ids)} images, but a bag needs {least}. Lower --bag_sizes.")
    scorer = similarity_scorer(arguments)
    features, signature = features_of(arguments, split.dataset, scorer, arguments.features), scorer.signature
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    summary: dict[str, Any] = {"output": str(output), "mode": arguments.mode, "images": len(ids)}
    summary |= {"scorer": signature, "features": arguments.features}
    if arguments.mode != "truematch":
        top = min(arguments.top, len(ids) - 1)
        if arguments.uses_shards or arguments.approximate or len(ids) > EXACT_ROWS:
            settings = {"scorer": signature, "features": arguments.features}
            # With --processes or --engine, a repeated command resumes; otherwise the folder is removed at the end.
            shards = nullcontext(output.with_suffix(".shards"))
            kept: Any = shards if arguments.uses_shards else temporary_path(output.parent, is_folder=True)
            with kept as folder:
                neighbours, similarities, recall = neighbours_in_parts(
                    features, top, Path(folder), arguments, approximate=arguments.approximate, settings=settings
                )
            if recall is not None:
                summary["recall"] = recall
        else:
            neighbours, similarities = nearest_neighbours(features, top, device=device)
        summary["neighbours"] = top
    if arguments.mode == "neighbours":
        save_neighbours(output, NeighbourFile(neighbours, similarities, ids, signature, arguments.features))
    else:
        bags: list[list[str]] = []
        scores: list[float] = []
        summary["bags"] = {}
        for size in sizes:
            if arguments.mode == "truematch":
                rows, score = curate_bags(*candidate_bags(features, size, device=device))
            else:
                rows = training_bags(neighbours, size, seed=arguments.seed, features=features, top=top)
                score = bag_similarities(features, rows)
            bags += [ids[bag] for bag in rows.tolist()]
            scores += score.tolist()
            summary["bags"][str(size)] = {"number": len(rows), "similarity": float(score.mean())}
        save_bags(output, BagFile(bags, scores, signature, arguments.features, arguments.mode))
    if arguments.json:
        print(json.dumps(summary))
        return
    print(f"{output}: {len(ids)} images, {arguments.features} features of {signature}")
    if "recall" in summary:
        print(f"  found {summary['recall']:.3f} of the true neighbours, measured on a sample")
    if "neighbours" in summary and arguments.mode == "neighbours":
        print(f"  {summary['neighbours']} ranked neighbours per image")
    for size, found in summary.get("bags", {}).items():
        print(f"  {found['number']} bags of {size}, mean similarity {found['similarity']:.3f}")
