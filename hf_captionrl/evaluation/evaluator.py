"""Numbers of captions: the rows of a recipe's table, and the tables of `captionrl evaluate`."""

from __future__ import annotations

import functools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.pipeline import LazyImages, scorer_features
from hf_captionrl.captioners.prompts import caption_entropy
from hf_captionrl.data.benchmarks import coco_id, load_hard_pool, load_published_bags, match_coco_ids
from hf_captionrl.data.columns import caption_column, id_column
from hf_captionrl.evaluation.options import EvaluationArguments, clip_prefix, optional_scorer
from hf_captionrl.metrics import (
    caption_perplexity,
    clip_score,
    paired_test,
    self_retrieval,
)
from hf_captionrl.metrics.bootstrap import (
    Interval,
    bootstrap_interval,
    mean_interval,
    proportion_interval,
    signature,
)
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.metrics.clip_scores import score_prefix
from hf_captionrl.metrics.columns import (
    BY_SCORER,
    MORE_REFERENCES_COLUMNS,
    PAPERS,
    REWARD_COLUMNS,
    SUITES,
    Column,
    by_reward_scorer,
    table_columns,
    variants,
)
from hf_captionrl.metrics.evaluate_modules.inputs import load_language_model
from hf_captionrl.metrics.meteor_spice import meteor, spice
from hf_captionrl.metrics.suites import SuiteRow, discritune_suite, ndlb_suite, sle_suite, smile_suite
from hf_captionrl.retrieval import Scorer, load_scorer
from hf_captionrl.retrieval.bags import load_bags
from hf_captionrl.retrieval.feature_cache import RowLookup
from hf_captionrl.scenes import BAG_SIZES, bags, check
from hf_captionrl.utils.model_files import model_path

# --- Images besides the test split that a caption is ranked among: a pool, and bags ----------------------------------


def joined_images(splits: Sequence[datasets.Dataset]) -> datasets.Dataset:
    """Images and ids of several splits, one after the other."""
    return datasets.concatenate_datasets([rows.select_columns(["image", "image_id"]) for rows in splits])


def pool_images(path: Path, test: datasets.Dataset, others: datasets.Dataset) -> datasets.Dataset:
    """The test images, followed by the other images of a pool such as CapEnrich's."""
    wanted = set(load_hard_pool(path))
    # Of the other images nothing is kept.
    found = wanted.intersection(map(coco_id, id_column(test)))
    more = []
    for row, image_id in enumerate(id_column(others)):
        number = coco_id(image_id)
        if number in wanted and number not in found:
            more.append(row)
            found.add(number)
    missing = sorted(wanted - found, key=int)
    if missing:
        raise ValueError(
            f"{len(missing)} of the {len(wanted)} images of {path} are not in the data set, such as COCO image {missing[0]}. "
            "Use a data set with all images of the pool (all splits of COCO)."
        )
    return joined_images([test, others.select(more)])


def bags_and_images(
    path: Path, test: datasets.Dataset, others: datasets.Dataset | None
) -> tuple[dict[int, list[list[int]]], datasets.Dataset | None]:
    """Bags as rows of the test split followed by other images, and these images; TrueMatch's are of both Karpathy splits."""
    parts = [rows.select_columns("image_id") for rows in (test, others) if rows is not None]
    number = len(test)
    bags = read_bags(path, id_column(datasets.concatenate_datasets(parts)))
    used = sorted({row - number for group in bags.values() for bag in group for row in bag if row >= number})
    if not used or others is None:
        return bags, None
    place = {row + number: at + number for at, row in enumerate(used)}
    bags = {size: [[place.get(row, row) for row in bag] for bag in group] for size, group in bags.items()}
    return bags, others.select(used)


