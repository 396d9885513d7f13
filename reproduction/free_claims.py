"""Precision, recall and verdicts of the truth checker on free text with gold claims, for docs/scenes.md.

    python reproduction/free_claims.py tests/scenes/free_captions.jsonl --output claims.json

A row of a file has `id`, `style`, `facts`, `caption` and `claims`, a list of `{"kind", "text", "about", "verdict"}`, where the verdict is
`"true"`, `"false"` or `"undecided"`. A claim of the reader matches a gold claim of the same kind whose words overlap
most, whatever the verdicts; every claim matches at most once. Intervals come from a bootstrap over captions.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only reproduction/ is on the path
from hf_captionrl.metrics.bootstrap import bootstrap_interval
from hf_captionrl.scenes import CheckResult, check
from hf_captionrl.utils.io import read_jsonl, write_json

_KINDS = {
    "object": "object|absence|kind|second|category of .*",
    "count": "(second )?count|plural",
    "attribute": "(natural )?(second[ _])?(colour|size|orientation)|attribute|pattern of a thing",
    "relation": "relation|side|interaction",
    "background": "(background|pattern)",
    "position": "position|column",
    "other": "(weather|time|alone|row)|other",
}
_STOP = frozenset("a an the of in on at to is are it its their with and by".split())


def kind_of(attribute: str) -> str:
    """Kind of gold claim that a claim about an attribute can match."""
    attribute = attribute.removeprefix("no ")  # the claim is negated
    return next(kind for kind, pattern in _KINDS.items() if re.fullmatch(pattern, attribute))


def _words(text: str) -> frozenset[str]:
    words = frozenset(re.findall(r"[a-z0-9]+", text.lower()))
    return words - _STOP or words


def match(gold: Sequence[Mapping[str, str]], result: CheckResult) -> list[tuple[str, str, str]]:
    """Pairs of gold claims and claims of the reader as `(kind, gold verdict, verdict)`; `""` where one has no partner."""
    undecided = getattr(result, "undecided", ())
    said = [
        (kind_of(claim.attribute), _words(claim.text), verdict)
        for verdict, claims in (("true", result.right), ("false", result.wrong), ("undecided", undecided))
        for claim in claims
    ]
    overlaps = sorted(
        (-len(_words(claim["text"]) & words) / len(_words(claim["text"]) | words), i, j)
        for i, claim in enumerate(gold)
        for j, (kind, words, _) in enumerate(said)
        if kind == claim["kind"] and _words(claim["text"]) & words
    )
    partner: dict[int, int] = {}
    for _, i, j in overlaps:
        if i not in partner and j not in partner.values():
            partner[i] = j
    pairs = [
        (claim["kind"], claim["verdict"], said[partner[i]][2] if i in partner else "") for i, claim in enumerate(gold)
    ]
    return pairs + [(kind, "", verdict) for j, (kind, _, verdict) in enumerate(said) if j not in partner.values()]


def _measure(pairs: Sequence[Sequence[tuple[str, str, str]]]) -> dict[str, Any]:
    """The numbers over captions, each with its interval. Precision and recall count claims that the facts decide."""
    decided = ("true", "false")
    # name: which pairs count, and which of these are hits
    ratios = {
        "precision": (lambda g, r: r in decided, lambda g, r: bool(g)),
        "recall": (lambda g, r: g in decided, lambda g, r: bool(r)),
        "verdict_accuracy": (lambda g, r: bool(g and r), lambda g, r: g == r),
        "precision_false": (lambda g, r: r == "false", lambda g, r: g == r),
        "recall_false": (lambda g, r: g == "false", lambda g, r: g == r),
        "recall_undecided": (lambda g, r: g == "undecided", lambda g, r: bool(r)),
    }
    measured = {}
    for name, (counts, hits) in ratios.items():
        of = [[hits(g, r) for _, g, r in caption if counts(g, r)] for caption in pairs]
        above, below = [sum(hit) for hit in of], [len(hit) for hit in of]
        interval = bootstrap_interval(above, weights=below) if sum(below) else None
        value = sum(above) / sum(below) if sum(below) else None
        measured[name] = {"value": value, "interval": interval, "num_claims": sum(below)}
    return measured


def evaluate(rows: Sequence[Mapping[str, Any]], checker: Callable[[str, Any], CheckResult] = check) -> dict[str, Any]:
    """Measure a checker on captions with gold claims, overall, per style and per kind."""
    pairs = [match(row["claims"], checker(row["caption"], row["facts"])) for row in rows]
    by_style = {
        style: _measure([p for p, row in zip(pairs, rows, strict=True) if row["style"] == style])
        for style in sorted({row["style"] for row in rows})
    }
    by_kind = {kind: _measure([[p for p in caption if p[0] == kind] for caption in pairs]) for kind in _KINDS}
    verdicts = Counter(f"{g or 'no claim'} read as {r or 'no claim'}" for caption in pairs for _, g, r in caption)
    return _measure(pairs) | {"verdicts": dict(sorted(verdicts.items())), "styles": by_style, "kinds": by_kind}


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate the checker, print a table and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args(argv)
    results: dict[str, Any] = {}
    for file in arguments.files:
        rows = [row for _, row in read_jsonl(file)]
        numbers = evaluate(rows)
        results[file.stem] = {"num_captions": len(rows), "grammar": numbers}
        print(f"{file.name}: {len(rows)} captions")
        for group, cells in [("all", numbers), *numbers["styles"].items(), *numbers["kinds"].items()]:
            texts = [
                f"{name} {cell['value']:.3f} [{cell['interval'][0]:.3f}, {cell['interval'][1]:.3f}]"
                for name, cell in cells.items()
                if isinstance(cell, dict) and cell.get("interval")
            ]
            print(f"  {group:<12}" + "  ".join(texts))
    command = f"python reproduction/free_claims.py {' '.join(str(file) for file in arguments.files)}"
    write_json(arguments.output, {"command": command, "files": results})


if __name__ == "__main__":
    main()
