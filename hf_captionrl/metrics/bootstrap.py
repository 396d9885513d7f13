"""Student's and bootstrap intervals over images or bags, exact ones of proportions, and a paired test of two captioners.

Legend: N samples (captions), R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any

import numpy as np

import hf_captionrl


def signature(**parts: Any) -> str:
    """Everything that a result depends on, on one line as in sacrebleu: `"pool:5000|ties:against|hf_captionrl:0.1.0"`."""
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in parts.items()}
    written = [f"{name}:{text.replace('|', ',')}" for name, text in texts.items() if parts[name] not in (None, "")]
    return "|".join([*written, f"hf_captionrl:{hf_captionrl.__version__}"])


# Draws per block: limits the memory to 64 MiB for any N and R.
_DRAWS = 2**22
# With at least this many samples per distinct value, the number of times that each value is drawn is sampled directly:
# the same distribution (multinomial), 100 times faster for recalls, whose values are 0 and 1.
_SAMPLES_PER_VALUE = 16
# Largest rounding difference of two sums of the same numbers in another order, relative to the sum of their magnitudes.
_ROUNDING = 64 * np.finfo(np.float64).eps


def check_values(values: Any, name: str) -> np.ndarray:
    """A vector of at least one finite number as `(N,)` float64; errors name the index."""
    if hasattr(values, "detach"):  # a tensor: NumPy does not support bf16 and GPUs, and importing torch takes seconds
        values = values.detach().double().cpu()
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a list of numbers: {error}.") from error
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"{name} must be a list with at least one number, got shape {array.shape}. Pass a flat list.")
    if len(bad := np.flatnonzero(~np.isfinite(array))):
        raise ValueError(f"{name}[{bad[0]}] is {array[bad[0]]}. Leave the sample out.")
    return array


def _values_and_weights(values: Any, weights: Any) -> tuple[np.ndarray, np.ndarray]:
    """Values and weights, by default 1 each, both `(N,)` float64."""
    numbers = check_values(values, "values")
    sizes = np.ones_like(numbers) if weights is None else check_values(weights, "weights")
    if len(sizes) != len(numbers):
        raise ValueError(f"{len(numbers)} values and {len(sizes)} weights. Pass one weight per value.")
    return numbers, sizes


def _by_group(values: np.ndarray, groups: Sequence[Any] | None) -> np.ndarray:
    """Sums over the samples of each group, `(G,)`."""
    if groups is None:
        return values
    if len(groups) != len(values):
        raise ValueError(f"groups has {len(groups)} labels for {len(values)} samples. Pass one per sample.")
    labels = groups.tolist() if hasattr(groups, "tolist") else groups
    if all(isinstance(label, int | np.integer) for label in labels):  # in order, others by their first occurrence
        return np.bincount(np.unique(np.asarray(labels), return_inverse=True)[1], values)
    return np.bincount(numbered(labels), values)


def numbered(labels: Iterable[Any]) -> list[int]:
    """A number from 0 for each label; not by an array, which would split tuples and make 1 and "1" equal."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(label, len(numbers)) for label in labels]


