"""Writes the report of a recipe: table, gallery, curves."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_captionrl.data import open_still
from hf_captionrl.evaluate_modules.results_columns import COLUMNS, DEGENERATE
from hf_captionrl.evaluation.evaluator import Evaluator
from hf_captionrl.reports.curves import CURVES, write_curves
from hf_captionrl.reports.gallery import GalleryCaption, GalleryItem, write_gallery
from hf_captionrl.reports.table import Column, print_table, write_results
from hf_captionrl.scenes import check
from hf_captionrl.trainers.reward_hacking import GuardThresholds

__all__ = ["write_report"]


def write_report(
    output_dir: str | os.PathLike[str],
    evaluator: Evaluator,
    rows: list[dict[str, Any]],
    captions: dict[str, list[str]],
    histories: dict[str, list[dict[str, float]]],
    *,
    title: str,
    seed: int,
    config: dict[str, Any],
    gallery_size: int,
    columns: Sequence[Column] = COLUMNS,
    selected: dict[str, Any] | None = None,
    learning_curves: dict[str, list[dict[str, float]]] | None = None,
    note: str = "",
) -> Path:
    """Write results.json, results.md, gallery.html and curves.png, and print the table.

    Args:
        output_dir: Folder to write to.
        evaluator: Has the test split.
        rows: Rows of the table.
        captions: Row name to captions of the test split.
        histories: Row name to evaluations during training.
        title: Title of the table.
        seed: Seed of the run.
        config: Arguments of the run by name.
        gallery_size: Images in the gallery.
        columns: Columns of the table.
        selected: Row name to the selected checkpoint.
        learning_curves: Row name to points of its learning curve; drawn as learning_curves.png.
        note: Sentences above the gallery.

    Returns:
        `pathlib.Path`: The JSON file.
    """
    folder = Path(output_dir)
    more = {"selected": selected, "learning_curves": learning_curves}
    path = write_results(folder, rows, seed=seed, config=config, title=title, columns=columns, more=more)
    chosen = random.Random(seed).sample(range(len(evaluator.dataset)), min(gallery_size, len(evaluator.dataset)))
    if chosen:
        items = [gallery_item(evaluator, index, captions) for index in sorted(chosen)]
        write_gallery(folder / "gallery.html", items, title=title, note=note)
    if any(histories.values()):
        write_curves(folder / "curves.png", histories)
    if learning_curves:
        measured = {key for points in learning_curves.values() for point in points for key in point}
        panels = [panel for panel in CURVES if panel[0] in measured]
        write_curves(folder / "learning_curves.png", learning_curves, x="step", panels=panels)
    print_table(rows, title=title, columns=columns_to_print(rows, columns))
    return path


def columns_to_print(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> tuple[Column, ...]:
    """The columns, with the share of degenerate captions first if it exceeds the guard's limit: a terminal may hide the last."""
    limit = GuardThresholds().max_degenerate or 0.0
    if not any((row.get(DEGENERATE.key) or 0.0) > limit for row in rows):
        return tuple(columns)
    return (DEGENERATE, *(column for column in columns if column.key != DEGENERATE.key))


def gallery_item(evaluator: Evaluator, index: int, captions: dict[str, list[str]]) -> GalleryItem:
    """One image of the gallery with its captions; claims are checked if the facts are known."""
    row = evaluator.dataset[index]
    shown = []
    for name, mine in captions.items():
        right: list[str] = []
        wrong: list[str] = []
        if evaluator.facts is not None:
            result = check(mine[index], evaluator.facts[index])
            right, wrong = [c.text for c in result.right], [c.text for c in result.wrong]
        ranks = evaluator.ranks.get(name)
        rank = None if ranks is None else int(ranks[index])
        shown.append(GalleryCaption(name, mine[index], right, wrong, rank, len(mine)))
    return GalleryItem(open_still(row), row["image_id"], shown, list(row["captions"]))
