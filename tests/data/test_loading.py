"""Every source is converted to the same columns, or refused with the remedy."""

import csv
import functools
import json

import datasets
import pytest
from PIL import Image

import hf_captionrl.scenes
from hf_captionrl.data import check_captions, exchange_captions, load_caption_splits, load_captions, open_image
from hf_captionrl.data.columns import undecoded
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


@pytest.mark.parametrize("column", ["caption", "text", "sentences"])
def test_caption_column_is_found_and_may_be_a_string(tmp_path, column):
    folder = make_folder(tmp_path, 3, column=column, rows={1: {column: "just  one"}, 2: {column: [{"raw": "two"}]}})
    ds = load_captions("imagefolder", data_dir=folder, split_fractions=ALL)
    assert ds["captions"][:] == [captions(0), ["just one"], ["two"]]
    assert column not in ds.column_names


def test_csv_and_parquet_metadata(tmp_path):
    folder = make_folder(tmp_path / "a", 3)
    with (folder / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["file_name", "text"], ["0.png", 'a "b", c'], ["2.png", "d"]])
    (folder / "metadata.jsonl").unlink()
    ds = load_captions("imagefolder", data_dir=folder, split_fractions=ALL)
    assert ds["captions"][:] == [['a "b", c'], ["d"]]
    (folder / "metadata.csv").unlink()
    datasets.Dataset.from_dict({"file_name": ["1.png"], "caption": [["x", "y"]]}).to_parquet(
        folder / "metadata.parquet"
    )
    ds = load_captions("imagefolder", data_dir=folder, split_fractions=ALL)
    assert ds["captions"][:] == [["x", "y"]]
    assert pixels(ds, 0) == of_png(1)


@pytest.mark.parametrize(
    ("line", "number"), [("1.png,a dog, running\n", 5), ("1.png\n", 5), ('1.png,"a\ndog",3\n', 6)]
)
def test_a_csv_row_of_another_length_is_refused(tmp_path, line, number):
    """An unquoted comma would truncate a caption, and a missing field would be an empty caption."""
    folder = make_folder(tmp_path / "a", 2)
    (folder / "metadata.jsonl").unlink()
    (folder / "metadata.csv").write_text('file_name,caption\n\n0.png,"a cat,\nasleep"\n' + line)
    with pytest.raises(
        ValueError, match=rf"^Line {number} of .*metadata.csv has [13] fields.* (into quotes|for each empty field)"
    ):
        load_captions("imagefolder", data_dir=folder)


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
    good, report = check_captions(ds, max_bad_fraction=0.5)
    assert report.counts() == {"caption_missing": 2, "image_missing": 2, "caption_not_text": 1, "image_not_found": 1}
    assert report.counts("caption") == {"caption_not_text": 3}
    assert len(good) == 14
    assert good["captions"][1] == ["good"]


def test_error_for_missing_columns_names_the_columns_and_the_argument(tmp_path):
    folder = make_folder(tmp_path, 3, column="beschreibung")
    with pytest.raises(ValueError, match=r"no column 'captions'.*\['beschreibung', 'file_name'\].*Set caption_column"):
        load_captions("imagefolder", data_dir=folder)
    ds = load_captions("imagefolder", data_dir=folder, caption_column="beschreibung", split_fractions=ALL)
    assert ds[0]["captions"] == captions(0)
    with pytest.raises(ValueError, match=r"no column 'photo'.*Set image_column"):
        load_captions("imagefolder", data_dir=folder, image_column="photo", caption_column="beschreibung")
    with pytest.raises(ValueError, match=r"no column 'nr'.*Set image_id_column"):
        load_captions("imagefolder", data_dir=folder, image_id_column="nr", caption_column="beschreibung")
    make_folder(tmp_path, 3, column="text", rows={1: {"caption": "x"}})
    with pytest.raises(ValueError, match=r"caption_column could be any of \['caption', 'text'\]"):
        load_captions("imagefolder", data_dir=folder)
    make_folder(tmp_path, 3, column="captions", rows={n: {"captions": n} for n in range(3)})
    with pytest.raises(ValueError, match=r"no text; the columns.*Set caption_column"):
        load_captions("imagefolder", data_dir=folder)


