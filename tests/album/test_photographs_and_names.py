"""Photographs of 24 megapixels and file names with newlines, quotes and tabs, through `describe_album` and the command."""

import csv
import json
import re
import weakref
from pathlib import Path

import pytest
from PIL import Image

from hf_captionrl.apps.album import page as report_page
from hf_captionrl.apps.album import sources as image_facts
from hf_captionrl.apps.album.album import describe_album
from hf_captionrl.apps.album.sources import load_album_source, read_captions_for
from hf_captionrl.cli import main

QUICK = (
    "--num_beams 1 --num_samples 1 --max_new_tokens 4 --cache_dir cache --json --scorer scenes:siglip-held-out".split()
)
PIXELS = 24_000_000


class Held:
    """Counts the decoded pixels that are held at one time."""

    def __init__(self, monkeypatch):
        self.most, self.opened, self._held = 0, 0, []
        for module in (image_facts, report_page):
            monkeypatch.setattr(module, "open_image", self._wrap(module.open_image))

    def _wrap(self, open_image):
        def opened(value, **settings):
            image = open_image(value, **settings)
            self.opened += 1
            self._held = [(reference, size) for reference, size in self._held if reference() is not None]
            self._held.append((weakref.ref(image), image.width * image.height))
            self.most = max(self.most, sum(size for _, size in self._held))
            return image

        return opened


def write_photographs(folder, number):
    folder.mkdir()
    for row in range(number):
        # 24 megapixels of few colours are quick to write; a strip tells the photographs apart.
        image = Image.new("RGB", (6000, 4000), (40 * row, 90, 160))
        image.paste((200, 30 * row, 20), (0, 0, 1500 + 900 * row, 4000))
        image.save(folder / f"{row}.jpg", quality=50)
    return folder


@pytest.mark.parametrize("number", [2, 4])
def test_memory_does_not_grow_with_the_number_of_photographs(captioner, scorer, tmp_path, monkeypatch, number):
    paths = sorted(write_photographs(tmp_path / "photos", number).iterdir())
    held = Held(monkeypatch)
    settings = {"num_beams": 1, "num_samples": 1, "max_new_tokens": 4, "copy_threshold": 2, "batch_size": 16}
    found = describe_album(paths, captioner, scorer, **settings)
    assert len(found.captions) == number
    assert all(found.captions)
    assert held.opened == 2 * number, "once to read them, once to caption them"
    # The photograph that is used, and the next one while it is decoded: 144 MB.
    assert held.most == 2 * PIXELS


def test_command_describes_photographs_of_24_megapixels(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_photographs(tmp_path / "photos", 3)
    held = Held(monkeypatch)
    outputs = ["--output", "o.jsonl", "o.html", "--sidecars"]
    assert main(["album", "photos", "--model", "scenes:blip-mle", *QUICK, *outputs]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["images"], summary["captions"], summary["unreadable"]) == (3, 3, 0)
    assert held.most == 2 * PIXELS
    texts = [json.loads(line)["caption"] for line in Path("o.jsonl").read_text().splitlines()]
    assert [Path("photos", f"{row}.txt").read_text() for row in range(3)] == [f"{text}\n" for text in texts]
    assert Path("o.html").stat().st_size < 1e6, "the page has small pictures"


NAMES = [
    "a\nb.png",
    'it\'s "quoted".png',
    "tab\there.png",
    "'=1+1.png",
    "comma, semi;.png",
    "</script><b>.png",
    "\u2028 line.png",
]
NAMES = [name.replace("/", "\u2044") for name in NAMES]


@pytest.fixture
def photos(tmp_path, monkeypatch, scenes):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, image in zip(NAMES, scenes, strict=False):
        image.save(folder / name)
    return folder


def test_names_survive_every_output_and_are_read_back(photos, capsys):
    outputs = ["o.csv", "o.jsonl", "o.html", "photos/metadata.jsonl"]
    command = ["album", "photos", "--model", "scenes:blip-mle", *QUICK, "--sidecars", "--output", *outputs]
    assert main(command) == 0
    rows = [json.loads(line) for line in Path("o.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    captions = {row["image_id"]: row["caption"] for row in rows}
    assert sorted(captions) == sorted(NAMES)
    assert all(captions.values())
    with open("o.csv", encoding="utf-8-sig", newline="") as file:
        table = {row["image_id"]: row["caption"] for row in csv.DictReader(file)}
    assert table == {("'" + name if name.startswith("'=") else name): text for name, text in captions.items()}
    for name, text in captions.items():
        assert (photos / name).with_suffix(".txt").read_text(encoding="utf-8") == text + "\n"
    page = Path("o.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert {card["image_id"]: card["caption"] for card in data["cards"]} == captions
    # The metadata are those of an image folder.
    source = load_album_source("photos", sidecars=False)
    assert dict(zip(source.image_ids, source.captions, strict=True)) == {n: [t] for n, t in captions.items()}
    # Both tables find their images again.
    for path in ("o.csv", "o.jsonl"):
        assert read_captions_for(source, path) == source.captions
    # The same command changes nothing.
    before = {path: path.read_bytes() for path in Path().glob("**/*") if path.is_file()}
    capsys.readouterr()
    assert main(command) == 0
    assert {path: path.read_bytes() for path in Path().glob("**/*") if path.is_file()} == before


def test_list_separated_by_nul_has_names_with_newlines(photos, capsys):
    Path("list.txt").write_bytes(b"".join(f"photos/{name}\0".encode() for name in NAMES))
    assert main(["album", "list.txt", "--model", "scenes:blip-mle", *QUICK, "--output", "o.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("o.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert [row["image_id"] for row in rows] == [f"photos/{name}" for name in NAMES]
    assert json.loads(capsys.readouterr().out)["captions"] == len(NAMES)
