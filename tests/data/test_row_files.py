"""CSV and other row files: ambiguous files are refused with the line, and no row is lost."""

import csv
import json
import random

import pytest

from hf_captionrl.data import check_captions, load_captions
from hf_captionrl.data.columns import read_csv, read_json_lines
from tests.data.photos import png


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
    good, report = check_captions(ds, max_bad_fraction=0.5)
    assert len(good) == 2
    assert [entry.reason for entry in report.entries] == ["caption_empty"]


@pytest.mark.parametrize("header", ["file_name,file_name,caption", "file_name,caption,split,split"])
def test_other_repeated_columns_are_refused(tmp_path, header):
    with pytest.raises(
        ValueError, match=r"^The first line of .*metadata.csv names the column '(file_name|split)' 2 times"
    ):
        read_csv(written(tmp_path, header + "\n" + ",".join("abcd"[: header.count(",") + 1]) + "\n"))


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('file_name,caption\na.png,"a dog\nb.png,a cat\nc.png,a cow\n', 2, "never closed"),
        ('file_name,caption\na.png,x\nb.png,"a cat\n', 3, "never closed"),
        # The next quote would close it and join two rows.
        ('file_name,caption\na.png,"a dog\nb.png,"a cat"\nc.png,y\n', 2, "text after a closing quote"),
        ('file_name,caption\na.png,"two\nlines"\nb.png,"a "big" cat"\n', 4, "text after a closing quote"),
        ('file_name,"caption\na.png,x\n', 1, "never closed"),
    ],
)
def test_an_unclosed_quote_is_an_error_with_its_line(tmp_path, text, line, said):
    with pytest.raises(ValueError, match=rf"^The row that begins in line {line} of .*metadata.csv has .*{said}"):
        read_csv(written(tmp_path, text))


def test_valid_quotes_are_kept(tmp_path):
    path = written(tmp_path, 'file_name,caption\r\na.png,"a ""big"" dog"\r\nb.png,5" pipe\r\n"c.png","two\nlines"\r\n')
    assert [row["caption"] for row in read_csv(path)] == ['a "big" dog', '5" pipe', "two\nlines"]


def test_columns_without_a_name(tmp_path):
    assert read_csv(written(tmp_path, "file_name, caption ,,\na.png,x,,\n")) == [
        {"file_name": "a.png", "caption": "x"}
    ]
    with pytest.raises(ValueError, match=r"^Line 3 of .* has 'lost' in column 3, which has no name"):
        read_csv(written(tmp_path, "file_name,caption,\na.png,x,\nb.png,y,lost\n"))


def test_repeated_key_is_refused(tmp_path):
    path = written(tmp_path, '{"file_name": "a.png", "caption": "x"}\n{"caption": "y", "caption": "z"}\n', "m.jsonl")
    with pytest.raises(
        ValueError, match=r"^Line 2 of .* has the key 'caption' twice. Write several captions as a list"
    ):
        read_json_lines(path)


HOSTILE = [
    "",
    " ",
    "\u200b",
    "caption",
    'a "quoted" one',
    "comma, semicolon; tab\t",
    "two\nlines",
    "\r",
    "🐶 dog",
    "x" * 9000,
    "\0",
    "=1+1",
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
    good, report = check_captions(ds, max_bad_fraction=0.9, quarantine_path=tmp_path / "q.jsonl")
    bad = [entry.image_id for entry in report.entries if entry.dropped == "row"]
    assert sorted([*good["image_id"][:], *bad]) == sorted(row[0] for row in rows)
    assert len(good) + report.bad_rows() == number
    # Every caption is used, in a removed row, or listed.
    used = sum(map(len, good["captions"][:]))
    given = {row[0]: row[1:] for row in rows}
    usable = sum(any(map(str.isalnum, text)) and len(text) <= 4000 for i in good["image_id"][:] for text in given[i])
    assert used == usable
    assert 50 < len(good) < 200


def test_split_names_are_case_insensitive(tmp_path):
    written(tmp_path, "file_name,caption,split\na.png,x,Train\nb.png,y,TEST\nc.png,z,train\n")
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(png(ord(name)))
    assert load_captions("imagefolder", data_dir=tmp_path, split="train", split_fractions=(1, 0, 0)).num_rows == 2
    assert load_captions("imagefolder", data_dir=tmp_path, split="test")["captions"][:] == [["y"]]


def test_rows_inside_a_quoted_text_are_named(tmp_path, caplog):
    path = written(tmp_path, 'file_name,caption\na.jpg,"a dog\nb.jpg,a cat"\nc.jpg,x\n')
    assert len(read_csv(path)) == 2
    assert "'b.jpg,a cat' looks like a row" in caplog.text
    caplog.clear()
    read_csv(written(tmp_path, 'file_name,caption\na.jpg,"a dog,\non a lawn"\n', "b.csv"))
    assert not caplog.text
