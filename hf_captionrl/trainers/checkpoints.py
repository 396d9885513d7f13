"""Exact resume for every trainer: checkpoints that are renamed when complete, and orderly stops on signals.

A checkpoint is written to a temporary folder, flushed to the disk and renamed, so a kill leaves no partial checkpoint. A
run resumes from the newest one, if it was written with the same configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import datasets
import torch
from accelerate.utils import gather_object
from PIL import Image
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, rotate_checkpoints
from transformers.utils import is_torch_bf16_gpu_available

from hf_captionrl.data.columns import undecoded
from hf_captionrl.data.features import image_hashes, source_key, training_images, write_training_images
from hf_captionrl.data.options import ids_digest
from hf_captionrl.losses import IGNORE_INDEX
from hf_captionrl.trainers.policy import default_output_dir
from hf_captionrl.trainers.publishing import (
    CheckedPush,
    base_model,
    deciding_settings,
    on_main_process,
    public_name,
    read_run,
    write_run,
)
from hf_captionrl.utils.io import FolderLock, counted, folded, json_digest, to_plain
from hf_captionrl.utils.model_files import check_checkpoint, check_index, check_kwargs, convert_command
from hf_captionrl.utils.options import documented

if TYPE_CHECKING:
    from hf_captionrl.trainers.dose import DoseCallback
    from hf_captionrl.trainers.guard import GuardCallback

logger = logging.getLogger(__name__)

# --- Which checkpoint a run resumes from -----------------------------------------------------------------------------

START = "start"  # folder in the output folder with a checkpoint of the start, which `DoseCallback` compares
PARTIAL = ".partial"  # folder in the output folder where a checkpoint is written

# Weights of older Trainers, which transformers still reads if there are no others.
_PICKLED_WEIGHTS = re.compile(r"(pytorch|adapter)_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
# Arguments of transformers and TRL that make another run of it ...
_INHERITED = (
    "seed data_seed learning_rate lr_scheduler_type warmup_steps optim optim_args adam_beta1 adam_beta2 adam_epsilon weight_decay "
    "max_grad_norm label_smoothing_factor num_generations beta temperature"
).split()
# ... and our own that do not: how it is cached, evaluated, logged and guarded.
_FREE = set(
    "model_init_kwargs cache_image_features cache_pixels feature_cache_dir generation_num_beams "
    "generation_max_new_tokens generation_batch_size log_completions num_completions_to_print guard max_truncated_by_scorer save_on_signal".split()
)
_PROBES = 64


def data_digest(data: Any) -> str | None:
    """Digest of the ids of training data and of some of their rows, with the bytes of the images; None for streams."""
    if not isinstance(data, datasets.Dataset | list | tuple):  # to read it might draw random numbers
        return None
    ids = None
    if isinstance(data, datasets.Dataset):
        data = undecoded(data.with_format(None)) if "image" in data.column_names else data.with_format(None)
        ids = ids_digest(data) if "image_id" in data.column_names else None
    return json_digest([ids, [_comparable(data[row]) for row in range(0, len(data), max(1, len(data) // _PROBES))]])


def _comparable(value: Any) -> Any:
    if isinstance(value, Image.Image) or (isinstance(value, dict) and value.keys() == {"bytes", "path"}):
        return source_key(value)
    if isinstance(value, dict):
        return {str(name): _comparable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(each) for each in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if value is None or isinstance(value, str | int | float) else type(value).__name__


def rows_per_step(args: TrainingArguments) -> int:
    """Training rows of an optimizer step on all processes."""
    return args.per_device_train_batch_size * max(1, args.n_gpu) * args.gradient_accumulation_steps * args.world_size


def run_configuration(trainer: Any) -> dict[str, Any]:
    """Trainer, model, data and the arguments that decide what a run computes."""
    args, data = trainer.args, trainer.train_dataset
    ours = [cls for cls in type(args).__mro__ if cls.__module__.startswith("hf_captionrl.")]
    declared = {name for cls in ours for name in inspect.get_annotations(cls)}
    declared -= {field.name for field in dataclasses.fields(TrainingArguments)}
    names = sorted({*declared, *_INHERITED}.intersection(field.name for field in dataclasses.fields(args)) - _FREE)
    configuration = {
        "trainer": type(trainer).__name__,
        "model": public_name(getattr(base_model(trainer), "name_or_path", None)),
        "rows": len(data) if hasattr(data, "__len__") else None,
        "rows per step": rows_per_step(args),  # with another number, a resumed epoch would read rows twice or never
        "training_data": trainer.training_data,
        **to_plain({name: getattr(args, name) for name in names}),
    }
    loaded: dict[str, Any] = json.loads(json.dumps(configuration))  # as in the file: tuples are lists
    return loaded


def set_aside(folder: Path, resumed: str | None) -> None:
    """Move checkpoints of other runs, and those after the one that this run resumes from, to `earlier-N` in the same folder.

    Otherwise `save_total_limit` and a later resume could not tell them from those of this run.
    """
    steps = {path: int(path.name[11:]) for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal()}
    last = next((step for path, step in steps.items() if resumed and os.path.samefile(path, resumed)), 0)
    if others := [path for path, step in steps.items() if step > last and path.is_dir()]:
        place = next(p for n in itertools.count(1) if not (p := folder / f"earlier-{n}").exists())
        place.mkdir()
        for path in others:
            path.rename(place / path.name)
        logger.warning("Checkpoints of an earlier start (%d) are moved to %s.", len(others), place)


def newest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint of an output folder; None if there is none."""
    return get_last_checkpoint(os.fspath(folder)) if os.path.isdir(folder) else None


