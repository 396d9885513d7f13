"""Pages of the site that are made of the committed results and presets: reproduction, leaderboard, presets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reproduction import RESULTS
from reproduction.make_paper_index import HEADINGS, PAPERS
from reproduction.measurements import Measured, measured, seed_interval, shown
from reproduction.real import missing_of, result_path
from reproduction.runs import CONFIGS, IGNORED, Run, of_older_world, settings_in

# --- README.md -------------------------------------------------------------------------------------------------

Rows = dict[str, dict[str, Any]]


def changes_table() -> str:
    """Starts and references, and what each training of README changes, with 95 % intervals over seeds."""

    def read(name: str) -> Rows:
        return {row["name"]: row for row in json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]}

    def by_seed(row: dict[str, Any], more: dict[str, Any] | None = None) -> list[Any]:
        """R@1, CIDEr-D and wrong claims of each seed; `more` is a further seed."""
        keys = [key for key in ("rd100_recall_at_1", "cider_d", "hallucination") if row.get(key)]
        return [np.array([*row[key]["values"], *([more[key]] if more else [])]) for key in keys]

    def line(name: str, numbers: list[Any], start: list[Any] | None = None) -> str:
        changes = [seed_interval(list(end - first)) for end, first in zip(numbers, start or [], strict=bool(start))]
        cells = [f"{one.value:+.3f} [{one.low:.3f}, {one.high:.3f}]" for one in changes]
        cells = cells or [f"{number.mean():.3f}" for number in numbers]
        return f"| {name} | {' | '.join([*cells, *['–'] * (3 - len(cells))])} |"

    dose, bags, seed_3 = map(read, ("dose_scenes", "self_retrieval_bags_seeds", "photographs_starts"))
    smile, curriculum = (read(f"photographs_seeds/photographs-flickr8k-{name}") for name in ("smile", "sr-curriculum"))
    start, curriculum_start = by_seed(dose["blip, 3 beams"]), by_seed(curriculum["MLE"], seed_3["400 steps"])
    flickr8k_start = by_seed(smile["MLE"], seed_3["400 steps"])
    return "\n".join(
        [
            "| training (seeds) | R@1 | CIDEr-D | wrong claims |",
            "|:--|--:|--:|--:|",
            line("**scenes, before training**", start),
            line("SMILE, lambda 0.5 (3)", by_seed(dose["blip, lambda 0.5, 3 beams"]), start),
            line("SMILE, lambda 0 (3)", by_seed(dose["blip, lambda 0, 3 beams"]), start),
            line("self-retrieval, bags (3)", by_seed(bags["SR (bag curriculum)"]), start),
            line("**Flickr8k, before training**", flickr8k_start),
            line(
                "self-retrieval, bags (3)",
                by_seed(curriculum["SR (bag curriculum)"], seed_3["400 steps, sr-curriculum"]),
                curriculum_start,
            ),
            line("SMILE, 100 steps (4)", by_seed(smile["SMILE"], seed_3["400 steps, smile, 100"]), flickr8k_start),
            line("**Flickr8k, a human caption**", by_seed(smile["references"], seed_3["references"])),
        ]
    )


# --- reproduction.md -------------------------------------------------------------------------------------------

INTRODUCTION = """# Reproduction

This page shows {entries} numbers of the papers beside ours. {ours} were measured on the embedded world, {older} of these on an older \
version of it, {theirs} on the paper's data.
The embedded world has small synthetic images and other captioners, so most of its numbers differ from the paper's. Compare the
direction between two rows instead, as [the findings](findings_smile.md) do.

```bash
python reproduction/reproduce.py --list                              # every row, and what is missing
python reproduction/reproduce.py                                     # run what is missing, then `make docs`
python reproduction/reproduce.py --only smile-table-1 --seeds 0 1 2 3 4
python reproduction/reproduce.py --data_root DATA                    # also rows on the papers' data, if data and captioners exist
```

A finished result of the same settings, seeds and version of the world is not computed again. If the code changed, delete the result
first. Each result contains the revision that produced it and a digest of its presets; `--check` says which presets changed
afterwards. To run such a result again, delete it and its folder in `outputs/reproduction`. A killed run resumes with the remaining seeds
and steps.

Numbers of the papers are in our units: fractions instead of percentages, CIDEr divided by 100. The interval is Student's t over seeds if
there are several, otherwise a bootstrap over images. It does not apply to other data. With three seeds, it extends 4.3 standard errors
to each side.

The top of `reproduction/real.py` describes the contents of `--data_root`. The last column below says what a row on the paper's
data requires. A captioner that another preset makes is made first. Presets state the batch of one optimizer step, which all processes
share, so a run has the paper's batch on any number of GPUs that divides it."""


def _interval(number: Measured) -> str:
    if number.low is None or number.high is None:
        return "same for every seed" if len(number.values) > 1 else ""
    return f"{shown(number.low)} to {shown(number.high)}"


def _code(preset: str) -> str:
    return f"`{preset}`" if "/" in preset else preset


