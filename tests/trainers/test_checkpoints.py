"""Which checkpoints are complete, and which one a run resumes from."""

import builtins
import errno
import io
import json
import os

import pytest

from hf_captionrl.trainers.checkpoints import (
    SEAL_FILE,
    _is_of_disk,
    _remove_partial,
    checkpoint_fault,
    has_checkpoint,
    newest_checkpoint,
    newest_complete_checkpoint,
    seal_checkpoint,
)


def made(folder, *steps, sealed=True):
    """Checkpoints of two files, one of them in a subfolder."""
    for step in steps:
        path = folder / f"checkpoint-{step}"
        (path / "shards").mkdir(parents=True)
        (path / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        (path / "shards" / "weights.safetensors").write_bytes(os.urandom(100))
        if sealed:
            seal_checkpoint(path)
    return folder


def test_newest_checkpoint_is_found_by_number(tmp_path, caplog):
    made(tmp_path, 2, 10, 9)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-99").write_text("a file")
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert newest_checkpoint(tmp_path, last=9) == str(tmp_path / "checkpoint-9")
    assert newest_complete_checkpoint(tmp_path / "checkpoint-2") == str(tmp_path / "checkpoint-2")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda c: (c / SEAL_FILE).unlink(), "it is incomplete: it has no seal.json"),
        (lambda c: (c / SEAL_FILE).write_text("{"), "its seal.json is damaged"),
        (lambda c: (c / SEAL_FILE).write_text('{"files": {"a": 1}}'), "its seal.json is damaged"),
        (lambda c: (c / SEAL_FILE).write_text("[]"), "its seal.json is damaged"),
        (lambda c: (c / "trainer_state.json").unlink(), "trainer_state.json is missing"),
        (
            lambda c: os.truncate(c / "shards/weights.safetensors", 40),
            "weights.safetensors has 40 bytes instead of 100",
        ),
        (lambda c: (c / "shards/weights.safetensors").write_bytes(bytes(100)), "weights.safetensors is damaged"),
    ],
)
def test_broken_checkpoint_is_skipped_and_named(tmp_path, caplog, harm, said):
    made(tmp_path, 2, 4, 6)
    harm(tmp_path / "checkpoint-6")
    assert said in checkpoint_fault(tmp_path / "checkpoint-6")
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    (record,) = caplog.records
    message = record.getMessage()
    assert record.levelname == "WARNING"
    assert message.startswith("Skipped checkpoint-6 (")
    assert said in message
    assert message.endswith("Training resumes from checkpoint-4.")
    assert newest_complete_checkpoint(tmp_path / "checkpoint-6") == str(tmp_path / "checkpoint-4")


def test_files_added_after_the_seal_are_accepted(tmp_path):
    made(tmp_path, 2)
    (tmp_path / "checkpoint-2" / "notes.txt").write_text("mine")
    assert checkpoint_fault(tmp_path / "checkpoint-2") is None
    assert set(json.loads((tmp_path / "checkpoint-2" / SEAL_FILE).read_text())["files"]) == {
        "trainer_state.json",
        "shards/weights.safetensors",
    }


def test_error_without_a_complete_checkpoint(tmp_path):
    made(tmp_path, 2, 4)
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").unlink()
    assert has_checkpoint(tmp_path)  # something is lost, so the run must not silently start from scratch
    with pytest.raises(
        ValueError, match=r"No checkpoint in .* is complete: checkpoint-4 \(trainer_state.*checkpoint-2"
    ):
        newest_checkpoint(tmp_path)


def test_error_without_a_sealed_checkpoint(tmp_path, caplog):
    assert not has_checkpoint(tmp_path / "missing")
    assert caplog.text == ""
    made(tmp_path, 2, sealed=False)
    assert not has_checkpoint(tmp_path)
    assert "checkpoint-2 is incomplete" in caplog.text
    with pytest.raises(ValueError, match="There is no checkpoint in"):
        newest_checkpoint(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"There is no checkpoint .*Use its folder"):
        newest_complete_checkpoint(tmp_path / "checkpoint-7")


def test_checkpoint_with_another_name_has_no_predecessor(tmp_path):
    made(tmp_path, 2)
    (tmp_path / "checkpoint-2").rename(tmp_path / "best")
    assert newest_complete_checkpoint(tmp_path / "best") == str(tmp_path / "best")
    (tmp_path / "best" / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match=r"best' is not complete: trainer_state.json is missing"):
        newest_complete_checkpoint(tmp_path / "best")


