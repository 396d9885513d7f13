"""Numbers of captions: the rows of a recipe's table, and those of `captionrl evaluate`.

[`SuiteRow`] computes the numbers; here are the captions, features, bags and references that it takes.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from hf_captionrl.captioners.pipeline import scorer_features
from hf_captionrl.data.benchmarks import coco_id, load_hard_pool, load_published_bags, match_coco_ids
from hf_captionrl.data.columns import caption_column, concept_column, id_column, parse_json, read_text
from hf_captionrl.evaluation.options import EvaluationArguments, clip_prefix, optional_scorer
from hf_captionrl.metrics import caption_perplexity, paired_test
from hf_captionrl.metrics.bootstrap import Interval, bootstrap_interval, mean_interval, proportion_interval
from hf_captionrl.metrics.caption_checks import spoken, text_warnings
from hf_captionrl.metrics.columns import (
    BY_SCORER,
    MORE_REFERENCES_COLUMNS,
    PAPERS,
    REWARD_COLUMNS,
    SUITES,
    TABLE,
    Column,
    by_reward_scorer,
    table_columns,
    variants,
)
from hf_captionrl.metrics.evaluate_modules.inputs import load_language_model
from hf_captionrl.metrics.meteor_spice import meteor, spice
from hf_captionrl.metrics.suites import BAG_SIZES, SuiteRow, bag_keys, suite
from hf_captionrl.retrieval import Scorer, TokenScorer
from hf_captionrl.retrieval.bags import load_bags
from hf_captionrl.retrieval.ranking import num_concepts
from hf_captionrl.scenes import bags, check

# --- Images besides the test split that a caption is ranked among: a pool, and bags ----------------------------------


def joined_images(splits: Sequence[datasets.Dataset]) -> datasets.Dataset:
    """Images and ids of several splits, one after the other."""
    return datasets.concatenate_datasets([rows.select_columns(["image", "image_id"]) for rows in splits])


def pool_images(path: Path, test: datasets.Dataset, others: datasets.Dataset) -> datasets.Dataset:
    """The test images, followed by the other images of a pool such as CapEnrich's."""
    pool, row_of = set(load_hard_pool(path)), dict[str, int]()
    for row, image_id in enumerate(id_column(others)):
        row_of.setdefault(coco_id(image_id), row)
    pool -= set(map(coco_id, id_column(test)))
    if missing := sorted(pool - row_of.keys(), key=int):
        raise ValueError(
            f"The data set lacks images of {path} ({len(missing)}), such as COCO image {missing[0]}. Use a data set with all "
            "images of the pool (all splits of COCO)."
        )
    return joined_images([test, others.select(sorted(row_of[image_id] for image_id in pool))])


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
    if path.is_dir():
        by_size: Mapping[int, list[list[str]]] = match_coco_ids(load_published_bags(path), ids)
    else:
        value = {"bags": []} if path.suffix == ".parquet" else parse_json(read_text(path), str(path))
        if "bags" in value:
            return load_bags(path, image_ids=ids).rows(ids)
        by_size = {int(size): [list(map(str, bag)) for bag in group] for size, group in value.items()}
    row_of = {image_id: row for row, image_id in enumerate(ids)}
    for size, group in by_size.items():
        for number, bag in enumerate(group):
            where, unknown = f"{path}: bag {number} of size {size} holds", [i for i in bag if i not in row_of]
            if unknown:
                raise ValueError(f"{where} image {unknown[0]!r}, which is not used here.")
            if not len(bag) == len(set(bag)) == size:
                raise ValueError(f"{where} {len(bag)} images, {len(set(bag))} different.")
    return {size: [[row_of[i] for i in bag] for bag in group] for size, group in by_size.items() if group}


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
    ) -> None:
        self.dataset = dataset
        self.held_out_scorer = held_out_scorer
        self.seed = seed
        self.tokenize = "ptb"
        """[`SuiteRow.tokenize`] of the tables."""
        self.clip_prefix = ""
        """Text before each caption for CLIPScore."""
        self.ranks: dict[str, Any] = {}  # row name -> rank of each test image in the whole pool
        self.references: Sequence[list[str]] = caption_column(dataset)
        columns = dataset.column_names
        self.facts = list(dataset["facts"]) if "facts" in columns else None
        self.concepts = concept_column(dataset)
        if self.concepts is not None:
            number = num_concepts(len(dataset), self.concepts)
            warnings.warn(f"R@1 is of concepts: {len(dataset)} images show {number} (column concept).", stacklevel=2)
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
        self.arguments = EvaluationArguments()
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
        )
        evaluator.arguments, splits = arguments, splits or {}
        evaluator.clip_prefix = clip_prefix(arguments.clip_prefix, "", arguments.held_out_scorer_name_or_path)
        others = [rows for split, rows in splits.items() if split != "test"]
        if arguments.pool is not None and evaluator.held_out_scorer is not None:
            rest = joined_images(others) if others else dataset.select([])
            evaluator.pool_features = evaluator.features_of(pool_images(Path(arguments.pool), dataset, rest))
        if arguments.bags is not None:
            in_splits = bags_and_images(Path(arguments.bags), dataset, splits.get("validation"))
            evaluator.bags, evaluator.bag_images = in_splits
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

    def suite_row(
        self, captions: Sequence[str], references: Sequence[Sequence[str]] | None, keys: Iterable[str]
    ) -> SuiteRow:
        """The numbers of some columns, from one caption per test image."""
        keys, scorer, inputs = [*keys], self.held_out_scorer, dict[str, Any]()
        if scorer is not None:
            inputs["text_features"] = _text_features(scorer, captions)
            inputs["max_text_tokens"], inputs["scorer"] = scorer.max_text_tokens, scorer.signature
            if self.clip_prefix and "clip_score" in keys:
                inputs["clip_features"] = _text_features(scorer, captions, self.clip_prefix)
            if isinstance(scorer, TokenScorer) and "mean_tokens" in keys:  # others need not count tokens
                inputs["token_counts"] = scorer.count_tokens(spoken(captions))
        row = SuiteRow(
            captions=captions,
            references=references,
            image_features=self.image_features,
            pool_features=self.pool_features,
            clip_prefix=self.clip_prefix,
            perplexity=self.perplexity,
            meteor=meteor,
            spice=spice,
            facts=self.facts,
            check=check,
            bags=self.bags,
            concepts=self.concepts,
            parts=self.parts,
            tokenize=self.tokenize,
            seed=self.seed,
            **inputs,
        )
        return row.compute(*keys)

    def row(
        self,
        name: str,
        captions: Sequence[str],
        references: Sequence[list[str]] | None = None,
        *,
        more_captions: Sequence[str] = (),
    ) -> dict[str, Any]:
        """One row of the table, from one caption per test image and one per image of `bag_images`; `references` replace the split's."""
        paper = PAPERS.get(self.arguments.paper or "", ())
        row = self.suite_row(captions, references or self.references, [*SUITES["smile"], "degenerate", *paper])
        row.set_parts()
        for text in [] if name in ("references", "learning curve") else text_warnings(captions, self.references):
            warnings.warn(f"{name}: {text}", stacklevel=2)
        numbers = row.result(details=False)
        if "ranks" in numbers:
            self.ranks[name] = numbers.pop("ranks")
        features = row.text_features, self.image_features
        numbers |= self._in_bags(captions, more_captions, self.held_out_scorer, *features, by=("", "truth_"))
        if self.more_references is not None:
            more = SuiteRow(captions=captions, references=self.more_references, seed=self.seed).compute("cider_d")
            numbers |= {f"more_{key}": value for key, value in more.numbers.items() if key.startswith("cider_d")}
        if (scorer := self.reward_scorer) is not None:  # without intervals, but in bags of a file
            text, images = _text_features(scorer, captions), self.reward_image_features
            inputs: dict[str, Any] = {"text_features": text, "image_features": images, "concepts": self.concepts}
            by_reward = SuiteRow(captions=captions, bags=self.bags, **inputs)
            by_reward.compute("rd100_recall_at_1", *(key for key in paper if key in BY_SCORER))
            in_bags = self._in_bags(captions, more_captions, scorer, text, images)
            retrieval = _without_intervals(by_reward.numbers)
            retrieval |= _without_intervals(in_bags) if self.arguments.bags is None else in_bags
            numbers |= {f"reward_{key}": value for key, value in retrieval.items() if key != "empty_captions"}
        for by, reader in (("", self.held_out_scorer), ("reward_", self.reward_scorer)):
            if reader is not None and (number := reader.count_truncated(spoken(captions))):
                numbers[f"{by}captions_truncated"] = number / len(captions)
        return {"name": name, **numbers, **self.more_numbers(captions, references)}

    def more_numbers(self, captions: Sequence[str], references: Sequence[list[str]] | None) -> dict[str, Any]:
        """Numbers of a table's columns that a subclass adds to each row; `references` as in [`row`]."""
        return {}

    def _in_bags(
        self,
        captions: Sequence[str],
        more_captions: Sequence[str],
        scorer: Scorer | None,
        text: Any,
        images: Any,
        *,
        by: Sequence[str] = ("",),
    ) -> dict[str, Any]:
        """Recall in bags by a scorer and by the facts; images of a file's bags may be of another split, without facts."""
        facts = self.facts
        if self.bag_images is not None:
            captions, facts = [*captions, *more_captions], None
            if scorer is not None:
                text = torch.cat([text, _text_features(scorer, more_captions)])
                images = torch.cat([images, self.features_of(self.bag_images, scorer)])
        options: dict[str, Any] = {"text_features": text, "image_features": images, "concepts": self.concepts}
        row = SuiteRow(captions=captions, bags=self.bags, facts=facts, check=check, seed=self.seed, **options)
        sizes = self.bags if self.arguments.bags is None else sorted({*BAG_SIZES, *self.bags})
        numbers = row.compute(*bag_keys(sizes, by)).numbers
        return {key: value for key, value in numbers.items() if key.startswith("bag_")}

    def reference_row(self) -> tuple[dict[str, Any], list[str]]:
        """The human row: one random reference per image, compared with the others; and these references."""
        drawn = draw_references(self.references, self.seed)
        captions, more = _first(drawn), list[str]()
        if self.bag_images is not None:
            more = _first(draw_references(caption_column(self.bag_images), self.seed))
        others = [group[1:] for group in drawn] if all(len(group) > 1 for group in drawn) else None
        row = self.row("references", captions, others, more_captions=more)
        for key in ("cider_d", "emscore_references"):
            if others is None and row.get(key) is not None:
                row |= {key: None, f"{key}_reason": "an image has only one reference"}
                row = {name: value for name, value in row.items() if name not in (f"{key}_ci", f"{key}_ci_method")}
        return row, captions


