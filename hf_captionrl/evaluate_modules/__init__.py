"""Thin `evaluate` modules over `hf_captionrl.metrics`, one folder each, and each folder a complete Space.

After `import hf_captionrl` (unless `CAPTIONRL_NO_INSTALL` is set) `evaluate.load("self_retrieval")` and the other bare names
of `MODULES` work from any folder, online and offline. Programs that do not import the package find them after
`captionrl metrics install`. `evaluate.load(path("self_retrieval"))` works without either. Importing this package is fast: no
torch, no `evaluate`.
"""

from hf_captionrl.evaluate_modules.evaluate_load import MODULES, install, modules_cache, path

__all__ = ["MODULES", "install", "path"]

if __name__ == "evaluate_modules":
    # The working folder is that of hf_captionrl itself, and hides the package of this name in the cache of `evaluate`.
    __path__.append(str(modules_cache() / "evaluate_modules"))
