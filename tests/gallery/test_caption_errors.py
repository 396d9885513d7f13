"""Errors of captions, counted and ordered, by hand."""

import pytest

from hf_captionrl.apps.gallery.gallery import error_counts, gallery_marks, most_wrong
from hf_captionrl.evaluation.pages import Mark
from hf_captionrl.scenes import Facts

PIGS = Facts("pig", 2, "small", "sideways", "top", "blue", "mushroom", "left of")
RIGHT, WRONG, BOUND = Mark("a", "right", 0, 1), Mark("b", "wrong", 0, 1), Mark("c", "misbound", 0, 1, "pig")


def test_marks_of_a_caption():
    marks = gallery_marks("two large pigs left of two mushrooms", PIGS)
    assert [(m.text, m.verdict, m.start, m.owner) for m in marks if m.verdict != "right"] == [
        ("large", "wrong", 4, ""),
        ("two", "misbound", 23, "pig"),
    ]
    assert gallery_marks("", PIGS) == []


def test_error_counts():
    assert error_counts([[RIGHT, WRONG, WRONG], [RIGHT], [BOUND], []]) == {
        "captions": 4,
        "claims": 5,
        "hallucinated": 2,
        "misbound": 1,
        "wrong_captions": 2,
        "misbound_captions": 1,
    }


def test_images_are_sorted_by_errors_and_right_ones_excluded():
    marks = {"A": [[RIGHT], [WRONG], [WRONG], [RIGHT], [BOUND]], "B": [[], [RIGHT], [WRONG], [WRONG], [RIGHT]]}
    assert most_wrong(marks, 9) == [4, 2, 1, 3]
    assert most_wrong(marks, 2) == [4, 2]
    with pytest.raises(ValueError, match="shorter"):
        most_wrong({"A": [[RIGHT]], "B": []}, 1)
