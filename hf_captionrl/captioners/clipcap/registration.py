"""Registers our models with the Auto classes of transformers, without importing transformers.

`import hf_captionrl` must stay fast, and the Auto classes cannot be imported without torch. `lazy_import` therefore
registers our classes when the modules of the Auto classes are first imported, or at once if they already are. The
registered entries are lazy too: the model class is imported on first access.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from hf_captionrl.utils.lazy_import import call_after_import


def _register_config() -> None:
    from transformers import AutoConfig

    from hf_captionrl.captioners.clipcap.configuration_clipcap import ClipCapConfig

    AutoConfig.register(ClipCapConfig.model_type, ClipCapConfig, exist_ok=True)


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


def _wait(mapping: Any, module: str, name: str) -> None:
    """Register a class that is not yet imported, as `Auto....register` would."""
    from hf_captionrl.captioners.clipcap.configuration_clipcap import ClipCapConfig

    if not isinstance(mapping._extra_content, _OnFirstUse):
        mapping._extra_content = _OnFirstUse(mapping._extra_content)
    mapping._extra_content.setdefault(ClipCapConfig, functools.partial(_imported, module, name))


def _imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"hf_captionrl.captioners.clipcap.{module}"), name)


def _register_model() -> None:
    from transformers.models.auto.modeling_auto import AutoModelForImageTextToText

    _wait(AutoModelForImageTextToText._model_mapping, "modeling_clipcap", "ClipCapForConditionalGeneration")


def _register_processor() -> None:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    _wait(PROCESSOR_MAPPING, "processing_clipcap", "ClipCapProcessor")


def register_auto_classes() -> None:
    """Register with the Auto classes, now or when they are imported. Called by `import hf_captionrl`."""
    call_after_import("transformers.models.auto.configuration_auto", _register_config)
    call_after_import("transformers.models.auto.modeling_auto", _register_model)
    call_after_import("transformers.models.auto.processing_auto", _register_processor)
