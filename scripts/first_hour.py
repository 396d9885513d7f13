"""Simulates the first hour of four users with a fresh clone: runs documented commands in a new folder and checks the results.

    python scripts/first_hour.py                                # a fresh clone in a fresh environment, all users
    python scripts/first_hour.py --python .venv/bin/python      # a fresh clone, the packages of an existing environment
    python scripts/first_hour.py --python .venv/bin/python --user photographer --keep

The users are a photographer with a folder of photographs, a researcher with a Karpathy-split file, a user of TRL with a
raw `datasets.Dataset` and a reward function, and a user of LoRA with a chat model in bf16. Only the packages of a fresh
environment are downloaded. The log goes to docs/results/first_hour.json.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only scripts/ is on the path
from hf_captionrl.metrics.table import installed_versions
from hf_captionrl.utils.io import write_json
from scripts.first_hour_users.lora_user import play_lora_user
from scripts.first_hour_users.photographer import play_photographer
from scripts.first_hour_users.researcher import play_researcher
from scripts.first_hour_users.session import CommandFailedError, Session
from scripts.first_hour_users.trl_user import play_trl_user

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "first_hour.json"

USERS: dict[str, Callable[[Session], None]] = {
    "photographer": play_photographer,
    "researcher": play_researcher,
    "trl": play_trl_user,
    "lora": play_lora_user,
}
"""What each user does."""


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"There is no program {name!r} on the path. Install it.")
    return found


def clone(repository: Path, folder: Path) -> Path:
    """Clone the committed files."""
    subprocess.run([_program("git"), "clone", "--quiet", str(repository), str(folder)], check=True)
    return folder


def installed(source: Path) -> Path:
    """Install a clone as the README says."""
    subprocess.run([_program("make"), "--silent", "install", f"PYTHON={sys.executable}"], cwd=source, check=True)
    return source / ".venv" / "bin" / "python"


def play(name: str, session: Session) -> dict[str, Any]:
    """One user, from an empty folder to the last check. Returns the entry of the log."""
    began = time.monotonic()
    error = None
    try:
        session.check_source()
        USERS[name](session)
    except CommandFailedError as failed:
        error = str(failed)
    except (
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
    ) as failed:  # a check found something unexpected
        error = f"{type(failed).__name__}: {failed}"
    passed = error is None and all(check["passed"] for check in session.checks)
    return {
        "user": name,
        "passed": passed,
        "seconds": round(time.monotonic() - began, 1),
        "commands": session.commands,
        "checks": session.checks,
        **({"error": error} if error else {}),
    }


def _report(entry: dict[str, Any]) -> None:
    """The user's log, one line per command and check."""
    for command in entry["commands"]:
        print(f"  {command['seconds']:6.1f} s  {command['lines']:3d} lines  {command['command']}")
    for check in entry["checks"]:
        mark = "ok  " if check["passed"] else "FAIL"
        print(
            f"  {mark}  {check['what']}: {check['found']}"
            + ("" if check["passed"] else f" (wanted {check['wanted']})")
        )
    if "error" in entry:
        print(f"  FAIL  {entry['error']}")
    print(f"{entry['user']}: {'passed' if entry['passed'] else 'FAILED'} in {entry['seconds']} s\n", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Clone, install, play the users, write the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--user", action="append", choices=USERS, help="one of them; may be given again (default: all)"
    )
    parser.add_argument("--python", type=Path, help="interpreter with the packages (default: a fresh environment)")
    parser.add_argument("--repository", type=Path, default=ROOT, help="what to clone (default: this repository)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the log (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the folders, and say where they are")
    arguments = parser.parse_args(argv)
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="first-hour-"))
    try:
        source = clone(arguments.repository, folder / "hf_captionrl")
        # Not resolved: the interpreter of an environment is a link.
        python = installed(source) if arguments.python is None else Path(os.path.abspath(arguments.python))
        entries = []
        for name in arguments.user or USERS:
            print(f"{name}:", flush=True)
            entries.append(play(name, Session(folder / name, source=source, python=python)))
            _report(entries[-1])
        passed = all(entry["passed"] for entry in entries)
        log = {
            "passed": passed,
            "environment": "fresh" if arguments.python is None else "given",
            "seconds": round(time.monotonic() - began, 1),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "versions": installed_versions(),
            "users": entries,
        }
        write_json(arguments.output, log)
        print(f"{sum(e['passed'] for e in entries)} of {len(entries)} users passed. The log: {arguments.output}")
    finally:
        if arguments.keep:
            print(f"Kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
