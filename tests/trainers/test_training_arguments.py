"""Fields of TrainingArguments that work, and what the configurations refuse."""

from __future__ import annotations

import dataclasses
import math
import re
import types
from typing import Any

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from trl import GRPOConfig, RLOOConfig

from hf_captionrl.data import CaptionDataset
from hf_captionrl.trainers import (
    CaptionRLConfig,
    SelfRetrievalConfig,
    SelfRetrievalGRPOConfig,
    SLEConfig,
    SmileConfig,
    SmileSFTConfig,
    SmileTrainer,
)
from hf_captionrl.trainers.caption_config import TRL_NAMES, trl_remedy
from hf_captionrl.trainers.policy import refuse_data_parallel
from tests.tiny import tiny_captioner
from tests.tolerances import resolution
from tests.trainers.grpo_worker import make_trainer
from tests.trainers.one_step import largest_difference, tiny_trainer, weights
from tests.trainers.rl_step import build, train
from tests.trainers.test_smile_sft_trainer import make as make_sft

# By the configuration, a value that it refuses of each option.
REFUSED: dict[type, dict[str, Any]] = {
    SmileConfig: {
        "average_tokens_across_devices": False,
        "label_smoothing_factor": 0.1,
        "bf16_full_eval": True,
        "use_liger_kernel": True,
        "include_for_metrics": ["inputs"],
        "enable_jit_checkpoint": True,
        "hub_strategy": "all_checkpoints",
        "parallelism_config": ParallelismConfig(tp_size=2),
        "remove_unused_columns": True,
        "train_sampling_strategy": "group_by_length",
        "model_init_kwargs": "sdpa",
        "mle_weight": 1.5,
        "cache_image_features": True,  # without a frozen tower
        "per_device_train_batch_size": 0,
        "weight_decay": math.inf,
        "warmup_steps": math.nan,
        "max_steps": 10**20,
    },
    CaptionRLConfig: {
        "auto_find_batch_size": True,
        "neftune_noise_alpha": 5.0,
        "ignore_data_skip": True,
        "accelerator_config": {"split_batches": True},
        "train_sampling_strategy": "sequential",
        "scale_rewards": "image",
        "beta": -0.1,
        "guard": "pray",
        "loss_type": "vespo",
        "epsilon_high": 0.0,
    },
    SelfRetrievalConfig: {"similarity_scale": "blog", "retrieval_weight": math.nan, "dataloader_drop_last": False},
    SLEConfig: {
        "alpha": 1.1,
        "num_generations": 1,
        "do_sample": False,
    },
    SmileSFTConfig: {
        "window_tokens": 1,
        "subset_scope": "chapter",
        "first_token": "shift",
        "eval_packing": True,
        "loss_type": "dft",
    },
}
CONTRADICTIONS = [
    (
        SmileConfig,
        {"cache_pixels": True, "cache_image_features": True, "freeze_vision_tower": True},
        "cache_pixels and",
    ),
    (SmileConfig, {"model_init_kwargs": {"dtype": "bf16"}}, "dtype 'bf16'"),
    (SmileConfig, {"model_init_kwargs": {"trust_remote_code": True}}, "trust_remote_code"),
    (CaptionRLConfig, {"scale_rewards": True}, "num_generations"),
    (CaptionRLConfig, {"loss_type": "cispo"}, "epsilon_high"),
    (SelfRetrievalConfig, {"num_generations_eval": 2}, "num_generations_eval of TRL .*generation_num_beams"),
    (SelfRetrievalConfig, {"bag_schedule": "weekly"}, "bag_schedule"),
    (SelfRetrievalConfig, {"cider_weight": 0.5, "do_sample": False}, "do_sample"),
    (SelfRetrievalConfig, {"num_generations": 2, "do_sample": False}, "do_sample"),
    (SelfRetrievalConfig, {"do_sample": True, "baseline": "leave_one_out"}, "num_generations"),
    (SelfRetrievalConfig, {"do_sample": True, "temperature": 0}, "temperature"),
    (SLEConfig, {"diversity": "multi_reference", "distance": "edit"}, "BLEU"),
    (SLEConfig, {"rl_start_epoch": 1, "num_iterations": 2}, "num_iterations"),
    (SmileSFTConfig, {"packing_strategy": "wrapped", "packing": True}, "packing_strategy"),
]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("config", [SmileConfig, SmileSFTConfig, SelfRetrievalGRPOConfig])
def test_defaults_work_without_an_accelerator_and_warn_of_nothing(config, tmp_path, recwarn):
    args = config(str(tmp_path))
    assert not args.bf16  # TRL's default, which transformers refuses here
    assert not args.dataloader_pin_memory
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize(
    ("config", "settings", "named"),
    [
        *((kind, {name: value}, name) for kind, values in REFUSED.items() for name, value in values.items()),
        *CONTRADICTIONS,
    ],
)
def test_refused_by_the_configuration(config, settings, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        config(str(tmp_path), use_cpu=True, bf16=False, **settings)


def test_every_option_of_trl_is_ours_or_refused_with_a_remedy():
    ours = {field.name for field in dataclasses.fields(CaptionRLConfig)}
    theirs = {field.name for kind in (GRPOConfig, RLOOConfig) for field in dataclasses.fields(kind)}
    assert [name for name in sorted(theirs | ours) if trl_remedy(name)] == sorted(theirs - ours)
    for text in TRL_NAMES:  # a remedy names an option that exists
        for word in re.findall(r"(?<=Use )\w+|(?<= and )\w+_\w+", text):
            assert word in ours or word == "SelfRetrievalGRPOTrainer", text


def test_a_field_set_later_is_refused_by_the_trainer(tmp_path, scenes):
    config = SmileConfig(str(tmp_path), use_cpu=True)
    config.label_smoothing_factor = 0.1
    with pytest.raises(ValueError, match="mle_label_smoothing"):
        SmileTrainer(tiny_captioner("blip"), config, scenes["train"])


def test_data_seed_determines_batches_and_captions(tmp_path, scenes):
    first, again, other = (tiny_trainer(tmp_path / str(n), scenes, data_seed=n % 2) for n in (1, 3, 2))
    for trainer in (first, again, other):
        trainer.train()
    assert largest_difference(weights(first), weights(again)) == 0
    assert largest_difference(weights(first), weights(other)) > 0
    drawn = CaptionDataset(scenes["train"], seed=1)
    assert [first.train_dataset[i]["caption"] for i in range(16)] == [drawn[i]["caption"] for i in range(16)]


def test_rollouts_have_no_incomplete_last_batch(tmp_path, scenes):
    settings = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 6}
    trainer = build(tmp_path, scenes["train"], policy=tiny_captioner("blip"), **settings)
    assert [len(batch) for batch in trainer.get_train_dataloader().batch_sampler] == [6, 6]


