"""Signals during training."""

import os
import re
import signal
import threading
import time

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_captionrl.trainers.checkpoints import StopOnSignal
from tests.faults.jobs import trainer_of
from tests.trainers.one_step import At, tiny_trainer
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
    assert stop.value.code == 0
    assert names(tmp_path) == ["checkpoint-4"]
    assert "Stopped after step 4; checkpoint-4 is saved." in capfd.readouterr().err
    assert trainer_of("smile", tmp_path).train(resume_from_checkpoint=True).global_step == 6


def test_new_checkpoint_is_kept_beside_the_best_one(tmp_path):
    # With save_total_limit=1 the Trainer deletes all but the best checkpoint at the end of training.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "length", "eval_strategy": "epoch"}
    trainer = signalled(tmp_path, 4, save_strategy="epoch", save_total_limit=1, **best)
    with pytest.raises(SystemExit):
        trainer.train()
    assert "checkpoint-4" in names(tmp_path)


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
def test_signals_are_not_handled_by_default(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        signalled(tmp_path, number=signal.SIGINT, save_on_signal=False).train()
    assert names(tmp_path) == []


@pytest.mark.slow
def test_late_signals_go_to_the_previous_handler(tmp_path):
    class Late(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            os.kill(os.getpid(), signal.SIGINT)

    trainer = trainer_of("smile", tmp_path, callbacks=[Late()], save_on_signal=True, max_steps=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


@pytest.mark.slow
def test_training_in_another_thread_handles_no_signals(tmp_path):
    steps = []
    trainer = trainer_of("smile", tmp_path, save_on_signal=True, max_steps=1)
    thread = threading.Thread(target=lambda: steps.append(trainer.train().global_step))
    thread.start()
    thread.join()
    assert steps == [1]


def test_broken_best_checkpoint_is_reported_and_the_last_weights_are_kept(tmp_path, caplog):
    def harm():
        weights = tmp_path / "checkpoint-3" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-9])

    best = {"load_best_model_at_end": True, "metric_for_best_model": "length", "eval_strategy": "steps"}
    # Equal captions at both evaluations, so the first checkpoint is the best.
    settings = {"eval_steps": 3, "save_steps": 3, "max_steps": 5, "learning_rate": 0.0, **best}
    trainer = trainer_of("smile", tmp_path, callbacks=[At(5, harm)], **settings)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-3")
    assert re.search(r"checkpoint-3, is broken: .*model\.safetensors.* is truncated", caplog.text)
    assert "The last weights are kept" in caplog.text
    assert "it is broken" in trainer.selection["kept_instead"]


def test_early_stopping_and_the_order_of_events(tmp_path, scenes):
    events = []
    names = [
        f"on_{name}" for name in ("train_begin", "epoch_begin", "step_begin", "step_end", "log", "evaluate", "save")
    ]

    def recorder(name):
        return lambda self, args, state, control, **_: events.append((name, state.global_step))

    callbacks = [type("Recorder", (TrainerCallback,), {name: recorder(name) for name in names})()]
    settings = {f"{name}_strategy": "steps" for name in ("eval", "save", "logging")}
    settings |= {f"{name}_steps": 1 for name in ("eval", "save", "logging")}
    settings |= {"metric_for_best_model": "worse", "greater_is_better": False, "load_best_model_at_end": True}
    arguments = {
        "callbacks": [*callbacks, EarlyStoppingCallback(early_stopping_patience=2)],
        "compute_metrics": lambda prediction: {"worse": len(events)},
    }
    trainer = tiny_trainer(tmp_path, scenes, trainer_arguments=arguments, **{**settings, "max_steps": 9})
    trainer.train()
    # The first evaluation is the best, and two are worse.
    assert (trainer.state.global_step, trainer.state.best_global_step) == (3, 1)
    of_step = [[name[3:] for name, number in events if number == step] for step in (0, 1, 2)]
    assert of_step[0] == ["train_begin", "epoch_begin", "step_begin"]
    assert of_step[1] == ["step_end", "log", "log", "evaluate", "save", "step_begin"]
    assert of_step[2] == ["step_end", "log", "log", "evaluate", "save", "epoch_begin", "step_begin"]
