"""Words, diversity and perplexity equal plain loops and the authors' numbers."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_captionrl.metrics import caption_diversity, caption_perplexity, caption_statistics
from hf_captionrl.metrics.bootstrap import leave_one_out
from hf_captionrl.metrics.words import (
    characteristic_words,
    length_statistics,
    local_mutual_information,
    vocabulary_size,
)
from tests.tolerances import close

COUNTS = {"human": {"new": 8, "red": 2, "old": 0}, "model": {"red": 9, "new": 1}, "other": {"small": 5}}


def plain_lmi(counts):
    total = sum(sum(words.values()) for words in counts.values())
    scores = {}
    for source, words in counts.items():
        for word, observed in words.items():
            row = sum(other.get(word, 0) for other in counts.values())
            if observed:
                scores[source, word] = observed * math.log(observed * total / (row * sum(words.values())))
    return scores


def test_local_mutual_information_equals_a_plain_loop():
    found = local_mutual_information(COUNTS)
    assert {(s, w): v for s, words in found.items() for w, v in words.items()} == pytest.approx(plain_lmi(COUNTS))
    assert found["human"]["new"] > 0 > found["human"]["red"]
    assert "old" not in found["human"]


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
    assert result["per_sample"]["div_1"].tolist() == pytest.approx([3 / 7, 3 / 4])
    assert "captions:2-3" in result["signature"]
    assert "novel_captions" not in caption_diversity(groups)


@pytest.mark.parametrize("order", [1, 4])
def test_each_image_has_the_bleu_of_its_longest_n_grams(order):
    groups = [["a dog runs", "a dog sleeps"], ["two cats", "two cats"]]
    found = caption_diversity(groups, max_order=order)
    key = f"mbleu_{order}"
    assert set(found["per_sample"]) == {"div_1", "div_2", key, f"{key}_per_image", "unique_captions"}
    for name, values in found["per_sample"].items():
        assert len(values) == len(groups), name
        assert values.mean() == pytest.approx(found[name]), name


def test_statistics_keep_case_and_drop_punctuation():
    result = caption_statistics(["A dog, a Dog.", "the dog's  bed!"])
    assert result["length"] == 3.5
    assert result["lexical_diversity"] == len({"A", "dog", "a", "Dog", "the", "dogs", "bed"}) / 1000
    assert result["per_sample"]["length"] == [4, 3]


WORDS = ["<unk>", "<bos>", "a", "dog", "cat", "runs", "red", "big"]
CAPTIONS = ["a dog runs", "a big red cat", "dog", "a red red red dog runs"]


@pytest.fixture(scope="module")
def language_model():
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=8, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.3, embd_pdrop=0.3)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<bos>")
    return GPT2LMHeadModel(config), wrapped


def plain_nats(model, ids):
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    return [-float(logits[t - 1, ids[t]]) for t in range(1, len(ids))]


@pytest.mark.parametrize(("bos", "batch_size"), [("tokenizer", 3), ("prepend", 1)])
def test_perplexity_equals_a_plain_loop(language_model, bos, batch_size):
    model, tokenizer = language_model
    start = [1] if bos == "prepend" else []
    nats = [plain_nats(model, start + tokenizer(caption)["input_ids"]) for caption in CAPTIONS]
    model.train()
    result = caption_perplexity(CAPTIONS, model, tokenizer, bos=bos, batch_size=batch_size)
    assert model.training  # unchanged, but scored without dropout
    total = sum(map(len, nats))
    assert result["num_tokens"] == total
    assert result["perplexity"] == pytest.approx(math.exp(sum(map(sum, nats)) / total), rel=1e-5)
    assert result["nats"] == pytest.approx([sum(row) for row in nats], rel=1e-5)
    assert result["tokens"].tolist() == [len(row) for row in nats]
    own = [math.exp(sum(row) / len(row)) for row in nats if row]
    assert result["mean_perplexity"] == pytest.approx(sum(own) / len(own), rel=1e-5)
    assert math.isnan(result["per_sample"][2]) == (bos == "tokenizer")  # "dog" alone has no context
    assert f"average:micro|bos:{bos}" in result["signature"]


def test_long_captions_are_truncated_and_counted(language_model):
    model, tokenizer = language_model
    result = caption_perplexity(["a dog " * 20, "a dog"], model, tokenizer)
    assert result["num_truncated"] == 1
    assert result["num_tokens"] == 15 + 1
    assert caption_perplexity(["a dog runs"], model, tokenizer, max_length=2)["num_tokens"] == 1


def test_signature_contains_no_local_path(language_model, tmp_path, monkeypatch):
    model, tokenizer = language_model
    (tmp_path / "judge").mkdir()
    for path, name in ((str(tmp_path / "judge"), "judge"), ("org/gpt2", "org/gpt2")):
        monkeypatch.setattr(model.config, "_name_or_path", path)
        assert f"|model:{name}|" in caption_perplexity(["a dog"], model, tokenizer)["signature"]


@pytest.mark.parametrize(
    ("captions", "options", "named"),
    [
        (["a", ""], {}, r"captions\[1\]"),
        (["dog"], {}, "bos='prepend'"),
        (["a dog"], {"bos": "never"}, "bos"),
    ],
)
def test_the_argument_is_named(language_model, captions, options, named):
    with pytest.raises(ValueError, match=named):
        caption_perplexity(captions, *language_model, **options)


@pytest.mark.parametrize("function", [caption_diversity, caption_statistics, vocabulary_size])
def test_contributions_of_images_equal_a_plain_loop(function):
    groups = [["a dog runs", "a dog"], ["a dog", "two cats", "two cats"], ["a red bus", "a bus"], ["a bus", "one bus"]]

    def measured(chosen):
        if function is caption_diversity:
            found = caption_diversity(chosen)
            return {key: found[key] for key in ("mbleu_4", "unique_captions")}, found["per_sample"]
        if function is caption_statistics:
            found = caption_statistics([" ".join(group) for group in chosen])
            return {"lexical_diversity": found["lexical_diversity"]}, found["per_sample"]
        number, without = vocabulary_size([" ".join(group).split() for group in chosen], 2)
        return {"vocabulary_size": number}, {"vocabulary_size": leave_one_out(number, without)}

    values, shares = measured(groups)
    for key, value in values.items():
        without = [measured(groups[:i] + groups[i + 1 :])[0][key] for i in range(4)]
        assert shares[key] == pytest.approx(leave_one_out(value, without)), key
