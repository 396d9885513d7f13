"""Training with a bank of distractors: one image per rollout, in this package's trainers and in TRL's."""

from __future__ import annotations

import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen2_5_chat_template
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)

from hf_captionrl.captioners.pipeline import scorer_features
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.rewards import BankRewardFunction, ImageBank
from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.model_files import model_path
from tests.tiny import _spread
from tests.tiny.chat import _text, chat_tokenizer, tiny_chat
from tests.tolerances import assert_close, close
from tests.trainers.completion_server import serving
from tests.trainers.grpo_worker import CAPTIONS, make_trainer, rewards_of
from tests.trainers.rl_step import train

BANK = {"distractor_scope": "bank", "bank_size": 5, "bank_batch_size": 8}
IMPORTANCE = {"bank_images": "nearest_and_random", "num_hard_distractors": 2, "bank_weighting": "importance"}
BANKS = pytest.mark.parametrize("weights", [{}, IMPORTANCE], ids=["random", "importance"])


@pytest.fixture(scope="module")
def scorer():
    return load_scorer(model_path("scenes:clip-reward"))


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load_scenes(num_train=8, num_validation=1, num_test=1)["train"]


def bank_function(scorer, data, folder, **weights) -> BankRewardFunction:
    features = scorer_features(scorer, data, cache_dir=str(folder))
    targets = ImageBank(features, data["image_id"], scorer.signature)
    return BankRewardFunction(scorer, targets, bank_size=5, bank_batch_size=8, **weights)


@BANKS
def test_captioner_trains_with_one_image_per_rollout(tmp_path, scorer, data, weights):
    settings = {
        "per_device_train_batch_size": 1,
        "num_generations": 2,
        "do_sample": True,
        "max_steps": 1,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "max_grad_norm": 1.0,
    }
    trainer = train(tmp_path / "bank", data, **settings, **BANK, **weights)
    (logged,) = [entry for entry in trainer.state.log_history if "rewards/self_retrieval/mean" in entry]
    assert logged["rewards/self_retrieval/mean"] < 0
    assert logged["grad_norm"] > 0
    assert "recall_at_1" not in logged
    bank = trainer.rewards.rewards[0]._banks[0]
    expected = bank_function(scorer, data, tmp_path / "cache", **weights).reward._banks[0]
    assert_close(bank.features, expected.features)
    if weights:
        assert bank.counts.tolist() == expected.counts.tolist() == close([1, 1, 5 / 3, 5 / 3, 5 / 3], dtype="float32")
    with pytest.raises(ValueError, match=r"has no distractors.*use distractor_scope='bank'"):
        train(tmp_path / "batch", data, **settings)


@BANKS
def test_chat_model_gets_the_rewards_of_the_function_for_one_group(tmp_path, scorer, data, weights):
    trainer = make_trainer(str(tmp_path), per_device_train_batch_size=2, max_steps=1, **BANK, **weights)
    assert trainer.args.generation_batch_size == trainer.num_generations == 2  # one image
    found = rewards_of(trainer, CAPTIONS[:2])[:, 0]
    image_id = [data["image_id"][0]] * 2
    function = bank_function(scorer, data, tmp_path / "cache", **weights)
    expected = function(completions=CAPTIONS[:2], image_id=image_id)
    assert_close(found, expected, dtype="float32", magnitude=100)
    assert len(set(expected)) == 2
    trainer.train()
    assert trainer.state.log_history[0]["rewards/self_retrieval/mean"] < 0


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


C, K, BANK_ASYNC_GRPO = 8, 2, 5  # images of the batch that the bank stands for, nearest images, images of the bank
G = 4  # captions per image


def attention(query, key, value, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size):
    """Each segment of queries attends to its own keys, the last query to the last key. `(tokens, heads, D)`."""
    assert causal
    assert window_size == (-1, -1)
    parts = []
    for n in range(len(cu_q) - 1):
        q, k, v = query[cu_q[n] : cu_q[n + 1]], key[cu_k[n] : cu_k[n + 1]], value[cu_k[n] : cu_k[n + 1]]
        k, v = (one.repeat_interleave(q.size(1) // one.size(1), 1) for one in (k, v))
        scores = softmax_scale * torch.einsum("qhd,khd->hqk", q, k)
        visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        weights = scores.masked_fill(~visible, -math.inf).softmax(2)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(parts)


class Transfer:
    """Copies the weights to the model of the server."""

    def __init__(self, server) -> None:
        self.server, self.sent = server, 0

    def init_weight_transfer(self) -> None:
        pass

    def pause(self) -> None:
        self.server.lock.acquire()

    def send_weights(self, iterator) -> None:
        self.server.model.load_state_dict(dict(iterator))
        self.sent += 1

    def resume(self) -> None:
        self.server.lock.release()

    def destroy(self) -> None:
        pass


class Recorder:
    """The queue of scored captions; keeps what the trainer takes."""

    def __init__(self, queue) -> None:
        self.queue, self.taken = queue, []

    def get(self, **arguments):
        self.taken.append(self.queue.get(**arguments))
        return self.taken[-1]

    def qsize(self) -> int:
        return self.queue.qsize()


def bank_reward(scorer, features, caption: str, own: int, distractors: list[int]) -> float:
    """The reward of one caption by a plain loop: 2 nearest of 7 other images, and 3 of the 5 remaining ones."""
    if not any(letter.isalnum() for letter in caption):
        return -2 * math.log(C)
    text = scorer.text_features([caption])[0].double()
    logits = [float(scorer.logit_scale) * float(text @ features[row].double()) for row in (own, *distractors)]
    others = len(features) - 1
    weights = (
        [1.0]
        + [(C - 1) / others] * K
        + [(C - 1) / others * (others - K) / (BANK_ASYNC_GRPO - K)] * (BANK_ASYNC_GRPO - K)
    )
    largest = max(logits)
    total = sum(weight * math.exp(logit - largest) for weight, logit in zip(weights, logits, strict=True))
    return logits[0] - largest - math.log(total)


@pytest.fixture
def without_vllm(monkeypatch):
    """What vLLM and a GPU would do, on the CPU."""
    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)  # it only sends requests to vLLM
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *arguments: None)  # asks the GPU


