"""Whether the decoding loop is slower than that of transformers in any family: a tiny model of each, at the same lengths.

Tiny models show the fixed cost of each token, the worst case for a loop with more bookkeeping.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import GenerationMixin

from hf_captionrl.captioners import Captioner, load_captioner
from scripts.benchmarks.generation import ending_at, planned_lengths
from scripts.benchmarks.shapes_file import measure_each
from scripts.benchmarks.spread import summary, to_cell
from tests.tiny import FAMILIES, tiny_images, tiny_model
from tests.tiny.chat import CHAT_TYPES, tiny_chat
from tests.tiny.families import FAMILY_NAMES, tiny_family

ALL = (*FAMILIES, *FAMILY_NAMES, *CHAT_TYPES)
KINDS = {"COCO": (12.0, 2.6), "12 tokens": (12.0, 0.0)}
"""Mean and standard deviation of tokens per caption."""
LONGEST = 20
_IMAGES, _CAPTIONS = 4, 5


def _captioner(name: str) -> Captioner:
    make: Any = tiny_model if name in FAMILIES else tiny_family if name in FAMILY_NAMES else tiny_chat
    model, processor = make(name)
    return load_captioner(model, processor=processor)


def _write(captioner: Captioner, encoded: dict[str, Any], lengths: torch.Tensor, **settings: Any) -> None:
    """Sampled captions of the planned lengths `(N,)`."""
    ends = {*captioner.end_token_ids, captioner.pad_token_id}
    with ending_at(lengths, captioner.end_token_ids[0]):
        written = captioner.generate(
            **encoded,
            max_new_tokens=LONGEST,
            do_sample=True,
            top_k=0,
            num_return_sequences=_CAPTIONS,
            suppress_tokens=sorted(ends),
            forced_eos_token_id=None,  # Florence-2's last token
            **settings,
        )
    if written.mask.sum(1).tolist() != lengths.tolist():
        raise AssertionError(f"wrote captions of {written.mask.sum(1).tolist()} tokens, not {lengths.tolist()}.")


def measure(name: str, *, rounds: int) -> dict[str, Any]:
    """Time both loops in turn, for captions of COCO's lengths and for captions that are all equally long."""
    captioner = _captioner(name)
    encoded = captioner.encode_images(tiny_images(_IMAGES))
    loops: dict[str, dict[str, Any]] = {"ours": {}, "transformers": {"custom_generate": GenerationMixin._sample}}
    found: dict[str, Any] = {}
    for kind, (mean, deviation) in KINDS.items():
        taken: dict[str, list[float]] = {loop: [] for loop in loops}
        for turn in range(rounds + 1):  # the first round is not counted
            torch.manual_seed(turn)
            lengths = planned_lengths(mean, deviation, _IMAGES * _CAPTIONS, longest=LONGEST)
            for loop in sorted(taken, reverse=bool(turn % 2)):
                start = time.process_time()
                _write(captioner, encoded, lengths, **loops[loop])
                if turn:
                    taken[loop].append(time.process_time() - start)
        ratios = [theirs / ours for theirs, ours in zip(taken["transformers"], taken["ours"], strict=True)]
        found[kind] = {
            "milliseconds": {loop: 1000 * summary(values)["median"] for loop, values in taken.items()},
            "speedup": summary(ratios),
        }
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    parser.add_argument("--families", nargs="+", choices=ALL, default=list(ALL), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15, help="Calls of each loop.")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time the loops on one thread."""
    return measure_each("families", args.families, lambda each: measure(each, rounds=args.rounds), args)


def markdown(result: dict[str, Any]) -> str:
    """Write the result as a section of docs/benchmarks.md."""
    lines = [
        "## `generation_families`: a tiny model of each family",
        "",
        f"`python scripts/benchmark.py generation_families`: {_IMAGES} x {_CAPTIONS} sampled captions, vision tower included, with random",
        "weights. Tiny models show the fixed cost of each token, the worst case for a loop with more bookkeeping. With COCO's lengths (12 tokens,",
        "standard deviation 2.6, at most 20), finished captions leave the batch. CPU-time; ratios within a round: median [quartiles].",
        "",
        "| family | transformers / ours, ms | speedup, COCO | speedup, all 12 tokens |",
        "|:--|--:|--:|--:|",
    ]
    for name, found in result["families"].items():
        ms = found["COCO"]["milliseconds"]
        ratios = " | ".join(to_cell(found[kind]["speedup"]) for kind in KINDS)
        lines.append(f"| {name} | {ms['transformers']:.0f} / {ms['ours']:.0f} | {ratios} |")
    versions = result["versions"]
    lines += [
        "",
        f"{result['processor']}, 1 thread, torch {versions['torch']}, transformers {versions['transformers']}; {result['rounds']} rounds.",
    ]
    return "\n".join(lines)
