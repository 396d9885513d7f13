"""Normalisation of captions, and detection of invalid ones."""

import unicodedata

import pyarrow as pa
import pytest

from hf_captionrl.data.columns import CAPTION_REMEDIES, caption_fault, clean_caption, to_caption_list


@pytest.mark.parametrize(
    ("dirty", "clean"),
    [
        ("A dog runs.", "A dog runs."),
        ("  some tables  next to\tumbrellas \r\n", "some tables next to umbrellas"),
        ("a\x00b\x07c\x1b[31m", "a b c [31m"),
        ("a\u0085b\u2028c\u2029d\xa0e", "a b c d e"),
        ("cafe\u0301", "caf\u00e9"),
        ("\ufeffa soft\u00adhyphen \u202etxet", "a softhyphen txet"),
        ("\U0001f468\u200d\U0001f469\u200d\U0001f467 family", "\U0001f468\u200d\U0001f469\u200d\U0001f467 family"),
        ("half a pair \ud83d here", "half a pair \ufffd here"),
        (" \t\n\x0b\x0c\u3000\ufeff", ""),
        ("", ""),
    ],
)
def test_clean_caption(dirty, clean):
    assert clean_caption(dirty) == clean
    assert clean_caption(clean) == clean
    assert unicodedata.is_normalized("NFC", clean)
    pa.array([clean_caption(dirty)])  # a half surrogate pair could not be stored


def test_ascii_shortcut_equals_the_general_code():
    for code in range(128):
        text = f"a {chr(code)} b"
        assert clean_caption(text) == clean_caption(text + " \u00e9")[:-2].rstrip(), code


@pytest.mark.parametrize(
    ("caption", "reason"),
    [
        ("a dog", None),
        ("\u72ac", None),
        ("7", None),
        (None, "caption_not_text"),
        (5, "caption_not_text"),
        ("", "caption_empty"),
        ("...", "caption_empty"),
        ("\ufffd", "caption_empty"),
        ("word " * 5 + "word", "caption_too_long"),
        ("word " * 4 + "word", None),
        ("x" * 101, "caption_too_long"),  # one word of base64
        ("x" * 100, None),
    ],
)
def test_caption_fault(caption, reason):
    fault = caption_fault(caption, max_words=5)
    assert (fault and fault[0]) == reason
    if fault:
        assert fault[0] in CAPTION_REMEDIES
        assert len(fault[1]) < 200  # long texts are shortened in messages


def test_every_form_of_a_row():
    assert to_caption_list("a  dog") == ["a dog"]
    assert to_caption_list(["a", None, 3, ["b"], " "]) == ["a", None, None, None, ""]
    assert to_caption_list([{"raw": "a", "tokens": ["a"]}, {"caption": "b"}, {"text": 3}, {}]) == [
        "a",
        "b",
        None,
        None,
    ]
    assert to_caption_list({"raw": "a"}) == ["a"]
    assert to_caption_list(None) == []
    assert to_caption_list([]) == []
    assert to_caption_list(float("nan")) == [None]
