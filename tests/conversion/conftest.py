"""Conversions without a new interpreter each."""

import pytest

from hf_captionrl.apps.convert import convert
from hf_captionrl.apps.convert import convert as unpickling


@pytest.fixture
def in_this_process(monkeypatch):
    """Open pickles here, as the process of `unpickling.py` does."""
    monkeypatch.setattr(convert, "unpickle", unpickling._write)
