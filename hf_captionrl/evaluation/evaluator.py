"""Evaluates the captions of a recipe: the rows of its table."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from hf_captionrl.data.arrow_columns import MappedRows, caption_column
from hf_captionrl.evaluate_modules.inputs import load_language_model
from hf_captionrl.evaluation.arguments import EvaluationArguments, clip_prefix, optional_scorer
from hf_captionrl.evaluation.image_pools import bags_and_images, joined_images, pool_images
from hf_captionrl.evaluation.paper_columns import (
    MORE_REFERENCES,
    more_columns,
    paper_numbers,
    references_numbers,
    reward_numbers,
)
from hf_captionrl.metrics import caption_perplexity, self_retrieval
from hf_captionrl.metrics.suites import smile_suite
from hf_captionrl.metrics.suites.suite_row import spoken
from hf_captionrl.reports.table import Column
from hf_captionrl.retrieval import Scorer
from hf_captionrl.scenes import BAG_SIZES, bags, check
from hf_captionrl.text.degenerate_captions import degenerate
from hf_captionrl.trainers.caption_generation import scorer_features

__all__ = ["Evaluator"]


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
            others = MappedRows(drawn, lambda _, group: group[1:])
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
    """The references of each image, a random one first (SMILE, Table 1); computed when they are read."""
    rng = random.Random(seed)
    sizes = map(len, references)
    chosen = np.fromiter((rng.randrange(size) if size else 0 for size in sizes), np.int64, len(references))
    return MappedRows(references, lambda row, group: _moved_first(group, int(chosen[row])))


def _moved_first(group: list[str], place: int) -> list[str]:
    return group[place : place + 1] + group[:place] + group[place + 1 :]


def _first(drawn: Sequence[list[str]]) -> list[str]:
    """The first reference of each image; empty if it has none."""
    return [group[0] if group else "" for group in drawn]


def _text_features(scorer: Scorer, captions: Sequence[str], prefix: str = "") -> torch.Tensor:
    """On the CPU, where the cached features of the images are, `(N, D)`."""
    return scorer.text_features([prefix + caption for caption in spoken(captions)]).cpu()
