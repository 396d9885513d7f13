"""A table of `captionrl evaluate` that needs further models: BLEURT, entailment, and the entropy of a captioner on the captions."""

from __future__ import annotations

import json
import random
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
from hf_captionrl.data.columns import TEXTS, caption_column, id_column, in_arrow
from hf_captionrl.evaluation.options import EvaluationArguments, clip_prefix, optional_scorer
from hf_captionrl.metrics import caption_perplexity, paired_test, self_retrieval
from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.metrics.evaluate_modules.inputs import load_language_model
from hf_captionrl.metrics.evaluate_modules.metric import all_metrics, table_columns
from hf_captionrl.metrics.evaluate_modules.results_columns import MORE_REFERENCES_COLUMNS, by_reward_scorer, variants
from hf_captionrl.metrics.meteor_spice import meteor, spice
from hf_captionrl.metrics.nlg import bleurt, entailment, load_pair_model
from hf_captionrl.metrics.suites import SuiteRow, discritune_suite, ndlb_suite, sle_suite, smile_suite, spoken
from hf_captionrl.metrics.table import Column
from hf_captionrl.metrics.words import length_statistics
from hf_captionrl.retrieval import Scorer
from hf_captionrl.retrieval.bags import load_bags
from hf_captionrl.retrieval.feature_cache import RowLookup
from hf_captionrl.scenes import BAG_SIZES, bags, check
from hf_captionrl.text.degenerate_captions import degenerate
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
    """Bags as rows of the test split followed by other images, and these images.

    `others` may be the validation split; TrueMatch's bags are of both.
    """
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
    """Bags as rows of images with these ids."""
    if not path.exists():
        raise FileNotFoundError(f"There is no file {str(path)!r} with bags. Use a file of `captionrl bags`.")
    if path.is_dir():
        return _rows_of_bags(match_coco_ids(load_published_bags(path), ids), RowLookup(ids))
    if path.suffix == ".parquet":
        return load_bags(path, image_ids=ids).rows(ids)
    shape = f'{path} must hold bags of `captionrl bags`, or {{"3": [["id", "id", "id"], ...]}}, lists by their size'
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{shape}; it is not JSON ({error}).") from None
    if isinstance(value, dict) and "bags" in value:
        return load_bags(path, image_ids=ids).rows(ids)
    if not isinstance(value, dict) or not all(
        size.isdigit() and isinstance(bags, list) and all(isinstance(bag, list) for bag in bags)
        for size, bags in value.items()
    ):
        raise ValueError(f"{shape}.")
    lookup = RowLookup(ids)
    return _rows_of_bags(_checked_bags(path, value, lookup), lookup)


def _rows_of_bags(bags: Mapping[int, list[list[str]]], lookup: RowLookup) -> dict[int, list[list[int]]]:
    rows = iter(lookup.rows([i for group in bags.values() for bag in group for i in bag]).tolist())
    return {size: [list(islice(rows, len(bag))) for bag in group] for size, group in bags.items()}


def _checked_bags(path: Path, value: Mapping[str, Any], lookup: RowLookup) -> dict[int, list[list[str]]]:
    found: dict[int, list[list[str]]] = {}
    strange = set(lookup.missing([str(i) for group in value.values() for bag in group for i in bag]))
    for size, group in value.items():
        for number, bag in enumerate(group):
            names = [str(i) for i in bag]
            if unknown := [name for name in names if name in strange]:
                raise ValueError(
                    f"{path}: bag {number} of size {size} holds image {unknown[0]!r}, which is not used here."
                )
            if not len(names) == len(set(names)) == int(size):
                raise ValueError(
                    f"{path}: bag {number} of size {size} holds {len(names)} images, {len(set(names))} different."
                )
            found.setdefault(int(size), []).append(names)
    return found


# --- Numbers of the tables of individual papers, in addition to those of every results table -------------------------

MORE_REFERENCES = "more_references"
"""Column of the test split with a second set of references, such as HolisticCaps."""

_COLUMNS: dict[str, tuple[Column, ...]] = {
    "discritune": table_columns("blocks_recall_at_1", "bleu_4", "meteor", "spice", short=True),
    "ndlb": table_columns("bleu_4", "ndlb_clip_score", "vocabulary_size", short=True),
    "sle": table_columns("meteor", "spice", short=True),
}
_BY_SCORER = ("blocks_recall_at_1", "ndlb_clip_score")
"""Columns that depend on the scorer; the papers compute them with the scorer of the reward."""