def test_bad_folders_and_files(tmp_path):
    with pytest.raises(ValueError, match="Set data_dir"):
        load_captions("imagefolder")
    with pytest.raises(FileNotFoundError, match=r"data_dir.*not a folder"):
        load_captions("imagefolder", data_dir=tmp_path / "nowhere")
    (tmp_path / "a.jpg").touch()
    with pytest.raises(ValueError, match=r"has no metadata.jsonl.*\['a.jpg'\].*\"file_name\""):
        load_captions("imagefolder", data_dir=tmp_path)
    metadata = tmp_path / "metadata.jsonl"
    metadata.write_text('{"file_name": "a.jpg", "captions": ["x"]}\n{"file_name": "b.j')
    with pytest.raises(ValueError, match=r"Line 2 of .*metadata.jsonl is not valid JSON"):
        load_captions("imagefolder", data_dir=tmp_path)
    metadata.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"Line 1 .* holds a list"):
        load_captions("imagefolder", data_dir=tmp_path)
    metadata.write_text("\n")
    with pytest.raises(ValueError, match="holds no rows"):
        load_captions("imagefolder", data_dir=tmp_path)
    metadata.write_bytes(b'{"file_name": "\xff"}')
    with pytest.raises(ValueError, match="is not UTF-8"):
        load_captions("imagefolder", data_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match="image_root"):
        load_captions("imagefolder", data_dir=tmp_path, image_root=tmp_path / "no")
    with pytest.raises(FileNotFoundError, match="not a file"):
        load_captions(str(tmp_path / "gone.parquet"))


# --- Karpathy ---


def karpathy(count=8, **changes):
    names = ["train", "restval", "val", "test"]
    images = [
        {
            "filepath": "val2014",
            "filename": f"{number}.png",
            "imgid": number,
            "cocoid": 1000 + number,
            "split": names[number % 4],
            "sentids": [1],
            "sentences": [{"raw": text, "tokens": text.split(), "sentid": 1} for text in captions(number)],
        }
        for number in range(count)
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


def test_karpathy_without_filepath_and_cocoid_as_flickr30k(tmp_path):
    content = karpathy()
    for image in content["images"]:
        del image["filepath"], image["cocoid"]
    path = tmp_path / "dataset_flickr30k.json"
    path.write_text(json.dumps(content))
    make_folder(tmp_path / "images", 8)
    ds = load_captions(str(path), image_root=tmp_path / "images", split="test")
    assert ds["image_id"][:] == ["3", "7"]
    assert pixels(ds, 1) == of_png(7)


def test_karpathy_refusals(tmp_path):
    path = tmp_path / "d.json"
    path.write_text(json.dumps(karpathy()))
    with pytest.raises(ValueError, match="Set image_root"):
        load_captions(str(path))
    path.write_text(json.dumps(karpathy(n1={"split": "holdout"})))
    with pytest.raises(ValueError, match=r"splits \['holdout'\]"):
        load_captions(str(path), image_root=tmp_path)
    path.write_text(json.dumps({"images": [{"file_name": "a.jpg", "id": 1}], "annotations": []}))
    with pytest.raises(ValueError, match="no entry of `images` has `sentences`"):
        load_captions(str(path), image_root=tmp_path)
    path.write_text(json.dumps({"info": {}, "data": []}))
    with pytest.raises(ValueError, match=r"keys \['data', 'info'\]"):
        load_captions(str(path), image_root=tmp_path)
    path.write_text("{broken")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_captions(str(path), image_root=tmp_path)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="not valid JSON"):
        load_captions(str(path), image_root=tmp_path)
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="list of objects"):
        load_captions(str(path), image_root=tmp_path)


# --- tables ---


@pytest.mark.parametrize("kind", ["jsonl", "json", "lines.json", "csv"])
def test_files_with_paths(tmp_path, kind):
    make_folder(tmp_path / "pictures", 4)
    rows = [{"image": f"{n}.png", "caption": f"picture {n}", "nr": n} for n in range(4)]
    path = tmp_path / f"table.{kind}"
    if kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ds = load_captions(str(path), image_root=tmp_path / "pictures", image_id_column="nr", split_fractions=ALL)
    assert_shape(ds)
    assert ds["image_id"][:] == ["0", "1", "2", "3"]
    assert ds["captions"][2] == ["picture 2"]
    assert pixels(ds, 2) == of_png(2)


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
    numbers = datasets.Dataset.from_dict({"image": [1, 2], "captions": [["a"], ["b"]]})
    numbers.to_parquet(tmp_path / "numbers.parquet")
    with pytest.raises(ValueError, match=r"not images, paths or bytes.*Set image_column"):
        load_captions(str(tmp_path / "numbers.parquet"))


def test_columns_with_reserved_names_are_dropped(tmp_path):
    ds = datasets.Dataset.from_dict(
        {"image": ["thumb"], "photo": [png(3)], "captions": [["old"]], "text": ["new"], "image_id": [7], "id": ["x"]}
    )
    ds.to_parquet(tmp_path / "a.parquet")
    loaded = load_captions(
        str(tmp_path / "a.parquet"),
        image_column="photo",
        caption_column="text",
        image_id_column="id",
        split_fractions=ALL,
    )
    assert loaded.column_names == ["image", "image_id", "captions"]
    assert (loaded[0]["image_id"], loaded[0]["captions"]) == ("x", ["new"])
    assert pixels(loaded, 0) == of_png(3)
    default = load_captions(str(tmp_path / "a.parquet"), image_column="photo", split_fractions=ALL)
    assert (default[0]["image_id"], default[0]["captions"]) == ("7", ["old"])


