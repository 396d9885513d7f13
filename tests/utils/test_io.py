"""A file is the old one or the new one; JSON is strict."""

import enum
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hf_captionrl.utils.io import (
    FolderLock,
    LineFile,
    atomic_file,
    atomic_write_bytes,
    atomic_write_text,
    counted,
    folded,
    read_jsonl,
    to_plain,
    write_json,
    write_jsonl,
)
from tests.processes import Forked


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "a" / "b" / "file.txt"
    assert atomic_write_text(path, "one\r\n") == path
    assert path.read_bytes() == b"one\r\n"
    atomic_write_bytes(path, b"\x00two")
    atomic_write_text(tmp_path / ("n" * 255), "the longest name")
    assert path.read_bytes() == b"\x00two"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch):
    path = atomic_write_text(tmp_path / "file", "old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        atomic_write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_killed_writer_leaves_a_whole_file(tmp_path):
    path, size = tmp_path / "file", 2_000_000
    code = (
        "import sys; from hf_captionrl.utils.io import atomic_write_bytes\n"
        "for n in range(10**6):\n"
        f"    atomic_write_bytes(sys.argv[1], (b'a' if n % 2 else b'b') * {size})\n"
        "    print(n, flush=True)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(5):
        writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    content = path.read_bytes()
    assert len(content) == size
    assert set(content) in ({ord("a")}, {ord("b")})


def killed_while_writing(path):
    with atomic_file(path) as file:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_temporary_file_of_a_killed_writer_goes_with_the_next_run(tmp_path):
    with Forked(killed_while_writing, tmp_path / "file") as writer:
        assert writer.wait() == -signal.SIGKILL
    with FolderLock(tmp_path):
        atomic_write_bytes(tmp_path / "file", b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@dataclass
class Nested:
    path: Path
    values: tuple
    colour: enum.Enum


def test_json_of_everything_a_run_holds(tmp_path):
    nested = Nested(Path("x/y"), (1, None, True), enum.Enum("Colour", {"RED": "red"}).RED)
    value = {"array": np.arange(3), "scalar": np.float32(0.5), "set": {"b", "a"}, "nested": nested, 3: "é\u2028"}
    said = {"path": "x/y", "values": [1, None, True], "colour": "red"}
    path = write_json(tmp_path / "v.json", value)
    assert json.loads(path.read_text(encoding="utf-8")) == (
        {"array": [0, 1, 2], "scalar": 0.5, "set": ["a", "b"], "nested": said, "3": "é\u2028"}
    )


def test_jsonl_is_one_value_a_line(tmp_path):
    rows = [{"text": "two\nlines\u2028three\u0085four\x1cfive"}, 3, None, {"caption": "\ud83d half an emoji"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert path.read_bytes().count(b"\n") == 4
    *found, (_, last) = read_jsonl(path)
    assert found == [(1, rows[0]), (2, 3), (3, None)]
    assert last["caption"].endswith("half an emoji")
    path.write_text('1\n\n  \n{"a": \n')
    with pytest.raises(ValueError, match=r"Line 4 of a\.jsonl is not valid JSON"):
        list(read_jsonl(path))


@pytest.mark.parametrize("number", [float("inf"), np.float64("nan")])
def test_nan_is_refused_by_name(tmp_path, number):
    with pytest.raises(ValueError, match=r"value\['rows'\]\[1\] is (nan|inf)"):
        write_json(tmp_path / "v.json", {"rows": [1.0, number]})
    assert not (tmp_path / "v.json").exists()


def test_values_without_json_form_are_refused():
    with pytest.raises(TypeError, match=r"value\['f'\] is a function"):
        to_plain({"f": test_values_without_json_form_are_refused})
    with pytest.raises(TypeError, match=r"value\['w'\]\[0\] is a longdouble"):
        to_plain({"w": np.ones(2, np.longdouble)})


class Counting(LineFile):
    busy = "Wait for the other one."

    def _begin(self, data):
        self.lines = data.count(b"\n")


def test_lines_are_added_and_seen_again(tmp_path):
    with Counting(tmp_path / "lines") as file:
        with pytest.raises(ValueError, match=r"Another process .*lines'\. Wait for the other"):
            Counting(tmp_path / "lines")
        assert file.lines == 0
        file.append_bytes(b"one\ntwo\n")
        file.append_bytes(b"three\n", flush=False)
        assert (tmp_path / "lines").read_bytes() == b"one\ntwo\nthree\n"  # seen by others before it is closed
    with Counting(tmp_path / "lines") as file:
        assert file.lines == 3
        file.truncate(len(b"one\n"))
        file.append_bytes(b"four\n")
    assert (tmp_path / "lines").read_bytes() == b"one\nfour\n"


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch, fails):
    with Counting(tmp_path / "lines") as file:
        file.append_bytes(b"whole\n")
        real = os.write

        def half_then_full(descriptor, data):
            return real(descriptor, data[:8]) if len(data) >= 8 else full_disk()

        with monkeypatch.context() as patched:
            patched.setattr(os, fails, half_then_full if fails == "write" else full_disk)
            with pytest.raises(OSError, match="No space left"):
                file.append_bytes(b"a longer line\n")
        file.append_bytes(b"next\n")
    assert (tmp_path / "lines").read_bytes() == b"whole\nnext\n"


def forked(function):
    """Run a function in a new process that lives until it is killed; returns when the function has run."""
    reader, writer = os.pipe()
    number = os.fork()
    if number == 0:
        try:
            held = function()  # noqa: F841
            os.write(writer, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    return number


def end(number):
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    folder = tmp_path / "new" / "run"
    number = forked(lambda: FolderLock(folder))
    try:
        with pytest.raises(ValueError, match=rf"^Another run is writing to '{folder}'\. Let it finish first, or use"):
            FolderLock(folder)
        with FolderLock(tmp_path / "other"):
            pass
    finally:
        end(number)
    with FolderLock(folder), pytest.raises(ValueError, match="Another run"):
        FolderLock(folder)
    assert not list(folder.iterdir())  # the probe and the lock are gone


def test_a_worker_neither_keeps_the_lock_of_its_parent_nor_gives_it_away(tmp_path):
    with FolderLock(tmp_path):
        end(forked(lambda: None))
        with pytest.raises(ValueError, match="Another run"):
            FolderLock(tmp_path)
        worker = forked(lambda: None)
    try:
        with FolderLock(tmp_path):
            pass
    finally:
        end(worker)


def test_only_one_is_singular():
    expected = ["0 bags", "1 bag", "1.5 bags", "1,000 bags"]
    assert [counted(number, "bag") for number in (0, 1, 1.5, 1000)] == expected


@pytest.mark.parametrize("columns", [30, 80, None])
def test_text_is_folded_at_blanks_only(monkeypatch, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    path = "/photographs/of-a-long-journey/results.json"
    text = f"  Written to {path}: " + "a number=0.5, and " * 20 + "end"
    first, *others = folded(text).split("\n")
    assert (first + "".join(line[1:] for line in others)) == text
    assert all(len(line) <= (columns or 120) for line in [first, *others] if path not in line)
    assert folded("short") == "short"
