"""Every source is converted to the same columns, or refused with the remedy."""

import itertools
import json
import unicodedata
from collections import Counter

import datasets
import numpy as np
import pandas as pd
import pytest
from PIL import Image

import hf_captionrl.scenes
from hf_captionrl.data import (
    ImageError,
    check_captions,
    choose_split,
    exchange_captions,
    load_caption_splits,
    load_captions,
    open_image,
)
from hf_captionrl.data.columns import concept_column, undecoded
from hf_captionrl.data.loading import hash_split
from tests.data.photos import captions, embedded, make_folder, png

ALL = (1, 0, 0)  # no split is divided off train


def assert_shape(ds):
    assert ds.column_names[:3] == ["image", "image_id", "captions"]
    assert isinstance(ds.features["image"], datasets.Image)
    assert ds.features["image_id"] == datasets.Value("string")
    assert ds.features["captions"] == datasets.List(datasets.Value("string"))
    assert len(set(ds["image_id"])) == len(ds)


def pixels(ds, row):
    return open_image(undecoded(ds)[row]["image"]).tobytes()


def of_png(number):
    return open_image(png(number)).tobytes()


# --- imagefolder ---


def test_imagefolder_is_loaded_with_its_metadata(tmp_path):
    folder = make_folder(tmp_path / "photos", rows={3: {"license": "CC BY", "size": [1, 2]}})
    ds = load_captions("imagefolder", data_dir=folder, split_fractions=ALL)
    assert_shape(ds)
    assert ds["image_id"][:2] == ["0.png", "1.png"]
    assert ds[4]["captions"] == captions(4)
    assert pixels(ds, 4) == of_png(4)
    assert isinstance(ds[4]["image"], Image.Image)
    assert (ds[3]["license"], ds[3]["size"], ds[2]["license"]) == ("CC BY", [1, 2], None)
    # The folder alone is enough, and a relative one too.
    assert load_captions(str(folder), split_fractions=ALL)[4]["captions"] == captions(4)


def test_split_folders_keep_their_splits(tmp_path):
    for name, count in (("train", 6), ("val", 2), ("test", 3)):
        make_folder(tmp_path / name, count)
    splits = load_caption_splits("imagefolder", data_dir=tmp_path)
    assert {name: len(ds) for name, ds in splits.items()} == {"train": 6, "validation": 2, "test": 3}
    assert splits["validation"]["image_id"][:] == ["val/0.png", "val/1.png"]
    assert pixels(splits["test"], 2) == of_png(2)
    assert {name: str(ds.split) for name, ds in splits.items()} == {name: name for name in splits}


def test_values_of_mixed_types_reach_the_check(tmp_path):
    odd = {
        1: {"captions": 5},
        2: {"captions": None},
        3: {"captions": ["good", 7, None, ["nested"]]},
        4: {"file_name": 9},
        5: {"file_name": None, "note": {"a": 1}},
        6: {"captions": ["half \ud83d pair"], "note": "text", "file_name": "\ud83d.png"},
        7: {"captions": []},
        8: {"note": "\ud83d"},
    }
    folder = make_folder(tmp_path, 20, rows=odd)
    ds = load_captions("imagefolder", data_dir=folder, split_fractions=ALL)
    assert_shape(ds)
    good, entries = check_captions(ds, max_bad_fraction=0.5)
    counts = {"caption_missing": 2, "image_missing": 2, "caption_not_text": 1, "image_not_found": 1}
    assert Counter(entry.reason for entry in entries if entry.dropped == "row") == counts
    assert [entry.reason for entry in entries if entry.dropped == "caption"] == ["caption_not_text"] * 3
    assert len(good) == 14
    assert good["captions"][1] == ["good"]


# --- Karpathy ---


