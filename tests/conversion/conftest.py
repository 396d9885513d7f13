"""Conversions without a new interpreter each."""

import pytest

from hf_captionrl.conversion import convert as _package  # noqa: F401
from hf_captionrl.conversion import unpickling


@pytest.fixture
def in_this_process(monkeypatch):
    """Open pickles here, as the process of `unpickling.py` does."""
    import importlib

    module = importlib.import_module("hf_captionrl.conversion.convert")
    monkeypatch.setattr(module, "unpickle", unpickling._write)
