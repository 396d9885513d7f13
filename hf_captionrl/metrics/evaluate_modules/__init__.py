"""Modules of `evaluate` over `hf_captionrl.metrics`: `<name>.py` holds a function and its class, `descriptions.py` all texts.

After `import hf_captionrl`, `evaluate.load("self_retrieval")` and the other names of `descriptions.DESCRIPTIONS` work from any
folder, online and offline. One function of `evaluate` is replaced in this process; no file is written. Without that import,
`evaluate.load(path("self_retrieval"))` works. Importing this package is fast: no torch, no `evaluate`.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

from hf_captionrl.utils.lazy_import import call_after_import


def path(name: str) -> str:
    """File of a module such as `"self_retrieval"`, for `evaluate.load(path(name))`."""
    from hf_captionrl.metrics.evaluate_modules.descriptions import DESCRIPTIONS

    if name not in DESCRIPTIONS:
        raise ValueError(f"There is no module {name!r}. Use one of {list(DESCRIPTIONS)}.")
    return str(Path(__file__).with_name(f"{name}.py"))


def class_name(name: str) -> str:
    """Name of the class of a module, from which `evaluate` derives the metric's name."""
    return "".join(part.title() for part in name.split("_"))


def extend_evaluate() -> None:
    """Make `evaluate.load` of this process know our names, once `evaluate` is imported; `import hf_captionrl` calls this."""
    call_after_import("evaluate.loading", _extend_lookup)


def _extend_lookup() -> None:
    loading: Any = sys.modules["evaluate.loading"]
    look_up = loading.evaluation_module_factory

    @functools.wraps(look_up)
    def extended(path: str, module_type: str | None = None, *arguments: Any, **options: Any) -> Any:
        from hf_captionrl.metrics.evaluate_modules.descriptions import DESCRIPTIONS

        # A script in the working folder comes first, as for every name.
        is_local = os.path.isfile(os.path.join(path, f"{path}.py"))
        if path not in DESCRIPTIONS or module_type not in (None, "metric") or is_local:
            return look_up(path, module_type, *arguments, **options)
        return loading.ImportableModule(f"{__name__}.{path}", __name__)

    loading.evaluation_module_factory = extended
