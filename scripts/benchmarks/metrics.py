"""How long the metrics take that are also rewards, side by side with what they replace.

CIDEr-D of 100 images x 5 captions x 5 references against pycocoevalcap, BLEU between the 5 captions of each image
against a plain loop, and self-retrieval of 5,000 captions in a pool of 30,000 images against the bare matrix product:
the ranks alone, and the whole metric with its checks and intervals. Both sides of a ratio run in turn in one process on
one thread, so that a busy machine slows both; times are CPU seconds of this process.
"""

import argparse
import gc
import json
import math
import random
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hf_captionrl.metrics import self_retrieval
from hf_captionrl.retrieval.ranking import ranks
from hf_captionrl.text.bleu import pairwise_bleu
from hf_captionrl.text.cider_d import CiderScorer, DocumentFrequencies
from hf_captionrl.text.ngrams import encode_words
from scripts.machine_facts import processor_name

_NOUNS = [
    "dog",
    "cat",
    "man",
    "woman",
    "bus",
    "train",
    "pizza",
    "table",
    "bench",
    "horse",
    "boat",
    "child",
    "clock",
    "bird",
]
_PLACES = ["street", "field", "kitchen", "beach", "room", "park", "station", "river", "forest", "market"]
_ADJECTIVES = ["red", "small", "young", "old", "wooden", "large", "white", "brown", "blue", "busy", "bright", "tall"]
_VERBS = ["sitting", "standing", "riding", "holding", "walking", "looking", "running", "eating", "playing"]
_RARE = [f"rareword{i}" for i in range(6000)]


def _caption(rng: random.Random, topic: tuple[str, str, str]) -> list[str]:
    """A caption of about COCO's length (10.5 words) and vocabulary about one topic."""
    noun, verb, place = topic
    words = ["a", rng.choice(_ADJECTIVES), noun, verb, *rng.choice([["in"], ["on"], ["next", "to"], ["near"]])]
    words += [rng.choice(["a", "the"]), *([rng.choice(_ADJECTIVES)] if rng.random() < 0.5 else []), place]
    if rng.random() < 0.6:
        words += ["with", "a", rng.choice(_NOUNS), *(["and", "a", rng.choice(_NOUNS)] if rng.random() < 0.5 else [])]
    if rng.random() < 0.5:
        words.insert(rng.randrange(len(words)), rng.choice(_RARE))
    return words


def _corpus(rng: random.Random, images: int, captions: int) -> list[list[list[str]]]:
    topics = [(rng.choice(_NOUNS), rng.choice(_VERBS), rng.choice(_PLACES)) for _ in range(images)]
    return [[_caption(rng, topic) for _ in range(captions)] for topic in topics]


def _ngrams(words: list[str]) -> list[Counter]:
    return [Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1)) for n in range(1, 5)]


def _sentence_bleu(words: list[str], mine: list[Counter], reference: list[str], other: list[Counter]) -> list[float]:
    """BLEU-1 ... 4 of one caption against one other, as pycocoevalcap computes it."""
    product, scores = 1.0, []
    ratio = (len(words) + 1e-15) / (len(reference) + 1e-9)
    penalty = math.exp(1 - 1 / ratio) if ratio < 1 else 1.0
    for n in range(1, 5):
        matches = sum(min(count, other[n - 1][ngram]) for ngram, count in mine[n - 1].items())
        product *= (matches + 1e-15) / (max(0, len(words) - n + 1) + 1e-9)
        scores.append(product ** (1 / n) * penalty)
    return scores


def _plain_pairwise_bleu(groups: list[list[list[str]]]) -> np.ndarray:
    """BLEU of every caption against every other one of its image: the loop anyone writes."""
    found = [_sentence_bleu(a, _ngrams(a), b, _ngrams(b)) for group in groups for a in group for b in group]
    return np.array(found).reshape(len(groups), len(groups[0]), len(groups[0]), 4)


