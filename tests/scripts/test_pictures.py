"""The pictures of README.md and of the pages show the committed numbers."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from scripts import docs_pictures
from scripts.docs_pictures import PICTURES, BeforeAfter, Plot, is_current
from tests.tolerances import close

ROOT = Path(__file__).parents[2]


def test_numbers_of_the_front_page_are_those_of_the_results(monkeypatch):
    picture = BeforeAfter()
    for (_, cells), (_, file, key) in zip(picture.values()["rows"], picture.rows, strict=True):
        rows = json.loads((ROOT / "docs" / "results" / file).read_text())["rows"]
        row = next(row for row in rows if row["name"] == key)
        for (mean, error), (column, _) in zip(cells, picture.columns, strict=True):
            seeds = row[column]["values"]
            assert mean == pytest.approx(sum(seeds) / len(seeds))
            spread = sum((value - mean) ** 2 for value in seeds) / (len(seeds) - 1)
            assert error == close((spread / len(seeds)) ** 0.5)
    # Both methods start from the same captioner.
    smile, retrieval = (
        dataclasses.replace(picture, rows=((name, name, "MLE"),))
        for name in ("smile_blip_seeds.json", "self_retrieval_bags_seeds.json")
    )
    for one, other in zip(smile.values()["rows"][0][1], retrieval.values()["rows"][0][1], strict=True):
        assert one == pytest.approx(other)
    with pytest.raises(KeyError, match="nobody"):
        dataclasses.replace(picture, rows=(("nobody", "smile_blip_seeds.json", "nobody"),)).values()


def test_cells_have_one_standard_error_to_each_side():
    plot = next(plot for plot in PICTURES if isinstance(plot, Plot) and plot.file == "smile.png")
    rows = {row["name"]: row for row in json.loads((ROOT / "docs/results/smile_blip_seeds.json").read_text())["rows"]}
    for name, cells in zip(plot.rows, plot.values()["cells"], strict=True):
        for (column, _), (value, low, high) in zip(plot.columns, cells, strict=True):
            mean, error = rows[name][column]["mean"], rows[name][column]["standard_error"]
            assert (value, low, high) == (mean, mean - error, mean + error)


@pytest.mark.parametrize("kind", ["BeforeAfter", "Plot", "TradeoffPlot", "CurvePlot"])
def test_a_picture_of_other_numbers_is_out_of_date(kind, tmp_path, monkeypatch, capsys):
    picture = next(picture for picture in PICTURES if type(picture).__name__ == kind)
    assert is_current(picture.draw(tmp_path / "new.png"), picture.numbers())
    with Image.open(tmp_path / "new.png") as new, Image.open(ROOT / "docs/images" / picture.file) as old:
        assert new.size == old.size
    monkeypatch.setattr(docs_pictures, "PICTURES", (picture,))
    assert docs_pictures.main(["--check"]) == 0
    monkeypatch.setattr(type(picture), "values", lambda self: {"other": 1})
    assert docs_pictures.main(["--check"]) == 1
    assert f"{picture.file} does not show the committed results" in capsys.readouterr().out
    assert not is_current(tmp_path / "missing.png", picture.numbers())


def test_pages_show_the_pictures():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert [picture.file for picture in PICTURES if f"images/{picture.file})" not in pages] == []


def test_readme_has_the_numbers_of_the_album():
    good = json.loads((ROOT / "docs/results/album_picture.json").read_text())["good"]
    found = re.findall(r"(0\.\d+) \[(0\.\d+),\s(0\.\d+)\]", (ROOT / "README.md").read_text())
    expected = [[good[name]["value"], *good[name]["interval"]] for name in ("before", "after")]
    assert [list(row) for row in found] == [[f"{number:.2f}" for number in row] for row in expected]
