"""What the command line and the recipes print, and their exit codes: 0 done, 2 usage or bad input, 1 anything else."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from hf_captionrl.utils.io import say

RESULT_FILE = "CAPTIONRL_RESULT_FILE"
"""Environment variable: where the main process of a recipe writes the path of its results."""

_USER_ERRORS = (ValueError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_NETWORK_ERRORS = frozenset({"TransportError", "ConnectionError", "Timeout", "TimeoutError"})
_PACKAGE = str(Path(__file__).parents[1])


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def is_input_error(error: BaseException) -> bool:
    """Whether the user can correct the input: exit code 2 and one line, instead of 1."""
    kinds = {kind.__name__ for link in error_chain(error) for kind in type(link).__mro__}
    # An unreachable Hub is not the user's mistake; offline, a name that is not in the cache is.
    if isinstance(error, OSError) and kinds & _NETWORK_ERRORS and "OfflineModeIsEnabled" not in kinds:
        return False
    # transformers reports a missing or incomplete model as an OSError without errno.
    is_message = isinstance(error, OSError) and error.errno is None
    # A missing optional library is the user's to install; a missing module of this package is a broken installation.
    is_message |= isinstance(error, ImportError) and "hf_captionrl" not in str(error)
    # In the training loop, a ValueError of another library is no bad input.
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_training = any(code.co_name in ("_inner_training_loop", "training_step") for code in frames)
    is_foreign = is_training and not frames[-1].co_filename.startswith(_PACKAGE + os.sep)
    return (isinstance(error, _USER_ERRORS) or is_message) and not is_foreign


def one_line(error: BaseException) -> str:
    """The message of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def flush_stdout() -> None:
    """Write what is left of the output; it is no error if its reader (`head`) has closed it."""
    try:
        print(end="", flush=True)
    except BrokenPipeError:  # which Python would report when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_main(main: Callable[[], object], program: str | None = None) -> NoReturn:
    """Run a recipe as a program, and end the process with its exit code.

    An error that the user can correct becomes one line on stderr and exit code 2; `--traceback` on the command line shows
    where it happened, too. Any other error is raised, with its traceback and exit code 1.
    """
    shows_traceback = "--traceback" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--traceback"]
    program = program or Path(sys.argv[0]).name
    code = 0
    try:
        result = main()
        if (file := os.environ.get(RESULT_FILE)) and os.environ.get("RANK", "0") == "0":
            Path(file).write_text("" if result is None else str(result), encoding="utf-8")
    except SystemExit as stop:  # argparse has printed its help, or training has stopped on a signal
        if isinstance(stop.code, str):
            say(stop.code)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BrokenPipeError:
        pass
    except Exception as error:
        if not is_input_error(error):
            raise
        if shows_traceback:
            traceback.print_exc()
        code, rank = 2, os.environ.get("RANK", "0")
        place = "" if rank == "0" else f" process {rank}:"
        say(f"{program}:{place} error: {one_line(error)}")
    flush_stdout()
    sys.exit(code)
