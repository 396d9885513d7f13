"""Help that answers at once, exit codes, and the metrics."""

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hf_captionrl.cli import main
from hf_captionrl.cli.main import build_parser

ROOT = Path(__file__).parents[2]
COMMANDS = [[], ["caption"], ["evaluate"], ["metrics"], ["metrics", "install"], ["metrics", "path"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_examples_and_is_fast(command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        [sys.executable, "-m", "hf_captionrl.cli", *command, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time, not the clock: other programs may be running.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.7
    assert "example" in run.stdout
    assert f"captionrl {' '.join(command)}" in run.stdout


def test_parsing_imports_nothing_heavy():
    code = (
        "import sys; from hf_captionrl.cli.main import build_parser; build_parser();"
        "print(*{'torch', 'numpy', 'transformers', 'datasets', 'matplotlib', 'rich'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_examples_in_the_help_parse():
    whole = build_parser()
    parsers = next(action for action in whole._actions if action.dest == "command").choices
    for parser in (whole, *parsers.values()):
        text = re.sub(r"\\\n *", " ", parser.epilog or "")
        examples = [line.split("   ")[0] for line in text.splitlines() if line.startswith("  captionrl ")]
        assert examples
        for line in examples:
            arguments = whole.parse_args(shlex.split(line.partition(" >")[0], comments=True)[1:])
            assert callable(arguments.run)


@pytest.mark.parametrize("argv", [[], ["nothing"], ["caption"], ["evaluate"], ["metrics", "path"]])
def test_bad_usage_exits_with_2(argv, capsys):
    assert main(argv) == 2
    assert "usage: captionrl" in capsys.readouterr().err


def fail_with(monkeypatch, error):
    def run(arguments):
        raise error

    monkeypatch.setattr("hf_captionrl.cli.metrics.print_path", run)
    return main(["metrics", "path", "x"])


def test_exit_codes_distinguish_bad_input_from_faults(monkeypatch, capsys):
    assert fail_with(monkeypatch, ValueError("two\nlines")) == 2
    assert capsys.readouterr().err == "captionrl metrics: error: two lines\n"
    assert fail_with(monkeypatch, FileNotFoundError("gone")) == 2
    assert fail_with(monkeypatch, OSError(28, "No space left on device")) == 1
    assert fail_with(monkeypatch, TypeError("a fault")) == 1
    assert "TypeError: a fault (--traceback shows where)" in capsys.readouterr().err
    assert main(["metrics", "path", "x", "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert fail_with(monkeypatch, KeyboardInterrupt()) == 1
    assert capsys.readouterr().err == "captionrl: interrupted.\n"


def test_interrupted_command_says_whether_it_resumes(tmp_path, monkeypatch, capsys):
    from hf_captionrl.cli import caption as write_captions

    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(write_captions, "write_captions", interrupt)
    assert main(["caption", "scenes:blip-mle", "--output", str(tmp_path / "a.jsonl")]) == 1
    assert capsys.readouterr().err == "captionrl: interrupted; the same command resumes.\n"


def test_metrics_path_and_install(tmp_path, monkeypatch, capsys):
    assert main(["metrics", "path", "self_retrieval"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder.is_file()
    assert main(["metrics", "path", "self_retrieval", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(folder)
    assert main(["metrics", "path", "nothing"]) == 2
    assert "self_retrieval" in capsys.readouterr().err
    monkeypatch.setattr("hf_captionrl.metrics.evaluate_modules.load.modules_cache", lambda: tmp_path)
    assert main(["metrics", "install", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "self_retrieval" in result["modules"]
    assert all(Path(file).is_file() and tmp_path in Path(file).parents for file in result["files"])
    # A file in place of the cache folder, so that nothing can be written.
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("hf_captionrl.metrics.evaluate_modules.load.modules_cache", lambda: tmp_path / "file")
    assert main(["metrics", "install"]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_console_script_is_declared():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("scripts", {})
    assert scripts.get("captionrl") == "hf_captionrl.cli:console"


@pytest.mark.parametrize(
    "argv", [["metrics", "path", "clip_score"], ["metrics", "path", "clip_score", "--json"], ["--help"]]
)
def test_full_stdout_gives_one_error_line_and_exit_code_1(argv, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(argv) == 1
    said = capsys.readouterr().err
    assert said.startswith("captionrl: error: stdout cannot be written (No space left on device)")
    assert len(said.splitlines()) == 1


def test_closed_stdout_is_refused_before_the_command_runs(monkeypatch, capsys):
    called = []
    monkeypatch.setattr("hf_captionrl.cli.metrics.print_path", called.append)
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["metrics", "path", "clip_score"]) == 2
    assert capsys.readouterr().err == "captionrl: error: stdout is closed. Use > /dev/null to discard the output.\n"
    assert called == []


def test_reader_that_stops_early_is_not_an_error(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["metrics", "path", "clip_score"]) == 0
        assert main(["--help"]) == 0
    assert capsys.readouterr().err == ""
