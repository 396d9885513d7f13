"""The trade-off plot: frontiers by brute force, the drawing, and invalid input."""

import itertools
import random

import pytest
from PIL import Image

from hf_captionrl.evaluation import plots as tradeoff
from hf_captionrl.evaluation.plots import frontier, write_diversity_tradeoff


def point(cider, div, mbleu, temperature=1.0):
    return {"cider_d": cider, "div_2": div, "mbleu_4_per_image": mbleu, "temperature": temperature}


CURVES = {
    "XE": [point(2.2, 0.3, 0.8, 0.5), point(1.7, 0.5, 0.4, 1.0), point(1.6, 0.4, 0.5, 1.25)],
    "$SLE_": [point(2.3, 0.3, 0.8, 0.5), point(2.1, 0.4, 0.6, None)],
}


@pytest.mark.parametrize("seed", range(20))
def test_frontier_equals_brute_force(seed):
    rng = random.Random(seed)
    points = [(rng.randrange(6) / 5, rng.randrange(6) / 5) for _ in range(rng.randrange(1, 9))]

    def beaten(i):
        return any(
            q != points[i] and q[0] >= points[i][0] and q[1] >= points[i][1] for j, q in enumerate(points) if j != i
        )

    expected = {points[i] for i in range(len(points)) if not beaten(i)}
    found = frontier(points)
    assert {points[i] for i in found} == expected
    assert len(found) == len(expected)  # one of equal points
    assert all(points[a][0] < points[b][0] for a, b in itertools.pairwise(found))


def test_the_picture_shows_every_point_and_joins_the_frontier(tmp_path, monkeypatch):
    figures = []
    save = tradeoff.save_figure
    monkeypatch.setattr(
        tradeoff,
        "save_figure",
        lambda path, figure, **options: figures.append(figure) or save(path, figure, **options),
    )
    path = write_diversity_tradeoff(tmp_path / "t.png", CURVES, title="CIDEr-D & diversity")
    with Image.open(path) as image:
        assert image.width > 600
    left, right = figures[0].axes
    # Temperature 1 of XE exceeds 1.25 in both numbers, so 1.25 is a mark outside the line.
    assert [line.get_xydata().tolist() for line in left.lines] == [[[0.3, 2.2], [0.5, 1.7]], [[0.3, 2.3], [0.4, 2.1]]]
    assert [c.get_offsets().tolist() for c in left.collections] == [[[0.4, 1.6]]]
    assert right.xaxis_inverted()  # up and to the right is better in both
    assert right.lines[0].get_xydata().tolist() == [[0.8, 2.2], [0.4, 1.7]]
    assert sorted(text.get_text() for text in left.texts) == ["0.5", "0.5", "1", "1.25"]


def test_the_same_numbers_give_the_same_bytes(tmp_path):
    first = write_diversity_tradeoff(tmp_path / "a.png", CURVES).read_bytes()
    assert write_diversity_tradeoff(tmp_path / "b.png", CURVES).read_bytes() == first


@pytest.mark.parametrize(
    ("curves", "message"),
    [
        ({}, "point"),
        ({"XE": []}, "XE"),
        ({"XE": [point(1.0, 40.0, 0.5)]}, r"div_2 of 'XE' is 40.0 at point 0; fractions"),
        ({"XE": [point(1.0, 0.4, float("nan"))]}, "mbleu_4_per_image of 'XE' is nan"),
        ({"XE": [{"div_2": 0.4, "mbleu_4_per_image": 0.4}]}, "cider_d of 'XE' is None"),
    ],
)
def test_invalid_points_are_refused(tmp_path, curves, message):
    with pytest.raises(ValueError, match=message):
        write_diversity_tradeoff(tmp_path / "t.png", curves)
    assert not list(tmp_path.iterdir())


def test_only_png_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"ends in \.png"):
        write_diversity_tradeoff(tmp_path / "t.svg", CURVES)
