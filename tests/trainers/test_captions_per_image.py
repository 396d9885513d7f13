"""An epoch with a row per caption: each caption once, exact resume, and images counted once."""

import dataclasses
import json

import pytest
import torch

from hf_captionrl.captioners import load_captioner
from hf_captionrl.trainers import SelfRetrievalConfig, SmileConfig, SmileTrainer
from hf_captionrl.trainers.publishing import TRAINING_FILE
from hf_captionrl.utils.model_files import model_path

from .bits import bits, different
from .one_step import PLAIN_SGD


def test_an_epoch_with_all_captions_has_each_once_and_resumes_exactly(tmp_path, scenes):
    data = scenes["train"].select(range(4))
    everything = sorted(caption for group in data["captions"] for caption in group)
    settings = {
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 2,
        "max_steps": -1,
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "freeze_vision_tower": True,
        "captions_per_image": "all",
    }
    steps = -(-len(everything) // 2)
    seen = []

    class Spy(SmileTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            seen.extend(self.captioner.decode(inputs["input_ids"][:, 1:]))
            return super().compute_loss(model, inputs, **kwargs)

    def trained(folder, resume=None):
        config = SmileConfig(str(folder), **{**PLAIN_SGD, **settings, "save_steps": steps + 1})
        trainer = Spy(load_captioner(model_path("scenes:blip-mle"), dtype=torch.float32), config, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    through = trained(tmp_path / "a")
    assert through.state.global_step == 2 * steps
    first, second = seen[: len(everything)], seen[len(everything) :]
    assert sorted(first) == sorted(second) == everything
    assert first != second  # in another order
    resumed = trained(tmp_path / "b", str(tmp_path / "a" / f"checkpoint-{steps + 1}"))
    assert different(bits(through), bits(resumed)) == []
    through.save_model()
    assert json.loads((tmp_path / "a" / TRAINING_FILE).read_text())["train_images"] == 4


def test_only_captions_of_references_can_all_be_rows():
    """With rewards an epoch consists of images, so bags hold each image once."""
    with pytest.raises(ValueError, match=r"captions_per_image"):
        SmileConfig("out", captions_per_image="five")
    assert "captions_per_image" not in {field.name for field in dataclasses.fields(SelfRetrievalConfig)}
