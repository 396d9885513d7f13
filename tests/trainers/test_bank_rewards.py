"""Training with a bank of distractors: one image per rollout, in this package's trainers and in TRL's."""

from __future__ import annotations

import pickle

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from hf_captionrl.captioners.pipeline import scorer_features
from hf_captionrl.rewards import BankRewardFunction, ImageBank
from hf_captionrl.scenes import load_scenes
from tests.tiny.chat import tiny_chat
from tests.tolerances import assert_close, close
from tests.trainers.rl_step import train

BANK = {"distractor_scope": "bank", "bank_size": 5, "bank_batch_size": 8}
IMPORTANCE = {"bank_images": "nearest_and_random", "num_hard_distractors": 2, "bank_weighting": "importance"}


@pytest.fixture
def data():
    return load_scenes(num_train=8, num_validation=1, num_test=1)["train"]


def bank_function(scorer, data, folder, **weights) -> BankRewardFunction:
    features = scorer_features(scorer, data, cache_dir=str(folder))
    targets = ImageBank(features, data["image_id"], scorer.signature)
    return BankRewardFunction(scorer, targets, bank_size=5, bank_batch_size=8, **weights)


def test_captioner_trains_with_one_image_per_rollout(tmp_path, scorer, data):
    settings = {"per_device_train_batch_size": 1, "num_generations": 2, "do_sample": True, "max_grad_norm": 1.0}
    settings |= {"logging_strategy": "steps", "logging_steps": 1}
    trainer = train(tmp_path / "bank", data, **settings, **BANK, **IMPORTANCE)
    (logged,) = [entry for entry in trainer.state.log_history if "rewards/self_retrieval/mean" in entry]
    assert logged["rewards/self_retrieval/mean"] < 0
    assert logged["grad_norm"] > 0
    assert "recall_at_1" not in logged
    bank = trainer.rewards.rewards[0]._banks[0]
    expected = bank_function(scorer, data, tmp_path / "cache", **IMPORTANCE).reward._banks[0]
    assert_close(bank.features, expected.features)
    assert bank.counts.tolist() == expected.counts.tolist() == close([1, 1, 5 / 3, 5 / 3, 5 / 3], dtype="float32")
    with pytest.raises(ValueError, match="distractor_scope='bank'"):
        train(tmp_path / "batch", data, **settings)


def test_trainer_of_trl_trains_with_the_function(tmp_path, scorer, data):
    """One prompt group per batch, and a copy of the function that was pickled, as in an asynchronous trainer."""
    reward = pickle.loads(pickle.dumps(bank_function(scorer, data, tmp_path / "cache")))
    model, processor = tiny_chat("llava")
    prompts = [[{"role": "user", "content": "Describe the image."}]] * len(data)
    given = []

    def recorded(completions, image_id, **columns):
        given.append(([completion[0]["content"] for completion in completions], image_id))
        return reward(completions=completions, image_id=image_id, **columns)

    arguments = {"num_generations": 2, "per_device_train_batch_size": 2, "max_steps": 1, "max_completion_length": 6}
    arguments |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
    arguments |= {"save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "learning_rate": 1e-2}
    trainer = GRPOTrainer(
        model,
        reward_funcs=recorded,
        args=GRPOConfig(str(tmp_path), **arguments),
        train_dataset=data.select_columns(["image", "image_id"]).add_column("prompt", prompts),
        processing_class=processor,
    )
    trainer.train()
    ((captions, image_id),) = given
    assert len(set(image_id)) == 1
    alone = bank_function(scorer, data, tmp_path / "cache")(completions=captions, image_id=image_id)
    mean = trainer.state.log_history[0]["rewards/recorded/mean"]
    assert mean == close(float(torch.tensor(alone).mean()), dtype="float32", magnitude=100)
