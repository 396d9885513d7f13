"""`captionrl album --dry_run`: what is counted, what is measured, and that nothing is written."""

import json
import os
from pathlib import Path

import pytest

from hf_captionrl.apps.album import album as steps
from hf_captionrl.apps.album import command as dry_run
from hf_captionrl.cli import main

QUICK = "--num_beams 1 --num_samples 1 --max_new_tokens 6 --batch_size 2 --cache_dir cache".split()
MODELS = ["--model", "scenes:blip-mle", "--scorer", "scenes:siglip-held-out"]


@pytest.fixture
def photos(tmp_path, monkeypatch, scenes):
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


def album(*more):
    return main(["album", "photos", *MODELS, *QUICK, "--output", "o.jsonl", *more])


def contents():
    return {str(path): path.stat().st_mtime_ns for path in Path().glob("**/*")}


def facts(capsys, *more):
    before = contents()
    capsys.readouterr()
    assert album("--dry_run", "--json", *more) == 0
    assert contents() == before, "nothing is written"
    return json.loads(capsys.readouterr().out)


def test_first_readable_images_are_measured(photos, capsys, monkeypatch):
    measured, real = [], steps.generate_candidates
    monkeypatch.setattr(
        steps, "generate_candidates", lambda c, images, *rest: measured.append(images.rows) or real(c, images, *rest)
    )
    found = facts(capsys)
    assert (found["images"], found["finished"], found["dry_run"]) == (10, 0, True)
    assert found["seconds"] > 0
    assert measured == [[3, 4]]
    assert album("--dry_run") == 0
    said = capsys.readouterr().out
    assert said.startswith("Would write o.jsonl for 10 images in about ")
    assert said.endswith("s. Nothing was written.\n")


def test_album_that_cannot_be_read_is_refused(photos, capsys):
    for path in photos.iterdir():
        path.write_bytes(b"no image")
    assert album("--dry_run") == 2
    assert "No image of the album can be read" in capsys.readouterr().err


def timed(monkeypatch):
    monkeypatch.setattr(dry_run, "seconds_per_image", lambda work: (1.0, 100.0))


def test_finished_shards_take_no_time(photos, capsys, monkeypatch):
    timed(monkeypatch)
    assert facts(capsys)["seconds"] == 10 * 101
    assert facts(capsys, "--processes", "4")["seconds"] == 10 * 101 / 4
    real = steps.generate_candidates

    def killed(captioner, images, rows, *rest):
        if 5 in rows:
            raise KeyboardInterrupt
        return real(captioner, images, rows, *rest)

    monkeypatch.setattr(steps, "generate_candidates", killed)
    assert album("--rows_per_shard", "2") != 0
    # All images are read. Two are captioned, a third one is a copy of them, and three cannot be read.
    assert (facts(capsys)["finished"], facts(capsys)["seconds"]) == (6, 400)
    monkeypatch.setattr(steps, "generate_candidates", real)
    assert album("--rows_per_shard", "2") == 0
    found = facts(capsys)
    assert (found["finished"], found["seconds"]) == (10, 0)
    # A new image, and one that was replaced.
    (photos / "1.png").write_bytes((photos / "2.png").read_bytes()[:-1] + b"x")
    (photos / "5.png").rename(photos / "new.png")
    found = facts(capsys)
    assert (found["finished"], found["seconds"]) == (8, 202)
    assert album("--dry_run") == 0
    assert "for 10 images, of which an earlier run has finished 8, in about 202 s" in capsys.readouterr().out
    # Other candidates, another scorer, a new start.
    assert facts(capsys, "--num_beams", "2")["seconds"] == 2 + 700, "three cannot be read"
    assert facts(capsys, "--scorer", "scenes:clip-reward")["seconds"] >= 10
    assert facts(capsys, "--overwrite")["seconds"] == 1010


def test_near_copies_of_a_finished_run_are_finished(photos, capsys, monkeypatch):
    timed(monkeypatch)
    assert album("--copy_threshold", "-1") == 0
    captioned = sum(1 for _ in Path("o.shards").glob("candidates-*/part-*"))
    assert captioned == 1
    assert facts(capsys)["seconds"] == 0


def test_diagnosis_compares_all_captions_again(photos, capsys, monkeypatch):
    timed(monkeypatch)
    Path("old.jsonl").write_text(json.dumps({"image_id": "0.png", "caption": "a pig"}) + "\n")
    command = ["album", "photos", "--captions", "old.jsonl", *MODELS[2:], *QUICK, "--output", "o.jsonl"]
    assert main(command) == 0
    capsys.readouterr()
    assert main([*command, "--dry_run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == 1000


def test_diagnosis_whose_first_images_have_no_caption_is_estimated(photos, capsys):
    Path("old.jsonl").write_text(json.dumps({"image_id": "copy.png", "caption": "a pig"}) + "\n")
    command = ["album", "photos", "--captions", "old.jsonl", *MODELS[2:], *QUICK, "--output", "o.jsonl"]
    assert main([*command, "--dry_run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] >= 0
    assert not os.path.exists("o.jsonl")


def test_training_counts_unless_it_is_finished(photos, capsys, monkeypatch):
    timed(monkeypatch)
    adapt = ["--adapt", "1h", "--held_out_scorer", "scenes:clip-reward"]
    assert facts(capsys, *adapt)["seconds"] == 3600 + 2 * 100 * 10 + 1010
    Path("o.adapter").mkdir()
    Path("o.adapter/decision.json").write_text(json.dumps({"kept": False}))
    assert facts(capsys, *adapt)["seconds"] == 1010
