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
    """Folders and `.py` files that a listing names and that are not there.

    A line begins with a folder: a unit of the package is indented by two, a folder of the repository is not. The description names what
    lies in it, or paths that begin with it.
    """
    found = []
    for line in layout.strip().splitlines():
        indent, entry, described = re.fullmatch(r"( {2}|)(\w+/)(?: +(.*))?", line).groups()
        outside = ROOT / "hf_captionrl" if indent else ROOT
        if not (outside / entry).is_dir():
            found.append(entry)
        for name in re.findall(r"[\w*]+/[\w*/]*|[\w*]+\.py\b", re.sub(r"<\w+>", "*", described or "")):
            inside = outside if name.startswith(entry) else outside / entry
            kind = Path.is_file if name.endswith(".py") else Path.is_dir
            if not any(map(kind, inside.glob(name.rstrip("/")))):
                found.append(f"{entry}: {name}")
    return found


def test_files_of_the_layout_exist():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    layout = page.split("## Package layout")[1].split("```")[1]
    units = {path.parent.name for path in (ROOT / "hf_captionrl").glob("*/__init__.py")}
    assert set(re.findall(r"^ {2}(\w+)/", layout, re.M)) == units
    assert missing_files(layout) == []


def test_missing_file_of_a_layout_is_found():
    true = "hf_captionrl/\n  losses/   smile.py, s*.py\nrecipes/  configs/<recipe>/, configs/rows/\ntests/    in tests/tiny\n"
    assert missing_files(true) == []
    false = "hf_captionrl/\n  loss/   pure\n  losses/   smile.py, cider.py, t*.py; rows/\nlosses/\ntests/  tests/none, configs/<recipe>/\n"
    expected = ["loss/", "losses/: cider.py", "losses/: t*.py", "losses/: rows/", "losses/"]
    assert missing_files(false) == [*expected, "tests/: tests/none", "tests/: configs/*/"]
