"""Data sets in memory, also with the columns of published ones, in `load_captions` and trainers."""

import datasets
import pytest
from datasets import Dataset, DatasetDict, Features, Image, IterableDataset, List, Value

from hf_captionrl.data import evaluation_rows, load_caption_splits, load_captions, open_image, training_rows
from hf_captionrl.data.columns import undecoded
from tests.data.photos import captions, embedded, make_folder, png

TEXTS = List(Value("string"))


def of(columns, **features):
    """A data set with images inside, without ids."""
    number = len(next(iter(columns.values())))
    images = [{"bytes": png(n), "path": None} for n in range(number)]
    kinds = Features({"image": Image(), **features}) if features else None
    found = Dataset.from_dict({"image": images, **columns}, features=kinds)
    return found.cast_column("image", Image())


RAW = [{"raw": f"a {n}", "tokens": ["a", str(n)], "sentid": n} for n in range(4)]


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        ({"text": ["x", "y"]}, [["x"], ["y"]]),
        ({"caption": [["x", "y"], ["z"]]}, [["x", "y"], ["z"]]),
        ({"captions": [["x"], ["z"]], "text": ["not this", "nor this"]}, [["x"], ["z"]]),
        ({"sentences": [["x", "y"], ["z"]]}, [["x", "y"], ["z"]]),
        # COCO and Flickr30k as published: a list of mappings, one mapping per row, or what `datasets` makes of a list.
        ({"sentences": [RAW[:2], RAW[2:]]}, [["a 0", "a 1"], ["a 2", "a 3"]]),
        ({"sentences": [RAW[0], RAW[3]]}, [["a 0"], ["a 3"]]),
        ({"sentences": [{"raw": ["x", "y"]}, {"raw": ["z"]}]}, [["x", "y"], ["z"]]),
    ],
)
def test_columns_of_published_sets_are_found(columns, wanted):
    ds = load_captions(of(columns))
    assert ds.column_names[:3] == ["image", "image_id", "captions"]
    assert ds["captions"][:] == wanted
    assert ds["image_id"][:] == ["train-000000", "train-000001"]
    assert open_image(undecoded(ds)[1]["image"]).tobytes() == open_image(png(1)).tobytes()


def test_ambiguous_columns_are_an_error():
    ds = of({"text": ["x"], "caption": ["y"]})
    with pytest.raises(
        ValueError, match=r"caption_column could be any of \['caption', 'text'\].*\(--caption_column\)"
    ):
        load_captions(ds)
    assert load_captions(ds, caption_column="text")["captions"][:] == [["x"]]
    with pytest.raises(ValueError, match=r"caption_column could be any of"):
        training_rows(ds)


def test_data_in_memory_are_not_divided():
    ds = of({"text": list("abcdefghij")})
    assert len(load_captions(ds)) == len(load_captions(ds, split="all")) == 10
    assert list(load_caption_splits(ds)) == ["train"]
    with pytest.raises(ValueError, match="no split 'test'"):
        load_captions(ds, split="test")
    assert len(load_captions(ds, split="test", split_fractions=(0.6, 0.0, 0.4))) == 4


def test_splits_of_a_dataset_dict_have_unique_ids():
    data = DatasetDict({"train": of({"text": ["a", "b", "c"]}), "val": of({"text": ["d", "e"]})})
    splits = load_caption_splits(data)
    assert {name: ds["image_id"][:] for name, ds in splits.items()} == {
        "train": ["train-000000", "train-000001", "train-000002"],
        "validation": ["validation-000000", "validation-000001"],
    }
    assert load_captions(data, split="validation")["captions"][:] == [["d"], ["e"]]
    assert len(load_captions(data, split="all")) == 5
    with pytest.raises(ValueError, match="two splits for 'validation'"):
        load_captions(DatasetDict({"val": data["val"], "dev": data["val"]}))


def test_files_of_data_in_memory(tmp_path):
    """Files of an image column are opened anywhere; paths in a text column only below image_root."""
    folder = make_folder(tmp_path / "p", 2)
    paths = [str(folder / "0.png"), str(folder / "1.png")]
    images = Dataset.from_dict({"image": paths, "text": ["a", "b"]}).cast_column("image", Image())
    assert open_image(undecoded(load_captions(images))[1]["image"]).tobytes() == open_image(png(1)).tobytes()
    texts = Dataset.from_dict({"image": ["0.png", "1.png"], "text": ["a", "b"]})
    with pytest.raises(ValueError, match="Set image_root"):
        load_captions(texts)
    assert load_captions(texts, image_root=folder)["image_id"][:] == ["0.png", "1.png"]
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="not below image_root"):
        load_captions(images, image_root=tmp_path / "other")
    leaving = Dataset.from_dict({"image": ["0.png", "../secret.png"], "text": ["a", "b"]})
    with pytest.raises(ValueError, match=r"secret.png.*not below image_root"):
        load_captions(leaving, image_root=folder)


