"""Registers our models with the Auto classes of transformers, without importing transformers.

`import hf_captionrl` must stay fast, and the Auto classes cannot be imported without torch. `lazy_import` therefore
registers our classes when the modules of the Auto classes are first imported, or at once if they already are. The
registered entries are lazy too: the model class is imported on first access.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from hf_captionrl.utils.lazy_import import call_after_import


def _register_config() -> None:
    from transformers import AutoConfig

    from hf_captionrl.captioners.clipcap.configuration_clipcap import ClipCapConfig

    AutoConfig.register(ClipCapConfig.model_type, ClipCapConfig, exist_ok=True)


class _OnFirstUse(dict[Any, Any]):
    """From configurations to classes, which may be imported on first access.

    Our classes import modules that in turn import the Auto classes, so they cannot be imported during registration.
    """

    def __init__(self, content: dict[Any, Any]) -> None:
        super().__init__(content)
        self._waiting: dict[Any, Callable[[], Any]] = {}

    def wait_for(self, key: Any, load: Callable[[], Any]) -> None:
        if key not in self:
            self[key] = None
            self._waiting[key] = load

    def __getitem__(self, key: Any) -> Any:
        # Another thread may load at the same time: both get the same class, in any order.
        load = self._waiting.get(key)
        if load is not None:
            self[key] = load()
            self._waiting.pop(key, None)
        return super().__getitem__(key)

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


def _wait(mapping: Any, module: str, name: str) -> None:
    """Register a class that is not yet imported, as `Auto....register` would."""
    from hf_captionrl.captioners.clipcap.configuration_clipcap import ClipCapConfig

    if not isinstance(mapping._extra_content, _OnFirstUse):
        mapping._extra_content = _OnFirstUse(mapping._extra_content)
    place = f"hf_captionrl.captioners.clipcap.{module}"
    mapping._extra_content.wait_for(ClipCapConfig, lambda: getattr(importlib.import_module(place), name))


def _register_model() -> None:
    from transformers.models.auto.modeling_auto import AutoModelForImageTextToText

    _wait(AutoModelForImageTextToText._model_mapping, "modeling_clipcap", "ClipCapForConditionalGeneration")


def _register_processor() -> None:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    _wait(PROCESSOR_MAPPING, "processing_clipcap", "ClipCapProcessor")


_REGISTER = {
    "transformers.models.auto.configuration_auto": _register_config,
    "transformers.models.auto.modeling_auto": _register_model,
    "transformers.models.auto.processing_auto": _register_processor,
}
"""From modules of transformers to the functions that are called after their import."""


def register_auto_classes() -> None:
    """Register with the Auto classes, now or when they are imported. Called by `import hf_captionrl`."""
    for name, register in _REGISTER.items():
        call_after_import(name, register)
