"""`captionrl caption` with the shipped captioner: output, and resuming after `kill -9`."""

import csv
import json
import os
import signal
import weakref

import pytest
from PIL import Image

import hf_captionrl.utils.io
from hf_captionrl.cli import main
from hf_captionrl.data import quarantine as image_reader
from hf_captionrl.evaluation.caption_files import read_caption_file
from tests.processes import Forked

SAMPLES = ["--do_sample", "--num_return_sequences", "5", "--batch_size", "4", "--max_new_tokens", "12"]


def caption(output, *more, images=10):
    return main(["caption", "scenes:blip-mle", "--output", str(output), "--max_images", str(images), *more])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Five samples per image, written by an uninterrupted run."""
    path = tmp_path_factory.mktemp("whole") / "five.jsonl"
    assert caption(path, *SAMPLES) == 0
    return path


def test_one_line_per_image_in_order(whole):
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    assert [line["image_id"] for line in lines] == [f"test-{i:05d}" for i in range(10)]
    for line in lines:
        assert line["caption"] == line["captions"][0]
        assert len(line["captions"]) == 5
    assert len({c for line in lines for c in line["captions"]}) > 5
    assert json.loads(whole.with_suffix(".run.json").read_text())["settings"]["top_k"] == 0


def test_resume_after_sigkill_gives_the_same_file(whole, tmp_path, capsys):
    path = tmp_path / "five.jsonl"
    command = ["caption", "scenes:blip-mle", "--output", str(path), "--max_images", "10", *SAMPLES]
    with Forked(write_and_be_killed, 3, command) as run:
        assert run.wait() == -signal.SIGKILL
    torn = path.read_bytes()
    assert not torn.endswith(b"\n")  # the third batch, half-way
    assert whole.read_bytes().startswith(torn)
    with pytest.raises(ValueError, match="is not JSON"):
        read_caption_file(path)
    before = torn.count(b"\n")
    assert before >= 8
    assert caption(path, *SAMPLES, "--json") == 0
    said = capsys.readouterr()
    assert "incomplete last line" in said.err
    summary = json.loads(said.out)
    assert (summary["resumed"], summary["written"]) == (before, 10 - before)
    assert path.read_bytes() == whole.read_bytes()


def test_resume_with_other_settings_is_refused(whole, capsys):
    size = whole.stat().st_size
    assert caption(whole, *SAMPLES, "--temperature", "0.5") == 2
    assert "written with temperature 1.0, but temperature is now 0.5" in capsys.readouterr().err
    settings = whole.with_suffix(".run.json")
    text = settings.read_text()
    settings.unlink()
    assert caption(whole, *SAMPLES) == 2
    assert "is missing" in capsys.readouterr().err
    settings.write_text(text)
    assert whole.stat().st_size == size
    assert caption(whole, *SAMPLES) == 0  # nothing left to do
    assert "10 of them from an earlier run" in capsys.readouterr().out


def test_resume_with_more_images_and_overwrite(tmp_path, capsys):
    path = tmp_path / "mle.jsonl"
    assert caption(path, "--num_beams", "1", images=2) == 0
    assert "(--max_images 2)" in capsys.readouterr().out
    first = path.read_bytes()
    assert caption(path, "--num_beams", "1", images=3) == 0
    assert path.read_bytes().startswith(first)
    assert len(read_caption_file(path).captions) == 3
    assert "captions" not in json.loads(path.read_text().splitlines()[0])
    assert caption(path, "--num_beams", "2", "--num_return_sequences", "2", "--overwrite", images=1) == 0
    assert [len(c) for c in read_caption_file(path).captions.values()] == [2]


def test_failed_start_keeps_the_existing_file_and_leaves_no_other(tmp_path, capsys):
    path = tmp_path / "mle.jsonl"
    path.write_text('{"image_id": "test-00000", "caption": "kept"}\n')
    for more in (["--output", str(path), "--overwrite"], ["--output", str(tmp_path / "x.jsonl")]):
        assert main(["caption", str(tmp_path / "no-model"), *more, "--max_images", "1"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert "kept" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


QUICK = ["--num_beams", "1", "--max_new_tokens", "3"]
NAMES = ["a.jpg", "b.PNG", "2024/summer/g.jpeg", '2024/h "quoted"\nsecond line é.jpg']


def photograph(path, shade=90):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 30), (shade, 90, 20)).save(path)


def caption_folder(output, folder, *more):
    command = ["caption", "scenes:blip-mle", "--output", str(output), "--dataset", "imagefolder"]
    return main([*command, "--data_dir", str(folder), *QUICK, *more])


@pytest.fixture
def album(tmp_path):
    """Subfolders, an unusual name, and a file of an operating system."""
    for name in (*NAMES, "__MACOSX/._a.jpg"):
        photograph(tmp_path / "photos" / name)
    return tmp_path / "photos"


def test_all_images_of_a_folder_without_metadata_are_captioned(album, tmp_path, capsys):
    output = tmp_path / "x.jsonl"
    assert caption_folder(output, album) == 0
    said = capsys.readouterr()
    assert said.out == f"{output}: captions of 4 of 4 images.\n"
    assert "captionrl: photos: all 4 images." in said.err
    assert list(read_caption_file(output).captions) == sorted(NAMES)
    assert not output.with_suffix(".quarantine.jsonl").exists()
    # The folder itself is a name, too.
    command = ["caption", "scenes:blip-mle", "--output", str(tmp_path / "y.jsonl"), "--dataset", str(album), *QUICK]
    assert main([*command, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["images"], summary["of"], summary["split"], summary["unreadable"]) == (4, 4, "all", [])
    assert (tmp_path / "y.jsonl").read_bytes() == output.read_bytes()


def test_unreadable_images_are_counted_and_listed(album, tmp_path, capsys):
    (album / "broken.jpg").write_bytes(b"no image")
    whole = (album / "a.jpg").read_bytes()
    (album / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (album / "empty.png").touch()
    output = tmp_path / "x.jsonl"
    assert caption_folder(output, album, "--batch_size", "2") == 2
    said = capsys.readouterr()
    assert "max_bad_fraction" in said.err
    assert "captions of 4 of 7 images" in said.out  # the others are captioned
    assert len(output.with_suffix(".quarantine.jsonl").read_text().splitlines()) == 3
    captions = output.read_bytes()
    more = ["--max_bad_fraction", "0.5", "--batch_size", "2"]
    assert caption_folder(output, album, *more) == 0
    said = capsys.readouterr().out
    assert "captions of 4 of 7 images" in said
    assert "3 cannot be read and are listed in" in said
    for name in ("'broken.jpg' (image_unreadable)", "'cut.jpg' (image_truncated)", "'empty.png' (image_unreadable)"):
        assert name in said
    assert output.read_bytes() == captions
    assert caption_folder(output, album, *more, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["images"], summary["of"], summary["written"], summary["resumed"]) == (4, 7, 0, 4)
    (album / "broken.jpg").write_bytes(whole)
    assert caption_folder(output, album, *more) == 0
    assert "captions of 5 of 7 images, 4 of them from an earlier run" in capsys.readouterr().out


def test_images_are_opened_once_and_one_batch_is_in_memory(tmp_path, monkeypatch):
    for number in range(8):
        photograph(tmp_path / "photos" / f"{number}.jpg", shade=number * 10)
    opened, alive, most, open_image = [], [], [], image_reader.open_image

    def counted(value, **settings):
        image = open_image(value, **settings)
        opened.append(value["path"])
        alive.append(weakref.ref(image))
        most.append(sum(reference() is not None for reference in alive))
        return image

    monkeypatch.setattr(image_reader, "open_image", counted)
    assert caption_folder(tmp_path / "x.jsonl", tmp_path / "photos", "--batch_size", "2") == 0
    assert len(opened) == len(set(opened)) == 8
    assert 2 <= max(most) <= 3  # a batch


def test_replaced_images_do_not_keep_their_captions(tmp_path, capsys):
    for number in range(3):
        photograph(tmp_path / "photos" / f"{number}.png", shade=number * 80)
    output = tmp_path / "c.jsonl"
    assert caption_folder(output, tmp_path / "photos") == 0
    whole = output.read_text().splitlines(keepends=True)
    os.utime(tmp_path / "photos" / "0.png", (1e9, 1e9))  # copied again
    assert caption_folder(output, tmp_path / "photos") == 0
    photograph(tmp_path / "photos" / "1.png", shade=200)
    capsys.readouterr()
    assert caption_folder(output, tmp_path / "photos") == 2
    assert "Images have changed since" in (said := capsys.readouterr().err)
    assert "'1.png'" in said
    assert output.read_text() == "".join(whole)
    output.write_text(whole[0] + whole[2])
    for _ in range(2):
        assert caption_folder(output, tmp_path / "photos") == 0
    assert list(read_caption_file(output).captions) == ["0.png", "2.png", "1.png"]


def test_a_last_line_without_a_line_feed_is_kept_if_it_is_whole(tmp_path, capsys):
    for number in range(3):
        photograph(tmp_path / "photos" / f"{number}.png", shade=number * 80)
    output = tmp_path / "c.jsonl"
    assert caption_folder(output, tmp_path / "photos") == 0
    first = output.read_text().splitlines(keepends=True)[0]
    output.write_text(first + '{"image_id": "1.png", "caption": "mine"}')
    assert caption_folder(output, tmp_path / "photos") == 0
    assert read_caption_file(output).captions["1.png"] == ["mine"]
    output.write_text(first + "my notes")
    assert caption_folder(output, tmp_path / "photos") == 2
    assert output.read_text() == first + "my notes"
    output.write_text(first + '{"image_id": "1.png", "capt')  # what a kill leaves
    assert caption_folder(output, tmp_path / "photos") == 0
    assert '"capt' in capsys.readouterr().err  # shown before it is removed
    assert len(read_caption_file(output).captions) == 3


class KillingOs:
    """The module `os`, whose `write` stops half-way."""

    def __init__(self, last):
        self.left = last

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, file, data):
        self.left -= 1
        if self.left:
            return os.write(file, data)
        os.write(file, data[: len(data) // 2 + 3])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


def write_and_be_killed(last, arguments):
    """Run a command until its n-th write to a growing file; in a separate process."""
    hf_captionrl.utils.io.os = KillingOs(last)
    return main(arguments)


@pytest.mark.parametrize("more", [SAMPLES, ["--max_new_tokens", "4"]])
def test_csv_has_the_columns_of_the_lines_and_is_read_again(tmp_path, more):
    path = tmp_path / "x.csv"
    assert caption(path, *more, images=4) == 0
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    with path.open(newline="", encoding="utf-8-sig") as file:
        table = list(csv.DictReader(file))
    assert [row.keys() for row in table] == [row.keys() for row in rows]
    assert [row["caption"] for row in table] == [row["caption"] for row in rows]
    assert read_caption_file(path).captions == read_caption_file(tmp_path / "x.jsonl").captions
    before = path.read_bytes()
    assert caption(path, *more, images=5) == 0  # resumes
    assert path.read_bytes().startswith(before)
    assert len(read_caption_file(path).captions) == 5
    assert caption(tmp_path / "x.txt", *more, images=4) == 2
