"""Shards of `captionrl album`: equal results, killed workers, skipped shards, refusals."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from hf_captionrl import load_captioner, load_scorer
from hf_captionrl.apps.album import candidates
from hf_captionrl.apps.album import run as loading
from hf_captionrl.apps.album.album import describe_album
from hf_captionrl.apps.album.options import AlbumOptions
from hf_captionrl.apps.album.run import AlbumModels, ShardWork
from hf_captionrl.apps.album.sources import AlbumSource, load_album_source
from hf_captionrl.cli import main
from hf_captionrl.utils import ray_engine
from hf_captionrl.utils.model_files import model_path
from hf_captionrl.utils.parts import read_shards
from hf_captionrl.utils.ray_engine import RayActor
from tests.apps.album.dying import DyingModels
from tests.tiny import tiny_images
from tests.tiny_chat import tiny_chat
from tests.tolerances import assert_close

QUICK = "--num_beams 1 --num_samples 2 --max_new_tokens 6 --batch_size 2 --json".split()
MODELS = ["--model", "scenes:blip-mle", "--scorer", "scenes:siglip-held-out"]


@pytest.fixture
def photos(tmp_path, monkeypatch, scenes):
    """Five images, a copy of the first one, and a file that cannot be read."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, image in enumerate(scenes[:5]):
        image.save(folder / f"{number}.png")
    scenes[0].save(folder / "copy.png")
    (folder / "broken.png").write_bytes(b"no image")
    return folder


class OtherScorer:
    signature = "other"

    def text_features(self, captions):
        return torch.full((len(captions), 2), 7.0)


def album(output, *more):
    # A cache of each output, because cached features of a copy are those of its first image.
    cache = ["--cache_dir", f"cache-{Path(output).parent.name}"]
    return main(["album", "photos", *MODELS, *QUICK, *cache, "--output", output, *more])


