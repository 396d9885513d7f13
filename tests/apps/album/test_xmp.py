"""`captionrl album` and XMP: captions that are read, files beside images, copies; originals never change."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hf_captionrl.data.xmp import read_packet, read_texts, with_packet, with_text
from tests.apps.album.conftest import album, contents, rows_of, write_images

IMAGES = Path(__file__).parents[2] / "photographs" / "images"
PERSON = with_text(None, "a person's text", ["alt_text"], "n")


@pytest.fixture
def photos(tmp_path, monkeypatch, scenes):
    """Scenes with a text beside, a text inside, both, a description only, none, and none in a subfolder."""
    monkeypatch.chdir(tmp_path)
    folder = write_images(
        scenes[:6], ["beside.png", "inside.jpg", "both.webp", "german.png", "none.png", "sub/none.jpg"]
    )
    (folder / "beside.png.xmp").write_bytes(PERSON)
    for name in ("inside.jpg", "both.webp"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(with_packet(data, with_text(None, "inside the file", ["description"], "n"), "n"))
    (folder / "both.xmp").write_bytes(PERSON)
    german = with_text(None, "zwei Schweine", ["description"], "n", "de")
    (folder / "german.png.xmp").write_bytes(german.replace(b'"x-default">zwei Schweine', b'"x-default">two pigs'))
    return folder


def captions(path):
    return {row["image_id"]: row["caption"] for row in rows_of(path)}


def test_existing_texts_are_read_from_files_and_images(photos):
    before = contents(photos)
    assert album("--output", "none.jsonl") == 2  # only if asked for
    assert album("--xmp_captions", "--output", "o.jsonl") == 0
    found = captions("o.jsonl")
    person, inside = "a person's text", "inside the file"
    assert found == {
        "beside.png": person,
        "inside.jpg": inside,
        "both.webp": person,
        "german.png": "two pigs",
        "none.png": "",
        "sub/none.jpg": "",
    }
    # A text file comes first.
    (photos / "beside.txt").write_text("a text file")
    assert album("--xmp_captions", "--output", "o.jsonl") == 0
    assert captions("o.jsonl")["beside.png"] == "a text file"
    (photos / "beside.txt").unlink()
    assert contents(photos) == before


def texts_in(path):
    return read_texts(path.read_bytes(), "n")


def test_files_beside_images_keep_the_texts_of_persons_and_all_other_properties(photos, capsys):
    rating = PERSON.replace(b'rdf:about=""', b'rdf:about="" xmlns:xmp="http://ns.adobe.com/xap/1.0/" xmp:Rating="5"')
    (photos / "none.png.xmp").write_bytes(rating.replace(b"a person's text", b""))
    images = {name: content for name, content in contents(photos).items() if not name.endswith(".xmp")}
    model = ["--model", "scenes:blip-mle", "--xmp_sidecars", "--output", "o.jsonl"]
    assert album(*model, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    kept = {Path(path).name for path in summary["kept_text_files"]}
    assert kept == {"beside.png.xmp", "both.xmp"}  # a description is another property
    assert (photos / "beside.png.xmp").read_bytes() == PERSON
    found = captions("o.jsonl")
    for name in ("inside.jpg", "none.png", "sub/none.jpg", "german.png"):
        assert texts_in(photos / f"{name}.xmp")["alt_text"] == [("x-default", found[name])]
    assert b'xmp:Rating="5"' in (photos / "none.png.xmp").read_bytes()
    assert texts_in(photos / "german.png.xmp")["description"] == [("x-default", "two pigs"), ("de", "zwei Schweine")]
    # What a captioner wrote is no existing text of the next run, which may replace it.
    assert album(*model, "--xmp_captions", "--choice", "first") == 0
    old = {row["image_id"]: row["old_caption"] for row in rows_of("o.jsonl")}
    assert old["none.png"] is None
    assert old["beside.png"] == "a person's text"
    assert texts_in(photos / "none.png.xmp")["alt_text"] == [("x-default", captions("o.jsonl")["none.png"])]
    # --overwrite replaces the person's text, and keeps it beside the output; a link is not replaced.
    (photos / "none.png.xmp").unlink()
    (photos / "none.png.xmp").symlink_to("../rating.xml")
    Path("rating.xml").write_bytes(rating)
    assert album(*model, "--overwrite") == 0
    assert ((photos / "none.png.xmp").is_symlink(), Path("rating.xml").read_bytes()) == (True, rating)
    assert texts_in(photos / "beside.png.xmp")["alt_text"] == [("x-default", captions("o.jsonl")["beside.png"])]
    assert any("a person's text" in row["text"] for row in rows_of("o.old.jsonl"))
    assert {name: content for name, content in contents(photos).items() if name in images} == images


def test_exported_texts_of_a_person_survive_a_captioner(photos):
    Path("mine.jsonl").write_text(json.dumps({"image_id": "none.png", "caption": "mine"}) + "\n")
    assert album("--captions", "mine.jsonl", "--xmp_sidecars", "--output", "mine.csv") == 0
    model = ["--model", "scenes:blip-mle", "--xmp_sidecars", "--xmp_captions", "--output", "o.jsonl"]
    assert album(*model) == 0
    assert texts_in(photos / "none.png.xmp")["alt_text"] == [("x-default", "mine")]
    assert {row["image_id"]: row["old_caption"] for row in rows_of("o.jsonl")}["none.png"] == "mine"


def test_copies_of_photographs_have_the_captions_and_the_same_pixels(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = sorted(path.name for path in IMAGES.iterdir())[:3]
    Path("photos/sub").mkdir(parents=True)
    for at, name in enumerate(names):
        shutil.copy(IMAGES / name, Path("photos", "sub" if at == 2 else "", name))
    Image.new("RGB", (20, 20)).save("photos/a.gif")
    before = contents("photos")
    model = ["--model", "scenes:blip-mle", "--xmp_copies", "out", "--xmp_properties", "alt_text", "description"]
    assert album(*model, "--language", "any", "--output", "o.jsonl", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert [reason.partition(" into ")[2].partition(",")[0] for reason in summary["not_copied"]] == ["photos/a.gif"]
    assert contents("photos") == before
    for name, caption in captions("o.jsonl").items():
        if not name.endswith(".gif"):
            texts = read_texts(read_packet(f"out/{name}"), "n")
            assert texts == {one: [("x-default", caption)] for one in ("alt_text", "description")}
            pixels = [np.asarray(Image.open(f"{folder}/{name}")) for folder in ("photos", "out")]
            assert (pixels[0] == pixels[1]).all()
    # Copies of this command get another caption; one that somebody has changed is kept.
    assert album(*model, "--language", "any", "--output", "o.jsonl", "--max_characters", "9", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["not_copied"]) == 1
    assert {len(read_texts(read_packet(f"out/{name}"), "n")["alt_text"][0][1]) < 10 for name in names[:2]} == {True}
    changed = Path("out", names[0])
    changed.write_bytes(b"mine")
    assert album(*model, "--language", "any", "--output", "o.jsonl", "--json") == 0
    assert any("--overwrite" in reason for reason in json.loads(capsys.readouterr().out)["not_copied"])
    assert changed.read_bytes() == b"mine"


@pytest.mark.parametrize("place", ["photos", "photos/copies", "link"])
def test_copies_never_reach_the_originals(photos, capsys, place):
    Path("link").symlink_to("photos")
    before = contents(photos)
    assert album("--model", "scenes:blip-mle", "--xmp_copies", place, "--output", "o.jsonl", "--overwrite") == 2
    assert "--xmp_copies" in capsys.readouterr().err
    Path("out").mkdir()
    Path("out/sub").symlink_to("../photos/sub")
    assert album("--model", "scenes:blip-mle", "--xmp_copies", "out", "--output", "o.jsonl", "--overwrite") == 0
    assert contents(photos) == before
    assert not list(Path(".").glob("out/*.tmp"))


@pytest.mark.parametrize("packet", [b"<x", b"<!DOCTYPE x [<!ENTITY a 'b'>]><x>&a;</x>", b"<x/>"])
def test_invalid_xmp_is_refused_by_name_before_any_work(photos, capsys, caplog, packet):
    (photos / "none.png.xmp").write_bytes(packet)
    before = contents(photos)
    assert album("--model", "scenes:blip-mle", "--xmp_sidecars", "--output", "o.jsonl") == 2
    assert "none.png.xmp" in capsys.readouterr().err
    assert not Path("o.jsonl").exists()
    assert album("--xmp_captions", "--output", "o.jsonl") == 0  # reading names it, and goes on
    assert "none.png.xmp" in caplog.text
    assert contents(photos) == before
    assert album("--captions", "o.jsonl", "--xmp_copies", "out", "--output", "p.jsonl") == 0
    assert album("--xmp_sidecars", "--model", "scenes:blip-mle", "--max_images", "2", images="scenes") == 2
    assert "--xmp_sidecars" in capsys.readouterr().err
    assert album("--xmp_properties", "description", "--model", "scenes:blip-mle", "--output", "q.jsonl") == 2
    assert "--xmp_properties" in capsys.readouterr().err
