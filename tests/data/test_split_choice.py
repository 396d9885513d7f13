"""Choice of splits: all, one or several; data are divided only on request, with a log."""

import logging

import datasets
import pytest

from hf_captionrl.data import choose_split, load_captions
from hf_captionrl.data.loading import parse_split
from tests.data.photos import embedded, make_folder


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
        with pytest.raises(ValueError, match=r"validation_share is .* and test_share"):
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
