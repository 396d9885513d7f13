"""The error of a killed worker names it, at any moment that PyTorch's signal handler may raise."""

import pytest

from hf_captionrl.trainers import checkpoints as exact_resume

KILLED = RuntimeError("DataLoader worker (pid 3) is killed by signal: Killed. ")


def fail(error):
    with exact_resume._dead_workers_named():
        raise error


def test_error_of_the_signal_handler():
    with pytest.raises(
        RuntimeError, match=r"^A DataLoader worker, which loads images, has died \(DataLoader worker \(pid 3"
    ):
        fail(KILLED)


def test_a_broken_pipe_of_a_worker(monkeypatch):
    monkeypatch.setattr(exact_resume, "_reads_from_worker", lambda error: True)
    with pytest.raises(RuntimeError, match=r"has died \(reset by peer\).*resume_from_checkpoint=True") as caught:
        fail(ConnectionResetError("reset by peer"))
    assert isinstance(caught.value.__cause__, ConnectionResetError)


def test_signal_during_the_handling_of_a_broken_pipe(monkeypatch):
    def interrupted(error):
        raise KILLED

    monkeypatch.setattr(exact_resume, "_reads_from_worker", interrupted)
    with pytest.raises(RuntimeError, match=r"^A DataLoader worker, which loads images, has died"):
        fail(EOFError())


@pytest.mark.parametrize("error", [ConnectionResetError("of a tracker"), RuntimeError("shapes"), ValueError("x")])
def test_other_errors_are_unchanged(error):
    with pytest.raises(type(error)) as caught:
        fail(error)
    assert caught.value is error
