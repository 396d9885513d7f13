"""What the guard does in a training: it warns, stops or rolls back, and refuses evaluations with degenerate captions."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_captionrl.trainers.completion_statistics import completion_statistics
from hf_captionrl.trainers.reward_hacking import GUARD_ACTIONS, RewardHackingGuard

__all__ = ["GuardCallback"]

logger = logging.getLogger(__name__)


class GuardCallback(TrainerCallback):
    """Acts when the guard detects hacking, and records which checkpoints are good.

    `action` is `warn`, `stop`, or `rollback`: load the weights of the newest good checkpoint, `rolled_back_to`, then
    stop. `trips` says when a limit was broken, `refused` which evaluations select no checkpoint.
    """

    def __init__(self, guard: RewardHackingGuard, action: str = "warn", trainer: Any | None = None) -> None:
        if action not in GUARD_ACTIONS or action == "off":
            allowed = tuple(a for a in GUARD_ACTIONS if a != "off")
            raise ValueError(f"action is {action!r}. Use one of {allowed}; leave the callback out for no guard.")
        self.guard = guard
        self.action = action
        self.trainer = trainer
        self.rolled_back_to: str | None = None
        self.trips: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []
        self._against: list[str] = []  # reasons against the captions of the current evaluation
        self._good: list[int] = []  # steps of checkpoints, ascending
        self._tripped = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget an earlier training, and mark the resumed checkpoint as good if it was; its state was saved before that."""
        self.rolled_back_to = None  # another train() of the same trainer may save again
        if state.global_step == 0:
            self.load_state_dict({})
        self.on_save(args, state, control, **kwargs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Mark the new checkpoint as good if no limit is broken."""
        # After a resume from an earlier step, later checkpoints belong to the previous attempt.
        self._good = [step for step in self._good if step < state.global_step]
        if state.global_step > 0 and self.guard.healthy and self.refusal(state.global_step) is None:
            self._good.append(state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Warn, stop or roll back if a limit is broken."""
        reason = self.guard.reason
        tripped, self._tripped = self._tripped, reason is not None
        # A run that was stopped and resumes stops again.
        if reason is None or (tripped and self.action == "warn"):
            return
        message = f"Step {state.global_step}: the reward seems to be hacked. {reason}"
        if self.action == "rollback":
            message += f" {self._roll_back(args, control)}"
        elif self.action == "stop":
            message += " Training stops."
        if self.action != "warn":
            control.should_training_stop = True
        name = None if self.rolled_back_to is None else Path(self.rolled_back_to).name
        self.trips.append({"step": state.global_step, "reason": reason, "action": self.action, "rolled_back_to": name})
        if state.is_world_process_zero:
            logger.warning(message)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prevent what `"epoch"` strategies would cause at the stop after a rollback."""
        if self.rolled_back_to is not None:
            self._skip_this_step(control)

    @staticmethod
    def _skip_this_step(control: TrainerControl) -> None:
        # A checkpoint of this step would combine the old weights with the optimizer of the hacked policy, and its
        # evaluation would be that of another step.
        control.should_save = control.should_evaluate = False

    def _roll_back(self, args: TrainingArguments, control: TrainerControl) -> str:
        """Load the newest good checkpoint that still exists; returns a sentence for the log."""
        if self.trainer is None:
            raise RuntimeError("action='rollback' needs the trainer. Pass trainer=..., or set callback.trainer to it.")
        folders = [Path(args.output_dir) / f"checkpoint-{step}" for step in reversed(self._good)]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        if folder is None:
            return (
                "No checkpoint was saved while the captions were good (or save_total_limit removed it), so the policy is "
                "unchanged. Training stops. Lower save_steps next time."
            )
        self.trainer._load_from_checkpoint(str(folder))
        self.rolled_back_to = str(folder)
        self._skip_this_step(control)
        return f"The policy was rolled back to {folder.name}, the newest good checkpoint. Training stops."

    # Evaluations

    def begin_evaluation(self) -> None:
        """Forget the captions of the last evaluation."""
        self._against = []

    def check_captions(self, captions: Sequence[str], ended: Any | None = None) -> dict[str, float]:
        """Check the captions of one evaluated data set, as they were generated; returns `degenerate` and `clipped_ratio`."""
        if not captions:
            return {}
        reason = self.guard.reason_against(captions, ended)
        if reason is not None:
            self._against.append(reason)
        found = completion_statistics(captions, ended=ended)
        return {name: found[name] for name in ("degenerate", "clipped_ratio") if name in found}

    def accepts(self, step: int) -> bool:
        """Whether the evaluation of this step may select its checkpoint; a refused one is recorded."""
        reason = next(iter(self._against), None) or self.guard.doubt
        if reason is None:
            return True
        self.refused.append({"step": step, "reason": reason})
        if self.trainer is None or self.trainer.is_world_process_zero():
            logger.warning("Step %d: this evaluation is refused and selects no checkpoint. %s", step, reason)
        return False

    def refusal(self, step: int) -> str | None:
        """Why the evaluation of a step was refused; None if it was not."""
        return next((entry["reason"] for entry in self.refused if entry["step"] == step), None)

    def fault_of_kept_weights(self, args: TrainingArguments, state: TrainerState) -> str | None:
        """Why weights that no evaluation selected must not be delivered; None if they may."""
        if args.load_best_model_at_end and state.best_model_checkpoint is None and self.refused:
            return str(self.refused[-1]["reason"])
        if self.rolled_back_to is not None:
            return None
        return self.refusal(state.global_step) or self.guard.doubt

    def facts(self) -> dict[str, Any]:
        """Action, trips and refused evaluations, for `selected_checkpoint.json` and reports."""
        return {"action": self.action, "trips": list(self.trips), "refused": list(self.refused)}

    def state_dict(self) -> dict[str, Any]:
        """State for an exact resume, that of the guard included."""
        return {
            "guard": self.guard.state_dict(),
            "good": list(self._good),
            "tripped": self._tripped,
            "trips": list(self.trips),
            "refused": list(self.refused),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; an empty one is that of a new training."""
        self.guard.load_state_dict(state.get("guard", {}))
        self._good = [int(step) for step in state.get("good", [])]
        self._tripped = bool(state.get("tripped", False))
        self.trips = [dict(entry) for entry in state.get("trips", [])]
        self.refused = [dict(entry) for entry in state.get("refused", [])]
