"""The numbers of the papers' tables, from captions and features: SMILE, DiscriTune, No Detail Left Behind and SLE.

A suite is a list of keys of [`hf_captionrl.metrics.columns`]; [`SuiteRow`] has the function of each. A number that cannot be computed
is None, and `<key>_reason` says why; `<key>_ci` is its 95 % interval over images, by `<key>_ci_method`.
Legend: N captions, one per image; M images of a pool; D features.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hf_captionrl.metrics import (
    bootstrap_interval,
    caption_diversity,
    caption_statistics,
    chair,
    cider_d,
    clip_score,
    faithfulness,
    mean_interval,
    proportion_interval,
    rouge_l,
    self_retrieval,
)
from hf_captionrl.metrics.bootstrap import Interval, leave_one_out, signature
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.metrics.columns import SUITES, TABLE
from hf_captionrl.metrics.nlg import reference_matches
from hf_captionrl.metrics.words import vocabulary_size
from hf_captionrl.retrieval.ranking import num_concepts
from hf_captionrl.text.bleu import bleu_scores, corpus_bleu
from hf_captionrl.text.cider_d import DocumentFrequencies
from hf_captionrl.text.degenerate_captions import degenerate, is_empty
from hf_captionrl.text.tokenize import ptb_tokenize, split_characters

NlgMetric = Callable[[list[str], list[list[str]]], Mapping[str, Any]]
"""Maps captions and references to a result like that of [`hf_captionrl.metrics.meteor_spice.meteor`]; raises a `RuntimeError`
with the reason if it cannot be computed."""

_MIN_FREQUENCY = 5  # from which a word counts for the vocabulary (Table 6 of No Detail Left Behind)

BAG_SIZES = (3, 5, 7)
"""Sizes of TrueMatch's bags."""


def bag_keys(sizes: Iterable[int], by: Sequence[str] = ("", "truth_")) -> list[str]:
    """Recall in bags of these sizes, by the scorer and by the facts."""
    return [f"bag_{size}_{means}recall_at_1" for size in sizes for means in by]


_NEEDS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("set_pool_recalls", "set_random_distractors", "set_block_recalls"), ("has_features", "no scorer")
    ),
    **dict.fromkeys(("set_bag_recalls", "set_clip_score"), ("has_features", "no scorer")),
    **dict.fromkeys(("set_cider_d", "set_bleu", "set_rouge_l", "set_by_java"), ("references", "no references")),
    "set_unmentioned_objects": ("references", "no references"),
    "set_perplexity": ("perplexity", "no language model"),
    **dict.fromkeys(("set_faithfulness", "set_truth_recalls"), ("facts", "no facts to check captions with")),
}
"""What a method needs, and the reason why its numbers are missing without."""

FUNCTIONS = {column.key: (place, column.function) for place, column in enumerate(TABLE) if column.function}
"""Place in the table of columns, and the method that computes the number."""


