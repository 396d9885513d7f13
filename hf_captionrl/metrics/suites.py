"""The columns of SMILE's tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_captionrl.metrics import (
    bootstrap_interval,
    caption_diversity,
    caption_statistics,
    cider_d,
    clip_score,
    faithfulness,
    proportion_interval,
    self_retrieval,
)
from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.metrics.nlg import reference_matches
from hf_captionrl.metrics.words import Tagger, characteristic_words, vocabulary_size
from hf_captionrl.text.bleu import bleu_scores, corpus_bleu
from hf_captionrl.text.cider_d import DocumentFrequencies
from hf_captionrl.text.tokenize import ptb_tokenize

# --- Row of a suite: numbers with intervals, reasons for missing ones, and scores of single images -------------------
# Legend: N captions, one per image; D features.

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


# --- The columns of DiscriTune's tables ------------------------------------------------------------------------------

NlgMetric = Callable[[list[str], list[list[str]]], Mapping[str, Any]]
"""Maps captions and references to a result like that of [`hf_captionrl.metrics.meteor_spice.meteor`]; raises a `RuntimeError`
with the reason if it cannot be computed."""


def discritune_suite(
    captions: Sequence[str],
    *,
    references: Sequence[Sequence[str]] | None = None,
    text_features: Any | None = None,
    image_features: Any | None = None,
    meteor: NlgMetric | None = None,
    spice: NlgMetric | None = None,
    facts: Sequence[Mapping[str, Any]] | None = None,
    check: Callable[[str, Any], Any] | None = None,
    tagger: Tagger | None = None,
    scorer: str = "",
    seed: int = 0,
    details: bool = False,
) -> dict[str, Any]:
    """The columns of DiscriTune's Tables 1 and 2, and the words of Tables 7 and 14.

    Source: Dessi et al. 2023, sections 4.1 and 5. P@1 is recall at 1 among the 100 images of the caption's block:
    consecutive blocks in the order of the data set; an incomplete last block is dropped. The paper multiplies by 100.

    Args:
        captions: N captions, one per image.
        references: References of each image; CIDEr-D counts document frequencies in them.
        text_features: `(N, D)` features of the captions by the scorer that evaluates.
        image_features: `(N, D)` features of the images by the same scorer.
        meteor: Computes METEOR, for instance [`hf_captionrl.metrics.meteor_spice.meteor`].
        spice: Computes SPICE, for instance [`hf_captionrl.metrics.meteor_spice.spice`].
        facts: Facts of each image.
        check: Checks a caption with the facts of its image.
        tagger: Gives lemmas and parts of speech, see [`hf_captionrl.metrics.words.spacy_tagger`]; with it the words that
            distinguish these captions from their references are returned too.
        scorer: Signature of the scorer, for the signatures of the numbers.
        seed: Seed of the bootstrap.
        details: Also return `per_sample`, `groups` and `signatures`, as [`smile_suite`] does.

    Returns:
        `dict`: `blocks_recall_at_1`, `bleu_4`, `meteor`, `cider_d`, `spice`, `hallucination`, `fact_recall`,
        `empty_captions`; with a tagger `nouns` and `adjectives`, the ten lemmas most associated with these captions;
        `<key>_ci` and `<key>_reason` as in [`smile_suite`].

    Raises:
        ValueError: If lengths differ.
    """
    check_lengths(captions, references=references, text_features=text_features, facts=facts)
    row = SuiteRow(captions, seed, scorer)
    if text_features is None or image_features is None:
        row.missing("no scorer", "blocks_recall_at_1")
    elif len(captions) < 100:
        row.missing("fewer than 100 images", "blocks_recall_at_1")
    else:
        text, images = torch.as_tensor(text_features), torch.as_tensor(image_features)
        row.recalls("blocks", (1,), text, images, num_distractors=99, protocol="blocks")
    row.bleu_4(references)
    row.cider_d(references)
    for key, metric in (("meteor", meteor), ("spice", spice)):
        if metric is None or references is None:
            row.missing("no references" if references is None else f"{key.upper()} was not requested", key)
            continue
        try:
            found = metric(row.texts, [list(group) for group in references])
        except RuntimeError as error:
            row.missing(str(error).removeprefix("not run: "), key)
        else:
            row.mean(key, found["per_sample"], value=found[key], signature=found.get("signature", ""))
            row.clip_interval(key)
    row.faithfulness(facts, check)
    if tagger is not None and references is not None:
        sources = {"captions": row.texts, "references": [text for group in references for text in group]}
        words = characteristic_words(sources, tagger=tagger)
        row.numbers["nouns"] = [word for word, _ in words["NOUN"]["captions"]]
        row.numbers["adjectives"] = [word for word, _ in words["ADJ"]["captions"]]
    return row.result(details)


# --- The columns of No Detail Left Behind's tables -------------------------------------------------------------------

BAG_SIZES = (3, 5, 7)
"""Sizes of TrueMatch's bags."""


