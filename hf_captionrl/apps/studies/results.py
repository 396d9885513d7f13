"""`captionrl study score`: score the answers of participants."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from hf_captionrl.apps.studies.build import RATING_SCALES, TEMPLATES, collect_answers, read_key
from hf_captionrl.evaluation.pages import render_html
from hf_captionrl.metrics.bootstrap import (
    bootstrap_interval,
    exact_interval,
    paired_test,
    proportion_interval,
    signature,
)
from hf_captionrl.metrics.columns import Column
from hf_captionrl.metrics.table import check_rows, escape_markdown, format_cell
from hf_captionrl.utils.io import atomic_write_text, to_plain, write_json

if TYPE_CHECKING:
    from hf_captionrl.apps.studies.build import Answers
    from hf_captionrl.apps.studies.options import ScoreOptions


# --- Agreement of raters beyond chance: Krippendorff's alpha, which scipy does not have ------------------------------
# Legend: V different values.


def krippendorff_alpha(
    ratings: Iterable[tuple[Hashable, Hashable, Any]], *, level: Literal["nominal", "ordinal", "interval"] = "nominal"
) -> dict[str, Any]:
    """Krippendorff's alpha: `1 - D_o / D_e`, observed over expected disagreement.

    Reference: Krippendorff, Computing Krippendorff's Alpha-Reliability, 2011. `ratings` are `(unit, person, value)`, at most
    one per person and unit. Units with one rating are left out. `level`: values are only equal or different, can be ordered,
    or have distances.
    """
    of_unit: dict[Hashable, dict[Hashable, Any]] = {}
    for unit, person, value in ratings:
        if level != "nominal" and (
            isinstance(value, bool | str) or not hasattr(value, "__float__") or not np.isfinite(value)
        ):
            raise ValueError(f"{person!r} gave {unit!r} the value {value!r}; the {level} level needs finite numbers.")
        given = of_unit.setdefault(unit, {})
        if person in given:
            raise ValueError(f"{person!r} rated {unit!r} twice. Keep one of the ratings.")
        given[person] = value
    units = [given for given in of_unit.values() if len(given) > 1]
    used = [value for given in units for value in given.values()]
    people = {person for given in units for person in given}
    result = {"alpha": None, "level": level, "units": len(units), "ratings": len(used), "people": len(people)}
    if not used:
        return {**result, "alpha_reason": "no unit was rated by two people"}
    different = sorted(set(used), key=repr) if level == "nominal" else sorted(set(used))
    if len(different) == 1:
        return {**result, "alpha_reason": "all ratings are equal, so agreement by chance is undefined"}
    place = {value: number for number, value in enumerate(different)}
    coincidences = np.zeros((len(different), len(different)))
    for given in units:
        counts = np.bincount([place[value] for value in given.values()], minlength=len(different)).astype(np.float64)
        # Ordered pairs of values of two people, weighted so that a unit counts as many pairs as it has values.
        coincidences += (np.outer(counts, counts) - np.diag(counts)) / (len(given) - 1)
    totals = coincidences.sum(axis=1)
    if level == "interval":  # scaling by a power of two is exact and keeps squares finite; alpha does not change
        numbers = np.asarray(different, dtype=np.float64)
        places = np.ldexp(numbers, -int(np.frexp(np.abs(numbers).max())[1]))
    else:  # a value's rank is the middle of its uses; distances are differences of ranks
        places = np.cumsum(totals) - totals / 2
    distances = (places[:, None] - places[None, :]) ** 2  # (V, V)
    if level == "nominal":
        distances = 1.0 - np.eye(len(different))
    observed = (coincidences * distances).sum()
    expected = (np.outer(totals, totals) * distances).sum() / (totals.sum() - 1)
    return {**result, "alpha": float(1 - observed / expected)}


# --- Scores of human studies: accuracy of picks, mean ratings, intervals, agreement, differences between systems -----
# Pure functions of what people answered; `hf_captionrl.apps.studies.build` reads the answers and checks them.


class Pick(NamedTuple):
    """One answer of a retrieval study."""

    participant: str  # id of the participant
    part: str  # the block; wrong controls are counted per block
    group: str  # the set of images; each set is shown once per system
    system: str | None  # system of the caption; None for a control
    value: int  # picked position, from 1
    right: int  # position of the target


class Rating(NamedTuple):
    """The rating of one caption by one participant: one number per scale; `item` is the image."""

    participant: str
    item: str
    system: str
    values: tuple[int, ...]


def _intervals(
    key: str,
    values: Sequence[float],
    questions: Sequence[Hashable],
    participants: Sequence[Hashable],
    options: Mapping[str, Any],
    *,
    interval: Callable[..., tuple[float, float]] = bootstrap_interval,
) -> dict[str, Any]:
    """A mean, its interval over questions and its interval over participants; `<key>_ci` is the wider of the two."""
    found: dict[str, Any] = {key: float(fmean(values))}
    ends = {}
    for name, labels in (("questions", questions), ("participants", participants)):
        # Resampling a single group gives no interval.
        ends[name] = interval(values, groups=labels, **options) if len(set(labels)) > 1 else None
        found[f"{key}_ci_{name}"] = ends[name]
    known = [interval for interval in ends.values() if interval is not None]
    found[f"{key}_ci"] = max(known, key=lambda interval: interval[1] - interval[0]) if known else None
    return found


def _pairs(
    names: Sequence[str], values: Iterable[tuple[str, Hashable, float]], key: str, seed: int
) -> list[dict[str, Any]]:
    """Differences between systems on the groups (sets, images) with answers for both; values are (system, group, value)."""
    lists: dict[str, dict[Hashable, list[float]]] = {name: {} for name in names}
    for system, group, value in values:
        lists.setdefault(system, {}).setdefault(group, []).append(value)
    found = []
    for first, second in combinations(names, 2):
        common = [group for group in lists[first] if group in lists[second]]
        entry: dict[str, Any] = {"a": first, "b": second, "measure": key, "num_groups": len(common)}
        if len(common) < 2:
            entry |= {"difference": None, "difference_reason": "fewer than two groups have answers for both"}
        else:
            means = ([fmean(lists[name][group]) for group in common] for name in (first, second))
            tested = paired_test(*means, seed=seed)
            entry |= {"difference": tested["difference"], "difference_ci": tested["interval"]}
            entry["p_value"] = tested["p_value"]
        found.append(entry)
    return found


def score_picks(
    picks: Sequence[Pick],
    systems: Sequence[str],
    *,
    set_size: int = 10,
    max_wrong_controls: int = 1,
    num_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Accuracy of each system's captions when people pick the image (DiscriTune, section 5.3 and Appendix A).

    A participant's block is dropped if more than `max_wrong_controls` of its controls are wrong.
    """
    sessions: dict[tuple[str, str], list[Pick]] = {}
    for pick in picks:
        sessions.setdefault((pick.participant, pick.part), []).append(pick)
    participants, dropped, kept = [], [], []
    for (participant, part), answers in sorted(sessions.items()):
        controls = [pick for pick in answers if pick.system is None]
        others = [pick for pick in answers if pick.system is not None]
        wrong = sum(pick.value != pick.right for pick in controls)
        correct = sum(pick.value == pick.right for pick in others)
        entry = {"participant": participant, "part": part, "answers": len(others), "correct": correct}
        participants.append(entry | {"controls": len(controls), "wrong_controls": wrong})
        if wrong > max_wrong_controls:
            reason = f"{wrong} of {len(controls)} controls wrong, but at most {max_wrong_controls} are allowed"
            dropped.append({"participant": participant, "part": part, "reason": reason})
        else:
            kept += others
    if not kept:
        told = "; ".join(f"{d['participant']} in {d['part']}: {d['reason']}" for d in dropped)
        raise ValueError(
            f"No answers are left to score ({told or 'controls only'}). Raise --max_wrong_controls, or ask more participants."
        )
    options = {"num_resamples": num_resamples, "seed": seed}
    rows = []
    for name in systems:
        own = [pick for pick in kept if pick.system == name]
        row: dict[str, Any] = {"name": name, "answers": len(own), "correct": sum(p.value == p.right for p in own)}
        if own:
            row |= _intervals(
                "accuracy",
                [float(pick.value == pick.right) for pick in own],
                [pick.group for pick in own],
                [pick.participant for pick in own],
                options,
                interval=proportion_interval,
            )
            row["accuracy_exact_ci"] = exact_interval(row["correct"], len(own))
        else:
            row |= {"accuracy": None, "accuracy_reason": "no answers, or all participants were dropped"}
        rows.append(row)
    hits = ((str(p.system), p.group, float(p.value == p.right)) for p in kept)
    # Categories are positions, not images: the images of a set occur in no other set, so chance would be 0.
    agreement = krippendorff_alpha(((p.part, p.group, p.system), p.participant, p.value) for p in kept)
    return {
        "rows": rows,
        "participants": participants,
        "dropped": dropped,
        "agreement": [{"measure": "pick"} | agreement],
        "paired": _pairs(systems, hits, "accuracy", seed),
        "chance": 1 / set_size,
        "signature": signature(
            study="retrieval",
            images=set_size,
            wrong_controls=max_wrong_controls,
            interval="wider of questions and participants",
            resamples=num_resamples,
            seed=seed,
        ),
    }