def bank_function_async_grpo(scorer, data, features) -> BankRewardFunction:
    return BankRewardFunction(
        scorer,
        ImageBank(features, data["image_id"], scorer.signature),
        bank_images="nearest_and_random",
        bank_weighting="importance",
        num_hard_distractors=K,
        bank_size=BANK_ASYNC_GRPO,
        bank_batch_size=C,
    )


def tiny_policy() -> tuple[Any, Any]:
    """A language model and its tokenizer."""
    tokenizer = chat_tokenizer(())
    tokenizer.chat_template = qwen2_5_chat_template
    torch.manual_seed(0)
    model = _spread(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_text(tokenizer))))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def settings(folder, url: str) -> AsyncGRPOConfig:
    return AsyncGRPOConfig(
        str(folder),
        vllm_server_base_url=url,
        num_generations=G,
        max_completion_length=6,
        per_device_train_batch_size=4,
        max_inflight_tasks=4,
        max_steps=2,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )


def test_asynchronous_trainer_of_trl_trains_with_the_function(tmp_path, without_vllm):
    scorer = load_scorer(model_path("scenes:clip-reward"))
    data = load_scenes(num_train=8, num_validation=1, num_test=1)["train"]
    features = torch.nn.functional.normalize(scorer_features(scorer, data, cache_dir=str(tmp_path / "cache")).float())
    reward = bank_function_async_grpo(scorer, data, features)
    model, tokenizer = tiny_policy()
    model.save_pretrained(tmp_path / "model")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    prompts = [[{"role": "user", "content": f"Rewrite: {captions[0]}"}] for captions in data["captions"]]
    with serving(model, max_model_len=256) as server:
        transfer = Transfer(server)
        trainer = AsyncGRPOTrainer(
            str(tmp_path / "model"),
            reward_funcs=reward,
            args=settings(tmp_path / "out", server.url),
            train_dataset=data.select_columns(["image_id"]).add_column("prompt", prompts),
            processing_class=tokenizer,
            weight_transfer=transfer,
        )
        trainer.rollout_queue = recorder = Recorder(trainer.rollout_queue)
        trainer.train()

    # Each group was scored alone, in another process.
    groups: dict[int, list] = {}
    for sample in recorder.taken:
        groups.setdefault(sample.group_id, []).append(sample)
    assert len(groups) > 1
    distractors = reward.reward._banks[0]._nearest.tolist()
    for group, samples in groups.items():
        row = group % len(data)
        assert samples[0].prompt == prompts[row]
        captions = [sample.completion[0]["content"].strip() for sample in samples]
        expected = [bank_reward(scorer, features, caption, row, distractors[row]) for caption in captions]
        found = [sample.metrics["rewards/self_retrieval"] for sample in samples]
        assert found == close(expected, dtype="float32", magnitude=100)
        if len(samples) == G:
            values = torch.tensor(found, dtype=torch.float64)
            advantages = (values - values.mean()) / (values.std(correction=0) + 1e-8)
            assert [sample.advantage for sample in samples] == close(advantages.tolist(), ulps=2**10)

    # The trainer gives the first captions the probabilities with which the server sampled them; then weights change.
    assert trainer.state.log_history[0]["ratio"] == close(1.0, dtype="float32", summands=64)
    after = trainer.model.state_dict()
    assert not any(after[name].equal(weight) for name, weight in before.items())
    assert transfer.sent == 3  # before the first step, and after each
    assert all(weight.equal(after[name]) for name, weight in server.model.state_dict().items())

    # A request holds the token ids of a text, and no image.
    texts = [tokenizer.apply_chat_template(p, return_dict=False, add_generation_prompt=True) for p in prompts]
    assert server.prompts
    assert all(prompt in texts for prompt in server.prompts)
