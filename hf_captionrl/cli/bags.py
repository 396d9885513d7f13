"""`captionrl bags`: mine bags of similar images for evaluation and for training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from hf_captionrl.data.options import DatasetOptions, SimilarityOptions, load_split
from hf_captionrl.utils.io import counted, refuse_other_file
from hf_captionrl.utils.options import Positive, Range, option


@dataclass
class BagsOptions(SimilarityOptions, DatasetOptions):
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


def mine_bags(arguments: BagsOptions) -> None:
    """Mine bags or neighbours and write them."""
    is_ranking, sizes = arguments.mode == "neighbours", sorted(set(arguments.bag_sizes or (3, 5, 7)))
    if is_ranking and arguments.bag_sizes:
        raise ValueError(
            "--bag_sizes has no effect with --mode neighbours: the trainer chooses the sizes. Leave it out."
        )
    output = arguments.output or Path("neighbours.safetensors" if is_ranking else "bags.json")
    suffix = ".safetensors" if is_ranking else ".json"
    if output.is_dir() or output.suffix != suffix:
        raise ValueError(f"--output {str(output)!r} must name a file that ends in {suffix}.")

    import torch

    from hf_captionrl.data.columns import concept_column, id_column
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
    from hf_captionrl.retrieval.ranking import num_concepts

    reader: Any = load_neighbours if is_ranking else load_bags
    refuse_other_file(output, reader, f"--mode {arguments.mode}")
    split = load_split(
        arguments,
        quarantine_path=output.with_suffix(".quarantine.jsonl"),
        require_captions=arguments.features != "image",
    )
    ids, concepts = id_column(split.dataset), concept_column(split.dataset)
    least = 2 if is_ranking else sizes[-1]
    if len(ids) < least:
        raise ValueError(f"the split has {len(ids)} images, but a bag needs {least}. Lower --bag_sizes.")
    scorer = similarity_scorer(arguments)
    features, signature = features_of(arguments, split.dataset, scorer), scorer.signature
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    summary: dict[str, Any] = {"output": str(output), "mode": arguments.mode, "images": len(ids)}
    summary |= {"scorer": signature, "features": arguments.features}
    if is_ranking:
        top = min(arguments.top, num_concepts(len(ids), concepts) - 1)
        pair = nearest_neighbours(features, top, device=device, concepts=concepts)
        save_neighbours(output, NeighbourFile(*pair, ids, signature, arguments.features))
        summary["neighbours"] = top
    else:
        bags: list[list[str]] = []
        scores: list[float] = []
        summary["bags"] = {}
        for size in sizes:
            rows, score = curate_bags(*candidate_bags(features, size, device=device, concepts=concepts))
            bags += [[ids[row] for row in bag] for bag in rows.tolist()]
            scores += score.tolist()
            summary["bags"][str(size)] = {"number": len(rows), "similarity": float(score.mean())}
        save_bags(output, BagFile(bags, scores, signature, arguments.features))
    if arguments.json:
        print(json.dumps(summary))
        return
    print(f"{output}: {counted(len(ids), 'image')}, {arguments.features} features of {signature.partition('|')[0]}")
    if "neighbours" in summary:
        print(f"  {summary['neighbours']} ranked neighbours per image")
    for size, bag in summary.get("bags", {}).items():
        print(f"  {counted(bag['number'], 'bag')} of {size}, mean similarity {bag['similarity']:.3f}")
