"""Tiny models of every family, by name."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from packaging.version import Version

from hf_captionrl.captioners import Captioner, load_captioner
from tests.tiny import FAMILIES, tiny_model
from tests.tiny.any_chat import ANY_CHAT_TYPES, tiny_any_chat
from tests.tiny.chat import CHAT_TYPES, tiny_chat
from tests.tiny.families import FAMILY_NAMES, tiny_family

MODELS = (*FAMILIES, *FAMILY_NAMES, *CHAT_TYPES)
ANY_CHAT = (*ANY_CHAT_TYPES, "joycaption")
"""Types without a family."""


def build(name: str) -> tuple[Any, Any]:
    """Model and processor."""
    if name in FAMILIES:
        return tiny_model(name)
    if name in ANY_CHAT:
        if name not in (*transformers.CONFIG_MAPPING, "joycaption"):
            pytest.skip(f"transformers {transformers.__version__} has no model type {name}")
        if name == "minicpmv4_6" and Version(transformers.__version__) < Version("5.21"):
            pytest.skip(
                f"MiniCPM-V of transformers {transformers.__version__} fails on an image with tiles of two sizes"
            )
        return tiny_any_chat(name)
    return tiny_family(name) if name in FAMILY_NAMES else tiny_chat(name)


def captioner_of(name: str, **settings: Any) -> Captioner:
    model, processor = build(name)
    return load_captioner(model.eval(), processor=processor, **settings)