def checkpoint_to_resume(trainer: Any, checkpoint: str | bool, trial: Any = None) -> str:
    """The folder of a checkpoint, for True the newest one in `args.output_dir`; refused if no run may resume from it."""
    folder = trainer.args.output_dir
    path = newest_checkpoint(folder) if checkpoint is True else checkpoint
    if not isinstance(path, str) or not os.path.isdir(path):
        raise ValueError(f"There is no checkpoint {path!r} in {folder!r}. Start without resume_from_checkpoint.")
    for file in sorted(Path(path).rglob("*")):
        if _PICKLED_WEIGHTS.fullmatch(file.name):
            raise ValueError(f"{str(file)!r} is a pickle; weights are safetensors. Use {convert_command(path)}.")
        if file.name.endswith(".safetensors.index.json"):
            check_index(file)
    if trial is not None:
        return path  # of a search, which may go on with other settings
    if not any(Path(path).glob("rng_state*.pth")):
        raise ValueError(f"{path!r} holds the model only (save_only_model=True). Use it as the model of a new run.")
    saved, configuration = read_run(path).get("configuration", {}), run_configuration(trainer)
    for name in sorted(saved):  # checkpoints of a plain Trainer have none
        if saved[name] != configuration.get(name):
            raise ValueError(
                f"{path!r} is of another run: its {name} is {saved[name]!r}, and here it is {configuration.get(name)!r}. "
                "Use the same configuration, another output_dir, or in a recipe --overwrite_output_dir."
            )
    return path


def _flush(*paths: Path) -> None:
    """Write files and entries of folders to the disk: a power loss must not undo a rename before them."""
    for path in paths:
        with contextlib.suppress(OSError):  # Windows and some network folders cannot flush a folder
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


# --- The selected checkpoint, its metric and ties: a section of run.json ---------------------------------------------


def describe_selection(trainer: Any) -> dict[str, Any]:
    """The checkpoint with the best metric; `kept_instead` says which other weights the model has."""
    args, state, guard = trainer.args, trainer.state, trainer.guard
    metric = args.metric_for_best_model
    metric = metric if metric is None or str(metric).startswith("eval_") else f"eval_{metric}"
    # Neither an evaluation before the first step nor a refused one has a checkpoint.
    without = {0, *(entry["step"] for entry in ([] if guard is None else guard.refused))}
    values = {e["step"]: e[metric] for e in state.log_history if metric in e and e.get("step", 0) not in without}
    step = state.best_global_step
    selection: dict[str, Any] = {
        "step": step,
        "metric": metric,
        "value": None if state.best_metric is None else float(state.best_metric),
        "greater_is_better": bool(args.greater_is_better),
        "evaluations": len(values),
        "ties": sorted(other for other, value in values.items() if value == state.best_metric and other != step),
        "tie_rule": "earliest",
    }
    keeps_best = args.load_best_model_at_end or (args.save_strategy == "best" and step == state.global_step)
    if state.best_model_checkpoint is None or not keeps_best:
        folder = None if guard is None else guard.rolled_back_to
        weights = f"step {state.global_step}" if folder is None else Path(folder).name
        selection["kept_instead"] = f"the weights of {weights} are kept"
    if guard is not None:
        selection["guard"] = {"action": guard.action, "trips": list(guard.trips), "refused": list(guard.refused)}
    return selection


