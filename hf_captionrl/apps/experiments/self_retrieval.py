"""Self-retrieval finetuning of any captioner: the code that `recipes/self_retrieval_*.py` share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from hf_captionrl.apps.experiments.arguments import (
    SCORERS,
    DataArguments,
    ModelArguments,
    RecipeDefaults,
    output_folder,
    parse_arguments,
    with_default,
)
from hf_captionrl.apps.experiments.report import (
    Comparison,
    Run,
    alone_in_folder,
    compare_runs,
    is_trained,
    plan_runs,
    prepare,
)
from hf_captionrl.data.columns import concept_column, id_column
from hf_captionrl.evaluation.options import EvaluationArguments
from hf_captionrl.evaluation.similarity import similarity_features
from hf_captionrl.retrieval.bags import load_neighbours
from hf_captionrl.retrieval.neighbours import nearest_neighbours
from hf_captionrl.retrieval.ranking import num_concepts
from hf_captionrl.rewards import WeightedRewards
from hf_captionrl.rewards.base import parse_weighted_reward
from hf_captionrl.trainers import SelfRetrievalConfig, SelfRetrievalTrainer
from hf_captionrl.utils.options import check_values, documented

NUM_NEIGHBOURS = 200


@dataclass
class BagArguments:
    """Nearest neighbours for the bags, and the runs that are compared."""

    neighbours: str | None = documented(None, "File of `captionrl bags --mode neighbours`. None: computed at start.")
    bag_features: Literal["multimodal", "concatenated", "image"] = documented(
        "multimodal",
        "Similarity: of images and captions with equal weights, of both concatenated (paper), or of images.",
    )
    variants: dict[str, Any] | str | None = documented(None, "Further runs: {row name: {argument: value}}.")

    def __post_init__(self) -> None:
        check_values(self)
        for name, changes in self.named_variants.items():
            if not isinstance(changes, Mapping):
                raise ValueError(f"The variant {name!r} is {changes!r}. Use {{argument: value}}.")

    @property
    def named_variants(self) -> dict[str, Any]:
        """The further runs, parsed."""
        try:
            return dict((json.loads(self.variants) if isinstance(self.variants, str) else self.variants) or {})
        except (ValueError, TypeError):
            raise ValueError(f"variants is {self.variants!r}. Use JSON, {{row name: {{argument: value}}}}.") from None


@dataclass
class SelfRetrievalRecipeConfig(RecipeDefaults, SelfRetrievalConfig):  # type: ignore[misc]
    """[`SelfRetrievalConfig`] with the defaults of a recipe: it evaluates every epoch and keeps the best one."""

    output_dir: str | None = output_folder("self_retrieval")
    save_total_limit: int | None = with_default(RecipeDefaults, "save_total_limit", 2)
    guard: Literal["off", "warn", "stop", "rollback"] = with_default(SelfRetrievalConfig, "guard", "rollback")


def parse_args(argv: Sequence[str] | None = None, *, default_config: Path) -> tuple[Any, ...]:
    """Parse the command line."""
    types = (ModelArguments, DataArguments, EvaluationArguments, BagArguments, SelfRetrievalRecipeConfig)
    return parse_arguments(types, argv, default_config=default_config)


_TITLES = {"claim_f1": "claims", "question_oracle": "questions"}


def run_name(config: SelfRetrievalConfig) -> str:
    """Row name of a finetuned captioner."""
    notes = []
    if config.bag_schedule is None:
        scopes = {"hard": f"{config.num_hard_distractors} hard", "bank": f"bank of {config.bank_size}"}
        notes.append(scopes.get(config.distractor_scope, "random"))
    else:
        fixed = str(config.bag_schedule).isdigit()
        kind = " of random images" if config.bag_distractors == "random" else ""
        notes.append((f"bags of {config.bag_schedule}" if fixed else "bag curriculum") + kind)
    if config.retrieval_weight and config.reward_kind != "log_prob":
        notes.append(config.reward_kind)
    if config.retrieval_weight not in (0, 1):
        notes.append(f"SR {config.retrieval_weight:g}")
    if config.cider_weight and config.retrieval_weight:
        notes.append(f"CIDEr {config.cider_weight:g}")
    if config.diversity_weight:
        notes.append(f"diversity {config.diversity_weight:g}")
    for name, fields, _ in map(parse_weighted_reward, config.rewards):
        notes.append(_TITLES.get(name, name) + (" by claim" if fields.get("credit") == "claim" else ""))
    if config.beta:
        notes.append(f"KL {config.beta:g}")
    if config.baseline not in ("running_mean", "batch_mean", "greedy"):
        notes.append(f"baseline {config.baseline}")
    first = "SR" if config.retrieval_weight else "CIDEr" if config.cider_weight else "truth"
    return f"{first} ({', '.join(notes)})"


def runs_of(
    config: SelfRetrievalRecipeConfig, variants: Mapping[str, Mapping[str, Any]]
) -> dict[str, SelfRetrievalRecipeConfig]:
    """The runs by row name: the variants, and last the recipe's own run."""
    own = run_name(config)
    if own in variants:
        raise ValueError(f"The variant {own!r} has the name of the recipe's own run. Use another name.")
    return plan_runs(config, [*variants.items(), (own, {})], run_name)


