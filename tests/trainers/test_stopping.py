"""Signals during training."""

import os
import signal
import time

import pytest
from transformers import TrainerCallback

from hf_captionrl.trainers.checkpoints import StopOnSignal
from hf_captionrl.trainers.publishing import read_run
from tests.faults.jobs import trainer_of
from tests.trainers.one_step import At
from tests.trainers.test_checkpoints import names


def send_and_wait(number, is_handled):
    """Pending signals merge into one, so the next is sent only when this one was handled or has raised."""
    os.kill(os.getpid(), number)
    end = time.monotonic() + 60
    while not is_handled():
        assert time.monotonic() < end, f"{signal.Signals(number).name} was not handled"


def signalled(folder, step=4, number=signal.SIGTERM, kind="smile", times=1, **changes):
    def received():
        return [c.received for c in trainer.callback_handler.callbacks if isinstance(c, StopOnSignal)] == [number]

    def send():
        send_and_wait(number, received)
        if times == 2:
            send_and_wait(number, lambda: False)

    settings = {"save_on_signal": True, "save_steps": 500, **changes}
    trainer = trainer_of(kind, folder, callbacks=[At(step, send)], **settings)
    return trainer


@pytest.fixture(autouse=True)
def _handlers_are_given_back():
    # Shells start background programs with SIGINT ignored; the test is about foreground programs.
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    signal.signal(signal.SIGINT, found)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signal_finishes_the_step_saves_and_exits(tmp_path, number, capfd):
    trainer = signalled(tmp_path, number=number)
    with pytest.raises(SystemExit) as stop:
        trainer.train()
    assert stop.value.code == 128 + number
    assert names(tmp_path) == ["checkpoint-4"]
    assert "Stopped after step 4;" in capfd.readouterr().err
    record = read_run(tmp_path)  # of a run without a result
    assert list(record) == ["settings"]
    assert list(record["settings"]) == ["learning rate", "length", "batch", "beams", "selection"]
    assert trainer_of("smile", tmp_path).train(resume_from_checkpoint=True).global_step == 6


def test_the_last_step_of_an_epoch_is_evaluated_first(tmp_path):
    trainer = signalled(tmp_path, 3, eval_strategy="epoch")
    with pytest.raises(SystemExit):
        trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_length" in entry] == [3]
    assert names(tmp_path) == ["checkpoint-3"]


def test_a_rollout_is_finished_first(tmp_path):
    with pytest.raises(SystemExit):
        signalled(tmp_path, 1, kind="caption-rl").train()
    assert names(tmp_path) == ["checkpoint-2"]


def test_a_second_signal_stops_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        signalled(tmp_path, number=signal.SIGINT, times=2).train()
    assert names(tmp_path) == []


@pytest.mark.slow
def test_late_signals_go_to_the_previous_handler(tmp_path):
    class Late(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            os.kill(os.getpid(), signal.SIGINT)

    trainer = trainer_of("smile", tmp_path, callbacks=[Late()], save_on_signal=True, max_steps=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
