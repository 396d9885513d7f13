"""Tiny models of every family, by name."""

from __future__ import annotations

from typing import Any

from hf_captionrl.captioners import Captioner, load_captioner
from tests.tiny import FAMILIES, tiny_model
from tests.tiny.chat import CHAT_TYPES, tiny_chat
from tests.tiny.families import FAMILY_NAMES, tiny_family

MODELS = (*FAMILIES, *FAMILY_NAMES, *CHAT_TYPES)


def build(name: str) -> tuple[Any, Any]:
    """Model and processor."""
    if name in FAMILIES:
        return tiny_model(name)
    return tiny_family(name) if name in FAMILY_NAMES else tiny_chat(name)


def captioner_of(name: str, **settings: Any) -> Captioner:
    model, processor = build(name)
    return load_captioner(model.eval(), processor=processor, **settings)
