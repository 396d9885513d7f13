"""`captionrl caption` on a folder of photographs: all are captioned, each is opened once, and a summary is printed."""

import json
import weakref

import pytest
from PIL import Image

from hf_captionrl.cli import main
from hf_captionrl.data import quarantine as image_reader
from hf_captionrl.evaluation.caption_files import read_caption_file

QUICK = ["--num_beams", "1", "--max_new_tokens", "3"]
KINDS = {"a.jpg": "JPEG", "b.PNG": "PNG", "c.webp": "WEBP", "d.gif": "GIF", "e.bmp": "BMP", "f.tiff": "TIFF"}


def photograph(path, size=(40, 30), shade=90, kind=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade % 256, 90, 20)).save(path, kind)


def caption(output, folder, *more):
    command = [
        "caption",
        "scenes:blip-mle",
        "--output",
        str(output),
        "--dataset",
        "imagefolder",
        "--data_dir",
        str(folder),
    ]
    return main([*command, *QUICK, *more])


@pytest.fixture
def album(tmp_path):
    """Six formats, subfolders, an unusual name, and files of operating systems."""
    folder = tmp_path / "photos"
    for name, kind in KINDS.items():
        photograph(folder / name, kind=kind)
    photograph(folder / "2024" / "summer" / "g.jpeg")
    photograph(folder / "2024" / 'h "quoted"\nsecond line é.jpg')
    photograph(folder / "__MACOSX" / "._a.jpg")
    (folder / ".a.jpg").write_bytes(b"x")
    (folder / "Thumbs.db").write_bytes(b"x")
    return folder


def test_all_images_of_a_folder_without_metadata_are_captioned(album, tmp_path, capsys):
    output = tmp_path / "x.jsonl"
    assert caption(output, album) == 0
    said = capsys.readouterr()
    assert said.out == f"{output}: captions of 8 of 8 images.\n"
    assert "captionrl: photos: all 8 images." in said.err
    found = read_caption_file(output).captions
    assert list(found) == sorted([*KINDS, "2024/summer/g.jpeg", '2024/h "quoted"\nsecond line é.jpg'])
    assert not output.with_suffix(".quarantine.jsonl").exists()
    # The folder itself is a name, too; a second run has nothing left to do.
    command = ["caption", "scenes:blip-mle", "--output", str(tmp_path / "y.jsonl"), "--dataset", str(album), *QUICK]
    assert main([*command, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["images"], summary["of"], summary["split"], summary["unreadable"]) == (8, 8, "all", [])
    assert main(command) == 0
    assert "captions of 8 of 8 images, 8 of them from an earlier run." in capsys.readouterr().out
    assert (tmp_path / "y.jsonl").read_bytes() == output.read_bytes()


def test_metadata_without_splits_are_divided_only_on_request(tmp_path, capsys):
    folder, rows = tmp_path / "photos", []
    for number in range(20):
        photograph(folder / f"{number}.png", shade=number * 12)
        rows.append({"file_name": f"{number}.png", "text": "a photo"})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:18]))
    assert caption(tmp_path / "x.jsonl", folder) == 0
    said = capsys.readouterr()
    assert "captions of 18 of 18 images." in said.out
    assert caption(tmp_path / "test.jsonl", folder, "--split", "test", "--test_share", "0.5") == 0
    said = capsys.readouterr()
    assert "captions of 9 of 9 images." in said.out
    assert "9 images, split 'test' (there are 18 all)" in said.err
    assert caption(tmp_path / "few.jsonl", folder, "--max_images", "3") == 0
    assert "captions of 3 of 18 images (--max_images 3)." in capsys.readouterr().out
    assert caption(tmp_path / "none.jsonl", folder, "--test_share", "0.9", "--validation_share", "0.2") == 2
    assert "leave nothing for train" in capsys.readouterr().err


def test_default_split_is_test_and_is_printed(tmp_path, capsys):
    folder, rows = tmp_path / "photos", []
    for number in range(6):
        photograph(folder / f"{number}.png", shade=number * 12)
        rows.append({"file_name": f"{number}.png", "split": ["train", "val", "test"][number % 3]})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for split, number in ((None, 2), ("all", 6), ("val+test", 4), ("train", 2)):
        output = tmp_path / f"{split}.jsonl"
        assert caption(output, folder, *([] if split is None else ["--split", split])) == 0
        said = capsys.readouterr()
        assert f"captions of {number} of {number} images." in said.out
        if split is None:
            assert "2 images, split 'test' (there are 2 train, 2 validation, 2 test)." in said.err
    assert set(read_caption_file(tmp_path / "None.jsonl").captions) == {"2.png", "5.png"}
    for bad, why in (("test+", "empty name"), ("test+test", "twice"), ("nowhere", "no split 'nowhere'")):
        assert caption(tmp_path / "x.jsonl", folder, "--split", bad) == 2
        assert why in capsys.readouterr().err


