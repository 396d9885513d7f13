"""An orderly stop on a signal: the step is finished, a checkpoint is saved, and the process exits with 0."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__all__ = ["StopOnSignal"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopOnSignal(TrainerCallback):
    """Handles SIGTERM and SIGINT during training; a context manager.

    The stop waits for an evaluation of the step and for the other steps of the same rollout, so that a resumed run is
    bit-exact. A second signal ends the process immediately. With several processes the signal may reach only one; all of
    them stop after the same step.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._saves = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python installs handlers only there
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        self.trainer.add_callback(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.trainer.remove_callback(self)
        self._restore()
        if self.received is not None and kind is None:
            signal.raise_signal(self.received)  # it came after the last step: leave it to the previous handler

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self._restore()
            signal.raise_signal(number)
            return
        self.received = number
        # Not print: the signal may have interrupted one.
        name = signal.Signals(number).name
        text = f"\n{name}: finishing the step and saving a checkpoint. A second signal stops immediately.\n"
        os.write(2, text.encode())

    def _asked(self) -> bool:
        """Whether any process got a signal; every process asks at the same points."""
        asked = self.received is not None
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:
            return asked
        return bool(accelerator.gather(torch.tensor([int(asked)], device=accelerator.device)).max())

    def _maybe_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if not self._asked() or state.global_step == 0:
            return
        if state.global_step % (getattr(args, "num_iterations", None) or 1):
            return  # TRL's checkpoints do not store a rollout in use
        if control.should_training_stop and state.global_step < state.max_steps:
            return  # another callback stops training and decides what is saved
        control.should_save = self._saves = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save after a signal; after the last step of an epoch, wait for its evaluation."""
        epoch = state.epoch or 0.0
        if abs(epoch - round(epoch)) > 1e-6:
            self._maybe_save(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save after a signal that came before or during the evaluation."""
        self._maybe_save(args, state, control)

    on_evaluate = on_epoch_end

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Exit after the checkpoint is saved."""
        if not self._saves:
            return
        if state.is_world_process_zero:
            print(
                f"Stopped after step {state.global_step}; checkpoint-{state.global_step} is saved. "
                "resume_from_checkpoint resumes from it.",
                file=sys.stderr,
            )
        raise SystemExit(0)