def selection_line(selection: Mapping[str, Any]) -> str:
    """One line about a selection, for terminals and cards."""
    if selection["step"] is None:
        line = "No checkpoint was selected"
    else:
        value, number = selection["value"], counted(selection["evaluations"], "evaluation")
        line = f"checkpoint-{selection['step']}: {selection['metric']} = {value:.4g}, the best of {number}"
        start = selection.get("start")
        if start is None:
            line = f"Selected {line}"
        elif start["delivered"]:
            gain = f"against {start['value']:.4g} (p = {start['p_value']:.2g}, {start['images']} images)"
            line = f"The start is delivered: {start['length']:.1f} words. Not significantly better is {line}, {gain}"
        else:
            gain = f"from {start['value']:.4g} (p = {start['p_value']:.2g}, {start['images']} images)"
            line = f"Best after {counted(selection['step'], 'step')}: {selection['length']:.1f} words. Selected {line}, {gain}"
    line += f"; {selection['kept_instead']}" if "kept_instead" in selection else ""
    for event, name in (("trips", "tripped"), ("refused", "refused the evaluation")):
        if steps := [entry["step"] for entry in selection.get("guard", {}).get(event, [])]:
            line += f"; the guard {name} at step {', '.join(map(str, steps))}"
    return f"{line}. Not delivered: {selection['collapsed']}" if "collapsed" in selection else f"{line}."


def note_collapse(trainer: Any, reason: str) -> None:
    """Record and warn that the weights must not be delivered."""
    trainer.collapsed = reason
    trainer.selection = {**(trainer.selection or describe_selection(trainer)), "collapsed": reason}
    if trainer.state.is_world_process_zero:
        logger.warning("Do not use this model. %s", reason)


def conclude_selection(trainer: Any) -> None:
    """After training, report the selected checkpoint, and whether the captions of the model have collapsed."""
    args, state, guard = trainer.args, trainer.state, trainer.guard
    selection = describe_selection(trainer)
    selects = (args.load_best_model_at_end or args.save_strategy == "best") and state.best_model_checkpoint is not None
    if selects or (guard is not None and (guard.trips or guard.refused)):
        if selects and trainer.dose is not None:
            selection |= trainer.dose.compare_with_start(selection["step"])
        trainer.selection = selection
        if state.is_world_process_zero:
            print(folded(selection_line(selection)))
    if guard is not None and "kept_instead" in selection and (fault := guard.fault_of_kept_weights(args, state)):
        note_collapse(trainer, fault)


