"""How long bags of similar images take: exact neighbours, disjoint bags for training, and faiss.

Exact neighbours of 118,000 images x 1,024 features against the bare blocked matrix product: a few blocks of queries
against all images, both sides in turn in one process on one thread, so that a busy machine slows both; normalising,
which is done once, is counted by its share. Disjoint bags for the seven sizes of the paper at 118,000 images (their
neighbours come from fewer features, which does not change the work). faiss against the exact search at 20,000 images.
Times are CPU seconds of this process.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hf_captionrl.data.bag_curriculum import PAPER_SCHEDULE
from hf_captionrl.retrieval.bags import bag_similarities, training_bags
from hf_captionrl.retrieval.neighbours import approximate_neighbours, nearest_neighbours, normalised, rank_rows


def _features(count: int, width: int, seed: int) -> torch.Tensor:
    """Clusters of about 20 images, as look-alikes are."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(max(count // 20, 1), width, generator=generator)
    rows = torch.randn(count, width, generator=generator)
    return rows.add_(centres[torch.randint(len(centres), (count,), generator=generator)])


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def _exact(args: argparse.Namespace) -> dict[str, Any]:
    setup, unit = _seconds(functools.partial(normalised, _features(args.images, args.width, args.seed)))
    block = max(2**24 // args.images, 16)
    buffer = torch.empty(block, args.images)
    generator = torch.Generator().manual_seed(args.seed)
    rows = torch.randperm(args.images, generator=generator)[: block * args.blocks]

    def bare() -> None:
        for part in rows.split(block):
            torch.mm(unit[part], unit.T, out=buffer[: len(part)])

    def ours() -> Any:
        return rank_rows(unit, args.top, rows=rows, block_size=block)

    bare()
    ours()
    share = setup * len(rows) / args.images
    pairs = [(_seconds(ours)[0] + share, _seconds(bare)[0]) for _ in range(args.rounds)]
    ratios = [a / b for a, b in pairs]
    indices = ours()[0]
    scores = unit[rows[:8]] @ unit.T
    scores[torch.arange(8), rows[:8]] = -2
    least = scores.gather(1, indices[:8]).min(dim=1).values
    # As many images stand above the last neighbour as there are neighbours: nothing was missed.
    missed = int(((scores > least[:, None] + 1e-6).sum(dim=1) >= args.top).sum())
    return {
        "images": args.images,
        "features": args.width,
        "neighbours": args.top,
        "queries": len(rows),
        "ours_seconds": statistics.median(a for a, _ in pairs),
        "bare_product_seconds": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        "rounds": args.rounds,
        "whole_run_seconds": statistics.median(a for a, _ in pairs) * args.images / len(rows),
        "queries_with_a_missed_neighbour": missed,
    }


def _assignment(args: argparse.Namespace) -> dict[str, Any]:
    features = _features(args.images, args.narrow, args.seed)
    neighbours, _ = nearest_neighbours(features, args.top)
    found: dict[str, Any] = {"images": args.images, "neighbours": args.top, "sizes": {}}
    for size in PAPER_SCHEDULE.values():
        draw = functools.partial(training_bags, neighbours, size, seed=args.seed, check=False)
        seconds, bags = _seconds(draw)
        exact, _ = _seconds(functools.partial(draw, features=features))
        near = (neighbours[bags[:, 0]][:, :, None] == bags[:, None, 1:]).any(dim=1).all(dim=1)
        found["sizes"][str(size)] = {
            "seconds": seconds,
            "seconds_with_features": exact,
            "bags": len(bags),
            "images_placed": int(bags.unique().numel()),
            "share_of_leftovers": float((~near).double().mean()),
            "similarity": float(bag_similarities(features, bags).mean()),
        }
    return found


def _faiss(args: argparse.Namespace) -> dict[str, Any]:
    features = _features(args.faiss_images, args.faiss_width, args.seed)
    exact, _ = _seconds(lambda: nearest_neighbours(features, args.top))
    found: dict[str, Any] = {
        "images": args.faiss_images,
        "features": args.faiss_width,
        "exact_seconds": exact,
        "probes": {},
    }
    for probes in (8, 32, 128):
        search = functools.partial(approximate_neighbours, features, args.top, num_probes=probes)
        seconds, (_, _, recall) = _seconds(search)
        found["probes"][str(probes)] = {"seconds": seconds, "recall": recall}
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    parser.add_argument("--images", type=int, default=118_000, help="Images of the exact search and of the bags.")
    parser.add_argument("--width", type=int, default=1024, help="Features of the exact search.")
    parser.add_argument("--narrow", type=int, default=24, help="Features behind the neighbours of the bags.")
    parser.add_argument("--top", type=int, default=200, help="Neighbours an image.")
    parser.add_argument("--blocks", type=int, default=4, help="Blocks of queries that are timed.")
    parser.add_argument("--rounds", type=int, default=9, help="How often both sides of the ratio are timed.")
    parser.add_argument("--faiss_images", type=int, default=20_000, help="Images of the comparison with faiss.")
    parser.add_argument("--faiss_width", type=int, default=256, help="Features of it.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of features and bags.")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time bags.

    Returns `exact`, with `ratio`, how often slower than the bare product; `assignment`, seconds and leftovers by bag
    size; `faiss`, seconds and recall by the number of lists searched.
    """
    import faiss

    threads = torch.get_num_threads(), faiss.omp_get_max_threads()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    try:
        result = {"exact": _exact(args), "assignment": _assignment(args), "faiss": _faiss(args)}
    finally:
        torch.set_num_threads(threads[0])
        faiss.omp_set_num_threads(threads[1])
    if result["exact"]["queries_with_a_missed_neighbour"]:
        raise RuntimeError("the exact search missed a neighbour; a wrong search is not timed.")
    for size, found in result["assignment"]["sizes"].items():
        if found["images_placed"] != args.images // int(size) * int(size):
            raise RuntimeError(f"bags of {size} hold {found['images_placed']} images; wrong bags are not timed.")
    result["versions"] = {"torch": torch.__version__, "numpy": np.__version__, "faiss": faiss.__version__}
    return result


def markdown(result: dict[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    exact, assignment, faiss = result["exact"], result["assignment"], result["faiss"]
    low, high = exact["ratio_quartiles"]
    lines = [
        "## `bags`: neighbours and bags of similar images",
        "",
        f"One thread, fp32, torch {result['versions']['torch']}, faiss {result['versions']['faiss']}; CPU-seconds.",
        "",
        f"Exact {exact['neighbours']} neighbours of {exact['images']:,} images x {exact['features']:,} features: "
        f"{exact['ratio']:.2f} [{low:.2f}, {high:.2f}] times the bare blocked product (median [quartiles] of "
        f"{exact['rounds']} rounds of {exact['queries']} queries against all images; at most 1.3). All images would "
        f"take {exact['whole_run_seconds']:.0f} CPU-seconds.",
        "",
        f"Disjoint training bags of {assignment['images']:,} images, leftovers placed through their neighbours' "
        "neighbours, or exactly with the features:",
        "",
        "| bag size | bags | seconds | with features | bags not from the top list | mean similarity |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {size} | {found['bags']:,} | {found['seconds']:.2f} | {found['seconds_with_features']:.2f} | "
        f"{found['share_of_leftovers']:.2%} | {found['similarity']:.3f} |"
        for size, found in assignment["sizes"].items()
    ]
    lines += [
        "",
        f"faiss (inverted lists) at {faiss['images']:,} images x {faiss['features']} features, where the exact search "
        f"takes {faiss['exact_seconds']:.1f} s; building the index and measuring the recall on 256 images included:",
        "",
        "| lists searched | seconds | recall |",
        "|--:|--:|--:|",
    ]
    lines += [f"| {p} | {found['seconds']:.1f} | {found['recall']:.3f} |" for p, found in faiss["probes"].items()]
    return "\n".join(lines)
