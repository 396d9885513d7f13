"""Shards in this process and in several: resuming, killed workers, refusals."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_captionrl.utils.options import EngineOptions
from hf_captionrl.utils.parts import Actor, ShardFolder, raise_packed, read_shard, read_shards, run_stage
from hf_captionrl.utils.ray_engine import RayActor, actor_numbers, connect
from tests.utils.toy import Slow, Squares, expected, pids

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
        run_stage(Slow(notes, fail_at=7), shards(tmp_path), EngineOptions(processes=2))
    # The other worker's part was finished first: nothing appears in the folder afterwards.
    assert sorted(path.name for path in (tmp_path / "out").glob("*")) == [
        "manifest.json",
        "part-00000-of-00005.parquet",
    ]
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


def test_other_settings_are_refused(tmp_path, notes):
    run_stage(Squares(notes), shards(tmp_path))
    for change, named in (({"settings": {"model": "n"}}, "model 'm'"), ({"rows_per_shard": 6}, "rows_per_shard 5")):
        with pytest.raises(ValueError, match=f"written with {named}"):
            shards(tmp_path, **change)
    fresh = shards(tmp_path, {"model": "n"}, overwrite=True)
    assert len(fresh.unfinished()) == len(fresh.names)


def start_waiting(tmp_path, notes, processes):
    """Another command that has finished some parts and is in the middle of one; its id and those of its workers."""
    code = (
        "from pathlib import Path; from hf_captionrl.utils.options import EngineOptions\n"
        "from hf_captionrl.utils.parts import ShardFolder, run_stage; from tests.utils.toy import Waits\n"
        "if __name__ == '__main__':\n"
        f"    shards = ShardFolder({str(tmp_path / 'out')!r}, {{'model': 'm'}}, num_rows={ROWS}, rows_per_shard={PER_SHARD})\n"
        f"    run_stage(Waits(Path({str(notes)!r})), shards, EngineOptions(processes={processes}))\n"
    )
    path = tmp_path / "waits.py"
    path.write_text(code)
    command = subprocess.Popen(
        [sys.executable, str(path)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    until(lambda: pids(notes, "waiting") and len(list((tmp_path / "out").glob("part-*"))) >= 2)
    return command


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_folder_that_another_command_writes_is_refused(tmp_path, notes):
    other = start_waiting(tmp_path, notes, 1)
    before = {path: path.read_bytes() for path in (tmp_path / "out").glob("[!.]*")}
    try:
        for settings, overwrite in (({"model": "m"}, False), ({"model": "n"}, True)):
            with pytest.raises(ValueError, match="Another run is writing to"):
                shards(tmp_path, settings, overwrite=overwrite)
        assert {path: path.read_bytes() for path in (tmp_path / "out").glob("[!.]*")} == before
    finally:
        other.kill()
        other.wait()
    run_stage(Squares(notes), shards(tmp_path))  # the lock ends with the process
    assert list(read_shards(tmp_path / "out")) == expected(ROWS, PER_SHARD)


def test_a_folder_that_another_command_took_over_is_refused(tmp_path, notes):
    mine = shards(tmp_path)
    run_stage(Squares(notes), shards(tmp_path, {"model": "n"}))  # no part was there
    with pytest.raises(ValueError, match="model 'n'"):
        run_stage(Squares(notes), mine)
    assert list(read_shards(tmp_path / "out")) == expected(ROWS, PER_SHARD)


def test_workers_end_with_a_killed_parent(tmp_path, notes):
    other = start_waiting(tmp_path, notes, 2)
    workers = pids(notes, "loaded")
    assert len(workers) == 2
    assert other.pid not in workers
    assert all(map(is_alive, workers))
    other.kill()
    other.wait()
    until(lambda: not any(map(is_alive, workers)), 10)


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 0), (2, 2)])
def test_parts_of_another_place_or_run_are_refused(tmp_path, notes, one, other):
    """Exchanged, doubled, and of a run with other settings; all of 5 rows."""
    run_stage(Squares(notes), shards(tmp_path))
    run_stage(Squares(notes), ShardFolder(tmp_path / "b", {"model": "n"}, num_rows=ROWS, rows_per_shard=PER_SHARD))
    out, place = tmp_path / "out", f"part-0000{other}-of-00005.parquet"
    whole = (out / place).read_bytes()
    shutil.copy((tmp_path / "b" if one == other else out) / f"part-0000{one}-of-00005.parquet", out / place)
    for read in (lambda: list(read_shards(out)), lambda: run_stage(Squares(notes), shards(tmp_path))):
        with pytest.raises(ValueError, match=rf"{place} is of another run or another place"):
            read()
    (out / place).unlink()
    run_stage(Squares(notes), shards(tmp_path))
    assert (out / place).read_bytes() == whole


def test_files_with_similar_names_are_left_alone(tmp_path, notes):
    (tmp_path / "out").mkdir()
    theirs = [tmp_path / "out" / f"part-{name}" for name in ("0.parquet", "00000-of-00005.parquet.json", "a.parquet")]
    for path in theirs:
        path.write_text("mine")
    for _ in range(2):
        run_stage(Squares(notes), shards(tmp_path, overwrite=True))
        assert list(read_shards(tmp_path / "out")) == expected(ROWS, PER_SHARD)
    assert all(path.read_text() == "mine" for path in theirs)
    assert not list((tmp_path / "out").glob(".*"))


def test_a_run_that_fails_before_its_first_part_leaves_nothing(tmp_path, notes):
    stage = shards(tmp_path)
    with pytest.raises(ValueError, match="Row 0 is bad"):
        run_stage(Squares(notes, fail_at=0), stage)
    assert not (tmp_path / "out").exists()
    run_stage(Squares(notes), stage)
    assert list(read_shards(tmp_path / "out")) == expected(ROWS, PER_SHARD)


def test_other_weights_are_refused(tmp_path, notes):
    run_stage(Squares(notes), shards(tmp_path))
    (tmp_path / "out/part-00003-of-00005.parquet").unlink()
    with pytest.raises(ValueError, match="written with weights 'a', but weights is now 'b'"):
        run_stage(Squares(notes, weights="b"), shards(tmp_path))
    assert not (tmp_path / "out/part-00003-of-00005.parquet").exists()


def test_truncated_shards_are_named_and_written_again_when_they_are_removed(tmp_path, notes):
    run_stage(Squares(notes), shards(tmp_path))
    part = tmp_path / "out/part-00001-of-00005.parquet"
    whole = part.read_bytes()
    for size in (0, len(whole) // 2, len(whole) - 1):
        part.write_bytes(whole[:size])
        for read in (lambda: list(read_shards(tmp_path / "out")), lambda: run_stage(Squares(notes), shards(tmp_path))):
            with pytest.raises(
                ValueError, match=r"part-00001-of-00005.parquet is damaged .* use the same command again"
            ):
                read()
    part.unlink()
    assert run_stage(Squares(notes), shards(tmp_path))["resumed"] == 4
    assert part.read_bytes() == whole


def test_damaged_pages_are_not_read_as_data(tmp_path, notes):
    """One bit of each byte of the pages in turn."""
    run_stage(Squares(notes), shards(tmp_path, rows_per_shard=23))
    part = tmp_path / "out/part-00000-of-00001.parquet"
    whole = part.read_bytes()
    rows = list(read_shards(tmp_path / "out"))
    errors, pages = [], range(4, len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"))
    for at in pages:
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        part.write_bytes(flipped)
        try:
            found = list(read_shards(tmp_path / "out"))
        except ValueError as error:
            errors.append(str(error))
        else:
            assert found == rows  # the bit is not used
    assert len(errors) > 0.5 * len(pages)
    assert all(error.startswith(f"{part} is damaged (") for error in errors)


def test_missing_columns_are_named(tmp_path):
    pq.write_table(pa.table({"row": [1, 2], "square": [1, 4]}), tmp_path / "old.parquet")
    assert read_shard(tmp_path / "old.parquet", ["square", "row"]).to_pylist() == [
        {"square": 1, "row": 1},
        {"square": 4, "row": 2},
    ]
    with pytest.raises(ValueError, match=r"old.parquet lacks the column\(s\) \['cube'\]; it has \['row', 'square'\]"):
        read_shard(tmp_path / "old.parquet", ["cube"])
    with pytest.raises(FileNotFoundError):  # not damage
        read_shard(tmp_path / "none.parquet")


def test_damaged_folders_are_named(tmp_path, notes):
    run_stage(Squares(notes), shards(tmp_path))
    (tmp_path / "out/manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(ValueError, match="is not a manifest"):
        shards(tmp_path)
    assert "a web page" in (tmp_path / "out/manifest.json").read_text()
    (tmp_path / "out/manifest.json").unlink()
    with pytest.raises(ValueError, match="with their settings is missing"):
        shards(tmp_path)
    with pytest.raises(FileNotFoundError, match="has no manifest"):
        list(read_shards(tmp_path / "out"))


def test_missing_ray_names_the_extra(tmp_path, notes, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-captionrl\[ray\]'"):
        run_stage(Squares(notes), shards(tmp_path), EngineOptions(engine="ray"))


def test_stages_without_gpu_have_an_actor_per_cpu():
    class Ray:
        """A cluster of two machines."""

        def __init__(self, **resources):
            self.resources = {"memory": 1e9} | resources

        def cluster_resources(self):
            return self.resources

        def nodes(self):
            return [{"Alive": True}, {"Alive": True}, {"Alive": False}]

    with_gpus, without = Ray(CPU=64.0, GPU=8.0), Ray(CPU=64.0)
    assert actor_numbers(with_gpus, None, needs_gpu=True) == (8, 1)
    assert actor_numbers(with_gpus, None, needs_gpu=False) == (64, 0)
    assert actor_numbers(without, None, needs_gpu=True) == (2, 0)
    assert actor_numbers(with_gpus, 3, needs_gpu=True) == (3, 1)


def test_stage_without_gpu_runs_in_one_process_of_a_machine_with_gpus(tmp_path, notes, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    stage = Squares(notes)
    stage.needs_gpu = False
    run_stage(stage, shards(tmp_path))
    assert pids(notes, "loaded") == {os.getpid()}


def test_error_of_a_ray_actor_is_part_of_its_answer(tmp_path, notes, monkeypatch):
    class StrangeError(LookupError):
        """Its class is unknown in other processes."""

    class Fails(Squares):
        def __call__(self, rows):
            if rows.start == 10:
                raise StrangeError("no way")
            return super().__call__(rows)

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # restored after the test
    actor = RayActor(Actor(Fails(notes, fail_at=7), shards(tmp_path)), os.getcwd(), 2)
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"  # actors of a machine decode in their share of its threads
    assert actor.attempt(0) == ""
    with pytest.raises(ValueError, match="Row 7 is bad") as error:
        raise_packed(actor.attempt(1))
    assert str(error.value) == "Row 7 is bad. Remove it."
    assert "in __call__" in error.value.__notes__[0]  # where it happened in the worker
    with pytest.raises(LookupError, match="StrangeError: no way"):
        raise_packed(actor.attempt(2))
    assert len(list((tmp_path / "out").glob("part-*"))) == 1


def test_address_without_a_cluster_is_refused():
    class Ray:
        """Stands for the module, whose search for a cluster takes seconds."""

        def is_initialized(self):
            return False

        def init(self, address, **settings):
            self.address = address
            if address == "local":
                assert not settings["include_dashboard"]
                return
            assert "include_dashboard" not in settings  # only for Ray that starts here
            raise ConnectionError("Could not find any running Ray instance.")

    with pytest.raises(ValueError, match=r"'auto': no Ray cluster answers .* Start one with `ray start --head`"):
        connect(Ray(), "auto")
    with socket.create_server(("127.0.0.1", 0)) as server:
        unused = f"ray://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ValueError, match=rf"--address '{unused}': no Ray cluster answers"):
        connect(Ray(), unused)
    ray = Ray()
    assert connect(ray, None)
    assert ray.address == "local"  # not the cluster that runs on this machine or that RAY_ADDRESS names
