"""The examples run as a user runs them, in a process of their own, on the embedded world; pages lead to each of them once."""

import re
import tomllib
from pathlib import Path

import nbformat
import pytest

from tests.test_fresh_processes import PAGES, run

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb"))
FEW = {r"^STEPS = \d+": "STEPS = 2", r"num_train=1280": "num_train=120", r"num_test=300": "num_test=30"}
# What each prints last, or in its only lines.
PRINTS = {
    "captions_of_a_folder": r'^(\{"file_name": "\d\.png", "caption": "[a-z ]+"\}\n?){6}$',
    "compare_two_captioners": r"difference of R@1: 0\.\d+ \[(.|\n)*self-retrieval +R@1 in \d+ bags",
    "own_captioner": r"differ by \d\.\de[-+]0[05-9]\n(.|\n)*loss: [3-9]\.\d\d [0-9. ]+\ncaptions: \['",
    "own_metric": r"^0\.239 \[0\.024, 0\.455\] \(metric:word_repetition\|tok:ptb\|.*\)\ndifference 0\.239, p = 0\.\d+$",
    "own_reward": r"rewards/names_layout/mean +0(.|\n)*rewards/different_tokens/mean +[1-9]",
    "rewards_in_ms_swift": r"\[-[\d.]+, -[\d.]+\]$",
    "rewards_in_trl": r"'rewards/self_retrieval/mean': -\d(.|\n)*'rewards/few_words/mean'",
    "rewards_in_verl": r"\{'score': -[\d.]+, 'words': \d+\}",
    "self_retrieval_in_one_file": r"before R@1 0\.\d\d (.|\n)*step +0 +reward -\d(.|\n)*after +R@1",
    "sle_in_one_file": r"before CIDEr-D 0\.\d\d, mBLEU-4 0\.\d\d(.|\n)*after +CIDEr-D",
    "smile_in_one_file": r"before R@1 0\.\d\d (.|\n)*step +0 +loss 0\.\d(.|\n)*after +R@1",
}
# ms-swift is not installed: its base class and table of rewards, with the signature of version 4.5.2.
SWIFT = "orms = {}\nclass ORM:\n    def __init__(self, args=None, **kwargs):\n        self.args = args\n"


def source_of(path):
    """The program of an example; of a notebook the code of its cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join(cell.source for cell in nbformat.reads(text, as_version=4).cells if cell.cell_type == "code")
    for long, short in FEW.items():
        text = re.sub(long, short, text, flags=re.MULTILINE)
    return text


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "swift").mkdir()
    (tmp_path / "swift" / "rewards.py").write_text(SWIFT)
    return tmp_path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, folder):
    arguments = []
    if path.stem == "rewards_in_trl":  # a tiny model of the kind that it downloads
        from tests.tiny.chat import tiny_chat

        for part in tiny_chat("idefics3"):
            part.save_pretrained(folder / "chat")
        arguments = ["chat"]
    status, output = run(f"import sys\nsys.argv = {[path.name, *arguments]}\n{source_of(path)}", folder)
    assert status == 0, output
    printed = re.sub(r"^(\[transformers\]|Loading weights|Creating parquet).*", "", output, flags=re.MULTILINE)
    assert re.search(PRINTS[path.stem], printed.strip()), output


CALL_VERL = """
import rewards_in_verl as example
data = example.training_images()
score = lambda caption, **more: example.compute_score(  # as verl's NaiveRewardManager calls it
    data_source="captions", solution_str=caption, ground_truth=str(data[0]["image_id"]), extra_info={"index": 0}, **more)["score"]
assert 0 >= score(data[0]["full_caption"]) > score(data[1]["full_caption"], reward_router_address="") + 1
row = next(example.verl_rows(data))
assert row["reward_model"]["ground_truth"] == data[0]["image_id"] and row["prompt"][0]["content"].count("<image>") == len(row["images"])
"""
CALL_SWIFT = """
import rewards_in_ms_swift as example
from pathlib import Path
from swift.rewards import orms
data = example.training_images()
reward = orms["self_retrieval"](args=None)
captions, rows = data["full_caption"][:2], list(example.swift_rows(data.select(range(2)), Path("images")))
right, wrong = (  # as ms-swift's GRPOTrainer calls it
    reward(completions=captions, image_id=ids, messages=[], trainer_state=None)
    for ids in ([row["image_id"] for row in rows], [row["image_id"] for row in reversed(rows)]))
assert all(0 >= a > b + 1 for a, b in zip(right, wrong)) and all(Path(row["images"][0]).is_file() for row in rows)
"""


@pytest.mark.parametrize("code", [CALL_VERL, CALL_SWIFT], ids=["verl", "ms-swift"])
def test_peers_call_rewards_by_their_published_signatures(code, folder):
    status, output = run(f"import sys\nsys.path.insert(0, {str(ROOT / 'examples')!r})\n{code}", folder)
    assert status == 0, output


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.suffix == ".ipynb"], ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell for cell in cells if cell.outputs or cell.execution_count is not None] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_exactly_one_page_leads_to_an_example(path):
    assert len([page for page in PAGES if f"examples/{path.name})" in page.read_text(encoding="utf-8")]) == 1


def test_the_list_of_examples_is_whole():
    """Names and lines of all, in at most 2 kB; a method in one file has at most 150 lines."""
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 2048
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in EXAMPLES}
    lines["compare_two_captioners.ipynb"] = ""  # a notebook's are not those that people read
    listed = re.findall(r"^\| \[(\S+)\]\(\1\) \| ?(\d*) \|", text, re.MULTILINE)
    assert dict(listed) == {name: str(number) for name, number in lines.items()}
    assert max(number for name, number in lines.items() if "one_file" in name) <= 150


def test_the_recipe_with_a_script_header_asks_for_this_package():
    text = (ROOT / "recipes" / "smile_blip.py").read_text(encoding="utf-8")
    (block,) = re.findall(r"(?m)^# /// script$\n((?:^#(?: .*)?$\n)+)^# ///$", text)  # PEP 723
    header = tomllib.loads("".join(line[2:] for line in block.splitlines(keepends=True)))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert header["dependencies"] == [project["project"]["name"]]
    assert header["requires-python"] == project["project"]["requires-python"]
    assert header["tool"]["uv"]["sources"] == {project["project"]["name"]: {"path": "..", "editable": True}}
