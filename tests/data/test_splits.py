"""Unique ids, disjoint splits, and missing splits that are the same on every machine."""

import json
import logging
import shutil

import datasets
import pytest

from hf_captionrl.data import choose_split, load_caption_splits, load_captions
from hf_captionrl.data.columns import replace_column, with_split
from hf_captionrl.data.loading import hash_split, parse_split
from tests.data.photos import embedded, make_folder, png

ALL = (1, 0, 0)  # no split is divided off train


# --- ids ---


def test_rows_of_one_image_are_joined(tmp_path, caplog):
    make_folder(tmp_path, 2)
    rows = [{"file_name": f"{n % 2}.png", "caption": f"caption {n}"} for n in range(6)]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level(logging.WARNING):
        ds = load_captions("imagefolder", data_dir=tmp_path, split_fractions=ALL)
    assert ds["image_id"][:] == ["0.png", "1.png"]
    assert ds["captions"][:] == [["caption 0", "caption 2", "caption 4"], ["caption 1", "caption 3", "caption 5"]]
    assert "4 rows repeat an image" in caplog.text


def test_one_id_for_two_images_is_an_error(tmp_path):
    folder = make_folder(tmp_path, 4, rows={n: {"image_id": "same" if n > 1 else n} for n in range(4)})
    with pytest.raises(
        ValueError, match=r"image_id 'same' is used for different images in rows 2 and 3.*image_id_column"
    ):
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


def test_same_image_in_two_splits_is_reported(tmp_path, caplog):
    splits = datasets.DatasetDict({"train": embedded(5), "test": embedded(2), "validation": embedded(6).select([5])})
    splits.save_to_disk(tmp_path / "d")
    loaded = load_caption_splits(str(tmp_path / "d"))
    assert loaded["test"]["image_id"][:] == ["id-0", "id-1"]
    assert "2 images are in train and in test" in caplog.text


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
    # With ten images fewer, only images near the boundaries move.
    fewer = hash_split(ds.select(range(190)), shares)
    assert sum(len(set(fewer[name]["image_id"]) - ids[name]) for name in fewer) <= 4
    # The same on every machine.
    assert sorted(ids["test"]) == [f"id-{n}" for n in (100, 121, 126, 131, 172, 36, 49, 52, 6, 75)]


def test_small_sets_get_an_image_in_every_split():
    shares = {"train": 0.8, "validation": 0.1, "test": 0.1}
    sizes = [{n: len(p) for n, p in hash_split(embedded(count), shares).items()} for count in (1, 2, 3, 4)]
    assert sizes[0] == {"train": 1}
    assert sizes[1] == {"train": 1, "test": 1}
    assert sizes[2] == {"train": 1, "validation": 1, "test": 1}
    assert sizes[3] == {"train": 2, "validation": 1, "test": 1}
    with pytest.raises(ValueError, match=r"add up to 1"):
        hash_split(embedded(3), {"train": 0.9, "test": 0.2})


@pytest.mark.parametrize("number", [1, 9, 10, 11])
def test_a_part_without_a_share_gets_no_image(number):
    parts = hash_split(embedded(number), {"train": 0.0, "validation": 0.5, "test": 0.5})
    assert "train" not in parts
    assert sum(map(len, parts.values())) == number
    assert max(map(len, parts.values())) - min(map(len, parts.values())) <= 1


@pytest.mark.parametrize("fractions", [(0.8, 0.3, 0.1), (0.5, 0.1, 0.1), (1.1, -0.1, 0.0)])
def test_fractions_are_checked_whichever_split_is_missing(tmp_path, fractions):
    for name in ("train", "validation"):
        make_folder(tmp_path / name, 5, rows={n: {"image_id": f"{name}{n}"} for n in range(5)})
    if fractions[2] == 0:
        (tmp_path / "validation").rename(tmp_path / "test")
    with pytest.raises(ValueError, match=r"add up to 1\. Correct split_fractions"):
        load_caption_splits("imagefolder", data_dir=tmp_path, split_fractions=fractions)


def test_only_missing_splits_are_divided_off_train(tmp_path):
    for name, count in (("train", 20), ("test", 5)):
        make_folder(tmp_path / name, count, rows={n: {"image_id": f"{name}{n}"} for n in range(count)})
    splits = load_caption_splits("imagefolder", data_dir=tmp_path)
    assert {name: len(ds) for name, ds in splits.items()} == {"train": 18, "validation": 2, "test": 5}
    assert {name: str(ds.split) for name, ds in splits.items()} == {name: name for name in splits}
    shutil.rmtree(tmp_path / "train")
    only = load_caption_splits("imagefolder", data_dir=tmp_path)
    assert list(only) == ["test"]
    with pytest.raises(ValueError, match=r"no split 'train'; it has \['test'\]"):
        load_captions("imagefolder", data_dir=tmp_path)


def test_split_column_is_used(tmp_path):
    folder = make_folder(tmp_path, 6, rows={n: {"split": ["train", "val", "test"][n % 3]} for n in range(6)})
    splits = load_caption_splits("imagefolder", data_dir=folder)
    assert {name: len(ds) for name, ds in splits.items()} == {"train": 2, "validation": 2, "test": 2}


