"""Tokenizer classes of the checkpoints that the pages name load from what an installation brings."""

import json
import re
import subprocess
import sys

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from scripts.load_tokenizers import ROOT, main, result_of

HIDDEN = """
import os, runpy, sys
from transformers import AutoTokenizer
for library in sys.argv[2:]:
    if os.fork() == 0:
        sys.modules[library] = None
        runpy.run_path(sys.argv[1], run_name="__main__")
    print("ended with", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_every_class_loads(capsys):
    assert main() == 0, capsys.readouterr().out


def test_a_library_that_is_missing_is_named_with_the_checkpoint():
    """Each library, hidden from a fork of one new interpreter that has imported neither."""
    program = str(ROOT / "scripts" / "load_tokenizers.py")
    command = [sys.executable, "-c", HIDDEN, program, "sentencepiece", "google.protobuf"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    *faults, end = done.stdout.split("ended with 1\n")
    assert (len(faults), end) == (2, ""), done.stdout + done.stderr
    for text in faults:
        assert re.search("^SiglipTokenizer of google/siglip-base-patch16-224 ", text, re.MULTILINE), text
        assert "Qwen" not in text  # whose classes need neither


def test_results_of_model_types_are_those_of_the_record_and_the_page():
    record = json.loads((ROOT / "reproduction/results/model_types.json").read_text())
    if record["versions"]["transformers"] != transformers.__version__:
        pytest.skip("the record is of another version of transformers")
    for kind in ("blip", "vipllava", "udop", "fuyu"):  # one of each result
        assert result_of(kind) == record["types"][kind]
    assert MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() == record["types"].keys()
    rows = re.findall(r"^\| ([a-z ]+)(?::[^|]*)? \| (\d+) \|$", (ROOT / "docs/families.md").read_text(), re.MULTILINE)
    assert {result: int(number) for result, number in rows} == record["counts"]
