"""Row of a suite: numbers with intervals, reasons for missing ones, and scores of single images.

Legend: N captions, one per image; D features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hf_captionrl.metrics import (
    bootstrap_interval,
    cider_d,
    clip_score,
    faithfulness,
    proportion_interval,
    self_retrieval,
)
from hf_captionrl.metrics.reference_similarity import reference_matches
from hf_captionrl.text.bleu import bleu_scores, corpus_bleu

__all__ = ["EMPTY_CAPTION", "SuiteRow", "check_lengths", "leave_one_out", "spoken"]

EMPTY_CAPTION = "."
"""Replaces an empty caption: scorers can read it, and it has no n-grams."""


def spoken(captions: Sequence[str]) -> list[str]:
    """Captions that every metric accepts: empty ones are replaced by `EMPTY_CAPTION`."""
    return [caption if caption.strip() else EMPTY_CAPTION for caption in captions]


def check_lengths(captions: Sequence[Any], **others: Any) -> None:
    """Refuse lists without exactly one entry per image."""
    for name, value in others.items():
        if value is not None and len(value) != len(captions):
            raise ValueError(f"There are {len(captions)} captions but {len(value)} {name}. Pass one per image.")


def leave_one_out(value: float, without: Any) -> np.ndarray:
    """Contributions `(N,)` of the images to a corpus number; `without` `(N,)` is the number without image i.

    These are the jackknife's pseudo-values, `N * value - (N - 1) * without_i`, centred on the value. With them a ratio of
    sums or corpus BLEU gets an interval and a paired test as a mean does, correct to first order.
    """
    without = np.asarray(without, dtype=np.float64)
    found = len(without) * value - (len(without) - 1) * without
    return found + (value - found.mean())


class SuiteRow:
    """One row of a paper's table under construction; `captions` may be empty, `scorer` is a signature."""

    def __init__(self, captions: Sequence[str], seed: int, scorer: str = "") -> None:
        self.texts = spoken(captions)
        self.seed = seed
        self.scorer = scorer
        self.numbers: dict[str, Any] = {"empty_captions": sum(not caption.strip() for caption in captions)}
        self.per_sample: dict[str, np.ndarray] = {}
        self.groups: dict[str, Sequence[Any] | np.ndarray] = {}
        self.signatures: dict[str, str] = {}
        self._claims: tuple[np.ndarray, np.ndarray] | None = None  # wrong and right claims of each caption

    def missing(self, reason: str, *keys: str) -> None:
        """Set numbers to None, with the reason."""
        for key in keys:
            self.numbers[key] = None
            self.numbers[f"{key}_reason"] = reason

    def number(self, key: str, value: float, *, signature: str = "") -> None:
        """Set a number of the whole set that is not a mean over images and has no interval."""
        self.numbers[key] = value
        if signature:
            self.signatures[key] = signature

    def mean(
        self,
        key: str,
        values: Any,
        *,
        weights: Any = None,
        value: float | None = None,
        groups: Sequence[Any] | None = None,
        signature: str = "",
        is_share: bool = False,
    ) -> None:
        """Set a mean, or a ratio of sums, with its interval over images."""
        array = np.asarray(values, dtype=np.float64)
        below = np.ones_like(array) if weights is None else np.asarray(weights, dtype=np.float64)
        total = float(below.sum())
        mean = float(array.sum() / total) if total else 0.0
        self.number(key, mean if value is None else float(value), signature=signature)
        self.numbers[f"{key}_ci"] = None
        if not total:
            return
        shift = self.numbers[key] - mean
        interval = proportion_interval if is_share else bootstrap_interval
        bounds = interval(array, weights=weights, groups=groups, seed=self.seed)
        self.numbers[f"{key}_ci"] = [bound + shift for bound in bounds]
        if weights is not None:
            rest = total - below
            without = np.divide(array.sum() - array, rest, out=np.full_like(array, mean), where=rest > 0)
            array = leave_one_out(mean, without)
        self.per_sample[key] = array + shift
        if groups is not None:
            self.groups[key] = list(groups)

    def clip_interval(self, key: str) -> None:
        """Keep the interval of a corpus number in [0, 1]; contributions of images, or their shift, can leave it."""
        low, high = self.numbers[f"{key}_ci"]
        self.numbers[f"{key}_ci"] = [max(low, 0.0), min(high, 1.0)]

    def recalls(self, name: str, ks: Sequence[int], text: Any, images: Any, **options: Any) -> dict[str, Any]:
        """Set `<name>_recall_at_<k>` from the features of captions and images, both `(N, D)`."""
        found = self_retrieval(text, images, ks=ks, seed=self.seed, scorer=self.scorer, **options)
        for k in ks:
            key = f"{name}_recall_at_{k}"
            self.number(key, float(found[f"recall_at_{k}"]), signature=found["signature"])
            self.numbers[f"{key}_ci"] = [float(bound) for bound in found[f"recall_at_{k}_ci"]]
            self.per_sample[key] = np.asarray(found[f"recall_at_{k}_per_sample"], dtype=np.float64)
            self.groups[key] = np.asarray(found["groups"])
        return found

    def random_distractors(self, ks: Sequence[int], text: Any, images: Any, ranks: Any = None) -> None:
        """Set `rd100_recall_at_<k>`, the exact expectation with 99 random distractors; `ranks` are those among all images."""
        if len(self.texts) < 100:
            self.missing("fewer than 100 images", *(f"rd100_recall_at_{k}" for k in ks))
        else:
            self.recalls("rd100", ks, text, images, num_distractors=99, pool_ranks=ranks)

    def clip_score(self, text: Any, images: Any, preset: Any, prefix: str = "") -> None:
        """Set `clip_score` from the features of captions and images, both `(N, D)`."""
        found = clip_score(text, images, preset=preset, prefix=prefix, scorer=self.scorer)
        self.mean("clip_score", found["per_sample"], signature=found["signature"])

    def cider_d(self, references: Sequence[Sequence[str]] | None) -> None:
        """Set `cider_d`, with document frequencies of these references."""
        if references is None:
            self.missing("no references", "cider_d")
            return
        found = cider_d(self.texts, references)
        self.mean("cider_d", found["per_sample"], signature=found["signature"])

    def bleu_4(self, references: Sequence[Sequence[str]] | None) -> None:
        """Set corpus `bleu_4`; its interval is that of the images' contributions, see `leave_one_out`."""
        if references is None:
            self.missing("no references", "bleu_4")
            return
        counts = reference_matches(([text] for text in self.texts), references)
        value = float(corpus_bleu(*counts)[-1])
        if len(self.texts) == 1:
            self.number("bleu_4", value)
            return
        # The counts without image i, for all i at once.
        rest = [part.double().sum(0) - part.double() for part in counts]
        without = bleu_scores(*rest)[:, -1]  # (N,)
        self.mean("bleu_4", leave_one_out(value, without.numpy()), signature="metric:bleu_4|tok:ptb|corpus")
        self.clip_interval("bleu_4")

    def perplexity(self, measure: Callable[[Sequence[str]], float | Mapping[str, Any]] | None) -> None:
        """Set `perplexity`; its interval is that of the mean loss per token, over captions."""
        if measure is None:
            self.missing("no language model", "perplexity")
            return
        found = measure(self.texts)
        if not isinstance(found, Mapping):
            self.number("perplexity", float(found))
            return
        nats, tokens = (np.asarray(found[name], dtype=np.float64) for name in ("nats", "tokens"))
        value = float(found["perplexity"])
        self.number("perplexity", value, signature=str(found.get("signature", "")))
        bounds = bootstrap_interval(nats, weights=tokens, seed=self.seed)
        self.numbers["perplexity_ci"] = [math.exp(bound) for bound in bounds]
        rest = tokens.sum() - tokens
        mean = np.divide(nats.sum() - nats, rest, out=np.full_like(nats, math.log(value)), where=rest > 0)
        self.per_sample["perplexity"] = leave_one_out(value, np.exp(mean))

    def faithfulness(self, facts: Sequence[Mapping[str, Any]] | None, check: Callable[[str, Any], Any] | None) -> None:
        """Set `hallucination` and `fact_recall`."""
        if facts is None or check is None:
            self.missing("no facts to check captions with", "hallucination", "fact_recall")
            return
        found = faithfulness(self.texts, facts, check)
        counts = {name: np.asarray(values) for name, values in found["per_sample"].items()}
        self._claims = counts["wrong"], counts["right"]
        for key, above, beside in (("hallucination", "wrong", "right"), ("fact_recall", "recalled", "missed")):
            weights = counts[above] + counts[beside]
            self.mean(key, counts[above], weights=weights, signature=found["signature"], is_share=True)

    def parts(self, parts: Mapping[str, Sequence[bool]]) -> None:
        """Set `<part>_rd100_recall_at_1` and `<part>_hallucination`: means over the images of each part.

        Call it after `random_distractors` and `faithfulness`. Distractors are of all images, so the parts together give the
        number of the whole set.
        """
        rd100, hallucination = "rd100_recall_at_1", "hallucination"
        for name, chosen in parts.items():
            at = np.flatnonzero(chosen)
            if not len(at):
                self.missing("no image of this part", f"{name}_{rd100}", f"{name}_{hallucination}")
                continue
            if rd100 in self.per_sample:
                groups = [self.groups[rd100][row] for row in at.tolist()]
                signature = self.signatures.get(rd100, "")
                self.mean(f"{name}_{rd100}", self.per_sample[rd100][at], groups=groups, signature=signature)
            else:
                self.missing(self.numbers.get(f"{rd100}_reason", "no scorer"), f"{name}_{rd100}")
            if self._claims is None:
                self.missing("no facts to check captions with", f"{name}_{hallucination}")
                continue
            wrong, right = (counts[at] for counts in self._claims)
            signature = self.signatures.get(hallucination, "")
            self.mean(f"{name}_{hallucination}", wrong, weights=wrong + right, signature=signature, is_share=True)

    def truth_recalls(
        self,
        facts: Sequence[Mapping[str, Any]] | None,
        check: Callable[[str, Any], Any] | None,
        bags: Mapping[int, list[list[int]]],
    ) -> None:
        """Set `bag_<size>_truth_recall_at_1`: the share of captions whose claims are true of the target and of no other image of the bag."""
        if facts is None or check is None:
            self.missing("no facts to check captions with", *(f"bag_{size}_truth_recall_at_1" for size in bags))
            return
        known: dict[tuple[int, int], bool] = {}  # bags of several sizes share images

        def fits(row: int, other: int) -> bool:
            if (row, other) not in known:
                known[row, other] = not check(self.texts[row], facts[other]).wrong
            return known[row, other]

        for size, members in bags.items():
            found = [float([other for other in bag if fits(row, other)] == [row]) for bag in members for row in bag]
            groups = [number for number, bag in enumerate(members) for _ in bag]
            signature = f"metric:truth_recall|bag:{size}"
            self.mean(f"bag_{size}_truth_recall_at_1", found, groups=groups, signature=signature, is_share=True)

    def result(self, details: bool) -> dict[str, Any]:
        """The row."""
        if not details:
            return self.numbers
        return self.numbers | {"per_sample": self.per_sample, "groups": self.groups, "signatures": self.signatures}