def read_bags(path: Path, ids: Sequence[str]) -> dict[int, list[list[int]]]:
    """Bags as rows of images with these ids, from a file of `captionrl bags`, lists of ids by size, or TrueMatch's folder."""
    if not path.exists():
        raise FileNotFoundError(f"There is no file {str(path)!r} with bags. Use a file of `captionrl bags`.")
    named: Mapping[int, list[list[str]]]
    lookup = RowLookup(ids)
    if path.is_dir():
        named = match_coco_ids(load_published_bags(path), ids)
    else:
        shape = f'{path} must hold bags of `captionrl bags`, or {{"3": [["id", "id", "id"], ...]}}, lists by size'
        try:
            value = {"bags": []} if path.suffix == ".parquet" else json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{shape}; it is not JSON ({error}).") from None
        if isinstance(value, dict) and "bags" in value:
            return load_bags(path, image_ids=ids).rows(ids)
        if not isinstance(value, dict) or not all(
            size.isdigit() and isinstance(bags, list) and all(isinstance(bag, list) for bag in bags)
            for size, bags in value.items()
        ):
            raise ValueError(f"{shape}.")
        named = {int(size): [[str(i) for i in bag] for bag in group] for size, group in value.items()}
        strange = set(lookup.missing([i for group in named.values() for bag in group for i in bag]))
        for size, group in named.items():
            for number, bag in enumerate(group):
                where, unknown = f"{path}: bag {number} of size {size} holds", [i for i in bag if i in strange]
                if unknown:
                    raise ValueError(f"{where} image {unknown[0]!r}, which is not used here.")
                if not len(bag) == len(set(bag)) == size:
                    raise ValueError(f"{where} {len(bag)} images, {len(set(bag))} different.")
    rows = iter(lookup.rows([i for group in named.values() for bag in group for i in bag]).tolist())
    return {size: [list(islice(rows, len(bag))) for bag in group] for size, group in named.items() if group}


# --- The rows of a recipe's table ------------------------------------------------------------------------------------

MORE_REFERENCES = "more_references"
"""Column of the test split with a second set of references, such as HolisticCaps."""


def more_columns(
    paper: str | None, has_reward_scorer: bool, has_more_references: bool, has_bags: bool
) -> tuple[Column, ...]:
    """Columns of bags and of a paper, also by the reward scorer, and of a second set of references."""
    found = table_columns(*PAPERS[paper], short=True) if paper else ()
    found = (*(REWARD_COLUMNS if has_bags else REWARD_COLUMNS[-2:]), *found)
    if has_reward_scorer:
        found += by_reward_scorer(*(column for column in found if column.key in BY_SCORER))
    else:
        found = tuple(column for column in found if not column.key.startswith("reward_"))
    return found + (MORE_REFERENCES_COLUMNS if has_more_references else ())


