"""Console output of a training, and which checkpoint of a run is delivered."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.trainer_callback import PrinterCallback, ProgressCallback

from hf_captionrl.trainers.checkpoints import hide_renamed_argument, note_collapse, selection_line

# --- Console output of a training: one heading per run, one short line per log, no irrelevant warnings ---------------

# Values shown first; others follow while the line has room. trainer_state.json contains all of them.
_FIRST = (
    "loss reward reward_std kl bag_size recall_at_1 reward_recall_at_1 degenerate recall_at_5 length completions/mean_length "
    "guard/degenerate guard/clipped_ratio grad_norm learning_rate lexical_diversity"
).split()
_UNUSED = re.compile(r"(text_|logit_scale|visual_projection)\S*\s*\| (\x1b\S*?m)?UNEXPECTED")
_HIDDEN = ("epoch", "total_flos", "runtime", "samples_per_second", "steps_per_second")


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns


def print_heading(text: str) -> None:
    """Print the heading of a run, as wide as the terminal."""
    width = _width()
    text = text if len(text) <= width - 6 else f"{text[: width - 9]}..."
    print(f"\n-- {text} {'-' * (width - len(text) - 4)}", flush=True)


def format_log(logs: Mapping[str, Any], step: int, max_steps: int, *, width: int = 100) -> str:
    """One line of at most `width` columns: the step, then the most important values first."""
    is_end = "train_runtime" in logs
    kind = "done " if is_end else "eval " if any(name.startswith("eval_") for name in logs) else "train"
    values = {name.removeprefix("eval_").removeprefix("train_"): value for name, value in logs.items()}
    line = f"{kind} {step:>{len(str(max_steps))}}/{max_steps}"
    if "epoch" in values:
        line += f"  epoch {_short(values['epoch'])}"
    if is_end:
        line += f"  seconds {_short(values['runtime'])}"
    names = sorted(values, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    for name in names:
        part = f"  {name.rpartition('/')[2] if name in _FIRST else name} {_short(values[name])}"
        if name in _HIDDEN:
            continue
        if len(line) + len(part) > width:
            break
        line += part
    return line


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class LogLines(PrinterCallback):
    """Prints one line per log on the main process of each machine."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_local_process_zero and logs:
            print(format_log(logs, state.global_step, state.max_steps, width=_width()), flush=True)


class ProgressLogLines(ProgressCallback):
    """A progress bar, with one line per log above it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs:
            self.training_bar.write(format_log(logs, state.global_step, state.max_steps, width=_width()))


def use_log_lines(trainer: Any) -> None:
    """Replace the callback of transformers that prints each log as a dict."""
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(LogLines if trainer.args.disable_tqdm else ProgressLogLines)


def _names_other_weights(record: logging.LogRecord) -> bool:
    """False for the report about a CLIP of which only the vision tower is loaded: every weight of its other half."""
    named = [line for line in record.getMessage().splitlines() if " | " in line and not line.startswith("Key")]
    return not named or not all(_UNUSED.match(line) for line in named)


def silence_libraries(*, progress_bars: bool) -> None:
    """Silence messages of other libraries that users cannot act on; our warnings and all errors stay."""
    hide_renamed_argument()
    # ClipCap loads the vision tower of a CLIP. A filter is added only once.
    logging.getLogger("transformers.modeling_utils").addFilter(_names_other_weights)
    if not progress_bars:
        # --disable_tqdm covers only the trainer's bars, not those of loading and tokenizing.
        from datasets import disable_progress_bars
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bars()
        disable_progress_bar()


# --- Which checkpoint of a run is delivered: reported at the end, and none if the captions have collapsed ------------

COLLAPSED_FOLDER = "model-collapsed"
"""Folder of the checkpoints of a recipe's own run whose captions have collapsed."""


def find_collapse(trainer: Any, captions: list[str]) -> str | None:
    """Why a trained model must not be saved as the result; None if it may."""
    # A selected checkpoint was checked in its evaluation. The captions of the test split select nothing.
    chosen = trainer.selection is not None and "kept_instead" not in trainer.selection
    if trainer.collapsed is None and not chosen and trainer.guard is not None:
        reason = trainer.guard.reason_against(captions)
        if reason is not None:
            note_collapse(trainer, reason)
    return trainer.collapsed


def withhold(folder: str | os.PathLike[str]) -> None:
    """Leave no model in a folder, not even that of an earlier start; its checkpoints are moved to `COLLAPSED_FOLDER`."""
    folder = Path(folder)
    moved = folder.with_name(COLLAPSED_FOLDER)
    shutil.rmtree(moved, ignore_errors=True)
    if folder.is_dir():
        for file in [path for path in folder.iterdir() if not path.is_dir()]:
            file.unlink()
        folder.rename(moved)


def checkpoint_lines(selected: Mapping[str, Mapping[str, Any]], name: str) -> list[str]:
    """Which weights a run ends with, when the guard tripped, and which evaluations it refused."""
    if name not in selected:
        return ["The weights of the last step; no checkpoint was selected."]
    return [selection_line(selected[name])]


def print_checkpoints(selected: Mapping[str, Mapping[str, Any]], trained: list[str], main: str) -> None:
    """Print the checkpoints of all runs, the recipe's own run last."""
    print_heading("Checkpoints")
    for name in [*(name for name in trained if name != main), main]:
        is_collapsed = "collapsed" in selected.get(name, {})
        print(name if name != main else f"{name} ({'no model' if is_collapsed else 'model/'})")
        for line in checkpoint_lines(selected, name):
            print(f"  {line}")
