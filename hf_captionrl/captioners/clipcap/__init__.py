"""ClipCap: maps an image embedding to a prefix of a language model.

Reference: Mokady et al. 2021, "ClipCap: CLIP Prefix for Image Captioning".

The classes are registered with the Auto classes of transformers when those are first imported, or at once if they already are:
`import hf_captionrl` must stay fast, and the Auto classes cannot be imported without torch. The registered entries are lazy, too:
the model class is imported on first access.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from hf_captionrl.utils.lazy_import import call_after_import, lazy_names

if TYPE_CHECKING:
    from hf_captionrl.captioners.clipcap.configuration_clipcap import ClipCapConfig
    from hf_captionrl.captioners.clipcap.modeling_clipcap import ClipCapForConditionalGeneration
    from hf_captionrl.captioners.clipcap.processing_clipcap import ClipCapProcessor

__getattr__, __all__ = lazy_names(__name__)


class _OnFirstUse(dict[Any, Any]):
    """From configurations to classes, or to functions that are called on first access and return them.

    Our classes import modules that in turn import the Auto classes, so they cannot be imported during registration.
    """

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(found, functools.partial):  # another thread may import at the same time: both get the same class
            self[key] = found = found()
        return found

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


def _imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"hf_captionrl.captioners.clipcap.{module}"), name)


def _register(module: str) -> None:
    """Register with the Auto classes of a module that was imported."""
    config, auto = _imported("configuration_clipcap", "ClipCapConfig"), importlib.import_module(module)
    if module.endswith("configuration_auto"):
        auto.AutoConfig.register(config.model_type, config, exist_ok=True)
        return
    if module.endswith("modeling_auto"):
        mapping = auto.AutoModelForImageTextToText._model_mapping
        load = functools.partial(_imported, "modeling_clipcap", "ClipCapForConditionalGeneration")
    else:
        mapping, load = auto.PROCESSOR_MAPPING, functools.partial(_imported, "processing_clipcap", "ClipCapProcessor")
    if not isinstance(mapping._extra_content, _OnFirstUse):
        mapping._extra_content = _OnFirstUse(mapping._extra_content)
    mapping._extra_content.setdefault(config, load)


def register_auto_classes() -> None:
    """Register with the Auto classes, now or when they are imported. Called by `import hf_captionrl`."""
    for name in ("configuration_auto", "modeling_auto", "processing_auto"):
        module = f"transformers.models.auto.{name}"
        call_after_import(module, functools.partial(_register, module))