@dataclass(kw_only=True)
class SuiteRow:
    """One row of a table under construction: what it is computed from, and the numbers so far."""

    captions: Sequence[str]  # N captions; may be empty
    references: Any = None  # N groups of texts; CIDEr-D counts document frequencies in them
    # The captions of each image if there are several; `captions` are then all of them.
    sampled: Sequence[Sequence[str]] | None = None
    frequencies: DocumentFrequencies | None = None  # of a training set, for `sampled`; None: those of `references`
    text_features: Any | None = None  # (N, D) of the captions, by the scorer that evaluates
    image_features: Any | None = None  # (N, D) by the same scorer
    # (M, D) of the pool of `pool_recall_at_<k>`, whose first N are `image_features`; None: these alone. SMILE's pool is
    # CapEnrich's, of 30,000 images.
    pool_features: Any | None = None
    clip_features: Any | None = None  # (N, D) of the captions with `clip_prefix`; None: `text_features`
    clip_prefix: str = ""  # for the signature; the paper's is "A photo depicts "
    token_counts: Sequence[int] | None = None  # the scorer's tokens of each caption
    max_text_tokens: int | None = None  # that the scorer reads
    perplexity: Any = None  # function to `caption_perplexity` of captions
    facts: Any = None  # of each image
    check: Any = None  # function of a caption and the facts of its image
    bags: Mapping[int, list[list[int]]] = field(default_factory=dict)  # by size, as lists of rows
    concepts: Sequence[int] | None = None  # of each image, see [`self_retrieval`]
    parts: Mapping[str, Sequence[bool]] = field(default_factory=dict)  # by name, whether each image belongs to it
    meteor: NlgMetric | None = None
    spice: NlgMetric | None = None
    scorer: str = ""  # its signature, for the signatures of the numbers
    tokenize: str = "ptb"  # "char": each character of a script without spaces is a word of captions and references
    seed: int = 0  # of the bootstrap

    def __post_init__(self) -> None:
        self._spoken = spoken(self.captions)  # as a language model reads them
        if self.tokenize == "char":
            for name in ("captions", "references", "sampled"):
                if getattr(self, name) is not None:
                    setattr(self, name, split_characters(getattr(self, name)))
        names = ("references", "text_features", "clip_features", "facts")
        rows = len(self.captions if self.sampled is None else self.sampled)
        for name, value in [*((name, getattr(self, name)) for name in names), *self.parts.items()]:
            if value is not None and len(value) != rows:
                raise ValueError(f"There are {rows} captions but {len(value)} {name}. Pass one per image.")
        for name in ("text_features", "image_features", "pool_features", "clip_features"):
            if getattr(self, name) is not None:
                setattr(self, name, torch.as_tensor(getattr(self, name)))
        self.texts = spoken(self.captions)
        self.numbers: dict[str, Any] = {"empty_captions": sum(not caption.strip() for caption in self.captions)}
        self.per_sample: dict[str, np.ndarray] = {}
        self.groups: dict[str, Sequence[Any] | np.ndarray] = {}  # bag or image of each score
        self.signatures: dict[str, str] = {}
        self._image_ranks: Any = None  # (N,) of the captions' images among the N images
        self._claims: tuple[np.ndarray, np.ndarray] | None = None  # wrong and right claims of each caption

    def compute(self, *keys: str) -> SuiteRow:
        """Set the numbers of some columns, in the order of the table of columns."""
        places = {key: FUNCTIONS[re.sub(r"^bag_\d+", "bag_7", key)] for key in keys}
        for function in dict.fromkeys(function for _, function in sorted(places.values())):
            chosen = [key for key in places if places[key][1] == function]
            name, reason = _NEEDS.get(function, ("captions", ""))
            if (value := getattr(self, name)) is None or value is False:
                self.missing(reason, *chosen)
            else:
                getattr(self, function)(chosen)
        return self

    def result(self, details: bool = True) -> dict[str, Any]:
        """The row. Details: scores of single images (or bags) whose mean is the number, for [`paired_test`]; the bag of each
        score if there are bags; and signatures."""
        if not details:
            return self.numbers
        return self.numbers | {"per_sample": self.per_sample, "groups": self.groups, "signatures": self.signatures}

    # --- a number with its interval, or the reason why it is missing ---

    def missing(self, reason: str, *keys: str) -> None:
        """Set numbers to None, with the reason."""
        for key in keys:
            self.numbers[key] = None
            self.numbers[f"{key}_reason"] = reason

    def number(self, key: str, value: float, *, signature: str = "") -> None:
        """Set a number of the whole set that is not a mean over images and has no interval."""
        self.numbers[key] = value
        if signature:
            is_char = self.tokenize == "char"
            self.signatures[key] = re.sub("tok:ptb|words:whitespace", "tok:char", signature) if is_char else signature

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
        is_corpus_share: bool = False,
    ) -> None:
        """Set a mean, or a ratio of sums, with its interval over images: Student's, or that of a proportion.

        Ratios of sums, and contributions to a number of the corpus (`value`, `is_corpus_share`), which are no independent
        scores, have the bootstrap's. That of the corpus' share is cut to [0, 1], which contributions, or their shift, can leave.
        """
        array = np.asarray(values, dtype=np.float64)
        below = np.ones_like(array) if weights is None else np.asarray(weights, dtype=np.float64)
        total = float(below.sum())
        mean = float(array.sum() / total) if total else 0.0
        self.number(key, mean if value is None else value, signature=signature)
        self.numbers[f"{key}_ci"] = None
        if not total:
            return
        shift = self.numbers[key] - mean
        if is_share or weights is not None or value is not None or is_corpus_share:
            ends = array.round(6)
            if is_corpus_share and (not ends.any() or (ends == 1).all()):  # 0 or 1, where a bootstrap collapses
                array, is_share = ends, True
            interval = proportion_interval if is_share else bootstrap_interval
            bounds = interval(array, weights=weights, groups=groups, seed=self.seed)
        else:
            bounds = mean_interval(array, groups=groups)
        limits = (0.0, 1.0) if is_corpus_share else (-math.inf, math.inf)
        self.numbers |= Interval(np.clip(np.add(bounds, shift), *limits), bounds.method).entries(key)
        if weights is not None:
            rest = total - below
            without = np.divide(array.sum() - array, rest, out=np.full_like(array, mean), where=rest > 0)
            array = leave_one_out(mean, without)
        self.per_sample[key] = array + shift
        if groups is not None:
            self.groups[key] = list(groups)

    # --- retrieval ---

    @property
    def has_features(self) -> bool:
        """Whether a scorer has read captions and images."""
        return self.text_features is not None and self.image_features is not None

    def _recalls(self, keys: Sequence[str], images: Any, **options: Any) -> dict[str, Any]:
        """Set `<name>_recall_at_<k>` among some images."""
        ks = [int(key.rpartition("_")[2]) for key in keys]
        if self.concepts is not None:  # other images of a pool or of bags are concepts of their own
            options["concepts"] = [*self.concepts, *[None] * (len(images) - len(self.concepts))]
        found = self_retrieval(self.text_features, images, ks=ks, seed=self.seed, scorer=self.scorer, **options)
        for key, k in zip(keys, ks, strict=True):
            if k >= found["pool_size"]:  # 1 for every captioner
                self.missing(f"{found['pool_size']} images", key)
                continue
            self.number(key, float(found[f"recall_at_{k}"]), signature=found["signature"])
            self.numbers |= found[f"recall_at_{k}_ci"].entries(key)
            self.per_sample[key] = np.asarray(found["per_sample"][f"recall_at_{k}"], dtype=np.float64)
            self.groups[key] = np.asarray(found["groups"])
        return found

    def set_pool_recalls(self, keys: Sequence[str]) -> None:
        """Recall in the pool; `ranks`, the rank of each image there."""
        is_whole = self.pool_features is None
        pool = self.image_features if is_whole else self.pool_features
        ranks = self._recalls(keys, pool, targets=torch.arange(len(self.texts)))["ranks"]
        self.numbers["ranks"] = np.asarray(ranks)
        if is_whole:
            self._image_ranks = ranks

    def set_random_distractors(self, keys: Sequence[str], protocol: Any = "expected") -> None:
        """The exact expectation with 99 random distractors."""
        if num_concepts(len(self.texts), self.concepts) < 100:
            return self.missing(f"fewer than 100 {'images' if self.concepts is None else 'concepts'}", *keys)
        ranks = self._image_ranks if protocol == "expected" else None
        self._recalls(keys, self.image_features, num_distractors=99, protocol=protocol, pool_ranks=ranks)

    def set_block_recalls(self, keys: Sequence[str]) -> None:
        """Among the 100 images of the caption's block: consecutive blocks, of which an incomplete last one is dropped."""
        if self.concepts is not None:
            return self.missing("the data have concepts, and blocks are of images", *keys)
        self.set_random_distractors(keys, "blocks")

    def set_bag_recalls(self, keys: Sequence[str]) -> None:
        """Recall in bags of similar images."""
        for key in keys:
            size = int(key.split("_")[1])
            concepts = self.concepts or range(len(self.texts))
            concepts_of_bags = [
                [concepts[row] for row in bag if row < len(concepts)] for bag in self.bags.get(size, ())
            ]
            if any(len(set(bag)) < len(bag) for bag in concepts_of_bags):
                self.missing("a bag has two images of one concept", key)
            elif self.bags.get(size):
                self._recalls([key], self.image_features, bags=self.bags[size])
            else:
                self.missing(f"no bags of {size} in the data", key)

    def set_truth_recalls(self, keys: Sequence[str]) -> None:
        """The share of captions whose claims are true of the target and of no other image of the bag."""

        @functools.cache  # bags of several sizes share images
        def fits(row: int, other: int) -> bool:
            return not self.check(self.texts[row], self.facts[other]).wrong

        for key in keys:
            size = int(key.split("_")[1])
            if not (bags := self.bags.get(size)):
                self.missing(f"no bags of {size} in the data", key)
                continue
            found = [float([other for other in bag if fits(row, other)] == [row]) for bag in bags for row in bag]
            groups = [number for number, bag in enumerate(bags) for _ in bag]
            self.mean(key, found, groups=groups, signature=f"metric:truth_recall|bag:{size}", is_share=True)

    def set_clip_score(self, keys: Sequence[str]) -> None:
        """CLIPScore: 2.5 times the cosine, of captions with the prefix; and ClipSc, 100 times the cosine, without prefix and clamping."""
        for key in keys:
            is_ndlb = key == "ndlb_clip_score"
            text = self.text_features if is_ndlb or self.clip_features is None else self.clip_features
            options: Any = {"preset": "ndlb"} if is_ndlb else {"preset": "hessel"}
            prefix = "" if is_ndlb else self.clip_prefix
            score = clip_score(text, self.image_features, prefix=prefix, scorer=self.scorer, **options)
            self.mean(key, score["per_sample"], signature=score["signature"])

    # --- captions and references ---

    def set_statistics(self, keys: Sequence[str]) -> None:
        """Length and lexical diversity."""
        found = caption_statistics(self.texts)
        lengths = [len(caption.split()) for caption in self.captions]
        self.mean("length", lengths, signature=found["signature"])
        shares, value = found["per_sample"]["lexical_diversity"], float(found["lexical_diversity"])
        self.mean("lexical_diversity", shares, value=value, signature=found["signature"])

    def set_lengths(self, keys: Sequence[str]) -> None:
        """Words and tokens of the captions, and how many the scorer truncates (Table 9 of No Detail Left Behind)."""
        words = np.array([len(text.split()) for text in self.texts])
        self._spread("std_words", words)
        self.number("max_words", int(words.max()))
        if self.token_counts is None:
            reason = "no scorer, or one that does not count tokens"
            return self.missing(reason, "mean_tokens", "std_tokens", "captions_truncated")
        tokens = np.asarray(self.token_counts)
        self.mean("mean_tokens", tokens)
        self._spread("std_tokens", tokens)
        self.mean("captions_truncated", tokens > (self.max_text_tokens or np.inf), is_share=True)

    def set_degenerate(self, keys: Sequence[str]) -> None:
        """Shares of captions without letter or digit, and of those that repeat themselves."""
        values = {"empty": list(map(is_empty, self.captions)), "degenerate": degenerate(self.captions)}
        for key in keys:
            self.mean(key, values[key], is_share=True)

    def _spread(self, key: str, values: np.ndarray) -> None:
        """Set the standard deviation of the captions."""
        apart, rest = values - values.mean(), max(len(values) - 1, 1)
        squares = (apart @ apart - apart**2) / rest - (apart / rest) ** 2  # without each caption
        value = float(values.std())
        self.mean(key, leave_one_out(value, np.sqrt(squares.clip(0))), value=value)

    def set_vocabulary_size(self, keys: Sequence[str]) -> None:
        """Number of words that occur at least `min_frequency` times."""
        number, without = vocabulary_size(map(ptb_tokenize, self.texts), _MIN_FREQUENCY)
        written = signature(metric="vocabulary_size", tok="ptb", frequency=f">={_MIN_FREQUENCY}")
        self.mean("vocabulary_size", leave_one_out(number, without), value=number, signature=written)
        self.numbers["vocabulary_size_ci"] = [max(bound, 0.0) for bound in self.numbers["vocabulary_size_ci"]]

    def set_repeated_captions(self, keys: Sequence[str]) -> None:
        """Share of the images whose caption another image has, too."""
        texts = [" ".join(ptb_tokenize(text)) for text in self.texts]
        number = Counter(texts)
        same = np.array([number[text] for text in texts])
        shared, others = float((same > 1).sum()), max(len(same) - 1, 1)
        without = (
            shared - (same > 1) - (same == 2)
        ) / others  # of a pair, the other image shares its caption no longer
        value, named = shared / len(same), signature(metric="repeated_captions", tok="ptb")
        contributions = leave_one_out(value, without)
        self.mean("repeated_captions", contributions, value=value, signature=named, is_corpus_share=True)

    def set_diversity(self, keys: Sequence[str]) -> None:
        """Diversity of several captions per image."""
        groups = [spoken(group) for group in self.sampled or ()]
        found = caption_diversity(groups)
        signature = found["signature"]
        self.mean("captions_per_image", list(map(len, groups)))
        values = found["per_sample"]
        for key in ("div_1", "div_2"):
            self.mean(key, values[key], signature=signature, is_share=True)
        per_image = signature.replace("mbleu:corpus", "mbleu:per-image")
        self.mean("mbleu_4_per_image", values["mbleu_4_per_image"], signature=per_image, is_share=True)
        for key in ("mbleu_4", "unique_captions"):
            self.mean(key, values[key], value=float(found[key]), signature=signature, is_corpus_share=True)

    def set_cider_d(self, keys: Sequence[str]) -> None:
        """CIDEr-D; of several captions per image the mean, and that of each image's best caption."""
        if self.sampled is None:
            found = cider_d(self.texts, self.references)
            return self.mean("cider_d", found["per_sample"], signature=found["signature"])
        groups = [spoken(group) for group in self.sampled]
        found = cider_d(groups, self.references, frequencies=self.frequencies)
        of_image = np.split(np.asarray(found["per_sample"]), np.cumsum([len(group) for group in groups])[:-1])
        self.mean("cider_d", [scores.mean() for scores in of_image], signature=found["signature"])
        self.mean("best_cider_d", [scores.max() for scores in of_image], signature=found["signature"])

    def set_bleu(self, keys: Sequence[str]) -> None:
        """Corpus BLEU; its interval is that of the images' contributions, see `leave_one_out`."""
        counts = reference_matches(([text] for text in self.texts), self.references)
        # The counts without image i, for all i at once.
        rest = [part.double().sum(0) - part.double() for part in counts]
        values, without = corpus_bleu(*counts), bleu_scores(*rest)  # (4,), (N, 4)
        for key in keys:
            order = int(key.rpartition("_")[2]) - 1
            value = float(values[order])
            if len(self.texts) == 1:
                self.number(key, value)
                continue
            contributions = leave_one_out(value, without[:, order].numpy())
            self.mean(key, contributions, signature=f"metric:{key}|tok:ptb|corpus", is_corpus_share=True)

    def set_rouge_l(self, keys: Sequence[str]) -> None:
        """ROUGE-L."""
        found = rouge_l(self.texts, self.references)
        self.mean("rouge_l", found["per_sample"], signature=found["signature"], is_share=True)

    def set_by_java(self, keys: Sequence[str]) -> None:
        """METEOR of the corpus, and SPICE."""
        for key in keys:
            metric: NlgMetric | None = getattr(self, key)
            if metric is None:
                self.missing(f"{key.upper()} was not requested", key)
                continue
            try:
                found = metric(self.texts, [list(group) for group in self.references])
            except RuntimeError as error:
                self.missing(str(error).removeprefix("not run: "), key)
                continue
            named, values = found.get("signature", ""), found["per_sample"]
            if key == "spice":  # a mean over captions, which METEOR is not
                self.mean(key, values, signature=named, is_share=True)
            else:
                self.mean(key, values, value=float(found[key]), signature=named, is_corpus_share=True)

    def set_perplexity(self, keys: Sequence[str]) -> None:
        """Perplexity; its interval is that of the mean loss per token, over captions."""
        losses = self.perplexity(self._spoken)
        nats, tokens = (np.asarray(losses[name], dtype=np.float64) for name in ("nats", "tokens"))
        value = float(losses["perplexity"])
        self.number("perplexity", value, signature=str(losses.get("signature", "")))
        bounds = bootstrap_interval(nats, weights=tokens, seed=self.seed)
        self.numbers |= Interval(np.exp(bounds), bounds.method).entries("perplexity")
        rest = tokens.sum() - tokens
        mean = np.divide(nats.sum() - nats, rest, out=np.full_like(nats, math.log(value)), where=rest > 0)
        self.per_sample["perplexity"] = leave_one_out(value, np.exp(mean))

    # --- facts, and parts of the images ---

    def set_faithfulness(self, keys: Sequence[str]) -> None:
        """Wrong claims and mentioned facts."""
        found = faithfulness(self.texts, self.facts, self.check)
        counts = {name: np.asarray(values) for name, values in found["per_sample"].items()}
        self._claims = counts["wrong"], counts["right"]
        for key, above, beside in (("hallucination", "wrong", "right"), ("fact_recall", "recalled", "missed")):
            weights = counts[above] + counts[beside]
            self.mean(key, counts[above], weights=weights, signature=found["signature"], is_share=True)

    def set_unmentioned_objects(self, keys: Sequence[str]) -> None:
        """COCO's objects that a caption names and no reference does, of all that it names.

        A bound of hallucination from above, because references omit objects.
        """
        joined = spoken([" . ".join(group) for group in self.references])
        objects = chair(joined, [()] * len(joined), synonyms="coco")["per_sample"]["mentioned"]
        found = chair(self.texts, objects, synonyms="coco")
        if found["chair_i"] is None:
            return self.missing(found["chair_i_reason"], *keys)
        wrong, named = (list(map(len, found["per_sample"][key])) for key in ("wrong", "mentioned"))
        self.mean("unmentioned_objects", wrong, weights=named, signature=found["signature"], is_share=True)

    def set_parts(self) -> None:
        """Set `<part>_rd100_recall_at_1` and `<part>_hallucination`: means over the images of each part.

        Call it after `set_random_distractors` and `set_faithfulness`. Distractors are of all images, so the parts together
        give the number of the whole set.
        """
        rd100, hallucination = "rd100_recall_at_1", "hallucination"
        for name, chosen in self.parts.items():
            at = np.flatnonzero(chosen)
            if not len(at):
                self.missing("no image of this part", f"{name}_{rd100}", f"{name}_{hallucination}")
                continue
            if rd100 in self.per_sample:
                groups = [self.groups[rd100][row] for row in at.tolist()]
                signature = self.signatures.get(rd100, "")
                values = self.per_sample[rd100][at]
                self.mean(f"{name}_{rd100}", values, groups=groups, signature=signature, is_share=True)
            else:
                self.missing(self.numbers.get(f"{rd100}_reason", "no scorer"), f"{name}_{rd100}")
            if self._claims is None:
                self.missing(_NEEDS["set_faithfulness"][1], f"{name}_{hallucination}")
                continue
            wrong, right = (counts[at] for counts in self._claims)
            signature = self.signatures.get(hallucination, "")
            self.mean(f"{name}_{hallucination}", wrong, weights=wrong + right, signature=signature, is_share=True)


