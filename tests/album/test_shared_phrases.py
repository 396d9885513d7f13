"""What captions share and what varies; removing it leaves correct text."""

from types import SimpleNamespace

import pytest

from hf_captionrl.album.shared_phrases import drop_shared, group_facts, repair, shared_phrases
from hf_captionrl.text import spacy_models

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
    assert shared_phrases(DOGS[:2]) == (), "two captions are no set"
    with pytest.raises(ValueError, match=r"min_share is 1\.5"):
        shared_phrases(DOGS, min_share=1.5)


@pytest.mark.parametrize(
    ("caption", "dropped", "triggered"),
    [
        (DOGS[0], "brown on a red sofa", "ohwx dog, brown on a red sofa"),
        (DOGS[1], "on the grass, running", "ohwx dog on the grass, running"),
        (DOGS[2], "with a ball", "ohwx dog with a ball"),
        (DOGS[3], "sleeping", "ohwx dog, sleeping"),
        ("a dog", "a dog", "ohwx dog"),
        ("a man and a dog", "a man", "ohwx dog, a man"),
        ("a man with a dog, smiling", "a man, smiling", "ohwx dog, a man, smiling"),
        ("a dog is sitting in a orange car", "sitting in an orange car", "ohwx dog, sitting in an orange car"),
        ("two pigs on a lawn", "two pigs on a lawn", "ohwx dog, two pigs on a lawn"),
        ("a hotdog stand", "a hotdog stand", "ohwx dog, a hotdog stand"),
        ("", "", "ohwx dog"),
    ],
)
def test_dropping_leaves_correct_text(caption, dropped, triggered):
    phrases = ("a photo", "dog")
    assert drop_shared(caption, phrases) == dropped
    assert drop_shared(caption, phrases, trigger="ohwx dog") == triggered


def test_repair():
    assert repair("and a dog with the") == "a dog"
    assert repair("a red, , an dog") == "a red, a dog"
    assert repair("of the") == ""
    assert repair("A apple on the the table") == "An apple on the table"


@pytest.mark.parametrize("noun_chunks", [False, None])
def test_facts_of_groups(noun_chunks):
    captions = [*DOGS, "a cat on a mat", "a cat on a hat", "a cat on a bat"]
    first, second = group_facts(captions, ["dogs"] * 4 + ["cats"] * 3, noun_chunks=noun_chunks)
    assert (first.group, first.num_images, first.shared) == ("dogs", 4, ("a photo", "dog"))
    assert (second.group, second.num_images, second.shared) == ("cats", 3, ("a cat",))
    assert dict(second.varying) == {"bat": 1, "hat": 1, "mat": 1}
    assert all(fact != "dog" for fact, _ in first.varying)


def test_noun_phrases_are_facts_with_a_parser(monkeypatch):
    """The parser's noun phrases, without determiners; a stand-in for spaCy, which only some machines have."""

    def token(text, kind):
        return SimpleNamespace(text=text, pos_=kind)

    def parse(texts):
        for text in texts:
            adjective, noun = text.split()[-2:]
            chunk = [token("a", "DET"), token(adjective, "ADJ"), token(noun, "NOUN")]
            yield SimpleNamespace(noun_chunks=[chunk])

    monkeypatch.setattr(spacy_models, "load_spacy", lambda **_: SimpleNamespace(pipe=parse))
    captions = ["a man with a blue umbrella", "a man on a wooden horse", "a man beside a wooden horse"]
    (found,) = group_facts(captions, [""] * 3, noun_chunks=True)
    assert found.varying == (("wooden horse", 2), ("blue umbrella", 1))
