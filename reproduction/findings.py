"""findings_*.md of the site: which findings of a paper hold in the embedded world. The verdicts are computed, not written."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import false_discovery_control

from hf_captionrl.apps.experiments.arguments import read_yaml
from reproduction import ROOT
from reproduction.measurements import Measured, detectable, difference, measured, p_value, scaled, shown
from reproduction.real import settings_of
from reproduction.runs import of_older_world

FINDINGS = ROOT / "reproduction" / "findings.yaml"
HOLDS, UNSEEN, OPEN, FAILS, MISSING = "holds", "no difference seen", "open", "does not hold", "not tested"
MIXED, UNFINISHED = "mixed", "not finished"


@functools.cache
def load_findings(path: Path = FINDINGS) -> dict[str, Any]:
    """The findings; a page may make the claims of another page on a result of its own."""
    pages = read_yaml(path)
    for page in pages.values():
        if "claims_of" in page:
            other, old, new = page["claims_of"]
            page["findings"] = json.loads(json.dumps(pages[other]["findings"]).replace(old, new))
    return pages


def verdict(found: Measured, expected: str, margin: float | None = None) -> str:
    """Whether a difference is as a finding says; `margin` is the largest difference that counts as none (`=`)."""
    if expected not in (">", "<", "=") or (margin is not None and expected != "="):
        raise ValueError(
            f"expected ({expected!r}) must be '>', '<' or '=', and margin ({margin!r}) goes with '='. Say what the paper claims "
            "of first minus second."
        )
    same_for_every_seed = found.is_constant
    low = found.value if same_for_every_seed else found.low
    high = found.value if same_for_every_seed else found.high
    if low is None or high is None:
        return OPEN
    if margin is not None:  # two one-sided tests
        if -margin < low and high < margin:
            return HOLDS
        return FAILS if low > margin or high < -margin else OPEN
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


def _of_all(verdicts: Sequence[str]) -> str:
    found = set(verdicts)
    if not found:
        return MISSING
    if len(found) == 1:
        return verdicts[0]
    if HOLDS in found:
        return MIXED if FAILS in found else f"{HOLDS} in part"
    return f"{OPEN} or {FAILS}" if FAILS in found else OPEN


def _filled(text: str, results: Mapping[str, Any]) -> str:
    """`{run:place}` replaced by the number, `{preset name setting}` by the setting of a preset."""

    def number(match: re.Match[str]) -> str:
        return shown(measured(match[2], results[match[1]]).value) if match[1] in results else "(not run)"

    def setting(match: re.Match[str]) -> str:
        found = settings_of(match[1])[match[2]]
        return ", ".join(map(str, found)) if isinstance(found, list) else str(found)

    text = re.sub(r"\{preset ([\w./-]+) (\w+)\}", setting, text)
    return re.sub(r"\{(\w+):([^{}]+)\}", number, text)


_RECALL = re.compile(r"(.+/)((?:bag_\d|rd100|pool|emscore)_recall_at_1|recall_at_1_all)")
LISTENERS = {
    "the reward scorer": lambda key: f"reward_{key.replace('pool', 'rd100')}",
    "truth": lambda key: f"{key[:5] if key.startswith('bag') else 'bag_7'}_truth_recall_at_1",
}
"""Who else finds the image from the caption, and the key of its recall: of the pool, that among 100; by truth, in bags alone."""


class Comparison(NamedTuple):
    """A comparison of a finding: both sides as text, their difference and the verdict; of recall, also by other listeners."""

    compare: Mapping[str, Any]
    first: str
    second: str
    found: Measured
    verdict: str
    heard: Mapping[str, tuple[Measured, str]]


def _heard(compare: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, tuple[Measured, str]]:
    """The difference and its verdict by each of the other listeners that a result has."""
    needed = ("difference",) if "difference" in compare else ("first", "second")
    sides = {side: _RECALL.fullmatch(compare.get(side, "")) for side in needed}
    found = {}
    for listener, key in LISTENERS.items():
        places = {side: match[1] + key(match[2]) for side, match in sides.items() if match}
        try:
            number = _sides({**compare, **places}, results)[2] if len(places) == len(needed) else None
        except KeyError:  # a result without this listener
            continue
        # Who hears nothing, or the same captions twice, cannot tell.
        if number is not None and any(number.values or [number.value]):
            found[listener] = number, verdict(number, compare["expect"], compare.get("margin"))
    return found


def _compared(finding: Mapping[str, Any], results: Mapping[str, Any]) -> list[Comparison]:
    """The comparisons of a finding that can be made."""
    made = []
    for compare in finding.get("compare", ()):
        worlds = {results[run].get("world", "1") if run in results else None for run in _runs_of(compare)}
        # Numbers of different worlds cannot be compared.
        if None not in worlds and len(worlds) == 1:
            first, second, found = _sides(compare, results)
            said = verdict(found, compare["expect"], compare.get("margin"))
            made.append(Comparison(compare, first, second, found, said, _heard(compare, results)))
    return made


def _said(finding: Mapping[str, Any], made: Sequence[Comparison]) -> str:
    if made and len(made) < len(finding["compare"]):
        return UNFINISHED
    return _of_all([comparison.verdict for comparison in made])


def said(finding: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """The verdict on a finding."""
    return _said(finding, _compared(finding, results))


def _by_listener(made: Sequence[Comparison]) -> str:
    """The verdict on the comparisons of recall by each of the other listeners, in a clause; empty if there are none."""
    verdicts = {name: [c.heard[name][1] for c in made if name in c.heard] for name in LISTENERS}
    return "; ".join(f"by {name}: {_of_all(said)}" for name, said in verdicts.items() if said)


def adjusted(differences: Iterable[Measured]) -> dict[Measured, float]:
    """The p-value of each difference after Benjamini and Hochberg's correction for all of them; one that several claims use counts once."""
    known = {number: value for number in differences if (value := p_value(number)) is not None}
    return dict(zip(known, false_discovery_control(list(known.values())).tolist(), strict=True)) if known else {}


