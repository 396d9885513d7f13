"""Logs a policy's captions with their images and rewards, on the terminal and in trackers.

Captions come from a model that may exploit anything, so they are always shown as text and never as markup.
"""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_captionrl.reports.table import escape_markdown

__all__ = ["TRACKERS", "log_completions", "print_completions"]

TRACKERS: tuple[str, ...] = ("tensorboard", "trackio", "wandb")
"""Trackers that show tables with images; the Trainer handles other names in `report_to`."""

CompletionRow = Mapping[str, Any]

logger = logging.getLogger(__name__)


def _reward_names(rows: Sequence[CompletionRow]) -> list[str]:
    """Names of all rewards, in the order of their first appearance."""
    for index, row in enumerate(rows):
        if missing := [name for name in ("image_id", "caption") if name not in row]:
            raise ValueError(
                f"rows[{index}] lacks {missing}; it has {sorted(row)}. Each row needs an image_id and a caption."
            )
    return list(dict.fromkeys(name for row in rows for name in row.get("rewards") or {}))


def _extra_names(rows: Sequence[CompletionRow]) -> list[str]:
    """Names of all further columns, in the order of their first appearance."""
    return list(dict.fromkeys(str(name) for row in rows for name in row.get("extra") or {}))


def _has_ranks(rows: Sequence[CompletionRow]) -> bool:
    return any(row.get("rank") is not None for row in rows)


def _visible(value: Any) -> str:
    """Text on one line with escaped control characters, which could control the terminal."""
    text = " ".join(str(value).split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _number(value: Any) -> str:
    return "-" if value is None else f"{float(value):.3f}"


def print_completions(rows: Sequence[CompletionRow], *, step: int, console: Console | None = None) -> None:
    """Print captions and their rewards as a table."""
    names = _reward_names(rows)
    console = console or Console()
    encoding = console.encoding

    def cell(value: Any) -> Text:
        # Text and not str, so that [brackets] in a caption are not markup.
        return Text(_visible(value).encode(encoding, errors="backslashreplace").decode(encoding), overflow="fold")

    table = Table(box=box.SIMPLE_HEAD, title=Text(f"Captions of step {step}"), pad_edge=False)
    for heading in ("image", "caption", "reference"):
        table.add_column(heading)
    extra = _extra_names(rows)
    for name in extra:
        table.add_column(cell(name))
    ranked = _has_ranks(rows)
    for name in (*names, "advantage", *(["rank"] if ranked else [])):
        table.add_column(cell(name), justify="right")
    for row in rows:
        rewards = row.get("rewards") or {}
        texts = [row["image_id"], row["caption"], row.get("reference") or ""]
        texts += [(row.get("extra") or {}).get(name, "") for name in extra]
        numbers = [_number(rewards.get(name)) for name in names] + [_number(row.get("advantage"))]
        if ranked:
            numbers.append("-" if row.get("rank") is None else str(row["rank"]))
        table.add_row(*(cell(value) for value in (*texts, *numbers)))
    console.print(table)


@lru_cache(maxsize=64)
def _warn_once(tracker: str, why: str) -> None:
    logger.warning("Captions are not logged to %s: %s", tracker, why)


def _escaped(value: Any) -> str:
    return escape_markdown(str(value))


def _columns(rows: Sequence[CompletionRow], step: int, text: Callable[[Any], str]) -> dict[str, list[Any]]:
    """The columns of the table; `text` escapes strings for the tracker."""
    columns: dict[str, list[Any]] = {
        "step": [step] * len(rows),
        "image_id": [text(row["image_id"]) for row in rows],
        "caption": [text(row["caption"]) for row in rows],
        "reference": [text(row.get("reference") or "") for row in rows],
    }
    for name in _extra_names(rows):
        values = [(row.get("extra") or {}).get(name, "") for row in rows]
        columns[f"extra/{name}"] = [text(value) for value in values]
    for name in _reward_names(rows):
        values = [(row.get("rewards") or {}).get(name) for row in rows]
        columns[f"rewards/{name}"] = [None if value is None else float(value) for value in values]
    advantages = [row.get("advantage") for row in rows]
    columns["advantage"] = [None if value is None else float(value) for value in advantages]
    if _has_ranks(rows):
        ranks = [row.get("rank") for row in rows]
        columns["rank"] = [None if rank is None else int(rank) for rank in ranks]
    return columns


def _log_table(
    module: Any,
    rows: Sequence[CompletionRow],
    images: Sequence[Any],
    step: int,
    text: Callable[[Any], str],
    tag: str,
) -> None:
    """Log a table to wandb, or to trackio, which has the same interface."""
    import pandas as pd

    columns = _columns(rows, step, text)
    if any(image is not None for image in images):
        columns["image"] = [None if image is None else module.Image(image.convert("RGB")) for image in images]
    table = module.Table(dataframe=pd.DataFrame(columns))
    # Without step=: the Trainer's callbacks let the tracker count steps, and wandb drops logs for earlier steps.
    module.log({tag: table, "train/global_step": step})


def _log_tensorboard(writer: Any, rows: Sequence[CompletionRow], images: Sequence[Any], step: int, tag: str) -> None:
    columns = _columns(rows, step, _escaped)
    shown = [name for name in columns if name != "step"]
    lines = ["| " + " | ".join(escape_markdown(name) for name in shown) + " |", "|" + " --- |" * len(shown)]
    for index in range(len(rows)):
        cells = [columns[name][index] for name in shown]
        lines.append("| " + " | ".join(str(c) if isinstance(c, str | int) else _number(c) for c in cells) + " |")
    writer.add_text(tag, "\n".join(lines), step)
    for index, image in enumerate(images):
        if image is not None:
            writer.add_image(f"{tag}/{index}", np.asarray(image.convert("RGB")), step, dataformats="HWC")


def log_completions(
    rows: Sequence[CompletionRow],
    images: Sequence[Any],
    *,
    step: int,
    report_to: str | Sequence[str] | None,
    tensorboard_writer: Any | None = None,
    tag: str = "completions",
) -> list[str]:
    """Send captions with images and rewards to the trackers that a run reports to.

    A requested tracker that is not installed or has no run is skipped with one warning per process: a failed log must not end
    the training.
    """
    _reward_names(rows)
    if len(images) not in (0, len(rows)):
        raise ValueError(
            f"There are {len(images)} images for {len(rows)} rows. Pass one per row (None if unknown), or none."
        )
    wanted = {report_to} if isinstance(report_to, str) else set(report_to or ())
    trackers = [name for name in TRACKERS if rows and (name in wanted or "all" in wanted)]
    written = []
    for name in trackers:
        if name == "tensorboard":
            if tensorboard_writer is None:
                _warn_once(name, "there is no writer. Install tensorboard, and log from the main process.")
                continue
            _log_tensorboard(tensorboard_writer, rows, images, step, tag)
        else:
            try:
                module = importlib.import_module(name)
            except ImportError:
                _warn_once(name, f"it is not installed. Install {name}, or take it out of report_to.")
                continue
            run = module.run if name == "wandb" else module.context_vars.current_run.get()
            if run is None:
                _warn_once(
                    name, f"no run is active. Call {name}.init() before training, or log from the main process."
                )
                continue
            # trackio shows text as Markdown, wandb as plain text.
            _log_table(module, rows, images, step, _escaped if name == "trackio" else str, tag)
        written.append(name)
    return written