def test_settings_of_a_push(tmp_path, scenes, monkeypatch):
    pushed = []
    monkeypatch.setattr("hf_captionrl.hub.push.push_folder", lambda *args, **settings: pushed.append((args, settings)))
    settings = {"push_to_hub": True, "hub_model_id": "me/x", "hub_token": "t", "hub_revision": "r"}
    tiny_trainer(tmp_path, scenes, **settings).push_to_hub()
    tiny_trainer(tmp_path, scenes, **settings, hub_private_repo=False).save_model()
    assert [args for args, _ in pushed] == [(str(tmp_path), "me/x")] * 2
    assert [(p["private"], p["token"], p["revision"]) for _, p in pushed] == [(True, "t", "r"), (False, "t", "r")]


def test_scaled_advantages_reach_the_gradient(tmp_path, scenes):
    """A factor on the reward disappears with scaling, and multiplies the gradient without it."""

    settings = {"num_generations": 3, "do_sample": True, "seed": 5, "baseline": "group_mean"}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}

    def difference(factors, **more) -> float:
        rows = scenes["train"].select(range(4))
        runs = [train(tmp_path / str(f), rows, retrieval_weight=f, **settings, **more) for f in factors]
        return largest_difference(*map(weights, runs))

    # Factors that are large against the 1e-4 that is added to the standard deviation.
    assert difference((1e4, 1e6), scale_rewards="group") < resolution(1, ulps=128)
    assert difference((1.0, 100.0)) > 1e-2


@pytest.mark.parametrize(
    "make",
    [
        lambda folder, _: SmileTrainer(tiny_captioner("blip"), SmileConfig(folder, use_cpu=True)),
        lambda folder, parts: make_sft(parts, folder, rows=[{"text": "a cat"}]),
        lambda folder, _: make_trainer(folder, per_device_train_batch_size=8),
    ],
)
def test_two_gpus_of_one_process_are_refused(tmp_path, monkeypatch, parts, make):
    for config in (SmileConfig, SmileSFTConfig, SelfRetrievalGRPOConfig):
        monkeypatch.setattr(config, "n_gpu", 2)  # what `TrainingArguments` finds on such a machine
    with pytest.raises(ValueError, match=r"2 GPUs.*--num_processes 2.*CUDA_VISIBLE_DEVICES=0"):
        make(str(tmp_path), parts)


def test_model_spread_over_gpus_is_accepted():
    """The Trainer itself then sets the number of GPUs to 1."""
    args = types.SimpleNamespace(n_gpu=2)
    spread, single = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    spread.hf_device_map, single.hf_device_map = {"a": 0, "b": 1}, {"": 0}
    refuse_data_parallel(args, spread)
    refuse_data_parallel(types.SimpleNamespace(n_gpu=1), single)
    with pytest.raises(ValueError, match="2 GPUs"):
        refuse_data_parallel(args, single)


@pytest.mark.parametrize("config", [SmileConfig, SmileSFTConfig])
def test_a_configuration_is_made_again_from_its_dict(tmp_path, config):
    """transformers hides names that end in `_token`; those that are no secrets are needed to make it again."""
    first = config(str(tmp_path), first_token="smile", hub_token="secret", use_cpu=True, bf16=False)
    values = first.to_dict()
    assert (values["first_token"], values["hub_token"]) == ("smile", "<HUB_TOKEN>")
    names = {field.name for field in dataclasses.fields(config) if field.init}
    again = config(**{name: value for name, value in values.items() if name in names})
    assert again.first_token == "smile"