class Evaluator:
    """Evaluates captions of the test split `dataset`, for the table and the gallery.

    `language_model` is `(model, tokenizer)` for perplexity; `reward_scorer` rewards or selects in training; its retrieval is also shown.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        held_out_scorer: Scorer | None,
        language_model: tuple[Any, Any] | None,
        *,
        seed: int,
        cache_dir: str | None = None,
        reward_scorer: Scorer | None = None,
        learning_curves: bool = False,
    ) -> None:
        self.dataset = dataset
        self.learning_curves = learning_curves
        self.held_out_scorer = held_out_scorer
        self.seed = seed
        self.tokenize = "ptb"
        """[`SuiteRow.tokenize`] of the tables."""
        self.ranks: dict[str, Any] = {}  # row name -> rank of each test image in the whole pool
        self.references: Sequence[list[str]] = caption_column(dataset)
        columns = dataset.column_names
        self.facts = list(dataset["facts"]) if "facts" in columns else None
        self.parts: dict[str, list[bool]] = {}
        if "against_preferences" in columns:
            # The embedded world, where some images go against what their kind prefers.
            against = list(dataset["against_preferences"])
            self.parts = {"with_preferences": [not value for value in against], "against_preferences": against}
        self.bags: dict[int, list[list[int]]] = {}
        if "bag_id" in columns:
            ids = list(dataset["bag_id"])
            if max(BAG_SIZES) in Counter(filter(None, ids)).values():  # a small split has no complete bag
                self.bags = {size: bags(ids, size) for size in BAG_SIZES}
        self.perplexity: Callable[[Sequence[str]], Mapping[str, Any]] | None = None
        if language_model is not None:
            model, tokenizer = language_model
            self.perplexity = lambda captions: caption_perplexity(list(captions), model, tokenizer)
        self.reward_scorer = reward_scorer
        self._cache_dir = cache_dir
        self.image_features = None if held_out_scorer is None else self.features_of(dataset)
        self.pool_features: Any = None
        """Features of a pool that begins with the test images; None: the pool is the test images."""
        self.bag_images: datasets.Dataset | None = None
        """Images of bags that are not in the test split, whose captions follow those of the test split."""
        self.arguments = EvaluationArguments(clip_prefix="")
        self.more_references = list(dataset[MORE_REFERENCES]) if MORE_REFERENCES in columns else None
        self.reward_image_features = None if reward_scorer is None else self.features_of(dataset, reward_scorer)

    @classmethod
    def from_arguments(
        cls,
        dataset: datasets.Dataset,
        arguments: EvaluationArguments,
        *,
        seed: int,
        cache_dir: str | None = None,
        reward_scorer: Scorer | None = None,
        splits: Mapping[str, datasets.Dataset] | None = None,
    ) -> Evaluator:
        """Load the models of resolved `arguments`, whose pool and bags are found in `splits`, and the features of test images."""
        name = arguments.perplexity_name_or_path
        evaluator = cls(
            dataset,
            optional_scorer(arguments.held_out_scorer_name_or_path),
            load_language_model(name) if name and name != "none" else None,
            seed=seed,
            cache_dir=cache_dir,
            reward_scorer=reward_scorer,
            learning_curves=arguments.learning_curves,
        )
        evaluator.arguments, splits = arguments, splits or {}
        others = [rows for split, rows in splits.items() if split != "test"]
        if arguments.pool is not None and evaluator.held_out_scorer is not None:
            rest = joined_images(others) if others else dataset.select([])
            evaluator.pool_features = evaluator.features_of(pool_images(Path(arguments.pool), dataset, rest))
        if arguments.bags is not None:
            found = bags_and_images(Path(arguments.bags), dataset, splits.get("validation"))
            evaluator.bags, evaluator.bag_images = found
        return evaluator

    def features_of(self, dataset: datasets.Dataset, scorer: Scorer | None = None) -> Any:
        """Features of M images by a scorer, by default the held-out one, `(M, D)` of unit length."""
        scorer = scorer or self.held_out_scorer
        assert scorer is not None  # nosec B101
        return scorer_features(scorer, dataset, cache_dir=self._cache_dir)

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns in addition to those of every table."""
        has_more = self.more_references is not None
        return more_columns(self.arguments.paper, self.reward_scorer is not None, has_more, bool(self.bags))

    def row(
        self,
        name: str,
        captions: Sequence[str],
        references: Sequence[list[str]] | None = None,
        *,
        more_captions: Sequence[str] = (),
    ) -> dict[str, Any]:
        """One row of the table, from one caption per test image and one per image of `bag_images`; `references` replace the split's."""
        text = clip_text = None
        prefix = clip_prefix(self.arguments.clip_prefix, "", self.arguments.held_out_scorer_name_or_path)
        if self.held_out_scorer is not None:
            text = _text_features(self.held_out_scorer, captions)
            if prefix:
                clip_text = _text_features(self.held_out_scorer, captions, prefix)
        inputs: dict[str, Any] = {
            "references": references or self.references,
            "text_features": text,
            "image_features": self.image_features,
            "seed": self.seed,
        }
        numbers = smile_suite(
            captions,
            pool_features=self.pool_features,
            clip_features=clip_text,
            clip_prefix=prefix,
            perplexity=self.perplexity,
            facts=self.facts,
            check=check,
            bags=self.bags if self.bag_images is None else {},
            parts=self.parts,
            **inputs,
        )
        if "ranks" in numbers:
            self.ranks[name] = numbers.pop("ranks")
        numbers |= _numbers(SuiteRow(captions=captions), "degenerate")
        if self.arguments.bags is not None:
            numbers |= self._in_bags(self.held_out_scorer, text, self.image_features, more_captions, "")
            keys = [key for key in (f"bag_{size}_truth_recall_at_1" for size in BAG_SIZES) if key not in numbers]
            numbers |= dict.fromkeys(keys) | {f"{key}_reason": "no facts to check captions with" for key in keys}
        paper = PAPERS.get(self.arguments.paper or "", ())
        numbers |= _numbers(SuiteRow(captions=captions, meteor=meteor, spice=spice, **inputs), *paper)
        if self.more_references is not None:
            more = SuiteRow(captions=captions, references=self.more_references, seed=self.seed)
            numbers |= {f"more_{key}": value for key, value in _numbers(more, "cider_d").items()}
        numbers |= self._by_the_reward(captions, more_captions)
        return {"name": name, **numbers, **self.more_numbers(captions, references)}

    def more_numbers(self, captions: Sequence[str], references: Sequence[list[str]] | None) -> dict[str, Any]:
        """Numbers of a table's columns that a subclass adds to each row; `references` as in [`row`]."""
        return {}

    def _in_bags(
        self, scorer: Scorer | None, text: Any, images: Any, more_captions: Sequence[str], prefix: str
    ) -> dict[str, Any]:
        """`<prefix>bag_<size>_recall_at_1` of the bags of a file, whose images may be of another split."""
        keys = {size: f"{prefix}bag_{size}_recall_at_1" for size in sorted({*BAG_SIZES, *self.bags})}
        if scorer is None:
            return dict.fromkeys(keys.values()) | {f"{key}_reason": "no scorer" for key in keys.values()}
        if self.bag_images is not None:
            text = torch.cat([text, _text_features(scorer, more_captions)])
            images = torch.cat([images, self.features_of(self.bag_images, scorer)])
        numbers: dict[str, Any] = {}
        for size, key in keys.items():
            if not self.bags.get(size):
                numbers |= {key: None, f"{key}_reason": f"no bags of {size} in {self.arguments.bags}"}
                continue
            found = self_retrieval(text, images, bags=self.bags[size], ks=(1,), seed=self.seed)
            numbers |= {key: float(found["recall_at_1"])} | found["recall_at_1_ci"].entries(key)
        return numbers

    def _by_the_reward(self, captions: Sequence[str], more_captions: Sequence[str]) -> dict[str, Any]:
        """Retrieval by the reward scorer, without intervals: `reward_<key>` and reasons."""
        if self.reward_scorer is None:
            return {}
        text, images = _text_features(self.reward_scorer, captions), self.reward_image_features
        row = SuiteRow(captions=captions, text_features=text, image_features=images, bags=self.bags)
        paper = PAPERS.get(self.arguments.paper or "", ())
        found = _numbers(row, *(key for key in paper if key in BY_SCORER)) | _numbers(row, "rd100_recall_at_1")
        if self.arguments.bags is None:
            row.set_bag_recalls(bag_keys := [f"bag_{size}_recall_at_1" for size in self.bags])
            found |= {key: row.numbers[key] for key in bag_keys}
        numbers = {f"reward_{key}": value for key, value in found.items() if not key.endswith(("_ci", "_ci_method"))}
        if self.arguments.bags is not None:
            numbers |= self._in_bags(self.reward_scorer, text, images, more_captions, "reward_")
        return numbers

    def reference_row(self) -> tuple[dict[str, Any], list[str]]:
        """The human row: one random reference per image, compared with the others; and these references."""
        drawn = draw_references(self.references, self.seed)
        captions, more = _first(drawn), list[str]()
        if self.bag_images is not None:
            more = _first(draw_references(caption_column(self.bag_images), self.seed))
        others = _others(drawn) if all(len(group) > 1 for group in drawn) else None
        row = self.row("references", captions, others, more_captions=more)
        for key in ("cider_d", "emscore_references"):
            if others is None and row.get(key) is not None:
                row |= {key: None, f"{key}_reason": "an image has only one reference"}
                row = {name: value for name, value in row.items() if name not in (f"{key}_ci", f"{key}_ci_method")}
        return row, captions


