import doctest
import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.bootstrap import signature


def test_every_public_name_is_a_function_even_after_all_modules_were_imported():
    for name in metrics.__all__:
        assert callable(getattr(metrics, name)), name
    for name in metrics.__all__:  # a module of the same name would now hide the function
        assert callable(getattr(metrics, name)), name
    with pytest.raises(AttributeError, match="no attribute 'wer'"):
        metrics.wer  # noqa: B018


def test_every_result_has_a_signature_with_the_version():
    unit, counts = [[1.0, 0.0], [0.0, 1.0]], SimpleNamespace(right=[1], wrong=[], recalled=[1], missed=[])
    pairs = (["a dog", "a cat"], [["a dog"], ["a red cat"]])
    words = {"a": ["dog"], "b": ["cat"]}
    results = {
        "bleu": metrics.bleu(*pairs),
        "caption_diversity": metrics.caption_diversity([["a dog", "a cat"]]),
        "caption_statistics": metrics.caption_statistics(["a dog"]),
        "chair": metrics.chair(["a dog"], [["dog"]]),
        "characteristic_words": metrics.characteristic_words(words, tagger=lambda t: [[(x, "NOUN")] for x in t]),
        "cider": metrics.cider(*pairs),
        "cider_d": metrics.cider_d(*pairs),
        "clip_score": metrics.clip_score(unit, unit),
        "emscore": metrics.emscore([unit], [unit]),
        "faithfulness": metrics.faithfulness(["a"], [{}], lambda caption, facts: counts),
        "length_statistics": metrics.length_statistics(["a dog"]),
        "paired_test": metrics.paired_test([1, 2], [2, 2], num_resamples=10),
        "ref_clip_score": metrics.ref_clip_score(unit, unit, [unit, unit]),
        "rouge_l": metrics.rouge_l(*pairs),
        "self_retrieval": metrics.self_retrieval(unit, unit, num_bootstrap=0),
    }
    for name, result in results.items():
        assert result["signature"].rpartition("|")[2].startswith("hf_captionrl:"), name
    # Models and Java have separate tests; the others do not return a metric's result.
    others = {"caption_perplexity", "local_mutual_information", "meteor", "path", "spice"}
    others |= {"bootstrap_interval", "exact_interval", "proportion_interval"}
    assert set(metrics.__all__) == set(results) | others
    assert results["cider"]["signature"] != results["cider_d"]["signature"]


def test_importing_the_package_does_not_import_torch():
    code = "import sys, hf_captionrl.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_signature_keeps_order_and_omits_missing_values():
    text = signature(metric="x", scorer="", seed=None, eos=False, n=4)
    assert text.startswith("metric:x|eos:false|n:4|hf_captionrl:")
    # The signature of a scorer fits into that of the metric.
    assert signature(metric="x", scorer="clip@abc|float32|text:77").startswith(
        "metric:x|scorer:clip@abc,float32,text:77|"
    )


@pytest.mark.parametrize("name", ["metrics.recall", "text.cider_d", "text.tokenize"])
def test_examples_of_docstrings_run(name):
    module = importlib.import_module(f"hf_captionrl.{name}")
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