def contents(folder, pattern="**/*"):
    """The content of every file below a folder."""
    files = [path for path in Path(folder).glob(pattern) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def shard_rows(folder, kind):
    (path,) = Path(folder).glob(f"{kind}-*")
    return list(read_shards(path))


def test_size_of_the_shards_does_not_change_the_result(photos, capsys):
    assert album("one/o.jsonl") == 0
    one = json.loads(capsys.readouterr().out)
    assert album("two/o.jsonl", "--processes", "1", "--rows_per_shard", "2") == 0
    two = json.loads(capsys.readouterr().out)
    ignored = {"outputs", "seconds"}
    assert {k: v for k, v in two.items() if k not in ignored} == {k: v for k, v in one.items() if k not in ignored}
    assert contents("one", "o.jsonl") == contents("two", "o.jsonl")
    for kind, number in (("images", 7), ("candidates", 5)):
        rows = shard_rows("one/o.shards", kind)
        assert rows == shard_rows("two/o.shards", kind)
        assert len(rows) == number
        assert len(list(Path("two/o.shards").glob(f"{kind}-*/part-*"))) == -(-number // 2)
    # The unreadable image is listed with the reason.
    assert one["unreadable_images"] == ["broken.png"]
    reasons = {row["id"].split()[0]: row["reason"] for row in shard_rows("two/o.shards", "images")}
    assert [name for name, reason in reasons.items() if reason is not None] == ["broken.png"]
    assert "broken.png" in reasons["broken.png"]


@pytest.mark.parametrize("decoding", ["beam", "rsa"])
def test_shards_equal_one_call_with_loaded_models(photos, decoding):
    settings = {"num_beams": 1, "num_samples": 2, "max_new_tokens": 6, "batch_size": 2, "num_distractors": 1}
    assert album("o.jsonl", "--decoding", decoding, "--num_distractors", "1", "--rows_per_shard", "2") == 0
    source = load_album_source("photos")
    captioner = load_captioner(model_path("scenes:blip-mle"), device="cpu")
    scorer = load_scorer(model_path("scenes:siglip-held-out"), device="cpu")
    expected = describe_album(
        source.images,
        captioner,
        scorer,
        image_ids=source.image_ids,
        skip_unreadable=True,
        decoding=decoding,
        **settings,
    ).rows()
    found = [json.loads(line) for line in Path("o.jsonl").read_text().splitlines()]
    assert len(found) == 7
    for one, other in zip(found, expected, strict=True):
        margins = [row.pop("margin") for row in (one, other)]
        assert one == other
        # Both are rounded to 4 digits.
        assert margins[0] == margins[1] or round(abs(margins[0] - margins[1]), 4) == 0.0001


def test_killed_command_repeats_only_unfinished_shards(photos, monkeypatch):
    shards = ["--rows_per_shard", "2"]
    assert album("whole/o.jsonl", *shards) == 0
    asked, real = [], candidates._of_batch

    def killed(captioner, images, rows, *rest):
        asked.append(list(rows))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(captioner, images, rows, *rest)

    monkeypatch.setattr(candidates, "_of_batch", killed)
    assert album("killed/o.jsonl", *shards) != 0
    assert not Path("killed/o.jsonl").exists()
    assert album("killed/o.jsonl", *shards) == 0
    assert asked == [[0, 1], [2, 3], [2, 3], [4]], "the first shard is finished"
    assert contents("killed") == contents("whole")
    asked.clear()
    assert album("killed/o.jsonl", *shards) == 0
    assert asked == []
    assert contents("killed") == contents("whole")


def test_actors_that_load_everything_again_give_the_same_files(photos, monkeypatch):
    """Ray without a cluster: what is sent to an actor, and what it writes."""

    def run_on_ray(actor, todo, options):
        assert (options.engine, options.address, options.processes) == ("ray", "auto", None)
        sent = RayActor(pickle.loads(pickle.dumps(actor)), os.getcwd(), 1).actor
        for shard in reversed(todo):
            assert sent.attempt(shard) == ""
            yield shard

    monkeypatch.setattr(ray_engine, "run_on_ray", run_on_ray)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # restored after the test
    assert album("one/o.jsonl", "--rows_per_shard", "2") == 0
    assert album("two/o.jsonl", "--rows_per_shard", "2", "--engine", "ray", "--address", "auto") == 0
    assert contents("two") == contents("one")


@pytest.mark.slow  # two processes that import everything
def test_images_read_by_two_processes_equal_those_of_one_file_by_file(photos):
    (photos / "0.txt").write_text("a pig")
    for output, processes in (("one", "1"), ("two", "2")):
        options = ["--rows_per_shard", "2", "--batch_size", "2", "--cache_dir", f"cache-{output}"]
        arguments = ["album", "photos", *MODELS[2:], *options, "--processes", processes]
        assert main([*arguments, "--output", f"{output}/o.jsonl"]) == 0
    assert contents("two") == contents("one")
    assert sum(name.endswith(".parquet") for name in contents("two")) == 4


@pytest.mark.slow  # four processes that import everything; the tests above interrupt one process
def test_two_processes_of_which_one_is_killed_equal_one_process_file_by_file(photos, monkeypatch):
    shards = ["--rows_per_shard", "2"]
    assert album("one/o.jsonl", *shards) == 0
    # The images are read.
    shutil.copytree("one/o.shards", "two/o.shards", ignore=shutil.ignore_patterns("candidates-*"))
    monkeypatch.setattr(loading, "AlbumModels", DyingModels)
    assert album("two/o.jsonl", *shards, "--processes", "2") == 0
    assert len(list(Path().glob("killed-*"))) == 1
    assert contents("two") == contents("one")


def test_images_that_are_added_are_the_only_ones_computed(photos, scenes, monkeypatch):
    (photos / "4.png").rename(photos.parent / "later.png")
    assert album("o.jsonl") == 0
    before = contents("o.shards")
    (photos.parent / "later.png").rename(photos / "1b.png")
    asked, real = [], candidates._of_batch
    monkeypatch.setattr(
        candidates, "_of_batch", lambda c, i, rows, *rest: asked.append(rows) or real(c, i, rows, *rest)
    )
    assert album("o.jsonl") == 0
    assert asked == [[2]]  # 0.png, 1.png, 1b.png
    after = contents("o.shards")
    assert before.items() <= after.items()
    added = [name for name in after if name not in before]
    assert sorted(name.partition("-")[0] for name in added) == ["candidates"] * 2 + ["images"] * 2
    captions = {row["image_id"]: row["caption"] for row in map(json.loads, Path("o.jsonl").read_text().splitlines())}
    assert captions["1b.png"]


@pytest.mark.parametrize("is_finished", [True, False])
def test_other_weights_are_refused(photos, monkeypatch, capsys, is_finished):
    assert album("o.jsonl", "--rows_per_shard", "2") == 0
    if not is_finished:
        sorted(Path("o.shards").glob("candidates-*/part-*"))[1].unlink()
    before = contents("o.shards")
    monkeypatch.setattr("hf_captionrl.retrieval.model_fingerprint", lambda model: "other")
    capsys.readouterr()
    assert album("o.jsonl", "--rows_per_shard", "2") == 2
    assert "but weights is now 'other'" in capsys.readouterr().err
    assert contents("o.shards") == before


def test_features_of_kept_and_of_edited_captions_equal_those_of_the_scorer(photos):
    options = AlbumOptions(
        images="photos",
        model="scenes:blip-mle",
        scorer="scenes:siglip-held-out",
        num_beams=1,
        num_samples=2,
        max_new_tokens=6,
        batch_size=2,
        cache_dir="cache",
    )
    models = AlbumModels(options)
    work = ShardWork(models, Path("shards"), {"images": "photos"})
    rows = [0, 1, 2]
    work.facts()
    texts = [["a text that no model wrote", *mine, ""] for mine in work.candidates(rows, None)]
    flat = [text or "." for mine in texts for text in mine]
    found = work.text_features(rows, texts)
    for wanted in ([0], range(len(flat)), [len(flat) - 1, 1, 1]):
        expected = [models.scorer.text_features([flat[row]])[0] for row in wanted]
        for mine, other in zip(found[list(wanted)], expected, strict=True):
            assert_close(mine, other)
    # Another scorer does not use them.
    models.scorer = OtherScorer()
    assert work.text_features(rows, texts)[[1]].tolist() == [[7.0, 7.0]]


def test_answers_are_asked_again_only_for_other_prompts(tmp_path, monkeypatch):
    model, processor = tiny_chat("llava")
    options = AlbumOptions(images="x", model="x", num_beams=2, max_new_tokens=4, contrastive=True, batch_size=2)
    models = AlbumModels(options, AlbumSource(tiny_images(3), list("abc")))
    models.captioner = load_captioner(model, processor=processor)
    models.scorer = AlbumModels(AlbumOptions(images="x", scorer="scenes:siglip-held-out")).scorer
    asked, real = [], models.captioner.generate
    monkeypatch.setattr(
        models.captioner, "generate", lambda **inputs: asked.append(len(inputs["prefix_ids"])) or real(**inputs)
    )

    def answers(*said):
        asked.clear()
        work = ShardWork(models, tmp_path, {"images": "x"})
        work.facts()
        return work.answers([0, 1, 2], [[text] for text in said])

    first = answers("a cat", "a house", "a red dog")
    assert asked == [2, 1]
    assert answers("a cat", "a house", "a red dog") == first
    assert asked == []
    changed = answers("a cat", "a house", "a dog")
    assert asked == [1]
    assert changed[:2] == first[:2]


def test_models_are_loaded_again_in_other_processes(photos):
    options = AlbumOptions(images="photos", model="scenes:blip-mle")
    models = AlbumModels(options, AlbumSource(["a.png"], ["a.png"]), adapter=Path("o.adapter"))
    sent = pickle.loads(pickle.dumps(models))
    assert sent.adapter == Path("o.adapter")
    assert sent.rows_of(["1.png", "0.png"]) == [sent.source.image_ids.index(name) for name in ("1.png", "0.png")]
    with pytest.raises(
        ValueError, match=r"'photos' has other images in this process .*'a.png' is missing. Use a path"
    ):
        sent.rows_of(["a.png"])


def test_launched_processes_are_refused(photos, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert album("o.jsonl") == 2
    assert "Use --processes or --engine ray instead of `accelerate launch`" in capsys.readouterr().err
    assert not os.path.exists("o.shards")


def test_dry_run_divides_the_time_among_processes(photos, capsys):
    assert album("o.jsonl", "--processes", "4", "--dry_run") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["images"], facts["processes"], facts["dry_run"]) == (7, 4, True)
    assert not os.path.exists("o.shards")
