"""New processes for tests, without 10 CPU-seconds of imports per process.

A fresh interpreter imports the packages that `evaluate` needs (torch, transformers, datasets) once, and forks for
every job. The child inherits no import of `evaluate` or `hf_captionrl` and no Hugging Face settings: it sets its own
environment and folder before it runs its code.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]


class WarmProcess:
    """Runs code in new processes; a context manager."""

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()

    def run(self, *jobs, timeout=120):
        """Run jobs (dicts of code, cwd and env) at once; their (exit code, output)."""
        self.process.stdin.write(json.dumps({"jobs": jobs, "timeout": timeout}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the warm_process has ended"
        return [tuple(pair) for pair in json.loads(answer)]


def child(job, output):
    os.setsid()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    for name in [n for n in os.environ if n.startswith(("HF_", "CAPTIONRL_"))]:
        del os.environ[name]
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    # As in a program in that folder; the package is found as if it were installed.
    sys.path[:] = [job["cwd"], str(ROOT), *[p for p in sys.path if p not in ("", str(Path(__file__).parent))]]
    code = 1
    try:
        exec(compile(job["code"], "job", "exec"), {"__name__": "__main__"})
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main():
    for heavy in ("pandas", "datasets", "torch", "torchvision", "transformers.pipelines"):
        importlib.import_module(heavy)
    assert "evaluate" not in sys.modules
    assert "hf_captionrl" not in sys.modules
    for line in sys.stdin:
        request, started = json.loads(line), []
        for job in request["jobs"]:
            output = tempfile.TemporaryFile()  # noqa: SIM115
            pid = os.fork()
            if pid == 0:
                child(job, output)
            started.append((pid, output))
        deadline, answers = time.monotonic() + request["timeout"], []
        for pid, output in started:
            status = None
            while status is None:
                done, found = os.waitpid(pid, os.WNOHANG)
                if done:
                    status = os.waitstatus_to_exitcode(found)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    deadline = time.monotonic() + 5
                else:
                    time.sleep(0.01)
            output.seek(0)
            answers.append((status, output.read().decode(errors="replace")))
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