def _without_intervals(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in numbers.items() if not key.endswith(("_ci", "_ci_method"))}


def draw_references(references: Sequence[list[str]], seed: int) -> Sequence[list[str]]:
    """The references of each image, a random one first (SMILE, Table 1)."""
    rng = random.Random(seed)
    places = [rng.randrange(len(group)) if group else 0 for group in references]
    return [[*g[at : at + 1], *g[:at], *g[at + 1 :]] for g, at in zip(references, places, strict=True)]


def _first(drawn: Sequence[list[str]]) -> list[str]:
    """The first reference of each image; empty if it has none."""
    return [group[0] if group else "" for group in drawn]


def _text_features(scorer: Scorer, captions: Sequence[str], prefix: str = "") -> torch.Tensor:
    """On the CPU, where the cached features of the images are, `(N, D)`."""
    return scorer.text_features([prefix + caption for caption in spoken(captions)]).cpu()


# --- The tables of `captionrl evaluate`: one row of numbers per source of captions, from which tables take columns -----


@dataclass
class Source:
    """The captions of one captioner: those of each image, in the order of the data set, and the references of each image."""

    name: str
    captions: Sequence[list[str]]
    references: Sequence[list[str]]
    is_human: bool = False  # whether the captions are the references, of which only the first is scored

    @property
    def number(self) -> int:
        """Captions per image that are scored, at most."""
        return 1 if self.is_human else max(map(len, self.captions))

    def nth(self, k: int) -> list[str]:
        """The first, second, ... caption of each image. An image with fewer repeats its captions."""
        return [group[k % len(group)] for group in self.captions]


