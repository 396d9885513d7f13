"""`make check` runs its parts beside each other and fails if one of them does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "check.py"


@pytest.mark.parametrize("sigchld", [signal.SIG_DFL, signal.SIG_IGN], ids=["default", "ignored"])
@pytest.mark.parametrize(("targets", "code"), [(["good", "bad", "other"], 1), (["good", "other"], 0)])
def test_the_exit_code_is_nonzero_if_a_part_failed(tmp_path, targets, code, sigchld):
    """Also under a parent that ignores SIGCHLD, where the system would discard the exit codes of the parts."""
    (tmp_path / "Makefile").write_text("good:\n\t@echo good\nbad:\n\t@echo bad; exit 3\nother:\n\t@echo other\n")
    signals = f"import os, signal, sys; signal.signal(signal.SIGCHLD, {int(sigchld)}); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", signals, sys.executable, str(SCRIPT), *targets]
    # As make itself would start it, with the flags of its job server.
    environment = os.environ | {"MAKEFLAGS": " -j2 --jobserver-auth=3,4", "MAKELEVEL": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == code, run.stderr
    assert all(target in run.stdout for target in targets)
    assert ("bad failed" in run.stderr) == bool(code)
