"""Image folders: which files are found, which are skipped with a reason, and which folders are refused."""

import json
import logging
import os
import shutil

import pytest
from PIL import Image

from hf_captionrl.data import check_captions, load_caption_splits, load_captions, open_image
from hf_captionrl.data.columns import undecoded
from hf_captionrl.data.loading import image_suffixes, list_images
from tests.data.photos import make_folder, png

ALL = {"split": "all", "require_captions": False}


def bare(folder, *names):
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    return folder


def load(folder, **more):
    return load_captions("imagefolder", data_dir=folder, **ALL, **more)


def test_folder_without_metadata_is_loaded_with_subfolders(tmp_path):
    folder = bare(tmp_path / "p", "b.png", "a.PNG", "2024/summer/c.png", "2024/a.png", "notes/d.Jpeg")
    for name in ("imagefolder", str(folder)):
        ds = load_captions(name, data_dir=folder if name == "imagefolder" else None, **ALL)
        assert ds["image_id"][:] == ["2024/a.png", "2024/summer/c.png", "a.PNG", "b.png", "notes/d.Jpeg"]
        assert ds["captions"][:] == [[]] * 5
        assert open_image(undecoded(ds)[1]["image"]).tobytes() == open_image(png(2)).tobytes()
    checked, report = check_captions(ds, require_captions=False)
    assert (len(checked), report.entries) == (5, ())
    with pytest.raises(ValueError, match=r"has no metadata.jsonl.*its 5 images have no captions"):
        load_captions("imagefolder", data_dir=folder)


def test_every_format_that_can_be_opened_is_found(tmp_path):
    """Files in every format that Pillow writes."""
    written = []
    for suffix, kind in [
        *[(".jpg", "JPEG"), (".jfif", "JPEG"), (".png", "PNG"), (".webp", "WEBP"), (".gif", "GIF"), (".bmp", "BMP")],
        *[
            (".tif", "TIFF"),
            (".tiff", "TIFF"),
            (".ppm", "PPM"),
            (".tga", "TGA"),
            (".jp2", "JPEG2000"),
            (".dib", "DIB"),
        ],
    ]:
        Image.new("RGB", (16, 12), (200, 90, 20)).save(tmp_path / f"x{suffix}", kind)
        written.append(f"x{suffix}")
    ds = load(tmp_path)
    assert ds["image_id"][:] == sorted(written)
    for row in undecoded(ds):
        assert open_image(row["image"]).size == (16, 12)
    assert not {".eps", ".txt", ".mp4", ".pdf", ".ico", ".heic", ""} & image_suffixes()


def test_system_files_are_skipped_and_other_files_counted(tmp_path, caplog):
    folder = bare(tmp_path, "a.png", ".b.png", "._a.png", ".trash/c.png", "__MACOSX/d.png", "@eaDir/e.png")
    for name in ("Thumbs.db", "desktop.ini", ".DS_Store", "x.heic", "y.HEIC", "notes.txt", "README"):
        (folder / name).write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        assert load(folder)["image_id"][:] == ["a.png"]
    assert "4 other files (2 .heic, 1 .txt, 1 without a suffix)" in caplog.text


@pytest.mark.parametrize(
    "name", ["a\nb.png", 'it\'s "quoted".png', "Zürich 東京 🐶.png", "a,b;c.png", "..a.png ", "%20.png"]
)
def test_odd_file_names(tmp_path, name):
    folder = bare(tmp_path / "p", name.strip() if name.endswith(" ") else name, "sub dir/x.png")
    ds = load(folder)
    found = [entry for entry in os.listdir(folder) if entry.endswith(".png") and not entry.startswith(".")]
    assert ds["image_id"][:] == sorted([*found, "sub dir/x.png"])
    assert all(open_image(row["image"]).size == (12, 10) for row in undecoded(ds))


def test_names_that_are_not_utf_8_are_counted(tmp_path, caplog):
    bare(tmp_path, "a.png")
    for number in (0xFF, 0xFE):
        (tmp_path / os.fsdecode(b"caf" + bytes([number]) + b".png")).write_bytes(png(1))
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path)["image_id"][:] == ["a.png"]
    assert "2 names are not UTF-8" in caplog.text


def test_links_that_leave_the_folder_are_refused(tmp_path, caplog):
    folder = bare(tmp_path / "p", "a.png", "sub/b.png")
    outside = bare(tmp_path / "other", "secret.png")
    (folder / "inside.png").symlink_to(folder / "a.png")
    (folder / "again").symlink_to(folder / "sub")
    (folder / "loop").symlink_to(folder)
    with caplog.at_level(logging.WARNING):
        assert load(folder)["image_id"][:] == ["a.png", "inside.png", "sub/b.png"]
    assert "2 links to folders are not followed" in caplog.text
    (folder / "z.png").symlink_to(outside / "secret.png")
    with pytest.raises(ValueError, match=r"z\.png.* is not below image_root.*Set image_root"):
        load(folder)
    # The remedy: a folder that holds both.
    ds = load(folder, image_root=tmp_path)
    assert ds["image_id"][:] == ["a.png", "inside.png", "sub/b.png", "z.png"]
    assert open_image(undecoded(ds)[3]["image"]).size == (12, 10)
    (folder / "z.png").unlink()
    (folder / "gone.png").symlink_to(folder / "nowhere.png")
    _, report = check_captions(load(folder), require_captions=False, max_bad_fraction=0.5)
    assert [(entry.image_id, entry.reason) for entry in report.entries] == [("gone.png", "image_not_found")]