@pytest.mark.parametrize("odd", ["held out", None, 3])
def test_one_split_name_that_is_not_known_is_refused(tmp_path, odd):
    folder = make_folder(tmp_path, 4, rows={n: {"split": odd if n == 2 else "train"} for n in range(4)})
    with pytest.raises(ValueError, match=rf"row 3 \(the first is 1\) has the split {odd!r}; other rows name one of"):
        load_caption_splits("imagefolder", data_dir=folder)
    # If no value is known, the column has another meaning.
    folder = make_folder(tmp_path, 4, rows={n: {"split": odd} for n in range(4)})
    assert len(load_captions("imagefolder", data_dir=folder, split_fractions=ALL)) == 4


# --- columns ---


@pytest.mark.parametrize("name", ["image_id", "number"])
def test_replace_column_of_data_on_disk_that_lost_another_column(name, tmp_path):
    datasets.Dataset.from_dict({"number": [1, 2, 3]}).save_to_disk(tmp_path / "d")
    rows = datasets.load_from_disk(tmp_path / "d").add_column("text", ["a", "b", "c"]).remove_columns("text")
    out = replace_column(rows, name, [7, 8, 9], datasets.Value("int64"))
    assert out[name][:] == [7, 8, 9]
    assert out["number"][:] == ([7, 8, 9] if name == "number" else [1, 2, 3])


def test_replace_column_of_a_selection():
    ds = embedded(10).select([7, 2, 2, 5])
    out = replace_column(ds, "captions", [["a"], ["b"], ["d"], ["c"]], datasets.List(datasets.Value("string")))
    assert out["captions"][:] == [["a"], ["b"], ["d"], ["c"]]  # a row that occurs twice may get two values
    assert out["image_id"][:] == ["id-7", "id-2", "id-2", "id-5"]
    assert out.select([3])[0]["captions"] == ["c"]
    assert out["image"][1] == ds["image"][1]
    few = replace_column(embedded(10).select([7, 2]), "captions", [["a"], ["b"]], out.features["captions"])
    assert few.data.num_rows == 10  # otherwise nothing is copied
    assert out.data.nbytes < 2 * ds.data.nbytes
    with pytest.raises(ValueError, match="3 values for 4 rows"):
        replace_column(ds, "captions", [["a"]] * 3, datasets.List(datasets.Value("string")))


def test_equal_data_have_equal_fingerprints():
    """`map` looks for its cached results under them."""
    ds, texts = embedded(4), ["a", "b", "c", "d"]

    def fingerprint(ds=ds, name="note", values=texts, kind="string"):
        return replace_column(ds, name, values, datasets.Value(kind))._fingerprint

    assert fingerprint() == fingerprint(embedded(4)) != ds._fingerprint
    others = {
        fingerprint(ds.select([0, 1, 3, 2])),
        fingerprint(name="image_id"),
        fingerprint(values=["a", "b", "c", "e"]),
        fingerprint(kind="large_string"),
        with_split(ds, "note")._fingerprint,
        with_split(ds, "test")._fingerprint,
    }
    assert len(others - {fingerprint(), ds._fingerprint}) == 6
    assert with_split(embedded(4), "test")._fingerprint in others


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


def test_names_of_splits():
    assert parse_split("all") == ()
    assert parse_split("test") == ("test",)
    assert parse_split("val + test") == ("validation", "test")
    assert parse_split("dev+training") == ("validation", "train")
    assert parse_split("restval") == ("restval",)
    for bad in ("", "+", "test+", "test++train"):
        with pytest.raises(ValueError, match="has an empty name"):
            parse_split(bad)
    for bad in ("test+test", "val+validation", "all+test"):
        with pytest.raises(ValueError, match="has images twice"):
            parse_split(bad)


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
    with pytest.raises(ValueError, match=r"no split 'nowhere'; it has \['train', 'validation', 'test'\]"):
        load_captions(split="test+nowhere", **named)


def test_split_names_of_the_scenes_are_parsed_like_others(monkeypatch):
    import functools

    import hf_captionrl.scenes

    small = functools.partial(hf_captionrl.scenes.load_scenes, num_train=4, num_validation=3)
    monkeypatch.setattr(hf_captionrl.scenes, "load_scenes", lambda **more: small(**{"num_test": 5, **more}))
    assert len(choose_split("scenes", None).dataset) == 5
    assert len(choose_split("scenes", "all").dataset) == 12
    assert len(choose_split("scenes", "train+val").dataset) == 7
    with pytest.raises(ValueError, match="no split 'nowhere'"):
        choose_split("scenes", "nowhere")


