"""docs/findings_*.md: which findings of a paper hold in the embedded world. The verdicts are computed, not written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_captionrl.apps.experiments.arguments import read_yaml
from scripts.reproduction.numbers import Measured, difference, look_up, measured, scaled, shown
from scripts.reproduction.real import settings_of
from scripts.reproduction.runs import ROOT, of_older_world

FINDINGS = ROOT / "docs" / "findings.yaml"
HOLDS, UNSEEN, OPEN, FAILS, MISSING = "holds", "no difference seen", "open", "does not hold", "not tested"
UNFINISHED = "not finished"


def load_findings(path: Path = FINDINGS) -> dict[str, Any]:
    """The findings."""
    return read_yaml(path)


def verdict(found: Measured, expected: str) -> str:
    """Whether a difference is as a finding says."""
    if expected not in (">", "<", "="):
        raise ValueError(
            f"expected ({expected!r}) must be '>', '<' or '='. Say what the paper claims of first minus second."
        )
    same_for_every_seed = len(found.values) > 1 and found.low is None
    low = found.value if same_for_every_seed else found.low
    high = found.value if same_for_every_seed else found.high
    if low is None or high is None:
        return OPEN
    above, below = low > 1e-9, high < -1e-9
    if expected == "=":
        return FAILS if above or below else UNSEEN
    if not (above or below):
        return FAILS if same_for_every_seed else OPEN
    return HOLDS if above == (expected == ">") else FAILS


def _sides(compare: Mapping[str, Any], results: Mapping[str, Any]) -> tuple[str, str, Measured]:
    """Both numbers as text, the second as often as is claimed, and their difference; of two runs seed by seed as well."""
    record = results[compare["run"]]
    if "difference" in compare:
        return "", "", measured(compare["difference"], record)
    other = results[compare.get("second_run", compare["run"])]
    if record.get("seeds") != other.get("seeds"):
        raise ValueError(
            f"{compare['run']} and {compare['second_run']} have different seeds. Run both with the same ones."
        )
    times = compare.get("times", 1)
    first, second = measured(compare["first"], record), scaled(measured(compare["second"], other), times)
    return shown(first.value), shown(second.value), difference(first, second)


def _runs_of(compare: Mapping[str, Any]) -> list[str]:
    return [compare[key] for key in ("run", "second_run") if key in compare]


def is_pending(compare: Mapping[str, Any], results: Mapping[str, Any]) -> bool:
    """Whether a comparison waits for a new run: its preset got the column after the result was made."""
    if "pending" not in compare:
        return False
    for run, key in ((compare["run"], "first"), (compare.get("second_run", compare["run"]), "second")):
        place, _, column = compare[key].rpartition("/")
        if column not in look_up(place, results[run]):
            return True
    return False


def _of_all(verdicts: Sequence[str]) -> str:
    if not verdicts:
        return MISSING
    if len(set(verdicts)) == 1:
        return verdicts[0]
    if set(verdicts) <= {HOLDS, UNSEEN}:
        return HOLDS
    # That no difference was seen supports no claim by itself.
    return "holds in part" if HOLDS in verdicts else OPEN if FAILS not in verdicts else f"{OPEN} or {FAILS}"


def _filled(text: str, results: Mapping[str, Any]) -> str:
    """`{run:place}` replaced by the number, `{preset name setting}` by the setting of a preset."""

    def number(match: re.Match[str]) -> str:
        return shown(measured(match[2], results[match[1]]).value) if match[1] in results else "(not run)"

    def setting(match: re.Match[str]) -> str:
        found = settings_of(match[1])[match[2]]
        return ", ".join(map(str, found)) if isinstance(found, list) else str(found)

    text = re.sub(r"\{preset ([\w./-]+) (\w+)\}", setting, text)
    return re.sub(r"\{(\w+):([^{}]+)\}", number, text)


def _lines(finding: Mapping[str, Any], results: Mapping[str, Any]) -> tuple[str, list[str]]:
    lines, verdicts, missing = [], [], 0
    for compare in finding.get("compare", ()):
        of_results = {results[run].get("world", "1") if run in results else None for run in _runs_of(compare)}
        if None in of_results or len(of_results) > 1:  # numbers of different worlds cannot be compared
            missing += 1
            continue
        if is_pending(compare, results):
            missing += 1
            continue
        first, second, found = _sides(compare, results)
        verdicts.append(verdict(found, compare["expect"]))
        interval = "no interval"
        if found.low is not None and found.high is not None:
            interval = f"{shown(found.low)} to {shown(found.high)}"
        elif len(found.values) > 1:
            interval = "same for every seed"
        claim = {">": "first is larger", "<": "first is smaller", "=": "no difference"}[compare["expect"]]
        what = compare["what"] + of_older_world(*(results[run] for run in _runs_of(compare)))
        cells = [what, first, second, f"{shown(found.value)} [{interval}]", claim, verdicts[-1]]
        lines.append(f"| {' | '.join(cells)} |")
    head = ["| | first | second | first - second [95 % interval] | claim | verdict |", "|:--|--:|--:|--:|:--|:--|"]
    said = UNFINISHED if lines and missing else _of_all(verdicts)
    return said, [*head, *lines, ""] if lines else []


def _why(finding: Mapping[str, Any], lines: Sequence[str], results: Mapping[str, Any]) -> str:
    if finding.get("compare") and not lines:
        return "Its runs are not finished."
    return _filled(finding["why"], results)


_NAMED = re.compile(r"(Table|Figure)s? ((?:\d+\w?(?:, | and | to )?)+)")


def _naming(paper: str, kind: str, number: str) -> list[Mapping[str, Any]]:
    """Findings that name a table or figure of a paper."""
    found = []
    for finding in load_findings()[paper]["findings"]:
        named = {
            (what.lower(), item)
            for what, items in _NAMED.findall(finding.get("paper", ""))
            for item in re.findall(r"\d+", items)
        }
        if (kind, number) in named:
            found.append(finding)
    return found


def verdicts_of(paper: str, kind: str, number: str, results: Mapping[str, Any]) -> list[str]:
    """Verdicts of the findings that name a table or figure of a paper."""
    return [_lines(finding, results)[0] for finding in _naming(paper, kind, number)]


def _places_of(compare: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Results and their rows whose numbers are compared."""
    if "difference" in compare:  # recall_at_1_gains/BlendCap - references/rd100
        gains, names, _ = compare["difference"].split("/")
        return {(compare["run"], f"{gains.removesuffix('_gains')}/{name}") for name in names.split(" - ")}
    sides = ((compare["run"], compare["first"]), (compare.get("second_run", compare["run"]), compare["second"]))
    return {(run, place.rpartition("/")[0]) for run, place in sides}