def main(argv: Sequence[str] | None = None, *, default_config: Path) -> Path:
    """Run the recipe."""
    return compare(parse_args(argv, default_config=default_config))


@alone_in_folder
def compare(arguments: tuple[Any, ...]) -> Path:
    """Train and compare the runs of the recipe."""
    model_args, _, eval_args, bag_args, config = arguments
    for name in SCORERS:
        if getattr(eval_args, name) == "none":
            raise ValueError(f"{name} is 'none', but self-retrieval needs two scorers. Use `captionrl train smile`.")
    is_training = is_trained(config)
    if config.pushes and not is_training:
        raise ValueError("push_to_hub is set, but num_train_epochs=0 only evaluates. Leave push_to_hub out, or train.")
    configs = runs_of(config, bag_args.named_variants if is_training else {})
    splits, scorer, evaluator = prepare(arguments, is_training=is_training)
    scorers = [scorer]
    neighbours = None  # (N, k) rows of training images, most similar first, by the reward scorer
    if is_training and any(c.bag_schedule is not None and c.bag_distractors == "nearest" for c in configs.values()):
        train = splits["train"]
        if bag_args.neighbours is not None:
            signature = getattr(scorer, "signature", None)
            found = load_neighbours(bag_args.neighbours, image_ids=id_column(train), signature=signature)
            neighbours = torch.as_tensor(found.indices)
        else:
            features = similarity_features(  # type: ignore[arg-type]
                train, scorer, bag_args.bag_features, cache_dir=config.feature_cache_dir
            )
            concepts = concept_column(train)
            number = min(NUM_NEIGHBOURS, num_concepts(len(train), concepts) - 1)
            neighbours, _ = nearest_neighbours(features, number, concepts=concepts)

    def make(run: SelfRetrievalRecipeConfig) -> SelfRetrievalTrainer:
        return SelfRetrievalTrainer(
            model_args.load(run.prompt),
            scorers,  # type: ignore[arg-type]
            run,
            # Without training, the rewards need no features of the training images.
            train_dataset=splits["train"] if is_training else None,
            eval_dataset=splits["validation"],
            held_out_scorer=evaluator.held_out_scorer,
            neighbours=neighbours if run.bag_schedule is not None else None,
            peft_config=model_args.peft_config,
        )

    def complete(result: Comparison) -> None:
        if not is_training:
            result.captioner = None  # an evaluation trains no model, so there is no card to write

    return compare_runs(
        [Run(name, run, make) for name, run in configs.items()],
        evaluator,
        arguments,
        splits,
        complete=complete,
        title="Self-retrieval",
        objective={"objective": "self_retrieval", "reward": describe_reward(config, scorers)},
    )


def describe_reward(config: SelfRetrievalConfig, scorers: Sequence[Any]) -> str:
    """One sentence on the reward, for the model card."""
    step = config.per_device_train_batch_size * config.gradient_accumulation_steps
    reward = WeightedRewards(*zip(*config.make_rewards(scorer=scorers), strict=True)).describe()
    names = " and ".join(scorer.signature.split("|")[0] for scorer in scorers)
    scorer = f"; scorer {names}" if config.retrieval_weight else ""
    look_alikes = config.bag_schedule is not None and config.bag_distractors != "random"
    bags = "bags of look-alikes" if look_alikes else "random images"
    return f"{reward[0].upper()}{reward[1:]}{scorer}; batches of {step} images per process, from {bags}."