def _numbers(row: SuiteRow, *keys: str) -> dict[str, Any]:
    """Some numbers of a row, with intervals and reasons."""
    found = row.compute(*keys).numbers
    return {key: value for key, value in found.items() if re.sub("(_ci|_ci_method|_reason)$", "", key) in keys}


def draw_references(references: Sequence[list[str]], seed: int) -> Sequence[list[str]]:
    """The references of each image, a random one first (SMILE, Table 1)."""
    rng = random.Random(seed)

    def moved_first(group: list[str]) -> list[str]:
        place = rng.randrange(len(group)) if group else 0
        return group[place : place + 1] + group[:place] + group[place + 1 :]

    return list(map(moved_first, references))


def _first(drawn: Sequence[list[str]]) -> list[str]:
    """The first reference of each image; empty if it has none."""
    return [group[0] if group else "" for group in drawn]


def _others(drawn: Sequence[list[str]]) -> Sequence[list[str]]:
    """The references of each image after the first."""
    return [group[1:] for group in drawn]


def _text_features(scorer: Scorer, captions: Sequence[str], prefix: str = "") -> torch.Tensor:
    """On the CPU, where the cached features of the images are, `(N, D)`."""
    return scorer.text_features([prefix + caption for caption in spoken(captions)]).cpu()