@pytest.mark.parametrize(
    ("error", "of_disk"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EROFS, "Read-only file system"), True),
        (Exception("No space left on device (os error 28)"), True),  # tokenizers
        (ValueError("I/O error: File too large (os error 27)"), True),  # safetensors
        (RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 64 vs 0"), True),  # torch
        (FileNotFoundError(errno.ENOENT, "No such file"), False),
        (ConnectionError("the Hub does not answer"), False),
        (RuntimeError("CUDA out of memory"), False),
        (Exception("Connection refused (os error 111)"), False),
    ],
)
def test_disk_errors_are_recognised(error, of_disk):
    assert _is_of_disk(error) == of_disk


def test_partial_checkpoint_is_removed_and_the_previous_one_named(tmp_path):
    made(tmp_path, 2)
    made(tmp_path, 4, sealed=False)
    said = str(_remove_partial(tmp_path / "checkpoint-4", OSError(errno.ENOSPC, "No space left on device")))
    assert said.startswith(f"checkpoint-4 cannot be written to '{tmp_path}' (No space left on device). Free space")
    assert said.endswith("resume_from_checkpoint=True resumes from checkpoint-2.")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def nested(path):
    (path / SEAL_FILE).write_text('{"files": ' + "[" * 100_000 + "]" * 100_000 + "}")


def infinite(path):
    (path / SEAL_FILE).write_text('{"files": {"a": {"size": 1e999, "sha256": ""}}}')


def failing_disk(path):
    """Reading a process's memory at address 0 is an I/O error, also for root."""
    (path / "trainer_state.json").unlink()
    (path / "trainer_state.json").symlink_to("/proc/self/mem")
    seal = json.loads((path / SEAL_FILE).read_text())
    seal["files"]["trainer_state.json"]["size"] = 0
    (path / SEAL_FILE).write_text(json.dumps(seal))


def failing_seal(path):
    (path / SEAL_FILE).unlink()
    (path / SEAL_FILE).symlink_to("/proc/self/mem")


# Only Linux has files that fail when they are read.
FAILING = [
    (failing_disk, "trainer_state.json cannot be read: Input/output error"),
    (failing_seal, "cannot be read: Input/output error"),
] * os.path.exists("/proc/self/mem")


def circular(path):
    (path / SEAL_FILE).unlink()
    (path / SEAL_FILE).symlink_to(SEAL_FILE)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (nested, "its seal.json is damaged"),
        (infinite, "its seal.json is damaged"),
        (circular, "it is incomplete"),
        *FAILING,
    ],
)
def test_an_unreadable_checkpoint_is_skipped_like_a_broken_one(tmp_path, caplog, harm, said):
    made(tmp_path, 2, 4)
    harm(tmp_path / "checkpoint-4")
    assert said in checkpoint_fault(tmp_path / "checkpoint-4")
    assert has_checkpoint(tmp_path)
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert said in caplog.text
    assert newest_complete_checkpoint(tmp_path / "checkpoint-4") == str(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("name", ["", "shards", "shards/weights.safetensors", SEAL_FILE])
def test_a_checkpoint_without_permission_is_skipped(tmp_path, monkeypatch, name):
    made(tmp_path, 2, 4)
    denied = str(tmp_path / "checkpoint-4" / name) if name else str(tmp_path / "checkpoint-4")
    if os.geteuid() != 0:
        os.chmod(denied, 0)
    else:  # root may read everything, so the system calls are made to fail
        stat = os.stat

        def refuse(function):
            def call(path, *args, **kwargs):
                inside = str(path).startswith(denied + "/")
                opens = function is not stat and str(path) == denied
                if inside or opens:
                    raise PermissionError(errno.EACCES, "Permission denied", str(path))
                return function(path, *args, **kwargs)

            return call

        for module, function in ((os, "stat"), (os, "listdir"), (os, "scandir"), (io, "open"), (builtins, "open")):
            monkeypatch.setattr(module, function, refuse(getattr(module, function)))
    try:
        assert "cannot be read: Permission denied" in checkpoint_fault(tmp_path / "checkpoint-4")
        assert has_checkpoint(tmp_path)
        assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    finally:
        if os.geteuid() != 0:
            os.chmod(denied, 0o700)
