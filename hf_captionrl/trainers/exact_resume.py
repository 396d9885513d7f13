"""Exact resume for every trainer: sealed checkpoints, a lock on the output folder, orderly stops on signals."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import shutil
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINING_ARGS_NAME

from hf_captionrl.checkpoints.loading import check_checkpoint, check_kwargs
from hf_captionrl.io import FolderLock, write_json
from hf_captionrl.trainers.checkpoint_selection import SELECTION_FILE, conclude_selection, note_selection
from hf_captionrl.trainers.checkpoints import (
    begin_run,
    checkpoint_fault,
    last_sealed,
    newest_checkpoint,
    newest_complete_checkpoint,
    open_checkpoint,
    remove_older,
    resume_run,
    run_of_checkpoint,
    seal_checkpoint,
)
from hf_captionrl.trainers.finite_weights import first_non_finite
from hf_captionrl.trainers.guard_callback import GuardCallback
from hf_captionrl.trainers.processes import on_main_process
from hf_captionrl.trainers.publishing import CheckedPush
from hf_captionrl.trainers.stopping import StopOnSignal

__all__ = ["ExactResumeArguments", "ExactResumeTrainer"]

logger = logging.getLogger(__name__)

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
_TORCH_WRITER = ("PytorchStreamWriter", "inline_container.cc", "iostream error", "file write failed")


@dataclass
class ExactResumeArguments:
    """Arguments of [`ExactResumeTrainer`]; a base class before `transformers.TrainingArguments`."""

    save_on_signal: bool = field(
        default=False,
        metadata={
            "help": "On SIGTERM or Ctrl-C finish the step, save a checkpoint and exit with 0; a second signal stops "
            "immediately. Enabled in the recipes."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        _refuse_foreign_code(self)
        if getattr(self, "hub_private_repo", None) is None:
            self.hub_private_repo = True  # TRL's GRPO logs completions to a repository too
        if self.save_on_signal and getattr(self, "save_only_model", False):
            logger.warning(
                "save_only_model=True: a checkpoint saved on a signal holds the model only, and no run can resume from it. Use "
                "save_only_model=False to resume."
            )


def _refuse_foreign_code(args: Any) -> None:
    """Refuse trust_remote_code, which TRL's trainers read from both of these places."""
    places = (vars(args), getattr(args, "model_init_kwargs", None) or {})
    if any(place.get("trust_remote_code") for place in places):
        raise ValueError(
            "trust_remote_code is set, but code from checkpoints is never run. Remove it, and use a model whose class is "
            "part of transformers."
        )


