"""Shards on a Ray cluster of two nodes, one of whose actors is killed."""

import functools
import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hf_captionrl.cli import main
from hf_captionrl.engine import EngineOptions, ShardFolder, read_shards, run_stage
from hf_captionrl.engine.ray_engine import connect
from hf_captionrl.evaluation.caption_files import read_caption_file
from hf_captionrl.retrieval import load_neighbours
from hf_captionrl.scenes import load_scenes
from tests.engine.clusters import two_nodes
from tests.engine.dying import DyingCaptions, DyingFeatures, DyingPixels
from tests.engine.toy import Squares, expected, pids
from tests.faults.areas import run_area


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as address:
        yield address


@pytest.mark.slow  # a cluster takes half a minute to start; tests/engine/test_engine.py kills a process
def test_killed_actor_of_two_nodes_loses_and_repeats_no_row(cluster, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    shards = ShardFolder(tmp_path / "out", {"model": "m"}, num_rows=23, rows_per_shard=4)
    options = EngineOptions(engine="ray", address=cluster)
    seen = []
    summary = run_stage(Squares(notes, kill_at=9), shards, options, progress=seen.append)
    assert list(read_shards(tmp_path / "out")) == expected(23, 4)
    assert summary["manifest"]["rows"] == sum(seen) == 23
    assert len(pids(notes, "killed")) == 1
    assert len(pids(notes, "loaded")) >= 3  # an actor on each node, and one instead of the killed one


@pytest.mark.slow
def test_actor_that_always_dies_stops_the_run_and_a_repeated_command_counts_anew(cluster, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    shards = ShardFolder(tmp_path / "out", {"model": "m"}, num_rows=23, rows_per_shard=12)
    options = EngineOptions(engine="ray", address=cluster)
    for deaths in (3, 6):
        with pytest.raises(RuntimeError, match=r"died 3 times without finishing a shard .* Use fewer --processes"):
            run_stage(Squares(notes, kill_at=0, times=99), shards, options)
        assert len(pids(notes, "killed")) == deaths
    run_stage(Squares(notes), shards, options)
    assert list(read_shards(tmp_path / "out")) == expected(23, 12)


@pytest.mark.slow
def test_ray_starts_on_this_machine_or_joins_the_running_cluster(cluster, monkeypatch):
    import ray

    monkeypatch.setenv("RAY_ADDRESS", cluster)
    for address, is_joined in ((None, False), ("auto", True)):
        assert connect(ray, address)
        try:
            assert (ray.get_runtime_context().gcs_address == cluster) is is_joined
        finally:
            ray.shutdown()


@pytest.mark.slow
def test_twenty_killed_actors_lose_and_repeat_no_row():
    row = run_area(None, "ray", 20, seed=2)
    assert (row["faults"], row["survived"], row["lost"], row["repeated"]) == (20, 20, 0, 0), row["notes"]


IMAGES = ["--max_images", "6", "--batch_size", "2"]
SCORER = ["--scorer", "scenes:clip-reward", "--cache_dir", "cache"]


def caption(output, *engine):
    """Sampled captions by image."""
    few = ["caption", "scenes:blip-mle", "--dataset", "scenes", *IMAGES, "--do_sample"]
    assert main([*few, "--output", output, *engine]) == 0
    return list(read_caption_file(output).captions.items())


def features(output, *engine):
    assert main(["features", "--dataset", "scenes", *IMAGES, *SCORER, "--output", output, *engine]) == 0
    return list(read_shards(output))


def pixels(output, *engine):
    few = ["pixels", "--model", "scenes:blip-mle", "--dataset", "scenes", *IMAGES, "--cache_dir", "cache"]
    assert main([*few, "--output", output, *engine]) == 0
    return list(read_shards(output))


def album(output, *engine):
    """The table, and the rows of both kinds of shards."""
    few = "--num_beams 1 --num_samples 2 --max_new_tokens 6 --batch_size 2".split()
    models = ["--model", "scenes:blip-mle", *SCORER]
    assert main(["album", "photos", *models, *few, "--output", f"{output}.jsonl", *engine]) == 0
    shards = [next(Path(f"{output}.shards").glob(f"{kind}-*")) for kind in ("images", "candidates")]
    return Path(f"{output}.jsonl").read_bytes(), [list(read_shards(folder)) for folder in shards]


def evaluate(output, *engine):
    """The whole table of results, numbers and intervals."""
    few = ["--dataset", "scenes", "--max_images", "6", "--suite", "smile", "--language_model", "none", *SCORER]
    files = ["--captions", "full.jsonl", "generic.jsonl", "--output_dir", output]
    # Without an engine there are no shards; 256 captions are scored together.
    engine = [{"2": "256"}.get(word, word) for word in engine] if "ray" in engine else []
    assert main(["evaluate", *few, *files, *engine]) == 0
    return json.loads(Path(output, "comparison.json").read_text())["tables"]


def bags(output, *engine):
    """Nearest images of every image."""
    if not Path("features").exists():
        features("features")
    few = ["bags", "--mode", "neighbours", "--top", "2", "--feature_shards", "features"]
    assert main([*few, "--output", f"{output}.safetensors", *engine]) == 0
    found = load_neighbours(f"{output}.safetensors")
    return found.image_ids, found.indices.tolist(), found.similarities.tolist()


def boost(output, *engine):
    """All columns, without the time of each answer."""
    assert main(["boost", "--max_images", "6", "--output", output, *engine]) == 0
    rows = pq.read_table(f"{output}/captions.parquet").to_pylist()
    for source in ("blend_source", "visual_source", "holistic_source"):
        assert all(row[source].pop("time") for row in rows)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "stage", "place"),
    [
        (caption, DyingCaptions, "hf_captionrl.evaluation.caption_stage.CaptionStage"),
        (features, DyingFeatures, "hf_captionrl.evaluation.write_features.FeatureStage"),
        (pixels, DyingPixels, "hf_captionrl.evaluation.write_pixels.PixelStage"),
    ],
)
def test_killed_actor_with_a_real_model_loses_and_repeats_no_row(
    cluster, tmp_path, monkeypatch, command, stage, place
):
    monkeypatch.chdir(tmp_path)
    one = command("one", "--processes", "1", "--rows_per_shard", "2")
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setattr(place, functools.partial(stage, notes=notes, kill_at=3))
    more = ["--engine", "ray", "--address", cluster, "--rows_per_shard", "2"]
    assert command("ray", *more, *([] if command is caption else ["--cache_dir", "empty"])) == one
    assert len(pids(notes, "killed")) == 1
    assert len(pids(notes, "loaded")) >= 2
    assert not pids(notes, "loaded") & {os.getpid()}
    ids = [row["image_id"] for row in read_shards("ray")]
    assert len(ids) == len(set(ids)) == 6


@pytest.mark.slow  # tests of each command compare several processes with one
@pytest.mark.parametrize("command", [caption, features, pixels, bags, boost, album, evaluate])
def test_rows_of_a_cluster_equal_those_of_one_process(cluster, tmp_path, monkeypatch, command):
    rows = load_scenes(num_train=0, num_validation=0)["test"].select(range(6))
    for name in ("one", "ray"):
        folder = tmp_path / name
        (folder / "photos").mkdir(parents=True)
        for number, image in enumerate(rows["image"][:]):
            image.save(folder / "photos" / f"{number}.png")
        for file, texts in (("full", rows["full_caption"][:]), ("generic", ["an animal"] * 6)):
            lines = [{"image_id": i, "caption": c} for i, c in zip(rows["image_id"], texts, strict=True)]
            (folder / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path / "one")
    one = command("out", "--processes", "1", "--rows_per_shard", "2")
    monkeypatch.chdir(tmp_path / "ray")
    assert command("out", "--engine", "ray", "--address", cluster, "--rows_per_shard", "2") == one
    # A repeated command finds its shards or its cache.
    assert command("out", "--engine", "ray", "--address", cluster, "--rows_per_shard", "2") == one