def karpathy(**changes):
    images = [
        {
            "filepath": "val2014",
            "filename": f"{number}.png",
            "imgid": number,
            "cocoid": 1000 + number,
            "split": ["train", "restval", "val", "test"][number % 4],
            "sentences": [{"raw": text, "tokens": text.split(), "sentid": 1} for text in captions(number)],
        }
        for number in range(8)
    ]
    for number, change in changes.items():
        images[int(number[1:])].update(change)
    return {"images": images, "dataset": "coco"}


def test_karpathy_json(tmp_path):
    make_folder(tmp_path / "val2014", 8)
    path = tmp_path / "dataset_coco.json"
    path.write_text(json.dumps(karpathy(n6={"sentences": None})))
    splits = load_caption_splits(str(path), image_root=tmp_path)
    assert {name: len(ds) for name, ds in splits.items()} == {"train": 4, "validation": 2, "test": 2}
    for ds in splits.values():
        assert_shape(ds)
    assert splits["train"]["image_id"][:] == ["1000", "1001", "1004", "1005"]
    assert splits["train"][1]["captions"] == captions(1)
    assert pixels(splits["train"], 1) == of_png(1)
    assert splits["validation"]["captions"][1] == []
    # As Flickr30k.
    content = karpathy()
    for image in content["images"]:
        del image["filepath"], image["cocoid"]
    path.write_text(json.dumps(content))
    ds = load_captions(str(path), image_root=tmp_path / "val2014", split="test")
    assert ds["image_id"][:] == ["3", "7"]
    assert pixels(ds, 1) == of_png(7)


# --- COCO's annotations ---


def coco(number=10):
    """As captions_train2017.json: annotations in another order than the images."""
    images = [{"id": 100 + n, "file_name": f"{n}.png", "height": 10, "width": 12} for n in range(number)]
    notes = [{"id": 7, "image_id": 100 + n, "caption": text} for n in range(number) for text in captions(n)]
    return {"info": {}, "licenses": [], "images": images, "annotations": notes[::-1]}


def test_annotations_of_coco(tmp_path):
    make_folder(tmp_path / "train2017", 10)
    path = tmp_path / "captions_train2017.json"
    path.write_text(json.dumps(coco()))
    ds = load_captions(str(path), image_root=tmp_path / "train2017", split="all")
    assert_shape(ds)
    assert ds["image_id"][:] == [str(100 + n) for n in range(10)]
    assert ds["captions"][3] == captions(3)[::-1]
    assert pixels(ds, 3) == of_png(3)
    with pytest.raises(ValueError, match="image_root"):
        load_captions(str(path))
    content = coco()
    path.write_text(json.dumps(content | {"annotations": [{"image_id": 100, "bbox": [0, 0, 1, 1]}]}))
    with pytest.raises(ValueError, match=r"captions_train2017\.json"):  # instances_train2017.json
        load_captions(str(path), image_root=tmp_path / "train2017")


# --- lists that were printed into a cell ---

TWO = ['it\'s a "dog"', "a cat, red"]
PRINTED = {"python": repr(TWO), "json": json.dumps(TWO), "numpy": str(np.array(TWO)), "one": repr(TWO[:1])}


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "metadata.csv", "memory"])
@pytest.mark.parametrize("form", PRINTED)
def test_printed_lists_are_lists(tmp_path, kind, form):
    make_folder(tmp_path, 3)
    (tmp_path / "metadata.jsonl").unlink()
    assert str(np.array(TWO)) == "['it\\'s a \"dog\"' 'a cat, red']"

    def loaded(texts):
        table = pd.DataFrame({"file_name": [f"{n}.png" for n in range(3)], "captions": texts})
        path = tmp_path / (kind if "." in kind else f"table.{kind}")
        if kind == "memory":
            source = datasets.Dataset.from_pandas(table)
            return load_captions(source, split="all", image_root=tmp_path, image_column="file_name")["captions"][:]
        if kind == "jsonl":
            table.to_json(path, orient="records", lines=True)
        else:
            (table.to_parquet if kind == "parquet" else table.to_csv)(path, index=False)
        source = str(tmp_path) if kind == "metadata.csv" else str(path)
        return load_captions(source, split="all", image_root=tmp_path)["captions"][:]

    expected = TWO[:1] if form == "one" else TWO
    assert loaded([PRINTED[form]] * 3) == [expected] * 3
    with pytest.raises(ValueError, match=r"row 2: the captions are a list .* row 0"):
        loaded(["a dog", "a [small] cat", PRINTED[form]])
    plain = ["[a dog] and ['a cat']", "a cat", "[1, 2]"]  # the negative control: not lists of texts
    assert loaded(plain) == [[text] for text in plain]


