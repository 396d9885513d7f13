"""`captionrl album` on files: outputs, resuming, copies, hostile names, bad input."""

import csv
import html
import json
import os
import re
from pathlib import Path

import pytest

from hf_captionrl.apps.album import command
from hf_captionrl.apps.album.command import check_sidecars
from hf_captionrl.apps.album.sources import AlbumSource, load_album_source, read_captions_for
from hf_captionrl.cli import main
from tests.apps.album.conftest import MODEL, album, contents, rows_of, write_images, write_rows

HOSTILE = '=1+"x"\n<script>alert(1)<\u2044script>.png'


@pytest.fixture
def photos(tmp_path, monkeypatch, scenes):
    """Four scenes in two folders, one of them twice, one with a caption, an unreadable file and a hostile name."""
    monkeypatch.chdir(tmp_path)
    folder = write_images([*scenes[:4], scenes[0]], ["a.png", "b.png", "sub/c.png", HOSTILE, "sub/copy.png"])
    (folder / "b.txt").write_text("two pigs\n", encoding="utf-8")
    (folder / "broken.png").write_bytes(b"no image")
    return folder


def test_copies_existing_captions_and_unreadable_files(photos, capsys):
    assert album(*MODEL, "--output", "o.csv", "o.jsonl", "o.html", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["images"], summary["captions"], summary["copies"], summary["unreadable"]) == (6, 5, 1, 1)
    assert summary["unreadable_images"] == ["broken.png"]
    rows = {row["image_id"]: row for row in rows_of("o.jsonl")}
    assert rows["sub/copy.png"]["caption"] == rows["a.png"]["caption"] != ""
    assert rows["sub/copy.png"]["copy_of"] == "a.png"
    assert rows["b.png"]["old_caption"] == "two pigs"
    assert sorted(p.name for p in photos.iterdir() if p.suffix == ".txt") == ["b.txt"]
    # The table is read back.
    assert album("--captions", "o.csv", "--output", "again.jsonl", "--json") == 0
    assert json.loads(capsys.readouterr().out)["distinct"] == summary["distinct"] == 1


def test_images_of_one_concept_share_a_caption_of_any_of_them(tmp_path, monkeypatch, scenes):
    monkeypatch.chdir(tmp_path)
    write_images(scenes[:4], ["one/a.png", "one/b.png", "two/c.png", "two/d.png"])
    assert album(*MODEL, "--output", "o.jsonl", "--by_concept", "folder") == 0
    assert album(*MODEL, "--output", "each.jsonl") == 0
    together, each = rows_of("o.jsonl"), rows_of("each.jsonl")
    captions = [row["caption"] for row in together]
    assert captions[0] == captions[1] != captions[2] == captions[3]
    assert len({row["caption"] for row in each}) == 4
    assert all(row["distinct"] and row["copy_of"] is None for row in together)
    candidates = {row["image"].split()[0]: row["captions"] for row in rows_of("o.candidates.jsonl")[1:]}
    assert captions[0] in candidates["one/a.png"] + candidates["one/b.png"]
    assert all(row["rank"] in (1, 2) for row in together), "ranks are among two concepts"
    assert album(*MODEL, "--output", "o.jsonl", "--by_concept", "sku") != 0


def test_candidates_are_kept_for_another_choice_and_after_a_kill(photos, monkeypatch):
    captioned, real = [], command.generate_candidates

    def counted(captioner, images, rows, *rest):
        if len(captioned) == 1:
            captioned.append(())
            raise KeyboardInterrupt
        captioned.append(tuple(rows))
        return real(captioner, images, rows, *rest)

    monkeypatch.setattr(command, "generate_candidates", counted)
    assert album(*MODEL, "--output", "o.jsonl") != 0
    assert album(*MODEL, "--output", "o.jsonl") == 0
    first, (kept, _, *others) = rows_of("o.jsonl"), captioned
    assert kept not in others, "the first batch was not repeated"
    assert album(*MODEL, "--output", "p.jsonl") == 0
    assert rows_of("p.jsonl") == first, "as a run that was not killed"
    number = len(captioned)
    assert album(*MODEL, "--output", "o.jsonl", "--max_characters", "12") == 0
    assert all(len(line["caption"]) <= 12 for line in rows_of("o.jsonl"))
    assert len(captioned) == number
    assert album(*MODEL, "--output", "o.jsonl", "--seed", "4") == 0
    assert len(captioned) > number