@pytest.mark.parametrize("data", [[{"image": 1}], {"train": []}, 7, object()])
def test_other_types_are_refused(data):
    with pytest.raises(ValueError, match=r"The data are a \w+. Use a datasets.Dataset or DatasetDict"):
        load_captions(data)


def test_iterable_data_are_refused_where_the_whole_set_is_needed():
    stream = of({"text": ["a", "b"]}).to_iterable_dataset()
    assert isinstance(stream, IterableDataset)
    for data in (stream, datasets.IterableDatasetDict({"train": stream})):
        with pytest.raises(ValueError, match=r"are an IterableDataset.*SmileTrainer with max_steps"):
            load_captions(data)
        with pytest.raises(ValueError, match=r"eval_dataset is an IterableDataset.*ranks each image among all others"):
            evaluation_rows(data)


# --- what trainers are given ---


def test_data_with_our_columns_are_not_converted():
    ds = embedded(3)
    assert training_rows(ds) is ds
    assert evaluation_rows(ds) is ds
    assert training_rows(None) is evaluation_rows(None) is None


def test_trainers_accept_the_data_of_load_captions(tmp_path):
    ds = of({"text": ["a", "b"]})
    for data in (ds, DatasetDict({"train": ds, "test": ds})):
        rows = training_rows(data)
        assert rows["captions"][:] == [["a"], ["b"]]
        assert rows["text"][:] == ["a", "b"]  # reward functions name the columns of the data
        assert rows["image_id"][:] == ["train-000000", "train-000001"]
    folder = make_folder(tmp_path, 10)
    assert len(training_rows(str(folder))) == 8
    assert len(evaluation_rows(folder)) == 1
    several = evaluation_rows({"one": ds, "two": embedded(2)})
    assert several["one"]["captions"][:] == [["a"], ["b"]]
    assert several["two"]["captions"][:] == [captions(0), captions(1)]
    assert evaluation_rows(ds.remove_columns("text"))["captions"][:] == [[], []]
    with pytest.raises(ValueError, match=r"training data lack the column\(s\) \['captions'\]; there are \['image'\]"):
        training_rows(ds.remove_columns("text"))
    with pytest.raises(ValueError, match=r"evaluation data lack the column\(s\) \['image'\]"):
        evaluation_rows(ds.remove_columns("image"))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([], "has no caption"),
        (None, "has no caption"),
        (["good", ""], r"has an empty caption: captions\[1\] is ''"),
        (["  \n"], r"has an empty caption: captions\[0\] is '  \\n'"),
        (["\u200b"], r"has an empty caption: captions\[0\] is"),
        ([None], r"has an empty caption: captions\[0\] is None"),
    ],
)
def test_empty_captions_are_found_before_training_with_their_row(bad, said):
    ds = embedded(4, captions_of=lambda number: bad if number == 2 else captions(number))
    with pytest.raises(ValueError, match=rf"^train_dataset: row 2 \(image_id 'id-2'\) {said}.*check_captions"):
        training_rows(ds)
    with pytest.raises(ValueError, match="row 2"):  # every time, not only once
        training_rows(ds)
    training_rows(ds.select([0, 1, 3]))
    raw = ds.rename_column("captions", "sentences").remove_columns("image_id")
    if bad is not None:
        with pytest.raises(ValueError, match=r"^train_dataset: row 2 \(image_id 'train-000002'\)"):
            training_rows(raw)


def test_a_split_column_is_used_in_memory_as_on_disk():
    ds = of({"text": ["a", "b", "c", "d"], "split": ["train", "test", "train", "test"]})
    assert training_rows(ds)["captions"][:] == [["a"], ["c"]]
    assert load_captions(ds, split="test")["captions"][:] == [["b"], ["d"]]
    assert load_captions(DatasetDict({"test": ds}), split="train")["captions"][:] == [["a"], ["c"]]


def test_columns_with_our_names_and_other_types_are_converted(tmp_path):
    nested = of({"captions": [[{"raw": "a b"}], [{"raw": "c"}]], "image_id": ["x", "y"]})
    assert training_rows(nested)["captions"][:] == [["a b"], ["c"]]
    paths = Dataset.from_dict({"image": ["/etc/a.png"], "image_id": ["x"], "captions": [["a"]]})
    with pytest.raises(ValueError, match="image_root"):
        training_rows(paths)


def test_empty_data_and_repeated_ids_are_found_before_training():
    ds = embedded(3)
    with pytest.raises(ValueError, match="hold no rows"):
        training_rows(ds.select([]))
    twice = ds.select([0, 1, 0])
    assert len(training_rows(twice)) == 3
    with pytest.raises(ValueError, match="occurs in several rows"):
        training_rows(twice, whole_set_for="rewards are prepared from all images")
