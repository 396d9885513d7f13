"""Invalid rows are removed, counted and listed; too many of them stop the run before it starts."""

import json
import os

import pytest
from PIL import Image

from hf_captionrl.data import (
    QuarantineError,
    check_captions,
    load_caption_splits,
    load_captions,
    open_image,
)
from tests.data.photos import captions, embedded, make_folder, png


def bad_folder(folder, count=100):
    """100 images, five of them invalid, one row without a valid caption, two rows with an invalid caption."""
    make_folder(
        folder,
        count,
        rows={
            0: {"captions": ["fine", "", "fine too"]},
            7: {"captions": ["x" * 9000, "fine"]},
            8: {"captions": [" ", None, "\u200b"]},
            9: {"file_name": "nowhere.png"},
        },
    )
    (folder / "1.png").write_bytes(png(1)[:-40])
    (folder / "2.png").write_bytes(b"<html>")
    Image.new("RGB", (1, 1)).save(folder / "3.png")
    Image.new("1", (10_000, 10_000)).save(folder / "4.png")
    return load_captions("imagefolder", data_dir=folder, split_fractions=(1, 0, 0))


EXPECTED = [
    (0, "0.png", "caption_empty", "caption"),
    (1, "1.png", "image_truncated", "row"),
    (2, "2.png", "image_unreadable", "row"),
    (3, "3.png", "image_too_small", "row"),
    (4, "4.png", "image_too_large", "row"),
    (7, "7.png", "caption_too_long", "caption"),
    (8, "8.png", "caption_empty", "row"),
    (9, "nowhere.png", "image_not_found", "row"),
]


def test_invalid_rows_are_removed_counted_and_listed(tmp_path, caplog):
    ds = bad_folder(tmp_path / "photos")
    path = tmp_path / "out" / "quarantine.jsonl"
    good, entries = check_captions(ds, quarantine_path=path, max_bad_fraction=0.06)
    assert [(e.row, e.image_id, e.reason, e.dropped) for e in entries] == EXPECTED
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(x["row"], x["image_id"], x["reason"], x["dropped"]) for x in lines] == EXPECTED
    assert all(x["split"] == "train" and x["detail"] for x in lines)
    assert "Rows that are left out: 6 (1 image_truncated, " in caplog.text
    assert "Captions that are left out: 2 (1 caption_empty, " in caplog.text
    assert os.listdir(path.parent) == ["quarantine.jsonl"]

    assert good["image_id"][:] == [f"{n}.png" for n in range(100) if n not in {1, 2, 3, 4, 8, 9}]
    assert good["captions"][0] == ["fine", "fine too"]
    assert good["captions"][3] == ["fine"]
    assert good["captions"][4] == captions(10)
    for row in range(len(good)):
        assert good[row]["image"].size == (12, 10)
    _, unopened = check_captions(ds, check_images=False)
    assert {entry.row for entry in unopened} == {0, 7, 8}
    again, clean = check_captions(good, quarantine_path=path)
    assert (clean, path.read_text()) == ([], "")
    assert again["captions"][:] == good["captions"][:]


def test_too_many_bad_rows_stop_with_counts_by_reason(tmp_path):
    ds = bad_folder(tmp_path / "photos")
    path = tmp_path / "quarantine.jsonl"
    with pytest.raises(QuarantineError) as caught:
        check_captions(ds, quarantine_path=path)
    message = str(caught.value)
    reasons = ("1 image_truncated", "1 image_unreadable", "1 image_too_small", "1 image_too_large")
    for text in ("6 of 100 rows", "max_bad_fraction is 0.05", "row 1, image_id '1.png'", str(path), *reasons):
        assert text in message
    assert "\n" not in message
    assert len(path.read_text().splitlines()) == len(EXPECTED)  # written before stopping


def test_the_limit_is_the_largest_share_that_passes():
    def text(number):
        return [""] if number == 0 else captions(number)

    check_captions(embedded(20, captions_of=text), max_bad_fraction=0.05)
    for rows, limit, message in (
        (embedded(19, captions_of=text), 0.05, "1 of 19"),
        (embedded(3, captions_of=lambda n: [""]), 1.0, r"3 of 3 rows .* 3 caption_empty"),
        (embedded(0), 1.0, "no rows"),
    ):
        with pytest.raises(QuarantineError, match=message):
            check_captions(rows, max_bad_fraction=limit)


def test_all_splits_in_one_file_and_each_below_the_limit(tmp_path):
    for name, count in (("train", 100), ("validation", 4), ("test", 4)):
        make_folder(tmp_path / name, count)
    (tmp_path / "validation" / "2.png").unlink()
    splits = load_caption_splits("imagefolder", data_dir=tmp_path)
    path = tmp_path / "quarantine.jsonl"
    with pytest.raises(QuarantineError, match=r"1 of 4 rows of split 'validation'"):
        check_captions(splits, quarantine_path=path)
    good, entries = check_captions(splits, quarantine_path=path, max_bad_fraction=0.25)
    assert {name: len(ds) for name, ds in good.items()} == {"train": 100, "validation": 3, "test": 4}
    assert json.loads(path.read_text())["split"] == "validation"
    assert [entry.split for entry in entries] == ["validation"]


def test_line_breaks_of_a_caption_are_escaped(tmp_path):
    evil = "\u2028\u2029\x85\r\n" + "\u202e" * 5 + '"}{"row": 1' + "\ud7ff"
    ds = embedded(4, captions_of=lambda n: ["?! " * 300 + evil] if n == 0 else captions(n))
    path = tmp_path / "q.jsonl"
    check_captions(ds, quarantine_path=path, max_bad_fraction=0.5)
    assert len(path.read_bytes().splitlines()) == len(path.read_text().splitlines()) == 1
    assert json.loads(path.read_text())["row"] == 0


def test_captions_are_cleaned_and_the_rest_is_untouched():
    ds = embedded(4, captions_of=lambda n: ["a\x00 cafe\u0301  "]).add_column("note", list("abcd"))
    good, entries = check_captions(ds.select([3, 1]))
    assert entries == []
    assert good["captions"][:] == [["a caf\u00e9"]] * 2
    assert good["note"][:] == ["d", "b"]
    assert good["image_id"][:] == ["id-3", "id-1"]
    assert open_image(good[0]["image"]).tobytes() == open_image(png(3)).tobytes()


def test_repeated_ids_are_refused():
    with pytest.raises(ValueError, match="image_id 'id-1'"):
        check_captions(embedded(4).select([0, 1, 1]))
