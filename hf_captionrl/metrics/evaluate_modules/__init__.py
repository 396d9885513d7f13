"""Modules of `evaluate` over `hf_captionrl.metrics`.

`<name>.py` declares a metric and its class; `captionrl push` writes the Space from it.

After `import hf_captionrl` (unless `CAPTIONRL_NO_INSTALL` is set) `evaluate.load("self_retrieval")` and the other bare names
of `MODULES` work from any folder, online and offline. Programs that do not import the package find them after
`captionrl metrics install`. `evaluate.load(path("self_retrieval"))` works without either. Importing this package is fast: no
torch, no `evaluate`.
"""

from hf_captionrl.metrics.evaluate_modules.load import MODULES, install, modules_cache, path

__all__ = ["MODULES", "install", "path"]

if __name__ == "evaluate_modules":
    # The working folder is hf_captionrl itself, so this package hides the one in the cache of `evaluate`.
    __path__.append(str(modules_cache() / "evaluate_modules"))
