"""`captionrl album` on files: outputs, resuming, copies, hostile names, bad input."""

import csv
import json
import os
import re
import shlex
import weakref
from pathlib import Path

import pyarrow.parquet
import pytest
from PIL import Image

from hf_captionrl.apps.album import album as album_result
from hf_captionrl.apps.album import album as steps
from hf_captionrl.apps.album import command as dry_run
from hf_captionrl.apps.album import page as report_page
from hf_captionrl.apps.album import sources as image_facts
from hf_captionrl.apps.album.album import PROBLEMS, Album, AlbumImage, describe_album
from hf_captionrl.apps.album.command import OwnFiles, sidecar_paths
from hf_captionrl.apps.album.options import duration
from hf_captionrl.apps.album.sources import AlbumSource, load_album_source, read_captions_for
from hf_captionrl.cli import main
from hf_captionrl.scenes import load_scenes
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


@pytest.fixture
def sidecar(tmp_path):
    path = tmp_path / "1.txt"
    path.write_text("mine", encoding="utf-8")
    return path


def written(kept, path, text):
    with kept.writing([path]):
        path.write_text(text, encoding="utf-8")


def test_old_texts_may_contain_any_separator(tmp_path, sidecar):
    text = "one\u2028two\u2029three\x85four\x0bfive\n"
    sidecar.write_bytes(text.encode("utf-8"))
    written(OwnFiles(tmp_path / "out.jsonl"), sidecar, "new")
    assert OwnFiles(tmp_path / "out.jsonl").old_texts() == {"1.txt": text}


def test_an_incomplete_line_is_dropped(tmp_path, sidecar):
    kept = OwnFiles(tmp_path / "out.jsonl")
    written(kept, sidecar, "new")
    with open(kept.old, "ab") as file:
        file.write(b'{"file": "2.txt", "te')  # the disk was full
    assert kept.old_texts() == {"1.txt": "mine"}
    other = tmp_path / "2.txt"
    other.write_text("theirs", encoding="utf-8")
    written(kept, other, "new")
    assert kept.old_texts() == {"1.txt": "mine", "2.txt": "theirs"}
    assert [json.loads(line)["file"] for line in kept.old.read_text(encoding="utf-8").splitlines()] == [
        "1.txt",
        "2.txt",
    ]


def test_an_edit_after_writing_is_not_ours(tmp_path, sidecar):
    kept = OwnFiles(tmp_path / "out.jsonl")
    written(kept, sidecar, "new")
    assert kept.is_ours(sidecar)
    sidecar.write_text("edited", encoding="utf-8")
    assert OwnFiles(tmp_path / "out.jsonl").foreign([sidecar]) == [sidecar]


QUICK_DRY_RUN = "--num_beams 1 --num_samples 1 --max_new_tokens 6 --batch_size 2 --cache_dir cache".split()
MODELS = ["--model", "scenes:blip-mle", "--scorer", "scenes:siglip-held-out"]