def more_columns(paper: str | None, has_reward_scorer: bool, has_more_references: bool) -> tuple[Column, ...]:
    """Columns of a paper, of its retrieval by the reward scorer, and of a second set of references."""
    found = _COLUMNS[paper] if paper else ()
    if has_reward_scorer:
        found += by_reward_scorer(*(column for column in found if column.key in _BY_SCORER))
    if has_more_references:
        found += MORE_REFERENCES_COLUMNS
    return found


def paper_numbers(paper: str | None, captions: Sequence[str], features: dict[str, Any], seed: int) -> dict[str, Any]:
    """Numbers of `_COLUMNS`, with intervals and reasons.

    `features` has `references`, `text_features` and `image_features` of the suites, of the captions without prefix.
    """
    if paper is None:
        return {}
    if paper == "ndlb":
        found = ndlb_suite(captions, **features, seed=seed)
        found |= {key.replace("clip_score", "ndlb_clip_score"): value for key, value in found.items() if "clip" in key}
    else:
        found = discritune_suite(captions, **features, meteor=meteor, spice=spice, seed=seed)
    wanted = [column.key for column in _COLUMNS[paper]]
    return {key: value for key, value in found.items() if key.removesuffix("_ci").removesuffix("_reason") in wanted}


def reward_numbers(paper: str | None, captions: Sequence[str], text: Any, images: Any) -> dict[str, Any]:
    """The retrieval columns of a paper by the reward scorer, without intervals: `reward_<key>` and reasons."""
    features = {"references": None, "text_features": text, "image_features": images}
    found = paper_numbers(paper, captions, features, seed=0)
    kept = {key for key in found if key.removesuffix("_reason") in _BY_SCORER}
    return {f"reward_{key}": found[key] for key in kept}


def references_numbers(
    captions: Sequence[str], references: Sequence[Sequence[str]] | None, seed: int
) -> dict[str, Any]:
    """`more_cider_d`: CIDEr-D against the second set of references."""
    if references is None:
        return {}
    row = SuiteRow(captions, seed)
    row.cider_d(references)
    return {f"more_{key}": value for key, value in row.numbers.items() if key.startswith("cider_d")}


# --- Evaluates the captions of a recipe: the rows of its table -------------------------------------------------------


