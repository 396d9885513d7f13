"""Every command and example of docs/metrics.md runs as written."""

import json
import re
import shlex
from pathlib import Path

import pytest

import hf_captionrl.metrics as metrics
from hf_captionrl.cli import main
from hf_captionrl.cli.main import build_parser
from hf_captionrl.evaluation import evaluator as suites
from hf_captionrl.metrics.evaluate_modules import MODULES, path
from scripts.benchmark import SECTIONS
from tests.tolerances import resolution

ROOT = Path(__file__).parents[2]
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
    assert set(re.findall(r"scripts/benchmark\.py (\w+)", PAGE)) <= SECTIONS.keys()


def test_numbers_equal_the_committed_results():
    result = json.loads((ROOT / "docs" / "results" / "benchmark_metrics.json").read_text())
    speed = " ".join(PAGE.partition("## Speed")[2].partition("## ")[0].split())
    for figure in (
        f"{result['cider_d']['ratio']:.0f} times as fast as pycocoevalcap",
        f"{result['pairwise_bleu']['ratio']:.0f} times as fast as a plain loop",
        f"{result['ranks']['ratio']:.2f} times as long as the matrix product alone",
        f"The whole metric, with checks and intervals, takes {result['self_retrieval']['ratio']:.2f} times",
        f"grew by {result['self_retrieval']['more_memory_mib']:.0f} MiB",
    ):
        assert figure in speed
    assert result["cider_d"]["ratio"] >= 25
    assert result["pairwise_bleu"]["ratio"] >= 15
    assert max(result[name]["ratio"] for name in ("ranks", "self_retrieval")) <= 1.3
    assert max(result[name]["largest_difference"] for name in ("cider_d", "pairwise_bleu")) < resolution(10)


def test_everything_public_is_on_the_page():
    for name in (*metrics.__all__, *MODULES):
        assert f"`{name}" in PAGE or f".{name}`" in PAGE or name == "path", name
    for link in re.findall(r"\]\(#([^)]*)\)", PAGE):
        titles = [
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", PAGE, re.M)
        ]
        assert link in titles, link
    assert (ROOT / "docs" / "benchmarks.md").is_file()
    assert "docs/metrics.md" in (ROOT / "README.md").read_text(encoding="utf-8")