def _blocks(num_resamples: int, width: int) -> Iterator[int]:
    """Numbers of resamples to draw at once."""
    rows = max(_DRAWS // width, 1)
    return (min(rows, num_resamples - start) for start in range(0, num_resamples, rows))


def check_confidence(confidence: float) -> None:
    """Refuse a coverage that is not between 0 and 1."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}. Use a number between 0 and 1.")


class Interval(tuple[float, float]):
    """`(low, high)`, and its `method`: `"student_t"`, `"bootstrap"`, `"clopper_pearson"` or `"sign_flips"`."""

    method: str

    def __new__(cls, ends: Iterable[float], method: str = "") -> Interval:
        interval = super().__new__(cls, map(float, ends))
        interval.method = method
        return interval

    def entries(self, key: str) -> dict[str, Any]:
        """`<key>_ci` and `<key>_ci_method` of a row of numbers; None without a method if the interval is infinite."""
        if not np.isfinite(self).all():
            return {f"{key}_ci": None}
        return {f"{key}_ci": list(self), f"{key}_ci_method": self.method}


def mean_interval(values: Any, *, groups: Sequence[Any] | None = None, confidence: float = 0.95) -> Interval:
    """Student's t interval of a mean; of groups, with the variance between groups (robust to their correlation).

    Args:
        values (sequence of `N` numbers): The score of each caption.
        groups (sequence of `N` labels): Image or bag of each caption; `None`: every caption is a separate group.
        confidence: Coverage of the interval; skewed scores of few groups have less.
    Returns:
        [`Interval`]: Lower and upper end; of a single group, minus and plus infinity.
    """
    from scipy.special import stdtrit

    check_confidence(confidence)
    numbers = check_values(values, "values")
    mean = float(numbers.mean())
    apart = _by_group(numbers - mean, groups)
    if len(apart) == 1:
        return Interval((-math.inf, math.inf), "student_t")
    error = math.sqrt(len(apart) / (len(apart) - 1) * float(apart @ apart)) / len(numbers)
    reach = float(stdtrit(len(apart) - 1, (1 + confidence) / 2)) * error
    return Interval((mean - reach, mean + reach), "student_t")


def bootstrap_interval(
    values: Any,
    *,
    weights: Any = None,
    groups: Sequence[Any] | None = None,
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of `sum(values) / sum(weights)`, a mean by default, for which see [`mean_interval`].

    Args:
        values (sequence of `N` numbers): The score of each caption, or the numerator of a ratio of sums.
        weights (sequence of `N` numbers): Denominators of a ratio of sums, not negative; `None`: 1 each.
        groups (sequence of `N` labels): Image or bag of each caption; whole groups are drawn, because captions of one
            image are not independent. `None`: every caption is a separate group.
        confidence: Share of resamples inside the interval.
        num_resamples: Number of resamples, at least 1.
        seed: Seed of the draws.
    Returns:
        [`Interval`]: Lower and upper end.
    """
    numbers, sizes = _values_and_weights(values, weights)
    if (sizes < 0).any() or sizes.sum() == 0:
        raise ValueError("weights must not be negative, and not all 0. Leave out samples without weight.")
    check_confidence(confidence)
    numerators, denominators = _by_group(numbers, groups), _by_group(sizes, groups)
    total = len(numerators)
    pairs, times = np.unique(numerators + 1j * denominators, return_counts=True)
    few = len(pairs) * _SAMPLES_PER_VALUE <= total
    generator = np.random.default_rng(seed)
    ratios = []
    for size in _blocks(num_resamples, len(pairs) if few else total):
        if few:
            counts = generator.multinomial(total, times / total, size=size)
            above, below = counts @ pairs.real, counts @ pairs.imag
        else:
            drawn = generator.integers(total, size=(size, total), dtype=np.int32)
            above, below = numerators[drawn].sum(axis=1), denominators[drawn].sum(axis=1)
        ratios.append(above[below > 0] / below[below > 0])  # a resample without any weight is dropped
    tail = (1 - confidence) / 2
    return Interval(np.quantile(np.concatenate(ratios), [tail, 1 - tail]), "bootstrap")


def leave_one_out(value: float, without: Any) -> np.ndarray:
    """Contributions `(N,)` of the images to a corpus number; `without` `(N,)` is the number without image i.

    These are the jackknife's pseudo-values, `N * value - (N - 1) * without_i`, centred on the value. With them a ratio of
    sums or corpus BLEU gets an interval and a paired test as a mean does, correct to first order.
    """
    without = np.asarray(without, dtype=np.float64)
    contributions = len(without) * value - (len(without) - 1) * without
    return contributions + (value - contributions.mean())


def exact_interval(successes: int, trials: int, *, confidence: float = 0.95) -> Interval:
    """Exact interval of a proportion by Clopper and Pearson.

    At each end of the interval, an observation at least as extreme has a probability of `(1 - confidence) / 2`.

    Args:
        successes: Number of successes.
        trials: Number of independent trials, at least 1.
        confidence: Minimum coverage.
    Returns:
        [`Interval`]: Lower and upper end, in [0, 1].
    """
    from scipy.special import betaincinv

    is_whole = isinstance(successes, Integral) and isinstance(trials, Integral)
    if not is_whole or not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} successes of {trials} trials. Use integers, 0 <= successes <= trials >= 1.")
    check_confidence(confidence)
    tail = (1 - confidence) / 2
    failures = trials - successes
    lower = 0.0 if successes == 0 else float(betaincinv(successes, failures + 1, tail))
    # From the share of failures, because 1 - tail would round. SciPy's binomtest is less precise (root finding to 1e-12).
    upper = 1.0 if failures == 0 else 1.0 - float(betaincinv(failures, successes + 1, tail))
    return Interval((lower, upper), "clopper_pearson")


