"""Exit codes, and one-line messages for errors that the user can correct.

Shared by the command line and the recipes. Exit codes: 0 done, 2 usage or bad input, 1 anything else.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

RESULT_FILE = "CAPTIONRL_RESULT_FILE"
"""Environment variable: where the main process of a recipe writes the path of its results."""
ERROR_FOLDER = "CAPTIONRL_ERROR_FOLDER"
"""Variable with the folder where the processes of one run write their errors; the launcher prints each once."""

_INPUT_ERRORS = (
    ValueError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
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
    return (isinstance(error, _INPUT_ERRORS) or is_message) and not is_foreign


def one_line(error: BaseException) -> str:
    """The message of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__


class CheckedOutput:
    """Replaces stdout. If stdout cannot be written (a full disk), the work continues, and the error is reported at the end."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or remember the error."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, or remember the error."""
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        if self._error is not None:
            return
        try:
            action()
        except OSError as error:
            # The rest of the buffer must not fail again when Python flushes it on exit.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if isinstance(error, BrokenPipeError):
                raise
            self._error = error

    def finish(self, program: str, code: int) -> int:
        """Flush, and say in one line where the output could not be written."""
        with contextlib.suppress(BrokenPipeError):
            self.flush()
        if self._error is None:
            return code
        hint = " Make room, and run it again." if self._error.errno == errno.ENOSPC else ""
        reason = self._error.strerror or str(self._error)
        _say(f"{program}: error: stdout cannot be written ({reason}), so the output is incomplete.{hint}")
        return code or 1


def run_main(main: Callable[[], object], program: str | None = None) -> NoReturn:
    """Run a recipe as a program, and end the process with its exit code.

    An error that the user can correct becomes one line on stderr and exit code 2; `--traceback` on the command line shows
    where it happened, too. Any other error is raised, with its traceback and exit code 1.
    """
    shows_traceback = "--traceback" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--traceback"]
    program = program or Path(sys.argv[0]).name
    announce_offline_waits()
    output = CheckedOutput(sys.stdout or io.StringIO())  # without a stdout the output is discarded, as Python does
    code = 0
    try:
        with contextlib.redirect_stdout(output):
            result = main()
        if (said := os.environ.get(RESULT_FILE)) and os.environ.get("RANK", "0") == "0":
            Path(said).write_text("" if result is None else str(result), encoding="utf-8")
    except SystemExit as stop:  # argparse has printed its help, or training has stopped on a signal
        if isinstance(stop.code, str):
            _say(stop.code)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BrokenPipeError:
        pass
    except Exception as error:
        if not is_input_error(error):
            raise
        if shows_traceback:
            traceback.print_exc()
        _report(program, f"error: {one_line(error)}")
        code = 2
    sys.exit(output.finish(program, code))


def _report(program: str, message: str) -> None:
    """Print an error once for all processes of a run: through the launcher, or with the number of the process."""
    folder, rank = os.environ.get(ERROR_FOLDER), os.environ.get("RANK", "0")
    if folder and Path(folder).is_dir():
        Path(folder, rank).write_text(f"{program}: {message}", encoding="utf-8")
    else:
        _say(f"{program}: {message}" if rank == "0" else f"{program}: process {rank}: {message}")


def _say(line: str) -> None:
    # stderr may be closed or full, too; the exit code remains.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(line, file=sys.stderr, flush=True)


class _NameTheSetting(logging.Filter):
    """Replaces the Hub client's warnings about retries with one line that names HF_HUB_OFFLINE."""

    was_said = False

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "Retrying in" in message:
            return False
        if "thrown while requesting" not in message or "HTTP Error 4" in message:
            return True
        if not _NameTheSetting.was_said:
            _NameTheSetting.was_said = True
            _say(
                "The Hub does not answer. Its client tries again for about 23 seconds per file. Use HF_HUB_OFFLINE=1 to read from "
                "the cache without waiting."
            )
        return False


def announce_offline_waits() -> None:
    """Print once, at the first failed request, how to avoid the Hub client's waits. For programs, not libraries."""
    logger = logging.getLogger("huggingface_hub.utils._http")
    if not any(isinstance(known, _NameTheSetting) for known in logger.filters):
        logger.addFilter(_NameTheSetting())
