"""Tokenizer classes of the checkpoints that the pages name load from what an installation brings."""

import subprocess
import sys

import pytest

from scripts.load_tokenizers import ROOT, main

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
