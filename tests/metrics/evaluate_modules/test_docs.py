"""Every command and example of docs/metrics.md runs as written."""

import re
import shlex
from pathlib import Path

import pytest

import hf_captionrl.metrics as metrics
from hf_captionrl.cli import main
from hf_captionrl.cli.main import build_parser
from hf_captionrl.evaluation import evaluator as suites
from hf_captionrl.metrics.evaluate_modules import path
from scripts.docs_hooks import metrics_table

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def no_java(captions, references):
    raise RuntimeError("not run: there is no Java")


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def test_examples_run_one_after_another(evaluate, capsys):
    names: dict = {}
    for number, block in enumerate(blocks("python")):
        exec(compile(block, f"docs/metrics.md, example {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "[1, 2]" in printed
    assert "metric:self_retrieval|variant:pool|pool:300|ties:against" in printed
    assert "df:given|documents:3" in printed
    assert names["tested"]["p_value"] < 0.05
    with pytest.raises(NameError):
        exec("nobody_wrote_this", names)


def test_commands_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAPTIONRL_CACHE", str(tmp_path / "cache"))
    # METEOR takes seconds to start, and other tests run it.
    monkeypatch.setattr(suites, "meteor", no_java)
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("captionrl ")]
    assert len(lines) == 3
    for line in lines:
        # A tenth of the images, enough for blocks of 100.
        short = line.replace("--max_images 105", "--max_images 12")
        build_parser().parse_args(shlex.split(line)[1:])
        assert main(shlex.split(short)[1:]) == 0, capsys.readouterr().err
    for name in ("comparison.json", "comparison.md", "lengths.png", "trade_off.png"):
        assert (tmp_path / "outputs" / "evaluate" / name).is_file()
        assert name in PAGE
    assert main(["caption", "no/such/model", "--output", "x.jsonl"]) != 0


def test_commands_in_the_text_are_known(capsys):
    assert main(["metrics", "path", "self_retrieval"]) == 0
    assert capsys.readouterr().out.strip() == path("self_retrieval")
    for command in re.findall(r"`(captionrl metrics [^`]*)`", PAGE):
        build_parser().parse_args(shlex.split(command)[1:])


def test_every_metric_is_on_the_page():
    for name in metrics.__all__:
        assert f"`{name}" in PAGE or f"`{name}`" in metrics_table() or name == "path", name
