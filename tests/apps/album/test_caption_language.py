"""Languages of existing captions are kept: the rule with a made identifier, and py3langid on short captions."""

import logging
import sys
import types
from typing import ClassVar

import numpy as np
import pytest

from hf_captionrl.apps.album import phrases as caption_language
from hf_captionrl.apps.album.album import describe_album
from hf_captionrl.apps.album.options import AlbumSettings
from hf_captionrl.apps.album.phrases import (
    MARGIN,
    LanguageIdentifier,
    check_candidates,
    load_language_identifier,
    meets_constraints,
)
from hf_captionrl.cli import main

CAPTIONS = {
    "en": [
        "a dog on a sofa",
        "three dogs",
        "red bus parked in the street",
        "a man riding a horse",
        "dog running in the snow",
    ],
    "de": [
        "ein Hund auf einem Sofa",
        "drei Hunde",
        "roter Bus auf der Straße",
        "ein Mann reitet ein Pferd",
        "Hund rennt im Schnee",
    ],
    "fr": [
        "un chien sur un canapé",
        "trois chiens",
        "bus rouge garé dans la rue",
        "un homme à cheval",
        "chien dans la neige",
    ],
    "es": [
        "un perro en un sofá",
        "tres perros",
        "autobús rojo en la calle",
        "un hombre a caballo",
        "perro en la nieve",
    ],
}


class Counting:
    """py3langid's interface; the score of a language is the number of its words."""

    labels = ("en", "de", "fr")
    words: ClassVar = {"en": {"dog", "the", "a"}, "de": {"hund", "der", "a"}, "fr": {"chien", "le"}}

    @classmethod
    def from_model_file(cls, file):
        assert file == "model"
        return cls()

    def set_languages(self, languages):
        self.asked = list(languages)

    def rank(self, text):
        scores = {name: 2.0 * sum(w in mine for w in text.lower().split()) for name, mine in self.words.items()}
        return sorted(scores.items(), key=lambda item: (-item[1], item[0]))

    def classify(self, text):
        return self.rank(text)[0]


@pytest.fixture
def made(monkeypatch):
    module = types.ModuleType("py3langid.langid")
    module.LanguageIdentifier, module.MODEL_FILE = Counting, "model"
    monkeypatch.setitem(sys.modules, "py3langid", types.ModuleType("py3langid"))
    monkeypatch.setitem(sys.modules, "py3langid.langid", module)
    caption_language._loaded.cache_clear()
    yield
    caption_language._loaded.cache_clear()


@pytest.fixture
def absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid", None)
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    caption_language._report_missing.cache_clear()


def test_only_clear_differences_count():
    identifier = LanguageIdentifier(Counting(), ["en", "de"])
    assert identifier._identifier.asked == ["de", "en"]
    assert MARGIN == 3
    assert not identifier.is_foreign("dog", ["de"]), "one word, 2 nats"
    assert identifier.is_foreign("the dog", ["de"])
    assert not identifier.is_foreign("the dog", ["de", "en"])
    assert not identifier.is_foreign("12 + 3", ["fr"])
    assert not identifier.is_foreign("the dog", [])
    # "a" is German by classification, but English here.
    groups = [["the dog"], ["a dog", "der hund"], ["a"], [], ["7"], ["the dog"]]
    assert identifier.languages_of(groups) == [{"en"}, {"en", "de"}, {"en"}, set(), set(), {"en"}]
    assert identifier.languages_of([["7"]]) == [set()]


def test_candidates_keep_the_language_of_existing_captions(made):
    candidates = [["the dog", "der hund", "le chien"], ["der hund", "dog"], ["le chien"]]
    old = [["the dog asleep"], ["der hund"], []]

    def allowed(**settings):
        return meets_constraints(candidates, old, AlbumSettings(**settings)).tolist()

    assert allowed() == [True, False, False, True, True, True]
    assert allowed(language="any") == [True] * 6
    assert allowed(language="de") == [False, True, False, True, True, False]
    # The trigger does not count.
    mask = meets_constraints([["le chien der hund"]], [["der hund"]], AlbumSettings(), trigger="le chien ")
    assert mask.tolist() == [True]
    assert not meets_constraints([["le chien le hund"]], [["der hund"]], AlbumSettings())[0]
    with pytest.raises(ValueError, match="The language 'xx' is unknown"):
        allowed(language="xx")


def test_album_does_not_choose_another_language(made, scorer, images):
    texts = [["der hund", "the dog red"], ["der hund rot"], ["der hund klein"]]
    existing = describe_album(images, None, scorer, captions=texts, diagnose_only=False, language="de")
    assert "the dog red" not in existing.captions
    found = describe_album(images, None, scorer, captions=["the dog", "der hund", "le chien"], language="de")
    assert ["constraint" in image.problems for image in found.images] == [True, False, True]


def test_scripts_are_compared_without_py3langid_and_this_is_said_once(absent, caplog, capsys):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            mask = check_candidates([["two cats", "zwei Katzen", "один кот"]], [["a cat"]], AlbumSettings())
    assert mask.tolist() == [True, True, False]
    assert [record.message.count("py3langid is not installed") for record in caplog.records] == [1]
    caplog.clear()
    caption_language._report_missing.cache_clear()
    assert check_candidates([["один кот"]], [["a cat"]], AlbumSettings(language="any")).all()
    assert check_candidates([["один кот"]], [[]], AlbumSettings()).all()
    assert caplog.records == [], "nothing was compared"
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hf-captionrl\[language\]'"):
        load_language_identifier("en")
    assert main(["album", "photos", "--model", "scenes:blip-mle", "--language", "de"]) != 0
    assert "The language 'de' needs py3langid" in capsys.readouterr().err


def test_languages_of_short_captions():
    pytest.importorskip("py3langid", reason="no py3langid on this machine")
    for language, mine in CAPTIONS.items():
        # Each caption stands for the existing one of an image; all captions are candidates.
        flat = [text for texts in CAPTIONS.values() for text in texts]
        owner = np.array([name for name, texts in CAPTIONS.items() for _ in texts])
        mask = meets_constraints([flat] * len(mine), [[text] for text in mine], AlbumSettings()).reshape(len(mine), -1)
        assert mask[:, owner == language].all()
        assert mask[:, owner != language].mean() < 0.1
    # A language that is not among the usual ones.
    assert meets_constraints([["un gos al sofà de casa", "a dog"]], [[]], AlbumSettings(language="ca")).tolist() == [
        True,
        False,
    ]


def test_mixed_albums_keep_the_language_of_each_image():
    pytest.importorskip("py3langid", reason="no py3langid on this machine")
    old = [["ein Hund auf einem Sofa"], ["a dog on a sofa"], ["zwei Katzen sitzen auf einem Stuhl"]]
    candidates = [["drei Hunde schlafen", "three dogs sleeping"]] * 3
    assert meets_constraints(candidates, old, AlbumSettings()).tolist() == [True, False, False, True, True, False]
