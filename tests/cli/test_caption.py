"""`captionrl caption` with the shipped captioner: output, and resuming after `kill -9`."""

import json
import signal

import pytest
from PIL import Image

from hf_captionrl.cli import main
from hf_captionrl.data import open_image
from hf_captionrl.evaluation.caption_files import read_caption_file
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.model_files import model_path
from tests.cli.killed_writer import write_and_be_killed
from tests.processes import Forked
from tests.tolerances import close

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
    made = json.loads(whole.with_suffix(".run.json").read_text())
    assert made["settings"]["top_k"] == 0
    assert made["settings"]["seed"] == 0
    assert "torch" in made["versions"]


def test_rerank_writes_the_caption_most_similar_to_its_image(whole, tmp_path):
    path = tmp_path / "best.jsonl"
    assert caption(path, *SAMPLES, "--rerank", "scenes:clip-reward") == 0
    scorer = load_scorer(model_path("scenes:clip-reward"))
    images = [open_image(row["image"]) for row in load_scenes(num_train=0, num_validation=0)["test"].select(range(10))]
    best, groups = read_caption_file(path).captions, read_caption_file(whole).captions
    assert list(best) == list(groups)
    for image, written, group in zip(images, best.values(), groups.values(), strict=True):
        similarity = [float(scorer.text_features([text])[0] @ scorer.image_features([image])[0]) for text in group]
        assert len(written) == 1
        assert written[0] in group
        assert similarity[group.index(written[0])] == close(max(similarity), dtype="float32", magnitude=1)
    assert (
        caption(path, *SAMPLES, "--rerank", "scenes:siglip-held-out") == 2
    )  # a file of another scorer is not resumed


def test_resume_after_sigkill_gives_the_same_file(whole, tmp_path, capsys):
    path = tmp_path / "five.jsonl"
    command = ["caption", "scenes:blip-mle", "--output", str(path), "--max_images", "10", *SAMPLES]
    with Forked(write_and_be_killed, 3, command) as run:
        assert run.wait() == -signal.SIGKILL
    torn = path.read_bytes()
    assert not torn.endswith(b"\n")  # the third batch, half-way
    assert whole.read_bytes().startswith(torn)
    with pytest.raises(ValueError, match="is incomplete"):
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
    assert caption(whole, "--num_beams", "5", "--num_return_sequences", "5") == 2
    assert "--overwrite" in capsys.readouterr().err
    settings = whole.with_suffix(".run.json")
    text = settings.read_text()
    settings.unlink()
    assert caption(whole, *SAMPLES) == 2
    assert "is missing" in capsys.readouterr().err
    settings.write_text(text)
    assert whole.stat().st_size == size
    assert caption(whole, *SAMPLES) == 0  # nothing left to do
    assert "10 of them from an earlier run" in capsys.readouterr().out


def test_resume_with_more_images_and_overwrite(tmp_path):
    path = tmp_path / "mle.jsonl"
    assert caption(path, "--num_beams", "1", images=2) == 0
    first = path.read_bytes()
    assert caption(path, "--num_beams", "1", images=3) == 0
    assert path.read_bytes().startswith(first)
    assert len(read_caption_file(path).captions) == 3
    assert "captions" not in json.loads(path.read_text().splitlines()[0])
    assert caption(path, "--num_beams", "2", "--num_return_sequences", "2", "--overwrite", images=1) == 0
    assert [len(c) for c in read_caption_file(path).captions.values()] == [2]


def test_failed_start_keeps_the_existing_file(tmp_path, capsys):
    path = tmp_path / "mle.jsonl"
    path.write_text('{"image_id": "test-00000", "caption": "kept"}\n')
    assert (
        main(["caption", str(tmp_path / "no-model"), "--output", str(path), "--overwrite", "--max_images", "1"]) == 2
    )
    assert "kept" in path.read_text()
    assert capsys.readouterr().err.count("\n") == 1


def test_unreadable_image_of_a_folder_is_quarantined(tmp_path, capsys):
    folder = tmp_path / "photos"
    folder.mkdir()
    rows = []
    for number in range(4):
        Image.new("RGB", (40 + number, 60), (number * 60, 90, 20)).save(folder / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "captions": ["a photo", "a plain one"]})
    (folder / "3.png").write_bytes(b"no image")
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = ["--dataset", "imagefolder", "--data_dir", str(folder), "--split", "train"]
    command = ["caption", "scenes:blip-mle", *source, "--num_beams", "1", "--output", str(tmp_path / "x.jsonl")]
    assert main(command) == 2
    assert "max_bad_fraction" in capsys.readouterr().err
    assert main([*command, "--max_bad_fraction", "0.5"]) == 0
    captions = read_caption_file(tmp_path / "x.jsonl").captions
    quarantine = (tmp_path / "x.quarantine.jsonl").read_text().splitlines()
    assert len(quarantine) == 1
    assert len(captions) in (1, 2, 3)  # without images that the split by hash put into other splits
    assert json.loads(quarantine[0])["image_id"] not in captions


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--rerank", "scenes:clip-reward"], "--rerank chooses among captions, but --num_return_sequences is 1"),
        (["--num_return_sequences", "5"], "needs at least as many beams, but --num_beams is 3"),
        (["--temperature", "0"], "temperature is 0"),
        (["--top_p", "1.5"], "top_p is 1.5"),
        (["--top_k", "-1"], "top_k is -1"),
        (["--split", "nowhere"], "no split 'nowhere'"),
        (["--batch_size", "0"], "batch_size is 0"),
        (["--dataset", "no/such/file.jsonl"], "no/such/file.jsonl"),
    ],
)
def test_bad_usage_gives_one_error_line(tmp_path, capsys, more, said):
    assert caption(tmp_path / "x.jsonl", *more) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert "captionrl caption: error: " in error


def test_model_that_is_not_a_captioner_is_refused(tmp_path, capsys):
    assert main(["caption", "scenes:siglip-held-out", "--output", str(tmp_path / "x.jsonl"), "--max_images", "1"]) == 2
    assert "load_scorer" in capsys.readouterr().err
    assert caption(tmp_path) == 2
    assert "is a folder" in capsys.readouterr().err