# --- normal forms, and encodings ---


@pytest.mark.parametrize(("on_disk", "in_table"), [("NFD", "NFC"), ("NFC", "NFD")])
def test_file_names_are_matched_by_their_normal_form(tmp_path, caplog, on_disk, in_table):
    name = "caf\u00e9.png"
    make_folder(tmp_path / "photos", 1)
    (tmp_path / "photos" / "0.png").rename(tmp_path / "photos" / unicodedata.normalize(on_disk, name))
    row = {"file_name": unicodedata.normalize(in_table, name), "captions": ["a dog"]}
    (tmp_path / "photos" / "metadata.jsonl").write_text(json.dumps(row))
    ds = load_captions(str(tmp_path / "photos"), split="all")
    assert pixels(ds, 0) == of_png(0)
    assert "not named" not in caplog.text
    row["file_name"] = unicodedata.normalize(in_table, "caf\u00e8.png")  # another letter
    (tmp_path / "photos" / "metadata.jsonl").write_text(json.dumps(row))
    with pytest.raises(ImageError, match="not a file"):
        pixels(load_captions(str(tmp_path / "photos"), split="all"), 0)
    assert "not named" in caplog.text


# --- tables ---


@pytest.mark.parametrize("kind", ["json", "lines.json"])
def test_files_with_paths(tmp_path, kind):
    make_folder(tmp_path / "pictures", 4)
    rows = [{"image": f"{n}.png", "caption": f"picture {n}", "nr": n} for n in range(4)]
    path = tmp_path / f"table.{kind}"
    path.write_text(json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)))
    ds = load_captions(str(path), image_root=tmp_path / "pictures", image_id_column="nr", split_fractions=ALL)
    assert_shape(ds)
    assert ds["image_id"][:] == ["0", "1", "2", "3"]
    assert ds["captions"][2] == ["picture 2"]
    assert pixels(ds, 2) == of_png(2)
    path.write_text(json.dumps(rows[0]))  # a file of one line
    assert load_captions(str(path), image_root=tmp_path / "pictures", split="all")["captions"][:] == [["picture 0"]]


def test_parquet_with_images_inside_and_save_to_disk(tmp_path):
    ds = embedded(6)
    ds.to_parquet(tmp_path / "a.parquet")
    ds.shuffle(seed=0).save_to_disk(tmp_path / "disk")
    for name in ("a.parquet", "disk"):
        loaded = load_captions(str(tmp_path / name), split_fractions=ALL)
        assert_shape(loaded)
        row = loaded["image_id"][:].index("id-4")
        assert loaded[row]["captions"] == captions(4)
        assert pixels(loaded, row) == of_png(4)


def test_bytes_and_structs_become_images(tmp_path):
    plain = datasets.Dataset.from_dict({"img": [png(0), png(1)], "text": ["a", "b"]})
    plain.to_parquet(tmp_path / "bytes.parquet")
    ds = load_captions(str(tmp_path / "bytes.parquet"), split_fractions=ALL)
    assert_shape(ds)
    assert pixels(ds, 1) == of_png(1)
    assert ds["image_id"][:] == ["train-000000", "train-000001"]
    struct = datasets.Dataset.from_dict({"image": [{"bytes": png(0), "path": "x"}], "captions": [["a"]]})
    struct.to_parquet(tmp_path / "struct.parquet")
    assert pixels(load_captions(str(tmp_path / "struct.parquet"), split_fractions=ALL), 0) == of_png(0)


