"""Run the parts of `make check`, two at a time, the longest first; each uses one core. `make --jobs` is not used,
because it fails under some process supervisors ("wait: No child processes").

    python scripts/check.py check-house check-types ...
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

JOBS = 2


def run_part(target: str) -> tuple[str, int, str]:
    """Name, exit code and output of a target of the Makefile."""
    # Remove the flags of the calling make, which would pass on its job server.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    }
    run = subprocess.run(
        [shutil.which("make") or "make", "--no-print-directory", target],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return target, run.returncode, run.stdout


def main(targets: list[str]) -> int:
    """Run every target, print each one's output when it ends, and return 1 if one failed."""
    # If the caller ignores SIGCHLD, the system discards exit codes, and every part would seem to pass.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    failed = []
    with ThreadPoolExecutor(JOBS) as pool:
        for part in as_completed([pool.submit(run_part, target) for target in targets]):
            target, code, output = part.result()
            print(output, end="", flush=True)
            if code:
                failed.append(target)
    if failed:
        print(f"make check: {', '.join(sorted(failed))} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
