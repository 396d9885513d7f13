"""Why tests are skipped, and how to unskip them: the rule, the end of `make test`, and the browser of `.ci/run`."""

import shutil
import subprocess
import sys

import pytest

from scripts.source_checks.skips import check_skips, skip_commands, skip_summary
from tests.planted_faults import ROOT, messages, plant

ROW = "| no Java | `apt-get install java` | tests |"


@pytest.mark.parametrize(
    "code",
    [
        "import pytest\npytest.skip('no Java')",
        "import pytest\n@pytest.mark.skipif(True, reason='no Java')\ndef test_x(): ...",
        "import pytest\nx = pytest.importorskip('spacy', reason='no Java')",
        "import pytest\nx = pytest.importorskip('spacy')",
        "import pytest\nwhy = 'no Java'\npytest.skip(why)",
    ],
)
def test_unlisted_skips_are_faults(tmp_path, code):
    root = plant(tmp_path, {"tests/test_a.py": code, "docs/skips.md": "nothing"})
    assert len(check_skips(root)) == 1
    plant(root, {"docs/skips.md": ROW})
    assert len(check_skips(root)) == (0 if "'no Java'" in code and "why" not in code else 1)


@pytest.mark.parametrize(
    "row", ["| no Java | tests |", "| no Java | `` | tests |", "| no Java at all | `java` | tests |"]
)
def test_reasons_without_a_command_are_faults(tmp_path, row):
    root = plant(tmp_path, {"tests/test_a.py": "pytest.skip('no Java')", "docs/skips.md": row})
    [fault] = messages(check_skips(root))
    assert "docs/skips.md with the command that unskips it" in fault


def test_the_summary_names_each_reason_once_with_its_command():
    reasons = ["no Java", "no luck", "no Java"]
    assert skip_summary(reasons, {"no Java": "apt-get install java"}) == [
        "2 tests skipped: no Java. To run them: apt-get install java",
        "1 test skipped: no luck. docs/skips.md names no command.",
    ]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_ends_with_what_was_skipped(tmp_path, workers):
    reason = "no Chromium on this machine"
    code = f"""
import pytest
@pytest.mark.skipif(True, reason={reason!r})
def test_one(): ...
def test_two(): pytest.skip({reason!r})
def test_three(): ...
"""
    plant(
        tmp_path,
        {
            "test_a.py": code,
            "test_b.py": "import pytest\npytest.importorskip('no_such_module', reason='odd')",
            "pytest.ini": "[pytest]",
        },
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "tests.conftest", "-p", "no:cacheprovider"]
    run = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    *_, first, second, counts = run.stdout.strip().splitlines()
    assert first == f"2 tests skipped: {reason}. To run them: {skip_commands(ROOT)[reason]}"
    assert second == "1 test skipped: odd. docs/skips.md names no command."
    assert counts.startswith("1 passed, 3 skipped")


def test_a_run_without_skips_does_not_mention_them(tmp_path):
    plant(tmp_path, {"test_a.py": "def test_one(): ...", "pytest.ini": "[pytest]"})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0
    assert "skipped" not in run.stdout


def ci(tmp_path, *, user="0", installs=True, browser=None, apt=True):
    """Runs `.ci/run` of a project where every program writes down that it was called."""
    called = tmp_path / "called"
    programs = {name: f'echo "{name} $*" >> {called}' for name in ("make", *(["apt-get"] if apt else []))}
    if not installs:
        programs["apt-get"] += "; exit 100"
    programs |= {"id": f"echo {user}", "timeout": 'shift; exec "$@"'}
    if browser:
        programs[browser] = ":"
    folder = plant(tmp_path / "programs", {name: f"#!/bin/sh\n{body}\n" for name, body in programs.items()})
    for name in ("bash", "dirname"):
        (folder / name).symlink_to(shutil.which(name))
    for path in folder.iterdir():
        if not path.is_symlink():
            path.chmod(0o755)
    python = f'#!/bin/sh\necho "python $*" >> {called}\n'
    root = plant(tmp_path / "root", {".ci/run": (ROOT / ".ci" / "run").read_text(), ".venv/bin/python": python})
    (root / ".venv" / "bin" / "python").chmod(0o755)
    run = subprocess.run(
        [folder / "bash", root / ".ci" / "run"], env={"PATH": str(folder)}, capture_output=True, text=True, check=False
    )
    return run, called.read_text().splitlines()


MADE = ["make install-test", "python scripts/check.py", "make test"]
INSTALLED = ["apt-get update -qq", "apt-get install -y -qq --no-install-recommends chromium"]


def test_ci_installs_a_browser_where_it_can(tmp_path):
    run, called = ci(tmp_path)
    assert run.returncode == 0, run.stderr
    assert called == [*INSTALLED, *MADE]


def test_ci_continues_without_a_browser(tmp_path):
    run, called = ci(tmp_path, installs=False)
    assert run.returncode == 0, run.stderr
    assert called == [INSTALLED[0], *MADE]
    assert "Chromium could not be installed" in run.stderr


@pytest.mark.parametrize("machine", [{"user": "1000"}, {"apt": False}, {"browser": "google-chrome"}])
def test_ci_installs_nothing_where_it_may_not_or_need_not(tmp_path, machine):
    run, called = ci(tmp_path, **machine)
    assert run.returncode == 0, run.stderr
    assert called == MADE