class Evaluator:
    """Evaluates captions of the test split, for the table and the gallery.

    Args:
        dataset: The test split.
        held_out_scorer: Scorer that evaluates retrieval, or None.
        language_model: `(model, tokenizer)` for perplexity, or None.
        seed: Seed of the bootstrap and of random choices.
        cache_dir: Folder of the feature cache; None for the default.

        reward_scorer: Scorer of the reward in training, shown beside the held-out scorer; None for none.
        learning_curves: Whether a run is also measured at each of its evaluations.
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
        self.ranks: dict[str, Any] = {}  # row name -> rank of each test image in the whole pool
        self.references: Sequence[list[str]] = caption_column(dataset)
        columns = dataset.column_names
        self.facts = list(dataset["facts"]) if "facts" in columns else None
        self.parts = preference_parts(dataset)
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
        self.reward_image_features = (
            None if reward_scorer is None else scorer_features(reward_scorer, dataset, cache_dir=cache_dir)
        )

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
        """Load the models that evaluate, and compute the features of the test images.

        Args:
            dataset: The test split.
            arguments: Names of the models, after `resolve`.
            seed: Seed of the bootstrap and of random choices.
            cache_dir: Folder of the feature cache; None for the default one.
            reward_scorer: Scorer of the reward, whose retrieval is shown beside the held-out scorer's; None for none.
            splits: All splits, in which the images of `arguments.pool` and `arguments.bags` are found.

        Returns:
            [`Evaluator`]: Ready to evaluate captions.
        """
        language_model = None
        name = arguments.perplexity_name_or_path
        if name and name != "none":
            language_model = load_language_model(name)
        evaluator = cls(
            dataset,
            optional_scorer(arguments.held_out_scorer_name_or_path),
            language_model,
            seed=seed,
            cache_dir=cache_dir,
            reward_scorer=reward_scorer,
            learning_curves=arguments.learning_curves,
        )
        evaluator.arguments = arguments
        evaluator._add_images(splits or {})
        return evaluator

    def _add_images(self, splits: Mapping[str, datasets.Dataset]) -> None:
        """Find the images of `pool` and `bags` in the other splits."""
        others = [rows for name, rows in splits.items() if name != "test"]
        if self.arguments.pool is not None and self.held_out_scorer is not None:
            rest = joined_images(others) if others else self.dataset.select([])
            self.pool_features = self.features_of(pool_images(Path(self.arguments.pool), self.dataset, rest))
        if self.arguments.bags is not None:
            path, validation = Path(self.arguments.bags), splits.get("validation")
            self.bags, self.bag_images = bags_and_images(path, self.dataset, validation)

    def features_of(self, dataset: datasets.Dataset) -> Any:
        """Features of images by the held-out scorer.

        Args:
            dataset (`datasets.Dataset`): M images.

        Returns:
            `torch.Tensor` of shape `(M, D)`: Unit length.
        """
        assert self.held_out_scorer is not None  # nosec B101
        return scorer_features(self.held_out_scorer, dataset, cache_dir=self._cache_dir)

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns in addition to those of every table."""
        return more_columns(self.arguments.paper, self.reward_scorer is not None, self.more_references is not None)

    def row(
        self,
        name: str,
        captions: Sequence[str],
        references: Sequence[list[str]] | None = None,
        *,
        more_captions: Sequence[str] = (),
    ) -> dict[str, Any]:
        """One row of the table.

        Args:
            name: Name of the row.
            captions: One caption per test image.
            references: Used instead of all references of the test split.
            more_captions: One caption per image of `bag_images`.

        Returns:
            `dict`: Name and numbers, see `smile_suite`.
        """
        text = clip_text = None
        prefix = self._clip_prefix()
        if self.held_out_scorer is not None:
            text = _text_features(self.held_out_scorer, captions)
            if prefix:
                clip_text = _text_features(self.held_out_scorer, captions, prefix)
        numbers = smile_suite(
            captions,
            references=references or self.references,
            text_features=text,
            image_features=self.image_features,
            pool_features=self.pool_features,
            clip_features=clip_text,
            clip_prefix=prefix,
            perplexity=self.perplexity,
            facts=self.facts,
            check=check if self.facts is not None else None,
            bags=self.bags if self.bag_images is None else {},
            parts=self.parts,
            seed=self.seed,
        )
        if "ranks" in numbers:
            self.ranks[name] = numbers.pop("ranks")
        numbers["degenerate"] = sum(degenerate(captions)) / max(len(captions), 1)
        if self.arguments.bags is not None:
            numbers |= self._in_bags(self.held_out_scorer, text, self.image_features, more_captions, "")
            sizes = {
                key: None for key in (f"bag_{size}_truth_recall_at_1" for size in BAG_SIZES) if key not in numbers
            }
            numbers |= sizes | {f"{key}_reason": "no facts to check captions with" for key in sizes}
        features = {"references": references or self.references, "text_features": text}
        numbers |= paper_numbers(
            self.arguments.paper, captions, {**features, "image_features": self.image_features}, self.seed
        )
        numbers |= references_numbers(captions, self.more_references, self.seed)
        numbers |= self._by_the_reward(captions, more_captions)
        return {"name": name, **numbers, **self.more_numbers(captions, references)}

    def more_numbers(self, captions: Sequence[str], references: Sequence[list[str]] | None) -> dict[str, Any]:
        """Numbers that a subclass adds to each row.

        Args:
            captions: One caption per test image.
            references: Used instead of all references of the test split; None for those.

        Returns:
            `dict`: Of a table's columns.
        """
        return {}

    def _clip_prefix(self) -> str:
        """Text before each caption for CLIPScore."""
        return clip_prefix(self.arguments.clip_prefix, "", self.arguments.held_out_scorer_name_or_path)

    def _in_bags(
        self, scorer: Scorer | None, text: Any, images: Any, more_captions: Sequence[str], prefix: str
    ) -> dict[str, Any]:
        """`<prefix>bag_<size>_recall_at_1` of the bags of a file, whose images may be of another split."""
        keys = {size: f"{prefix}bag_{size}_recall_at_1" for size in sorted({*BAG_SIZES, *self.bags})}
        if scorer is None:
            return dict.fromkeys(keys.values()) | {f"{key}_reason": "no scorer" for key in keys.values()}
        if self.bag_images is not None:
            text = torch.cat([text, _text_features(scorer, more_captions)])
            images = torch.cat([images, scorer_features(scorer, self.bag_images, cache_dir=self._cache_dir)])
        numbers: dict[str, Any] = {}
        for size, key in keys.items():
            if not self.bags.get(size):
                numbers |= {key: None, f"{key}_reason": f"no bags of {size} in {self.arguments.bags}"}
                continue
            found = self_retrieval(text, images, bags=self.bags[size], ks=(1,), seed=self.seed)
            numbers |= {key: float(found["recall_at_1"]), f"{key}_ci": [float(b) for b in found["recall_at_1_ci"]]}
        return numbers

    def _by_the_reward(self, captions: Sequence[str], more_captions: Sequence[str]) -> dict[str, Any]:
        """Retrieval by the reward scorer."""
        if self.reward_scorer is None:
            return {}
        text, images = _text_features(self.reward_scorer, captions), self.reward_image_features
        numbers = reward_numbers(self.arguments.paper, captions, text, images)
        if len(captions) >= 100:
            found = self_retrieval(text, images, num_distractors=99, ks=(1,))
            numbers["reward_rd100_recall_at_1"] = float(found["recall_at_1"])
        else:
            numbers |= {"reward_rd100_recall_at_1": None, "reward_rd100_recall_at_1_reason": "fewer than 100 images"}
        if self.arguments.bags is not None:
            return numbers | self._in_bags(self.reward_scorer, text, images, more_captions, "reward_")
        for size, members in self.bags.items():
            found = self_retrieval(text, images, bags=members, ks=(1,))
            numbers[f"reward_bag_{size}_recall_at_1"] = float(found["recall_at_1"])
        return numbers

    def reference_row(self) -> tuple[dict[str, Any], list[str]]:
        """The human row: one random reference per image, compared with the others.

        If an image has only one reference, CIDEr-D is None, with the reason.

        Returns:
            `tuple[dict, list[str]]`: The row, and the chosen references.
        """
        drawn = draw_references(self.references, self.seed)
        captions, more = _first(drawn), list[str]()
        if self.bag_images is not None:
            more = _first(draw_references(caption_column(self.bag_images), self.seed))
        if all(len(group) > 1 for group in drawn):
            others = in_arrow((group[1:] for group in drawn), TEXTS)
            return self.row("references", captions, others, more_captions=more), captions
        row = self.row("references", captions, more_captions=more)
        for key in ("cider_d", "emscore_references"):
            if row.get(key) is not None:
                row |= {key: None, f"{key}_reason": "an image has only one reference"}
                row.pop(f"{key}_ci", None)
        return row, captions


