"""What the pages say can be done: commands parse, files exist. mkdocs checks the links between pages."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from hf_captionrl.captioners.loading import FAMILIES
from hf_captionrl.cli.main import build_parser
from hf_captionrl.cli.train import METHODS, _with_config

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.M | re.S)


def blocks(page: Path, *languages: str) -> list[str]:
    found = []
    for indent, language, body in BLOCK.findall(page.read_text()):
        if language in languages:
            found.append("".join(line.removeprefix(indent) for line in body.splitlines(keepends=True)))
    return found


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def commands(page: Path) -> list[list[str]]:
    """Lines of shell blocks as words: continuation lines joined, comments and loops left out."""
    lines = []
    for block in blocks(page, "bash", "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.split("  #")[0].split(" # ")[0].strip()
            if line and not line.startswith("#"):
                lines.append(shlex.split(line.split("|")[0].split(">")[0], comments=True))
    return [words for words in lines if words]


def broken_links(page: Path) -> list[str]:
    text = BLOCK.sub("", page.read_text())
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name):
    assert broken_links(ROOT / name) == []


def parse(words: list[str]) -> None:
    """Let whoever a command belongs to parse it."""
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    if words[0] == "captionrl" and words[1] != "train":
        build_parser().parse_args(words[1:])
        return
    if words[:2] == ["captionrl", "train"]:
        arguments = build_parser().parse_args(words[1:])
        recipe_file = METHODS[arguments.method][0]
        words = [f"recipes/{recipe_file}", *_with_config(arguments.arguments, recipe_file)]
    recipe = next((i for i, word in enumerate(words) if re.fullmatch(r"recipes/\w+\.py", word)), None)
    if recipe is not None:
        module = importlib.import_module(words[recipe].removesuffix(".py").replace("/", "."))
        module.parse_args(words[recipe + 1 :])
        return
    script = next((word for word in words if word.startswith("scripts/") and word.endswith(".py")), None)
    if script is not None:
        assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for words in commands(page):
        try:
            parse(words)
        except SystemExit as stop:
            pytest.fail(f"{' '.join(words)}: {capsys.readouterr().err.splitlines()[-1] if stop.code else 'help'}")


def test_a_broken_page_is_seen(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(
        "[x](nowhere.md) [y](#none)\n\n# Some head\n\n[z](#some-head)\n```bash\ncaptionrl caption --nothing\n```\n"
    )
    assert broken_links(page) == ["nowhere.md", "#none"]
    with pytest.raises(SystemExit):
        parse(commands(page)[0])


# --- The questions and the layout of docs/architecture.md --------------------------------------------------------------


def questions(page):
    """Number, question and answers of each row."""
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+) \|$", page.split("## In which file is ...?")[1], re.M)
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
    false = [("losses/no_such_file.py", ""), ("losses/smile.py", "no_such_name"), ("losses", "")]
    assert wrong(false) == [":".join(filter(None, answer)) for answer in false]


def is_there(name):
    """Whether a path of the layout, which may hold `*`, is in the package, in a unit of it or in a folder of the repository."""
    return any(found for top in (".", "*", "hf_captionrl/*") for found in ROOT.glob(f"{top}/{name.rstrip('/')}"))


def test_files_of_the_layout_exist():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    layout = page.split("## Package layout")[1].split("```")[1]
    units = {path.parent.name for path in (ROOT / "hf_captionrl").glob("*/__init__.py")}
    assert set(re.findall(r"^ {2}(\w+)/", layout, re.M)) == units
    names = re.findall(r"[\w*]+/[\w*/]*|[\w*]+\.py\b", re.sub(r"<\w+>", "*", layout))
    assert len(names) > len(units)
    assert [name for name in [*names, "loss/", "losses/cider.py", "z*.py"] if not is_there(name)] == [
        *("loss/", "losses/cider.py", "z*.py")
    ]


# --- The worked examples of CONTRIBUTING.md -----------------------------------------------------------------------------

FILE = re.compile(r"^`([\w/]+\.py)`:\n\n```python\n(.*?)^```", re.M | re.S)


def files_of(heading):
    """Path and source of the files that a section shows."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return FILE.findall(section)


def executed(path, source, monkeypatch):
    """The file as a module that others can import."""
    module = types.ModuleType(path.removesuffix(".py").replace("/", "."))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, path, "exec"), vars(module))
    return module


def cases_of(test):
    """The arguments of each run of a test function."""
    for mark in getattr(test, "pytestmark", []):
        names, values = mark.args
        return [dict(zip(names, value, strict=True)) for value in values]
    return [{}]


@pytest.mark.parametrize(("heading", "num_runs"), [("Add a model family", 2), ("Add a scorer", 3)])
def test_worked_example_passes_its_own_test(heading, num_runs, monkeypatch):
    families = dict(FAMILIES)
    (source_path, source), (test_path, test_source) = files_of(heading)
    assert not Path(source_path).exists()
    assert test_path.startswith("tests/")
    try:
        executed(source_path, source, monkeypatch)
        module = executed(test_path, test_source, monkeypatch)
        runs = [
            (function, arguments)
            for name, function in inspect.getmembers(module, inspect.isfunction)
            if name.startswith("test_")
            for arguments in cases_of(function)
        ]
        assert len(runs) == num_runs
        for function, arguments in runs:
            function(**arguments)
    finally:
        FAMILIES.clear()
        FAMILIES.update(families)


def test_a_module_of_ones_own_registers_a_family(tmp_path):
    path, source = files_of("Add a model family")[0]
    (tmp_path / path).write_text(source)
    code = (
        "import vipllava; from hf_captionrl.captioners.loading import FAMILIES; print(FAMILIES['vipllava'].__name__)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)])}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert found.stdout.strip() == "VipLlavaCaptioner", found.stderr[-3000:]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "F1 of claims" in (tmp_path / "site" / "reproduction" / "reward_hacking.html").read_text(encoding="utf-8")
