"""Tokenizer classes of the checkpoints that the pages name load from what an installation brings."""

import json
import re
import subprocess
import sys

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from scripts.load_tokenizers import ROOT, main, result_of

HIDDEN = """
import runpy, sys
sys.modules[sys.argv.pop(1)] = None
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_every_class_loads(capsys):
    assert main() == 0, capsys.readouterr().out


@pytest.mark.parametrize("library", ["sentencepiece", "google.protobuf"])
def test_a_library_that_is_missing_is_named_with_the_checkpoint(library):
    command = [sys.executable, "-c", HIDDEN, library, str(ROOT / "scripts" / "load_tokenizers.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    faults = done.stdout.splitlines()
    assert any(line.startswith("SiglipTokenizer of google/siglip-base-patch16-224 ") for line in faults), faults
    assert "Qwen" not in done.stdout  # whose classes need neither


def test_results_of_model_types_are_those_of_the_record_and_the_page():
    record = json.loads((ROOT / "reproduction/results/model_types.json").read_text())
    for kind in ("blip", "vipllava", "udop", "fuyu"):  # one of each result
        assert result_of(kind) == record["types"][kind]
    assert MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() == record["types"].keys()
    rows = re.findall(r"^\| ([a-z ]+)(?::[^|]*)? \| (\d+) \|$", (ROOT / "docs/families.md").read_text(), re.MULTILINE)
    assert {result: int(number) for result, number in rows} == record["counts"]