def preference_parts(dataset: datasets.Dataset) -> dict[str, list[bool]]:
    """Which images follow the preferences of the embedded world and which go against them; empty for other data."""
    if "against_preferences" not in dataset.column_names:
        return {}
    against = list(dataset["against_preferences"])
    return {"with_preferences": [not value for value in against], "against_preferences": against}


def draw_references(references: Sequence[list[str]], seed: int) -> Sequence[list[str]]:
    """The references of each image, a random one first (SMILE, Table 1)."""
    rng = random.Random(seed)
    sizes = map(len, references)
    chosen = np.fromiter((rng.randrange(size) if size else 0 for size in sizes), np.int64, len(references))
    return in_arrow(map(_moved_first, references, chosen.tolist()), TEXTS)


def _moved_first(group: list[str], place: int) -> list[str]:
    return group[place : place + 1] + group[:place] + group[place + 1 :]


def _first(drawn: Sequence[list[str]]) -> list[str]:
    """The first reference of each image; empty if it has none."""
    return [group[0] if group else "" for group in drawn]


def _text_features(scorer: Scorer, captions: Sequence[str], prefix: str = "") -> torch.Tensor:
    """On the CPU, where the cached features of the images are, `(N, D)`."""
    return scorer.text_features([prefix + caption for caption in spoken(captions)]).cpu()


# --- The papers' tables: their columns, and how a row is computed from one file of captions --------------------------


