"""Atomic writes, and files that grow line by line.

Files are written to a temporary file of the same folder, flushed to disk and renamed: a killed run leaves the previous file intact.
Files that grow line by line (captions, answers, decisions) are `LineFile`s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_path(folder: Path, *, is_folder: bool = False) -> Iterator[Path]:
    """A new file or folder in `folder`, to be filled and renamed; removed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    # The name is short (a long target name must not exceed 255 bytes) and random (two writers must not share it).
    path = folder / f".tmp-{secrets.token_hex(8)}"
    # Not mkstemp: the file keeps the permissions the user's umask asks for.
    path.mkdir() if is_folder else path.touch(exist_ok=False)
    try:
        yield path
    finally:
        _remove(path)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that is written part by part, and atomically: it replaces the old file when the block ends without an error."""
    path = Path(path)
    with temporary_path(path.parent) as temporary:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write bytes atomically."""
    with atomic_file(path) as file:
        file.write(data)
    return Path(path)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write UTF-8 text atomically."""
    # A lone surrogate (half of an emoji, from a broken caption) has no UTF-8 form; the file must still be written.
    return atomic_write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


FORMULA = re.compile(r"'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
"""Start of a cell that spreadsheets would evaluate, or would evaluate if apostrophes were removed from it."""


def csv_cell(value: Any) -> Any:
    """A cell of a CSV file; an apostrophe before formulas, which [`FORMULA`] recognises, keeps them text."""
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


_END_OF_LINK = re.compile(r"\](?=[(\[:])")
_ADDRESS = re.compile(r"(?<=\w):(?=/)|(?i:(?<=\bwww))\.|(?<!\w)@(?=\w)|@(?=[\w-]+\.\w)|&(?=#?\w+;)")


def escape_markdown(text: str) -> str:
    """Markdown that shows a text, in a line or table cell: no markup, links or HTML; line breaks become spaces."""
    text = " ".join(text.split())
    for character in "\\|*_`<>":
        text = text.replace(character, f"\\{character}")
    # Addresses that become links automatically, mail addresses, mentions and entities.
    text = _ADDRESS.sub(r"\\\g<0>", text)
    # Links and images, which a page would fetch; single brackets, as around an interval, are harmless.
    return _END_OF_LINK.sub(r"\\]", text)


def refuse_other_file(output: Path, read: Callable[[Path], Any], kind: str) -> None:
    """Refuse to replace a file that `read` does not accept as one of the command."""
    if output.exists():
        try:
            read(output)
        except (ValueError, OSError) as error:
            text = f"--output {str(output)!r} exists and is not a file of {kind}. Use another --output."
            raise ValueError(text) from error


def write_json(path: str | os.PathLike[str], value: Any, *, indent: int | None = 2) -> Path:
    """Write one value as strict JSON, atomically."""
    return atomic_write_text(path, json.dumps(to_plain(value), indent=indent, ensure_ascii=False) + "\n")


def write_jsonl(path: str | os.PathLike[str], rows: Iterable[Any]) -> Path:
    """Write one JSON value per line, atomically."""
    return atomic_write_text(path, "".join(json.dumps(to_plain(row), ensure_ascii=False) + "\n" for row in rows))


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[tuple[int, Any]]:
    """Read one JSON value per line; blank lines are skipped."""
    # Not splitlines(): it would also split at U+2028 inside a text.
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"Line {number} of {Path(path).name} is not valid JSON ({error}). Use JSON Lines."
            ) from None
        yield number, value


def _locked(path: Path, busy: str) -> FileLock:
    """The lock of a file, which ends with this process; raises ValueError with the text `busy` if another one has it."""
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(busy) from None
    return lock


def _release(lock: FileLock) -> None:
    with contextlib.suppress(OSError):  # on Windows, an open file cannot be removed
        os.unlink(lock.lock_file)  # before its release: whoever waits for it makes a new file
    lock.release()


class LineFile(contextlib.ExitStack):
    """A file of lines with one writing process at a time; a context manager.

    A kill leaves complete lines and at most one incomplete line, which subclasses handle in `_begin`. A file that is empty when it is
    closed is removed.
    """

    busy = "Let it finish first."
    """The remedy in the error if another process is writing the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        busy = f"Another process is writing {str(self.path)!r}. {self.busy}"
        self.callback(_release, _locked(self.path.with_name(f".{self.path.name}.lock"), busy))
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            self._file = os.open(self.path, flags, 0o666)
            self.callback(self._close_file)
            self._begin(self.path.read_bytes())
        except BaseException:
            self.close()
            raise

    def _begin(self, data: bytes) -> None:
        """Read the content of the file; an error here closes it."""

    def _close_file(self) -> None:
        if not os.fstat(self._file).st_size:
            self.path.unlink(missing_ok=True)
        os.close(self._file)

    def truncate(self, size: int) -> None:
        """Remove an incomplete last line; `size` bytes stay."""
        os.ftruncate(self._file, size)

    def append_bytes(self, data: bytes, *, flush: bool = True) -> None:
        """Append complete lines; a kill of the process does not lose them, nor, with `flush`, a power cut."""
        before = os.fstat(self._file).st_size
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left) :]
            if flush:
                os.fsync(self._file)
        except OSError:
            self.truncate(before)  # a full disk: the next line must not continue an incomplete one
            raise


