"""Shards in this process and in several: resuming, killed workers, refusals."""

import json
import os

import pytest

from hf_captionrl.engine import EngineOptions, ShardFolder, read_shards, run_stage
from hf_captionrl.engine.actor import Actor, raise_packed
from hf_captionrl.engine.ray_engine import RayActor, connect
from tests.engine.toy import Squares, expected, pids

ROWS, PER_SHARD = 23, 5


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def shards(tmp_path, settings=None, **more):
    sizes = {"num_rows": ROWS, "rows_per_shard": PER_SHARD} | more
    return ShardFolder(tmp_path / "out", settings or {"model": "m"}, **sizes)


def test_rows_in_this_process_equal_a_plain_loop(tmp_path, notes):
    seen = []
    summary = run_stage(Squares(notes), shards(tmp_path), progress=seen.append)
    assert list(read_shards(tmp_path / "out")) == expected(ROWS, PER_SHARD)
    assert list(read_shards(tmp_path / "out", ["square"])) == [{"square": n * n} for n in range(ROWS)]
    assert seen == [5, 5, 5, 5, 3]
    assert (summary["shards"], summary["resumed"]) == (5, 0)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert summary["manifest"] == manifest
    assert manifest["rows"] == ROWS
    assert [shard["rows"] for shard in manifest["shards"]] == [5, 5, 5, 5, 3]
    assert manifest["settings"] == {"model": "m", "num_rows": ROWS, "rows_per_shard": PER_SHARD}
    assert manifest["made_by"] == {"weights": "a"}


def test_finished_shards_are_skipped(tmp_path, notes):
    first = run_stage(Squares(notes), shards(tmp_path))["manifest"]
    (tmp_path / "out/part-00003-of-00005.parquet").unlink()
    others = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    seen = []
    assert run_stage(Squares(notes), shards(tmp_path), progress=seen.append)["resumed"] == 4
    assert seen == [5]
    assert {path: path.stat().st_mtime_ns for path in others} == others
    for path in notes.iterdir():
        path.unlink()
    summary = run_stage(Squares(notes), shards(tmp_path))
    assert summary == {"shards": 5, "resumed": 5, "manifest": first}
    assert not pids(notes, "loaded")  # nothing to do: nothing is loaded


def test_two_processes_with_one_killed_lose_and_repeat_no_row(tmp_path, notes):
    stage = Squares(notes, kill_at=12)
    summary = run_stage(stage, shards(tmp_path), EngineOptions(processes=2))
    assert list(read_shards(tmp_path / "out")) == expected(ROWS, PER_SHARD)
    assert summary["manifest"]["rows"] == ROWS
    assert len(pids(notes, "killed")) == 1
    assert len(pids(notes, "loaded") - pids(notes, "killed")) >= 1


def test_worker_that_always_dies_stops_the_run(tmp_path, notes):
    with pytest.raises(RuntimeError, match="Use fewer --processes than 2"):
        run_stage(Squares(notes, kill_at=0, times=99), shards(tmp_path, rows_per_shard=12), EngineOptions(processes=2))


def test_error_of_a_worker_reaches_the_caller(tmp_path, notes):
    with pytest.raises(ValueError, match="Row 7 is bad"):
        run_stage(Squares(notes, fail_at=7), shards(tmp_path), EngineOptions(processes=2))
    assert not (tmp_path / "out/part-00001-of-00005.parquet").exists()
    run_stage(Squares(notes), shards(tmp_path))
    assert list(read_shards(tmp_path / "out")) == expected(ROWS, PER_SHARD)


