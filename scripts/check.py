"""Run the parts of `make check`, two at a time, the longest first; each uses one core.

    python scripts/check.py                             # all
    python scripts/check.py check-source check-types     # targets of the Makefile

make only prints the commands of a part, and a shell runs them: under some process supervisors make loses the processes that it
waits for ("wait: No child processes"), with and without `--jobs`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

JOBS = 2
PARTS = ("check-imports", "check-source", "check-pages", "check-types", "check-lint")


def run_part(target: str) -> tuple[str, int, str]:
    """Name, exit code and output of a target of the Makefile."""
    # Remove the flags of the calling make, which would pass on its job server, and what the Makefile does not export.
    left_out = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )

    commands = run(shutil.which("make") or "make", "--no-print-directory", "--dry-run", target)
    done = commands if commands.returncode else run("/bin/sh", "-evc", commands.stdout)
    return target, done.returncode, done.stdout


def main(targets: list[str]) -> int:
    """Run every target, print each one's output when it ends, and return 1 if one failed."""
    # If the caller ignores SIGCHLD, the system discards exit codes, and every part would seem to pass.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    failed = []
    with ThreadPoolExecutor(JOBS) as pool:
        for part in as_completed([pool.submit(run_part, target) for target in targets or PARTS]):
            target, code, output = part.result()
            print(output, end="", flush=True)
            if code:
                failed.append(target)
    if failed:
        print(f"make check: {', '.join(sorted(failed))} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