def test_id_column_called_image(tmp_path):
    rows = [{"file": f"{n}.png", "image": f"id {n}", "caption": "a"} for n in range(2)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ds = load_captions(str(tmp_path / "r.jsonl"), image_column="file", image_id_column="image", split_fractions=ALL)
    assert_shape(ds)
    assert ds["image_id"][:] == ["id 0", "id 1"]


def test_file_name_is_not_a_pattern(tmp_path):
    for name in ("run[1].parquet", "run1.parquet"):
        table = datasets.Dataset.from_dict({"image": ["a.png"], "caption": [name], "image_id": ["1"]})
        table.to_parquet(str(tmp_path / name))
    ds = load_captions(str(tmp_path / "run[1].parquet"), split_fractions=ALL)
    assert ds["captions"][:] == [["run[1].parquet"]]
    found = exchange_captions(ds, tmp_path / "run[1].parquet", column="caption")
    assert found["captions"][:] == [["run[1].parquet"]]


def test_unknown_hub_data_set_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'nobody/nothing' could not be loaded.*'imagefolder' with data_dir"):
        load_captions("nobody/nothing")


def test_code_of_a_data_set_is_never_run(tmp_path):
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    with pytest.raises(ValueError, match="could not be loaded"):
        load_captions(str(folder))
    assert not (tmp_path / "ran").exists()


def test_detailed_captions_of_the_scenes(monkeypatch):
    small = functools.partial(hf_captionrl.scenes.load_scenes, num_train=4, num_validation=3, num_test=0)
    monkeypatch.setattr(hf_captionrl.scenes, "load_scenes", small)
    plain, full = load_caption_splits("scenes"), load_caption_splits("scenes", caption_column="full_caption")
    for name in ("train", "validation", "test"):
        assert full[name]["captions"] == [[text] for text in plain[name]["full_caption"]]
        assert full[name].features == plain[name].features
        assert full[name]["image_id"] == plain[name]["image_id"]
    with pytest.raises(ValueError, match="caption_column is 'caption'"):
        load_caption_splits("scenes", caption_column="caption")


def test_domains_of_the_scenes_are_configurations(monkeypatch):
    small = functools.partial(hf_captionrl.scenes.load_scenes, num_train=4, num_validation=3, num_test=0)
    monkeypatch.setattr(hf_captionrl.scenes, "load_scenes", small)
    plain, other, shapes = (
        load_caption_splits("scenes", dataset_config=name)["train"] for name in (None, "alt_text", "shapes")
    )
    assert plain["image_id"] == other["image_id"]
    assert plain[0]["image"].tobytes() == other[0]["image"].tobytes()
    assert plain["captions"] != other["captions"]
    assert other["captions"] == small(annotators="alt_text")["train"]["captions"]
    assert shapes["captions"] == small("shapes")["train"]["captions"]
    with pytest.raises(
        ValueError, match=r"dataset_config is 'shape', but 'scenes' has \['alt_text', 'captions', 'shapes'\]"
    ):
        load_caption_splits("scenes", dataset_config="shape")
    with pytest.raises(ValueError, match="'moving_scenes' has only captions"):
        load_caption_splits("moving_scenes", dataset_config="shapes", num_frames=4)


def test_scenes_are_the_default_data(monkeypatch):
    small = functools.partial(hf_captionrl.scenes.load_scenes, num_train=20, num_validation=3, num_test=15)
    monkeypatch.setattr(hf_captionrl.scenes, "load_scenes", small)
    splits = load_caption_splits()
    assert {name: len(ds) for name, ds in splits.items()} == {"train": 20, "validation": 3, "test": 15}
    for ds in splits.values():
        assert_shape(ds)
        assert {"full_caption", "facts", "bag_id"} <= set(ds.column_names)
    good, report = check_captions(splits)
    assert report.entries == ()
    assert good["test"]["captions"][:] == splits["test"]["captions"][:]
    assert load_captions(split=None).keys() == splits.keys()
    assert load_captions(split="validation")["image_id"][:] == splits["validation"]["image_id"][:]


@pytest.mark.parametrize("fractions", [(0.0, 0.5, 0.5), (0.0, 0.0, 1.0)])
def test_train_with_a_share_of_0_is_empty(tmp_path, fractions):
    splits = load_caption_splits("imagefolder", data_dir=make_folder(tmp_path, 10), split_fractions=fractions)
    assert "train" not in splits
    ids = [image_id for split in splits.values() for image_id in split["image_id"][:]]
    assert len(ids) == len(set(ids)) == 10
