"""Results of a human study as tables in Markdown and HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_captionrl.reports.table import Column, check_rows, escape_markdown, format_cell
from hf_captionrl.reports.templating import render_html
from hf_captionrl.studies.participant_page import TEMPLATES

__all__ = ["study_html", "study_markdown"]

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


_WORDS = frozenset({"", "Measure", "Level", "Part", "Reason"})
"""Left-aligned columns: those with words."""


@dataclass(frozen=True)
class _Table:
    """A heading, column titles and cells."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @property
    def words(self) -> list[bool]:
        """Whether each column is left-aligned."""
        return [name in _WORDS for name in self.header]


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _range(interval: Sequence[float] | None, digits: int = 3) -> str:
    return "–" if interval is None else f"[{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def _systems(result: Mapping[str, Any]) -> _Table:
    kind = result["kind"]
    columns = _COLUMNS[kind]
    # A cell shows one interval, so the exact interval has another column.
    rows = [
        {**row, "exact": None, "exact_reason": None} if kind == "retrieval" else dict(row) for row in result["rows"]
    ]
    check_rows(rows, columns)
    cells = [
        [
            row["name"],
            *(
                _range(row.get("accuracy_exact_ci")) if column.key == "exact" else format_cell(row, column)
                for column in columns
            ),
        ]
        for row in rows
    ]
    legend = _LEGENDS[kind].format(chance=result.get("chance", 0.0))
    return _Table("Systems", ["", *(column.title for column in columns)], cells, legend)


def _differences(pairs: Sequence[Mapping[str, Any]]) -> _Table:
    return _Table(
        "Differences",
        ["", "Measure", "Difference", "95 % interval", "p", "Groups"],
        [
            [
                f"{pair['a']} − {pair['b']}",
                pair["measure"],
                _number(pair["difference"]),
                _range(pair.get("difference_ci")),
                _number(pair.get("p_value"), 4),
                str(pair["num_groups"]),
            ]
            for pair in pairs
        ],
        "On the sets of images, or images, with answers for both systems: two-sided paired randomisation test, not "
        "corrected for the number of tests.",
    )


def _agreement(entries: Sequence[Mapping[str, Any]]) -> _Table:
    return _Table(
        "Agreement",
        ["", "Level", "Krippendorff's alpha", "Rated by two or more", "People"],
        [
            [
                entry["measure"],
                entry["level"],
                _number(entry["alpha"]) if entry["alpha"] is not None else f"not run: {entry['alpha_reason']}",
                str(entry["units"]),
                str(entry["people"]),
            ]
            for entry in entries
        ],
    )


def _participants(people: Sequence[Mapping[str, Any]]) -> _Table:
    names = [name for name in people[0] if name != "participant"]
    return _Table(
        "Participants",
        ["", *(name.replace("_", " ").capitalize() for name in names)],
        [[entry["participant"], *(str(entry[name]) for name in names)] for entry in people],
    )


def _tables(result: Mapping[str, Any]) -> list[_Table]:
    found = [_systems(result)]
    if result["paired"]:
        found.append(_differences(result["paired"]))
    found += [_agreement(result["agreement"]), _participants(result["participants"])]
    if result["dropped"]:
        rows = [[entry["participant"], entry["part"], entry["reason"]] for entry in result["dropped"]]
        found.append(_Table("Dropped participants", ["", "Part", "Reason"], rows))
    if result["rejected"]:
        rows = [[entry["file"], entry["reason"]] for entry in result["rejected"]]
        found.append(_Table("Files that do not count", ["", "Reason"], rows))
    return found


def _titles(result: Mapping[str, Any]) -> tuple[str, str]:
    title = "Retrieval by people" if result["kind"] == "retrieval" else "Ratings by people"
    return title, f"Study {result['study']}. {result['signature']}"


def study_markdown(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    title, note = _titles(result)
    parts = [f"# {title}\n\n{escape_markdown(note)}\n"]
    for table in _tables(result):
        lines = [f"\n## {table.title}\n", "| " + " | ".join(map(escape_markdown, table.header)) + " |"]
        lines.append("|" + "".join(":--|" if left else "--:|" for left in table.words))
        lines += ["| " + " | ".join(map(escape_markdown, row)) + " |" for row in table.rows]
        if table.note:
            lines.append(f"\n{escape_markdown(table.note)}")
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


def study_html(result: Mapping[str, Any]) -> str:
    """The result as one HTML page that needs nothing else."""
    title, note = _titles(result)
    return render_html(TEMPLATES, "study_results", title=title, note=note, tables=_tables(result))