def test_texts_of_a_person_are_kept_and_named_unless_they_are_overwritten(photos, capsys):
    arguments = [*MODEL, "--sidecars", "--drop_shared", "--trigger", "ohwx thing", "--output", "o.jsonl"]
    assert album(*arguments) == 0
    assert "kept: photos/b.txt. Use --prefer_existing" in capsys.readouterr().out
    assert (photos / "b.txt").read_text() == "two pigs\n"
    assert len([*photos.glob("**/*.txt")]) == 5, "the other images have text files"
    assert album(*arguments, "--overwrite", "--json") == 0
    assert json.loads(capsys.readouterr().out)["kept_text_files"] == []
    files = texts_of(photos)
    assert set(files) == {"a.txt", "b.txt", "c.txt", "copy.txt", HOSTILE.replace(".png", ".txt")}
    assert all(text.startswith("ohwx thing") for text in files.values())
    # The same command continues; its own text files are not captions that existed, and the text of the person is known.
    before = rows_of("o.jsonl")
    (photos / "a.txt").unlink()
    assert album(*arguments) == 0
    assert (rows_of("o.jsonl"), texts_of(photos)) == (before, files)
    assert next(row for row in before if row["image_id"] == "b.png")["old_caption"] == "two pigs"
    # Outputs of others are not replaced.
    Path("mine.csv").write_text("image_id,caption\na.png,mine\n")
    assert album(*MODEL, "--output", "o.jsonl", "mine.csv") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert Path("mine.csv").read_text() == "image_id,caption\na.png,mine\n"