@pytest.fixture
def photos_dry_run(tmp_path, monkeypatch, scenes):
    """Six images and a copy of the first one; the files of the first batch cannot be read."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(6):
        scenes[number].save(folder / f"{number}.png")
    scenes[0].save(folder / "copy.png")
    for name in ("-a.png", "-b.png", "-c.png"):
        (folder / name).write_bytes(b"no image")
    return folder


def album_dry_run(*more):
    return main(["album", "photos", *MODELS, *QUICK_DRY_RUN, "--output", "o.jsonl", *more])


def contents_dry_run():
    return {str(path): path.stat().st_mtime_ns for path in Path().glob("**/*")}


def facts(capsys, *more):
    before = contents_dry_run()
    capsys.readouterr()
    assert album_dry_run("--dry_run", "--json", *more) == 0
    assert contents_dry_run() == before, "nothing is written"
    return json.loads(capsys.readouterr().out)


def test_first_readable_images_are_measured(photos_dry_run, capsys, monkeypatch):
    measured, real = [], steps.generate_candidates
    monkeypatch.setattr(
        steps, "generate_candidates", lambda c, images, *rest: measured.append(images.rows) or real(c, images, *rest)
    )
    found = facts(capsys)
    assert (found["images"], found["finished"], found["dry_run"]) == (10, 0, True)
    assert found["seconds"] > 0
    assert measured == [[3, 4]]
    assert album_dry_run("--dry_run") == 0
    said = capsys.readouterr().out
    assert said.startswith("Would write o.jsonl for 10 images in about ")
    assert said.endswith("s. Nothing was written.\n")


def test_album_that_cannot_be_read_is_refused(photos_dry_run, capsys):
    for path in photos_dry_run.iterdir():
        path.write_bytes(b"no image")
    assert album_dry_run("--dry_run") == 2
    assert "No image of the album can be read" in capsys.readouterr().err


def timed(monkeypatch):
    monkeypatch.setattr(dry_run, "seconds_per_image", lambda work: (1.0, 100.0))


def test_finished_shards_take_no_time(photos_dry_run, capsys, monkeypatch):
    timed(monkeypatch)
    assert facts(capsys)["seconds"] == 10 * 101
    assert facts(capsys, "--processes", "4")["seconds"] == 10 * 101 / 4
    real = steps.generate_candidates

    def killed(captioner, images, rows, *rest):
        if 5 in rows:
            raise KeyboardInterrupt
        return real(captioner, images, rows, *rest)

    monkeypatch.setattr(steps, "generate_candidates", killed)
    assert album_dry_run("--rows_per_shard", "2") != 0
    # All images are read. Two are captioned, a third one is a copy of them, and three cannot be read.
    assert (facts(capsys)["finished"], facts(capsys)["seconds"]) == (6, 400)
    monkeypatch.setattr(steps, "generate_candidates", real)
    assert album_dry_run("--rows_per_shard", "2") == 0
    found = facts(capsys)
    assert (found["finished"], found["seconds"]) == (10, 0)
    # A new image, and one that was replaced.
    (photos_dry_run / "1.png").write_bytes((photos_dry_run / "2.png").read_bytes()[:-1] + b"x")
    (photos_dry_run / "5.png").rename(photos_dry_run / "new.png")
    found = facts(capsys)
    assert (found["finished"], found["seconds"]) == (8, 202)
    assert album_dry_run("--dry_run") == 0
    assert "for 10 images, of which an earlier run has finished 8, in about 202 s" in capsys.readouterr().out
    # Other candidates, another scorer, a new start.
    assert facts(capsys, "--num_beams", "2")["seconds"] == 2 + 700, "three cannot be read"
    assert facts(capsys, "--scorer", "scenes:clip-reward")["seconds"] >= 10
    assert facts(capsys, "--overwrite")["seconds"] == 1010


def test_near_copies_of_a_finished_run_are_finished(photos_dry_run, capsys, monkeypatch):
    timed(monkeypatch)
    assert album_dry_run("--copy_threshold", "-1") == 0
    captioned = sum(1 for _ in Path("o.shards").glob("candidates-*/part-*"))
    assert captioned == 1
    assert facts(capsys)["seconds"] == 0


def test_diagnosis_compares_all_captions_again(photos_dry_run, capsys, monkeypatch):
    timed(monkeypatch)
    Path("old.jsonl").write_text(json.dumps({"image_id": "0.png", "caption": "a pig"}) + "\n")
    command = ["album", "photos", "--captions", "old.jsonl", *MODELS[2:], *QUICK_DRY_RUN, "--output", "o.jsonl"]
    assert main(command) == 0
    capsys.readouterr()
    assert main([*command, "--dry_run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == 1000


def test_diagnosis_whose_first_images_have_no_caption_is_estimated(photos_dry_run, capsys):
    Path("old.jsonl").write_text(json.dumps({"image_id": "copy.png", "caption": "a pig"}) + "\n")
    command = ["album", "photos", "--captions", "old.jsonl", *MODELS[2:], *QUICK_DRY_RUN, "--output", "o.jsonl"]
    assert main([*command, "--dry_run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] >= 0
    assert not os.path.exists("o.jsonl")


def test_training_counts_unless_it_is_finished(photos_dry_run, capsys, monkeypatch):
    timed(monkeypatch)
    adapt = ["--adapt", "1h", "--held_out_scorer", "scenes:clip-reward"]
    assert facts(capsys, *adapt)["seconds"] == 3600 + 2 * 100 * 10 + 1010
    Path("o.adapter").mkdir()
    Path("o.adapter/decision.json").write_text(json.dumps({"kept": False}))
    assert facts(capsys, *adapt)["seconds"] == 1010


PAGE = Path(__file__).parents[3] / "docs" / "album.md"
QUICK_GUIDES = "--num_beams 1 --num_samples 2 --max_new_tokens 8 --cache_dir cache".split()
STAND_INS = {"Salesforce/blip-image-captioning-base": "scenes:blip-mle", "10m": "1s"}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture
def photos_guides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images = load_scenes(num_train=0, num_validation=0, num_test=15)["test"]["image"][:3]
    (tmp_path / "photos").mkdir()
    for number, image in enumerate(images):
        image.save(tmp_path / "photos" / f"{number}.png")
    rows = [{"image_id": f"{number}.png", "caption": "a pig"} for number in range(3)]
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_guides_write_their_files(photos_guides, command, capsys):
    words = [STAND_INS.get(word, word) for word in shlex.split(command)]
    assert words[:2] == ["captionrl", "album"]
    scorer = [] if "--adapt" in words else ["--scorer", "scenes:siglip-held-out"]
    assert main([*words[1:], *QUICK_GUIDES, *scorer]) == 0
    assert "images in" in capsys.readouterr().out
    named = words[words.index("--output") + 1 :] if "--output" in words else ["album.jsonl"]
    assert all(Path(name).stat().st_size for name in named if "." in name)
    if "--sidecars" in words:
        assert all(Path(f"photos/{n}.txt").read_text().startswith("ohwx dog") for n in range(3))


def test_guides_of_three_jobs_are_there():
    text = " ".join(COMMANDS)
    assert all(word in text for word in ("--max_characters 125", "--drop_shared", "--captions", "--adapt"))
    rows = dict(re.findall(r"^\| (\w+) \| (.*?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert {name: rows.get(name) for name in PROBLEMS} == PROBLEMS


def test_program_of_the_guide_writes_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (program,) = blocks("python")
    exec(compile(program, str(PAGE), "exec"), {})
    assert Path("album.csv").read_text(encoding="utf-8-sig").startswith("image_id,caption")
    assert capsys.readouterr().out


QUICK_PHOTOGRAPHS_AND_NAMES = (
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
    assert main(["album", "photos", "--model", "scenes:blip-mle", *QUICK_PHOTOGRAPHS_AND_NAMES, *outputs]) == 0
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
def photos_photographs_and_names(tmp_path, monkeypatch, scenes):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, image in zip(NAMES, scenes, strict=False):
        image.save(folder / name)
    return folder


def test_names_survive_every_output_and_are_read_back(photos_photographs_and_names, capsys):
    outputs = ["o.csv", "o.jsonl", "o.html", "photos/metadata.jsonl"]
    command = [
        "album",
        "photos",
        "--model",
        "scenes:blip-mle",
        *QUICK_PHOTOGRAPHS_AND_NAMES,
        "--sidecars",
        "--output",
        *outputs,
    ]
    assert main(command) == 0
    rows = [json.loads(line) for line in Path("o.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    captions = {row["image_id"]: row["caption"] for row in rows}
    assert sorted(captions) == sorted(NAMES)
    assert all(captions.values())
    with open("o.csv", encoding="utf-8-sig", newline="") as file:
        table = {row["image_id"]: row["caption"] for row in csv.DictReader(file)}
    assert table == {("'" + name if name.startswith("'=") else name): text for name, text in captions.items()}
    for name, text in captions.items():
        assert (photos_photographs_and_names / name).with_suffix(".txt").read_text(encoding="utf-8") == text + "\n"
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


def test_list_separated_by_nul_has_names_with_newlines(photos_photographs_and_names, capsys):
    Path("list.txt").write_bytes(b"".join(f"photos/{name}\0".encode() for name in NAMES))
    assert (
        main(["album", "list.txt", "--model", "scenes:blip-mle", *QUICK_PHOTOGRAPHS_AND_NAMES, "--output", "o.jsonl"])
        == 0
    )
    rows = [json.loads(line) for line in Path("o.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert [row["image_id"] for row in rows] == [f"photos/{name}" for name in NAMES]
    assert json.loads(capsys.readouterr().out)["captions"] == len(NAMES)