def _surviving(numbers: Iterable[Measured], of_page: Mapping[Measured, float]) -> str:
    found = [of_page[number] for number in numbers if number in of_page and (p_value(number) or 0.0) < 0.05]
    return f"{sum(corrected < 0.05 for corrected in found)} of {len(found)}"


def _with_effect(found: Measured, said: str) -> str:
    """A verdict; where nothing is seen, with the difference that would have been."""
    least = detectable(found) if said in (OPEN, UNSEEN) else None
    return said if least is None else f"{said} (detectable: {shown(least)})"


def _chance(corrected: float | None) -> str:
    return "" if corrected is None else "< 0.001" if corrected < 0.001 else f"{corrected:.3f}"


def _by_other(number: Measured, said: str, of_page: Mapping[Measured, float]) -> str:
    chance = _chance(of_page.get(number))
    return f"{_with_interval(number)};{f' p {chance};' if chance else ''} {_with_effect(number, said)}"


def _with_interval(number: Measured) -> str:
    interval = "no interval"
    if number.values:
        interval = "same for every seed" if number.is_constant else f"seeds {', '.join(map(shown, number.values))}"
    if number.low is not None and number.high is not None:
        interval = f"{shown(number.low)} to {shown(number.high)}"
    return f"{shown(number.value)} [{interval}]"


def _lines(made: Sequence[Comparison], of_page: Mapping[Measured, float], results: Mapping[str, Any]) -> list[str]:
    lines = []
    listeners = [name for name in LISTENERS if any(name in comparison.heard for comparison in made)]
    for compare, first, second, found, said, heard in made:
        claim = {">": "first is larger", "<": "first is smaller", "=": "no difference"}[compare["expect"]]
        claim += f" (±{shown(compare['margin'])})" if "margin" in compare else ""
        what = compare["what"] + of_older_world(*(results[run] for run in _runs_of(compare)))
        cells = [what, first, second, _with_interval(found), _chance(of_page.get(found)), claim]
        cells.append(_with_effect(found, said))
        cells += [_by_other(*heard[name], of_page) if name in heard else "" for name in listeners]
        lines.append(f"| {' | '.join(cells)} |")
    columns = ["first", "second", "first - second [95 % interval]", "corrected p", "claim", "verdict"]
    columns += [f"by {name}, with corrected p" for name in listeners]
    head = [f"| | {' | '.join(columns)} |", f"|:--|--:|--:|--:|--:|:--|:--|{':--|' * len(listeners)}"]
    return [*head, *lines, ""] if lines else []


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
    return [said(finding, results) for finding in _naming(paper, kind, number)]


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
    return [
        (comparison.compare["what"], comparison.verdict)
        for finding in _naming(*table)
        for comparison in _compared(finding, results)
        if (run, place) in _places_of(comparison.compare)
    ]


PAGE = """# Findings: {title}

{intro}

[What the verdicts mean](findings.md). Recall is by the held-out scorer; beside it stand the reward scorer (among 100 where the comparison is of the pool) and
the truth checker (in bags of 7 where it is not of bags; nothing where it accepts no caption at all). In parentheses, the difference that would have been detected in 4 of 5 such experiments.
Corrected p: the p-value of no difference after Benjamini and Hochberg's correction for the {number} differences of this page, by every listener. Verdicts follow from the
uncorrected intervals: {own} intervals that exclude 0 remain significant (p < 0.05), and {others} by the other listeners.

{summary}
{body}

Generated by `python reproduction/reproduce.py --pages` from {sources}.
"""


def pages(results: Mapping[str, Any], findings: Mapping[str, Any] | None = None) -> dict[str, str]:
    """One page per paper, as Markdown by file name."""
    written = {}
    for paper, page in (load_findings() if findings is None else findings).items():
        made = [_compared(finding, results) for finding in page["findings"]]
        compared = [comparison for of_finding in made for comparison in of_finding]
        own = [c.found for c in compared]
        others = {number for c in compared for number, _ in c.heard.values()}
        corrected = adjusted([*own, *others])
        body: list[str] = []
        cited = any("paper" in finding for finding in page["findings"])
        columns = ["finding", *["in the paper"] * cited, "verdict", "recall by others"]
        summary = [f"| | {' | '.join(columns)} |", "|--:" + "|:--" * len(columns) + "|"]
        for number, (finding, of_finding) in enumerate(zip(page["findings"], made, strict=True), 1):
            said, lines = _said(finding, of_finding), _lines(of_finding, corrected, results)
            by_others = _by_listener(of_finding)
            cells = [finding["claim"], *[finding.get("paper", "")] * cited, f"**{said}**", by_others]
            summary.append(f"| {number} | {' | '.join(cells)} |")
            body += ["", f"## {number}. {finding['claim']}", "", *lines]
            body.append(f"**{said.capitalize()}.** {_why(finding, lines, results)}")
        runs = dict.fromkeys(run for comparison in compared for run in _runs_of(comparison.compare))
        written[f"findings_{paper}.md"] = PAGE.format(
            title=page["title"],
            intro=_filled(page["intro"], results),
            summary="\n".join(summary),
            body="\n".join(body),
            number=len(corrected),
            own=_surviving(own, corrected),
            others=_surviving(others, corrected),
            sources=", ".join(f"[{name}](results/{name}.json)" for name in runs if name in results),
        )
    return written