def proportion_interval(
    values: Any,
    *,
    weights: Any = None,
    groups: Sequence[Any] | None = None,
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Interval of a proportion, which does not collapse at 0 and 1 as others do.

    If every caption is an independent sample that succeeds or fails, this is [`exact_interval`]. Of probabilities, and of
    several captions per image, it is [`mean_interval`], cut to [0, 1]; with `weights`, [`bootstrap_interval`]. If all fail or
    all succeed, it is the exact interval with one trial per independent sample, which is wide enough for groups of any size.

    Args:
        values (sequence of `N` numbers): For each caption 0 or 1, a probability, or the number of successes among its
            `weights`.
        weights (sequence of `N` numbers): Number of trials of each caption; `None`: 1 each.
        groups (sequence of `N` labels): Image or bag of each caption; `None`: every caption is a separate group.
        confidence: Coverage of the interval.
        num_resamples: Resamples of the bootstrap, at least 1.
        seed: Seed of the bootstrap.
    Returns:
        [`Interval`]: Lower and upper end, in [0, 1].
    """
    numbers, sizes = _values_and_weights(values, weights)
    bad = np.flatnonzero((numbers < 0) | (numbers > sizes))
    if len(bad):
        i = bad[0]
        raise ValueError(f"values[{i}] is {numbers[i]}, not in [0, {sizes[i]}]. Use mean_interval.")
    above, below = _by_group(numbers, groups), _by_group(sizes, groups)
    independent = below == 1
    if independent.all() and np.isin(above, (0, 1)).all():
        return exact_interval(int(above.sum()), len(above), confidence=confidence)
    samples = int((below > 0).sum())
    if samples and (not above.any() or (numbers == sizes).all()):
        return exact_interval(samples if above.any() else 0, samples, confidence=confidence)
    if weights is None:
        bounds = mean_interval(numbers, groups=groups, confidence=confidence)
        return Interval(np.clip(bounds, 0, 1), bounds.method)
    return bootstrap_interval(
        numbers, weights=weights, groups=groups, confidence=confidence, num_resamples=num_resamples, seed=seed
    )


def paired_test(
    a: Any,
    b: Any,
    *,
    groups: Sequence[Any] | None = None,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """Randomisation test of the mean difference of two captioners on the same images, and the interval that it implies.

    Under the null hypothesis the two are exchangeable, so the sign of each image's difference is random. The p-value is the
    share of sign flips with a difference at least as large; it counts the observed one and is therefore never 0. The
    interval has the shifts of `a` that the same flips do not reject, so it excludes 0 exactly if the p-value is below
    `1 - confidence`. Up to five images cannot reject any shift at 0.05: their interval is infinite.

    Args:
        a (sequence of `N` numbers): Scores of the first captioner, one per caption.
        b (sequence of `N` numbers): Scores of the second on the same images, in the same order.
        groups (sequence of `N` labels): Image or bag of each caption; the sign of a whole group is flipped.
        confidence: Coverage of the interval of the difference.
        num_resamples: Number of sign flips.
        seed: Seed of the sign flips.
    Returns:
        `dict`: `difference` (mean of a - b), `p_value` (two-sided), `interval` (low, high), `num_samples`,
        `signature`.
    """
    first, second = check_values(a, "a"), check_values(b, "b")
    if len(first) != len(second):
        raise ValueError(f"a has {len(first)} scores and b {len(second)}. Pass scores of the same images in both.")
    check_confidence(confidence)
    difference = first - second
    sums = np.stack([_by_group(difference, groups), _by_group(np.ones_like(difference), groups)], axis=1)  # (G, 2)
    total, number = sums.sum(axis=0)
    generator = np.random.default_rng(seed)
    distinct, times = np.unique(sums, axis=0, return_counts=True)
    few = len(distinct) * _SAMPLES_PER_VALUE <= len(sums)
    flips = []
    for size in _blocks(num_resamples, len(distinct) if few else len(sums)):
        if few:
            flips.append((2.0 * generator.binomial(times, 0.5, size=(size, len(distinct))) - times) @ distinct)
        else:
            flips.append((2.0 * generator.integers(2, size=(size, len(sums)), dtype=np.int8) - 1.0) @ sums)
    tossed, sizes = np.concatenate(flips).T  # (R,) each: sums of the differences and of ones, with flipped signs
    # A flip is as large as the sum at shift d, |tossed - d * sizes| >= |total - d * number|, for the d between these two.
    # Sums of the same numbers in another order differ by rounding, which must not count as a larger difference.
    rounding = 1e-12 * abs(total) + _ROUNDING * np.abs(sums[:, 0]).sum()
    ends = np.empty((2, num_resamples))
    for end, above, below in zip(
        ends, (total - tossed, total + tossed), (number - sizes, number + sizes), strict=True
    ):
        np.divide(np.where(np.abs(above) <= rounding, 0, above), below, out=end, where=below > 0)
    low, high = np.sort(ends, axis=0)
    is_whole = np.abs(sizes) == number  # all signs are equal
    low[is_whole], high[is_whole] = -np.inf, np.inf
    # The least number of flips that do not reject.
    rank = math.ceil(round((1 - confidence) * (1 + num_resamples), 9)) - 1
    interval = (np.sort(low)[rank - 1], -np.sort(-high)[rank - 1]) if rank > 0 else (-math.inf, math.inf)
    unit = "caption" if groups is None else "group"
    return {
        "difference": float(difference.mean()),
        "p_value": (1 + int(((low <= 0) & (high >= 0)).sum())) / (1 + num_resamples),
        "interval": Interval(interval, "sign_flips"),
        "num_samples": len(difference),
        "signature": signature(
            test="randomisation", interval="sign_flips", unit=unit, resamples=num_resamples, seed=seed
        ),
    }