def test_folders_without_images(tmp_path):
    for require in (True, False):
        with pytest.raises(ValueError, match=r"no images .*it has nothing"):
            load_captions("imagefolder", data_dir=tmp_path, require_captions=require)
    (tmp_path / "a.heic").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").touch()
    with pytest.raises(ValueError, match=r"no images .*'a.heic', 'sub'.*2 other files \(1 .heic, 1 .txt\)"):
        load(tmp_path)


def test_a_folder_that_cannot_be_read_is_named(tmp_path, caplog, monkeypatch):
    """The system call is made to fail, because root may read every folder."""
    folder, scandir = bare(tmp_path, "a.png", "locked/b.png"), os.scandir

    def refused(path):
        if os.fspath(path).rstrip("/").endswith("locked"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with caplog.at_level(logging.WARNING):
        assert load(folder)["image_id"][:] == ["a.png"]
    assert "1 folders cannot be read, such as 'locked/' (Permission denied)" in caplog.text


def test_listing_a_folder_opens_no_file(tmp_path, monkeypatch):
    folder = bare(tmp_path, *(f"{n // 10}/{n}.png" for n in range(40)))

    def refuse(*arguments, **settings):
        raise AssertionError("opened")

    monkeypatch.setattr(Image, "open", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    assert len(list_images(folder).images) == 40


def test_folders_named_like_splits_without_metadata(tmp_path):
    folder = bare(tmp_path, *(f"{name}/{n}.png" for name in ("train", "val", "test") for n in range(3)))
    assert len(load(folder)) == 9
    found = load_captions("imagefolder", data_dir=folder, split="test", require_captions=False)
    assert found["image_id"][:] == ["test/0.png", "test/1.png", "test/2.png"]
    bare(folder, "top.png")  # then they are ordinary subfolders
    assert len(load(folder)) == 10


# --- with metadata ---


def test_images_without_a_row_are_counted(tmp_path, caplog):
    folder = make_folder(tmp_path, 4)
    bare(folder, "extra.png", "sub/extra.png", ".hidden.png")
    with caplog.at_level(logging.WARNING):
        ds = load_captions("imagefolder", data_dir=folder, split="all")
    assert len(ds) == 4
    assert (
        "2 of 6 images are not named by any row of metadata.jsonl and are not used, such as 'extra.png'" in caplog.text
    )
    caplog.clear()
    # No warning if every image has a row, however its path is written.
    with (folder / "metadata.jsonl").open("a") as file:
        file.write(json.dumps({"file_name": "./extra.png", "captions": ["x"]}) + "\n")
        file.write(json.dumps({"file_name": "sub/../sub/extra.png", "captions": ["x"]}) + "\n")
    with caplog.at_level(logging.WARNING):
        load_captions("imagefolder", data_dir=folder, split="all")
    assert "not named by any row" not in caplog.text


def test_split_folder_without_metadata_is_reported(tmp_path, caplog):
    make_folder(tmp_path / "train", 3)
    bare(tmp_path, "test/0.png", "test/1.png")
    with caplog.at_level(logging.WARNING):
        load_caption_splits("imagefolder", data_dir=tmp_path, split_fractions=(1, 0, 0))
    assert "2 of 5 images are not named by any row of train/metadata.jsonl" in caplog.text


def test_second_metadata_file_is_refused_or_reported(tmp_path, caplog):
    folder = make_folder(tmp_path / "p", 2)
    (folder / "metadata.csv").write_text("file_name,caption\n0.png,other\n")
    for require in (True, False):
        with pytest.raises(ValueError, match=r"has metadata.jsonl and metadata.csv, and only one can be read"):
            load_captions("imagefolder", data_dir=folder, require_captions=require)
    (folder / "metadata.csv").unlink()
    make_folder(folder / "train", 2)
    with pytest.raises(ValueError, match=r"has metadata.jsonl and train/metadata.jsonl"):
        load_captions("imagefolder", data_dir=folder)
    shutil.rmtree(folder / "train")
    make_folder(folder / "2024", 2)
    with caplog.at_level(logging.WARNING):
        assert len(load_captions("imagefolder", data_dir=folder, split="all")) == 2
    assert "2024/metadata.jsonl is not read. Set data_dir" in caplog.text
    caplog.clear()
    (folder / "metadata.jsonl").unlink()
    with caplog.at_level(logging.WARNING):
        assert len(load(folder)) == 4
    assert "2024/metadata.jsonl is not read" in caplog.text


def test_metadata_without_captions_is_accepted_for_captioning(tmp_path):
    folder = make_folder(tmp_path, 3, column="date")
    with pytest.raises(ValueError, match="no column 'captions'"):
        load_captions("imagefolder", data_dir=folder)
    ds = load(folder)
    assert ds["captions"][:] == [[]] * 3
    assert ds["image_id"][:] == ["0.png", "1.png", "2.png"]