# --- The tables of `captionrl evaluate` ------------------------------------------------------------------------------


@dataclass
class ScoredCaptions:
    """Captions of one captioner, with everything that is computed once."""

    name: str  # name of the captioner
    captions: Sequence[list[str]]  # captions of each image, in the order of the data set
    references: Sequence[list[str]]  # references of each image
    is_human: bool = False  # whether the captions are the references, of which only the first is scored
    # What follows is of each image's first caption; the others are scored as those of `singles`.
    text: Tensor | None = None  # features `(N, D)`, or None
    # The same for CLIPScore, with `clip_prefix` before each caption, or None if the prefix is empty.
    clip_text: Tensor | None = None
    clip_prefix: str = ""  # text before each caption
    scorer: str = ""  # signature of the scorer
    image_ranks: np.ndarray | None = None  # rank of each image among the images, or None
    pool_ranks: np.ndarray | None = None  # the same in the evaluator's pool
    tokens: list[int] | None = None  # number of the scorer's tokens in each caption, or None
    max_text_tokens: int | None = None  # largest number of tokens that the scorer reads
    # Function from captions to the result of `caption_perplexity`, or None.
    perplexity: Callable[[Sequence[str]], Mapping[str, Any]] | None = None
    _found: dict[Any, dict[str, Any]] = field(default_factory=dict, init=False, repr=False)

    @property
    def first(self) -> list[str]:
        """The first caption of each image: the best beam."""
        return [group[0] for group in self.captions]

    @cached_property
    def singles(self) -> list[ScoredCaptions]:
        """The same with one caption per image each: first, second, ... captions. An image with fewer repeats its captions."""
        number = 1 if self.is_human else max(map(len, self.captions))
        if number == 1:
            return [self]
        parts = ([[group[k % len(group)]] for group in self.captions] for k in range(number))
        return [ScoredCaptions(self.name, part, self.references) for part in parts]

    @cached_property
    def given_references(self) -> Sequence[list[str]] | None:
        """The references if every image has one; metrics of references are left out otherwise."""
        return self.references if all(self.references) else None

    def _once(self, metric: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
        """The numbers of a slow metric, for all tables."""
        if metric not in self._found:
            self._found[metric] = metric(*given)
        return self._found[metric]

    def inputs(self, evaluator: Evaluator) -> dict[str, Any]:
        """What [`SuiteRow`] takes beside captions and bags."""
        return {
            "references": self.given_references,
            "text_features": self.text,
            "image_features": evaluator.image_features,
            "pool_features": evaluator.pool_features,
            "image_ranks": self.image_ranks,
            "pool_ranks": self.pool_ranks,
            "clip_features": self.clip_text,
            "clip_prefix": self.clip_prefix,
            "perplexity": self.perplexity,
            "meteor": functools.partial(self._once, meteor),
            "spice": functools.partial(self._once, spice),
            "facts": evaluator.facts,
            "check": check,
            "scorer": self.scorer,
            "tokenize": evaluator.tokenize,
            "seed": evaluator.seed,
        }


def human_captions(evaluator: Evaluator) -> ScoredCaptions | None:
    """One random reference per image, compared with the others (SMILE, Table 1); None if an image has one reference."""
    drawn = draw_references(evaluator.references, evaluator.seed)
    if not all(len(group) > 1 for group in drawn):
        return None
    return ScoredCaptions("references", drawn, _others(drawn), is_human=True)


@dataclass(frozen=True)
class Table:
    """A paper's table; `compute` maps scored captions, one per image, and the evaluator to a row with details."""

    title: str
    columns: tuple[Column, ...]
    compute: Callable[[ScoredCaptions, Evaluator], dict[str, Any]]
    takes_all: bool = False  # whether `compute` takes all captions of an image together

    def row(self, scored: ScoredCaptions, evaluator: Evaluator, *, with_best: bool = False) -> dict[str, Any]:
        """The row of a source: means over the captions of an image, and `best_<key>` of `BEST` over its best captions."""
        if self.takes_all:
            return {"name": scored.name, **self.compute(scored, evaluator)}
        rows = [self.compute(single, evaluator) for single in scored.singles]
        if len(rows) == 1 and not with_best:
            return {"name": scored.name, **rows[0]}
        sizes = np.array([min(len(group), len(rows)) for group in scored.captions])
        shares = {column.key for column in self.columns if column.is_fraction}
        return {"name": scored.name, **_over_captions(rows, sizes, shares, evaluator.seed)}


BEST = ("pool_recall_at_1", "rd100_recall_at_1", "blocks_recall_at_1", "clip_score", "cider_d")
"""Numbers that are also given for the best caption of each image, where a source has several."""


def _over_captions(rows: Sequence[dict[str, Any]], sizes: np.ndarray, shares: set[str], seed: int) -> dict[str, Any]:
    """One row from those of first, second, ... captions, of which `sizes` `(N,)` count for each image; intervals over images."""
    merged: dict[str, Any] = rows[0] | {"per_sample": {}, "groups": {}}
    for key in rows[0]:
        if missing := [row for row in rows if f"{key}_reason" in row]:
            merged |= {name: missing[0].get(name) for name in (key, f"{key}_ci", f"{key}_reason")}
            merged.pop(f"{key}_ci_method", None)
        elif key == "max_words":  # of all captions
            merged |= {name: np.max([row[name] for row in rows], 0).tolist() for name in (key, f"{key}_ci")}
    for key in [key for key in rows[0]["per_sample"] if all(key in row["per_sample"] for row in rows)]:
        values, groups = np.stack([row["per_sample"][key] for row in rows]), rows[0]["groups"].get(key)  # (K, N)
        of_images = sizes if groups is None or key not in BEST else sizes[np.asarray(groups)]
        counts = np.arange(len(rows))[:, None] < (of_images if len(of_images) == values.shape[1] else len(rows))
        means = {key: (values * counts).sum(0) / np.broadcast_to(counts, values.shape).sum(0)}
        if key in BEST:
            means[f"best_{key}"] = np.where(counts, values, -np.inf).max(0)
        for name, of_image in means.items():
            # Contributions to a number of the corpus, which may leave [0, 1], have the bootstrap's interval.
            of_corpus = any(row.get(f"{key}_ci_method") == "bootstrap" for row in rows)
            if key in shares and (not of_corpus or not of_image.any() or (of_image == 1).all()):
                bounds = proportion_interval(of_image, groups=groups)
            elif of_corpus:
                bounds = bootstrap_interval(of_image, groups=groups, seed=seed)
            else:
                bounds = mean_interval(of_image, groups=groups)
            if len(rows) > 1 or name != key:
                limits = (0.0, 1.0) if key in shares else (-np.inf, np.inf)
                merged |= {name: float(of_image.mean())} | Interval(np.clip(bounds, *limits), bounds.method).entries(
                    name
                )
            merged["per_sample"][name] = of_image
            merged["groups"] |= {} if groups is None else {name: groups}
    merged |= {f"best_{key}": None for key in BEST if key in merged and f"best_{key}" not in merged}
    reasons = {f"best_{key}_reason": merged[f"{key}_reason"] for key in BEST if f"{key}_reason" in merged}
    return merged | reasons


def _sle(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    if min(map(len, scored.captions)) < 2:
        empty = SuiteRow(captions=scored.first)
        empty.missing("one caption per image; this table needs several", *SUITES["sle"])
        return empty.result()
    references = None if scored.is_human else scored.given_references
    options: dict[str, Any] = {"tokenize": evaluator.tokenize, "seed": evaluator.seed}
    row = sle_suite(scored.captions, references=references, details=True, **options)
    reason = "the references are the captions"
    return row | ({"cider_d_reason": reason, "best_cider_d_reason": reason} if scored.is_human else {})


def _captions(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    counts: dict[str, Any] = {"token_counts": scored.tokens, "max_text_tokens": scored.max_text_tokens}
    row = SuiteRow(captions=scored.first, tokenize=evaluator.tokenize, seed=evaluator.seed, **counts)
    return row.compute(*SUITES["lengths"]).result()


def _preferences(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    row = SuiteRow(captions=scored.first, parts=evaluator.parts, **scored.inputs(evaluator))
    row.compute(*(["rd100_recall_at_1"] if row.has_features else []), "hallucination", "fact_recall")
    row.set_parts()
    return row.result()


def _text(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    return SuiteRow(captions=scored.first, **scored.inputs(evaluator)).compute(*SUITES["text"]).result()


TABLES: dict[str, Table] = {
    "text": Table("Captions and references", table_columns(*SUITES["text"]), _text),
    "smile": Table(
        "SMILE",
        table_columns(*SUITES["smile"]),
        lambda scored, evaluator: smile_suite(scored.first, details=True, **scored.inputs(evaluator)),
    ),
    "discritune": Table(
        "DiscriTune",
        table_columns(*SUITES["discritune"]),
        lambda scored, evaluator: discritune_suite(scored.first, details=True, **scored.inputs(evaluator)),
    ),
    "sle": Table(
        "SLE (several captions per image)",
        table_columns(*SUITES["sle"]),
        _sle,
        takes_all=True,
    ),
    "ndlb": Table(
        "No Detail Left Behind",
        # Of the two conventions of CLIPScore, this suite has one.
        tuple(replace(c, key=c.key.removeprefix("ndlb_")) for c in table_columns(*SUITES["ndlb"])),
        lambda scored, evaluator: ndlb_suite(
            scored.first, bags=evaluator.bags, details=True, **scored.inputs(evaluator)
        ),
    ),
}
"""Suites by the name for `--suite`."""

_BY_PART = table_columns("rd100_recall_at_1", "hallucination")

PREFERENCES_TABLE = Table(
    "Scenes with and against the preferences of their kinds",
    (
        *variants("with_preferences", ", with preferences", *_BY_PART),
        *variants("against_preferences", ", against preferences", *_BY_PART),
    ),
    _preferences,
)
"""Printed below every suite on the embedded world, where some test scenes go against what their kind prefers."""

CAPTIONS_TABLE = Table(
    "Captions",
    table_columns(*SUITES["lengths"]),
    _captions,
)
"""Printed below every suite: lengths of the captions, and how many the scorer truncated (NDLB Table 9)."""


def compare_with_first(rows: Sequence[dict[str, Any]], *, seed: int) -> None:
    """Test each row against the first; adds `<key>_p_value`, `<key>_difference` and, below 0.05, `<key>_mark`."""
    first = rows[0]["per_sample"]
    for row in rows[1:]:
        for key, values in row["per_sample"].items():
            if key not in first or len(first[key]) != len(values):
                continue
            found = paired_test(values, first[key], groups=row["groups"].get(key), seed=seed)
            row[f"{key}_difference"], row[f"{key}_p_value"] = found["difference"], found["p_value"]
            if found["p_value"] < 0.05:
                row[f"{key}_mark"] = "**" if found["p_value"] < 0.01 else "*"


def learned_table(captioner_name: str | None, pac_s_name: str | None = None) -> Table | None:
    """The entropy of a captioner on the captions, and PAC-S, by models that are loaded immediately; None if none is named."""
    numbers: dict[str, Callable[[ScoredCaptions, Evaluator], dict[str, Any]]] = {}
    if captioner_name is not None:
        captioner = load_captioner(model_path(captioner_name))

        def entropy(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
            images = LazyImages(evaluator.dataset, range(len(scored.captions)))
            found = caption_entropy(captioner, images, spoken(scored.first))
            return found | {"signature": signature(metric="caption_entropy", family=captioner.family)}

        numbers["caption_entropy"] = entropy
    if pac_s_name is not None:
        weights = load_scorer(model_path(pac_s_name))

        def pac_s(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
            text = _text_features(weights, scored.first, score_prefix("pac_s"))
            images = evaluator.features_of(evaluator.dataset, weights)
            return clip_score(text, images, preset="pac_s", scorer=weights.signature)

        numbers["pac_s"] = pac_s
    columns = table_columns(*numbers)

    def compute(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
        row = SuiteRow(captions=scored.first, seed=evaluator.seed)
        for column, number in zip(columns, numbers.values(), strict=True):
            found = number(scored, evaluator)
            values = np.asarray(found.get("per_sample", ()), dtype=np.float64)
            rated = ~np.isnan(values)
            if not rated.any():
                row.missing(found.get(f"{column.key}_reason", "defined for no caption"), column.key)
                continue
            row.mean(
                column.key,
                np.where(rated, values, 0),
                weights=None if rated.all() else rated,
                signature=found["signature"],
                is_share=column.is_fraction,
            )
        return row.result()

    return Table("Learned metrics", columns, compute) if numbers else None
