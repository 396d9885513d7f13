"""Evaluates the captions of a recipe: the rows of its table."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets

from hf_captionrl.evaluate_modules.inputs import load_language_model
from hf_captionrl.evaluation.arguments import EvaluationArguments, optional_scorer
from hf_captionrl.metrics import caption_perplexity, self_retrieval
from hf_captionrl.metrics.suites import smile_suite
from hf_captionrl.metrics.suites.suite_row import spoken
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
        seed: Of bootstrap and random choice.
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
        self.references: list[list[str]] = [list(c) for c in dataset["captions"]]
        columns = dataset.column_names
        self.facts = list(dataset["facts"]) if "facts" in columns else None
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
        self.image_features = (
            None if held_out_scorer is None else scorer_features(held_out_scorer, dataset, cache_dir=cache_dir)
        )
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
    ) -> Evaluator:
        """Load the models that evaluate, and compute the features of the test images.

        Args:
            dataset: The test split.
            arguments: Names of the models, after `resolve`.
            seed: Of bootstrap and random choice.
            cache_dir: Folder of the feature cache; None for the default one.
            reward_scorer: Scorer of the reward, whose retrieval is shown beside the held-out scorer's; None for none.

        Returns:
            [`Evaluator`]: Ready to evaluate captions.
        """
        language_model = None
        name = arguments.perplexity_name_or_path
        if name and name != "none":
            language_model = load_language_model(name)
        return cls(
            dataset,
            optional_scorer(arguments.held_out_scorer_name_or_path),
            language_model,
            seed=seed,
            cache_dir=cache_dir,
            reward_scorer=reward_scorer,
            learning_curves=arguments.learning_curves,
        )

    def row(self, name: str, captions: Sequence[str], references: list[list[str]] | None = None) -> dict[str, Any]:
        """One row of the table.

        Args:
            name: Name of the row.
            captions: One caption per test image.
            references: Used instead of all references of the test split.

        Returns:
            `dict`: Name and numbers, see `smile_suite`.
        """
        # Without the papers' prefix "A photo depicts": scorers of the embedded world were trained without it.
        text = None
        if self.held_out_scorer is not None:
            text = self.held_out_scorer.text_features(spoken(captions))
        numbers = smile_suite(
            captions,
            references=references or self.references,
            text_features=text,
            image_features=self.image_features,
            perplexity=self.perplexity,
            facts=self.facts,
            check=check if self.facts is not None else None,
            bags=self.bags,
            seed=self.seed,
        )
        if "ranks" in numbers:
            self.ranks[name] = numbers.pop("ranks")
        numbers["degenerate"] = sum(degenerate(captions)) / max(len(captions), 1)
        return {"name": name, **numbers, **self._by_the_reward(captions)}

    def _by_the_reward(self, captions: Sequence[str]) -> dict[str, Any]:
        """Retrieval by the reward scorer."""
        if self.reward_scorer is None:
            return {}
        text, images = self.reward_scorer.text_features(spoken(captions)), self.reward_image_features
        numbers: dict[str, Any] = {}
        if len(captions) >= 100:
            found = self_retrieval(text, images, num_distractors=99, ks=(1,))
            numbers["reward_rd100_recall_at_1"] = float(found["recall_at_1"])
        else:
            numbers |= {"reward_rd100_recall_at_1": None, "reward_rd100_recall_at_1_reason": "fewer than 100 images"}
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
        captions, others = draw_references(self.references, self.seed)
        if all(others):
            return self.row("references", captions, others), captions
        row = self.row("references", captions)
        for key in ("cider_d", "emscore_references"):
            if row.get(key) is not None:
                row |= {key: None, f"{key}_reason": "an image has only one reference"}
                row.pop(f"{key}_ci", None)
        return row, captions


def draw_references(references: Sequence[Sequence[str]], seed: int) -> tuple[list[str], list[list[str]]]:
    """One random reference per image, and the other references of each image (SMILE, Table 1)."""
    rng = random.Random(seed)
    chosen = [rng.randrange(len(group)) if group else 0 for group in references]
    captions = [group[i] if group else "" for group, i in zip(references, chosen, strict=True)]
    others = [[c for j, c in enumerate(group) if j != i] for group, i in zip(references, chosen, strict=True)]
    return captions, others
