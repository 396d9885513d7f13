"""Starts the processes of `captionrl train --processes N`: `python -P train_launch.py OPTIONS RECIPE ARGUMENTS`.

Like `accelerate launch`, with three differences: no process has the working folder on its path, a user's error is printed
once for all processes, and the exit code is that of the first process that failed.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


def launch(argv: Sequence[str]) -> int:
    """Run a recipe in several processes."""
    import accelerate.utils.launch
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from hf_captionrl.utils.console import ERROR_FOLDER

    os.environ["PYTHONSAFEPATH"] = "1"
    # It would add the working folder to PYTHONPATH for DeepSpeed.
    accelerate.utils.launch.env_var_path_add = lambda name, folder: os.environ.get(name, "")
    # The lines below report a failed process instead of its loggers.
    for name in ("agent", "multiprocessing"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[ERROR_FOLDER] = folder
        try:
            launch_command(launch_command_parser().parse_args(list(argv)))
            code = 0
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
            if not list(Path(folder).iterdir()):
                print(f"captionrl train: error: process {rank} ended with exit code {code}.", file=sys.stderr)
        except SignalException as error:  # the processes received the signal and have saved
            code = 128 + int(error.sigval)
        except subprocess.CalledProcessError as error:
            code = error.returncode if error.returncode > 0 else 128 - error.returncode
        for line in sorted({file.read_text(encoding="utf-8") for file in Path(folder).iterdir()}):
            print(line, file=sys.stderr)
    return code


if __name__ == "__main__":
    if not sys.flags.safe_path:  # else this file's folder, whose `metrics.py` and others would hide packages
        del sys.path[0]
    from hf_captionrl.utils.console import run_main

    run_main(lambda: sys.exit(launch(sys.argv[1:])), "captionrl train")
