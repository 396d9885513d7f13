"""Reading and writing files of captions, and errors of broken files."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hf_captionrl.evaluation.caption_files import CaptionFile, measured_images, read_caption_file, read_references

GOOD = '{"image_id": "a", "caption": "a dog"}\n{"image_id": 7, "captions": ["a cat", "", "x\u2028y"]}\n'


def test_reads_several_captions_numeric_ids_and_empty_captions(tmp_path):
    path = tmp_path / "mle.jsonl"
    path.write_text(GOOD + "\n", encoding="utf-8")
    file = read_caption_file(path)
    assert file.name == "mle"
    assert file.captions == {"a": ["a dog"], "7": ["a cat", "", "x\u2028y"]}
    assert list(file.aligned(["7", "a"], {"7", "a", "z"})) == [["a cat", "", "x\u2028y"], ["a dog"]]
    assert list(file.aligned(["a"], {"7", "a"})) == [["a dog"]]  # --max_images: the rest of the file is left out
    with pytest.raises(ValueError, match=r"image ids that are not in the data set: 1 of 2, such as '7'"):
        file.aligned(["a", "b"], {"a", "b"})
    with pytest.raises(ValueError, match=r"2 of the data set's 4 images; missing: 2, such as 'b', 'c'"):
        file.aligned(["a", "b", "7", "c"], {"a", "b", "7", "c"})


CAPTIONS = {"1": ["a dog"], "2": ['a cat, "red"', "two"]}
ANNOTATIONS = [{"id": 10, "image_id": int(i), "caption": text} for i, texts in CAPTIONS.items() for text in texts]
SPLIT = [{"imgid": 7, "cocoid": int(i), "split": "val", "sentences": [{"raw": t, "tokens": []} for t in texts]}
         for i, texts in CAPTIONS.items()]  # fmt: skip
LAYOUTS = {
    "annotations of COCO.json": {"images": [{"id": 1}, {"id": 2}], "annotations": ANNOTATIONS},
    "results of COCO.json": ANNOTATIONS,
    "lists.json": CAPTIONS,
    "texts.json": {i: texts[0] for i, texts in CAPTIONS.items()},
    "pycocoevalcap.json": {i: [{"caption": text} for text in texts] for i, texts in CAPTIONS.items()},
    "rows.json": [{"file_name": i, "text": texts} for i, texts in CAPTIONS.items()],
    "one.json": {"image_id": 1, "caption": "a dog"},
    "karpathy.json": {"dataset": "coco", "images": SPLIT},
    "lines.jsonl": "\n".join(json.dumps({"image_id": i, "captions": texts}) for i, texts in CAPTIONS.items()),
    "lines.json": "\n".join(json.dumps({"image": i, "captions": texts}) for i, texts in CAPTIONS.items()),
    "long.csv": 'image_id,caption\n1,a dog\n2,"a cat, ""red"""\n2,two\n',
    "wide.csv": 'file_name,caption,caption\n1,a dog,\n2,"a cat, ""red""",two\n',
    "long.tsv": 'image_id\tcaption\n1\ta dog\n2\ta cat, "red"\n2\ttwo\n',
    "album.csv": "\ufeffimage_id,caption,old_caption,rank,unreadable,number\n1,a dog,,1,,1\n3,,,,truncated,1\n"
    '2,"a cat, ""red""",,1,,1\n2,two,,1,,2\n',
}


