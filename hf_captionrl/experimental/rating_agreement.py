"""Agreement of metrics with people, with a bootstrap over images: Kendall's tau with ratings.

Legend: N rated captions, J ratings of each, K different ratings, G images, R resamples.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from scipy.stats import false_discovery_control

from hf_captionrl.metrics.bootstrap import check_values, numbered, signature

_ENDS = [50 * (1 - 0.95), 100 - 50 * (1 - 0.95)]  # of the intervals, in percent of the resamples


def agreement(
    scores: Mapping[str, Any] | Any,
    ratings: Any,
    *,
    groups: Sequence[Any] | None = None,
    variant: Literal["b", "c"] = "c",
    num_bootstrap: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    r"""Kendall's tau between scores of a metric and human ratings of the same captions.

    $\tau_c = 2 (P - Q) m / (n^2 (m - 1))$ and $\tau_b = (P - Q) / \sqrt{D_s D_r}$, with $P$ concordant and $Q$ discordant of $n$
    (caption, rating) pairs, $D$ pairs that are not tied, and $m$ the smaller number of different values. Papers on captioning
    multiply it by 100. Intervals and differences come from one bootstrap of whole images.

    Args:
        scores (sequence of `N` numbers, or `dict` of such): Scores of one metric, or of several by name.
        ratings (`(N,)` or `(N, J)` numbers): Ratings; those of one caption count as separate pairs, NaN as missing.
        groups (sequence of `N` labels): Image of each caption; `None`: each caption is an image of its own.
        variant: `"c"`, as for Flickr8k-Expert and Composite, or `"b"`, as for Flickr8k-CF.
        num_bootstrap: Number of resamples; 0 for no intervals.
        seed: Seed of the resamples.
    Returns:
        `dict`: `tau`, `tau_ci`, `num_captions`, `num_ratings`, `num_images`, `signature`. For several metrics: `metrics`, such a
        `dict` by name, and `differences`, one `dict` per pair: `first`, `second`, `difference`, `interval`, `p_value` (two-sided),
        `adjusted_p_value` (Benjamini and Hochberg, over all pairs).
    """
    by_name = scores if isinstance(scores, Mapping) else {"": scores}
    values = {str(name): check_values(of, f"scores {name!r}") for name, of in by_name.items()}
    table = np.asarray(ratings, dtype=np.float64)
    table = table[:, None] if table.ndim == 1 else table
    labels = range(len(table)) if groups is None else list(groups)
    if table.ndim != 2 or {len(table)} != {len(labels), *map(len, values.values())}:
        numbers = ", ".join(f"{len(of)} scores {name!r}" for name, of in values.items())
        shapes = f"{numbers}, ratings of shape {table.shape} and {len(labels)} groups"
        raise ValueError(f"{shapes}. Pass one row per caption in each.")
    is_rated = ~np.isnan(table)
    if not is_rated.any(1).all():
        raise ValueError(f"ratings[{int((~is_rated.any(1)).argmax())}] has no rating. Leave the caption out.")
    levels = np.unique(table[is_rated])
    if len(levels) < 2:
        raise ValueError("All ratings are equal, so no metric can agree with them.")
    images = np.asarray(numbered(labels))
    G = int(images.max()) + 1
    order = np.argsort(images, kind="stable")
    counts = (table[order][:, :, None] == levels).sum(1).astype(np.float32)  # (N, K)
    starts: np.ndarray = np.searchsorted(images[order], np.arange(G))  # type: ignore[assignment]
    generator = np.random.default_rng(seed)
    draws = generator.multinomial(G, np.full(G, 1 / G), size=num_bootstrap).astype(np.float64)  # (R, G)
    weights = np.concatenate([np.ones((1, G)), draws])
    taus = {name: _taus(of[order], counts, starts, weights, variant) for name, of in values.items()}  # (1 + R,) each
    parts = signature(metric="agreement", tau=variant, unit="image", resamples=num_bootstrap, seed=seed)
    counted = {"num_captions": len(table), "num_ratings": int(is_rated.sum()), "num_images": G, "signature": parts}
    results: dict[str, dict[str, Any]] = {}
    for name, (tau, *drawn) in taus.items():
        interval = {"tau_ci": tuple(np.nanpercentile(drawn, _ENDS).tolist())} if drawn else {}
        results[name] = {"tau": float(tau)} | interval | counted
    if not isinstance(scores, Mapping):
        return results[""]
    differences: list[dict[str, Any]] = []
    for first, second in itertools.combinations(taus, 2) if num_bootstrap else ():
        difference, *drawn = taus[first] - taus[second]
        tail = min(np.less_equal(drawn, 0).sum(), np.greater_equal(drawn, 0).sum())
        row = {"first": first, "second": second, "difference": float(difference)}
        row |= {"interval": tuple(np.percentile(drawn, _ENDS).tolist())}
        differences.append(row | {"p_value": min(1.0, 2 * (1 + int(tail)) / (1 + num_bootstrap))})
    adjusted = false_discovery_control([row["p_value"] for row in differences]) if differences else ()
    for row, p_value in zip(differences, adjusted, strict=True):
        row["adjusted_p_value"] = float(p_value)
    return {"metrics": results, "differences": differences}


def _taus(scores: np.ndarray, counts: np.ndarray, starts: np.ndarray, weights: np.ndarray, variant: str) -> np.ndarray:
    """Tau for each row of weights of images `(R, G)`; captions of an image are neighbours, which begin at `starts`."""
    total, levels = counts.sum(1), counts.shape[1]
    signs = np.sign(np.arange(levels)[:, None] - np.arange(levels)).astype(np.float32)
    concordant = np.zeros((len(starts), len(starts)))  # P - Q of the pairs of two images
    untied = np.zeros_like(concordant)  # pairs with different scores
    above = counts @ signs  # (N, K)
    size = max(1, 2**23 // len(scores))
    for begin in range(0, len(scores), size):
        rows = slice(begin, begin + size)
        difference = np.sign(scores[rows, None] - scores)  # (rows, N)
        ends = [begin, min(begin + size, len(scores)) - 1]
        first, last = (int(np.searchsorted(starts, end, side="right")) - 1 for end in ends)
        within = np.maximum(starts[first : last + 1] - begin, 0)
        for into, pairs in (
            (concordant, difference * (above[rows] @ counts.T)),
            (untied, (difference != 0) * (total[rows, None] * total)),
        ):
            into[first : last + 1] += np.add.reduceat(np.add.reduceat(pairs, starts, axis=1), within, axis=0)

    def of(matrix: np.ndarray) -> np.ndarray:
        return ((weights @ matrix) * weights).sum(1) / 2

    sizes = np.add.reduceat(counts, starts, axis=0).astype(np.float64)  # (G, K)
    number = weights @ sizes.sum(1)
    if variant == "c":
        m = min(len(np.unique(scores)), levels)
        if m < 2:
            return np.zeros(len(weights))
        return 2 * of(concordant) / (number**2 * (m - 1) / m)
    different = (number**2 - ((weights @ sizes) ** 2).sum(1)) / 2
    below = np.sqrt(of(untied) * different)
    return np.divide(of(concordant), below, out=np.zeros(len(weights)), where=below > 0)
