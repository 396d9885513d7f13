"""Causes faults in every part and counts what is lost: docs/results/reliability.json and docs/reliability.md.

    python scripts/fault_campaign.py                                    # everything, 20 faults each
    python scripts/fault_campaign.py --areas training push --kills 50 --seed 7
    python scripts/fault_campaign.py --page_only                        # the page from existing numbers

The areas are defined in `tests/faults/of_*.py`. Areas that are not run keep their previous rows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only scripts/ is on the path
from hf_captionrl.metrics.table import installed_versions
from hf_captionrl.utils.io import write_json
from scripts.machine_facts import library_versions
from scripts.page_sections import write_section

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("torch", "transformers", "accelerate", "safetensors")  # they determine how a run is saved
RESULTS = ROOT / "docs" / "results" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown, with their sums."""
    lines = [
        "| fault | injected | survived | lost | repeated | longest wait, s | seconds |",
        "|:--|--:|--:|--:|--:|--:|--:|",
    ]
    names = ("faults", "survived", "lost", "repeated", "seconds")
    for row in [*rows, {"title": "**all**", **{name: sum(row[name] for row in rows) for name in names}}]:
        counts = " | ".join(f"{row[name]:,}" for name in names[:-1])
        wait = row.get("longest_wait_s")
        lines.append(f"| {row['title']} | {counts} | {'' if wait is None else wait} | {row['seconds']:.0f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run areas and write their results."""
    os.environ.update(dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tests.faults.areas import AREAS, run_area
    from tests.faults.warm_process import WarmProcess

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--areas", nargs="+", choices=[*AREAS], default=[*AREAS], metavar="AREA", help=", ".join(AREAS)
    )
    parser.add_argument(
        "--kills", type=int, default=20, metavar="N", help="faults of each area (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the times of the faults (default: %(default)s)"
    )
    parser.add_argument("--page_only", action="store_true", help="write the page from the results that are there")
    arguments = parser.parse_args(argv)
    before = json.loads(RESULTS.read_text(encoding="utf-8"))["areas"] if RESULTS.exists() else []
    rows = {row["area"]: row for row in before}
    if not arguments.page_only:
        revision = installed_versions().get("git_revision")
        with WarmProcess() as warm_process:
            for name in arguments.areas:
                row = run_area(warm_process, name, arguments.kills, arguments.seed)
                rows[name] = {**row, "seed": arguments.seed, "revision": revision}
                print(
                    f"{name}: {row['survived']} of {row['faults']}, lost {row['lost']}, {row['seconds']} s", flush=True
                )
                for note in row["notes"]:
                    print(f"  {note}", file=sys.stderr)
                # After each area: this program may be killed, too.
                ordered = [rows[known] for known in AREAS if known in rows]
                made = {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count()}
                write_json(RESULTS, {"versions": library_versions(*LIBRARIES), **made, "areas": ordered})
    ordered = [rows[known] for known in AREAS if known in rows]
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    named = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    section = (
        f"{table(ordered)}\n\nPython {found['python']}, {named}; {found['cpus']} CPU cores, shared with other work."
    )
    write_section(PAGE, "faults", section)
    return int(any(row["survived"] < row["faults"] or row["lost"] for row in ordered))


if __name__ == "__main__":
    sys.exit(main())
