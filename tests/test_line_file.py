"""A file of lines has one writer, and holds whole lines whatever happens to it."""

import os

import pytest

from hf_captionrl.utils.io import LineFile


class Counting(LineFile):
    busy = "Wait for the other one."

    def _begin(self, data):
        if data.startswith(b"broken"):
            raise ValueError("This file is broken.")
        self.lines = data.count(b"\n")


def test_lines_are_added_and_seen_again(tmp_path):
    with Counting(tmp_path / "lines") as file:
        assert file.lines == 0
        file.append_bytes(b"one\ntwo\n")
        file.append_bytes(b"three\n", flush=False)
        assert (tmp_path / "lines").read_bytes() == b"one\ntwo\nthree\n"  # seen by others before it is closed
    with Counting(tmp_path / "lines") as file:
        assert file.lines == 3
        file.truncate(len(b"one\n"))
        file.append_bytes(b"four\n")
    assert (tmp_path / "lines").read_bytes() == b"one\nfour\n"


def test_a_second_writer_is_refused_until_the_first_is_closed(tmp_path):
    with (
        Counting(tmp_path / "lines"),
        pytest.raises(ValueError, match=r"Another process .*lines'\. Wait for the other"),
    ):
        Counting(tmp_path / "lines")
    with Counting(tmp_path / "lines") as file:
        file.append_bytes(b"free again\n")


def test_a_file_that_is_deleted_while_it_is_opened_is_made_again(tmp_path, monkeypatch):
    deletions = [True, True, False]
    real = Counting._lock

    def lock_after_another_process_deleted_it(self):
        if deletions.pop(0):
            self.path.unlink()
        real(self)

    monkeypatch.setattr(Counting, "_lock", lock_after_another_process_deleted_it)
    with Counting(tmp_path / "lines") as file:
        file.append_bytes(b"kept\n")
    assert deletions == []
    assert (tmp_path / "lines").read_bytes() == b"kept\n"


def test_an_error_at_the_beginning_gives_the_file_back(tmp_path):
    (tmp_path / "lines").write_bytes(b"broken\n")
    for _ in range(2):  # a lock that was kept would be another message
        with pytest.raises(ValueError, match="is broken"):
            Counting(tmp_path / "lines")
    assert (tmp_path / "lines").read_bytes() == b"broken\n"


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch, fails):
    with Counting(tmp_path / "lines") as file:
        file.append_bytes(b"whole\n")
        real = os.write

        def half_then_full(descriptor, data):
            if len(data) < 8:
                raise OSError(28, "No space left on device")
            return real(descriptor, data[:8])

        def full(descriptor):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, fails, half_then_full if fails == "write" else full)
            with pytest.raises(OSError, match="No space left"):
                file.append_bytes(b"a longer line\n")
        file.append_bytes(b"next\n")
    assert (tmp_path / "lines").read_bytes() == b"whole\nnext\n"
