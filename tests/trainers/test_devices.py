"""Trainers refuse one process with several GPUs, because DataParallel would split the batch."""

import types

import pytest
import torch

from hf_captionrl.trainers import SelfRetrievalGRPOConfig, SmileConfig, SmileSFTConfig, SmileSFTTrainer, SmileTrainer
from hf_captionrl.trainers.policy import refuse_data_parallel
from tests.tiny import tiny_captioner
from tests.trainers import test_reward_functions as rewarding
from tests.trainers.grpo_worker import make_trainer

MESSAGE = r"sees 2 GPUs.*Use one process per GPU: `accelerate launch --num_processes 2.*CUDA_VISIBLE_DEVICES=0"


@pytest.fixture
def two_gpus(monkeypatch):
    """The number of GPUs that `TrainingArguments` finds on such a machine."""
    for config in (
        SmileConfig,
        SmileSFTConfig,
        SelfRetrievalGRPOConfig,
        rewarding.CaptionRLConfig,
        rewarding.SLEConfig,
    ):
        monkeypatch.setattr(config, "n_gpu", 2)
    monkeypatch.setattr(rewarding.SelfRetrievalConfig, "n_gpu", 2)


def smile(folder):
    return SmileTrainer(tiny_captioner("blip"), SmileConfig(str(folder), use_cpu=True), rewarding.marked())


def smile_sft(folder, parts):
    model, tokenizer = parts
    data = [{"text": "a cat"}]
    return SmileSFTTrainer(
        model, SmileSFTConfig(str(folder), use_cpu=True), train_dataset=data, processing_class=tokenizer
    )


@pytest.mark.parametrize("make", [rewarding.caption_rl, rewarding.sle, rewarding.self_retrieval])
def test_rewarding_trainers_refuse_two_gpus(tmp_path, two_gpus, make):
    with pytest.raises(ValueError, match=MESSAGE):
        make(tmp_path, rewarding.marked(), "length")


def test_other_trainers_refuse_two_gpus(tmp_path, two_gpus, parts):
    with pytest.raises(ValueError, match=MESSAGE):
        smile(tmp_path)
    with pytest.raises(ValueError, match=MESSAGE):
        smile_sft(tmp_path, parts)
    with pytest.raises(ValueError, match=MESSAGE):
        make_trainer(str(tmp_path), per_device_train_batch_size=8)


def test_model_spread_over_gpus_is_accepted():
    """The Trainer itself then sets the number of GPUs to 1."""
    args = types.SimpleNamespace(n_gpu=2)
    spread, single = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    spread.hf_device_map, single.hf_device_map = {"a": 0, "b": 1}, {"": 0}
    refuse_data_parallel(args, spread)
    refuse_data_parallel(types.SimpleNamespace(n_gpu=1), single)
    with pytest.raises(ValueError, match=MESSAGE):
        refuse_data_parallel(args, single)
