"""What captions share and what varies."""

import random
import re
import tracemalloc
from types import SimpleNamespace

import pytest

from hf_captionrl.apps.album import phrases
from hf_captionrl.apps.album.phrases import drop_shared, group_facts, shared_phrases
from hf_captionrl.text import tokenize as spacy_models

DOGS = [
    "a photo of a brown dog on a red sofa",
    "a photo of a dog on the grass, running",
    "A photo of the dog with a ball",
    "a photo of a sleeping dog",
]


def test_shared_phrases_by_hand():
    assert shared_phrases(DOGS) == ("a photo", "dog")
    assert shared_phrases([*DOGS, "a cat"]) == ()
    assert shared_phrases([*DOGS, "a cat"], min_share=0.8) == ("a photo", "dog")
    # The longest phrase stands for its parts; function words alone are not shared facts.
    assert shared_phrases(["the old red barn in snow", "the old red barn in fog", "the old red barn"]) == (
        "the old red barn",
    )
    assert shared_phrases(["on the sea", "on the hill", "on the roof"]) == ()
    # Punctuation ends a phrase.
    assert shared_phrases(["a dog, red ball"] * 3) == ("a dog", "red ball")
    assert shared_phrases(DOGS[:2]) == (), "two captions are not a set"


def test_shared_phrases_of_other_scripts_are_whole_words():
    hindi = ["एक कुत्ता घास पर है", "एक कुत्ता सोफ़े पर है", "एक कुत्ता पानी में है"]
    assert shared_phrases(hindi) == ("एक कुत्ता", "है")
    assert shared_phrases(["at 8:30 am", "at 8:30 pm", "until 8:30"]) == ("8:30",)
    assert shared_phrases(["一只狗在草地上", "一只狗在沙发上", "一只狗在水里"]) == ()


def test_rare_words_take_no_memory_and_change_no_phrase():
    rng = random.Random(0)
    captions = [
        " ".join(["red barn", *(f"w{rng.randrange(10**6)}" for _ in range(30)), "old", "sea"]) for _ in range(2000)
    ]
    tracemalloc.start()
    try:
        found = shared_phrases(captions)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == ("old sea", "red barn")
    assert peak < 30e6  # all 500,000 phrases take 100 MB


def test_facts_of_groups():
    captions = [*DOGS, "a cat on a mat", "a cat on a hat", "a cat on a bat"]
    first, second = group_facts(captions, ["dogs"] * 4 + ["cats"] * 3)
    assert (first.group, first.num_images, first.shared) == ("dogs", 4, ("a photo", "dog"))
    assert (second.group, second.num_images, second.shared) == ("cats", 3, ("a cat",))
    assert dict(second.varying) == {"bat": 1, "hat": 1, "mat": 1}
    assert all(fact != "dog" for fact, _ in first.varying)


class Chunk(list):
    """spaCy's span: tokens and their text; those of `a`, `the` and `it` are no nouns."""

    def __init__(self, text):
        kinds = {"a": "DET", "the": "DET", "it": "PRON"}
        super().__init__(
            SimpleNamespace(text=w, pos_=kinds.get(w, "NOUN"))
            for w in text.replace(",", " ,").replace("'s", " 's").split()
        )
        self.text = text


@pytest.fixture
def parser(monkeypatch):
    """A stand-in for spaCy, which only some machines have: noun chunks are in brackets."""

    class Parser:
        def pipe(self, texts):
            for text in texts:
                chunks = (Chunk(found) for found in re.findall(r"\[(.*?)\]", marked[text]))
                yield SimpleNamespace(noun_chunks=chunks)

    marked = {}

    def load_spacy(exclude):
        assert exclude == ["ner"]
        return Parser()

    def captions(*texts):
        plain = [re.sub(r"[\[\]]", "", text) for text in texts]
        marked.update(zip((text.casefold() for text in plain), (text.casefold() for text in texts), strict=True))
        return plain

    monkeypatch.setattr(phrases, "load_spacy", load_spacy)
    return captions


def test_noun_phrases_are_facts_with_a_parser(parser):
    captions = parser(
        "[a man] with [a blue umbrella]", "[a man] on [a wooden horse]", "[a man] by [a wooden horse] of [it]"
    )
    (found,) = group_facts(captions, [""] * 3)
    assert found.shared == ("a man",)
    assert found.varying == (("wooden horse", 2), ("blue umbrella", 1))


def test_noun_chunks_are_shared_phrases(parser, monkeypatch):
    captions = parser(
        "[a close up] of [a big, red dog]",
        "[the close up] of [the big, red dog] on [grass]",
        "[A close up]: [a big, red dog]",
    )
    (found,) = group_facts(captions, [""] * 3)
    assert found.shared == ("big, red dog", "close up")
    assert dict(found.varying) == {"grass": 1}
    # Phrases of content words stay, and without a parser there are only these.
    with monkeypatch.context() as patched:
        patched.setattr(phrases, "_MOST_PARSED", 2)
        (without,) = group_facts(captions, [""] * 3)
    assert without.shared == ("red dog", "big", "close")
    assert [drop_shared(text, found.shared, trigger="x") for text in captions] == ["x", "x on grass", "x"]
    # A chunk of too few captions is not shared; pronouns never are.
    few = parser("[a close up] of [it]", "[a close up] and [it]", "[a close shave] for [it]")
    (found,) = group_facts(few, [""] * 3)
    assert found.shared == ("a close",)
    assert group_facts(few, [""] * 3, min_share=0.6)[0].shared == ("a close up",)


def test_large_groups_are_not_parsed(parser):
    (found,) = group_facts(["a dog"] * 5001, [""] * 5001)
    assert found.shared == ("a dog",)


def test_noun_chunks_of_spacy_are_shared_phrases():
    pytest.importorskip("spacy", reason="no spaCy with its English model on this machine")
    try:
        spacy_models.load_spacy()
    except ModuleNotFoundError:
        pytest.skip("no spaCy with its English model on this machine")
    captions = ["a big, red dog on a sofa", "the big, red dog in the snow", "a big, red dog with a wooden ball"]
    (found,) = group_facts(captions, [""] * 3)
    assert found.shared == ("big, red dog",)
    assert dict(found.varying) == {"sofa": 1, "snow": 1, "wooden ball": 1}
