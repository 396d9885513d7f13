"""SmileTrainer: plain loops, splits of the batch, several processes, and exact resume."""

import pytest
import torch
import torch.nn.functional as F

from hf_captionrl.captioners import HeadInputs
from hf_captionrl.data import CaptionDataset
from hf_captionrl.losses import smile_loss
from hf_captionrl.trainers import SmileConfig, SmileObjective, SmileTrainer
from hf_captionrl.trainers.publishing import read_run
from tests.tolerances import assert_close, resolution
from tests.trainers.one_step import bits, different

from .one_step import PLAIN_SGD, assert_one_plain_step, captioner, largest_difference, train, weights


@pytest.fixture(scope="module")
def whole_batch(tmp_path_factory, scenes):
    folder = tmp_path_factory.mktemp("whole")
    return weights(train(folder, scenes["train"], per_device_train_batch_size=16))


@pytest.mark.parametrize("mle_weight", [0.0, 0.3])
def test_one_step_equals_a_plain_loop(tmp_path, scenes, mle_weight):
    trained = weights(train(tmp_path, scenes["train"], per_device_train_batch_size=16, mle_weight=mle_weight))

    plain = captioner()
    dataset = CaptionDataset(scenes["train"], seed=42)
    dataset.set_epoch(0)
    items = [dataset[i] for i in range(16)]
    batch = plain.collate([i["image"] for i in items], [i["caption"] for i in items])
    labels = batch.pop("labels")
    logits = plain.model(**batch).logits[:, :-1]  # (B, T - 1, V)
    labels = labels[:, 1:]
    total, count = torch.zeros(()), 0
    for row, label in zip(logits, labels, strict=True):
        words = sorted({int(w) for w in label if w != -100})
        first = True
        for z, w in zip(row, label, strict=True):
            if w == -100:
                continue
            mle = -F.log_softmax(z, -1)[w]
            smile = mle if first else -F.log_softmax(z[words], -1)[words.index(int(w))]
            total = total + mle_weight * mle + (1 - mle_weight) * smile
            count += 1
            first = False
    assert_one_plain_step(trained, plain.model, total / count, ulps=64)


def test_averaging_per_micro_batch_changes_the_gradient(tmp_path, scenes, whole_batch, monkeypatch):
    """Negative control: dividing by the tokens of each micro-batch changes the gradient."""
    monkeypatch.setattr(
        SmileTrainer,
        "token_mean",
        lambda self, total, labels, n: total / (labels != -100).sum() / self.args.gradient_accumulation_steps,
    )
    split = weights(train(tmp_path, scenes["train"], per_device_train_batch_size=2, gradient_accumulation_steps=8))
    assert largest_difference(split, whole_batch) > 1e-5


@pytest.mark.parametrize("draw", ["sequence", "position"])
def test_random_subsets_do_not_depend_on_the_split(tmp_path, scenes, draw):
    settings = {"subset": "random", "random_draw": draw}
    whole = train(tmp_path / "a", scenes["train"], per_device_train_batch_size=16, **settings)
    split = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    assert largest_difference(
        weights(whole), weights(train(tmp_path / "b", scenes["train"], **split, **settings))
    ) < resolution(1)


def test_cached_image_features_change_nothing(tmp_path, scenes, whole_batch, monkeypatch):
    encoded, encode = [], type(captioner()).image_features
    spy = lambda self, pixel_values: encoded.append(len(pixel_values)) or encode(self, pixel_values)  # noqa: E731
    monkeypatch.setattr(type(captioner()), "image_features", spy)
    settings = {"cache_image_features": True, "feature_cache_dir": str(tmp_path / "cache")}
    cached = train(tmp_path / "a", scenes["train"], per_device_train_batch_size=16, **settings)
    assert largest_difference(weights(cached), whole_batch) < resolution(1)
    assert sum(encoded) == 16
    # A second run of three epochs encodes nothing.
    train(tmp_path / "b", scenes["train"], per_device_train_batch_size=8, **{**settings, "max_steps": 6})
    assert sum(encoded) == 16


class Spy(SmileTrainer):
    def compute_loss(self, model, inputs, **kwargs):
        self.seen.append(self.captioner.decode(inputs["input_ids"][:, 1:]))
        return super().compute_loss(model, inputs, **kwargs)


def test_every_epoch_draws_other_captions(tmp_path, scenes):
    config = SmileConfig(str(tmp_path), **{**PLAIN_SGD, "max_steps": 3, "per_device_train_batch_size": 16})
    trainer = Spy(captioner(), config, train_dataset=scenes["train"])
    trainer.seen = []
    trainer.train()
    drawn = [sorted(batch) for batch in trainer.seen]
    dataset = CaptionDataset(scenes["train"], seed=42)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        assert drawn[epoch] == sorted(dataset[i]["caption"] for i in range(16))
    assert drawn[0] != drawn[1] != drawn[2]


@pytest.mark.parametrize(
    "settings",
    [{"freeze_vision_tower": False}, {"gradient_checkpointing": True}, {"first_token": "shift"}, {"prompt": "photo "}],
)
def test_two_steps_move_the_parameters(tmp_path, scenes, settings):
    trainer = train(tmp_path, scenes["train"], per_device_train_batch_size=8, **{"max_steps": 2, **settings})
    before = dict(captioner().model.named_parameters())
    after = weights(trainer)
    assert all(torch.isfinite(value).all() for value in after.values())
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert any("text_decoder" in name for name in moved)
    assert any("vision_model" in name for name in moved) == ("freeze_vision_tower" in settings)


def test_objective_falls_back_to_full_logits():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 8, generator=generator)
    weight = torch.randn(30, 8, generator=generator)
    labels = torch.tensor([[3, 4, 3, 7, -100], [9, 1, -100, -100, -100]])
    for settings in ({}, {"mle_weight": 0.2}, {"subset": "random"}, {"subset": "random", "random_draw": "position"}):
        objective = SmileObjective(**settings)
        fused = objective(HeadInputs(labels=labels, hidden=hidden, weight=weight))["loss"]
        full = objective(HeadInputs(labels=labels, logits=hidden @ weight.T))["loss"]
        assert_close(fused, full)
    torch.testing.assert_close(
        SmileObjective()(HeadInputs(labels=labels, logits=hidden @ weight.T))["loss"],
        smile_loss(hidden @ weight.T, labels, reduction="sum"),
    )


def test_an_epoch_with_all_captions_has_each_once_and_resumes_exactly(tmp_path, scenes):
    data = scenes["train"].select(range(4))
    everything = sorted(caption for group in data["captions"] for caption in group)
    steps = -(-len(everything) // 2)
    settings = {"optim": "adamw_torch", "learning_rate": 1e-3, "per_device_train_batch_size": 2, "max_steps": -1}
    settings |= {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": steps + 1}

    def trained(folder, resume=None):
        config = SmileConfig(str(folder), **{**PLAIN_SGD, **settings}, captions_per_image="all")
        trainer = Spy(captioner(), config, train_dataset=data)
        trainer.seen = []
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    through = trained(tmp_path / "a")
    assert through.state.global_step == 2 * steps
    seen = [caption for batch in through.seen for caption in batch]
    first, second = seen[: len(everything)], seen[len(everything) :]
    assert sorted(first) == sorted(second) == everything
    assert first != second  # in another order
    resumed = trained(tmp_path / "b", str(tmp_path / "a" / f"checkpoint-{steps + 1}"))
    assert different(bits(through), bits(resumed)) == []
    through.save_model()
    assert read_run(tmp_path / "a")["training"]["train_images"] == 4
