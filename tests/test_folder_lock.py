"""A folder has one writer; a killed writer blocks no other."""

import os
import signal

import pytest

from hf_captionrl.utils.io import FolderLock


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
        with pytest.raises(
            ValueError, match=rf"^Another run is writing to '{folder}'\. Let it finish first, or choose"
        ):
            FolderLock(folder)
        with FolderLock(tmp_path / "other"):
            pass
    finally:
        end(number)
    with FolderLock(folder), pytest.raises(ValueError, match="Another run"):
        FolderLock(folder)
    assert [path.name for path in folder.iterdir()] == [".run.lock"]  # the probe is gone


def test_a_worker_does_not_keep_the_lock_of_its_parent(tmp_path):
    with FolderLock(tmp_path):
        worker = forked(lambda: None)
    try:
        with FolderLock(tmp_path):
            pass
    finally:
        end(worker)


def test_a_worker_does_not_give_the_lock_away(tmp_path):
    with FolderLock(tmp_path):
        end(forked(lambda: None))
        with pytest.raises(ValueError, match="Another run"):
            FolderLock(tmp_path)


def test_a_path_that_is_not_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Nothing can be written to .*file.*choose another output_dir"):
        FolderLock(tmp_path / "file")


def test_a_full_disk_is_found_and_the_folder_free_again(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_captionrl.utils.io.atomic_write_bytes", full)
    with pytest.raises(OSError, match=r"^Nothing can be written to '.*' \(No space left on device\)\. Make room"):
        FolderLock(tmp_path)
    monkeypatch.undo()
    with FolderLock(tmp_path):
        pass
