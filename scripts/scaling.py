"""Measures memory and time of features, bags, evaluation and boosting at three sizes of the data.

    python scripts/scaling.py          # about seven CPU minutes; writes docs/results/scaling.json and docs/scaling.md
    python scripts/scaling.py --render # the tables from existing numbers

Each size runs in a separate process with one thread. Time is the CPU time of the process. Memory is the peak of its
resident set minus its value after the input was created (Linux counts and resets the peak). The exponent is the slope
of a line through the logarithms: 1 means that twice the data takes twice as much.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a program, only scripts/ is on the path

from hf_captionrl.io import write_json  # noqa: E402
from hf_captionrl.reports.versions import installed_versions  # noqa: E402
from scripts.common import write_section  # noqa: E402
from scripts.scaling_stages import STAGES  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "scaling.json"
PAGE = ROOT / "docs" / "scaling.md"


def memory_mib(what: str) -> float:
    """A number of this process from `/proc/self/status`. In MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:")) / 1024


def _child(stage: str, count: int, answers: Any) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            work = STAGES[stage][1](count, Path(folder))
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
            held, started = memory_mib("VmRSS"), time.process_time()
            further = work()
            seconds = time.process_time() - started
            found = {"rows": count, "cpu_s": seconds, "peak_mib": max(memory_mib("VmHWM") - held, 0.0)}
            answers.put(found | (further() if callable(further) else {}))
    except Exception as error:  # the parent says it
        answers.put({"rows": count, "error": f"{type(error).__name__}: {error}"})


def measure(stage: str, count: int) -> dict[str, Any]:
    """Measure one size of one stage in a separate process. Returns `rows`, `cpu_s` and `peak_mib`."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_child, args=(stage, count, answers))
    process.start()
    process.join()
    if process.exitcode or answers.empty():
        raise RuntimeError(f"{stage} at {count} rows ended with {process.exitcode}. Run it with fewer rows.")
    answer = answers.get()
    if "error" in answer:
        raise RuntimeError(f"{stage} at {count} rows: {answer['error']}.")
    return answer


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the least-squares line through the logarithms.

    `values` are above 0.
    """
    if min(*sizes, *values) <= 0 or len(set(sizes)) < 2:
        raise ValueError(f"sizes {list(sizes)} and values {list(values)} must be above 0, and sizes differ.")
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def render(results: Mapping[str, Any]) -> str:
    """The table of the page."""
    lines = [
        "| | rows | CPU s | peak MiB | time ~ rows^e | memory ~ rows^e |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, runs in results["stages"].items():
        rows, seconds = [run["rows"] for run in runs], [run["cpu_s"] for run in runs]
        memory = [max(run["peak_mib"], 0.1) for run in runs]
        cells = [
            " / ".join(f"{n:,}" for n in rows),
            " / ".join(f"{s:.2f}" for s in seconds),
            " / ".join(f"{m:.0f}" for m in memory),
            f"{exponent(rows, seconds):.2f}",
            f"{exponent(rows, memory):.2f}",
        ]
        lines.append(f"| {STAGES[name][0]} | " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts = [
        f"{run['rows']:,} rows: {run['build_s']:.1f} s to build, {1000 * run['search_s'] / run['rows']:.2f} ms per search, "
        f"recall {run['recall']:.3f}"
        for run in results["stages"].get("ivf_pq", ())
    ]
    lines += ["", f"IVF-PQ, in clusters of 200 rows: {'; '.join(parts)}."] if parts else []
    for run in results["stages"].get("pixel_shards", ())[-1:]:
        kilobytes = [run[name] / run["rows"] / 1000 for name in ("shards_bytes", "cache_bytes")]
        lines += [
            "",
            f"Prepared pixels, 384 x 384, per image: {kilobytes[0]:.1f} kB in the shards and {kilobytes[1]:.1f} kB in the cache.",
        ]
    return "\n".join(lines) + f"\n\nOne thread of a CPU. {versions}.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the numbers, render the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="measure nothing, render existing numbers")
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=STAGES,
        default=list(STAGES),
        help="stages to measure; others keep their numbers",
    )
    args = parser.parse_args(argv)
    if not args.render:
        before = json.loads(RESULTS.read_text(encoding="utf-8"))["stages"] if RESULTS.is_file() else {}
        found = {name: runs for name, runs in before.items() if name not in args.stages}
        versions = installed_versions()
        kept = {name: versions[name] for name in ("python", "torch", "datasets") if name in versions}
        for name in args.stages:
            found[name] = [measure(name, count) for count in STAGES[name][2]]
            print(
                name,
                [(run["rows"], round(run["cpu_s"], 2), round(run["peak_mib"])) for run in found[name]],
                flush=True,
            )
            # After each stage, so that an interrupted run keeps finished stages.
            write_json(RESULTS, {"stages": {name: found[name] for name in STAGES if name in found}, "versions": kept})
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    write_section(PAGE, "scaling", render(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