@dataclass
class ScoredCaptions:
    """Captions of one captioner, with everything that is computed once."""

    name: str  # name of the captioner
    captions: Sequence[list[str]]  # captions of each image, in the order of the data set
    references: Sequence[list[str]]  # references of each image, for the first caption
    is_human: bool = False  # whether the captions are the references
    text: Tensor | None = None  # features `(N, D)` of each image's first caption, or None
    # The same for CLIPScore, with `clip_prefix` before each caption, or None if the prefix is empty.
    clip_text: Tensor | None = None
    clip_prefix: str = ""  # text before each caption
    scorer: str = ""  # signature of the scorer
    image_ranks: np.ndarray | None = None  # rank of each image among the images, for the first caption, or None
    pool_ranks: np.ndarray | None = None  # the same in the evaluator's pool
    tokens: list[int] | None = None  # number of the scorer's tokens in each first caption, or None
    max_text_tokens: int | None = None  # largest number of tokens that the scorer reads
    # Function from captions to the result of `caption_perplexity`, or None.
    perplexity: Callable[[Sequence[str]], Mapping[str, Any]] | None = None
    # Number of words in each first caption, set by the table of captions.
    lengths: list[int] = field(default_factory=list)

    @property
    def first(self) -> list[str]:
        """The first caption of each image: the best beam."""
        return [group[0] for group in self.captions]

    @cached_property
    def given_references(self) -> Sequence[list[str]] | None:
        """The references if every image has one; metrics of references are left out otherwise."""
        return self.references if all(self.references) else None


@dataclass(frozen=True)
class Table:
    """A paper's table; `compute` maps scored captions and the evaluator to a row with details."""

    title: str
    columns: tuple[Column, ...]
    compute: Callable[[ScoredCaptions, Evaluator], dict[str, Any]]


