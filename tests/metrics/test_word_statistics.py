import math

import numpy as np
import pytest

from hf_captionrl.metrics.words import characteristic_words, length_statistics, local_mutual_information
from tests.tolerances import close

COUNTS = {"human": {"new": 8, "red": 2, "old": 0}, "model": {"red": 9, "new": 1}, "other": {"small": 5}}


def plain_lmi(counts):
    total = sum(sum(words.values()) for words in counts.values())
    scores = {}
    for source, words in counts.items():
        for word, observed in words.items():
            if observed == 0:
                continue
            row = sum(other.get(word, 0) for other in counts.values())
            column = sum(words.values())
            scores[source, word] = observed * math.log(observed / (row * column / total))
    return scores


def test_local_mutual_information_equals_a_plain_loop():
    found = local_mutual_information(COUNTS)
    assert {(s, w): v for s, words in found.items() for w, v in words.items()} == pytest.approx(plain_lmi(COUNTS))
    assert found["human"]["new"] > 0 > found["human"]["red"]
    assert "old" not in found["human"]
    by_hand = 5 * math.log(5 / (5 * 5 / 25))
    assert found["other"]["small"] == pytest.approx(by_hand)


def test_equal_proportions_have_no_characteristic_words():
    found = local_mutual_information({"a": {"x": 2, "y": 4}, "b": {"x": 1, "y": 2}})
    assert all(score == close(0, magnitude=1.0) for words in found.values() for score in words.values())


def tagger(captions):
    """Reads words with their part of speech after a slash."""
    for caption in captions:
        yield [tuple(word.split("/")) for word in caption.split()]


def test_characteristic_words_count_within_a_part_of_speech():
    sources = {
        "human": ["new/ADJ person/NOUN", "new/ADJ red/ADJ", "run/VERB person/NOUN"],
        "model": ["red/ADJ dress/NOUN", "red/ADJ dress/NOUN lake/NOUN"],
    }
    found = characteristic_words(sources, tagger=tagger)
    adjectives = plain_lmi({"human": {"new": 2, "red": 1}, "model": {"red": 2}})
    assert found["ADJ"]["human"] == [("new", pytest.approx(adjectives["human", "new"]))]
    assert found["ADJ"]["model"] == [("red", pytest.approx(adjectives["model", "red"]))]
    assert [word for word, _ in found["NOUN"]["model"]] == ["dress", "lake"]
    assert "run" not in str(found)
    assert [w for w, _ in characteristic_words(sources, tagger=tagger, top=1)["NOUN"]["model"]] == ["dress"]
    ties = characteristic_words({"a": ["y/NOUN x/NOUN"], "b": ["z/NOUN"]}, tagger=tagger)
    assert [word for word, _ in ties["NOUN"]["a"]] == ["x", "y"]
    assert ties["ADJ"] == {"a": [], "b": []}


def test_length_statistics():
    captions = ["a dog", "a small red dog on a road", "cats  play"]
    found = length_statistics(captions, count_tokens=lambda texts: [len(text) for text in texts])
    words = [2, 7, 2]
    assert found["words"].tolist() == words
    assert found["mean_words"] == pytest.approx(np.mean(words))
    assert found["std_words"] == pytest.approx(math.sqrt(sum((w - 11 / 3) ** 2 for w in words) / 3))
    assert (found["max_words"], found["max_tokens"]) == (7, len(captions[1]))
    assert "tokens" not in length_statistics(captions)
