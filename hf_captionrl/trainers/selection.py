"""The selected checkpoint, its metric and ties: printed at the end of training and stored with the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_captionrl.io import write_json

__all__ = ["SELECTION_FILE", "CheckpointSelection", "describe_selection", "selection_sentence"]

SELECTION_FILE = "selected_checkpoint.json"
"""File in the folder of the saved model."""


def describe_selection(args: Any, state: Any, kept_instead: str | None = None) -> dict[str, Any]:
    """The checkpoint with the best metric."""
    metric = str(args.metric_for_best_model)
    metric = metric if metric.startswith("eval_") else f"eval_{metric}"
    # An evaluation before the first step has no checkpoint.
    values = {e["step"]: e[metric] for e in state.log_history if metric in e and e.get("step", 0) > 0}
    step = state.best_global_step
    found = {
        "step": step,
        "metric": metric,
        "value": None if state.best_metric is None else float(state.best_metric),
        "greater_is_better": bool(args.greater_is_better),
        "evaluations": len(values),
        "ties": sorted(other for other, value in values.items() if value == state.best_metric and other != step),
        "tie_rule": "earliest",
    }
    return found if kept_instead is None else {**found, "kept_instead": kept_instead}


def selection_sentence(selection: dict[str, Any]) -> str:
    """One line for the terminal."""
    best = "highest" if selection["greater_is_better"] else "lowest"
    value = "?" if selection["value"] is None else f"{selection['value']:.6g}"
    ties = selection["ties"]
    tied = f"{len(ties)} tied (steps {', '.join(map(str, ties))}): the earliest is taken" if ties else "no ties"
    text = (
        f"checkpoint-{selection['step']}: {selection['metric']} = {value}, the {best} of {selection['evaluations']} "
        f"evaluations; {tied}."
    )
    instead = selection.get("kept_instead")
    return f"Selected {text}" if instead is None else f"Best was {text} It was not loaded: {instead}."


class CheckpointSelection:
    """Mixin of trainers that reports the selected checkpoint.

    Attributes:
        selection (`dict`, *optional*): Of [`describe_selection`], after a training with `load_best_model_at_end` or
            `save_strategy="best"`.
    """

    args: Any
    state: Any
    selection: dict[str, Any] | None = None

    def note_selection(self, kept_instead: str | None = None) -> None:
        """Print and store the selection.

        Args:
            kept_instead (`str`, *optional*): Which other weights the model has, and why.
        """
        self.selection = describe_selection(self.args, self.state, kept_instead)
        if self.state.is_world_process_zero:
            print(selection_sentence(self.selection))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; with `save_strategy="best"`, report the best checkpoint at the end.

        Args:
            args (`Any`): For the Trainer.
            kwargs (`Any`): For the Trainer.

        Returns:
            `TrainOutput`: Of the Trainer.
        """
        self.selection = None
        output = super().train(*args, **kwargs)  # type: ignore[misc]
        strategy = getattr(self.args.save_strategy, "value", self.args.save_strategy)
        if self.selection is None and strategy == "best" and self.state.best_model_checkpoint is not None:
            step = self.state.global_step
            is_last = self.state.best_global_step == step
            self.note_selection(
                None if is_last else f"load_best_model_at_end is False, and the weights of step {step} are kept"
            )
        return output

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        if self.selection is not None:
            write_json(Path(output_dir or self.args.output_dir) / SELECTION_FILE, self.selection)
