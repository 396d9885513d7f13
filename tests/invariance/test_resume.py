"""A run that resumes from a checkpoint ends with the bits of the run that was never stopped: the trainers not tested elsewhere.

SMILE, SLE, self-retrieval (killed for real) and SMILE for text have this test beside their others, in tests/trainers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hf_captionrl.captioners import load_captioner
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from tests.tiny import tiny_captioner
from tests.tiny.chat import tiny_chat
from tests.trainers.grpo_worker import make_trainer
from tests.trainers.one_step import bits, different

STEPS = {"save_strategy": "steps", "logging_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
LEARNING = {"learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 1, "optim": "adamw_torch"}


def maximum_likelihood(folder: Path, **settings: Any) -> Any:
    """ClipCap's start: maximum likelihood of the whole captioner, on images that are encoded once, with dropout."""
    captioner = tiny_captioner("clipcap")
    for module in captioner.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    args = SmileConfig(
        str(folder),
        mle_weight=1.0,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        freeze_vision_tower=True,
        cache_image_features=True,
        feature_cache_dir=str(folder.parent / "cache"),
        **STEPS,
        **LEARNING,
        **settings,
    )
    return SmileTrainer(captioner, args, load_scenes(num_train=8, num_validation=1, num_test=0)["train"])


def grpo(folder: Path, **settings: Any) -> Any:
    """TRL's trainer with this package's rewards and sampler, sampling its captions."""
    return make_trainer(str(folder), per_device_train_batch_size=8, **{**STEPS, **LEARNING, **settings})


@pytest.mark.parametrize("make", [maximum_likelihood, grpo], ids=["MLE", "GRPO"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, make):
    # Two steps are an epoch of MLE (4 of 8 images per step) and of GRPO (4 images, 2 captions each): 3 is in the second.
    through = make(tmp_path / "through", max_steps=5, save_steps=3)
    through.train()
    resumed = make(tmp_path / "resumed", max_steps=5, save_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "through" / "checkpoint-3"))
    assert resumed.state.global_step == 5
    assert not different(bits(resumed), bits(through))
    ours, theirs = ([entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (resumed, through))
    assert ours == theirs
    # The control: another seed is another run, so what is compared does depend on what was drawn.
    other = make(tmp_path / "other", max_steps=5, save_steps=3, seed=7)
    other.train()
    assert different(bits(other), bits(through))


def test_grpo_stopped_within_a_rollout_starts_a_new_one(tmp_path):
    """TRL keeps the captions of a rollout in memory only: bits hold where a rollout ends with its checkpoint.

    Here a rollout serves two optimizer steps, and the checkpoint lies between them.
    """
    settings = {"max_steps": 4, "save_steps": 1, "num_iterations": 2}
    through = grpo(tmp_path / "through", **settings)
    through.train()
    apart = {}
    for at in (1, 2):
        resumed = grpo(tmp_path / f"from-{at}", **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "through" / f"checkpoint-{at}"))
        assert resumed.state.global_step == 4
        apart[at] = different(bits(resumed), bits(through))
    assert apart[1]
    assert not apart[2]


def test_weights_saved_under_other_names_come_back(tmp_path):
    """transformers saves LLaVA under the names of its first release, and its Trainer does not know them when it loads.

    Once a resumed run went on from the weights it had been given, with a warning; so did the best checkpoint.
    """
    model, processor = tiny_chat("llava")
    args = SmileConfig(str(tmp_path), max_steps=1, save_steps=1, per_device_train_batch_size=2, **STEPS, **LEARNING)
    scenes = load_scenes(num_train=2, num_validation=1, num_test=0)["train"]
    trainer = SmileTrainer(load_captioner(model, processor=processor), args, scenes)
    trainer.train()
    checkpoint = str(tmp_path / "checkpoint-1")
    with safe_open(f"{checkpoint}/model.safetensors", "pt") as file:
        assert not set(file.keys()) <= set(trainer.model.state_dict())  # or this test shows nothing
    trained = {name: value.clone() for name, value in trainer.model.state_dict().items()}

    def best() -> None:
        trainer.state.best_model_checkpoint = checkpoint
        trainer._load_best_model()

    for load in (lambda: trainer._load_from_checkpoint(checkpoint), best):
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.zero_()
        assert different(dict(trainer.model.state_dict()), trained)
        load()
        assert not different(dict(trainer.model.state_dict()), trained)
