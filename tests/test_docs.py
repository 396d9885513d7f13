"""What the pages say can be done: code imports what there is, commands parse. mkdocs checks the links between pages."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_compiles_and_imports_what_there_is(page):
    found = blocks(page, "python", "py")
    # Files that the page tells readers to write: named above the code, or in its first line.
    shown = re.findall(r"^`([\w/]+)\.py`:$", page.read_text(), re.M)
    shown += [path for code in found for path in re.findall(r"\A# (\S+)\.py$", code, re.M)]
    for code in found:
        tree = ast.parse(code)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_captionrl"):
                if (node.module or "").replace(".", "/") in shown:
                    continue
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, (node.module, missing)


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
