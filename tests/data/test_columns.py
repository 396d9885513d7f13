"""Rows of any file become the same columns, with clean captions."""

import csv
import json
import random
import unicodedata

import datasets
import pyarrow as pa
import pytest

from hf_captionrl.data import check_captions, load_captions
from hf_captionrl.data.columns import (
    SourceArguments,
    caption_fault,
    clean_caption,
    read_csv,
    replace_column,
    to_caption_columns,
    to_caption_list,
)
from tests.data.photos import embedded, png


@pytest.mark.parametrize("name", ["image_id", "number"])
def test_replace_column_of_data_on_disk_that_lost_another_column(name, tmp_path):
    datasets.Dataset.from_dict({"number": [1, 2, 3]}).save_to_disk(tmp_path / "d")
    rows = datasets.load_from_disk(tmp_path / "d").add_column("text", ["a", "b", "c"]).remove_columns("text")
    out = replace_column(rows, name, [7, 8, 9], datasets.Value("int64"))
    assert out[name][:] == [7, 8, 9]
    assert out["number"][:] == ([7, 8, 9] if name == "number" else [1, 2, 3])


def test_replaced_column_of_a_selection_follows_its_order():
    for rows in ([4, 0, 2], [7, 2, 2, 5]):  # a row that occurs twice may get two values
        chosen = embedded(8).select(rows)
        values = [f"new {i}" for i in range(len(rows))]
        replaced = replace_column(chosen, "more", values, datasets.Value("string"))
        assert replaced["more"][:] == values
        assert replaced["image_id"][:] == chosen["image_id"][:]
        assert replaced.select([2])[0]["more"] == "new 2"
        assert replaced["image"][1] == chosen["image"][1]
        # Images are copied only if a row occurs twice, and then only the selected ones.
        assert replaced.data.num_rows == (8 if len(set(rows)) == len(rows) else 4)


def converted(columns, **arguments):
    rows = datasets.Dataset.from_dict({"image": [b"x"] * 2, **columns})
    return rows, to_caption_columns(rows, SourceArguments(**arguments), split="train", where="test")


def test_columns_may_have_each_others_names():
    columns = {"captions": ["x", "y"], "image_id": [["a dog"], ["a cat"]]}
    _, found = converted(columns, image_id_column="captions", caption_column="image_id")
    assert (found["image_id"][:], found["captions"][:]) == (["x", "y"], [["a dog"], ["a cat"]])


@pytest.mark.parametrize(
    ("dirty", "clean"),
    [
        ("  some tables  next to\tumbrellas \r\n", "some tables next to umbrellas"),
        ("a\x00b\x07c\x1b[31m", "a b c [31m"),
        ("a\u0085b\u2028c\u2029d\xa0e", "a b c d e"),
        ("cafe\u0301", "caf\u00e9"),
        ("\ufeffa soft\u00adhyphen \u202etxet", "a softhyphen txet"),
        ("\U0001f468\u200d\U0001f469\u200d\U0001f467 family", "\U0001f468\u200d\U0001f469\u200d\U0001f467 family"),
        ("half a pair \ud83d here", "half a pair \ufffd here"),
        (" \t\n\x0b\x0c\u3000\ufeff", ""),
    ],
)
def test_clean_caption(dirty, clean):
    assert clean_caption(dirty) == clean
    assert clean_caption(clean) == clean
    assert unicodedata.is_normalized("NFC", clean)
    pa.array([clean_caption(dirty)])  # a half surrogate pair could not be stored


def test_ascii_shortcut_equals_the_general_code():
    for code in range(128):
        text = f"a {chr(code)} b"
        assert clean_caption(text) == clean_caption(text + " \u00e9")[:-2].rstrip(), code


@pytest.mark.parametrize(
    ("caption", "reason"),
    [
        ("a dog", None),
        ("\u72ac", None),
        (None, "caption_not_text"),
        ("", "caption_empty"),
        ("...", "caption_empty"),
        ("word " * 200 + "word", "caption_too_long"),
        ("x" * 4001, "caption_too_long"),  # one word of base64
    ],
)
def test_caption_fault(caption, reason):
    fault = caption_fault(caption)
    assert (fault and fault[0]) == reason
    if fault:
        assert len(fault[1]) < 200  # long texts are shortened in messages


