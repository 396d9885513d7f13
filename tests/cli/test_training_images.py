"""Images that a captioner was trained on do not test it: `captionrl caption` and `evaluate` leave them out and say so."""

import json
import shutil

import pytest

from hf_captionrl.cli.main import main
from hf_captionrl.data import load_captions
from hf_captionrl.evaluation.caption_files import read_caption_file
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from hf_captionrl.utils.model_files import model_path
from tests.tiny import write_photos

NAMES = [f"{number}.png" for number in range(8)]
TRAINED, OTHERS = set(NAMES[:5]), set(NAMES[5:])


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Eight photographs with captions, and `model`, trained on the first five of them."""
    root = tmp_path_factory.mktemp("trained")
    write_photos(root / "photos", load_scenes(num_train=0, num_validation=0, num_test=8)["test"])
    rows = load_captions("imagefolder", data_dir=str(root / "photos"), split="all")
    assert rows["image_id"] == NAMES
    args = SmileConfig(
        str(root / "model"), max_steps=1, use_cpu=True, report_to="none", save_strategy="steps", save_steps=1
    )
    trainer = SmileTrainer(model_path("scenes:blip-mle"), args, rows.select(range(5)))
    trainer.train()
    trainer.save_model()
    return root


@pytest.fixture
def here(photos, tmp_path, monkeypatch):
    """A copy of the folder for one test."""
    shutil.copytree(photos, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def caption(*more, model="model", output="smile.jsonl", folder="photos"):
    common = ["--dataset", "imagefolder", "--data_dir", folder, "--num_beams", "1", "--max_new_tokens", "4"]
    return main(["caption", model, *common, "--output", output, *more])


def evaluate(*files, more=()):
    common = ["--dataset", "imagefolder", "--data_dir", "photos", "--scorer", "none", "--language_model", "none"]
    return main(["evaluate", "--captions", *files, *common, "--suite", "sle", "--json", *more])


@pytest.mark.parametrize("more", [[], ["--processes", "1"]])
def test_caption_leaves_the_training_images_out(here, capsys, more):
    output = "smile" if more else "smile.jsonl"
    assert caption(*more, output=output) == 0
    assert set(read_caption_file(output).captions) == OTHERS
    said = capsys.readouterr().err
    assert "5 of 8 images" in said
    assert "--include_training_images" in said
    # Asked for, they are captioned, and the file knows which they are.
    assert caption("--include_training_images", *more, output=f"all-{output}") == 0
    assert set(read_caption_file(f"all-{output}").captions) == set(NAMES)
    assert "5 of 8 images" in capsys.readouterr().err
    assert evaluate(f"all-{output}") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["num_images"] == 3
    assert "5 of 8 images ('0.png', '1.png', '2.png', ...) were in the training of model" in printed.err.replace(
        "\n  ", " "
    )


def test_evaluate_compares_all_files_on_images_that_no_captioner_was_trained_on(here, capsys):
    assert caption(model="scenes:blip-mle", output="before.jsonl") == 0
    assert caption() == 0
    assert main(["caption", "model", "--dataset", "scenes", "--max_images", "2", "--output", "scenes.jsonl"]) == 0
    shutil.rmtree("model")  # what the file says is enough
    capsys.readouterr()
    assert evaluate("before.jsonl", "smile.jsonl") == 0
    assert json.loads(capsys.readouterr().out)["num_images"] == 3
    assert evaluate("before.jsonl", "smile.jsonl", more=["--include_training_images"]) == 2  # has no captions of five
    capsys.readouterr()
    assert evaluate("before.jsonl", more=["--split", "test"]) == 0  # of the split, of captions of all images
    assert json.loads(capsys.readouterr().out)["num_images"] == 1
    assert evaluate("before.jsonl", "scenes.jsonl", more=["--split", "test"]) == 2
    capsys.readouterr()
    assert evaluate("before.jsonl") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["num_images"] == 8
    assert "training" not in printed.err


def test_images_are_recognised_by_their_bytes(here, capsys):
    # Other photographs with the same names are not left out ...
    write_photos(here / "others", load_scenes(num_train=8, num_validation=0, num_test=0)["train"]).unlink()
    assert caption(folder="others", output="others.jsonl") == 0
    assert set(read_caption_file("others.jsonl").captions) == set(NAMES)
    # ... and those of the training are under any name, and for every checkpoint and every captioner that continues it.
    (here / "others" / "copy.png").write_bytes((here / "photos/0.png").read_bytes())
    assert caption(folder="others", model="model/checkpoint-1", output="copy.jsonl") == 0
    assert set(read_caption_file("copy.jsonl").captions) == set(NAMES)
    args = SmileConfig("more", max_steps=1, use_cpu=True, report_to="none", save_strategy="no")
    rows = load_captions("imagefolder", data_dir="photos", split="all").select([5])
    trainer = SmileTrainer("model", args, rows)
    trainer.train()
    trainer.save_model()
    assert caption(model="more", output="more.jsonl") == 0
    assert set(read_caption_file("more.jsonl").captions) == OTHERS - {"5.png"}


def test_where_nothing_is_left_the_remedy_is_named(here, capsys):
    for name in OTHERS:
        (here / "photos" / name).unlink()
    (here / "photos/metadata.jsonl").unlink()
    assert caption() == 2
    assert "--include_training_images" in capsys.readouterr().err
    assert not (here / "smile.run.json").exists()
