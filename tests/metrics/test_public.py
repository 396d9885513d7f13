import argparse
import doctest
import importlib
import json
import subprocess
import sys

import pytest

import hf_captionrl.metrics as metrics
import scripts.benchmarks.metrics as benchmark
from hf_captionrl.metrics.signature import signature


def test_every_public_name_is_a_function_even_after_all_modules_were_imported():
    for name in metrics.__all__:
        assert callable(getattr(metrics, name)), name
    for name in metrics.__all__:  # a module of the same name would hide the function now
        assert callable(getattr(metrics, name)), name
    with pytest.raises(AttributeError, match="no attribute 'wer'"):
        metrics.wer  # noqa: B018


def test_importing_the_package_does_not_import_torch():
    code = "import sys, hf_captionrl.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_signature_keeps_order_and_leaves_out_what_is_not_there():
    text = signature(metric="x", scorer="", seed=None, eos=False, n=4)
    assert text.startswith("metric:x|eos:false|n:4|hf_captionrl:")
    with pytest.raises(ValueError, match="separator"):
        signature(scorer="a|b")


@pytest.mark.parametrize("name", ["metrics.retrieval", "text.cider", "text.tokenize"])
def test_examples_of_docstrings_run(name):
    module = importlib.import_module(f"hf_captionrl.{name}")
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_benchmark_runs_and_checks_its_own_numbers(tmp_path):
    parser = argparse.ArgumentParser()
    benchmark.add_arguments(parser)
    output = tmp_path / "benchmark.json"
    arguments = ["--rounds", "1", "--training-images", "120", "--pool", "20", "30", "8", "--output", str(output)]
    result = benchmark.run(parser.parse_args(arguments))
    assert result["cider_d"]["largest_difference"] < 1e-6
    assert result["pairwise_bleu"]["largest_difference"] < 1e-6
    assert result["cider_d"]["ratio"] > 1
    assert json.loads(output.read_text()) == result