def test_every_form_of_a_row():
    assert to_caption_list("a  dog") == ["a dog"]
    assert to_caption_list(["a", None, 3, ["b"], " "]) == ["a", None, None, None, ""]
    rows = [{"raw": "a", "tokens": ["a"]}, {"caption": "b"}, {"text": 3}, {}]
    assert to_caption_list(rows) == ["a", "b", None, None]
    assert to_caption_list({"raw": "a"}) == ["a"]
    assert to_caption_list(None) == to_caption_list([]) == []
    assert to_caption_list(float("nan")) == [None]


def written(tmp_path, text, name="metadata.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_several_caption_columns_are_several_captions(tmp_path):
    path = written(tmp_path, 'file_name,caption,caption,caption\na.png,one,"two, too",three\nb.png,one,,\nc.png,,, \n')
    assert read_csv(path) == [
        {"file_name": "a.png", "caption": ["one", "two, too", "three"]},
        {"file_name": "b.png", "caption": ["one"]},
        {"file_name": "c.png", "caption": ["", "", " "]},
    ]
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(png(ord(name)))
    ds = load_captions("imagefolder", data_dir=tmp_path, split="all")
    assert ds["captions"][:] == [["one", "two, too", "three"], ["one"], ["", "", ""]]
    good, entries = check_captions(ds, max_bad_fraction=0.5)
    assert len(good) == 2
    assert [entry.reason for entry in entries] == ["caption_empty"]


def test_valid_quotes_are_kept_and_columns_without_a_name_left_out(tmp_path):
    path = written(tmp_path, 'file_name,caption\r\na.png,"a ""big"" dog"\r\nb.png,5" pipe\r\n"c.png","two\nlines"\r\n')
    assert [row["caption"] for row in read_csv(path)] == ['a "big" dog', '5" pipe', "two\nlines"]
    unnamed = written(tmp_path, "file_name, caption ,,\na.png,x,,\n")
    assert read_csv(unnamed) == [{"file_name": "a.png", "caption": "x"}]


HOSTILE = [
    "",
    " ",
    "\u200b",
    'a "quoted" one',
    "comma, semicolon; tab\t",
    "two\nlines",
    "\r",
    "🐶 dog",
    "x" * 9000,
    "\0",
]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_every_row_is_used_or_quarantined(tmp_path, suffix):
    """No difficult row that the standard library writes is lost."""
    random.seed(7)
    number = 300
    rows = []
    for n in range(number):
        name = f"{n}.png"
        if n % 7:
            (tmp_path / name).write_bytes(png(n) if n % 5 else b"no image")
        rows.append([name, random.choice(HOSTILE), random.choice(HOSTILE)])
    path = tmp_path / f"metadata.{suffix}"
    if suffix == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["file_name", "caption", "caption"], *rows])
    else:
        path.write_text("".join(json.dumps({"file_name": r[0], "caption": r[1:]}) + "\n\n" for r in rows))
    ds = load_captions("imagefolder", data_dir=tmp_path, split="all")
    assert ds["image_id"][:] == [row[0] for row in rows]
    good, entries = check_captions(ds, max_bad_fraction=0.9, quarantine_path=tmp_path / "q.jsonl")
    bad = [entry.image_id for entry in entries if entry.dropped == "row"]
    assert sorted([*good["image_id"][:], *bad]) == sorted(row[0] for row in rows)
    assert len(good) + len(bad) == number
    # Every caption is used, in a removed row, or listed.
    used = sum(map(len, good["captions"][:]))
    given = {row[0]: row[1:] for row in rows}
    usable = sum(any(map(str.isalnum, text)) and len(text) <= 4000 for i in good["image_id"][:] for text in given[i])
    assert used == usable
    assert 50 < len(good) < 200