class ExactResumeTrainer(CheckedPush):
    """A Trainer with exact resume; a base class before a trainer of TRL.

    A checkpoint is sealed when it is complete, and older ones are removed only then. A resumed run uses the newest complete
    checkpoint. A run locks its output folder and checks before the first step that it can write there. It neither uses
    nor removes checkpoints of other runs. If weights are not finite, the run stops without saving them.

    Attributes:
        selection (`dict`, *optional*): The selected checkpoint, after a training with `load_best_model_at_end` or
            `save_strategy="best"`, or in which the guard tripped or refused an evaluation.
        collapsed (`str`, *optional*): Why the weights after training must not be delivered; None if they may.
        guard ([`GuardCallback`], *optional*): Checks the captions of rollouts and evaluations.
    """

    selection: dict[str, Any] | None = None
    collapsed: str | None = None
    guard: GuardCallback | None = None
    _run_id: str | None = None

    @staticmethod
    def _load_safely(args: Any, *, by_name: bool, model: Any = None) -> None:
        """Make TRL load models by name from safetensors only, without their code or kernels."""
        _refuse_foreign_code(args)  # the arguments may have changed
        if by_name:
            given = check_kwargs(args.model_init_kwargs or {})
            if isinstance(model, str):
                given["revision"] = check_checkpoint(model, given.get("revision"))["revision"]
            args.model_init_kwargs = {"attn_implementation": None, **given, "use_safetensors": True}

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, num_epochs: int, *args: Any
    ) -> tuple[int, int]:
        """Restore the state; a run that was killed after its last step does not take another one.

        transformers looks for the end after a step, so a training that ended within an epoch would go on for one step.
        """
        epochs, batches = super()._init_training_state(max_steps, steps_per_epoch, num_epochs, *args)  # type: ignore[misc]
        return (num_epochs, 0) if self.state.global_step >= max_steps else (epochs, batches)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `transformers.Trainer.train` does, with a lock on the output folder; report the selected checkpoint.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): A checkpoint or a folder of them; True for `args.output_dir`.
            args (`Any`): For the Trainer.
            kwargs (`Any`): For the Trainer.

        Returns:
            `TrainOutput`: Of the Trainer.
        """
        with contextlib.ExitStack() as stack:

            def take_folder() -> None:
                stack.enter_context(FolderLock(self.args.output_dir))

            def choose() -> tuple[str | None, str | None]:
                folder = self.args.output_dir
                if not resume_from_checkpoint:
                    return None, begin_run(folder)
                if resume_from_checkpoint is True:
                    checkpoint = newest_checkpoint(folder)
                else:
                    checkpoint = newest_complete_checkpoint(resume_from_checkpoint)
                _refuse_model_only(checkpoint)
                return checkpoint, resume_run(folder, checkpoint)

            on_main_process(self.accelerator, take_folder)
            checkpoint, self._run_id = on_main_process(self.accelerator, choose)
            if self.args.save_on_signal:
                stack.enter_context(StopOnSignal(self))
            with _dead_workers_named():
                self.selection = self.collapsed = None
                output = super().train(checkpoint, *args, **kwargs)
                conclude_selection(self)
                self.refuse_diverged_model()
                return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, as `transformers.Trainer.save_model` does, if its weights are finite.

        Args:
            output_dir (`str`, *optional*): Folder; None for `args.output_dir`.

        Raises:
            FloatingPointError: If weights are not finite; nothing is saved.
        """
        if not _internal_call:
            self.refuse_diverged_model()
        super().save_model(output_dir, _internal_call)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> str:
        self.refuse_diverged_model()
        return super().push_to_hub(*args, **kwargs)

    def refuse_diverged_model(self) -> None:
        """Stop if weights are NaN or infinite.

        Raises:
            FloatingPointError: Naming the step and the last good checkpoint.
        """
        self._refuse_diverged(self.model, Path(self.args.output_dir), "The model")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        # A pickle that contains the Hub's token and that no one needs: results.json has the configuration.
        folder = Path(output_dir or self.args.output_dir)
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
        if self.selection is not None:
            write_json(folder / SELECTION_FILE, self.selection)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: the Trainer would upload the optimizer's pickle. `push_to_hub` publishes the finished model."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run = Path(self._get_output_dir(trial=trial))
        folder = run / f"checkpoint-{self.state.global_step}"
        self._refuse_diverged(model, run, folder.name)
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            if self.args.should_save:
                open_checkpoint(folder, self._run_id)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                seal_checkpoint(folder)
        except Exception as error:
            if not _is_of_disk(error):
                raise
            raise _remove_partial(folder, error) from error
        finally:
            self.args.save_total_limit = limit
        # The Trainer would remove older checkpoints before the new one is sealed, and those of other runs.
        if self.args.should_save:
            remove_older(folder, limit=limit, best=self.state.best_model_checkpoint)

    def _refuse_diverged(self, model: Any, run: Path, what: str) -> None:
        """Stop before weights that are NaN or infinite replace finite ones."""
        name = first_non_finite(model)
        found = [name]
        if self.accelerator.num_processes > 1:  # where weights are sharded, one process may hold all the bad ones
            from accelerate.utils import gather_object

            found = gather_object(found)
        name = next((name for name in found if name is not None), None)
        if name is None:
            return
        good = last_sealed(run, self._run_id)
        remedy = "This run has no earlier checkpoint. Start again with a lower learning_rate or max_grad_norm."
        if good is not None:
            remedy = (
                f"The last checkpoint is {str(good)!r}. Start from it, with a lower learning_rate or max_grad_norm: use it as "
                "the model of a new run."
            )
        raise FloatingPointError(
            f"Training has diverged: {name} is NaN or infinite after step {self.state.global_step}. {what} is not saved, "
            f"and no checkpoint is removed. {remedy}"
        )

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # With save_total_limit=1 the Trainer removes all but the best checkpoint here, also of other runs.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            output = super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit
        best = self.state.best_model_checkpoint
        if self.args.should_save and limit == 1 and best is not None and run_of_checkpoint(best) == self._run_id:
            remove_older(best, limit=1, best=None)
        return output

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        self._renamed = bool(load_result.unexpected_keys)
        if not self._renamed:
            super()._issue_warnings_after_load(load_result)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._renamed = False
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_renamed(resume_from_checkpoint)

    def _load_renamed(self, checkpoint: str) -> None:
        """Load weights whose names in the checkpoint differ from those in the model.

        transformers saves LLaVA and similar models with the names of their first release. `from_pretrained` translates them,
        the Trainer does not: it would continue with the initial weights and warn.
        """
        if self._renamed:
            inner = self.accelerator.unwrap_model(self.model)
            saved = type(inner).from_pretrained(checkpoint, dtype="auto", use_safetensors=True)
            inner.load_state_dict(saved.state_dict())

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint

        def find_fault() -> str | None:
            # The Trainer stores its path, where another run may have left a checkpoint of the same step.
            other = run_of_checkpoint(best) != self._run_id
            return "it is of another run" if other else checkpoint_fault(best)

        fault = on_main_process(self.accelerator, find_fault)
        if fault is None:
            self._renamed = False
            super()._load_best_model()
            self._load_renamed(str(best))
            note_selection(self)
            return
        note_selection(self, f"it is broken ({fault}), and the weights of step {self.state.global_step} are kept")
        if self.accelerator.is_main_process:
            logger.warning("%s, the best checkpoint, is broken: %s. The last weights are kept instead.", best, fault)