def trainable_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and values of each trainable weight: the part that this process holds, without a copy."""
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            # Under DeepSpeed's stage 3 the parameter itself is empty; DTensor is FSDP2's.
            values: Any = getattr(weight, "ds_tensor", weight)
            yield name, (values.to_local() if hasattr(values, "to_local") else values).detach()


# --- An orderly stop on a signal: the step is finished, a checkpoint is saved, and the process exits -----------------


class StopOnSignal(TrainerCallback):
    """Handles SIGTERM and SIGINT during training; a context manager.

    The stop waits for an evaluation of the step and for the other steps of the same rollout, so that a resumed run is
    bit-exact. The exit code is 128 + the signal's number. A second signal ends the process immediately. With several processes
    the signal may reach only one; all of them stop after the same step.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._saves = 0  # the signal of which process ever

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python installs handlers only there
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        self.trainer.add_callback(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self.trainer.remove_callback(self)
        for number, before in self._before.items():
            signal.signal(number, before)
        if self.received is not None and kind is None:
            signal.raise_signal(self.received)  # it came after the last step: leave it to the previous handler

    def _note(self, number: int, frame: Any) -> None:
        if self.received is not None:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
        self.received = number
        text = "finishing the step and saving a checkpoint. A second signal stops immediately."
        os.write(2, f"\n{signal.Signals(number).name}: {text}\n".encode())  # print may be what was interrupted

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save after a signal that came before or during the evaluation."""
        number, accelerator = self.received or 0, self.trainer.accelerator
        if accelerator.num_processes > 1:  # every process asks at the same points
            number = int(accelerator.gather(torch.tensor([number], device=accelerator.device)).max())
        if not number or state.global_step % (getattr(args, "num_iterations", None) or 1) or not state.global_step:
            return  # TRL's checkpoints do not store a rollout in use
        if not control.should_training_stop or state.global_step >= state.max_steps:
            control.should_save, self._saves = True, number  # else another callback stops, and decides what is saved

    on_evaluate = on_epoch_end

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save after a signal; after the last step of an epoch, wait for its evaluation."""
        epoch = state.epoch or 0.0
        if abs(epoch - round(epoch)) > 1e-6:
            self.on_epoch_end(args, state, control)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Exit after the checkpoint is saved."""
        if self._saves:
            print(f"Stopped after step {state.global_step}; its checkpoint is saved.", file=sys.stderr)
            raise SystemExit(128 + self._saves)


# --- The base class of every trainer ---------------------------------------------------------------------------------


_LOWEST = {
    **dict.fromkeys("learning_rate projection_learning_rate weight_decay adam_epsilon max_grad_norm".split(), 0),
    **dict.fromkeys("per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps".split(), 1),
}
"""Smallest values of numbers that transformers does not check."""
_HIGHEST = 2**32 - 1


@dataclass
class ExactResumeArguments:
    """Arguments of [`ExactResumeTrainer`]; a base class before `transformers.TrainingArguments`."""

    save_on_signal: bool = documented(
        False,
        "On SIGTERM or Ctrl-C finish the step, save a checkpoint and exit with 143 or 130; a second signal stops immediately. "
        "Enabled in the recipes.",
    )

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            lowest = _LOWEST.get(name, -_HIGHEST)
            if isinstance(value, int | float) and not lowest <= value <= _HIGHEST:
                raise ValueError(f"{name} is {value}. Use a number from {lowest} to {_HIGHEST}.")
        is_trl = any(cls.__module__.startswith("trl.") for cls in type(self).__mro__)
        takes_bf16 = is_torch_bf16_gpu_available() or getattr(self, "use_cpu", False)
        if is_trl and getattr(self, "bf16", False) is None and not takes_bf16:
            self.bf16 = False  # TRL's default is True, which transformers refuses without such a GPU
        if getattr(self, "bf16", False) and not torch.accelerator.is_available():
            self.use_cpu = True  # transformers asks for it, though there is no other device
        # trl, peft and those who run older releases use a name that transformers renamed.
        renamed = r"`\w*gradient_checkpointing\w*` is deprecated"
        warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)
        super().__post_init__()  # type: ignore[misc]
        _refuse_foreign_code(self)
        if not torch.accelerator.is_available():
            self.dataloader_pin_memory = False  # PyTorch would warn of it at every data loader
        if getattr(self, "hub_private_repo", None) is None:
            self.hub_private_repo = True  # TRL's GRPO logs completions to a repository too

    def to_dict(self) -> dict[str, Any]:
        """The arguments. transformers hides the values of names that end in `_token`; of those, only the Hub's are secrets."""
        values: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        tokens = (name for name in values if name.endswith("_token") and not name.endswith("hub_token"))
        return values | {name: getattr(self, name) for name in tokens}


def _refuse_foreign_code(args: Any) -> None:
    """Refuse trust_remote_code, which TRL's trainers read from both of these places."""
    places = (vars(args), getattr(args, "model_init_kwargs", None) or {})
    if any(place.get("trust_remote_code") for place in places):
        raise ValueError(
            "trust_remote_code is set, but code from checkpoints is never run. Use a model class of transformers."
        )


class ExactResumeTrainer(CheckedPush):
    """A Trainer with exact resume; a base class before a trainer of TRL.

    A run locks its output folder. If weights are not finite, it stops without saving them.

    Attributes:
        selection (`dict`, *optional*): The selected checkpoint, after a training with `load_best_model_at_end` or
            `save_strategy="best"`, or in which the guard tripped or refused an evaluation.
        collapsed (`str`, *optional*): Why the weights after training must not be delivered; None if they may.
        guard ([`GuardCallback`], *optional*): Checks the captions of rollouts and evaluations.
        dose ([`DoseCallback`], *optional*): Evaluates the start and early checkpoints.
    """

    selection: dict[str, Any] | None = None
    collapsed: str | None = None
    guard: GuardCallback | None = None
    dose: DoseCallback | None = None
    config_class: ClassVar[type[Any]]
    method_name: ClassVar[str]
    """Names the output folder of a run without a configuration."""
    training_data: str | None = None
    """[`data_digest`] at the start of the training."""
    image_rows: Any = None
    """The training data as passed, with images; None for text."""
    _hashes: list[str] | None = None
    _loading: str | None = None
    _resumed: str | None = None
    _has_saved = False
    _trial: Any = None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log on the main process; tensorboard's files are in the output folder also before training."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
                callback.logging_dir = os.path.join(self.args.output_dir, "runs", time.strftime("%b%d_%H-%M-%S"))
        super().log(logs, start_time)

    @classmethod
    def _resolve_args(cls, model: Any, args: Any) -> Any:
        """The configuration; without one, the default configuration."""
        if args is None:
            return cls.config_class(default_output_dir(model, cls.method_name))
        if not isinstance(args, cls.config_class):
            raise TypeError(f"args is a {type(args).__name__}. Use a {cls.config_class.__name__}.")
        return args

    @staticmethod
    def _load_safely(args: Any, *, by_name: bool, model: Any = None) -> None:
        """Make TRL load models by name from safetensors only, without their code or kernels."""
        _refuse_foreign_code(args)  # the arguments may have changed
        if by_name:
            given = check_kwargs(args.model_init_kwargs or {})
            if isinstance(model, str):
                given["revision"] = check_checkpoint(model, given.get("revision"))["revision"]
            args.model_init_kwargs = {"attn_implementation": None, **given, "use_safetensors": True}

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as `transformers.Trainer.train` does, with a lock on the output folder; report the selected checkpoint.

        `resume_from_checkpoint` is a checkpoint, or True for the newest one in `args.output_dir`. Checkpoints of other runs in that
        folder are moved into a folder `earlier-N`. A trial of a hyperparameter search has a folder of its own.
        """
        folder = Path(self._get_output_dir(trial))
        with contextlib.ExitStack() as stack:

            def begin() -> str | None:
                stack.enter_context(FolderLock(folder))
                shutil.rmtree(folder / PARTIAL, ignore_errors=True)
                self.training_data = data_digest(self.train_dataset if self.image_rows is None else self.image_rows)
                self.training_image_hashes()  # may take minutes: not while a checkpoint is written
                checkpoint = resume_from_checkpoint
                return checkpoint_to_resume(self, checkpoint, trial) if checkpoint else None

            self._resumed, self._has_saved = on_main_process(self.accelerator, begin), False
            if self.args.save_on_signal:
                stack.enter_context(StopOnSignal(self))
            self.selection = self.collapsed = None
            self._trial = trial
            output = super().train(self._resumed, trial, *args, **kwargs)
            conclude_selection(self)
            self.refuse_diverged()
            return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, as `transformers.Trainer.save_model` does, if its weights are finite."""
        if not _internal_call:
            self.refuse_diverged()
        super().save_model(output_dir, _internal_call)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> str:
        self.refuse_diverged()
        return super().push_to_hub(*args, **kwargs)

    def refuse_diverged(self, model: Any = None, what: str = "The model") -> None:
        """Stop with a `FloatingPointError` before weights that are NaN or infinite replace finite ones."""
        # The largest magnitude is NaN if any value is, and cannot overflow.
        norms = (
            (name.removeprefix("module."), torch.linalg.vector_norm(values, ord=float("inf")))
            for name, values in trainable_values(self.model if model is None else model)
            if values.numel()
        )
        name = next((name for name, norm in norms if not norm.isfinite()), None)
        if self.accelerator.num_processes > 1:  # where weights are sharded, one process may hold all the bad ones
            name = next(filter(None, gather_object([name])), None)
        if name is None:
            return
        raise FloatingPointError(
            f"Training has diverged: {name} is NaN or infinite after step {self.state.global_step}. {what} is not saved, and no "
            "checkpoint is removed. Start a new run from the last checkpoint with a lower learning_rate or max_grad_norm."
        )

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        # Accelerate repeats rows in the last batch of an epoch, so that all processes have as many: they are not supervised.
        batches, processes = [], self.accelerator.num_processes
        is_filled = self.args.accelerator_config.even_batches and not self.args.dataloader_drop_last
        for batch in itertools.islice(epoch_iterator, num_batches):
            loader = self.accelerator.gradient_state
            if processes > 1 and is_filled and loader.end_of_dataloader and "labels" in batch:
                labels, rows = batch["labels"], loader.remainder
                if rows < 0:  # accelerate does not count the rows of a resumed epoch
                    rows = len(self.train_dataset) % (len(labels) * processes)
                if rows:
                    labels[max(rows - self.accelerator.process_index * len(labels), 0) :] = IGNORE_INDEX
            batches.append(batch)
        return batches, self._get_num_items_in_batch(batches, device)

    def save_state_of_run(self, folder: str) -> None:
        """Hook: store in a checkpoint what a trainer needs besides the Trainer's states; called on every process."""

    def load_state_of_run(self, folder: str) -> None:
        """Hook: restore what `save_state_of_run` stored."""

    # Private overrides; the reason for each is in caption_trainer.py.

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, num_epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        start = super()._init_training_state(max_steps, steps_per_epoch, num_epochs, checkpoint, trial)  # type: ignore[misc]
        if checkpoint is not None:
            self.load_state_of_run(checkpoint)
        if self.is_world_process_zero():  # an interrupted run leaves a record, too
            write_run(self._get_output_dir(trial), settings=deciding_settings(self.args))
        is_over = self.dose is not None and self.dose.is_over(self.state)
        return (num_epochs, 0) if is_over or self.state.global_step >= max_steps else start

    def save_start(self) -> None:
        """Save a checkpoint before the first step, which `save_total_limit` does not remove."""
        self._save_checkpoint(self.model_wrapped, self._trial)
        run = Path(self._get_output_dir(self._trial))
        if self.args.should_save:
            shutil.rmtree(run / START, ignore_errors=True)
            (run / f"{PREFIX_CHECKPOINT_DIR}-0").rename(run / START)
        self.accelerator.wait_for_everyone()

    def load_start(self) -> None:
        """Load the weights that [`save_start`] saved."""
        self.state.best_model_checkpoint = str(Path(self._get_output_dir(self._trial)) / START)
        self._load_best_model()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
        if hashes := self.training_image_hashes():
            # Also those of the model that this training started from
            start = training_images(getattr(base_model(self), "name_or_path", ""))
            write_training_images(folder, {*hashes, *start})

    def training_image_hashes(self) -> list[str]:
        """Hashes of the training images, computed once; empty for text and streams."""
        if self._hashes is None:
            self._hashes = image_hashes(self.image_rows) if isinstance(self.image_rows, datasets.Dataset) else []
        return self._hashes

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing; `push_to_hub` publishes the finished model."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run, output_dir = Path(self._get_output_dir(trial)), self.args.output_dir
        folder, written = run / f"checkpoint-{self.state.global_step}", run / PARTIAL
        self.refuse_diverged(model, folder.name)
        self.args.output_dir = str(written)
        partial = Path(self._get_output_dir(trial)) / folder.name
        try:
            super()._save_checkpoint(model, trial)
            if not self.args.save_only_model:
                self.save_state_of_run(str(partial))
        except Exception:
            shutil.rmtree(written, ignore_errors=True)  # the disk may be full
            raise
        finally:
            self.args.output_dir = output_dir
        if Path(self.state.best_model_checkpoint or "") == partial:
            self.state.best_model_checkpoint = str(folder)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self.state.save_to_json(str(partial / TRAINER_STATE_NAME))
            write_run(partial, configuration=run_configuration(self))
            _flush(*partial.rglob("*"), partial)
            if not self._has_saved:  # not before: a start that fails early must leave the earlier run as it is
                run.mkdir(parents=True, exist_ok=True)
                set_aside(run, self._resumed)
                self._has_saved = True
            if folder.exists():  # of an earlier start
                folder.rename(written / "replaced")
            partial.rename(folder)
            _flush(run)
            shutil.rmtree(written, ignore_errors=True)
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
            )
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._loading = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._loading = None

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        inner = self.accelerator.unwrap_model(self.model)
        if load_result.unexpected_keys:
            checkpoint = self._loading or self.state.best_model_checkpoint
            saved = type(inner).from_pretrained(checkpoint, dtype="auto", use_safetensors=True)
            inner.load_state_dict(saved.state_dict())
            return
        tied = set(getattr(inner, "all_tied_weights_keys", None) or ())
        missing = [key for key in load_result.missing_keys if key not in tied]
        super()._issue_warnings_after_load(type(load_result)(missing, load_result.unexpected_keys))
