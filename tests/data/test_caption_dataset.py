"""One caption per image and epoch: equal in all processes, new in every epoch, also in running workers."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Image
from torch.utils.data import DataLoader

from hf_captionrl.data import (
    CaptionCollator,
    CaptionDataset,
    ImageError,
    evaluation_rows,
    load_caption_splits,
    load_captions,
    open_image,
    training_rows,
)
from hf_captionrl.data.caption_dataset import draw_caption
from hf_captionrl.data.columns import undecoded
from tests.data.photos import captions, embedded, make_folder, png


class FakeCaptioner:
    """Records its arguments, as tensors and strings."""

    def collate(self, images, texts, *, image_features=None, max_length=40):
        pixels = None if images is None else torch.stack([torch.from_numpy(np.array(image)) for image in images])
        return {"pixels": pixels, "captions": list(texts), "features": image_features, "max_length": max_length}


def expected(rows, epoch, seed=0):
    return [captions(n)[draw_caption(5, seed=seed, epoch=epoch, image_id=f"id-{n}")] for n in rows]


# --- the draw ---


def test_the_draw_is_the_same_on_every_machine():
    """Every process has its own seed of `hash()`, this one too."""
    keys = itertools.product((0, 42), (0, 1, 2), ("a", "391895", "\u72ac"))
    drawn = [draw_caption(5, seed=s, epoch=e, image_id=i) for s, e, i in keys]
    assert drawn == [3, 1, 3, 1, 0, 0, 2, 4, 4, 0, 3, 1, 2, 2, 1, 2, 0, 1]


def test_the_draw_is_uniform_and_independent_over_epochs_images_and_seeds():
    n = 20_000
    for count in (
        Counter(draw_caption(5, seed=0, epoch=0, image_id=str(i)) for i in range(n)),
        Counter(draw_caption(5, seed=0, epoch=e, image_id="x") for e in range(n)),
        Counter(draw_caption(5, seed=s, epoch=3, image_id="x") for s in range(n)),
    ):
        chi_squared = sum((count[k] - n / 5) ** 2 / (n / 5) for k in range(5))
        assert chi_squared < 18.5  # 0.999 quantile of chi-squared with 4 degrees of freedom
    pairs = Counter(tuple(draw_caption(5, seed=0, epoch=e, image_id=str(i)) for e in (0, 1)) for i in range(n))
    assert sum((pairs[a, b] - n / 25) ** 2 / (n / 25) for a in range(5) for b in range(5)) < 51.2  # 24 degrees


# --- the data set ---


def test_items_have_image_caption_id_and_index():
    ds = CaptionDataset(embedded(4), seed=3)
    item = ds[2]
    assert sorted(item) == ["caption", "image", "image_features", "image_id", "index"]
    assert (item["image_id"], item["index"], item["image_features"]) == ("id-2", 2, None)
    assert item["image"].tobytes() == open_image(png(2)).tobytes()
    assert item["caption"] == expected([2], 0, seed=3)[0]
    assert ds[-1]["index"] == 3
    assert [item["index"] for item in ds] == [0, 1, 2, 3]  # iteration ends, because out of range is an IndexError
    with pytest.raises(IndexError):
        ds[4]


def test_a_new_caption_each_epoch():
    ds = CaptionDataset(embedded(30))
    seen = []
    for epoch in range(4):
        ds.set_epoch(epoch)
        assert ds.epoch == epoch
        seen.append([item["caption"] for item in ds])
        assert seen[-1] == expected(range(30), epoch)
    assert len({tuple(captions) for captions in seen}) == 4
    ds.set_epoch(1)  # a resumed run draws the same captions
    assert [item["caption"] for item in ds] == seen[1]
    fixed = CaptionDataset(embedded(30), resample=False)
    fixed.set_epoch(5)
    assert [item["caption"] for item in fixed] == seen[0]


def test_all_captions_are_items_in_the_order_of_the_images():
    rows = [*embedded(3)]
    rows[1]["captions"] = rows[1]["captions"][:2]  # images may have different numbers of captions
    data = embedded(3).map(lambda row, n: {"captions": rows[n]["captions"]}, with_indices=True)
    ds = CaptionDataset(data, captions_per_image="all")
    assert (len(ds), ds.num_images) == (5 + 2 + 5, 3)
    expected = [(n, caption) for n, row in enumerate(rows) for caption in row["captions"]]
    assert [(item["index"], item["caption"]) for item in ds] == expected
    assert [item["image_id"] for item in ds] == [f"id-{n}" for n, _ in expected]
    assert (ds[6]["image"].tobytes(), ds[-1]["caption"]) == (open_image(png(1)).tobytes(), captions(2)[-1])
    ds.set_epoch(4)  # every epoch has the same items
    assert [(item["index"], item["caption"]) for item in ds] == expected
    assert len(CaptionDataset(data)) == 3


def test_features_replace_images(tmp_path):
    rows = np.random.default_rng(0).normal(size=(6, 3, 2)).astype(np.float16)
    np.save(tmp_path / "f.npy", rows)
    mapped = np.load(tmp_path / "f.npy", mmap_mode="r")
    no_images = embedded(6).remove_columns("image")
    for features in (mapped, torch.from_numpy(rows)):
        item = CaptionDataset(no_images, image_features=features)[4]
        assert item["image"] is None
        assert item["image_features"].dtype == torch.float16
        assert torch.equal(item["image_features"], torch.from_numpy(rows[4]))
        item["image_features"].zero_()  # a copy: neither a crash on the read-only map nor a changed cache
        assert features[4].any()


def test_image_damaged_after_the_check_names_its_row():
    ds = embedded(3)
    broken = ds.map(lambda row, n: {"image": {"bytes": b"no" if n == 1 else png(n), "path": None}}, with_indices=True)
    with pytest.raises(ImageError) as caught:
        CaptionDataset(broken)[1]
    assert "row 1, image_id 'id-1'" in caught.value.__notes__[0]
    loader = DataLoader(CaptionDataset(broken), batch_size=1, num_workers=1, collate_fn=list)
    with pytest.raises(Exception, match="row 1, image_id 'id-1'"):
        list(loader)


# --- workers and collator ---


def with_workers(ds):
    collate = CaptionCollator(FakeCaptioner())
    return DataLoader(ds, batch_size=4, num_workers=2, persistent_workers=True, collate_fn=collate)


def test_the_epoch_reaches_persistent_workers():
    ds = CaptionDataset(embedded(12))
    loader = with_workers(ds)
    for epoch in (0, 1, 7, 1):
        ds.set_epoch(epoch)
        assert [c for batch in loader for c in batch["captions"]] == expected(range(12), epoch)
    ds.set_epoch(3)
    next(iter(loader))  # an interrupted epoch
    ds.set_epoch(4)
    assert [c for batch in loader for c in batch["captions"]] == expected(range(12), 4)


class EpochByAttribute(CaptionDataset):
    """Negative control: an epoch that is not in shared memory is a stale copy in each worker."""

    _plain = 0

    @property
    def epoch(self):
        return self._plain

    def set_epoch(self, epoch):
        self._plain = epoch


def test_stale_epoch_is_detected_by_the_worker_test():
    ds = EpochByAttribute(embedded(12))
    loader = with_workers(ds)
    list(loader)
    ds.set_epoch(1)
    assert [c for batch in loader for c in batch["captions"]] == expected(range(12), 0) != expected(range(12), 1)


def of(columns):
    """A data set with images inside, without ids."""
    images = [{"bytes": png(n), "path": None} for n in range(len(next(iter(columns.values()))))]
    return Dataset.from_dict({"image": images, **columns}).cast_column("image", Image())


RAW = [{"raw": f"a {n}", "tokens": ["a", str(n)], "sentid": n} for n in range(4)]


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        ({"captions": [["x"], ["z"]], "text": ["not this", "nor this"]}, [["x"], ["z"]]),
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


def test_data_in_memory_are_not_divided():
    ds = of({"text": list("abcdefghij")})
    assert len(load_captions(ds)) == len(load_captions(ds, split="all")) == 10
    assert list(load_caption_splits(ds)) == ["train"]
    with pytest.raises(ValueError, match="no split 'test'"):
        load_captions(ds, split="test")
    assert len(load_captions(ds, split="test", split_fractions=(0.6, 0.0, 0.4))) == 4


def test_files_of_data_in_memory(tmp_path):
    """Files of an image column are opened anywhere; paths in a text column only below image_root."""
    folder = make_folder(tmp_path / "p", 2)
    paths = [str(folder / "0.png"), str(folder / "1.png")]
    images = Dataset.from_dict({"image": paths, "text": ["a", "b"]}).cast_column("image", Image())
    assert open_image(undecoded(load_captions(images))[1]["image"]).tobytes() == open_image(png(1)).tobytes()
    texts = Dataset.from_dict({"image": ["0.png", "1.png"], "text": ["a", "b"]})
    assert load_captions(texts, image_root=folder)["image_id"][:] == ["0.png", "1.png"]
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="not below image_root"):
        load_captions(images, image_root=tmp_path / "other")


# --- what trainers are given ---


def test_trainers_accept_the_data_of_load_captions(tmp_path):
    ours = embedded(3)  # not converted
    assert training_rows(ours) is evaluation_rows(ours) is ours
    assert training_rows(None) is evaluation_rows(None) is None
    assert len(training_rows(ours.select([0, 1, 0]))) == 3  # joined only where it matters
    ds = of({"text": ["a", "b"]})
    for data in (ds, DatasetDict({"train": ds, "test": ds})):
        rows = training_rows(data)
        assert rows["captions"][:] == [["a"], ["b"]]
        assert rows["text"][:] == ["a", "b"]  # reward functions name the columns of the data
        assert rows["image_id"][:] == ["train-000000", "train-000001"]
    folder = make_folder(tmp_path, 10)
    assert len(training_rows(str(folder))) == 8
    assert len(evaluation_rows(folder)) == 1
    assert len(evaluation_rows("scenes")) == 500
    several = evaluation_rows({"one": ds, "two": embedded(2)})
    assert [rows["captions"][0] for rows in several.values()] == [["a"], captions(0)]
    assert evaluation_rows(ds.remove_columns("text"))["captions"][:] == [[], []]


@pytest.mark.parametrize("bad", [None, ["good", ""], ["\u200b"], [None]])
def test_empty_captions_are_found_before_training_with_their_row(bad):
    ds = embedded(4, captions_of=lambda number: bad if number == 2 else captions(number))
    for _ in range(2):  # every time, not only once
        with pytest.raises(ValueError, match=r"row 2 \(image_id 'id-2'\).*check_captions"):
            training_rows(ds)
    training_rows(ds.select([0, 1, 3]))


AMBIGUOUS = of({"text": ["x"], "caption": ["y"]})


@pytest.mark.parametrize(
    ("load", "data", "message"),
    [
        (load_captions, {"train": []}, "The data are a dict"),
        (evaluation_rows, of({"text": ["a", "b"]}).to_iterable_dataset(), "IterableDataset becomes one by"),
        (training_rows, of({"text": ["a"]}).remove_columns("text"), "no column 'captions'"),
        (load_captions, AMBIGUOUS, r"any of \['caption', 'text'\].*\(--caption_column\)"),
        (training_rows, embedded(3).select([]), "no rows"),
        (lambda rows: training_rows(rows, whole_set_for="x"), embedded(3).select([0, 1, 0]), "several rows"),
        (lambda count: draw_caption(count, seed=0, epoch=0, image_id="x"), 0, "'x' has 0 captions.*check_captions"),
    ],
)
def test_unusable_data_are_refused(load, data, message):
    with pytest.raises(ValueError, match=message):
        load(data)
