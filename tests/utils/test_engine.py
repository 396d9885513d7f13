"""Parts in this process and in several: resuming, killed workers, refusals."""

import os
import subprocess
import sys
import time

import pytest

from hf_captionrl.utils.options import EngineOptions
from hf_captionrl.utils.parts import read_parts
from tests.utils.toy import Slow, Squares, expected, pids, run


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def test_rows_in_this_process_equal_a_plain_loop(tmp_path, notes):
    assert run(tmp_path / "out", Squares(notes)) == 0
    assert list(read_parts(tmp_path / "out")) == expected()
    assert list(read_parts(tmp_path / "out", ["square"])) == [{"square": n * n} for n in range(23)]
    assert len(list((tmp_path / "out").iterdir())) == 5


def test_finished_parts_are_skipped(tmp_path, notes):
    run(tmp_path / "out", Squares(notes))
    (tmp_path / "out/part-00003-of-00005.parquet").unlink()
    others = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    with pytest.raises(ValueError, match="missing parts: 1 of 5"):
        list(read_parts(tmp_path / "out"))
    assert run(tmp_path / "out", Squares(notes)) == 18
    assert {path: path.stat().st_mtime_ns for path in others} == others
    assert list(read_parts(tmp_path / "out")) == expected()
    for path in notes.iterdir():
        path.unlink()
    assert run(tmp_path / "out", Squares(notes)) == 23
    assert not pids(notes, "loaded")  # nothing to do: nothing is loaded


def test_a_killed_process_ends_the_run_and_the_same_call_loses_and_repeats_no_row(tmp_path, notes):
    with pytest.raises(RuntimeError, match=r"A worker died.*The same command resumes"):
        run(tmp_path / "out", Squares(notes, kill_at=22), EngineOptions(processes=2))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    run(tmp_path / "out", Squares(notes, kill_at=22), EngineOptions(processes=2))
    assert list(read_parts(tmp_path / "out")) == expected()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(pids(notes, "killed")) == 1
    assert not list((tmp_path / "out").glob(".*"))


def test_error_of_a_worker_reaches_the_caller(tmp_path, notes):
    with pytest.raises(ValueError, match="Row 7 is bad") as error:
        run(tmp_path / "out", Slow(notes, fail_at=7), EngineOptions(processes=2))
    assert str(error.value) == "Row 7 is bad. Remove it."
    assert "in __call__" in str(error.value.__cause__)  # where it happened in the worker
    before = {path.name for path in (tmp_path / "out").iterdir()}
    assert "part-00001-of-00005.parquet" not in before
    time.sleep(1.5)
    assert {path.name for path in (tmp_path / "out").iterdir()} == before  # nothing appears afterwards
    run(tmp_path / "out", Squares(notes))
    assert list(read_parts(tmp_path / "out")) == expected()


def test_other_settings_are_refused(tmp_path, notes):
    run(tmp_path / "out", Squares(notes))
    for change, named in (({"settings": {"model": "n"}}, "model 'm'"), ({"rows_per_part": 6}, "rows_per_shard 5")):
        with pytest.raises(ValueError, match=f"written with {named}"):
            run(tmp_path / "out", Squares(notes), **change)
        assert list(read_parts(tmp_path / "out")) == expected()
    run(tmp_path / "out", Squares(notes, weights="b"), settings={"model": "n"}, rows_per_part=6, overwrite=True)
    assert list(read_parts(tmp_path / "out")) == expected(23, 6)


def start_waiting(tmp_path, notes, processes):
    """Another command that has finished some parts and is in the middle of one."""
    path = tmp_path / "waits.py"
    path.write_text(
        "from hf_captionrl.utils.options import EngineOptions; from tests.utils.toy import Waits, run\n"
        "if __name__ == '__main__':\n"
        f"    run({str(tmp_path / 'out')!r}, Waits({str(notes)!r}), EngineOptions(processes={processes}))\n"
    )
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
        for more in ({}, {"settings": {"model": "n"}, "overwrite": True}):
            with pytest.raises(ValueError, match="Another run is writing to"):
                run(tmp_path / "out", Squares(notes), **more)
        assert {path: path.read_bytes() for path in (tmp_path / "out").glob("[!.]*")} == before
    finally:
        other.kill()
        other.wait()
    assert run(tmp_path / "out", Squares(notes)) >= 10  # the lock ends with the process
    assert list(read_parts(tmp_path / "out")) == expected()


def test_workers_end_with_a_killed_parent(tmp_path, notes):
    other = start_waiting(tmp_path, notes, 2)
    workers = pids(notes, "loaded")
    assert len(workers) == 2
    assert other.pid not in workers
    assert all(map(is_alive, workers))
    other.kill()
    other.wait()
    until(lambda: not any(map(is_alive, workers)), 10)


def test_other_weights_are_refused(tmp_path, notes):
    run(tmp_path / "out", Squares(notes))
    (tmp_path / "out/part-00003-of-00005.parquet").unlink()
    with pytest.raises(ValueError, match="written with weights 'a', but weights is now 'b'"):
        run(tmp_path / "out", Squares(notes, weights="b"))
    assert not (tmp_path / "out/part-00003-of-00005.parquet").exists()
