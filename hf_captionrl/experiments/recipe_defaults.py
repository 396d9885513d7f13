"""Defaults of training arguments that several recipes share; base classes before the trainer's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_captionrl.trainers.caption_rl_config import CaptionRLConfig
from hf_captionrl.trainers.exact_resume import ExactResumeArguments

__all__ = ["EvaluateEveryEpoch", "GuardedRecipe", "RecipeDefaults", "SaveEveryEpoch", "output_folder", "with_default"]


def with_default(config: type[Any], name: str, default: Any) -> Any:
    """A field of a configuration with another default and the same help text."""
    return field(default=default, metadata=config.__dataclass_fields__[name].metadata)


def output_folder(recipe: str) -> Any:
    """The field `output_dir` of a recipe."""
    return field(default=f"outputs/{recipe}", metadata={"help": "Folder for all output."})


@dataclass
class RecipeDefaults:
    """Defaults of every recipe."""

    save_on_signal: bool = with_default(ExactResumeArguments, "save_on_signal", True)


@dataclass
class SaveEveryEpoch(RecipeDefaults):
    """Defaults of recipes that save every epoch."""

    save_strategy: str = field(default="epoch", metadata={"help": "When to save: 'no', 'steps' or 'epoch'."})
    save_total_limit: int | None = field(
        default=1, metadata={"help": "Number of checkpoints to keep, in addition to the best one."}
    )


@dataclass
class EvaluateEveryEpoch(SaveEveryEpoch):
    """Defaults of recipes that also evaluate every epoch."""

    eval_strategy: str = field(default="epoch", metadata={"help": "When to evaluate: 'no', 'steps' or 'epoch'."})


@dataclass
class GuardedRecipe(EvaluateEveryEpoch):
    """Defaults of recipes that train with rewards."""

    guard: str = with_default(CaptionRLConfig, "guard", "rollback")
    load_best_model_at_end: bool | None = field(
        default=None,
        metadata={
            "help": "Select the checkpoint with the best R@1 on the validation split, by the reward scorer. None: yes, if every "
            "checkpoint is evaluated."
        },
    )

    def __post_init__(self) -> None:
        if self.load_best_model_at_end is None:
            evaluates, saves = (
                str(getattr(value, "value", value)) for value in (self.eval_strategy, self.save_strategy)
            )
            self.load_best_model_at_end = evaluates == saves != "no"
        super().__post_init__()  # type: ignore[misc]
