"""Makes `evaluate.load("self_retrieval")` find the installed module.

In a process that imports `hf_captionrl`, [`extend_evaluate`] adds our names to the function with which `evaluate` looks up
modules. It writes nothing and does not contact the Hub.

For processes that do not import it, [`install`] (`captionrl metrics install`) writes into the modules cache of `evaluate`.
`evaluate` looks for a bare name in the working folder, then on the Hub as `evaluate-metric/NAME`, and if the Hub does not
answer (offline, 401, 404, 503) in its modules cache, in
`$HF_MODULES_CACHE/evaluate_modules/metrics/evaluate-metric--NAME/<64 characters>/NAME.py`. `install` writes a file of one
line there, which imports the class from this package. `evaluate` stores every answer with status 200 (of the Hub or of a
sign-in page) in the same folder under another hash. The folder's `__init__.py`, also one line, redirects such hashes to
the installed module, so that foreign code under our name never runs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import types
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_captionrl.utils.lazy_import import call_after_import

MODULES = (
    "caption_diversity",
    "caption_faithfulness",
    "caption_judge",
    "caption_nlg",
    "caption_perplexity",
    "clip_score",
    "emscore",
    "self_retrieval",
)
"""Names of the modules: one file of this folder each."""

_OFF = "CAPTIONRL_NO_INSTALL"
_INIT = f"from {__name__} import use_installed; use_installed(__name__, __path__)\n"


def modules_cache() -> Path:
    """Modules cache of `evaluate`, found without importing it (which takes seconds)."""
    config = sys.modules.get("evaluate.config")
    if config is not None:
        return Path(config.HF_MODULES_CACHE)
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_MODULES_CACHE") or os.path.join(os.path.expanduser(home), "modules"))


def path(name: str) -> str:
    """File of a module, for `evaluate.load(path(name))`.

    Args:
        name: One of `MODULES`.
    Returns:
        `str`: The file.
    """
    if name not in MODULES:
        raise ValueError(f"There is no module {name!r}. Use one of {list(MODULES)}.")
    return str(Path(__file__).with_name(f"{name}.py"))


def install() -> list[Path]:
    """Make the bare names of `MODULES` known to `evaluate` in processes that do not import `hf_captionrl`.

    It checks a few files if everything is installed already, and is safe in many processes at once. If the cache cannot be
    written, it warns once.
    Returns:
        `list[pathlib.Path]`: The installed files, one per module; empty if the cache cannot be written.
    """
    cache = modules_cache()
    root = cache / "evaluate_modules" / "metrics"
    try:
        found = [_install_one(root, name) for name in MODULES]
        for folder in (root.parent, root):
            if not (folder / "__init__.py").exists():
                (folder / "__init__.py").touch()
    except OSError as error:
        warnings.warn(
            f"evaluate's modules cache {str(cache)!r} cannot be written ({error}), so evaluate.load does not find "
            f"{', '.join(MODULES)} by name. Set HF_MODULES_CACHE or HF_HOME to a folder that can be written.",
            stacklevel=2,
        )
        return []
    return found


def extend_evaluate() -> None:
    """Make `evaluate.load` of this process know the bare names of `MODULES`; `import hf_captionrl` calls this.

    If `evaluate` is not imported yet, this happens when it is. Does nothing if `CAPTIONRL_NO_INSTALL` is set.
    """
    if os.environ.get(_OFF, "").lower() in ("", "0", "false", "no", "off"):
        call_after_import("evaluate.loading", _extend_lookup)


def _extend_lookup() -> None:
    loading: Any = sys.modules["evaluate.loading"]
    look_up = loading.evaluation_module_factory
    if hasattr(look_up, "captionrl_modules"):
        return

    @functools.wraps(look_up)
    def extended(path: str, module_type: str | None = None, *arguments: Any, **options: Any) -> Any:
        # A script in the working folder comes first, as for every name.
        is_local = os.path.isfile(os.path.join(path, f"{path}.py"))
        if path not in MODULES or module_type not in (None, "metric") or is_local:
            return look_up(path, module_type, *arguments, **options)
        return loading.ImportableModule(f"{__package__}.{path}", _shim(path)[1])

    extended.captionrl_modules = MODULES  # type: ignore[attr-defined]
    loading.evaluation_module_factory = extended


def use_installed(package: str, folders: Iterable[str]) -> None:
    """Redirect every stored version of a module to the installed one.

    Called by the `__init__.py` of a module's folder in `evaluate`'s cache, which is imported after `evaluate` has
    written what it downloaded and before that would be run.
    """
    name = package.rpartition("--")[2]
    if name not in MODULES:
        return
    ours = _shim(name)[1]
    for folder in map(Path, folders):
        for version in folder.iterdir() if (folder / ours).is_dir() else ():
            if len(version.name) == 64 and version.name != ours:
                stand_in = types.ModuleType(f"{package}.{version.name}", "Redirects to the installed module.")
                stand_in.__path__ = [str(folder / ours)]
                sys.modules[stand_in.__name__] = stand_in


def class_name(name: str) -> str:
    """Name of the class of a module, from which `evaluate` derives the metric's name."""
    return "".join(part.title() for part in name.split("_"))


def _shim(name: str) -> tuple[str, str]:
    """The line that imports a module's class, and its hash."""
    text = f"from {__package__}.{name} import {class_name(name)}\n"
    return text, hashlib.sha256(text.encode()).hexdigest()


def _install_one(root: Path, name: str) -> Path:
    text, digest = _shim(name)
    folder = root / f"evaluate-metric--{name}"
    wanted = {folder / digest / f"{name}.py": text, folder / "__init__.py": _INIT}
    shim = next(iter(wanted))
    lacking = [file for file, content in wanted.items() if _size(file) != len(content)]
    if not lacking:
        return shim
    # Imported here, because every `import hf_captionrl` would pay for them.
    from hf_captionrl.utils.io import atomic_write_text, temporary_path

    if not shim.parent.is_dir():
        # Rename a complete folder: `evaluate` fails if the folder exists without the file.
        # An error: another process was faster, or the folder cannot be written; the code below finds out.
        with contextlib.suppress(OSError), temporary_path(folder, is_folder=True) as making:
            atomic_write_text(making / "__init__.py", "")
            atomic_write_text(making / shim.name, text)
            os.rename(making, shim.parent)
    for file in lacking:
        if _size(file) != len(wanted[file]):
            atomic_write_text(file, wanted[file])
    return shim


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return -1
