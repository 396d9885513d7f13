"""Which checkpoint of a run is delivered: reported at the end, and none if the captions have collapsed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_captionrl.experiments.log_lines import print_heading
from hf_captionrl.trainers.checkpoint_selection import note_collapse, selection_lines

__all__ = ["COLLAPSED_FOLDER", "checkpoint_lines", "find_collapse", "print_checkpoints", "withhold"]

COLLAPSED_FOLDER = "model-collapsed"
"""Folder of the checkpoints of a recipe's own run whose captions have collapsed."""


def find_collapse(trainer: Any, captions: list[str]) -> str | None:
    """Why a trained model must not be saved as the result; None if it may.

    The guard has checked a selected checkpoint in its evaluation. Other weights are checked by their captions of the test
    split, which thereby select nothing.
    """
    chosen = trainer.selection is not None and "kept_instead" not in trainer.selection
    if trainer.collapsed is None and not chosen:
        reason = None if trainer.guard is None else trainer.guard.guard.reason_against(captions)
        if reason is not None:
            note_collapse(trainer, reason)
    return trainer.collapsed


def withhold(folder: str | os.PathLike[str]) -> Path:
    """Leave no model in a folder, not even that of an earlier start; its checkpoints are moved to `COLLAPSED_FOLDER`."""
    folder = Path(folder)
    moved = folder.with_name(COLLAPSED_FOLDER)
    shutil.rmtree(moved, ignore_errors=True)
    if folder.is_dir():
        for file in [path for path in folder.iterdir() if not path.is_dir()]:
            file.unlink()
        folder.rename(moved)
    return moved


def checkpoint_lines(selected: Mapping[str, Mapping[str, Any]], name: str) -> list[str]:
    """Which weights a run ends with, when the guard tripped, and which evaluations it refused."""
    if name not in selected:
        return ["The weights of the last step; no checkpoint was selected."]
    return selection_lines(dict(selected[name]))


def print_checkpoints(selected: Mapping[str, Mapping[str, Any]], trained: list[str], main: str) -> None:
    """Print the checkpoints of all runs, the recipe's own run last."""
    print_heading("Checkpoints")
    for name in [*(name for name in trained if name != main), main]:
        is_collapsed = "collapsed" in selected.get(name, {})
        print(name if name != main else f"{name} ({'no model' if is_collapsed else 'model/'})")
        for line in checkpoint_lines(selected, name):
            print(f"  {line}")
