"""`captionrl caption --processes N` and `--engine`: Parquet shards with the captions of one process."""

import json
import pickle
from dataclasses import replace

import datasets
import pytest

from hf_captionrl.captioners.pipeline import pipeline
from hf_captionrl.cli import main
from hf_captionrl.cli.caption import CaptionOptions, CaptionStage
from hf_captionrl.data import open_image
from hf_captionrl.data.columns import replace_column, undecoded
from hf_captionrl.data.options import ids_digest, load_split
from hf_captionrl.evaluation.caption_files import read_caption_file
from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.parts import read_shards

SAMPLES = ["--do_sample", "--num_return_sequences", "2", "--batch_size", "2", "--max_new_tokens", "10"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Parquet file of 9 images, of which the sixth cannot be read."""
    rows = undecoded(load_scenes(num_train=0, num_validation=0)["test"].select(range(9)))
    images = rows["image"][:]
    images[5] = {"bytes": b"no image", "path": None}
    path = tmp_path_factory.mktemp("data") / "images.parquet"
    replace_column(rows.select_columns(["image_id", "captions"]), "image", images, datasets.Image()).to_parquet(path)
    return ["--dataset", str(path), "--max_bad_fraction", "0.5"]


def caption(output, *more):
    return main(["caption", "scenes:blip-mle", "--output", str(output), *SAMPLES, *more])


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])  # each imports everything
def test_shards_equal_the_file_of_one_process_row_by_row(source, tmp_path, capsys, processes):
    engine = ["--processes", processes, "--rows_per_shard", "4"]
    assert caption(tmp_path / "one.jsonl", *source) == 0
    assert caption(tmp_path / "two", *source, *engine, "--json") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["images"], summary["of"], summary["written"], summary["shards"]) == (8, 9, 8, 3)
    one, two = read_caption_file(tmp_path / "one.jsonl"), read_caption_file(tmp_path / "two")
    assert list(two.captions.items()) == list(one.captions.items())
    assert len(one.captions) == 8
    rows = list(read_shards(tmp_path / "two"))
    assert [row["image_id"] for row in rows] == [f"test-{number:05d}" for number in range(9)]
    assert [row["reason"] is None for row in rows] == [number != 5 for number in range(9)]
    listed = (tmp_path / "one.quarantine.jsonl").read_text()
    assert (tmp_path / "two/quarantine.jsonl").read_text() == listed
    manifest = json.loads((tmp_path / "two/manifest.json").read_text())
    before = json.loads((tmp_path / "one.run.json").read_text())["settings"]
    assert manifest["made_by"] == {name: before[name] for name in ("weights", "prompt")}
    # The same command has nothing to do, and other settings are refused.
    assert caption(tmp_path / "two", *source, *engine) == 0
    assert "9 of them from an earlier run" in capsys.readouterr().out
    assert caption(tmp_path / "two", *source, *engine, "--top_k", "3") == 2
    assert "written with top_k 0, but top_k is now 3" in capsys.readouterr().err


def test_other_commands_read_shards(tmp_path, capsys):
    few = ["--dataset", "scenes", "--max_images", "6"]
    assert caption(tmp_path / "shards", *few, "--processes", "1", "--rows_per_shard", "4") == 0
    assert caption(tmp_path / "lines.jsonl", *few) == 0
    capsys.readouterr()
    files = [str(tmp_path / "shards"), str(tmp_path / "lines.jsonl")]
    assert main(["evaluate", "--captions", *files, *few, "--scorer", "none", "--suite", "sle", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert "shards" in json.dumps(rows)
    (tmp_path / "shards/part-00001-of-00002.parquet").unlink()
    (tmp_path / "shards/manifest.json").write_text(
        json.dumps({"format": 1, "settings": {}}),
    )
    assert main(["evaluate", "--captions", *files, *few, "--scorer", "none", "--suite", "sle"]) == 2
    assert "is unfinished. Use the same command again" in capsys.readouterr().err


def test_stage_can_be_sent_to_another_process(source):
    options = CaptionOptions(model="scenes:blip-mle", dataset=source[1], batch_size=2, max_new_tokens=10, max_images=3)
    options = replace(options, num_beams=1)
    split = load_split(options, quarantine_path=None)
    stage = pickle.loads(pickle.dumps(CaptionStage(options, ids_digest(split.dataset))))
    stage.load()
    texts = [row["captions"][0] for row in stage(range(1, 3))]
    images = [open_image(row["image"]) for row in split.dataset.select(range(1, 3))]
    assert texts == pipeline("scenes:blip-mle")(images, **options.decoding)
    other = CaptionStage(replace(options, max_images=2), ids_digest(split.dataset))
    with pytest.raises(ValueError, match="has other images in this process"):
        other.load()


def test_too_many_unreadable_images_stop_the_command(source, tmp_path, capsys):
    assert caption(tmp_path / "out", *source[:2], "--processes", "1") == 2
    assert "max_bad_fraction (0.05)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--processes", "2", "--rows_per_shard", "5"],
            "--rows_per_shard 5 is not a multiple of --batch_size 2. Use 6.",
        ),
        (["--address", "auto"], "--address 'auto' has an effect only with Ray. Use --engine ray."),
        (["--rows_per_shard", "4"], "--rows_per_shard 4 has an effect only with shards."),
    ],
)
def test_bad_options_are_named(tmp_path, capsys, more, message):
    assert caption(tmp_path / "out", "--dataset", "scenes", *more) == 2
    assert message in capsys.readouterr().err


def test_output_must_be_a_folder(tmp_path, capsys):
    assert caption(tmp_path / "out.jsonl", "--processes", "1") == 2
    assert f"Use '{tmp_path / 'out'}'." in capsys.readouterr().err
