"""Exact resume for every trainer: sealed checkpoints, a lock on the output folder, orderly stops on signals."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import logging
import os
import re
import secrets
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME

from hf_captionrl.trainers.guard import GuardCallback
from hf_captionrl.utils.io import FolderLock, write_json
from hf_captionrl.utils.model_files import check_checkpoint, check_index, check_kwargs, convert_command

# --- Numbers and objects of all processes, on every process ----------------------------------------------------------

_Found = TypeVar("_Found")


def means_over_processes(accelerator: Any, values: list[float]) -> list[float]:
    """Means of numbers over the processes, in float64."""
    if accelerator.num_processes == 1 or not values:
        return values
    mine = torch.tensor([values], dtype=torch.float64, device=accelerator.device)
    return accelerator.gather(mine).mean(0).tolist()


def mean_over_processes(accelerator: Any, value: float) -> float:
    """Mean of a number over the processes."""
    return means_over_processes(accelerator, [value])[0]


def gather_values(accelerator: Any, value: Any) -> list[Any]:
    """The value of each process."""
    return [value] if accelerator.num_processes == 1 else gather_object([value])


def on_main_process(accelerator: Any, function: Callable[[], _Found]) -> _Found:
    """Result or error of a function that only the main process calls, on every process."""
    found: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            found[0] = function()
        except (OSError, ValueError, RuntimeError) as error:
            found[1] = error
    if accelerator.num_processes > 1:
        broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    return found[0]


# --- Facts about a training, stored beside the model: base model, data, objective and settings -----------------------

TRAINING_FILE = "training.json"
"""Base model, objective, rewards, data and seeds, without local paths."""


def _public(name: Any) -> str | None:
    """A name on the Hub unchanged; of a folder only the last part."""
    text = str(name or "")
    if not text:
        return None
    return Path(text).name if os.path.isabs(text) or os.path.exists(text) else text


def _objective(trainer: Any) -> dict[str, Any]:
    args, rewards = trainer.args, getattr(trainer, "rewards", None)
    if rewards is None:
        weight = getattr(args, "mle_weight", None)
        if weight is None:
            return {}
        return {
            "objective": "mle" if weight == 1.0 else "smile",
            "mle_weight": weight,
            "first_token": args.first_token,
        }
    known = {"SelfRetrieval": "self_retrieval", "PairwiseDiversity": "sle"}
    kinds = [known[type(r).__name__] for r in rewards.rewards if type(r).__name__ in known]
    scorers = [scorer.signature for scorer in trainer.scorers if hasattr(scorer, "signature")]
    return {
        **({"objective": kinds[0]} if kinds else {}),
        "reward": rewards.describe(),
        "baseline": args.baseline,
        "num_generations": args.num_generations,
        "reward_scorers": [_public(signature) for signature in scorers],
    }


def _number_of_images(data: Any) -> int | None:
    """Number of training images; None for a stream."""
    return getattr(data, "num_images", len(data) if hasattr(data, "__len__") else None)


def training_facts(trainer: Any) -> dict[str, Any]:
    """Facts about a trainer's model."""
    captioner, args, data = trainer.captioner, trainer.args, trainer.train_dataset
    model = captioner.base_model
    facts: dict[str, Any] = {
        "trainer": type(trainer).__name__,
        "base_model": _public(getattr(model, "name_or_path", None)),
        "family": captioner.family,
        "prompt": captioner.prompt,
        "is_adapter": hasattr(captioner.model, "peft_config"),
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "learning_rate": args.learning_rate,
        "seeds": {"seed": args.seed, "data_seed": args.data_seed},
        "train_images": _number_of_images(data),
        "generation": {"num_beams": args.generation_num_beams, "max_new_tokens": args.generation_max_new_tokens},
    }
    return {**facts, **_objective(trainer)}


def write_training_facts(trainer: Any, folder: str | os.PathLike[str]) -> Path:
    """Write [`TRAINING_FILE`]."""
    return write_json(Path(folder) / TRAINING_FILE, training_facts(trainer))


# --- Pushing a trainer's model to the Hub: private by default, with a model card, and checked like every push --------


def _hub() -> Any:
    # Publishing is in a higher layer; the lookup at call time avoids an import cycle.
    return importlib.import_module("hf_captionrl.hub")


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) and value else value or None


