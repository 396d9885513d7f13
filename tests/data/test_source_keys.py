"""Rows of a data set are known by their files: a warm cache opens no image, and a changed file is read again."""

import os
import threading
import time

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from hf_captionrl.data import ImageError, cached_features
from hf_captionrl.data import features as feature_extraction
from hf_captionrl.data import features as module
from hf_captionrl.data.features import source_keys
from hf_captionrl.retrieval import FeatureCache
from tests.data.photos import embedded, png


def files(folder, number=4):
    """A data set of paths to files that were written an hour ago."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{i}.png" for i in range(number)]
    for i, path in enumerate(paths):
        path.write_bytes(png(i))
        age(path, 3600)
    return datasets.Dataset.from_dict({"image": [*map(str, paths)]}).cast_column("image", datasets.Image()), paths


def age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


class Encode:
    """Mean colours, and how many images were encoded."""

    def __init__(self):
        self.images = 0

    def __call__(self, images):
        self.images += len(images)
        return torch.stack([torch.tensor(np.asarray(image).reshape(-1, 3).mean(0)) for image in images]).float()


def features(folder, dataset, encode, what="image"):
    cache = FeatureCache(folder, model_id="m", revision="r", what=what)
    return np.asarray(cached_features(cache, dataset, encode, progress=False))


def refuse(*args, **kwargs):
    raise AssertionError("an image was opened")


@pytest.mark.parametrize("kind", ["paths", "bytes"])
def test_a_warm_cache_opens_no_image(tmp_path, monkeypatch, kind):
    dataset = files(tmp_path / "images")[0] if kind == "paths" else embedded(4)
    encode = Encode()
    cold = features(tmp_path / "cache", dataset, encode)
    assert encode.images == 4
    monkeypatch.setattr(Image, "open", refuse)
    np.testing.assert_array_equal(features(tmp_path / "cache", dataset, encode), cold)
    assert encode.images == 4
    with pytest.raises(ImageError, match="an image was opened"):  # the replacement is noticed
        features(tmp_path / "cache", dataset, encode, what="another kind")


def test_a_known_file_is_not_read_again(tmp_path, monkeypatch):
    dataset, _ = files(tmp_path / "images")
    first = source_keys(dataset, tmp_path / "cache")
    monkeypatch.setattr(module, "_file_hash", refuse)
    assert source_keys(dataset, tmp_path / "cache") == first
    with pytest.raises(AssertionError):
        source_keys(dataset, tmp_path / "empty")


def test_images_are_decoded_and_hashed_by_several_threads_with_a_bar(tmp_path, monkeypatch, capsys):
    dataset, _ = files(tmp_path / "images", 6)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2}, raising=False)
    together = threading.Barrier(3)

    def waiting(function):
        def waited(value):
            together.wait(timeout=20)  # raises unless three threads arrive
            return function(value)

        return waited

    monkeypatch.setattr(module, "_file_hash", waiting(module._file_hash))
    monkeypatch.setattr(feature_extraction, "open_image", waiting(feature_extraction.open_image))
    cache = FeatureCache(tmp_path / "cache", model_id="m", revision="r")
    cached_features(cache, dataset, Encode())
    shown = capsys.readouterr().err
    assert "Hashing files: 100%" in shown
    assert "Encoding images: 100%" in shown


def test_processes_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    found = []
    for processes in ("1", "3", "16"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        with module.workers() as pool:
            found.append(pool._max_workers)
    assert found == [8, 2, 1]


@pytest.mark.parametrize("change", ["time", "size"])
def test_a_changed_file_is_encoded_again(tmp_path, change):
    dataset, paths = files(tmp_path / "images")
    before = features(tmp_path / "cache", dataset, Encode())
    size, other = paths[2].stat().st_size, png(77)
    paths[2].write_bytes(other if change == "time" else png(77, size=(20, 20)))
    assert (paths[2].stat().st_size == size) is (change == "time")
    age(paths[2], 1800 if change == "time" else 3600)
    encode = Encode()
    after = features(tmp_path / "cache", dataset, encode)
    assert encode.images == 1
    changed = (after != before).any(1)
    assert changed.tolist() == [False, False, True, False]


def test_a_file_that_was_just_written_is_always_read(tmp_path):
    """A second change within the resolution of the clock would keep size and time."""
    dataset, paths = files(tmp_path / "images")
    stamp = time.time_ns()
    keys = []
    for seed in (50, 51):
        paths[1].write_bytes(png(seed))
        os.utime(paths[1], ns=(stamp, stamp))
        keys.append(source_keys(dataset, tmp_path / "cache"))
    assert [a == b for a, b in zip(*keys, strict=True)] == [True, False, True, True]


def test_copies_share_a_key_and_touching_a_file_keeps_it(tmp_path):
    dataset, paths = files(tmp_path / "images")
    keys = source_keys(dataset, tmp_path / "cache")
    assert len(set(keys)) == 4
    copy, _ = files(tmp_path / "elsewhere")
    age(paths[0], 60)
    assert source_keys(copy, tmp_path / "cache") == source_keys(dataset, tmp_path / "cache") == keys
    bytes_of = datasets.Dataset.from_dict({"image": [{"bytes": p.read_bytes(), "path": None} for p in paths]})
    assert source_keys(bytes_of, tmp_path / "cache") == keys


@pytest.mark.parametrize(("value", "reason"), [("gone.png", "image_not_found"), (None, "image_missing")])
def test_a_missing_file_is_named(tmp_path, value, reason):
    dataset = datasets.Dataset.from_dict({"image": [value]}, features=datasets.Features({"image": datasets.Image()}))
    with pytest.raises(ImageError) as error:
        source_keys(dataset, tmp_path)
    assert error.value.reason == reason
