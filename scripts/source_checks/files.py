"""Shared by the checks of `check_source.py`: faults, files and syntax trees."""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """One broken rule, with its remedy; line 0 stands for the whole file."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def python_files(root: Path, *folders: str) -> list[Path]:
    """Python files below the given folders of `root`, in a stable order."""
    return sorted(
        path for folder in folders for path in (root / folder).rglob("*.py") if "__pycache__" not in path.parts
    )


def relative(root: Path, path: Path) -> str:
    """A path relative to the root, as faults show it."""
    return path.relative_to(root).as_posix()


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file. Do not change it: all checks share it."""
    return _parse(path, path.stat().st_mtime_ns)


@functools.cache
def _parse(path: Path, changed: int) -> ast.Module:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    gc.freeze()  # no node is ever garbage, so collecting only costs time
    return tree