def score_ratings(
    ratings: Sequence[Rating],
    systems: Sequence[str],
    *,
    scales: Sequence[str] = RATING_SCALES,
    num_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Mean rating of each system on each scale, and F1 of the first two (SMILE, Table 2).

    F1 = 2 D A / (D + A) of the means D and A, as in the table. F1 is homogeneous of degree one, so it equals the mean of its
    linearisation `(2 A^2 d + 2 D^2 a) / (D + A)^2` over ratings d and a; intervals and tests use the linearisation.
    """
    options = {"num_resamples": num_resamples, "seed": seed}
    measures = (*scales, "f1")
    rows: list[dict[str, Any]] = []
    values: dict[str, list[tuple[str, Hashable, float]]] = {measure: [] for measure in measures}
    for name in systems:
        own = [rating for rating in ratings if rating.system == name]
        row: dict[str, Any] = {"name": name, "ratings": len(own)}
        rows.append(row)
        if not own:
            for measure in measures:
                row |= {measure: None, f"{measure}_reason": "no ratings"}
            continue
        columns = [[float(rating.values[place]) for rating in own] for place in range(len(scales))]
        d, a = fmean(columns[0]), fmean(columns[1])
        columns.append([2 * (a * a * x + d * d * y) / (d + a) ** 2 for x, y in zip(*columns[:2], strict=True)])
        for measure, column in zip(measures, columns, strict=True):
            row |= _intervals(measure, column, [r.item for r in own], [r.participant for r in own], options)
            values[measure] += [(name, r.item, x) for r, x in zip(own, column, strict=True)]
    agreement = []
    for place, scale in enumerate(scales):
        triples = [((r.item, r.system), r.participant, r.values[place]) for r in ratings]
        agreement.append({"measure": scale, **krippendorff_alpha(triples, level="ordinal")})
        agreement.append({"measure": scale, **krippendorff_alpha(triples, level="interval")})
    counts = sorted(Counter(rating.participant for rating in ratings).items())
    return {
        "rows": rows,
        "participants": [{"participant": name, "answers": count} for name, count in counts],
        "dropped": [],
        "agreement": agreement,
        "paired": [entry for measure in measures for entry in _pairs(systems, values[measure], measure, seed)],
        "signature": signature(
            study="rating",
            scales=",".join(scales),
            f1="of the means",
            interval="wider of images and participants",
            resamples=num_resamples,
            seed=seed,
        ),
    }


# --- Results of a human study as tables in Markdown and HTML ---------------------------------------------------------

_COLUMNS = {
    "retrieval": (
        Column("accuracy", "Accuracy", "higher", is_fraction=True),
        Column("exact", "Exact binomial", None),
        Column("correct", "Right", None, digits=0),
        Column("answers", "Answers", None, digits=0),
    ),
    "rating": (
        Column("descriptiveness", "Descriptiveness", "higher", digits=2),
        Column("accuracy", "Accuracy", "higher", digits=2),
        Column("f1", "F1", "higher", digits=2),
        Column("fluency", "Fluency", "higher", digits=2),
        Column("ratings", "Captions rated", None, digits=0),
    ),
}

_LEGENDS = {
    "retrieval": (
        "Accuracy: fraction of questions with the correct image; chance is {chance:.3f}. ± or [low, high]: 95 % "
        "interval over sets of images or over participants, whichever is wider. Exact binomial: interval of Clopper "
        "and Pearson, which treats all answers as independent."
    ),
    "rating": (
        "Ratings from 1 (terrible) to 5 (excellent). F1: harmonic mean of the means of descriptiveness and accuracy. ± or "
        "[low, high]: 95 % bootstrap interval over images or over participants, whichever is wider."
    ),
}


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> dict[str, Any]:
    """One table of the result; columns with words are left-aligned."""
    words = [name in ("", "Measure", "Level", "Part", "Reason") for name in header]
    return {"title": title, "header": header, "rows": rows, "note": note, "words": words}


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _range(interval: Sequence[float] | None) -> str:
    return "–" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]"


def _tables(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    columns = _COLUMNS[result["kind"]]
    # A cell shows one interval, so the exact interval has another column.
    exact = {"exact": None, "exact_reason": None} if result["kind"] == "retrieval" else {}
    check_rows([{**row, **exact} for row in result["rows"]], columns)

    def cell(row: Mapping[str, Any], column: Column) -> str:
        return _range(row.get("accuracy_exact_ci")) if column.key == "exact" else format_cell(row, column)

    rows = [[row["name"], *(cell(row, column) for column in columns)] for row in result["rows"]]
    legend = _LEGENDS[result["kind"]].format(chance=result.get("chance", 0.0))
    found = [_table("Systems", ["", *(column.title for column in columns)], rows, legend)]
    if result["paired"]:
        note = (
            "On the sets of images, or images, with answers for both systems: two-sided paired randomisation test, not "
            "corrected for the number of tests."
        )
        rows = []
        for pair in result["paired"]:
            row = [f"{pair['a']} − {pair['b']}", pair["measure"], _number(pair["difference"])]
            row += [_range(pair.get("difference_ci")), _number(pair.get("p_value"), 4), str(pair["num_groups"])]
            rows.append(row)
        header = ["", "Measure", "Difference", "95 % interval", "p", "Groups"]
        found.append(_table("Differences", header, rows, note))
    rows = []
    for entry in result["agreement"]:
        alpha = f"not run: {entry['alpha_reason']}" if entry["alpha"] is None else _number(entry["alpha"])
        rows.append([entry["measure"], entry["level"], alpha, str(entry["units"]), str(entry["people"])])
    header = ["", "Level", "Krippendorff's alpha", "Rated by two or more", "People"]
    found.append(_table("Agreement", header, rows))
    names = [name for name in result["participants"][0] if name != "participant"]
    rows = [[entry["participant"], *(str(entry[name]) for name in names)] for entry in result["participants"]]
    found.append(_table("Participants", ["", *(name.replace("_", " ").capitalize() for name in names)], rows))
    if result["dropped"]:
        rows = [[entry["participant"], entry["part"], entry["reason"]] for entry in result["dropped"]]
        found.append(_table("Dropped participants", ["", "Part", "Reason"], rows))
    if result["rejected"]:
        rows = [[entry["file"], entry["reason"]] for entry in result["rejected"]]
        found.append(_table("Files that do not count", ["", "Reason"], rows))
    return found


def _page(result: Mapping[str, Any]) -> dict[str, Any]:
    title = "Retrieval by people" if result["kind"] == "retrieval" else "Ratings by people"
    note = f"Study {result['study']}. {result['signature']}"
    return {"title": title, "note": note, "tables": _tables(result)}


def study_markdown(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    page = _page(result)
    lines = [f"# {page['title']}\n", escape_markdown(page["note"])]
    for table in page["tables"]:
        lines += [f"\n## {table['title']}\n", "| " + " | ".join(map(escape_markdown, table["header"])) + " |"]
        lines.append("|" + "".join(":--|" if left else "--:|" for left in table["words"]))
        lines += ["| " + " | ".join(map(escape_markdown, row)) + " |" for row in table["rows"]]
        lines += [f"\n{escape_markdown(table['note'])}"] if table["note"] else []
    return "\n".join(lines) + "\n"


def study_html(result: Mapping[str, Any]) -> str:
    """The result as one HTML page that needs nothing else."""
    return render_html(TEMPLATES, "study_results", **_page(result))


# --- `captionrl study score`: score the answers of participants ------------------------------------------------------


def score_answers(
    key: Mapping[str, Any], answers: Sequence[Answers], *, max_wrong_controls: int = 1, seed: int = 0
) -> dict[str, Any]:
    """Join answers with the key and score them; adds the median seconds per question of each participant."""
    joined = [
        (found, question, found.values[question["id"]])
        for found in answers
        for question in key["parts"][found.part]
        if question["id"] in found.values
    ]
    systems = key["systems"]
    if key["kind"] == "retrieval":
        picks = [
            Pick(found.participant, found.part, q["group"], q["system"], values[0], q["right"])
            for found, q, values in joined
        ]
        size = key["settings"]["set_size"]
        result = score_picks(picks, systems, set_size=size, max_wrong_controls=max_wrong_controls, seed=seed)
    else:
        ratings = [Rating(found.participant, q["group"], q["system"], values) for found, q, values in joined]
        result = score_ratings(ratings, systems, scales=RATING_SCALES, seed=seed)
    times: dict[str, list[int]] = {}
    for found in answers:
        times.setdefault(found.participant, []).extend(found.milliseconds.values())
    for entry in result["participants"]:
        entry["seconds_per_question"] = round(median(times[entry["participant"]]) / 1000, 1)
    return result


def score(arguments: ScoreOptions) -> None:
    """Score the answers, and write the tables."""
    key = read_key(arguments.folder)
    answers, rejected = collect_answers(arguments.answers, key, allow_incomplete=arguments.allow_incomplete)
    for entry in rejected:
        print(f"captionrl study: {entry['file']} does not count: {entry['reason']}", file=sys.stderr)
    if not answers:
        told = "; ".join(f"{entry['file']}: {entry['reason']}" for entry in rejected[:3])
        raise ValueError(f"None of {len(rejected)} files of answers counts ({told}). Ask for valid files.")

    result = {
        "kind": key["kind"],
        "study": key["fingerprint"],
        **score_answers(key, answers, max_wrong_controls=arguments.max_wrong_controls, seed=arguments.seed),
        "rejected": rejected,
        "files": sorted(found.path.name for found in answers),
        "settings": key["settings"],
    }
    folder = arguments.output_dir or arguments.folder
    markdown = study_markdown(result)
    write_json(folder / "results.json", result)
    atomic_write_text(folder / "results.md", markdown)
    atomic_write_text(folder / "results.html", study_html(result))
    if arguments.json:
        print(json.dumps(to_plain(result), ensure_ascii=False))
        return
    print(markdown)
    print(f"Written to {folder}: results.json, results.md, results.html")
