import json
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_captionrl.metrics import caption_diversity, caption_statistics
from tests.tolerances import close, resolution

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "diversity.json").read_text())
EXPECTED = VECTORS["diversity"]


def test_diversity_equals_the_authors_numbers():
    result = caption_diversity(VECTORS["caption_sets"])
    assert result["div_1"] == close(EXPECTED["Div1"], dtype="float32")
    assert result["div_2"] == close(EXPECTED["Div2"], dtype="float32")
    assert 1000 * result["lexical_diversity"] == pytest.approx(EXPECTED["gDiv1_unique_words"])
    for n in range(1, 5):
        corpus = EXPECTED["mBLEU_1..4_corpus_level(ruotianluo eval_multi)"][n - 1]
        per_image = EXPECTED["mBLEU_1..4_mean_of_per_image(DiversityMetrics)"][n - 1]
        assert result[f"mbleu_{n}"] == close(corpus)
        assert result[f"mbleu_{n}_per_image"] == close(per_image, dtype="float32")


def test_counts_are_those_of_a_plain_loop():
    groups = [["a dog", "a dog", "a big dog"], ["The cat.", "a cat"]]
    result = caption_diversity(groups, training_captions=["A dog!", "a horse"], min_frequency=3)
    assert result["unique_captions"] == 4 / 5
    assert result["novel_captions"] == 3 / 5  # "a big dog", "the cat", "a cat"
    assert result["vocabulary_size"] == 2  # a (4 times), dog (3 times)
    assert result["length"] == pytest.approx((2 + 2 + 3 + 2 + 2) / 5)
    assert result["lexical_diversity"] == 0.005  # a dog big The cat
    assert result["per_image"]["div_1"].tolist() == pytest.approx([3 / 7, 3 / 4])
    assert "captions:2-3" in result["signature"]
    assert "novel_captions" not in caption_diversity(groups)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(["a dog", "a cat runs", "two big dogs"]), min_size=2, max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_shares_are_in_0_to_1(groups):
    result = caption_diversity(groups)
    for key in ("div_1", "div_2", "mbleu_4", "mbleu_4_per_image", "unique_captions"):
        assert 0 <= result[key] <= 1 + resolution(1, dtype="float64")


def test_copies_are_not_diverse():
    same = caption_diversity([["a man rides a brown horse"] * 5])
    other = caption_diversity([["a man rides a brown horse", "two cats sleep on one red bed"]])
    assert same["mbleu_4"] == close(1.0, dtype="float32")
    assert other["mbleu_4"] < 1e-3
    assert other["div_2"] > same["div_2"]


@pytest.mark.parametrize("order", [1, 3, 4])
def test_each_image_has_the_bleu_of_its_longest_n_grams(order):
    found = caption_diversity([["a dog runs", "a dog sleeps"], ["two cats", "two cats"]], max_order=order)
    key = f"mbleu_{order}"
    assert sorted(found["per_image"]) == ["div_1", "div_2", key]
    assert found["per_image"][key].mean() == pytest.approx(found[f"{key}_per_image"])


def test_statistics_keep_case_and_drop_punctuation():
    result = caption_statistics(["A dog, a Dog.", "the dog's  bed!"])
    assert result["length"] == 3.5
    assert result["lexical_diversity"] == len({"A", "dog", "a", "Dog", "the", "dogs", "bed"}) / 1000
    assert result["per_sample"] == [4, 3]
    assert all(mark not in word for word in ("dogs",) for mark in string.punctuation)