def test_file_name_is_not_a_pattern(tmp_path):
    for name in ("run[1].parquet", "run1.parquet"):
        table = datasets.Dataset.from_dict({"image": ["a.png"], "caption": [name], "image_id": ["1"]})
        table.to_parquet(str(tmp_path / name))
    ds = load_captions(str(tmp_path / "run[1].parquet"), split_fractions=ALL)
    assert ds["captions"][:] == [["run[1].parquet"]]
    found = exchange_captions(ds, tmp_path / "run[1].parquet", column="caption")
    assert found["captions"][:] == [["run[1].parquet"]]


def test_code_of_a_data_set_is_never_run(tmp_path):
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    with pytest.raises(ValueError, match="could not be loaded"):
        load_captions(str(folder))
    assert not (tmp_path / "ran").exists()


def test_scenes_are_the_default_data(monkeypatch):
    few, load = {"num_train": 4, "num_validation": 3, "num_test": 5}, hf_captionrl.scenes.load_scenes
    monkeypatch.setattr(hf_captionrl.scenes, "load_scenes", lambda *name, **more: load(*name, **few | more))
    splits, full = load_captions(split=None), load_caption_splits("scenes", caption_column="full_caption")
    assert {name: len(ds) for name, ds in splits.items()} == {"train": 4, "validation": 3, "test": 5}
    for name, ds in splits.items():
        assert_shape(ds)
        assert {"full_caption", "facts", "bag_id"} <= set(ds.column_names)
        assert full[name]["captions"] == [[text] for text in ds["full_caption"]]
        assert full[name].features == ds.features
    good, entries = check_captions(splits)
    assert entries == []
    assert good["test"]["captions"][:] == splits["test"]["captions"][:]
    assert load_captions(split="validation")["image_id"][:] == splits["validation"]["image_id"][:]
    assert [len(choose_split("scenes", split).dataset) for split in (None, "all", "train+val")] == [5, 12, 7]


ALL_IMAGE_FOLDERS = {"split": "all", "require_captions": False}


def bare(folder, *names):
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    return folder


def load(folder, **more):
    return load_captions("imagefolder", data_dir=folder, **ALL_IMAGE_FOLDERS, **more)


def test_folder_without_metadata_is_loaded_with_subfolders(tmp_path):
    odd = ["a\nb.png", 'it\'s "quoted".png', "Zürich 東京 🐶.png", "a,b;c.png", "%20.png"]
    folder = bare(tmp_path / "p", "b.png", "a.PNG", "2024/summer/c.png", "2024/a.png", "notes/d.Jpeg", *odd)
    names = sorted(["2024/a.png", "2024/summer/c.png", "a.PNG", "b.png", "notes/d.Jpeg", *odd])
    for ds in (load(folder), load_captions(str(folder), **ALL_IMAGE_FOLDERS)):
        assert ds["image_id"][:] == names
        assert ds["captions"][:] == [[]] * 10
        assert pixels(ds, names.index("2024/summer/c.png")) == of_png(2)
    checked, entries = check_captions(ds, require_captions=False)
    assert (len(checked), entries) == (10, [])
    # Metadata without captions are accepted too.
    assert load(make_folder(tmp_path / "dated", 3, column="date"))["captions"][:] == [[]] * 3


def test_system_files_are_skipped_and_other_files_counted(tmp_path, caplog):
    folder = bare(tmp_path, "a.png", ".b.png", "._a.png", ".trash/c.png", "__MACOSX/d.png", "@eaDir/e.png")
    for name in ("Thumbs.db", "desktop.ini", ".DS_Store", "x.heic", "y.HEIC", "notes.txt", "README"):
        (folder / name).write_bytes(b"x")
    assert load(folder)["image_id"][:] == ["a.png"]
    assert "not used: 2 .heic, " in caplog.text