def test_a_caption_that_a_person_edited_in_the_table_stays(photos):
    arguments = [*MODEL, "--sidecars", "--output", "o.csv", "o.html"]
    assert album(*arguments) == 0
    before = shown_captions("o")
    with open("o.csv", encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    next(row for row in rows if row["image_id"] == "sub/c.png")["caption"] = "three cows under a tree"
    with open("o.csv", "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for more in ((), (), ("--max_characters", "12")):  # also shorter ones
        assert album(*arguments, *more) == 0
        after = shown_captions("o")
        assert after["sub/c.png"] == "three cows under a tree"
        assert (photos / "sub" / "c.txt").read_text() == "three cows under a tree\n"
        if not more:
            assert after == before | {"sub/c.png": "three cows under a tree"}
    assert album(*arguments, "--overwrite") == 0
    assert shown_captions("o") == before


def texts_of(folder):
    """The content of each text file, by its name."""
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("**/*.txt")}


def write_table(path, captions):
    """A table as the page exports it."""
    with open(path, "w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([("image_id", "caption"), *captions.items()])


def test_trigger_and_shared_phrases_of_existing_captions_alone(photos, capsys):
    old = {
        "a": "a photo of a dog on grass",
        "b": "a photo of a dog with a ball",
        "sub/c": "a photo of a dog, asleep",
        "sub/copy": "",
    }
    for name, text in old.items():
        (photos / f"{name}.txt").write_text(text)
    arguments = ["--sidecars", "--drop_shared", "--trigger", "ohwx", "--group_by", "album", "--shared_share", "0.6"]
    arguments += ["--output", "album.jsonl"]
    assert album(*arguments) == 0
    assert "kept: " in capsys.readouterr().out, "unless --overwrite is given"
    for more in (["--overwrite"], [], ["--captions", "album.old.csv"]):
        if more and more[0] == "--captions":  # the same captions from a table
            write_table("album.old.csv", {f"{name}.png": text for name, text in old.items()})
        assert album(*arguments, *more) == 0
        found = texts_of(photos)
        assert [found[f"{n}.txt"] for n in "abc"] == ["ohwx on grass\n", "ohwx with a ball\n", "ohwx, asleep\n"]
        rows = {row["image_id"]: row for row in rows_of("album.jsonl")}
        assert rows["a.png"]["old_caption"] == old["a"]
        assert rows["a.png"]["rank"] is not None
    # Another trigger replaces it.
    arguments[3] = "sks"
    assert album(*arguments) == 0
    assert texts_of(photos)["c.txt"] == "sks, asleep\n"


def test_text_of_persons_is_preferred_and_the_rest_is_captioned(photos, monkeypatch, capsys):
    captioned, real = [], command.generate_candidates
    monkeypatch.setattr(
        command, "generate_candidates", lambda c, i, rows, *rest: captioned.extend(rows) or real(c, i, rows, *rest)
    )
    texts = {"b.png": "two pigs " * 9 + "there", "sub/copy.png": "a text of the copy"}
    for name, text in texts.items():
        (photos / name).with_suffix(".txt").write_text(text + "\n")
    before = contents(photos, "**/*.txt")
    arguments = [*MODEL, "--prefer_existing", "--sidecars", "--max_characters", "30", "--output", "album.jsonl"]
    for _ in range(2):
        assert album(*arguments, "--json") == 0
        assert json.loads(capsys.readouterr().out)["kept_text_files"] == []
        rows = {row["image_id"]: row for row in rows_of("album.jsonl")}
        assert {name: rows[name]["caption"] for name in texts} == texts, "whole, also that of a copy"
        assert not rows["b.png"]["meets_constraints"]
        assert rows["sub/c.png"]["caption"]
        assert rows["sub/c.png"]["old_caption"] is None
        assert {name: found for name, found in contents(photos, "**/*.txt").items() if name in before} == before
    ids = [row["image_id"] for row in rows_of("album.jsonl")]
    assert sorted(ids[row] for row in captioned) == sorted(["sub/c.png", HOSTILE]), "a.png has the caption of its copy"
    # Without the option, they stay the text of a person.
    assert album(*MODEL, "--sidecars", "--output", "album.jsonl", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)["kept_text_files"]) >= {"photos/b.txt"}


def shown_captions(name):
    """Captions of the CSV file and of the page of an album, which must be equal."""
    with Path(f"{name}.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    table = {row["image_id"]: row["caption"] for row in rows}
    page = Path(f"{name}.html").read_text(encoding="utf-8")
    shown = [html.unescape(text) for text in re.findall(r'<p class="caption"[^>]*>(.*?)</p>', page)]
    assert shown == [row["caption"] or "<i>(no caption)</i>" for row in rows if not row["unreadable"]]
    return table


def test_a_text_that_a_person_edited_is_what_csv_and_page_show(photos):
    arguments = [*MODEL, "--sidecars", "--output", "o.csv", "o.html"]
    assert album(*arguments) == 0
    before = shown_captions("o")
    (photos / "sub" / "c.txt").write_text("three cows under a tree\n")
    assert album(*arguments) == 0
    assert shown_captions("o") == before | {"sub/c.png": "three cows under a tree"}
    assert (photos / "sub" / "c.txt").read_text() == "three cows under a tree\n"


@pytest.mark.parametrize("second", ["o.jsonl", "p.jsonl", "q/o.jsonl"])
def test_own_texts_of_an_earlier_run_are_no_text_of_a_person(photos, second):
    arguments = [*MODEL, "--sidecars", "--prefer_existing", "--output"]
    assert album(*arguments, "o.jsonl") == 0
    first = {row["image_id"]: row["caption"] for row in rows_of("o.jsonl")}
    assert first["b.png"] == "two pigs"
    assert album(*arguments, second, "--max_characters", "5") == 0
    after = {row["image_id"]: row["caption"] for row in rows_of(second)}
    assert after["b.png"] == "two pigs"
    assert all(len(text) <= 5 for name, text in after.items() if name != "b.png")
    assert (photos / "a.txt").read_text().strip() == after["a.png"] != first["a.png"]


@pytest.mark.parametrize("content", ["", " \n"])
def test_an_empty_text_file_is_filled(photos, capsys, content):
    (photos / "a.txt").write_text(content)
    (photos / "sub" / "c.txt").write_text("\n.\n")  # not empty
    assert album(*MODEL, "--sidecars", "--do_not_mention", "pigs", ".", "--output", "o.jsonl", "--json") == 0
    assert json.loads(capsys.readouterr().out)["kept_text_files"] == ["photos/b.txt", "photos/sub/c.txt"]
    captions = {row["image_id"]: row["caption"] for row in rows_of("o.jsonl")}
    assert (photos / "a.txt").read_text() == captions["a.png"] + "\n" != "\n"


def test_text_files_that_are_read_are_not_listed_as_not_used(photos, caplog):
    (photos / "notes.pdf").write_bytes(b"%PDF")
    assert album("--output", "o.jsonl") == 0
    assert {row["image_id"]: row["caption"] for row in rows_of("o.jsonl")}["b.png"] == "two pigs"
    listed = [record.getMessage() for record in caplog.records if "not used" in record.getMessage()]
    assert len(listed) == 1
    assert ".pdf" in listed[0]
    assert ".txt" not in listed[0]


def test_without_a_scorer_texts_are_collected(photos, capsys, monkeypatch):
    for name in ("load_captioner", "load_scorer"):
        monkeypatch.setattr(command, name, None)
    (photos / "a.txt").write_text("two cows\n")
    assert main(["album", "photos", "--scorer", "none", "--output", "o.csv", "o.html"]) == 0
    texts = {name: text for name, text in shown_captions("o").items() if text}
    assert texts == {"a.png": "two cows", "b.png": "two pigs"}
    assert main(["album", "photos", "--scorer", "none", "--output", "p.csv", *MODEL]) == 2
    assert "--scorer none" in capsys.readouterr().err
    assert not Path("p.csv").exists()


def test_links_and_pipes_are_no_text_files(photos, tmp_path, capsys, caplog):
    secret = tmp_path / "secret.txt"
    secret.write_text("the password")
    (photos / "a.txt").symlink_to(secret)
    os.mkfifo(photos / "sub" / "c.txt")  # reading it would wait forever
    (photos / "sub" / "copy.txt").write_bytes("caf\xe9".encode("latin-1"))
    assert album(*MODEL, "--sidecars", "--overwrite", "--output", "o.csv", "--json") == 0
    assert sorted(json.loads(capsys.readouterr().out)["kept_text_files"]) == ["photos/a.txt", "photos/sub/c.txt"]
    assert "3 text files are not read" in caplog.text
    for path in (Path("o.csv"), photos / ".captionrl.json"):
        assert "password" not in path.read_text(encoding="utf-8")
    assert ((photos / "a.txt").is_symlink(), secret.read_text()) == (True, "the password")


def test_sources_read_tables(tmp_path, scenes):
    write_images([scenes[0]] * 2, ["a.png", "b.png"], tmp_path)
    write_rows(tmp_path / "metadata.jsonl", [{"file_name": "a.png", "text": "a pig"}])
    found = load_album_source(tmp_path)
    assert (found.image_ids, found.captions) == (["a.png"], [["a pig"]])
    assert found.paths == [str(tmp_path / "a.png")]
    (tmp_path / "c.csv").write_text("file_name,caption\na.png,'=sum\n")
    assert read_captions_for(found, tmp_path / "c.csv") == [["=sum"]]
    (tmp_path / "c.csv").write_text("x,caption\n1,2\n")
    with pytest.raises(ValueError, match="image_id"):
        read_captions_for(found, tmp_path / "c.csv")
    write_rows(tmp_path / "other.jsonl", [{"image_id": "z", "caption": "a"}])
    with pytest.raises(ValueError, match="None of the 1 captions"):
        read_captions_for(found, tmp_path / "other.jsonl")
    (tmp_path / "a.jpg").write_bytes(b"")
    paths = [str(tmp_path / "a.png"), str(tmp_path / "a.jpg")]
    with pytest.raises(ValueError, match="same text file"):
        check_sidecars(AlbumSource(paths, ["a.png", "a.jpg"]))


NAMES = [
    "a\nb.png",
    'it\'s "quoted".png',
    "tab\there.png",
    "'=1+1.png",
    "comma, semi;.png",
    "<\u2044script><b>.png",
    "\u2028 line.png",
]


def test_names_survive_every_output_and_are_read_back(tmp_path, monkeypatch, scenes, capsys):
    monkeypatch.chdir(tmp_path)
    photos = write_images(scenes, NAMES)
    arguments = [*MODEL, "--sidecars", "--output", "o.csv", "o.jsonl", "o.html"]
    assert album(*arguments) == 0
    captions = {row["image_id"]: row["caption"] for row in rows_of("o.jsonl")}
    assert sorted(captions) == sorted(NAMES)
    assert all(captions.values())
    with open("o.csv", encoding="utf-8-sig", newline="") as file:
        table = {row["image_id"]: row["caption"] for row in csv.DictReader(file)}
    assert table == {("'" + name if name.startswith("'=") else name): text for name, text in captions.items()}
    for name, text in captions.items():
        assert (photos / name).with_suffix(".txt").read_text(encoding="utf-8") == text + "\n"
    page = Path("o.html").read_text(encoding="utf-8")
    names = [html.unescape(name) for name in re.findall(r'<p class="id"><bdi>(.*?)</bdi>', page, re.DOTALL)]
    assert sorted(names) == sorted(NAMES)
    # The text files are read back.
    source = load_album_source("photos")
    assert dict(zip(source.image_ids, source.captions, strict=True)) == {n: [t] for n, t in captions.items()}
    # Both tables find their images again.
    for path in ("o.csv", "o.jsonl"):
        assert read_captions_for(source, path) == source.captions
    # The same command changes nothing.
    before = {name: content for name, (content, _) in contents(".").items()}
    assert album(*arguments) == 0
    assert {name: content for name, (content, _) in contents(".").items()} == before
