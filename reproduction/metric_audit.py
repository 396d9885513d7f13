"""Audits the metrics and rewards of the package that need no model of the Hub, for the table of docs/metrics.md.

python reproduction/metric_audit.py --output reproduction/results/metric_audit.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only scripts/ is on the path
from hf_captionrl.cli import main as captionrl
from hf_captionrl.utils.io import installed_versions, write_json

WITH_REFERENCES = ("bleu_1", "bleu_4", "rouge_l", "meteor", "cider_d", "cider", "ref_clip_score", "reward:cider")
OTHERS = (
    *("clip_score", "reward:self_retrieval", "reward:repetition", "reward:length", "reward:truncation"),
    *(
        "reward:claim_f1",
        "reward:question_oracle",
        "perplexity",
        "length",
        "truth_precision",
        "truth_recall",
        "truth_f1",
    ),
)
SCORERS = ("scenes:clip-reward", "scenes:siglip-held-out")


def tables(result: Mapping[str, Any]) -> str:
    """The numbers as Markdown: in parentheses what is not seen, in bold where the error is preferred."""
    lines = []
    for style, title in (("short", "Short references"), ("full", "References with all facts")):
        metrics = result[style]["metrics"]
        kinds = list(next(iter(metrics.values()))["sensitivity"])
        lines += ["", f"| {title} | {' | '.join(kinds)} |", f"|:--|{'--:|' * len(kinds)}"]
        for name, row in metrics.items():
            marks = {**dict.fromkeys(row["does_not_see"], "({})"), **dict.fromkeys(row["prefers_the_error"], "**{}**")}
            found = row["sensitivity"].items()
            cells = [marks.get(kind, "{}").format(f"{value['value']:.2f}") for kind, value in found]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    changes = list(next(iter(metrics.values()))["invariance"])
    header = [*changes, "rises with facts", "bias to length", "wrong ranking", "false alarms", "time / CIDEr-D"]
    lines += ["", f"| Short references | {' | '.join(header)} |", f"|:--|{'--:|' * len(header)}"]
    for name, row in result["short"]["metrics"].items():
        ranked = next(case for case in row["misranked"] if (case["error_rates"], case["images"]) == ([0.1, 0.2], 200))
        numbers = [*row["invariance"].values(), row["monotonicity"], row["length_bias"], ranked, row["false_alarms"]]
        cells = ["–" if one["value"] is None else f"{one['value']:.2f}" for one in numbers]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['cost']['value']:.2g} |")
    return "\n".join(lines[1:])


def main(argv: Sequence[str] | None = None) -> None:
    """Run both audits: with short references, and with full ones for the metrics that read references."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--n", type=int, default=1000, help="scenes")
    arguments = parser.parse_args(argv)
    result = {
        "command": f"python reproduction/metric_audit.py --output {arguments.output}",
        "versions": installed_versions(),
    }
    for style, metrics in (("short", (*WITH_REFERENCES, *OTHERS)), ("full", WITH_REFERENCES)):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
            options = ("--references", style, "--n", str(arguments.n), "--output", folder, "--device", "cpu", "--json")
            code = captionrl(["audit-metric", "--metric", *metrics, "--scorer", *SCORERS, *options])
        if code != 0:
            raise SystemExit(f"captionrl audit-metric --references {style} failed")
        result[style] = json.loads(printed.getvalue())
    write_json(arguments.output, result)
    print(tables(result))


if __name__ == "__main__":
    main()
