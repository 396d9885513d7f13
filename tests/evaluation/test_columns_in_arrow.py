"""`captionrl evaluate` keeps captions and references in Arrow and large features in files; the numbers are the same."""

import json
import random

import datasets
import numpy as np
import pytest
import torch

from hf_captionrl.data.columns import TEXTS, ColumnView, in_arrow
from hf_captionrl.evaluation import scored_captions as caption_scores
from hf_captionrl.evaluation.caption_files import read_caption_file
from hf_captionrl.evaluation.evaluator import Evaluator, draw_references
from hf_captionrl.evaluation.scored_captions import BLOCK, empty_column, human_captions, score_captions_in_blocks
from hf_captionrl.metrics.suites import ndlb_suite

REFERENCES = [["a", "b", "c"], ["d", "d"], ["e"], [], ["f", "g"]]


def references(rows=REFERENCES):
    return datasets.Dataset.from_dict(
        {"captions": rows}, features=datasets.Features({"captions": datasets.List(datasets.Value("string"))})
    )


def test_a_sequence_in_arrow_equals_a_list():
    values = [["a", "b"], [], ["c"]] * 1000
    made = in_arrow(iter(values), TEXTS)
    assert len(made) == len(values)
    assert list(made) == values
    for index in (0, 5, -1, slice(1020, 1030), slice(-3, None), slice(10, 0, -4)):
        assert made[index] == values[index]
    with pytest.raises(IndexError):
        made[len(values)]


@pytest.mark.parametrize("seed", range(4))
def test_drawn_references_equal_a_plain_loop(seed):
    rng = random.Random(seed)
    expected = []
    for group in REFERENCES:
        place = rng.randrange(len(group)) if group else 0
        expected.append([*group[place : place + 1], *(c for i, c in enumerate(group) if i != place)])
    drawn = draw_references(ColumnView(references(), "captions"), seed)
    assert list(drawn) == expected
    assert [drawn[row] for row in range(len(drawn))] == expected


def test_human_captions_need_two_references_of_every_image():
    assert human_captions(Evaluator(references(), None, None, seed=0)) is None
    scored = human_captions(Evaluator(references([["a", "b"], ["c", "d", "e"]]), None, None, seed=0))
    assert scored is not None
    assert [sorted(group) for group in scored.captions] == [["a", "b"], ["c", "d", "e"]]
    assert scored.first == [group[0] for group in scored.captions]
    assert list(scored.references) == [group[1:] for group in scored.captions]


def test_aligned_captions_are_in_arrow_unless_they_have_no_utf8_form(tmp_path):
    rows = {"b": ["x", ""], "a": ["y"]}

    def aligned():
        lines = (json.dumps({"image_id": i, "captions": texts}) + "\n" for i, texts in rows.items())
        (tmp_path / "c.jsonl").write_text("".join(lines))
        return read_caption_file(tmp_path / "c.jsonl").aligned(["a", "b"], {"a", "b"})

    found = aligned()
    assert isinstance(found, ColumnView)
    assert list(found) == [["y"], ["x", ""]]
    rows["a"] = ["lone \ud83d"]
    assert aligned() == [["lone \ud83d"], ["x", ""]]


def test_large_columns_are_in_a_file_that_disappears(tmp_path, monkeypatch):
    def scoring(captions, first):
        rows = np.arange(first, first + len(captions))
        return {"text": np.stack([rows, rows**2], 1).astype(np.float32), "rank": rows}

    captions = ["a"] * (2 * BLOCK + 3)
    memory = score_captions_in_blocks(scoring, captions, 7)
    monkeypatch.setattr(caption_scores, "_IN_MEMORY", 8 * len(captions))
    assert not isinstance(empty_column((len(captions) - 1, 2), np.float32, tmp_path), np.memmap)
    found = score_captions_in_blocks(scoring, captions, 7, folder=tmp_path / "new")
    assert all(isinstance(found[name], np.memmap) and not isinstance(memory[name], np.memmap) for name in found)
    assert list((tmp_path / "new").iterdir()) == []
    expected = np.arange(7, 7 + len(captions))
    for columns in (memory, found):
        np.testing.assert_array_equal(columns["rank"], expected)
        np.testing.assert_array_equal(columns["text"][:, 1], expected.astype(np.float32) ** 2)
    torch.from_numpy(found["text"])[0] = 5.0  # writable
    assert found["text"][0].tolist() == [5.0, 5.0]


def test_suite_reads_references_from_a_column():
    rng = random.Random(0)
    words = "a red cat sits on the blue mat near two dogs".split()

    def caption():
        return " ".join(rng.choices(words, k=rng.randint(1, 9)))

    listed = [[caption() for _ in range(rng.randint(1, 5))] for _ in range(300)]
    captions = [rng.choice(["", "  ", caption(), caption()]) for _ in listed]  # some are missing
    column = ColumnView(references(listed), "captions")
    assert ndlb_suite(captions, references=column) == ndlb_suite(captions, references=listed)
