"""Runs the tests with the lowest, a middle and the newest releases of the libraries: `make test-versions`.

    python scripts/test_versions.py                  # environments without a result of this revision, then the page
    python scripts/test_versions.py --only lowest    # one environment; the others keep their results
    python scripts/test_versions.py --page           # the existing results, into docs/
    python scripts/test_versions.py --check          # whether docs/reproducibility.md shows the results

`lowest` has the lower bounds of pyproject.toml, `newest` the versions of constraints.txt, which `make test` uses, too.
Each environment is a virtual environment in outputs/versions/; other packages have the versions of constraints.txt if
these are compatible, otherwise the newest compatible ones. The tests are those in which this package meets the
libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only scripts/ is on the path
from hf_captionrl.utils.io import atomic_write_text, write_json
from scripts.machine_facts import library_versions
from scripts.page_sections import replace_section, write_section
from scripts.slow_tests import Recorder
from scripts.test_machines import summary

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "outputs" / "versions"
RESULTS = ROOT / "docs" / "results" / "test_versions.json"
PAGE = ROOT / "docs" / "reproducibility.md"

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "evaluate", "huggingface_hub", "numpy")
"""Libraries whose versions are tested and listed."""

ENVIRONMENTS: dict[str, Mapping[str, str]] = {
    "lowest": {},  # the lower bounds of pyproject.toml
    "middle": {
        "torch": "2.10.0",
        "torchvision": "0.25.0",
        "transformers": "5.21.1",
        "peft": "0.21.0",
        "accelerate": "1.12.0",
        "datasets": "5.0.0",
    },
    "newest": {},  # constraints.txt
}
"""Versions that an environment fixes."""

TESTS = (
    "tests/captioners/test_families.py",
    "tests/captioners/test_captioner.py",
    "tests/metrics/evaluate_modules/test_modules.py",
    "tests/captioners/test_clipcap.py",
    "tests/test_lazy_import.py",
    "tests/test_pipelines.py",
    "tests/trainers/test_caption_rl_trainer.py",
    "tests/trainers/test_peft_config.py",
    "tests/trainers/test_self_retrieval_grpo_trainer.py",
    "tests/trainers/test_smile_sft_trainer.py",
    "tests/trainers/test_smile_trainer.py",
    "tests/trainers/test_training_arguments.py",
)
TOOLS = ("hypothesis", "num2words", "pytest", "pytest-timeout", "pytest-xdist")


def lower_bounds(root: Path = ROOT) -> dict[str, str]:
    """Lower bounds of the required packages, by name as pyproject.toml spells it."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = (re.match(r"([\w-]+)>=([\d.]+)", line) for line in project["dependencies"])
    return {match[1]: match[2] for match in found if match}


def pins(name: str, root: Path = ROOT) -> dict[str, str]:
    """The versions that an environment fixes, by normalised name.

    `newest` has those of constraints.txt; `middle` those of its file; `lowest` all lower bounds.
    """
    if name == "newest":
        lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
        return {_normal(line.partition("==")[0]): line.partition("==")[2] for line in lines if "==" in line}
    if name == "lowest":
        return {_normal(name): version for name, version in lower_bounds(root).items()}
    return {_normal(k): v for k, v in ENVIRONMENTS[name].items()}


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


def prepare(name: str, folder: Path) -> Path:
    """Create or update the virtual environment; returns its Python."""
    python = folder / name / "bin" / "python"
    uv = str(Path(sys.executable).with_name("uv"))
    if not python.is_file():
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder / name)], check=True)
    fixed = folder / f"{name}.txt"
    atomic_write_text(fixed, "".join(f"{package}=={version}\n" for package, version in pins(name).items()))
    command = [uv, "pip", "install", "--quiet", "--python", str(python), "--constraints", str(fixed)]
    subprocess.run([*command, "--editable", str(ROOT), *TOOLS], check=True)
    return python


def run(name: str, folder: Path) -> dict[str, Any] | None:
    """The result of an environment; None if pytest did not finish."""
    python, path = prepare(name, folder), folder / f"{name}.json"
    path.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    print(f"{name}:", flush=True)
    subprocess.run(
        [str(python), str(Path(__file__).resolve()), "--here", str(path)], cwd=ROOT, env=environment, check=False
    )
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def run_here(path: Path) -> int:
    """Run the tests with this Python, and write the result."""
    recorder = Recorder(path, TESTS)
    status = int(pytest.main(["-q", "-m", "not slow", "-n", "2", "--dist", "loadfile", *TESTS], plugins=[recorder]))
    if recorder.ended:
        result = summary(json.loads(path.read_text(encoding="utf-8")))
        write_json(path, result | {"python": platform.python_version(), "versions": library_versions(*LIBRARIES)})
    return status


def section(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of docs/reproducibility.md, in Markdown."""
    lines = [f"| | {' | '.join(results)} |", "|:--|" + "--:|" * len(results)]
    for library in LIBRARIES:
        lines.append(f"| {library} | {' | '.join(row['versions'][library] for row in results.values())} |")
    for count in ("passed", "failed", "skipped"):
        lines.append(f"| tests {count} | {' | '.join(str(row[count]) for row in results.values())} |")
    revisions = sorted({row["revision"][:12] for row in results.values()})
    return "\n".join([*lines, "", f"Revision {', '.join(f'`{revision}`' for revision in revisions)}."])


def finished(folder: Path) -> dict[str, dict[str, Any]]:
    """Existing results by environment, without those of interrupted runs."""
    paths = {name: folder / f"{name}.json" for name in ENVIRONMENTS}
    found = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}
    return {name: result for name, result in found.items() if "versions" in result}


def main(argv: Sequence[str] | None = None) -> int:
    """Run environments, write the page, or check it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ENVIRONMENTS, metavar="NAME", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the environments and their results")
    parser.add_argument("--page", action="store_true", help="write the page from existing results")
    parser.add_argument("--check", action="store_true", help="compare the page with docs/results; runs nothing")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.here:
        return run_here(arguments.here)
    page = PAGE.read_text(encoding="utf-8")
    if arguments.check:
        shown = RESULTS.is_file() and replace_section(
            page, "versions", section(json.loads(RESULTS.read_text("utf-8")))
        )
        if shown in (False, page):
            return 0
        print(f"{PAGE.name} does not show {RESULTS.name}. Run python scripts/test_versions.py --page.")
        return 1
    if not arguments.page:
        made = {name: run(name, arguments.output) for name in arguments.only or ENVIRONMENTS}
        failed = [name for name, result in made.items() if result is None or result["failed"]]
        if failed:
            print(f"failed: {', '.join(failed)}")
            return 1
    results = finished(arguments.output)
    if missing := [name for name in ENVIRONMENTS if name not in results]:
        print(f"no result yet: {', '.join(missing)}")
        return 0 if arguments.only else 1
    write_json(RESULTS, results)
    write_section(PAGE, "versions", section(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
