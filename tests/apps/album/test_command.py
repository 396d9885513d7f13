"""`captionrl album` on files: outputs, resuming, copies, hostile names, bad input."""

import csv
import json
import os
from pathlib import Path

import pyarrow.parquet
import pytest
from PIL import Image

from hf_captionrl.apps.album import album as album_result
from hf_captionrl.apps.album.album import Album, AlbumImage
from hf_captionrl.apps.album.command import sidecar_paths
from hf_captionrl.apps.album.options import duration
from hf_captionrl.apps.album.sources import AlbumSource, load_album_source, read_captions_for
from hf_captionrl.cli import main
from hf_captionrl.utils.io import LineFile

QUICK = [
    "--scorer",
    "scenes:siglip-held-out",
    "--num_beams",
    "2",
    "--num_samples",
    "2",
    "--max_new_tokens",
    "10",
    "--batch_size",
    "3",
    "--cache_dir",
    "cache",
]
MODEL = ["--model", "scenes:blip-mle"]
HOSTILE = '=1+"x"\n<script>alert(1)</script>.png'


@pytest.fixture
def photos(tmp_path, monkeypatch, scenes):
    """Four scenes in two folders, one of them twice, one with a caption, an unreadable file and a hostile name."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    (folder / "sub").mkdir(parents=True)
    for name, image in zip(["a.png", "b.png", "sub/c.png", HOSTILE.replace("/", "")], scenes[:4], strict=True):
        image.save(folder / name)
    scenes[0].save(folder / "sub" / "copy.png")
    (folder / "b.txt").write_text("two pigs\n", encoding="utf-8")
    (folder / "broken.png").write_bytes(b"no image")
    return folder


def lines_of(path):
    return Path(path).read_text(encoding="utf-8").split("\n")[:-1]


def contents(folder):
    """The content of every file below a folder, and when it was written."""
    files = [path for path in Path(folder).glob("**/*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def album(*arguments):
    return main(["album", "photos", *arguments, *QUICK])


def test_all_outputs(photos, capsys):
    assert album(*MODEL, "--output", "o.csv", "o.jsonl", "o.html", "metadata.jsonl", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["images"], summary["captions"], summary["copies"], summary["unreadable"]) == (6, 5, 1, 1)
    assert summary["unreadable_images"] == ["broken.png"]
    rows = {row["image_id"]: row for row in map(json.loads, lines_of("o.jsonl"))}
    assert rows["sub/copy.png"]["caption"] == rows["a.png"]["caption"] != ""
    assert rows["sub/copy.png"]["copy_of"] == "a.png"
    assert rows["b.png"]["old_caption"] == "two pigs"
    with open("o.csv", encoding="utf-8-sig", newline="") as file:
        table = list(csv.DictReader(file))
    name = HOSTILE.replace("/", "")
    assert [row["image_id"].removeprefix("'") for row in table] == list(rows)
    assert table[[*rows].index(name)]["image_id"] == "'" + name, "no formula"
    lines = [json.loads(line) for line in lines_of("metadata.jsonl")]
    assert {line["file_name"] for line in lines} == {f"photos/{i}" for i, row in rows.items() if row["caption"]}
    page = Path("o.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert page.count("data:image/png;base64") >= 5
    assert sorted(p.name for p in photos.iterdir() if p.suffix == ".txt") == ["b.txt"]
    # The table is read back, and none of its captions is a duplicate.
    assert album("--captions", "o.csv", "--output", "diagnosed.jsonl", "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["distinct"] == summary["distinct"] == 1


def test_choice_changes_without_new_candidates_and_other_settings_are_refused(photos, capsys):
    assert album(*MODEL, "--output", "o.jsonl") == 0
    whole, kept = Path("o.jsonl").read_text(encoding="utf-8"), contents("o.shards")
    assert len(kept) == 4  # two folders of one shard and its manifest
    os.unlink("o.jsonl")
    assert album(*MODEL, "--output", "o.jsonl") == 0
    assert Path("o.jsonl").read_text(encoding="utf-8") == whole
    # Constraints change the choice, not the candidates.
    assert album(*MODEL, "--output", "o.jsonl", "--max_characters", "12") == 0
    assert all(len(json.loads(line)["caption"]) <= 12 for line in lines_of("o.jsonl"))
    assert contents("o.shards") == kept
    capsys.readouterr()
    assert album(*MODEL, "--output", "o.jsonl", "--seed", "4") == 2
    assert "written with seed 0, but seed is now 4" in capsys.readouterr().err
    with LineFile(Path("o.lock")):
        assert album(*MODEL, "--output", "o.jsonl") == 2
    assert "Another process" in capsys.readouterr().err
    assert contents("o.shards") == kept
    assert album(*MODEL, "--output", "o.jsonl", "--seed", "4", "--overwrite") == 0
    assert set(contents("o.shards")).isdisjoint(name for name in kept if "candidates" in name)


def test_json_summary_has_the_shared_facts(photos, capsys):
    names = ["a.png", "b.png", "sub/c.png", HOSTILE.replace("/", "")]
    rows = [{"image_id": name, "caption": f"a pig of {n} kg"} for n, name in enumerate(names)]
    Path("given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert album("--captions", "given.jsonl", "--group_by", "album", "--json") == 0
    (shared,) = json.loads(capsys.readouterr().out)["shared"]
    assert (shared["group"], shared["num_images"], shared["shared"]) == ("", 4, ["a pig", "kg"])


@pytest.mark.parametrize("text", ["=1+1", "'=1", "''-x", "\tindented", "\rx", "-5 degrees", "'tis", 'plain, "quoted"'])
def test_every_text_survives_a_csv_file(tmp_path, text):
    found = Album([AlbumImage("a.png", text), AlbumImage("@b", "b")], 2, 1.0)
    path = found.to_csv(tmp_path / "o.csv")
    with open(path, encoding="utf-8-sig", newline="") as file:
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for row in csv.reader(file) for cell in row)
    source = AlbumSource(["a.png", "b.png"], ["a.png", "@b"])
    assert read_captions_for(source, path) == [[text], ["b"]]


def test_jsonl_file_has_one_object_per_image(tmp_path):
    images = [AlbumImage("a.png", "a pig", rank=1, margin=0.123456, is_distinct=True), AlbumImage("b.png", "")]
    found = Album(images, 2, 1.0)
    path = found.to_jsonl(tmp_path / "o.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert rows == found.rows()
    assert [(row["image_id"], row["caption"], row["margin"]) for row in rows] == [
        ("a.png", "a pig", 0.1235),
        ("b.png", "", None),
    ]


def test_every_output_is_reserved(photos, capsys):
    with LineFile(Path("b.lock")):
        assert album("--output", "a.jsonl", "b.csv") == 2
        assert "Another process is writing 'b.lock'" in capsys.readouterr().err
        assert album("--output", "a.jsonl", "c.csv") == 0
    Path("b.lock").unlink()
    assert album("--output", "a.jsonl", "b.csv", "a.csv", "sub/b.html") == 0
    assert not list(Path().glob("**/[a-z]*.lock")), "locks are removed"


def test_text_files_of_a_folder_have_one_writer(photos, capsys):
    with LineFile(photos / ".captionrl.lock"):
        assert album(*MODEL, "--sidecars", "--overwrite", "--output", "other.jsonl") == 2
        assert "without --sidecars" in capsys.readouterr().err
        assert (photos / "b.txt").read_text() == "two pigs\n"
        assert album(*MODEL, "--output", "other.jsonl") == 0
    assert album(*MODEL, "--sidecars", "--overwrite", "--output", "other.jsonl") == 0
    assert not (photos / ".captionrl.lock").exists()


def test_sidecars_are_not_overwritten(photos, capsys):
    arguments = [*MODEL, "--sidecars", "--drop_shared", "--trigger", "ohwx thing"]
    assert album(*arguments) == 2
    error = capsys.readouterr().err
    assert "b.txt" in error
    assert "--overwrite" in error
    assert (photos / "b.txt").read_text() == "two pigs\n"
    assert sorted(p.name for p in photos.glob("**/*.txt")) == ["b.txt"]
    assert album(*arguments, "--overwrite") == 0
    files = {p.name: p.read_text() for p in photos.glob("**/*.txt")}
    assert set(files) == {"a.txt", "b.txt", "c.txt", "copy.txt", HOSTILE.replace("/", "").replace(".png", ".txt")}
    assert all(text.startswith("ohwx thing") for text in files.values())
    kept = {"file": "photos/b.txt", "text": "two pigs\n"}
    assert json.loads(Path("album.old.jsonl").read_text(encoding="utf-8")) == kept
    # The same command, without --overwrite, continues; its own text files are not captions that existed.
    before = Path("album.jsonl").read_text(encoding="utf-8")
    (photos / "a.txt").unlink()
    assert album(*arguments) == 0
    assert Path("album.jsonl").read_text(encoding="utf-8") == before
    assert {p.name: p.read_text() for p in photos.glob("**/*.txt")} == files


def test_files_of_others_are_never_replaced_unasked_and_never_lost(photos, capsys):
    assert album(*MODEL, "--output", "o.jsonl") == 0
    # Text files and outputs that a later command adds are checked, too.
    (photos / "a.txt").write_text("by hand\n")
    Path("mine.csv").write_text("my table\n")
    for more in (["--sidecars"], []):
        assert album(*MODEL, "--output", "o.jsonl", *([] if more else ["mine.csv"]), *more) == 2
        assert "files exist that this command did not write" in capsys.readouterr().err
    assert ((photos / "a.txt").read_text(), Path("mine.csv").read_text()) == ("by hand\n", "my table\n")
    # Captions of a file do not hide what stands in the text files.
    Path("given.jsonl").write_text(json.dumps({"image_id": "a.png", "caption": "given"}) + "\n")
    arguments = [*MODEL, "--output", "o.jsonl", "mine.csv", "--sidecars", "--captions", "given.jsonl", "--overwrite"]
    expected = {"photos/a.txt": "by hand\n", "photos/b.txt": "two pigs\n", "mine.csv": "my table\n"}
    for _ in range(2):  # a second time only files of this command are replaced
        assert album(*arguments) == 0
        lines = [json.loads(line) for line in lines_of("o.old.jsonl")]
        assert {line["file"]: line["text"] for line in lines} == expected
        assert len(lines) == 3
    # A text file that was edited since is someone's again.
    (photos / "a.txt").write_text("edited\n")
    assert album(*MODEL, "--output", "o.jsonl", "mine.csv", "--sidecars", "--captions", "given.jsonl") == 2
    assert "'photos/a.txt'" in capsys.readouterr().err


def test_diagnosis_needs_no_captioner(photos, capsys):
    assert album() == 0
    rows = {row["image_id"]: row for row in map(json.loads, lines_of("album.jsonl"))}
    assert rows["b.png"]["caption"] == "two pigs"
    assert rows["a.png"]["problems"] == ["missing"]
    assert [path.name.partition("-")[0] for path in Path("album.shards").iterdir()] == ["images"]
    assert "missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "o.txt"], "--output"),
        (["--output", "o.csv", "o.csv"], "names a file twice"),
        (["--output", "photos/dir.csv"], "--output"),
        (["--sidecars"], "Use --model"),
        (["--adapt", "soon"], "not a duration"),
        (["--captions", "nothing.jsonl"], "no file"),
        (["--temperature", "0"], "temperature is 0"),
        (["--rows_per_shard", "4"], "--rows_per_shard 4 is not a multiple of --batch_size 3. Use 6."),
        (["--address", "auto"], "Use --engine ray."),
    ],
)
def test_invalid_options_are_refused(photos, capsys, arguments, message):
    (photos / "dir.csv").mkdir()
    assert album(*arguments) == 2
    assert message in capsys.readouterr().err


def test_empty_folders_and_foreign_files_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos" / "nested").mkdir(parents=True)
    assert album(*MODEL) == 2
    assert "contains no files" in capsys.readouterr().err
    (tmp_path / "photos" / "a.png").write_bytes(b"")
    assert album(*MODEL) == 2
    assert "can be read" in capsys.readouterr().err
    (tmp_path / "o.csv").write_text("mine")
    assert album(*MODEL, "--output", "o.csv") == 2
    assert (tmp_path / "o.csv").read_text() == "mine"


def test_own_metadata_do_not_hide_new_images(photos, scenes, capsys):
    output = ["--output", "photos/metadata.jsonl", "--json"]
    assert album(*MODEL, *output) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 6
    named = [json.loads(line)["file_name"] for line in lines_of("photos/metadata.jsonl")]
    assert "new.png" not in named
    scenes[5].save(photos / "new.png")
    assert album(*MODEL, *output) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["images"] == 7  # with the one that cannot be read
    assert sorted(json.loads(line)["file_name"] for line in lines_of("photos/metadata.jsonl")) == sorted(
        [*named, "new.png"]
    )
    # Metadata of others say which images belong to the album.
    (photos / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": "a pig"}) + "\n")
    assert album(*MODEL, "--output", "o.jsonl", "--json") == 0
    assert json.loads(capsys.readouterr().out)["images"] == 1


def test_full_disk_loses_nothing(photos, monkeypatch, capsys):
    assert album(*MODEL, "--output", "o.jsonl") == 0
    before, kept = Path("o.jsonl").read_text(encoding="utf-8"), contents("o.shards")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(album_result, "write_jsonl", full)
        assert album(*MODEL, "--output", "o.jsonl", "--max_characters", "9") == 1
    assert "No space left" in capsys.readouterr().err
    assert (Path("o.jsonl").read_text(encoding="utf-8"), contents("o.shards")) == (before, kept)
    # What is written into the file before the command is repeated is not the command's.
    Path("o.jsonl").write_text("edited", encoding="utf-8")
    assert album(*MODEL, "--output", "o.jsonl", "--max_characters", "9") == 2
    assert Path("o.jsonl").read_text(encoding="utf-8") == "edited"
    assert album(*MODEL, "--output", "o.jsonl", "--max_characters", "9", "--overwrite") == 0
    assert json.loads(Path("o.old.jsonl").read_text(encoding="utf-8")) == {"file": "o.jsonl", "text": "edited"}


def test_sources_read_lists_of_files(tmp_path, scenes):
    names = ["a.png", "b.png"]
    for name in names:
        scenes[0].save(tmp_path / name)
    (tmp_path / "list.txt").write_text("a.png\n\nb.png\n", encoding="utf-8")
    assert load_album_source(tmp_path / "list.txt").image_ids == names
    (tmp_path / "null.txt").write_bytes(b"a.png\0b.png\0")
    assert load_album_source(tmp_path / "null.txt").image_ids == names
    (tmp_path / "mark.txt").write_text("a.png\nb.png\n", encoding="utf-8-sig")
    assert load_album_source(tmp_path / "mark.txt").image_ids == names
    (tmp_path / "bad.txt").write_text("../x.png\n")
    with pytest.raises(ValueError, match="not below"):
        load_album_source(tmp_path / "bad.txt")
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": "a pig"}) + "\n")
    found = load_album_source(tmp_path)
    assert (found.image_ids, found.captions) == (["a.png"], [["a pig"]])
    assert found.paths == [str(tmp_path / "a.png")]
    (tmp_path / "c.csv").write_text("file_name,caption\na.png,'=sum\n")
    assert read_captions_for(found, tmp_path / "c.csv") == [["=sum"]]
    (tmp_path / "c.csv").write_text("x,caption\n1,2\n")
    with pytest.raises(ValueError, match="has the columns"):
        read_captions_for(found, tmp_path / "c.csv")
    (tmp_path / "other.jsonl").write_text(json.dumps({"image_id": "z", "caption": "a"}) + "\n")
    with pytest.raises(ValueError, match="None of the 1 captions"):
        read_captions_for(found, tmp_path / "other.jsonl")
    with pytest.raises(ValueError, match="Two images are called 'a'"):
        AlbumSource([scenes[0]] * 2, ["a", "a"])
    (tmp_path / "a.jpg").write_bytes(b"")
    paths = [str(tmp_path / "a.png"), str(tmp_path / "a.jpg")]
    with pytest.raises(ValueError, match="same text file"):
        sidecar_paths(AlbumSource(paths, ["a.png", "a.jpg"]))


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_local_files_of_a_table_have_text_files(tmp_path, scenes, suffix):
    (tmp_path / "sub").mkdir()
    for name in ("a.png", "sub/b.png"):
        scenes[0].save(tmp_path / name)
    (tmp_path / "a.txt").write_text("a pig")
    table = tmp_path / f"table.{suffix}"
    if suffix == "csv":
        table.write_text("file_name\na.png\nsub/b.png\n")
    elif suffix == "jsonl":
        table.write_text('{"file_name": "a.png"}\n{"file_name": "sub/b.png"}\n')
    else:
        pyarrow.parquet.write_table(pyarrow.table({"file_name": ["a.png", "sub/b.png"]}), table)
    found = load_album_source(table)
    assert found.paths == [str(tmp_path / "a.png"), str(tmp_path / "sub" / "b.png")]
    assert found.captions == [["a pig"], []]
    assert found.root == tmp_path, "folders are groups"
    expected = [tmp_path / "a.txt", tmp_path / "sub" / "b.txt"]
    assert sidecar_paths(found) == expected


def test_durations_are_parsed_with_their_unit():
    assert [duration(text) for text in ("90s", "10m", "1.5h")] == [90, 600, 5400]
    for text in ("10", "m", "0s", "-1m"):
        with pytest.raises(ValueError, match="not a duration"):
            duration(text)


def test_photographs_of_24_megapixels_are_opened_one_by_one(tmp_path):
    from hf_captionrl.apps.album.sources import opened_chunks

    for number in range(3):
        Image.new("L", (6000, 4000), number).save(tmp_path / f"{number}.jpg")
    chunks = [rows for rows, _ in opened_chunks([tmp_path / f"{n}.jpg" for n in range(3)], range(3), 16)]
    assert chunks == [[0], [1], [2]]
