"""Lengths and vocabulary of captions by source: Table 9 and Figure 4 of No Detail Left Behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_captionrl.metrics.diversity import caption_statistics
from hf_captionrl.metrics.word_statistics import length_statistics
from hf_captionrl.reports.length_plots import write_length_histogram

__all__ = ["PERCENTILES", "source_statistics", "write_source_histogram"]

PERCENTILES = (5, 25, 50, 75, 95)
"""Percentiles of the lengths."""


def source_statistics(
    sources: Mapping[str, Iterable[str]], *, count_tokens: Callable[[list[str]], Sequence[int]] | None = None
) -> dict[str, dict[str, Any]]:
    """Lengths and vocabulary of caption sources.

    Reference: Gaur et al. 2024 (No Detail Left Behind), Table 9: mean and deviation of words and of CLIP tokens.

    Args:
        sources: For each source (references, BlendCap, ...) its captions, which are read twice.
        count_tokens: From captions to their numbers of tokens; None leaves tokens out.

    Returns:
        `dict`: For each source `captions` (their number), `mean_words`, `std_words`, `max_words`, `percentiles_words`,
        the same of `tokens` with `count_tokens`, and `vocabulary`, the number of distinct words.

    Raises:
        ValueError: If a source has no captions, or one is bad (its index is named).
    """
    result: dict[str, dict[str, Any]] = {}
    for name, captions in sources.items():
        found = length_statistics(captions, count_tokens=count_tokens)
        row: dict[str, Any] = {"captions": len(found["words"])}
        for unit in ("words", "tokens"):
            if unit in found:
                row |= {f"{key}_{unit}": found[f"{key}_{unit}"] for key in ("mean", "std", "max")}
                values = np.percentile(found[unit], PERCENTILES)
                row[f"percentiles_{unit}"] = {str(p): float(v) for p, v in zip(PERCENTILES, values, strict=True)}
        # `lexical_diversity` is in thousands.
        row["vocabulary"] = round(1000 * caption_statistics(captions)["lexical_diversity"])
        result[name] = row
    return result


def write_source_histogram(path: str | os.PathLike[str], sources: Mapping[str, Iterable[str]]) -> Path:
    """Draw how many words the captions of each source have (Figure 4), and write the PNG atomically.

    Args:
        path: Where to write; the name must end in `.png`.
        sources: For each source its captions.

    Returns:
        `pathlib.Path`: The file written.

    Raises:
        ValueError: If a source has no caption, or the name does not end in `.png`.
    """
    return write_length_histogram(path, {name: length_statistics(texts)["words"] for name, texts in sources.items()})