class CheckedPush(Trainer):
    """A Trainer whose upload, also that of TRL, is checked like every push."""

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Check the name of the repository; the push creates it, after its other checks.

        Args:
            token (`str`, *optional*): Unused; part of the Trainer's signature.
            private (`bool`, *optional*): Unused too.

        Raises:
            ValueError: If the Hub does not accept the name.
        """
        name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        _hub().push.check_name(name)
        self.hub_model_id = name
        self.push_in_progress = None

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
        dataset_name: str | None = None,
    ) -> None:
        """Write a card without results into `args.output_dir`, unless someone has written one.

        Args:
            language (`str`, *optional*): Language code.
            license (`str`, *optional*): As the Hub writes it.
            tags (`str` or `list[str]`, *optional*): Unused: the tags are those of this package.
            model_name (`str`, *optional*): By default that of the repository.
            finetuned_from (`str`, *optional*): The base model.
            tasks (`str` or `list[str]`, *optional*): Unused: it follows from the kind of the model.
            dataset_tags (`str` or `list[str]`, *optional*): Name of the data on the Hub.
            dataset (`str` or `list[str]`, *optional*): Name of the data.
            dataset_args (`str` or `list[str]`, *optional*): Unused.
            dataset_name (`str`, *optional*): Name of the data, as TRL calls it.

        Raises:
            ValueError: If a text must not be published.
        """
        name = model_name or self.args.hub_model_id or Path(self.args.output_dir).absolute().name

        def write() -> None:
            if not any(Path(self.args.output_dir).glob("*.safetensors")):
                return  # TRL creates a card with every checkpoint, before there is a model
            _hub().write_trained_card(
                self.args.output_dir,
                model_id=name,
                base_model=finetuned_from,
                license=license,
                dataset=_first(dataset) or dataset_name,
                dataset_id=_first(dataset_tags),
                language=_first(language),
            )

        on_main_process(self.accelerator, write)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        overwrite: bool = False,
        **kwargs: Any,
    ) -> str:
        """Save the model, write its card and push both, checked like every push: safetensors only, no secrets.

        Args:
            commit_message (`str`, *optional*): Message of the commit.
            blocking (`bool`): Unused: the push always blocks.
            token (`str`, *optional*): Token of the Hub; None for `args.hub_token`, then the one stored by `hf auth login`.
            revision (`str`, *optional*): Branch; None for `args.hub_revision`.
            private (`bool`, *optional*): Whether a new repository is private; None for `args.hub_private_repo`, then yes.
            overwrite (`bool`): Push also into a repository that holds other content.
            kwargs (`Any`): For `create_model_card`.

        Returns:
            `str`: Address of the commit.

        Raises:
            FileNotFoundError: If something is missing that a published model has.
            ValueError: If something in the folder must not be published.
            FileExistsError: If the repository holds other content.
            PermissionError: If the token is missing, wrong, or may not write there.
            PushError: If the Hub cannot be reached or refuses otherwise.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo()
        self.save_model(_internal_call=True)
        self.create_model_card(**{"model_name": self.hub_model_id, **kwargs})
        wanted = self.args.hub_private_repo if private is None else private

        def push() -> str:
            address = _hub().push_trained(
                self.args.output_dir,
                self.hub_model_id,
                private=wanted is None or wanted,
                token=token or self.args.hub_token,
                revision=revision or self.args.hub_revision,
                commit_message=commit_message or "End of training",
                overwrite=overwrite,
            )
            return str(address)

        return str(on_main_process(self.accelerator, push))


# --- Complete checkpoints and their runs: each checkpoint is sealed when it is complete, and verified before a resume ---
# A kill during a save leaves a folder without a seal. A disk error or a manual change leaves files that differ from the seal.
# A run resumes from its newest complete checkpoint.
#
# A `train` that does not resume starts a run with a new run id. The output folder records the id of the run that uses it, and
# every checkpoint the id of the run that wrote it. A resumed run keeps the id of its checkpoint. Checkpoints of other runs in
# the same folder are neither used nor removed.

logger = logging.getLogger(__name__)

SEAL_FILE = "seal.json"
"""Written last: the id of the run, and size and SHA-256 of every other file of the checkpoint."""

