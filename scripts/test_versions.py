"""Runs the tests with the lowest, a middle and the newest releases of the libraries: `make test-versions`.

    python scripts/test_versions.py                  # all three
    python scripts/test_versions.py --only lowest    # one

Each environment is a virtual environment in outputs/versions/. `lowest` has the lower bounds of pyproject.toml, `newest`
the versions of constraints.txt. The tests are those in which this package meets the libraries.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "outputs" / "versions"
ENVIRONMENTS = ("lowest", "middle", "newest")
MIDDLE = """torch==2.10.0
torchvision==0.25.0
transformers==5.21.1
peft==0.21.0
accelerate==1.12.0
datasets==5.0.0
"""
TESTS = (
    "tests/captioners/test_captioner.py",
    "tests/captioners/test_clipcap.py",
    "tests/captioners/test_families.py",
    "tests/captioners/test_pipelines.py",
    "tests/metrics/evaluate_modules/test_modules.py",
    "tests/trainers",
    "tests/utils/test_lazy_import.py",
)
TOOLS = ("hypothesis", "num2words", "pytest", "pytest-timeout", "pytest-xdist")


def constraints(name: str) -> str:
    """The versions that an environment fixes, one `name==version` per line."""
    if name == "newest":
        return (ROOT / "constraints.txt").read_text(encoding="utf-8")
    if name == "middle":
        return MIDDLE
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = (re.match(r"([\w-]+)>=([\d.]+)", line) for line in project["dependencies"])
    return "".join(f"{bound[1]}=={bound[2]}\n" for bound in bounds if bound)


def run(name: str) -> int:
    """Create or update an environment and run the tests in it; pytest's exit code."""
    python, uv = OUTPUT / name / "bin" / "python", str(Path(sys.executable).with_name("uv"))
    if not python.is_file():
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(OUTPUT / name)], check=True)
    fixed = OUTPUT / f"{name}.txt"
    fixed.write_text(constraints(name), encoding="utf-8")
    install = [uv, "pip", "install", "--quiet", "--python", str(python), "--constraints", str(fixed)]
    subprocess.run([*install, "--editable", str(ROOT), *TOOLS], check=True)
    print(f"{name}:", flush=True)
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow", "-n", "2", "--dist", "loadfile", *TESTS]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Run the asked environments; 1 if tests of one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ENVIRONMENTS, default=ENVIRONMENTS, help="run only these")
    failed = [name for name in parser.parse_args(argv).only if run(name)]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
