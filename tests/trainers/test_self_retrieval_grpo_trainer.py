"""SelfRetrievalGRPOTrainer: rewards against a loop, the sampler, two processes."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from trl.trainer.utils import RepeatSampler

from hf_captionrl.data import BagCurriculumSampler, open_image
from hf_captionrl.retrieval import nearest_neighbours
from hf_captionrl.trainers.trl_grpo import BagRepeatSampler, SelfRetrievalGRPOTrainer
from tests.processes import run_in_processes
from tests.tiny.chat import tiny_chat
from tests.tolerances import assert_close
from tests.trainers.grpo_worker import CAPTIONS, make_trainer, rewards_of


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return make_trainer(str(tmp_path_factory.mktemp("grpo")), per_device_train_batch_size=16)


def test_rewards_equal_a_loop(trainer, scorer):
    """Log-softmax of each caption's target among the candidates, one caption at a time."""
    images = scorer.image_features([open_image(row["image"]) for row in trainer.image_rows])
    expected = []
    for index, caption in enumerate(CAPTIONS):
        similarities = scorer.text_features([caption])[0] @ images.T * scorer.logit_scale
        expected.append(float(similarities.log_softmax(0)[index // 2]))
    found = rewards_of(trainer, CAPTIONS)
    assert found.shape == (16, 1)
    assert_close(found[:, 0], expected, dtype="float32", magnitude=100)
    assert len({round(value, 3) for value in expected}) > 8  # a reward that distinguishes captions


def test_answers_may_be_text_or_chat(trainer):
    inputs = [trainer.train_dataset[0], trainer.train_dataset[0]]
    chat = [[{"role": "assistant", "content": "a cat"}], [{"role": "assistant", "content": [{"text": "a dog "}]}]]
    context = trainer.reward_context(inputs, chat, [[5, 6], [7]])
    assert context.captions == ["a cat", "a dog"]
    assert trainer.reward_context(inputs, ["a cat ", ""], [[5], []]).captions == ["a cat", ""]


def test_ends_and_masks(trainer):
    end, pad = trainer._tokenizer.eos_token_id, trainer._tokenizer.pad_token_id
    inputs = [trainer.train_dataset[3], trainer.train_dataset[3]]
    context = trainer.reward_context(inputs, ["a", "b"], [[50, 51, end], [52, 53, 54, 55]])
    assert context.ids.tolist() == [[50, 51, end, pad], [52, 53, 54, 55]]
    assert context.mask.tolist() == [[True, True, True, False], [True] * 4]
    assert context.ended.tolist() == [True, False]
    assert context.rows.tolist() == [3]
    assert context.references == [list(trainer.image_rows[3]["captions"])]


@pytest.mark.parametrize(("accumulation", "generations", "iterations"), [(4, 2, 1), (2, 4, 3)])
def test_rollout_number(trainer, monkeypatch, accumulation, generations, iterations):
    """As in TRL: a rollout every `steps_per_generation * num_iterations` micro-steps. Scorers alternate by it."""
    monkeypatch.setattr(trainer.args, "gradient_accumulation_steps", accumulation)
    monkeypatch.setattr(trainer.args, "steps_per_generation", generations)
    monkeypatch.setattr(trainer, "num_iterations", iterations)
    numbers = []
    for micro_step in range(48):
        monkeypatch.setattr(trainer, "_step", micro_step)
        monkeypatch.setattr(trainer.state, "global_step", micro_step // accumulation)
        if micro_step % (generations * iterations) == 0:
            numbers.append(trainer._rollout_number())
            resumed = micro_step % accumulation  # TRL's counter restarts after a resume, the Trainer's does not
            monkeypatch.setattr(trainer, "_step", resumed)
            assert trainer._rollout_number() == numbers[-1]
    assert numbers == list(range(len(numbers)))


def test_two_steps_move_the_parameters(tmp_path):
    trainer = make_trainer(str(tmp_path), per_device_train_batch_size=8)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    seen = []
    trainer.model.register_forward_pre_hook(lambda m, args, given: seen.append(given), with_kwargs=True)
    trainer.train()
    # The policy gets the images as its processor prepares them.
    images = [open_image(row["image"]) for row in trainer.image_rows]
    own = trainer.processing_class.image_processor(images=images, return_tensors="pt")["pixel_values"]
    rows = [[i for i, image in enumerate(own) if torch.equal(image, row)] for row in seen[-1]["pixel_values"]]
    assert all(len(found) == 1 for found in rows)
    assert len({found[0] for found in rows}) == 4
    moved = [name for name, p in trainer.model.named_parameters() if not torch.equal(p.detach(), before[name])]
    assert any("language_model" in name for name in moved)
    logged = trainer.state.log_history[0]
    assert logged["rewards/self_retrieval/mean"] < 0
    assert 0 <= logged["recall_at_1"] <= 1


@pytest.mark.parametrize("differs", [True, False])
def test_equal_rewards_are_named(tmp_path, caplog, differs):
    def reward(completions, **kwargs):
        return [float(differs * number) for number in range(len(completions))]

    settings = {"per_device_train_batch_size": 16, "max_steps": 1, "learning_rate": 1e-12}
    make_trainer(str(tmp_path), trainer_arguments={"reward_funcs": [reward]}, **settings).train()
    assert ("All advantages are 0" in caplog.text) != differs
    assert ("Use a higher learning_rate" in caplog.text) == differs


def test_rewards_are_weighted_and_logged(tmp_path):
    trainer = make_trainer(str(tmp_path), per_device_train_batch_size=16, cider_weight=0.5, max_steps=1)
    assert trainer.reward_func_names == ["self_retrieval", "cider"]
    assert trainer.reward_weights.tolist() == [1.0, 0.5]
    references = [max(trainer.image_rows[index // 2]["captions"], key=len) for index in range(16)]
    values = rewards_of(trainer, references)
    assert values.shape == (16, 2)
    assert (values[:, 1] > 0).all()  # a reference matches itself
    # CIDEr compares tokens, here letters: no caption has this one.
    assert (rewards_of(trainer, ["qqq"] * 16)[:, 1] == 0).all()
    trainer.train()
    assert "rewards/cider/mean" in trainer.state.log_history[0]


def _two(folder: str) -> None:
    trainer = make_trainer(folder, per_device_train_batch_size=8)
    found = {"rewards": rewards_of(trainer, CAPTIONS).tolist(), "order": list(trainer._get_train_sampler())}
    Path(folder, f"{trainer.accelerator.process_index}.json").write_text(json.dumps(found))


def test_two_processes_see_one_rollout(tmp_path, trainer):
    run_in_processes(2, _two, str(tmp_path), folder=tmp_path)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert_close(found["rewards"], rewards_of(trainer, CAPTIONS).tolist(), dtype="float32", magnitude=100)
        assert found["order"] == list(trainer._get_train_sampler())


def test_rows_have_the_order_of_trl():
    bags = BagCurriculumSampler(None, 4, 1, distractors="random", num_images=13)
    ours = list(BagRepeatSampler(bags, 3, 2))
    theirs = list(RepeatSampler(list(range(13)), 3, batch_size=4, repeat_count=2, seed=0))
    assert len(ours) == len(theirs) == len(BagRepeatSampler(bags, 3, 2)) == 3 * 4 * 3 * 2
    for rows in (ours, theirs):  # the same order: each image three times in a row, each rollout twice
        blocks = np.array(rows).reshape(3, 2, 4, 3)
        assert (blocks == blocks[..., :1]).all()
        assert (blocks[:, 0] == blocks[:, 1]).all()
        assert all(len(set(block[0, :, 0].tolist())) == 4 for block in blocks)


def test_bags_stay_whole_and_rollouts_are_filled_with_random_images():
    features = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    neighbours, _ = nearest_neighbours(torch.nn.functional.normalize(features, dim=-1), 10)
    bags, others = (BagCurriculumSampler(neighbours, 10, {2: 3, 4: 5}) for _ in range(2))
    sampler, again = BagRepeatSampler(bags, 2, 1), BagRepeatSampler(others, 2, 1)
    for epoch, size in ((0, 3), (2, 5)):
        bags.set_epoch(epoch)
        assert bags.bag_size == size
        rollouts = np.array(list(sampler)).reshape(4, 10, 2)[..., 0]
        for rollout, batch in zip(rollouts, bags, strict=True):
            assert rollout[: len(batch)].tolist() == batch
            assert len(set(rollout.tolist())) == 10
    others.set_epoch(2)
    assert list(again) == list(sampler)
    bags.set_epoch(3)
    assert list(again) != list(sampler)


RANKED = {"neighbours": np.stack([np.r_[0:r, r + 1 : 8] for r in range(8)])}
REFUSED = [
    ("16 different images", {"per_device_train_batch_size": 32}),
    ("neighbours", {"bag_schedule": 2}),
    ("bag_schedule", {"bag_schedule": "adaptive"}),  # TRL's trainer does not measure R@1 per epoch
    ("remove_unused_columns", {"remove_unused_columns": True}),
    ("retrieval_weight", {"retrieval_weight": 0.0}),
    ("eval_dataset", {"trainer_arguments": {"eval_dataset": [1]}}),
    (r"Bags of \[3\]", {"bag_schedule": 3, "distractor_scope": "bag", "trainer_arguments": RANKED}),
]


@pytest.mark.parametrize(("name", "settings"), REFUSED)
def test_contradictory_arguments_are_refused_before_training(tmp_path, name, settings):
    with pytest.raises(ValueError, match=name):
        make_trainer(str(tmp_path), **{"per_device_train_batch_size": 8, **settings})


def test_evaluation_outside_a_run(tmp_path):
    """Each caption is rewarded with the columns of its image, also with another number of captions per image."""
    marks = []

    def reward(completions, mark, **columns):
        marks.append(mark)
        return [float(value) for value in mark]

    settings = {"per_device_train_batch_size": 8, "num_generations_eval": 1, "scorer": None}
    trainer = make_trainer(str(tmp_path), **settings, trainer_arguments={"reward_funcs": reward})
    metrics = trainer.evaluate(trainer.train_dataset.select([5, 2, 7]))
    assert [sorted(mark) for mark in marks] == [[102, 105, 107]]
    assert metrics["eval_reward"] == pytest.approx((105 + 102 + 107) / 3)
    for rows in (trainer.image_rows, trainer.image_rows.remove_columns("image")):
        with pytest.raises(ValueError, match="train_dataset"):
            trainer.evaluate(rows)
    with pytest.raises(ValueError, match="train_dataset is missing"):
        SelfRetrievalGRPOTrainer(trainer.model, None, trainer.args, None, reward_funcs=reward)


def test_steps_outside_a_run(tmp_path):
    trainer = make_trainer(str(tmp_path), per_device_train_batch_size=8)
    batch = next(iter(trainer.get_train_dataloader()))
    for mode in (True, False):
        trainer.model.train(mode)
        loss, logits, labels = trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)
        assert (loss.isfinite().item(), logits, labels) == (True, None, None)
        assert trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch)).requires_grad
    with pytest.raises(ValueError, match="outputs"):
        trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch), return_outputs=True)


def test_a_model_without_images_is_refused_before_training(tmp_path, parts):
    model, tokenizer = copy.deepcopy(parts)  # TRL changes a model that it is given
    with pytest.raises(ValueError, match="images"):
        make_trainer(str(tmp_path), model=model, trainer_arguments={"processing_class": tokenizer})


def test_ids_beyond_the_tokenizer_are_not_sampled(tmp_path):
    model, processor = tiny_chat("llava")
    size = len(processor.tokenizer)
    model.resize_token_embeddings(size + 300)

    def largest(suppressed: list[int] | None = None) -> int:
        trainer = make_trainer(str(tmp_path), model=model, per_device_train_batch_size=8, max_completion_length=12)
        if suppressed is not None:
            trainer.generation_config.suppress_tokens = suppressed
        inputs = next(iter(trainer.get_train_dataloader()))
        return int(trainer._prepare_inputs(inputs)["completion_ids"].max())

    assert largest() < size
    assert largest([model.config.image_token_id]) >= size  # the negative control: what TRL suppresses
