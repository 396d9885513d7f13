"""Results know the settings that they were made with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import reproduce
from scripts.docs_hooks import generated_pages
from scripts.reproduction import runs as settings
from scripts.reproduction.pages import reproduction_page
from scripts.reproduction.runs import CONFIGS, Run, execute

ROOT = Path(__file__).parents[2]
RUNS = reproduce.load_runs()
PRESET = "smile/scenes/table5"


def test_a_digest_is_of_the_settings_that_matter():
    first = settings.digest({"learning_rate": 1e-4, "num_train_epochs": 2, "title": "a", "paper": "ndlb"})
    assert settings.digest({"num_train_epochs": 2, "learning_rate": 1e-4, "title": "b", "output_dir": "x"}) == first
    assert settings.digest({"learning_rate": 2e-4, "num_train_epochs": 2}) != first
    assert settings.digest({"learning_rate": 1e-4}) != first
    assert len(first) == 16


def test_presets_of_a_run_are_those_of_its_commands():
    run = RUNS["ndlb_holistic_seeds"]
    assert run.presets == [
        "ndlb/scenes/holistic-lv",
        "smile/scenes/holistic",
        "ndlb/scenes/holistic-l",
        "ndlb/scenes/holistic-v",
    ]
    assert RUNS["boosting_quality"].presets == []
    assert settings.presets_of("a/b", "python x.py --config recipes/configs/smile_blip/coco.yaml") == [
        "a/b",
        "smile_blip/coco",
    ]


def test_a_base_that_changes_makes_its_rows_stale(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "smile_blip").mkdir()
    (tmp_path / "rows/smile.yaml").write_text("a: {title: A, base: smile_blip/scenes, mle_weight: 0.5}")
    base = tmp_path / "smile_blip/scenes.yaml"
    base.write_text("learning_rate: 1.0e-4")
    presets = ["smile/a", "smile_blip/scenes"]
    record = {"settings": settings.digests(presets, tmp_path)}
    assert settings.changed(record, presets, tmp_path) == {}
    base.write_text("learning_rate: 1.0e-4\nlogging_steps: 5")
    assert settings.changed(record, presets, tmp_path) == {}
    base.write_text("learning_rate: 2.0e-4")
    assert settings.changed(record, presets, tmp_path) == dict.fromkeys(presets, "stale")
    assert settings.changed({}, presets, tmp_path) == dict.fromkeys(presets, "unknown")
    record["settings"]["smile/a"] = "unknown"
    assert settings.changed(record, presets, tmp_path) == {"smile/a": "unknown", "smile_blip/scenes": "stale"}


def test_a_run_records_the_digests_of_its_presets(tmp_path):
    step = f"for each seed s: python recipes/smile_blip.py --row {PRESET} --seed s --output_dir {{folder}}/seed-s"
    run = Run(name="tiny", preset=PRESET, minutes=1, seeds=[0], steps=[step], rows={"a": ["{folder}", "trained"]})

    def caller(words):
        folder = Path(words[words.index("--output_dir") + 1])
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps({"rows": [{"name": "SMILE", "length": 1.0}]}))
        return 0

    out = tmp_path / "out"
    assert execute(run, [0], output=out, runs_dir=tmp_path, others={}, caller=caller, told=lambda text: None) is None
    record = json.loads((out / "tiny.json").read_text())
    assert record["settings"] == settings.digests([PRESET], CONFIGS)
    assert run.changed(record) == {}


def test_check_says_which_result_is_stale(monkeypatch, capsys):
    monkeypatch.setattr(reproduce.index, "faults", lambda *_: [])
    assert reproduce.main(["--check"]) == 0
    record = json.loads((ROOT / "docs/results/smile_blip_seeds.json").read_text())
    record["settings"]["smile_blip/scenes"] = "0" * 16
    monkeypatch.setattr(reproduce, "_results", lambda *_: {"smile_blip_seeds": record})
    assert reproduce.main(["--check"]) == 1
    assert "smile_blip_seeds.json is stale: its preset smile_blip/scenes changed" in capsys.readouterr().out
    record["settings"]["smile_blip/scenes"] = "unknown"
    assert reproduce.main(["--check"]) == 0
    assert "smile_blip_seeds.json does not say the settings of its preset smile_blip/scenes" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run.presets])
def test_committed_results_say_their_settings(name):
    path = ROOT / "docs/results" / f"{name}.json"
    if path.exists():
        assert set(json.loads(path.read_text())["settings"]) == set(RUNS[name].presets)


def test_the_page_names_all_presets_and_what_changed():
    row = next(row for row in reproduce.index.load_rows() if row["id"] == "smile-table-1")
    record = json.loads((ROOT / "docs/results/smile_blip_seeds.json").read_text())
    record["settings"]["smile_blip/scenes"] = "0" * 16
    page = reproduction_page([row], RUNS, {"smile_blip_seeds": record}, ROOT / "docs/results")
    assert "embedded world; made before `smile_blip/scenes` changed" in page
    committed = generated_pages()["reproduction.md"]
    assert all(f"`{preset}`" in committed for preset in RUNS["ndlb_matched_seeds"].presets)
