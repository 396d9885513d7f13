"""Imports that wait: names of a package on first use, and code that runs after a module of another library is imported."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar


def lazy_names(package: str) -> tuple[Callable[[str], Any], list[str]]:
    """`__getattr__` and `__all__` of a package whose names are imported on first use; `dir` lists them too.

    The names are those that the package's `__init__.py` imports under `if TYPE_CHECKING:`, so that they stand there once.
    torch, transformers and trl take seconds to import, and `import hf_captionrl` must not.
    """
    module: Any = sys.modules[package]
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    guarded = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom)]
    home = {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}. Its public names are {sorted(home)}.")
        return getattr(importlib.import_module(home[name]), name)

    module.__dir__ = lambda: sorted({*vars(module), *home})  # what a shell completes
    return get, sorted(home)


def call_after_import(name: str, function: Callable[[], object]) -> None:
    """Call a function once a submodule is imported: now, if it is, else after the first import that succeeds."""
    if name in sys.modules:
        importlib.import_module(name)  # another thread may still be executing it
        function()
        return
    _Waiting.functions.setdefault(name, []).append(function)
    if _Waiting not in sys.meta_path:
        sys.meta_path.insert(0, _Waiting)


class _Waiting:
    """Finds the modules that functions wait for, and calls these after the code of the module."""

    functions: ClassVar[dict[str, list[Callable[[], object]]]] = {}

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in cls.functions else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for function in cls.functions.pop(name, []):
                function()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