def _refuse_model_only(checkpoint: str) -> None:
    """Refuse a checkpoint without the states of optimizer, schedule and random numbers."""
    if not any(Path(checkpoint).glob("rng_state*.pth")):
        raise ValueError(
            f"{checkpoint!r} holds the model only (save_only_model=True): without the states of optimizer, schedule and random "
            "numbers no run can resume from it exactly. Use it as the model of a new run, or another checkpoint; use "
            "save_only_model=False for checkpoints that runs resume from."
        )


@contextlib.contextmanager
def _dead_workers_named() -> Iterator[None]:
    """Replace the error of a killed worker by one sentence; errors in a worker's code pass unchanged."""
    try:
        try:
            yield
        except (ConnectionError, EOFError) as error:  # a pipe that broke during a read
            if not _reads_from_worker(error):
                raise
            raise _dead_worker(error) from error
    except RuntimeError as error:
        # PyTorch raises it in a signal handler, at any point of the program, also in the handler above.
        if "DataLoader worker (pid" not in str(error):
            raise
        raise _dead_worker(error) from error


def _reads_from_worker(error: Exception) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == "torch.utils.data.dataloader" for frame, _ in frames)


def _dead_worker(error: Exception) -> RuntimeError:
    return RuntimeError(
        f"A DataLoader worker, which loads images, has died ({error}). Memory may have run out: lower "
        "dataloader_num_workers, and resume with resume_from_checkpoint=True."
    )


def _is_of_disk(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _DISK
    # safetensors and tokenizers are written in Rust: their errors have no errno, and those of tokenizers no class.
    if number := re.search(r"\(os error (\d+)\)", str(error)):
        return int(number[1]) in _DISK
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TORCH_WRITER)


def _remove_partial(folder: Path, error: Exception) -> OSError:
    """Remove a checkpoint that could not be written completely; returns the error to raise."""
    run_id = run_of_checkpoint(folder)
    shutil.rmtree(folder, ignore_errors=True)
    cause = (isinstance(error, OSError) and error.strerror) or "the disk is full, or a limit on files is reached"
    last = last_sealed(folder.parent, run_id)
    after = "start again" if last is None else f"resume_from_checkpoint=True resumes from {last.name}"
    return OSError(
        f"{folder.name} cannot be written to {str(folder.parent)!r} ({cause}). Free space there, and {after}."
    )