def _careful_pairwise_bleu(groups: list[list[list[str]]]) -> np.ndarray:
    """The same loop, with the n-grams of each caption counted once only."""
    counted = [[(words, _ngrams(words)) for words in group] for group in groups]
    found = [_sentence_bleu(*a, *b) for group in counted for a in group for b in group]
    return np.array(found).reshape(len(groups), len(groups[0]), len(groups[0]), 4)


def _side_by_side(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Median CPU times of both, run in turn, and the median and spread of their ratio."""

    def seconds(work: Callable[[], Any]) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    for work in (ours, ours, theirs):
        work()
    pairs = []
    for _ in range(rounds):
        gc.collect()
        pairs.append((seconds(ours), seconds(theirs)))
    ratios = [b / a for a, b in pairs]
    return {
        "ours_ms": 1000 * statistics.median(a for a, _ in pairs),
        "theirs_ms": 1000 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        "rounds": rounds,
    }


def _cider(arguments: argparse.Namespace) -> dict[str, Any]:
    from pycocoevalcap.cider.cider import Cider

    rng = random.Random(arguments.seed)
    training = _corpus(rng, arguments.training_images, 5)
    chosen = rng.sample(range(len(training)), 100)
    references = [training[i] for i in chosen]
    candidates = [[_vary(rng, references[i]) for _ in range(5)] for i in range(100)]
    truth = {5 * i + j: [" ".join(words) for words in references[i]] for i in range(100) for j in range(5)}
    written = {5 * i + j: [" ".join(words)] for i, group in enumerate(candidates) for j, words in enumerate(group)}
    # Equal numbers first: pycocoevalcap takes each candidate for an image, so its documents repeat.
    same = CiderScorer(DocumentFrequencies.from_references([group for group in references for _ in range(5)]))
    _, expected = Cider().compute_score(truth, written)
    difference = float(np.abs(same(candidates, references).numpy() - expected).max())
    scorer = CiderScorer(DocumentFrequencies.from_references(training))
    timed = _side_by_side(
        lambda: scorer(candidates, references), lambda: Cider().compute_score(truth, written), arguments.rounds
    )
    return timed | {"largest_difference": difference, "training_images": arguments.training_images}


def _vary(rng: random.Random, references: list[list[str]]) -> list[str]:
    """What a captioner might sample: a reference with a word or two changed."""
    words = list(rng.choice(references))
    for _ in range(rng.randint(0, 2)):
        words[rng.randrange(len(words))] = rng.choice(_NOUNS + _ADJECTIVES + _RARE[:100])
    return words


def _bleu(arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(arguments.seed + 1)
    groups = _corpus(rng, 100, 5)
    flat = [words for group in groups for words in group]
    difference = np.abs(pairwise_bleu(encode_words(flat), 5).numpy() - _plain_pairwise_bleu(groups)).max()
    timed = _side_by_side(
        lambda: pairwise_bleu(encode_words(flat), 5), lambda: _plain_pairwise_bleu(groups), arguments.rounds
    )
    careful = _side_by_side(
        lambda: pairwise_bleu(encode_words(flat), 5), lambda: _careful_pairwise_bleu(groups), arguments.rounds
    )
    return timed | {"largest_difference": float(difference), "ratio_to_loop_with_counts_kept": careful["ratio"]}


def _retrieval(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(arguments.seed)
    captions, images, width = arguments.pool
    text, pool = (
        torch.nn.functional.normalize(torch.randn(n, width, generator=generator), dim=1) for n in (captions, images)
    )
    targets = torch.arange(captions) % images
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The smaller first: a process never forgets its largest size.
    works: dict[str, Callable[[], Any]] = {
        "ranks": lambda: ranks(text, pool, targets),
        "self_retrieval": lambda: self_retrieval(text, pool, targets=targets),
    }
    memory = {}
    for name, work in works.items():
        work()
        memory[name] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    found = {}
    for name, work in works.items():
        timed = _side_by_side(work, lambda: text @ pool.T, max(arguments.rounds // 5, 3))
        timed["ratio"] = 1 / timed["ratio"]
        timed["ratio_quartiles"] = sorted(1 / ratio for ratio in timed["ratio_quartiles"])
        size = {"captions": captions, "images": images, "features": width}
        found[name] = timed | size | {"more_memory_mib": memory[name]}
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    parser.add_argument("--rounds", type=int, default=25, help="How often both sides of a ratio are timed.")
    parser.add_argument("--training-images", type=int, default=5000, help="Images in the document frequencies.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the captions and features.")
    parser.add_argument(
        "--pool", type=int, nargs=3, default=(5000, 30_000, 512), help="Captions, images and features of the ranking.",
        metavar=("N", "M", "D"),
    )  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time the metrics.

    Returns for `cider_d` and `pairwise_bleu` times in milliseconds and `ratio`, how often faster than pycocoevalcap and
    a plain loop; for `ranks` and `self_retrieval` `ratio`, how often slower than the bare matrix product, and the memory
    they add.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Memory first: later work would hide behind the largest size the process ever had.
        result: dict[str, Any] = _retrieval(args) | {"cider_d": _cider(args), "pairwise_bleu": _bleu(args)}
    finally:
        torch.set_num_threads(threads)
    result["versions"] = {"torch": torch.__version__, "numpy": np.__version__}
    result |= {"processor": processor_name(), "seed": args.seed}
    return result


def markdown(result: dict[str, Any]) -> str:
    """Write the result as a section of docs/benchmarks.md."""
    size = result["ranks"]
    pool = f"{size['captions']:,} captions in a pool of {size['images']:,} images, {size['features']} features"
    rows = {
        "cider_d": ("CIDEr-D reward call, 100 images x 5 captions x 5 references", "pycocoevalcap", "at least 25"),
        "pairwise_bleu": ("BLEU between the 5 captions of each of 100 images", "a plain loop", "at least 15"),
        "ranks": (f"Ranks of {pool}", "the bare product", "at most 1.3"),
        "self_retrieval": (f"`self_retrieval` with checks and intervals, {pool}", "the bare product", "at most 1.3"),
    }
    lines = [
        "## `metrics`: rewards and ranks",
        "",
        f"`python scripts/benchmark.py --write metrics`: seed {result['seed']}, one thread of {result['processor']}, torch "
        f"{result['versions']['torch']}, numpy {result['versions']['numpy']}. Both sides alternate in one process. "
        "Times are CPU-milliseconds. Ratios are computed within a round, median [quartiles]: in the first two rows a ratio "
        "above 1 means that ours is faster, in the others that ours is slower.",
        "",
        "| what | against | ours / theirs, ms | ratio | wanted | rounds |",
        "|---|---|---|---|---|---|",
    ]
    for name, (what, against, wanted) in rows.items():
        row = result[name]
        low, high = row["ratio_quartiles"]
        times = f"{row['ours_ms']:.1f} / {row['theirs_ms']:.1f}"
        ratio = f"{row['ratio']:.2f} [{low:.2f}, {high:.2f}]"
        lines.append(f"| {what} | {against} | {times} | {ratio} | {wanted} | {row['rounds']} |")
    lines += [
        "",
        f"The largest difference is {result['cider_d']['largest_difference']:.0e} from pycocoevalcap's CIDEr-D and "
        f"{result['pairwise_bleu']['largest_difference']:.0e} from the loop's BLEU. A loop that counts each caption's "
        f"n-grams only once takes {result['pairwise_bleu']['ratio_to_loop_with_counts_kept']:.1f} times as long as ours. "
        f"Document frequencies of {result['cider_d']['training_images']:,} images are counted before the timing. The peak "
        f"memory of the process, measured from its peak after generating the features, grew by "
        f"{result['ranks']['more_memory_mib']:.0f} MiB for the ranks and by "
        f"{result['self_retrieval']['more_memory_mib']:.0f} MiB for the whole metric (limit: 1 GiB).",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(_parser)
    print(json.dumps(run(_parser.parse_args()), indent=2))