def human_captions(evaluator: Evaluator) -> Source | None:
    """One random reference per image, compared with the others (SMILE, Table 1); None if an image has one reference."""
    drawn = draw_references(evaluator.references, evaluator.seed)
    if not all(len(group) > 1 for group in drawn):
        return None
    return Source("references", drawn, [group[1:] for group in drawn], is_human=True)


BEST = ("pool_recall_at_1", "rd100_recall_at_1", "blocks_recall_at_1", "clip_score", "ndlb_clip_score", "cider_d")
"""Numbers that are also given for the best caption of each image, where a source has several."""

_BY_PART = table_columns("rd100_recall_at_1", "hallucination")

TABLES: dict[str, tuple[str, tuple[Column, ...]]] = {
    "text": ("Captions and references", table_columns(*SUITES["text"])),
    "smile": ("SMILE", table_columns(*SUITES["smile"])),
    "discritune": ("DiscriTune", table_columns(*SUITES["discritune"])),
    "sle": ("SLE (several captions per image)", table_columns(*SUITES["sle"])),
    "ndlb": ("No Detail Left Behind", table_columns(*SUITES["ndlb"])),
    "preferences": (
        "Scenes with and against the preferences of their kinds",
        (
            *variants("with_preferences", ", with preferences", *_BY_PART),
            *variants("against_preferences", ", against preferences", *_BY_PART),
        ),
    ),
    "captions": ("Captions", table_columns(*SUITES["lengths"])),
}
"""Title and columns by name: suites, and two tables below every suite: of the embedded world, where some test scenes go against what
their kind prefers, and lengths of the captions, with how many the scorer truncated (NDLB Table 9)."""


