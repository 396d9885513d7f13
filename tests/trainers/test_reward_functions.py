"""Reward functions with TRL's signature in every RL trainer, with bags and on two processes."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from hf_captionrl.captioners.pipeline import scorer_features
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.rewards import BankRewardFunction, ImageBank
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import CaptionRLConfig, CaptionRLTrainer, SelfRetrievalConfig, SelfRetrievalTrainer
from hf_captionrl.utils.model_files import model_path
from tests.processes import run_in_processes
from tests.rewards.conftest import OfContext
from tests.tolerances import assert_close, close
from tests.trainers.grpo_worker import make_trainer, trainer_of_trl
from tests.trainers.one_step import PLAIN_SGD, captioner, spy_on
from tests.trainers.rl_step import neighbours, train

SHORT = {"max_completion_length": 4, "guard": "off", "num_generations": 2, "per_device_train_batch_size": 4}
LOGGED = {"logging_strategy": "steps", "logging_steps": 1, "report_to": "none"}


def marked(rows=8):
    data = load_scenes(num_train=rows, num_validation=1, num_test=0)["train"]
    return data.add_column("mark", [100 + row for row in range(len(data))])


class Recorder:
    __name__ = "marks"

    def __init__(self):
        self.seen = []
        self.images = []
        self.states = []

    def __call__(self, completions, mark, image_id, captions, trainer_state, log_metric, log_extra, **kwargs):
        self.seen += zip(image_id, mark, completions, kwargs["completion_ids"], captions, strict=True)
        self.images += list(kwargs["image"])[:1]
        self.states.append(trainer_state.global_step)
        assert len(kwargs["prompts"]) == len(completions)
        log_metric("mark", mark[0])
        log_extra("doubled", [2 * value for value in mark])
        return [float(value) for value in mark]


def caption_rl(folder, data, reward, **settings):
    args = CaptionRLConfig(str(folder), **{**PLAIN_SGD, **SHORT, **LOGGED, **settings})
    return CaptionRLTrainer(captioner(), reward, args, data)


def self_retrieval(folder, data, reward, **settings):
    args = SelfRetrievalConfig(
        str(folder), **{**PLAIN_SGD, **SHORT, **LOGGED, "baseline": "leave_one_out", "bag_schedule": 2, **settings}
    )
    scorer = load_scorer(model_path("scenes:clip-reward"))
    ranked, rewards = neighbours(len(data), 3), ["self_retrieval", reward]
    return SelfRetrievalTrainer(captioner(), scorer, args, data, neighbours=ranked, reward_funcs=rewards)


def test_columns_reach_the_function_with_their_captions(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    data, reward = marked(), Recorder()
    trainer = self_retrieval(tmp_path, data, reward, max_steps=2, log_completions=True, num_completions_to_print=2)
    written = spy_on(trainer.rollouts, "reward_context")
    trainer.train()
    G = trainer.args.num_generations
    sampled = [context for context in written if context.group_size == G]
    assert len(sampled) == 2
    rows = {row["image_id"]: row for row in data}
    assert len(reward.seen) == 2 * 4 * G
    for image_id, mark, completion, ids, captions in reward.seen:
        assert mark == rows[image_id]["mark"]
        assert captions == list(rows[image_id]["captions"])
        assert isinstance(completion, str)
        assert trainer.captioner.decode(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)) == [completion]
    assert sampled[0].columns.get("nothing") is None
    pairs = {(seen[0], seen[2]) for seen in reward.seen}
    for context in sampled:
        images = [image_id for image_id in context.image_ids for _ in range(G)]
        assert set(zip(images, context.captions, strict=True)) <= pairs
    assert set(reward.states) == {0, 1}
    assert reward.images[0].tobytes() == rows[reward.seen[0][0]]["image"].tobytes()
    logged = [entry for entry in trainer.state.log_history if "mark" in entry]
    assert [entry["mark"] for entry in logged] == [100 + int(context.rows[0]) for context in sampled]
    means = [sum(100 + int(row) for row in context.rows) / 4 for context in sampled]
    assert [entry["rewards/marks/mean"] for entry in logged] == pytest.approx(means)
    shown = capsys.readouterr().out  # the table of completions, with what the function logged
    assert "doubled" in shown
    assert str(2 * (100 + int(sampled[-1].rows[0]))) in shown


def test_grpo_passes_the_arguments_of_trl(tmp_path):
    reward, asked = Recorder(), []

    async def words(completions, **columns):
        asked.append(set(columns))
        return [float(len(completion[0]["content"].split())) for completion in completions]

    per_image = OfContext(lambda context: context.rows.repeat_interleave(context.group_size), "per_image")

    trainer = make_trainer(
        str(tmp_path),
        per_device_train_batch_size=8,
        max_steps=2,
        reward_weights=[1.0, 0.5, 0.0],
        trainer_arguments={"reward_funcs": [reward, words, per_image]},
    )
    assert trainer.reward_func_names == ["marks", "words", "per_image"]
    assert trainer.reward_weights.tolist() == [1.0, 0.5, 0.0]
    trainer.train()
    rows = {row["image_id"]: row for row in trainer.image_rows}
    assert len(reward.seen) == 16
    for image_id, mark, completion, ids, captions in reward.seen:
        assert completion[0]["role"] == "assistant"  # TRL's conversational format
        assert mark == rows[image_id]["mark"]
        assert captions == list(rows[image_id]["captions"])
        assert all(isinstance(token, int) for token in ids)
    assert reward.states == [0, 1]
    assert {"prompts", "completion_ids", "image", "mark", "trainer_state", "log_extra"} <= asked[0]
    assert "caption_row" not in asked[0]
    logged = [entry["mark"] for entry in trainer.state.log_history if "mark" in entry]
    assert logged == [reward.seen[0][1], reward.seen[8][1]]
    assert "doubled" in trainer._logs["extra"]


class Unequal(Recorder):
    """Logs one metric everywhere and one on the second process only."""

    def __call__(self, completions, log_metric, mark, **kwargs):
        if torch.distributed.get_rank() == 1:
            log_metric("second", 7.0)
        return super().__call__(completions, log_metric=log_metric, mark=mark, **kwargs)


def _two(folder: str) -> None:
    rank = torch.distributed.get_rank()
    found = {}
    for name, make in (("bags", self_retrieval), ("grpo", None)):
        reward, where = Unequal(), Path(folder) / name
        if make is not None:
            trainer = make(where, marked(), reward, max_steps=2)
        else:
            data = {"per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1}
            trainer = make_trainer(str(where), **data, trainer_arguments={"reward_funcs": reward})
        trainer.train()
        seen = [(image_id, mark) for image_id, mark, *_ in reward.seen]
        found[name] = {"seen": seen, "log": trainer.state.log_history}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_in_processes(2, _two, str(folder), folder=folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", ["bags", "grpo"])
def test_columns_stay_with_their_captions_on_two_processes(two, name):
    marks = {row["image_id"]: row["mark"] for row in marked()}
    seen = [found[name]["seen"] for found in two]
    assert all(marks[image_id] == mark for mine in seen for image_id, mark in mine)
    share = len(seen[0]) // 2  # of each rollout
    for step in range(2):
        here = [{image_id for image_id, _ in mine[step * share : (step + 1) * share]} for mine in seen]
        assert len(here[0]) == len(here[1]) == share // 2
        assert not here[0] & here[1]  # each process rewards its images
    logged = [entry for entry in two[0][name]["log"] if "mark" in entry]
    assert len(logged) == 2
    for step, entry in enumerate(logged):
        firsts = [mine[step * share][1] for mine in seen]
        assert entry["mark"] == pytest.approx(sum(firsts) / 2)
        assert entry["second"] == 7.0
        every = [mark for mine in seen for _, mark in mine[step * share : (step + 1) * share]]
        assert entry["rewards/marks/mean"] == pytest.approx(sum(every) / len(every))


# A bank of distractors: one image per rollout, in this package's trainers and in TRL's

BANK = {"distractor_scope": "bank", "bank_size": 5, "bank_batch_size": 8}
MIXED = {"bank_images": "nearest_and_random", "num_hard_distractors": 2}


def bank_function(scorer, data, folder, **weights) -> BankRewardFunction:
    features = scorer_features(scorer, data, cache_dir=str(folder))
    targets = ImageBank(features, data["image_id"], scorer.signature)
    return BankRewardFunction(scorer, targets, bank_size=5, bank_batch_size=8, **weights)


def test_captioner_trains_with_one_image_per_rollout(tmp_path, scorer):
    data = marked()
    settings = {"per_device_train_batch_size": 1, "num_generations": 2, "do_sample": True, "max_grad_norm": 1.0}
    settings |= {"logging_strategy": "steps", "logging_steps": 1}
    trainer = train(tmp_path / "bank", data, **settings, **BANK, **MIXED)
    (logged,) = [entry for entry in trainer.state.log_history if "rewards/self_retrieval/mean" in entry]
    assert logged["rewards/self_retrieval/mean"] < 0
    assert logged["grad_norm"] > 0
    assert "recall_at_1" not in logged
    bank = trainer.rewards.rewards[0]._banks[0]
    expected = bank_function(scorer, data, tmp_path / "cache", **MIXED).reward._banks[0]
    assert_close(bank.features, expected.features)
    with pytest.raises(ValueError, match="distractor_scope='bank'"):
        train(tmp_path / "batch", data, **settings)


def test_trainer_of_trl_trains_with_the_function(tmp_path, scorer):
    """One prompt group per batch, and a copy of the function that was pickled, as in an asynchronous trainer."""
    data = marked()
    reward = pickle.loads(pickle.dumps(bank_function(scorer, data, tmp_path / "cache")))
    given = []

    def recorded(completions, image_id, **columns):
        given.append(([completion[0]["content"] for completion in completions], image_id))
        return reward(completions=completions, image_id=image_id, **columns)

    trainer = trainer_of_trl(tmp_path, data, recorded)
    trainer.train()
    ((captions, image_id),) = given
    assert len(set(image_id)) == 1
    alone = bank_function(scorer, data, tmp_path / "cache")(completions=captions, image_id=image_id)
    mean = trainer.state.log_history[0]["rewards/recorded/mean"]
    assert mean == close(float(torch.tensor(alone).mean()), dtype="float32", magnitude=100)
