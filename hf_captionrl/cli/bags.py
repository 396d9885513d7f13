"""`captionrl bags`: mine bags of similar images for evaluation and for training."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from hf_captionrl.data.options import DatasetOptions, SimilarityOptions, load_split
from hf_captionrl.utils.io import atomic_write_bytes, refuse_other_file
from hf_captionrl.utils.options import EngineOptions, Positive, Range, option
from hf_captionrl.utils.parts import MakePart, check_settings, part_files, run_parts, split_rows

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor


_ROWS_PER_PART = 4096


class NeighbourParts(MakePart):
    """Neighbours of rows, most similar first; `features` is a file with those of all images, of unit length."""

    def __init__(self, features: Path, top: int) -> None:
        self.features, self.top = features.absolute(), top

    def load(self) -> dict[str, Any]:
        import torch
        from safetensors.torch import load_file

        self._unit = load_file(self.features)["features"].to("cuda" if torch.cuda.is_available() else "cpu")
        return {}

    def __call__(self, rows: range) -> pa.Table:
        import pyarrow as pa

        from hf_captionrl.retrieval.neighbours import rank_rows

        indices, similarities = rank_rows(self._unit, self.top, rows=list(rows))
        schema = pa.schema({"neighbours": pa.list_(pa.int64()), "similarities": pa.list_(pa.float32())})
        return pa.table([indices.tolist(), similarities.tolist()], schema=schema)


def neighbours_in_parts(
    features: Tensor, top: int, folder: Path, options: EngineOptions, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Neighbours `(N, top)` of all images, and their similarities."""
    import numpy as np
    import pyarrow.parquet
    import torch
    from safetensors.torch import save

    from hf_captionrl.retrieval.neighbours import normalised

    unit = normalised(features).cpu().contiguous()
    digest = hashlib.blake2b(unit.numpy(), digest_size=16).hexdigest()
    settings = settings | {"rows": digest, "top": top}
    parts = split_rows(len(unit), options.rows_per_shard or _ROWS_PER_PART)
    check_settings(folder, parts, settings)  # before files of other settings are written
    path = folder / f"features-{digest}.safetensors"
    if not path.is_file():
        atomic_write_bytes(path, save({"features": unit}))
    run_parts(folder, parts, NeighbourParts(path, top), options, settings=settings)
    table = pyarrow.parquet.read_table(part_files(folder), partitioning=None)
    indices, similarities = (
        torch.from_numpy(np.stack(table[name].to_numpy())) for name in ("neighbours", "similarities")
    )
    return indices, similarities


# --- `captionrl bags`: mine bags of similar images for evaluation and for training -----------------------------------


@dataclass
class BagsOptions(EngineOptions, SimilarityOptions, DatasetOptions):
    """Find images that look alike, by a scorer's features of images, or of images and captions.

    The file holds image ids, similarities, and the scorer's name and revision. Readers refuse bags of other features.
    """

    examples: ClassVar[str] = """
        modes:
          truematch    the most similar bag of each visual concept, disjoint (No Detail Left Behind, Algorithms 1 and 2)
          neighbours   the ranked neighbours of each image, from which a trainer draws new training bags every epoch

        examples:
          captionrl bags --dataset scenes --output truematch.json
          captionrl bags --dataset scenes --split train --mode neighbours --output neighbours.safetensors
          captionrl bags --dataset dataset_coco.json --image_root coco --split test --scorer openai/clip-vit-base-patch32 \\
              --features image --bag_sizes 20 --output bags.json
          captionrl bags --dataset OWNER/NAME --split train --mode neighbours --output neighbours.safetensors --processes 8
    """

    output: Path | None = option(
        None,
        metavar="FILE",
        help="bags: .json; neighbours: .safetensors (default: bags.json, neighbours.safetensors)",
    )
    mode: Literal["truematch", "neighbours"] = option("truematch", help="what to mine, as listed below")
    bag_sizes: list[Annotated[int, Range(at_least=2)]] | None = option(
        None,
        metavar="K",
        group="bags",
        aliases=["--bag_size"],
        help="images per bag, one size or several (default: 3 5 7)",
    )
    top: Positive = option(200, group="bags", help="number of neighbours per image")


def _check(arguments: BagsOptions) -> tuple[Path, list[int]]:
    """Output file and bag sizes, checked before anything slow."""
    is_ranking = arguments.mode == "neighbours"
    if arguments.uses_shards and not is_ranking:
        raise ValueError(f"--mode {arguments.mode} runs in one process. Leave --processes and --engine out.")
    output = arguments.output or Path("neighbours.safetensors" if is_ranking else "bags.json")
    suffix = ".safetensors" if is_ranking else ".json"
    if output.is_dir() or output.suffix != suffix:
        raise ValueError(f"--output {str(output)!r} must name a file that ends in {suffix}.")
    if is_ranking:
        if arguments.bag_sizes:
            raise ValueError(
                "--bag_sizes has no effect with --mode neighbours: the trainer chooses the sizes. Leave it out."
            )
        return output, []
    return output, sorted(set(arguments.bag_sizes or (3, 5, 7)))


def mine_bags(arguments: BagsOptions) -> None:
    """Mine bags or neighbours and write them."""
    output, sizes = _check(arguments)

    import torch

    from hf_captionrl.data.columns import id_column
    from hf_captionrl.evaluation.similarity import features_of, similarity_scorer
    from hf_captionrl.retrieval.bags import (
        BagFile,
        NeighbourFile,
        candidate_bags,
        curate_bags,
        load_bags,
        load_neighbours,
        save_bags,
        save_neighbours,
    )
    from hf_captionrl.retrieval.neighbours import nearest_neighbours

    reader: Any = load_neighbours if arguments.mode == "neighbours" else load_bags
    refuse_other_file(output, reader, f"--mode {arguments.mode}")
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
    if arguments.mode == "neighbours":
        top = min(arguments.top, len(ids) - 1)
        if arguments.uses_shards:
            settings = {"scorer": signature, "features": arguments.features}
            pair = neighbours_in_parts(features, top, output.with_suffix(".shards"), arguments, settings)
        else:
            pair = nearest_neighbours(features, top, device=device)
        save_neighbours(output, NeighbourFile(*pair, ids, signature, arguments.features))
        summary["neighbours"] = top
    else:
        bags: list[list[str]] = []
        scores: list[float] = []
        summary["bags"] = {}
        for size in sizes:
            rows, score = curate_bags(*candidate_bags(features, size, device=device))
            bags += [[ids[row] for row in bag] for bag in rows.tolist()]
            scores += score.tolist()
            summary["bags"][str(size)] = {"number": len(rows), "similarity": float(score.mean())}
        save_bags(output, BagFile(bags, scores, signature, arguments.features))
    if arguments.json:
        print(json.dumps(summary))
        return
    print(f"{output}: {len(ids)} images, {arguments.features} features of {signature}")
    if "neighbours" in summary:
        print(f"  {summary['neighbours']} ranked neighbours per image")
    for size, bag in summary.get("bags", {}).items():
        print(f"  {bag['number']} bags of {size}, mean similarity {bag['similarity']:.3f}")