def ndlb_suite(
    captions: Sequence[str],
    *,
    references: Sequence[Sequence[str]] | None = None,
    text_features: Any | None = None,
    image_features: Any | None = None,
    image_ranks: Any | None = None,
    facts: Sequence[Mapping[str, Any]] | None = None,
    check: Callable[[str, Any], Any] | None = None,
    bags: Mapping[int, list[list[int]]] | None = None,
    min_frequency: int = 5,
    scorer: str = "",
    seed: int = 0,
    details: bool = False,
) -> dict[str, Any]:
    """The columns of No Detail Left Behind's Tables 3 to 7: bags, random distractors, similarity, vocabulary.

    Source: Gaur et al. 2024, sections 3 and 4. ClipSc is 100 times the cosine, without prefix and without clamping,
    so text features must be those of the bare captions.

    Args:
        captions: N captions, one per image.
        references: References of each image, for CIDEr-D (with document frequencies of these references).
        text_features: `(N, D)` features of the captions by the scorer that evaluates.
        image_features: `(N, D)` features of the images by the same scorer.
        image_ranks: `(N,)` ranks of the captions' images among the N images, if known; None: they are computed.
        facts: Facts of each image.
        check: Checks a caption with the facts of its image.
        bags: For each bag size the bags, as lists of rows.
        min_frequency: Number of occurrences from which a word counts for the vocabulary (Table 6).
        scorer: Signature of the scorer, for the signatures of the numbers.
        seed: Seed of the bootstrap.
        details: Also return `per_sample`, `groups` and `signatures`, as [`smile_suite`] does.

    Returns:
        `dict`: `bag_3_recall_at_1`, `bag_5_recall_at_1`, `bag_7_recall_at_1` (and those of other sizes in `bags`),
        `rd100_recall_at_1`, `bleu_4`, `cider_d`, `clip_score`, `vocabulary_size` (a number of words), `hallucination`,
        `fact_recall`, `empty_captions`; `<key>_ci` and `<key>_reason` as in [`smile_suite`].

    Raises:
        ValueError: If lengths differ or `min_frequency` is below 1.
    """
    check_lengths(captions, references=references, text_features=text_features, facts=facts)
    row = SuiteRow(captions, seed, scorer)
    vocabulary = vocabulary_size(map(ptb_tokenize, row.texts), min_frequency)
    sizes = sorted({*BAG_SIZES, *(bags or {})})
    if text_features is None or image_features is None:
        row.missing("no scorer", *(f"bag_{size}_recall_at_1" for size in sizes), "rd100_recall_at_1", "clip_score")
    else:
        text, images = torch.as_tensor(text_features), torch.as_tensor(image_features)
        for size in sizes:
            if bags and bags.get(size):
                row.recalls(f"bag_{size}", (1,), text, images, bags=bags[size])
            else:
                row.missing(f"no bags of {size} in the data", f"bag_{size}_recall_at_1")
        row.random_distractors((1,), text, images, image_ranks)
        row.clip_score(text, images, "ndlb")
    row.bleu_4(references)
    row.cider_d(references)
    row.number(
        "vocabulary_size",
        vocabulary,
        signature=signature(metric="vocabulary_size", tok="ptb", frequency=f">={min_frequency}"),
    )
    row.faithfulness(facts, check)
    return row.result(details)


# --- The columns of SLE's diversity table ----------------------------------------------------------------------------
# Legend: B images, G captions per image.


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


# --- The columns of SMILE's tables -----------------------------------------------------------------------------------


