"""Shards of `captionrl album`: equal results, killed workers, skipped shards, refusals."""

import os
import pickle
import shutil
import signal
from functools import cached_property
from pathlib import Path

import pytest

from hf_captionrl import load_captioner
from hf_captionrl.apps.album import album as steps
from hf_captionrl.apps.album import command
from hf_captionrl.apps.album.album import describe_album
from hf_captionrl.apps.album.command import AlbumStage, KeptWork
from hf_captionrl.apps.album.options import AlbumOptions
from hf_captionrl.apps.album.sources import AlbumSource, load_album_source
from hf_captionrl.utils import ray_engine
from hf_captionrl.utils.ray_engine import RayActor
from tests.apps.album.conftest import MODEL, rows_of, write_images
from tests.apps.album.conftest import album as quick_album
from tests.apps.album.conftest import contents as written
from tests.tiny import tiny_images
from tests.tiny.chat import tiny_chat


@pytest.fixture
def photos(tmp_path, monkeypatch, scenes):
    """Five images, a copy of the first one, and a file that cannot be read."""
    monkeypatch.chdir(tmp_path)
    folder = write_images([*scenes[:5], scenes[0]], [*(f"{number}.png" for number in range(5)), "copy.png"])
    (folder / "broken.png").write_bytes(b"no image")
    return folder


class DyingWork(KeptWork):
    """The first process that samples captions dies; `killed-PID` is left in the working folder."""

    @cached_property
    def captioner(self):
        captioner = KeptWork.captioner.func(self)
        real = captioner.generate

        def generate(**inputs):
            if inputs["do_sample"] and not list(Path().glob("killed-*")):
                Path(f"killed-{os.getpid()}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return real(**inputs)

        captioner.generate = generate
        return captioner


def album(output, *more):
    # A cache of each output, because cached features of a copy are those of its first image.
    cache = f"cache-{Path(output).parent.name}"
    return quick_album(*MODEL, "--num_samples", "2", "--json", "--output", output, *more, cache=cache)


def contents(folder, pattern="**/*"):
    """The content of every file below a folder."""
    return {name: content for name, (content, _) in written(folder, pattern).items()}


def test_shards_equal_one_call_with_loaded_models(photos, captioner, scorer):
    settings = {"num_beams": 1, "num_samples": 2, "max_new_tokens": 6, "batch_size": 2, "num_distractors": 1}
    assert album("o.jsonl", "--decoding", "rsa", "--num_distractors", "1", "--rows_per_shard", "2") == 0
    source = load_album_source("photos")
    settings |= {"image_ids": source.image_ids, "skip_unreadable": True, "decoding": "rsa"}
    expected = describe_album(source.images, captioner, scorer, **settings).rows()
    found = rows_of("o.jsonl")
    assert len(found) == 7
    for one, other in zip(found, expected, strict=True):
        margins = [row.pop("margin") for row in (one, other)]
        assert one == other
        # Both are rounded to 4 digits.
        assert margins[0] == margins[1] or round(abs(margins[0] - margins[1]), 4) == 0.0001


def test_killed_command_repeats_only_unfinished_shards(photos, monkeypatch):
    shards = ["--rows_per_shard", "2"]
    assert album("whole/o.jsonl", *shards) == 0
    asked, real = [], steps.generate_candidates

    def killed(captioner, images, rows, *rest):
        asked.append(list(rows))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(captioner, images, rows, *rest)

    monkeypatch.setattr(steps, "generate_candidates", killed)
    assert album("killed/o.jsonl", *shards) != 0
    assert not Path("killed/o.jsonl").exists()
    for _ in range(2):  # the second time there is nothing to do
        assert album("killed/o.jsonl", *shards) == 0
        assert contents("killed") == contents("whole")
        assert asked == [[0, 1], [2, 3], [2, 3], [4]], "the first shard is finished"


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


@pytest.mark.slow  # four processes that import everything; the tests above interrupt one process
def test_two_processes_of_which_one_is_killed_equal_one_process_file_by_file(photos, monkeypatch):
    shards = ["--rows_per_shard", "2"]
    assert album("one/o.jsonl", *shards) == 0
    # The images are read.
    shutil.copytree("one/o.shards", "two/o.shards", ignore=shutil.ignore_patterns("candidates-*"))
    monkeypatch.setattr(command, "KeptWork", DyingWork)
    assert album("two/o.jsonl", *shards, "--processes", "2") == 0
    assert len(list(Path().glob("killed-*"))) == 1
    assert contents("two") == contents("one")


def test_other_weights_are_refused_if_nothing_is_left_to_do(photos, monkeypatch, capsys):
    assert album("o.jsonl", "--rows_per_shard", "2") == 0
    before = contents("o.shards")
    monkeypatch.setattr("hf_captionrl.apps.album.command.model_fingerprint", lambda model: "other")
    capsys.readouterr()
    assert album("o.jsonl", "--rows_per_shard", "2") == 2
    assert "but weights is now 'other'" in capsys.readouterr().err
    assert contents("o.shards") == before


def test_answers_are_asked_again_only_for_other_prompts(tmp_path, monkeypatch):
    model, processor = tiny_chat("llava")
    settings = {"num_beams": 2, "max_new_tokens": 4, "contrastive": True, "batch_size": 2}
    options = AlbumOptions(images="x", model="x", scorer="scenes:siglip-held-out", **settings)
    options.output, options.cache_dir = [tmp_path / "o.jsonl"], str(tmp_path / "cache")
    work = KeptWork(options, AlbumSource(tiny_images(3), list("abc")))
    work.captioner = load_captioner(model, processor=processor)
    asked, real = [], work.captioner.generate
    monkeypatch.setattr(
        work.captioner, "generate", lambda **inputs: asked.append(len(inputs["prefix_ids"])) or real(**inputs)
    )
    work.compute("images", [0, 1, 2])

    def answers(*said):
        asked.clear()
        return work.compute("answers", [0, 1, 2], [[text] for text in said])

    first = answers("a cat", "a house", "a red dog")
    assert asked == [2, 1]
    assert answers("a cat", "a house", "a red dog") == first
    assert asked == []
    changed = answers("a cat", "a house", "a dog")
    assert asked == [1]
    assert changed[:2] == first[:2]


def test_models_are_loaded_again_in_other_processes(photos):
    options = AlbumOptions(images="photos", model="scenes:blip-mle")
    work = KeptWork(options, AlbumSource(["a.png"], ["a.png"]), adapter=Path("o.adapter"))
    stage = pickle.loads(pickle.dumps(AlbumStage(work, "images", ["x", "y"], ["1.png", "0.png"], None, None)))
    assert stage.work.adapter == Path("o.adapter")
    stage.load()
    assert stage.rows == [stage.work.image_ids.index(name) for name in ("1.png", "0.png")]
    stage.images = ["a.png"]
    with pytest.raises(
        ValueError, match=r"'photos' has other images in this process .*'a.png' is missing. Use a path"
    ):
        stage.load()


def test_launched_processes_are_refused(photos, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert album("o.jsonl") == 2
    assert "Use --processes or --engine ray instead of `accelerate launch`" in capsys.readouterr().err
    assert not os.path.exists("o.shards")