def test_links_that_leave_the_folder_are_left_out_and_named(tmp_path, caplog):
    folder = bare(tmp_path / "p", "a.png", "sub/b.png")
    outside = bare(tmp_path / "other", "secret.png")
    (folder / "inside.png").symlink_to(folder / "a.png")
    (folder / "again").symlink_to(folder / "sub")
    (folder / "loop").symlink_to(folder)
    (folder / "z.png").symlink_to(outside / "secret.png")
    assert load(folder)["image_id"][:] == ["a.png", "inside.png", "sub/b.png"]
    assert "links that lead out of the folder are not used (1)" in caplog.text
    assert "'z.png'" in caplog.text
    ds = load(folder, image_root=tmp_path)  # the remedy: a folder that holds both
    assert ds["image_id"][:] == ["a.png", "inside.png", "sub/b.png", "z.png"]


def test_folders_named_like_splits_without_metadata(tmp_path):
    folder = bare(tmp_path, *(f"{name}/{n}.png" for name in ("train", "val", "test") for n in range(3)))
    assert len(load(folder)) == 9
    found = load_captions("imagefolder", data_dir=folder, split="test", require_captions=False)
    assert found["image_id"][:] == ["test/0.png", "test/1.png", "test/2.png"]
    bare(folder, "top.png")  # then they are ordinary subfolders
    assert len(load(folder)) == 10


# --- with metadata ---


SPLIT_3 = '{"file_name": "a", "text": "x", "split": "train"}\n{"file_name": "b", "text": "x", "split": 3}\n'
FOLDER = {"data_dir": "."}
ROW = '{"file_name": "a.jpg", "captions": ["x"]}\n'


JSON_LINES = '{"file_name": "a.png", "caption": "x"}\n{"caption": "y", "caption": "z"}\n'


@pytest.mark.parametrize(
    ("name", "files", "arguments", "named"),
    [
        ("imagefolder", {}, {}, "data_dir"),
        ("imagefolder", {"a.jpg": ""}, FOLDER, r"no metadata.jsonl.*no captions of its images \(1\)"),
        ("imagefolder", {"metadata.jsonl": ROW + '{"file_name": "b.j'}, FOLDER, "Line 2"),
        ("imagefolder", {"metadata.jsonl": '{"file_name": "\xff"}'}, FOLDER, "UTF-8"),
        ("imagefolder", {"metadata.jsonl": JSON_LINES}, FOLDER, "Line 2 .*'caption' twice"),
        ("imagefolder", {"metadata.jsonl": ROW, "train/metadata.jsonl": ROW}, FOLDER, "only one can be read"),
        ("imagefolder", {"metadata.jsonl": '{"file_name": "a", "x": "y"}'}, FOLDER, "'captions'.*caption_column"),
        ("imagefolder", {"metadata.jsonl": '{"file_name": "a", "captions": 1}'}, FOLDER, "no text.*caption_column"),
        # An unquoted comma would truncate a caption.
        ("imagefolder", {"metadata.csv": 'file_name,text\n\n0,"a,\nb"\n1,c, d\n'}, FOLDER, "Line 5 .* 3 fields"),
        # The next quote would close it and join two rows.
        ("imagefolder", {"metadata.csv": 'file_name,text\na,"a\nb,"c"\nd,y\n'}, FOLDER, "begins in line 2 .*quote"),
        ("gone.parquet", {}, {}, "not a file"),
        ("owner/missing", {}, {}, "could not be loaded"),
        ("d.json", {"d.json": json.dumps(karpathy(n1={"split": "holdout"}))}, {"image_root": "."}, "'holdout'"),
        ("d.json", {"d.json": '{"images": [{"file_name": "a.jpg"}]}'}, {"image_root": "."}, "`sentences`"),
        ("d.json", {"d.json": "[" * 100_000}, {}, "not valid JSON"),
        ("imagefolder", {"metadata.csv": "\xff\xfea\0,\0b\0"}, FOLDER, "metadata.csv is UTF-16"),
        ("imagefolder", {"metadata.jsonl": "{\0}\0"}, FOLDER, "metadata.jsonl is UTF-16"),
        ("imagefolder", {"metadata.jsonl": SPLIT_3}, FOLDER, "split 3"),
    ],
    ids=itertools.count(),
)
def test_bad_sources_are_refused(tmp_path, monkeypatch, name, files, arguments, named):
    monkeypatch.chdir(tmp_path)
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content.encode("latin-1"))
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        load_captions(name, **arguments)