# --- The suites of the papers ----------------------------------------------------------------------------------------


def suite(name: str, captions: Sequence[Any], *, details: bool = False, **inputs: Any) -> dict[str, Any]:
    """The columns of a paper's tables, with faithfulness beside every retrieval number.

    - `"smile"`: Yue et al. 2023, Table 1; with bags also [`bag_keys`]; with parts, `<part>_rd100_recall_at_1` and
      `<part>_hallucination`; `ranks`, of each image in the pool.
    - `"discritune"`: Dessi et al. 2023, Tables 1 and 2, not multiplied by 100. P@1 is recall at 1 among the 100 images of the
      caption's block.
    - `"ndlb"`: Gaur et al. 2024 (No Detail Left Behind), Tables 3 to 7, for all sizes of bags.
    - `"sle"`: Chen and Jin 2020, Table 4, for several captions per image: five random samples ("rs"), or the five best of a beam
      ("bs"). CIDEr-D is the mean over the captions, `best_cider_d` that of each image's best caption. Div-n divides distinct n-grams
      by words; `mbleu_4_per_image` compares each caption with the others of its image. Other papers report corpus mBLEU-4 (`mbleu_4`).

    `inputs` are those of [`SuiteRow`]; with `details`, see [`SuiteRow.result`].
    """
    if name == "sle":
        every = [caption for group in captions for caption in group]
        return SuiteRow(captions=every, sampled=captions, **inputs).compute(*SUITES["sle"]).result(details)
    row = SuiteRow(captions=captions, **inputs)
    sizes = {"smile": row.bags, "ndlb": {*BAG_SIZES, *row.bags}}.get(name, ())
    row.compute(*SUITES[name], *bag_keys(sizes))
    row.set_parts()
    return row.result(details)


# --- SLE's diversity over temperatures -------------------------------------------------------------------------------


def diversity_at_cider_d(points: Sequence[Mapping[str, Any]], cider_d: float) -> dict[str, float] | None:
    """`temperature`, `div_2` and `mbleu_4_per_image` where a captioner's samples have a given mean CIDEr-D.

    `points` are rows of SLE's suite with their `temperature`. Interpolates linearly between neighbouring ones; None if none of them
    encloses this CIDEr-D. If several temperatures have it, the highest counts, whose captions are the most diverse. Compares captioners at equal precision; at
    equal temperature, one of them may only sample from a narrower distribution.
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
