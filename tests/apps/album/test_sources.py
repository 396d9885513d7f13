"""Copies: equal pixels, saved again, and look-alikes that are none."""

import io
import os
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from hf_captionrl.apps.album import album as steps
from hf_captionrl.apps.album.sources import (
    AlbumSource,
    copy_leaders,
    copy_threshold,
    load_album_source,
    read_images,
    saved_again,
    small_picture,
)
from hf_captionrl.data import cached_features
from hf_captionrl.retrieval import FeatureCache
from tests.apps.album.conftest import MODEL, rows_of, write_images
from tests.apps.album.conftest import album as quick_album


def pictures(*levels):
    return np.stack([np.full(768, level, dtype=np.uint8) for level in levels])


def unit(*angles):
    return torch.tensor([[np.cos(angle), np.sin(angle)] for angle in angles], dtype=torch.float32)


@pytest.mark.parametrize("among", ["all", "neighbours"])
def test_near_copies_need_cosine_and_picture(among):
    features = unit(0, 0.01, 0.02, 1.0, 1.001)
    levels = pictures(100, 101, 150, 100, 100)
    near = None
    if among == "neighbours":
        cosines = features @ features.T - 2 * torch.eye(5)
        near = (cosines.topk(2).indices, cosines.topk(2).values)
    found = copy_leaders(list("abcde"), levels, features, near, threshold=0.999)
    # 2 looks different, 3 has another cosine.
    assert found.tolist() == [0, 0, 2, 3, 3]
    assert copy_leaders(list("abcde"), levels, features, near, threshold=1.1).tolist() == [0, 1, 2, 3, 4]
    assert copy_leaders(list("abcda"), levels, features, near, threshold=1.1).tolist() == [0, 1, 2, 3, 0]


def test_groups_do_not_grow_along_chains_but_follow_their_leader():
    angles, same = np.arange(4) * 0.04, pictures(*[100] * 4)
    found = copy_leaders(list("abcd"), same, unit(*angles), None, threshold=float(np.cos(0.05)))
    assert found.tolist() == [0, 0, 2, 2], "the last one is no near-copy of the first"
    found = copy_leaders(list("abb"), same[:3], unit(0, 0.01, 0.01), None, threshold=0.999)
    assert found.tolist() == [0, 0, 0], "the leader of equal images becomes a near-copy itself"


def test_threshold_is_what_saved_copies_reach():
    class Brightness:
        """The angle is the mean brightness, so that saving again changes it a little."""

        def image_features(self, images):
            return unit(*(np.asarray(image, dtype=float).mean() / 255 for image in images))

    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 255, (40, 60, 3), dtype=np.uint8)) for _ in range(5)]
    found = copy_threshold(images, read_images(images, Brightness()), Brightness(), None)
    cosines = [float(torch.mul(*Brightness().image_features([i, saved_again(i)])).sum()) for i in images]
    assert min(cosines) <= found <= max(cosines)
    assert saved_again(images[0]).size == (48, 32)
    assert small_picture(images[0]).shape == (768,)


class Counted:
    """A scorer of mean colours that counts the images it encodes."""

    signature = "colours@1"
    name_or_path = "colours"

    def __init__(self):
        self.encoded = 0

    def image_features(self, images):
        self.encoded += len(images)
        return torch.stack([torch.tensor(np.asarray(image, np.float32).mean((0, 1)) / 255) for image in images])


def cache_of(folder):
    return FeatureCache(folder, model_id="colours", revision="1", what="image", dtype="float32")


def paths(folder):
    return [str(path) for path in sorted(folder.iterdir())]


def test_only_new_pixels_are_encoded(tmp_path, scenes):
    # The last one has the same pixels in another file.
    names = ["0.png", "1.png", "2.png", "3.png", "4.bmp"]
    files = paths(write_images([*scenes[:4], scenes[0]], names, tmp_path / "photos"))
    scorer = Counted()
    expected = read_images(files, scorer).features
    assert scorer.encoded == 4  # the copy is not encoded
    assert torch.equal(expected[0], expected[4])
    # Features of training and of other commands are found by the bytes of the files.
    rows = datasets.Dataset.from_dict({"image": [files[0], files[2]]}).cast_column("image", datasets.Image())
    cached_features(cache_of(tmp_path / "cache"), rows, scorer.image_features, progress=False)
    scorer.encoded = 0
    for _ in range(2):
        facts = read_images(files, scorer, cache=cache_of(tmp_path / "cache"))
        assert scorer.encoded == 2
        assert torch.equal(facts.features, expected)


@pytest.fixture
def opened(monkeypatch):
    """Calls of `PIL.Image.open`, for files and for bytes in memory."""
    calls, open_file = [], Image.open

    def count(file, *rest, **more):
        calls.append(os.path.basename(file) if isinstance(file, str | os.PathLike) else "memory")
        return open_file(file, *rest, **more)

    monkeypatch.setattr(Image, "open", count)
    return calls


@pytest.fixture
def six(tmp_path, monkeypatch, scenes):
    """Six photographs with captions: two are equal in their pixels, but not in their bytes."""
    monkeypatch.chdir(tmp_path)
    write_images([*scenes[:5], scenes[1]], [*(f"{number}.png" for number in range(5)), "5.bmp"], "album")
    for number in range(5):
        Path(f"album/{number}.txt").write_text(f"scene {number}")
    return Path("album")


def album(*more, output="o.jsonl", images="album", cache="cache"):
    """The rows that a command writes."""
    assert quick_album(*more, "--output", output, images=images, cache=cache) == 0
    return rows_of(output)


