"""Makes `evaluate.load("self_retrieval")` find the installed module.

In a process that imports `hf_captionrl`, [`extend_evaluate`] adds our names to the function of `evaluate` that looks modules
up. Nothing is written, and nothing is asked of the Hub.

For processes that do not import it, [`install`] (`captionrl metrics install`) writes into the modules cache of `evaluate`:
`evaluate` looks for a bare name in the working folder, then on the Hub as `evaluate-metric/NAME`, and when the Hub has
no answer (offline, 401, 404, 503) in its modules cache, in
`$HF_MODULES_CACHE/evaluate_modules/metrics/evaluate-metric--NAME/<64 characters>/NAME.py`. There a file of one line is
put that imports the class from this package. Whatever a Hub, or a page between, answers with 200 is written into that
same folder under a name of its own; the folder's `__init__.py`, also one line, sends such names to the installed
module too, so that foreign code under our name is not run.
"""

import functools
import hashlib
import os
import sys
import types
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_captionrl.lazy_import import call_after_import

__all__ = ["MODULES", "extend_evaluate", "install", "modules_cache", "path", "use_installed"]

MODULES: dict[str, str] = {
    "caption_diversity": "CaptionDiversity",
    "caption_faithfulness": "CaptionFaithfulness",
    "caption_nlg": "CaptionNLG",
    "caption_perplexity": "CaptionPerplexity",
    "clip_score": "ClipScore",
    "emscore": "Emscore",
    "self_retrieval": "SelfRetrieval",
}
"""Names of the modules, and the class in each."""

_OFF = "CAPTIONRL_NO_INSTALL"
_INIT = f"from {__name__} import use_installed; use_installed(__name__, __path__)\n"


def modules_cache() -> Path:
    """Where `evaluate` keeps modules, found without importing it (that takes seconds)."""
    config = sys.modules.get("evaluate.config")
    if config is not None:
        return Path(config.HF_MODULES_CACHE)
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_MODULES_CACHE") or os.path.join(os.path.expanduser(home), "modules"))


def path(name: str) -> str:
    """Folder of a module, for `evaluate.load(path(name))`.

    Args:
        name: One of `MODULES`.

    Returns:
        `str`: The folder, which is also a complete Space.

    Raises:
        ValueError: If there is no such module.
    """
    if name not in MODULES:
        raise ValueError(f"There is no module {name!r}. Use one of {sorted(MODULES)}.")
    return str(Path(__file__).parent / name)


def install() -> list[Path]:
    """Make the bare names of `MODULES` known to `evaluate`.

    This is for processes that do not import `hf_captionrl`. Costs a few looks at files where everything is in place; safe
    in many processes at once. A cache that cannot be written gives one warning.

    Returns:
        `list[pathlib.Path]`: The files in place, one a module; empty where the cache cannot be written.
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
            f"evaluate's modules cache {str(cache)!r} cannot be written ({error}), so that evaluate.load does not find "
            f"{', '.join(MODULES)} by name. Set HF_MODULES_CACHE or HF_HOME to a folder that can be written.",
            stacklevel=2,
        )
        return []
    return found


def extend_evaluate() -> None:
    """Make `evaluate.load` of this process know the bare names of `MODULES`; `import hf_captionrl` calls this.

    Happens at once where `evaluate` is imported, else when it is. Does nothing where `CAPTIONRL_NO_INSTALL` is set.
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
        return loading.ImportableModule(f"{__package__}.{path}.{path}", _digest(_shim(path)))

    extended.captionrl_modules = tuple(MODULES)  # type: ignore[attr-defined]
    loading.evaluation_module_factory = extended


def use_installed(package: str, folders: Iterable[str]) -> None:
    """Send every version of a module that `evaluate` may hold to the installed one.

    Called by the `__init__.py` of a module's folder in `evaluate`'s cache, which is imported after `evaluate` has
    written what it downloaded and before that would be run.
    """
    name = package.rpartition("--")[2]
    if name not in MODULES:
        return
    ours = _digest(_shim(name))
    for folder in map(Path, folders):
        for version in folder.iterdir() if (folder / ours).is_dir() else ():
            if len(version.name) == 64 and version.name != ours:
                stand_in = types.ModuleType(f"{package}.{version.name}", "Stands for the installed module.")
                stand_in.__path__ = [str(folder / ours)]
                sys.modules[stand_in.__name__] = stand_in


def _shim(name: str) -> str:
    return f"from {__package__}.{name}.{name} import {MODULES[name]}\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _install_one(root: Path, name: str) -> Path:
    folder, text = root / f"evaluate-metric--{name}", _shim(name)
    shim, init = folder / _digest(text) / f"{name}.py", folder / "__init__.py"
    if _size(shim) == len(text) and _size(init) == len(_INIT):
        return shim
    # Only now: the import of hf_captionrl does not pay for what it seldom needs.
    import secrets
    import shutil

    from hf_captionrl.io import atomic_write_text

    if not shim.parent.is_dir():
        # The folder appears with the file in it: `evaluate` gives up on a folder without.
        making = folder / f".tmp-{secrets.token_hex(8)}"
        try:
            atomic_write_text(making / "__init__.py", "")
            atomic_write_text(making / shim.name, text)
            os.rename(making, shim.parent)
        except OSError:
            # Another process was faster, or nothing can be written here: what follows tells.
            shutil.rmtree(making, ignore_errors=True)
    if _size(shim) != len(text):
        atomic_write_text(shim, text)
    if _size(init) != len(_INIT):
        atomic_write_text(init, _INIT)
    return shim


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return -1
