"""The curves of Figure 3."""

import itertools
import random

import numpy as np
import pytest
from PIL import Image

from hf_captionrl.evaluation import plots
from hf_captionrl.evaluation.plots import (
    CURVES,
    frontier,
    write_curves,
    write_diversity_tradeoff,
    write_length_histogram,
)

HISTORIES = {
    "MLE+MLE": [{"epoch": e, "length": 2.3, "recall_at_1": 0.53} for e in range(4)],
    "SMILE": [{"epoch": e, "length": 2 * e, "recall_at_1": 0.6, "recall_at_1_ci": [0.5, 0.7]} for e in range(4)],
}


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    found, save = [], plots.save_figure
    monkeypatch.setattr(
        plots, "save_figure", lambda path, figure, **kw: found.append(figure) or save(path, figure, **kw)
    )
    return found


def test_picture_shows_both_methods(tmp_path):
    path = write_curves(tmp_path / "out" / "curves.png", HISTORIES, title="$title")
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    for half in np.array_split(pixels, 2, axis=1):
        for colour in ((0x7A, 0x7F, 0x8A), (0xE6, 0x9F, 0x00)):
            assert (half == colour).all(axis=-1).sum() > 200


@pytest.mark.filterwarnings("error")  # a layout that matplotlib gives up
def test_learning_curves_have_a_panel_per_number_that_was_measured(tmp_path, figures):
    points = [{"step": s, "rd100_recall_at_1": 0.1 * s, "cider_d": 1.5 - 0.1 * s, "length": 4 + s} for s in range(4)]
    histories = {"_SR": points, "$SMILE": [{**point, "cider_d": None} for point in points], "one": points[:1]}
    panels = [panel for panel in CURVES if panel[0] in points[0]]
    assert len(panels) == 3
    heights = []
    for shown in (panels[:2], panels):
        with Image.open(write_curves(tmp_path / "c.png", histories, x="step", panels=shown)) as image:
            heights.append(image.height)
    assert heights[1] > heights[0]  # a second row of panels
    write_curves(tmp_path / "c.png", {"SMILE": histories["$SMILE"]}, x="step", panels=panels)
    shown = {axis.get_title(loc="left"): [text.get_text() for text in axis.texts] for axis in figures[-1].axes}
    assert shown["CIDEr-D"] == ["not measured"]
    assert shown["Mean length (words)"] == []


def test_lines_have_the_colours_of_the_gallery_and_a_captioner_without_points_no_label(tmp_path, figures):
    write_curves(tmp_path / "c.png", {"MLE": [], **HISTORIES})
    first = figures[-1].axes[0]
    assert [line.get_color() for line in first.lines] == list(plots.COLOURS[:3])
    assert first.get_legend_handles_labels()[1] == list(HISTORIES)


def point(cider, div, mbleu, temperature=1.0):
    return {"cider_d": cider, "div_2": div, "mbleu_4_per_image": mbleu, "temperature": temperature}


CURVES_TRADEOFF = {
    "XE": [point(2.2, 0.3, 0.8, 0.5), point(1.7, 0.5, 0.4, 1.0), point(1.6, 0.4, 0.5, 1.25)],
    "$SLE_": [point(2.3, 0.3, 0.8, 0.5), point(2.1, 0.4, 0.6, None)],
}


def test_frontier_equals_brute_force():
    rng = random.Random(0)
    for _ in range(20):
        points = [(rng.randrange(6) / 5, rng.randrange(6) / 5) for _ in range(rng.randrange(1, 9))]
        expected = {p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)}
        found = frontier(points)
        assert {points[i] for i in found} == expected
        assert len(found) == len(expected)  # one of equal points
        assert all(points[a][0] < points[b][0] for a, b in itertools.pairwise(found))


def test_the_picture_shows_every_point_and_joins_the_frontier(tmp_path, figures):
    path = write_diversity_tradeoff(tmp_path / "t.png", CURVES_TRADEOFF, title="CIDEr-D & diversity")
    with Image.open(path) as image:
        assert image.width > 600
    left, right = figures[0].axes
    # Temperature 1 of XE exceeds 1.25 in both numbers, so 1.25 is a mark outside the line.
    assert [line.get_xydata().tolist() for line in left.lines] == [[[0.3, 2.2], [0.5, 1.7]], [[0.3, 2.3], [0.4, 2.1]]]
    assert [c.get_offsets().tolist() for c in left.collections] == [[[0.4, 1.6]]]
    assert right.xaxis_inverted()  # up and to the right is better in both
    assert right.lines[0].get_xydata().tolist() == [[0.8, 2.2], [0.4, 1.7]]
    assert sorted(text.get_text() for text in left.texts) == ["0.5", "1", "1.25"]  # of the first curve


LENGTHS = {"_mle $x$": [2, 2, 3], "long": [0, 41, 300]}


def test_the_same_numbers_give_the_same_picture(tmp_path):
    first = write_length_histogram(tmp_path / "a.png", LENGTHS).read_bytes()
    assert write_length_histogram(tmp_path / "b.png", LENGTHS).read_bytes() == first
    with Image.open(tmp_path / "a.png") as image:
        assert min(image.size) > 300
        assert len(image.convert("RGB").getcolors(10**6)) > 20
