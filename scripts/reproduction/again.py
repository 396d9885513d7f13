"""Measures the models of a finished run again, for columns that their tables did not have; trains nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from hf_captionrl.utils.io import write_json
from scripts.reproduction.runs import CONFIGS, Caller, Run, call, complete, said_of, words_in, words_of
from scripts.reproduction.settings import presets_of, settings_in

_RESUME = ["--resume_from_checkpoint", "true"]


def measure_again(
    run: Run,
    seeds: Sequence[int],
    *,
    output: Path,
    runs_dir: Path,
    others: Mapping[str, Run],
    caller: Caller = call,
    told: Callable[[str], None] = print,
) -> str | None:
    """Resume the recipes of a run after their last step, so that they only measure; returns why not.

    The result keeps the revisions that trained the models under `trained_revisions`.
    """
    path = output / f"{run.name}.json"
    if not path.exists():
        return "has no result yet"
    before = json.loads(path.read_text(encoding="utf-8"))
    if changed := run.changed(before):
        return f"{', '.join(changed)} changed after it was made, or it does not say; run it anew"
    folder = run.folder(runs_dir)
    name = said_of(path.with_suffix(""))
    commands = run.commands(seeds, name, runs_dir, others)
    measured = [(command, where) for _, command in commands if (where := _folders(run, command, seeds, folder))]
    wrong = [
        f"{where.relative_to(runs_dir)}: {why}"
        for command, places in measured
        for where in places
        if (why := _why_not(where, _is_trained(run, command)))
    ]
    if wrong or not measured:
        return "; ".join(wrong) or "it has no recipe"
    for command, places in measured:
        words = words_in(command, folder)
        if "scripts/run_seeds.py" in command and "--" not in words:
            words.append("--")  # what follows is for the recipe
        told(f"{run.name}, again: {command}")
        for place in places:
            (place / "results.json").unlink(missing_ok=True)
        if code := caller([*words, *_RESUME]):
            return f"exit code {code} of `{command}`"
    complete(run, seeds, path, name, folder)
    after = json.loads(path.read_text(encoding="utf-8"))
    trained = before.get("trained_revisions", before.get("revisions", [before["versions"].get("git_revision")]))
    write_json(path, {**after, "trained_revisions": trained})
    told(f"{run.name}: {differences(before, after)}")
    return None


def _folders(run: Run, command: str, seeds: Sequence[int], folder: Path) -> list[Path]:
    """Folders of results that a command writes and the run's rows read."""
    words = words_of(command)
    if "scripts/run_seeds.py" in command:
        recipe = words[words.index("scripts/run_seeds.py") + 1]
        return [folder / recipe / f"seed-{seed}" for seed in seeds]
    if "--output_dir" not in words:
        return []
    place = Path(words[words.index("--output_dir") + 1])
    read = {Path(where.replace("{folder}", str(folder))) for where, _ in run.rows.values()}
    return [place] if place.parent in read else []


def _is_trained(run: Run, command: str) -> bool:
    """Whether a command trains; a preset without epochs only evaluates."""
    preset = presets_of("", command) or [run.preset]
    settings = settings_in(CONFIGS, preset[0])
    return settings.get("num_train_epochs") != 0 or settings.get("max_steps", 0) > 0


def _why_not(place: Path, is_trained: bool) -> str:
    """Why the models in a folder of results cannot be measured without training; empty if they can."""
    if not place.is_dir():
        return "is not there"
    for model in (path for path in place.iterdir() if path.is_dir() and path.name.startswith("model")):
        last = get_last_checkpoint(str(model))
        if last is None and not is_trained:
            continue
        if last is None:
            return f"{model.name} has no checkpoint"
        state = json.loads(Path(last, "trainer_state.json").read_text(encoding="utf-8"))
        if state["global_step"] < state["max_steps"]:
            return f"the training of {model.name} ended before its last step"
    return ""


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """How far numbers that a result had are from those that it has now."""
    largest, where, count = 0.0, "", 0
    rows = {row["name"]: row for row in after["rows"]}
    for row in before["rows"]:
        for key in row.keys() & rows.get(row["name"], {}).keys() - {"name"}:
            for old, new in zip(row[key]["values"], rows[row["name"]][key]["values"], strict=True):
                count += 1
                difference = abs(old - new) / max(abs(old), abs(new), 1e-12)
                if difference > largest:
                    largest, where = difference, f", {row['name']}, {key}"
    return f"largest relative difference of {count} numbers: {largest:.2g}{where}"
