"""What a training prints: short lines, and every warning that a user can act on."""

import logging
import warnings
from types import SimpleNamespace

from hf_captionrl.apps.experiments.logs import (
    LogLines,
    format_log,
    silence_libraries,
)

GUARDS = {f"guard/value_{n}": 0.123456 for n in range(30)}


def test_a_log_is_one_line_with_what_matters_first():
    logs = {**GUARDS, "learning_rate": 2e-4, "reward": -0.48261, "loss": -0.546, "epoch": 0.5, "bag_size": 4}
    line = format_log(logs, 20, 790, width=100)
    assert line.startswith("train  20/790  epoch 0.5  loss -0.546  reward -0.4826  bag_size 4  learning_rate 0.0002")
    assert len(line) <= 100
    evaluated = format_log({"eval_loss": 0.7, "eval_recall_at_1": 0.5, "eval_runtime": 3.0, "epoch": 1.0}, 40, 79)
    assert evaluated == "eval  40/79  epoch 1  loss 0.7  recall_at_1 0.5"
    done = format_log({"train_runtime": 12.5, "train_loss": 0.6, "train_steps_per_second": 1.0}, 79, 79)
    assert done == "done  79/79  seconds 12.5  loss 0.6"


def test_only_the_main_process_prints(capsys):
    for is_main in (False, True):
        state = SimpleNamespace(is_local_process_zero=is_main, global_step=1, max_steps=2)
        LogLines().on_log(None, state, None, {"loss": 1.0})
        assert capsys.readouterr().out == ("train 1/2  loss 1\n" if is_main else "")


def test_warnings_that_a_user_can_act_on_stay(caplog):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        silence_libraries(progress_bars=True)
        warnings.warn("`is_gradient_checkpointing` is deprecated and will be removed.", FutureWarning, stacklevel=1)
        warnings.warn("`reward_funcs` is deprecated.", FutureWarning, stacklevel=1)
        warnings.warn("The captions are long.", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["`reward_funcs` is deprecated.", "The captions are long."]
    loader = logging.getLogger("transformers.modeling_utils")
    head = "CLIPVisionModel LOAD REPORT from: x\nKey | Status |  | \n----+----\n"
    unused = "text_model.embeddings.weight | UNEXPECTED |  | \nlogit_scale | UNEXPECTED |  | \n"
    shown = [unused + "vision_model.weight | MISSING | | ", unused + "lm_head.weight | UNEXPECTED | | ", "no report"]
    loader.addHandler(caplog.handler)
    try:
        for text in (unused, *shown):
            loader.warning(text if text == "no report" else head + text)
    finally:
        loader.removeHandler(caplog.handler)
    assert {record.getMessage().removeprefix(head) for record in caplog.records} == set(shown)
