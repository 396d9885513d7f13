"""How often `captionrl album` opens images: never for what an earlier command has cached."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hf_captionrl.apps.album.sources import copy_threshold, read_images
from hf_captionrl.cli import main
from hf_captionrl.retrieval import FeatureCache
from tests.apps.album.test_image_facts import Counted, cache_of, paths

SCORER = "--scorer scenes:siglip-held-out --cache_dir cache".split()
QUICK = "--num_beams 1 --num_samples 1 --max_new_tokens 6 --batch_size 4".split()


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
def photos(tmp_path, monkeypatch, scenes):
    """Six photographs: two are equal in their pixels, but not in their bytes."""
    monkeypatch.chdir(tmp_path)
    Path("album").mkdir()
    for number, image in enumerate(scenes[:5]):
        image.save(f"album/{number}.png")
        Path(f"album/{number}.txt").write_text(f"scene {number}")
    scenes[1].save("album/5.bmp")
    return Path("album")


def album(*more, output="o.jsonl"):
    """The rows that a command writes."""
    assert main(["album", "album", *SCORER, *more, "--output", output]) == 0
    return [json.loads(line) for line in Path(output).read_text().splitlines()]


def test_repeated_command_opens_no_image(photos, opened):
    features = ["--dataset", "album", "--split", "all", "--features", "image", *SCORER, "--output", "features"]
    assert main(["features", *features]) == 0
    opened.clear()
    model = ["--model", "scenes:blip-mle", *QUICK]
    first = album(*model)
    assert len(opened) > 0
    opened.clear()
    assert album(*model) == first
    assert opened == []


def test_album_with_other_settings_opens_no_image(photos, opened):
    first = album("--batch_size", "4")
    # Each image once to be read and once to be saved again, which decodes the copy; equal pixels only once.
    assert sorted(opened) == sorted(
        [*(f"{n}.png" for n in range(5)), "5.bmp", *(f"{n}.png" for n in range(5)), *["memory"] * 5]
    )
    opened.clear()
    assert album("--batch_size", "3", "--max_characters", "99", output="other.jsonl") == first
    assert opened == []


def test_only_a_changed_image_is_opened(photos, opened, scenes):
    album()
    scenes[7].save(photos / "2.png")
    opened.clear()
    found = album()
    assert opened == ["2.png", "2.png", "memory"]
    # The result equals that of a cache that has nothing.
    assert main(["album", "album", "--scorer", SCORER[1], "--cache_dir", "new", "--output", "new.jsonl"]) == 0
    assert [json.loads(line) for line in Path("new.jsonl").read_text().splitlines()] == found


def test_facts_of_cached_images_equal_those_of_opened_ones(tmp_path, photos, opened):
    files = [path for path in paths(photos) if not path.endswith(".txt")]
    Path("album/broken.png").write_bytes(b"no image")
    files.insert(2, "album/broken.png")
    scorer = Counted()
    plain = read_images(files, scorer, skip_unreadable=True, batch_size=4)
    cache = cache_of(tmp_path / "cache")
    read_images(files[3:5], scorer, cache=cache)  # these are known when the others are read
    for _ in range(2):
        opened.clear()
        facts = read_images(files, scorer, cache=cache, skip_unreadable=True, batch_size=4)
        assert facts.rows == plain.rows
        assert facts.keys == plain.keys
        assert facts.unreadable == plain.unreadable
        assert np.array_equal(facts.pictures, plain.pictures)
        assert torch.equal(facts.features, plain.features)
    assert opened == ["broken.png"]
    # The small pictures are known, but not the features of another scorer.
    opened.clear()
    other = FeatureCache(tmp_path / "cache", model_id="other", revision="1", dtype="float32")
    assert torch.equal(read_images(files[3:], scorer, cache=other).features, plain.features[2:])
    assert len(opened) == 4


def test_cached_threshold_equals_that_of_opened_images(tmp_path, photos, opened):
    files = [path for path in paths(photos) if not path.endswith(".txt")]
    scorer = Counted()
    cache = cache_of(tmp_path / "cache")
    facts = read_images(files, scorer, cache=cache)
    plain = copy_threshold(files, facts, scorer, None)
    assert copy_threshold(files, facts, scorer, cache) == plain
    opened.clear()
    assert copy_threshold(files, facts, scorer, cache) == plain
    assert opened == []
