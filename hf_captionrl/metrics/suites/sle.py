"""The columns of SLE's diversity table.

Legend: B images, G captions per image.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hf_captionrl.metrics import caption_diversity, cider_d
from hf_captionrl.metrics.suites.suite_row import SuiteRow, check_lengths, spoken
from hf_captionrl.text.frequencies import DocumentFrequencies

__all__ = ["decoding_suite", "diversity_at_cider_d", "sle_suite", "tradeoff_points"]


def sle_suite(
    captions: Sequence[Sequence[str]],
    *,
    references: Sequence[Sequence[str]] | None = None,
    frequencies: DocumentFrequencies | None = None,
    seed: int = 0,
    details: bool = False,
) -> dict[str, Any]:
    """The columns of SLE's Table 4: diversity and quality of several captions per image.

    Source: Chen and Jin 2020, Table 4: five random samples ("rs"), or the five best of a beam ("bs"). CIDEr is the
    mean over the five; Div-n divides distinct n-grams by words; mBLEU-4 compares each caption with the other four and
    is the mean over captions (`mbleu_4_per_image`). Other papers report corpus mBLEU-4 (`mbleu_4`).

    Args:
        captions: The G captions of each of B images, at least two (the paper: five).
        references: References of each image, for CIDEr-D.
        frequencies: Document frequencies of a training set; None: those of `references`.
        seed: Seed of the bootstrap.
        details: Also return `per_sample`, `groups` and `signatures`, as [`smile_suite`] does.

    Returns:
        `dict`: `div_1`, `div_2`, `mbleu_4_per_image`, `mbleu_4`, `cider_d`, `best_cider_d` (of each image's best
        caption), `unique_captions`, `captions_per_image`, `empty_captions`; `<key>_ci` and `<key>_reason` as in
        [`smile_suite`].

    Raises:
        ValueError: If lengths differ or an image has fewer than two captions.
    """
    check_lengths(captions, references=references)
    groups = [spoken(group) for group in captions]
    sizes = [len(group) for group in groups]
    row = SuiteRow([caption for group in captions for caption in group], seed)
    diversity = caption_diversity(groups)
    signature = diversity["signature"]
    row.number("captions_per_image", sum(sizes) / len(sizes))
    for key in ("div_1", "div_2"):
        row.mean(key, diversity["per_image"][key], signature=signature)
    per_image = signature.replace("mbleu:corpus", "mbleu:per-image")
    row.mean("mbleu_4_per_image", diversity["per_image"]["mbleu_4"], signature=per_image)
    row.number("mbleu_4", float(diversity["mbleu_4"]), signature=signature)
    row.number("unique_captions", float(diversity["unique_captions"]), signature=signature)
    if references is None:
        row.missing("no references", "cider_d", "best_cider_d")
    else:
        found = cider_d(groups, references, frequencies=frequencies)
        of_image = np.split(np.asarray(found["per_sample"]), np.cumsum(sizes)[:-1])
        row.mean("cider_d", [scores.mean() for scores in of_image], signature=found["signature"])
        row.mean("best_cider_d", [scores.max() for scores in of_image], signature=found["signature"])
    return row.result(details)


def decoding_suite(
    decodings: Mapping[str, Sequence[Sequence[str]]],
    *,
    references: Sequence[Sequence[str]] | None = None,
    frequencies: DocumentFrequencies | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Both halves of a row of SLE's Table 4: the same images with captions of several decoding methods.

    Args:
        decodings: For each decoding method, `"rs"` (random samples) and `"bs"` (best of a beam) in the paper, the captions
            of each image.
        references: As in [`sle_suite`].
        frequencies: As in [`sle_suite`].
        seed: Seed of the bootstrap.

    Returns:
        `dict`: The result of [`sle_suite`] for each, with the prefixes `rs_` and `bs_`.

    Raises:
        ValueError: If `decodings` is empty, or as in [`sle_suite`].
    """
    if not decodings:
        raise ValueError("decodings is empty. Pass the captions by decoding method, e.g. {'rs': ..., 'bs': ...}.")
    row: dict[str, Any] = {}
    for how, captions in decodings.items():
        found = sle_suite(captions, references=references, frequencies=frequencies, seed=seed)
        row |= {f"{how}_{key}": value for key, value in found.items()}
    return row


def tradeoff_points(
    samples: Mapping[float, Sequence[Sequence[str]]],
    *,
    references: Sequence[Sequence[str]],
    frequencies: DocumentFrequencies | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Precision and recall of one captioner over temperatures, for `reports.tradeoff`.

    Args:
        samples: For each temperature the sampled captions of each image.
        references: References of each image.
        frequencies: As in [`sle_suite`].
        seed: Seed of the bootstrap.

    Returns:
        `list[dict]`: One point per temperature, ascending: `temperature` and the result of [`sle_suite`].

    Raises:
        ValueError: If a temperature is not positive, or as in [`sle_suite`].
    """
    bad = [temperature for temperature in samples if not temperature > 0]
    if bad:
        raise ValueError(f"Temperatures {bad} are not positive. Use temperatures above 0.")
    return [
        {
            "temperature": temperature,
            **sle_suite(samples[temperature], references=references, frequencies=frequencies, seed=seed),
        }
        for temperature in sorted(samples)
    ]


def diversity_at_cider_d(points: Sequence[Mapping[str, Any]], cider_d: float) -> dict[str, float] | None:
    """Diversity of a captioner at the temperature where its samples have a given mean CIDEr-D.

    Interpolates linearly between neighbouring temperatures. If several temperatures have this CIDEr-D, the highest counts, whose
    captions are the most diverse. Compares captioners at equal precision; at equal temperature, one of them may only sample
    from a narrower distribution.

    Args:
        points: Result of [`tradeoff_points`].
        cider_d: Mean CIDEr-D of the samples.

    Returns:
        `dict`: `temperature`, `div_2` and `mbleu_4_per_image`; None if no temperature in the range of the points has this
        CIDEr-D (nothing is extrapolated).
    """
    keys = ("temperature", "div_2", "mbleu_4_per_image")
    ordered = sorted(points, key=lambda point: -point["temperature"])
    for high, low in itertools.pairwise([*ordered, *ordered[-1:]]):
        if high["cider_d"] == cider_d:
            return {key: high[key] for key in keys}
        ends = sorted((high["cider_d"], low["cider_d"]))
        if ends[0] < cider_d < ends[1]:
            share = (cider_d - high["cider_d"]) / (low["cider_d"] - high["cider_d"])
            return {key: high[key] + share * (low[key] - high[key]) for key in keys}
    return None