@pytest.mark.parametrize("name", [*LAYOUTS, "rows.parquet", "structs.parquet"])
def test_captions_are_read_in_every_layout(tmp_path, name):
    path = tmp_path / name
    if name.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet

        ids, texts = [1, 2], list(CAPTIONS.values())
        if name == "structs.parquet":
            ids, texts = [1.0, 2.0], [[{"raw": t} for t in c] for c in CAPTIONS.values()]
        pyarrow.parquet.write_table(pa.table({"image_id": ids, "image": [b"JPEG", b"JPEG"], "captions": texts}), path)
    else:
        content = LAYOUTS[name]
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    first = {i: texts[:1] for i, texts in CAPTIONS.items()}
    expected = {"texts.json": first, "one.json": {"1": ["a dog"]}}.get(name, CAPTIONS)
    assert read_caption_file(path, is_repeatable=True).captions == expected
    has_rows_of_one_image = name.startswith(("annotations", "results", "long"))
    if has_rows_of_one_image:
        with pytest.raises(ValueError, match="image '2' occurs twice"):
            read_caption_file(path)
    else:
        assert read_caption_file(path).captions == expected


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("x.jsonl", GOOD + "{broken}\n", "line 3, is not JSON"),
        ("x.jsonl", GOOD + '{"image_id": "b", "capt', "line 3, is not JSON"),
        ("x.jsonl", GOOD + '["b", "a bird"]\n', "line 3, holds a list"),
        ("x.jsonl", GOOD + '{"caption": "a bird"}\n', "image_id is None"),
        ("x.jsonl", GOOD + '{"image_id": "b", "captions": []}\n', r"is \[\], not text"),
        ("x.jsonl", GOOD + '{"image_id": "7", "caption": "again"}\n', "line 3: image '7' occurs twice"),
        ("x.jsonl", "\n\n", "holds no captions"),
        ("x.csv", "image_id;caption\n1;a dog\n", "row 1: image_id is None .of image_id;caption."),
        ("x.csv", "image_id,title\n1,a dog\n", r"image '1' is \[None\], not text"),
        ("x.csv", "image_id,caption,number\n1,a dog,1\n1,a cat,1\n", "row 2: image '1' occurs twice"),
        ("x.json", '[{"image_id": 1, "caption": "a"}, 7]', "entry 2, holds a int"),
        ("x.json", '{"1": {"a": "dog"}}', "image '1' is .*not text"),
        ("x.json", "{oops", "not valid JSON"),
        ("x.parquet", "PAR1", "not a Parquet file"),
        ("x.csv", "image_id,caption\n1,a dog\n2,\"['a', 'b']\"\n", "row 2: the captions are a list .* row 1 are not"),
        ("x.csv", "image_id,caption\n1,\"['a', 'b']\"\n2,None\n", "row 1: the captions are a list .* row 2 are not"),
        ("x.jsonl", "\ufeff" + GOOD, "UTF-16"),
    ],
)
def test_bad_files_are_refused_with_the_file_and_the_place(tmp_path, name, content, named):
    (tmp_path / name).write_text(content, encoding="utf-16-le" if named == "UTF-16" else "utf-8")
    with pytest.raises(ValueError, match=named) as caught:
        read_caption_file(tmp_path / name)
    assert name in str(caught.value)


def test_formulas_that_an_album_quoted_are_as_they_were(tmp_path):
    (tmp_path / "album.csv").write_text("image_id,caption\n'-1.png,'=a dog\n'a.png,'tis a cat\n")
    assert read_caption_file(tmp_path / "album.csv").captions == {"-1.png": ["=a dog"], "'a.png": ["'tis a cat"]}


def test_measured_images_are_those_of_the_captions_which_all_files_share():
    def file(name, ids):
        return CaptionFile(name, Path(f"{name}.json"), {i: ["a dog"] for i in ids})

    assert measured_images([file("a", "21"), file("b", "12")], file("refs", "123")) == ["1", "2"]  # 3 is left out
    assert measured_images([file("a", "21")], None) == ["2", "1"]
    with pytest.raises(ValueError, match=r"a.json .* 2 images and b.json of 2; in only one of them: 2, .*'1', '3'"):
        measured_images([file("a", "12"), file("b", "23")], None)


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet", "json"])
@pytest.mark.parametrize("form", ["python", "json", "numpy"])
def test_printed_lists_are_lists(tmp_path, kind, form):
    groups = [["a dog's bone", 'a "cat", red'], ["two \\ kites"]]
    write = {"python": repr, "json": json.dumps, "numpy": lambda group: str(np.array(group))}[form]

    def read(texts):
        table = pd.DataFrame({"image_id": ["a", "b"], "caption": texts})
        path = tmp_path / f"x.{kind}"
        if kind in ("json", "jsonl"):
            table.to_json(path, orient="records", lines=kind == "jsonl")
        elif kind == "parquet":
            table.to_parquet(path)
        else:
            table.to_csv(path, sep="\t" if kind == "tsv" else ",", index=False)
        return read_references(path).captions

    assert read([write(group) for group in groups]) == {"a": groups[0], "b": groups[1]}
    assert read(["[a] kite", "['a"]) == {"a": ["[a] kite"], "b": ["['a"]}  # the negative control


def test_ids_are_matched_by_their_normal_form():
    file = CaptionFile("x", Path("x.jsonl"), {"caf\u00e9.png": ["a"], "b": ["b"]})
    ids = ["b", "cafe\u0301.png"]
    assert list(file.aligned(ids, set(ids))) == [["b"], ["a"]]
