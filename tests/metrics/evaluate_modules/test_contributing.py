"""The example "Add a metric" of CONTRIBUTING.md works in a copy of the package, as printed."""

import json
import shutil
from pathlib import Path

import pytest

from tests.metrics.evaluate_modules.test_install import job
from tests.test_docs import blocks

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "CONTRIBUTING.md"
SECTION = "## Add a metric"
CODE = """
import json, types
import pytest
assert pytest.main(["-q", "-p", "no:cacheprovider", "tests/metrics/test_word_repetition.py"]) == 0
import hf_captionrl
import evaluate
from hf_captionrl.evaluation.evaluator import CAPTIONS_TABLE, ScoredCaptions
captions = ["a dog and a cat", "two red kites", "red red"]
found = evaluate.load("word_repetition").compute(predictions=captions)
scored = ScoredCaptions("mine", [[caption] for caption in captions], [["a dog"]] * 3)
row = CAPTIONS_TABLE.compute(scored, types.SimpleNamespace(seed=0))
columns = [column.title for column in CAPTIONS_TABLE.columns]
from hf_captionrl.hub.spaces import space_files
files = sorted(space_files("word_repetition"))
numbers = [row["word_repetition"], row["word_repetition_ci"]]
print("RESULT", json.dumps([hf_captionrl.__file__, found, *numbers, columns, files]))
"""


def example():
    """Files of the example by their paths."""
    files = [block for block in blocks(PAGE, "python") if block.startswith("# ")]
    return {path.removeprefix("# "): text for path, _, text in (block.partition("\n") for block in files)}


@pytest.fixture
def copy(tmp_path):
    """The package without the example: linked, and copied where files are added."""
    for name in ("hf_captionrl", "run"):
        (tmp_path / name).mkdir()
    for entry in (ROOT / "hf_captionrl").iterdir():
        if entry.name == "metrics":
            shutil.copytree(entry, tmp_path / "hf_captionrl" / entry.name)
        elif entry.name != "__pycache__":
            (tmp_path / "hf_captionrl" / entry.name).symlink_to(entry)
    return tmp_path


def test_metric_example_works_as_printed(warm_process, copy):
    files = {path: text for path, text in example().items() if "word_repetition" in path}
    assert len(files) == 2
    for path, text in files.items():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_text(text)
    section = PAGE.read_text(encoding="utf-8").partition(SECTION)[2].partition("\n## ")[0]
    assert "Add its name to `MODULES` in `hf_captionrl/metrics/evaluate_modules/load.py`" in section
    assert "```bash\npytest tests/metrics/test_word_repetition.py tests/metrics/evaluate_modules\n```" in section
    load = copy / "hf_captionrl" / "metrics" / "evaluate_modules" / "load.py"
    before, start, after = load.read_text().partition("MODULES = (\n")
    load.write_text(f'{before}{start}    "word_repetition",\n{after}')
    work = job(copy, CODE, "run", HF_EVALUATE_OFFLINE="1") | {"cwd": str(copy)}
    ((status, said),) = warm_process.run(work)
    assert status == 0, said
    home, found, value, interval, columns, space = json.loads(said.split("RESULT ")[1])
    assert home == str(copy / "hf_captionrl" / "__init__.py")
    assert found["word_repetition"] == value == pytest.approx(0.7 / 3)
    assert interval[0] <= value <= interval[1]
    assert columns[-1] == "Repeated words ↓"
    assert space == ["README.md", "app.py", "requirements.txt", "tests.py", "word_repetition.py"]