def test_only_new_images_are_opened(six, opened, scenes):
    first = album("--batch_size", "4")
    # Each image once to be read and once to be saved again, which decodes the copy; equal pixels only once.
    assert sorted(opened) == sorted(
        [*(f"{n}.png" for n in range(5)), "5.bmp", *(f"{n}.png" for n in range(5)), *["memory"] * 5]
    )
    opened.clear()
    assert album("--batch_size", "3", "--max_characters", "99", output="other.jsonl") == first
    assert opened == []
    # A changed image, and the result equals that of a cache that has nothing.
    scenes[7].save(six / "2.png")
    opened.clear()
    found = album()
    assert opened == ["2.png", "2.png", "memory"]
    assert album(output="new.jsonl", cache="new") == found


def test_facts_of_cached_images_equal_those_of_opened_ones(tmp_path, six, opened):
    files = [path for path in paths(six) if not path.endswith(".txt")]
    Path("album/broken.png").write_bytes(b"no image")
    files.insert(2, "album/broken.png")
    scorer, reasons = Counted(), {}
    plain = read_images(files, scorer, unreadable=reasons, batch_size=4)
    assert list(reasons) == [2]
    cache = cache_of(tmp_path / "cache")
    read_images(files[3:5], scorer, cache=cache)  # these are known when the others are read
    for _ in range(2):
        opened.clear()
        again = {}
        facts = read_images(files, scorer, cache=cache, unreadable=again, batch_size=4)
        assert (facts.rows, facts.keys, again) == (plain.rows, plain.keys, reasons)
        assert np.array_equal(facts.pictures, plain.pictures)
        assert torch.equal(facts.features, plain.features)
    assert opened == ["broken.png"]
    # The threshold is cached, too.
    threshold = copy_threshold(files, facts, scorer, None)
    assert copy_threshold(files, facts, scorer, cache) == threshold
    opened.clear()
    assert copy_threshold(files, facts, scorer, cache) == threshold
    assert opened == []
    # The small pictures are known, but not the features of another scorer.
    other = FeatureCache(tmp_path / "cache", model_id="other", revision="1", dtype="float32")
    assert torch.equal(read_images(files[3:], scorer, cache=other).features, plain.features[2:])
    assert len(opened) == 4


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def write_folder(images):
    Path("album").mkdir(exist_ok=True)
    for number, image in enumerate(images):
        path = Path("album", f"{number}.png")
        if not path.is_file() or path.read_bytes() != png(image):
            path.write_bytes(png(image))
            os.utime(path, ns=(7, 10**18 + sum(png(image))))
    return "album"


def write_table(images):
    table = {"image": [{"bytes": png(image), "path": f"{n}.png"} for n, image in enumerate(images)]}
    pyarrow.parquet.write_table(
        pyarrow.table({**table, "image_id": [f"{n}.png" for n in range(len(images))]}), "a.parquet"
    )
    return "a.parquet"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Working folder of a test; images that were opened to be read, and captioned."""
    monkeypatch.chdir(tmp_path)
    found, caption, read = {"read": [], "captioned": []}, steps.generate_candidates, steps.read_batch

    def captioned(captioner, images, rows, *rest):
        found["captioned"] += rows
        return caption(captioner, images, rows, *rest)

    def reading(images, rows, *rest, **more):
        found["read"] += rows
        return read(images, rows, *rest, **more)

    monkeypatch.setattr(steps, "generate_candidates", captioned)
    monkeypatch.setattr(steps, "read_batch", reading)
    return found


def captions(name):
    return [row["caption"] for row in album(*MODEL, images=name)]


def test_only_replaced_images_are_read_and_captioned_again(asked, scenes):
    first = captions(write_folder(scenes[:4]))
    assert asked == {"read": [0, 1, 2, 3], "captioned": [0, 1, 2, 3]}
    assert captions(write_folder(scenes[:4])) == first
    assert asked == {"read": [0, 1, 2, 3], "captioned": [0, 1, 2, 3]}, "nothing changed"
    changed = captions(write_folder([scenes[0], scenes[9], scenes[2], scenes[3]]))
    assert asked == {"read": [0, 1, 2, 3, 1], "captioned": [0, 1, 2, 3, 1]}
    assert changed[1] != first[1]
    # A file that was only touched is read, and the earlier image is known.
    os.utime(Path("album", "2.png"))
    assert captions(write_folder(scenes[:4])) == first
    assert asked["captioned"] == [0, 1, 2, 3, 1]
    # Images that change places.
    swapped = captions(write_folder([scenes[1], scenes[0], scenes[2], scenes[3]]))
    assert asked["captioned"] == [0, 1, 2, 3, 1, 0, 1]
    assert swapped[2:] == first[2:]


def test_stamps_tell_images_of_one_name_apart(tmp_path, monkeypatch, scenes):
    monkeypatch.chdir(tmp_path)
    name = write_table(scenes[:3])
    counted = []
    first = load_album_source(name).stamps(counted.append)
    assert len(set(first)) == 3
    assert counted == [1, 1, 1]
    second = load_album_source(write_table([scenes[0], scenes[0], scenes[2]])).stamps(counted.append)
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, False, True]
    # Files are not opened; what cannot be read is left to the step that reads.
    Path("x.png").write_bytes(b"no image")
    source = AlbumSource([scenes[0], "x.png", {"bytes": None, "path": None}], list("abc"))
    counted.clear()
    assert source.stamps(counted.append)[1:] == [f"8-{os.stat('x.png').st_mtime_ns}", "unreadable"]
    assert counted == [1]


def test_one_repeated_id_among_many_is_found_at_once():
    ids = [str(n) for n in range(200_000)]
    start = time.process_time()
    with pytest.raises(ValueError, match="Two images are called '199998'"):
        AlbumSource(ids, [*ids[:-1], "199998"])
    assert time.process_time() - start < 5, "a search per id takes minutes"