RUN_FILE = ".run.json"
"""Written first, to a checkpoint and to an output folder: the id of the run."""

_NAME = re.compile(r"checkpoint-(\d+)")
# Weights of older Trainers, which transformers still reads if there are no others.
_PICKLED_WEIGHTS = re.compile(r"(pytorch|adapter)_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
# Errors of reading a damaged JSON file; RecursionError for lists that are nested too deeply.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_run_id(path: Path) -> str | None:
    """The `run_id` of a file; None where it names none. Raises one of `_UNREADABLE` where there is no such file."""
    found = json.loads(path.read_text(encoding="utf-8"))["run_id"]
    return None if found is None else str(found)


def run_of_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The id of the run that wrote a checkpoint."""
    for name in (SEAL_FILE, RUN_FILE):
        try:
            return _read_run_id(Path(folder) / name)
        except _UNREADABLE:
            continue
    return None


def begin_run(folder: str | os.PathLike[str]) -> str:
    """Record that a new run uses an output folder, so that checkpoints already there are those of other runs."""
    run_id = secrets.token_hex(16)  # not from a seeded generator: two runs with the same seed have different ids
    write_json(Path(folder) / RUN_FILE, {"run_id": run_id})
    return run_id


def resume_run(folder: str | os.PathLike[str], checkpoint: str | os.PathLike[str]) -> str | None:
    """Record that the run of a checkpoint uses an output folder; its later checkpoints there are renamed."""
    run_id, folder = run_of_checkpoint(checkpoint), Path(folder)
    step = int(json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))["global_step"])
    for path in _checkpoints(folder):
        # They exist if someone resumes from an earlier checkpoint on purpose. Incomplete ones are overwritten.
        if _step(path) > step and run_of_checkpoint(path) == run_id and checkpoint_fault(path) is None:
            logger.warning(
                "%s is after the step that the run resumes from. It is now %s.", path.name, _set_aside(path)
            )
    write_json(folder / RUN_FILE, {"run_id": run_id})
    return run_id


def open_checkpoint(folder: str | os.PathLike[str], run_id: str | None) -> None:
    """Create the folder of a checkpoint; a checkpoint of another run in its place is renamed."""
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()) and run_of_checkpoint(folder) != run_id:
        logger.warning("%s is of another run. It is kept as %s.", folder.name, _set_aside(folder))
    (folder / SEAL_FILE).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    if run_id is not None:
        write_json(folder / RUN_FILE, {"run_id": run_id})


def _set_aside(path: Path) -> str:
    """Rename a checkpoint, so that no run uses or overwrites it; returns the new name."""
    stem = f"{path.name}-run-{(run_of_checkpoint(path) or 'unknown')[:8]}"
    number, name = 1, stem
    while (path.parent / name).exists():
        number += 1
        name = f"{stem}-{number}"
    path.rename(path.parent / name)
    return name


def seal_checkpoint(folder: str | os.PathLike[str]) -> Path:
    """Mark a checkpoint as complete, after its files are on the disk; takes about a second per 1-2 gigabytes."""
    folder = Path(folder)
    run_id = run_of_checkpoint(folder)
    (folder / SEAL_FILE).unlink(missing_ok=True)
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "r+b") as file:  # a power loss must not undo what the seal lists
                os.fsync(file.fileno())
            files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": _digest(path)}
    return write_json(folder / SEAL_FILE, {"run_id": run_id, "files": files})


def checkpoint_fault(folder: str | os.PathLike[str]) -> str | None:
    """Why a checkpoint cannot be used: it is incomplete, unreadable, or holds weights as pickles, which run code."""
    folder = Path(folder)
    try:
        return _fault(folder)
    except OSError as error:  # no permission, or a disk that fails
        place = ""
        if error.filename is not None and Path(os.fsdecode(error.filename)) != folder:
            place = f"{Path(os.fsdecode(error.filename)).name} "
        return f"{place}cannot be read: {error.strerror or error}"


def _fault(folder: Path) -> str | None:
    if not (folder / SEAL_FILE).is_file():
        return f"it is incomplete: it has no {SEAL_FILE}"
    try:
        files = json.loads((folder / SEAL_FILE).read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(file["size"]), str(file["sha256"])) for name, file in files.items()}
    except OSError:
        raise
    except _UNREADABLE:
        return f"its {SEAL_FILE} is damaged"
    # The Trainer reads the folder and one folder below it per adapter.
    inner = (path for place in folder.iterdir() if place.is_dir() for path in place.iterdir())
    for path in sorted([*folder.iterdir(), *inner]):
        if _PICKLED_WEIGHTS.fullmatch(path.name):
            where = path.relative_to(folder).as_posix()
            return f"{where} is a pickle; weights are loaded only from safetensors: use {convert_command(str(folder))}"
        if path.name.endswith(".safetensors.index.json"):
            try:
                check_index(path)
            except ValueError as error:
                return str(error).rstrip(".")
    # Sizes first: they reveal truncated and missing files without reading gigabytes.
    for name, (size, _) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    for name, (_, digest) in expected.items():
        try:
            if _digest(folder / name) != digest:
                return f"{name} is damaged"
        except OSError as error:  # a failed read does not name the file
            return f"{name} cannot be read: {error.strerror or error}"
    return None


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _checkpoints(folder: Path, last: int | None = None) -> list[Path]:
    """Newest first, those of later steps than `last` left out."""
    found = [path for path in folder.iterdir() if _step(path) >= 0 and path.is_dir()] if folder.is_dir() else []
    return sorted((path for path in found if last is None or _step(path) <= last), key=_step, reverse=True)


def _current_run(folder: Path) -> str | None:
    """The id of the run that uses an output folder; if none is recorded, that of its checkpoints."""
    try:
        return _read_run_id(folder / RUN_FILE)
    except _UNREADABLE:
        pass
    runs = {run_of_checkpoint(path): path for path in _checkpoints(folder) if _is_sealed(path)}
    if len(runs) > 1:
        names = " and ".join(sorted(path.name for path in runs.values()))
        raise ValueError(
            f"{str(folder)!r} has checkpoints of {len(runs)} runs ({names}, for example) and no {RUN_FILE} that says which "
            "one uses it. Use the path of a checkpoint as resume_from_checkpoint."
        )
    return next(iter(runs), None)


def has_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether the run that uses a folder has sealed a checkpoint there, intact or not; warns if there are only others."""
    folder = Path(folder)
    found = _checkpoints(folder)
    try:
        run_id = _current_run(folder)
    except ValueError:
        return True  # the resume raises the error
    mine = [path for path in found if run_of_checkpoint(path) == run_id]
    if any(_is_sealed(path) for path in mine):
        return True
    if mine:
        logger.warning("%s is incomplete. Training in %s starts from scratch.", mine[0].name, folder)
    elif found:
        logger.warning(
            "%s. Training in %s starts from scratch. Use resume_from_checkpoint='%s' to resume that run instead.",
            _of_others(found),
            folder,
            found[0],
        )
    return False


def _is_sealed(path: Path) -> bool:
    try:
        return (path / SEAL_FILE).is_file()
    except OSError:  # unreadable, not absent
        return True


def _of_others(paths: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in paths)
    return f"{names} {'belongs' if len(paths) == 1 else 'belong'} to another run and {'is' if len(paths) == 1 else 'are'} not used"


def newest_checkpoint(folder: str | os.PathLike[str], *, last: int | None = None) -> str:
    """The newest complete checkpoint of the run that uses the folder; warnings name skipped ones and the reasons."""
    return _newest(Path(folder), _current_run(Path(folder)), last)


def _newest(folder: Path, run_id: str | None, last: int | None) -> str:
    broken: list[str] = []
    found = _checkpoints(folder, last)
    others = [path for path in found if run_of_checkpoint(path) != run_id]
    for path in found:
        if path in others:
            continue
        fault = checkpoint_fault(path)
        if fault is None:
            if broken:
                logger.warning("Skipped %s. Training resumes from %s.", "; ".join(broken), path.name)
            if others:
                logger.warning("%s. Training resumes from %s.", _of_others(others), path.name)
            return str(path)
        broken.append(f"{path.name} ({fault})")
    if broken:
        raise ValueError(
            f"No checkpoint in {str(folder)!r} is complete: {'; '.join(broken)}. Start without resume_from_checkpoint, or "
            "restore a copy."
        )
    if others:
        raise ValueError(
            f"The run that last started in {str(folder)!r} has no checkpoint: {_of_others(others)}. Start without "
            f"resume_from_checkpoint, or use resume_from_checkpoint={str(others[0])!r} to resume that run."
        )
    raise ValueError(f"There is no checkpoint in {str(folder)!r}. Start without resume_from_checkpoint.")


def newest_complete_checkpoint(checkpoint: str | os.PathLike[str]) -> str:
    """A checkpoint if it is complete, else the newest complete one of the same run before it."""
    path = Path(checkpoint)
    if not path.is_dir():
        raise ValueError(
            f"There is no checkpoint {str(checkpoint)!r}. Use its folder, or True for the newest one in output_dir."
        )
    fault = checkpoint_fault(path)
    if fault is None:
        return str(path)
    if _step(path) >= 0:
        return _newest(path.parent, run_of_checkpoint(path), _step(path))
    raise ValueError(f"The checkpoint {str(checkpoint)!r} is not complete: {fault}. Use another one.")


def last_sealed(folder: str | os.PathLike[str], run_id: str | None) -> Path | None:
    """The newest sealed checkpoint of a run; its files are not verified."""
    found = _checkpoints(Path(folder))
    return next((path for path in found if _is_sealed(path) and run_of_checkpoint(path) == run_id), None)


def remove_older(newest: str | os.PathLike[str], *, limit: int | None, best: str | os.PathLike[str] | None) -> None:
    """Remove the oldest checkpoints of a run, never the one just written, the best one, or one of another run."""
    if not limit or limit < 0:
        return
    newest = Path(newest)
    run_id, step = run_of_checkpoint(newest), _step(newest)
    kept = {newest.absolute(), *([] if best is None else [Path(best).absolute()])}
    mine = [path for path in _checkpoints(newest.parent) if run_of_checkpoint(path) == run_id]
    # Later steps are removed first: they were incomplete when the run resumed before them.
    mine.sort(key=lambda path: (_step(path) <= step, _step(path)))
    excess = len(mine) - max(limit, len(kept & {path.absolute() for path in mine}))
    for path in [path for path in mine if path.absolute() not in kept][: max(excess, 0)]:
        shutil.rmtree(path, ignore_errors=True)


# --- The selected checkpoint, its metric and ties: printed at the end of training and stored with the model ----------

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


# --- Check that weights are finite, in one pass over those that training can change ----------------------------------


def _local(parameter: Any) -> Tensor:
    """The part of a parameter that this process holds: all of it, or its shard."""
    shard = getattr(parameter, "ds_tensor", None)  # DeepSpeed, stage 3: the parameter itself is empty
    if shard is None:
        shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # DTensor of FSDP2
    return shard.detach()


def _changeable(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Names and values of trainable parameters and of buffers that are saved; whether each may hold infinity."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, _local(parameter), False
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            # Some buffers are masks with minus infinity.
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, _local(buffer), True


def first_non_finite(model: nn.Module) -> str | None:
    """Name of the first weight of this process with NaN or infinity, without copying weights."""
    names: list[str] = []
    bad: list[Tensor] = []
    for name, values, may_be_infinite in _changeable(model):
        if values.numel() and values.is_floating_point() and values.device.type != "meta":
            # The largest magnitude is NaN if any value is, and cannot overflow.
            largest = torch.linalg.vector_norm(values, ord=float("inf"))
            names.append(name.removeprefix("module."))
            bad.append(largest.isnan() if may_be_infinite else ~largest.isfinite())
    flags: list[bool] = []
    for flag in _together(bad):
        flags += flag
    return next((name for name, flag in zip(names, flags, strict=True) if flag), None)


def _together(bad: list[Tensor]) -> Iterator[list[bool]]:
    """The flags in order, fetched in one transfer per run of flags on the same device."""
    start = 0
    for stop in range(1, len(bad) + 1):
        if stop == len(bad) or bad[stop].device != bad[start].device:
            yield torch.stack(bad[start:stop]).tolist()
            start = stop


# --- An orderly stop on a signal: the step is finished, a checkpoint is saved, and the process exits with 0 ----------

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


# --- Exact resume for every trainer: sealed checkpoints, a lock on the output folder, orderly stops on signals -------

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
