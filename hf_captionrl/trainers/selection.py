"""The selected checkpoint, its metric and ties: printed at the end of training and stored with the model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hf_captionrl.io import write_json

__all__ = ["SELECTION_FILE", "CheckpointSelection", "describe_selection", "selection_lines", "selection_sentence"]

logger = logging.getLogger(__name__)

SELECTION_FILE = "selected_checkpoint.json"
"""File in the folder of the saved model."""


def describe_selection(
    args: Any, state: Any, kept_instead: str | None = None, guard: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The checkpoint with the best metric; `guard` is what `GuardCallback.facts` returns."""
    metric = args.metric_for_best_model
    metric = metric if metric is None or str(metric).startswith("eval_") else f"eval_{metric}"
    refused = {entry["step"] for entry in (guard or {}).get("refused", ())}
    # An evaluation before the first step has no checkpoint.
    values = {
        e["step"]: e[metric]
        for e in state.log_history
        if metric in e and e.get("step", 0) > 0 and e["step"] not in refused
    }
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
    found |= {} if kept_instead is None else {"kept_instead": kept_instead}
    return found if guard is None else {**found, "guard": guard}


def selection_sentence(selection: dict[str, Any]) -> str:
    """One line for the terminal."""
    instead = selection.get("kept_instead")
    if selection["step"] is None:
        return f"No checkpoint was selected: {instead}."
    best = "highest" if selection["greater_is_better"] else "lowest"
    value = "?" if selection["value"] is None else f"{selection['value']:.6g}"
    ties = selection["ties"]
    tied = f"{len(ties)} tied (steps {', '.join(map(str, ties))}): the earliest is taken" if ties else "no ties"
    text = (
        f"checkpoint-{selection['step']}: {selection['metric']} = {value}, the {best} of {selection['evaluations']} "
        f"evaluations; {tied}."
    )
    return f"Selected {text}" if instead is None else f"Best was {text} It was not loaded: {instead}."


def selection_lines(selection: dict[str, Any]) -> list[str]:
    """The sentence, and one for each time the guard tripped or refused an evaluation."""
    lines = [selection_sentence(selection)]
    guard = selection.get("guard") or {"trips": [], "refused": []}
    for trip in guard["trips"]:
        outcome = {"warn": "Training continued.", "stop": "Training stopped.", "rollback": "Training stopped."}
        back = trip["rolled_back_to"]
        lines.append(
            f"Step {trip['step']}: the guard tripped. {trip['reason']} "
            + (outcome[trip["action"]] if back is None else f"The weights were rolled back to {back}.")
        )
    lines += [f"Step {e['step']}: the guard refused the evaluation. {e['reason']}" for e in guard["refused"]]
    if selection.get("collapsed"):
        lines.append(f"The captions have collapsed, so this model is not delivered. {selection['collapsed']}")
    return lines


class CheckpointSelection:
    """Mixin of trainers that reports the selected checkpoint.

    Attributes:
        selection (`dict`, *optional*): Of [`describe_selection`], after a training with `load_best_model_at_end` or
            `save_strategy="best"`, or in which the guard tripped or refused an evaluation.
        collapsed (`str`, *optional*): Why the weights after training must not be delivered; None if they may.
        selecting_scorer ([`Scorer`], *optional*): Scorer of `reward_recall_at_1`, where `scorer` is held out and must not
            select.
    """

    args: Any
    state: Any
    selection: dict[str, Any] | None = None
    collapsed: str | None = None
    selecting_scorer: Any = None

    def judge_captions(self, captions: list[str], ended: list[bool] | None = None) -> dict[str, float]:
        """Check the captions of an evaluation.

        Args:
            captions (`list[str]`): As generated.
            ended (`list[bool]`, *optional*): False where the length limit truncated a caption.

        Returns:
            `dict[str, float]`: More metrics; with a guard `degenerate` and `clipped_ratio`.
        """
        return {}

    def reason_against(self, captions: list[str]) -> str | None:
        """Why a model that generates these captions must not be delivered.

        Args:
            captions (`list[str]`): As they will be written.

        Returns:
            `str`, *optional*: One sentence; None if the guard accepts them.
        """
        return None

    def guard_facts(self) -> dict[str, Any] | None:
        """What the guard did.

        Returns:
            `dict`, *optional*: `action`, `trips` and `refused` of [`GuardCallback`]; None without a guard.
        """
        return None

    def fault_of_kept_weights(self) -> str | None:
        """Why the weights after training must not be delivered.

        Returns:
            `str`, *optional*: One sentence; None if they may.
        """
        return None

    def note_selection(self, kept_instead: str | None = None) -> None:
        """Print and store the selection.

        Args:
            kept_instead (`str`, *optional*): Which other weights the model has, and why.
        """
        self.selection = describe_selection(self.args, self.state, kept_instead, self.guard_facts())
        if self.state.is_world_process_zero:
            print(selection_sentence(self.selection))

    def note_collapse(self, reason: str) -> None:
        """Record and warn that the weights must not be delivered.

        Args:
            reason (`str`): One sentence.
        """
        self.collapsed = reason
        kept = f"the weights of step {self.state.global_step} are kept"
        selection = self.selection or describe_selection(self.args, self.state, kept, self.guard_facts())
        self.selection = {**selection, "collapsed": reason}
        if self.state.is_world_process_zero:
            logger.warning("The captions have collapsed. Do not use this model. %s", reason)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; report the selected checkpoint, and whether the captions of the model have collapsed.

        Args:
            args (`Any`): For the Trainer.
            kwargs (`Any`): For the Trainer.

        Returns:
            `TrainOutput`: Of the Trainer.
        """
        self.selection = self.collapsed = None
        output = super().train(*args, **kwargs)  # type: ignore[misc]
        strategy = getattr(self.args.save_strategy, "value", self.args.save_strategy)
        step, guard = self.state.global_step, self.guard_facts()
        if self.selection is None and strategy == "best" and self.state.best_model_checkpoint is not None:
            is_last = self.state.best_global_step == step
            self.note_selection(
                None if is_last else f"load_best_model_at_end is False, and the weights of step {step} are kept"
            )
        elif self.selection is None and guard is not None and (guard["trips"] or guard["refused"]):
            back = next((trip["rolled_back_to"] for trip in guard["trips"] if trip["rolled_back_to"]), None)
            kept = f"the weights of step {step} are kept" if back is None else f"the guard rolled back to {back}"
            why = "load_best_model_at_end is False"
            if self.args.load_best_model_at_end:
                why = f"the guard refused {len(guard['refused'])} evaluations and accepted none"
            self.note_selection(f"{why}, and {kept}")
        reason = self.fault_of_kept_weights()
        if reason is not None:
            self.note_collapse(reason)
        return output

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        if self.selection is not None:
            write_json(Path(output_dir or self.args.output_dir) / SELECTION_FILE, self.selection)
