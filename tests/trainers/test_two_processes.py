"""Every number that a trainer logs is that of the whole step: two processes log what one logs."""

import json
from pathlib import Path

import pytest

from hf_captionrl import (
    CaptionRLConfig,
    CaptionRLTrainer,
    SelfRetrievalConfig,
    SelfRetrievalTrainer,
    SmileConfig,
    SmileTrainer,
    load_captioner,
    load_scenes,
    load_scorer,
)
from hf_captionrl.utils.model_files import model_path
from tests.processes import run_in_processes

COMMON = {
    "learning_rate": 1e-4,
    "logging_steps": 1,
    "num_train_epochs": 1,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
    "optim": "sgd",
    "freeze_vision_tower": True,
}
RL = {"num_generations": 1, "do_sample": False, "max_completion_length": 8, "guard": "warn", "log_completions": False}
DIFFERENT = {
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "total_flos",
    "num_input_tokens_seen",
}


def a_first_word_in_four(completions, **columns):
    """Captions of even length get no reward."""
    return [None if len(text) % 2 == 0 else float(len(text.split())) for text in completions]


def logs(kind: str, folder: str, batch: int) -> list[dict]:
    # SMILE's last batch has two rows: the second process has none, and accelerate repeats rows.
    scenes = load_scenes(num_train={"smile": 10}.get(kind, 16), num_validation=0, num_test=0)["train"]
    captioner = load_captioner(model_path("scenes:blip-mle"))
    if kind == "smile":
        args = SmileConfig(folder, per_device_train_batch_size=batch, **COMMON)
        trainer = SmileTrainer(captioner, args, scenes)
    elif kind == "self_retrieval":
        args = SelfRetrievalConfig(folder, per_device_train_batch_size=batch, baseline="batch_mean", **COMMON, **RL)
        scorer = load_scorer(model_path("scenes:clip-reward"))
        held_out = load_scorer(model_path("scenes:siglip-held-out"))
        trainer = SelfRetrievalTrainer(captioner, scorer, args, scenes, held_out_scorer=held_out)
    else:
        args = CaptionRLConfig(folder, per_device_train_batch_size=batch, baseline="batch_mean", **COMMON, **RL)
        trainer = CaptionRLTrainer(captioner, [a_first_word_in_four, "repetition"], args, scenes)
    trainer.train()
    return [{k: v for k, v in log.items() if k not in DIFFERENT} for log in trainer.state.log_history]


def _one_of_two(kind: str, folder: str) -> None:
    import torch

    written = logs(kind, f"{folder}/two", 4)
    if torch.distributed.get_rank() == 0:
        Path(folder, "two.json").write_text(json.dumps(written))


@pytest.mark.parametrize("kind", ["smile", "self_retrieval", "caption_rl"])
def test_two_processes_log_what_one_logs(kind, tmp_path):
    alone = logs(kind, str(tmp_path / "one"), 8)
    run_in_processes(2, _one_of_two, kind, str(tmp_path), folder=tmp_path)
    both = json.loads((tmp_path / "two.json").read_text())
    assert [set(log) for log in both] == [set(log) for log in alone]
    assert len(alone) == 3  # two steps and the end
    for one, two in zip(alone, both, strict=True):
        assert two == pytest.approx(one, rel=2e-4, abs=1e-5)
    first = alone[0]
    assert kind == "smile" or {"reward_std", "completions/mean_length"} <= set(first)
    assert kind == "smile" or any(name.startswith("guard/") for name in first)
