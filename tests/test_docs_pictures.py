"""The picture of the front page shows the committed numbers."""

import dataclasses
import json
from pathlib import Path

import pytest
from PIL import Image

from scripts import docs_pictures, docs_plots
from scripts.docs_pictures import COLUMNS, ROWS, before_after, draw, photograph
from scripts.docs_plots import PLOTS
from tests.tolerances import close

ROOT = Path(__file__).parents[1]


def test_numbers_are_those_of_the_results(tmp_path, monkeypatch):
    table = before_after()
    assert [name for name, _ in table] == [name for name, _, _ in ROWS]
    for (_, values), (_, file, key) in zip(table, ROWS, strict=True):
        rows = json.loads((ROOT / "docs" / "results" / file).read_text())["rows"]
        row = next(row for row in rows if row["name"] == key)
        for (mean, error), (column, _) in zip(values, COLUMNS, strict=True):
            seeds = row[column]["values"]
            assert mean == pytest.approx(sum(seeds) / len(seeds))
            spread = sum((value - mean) ** 2 for value in seeds) / (len(seeds) - 1)
            assert error == close((spread / len(seeds)) ** 0.5)
    monkeypatch.setattr(docs_pictures, "ROWS", (("nobody", "smile_blip_seeds.json", "nobody"),))
    with pytest.raises(KeyError, match="nobody"):
        before_after()


def test_committed_picture_was_drawn_from_the_committed_results(tmp_path, monkeypatch, capsys):
    assert docs_pictures.main(["--check"]) == 0
    monkeypatch.setattr(docs_pictures, "ROWS", ROWS[:-1])
    assert docs_pictures.main(["--check"]) == 1
    assert "before_after.png does not show the committed results" in capsys.readouterr().out
    assert not docs_pictures.is_current(tmp_path / "missing.png", docs_pictures.numbers())
    assert not docs_pictures.is_current(ROOT / "docs" / "images" / "gallery.png", docs_pictures.numbers())


def test_plots_of_the_guides_show_the_committed_results(tmp_path, monkeypatch, capsys):
    plot = next(plot for plot in PLOTS if plot.file == "smile.png")
    rows = {row["name"]: row for row in json.loads((ROOT / "docs/results/smile_blip_seeds.json").read_text())["rows"]}
    for name, cells in zip(plot.rows, plot.table(), strict=True):
        for (column, _), (value, low, high) in zip(plot.columns, cells, strict=True):
            mean, error = rows[name][column]["mean"], rows[name][column]["standard_error"]
            assert (value, low, high) == (mean, mean - error, mean + error)
    changed = dataclasses.replace(plot, rows=plot.rows[1:])
    monkeypatch.setattr(docs_pictures, "PLOTS", (changed,))
    assert docs_pictures.main(["--check"]) == 1
    assert "smile.png does not show the committed results" in capsys.readouterr().out
    assert docs_pictures.is_current(changed.draw(tmp_path / "smile.png"), changed.numbers())
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert [plot.file for plot in PLOTS if f"](images/{plot.file})" not in pages] == []


def test_both_captioners_start_from_the_same(tmp_path):
    starts = []
    for file in ("smile_blip_seeds.json", "self_retrieval_bags_seeds.json"):
        rows = {row["name"]: row for row in json.loads((ROOT / "docs" / "results" / file).read_text())["rows"]}
        starts.append([rows["MLE"][column]["mean"] for column, _ in COLUMNS])
    assert starts[0] == pytest.approx(starts[1])


def test_committed_pictures_have_the_expected_size(tmp_path):
    with (
        Image.open(draw(tmp_path / "new.png")) as new,
        Image.open(ROOT / "docs" / "images" / "before_after.png") as old,
    ):
        assert new.size == old.size
    with Image.open(ROOT / "docs" / "images" / "gallery.png") as gallery:
        assert gallery.size == (1180, 930)
    with pytest.raises(ValueError, match="png"):
        draw(tmp_path / "new.jpg")


def test_without_a_browser_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(docs_pictures.shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="Install chromium"):
        photograph(tmp_path / "page.html", tmp_path / "page.png")


def test_settings_that_differ_in_a_number_are_one_line(tmp_path, monkeypatch):
    def row(name, cpu_s, value):
        return {"name": name, "cpu_s": {"mean": cpu_s}, "held_out": {"mean": value, "interval": [value - 0.1, None]}}

    rows = [row("MLE, best of 16", 2.0, 0.5), row("MLE, best of 4", 1.0, 0.4), row("MLE, adapted 60 s", 3.0, 0.6)]
    (tmp_path / "made.json").write_text(json.dumps({"rows": [*rows, row("SR, best of 4 beams", 9.0, 0.1)]}))
    monkeypatch.setattr(docs_plots, "RESULTS", tmp_path)
    panels = (("held_out", "R@1"), ("held_out", "again"))
    plot = docs_plots.ComputePlot("made.png", "made.json", panels, frozenset({"best of 4 beams"}))
    found = {
        name: [(point["cpu_s"], point["held_out"][0]) for point in points] for name, points in plot.lines().items()
    }
    assert found == {"MLE, best of N": [(1.0, 0.4), (2.0, 0.5)], "MLE, adapted N s": [(3.0, 0.6)]}
    assert plot.draw(tmp_path / "made.png").stat().st_size > 5000
