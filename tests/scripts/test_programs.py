"""Each program of scripts/ starts from any folder, although only its folder is on the path."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
PROGRAMS = [str(path) for path in sorted(SCRIPTS.glob("*.py")) if '__name__ == "__main__"' in path.read_text()]

# In one interpreter, because each of them would import the libraries again.
START = """
import json, runpy, sys
before, failed = sys.path[1:], {}
for program in json.loads(sys.argv[1]):
    sys.path[:] = [program.rpartition("/")[0], *before]
    for name in [name for name in sys.modules if name.partition(".")[0] == "scripts"]:
        del sys.modules[name]
    try:
        runpy.run_path(program, run_name="not_started")
    except Exception as error:
        failed[program] = repr(error)
print(json.dumps(failed))
"""


def test_programs_find_the_modules_they_import_and_one_that_does_not_is_noticed(tmp_path):
    assert len(PROGRAMS) > 5
    planted = tmp_path / "program.py"
    planted.write_text("from scripts.reproduction.runs import processor_name\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", START, json.dumps([*PROGRAMS, str(planted)])]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    failed = json.loads(run.stdout.splitlines()[-1])
    assert "No module named 'scripts'" in failed.pop(str(planted))
    assert failed == {}