class FolderLock(contextlib.ExitStack):
    """Reserves a folder, created if missing, for one process; removes the temporary files of killed runs. A context manager."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        Path(folder).mkdir(parents=True, exist_ok=True)
        busy = f"Another run is writing to {str(folder)!r}. Let it finish first, or use another output folder."
        self.callback(_release, _locked(Path(folder, ".run.lock"), busy))
        for path in Path(folder).glob(".tmp-" + 16 * "[0-9a-f]"):
            _remove(path)


def say(line: str) -> None:
    """Print a line on stderr, which may be closed or full, too; the exit code remains."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(line, file=sys.stderr, flush=True)


def to_plain(value: Any, *, where: str = "value", is_config: bool = False) -> Any:
    """Turn a value into one that strict JSON can represent.

    Dataclasses and mappings become dicts, tuples and sets lists (sets sorted), paths strings, enums their value, and
    arrays and tensors (whatever has `tolist`) lists or numbers. A configuration loses its secrets, and what JSON cannot
    represent (a dtype, a device, an infinite limit) becomes its text; elsewhere that is an error.
    """
    if isinstance(value, enum.Enum):
        value = value.value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, bool | str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        items = ((str(to_plain(key, is_config=is_config)), item) for key, item in value.items())
        shown = ((key, item) for key, item in items if not (is_config and is_secret(key, item)))
        return {key: to_plain(item, where=f"{where}[{key!r}]", is_config=is_config) for key, item in shown}
    if isinstance(value, set | frozenset):
        return sorted((to_plain(item, where=where, is_config=is_config) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [to_plain(item, where=f"{where}[{index}]", is_config=is_config) for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if is_config:
        return str(value)
    if isinstance(value, float):
        raise ValueError(f"{where} is {value}; JSON has no such number. Write None for missing measurements.")
    raise TypeError(
        f"{where} is a {type(value).__name__}, which JSON cannot represent. Turn it into numbers or text first."
    )


# --- Versions of the packages of a run, and its configuration without secrets ----------------------------------------

PACKAGES = ("torch", "transformers", "peft", "trl", "datasets", "accelerate")
"""Packages whose version can change a result."""

_SECRET = re.compile(r"(?<!^first_)(token|secret|password|api_?key)s?$", re.IGNORECASE)
"""`first_token`, an argument of SMILE, is not a secret."""
_LIMIT = re.compile(r"(^|_)(max|min|num)_(\w+_)?tokens?$")
"""Numbers of tokens are not secrets."""


def is_secret(name: str, value: object) -> bool:
    """Whether a setting must not be written down."""
    name = name.lstrip("-").replace("-", "_")
    if not isinstance(value, str) or (_LIMIT.search(name) and value.isdecimal()):
        return False
    return _SECRET.search(name) is not None


def installed_versions() -> dict[str, str]:
    """Versions of all packages that can change a result, read without importing them."""
    versions = {"python": platform.python_version()}
    for package in (*PACKAGES, "hf_captionrl"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    if revision := _git_revision(Path(__file__).resolve().parents[1]):
        versions["git_revision"] = revision
    return versions


def _git_revision(package: Path) -> str | None:
    """Revision of the checkout whose top folder holds `package`; None outside one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # In a .venv inside another repository, git would give the revision of that repository.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != package.parent:
            return None
        # Results change no number of other results.
        inputs = (":(top)", ":(top,exclude)reproduction/results")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *inputs)
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def plain_config(config: Any) -> Any:
    """A configuration for JSON, without secrets; objects that JSON cannot hold become their text."""
    return to_plain(config, is_config=True)


def json_digest(value: Any, *, size: int = 8) -> str:
    """Hash of what JSON represents, in `2 * size` hex digits; the order of the keys of dicts does not count."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=size).hexdigest()


def shipped_path(*parts: str) -> Path:
    """A file of a checkout, or where a wheel installs it."""
    folders = (Path(__file__).parents[2], Path(sysconfig.get_path("data"), "share/hf_captionrl"))
    for path in (folder.joinpath(*parts) for folder in folders):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{'/'.join(parts)} is neither in {folders[0]} nor in {folders[1]}. Check the name, or install from a checkout: "
        "pip install -e ."
    )


# --- Texts for people ------------------------------------------------------------------------------------------------


def counted(number: float, noun: str) -> str:
    """A number with its noun: 1 image, 1.5 epochs, 1,000 images."""
    return f"{number:,.10g} {noun}{'s' * (number != 1)}"


def folded(text: str) -> str:
    """A text in lines of the terminal's width; without a terminal, of 120 characters."""
    width = shutil.get_terminal_size((120, 0)).columns
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
