"""Runs code after a module of another library is imported, without importing it and without an import hook.

A submodule that is not imported yet, such as `evaluate.loading`, gets an entry in `sys.modules` that is still empty. The
first use of one of its names imports the parent package, executes the submodule's code in the entry, and then calls
the function that waits for it. From then on the entry is an ordinary module. `sys.meta_path`, `sys.path_hooks`,
`builtins.__import__` and the parent package stay as they are, and nothing is written to disk.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any


def call_after_import(name: str, function: Callable[[], object]) -> None:
    """Call a function once a submodule is imported: now, if it is, else when it is first used."""
    module = sys.modules.get(name)
    if module is None:
        module = sys.modules[name] = _LazyModule(name)
    if isinstance(module, _LazyModule):
        _STATES[name].functions.append(function)
        return
    importlib.import_module(name)  # another thread may still be executing it
    function()


class _State:
    """State of an entry, kept outside of it: the namespace of the entry belongs to the library."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.functions: list[Callable[[], object]] = []
        self.is_executing = False


_STATES: dict[str, _State] = {}


class _LazyModule(ModuleType):
    """An entry of `sys.modules` that becomes its module when a name of it is first used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        _STATES[name] = _State()
        # Tools that look through all modules ask for these; without them they see a module without a source.
        for attribute in ("__spec__", "__loader__", "__package__", "__doc__"):
            vars(self).pop(attribute, None)

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "__spec__":  # of `importlib.util.find_spec`, which finds parents without importing them
            parent = importlib.util.find_spec(self.__name__.rpartition(".")[0])
            if parent is not None and parent.submodule_search_locations is not None:
                return _find_spec(self.__name__, parent.submodule_search_locations)
        # `from module import *` asks for `__all__`. Other special names are asked for by tools, which must not import.
        if not (attribute.startswith("__") and attribute != "__all__"):
            _execute(self)
            if attribute in vars(self):
                return vars(self)[attribute]
            if type(self) is ModuleType and "__getattr__" in vars(self):
                return vars(self)["__getattr__"](attribute)
        raise AttributeError(f"module {self.__name__!r} has no attribute {attribute!r}")


def _execute(module: ModuleType) -> None:
    """Turn an entry into the module that it stands for; other threads wait until that is done."""
    name = module.__name__
    state = _STATES[name]
    with state.lock:
        if type(module) is ModuleType or state.is_executing:  # done, or an import cycle in the library
            return
        try:
            parent_name, _, last = name.rpartition(".")
            parent = importlib.import_module(parent_name)
            if type(module) is ModuleType:  # the parent package has used it
                return
            state.is_executing = True
            spec = _find_spec(name, parent.__path__)
            vars(module).update(vars(importlib.util.module_from_spec(spec)))
            spec.loader.exec_module(module)
            setattr(parent, last, module)
            for function in state.functions:
                function()
            module.__class__ = ModuleType
        except BaseException:
            # As after any failed import: the next import starts again.
            sys.modules.pop(name, None)
            raise
        finally:
            state.is_executing = False


def _find_spec(name: str, path: Any) -> Any:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            return spec
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
