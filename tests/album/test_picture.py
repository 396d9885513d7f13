"""The picture of an album before and after: what counts as good, and that it is drawn."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

from PIL import Image

from hf_captionrl.apps.album.result import AlbumImage
from hf_captionrl.scenes import load_scenes
from scripts.album_picture import draw, marked

ROOT = Path(__file__).resolve().parents[2]


def test_good_captions_are_unique_found_and_true():
    facts = load_scenes(num_train=0, num_validation=0, num_test=8)["test"][0]["facts"]
    true, wrong = f"some {facts['kind']}s", "three thousand red whales"
    assert facts["kind"] != "whale"
    found = [
        AlbumImage("0", true, is_distinct=True),
        AlbumImage("1", true, is_distinct=True),
        AlbumImage("2", true, is_distinct=False),
        AlbumImage("3", wrong, is_distinct=True),
    ]
    marks = marked(SimpleNamespace(images=found), [facts] * 4, [1, 2, 1, 1])
    assert [good for _, good in marks] == [True, False, False, False]


def test_readme_has_the_numbers():
    good = json.loads((ROOT / "docs/results/album_picture.json").read_text())["good"]
    found = re.findall(r"(0\.\d+) \[(0\.\d+),\s(0\.\d+)\]", (ROOT / "README.md").read_text())
    expected = [[good[name]["value"], *good[name]["interval"]] for name in ("before", "after")]
    assert [list(row) for row in found] == [[f"{number:.2f}" for number in row] for row in expected]


def test_picture_has_its_size_and_marks_distinct_captions_by_colour(tmp_path):
    pictures = [Image.new("RGB", (40, 40), (n * 90, 20, 20)) for n in range(3)]
    captions = {"before": [("a pig " * 9, False)] * 3, "after": [("a $pig", True), ("_b", True), ("", False)]}
    path = draw(tmp_path / "album.png", pictures, captions)
    with Image.open(path) as image:
        assert image.size == (round(2.1 * 3 * 150), round(4.2 * 150))
        colours = image.convert("RGB").getcolors(2**20)
    found = {colour for _, colour in colours}
    assert {(0x11, 0x63, 0x29), (0xB3, 0x26, 0x1E)} <= found
