"""Properties of every command: fast help, examples that parse, completion, documentation."""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hf_captionrl.cli.main import build_parser, completion_script

ROOT = Path(__file__).parents[2]


def leaves(parser, path=()):
    """Parsers of all commands and subcommands, by their words."""
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not inner:
        return {path: parser}
    return {k: v for name, below in inner[0].choices.items() for k, v in leaves(below, (*path, name)).items()}


PARSER = build_parser()
COMMANDS = leaves(PARSER)


def examples(text):
    """Lines of a help that show the command, continued ones in one piece."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.split("   ")[0].split(" >")[0] for line in lines if line.startswith("  captionrl ")]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_has_examples_that_parse(path):
    text = COMMANDS[path].format_help()
    found = [line for line in examples(text) if line.split()[1 : 1 + len(path)] == list(path)]
    assert found, text
    for line in found:
        arguments = PARSER.parse_args(shlex.split(line, comments=True)[1:])
        assert callable(arguments.run)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_json_and_help_for_every_option(path):
    options = {name: action for action in COMMANDS[path]._actions for name in action.option_strings}
    assert {"--json", "--traceback", "--help"} <= set(options)
    assert all(action.help for action in options.values())
    assert all(action.help for action in COMMANDS[path]._actions)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_texts_are_phrases_that_need_no_other_line(path):
    fragment = re.compile(r"(of|for|with|by|its|the same|such as|see below|that|which)\b|\(")
    assert [action.help for action in COMMANDS[path]._actions if fragment.match(action.help)] == []


def test_completion_contains_every_option_of_every_command():
    script = completion_script(PARSER, "bash")
    arrays = re.findall(r"^_shtab_captionrl_(\w+)=\((.*)\)$", script, re.MULTILINE)
    offered = {name: set(shlex.split(words)) for name, words in arrays}
    for path, parser in COMMANDS.items():
        words = {name for action in parser._actions for name in action.option_strings}
        assert words == offered["_".join((*path, "option_strings"))]
        for depth in range(1, len(path)):
            assert path[depth] in offered["_".join((*path[:depth], "subparsers"))]


def test_every_command_and_exit_code_is_documented():
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for path in COMMANDS:
        assert f"`{' '.join(path)}" in page, path
    for code in ("0", "1", "2"):
        assert re.search(rf"^\| {code} \|", page, re.MULTILINE)
    assert "`frobnicate" not in page


HELP = """
import json, sys, time
start = time.process_time()
from hf_captionrl.cli.main import build_parser
import argparse

def texts(parser):
    found = [parser.format_help()]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                found += texts(inner)
    return found

helps = texts(build_parser())
here = time.process_time() - start
heavy = {"torch", "transformers", "numpy", "datasets", "PIL", "pyarrow", "rich", "jinja2", "gradio", "huggingface_hub"}
loaded = sorted(heavy & set(sys.modules))
start = time.process_time()
import transformers.models.auto.modeling_auto, torch
print(json.dumps({"loaded": loaded, "helps": len(helps), "seconds": here, "torch": time.process_time() - start}))
"""


def test_help_imports_nothing_heavy_and_is_fast():
    """Time of all help texts, compared with one import of torch and transformers."""
    run = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert found["loaded"] == []
    assert found["helps"] > len(COMMANDS)
    assert found["seconds"] < found["torch"] / 4
