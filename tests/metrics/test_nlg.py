"""Tests."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.rouge.rouge import Rouge, my_lcs

from hf_captionrl.metrics import bleu, cider, cider_d, rouge_l
from hf_captionrl.metrics.nlg import _common, bleurt, entailment
from hf_captionrl.text.cider_d import DocumentFrequencies
from hf_captionrl.text.tokenize import ptb_tokenize
from tests.tiny import tiny_pair_model
from tests.tolerances import assert_close, close

VECTORS = Path(__file__).parents[1] / "vectors"
ROWS = [json.loads(line) for line in (VECTORS / "coco_sample.jsonl").read_text().splitlines()]
REFERENCES = [row["references"] for row in ROWS]


def cut(caption: str) -> str:
    return " ".join(ptb_tokenize(caption))


@pytest.mark.parametrize("captioner", ["clipcap_coco", "clipcap_conceptual"])
def test_scores_equal_pycocoevalcap_on_coco(captioner, capsys):
    captions = [row[captioner] for row in ROWS]
    truth = {i: [cut(r) for r in references] for i, references in enumerate(REFERENCES)}
    ours = {i: [cut(caption)] for i, caption in enumerate(captions)}
    found = bleu(captions, REFERENCES)
    corpus, sentences = Bleu(4).compute_score(truth, ours, verbose=0)
    assert_close([found[f"bleu_{n}"] for n in range(1, 5)], corpus)
    assert_close(found["per_sample"].T, sentences)
    for name, metric, oracle in (("cider_d", cider_d, Cider()), ("rouge_l", rouge_l, Rouge())):
        mean, scores = oracle.compute_score(truth, ours)
        result = metric(captions, REFERENCES)
        assert result[name] == close(mean)
        assert_close(result["per_sample"], scores)


def test_cider_names_both_metrics():
    captions = [row["clipcap_coco"] for row in ROWS]
    plain, d = cider(captions, REFERENCES), cider_d(captions, REFERENCES)
    assert "cider" in plain
    assert "cider_d" not in plain
    assert plain["cider"] != d["cider_d"]
    assert plain["signature"].startswith("metric:cider|")
    assert "df:corpus|documents:100" in d["signature"]


def test_given_frequencies_are_used_and_stated():
    captions = [row["clipcap_coco"] for row in ROWS]
    words = [[ptb_tokenize(r) for r in references] for references in REFERENCES]
    given_ = cider_d(captions[:10], REFERENCES[:10], frequencies=DocumentFrequencies.from_references(words))
    assert given_["cider_d"] != cider_d(captions[:10], REFERENCES[:10])["cider_d"]
    assert_close(given_["per_sample"], cider_d(captions, REFERENCES)["per_sample"][:10])
    assert "df:given|documents:100" in given_["signature"]


def test_eos_lowers_the_score_of_truncated_captions():
    references = [["a man riding a horse"], ["two dogs on a bed"], ["a red bus"]]
    captions = ["a man riding a", "two dogs on a bed", "a red bus"]
    without, with_eos = (cider_d(captions, references, eos=eos)["per_sample"][0] for eos in (False, True))
    assert with_eos < without


def test_several_captions_per_image_are_averaged():
    references = REFERENCES[:20]
    pairs = [[row["clipcap_coco"], row["clipcap_conceptual"]] for row in ROWS[:20]]
    both = cider_d(pairs, references)
    single = [cider_d([pair[k] for pair in pairs], references)["cider_d"] for k in (0, 1)]
    assert both["cider_d"] == pytest.approx(sum(single) / 2)
    assert len(rouge_l(pairs, references)["per_sample"]) == 40


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=12))
def test_common_subsequence_equals_the_table_of_pycocoevalcap(a, b):
    assert _common(a, b) == my_lcs(a, b)


def test_caption_of_punctuation_scores_0():
    references = [["a dog"], ["a cat"]]
    assert cider_d([".", "a cat"], references)["per_sample"][0] == 0
    assert rouge_l([".", "a cat"], references)["per_sample"][0] == 0
    assert bleu([".", "a cat"], references)["per_sample"][0].max() < 1e-3


CAPTIONS = ["a cat", "two dogs"]
REFERENCES_LEARNED_SIMILARITY = [["a red cat", "a mat"], ["a dog", "two dogs", "birds"]]


def logits(model, tokenizer, first, second):
    with torch.no_grad():
        return model(**tokenizer([first], [second], return_tensors="pt")).logits[0].double()


def test_bleurt_is_that_of_the_best_reference(tmp_path):
    model, tokenizer = tiny_pair_model(tmp_path, ["score"])
    expected = [
        max(float(logits(model, tokenizer, c, r)[0]) for r in group)
        for c, group in zip(CAPTIONS, REFERENCES_LEARNED_SIMILARITY, strict=True)
    ]
    found = bleurt(CAPTIONS, REFERENCES_LEARNED_SIMILARITY, model=str(tmp_path))
    assert found["per_sample"] == close(expected, dtype="float32", ulps=64, magnitude=1)
    assert (
        bleurt(CAPTIONS, REFERENCES_LEARNED_SIMILARITY, model=(model, tokenizer))["per_sample"].tolist()
        == found["per_sample"].tolist()
    )
    assert found["bleurt"] == close(sum(expected) / 2, dtype="float32", ulps=64, magnitude=1)


@pytest.mark.parametrize("reverse", [False, True])
def test_entailment_reads_the_label_of_that_name(tmp_path, reverse):
    model, tokenizer = tiny_pair_model(tmp_path, ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"])
    expected = []
    for caption, group in zip(CAPTIONS, REFERENCES_LEARNED_SIMILARITY, strict=True):
        pairs = [(r, caption) if reverse else (caption, r) for r in group]
        expected.append(max(float(logits(model, tokenizer, *pair).softmax(0)[2]) for pair in pairs))
    found = entailment(CAPTIONS, REFERENCES_LEARNED_SIMILARITY, model=str(tmp_path), reverse=reverse)
    assert found["per_sample"] == close(expected, dtype="float32", ulps=64, magnitude=1)
    tiny_pair_model(tmp_path / "other", ["a", "b"])
    with pytest.raises(ValueError, match="Use a model with the label entailment"):
        entailment(CAPTIONS, REFERENCES_LEARNED_SIMILARITY, model=str(tmp_path / "other"))


def test_missing_weights_are_named():
    with pytest.raises(RuntimeError, match="not run: the weights of 'Elron/bleurt-large-512' cannot be loaded"):
        bleurt(CAPTIONS, REFERENCES_LEARNED_SIMILARITY)