def _lines(
    row: Mapping[str, Any],
    entry: Mapping[str, Any],
    results: Mapping[str, Any],
    runs: Mapping[str, Run],
    output: Path,
    reasons: Mapping[str, str],
) -> list[str]:
    """One line for the embedded world, and one for the paper's data."""
    anchor = HEADINGS[row["paper"]].lower().replace(" ", "-")
    source = f"[{row['kind'].capitalize()} {row['number']}](paper_index.md#{anchor})"
    number = [source, entry["what"], shown(entry["paper"]) if "paper" in entry else ""]
    preset, name, lines = entry.get("preset", ""), entry.get("run", ""), []
    real = result_path(preset, output) if preset else None
    if name in results:
        record, run = results[name], runs[name]
        ours = measured(entry["at"], record)
        stale = [_code(preset) for preset, why in run.changed(record).items() if why == "stale"]
        place = "embedded world" + of_older_world(record)
        place += f"; made before {', '.join(stale)} changed" if stale else ""
        place += "; the paper's data: not run" if real is not None and not real.exists() else ""
        presets = "<br>".join(map(_code, run.presets)) or run.preset
        hardware = str(record.get("hardware", "CPU, not recorded"))
        lines.append([*number, shown(ours.value), _interval(ours), presets, hardware, place])
    if real is not None and real.exists():
        record = json.loads(real.read_text(encoding="utf-8"))
        at, place, cells = entry.get("preset_at", entry.get("at")), "the paper's data", ["", ""]
        if at.startswith("reached/") and "reached" not in record:
            place += ": the curve does not reach the other result"
        else:
            ours = measured(at, record)
            cells = [shown(ours.value), _interval(ours)]
        lines.append([*number, *cells, _code(preset), str(record.get("hardware", "CPU, not recorded")), place])
    elif not lines:
        if name:
            why = reasons.get(name, "no result")
        elif preset:
            missing = f"{', '.join(missing_of(preset, None))} and a GPU were not available"
            why = reasons.get(preset, missing)
        else:
            why = row["note"]
        lines.append([*number, "", "", _code(preset), "", f"not run: {why}"])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def reproduction_page(
    rows: Sequence[Mapping[str, Any]],
    runs: Mapping[str, Run],
    results: Mapping[str, Any],
    output: Path,
    reasons: Mapping[str, str] | None = None,
) -> str:
    """The papers' numbers beside ours."""
    entries = [entry for row in rows for entry in row.get("numbers", ())]
    ours = [results[entry["run"]] for entry in entries if entry.get("run") in results]
    theirs = [entry for entry in entries if "preset" in entry and result_path(entry["preset"], output).exists()]
    older = sum(bool(of_older_world(record)) for record in ours)
    counts = {"entries": len(entries), "ours": len(ours), "older": older, "theirs": len(theirs)}
    lines = [INTRODUCTION.format(**counts)]
    for paper, title in PAPERS.items():
        lines += ["", f"## {HEADINGS[paper]}", "", title.split(": ", 1)[1] + ".", ""]
        lines += ["| | | paper | ours | 95 % interval | preset | hardware | |", "|:--|:--|--:|--:|:--|:--|:--|:--|"]
        for row in (row for row in rows if row["paper"] == paper):
            for entry in row.get("numbers", ()):
                lines += _lines(row, entry, results, runs, output, reasons or {})
    return "\n".join(lines) + "\n"


# --- leaderboard.md --------------------------------------------------------------------------------------------

RANKED_BY = "bag_7_recall_at_1"
COLUMNS = {
    "length": "words",
    "rd100_recall_at_1": "R@1 RD100 ↑",
    RANKED_BY: "R@1 bags of 7 ↑",
    "bag_7_truth_recall_at_1": "by the truth checker ↑",
    "cider_d": "CIDEr-D ↑",
    "hallucination": "hallucination ↓",
}
PARTS = {
    "with_preferences_hallucination": "hallucination, with ↓",
    "against_preferences_hallucination": "hallucination, against ↓",
    "with_preferences_rd100_recall_at_1": "R@1 RD100, with ↑",
    "against_preferences_rd100_recall_at_1": "R@1 RD100, against ↑",
}
"""Numbers of scenes with and against the preferences of their kinds, which older results lack."""


def _cell(place: str, result: Any) -> str:
    try:
        number = measured(place, result)
    except KeyError:  # made before it was measured
        return "–"
    return shown(number.value) + ("" if number.high is None else f" ±{shown(number.high - number.value)}")


def leaderboard(
    runs: Mapping[str, Run], results: Mapping[str, Any], columns: Mapping[str, str], best: Sequence[str] = ()
) -> str:
    """Methods of this version of the world, the best in bags of 7 first, under full captions, which no method can pass."""
    found = [
        (title, f"rows/{row}", results[name])
        for name, run in runs.items()
        if name in results and not of_older_world(results[name])
        for row, title in run.leaderboard.items()
    ]
    found.sort(key=lambda entry: -measured(f"{entry[1]}/{RANKED_BY}", entry[2]).value)
    lines = [f"| method | {' | '.join(columns.values())} |", f"|:--|{'--:|' * len(columns)}"]
    lines += [f"| *full captions* | {' | '.join(best)} |"] if best else []
    for title, row, result in found:
        cells = [_cell(f"{row}/{key}", result) for key in columns]
        lines.append(f"| [{title}](reproduction.md) | {' | '.join(cells)} |")
    return "\n".join(lines)


