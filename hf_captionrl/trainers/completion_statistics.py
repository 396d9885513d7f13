"""Statistics of the captions of one training step: lengths, repetition, truncation.

Legend: N captions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_captionrl.text.degenerate_captions import caption_words, count_words, find_repeats, mark_degenerate
from hf_captionrl.text.ngrams import distinct_share

__all__ = ["caption_flags", "completion_statistics", "describe_completions"]


def caption_flags(name: str, values: Any, number: int) -> Tensor:
    """Booleans `(N,)` on the CPU, checked to be one per caption."""
    flags = torch.as_tensor(values).detach().cpu().bool()
    if flags.shape != (number,):
        raise ValueError(f"{name} has shape {tuple(flags.shape)}. Pass one value for each of the {number} captions.")
    return flags


def describe_completions(captions: Sequence[str], ended: Any) -> tuple[dict[str, float], Tensor, Tensor]:
    """The statistics of [`completion_statistics`], which captions are degenerate `(N,)`, and their words `(N,)`."""
    if not len(captions):
        raise ValueError("There are no captions. Pass at least one.")
    batch = caption_words(captions)
    counts = count_words(batch)
    number, lengths = len(batch), batch.lengths
    repeats, doubled = find_repeats(batch)
    bad = mark_degenerate(counts, repeats, doubled)
    p10, p50, p90 = torch.quantile(lengths.double(), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    statistics = {"length_p10": p10, "length_p50": p50, "length_p90": p90}
    for order in (1, 2):
        long_enough = lengths >= order
        shares = distinct_share(counts, order, number, per="ngrams")[long_enough]
        # An empty caption repeats nothing; `empty` counts it.
        statistics[f"distinct_{order}"] = float(shares.mean()) if len(shares) else 1.0
    statistics |= {
        "distinct_captions": len(set(captions)) / number,
        "longest_repeat_max": float(repeats.max()),
        "longest_repeat_mean": float(repeats.double().mean()),
        "degenerate": float(bad.double().mean()),
        "empty": float((lengths == 0).double().mean()),
    }
    if ended is not None:
        statistics["clipped_ratio"] = float((~caption_flags("ended", ended, number)).double().mean())
    return statistics, bad, lengths


def completion_statistics(captions: Sequence[str], *, ended: Any | None = None) -> dict[str, float]:
    """Describe the captions of one step.

    Quantiles of the length in words, the mean share of distinct words and word pairs per caption, the longest phrase
    that occurs twice, in words, and shares in [0, 1]. `ended` `(N,)` is False where the length limit truncated a
    caption.
    """
    return describe_completions(captions, ended)[0]
