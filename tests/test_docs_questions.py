"""The questions at the end of docs/architecture.md: every file that an answer names exists and defines the name."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECTION = "## In which file is ...?"


def questions(page):
    """Number, question and answers of each row."""
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+) \|$", page.split(SECTION)[1], re.M)
    return [
        (int(number), question, re.findall(r"`([\w/.]+)(?::(\w+))?`", answer)) for number, question, answer in rows
    ]


def wrong(answers):
    """Answers whose file is not there or does not define the name."""
    found = []
    for path, name in answers:
        file = next((file for file in (ROOT / "hf_captionrl" / path, ROOT / path) if file.is_file()), None)
        if file is None:
            found.append(path)
        elif name and not re.search(rf"^(?:def|class) {name}\b|^{name}\b.*=", file.read_text(encoding="utf-8"), re.M):
            found.append(f"{path}:{name}")
    return found


def test_answers_name_files_that_define_the_names():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert page.rstrip().endswith("|"), "the questions end the page"
    rows = questions(page)
    assert [number for number, _, _ in rows] == list(range(1, 21))
    assert all(question.endswith("?") and answers for _, question, answers in rows)
    assert {question: bad for _, question, answers in rows if (bad := wrong(answers))} == {}


@pytest.mark.parametrize(
    "answer", [("losses/no_such_file.py", ""), ("losses/smile.py", "no_such_name"), ("losses", "")]
)
def test_wrong_answer_is_found(answer):
    assert wrong([answer]) == [":".join(filter(None, answer))]
    assert wrong([("losses/smile.py", "smile_loss"), ("rewards/registry.py", "REWARDS"), ("Makefile", "")]) == []


def missing_files(layout):
    """Files that a listing names and its folder has not: a folder is indented by four, its description names files in it."""
    found, folder = [], ""
    for line in layout.splitlines():
        entry = re.match(r" {4}([\w/]+/|\w+\.py)(?= )", line)
        folder = entry[1] if entry else folder
        inside = ROOT / "hf_captionrl" / folder if folder.endswith("/") else ROOT / "hf_captionrl"
        found += [f"{folder}: {name}" for name in re.findall(r"\b\w+\.py\b", line) if not (inside / name).is_file()]
    return found


def test_files_of_the_layout_exist():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    layout = page.split("## Package layout")[1].split("```")[1]
    assert len(re.findall(r"\w+\.py\b", layout)) > 15
    assert missing_files(layout) == []
    assert missing_files("    losses/   smile.py and\n              cider.py\n") == ["losses/: cider.py"]