_SHARES = {column.key for column in (*TABLE, *TABLES["preferences"][1]) if column.is_fraction}


def source_row(
    source: Source, evaluator: Evaluator, keys: Sequence[str], *, with_best: bool = False
) -> dict[str, Any]:
    """The numbers of a source with details: means over the captions of an image, and `best_<key>` of `BEST` over its best captions."""
    rows = []
    for k in range(source.number):
        references = source.references if all(source.references) else None
        row = evaluator.suite_row(source.nth(k), references, keys)
        row.set_parts()
        rows.append(row.result())
    if len(rows) == 1 and not with_best:
        return {"name": source.name, **rows[0]}
    sizes = np.array([min(len(group), len(rows)) for group in source.captions])
    return {"name": source.name, **_over_captions(rows, sizes, evaluator.seed)}


def sle_row(source: Source, evaluator: Evaluator) -> dict[str, Any]:
    """SLE's numbers of a source with several captions per image."""
    if min(map(len, source.captions)) < 2:
        empty = SuiteRow(captions=source.nth(0))
        empty.missing("one caption per image; this table needs several", *SUITES["sle"])
        return {"name": source.name, **empty.result()}
    references = source.references if all(source.references) and not source.is_human else None
    options = {"tokenize": evaluator.tokenize, "seed": evaluator.seed}
    row = suite("sle", source.captions, references=references, details=True, **options)
    reasons = [f"{key}_reason" for key in ("cider_d", "best_cider_d")] if source.is_human else []
    return {"name": source.name, **row, **dict.fromkeys(reasons, "the references are the captions")}


def _over_captions(rows: Sequence[dict[str, Any]], sizes: np.ndarray, seed: int) -> dict[str, Any]:
    """One row from those of first, second, ... captions, of which `sizes` `(N,)` count for each image; intervals over images."""
    merged: dict[str, Any] = rows[0] | {"per_sample": {}, "groups": {}}
    for key in rows[0]:
        if missing := [row for row in rows if f"{key}_reason" in row]:
            merged |= {name: missing[0].get(name) for name in (key, f"{key}_ci", f"{key}_reason")}
            merged.pop(f"{key}_ci_method", None)
        elif key == "max_words":  # of all captions
            merged[key] = max(row[key] for row in rows)
    for key in [key for key in rows[0]["per_sample"] if all(key in row["per_sample"] for row in rows)]:
        values, groups = np.stack([row["per_sample"][key] for row in rows]), rows[0]["groups"].get(key)  # (K, N)
        is_part = groups is not None and key in BEST and len(groups) != len(sizes)
        of_images = sizes[np.asarray(groups)] if is_part else sizes
        counts = np.arange(len(rows))[:, None] < (of_images if len(of_images) == values.shape[1] else len(rows))
        means = {key: (values * counts).sum(0) / np.broadcast_to(counts, values.shape).sum(0)}
        if key in BEST:
            means[f"best_{key}"] = np.where(counts, values, -np.inf).max(0)
        for name, of_image in means.items():
            # Contributions to a number of the corpus, which may leave [0, 1], have the bootstrap's interval.
            of_corpus = any(row.get(f"{key}_ci_method") == "bootstrap" for row in rows)
            if key in _SHARES and (not of_corpus or not of_image.any() or (of_image == 1).all()):
                bounds = proportion_interval(of_image, groups=groups)
            elif of_corpus:
                bounds = bootstrap_interval(of_image, groups=groups, seed=seed)
            else:
                bounds = mean_interval(of_image, groups=groups)
            if len(rows) > 1 or name != key:
                limits = (0.0, 1.0) if key in _SHARES else (-np.inf, np.inf)
                merged |= {name: float(of_image.mean())} | Interval(np.clip(bounds, *limits), bounds.method).entries(
                    name
                )
            merged["per_sample"][name] = of_image
            merged["groups"] |= {} if groups is None else {name: groups}
    merged |= {f"best_{key}": None for key in BEST if key in merged and f"best_{key}" not in merged}
    reasons = {f"best_{key}_reason": merged[f"{key}_reason"] for key in BEST if f"{key}_reason" in merged}
    return merged | reasons


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
