"""BLEURT and entailment with tiny random models: the best reference by a loop, and missing weights."""

import pytest
import torch

from hf_captionrl.metrics.nlg import bleurt, entailment
from tests.tiny import tiny_pair_model
from tests.tolerances import close

CAPTIONS = ["a cat", "two dogs"]
REFERENCES = [["a red cat", "a mat"], ["a dog", "two dogs", "birds"]]


def logits(model, tokenizer, first, second):
    with torch.no_grad():
        return model(**tokenizer([first], [second], return_tensors="pt")).logits[0].double()


def test_bleurt_is_that_of_the_best_reference(tmp_path):
    model, tokenizer = tiny_pair_model(tmp_path, ["score"])
    expected = [
        max(float(logits(model, tokenizer, c, r)[0]) for r in group)
        for c, group in zip(CAPTIONS, REFERENCES, strict=True)
    ]
    found = bleurt(CAPTIONS, REFERENCES, model=str(tmp_path))
    assert found["per_sample"] == close(expected, dtype="float32", ulps=64, magnitude=1)
    assert (
        bleurt(CAPTIONS, REFERENCES, model=(model, tokenizer))["per_sample"].tolist() == found["per_sample"].tolist()
    )
    assert found["bleurt"] == close(sum(expected) / 2, dtype="float32", ulps=64, magnitude=1)


@pytest.mark.parametrize("reverse", [False, True])
def test_entailment_reads_the_label_of_that_name(tmp_path, reverse):
    model, tokenizer = tiny_pair_model(tmp_path, ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"])
    expected = []
    for caption, group in zip(CAPTIONS, REFERENCES, strict=True):
        pairs = [(r, caption) if reverse else (caption, r) for r in group]
        expected.append(max(float(logits(model, tokenizer, *pair).softmax(0)[2]) for pair in pairs))
    found = entailment(CAPTIONS, REFERENCES, model=str(tmp_path), reverse=reverse)
    assert found["per_sample"] == close(expected, dtype="float32", ulps=64, magnitude=1)
    tiny_pair_model(tmp_path / "other", ["a", "b"])
    with pytest.raises(ValueError, match="Use a model with the label entailment"):
        entailment(CAPTIONS, REFERENCES, model=str(tmp_path / "other"))


def test_missing_weights_are_named():
    with pytest.raises(RuntimeError, match="not run: the weights of 'Elron/bleurt-large-512' cannot be loaded"):
        bleurt(CAPTIONS, REFERENCES)