def test_unreadable_images_are_counted_and_listed(album, tmp_path, capsys):
    (album / "broken.jpg").write_bytes(b"no image")
    whole = (album / "a.jpg").read_bytes()
    (album / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (album / "empty.png").touch()
    output = tmp_path / "x.jsonl"
    assert caption(output, album, "--batch_size", "2") == 2
    assert "max_bad_fraction" in capsys.readouterr().err
    assert len(output.with_suffix(".quarantine.jsonl").read_text().splitlines()) >= 1
    # The same command with a larger share continues.
    more = ["--max_bad_fraction", "0.5", "--batch_size", "2"]
    assert caption(output, album, *more) == 0
    said = capsys.readouterr().out
    assert "captions of 8 of 11 images" in said
    assert "3 cannot be read and are listed in" in said
    for name in ("'broken.jpg' (image_unreadable)", "'cut.jpg' (image_truncated)", "'empty.png' (image_unreadable)"):
        assert name in said
    listed = [json.loads(line) for line in output.with_suffix(".quarantine.jsonl").read_text().splitlines()]
    assert [entry["image_id"] for entry in listed] == ["broken.jpg", "cut.jpg", "empty.png"]
    assert len(read_caption_file(output).captions) == 8
    assert caption(output, album, *more, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["images"], summary["of"], summary["written"], summary["resumed"]) == (8, 11, 0, 8)
    (album / "broken.jpg").write_bytes(whole)
    assert caption(output, album, *more) == 0
    assert "captions of 9 of 11 images, 8 of them from an earlier run" in capsys.readouterr().out


def test_folder_without_images_gives_one_error_line(tmp_path, capsys):
    folder = tmp_path / "photos"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(b"x")
    assert caption(tmp_path / "x.jsonl", folder) == 2
    assert "no images" in capsys.readouterr().err
    (folder / "a.heic").touch()
    assert caption(tmp_path / "x.jsonl", folder) == 2
    assert "1 .heic" in capsys.readouterr().err
    (folder / "b.png").symlink_to(tmp_path / "secret.png")
    assert caption(tmp_path / "x.jsonl", folder) == 2
    assert "is not below image_root" in capsys.readouterr().err
    (folder / "b.png").unlink()
    (folder / "c.png").write_bytes(b"x")
    assert caption(tmp_path / "x.jsonl", folder) == 2
    assert "nothing is left" in capsys.readouterr().err


def test_images_are_opened_once_and_one_batch_is_in_memory(tmp_path, monkeypatch):
    """24 photographs of 3 megapixels, 9 MB each decoded: 215 MB together."""
    folder = tmp_path / "photos"
    for number in range(24):
        photograph(folder / f"{number}.jpg", (2000, 1500), number * 10)
    opened = []
    open_image = image_reader.open_image
    alive = []

    def counted(value, **settings):
        image = open_image(value, **settings)
        opened.append(value["path"])
        alive.append(weakref.ref(image))
        most.append(sum(reference() is not None for reference in alive))
        return image

    most = []
    monkeypatch.setattr(image_reader, "open_image", counted)
    assert caption(tmp_path / "x.jsonl", folder, "--batch_size", "2") == 0
    assert len(opened) == len(set(opened)) == 24
    assert 2 <= max(most) <= 3  # a batch


def test_file_is_not_resumed_for_another_folder_with_equal_names(tmp_path, capsys):
    for folder, shade in (("100", 10), ("101", 200)):
        photograph(tmp_path / folder / "IMG_0001.jpg", shade=shade)
    assert caption(tmp_path / "c.jsonl", tmp_path / "100") == 0
    assert caption(tmp_path / "c.jsonl", tmp_path / "101") == 2
    assert "source" in capsys.readouterr().err
    assert caption(tmp_path / "c.jsonl", tmp_path / "100") == 0


def test_other_files_in_the_folder_do_not_hide_images(tmp_path, capsys):
    for name in ("test_me.jpg", "holiday.jpg", "b.jpg"):
        photograph(tmp_path / "photos" / name)
    (tmp_path / "photos" / "gps.csv").write_text("a,b\n1,2\n")
    (tmp_path / "photos" / "backup.zip").write_bytes(b"PK")
    few = ["--output", str(tmp_path / "c.jsonl"), *QUICK]
    assert main(["caption", "scenes:blip-mle", "--dataset", str(tmp_path / "photos"), *few]) == 0
    assert "captions of 3 of 3 images" in capsys.readouterr().out


def test_data_dir_without_imagefolder_is_refused(tmp_path, capsys):
    photograph(tmp_path / "photos" / "a.jpg")
    few = ["--output", str(tmp_path / "c.jsonl"), *QUICK]
    assert main(["caption", "scenes:blip-mle", "--data_dir", str(tmp_path / "photos"), *few]) == 2
    assert "--dataset imagefolder" in capsys.readouterr().err
