"""The selected checkpoint, its metric and ties: printed at the end of training and stored with the model."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["SELECTION_FILE", "conclude_selection", "note_collapse", "note_selection", "selection_lines"]

logger = logging.getLogger(__name__)

SELECTION_FILE = "selected_checkpoint.json"
"""File in the folder of the saved model."""


def _describe(
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


def _sentence(selection: dict[str, Any]) -> str:
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
    lines = [_sentence(selection)]
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


def note_selection(trainer: Any, kept_instead: str | None = None) -> None:
    """Print and store the selection; `kept_instead` says which other weights the model has, and why."""
    trainer.selection = _describe(trainer.args, trainer.state, kept_instead, _guard_facts(trainer))
    if trainer.state.is_world_process_zero:
        print(_sentence(trainer.selection))


def note_collapse(trainer: Any, reason: str) -> None:
    """Record and warn that the weights must not be delivered."""
    trainer.collapsed = reason
    kept = f"the weights of step {trainer.state.global_step} are kept"
    selection = trainer.selection or _describe(trainer.args, trainer.state, kept, _guard_facts(trainer))
    trainer.selection = {**selection, "collapsed": reason}
    if trainer.state.is_world_process_zero:
        logger.warning("The captions have collapsed. Do not use this model. %s", reason)


def conclude_selection(trainer: Any) -> None:
    """After training, report a selection that was not loaded, and whether the captions of the model have collapsed."""
    args, state = trainer.args, trainer.state
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    step, guard = state.global_step, _guard_facts(trainer)
    if trainer.selection is None and strategy == "best" and state.best_model_checkpoint is not None:
        is_last = state.best_global_step == step
        note_selection(
            trainer,
            None if is_last else f"load_best_model_at_end is False, and the weights of step {step} are kept",
        )
    elif trainer.selection is None and guard is not None and (guard["trips"] or guard["refused"]):
        back = next((trip["rolled_back_to"] for trip in guard["trips"] if trip["rolled_back_to"]), None)
        kept = f"the weights of step {step} are kept" if back is None else f"the guard rolled back to {back}"
        why = "load_best_model_at_end is False"
        if args.load_best_model_at_end:
            why = f"the guard refused {len(guard['refused'])} evaluations and accepted none"
        note_selection(trainer, f"{why}, and {kept}")
    is_loaded = trainer.selection is not None and "kept_instead" not in trainer.selection
    if trainer.guard is not None and not is_loaded:
        reason = trainer.guard.fault_of_kept_weights(args, state)
        if reason is not None:
            note_collapse(trainer, reason)


def _guard_facts(trainer: Any) -> dict[str, Any] | None:
    return None if trainer.guard is None else trainer.guard.facts()