def test_data_without_splits_default_to_all_images(plain, caplog):
    with caplog.at_level(logging.WARNING):
        found = choose_split(plain["dataset_name"], None, data_dir=plain["data_dir"])
    assert (len(found.dataset), found.split, found.sizes) == (20, "all", {"all": 20})
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        test = choose_split(plain["dataset_name"], "test", data_dir=plain["data_dir"])
    assert (
        "its 20 images are divided by the hash of image_id (seed 0) into 16 train (0.8), 2 validation (0.1), 2 test"
        in (caplog.text)
    )
    # The images that training holds out.
    assert set(test.dataset["image_id"]) == set(load_captions(split="test", **plain)["image_id"])
    assert test.split == "test"
    other = choose_split("imagefolder", "test", data_dir=plain["data_dir"], split_fractions=(0.5, 0.1, 0.4), seed=3)
    assert len(other.dataset) == 8


def test_data_with_splits_default_to_test(named, tmp_path):
    found = choose_split(named["dataset_name"], None, data_dir=named["data_dir"])
    assert (found.split, found.sizes) == ("test", {"train": 10, "validation": 4, "test": 6})
    assert found.dataset["image_id"][:] == [f"{n}.png" for n in range(14, 20)]
    # A named train split is undivided unless a missing split is requested.
    folder = make_folder(tmp_path / "two", 20, rows={n: {"split": "train" if n < 15 else "val"} for n in range(20)})
    assert len(choose_split("imagefolder", "train", data_dir=folder).dataset) == 15
    with pytest.raises(ValueError, match=r"has the splits {'train': 15, 'validation': 5} and no 'test'. Set split"):
        choose_split("imagefolder", None, data_dir=folder)
    assert len(choose_split("imagefolder", "test", data_dir=folder).dataset) == 2


@pytest.mark.parametrize("kind", ["parquet", "disk", "jsonl"])
def test_files_and_saved_data_without_splits_default_to_all_images(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        embedded(12).to_parquet(path)
    elif kind == "disk":
        embedded(12).save_to_disk(path)
    else:
        make_folder(tmp_path, 12)
        path.write_text((tmp_path / "metadata.jsonl").read_text())
    found = choose_split(str(path), None)
    assert (len(found.dataset), found.split) == (12, "all")


def test_single_split_is_not_divided(tmp_path):
    datasets.DatasetDict({"train": embedded(12)}).save_to_disk(tmp_path / "d")
    assert len(choose_split(str(tmp_path / "d"), None).dataset) == 12
    assert len(load_captions(str(tmp_path / "d"))) == 10  # to train on, a tenth each is held out


def test_the_division_for_training_is_logged_with_its_shares(plain, caplog):
    with caplog.at_level(logging.WARNING):
        load_captions(split="train", split_fractions=(0.7, 0.2, 0.1), seed=4, **plain)
    assert "has no split validation and test: its 20 images" in caplog.text
    assert "(seed 4) into 14 train (0.7), 4 validation (0.2), 2 test (0.1)" in caplog.text


def test_joined_splits_contain_a_shared_image_once(tmp_path, caplog):
    one, other = embedded(4), embedded(6, captions_of=lambda n: [f"other {n}"]).select([3, 4, 5])
    datasets.DatasetDict({"train": one, "test": other}).save_to_disk(tmp_path / "d")
    with caplog.at_level(logging.WARNING):
        found = load_captions(str(tmp_path / "d"), split="all")
    assert found["image_id"][:] == [f"id-{n}" for n in range(6)]
    assert found["captions"][3] == [*one["captions"][3], "other 3"]
    assert "1 rows repeat an image" in caplog.text


def test_columns_that_differ_between_splits_are_dropped(tmp_path, caplog):
    for name, note in (("train", 5), ("test", "text")):
        make_folder(tmp_path / name, 2, rows={n: {"note": note, "same": n} for n in range(2)})
    with caplog.at_level(logging.WARNING):
        found = load_captions("imagefolder", data_dir=tmp_path, split="all")
    assert found["same"][:] == [0, 1, 0, 1]
    assert "note" not in found.column_names
    assert "['note'] differ between splits" in caplog.text


def test_a_recipe_divides_by_its_shares(plain, tmp_path, caplog):
    from hf_captionrl.apps.experiments.arguments import DataArguments
    from hf_captionrl.apps.experiments.data import load_data

    source = {"dataset_name": "imagefolder", "data_dir": str(plain["data_dir"])}
    with caplog.at_level(logging.WARNING):
        splits = load_data(DataArguments(**source, validation_share=0.25, test_share=0.15), output_dir=tmp_path)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 12, "validation": 5, "test": 3}
    assert "12 train (0.6), 5 validation (0.25), 3 test (0.15)" in caplog.text
    default = load_data(DataArguments(**source), output_dir=tmp_path)
    assert set(default["test"]["image_id"]) == set(load_captions(split="test", **plain)["image_id"])
    other = load_data(DataArguments(**source, split_seed=5), output_dir=tmp_path)
    assert set(other["test"]["image_id"]) != set(default["test"]["image_id"])
    for bad in ({"validation_share": -0.1}, {"validation_share": 0.6, "test_share": 0.4}):
        with pytest.raises(ValueError, match=r"validation_share"):
            DataArguments(**bad)


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
