"""The campaign: what is finished is not run again, what was killed resumes, and the pages are those of the results."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path

import pytest

from scripts import reproduce
from scripts.docs_hooks import generated_pages, on_page_markdown
from scripts.make_paper_index import PAPERS, load_rows
from scripts.reproduction import findings, runs
from scripts.reproduction.numbers import measured, shown
from scripts.reproduction.runs import finished, in_order

ROOT = Path(__file__).parents[2]
RUNS = reproduce.load_runs()
RESULTS = {path.stem: json.loads(path.read_text()) for path in (ROOT / "docs/results").glob("*.json")}


def test_the_committed_results_are_up_to_date(capsys):
    assert reproduce.main(["--check"]) == 0, capsys.readouterr().out


def test_every_figure_of_the_index_is_on_the_page():
    page = generated_pages()["reproduction.md"]
    sections = dict(zip(PAPERS, page.split("\n## ")[1:], strict=True))
    for row in load_rows():
        for entry in row.get("numbers", ()):
            name = f"[{row['kind'].capitalize()} {row['number']}]"
            (line,) = [
                text
                for text in sections[row["paper"]].splitlines()
                if name in text and f" | {entry['what']} |" in text
            ]
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert cells[2] == (shown(entry["paper"]) if "paper" in entry else "")
            if entry.get("run") in RESULTS:
                found = RESULTS[entry["run"]]
                for key in entry["at"].split("/"):
                    if isinstance(found, list):  # rows, or points of a curve
                        names = {
                            str(part.get("name", part.get("step"))).split(" (entropy=")[0]: part for part in found
                        }
                        found = found[-1] if key == "last" else names[key]
                    else:
                        found = found[key]
                value = found if isinstance(found, float) else found.get("mean", found.get("value"))
                assert cells[3] == shown(value), line
            else:
                assert entry.get("run") is None
                assert cells[3] == ""
                assert cells[7].startswith("not run: "), line


def test_results_of_an_older_world_are_shown_and_run_again(tmp_path):
    run = RUNS["smile_blip_seeds"]
    record = json.loads((ROOT / "docs/results/smile_blip_seeds.json").read_text())
    for world, again in (("2", False), ("1", True), (None, True)):
        changed = {**record, "command": run.recorded(run.seeds, (tmp_path / run.name).as_posix()), "world": world}
        if world is None:
            del changed["world"]
        (tmp_path / "smile_blip_seeds.json").write_text(json.dumps(changed))
        assert finished(run, run.seeds, tmp_path) is not None
        assert runs.to_run(run, run.seeds, tmp_path) == again


def test_the_committed_results_are_those_of_the_runs():
    assert [name for name, run in RUNS.items() if finished(run, run.seeds, ROOT / "docs/results") is None] == []
    commands = {row.get("command") for row in load_rows()}
    guides = "\n".join(on_page_markdown(page.read_text()) for page in (ROOT / "docs").glob("*.md"))
    tables = dict(text.split("\n", 1) for text in generated_pages()["full_tables.md"].split("\n## ")[1:])
    for run in RUNS.values():
        if not run.steps and "run_seeds" in run.command:
            command = run.recorded(run.seeds, f"docs/results/{run.name}")
            # A run of no paper's row is on the page of a guide, or in the full table that a guide links.
            linked = tables[run.name] if f"(full_tables.md#{run.name})" in guides else ""
            assert command in commands or command in guides or f"Made by `{command}`." in linked, run.name


def test_findings_say_what_the_numbers_say():
    pages = findings.pages(RESULTS)
    smile = pages["findings_smile.md"]
    assert re.search(r"\| 6 \| CLIPScore falls a little \| .* \| \*\*open\*\* \|", smile)
    degenerate = measured("rows/SR (random)/degenerate", RESULTS["self_retrieval_clipcap_seeds"]).value
    assert f"{shown(degenerate)} of ClipCap's captions" in pages["findings_discritune.md"]
    assert "{" not in "".join(pages.values())
    text = json.dumps(RESULTS["smile_blip_seeds"])
    text = text.replace('"SMILE"', '"X"').replace('"MLE"', '"SMILE"').replace('"X"', '"MLE"')
    upside_down = findings.pages({**RESULTS, "smile_blip_seeds": json.loads(text)})["findings_smile.md"]
    first = "| 1 | Captions become more than twice as long | 10.0 to 22.3 words (Table 1) | **does not hold** |"
    assert first in upside_down
    with pytest.raises(KeyError, match="leads nowhere"):
        findings.pages({**RESULTS, "smile_blip_seeds": {"rows": []}})


def test_the_list_and_unknown_rows(capsys):
    assert reproduce.main(["--list", "--only", "smile-table-4", "ndlb-table-2"]) == 0
    out = capsys.readouterr().out
    assert "finished" in out
    assert "missing" in out
    with pytest.raises(SystemExit, match="neither a row nor a run"):
        reproduce.main(["--list", "--only", "smile-table-99"])


@pytest.mark.parametrize("processes", [1, 4])
def test_runs_start_after_those_they_need_and_use_the_processes(processes):
    needs = {"d": {"c"}, "a": set(), "b": set(), "c": {"a", "elsewhere"}}
    lock, together, most, ended = threading.Lock(), [], [], []

    def work(name):
        with lock:
            assert needs[name] & needs.keys() <= set(ended)
            together.append(name)
            most.append(len(together))
        time.sleep(0.05)
        with lock:
            together.remove(name)
            ended.append(name)

    in_order(needs, work, processes)
    assert sorted(ended) == ["a", "b", "c", "d"]
    assert max(most) == min(processes, 2)
    with pytest.raises(ValueError, match="cycle"):
        in_order({"a": {"b"}, "b": {"a"}}, print, 2)
