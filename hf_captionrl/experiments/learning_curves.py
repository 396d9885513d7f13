"""Learning curves of a run: captions of the test split, measured at every evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import datasets
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_captionrl.evaluation.evaluator import Evaluator
from hf_captionrl.reports.curves import CURVES
from hf_captionrl.trainers import CaptionTrainer

__all__ = ["LearningCurve", "curve_point", "curve_points", "measured"]

_PREFIX = "test_"


def measured(name: str, captions: list[str], evaluator: Evaluator, trainer: CaptionTrainer) -> dict[str, Any]:
    """The row of a captioner, which also captions the images of bags that are not in the test split.

    Args:
        name (`str`): Its row.
        captions (`list[str]`): Of the test split.
        evaluator ([`Evaluator`]): Computes the row.
        trainer ([`CaptionTrainer`]): Has the captioner.

    Returns:
        `dict`: The row.
    """
    more = [] if evaluator.bag_images is None else trainer.generate_captions(evaluator.bag_images)
    return evaluator.row(name, captions, more_captions=more)


class LearningCurve(TrainerCallback):
    """Measures captions of the test split at every evaluation; selects nothing.

    The points are in `trainer.state.log_history`, so a resumed run has those before the interruption.
    """

    def __init__(self, trainer: CaptionTrainer, evaluator: Evaluator, test: datasets.Dataset) -> None:
        self.trainer = trainer
        self.evaluator = evaluator
        self.test = test

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        captions = self.trainer.generate_captions(self.test)
        row = measured("learning curve", captions, self.evaluator, self.trainer)
        point = {f"{_PREFIX}{key}": value for key, value in curve_point(row).items()}
        state.log_history.append({**point, "step": state.global_step, "epoch": state.epoch})


def curve_point(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a results row that a learning curve shows, and CIDEr-D against the references of `test_references`."""
    keys = [*(key for key, _ in CURVES), "more_cider_d"]
    return {key: row[key] for key in keys if row.get(key) is not None}


def curve_points(first: Mapping[str, Any], state: TrainerState) -> list[dict[str, float]]:
    """A run's points: the row of the captioner that it starts from, and one per evaluation."""
    points = [{**curve_point(first), "step": 0, "epoch": 0.0}]
    for entry in state.log_history:
        if f"{_PREFIX}length" in entry:
            found = {key.removeprefix(_PREFIX): value for key, value in entry.items() if key.startswith(_PREFIX)}
            points.append({**found, "step": entry["step"], "epoch": entry["epoch"] or 0.0})
    return points