LEADERBOARD = """# Leaderboard of the embedded world

Maximum likelihood on detailed captions leads; self-retrieval from generic captions cannot reach it. Methods on [`scenes`](../docs/scenes.md), version 2: greedy
captions of the 1,000 test images, mean over at least three training seeds, ± half of the 95 % interval over seeds, ranked by R@1 in bags of 7
look-alikes. The held-out scorer measures both recalls. *By the truth checker*, a caption counts only if its claims are true of its target and of no
other image of the bag.

{table}

Read the columns together. A caption that mentions every fact finds its image but differs from what a person would write, so CIDEr-D falls. A caption
that claims too much can find its image by its true claims, so hallucination rises. The commands are on the page [Reproduction](reproduction.md).

## Scenes with and against the preferences

Each kind of object prefers a background, a position and a partner ([scenes](../docs/scenes.md#images)). In about a third of the test images they differ from
that. A captioner that guesses facts from the kind is wrong there. "–" marks results that were made before the parts were measured.

{parts}

## Add a method

1. Train with seeds 0, 1 and 2 on the train split. Select checkpoints by the validation split and the reward scorer `scenes:clip-reward`. Do not use
   the test split or `scenes:siglip-held-out` for training or selection.
2. Per seed, run `captionrl caption outputs/seed-0/model --dataset scenes --num_beams 1 --output captions.jsonl` and
   `captionrl evaluate --captions captions.jsonl --dataset scenes --suite all`.
3. For a recipe of this repository, add a run with `leaderboard:` to `reproduction/paper_index.yaml`, run `python reproduction/reproduce.py --only NAME`, and commit the
   result.

The data do not change within a version: `reproduction/results/scenes_digests.json` has their digests. `python scripts/export_scenes.py` writes them as a data set
for the Hub.
"""


def leaderboard_page(runs: Mapping[str, Run], results: Mapping[str, Any]) -> str:
    """The page with both tables."""
    accepted = json.loads((RESULTS / "scenes_acceptance.json").read_text(encoding="utf-8"))
    bars = {bar["name"]: shown(bar["mean"]) for bar in accepted["bars"]}
    best = [bars.get(f"full_captions/{key}", "") for key in COLUMNS]
    table, parts = leaderboard(runs, results, COLUMNS, best), leaderboard(runs, results, PARTS)
    return LEADERBOARD.format(table=table, parts=parts)


# --- presets.md ------------------------------------------------------------------------------------------------

PRESETS = {
    "smile_blip/scenes": "smile_blip/coco",
    "discritune/scenes/tables": "discritune/blip",
    "self_retrieval_clipcap/scenes": "self_retrieval_clipcap/discritune",
    "sle/scenes/frontier": "sle_blip/coco",
    "self_retrieval_blip/scenes": "discritune/blip",
    "ndlb/scenes/generic-l": "ndlb/table5/row2",
    "ndlb/scenes/generic-v": "ndlb/table5/row3",
    "ndlb/scenes/generic-lv": "ndlb/table5/row4",
    "ndlb/scenes/blend-l": "ndlb/table4/row4",
    "ndlb/scenes/blend-v": "ndlb/table4/row5",
    "ndlb/scenes/blend-lv": "ndlb/table6/blendcap",
    "ndlb/scenes/holistic-l": "ndlb/table5/row6",
    "ndlb/scenes/holistic-v": "ndlb/table5/row7",
    "ndlb/scenes/holistic-lv": "ndlb/table5/row8",
    "ndlb/scenes/holistic-large-bags": "ndlb/table10/row8",
    "ndlb/scenes/clipcap-l": "ndlb/table4/row1",
    "ndlb/scenes/clipcap-v": "ndlb/table4/row2",
    "ndlb/scenes/table14-generic": "ndlb/table14/coco",
}
"""Presets of the embedded world, and those of the papers that they stand for."""


def presets_page() -> str:
    """Every setting in which a preset of the embedded world differs from that of its paper."""
    lines = [
        "# Presets here and in the papers",
        "Every setting in which a preset of the embedded world differs from the paper's that it stands for; a dash is the option's default. "
        "What was [chosen on these scenes](choices.md) is listed; other reasons stand beside the preset in `recipes/configs`.",
    ]
    for here, paper in PRESETS.items():
        ours, theirs = settings_in(CONFIGS, here), settings_in(CONFIGS, paper)
        differing = [
            name for name in sorted({*ours, *theirs} - IGNORED - {"variants"}) if ours.get(name) != theirs.get(name)
        ]
        rows = [
            f"| `{name}` | {' | '.join(f'`{side[name]}`' if name in side else '–' for side in (ours, theirs))} |"
            for name in differing
        ]
        lines += [f"## {here}", "\n".join([f"| | `{here}` | `{paper}` |", "|:--|:--|:--|", *rows])]
    return "\n\n".join(lines) + "\n"