def test_launched_processes_share_the_shards(tmp_path, notes, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run_stage(Squares(notes), shards(tmp_path))["manifest"] is None
    assert sorted(path.name[5:10] for path in (tmp_path / "out").glob("part-*")) == ["00001", "00003"]
    with pytest.raises(ValueError, match="is unfinished"):
        list(read_shards(tmp_path / "out"))
    with pytest.raises(ValueError, match="2 processes were launched"):
        run_stage(Squares(notes), shards(tmp_path), EngineOptions(processes=2))
    with pytest.raises(ValueError, match="Remove the folder instead of using --overwrite"):
        shards(tmp_path, overwrite=True)
    monkeypatch.setenv("RANK", "0")
    # It starts when process 1 has finished, and divides the shards in the same way.
    assert run_stage(Squares(notes), shards(tmp_path))["manifest"]["rows"] == ROWS
    assert list(read_shards(tmp_path / "out")) == expected(ROWS, PER_SHARD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": {"model": "n"}}, "written with model 'm', but model is now 'n'"),
        ({"rows_per_shard": 6}, "written with rows_per_shard 5"),
        ({"num_rows": 24}, "written with num_rows 23"),
    ],
)
def test_other_settings_are_refused(tmp_path, notes, change, message):
    run_stage(Squares(notes), shards(tmp_path))
    with pytest.raises(ValueError, match=message):
        shards(tmp_path, **change)
    fresh = shards(tmp_path, **change, overwrite=True)
    assert len(fresh.unfinished()) == len(fresh.names)


def test_other_weights_are_refused(tmp_path, notes):
    run_stage(Squares(notes), shards(tmp_path))
    (tmp_path / "out/part-00003-of-00005.parquet").unlink()
    with pytest.raises(ValueError, match="written with weights 'a', but weights is now 'b'"):
        run_stage(Squares(notes, weights="b"), shards(tmp_path))
    assert not (tmp_path / "out/part-00003-of-00005.parquet").exists()


def test_damaged_folders_are_named(tmp_path, notes):
    run_stage(Squares(notes), shards(tmp_path))
    parts = sorted((tmp_path / "out").glob("part-*"))
    parts[4].write_bytes(parts[0].read_bytes())
    with pytest.raises(ValueError, match=r"has 5 rows, but manifest.json says 3"):
        list(read_shards(tmp_path / "out"))
    (tmp_path / "out/manifest.json").write_text("[1]")
    with pytest.raises(ValueError, match="is not a manifest"):
        shards(tmp_path)
    (tmp_path / "out/manifest.json").unlink()
    with pytest.raises(ValueError, match="with their settings is missing"):
        shards(tmp_path)
    with pytest.raises(FileNotFoundError, match="has no manifest"):
        list(read_shards(tmp_path / "out"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "auto"}, "Use --engine ray"),
        ({"rows_per_shard": 8}, "Use --processes or --engine"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, notes, options, message):
    with pytest.raises(ValueError, match=message):
        run_stage(Squares(notes), shards(tmp_path), EngineOptions(**options))


def test_missing_ray_names_the_extra(tmp_path, notes, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-captionrl\[ray\]'"):
        run_stage(Squares(notes), shards(tmp_path), EngineOptions(engine="ray"))


def test_error_of_a_ray_actor_is_part_of_its_answer(tmp_path, notes):
    class StrangeError(LookupError):
        """Its class is unknown in other processes."""

    class Fails(Squares):
        def __call__(self, rows):
            if rows.start == 10:
                raise StrangeError("no way")
            return super().__call__(rows)

    actor = RayActor(Actor(Fails(notes, fail_at=7), shards(tmp_path)), os.getcwd())
    answer = actor({"shard": [0, 1, 2]})
    assert answer["shard"] == [0, 1, 2]
    assert answer["error"][0] == ""
    with pytest.raises(ValueError, match="Row 7 is bad") as error:
        raise_packed(answer["error"][1])
    assert str(error.value) == "Row 7 is bad. Remove it."
    assert "in __call__" in error.value.__notes__[0]  # where it happened in the worker
    with pytest.raises(LookupError, match="StrangeError: no way"):
        raise_packed(answer["error"][2])
    assert len(list((tmp_path / "out").glob("part-*"))) == 1


def test_address_without_a_cluster_is_refused():
    class Ray:
        """Stands for the module, whose search for a cluster takes seconds."""

        def is_initialized(self):
            return False

        def init(self, address, **settings):
            assert "include_dashboard" not in settings  # only Ray that starts here has one
            raise ConnectionError("Could not find any running Ray instance.")

    with pytest.raises(ValueError, match=r"'auto': no Ray cluster answers .* Start one with `ray start --head`"):
        connect(Ray(), "auto")
