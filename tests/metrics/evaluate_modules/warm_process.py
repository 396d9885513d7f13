"""New processes for tests, without 10 CPU-seconds of imports per process.

They are forked from a fresh process that has imported the packages that `evaluate` needs (torch, transformers, datasets), but
neither `evaluate` nor `hf_captionrl`. A job sets its own environment, without Hugging Face settings of others, and folder.
"""

import multiprocessing
import os
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[3]
HEAVY = ["pandas", "datasets", "torch", "torchvision", "transformers.pipelines", "peft", "trl.trainer.grpo_trainer"]


def run(*jobs, timeout=120):
    """Run jobs (dicts of code, cwd and env) at once; their (exit code, output)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(number)) for number in range(len(jobs))]
        running = [context.Process(target=child, args=pair) for pair in zip(jobs, outputs, strict=True)]
        for process in running:
            process.start()
        for process in running:
            process.join(timeout)
            process.kill()
            process.join()
        said = [output.read_text(errors="replace") for output in outputs]
    return [(process.exitcode, text) for process, text in zip(running, said, strict=True)]


def child(job, output):
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stderr = open(output, "w", buffering=1, errors="replace")  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    assert "datasets" in sys.modules
    assert not {"evaluate", "hf_captionrl"} & set(sys.modules)
    for name in [n for n in os.environ if n.startswith(("HF_", "CAPTIONRL_"))]:
        del os.environ[name]
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    # As in a program in that folder; the package is found as if it were installed, and no cache of the tests before is.
    kept = [
        p for p in sys.path if p not in ("", str(Path(__file__).parent)) and not Path(p, "evaluate_modules").exists()
    ]
    sys.path[:] = [job["cwd"], str(ROOT), *kept]
    code = 1
    try:
        exec(compile(job["code"], "job", "exec"), {"__name__": "__main__"})
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)
