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
    assert wrong([("losses/smile.py", "smile_loss"), ("rewards/base.py", "register_reward"), ("Makefile", "")]) == []


def missing_files(layout):
    """Folders and files that a listing names and that are not there.

    An entry begins its line with a folder: a unit is indented by two, other folders are not. Its description names files and folders in it.
    """
    found, inside = [], ROOT
    for line in layout.splitlines():
        entry = re.match(r"((?:  )?)([\w/]+/)(?: |$)", line)
        if entry:
            inside = (ROOT / "hf_captionrl" if entry[1] else ROOT) / entry[2]
            line = line[entry.end() :]
            if not inside.is_dir():
                found.append(entry[2])
        # Elsewhere than at the beginning of a line, `tests/tiny` is a folder of the repository.
        for name in re.findall(r"(?<![\w/<>])(?:[\w*]+/[\w/]*|[\w*]+\.py\b)(?!<)", line):
            if not any(list(folder.glob(name.rstrip("/"))) for folder in (inside, ROOT)):
                found.append(f"{inside.relative_to(ROOT)}: {name}")
    return found


def test_files_of_the_layout_exist():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    layout = page.split("## Package layout")[1].split("```")[1]
    units = {path.name for path in (ROOT / "hf_captionrl").iterdir() if (path / "__init__.py").is_file()}
    assert set(re.findall(r"^  (\w+)/ ", layout, re.M)) == units
    assert missing_files(layout) == []