# --- ids ---


def test_rows_of_one_image_are_joined(tmp_path, caplog):
    make_folder(tmp_path, 2)
    rows = [{"file_name": f"{n % 2}.png", "caption": f"caption {n}"} for n in range(6)]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ds = load_captions("imagefolder", data_dir=tmp_path, split_fractions=ALL)
    assert ds["image_id"][:] == ["0.png", "1.png"]
    assert ds["captions"][:] == [["caption 0", "caption 2", "caption 4"], ["caption 1", "caption 3", "caption 5"]]
    assert "rows that repeat an image: 4" in caplog.text
    folder = make_folder(tmp_path / "other", 4, rows={n: {"image_id": "same" if n > 1 else n} for n in range(4)})
    with pytest.raises(ValueError, match=r"image_id 'same' .* different images in rows 2 and 3.*image_id_column"):
        load_captions("imagefolder", data_dir=folder)


def test_ids_are_strings_and_never_missing(tmp_path):
    folder = make_folder(tmp_path, 4, rows={0: {"image_id": 7}, 1: {"image_id": 2.5}, 2: {"image_id": ""}})
    ds = load_captions("imagefolder", data_dir=folder, split_fractions=ALL)
    assert ds.features["image_id"] == datasets.Value("string")
    assert ds["image_id"][2:] == ["train-000002", "train-000003"]
    table = datasets.Dataset.from_dict({"image": ["a", "b"], "text": ["x", "y"], "image_id": [7.0, None]})
    table.to_parquet(tmp_path / "t.parquet")
    assert load_captions(str(tmp_path / "t.parquet"), split_fractions=ALL)["image_id"][:] == ["7", "train-000001"]


def test_equal_ids_in_different_splits_become_unique(tmp_path, caplog):
    for name, first in (("train", 0), ("validation", 3)):
        folder = make_folder(tmp_path / name, 3, rows={n: {"image_id": n} for n in range(3)})
        for n in range(3):
            (folder / f"{n}.png").write_bytes(png(first + n))
    make_folder(tmp_path / "test", 1, rows={0: {"image_id": 99}})
    splits = load_caption_splits("imagefolder", data_dir=tmp_path)
    assert splits["train"]["image_id"][:] == ["train/0", "train/1", "train/2"]
    assert splits["validation"]["image_id"][:] == ["validation/0", "validation/1", "validation/2"]
    assert "use the same ids for different images" in caplog.text


# --- splits ---


def test_hash_split_is_exact_stable_and_independent_of_order(tmp_path):
    ds = embedded(200)
    shares = {"train": 0.8, "validation": 0.15, "test": 0.05}
    parts = hash_split(ds, shares)
    assert {name: len(part) for name, part in parts.items()} == {"train": 160, "validation": 30, "test": 10}
    ids = {name: set(part["image_id"]) for name, part in parts.items()}
    assert set.union(*ids.values()) == set(ds["image_id"])
    shuffled = hash_split(ds.shuffle(seed=3), shares)
    assert {name: set(part["image_id"]) for name, part in shuffled.items()} == ids
    assert {name: set(part["image_id"]) for name, part in hash_split(ds, shares, seed=1).items()} != ids
    # The same on every machine.
    assert sorted(ids["test"]) == [f"id-{n}" for n in (100, 121, 126, 131, 172, 36, 49, 52, 6, 75)]