def _shared(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    """Arguments of every suite with retrieval."""
    return {
        "references": scored.given_references,
        "text_features": scored.text,
        "image_features": evaluator.image_features,
        "scorer": scored.scorer,
        "seed": evaluator.seed,
        "details": True,
        "facts": evaluator.facts,
        "check": check if evaluator.facts is not None else None,
    }


def _smile(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    return smile_suite(
        scored.first,
        pool_features=evaluator.pool_features,
        image_ranks=scored.image_ranks,
        pool_ranks=scored.pool_ranks,
        clip_features=scored.clip_text,
        clip_prefix=scored.clip_prefix,
        perplexity=scored.perplexity,
        **_shared(scored, evaluator),
    )


def _discritune(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    return discritune_suite(scored.first, meteor=meteor, spice=spice, **_shared(scored, evaluator))


def _ndlb(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    return ndlb_suite(scored.first, bags=evaluator.bags, image_ranks=scored.image_ranks, **_shared(scored, evaluator))


def _sle(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    if min(len(group) for group in scored.captions) < 2:
        empty = SuiteRow(scored.first, evaluator.seed)
        empty.missing("one caption per image; this table needs several", *(c.key for c in TABLES["sle"].columns))
        return empty.result(details=True)
    if not scored.is_human:
        return sle_suite(scored.captions, references=scored.given_references, seed=evaluator.seed, details=True)
    row = sle_suite(scored.captions, seed=evaluator.seed, details=True)
    reason = "the references are the captions"
    return row | {"cider_d_reason": reason, "best_cider_d_reason": reason}


def _captions(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    tokens = scored.tokens
    counted = None if tokens is None else iter(tokens)
    found = length_statistics(
        spoken(scored.first),
        count_tokens=None if counted is None else lambda block: list(islice(counted, len(block))),
    )
    scored.lengths = found["words"].tolist()
    row = SuiteRow(scored.first, evaluator.seed)
    row.mean("mean_words", found["words"])
    row.number("std_words", found["std_words"])
    row.number("max_words", found["max_words"])
    if tokens is None:
        row.missing("no scorer, or one that does not count tokens", "mean_tokens", "std_tokens", "captions_truncated")
    else:
        row.mean("mean_tokens", found["tokens"])
        row.number("std_tokens", found["std_tokens"])
        row.mean("captions_truncated", found["tokens"] > (scored.max_text_tokens or np.inf), is_share=True)
    for metric in _CAPTION_METRICS:
        result = metric.compute(spoken(scored.first))
        for column in metric.columns:
            row.mean(column.key, result["per_sample"], signature=result["signature"], is_share=column.is_fraction)
    return row.result(details=True)


def _preferences(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
    shared = _shared(scored, evaluator)
    row = SuiteRow(scored.first, evaluator.seed, scored.scorer)
    if scored.text is not None and evaluator.image_features is not None:
        row.random_distractors((1,), scored.text, evaluator.image_features, scored.image_ranks)
    row.faithfulness(shared["facts"], shared["check"])
    row.parts(evaluator.parts)
    return row.result(details=True)


_FAITHFULNESS = ("hallucination", "fact_recall")


TABLES: dict[str, Table] = {
    "smile": Table(
        "SMILE",
        table_columns(
            *("length", "lexical_diversity", "pool_recall_at_1", "pool_recall_at_5", "rd100_recall_at_1"),
            *("rd100_recall_at_5", "clip_score", "perplexity", "cider_d", *_FAITHFULNESS),
        ),
        _smile,
    ),
    "discritune": Table(
        "DiscriTune",
        table_columns("blocks_recall_at_1", "bleu_4", "meteor", "cider_d", "spice", *_FAITHFULNESS),
        _discritune,
    ),
    "sle": Table(
        "SLE (several captions per image)",
        (
            *table_columns("captions_per_image"),
            replace(*table_columns("cider_d"), header="CIDEr-D, mean over an image's captions"),
            *table_columns("best_cider_d", "div_1", "div_2", "mbleu_4_per_image", "mbleu_4", "unique_captions"),
        ),
        _sle,
    ),
    "ndlb": Table(
        "No Detail Left Behind",
        (
            *table_columns(
                "bag_3_recall_at_1", "bag_5_recall_at_1", "bag_7_recall_at_1", "rd100_recall_at_1", "bleu_4"
            ),
            *table_columns("cider_d"),
            replace(*table_columns("ndlb_clip_score"), key="clip_score"),
            *table_columns("vocabulary_size", *_FAITHFULNESS),
        ),
        _ndlb,
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

_CAPTION_METRICS = [metric for metric in all_metrics().values() if metric.in_captions_table]

CAPTIONS_TABLE = Table(
    "Captions",
    (
        Column("mean_words", "Words, mean", None, digits=2),
        Column("std_words", "Words, standard deviation", None, digits=2),
        Column("max_words", "Words, longest", None, digits=0),
        Column("mean_tokens", "Scorer's tokens, mean", None, digits=2),
        Column("std_tokens", "Scorer's tokens, standard deviation", None, digits=2),
        Column("captions_truncated", "Truncated at the scorer's text limit", "lower", is_fraction=True),
        Column("empty_captions", "Empty captions", "lower", digits=0),
        *(column for metric in _CAPTION_METRICS for column in metric.columns),
    ),
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


# --- A table of `captionrl evaluate` that needs further models: BLEURT, entailment, and the entropy of a captioner on the captions ---


def learned_table(bleurt_name: str | None, nli_name: str | None, captioner_name: str | None) -> Table | None:
    """The table of the named models, which are loaded immediately; None if no model is named.

    Raises FileNotFoundError without weights, and ValueError for a model of another kind.
    """
    numbers: dict[str, Callable[[ScoredCaptions, Evaluator], dict[str, Any]]] = {}
    if bleurt_name is not None:
        numbers["bleurt"] = _by_references(bleurt, _loaded(bleurt_name, "--bleurt"))
    if nli_name is not None:
        numbers["entailment"] = _by_references(entailment, _loaded(nli_name, "--nli"))
    if captioner_name is not None:
        captioner = load_captioner(model_path(captioner_name))

        def entropy(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
            images = LazyImages(evaluator.dataset, range(len(scored.captions)))
            found = caption_entropy(captioner, images, spoken(scored.first))
            return found | {"signature": signature(metric="caption_entropy", family=captioner.family)}

        numbers["caption_entropy"] = entropy

    columns = table_columns(*numbers)

    def compute(scored: ScoredCaptions, evaluator: Evaluator) -> dict[str, Any]:
        row = SuiteRow(scored.first, evaluator.seed)
        for column, number in zip(columns, numbers.values(), strict=True):
            if column.key != "caption_entropy" and scored.given_references is None:
                row.missing("an image has no reference", column.key)
                continue
            found = number(scored, evaluator)
            row.mean(column.key, found["per_sample"], signature=found["signature"], is_share=column.is_fraction)
        return row.result(details=True)

    return Table("Learned metrics", columns, compute) if numbers else None


def _loaded(name: str, option: str) -> Any:
    try:
        return load_pair_model(name)
    except RuntimeError as error:
        raise FileNotFoundError(f"{option}: {str(error).removeprefix('not run: ')}") from error


def _by_references(metric: Any, model: Any) -> Callable[[ScoredCaptions, Evaluator], dict[str, Any]]:
    return lambda scored, _: metric(spoken(scored.first), scored.references, model=model)