def smile_suite(
    captions: Sequence[str],
    *,
    references: Sequence[Sequence[str]] | None = None,
    text_features: Any | None = None,
    image_features: Any | None = None,
    pool_features: Any | None = None,
    image_ranks: Any | None = None,
    pool_ranks: Any | None = None,
    clip_features: Any | None = None,
    clip_prefix: str = "",
    perplexity: Callable[[Sequence[str]], float | Mapping[str, Any]] | None = None,
    facts: Sequence[Mapping[str, Any]] | None = None,
    check: Callable[[str, Any], Any] | None = None,
    bags: Mapping[int, list[list[int]]] | None = None,
    parts: Mapping[str, Sequence[bool]] | None = None,
    scorer: str = "",
    seed: int = 0,
    details: bool = False,
) -> dict[str, Any]:
    """The columns of SMILE's Table 1, with a faithfulness number beside every retrieval number.

    Source: Yue et al. 2023, section 3.1 and Table 1. A number that cannot be computed is None, and `<key>_reason` says why.

    Args:
        captions: N captions, one per image.
        references: References of each image, for CIDEr-D (with document frequencies of these references).
        text_features: `(N, D)` features of the captions by the scorer that evaluates.
        image_features: `(N, D)` features of the images by the same scorer.
        pool_features: `(M, D)` features of the pool of `pool_recall_at_<k>`, whose first N are `image_features`; None: these
            alone. The paper's pool is CapEnrich's, of 30,000 images.
        image_ranks: `(N,)` ranks of the captions' images among the N images, if known; None: they are computed.
        pool_ranks: The same in `pool_features`.
        clip_features: `(N, D)` features for CLIPScore, of the captions with `clip_prefix`; None: `text_features`.
        clip_prefix: Prefix of the captions there, for the signature; the paper's is "A photo depicts ".
        perplexity: Maps captions to the result of [`caption_perplexity`] under a language model, or to the number alone,
            which then has no interval.
        facts: Facts of each image.
        check: Checks a caption with the facts of its image.
        bags: For each bag size the bags, as lists of rows.
        parts: For each part of the images its name, and whether each image belongs to it.
        scorer: Signature of the scorer, for the signatures of the numbers.
        seed: Seed of the bootstrap.
        details: Also return `per_sample`, scores of single images (or bags) whose mean is the number, for
            [`paired_test`]; `groups`, the bag of each score if there are bags; and `signatures`.

    Returns:
        `dict`: `length`, `lexical_diversity`, `pool_recall_at_1`, `pool_recall_at_5`, `rd100_recall_at_1`,
        `rd100_recall_at_5`, `clip_score`, `perplexity`, `cider_d`, `hallucination`, `fact_recall`, `empty_captions`
        (their number) and, with bags, `bag_<size>_recall_at_1` and `bag_<size>_truth_recall_at_1` (of captions whose
        claims fit no other image of the bag); with parts, `<part>_rd100_recall_at_1` and `<part>_hallucination`; `ranks`,
        the rank of each image in the pool; `<key>_ci` holds 95 % bootstrap intervals over images, `<key>_reason` the
        reason why a value is None.

    Raises:
        ValueError: If lengths differ.
    """
    check_lengths(
        captions,
        references=references,
        text_features=text_features,
        clip_features=clip_features,
        facts=facts,
        **(parts or {}),
    )
    row = SuiteRow(captions, seed, scorer)
    statistics = caption_statistics(row.texts)
    row.mean("length", [len(caption.split()) for caption in captions], signature=statistics["signature"])
    row.number("lexical_diversity", float(statistics["lexical_diversity"]), signature=statistics["signature"])
    if text_features is None or image_features is None:
        keys = ["pool_recall_at_1", "pool_recall_at_5", "rd100_recall_at_1", "rd100_recall_at_5", "clip_score"]
        row.missing("no scorer", *keys)
    else:
        text, images = torch.as_tensor(text_features), torch.as_tensor(image_features)
        pool = images if pool_features is None else torch.as_tensor(pool_features)
        known = image_ranks if pool_features is None else pool_ranks
        found = row.recalls("pool", (1, 5), text, pool, targets=torch.arange(len(text)), pool_ranks=known)
        row.numbers["ranks"] = np.asarray(found["ranks"])
        known = found["ranks"] if pool_features is None else image_ranks
        row.random_distractors((1, 5), text, images, known)
        prefixed = text if clip_features is None else torch.as_tensor(clip_features)
        row.clip_score(prefixed, images, "hessel", clip_prefix)
        for size, members in (bags or {}).items():
            row.recalls(f"bag_{size}", (1,), text, images, bags=members)
    row.perplexity(perplexity)
    row.cider_d(references)
    row.faithfulness(facts, check)
    row.parts(parts or {})
    row.truth_recalls(facts, check, bags or {})
    return row.result(details)
