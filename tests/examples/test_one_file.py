"""Each method in one file takes the steps of its trainer: three gradients, from the same weights, images and captions."""

from types import SimpleNamespace

import pytest
import torch

from examples import self_retrieval_in_one_file, sle_in_one_file, smile_in_one_file
from hf_captionrl import load_captioner, load_scenes, load_scorer, trainers
from hf_captionrl.captioners.captioner import split_greedy
from hf_captionrl.rewards import RunningMeanBaseline
from tests.tolerances import assert_close
from tests.trainers.one_step import PLAIN_SGD, spy_on

SETTINGS = {**PLAIN_SGD, "max_steps": 3, "per_device_train_batch_size": 8, "report_to": "none"}


@pytest.fixture(scope="module")
def scenes():
    return load_scenes(num_train=24, num_validation=0, num_test=0)["train"]


def loaded(example):
    """Model, tokenizer and image processor of an example, in fp64 as the trainer's: 1e-6 is then far from rounding."""
    model, *processors = example.load(example.MODEL)
    return model.double(), *processors


def gradient_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad and p.grad is not None])


def recorded_steps(trainer):
    """Inputs of the loss and gradient of each step; of a trainer with rewards also completions and rewards."""
    steps, training_step, rollouts = [], trainer.training_step, getattr(trainer, "rollouts", None)

    def recording(model, inputs, *args):
        loss = training_step(model, inputs, *args)
        steps.append(SimpleNamespace(**inputs, gradient=gradient_of(trainer.captioner.base_model)))
        return loss

    trainer.training_step = recording
    written, rewarded = (spy_on(rollouts, name) if rollouts else [] for name in ("generate", "roll_out"))
    trainer.train()
    for step, completions, (_, rewards, _) in zip(steps, written, rewarded, strict=rollouts is not None):
        step.completions, step.rewards = completions, rewards
    return steps


def assert_same_gradients(steps, model, loss_of, tolerance=1e-6):
    """A plain loop over the recorded steps: to 1e-6 of the gradient's size, while the next step's differs by far more."""
    assert len(steps) == 3
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=PLAIN_SGD["learning_rate"])
    for number, step in enumerate(steps):
        optimizer.zero_grad()
        loss_of(step).backward()
        gradient, size = gradient_of(model), step.gradient.norm()
        assert size > 1e-2
        assert (gradient - step.gradient).norm() < tolerance * size
        assert (gradient - steps[number - 1].gradient).norm() > 1e-2 * size
        optimizer.step()


def test_smile(tmp_path, scenes):
    example = smile_in_one_file
    model, tokenizer, processor = loaded(example)
    captioner = load_captioner(example.MODEL, dtype=torch.float64)
    config = trainers.SmileConfig(str(tmp_path), mle_weight=example.MLE_WEIGHT, **SETTINGS)
    steps = recorded_steps(trainers.SmileTrainer(captioner, config, scenes))
    pixels = captioner.encode_images(scenes["image"][:])["pixel_values"]
    assert_close(example.encode_images(model, processor, scenes["image"][:]), captioner.image_features(pixels))

    def loss_of(step):
        ids, labels = example.encode_captions(model, tokenizer, captioner.decode(step.input_ids[:, 1:]))
        assert torch.equal(ids, step.input_ids)
        assert torch.equal(labels, step.labels)
        return example.loss_of(model, model.vision_model(step.pixel_values).last_hidden_state, ids, labels)

    assert_same_gradients(steps, model, loss_of)


def test_self_retrieval(tmp_path, scenes):
    """Greedy captions, as in the paper, so that the example writes its own."""
    example = self_retrieval_in_one_file
    model, tokenizer, _ = loaded(example)
    listener, baseline = example.Listener(example.SCORER), RunningMeanBaseline()
    config = trainers.SelfRetrievalConfig(
        str(tmp_path), max_completion_length=example.MAX_TOKENS, guard="off", **SETTINGS
    )
    captioner, scorer = load_captioner(example.MODEL, dtype=torch.float64), load_scorer(example.SCORER)
    steps = recorded_steps(trainers.SelfRetrievalTrainer(captioner, scorer, config, scenes))

    def loss_of(step):
        ids, mask = example.write(model, step.image_features, do_sample=False)
        assert torch.equal(ids, step.completions.ids)
        captions = tokenizer.batch_decode(ids, skip_special_tokens=True)
        images = listener.images(scenes[step.rows.tolist()]["image"])
        rewards = example.rewards_of(listener, captions, images)
        assert_close(rewards.double(), step.rewards[:, 0], dtype="float32", magnitude=listener.scale)
        return example.loss_of(model, step.image_features, ids, mask, rewards, baseline)

    assert_same_gradients(steps, model, loss_of, tolerance=1e-5)  # rewards come from an fp32 scorer


def test_sle(tmp_path, scenes):
    """The samples are those of the trainer; the greedy captions, of the baseline, are the example's own."""
    example = sle_in_one_file
    model, tokenizer, _ = loaded(example)
    cider_of = example.Cider(scenes["captions"][:], tokenizer, model.config.text_config.sep_token_id)
    shared = {"alpha": example.ALPHA, "num_generations": example.SAMPLES, "max_completion_length": example.MAX_TOKENS}
    config = trainers.SLEConfig(str(tmp_path), guard="off", **shared, **SETTINGS)
    captioner = load_captioner(example.MODEL, dtype=torch.float64)
    steps = recorded_steps(trainers.SLETrainer(captioner, config, scenes))

    def loss_of(step):
        sampled, greedy = split_greedy(step.completions, example.SAMPLES)
        rows = step.rows.tolist()
        ids, mask = example.write(model, step.image_features, do_sample=False)
        assert torch.equal(ids, greedy.ids)
        cider = cider_of(sampled.ids, sampled.mask, rows)
        assert_close(cider.flatten(), step.rewards[:, 0])
        return example.loss_of(model, step.image_features, sampled.ids, sampled.mask, cider, cider_of(ids, mask, rows))

    assert_same_gradients(steps, model, loss_of)