def test_concepts_of_a_column_and_of_folders_stay_in_one_split(tmp_path, caplog):
    names = [f"sku{n // 4}/{n % 4}.png" for n in range(40)]
    folders = load(bare(tmp_path / "shop", *names, "alone.png", "alone too.png"), concept_column="folder")
    rows = [{"sku": n // 4, "image_id": str(n)} for n in range(40)]
    table = datasets.Dataset.from_list(
        [row | {"image": {"bytes": png(n)}, "captions": ["a"]} for n, row in enumerate(rows)]
    )
    data = load_captions(table, concept_column="sku")
    assert concept_column(data) == [n // 4 for n in range(40)]
    assert concept_column(load_captions(table)) is None
    assert concept_column(folders) == [0, 1, *(2 + n // 4 for n in range(40))], "images outside a folder are concepts"
    parts = hash_split(data, {"train": 0.7, "validation": 0.1, "test": 0.2})
    skus = {name: set(part["sku"]) for name, part in parts.items()}
    assert sorted(len(part) for part in parts.values()) == [4, 8, 28]
    assert sum(map(len, skus.values())) == len(set.union(*skus.values())) == 10
    with pytest.raises(ValueError, match="concept_column"):
        load_captions(table, concept_column="SKU")
    # Of few and large concepts, train keeps one, and a part ends at the nearer end of a concept.
    shares = {"train": 0.8, "validation": 0.1, "test": 0.1}
    for number, sizes in ((2, [20, 20]), (4, [10, 10, 20])):
        few = table.add_column("concept", [n * number // 40 for n in range(40)])
        assert sorted(map(len, hash_split(load_captions(few), shares).values())) == sizes


def test_small_sets_get_an_image_in_every_split():
    shares = {"train": 0.8, "validation": 0.1, "test": 0.1}
    sizes = [{n: len(p) for n, p in hash_split(embedded(count), shares).items()} for count in (1, 2, 4)]
    assert sizes == [{"train": 1}, {"train": 1, "test": 1}, {"train": 2, "validation": 1, "test": 1}]
    parts = hash_split(
        embedded(11), {"train": 0.0, "validation": 0.5, "test": 0.5}
    )  # a part without a share gets no image
    assert sorted(map(len, parts.values())) == [5, 6]


def test_only_missing_splits_are_divided_off_train(tmp_path):
    for name, count in (("train", 20), ("test", 5)):
        make_folder(tmp_path / name, count, rows={n: {"image_id": f"{name}{n}"} for n in range(count)})
    splits = load_caption_splits("imagefolder", data_dir=tmp_path)
    assert {name: len(ds) for name, ds in splits.items()} == {"train": 18, "validation": 2, "test": 5}
    assert {name: str(ds.split) for name, ds in splits.items()} == {name: name for name in splits}


@pytest.fixture
def plain(tmp_path):
    """20 images without splits."""
    return {"dataset_name": "imagefolder", "data_dir": make_folder(tmp_path / "photos", 20)}


@pytest.fixture
def named(tmp_path):
    """10 train, 4 validation, 6 test."""
    names = ["train"] * 10 + ["val"] * 4 + ["test"] * 6
    return {
        "dataset_name": "imagefolder",
        "data_dir": make_folder(tmp_path / "named", 20, rows={n: {"split": s} for n, s in enumerate(names)}),
    }


def test_all_and_joined_splits(named, plain):
    whole = load_captions(split="all", **named)
    assert len(whole) == 20
    joined = load_captions(split="val+test", **named)
    assert joined["image_id"][:] == [f"{n}.png" for n in range(10, 20)]
    assert str(joined.split) == "validation+test"
    assert joined[0]["captions"][0] == "caption a of picture 10"
    assert len(load_captions(split="all", **plain)) == 20
    parts = [set(load_captions(split=name, **plain)["image_id"]) for name in ("train", "validation", "test")]
    assert list(map(len, parts)) == [16, 2, 2]
    assert set(load_captions(split="validation+test", **plain)["image_id"]) == parts[1] | parts[2]


def test_data_without_splits_default_to_all_images(plain, tmp_path, caplog):
    found = choose_split(plain["dataset_name"], None, data_dir=plain["data_dir"])
    assert (len(found.dataset), found.split, found.sizes) == (20, "all", {"all": 20})
    assert caplog.text == ""
    test = choose_split(plain["dataset_name"], "test", data_dir=plain["data_dir"])
    assert "divided by the hash of image_id (seed 0) into 16 train (0.8), 2 validation (0.1), 2 test" in caplog.text
    # The images that training holds out.
    assert set(test.dataset["image_id"]) == set(load_captions(split="test", **plain)["image_id"])
    assert test.split == "test"
    embedded(12).save_to_disk(tmp_path / "disk")
    assert choose_split(str(tmp_path / "disk"), None).split == "all"


def test_data_with_splits_default_to_test(named, tmp_path):
    found = choose_split(named["dataset_name"], None, data_dir=named["data_dir"])
    assert (found.split, found.sizes) == ("test", {"train": 10, "validation": 4, "test": 6})
    assert found.dataset["image_id"][:] == [f"{n}.png" for n in range(14, 20)]
    folder = make_folder(tmp_path / "two", 20, rows={n: {"split": "train" if n < 15 else "val"} for n in range(20)})
    assert len(choose_split("imagefolder", "train", data_dir=folder).dataset) == 15
    with pytest.raises(ValueError, match=r"has the splits {'train': 15, 'validation': 5} and no 'test'. Set split"):
        choose_split("imagefolder", None, data_dir=folder)
    assert len(choose_split("imagefolder", "test", data_dir=folder).dataset) == 2


def test_joined_splits_contain_a_shared_image_once(tmp_path, caplog):
    one, other = embedded(4), embedded(6, captions_of=lambda n: [f"other {n}"]).select([3, 4, 5])
    datasets.DatasetDict({"train": one, "test": other}).save_to_disk(tmp_path / "d")
    found = load_captions(str(tmp_path / "d"), split="all")
    assert found["image_id"][:] == [f"id-{n}" for n in range(6)]
    assert found["captions"][3] == [*one["captions"][3], "other 3"]
    assert "rows that repeat an image: 1" in caplog.text


def test_columns_that_differ_between_splits_are_dropped(tmp_path):
    for name, note in (("train", 5), ("test", "text")):
        make_folder(tmp_path / name, 2, rows={n: {"note": note, "same": n} for n in range(2)})
    found = load_captions("imagefolder", data_dir=tmp_path, split="all")
    assert found["same"][:] == [0, 1, 0, 1]
    assert "note" not in found.column_names


def test_split_column_of_a_table_is_used(tmp_path):
    """Flickr30k on the Hub: one table called test, with a column of split names."""
    names = ["train", "val", "test", "train"]
    table = embedded(4).add_column("split", names)
    datasets.DatasetDict({"test": table}).save_to_disk(tmp_path / "d")
    table.to_parquet(tmp_path / "t.parquet")
    for name in ("d", "t.parquet"):
        found = choose_split(str(tmp_path / name), None)
        assert (found.split, found.sizes) == ("test", {"train": 2, "validation": 1, "test": 1})
        assert found.dataset["image_id"][:] == ["id-2"]
    # A column with another meaning.
    embedded(4).add_column("split", ["a", "train", "b", "c"]).to_parquet(tmp_path / "t.parquet")
    assert len(choose_split(str(tmp_path / "t.parquet"), None).dataset) == 4