def verdicts_of_row(
    table: tuple[str, str, str], run: str, place: str, results: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """What the findings that name a table `(paper, kind, number)` compare with a row of a result, and each verdict."""
    found = []
    for finding in _naming(*table):
        for compare in finding.get("compare", ()):
            worlds = {results[name].get("world", "1") if name in results else None for name in _runs_of(compare)}
            if None in worlds or len(worlds) > 1 or is_pending(compare, results):
                continue
            if (run, place) in _places_of(compare):
                found.append((compare["what"], verdict(_sides(compare, results)[2], compare["expect"])))
    return found


PAGE = """# Findings: {title}

{intro}

The verdicts are computed from the 95 % interval of first minus second (Student's t over pairs with the same seed, or a bootstrap over
images):

| verdict | the 95 % interval of the difference |
|:--|:--|
| holds | is entirely on the side that the paper states |
| does not hold | is entirely on the other side |
| open | contains 0 |
| no difference seen | contains 0, and the paper states no difference; differences smaller than the interval cannot be detected |
| holds in part | of some lines of the table is on the side that the paper states, but not of all |
| open or does not hold | of no line is on that side, and of at least one it is on the other |
| not finished | some of its runs are missing, or lack a column that they get when they are run again; the table has the others |

{summary}
{body}

Generated by `python scripts/reproduce.py --pages` from {sources}.
"""


def pages(results: Mapping[str, Any], findings: Mapping[str, Any] | None = None) -> dict[str, str]:
    """One page per paper, as Markdown by file name."""
    made = {}
    for paper, page in (load_findings() if findings is None else findings).items():
        body, summary = [], ["| | finding | in the paper | embedded world |", "|--:|:--|:--|:--|"]
        for number, finding in enumerate(page["findings"], 1):
            said, lines = _lines(finding, results)
            summary.append(f"| {number} | {finding['claim']} | {finding.get('paper', '')} | **{said}** |")
            body += ["", f"## {number}. {finding['claim']}", "", *lines]
            body.append(f"**{said.capitalize()}.** {_why(finding, lines, results)}")
        compared = [compare for finding in page["findings"] for compare in finding.get("compare", ())]
        runs = dict.fromkeys(run for compare in compared for run in _runs_of(compare))
        made[f"findings_{paper}.md"] = PAGE.format(
            title=page["title"],
            intro=_filled(page["intro"], results),
            summary="\n".join(summary),
            body="\n".join(body),
            sources=", ".join(f"[{name}](results/{name}.json)" for name in runs if name in results),
        )
    return made
