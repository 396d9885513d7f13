"""Images and keys of several rows in threads: the same results, order and faults as one after the other."""

import os
import threading
import time

import datasets
import numpy as np
import pytest

from hf_captionrl.cli.features import keys_and_cached
from hf_captionrl.data import ImageReader, open_image
from hf_captionrl.data import features as module
from hf_captionrl.data.features import file_hashes, in_threads, keys_of, source_key, source_keys
from hf_captionrl.data.quarantine import QuarantineError
from hf_captionrl.retrieval import FeatureCache
from tests.data.photos import png


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.fixture
def paths(tmp_path):
    """Eight files that were written an hour ago; the fourth is no image."""
    folder = tmp_path / "images"
    folder.mkdir()
    found = [folder / f"{number}.png" for number in range(8)]
    for number, path in enumerate(found):
        path.write_bytes(b"no image" if number == 3 else png(number))
        os.utime(path, (time.time() - 3600,) * 2)
    return found


def reader(paths, **more):
    columns = {"image_id": [path.stem for path in paths], "image": [*map(str, paths)]}
    dataset = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    return dataset, ImageReader(dataset, split="all", **{"max_bad_fraction": 0.5, **more})


def together(number):
    """A function that returns only when `number` threads are in it at the same time."""
    barrier = threading.Barrier(number)
    return lambda value: barrier.wait(timeout=20) and None


def test_images_are_opened_in_several_threads_in_the_order_of_the_rows(paths, monkeypatch):
    from hf_captionrl.data import quarantine as image_reader

    meet = together(4)
    monkeypatch.setattr(image_reader, "open_image", lambda value, **limits: meet(value) or open_image(value, **limits))
    rows = [6, 3, 0, 7, 1, 2, 5, 4]
    _, several = reader(paths)
    found = several.open_all(rows)
    assert list(found) == [row for row in rows if row != 3]
    for row, image in found.items():
        assert np.array_equal(np.asarray(image), np.asarray(open_image(str(paths[row]))))
    monkeypatch.undo()
    _, single = reader(paths)
    assert [row for row in rows if single.open(row) is None] == [3]
    assert several.report().entries == single.report().entries


def test_too_many_unreadable_images_of_a_batch_stop(paths):
    for path in paths[4:]:
        path.write_bytes(b"no image")
    _, found = reader(paths)
    with pytest.raises(QuarantineError, match="5 of 8"):
        found.open_all(range(8))


def test_other_errors_of_a_thread_are_raised(paths):
    def fail(value):
        raise OSError("the disk fails")

    with pytest.raises(OSError, match="the disk fails"):
        reader(paths)[1].read_all(range(8), in_threads(fail))


def test_keys_of_several_rows_equal_those_of_each_and_known_files_are_not_read(paths, tmp_path, monkeypatch):
    paths[5].unlink()
    _, found = reader(paths)
    features = FeatureCache(tmp_path / "cache", model_id="m", revision="r")
    rows = [0, 2, 1, 5, 6]
    expected = {row: source_key(str(paths[row])) for row in rows if row != 5}
    features.put([expected[6]], np.array([[1.0, 2.0]], np.float32))
    meet, hash_file = together(4), module._file_hash
    monkeypatch.setattr(module, "_file_hash", lambda path: meet(path) or hash_file(path))
    hashes = file_hashes(tmp_path / "cache")
    keys, cached = keys_and_cached(found, features, hashes, rows)
    assert list(keys.items()) == list(expected.items())
    assert {row: values.tolist() for row, values in cached.items()} == {6: [1.0, 2.0]}
    assert [(entry.row, entry.reason) for entry in found.report().entries] == [(5, "image_not_found")]

    def refuse(path):
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(module, "_file_hash", refuse)
    again = file_hashes(tmp_path / "cache")
    assert keys_and_cached(found, features, again, rows)[0] == expected
    paths[1].write_bytes(png(50))
    os.utime(paths[1], (time.time() - 1800,) * 2)
    with pytest.raises(AssertionError, match=r"1\.png was read"):
        keys_and_cached(found, features, again, rows)


def test_keys_of_bytes_equal_those_of_their_files(paths, tmp_path):
    dataset, _ = reader(paths)
    values = [{"bytes": path.read_bytes(), "path": None} for path in paths]
    assert keys_of(values, file_hashes(tmp_path / "cache")) == list(source_keys(dataset, tmp_path / "other"))
