"""Reward functions with TRL's signature: their arguments, results and errors."""

import asyncio
import functools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward

from hf_captionrl.rewards import CompletionReward, LengthPenalty, WeightedRewards, resolve_rewards


async def async_of_completions(completions, **kwargs):
    return [1.0 for _ in completions]


def recorded(context) -> dict[str, Any]:
    """The arguments of a function of completions."""
    given: dict[str, Any] = {}
    WeightedRewards([CompletionReward(lambda **kwargs: given.update(kwargs) or [0.0] * 4)])(context)
    return given


@pytest.fixture
def context(rollouts):
    return rollouts.context(
        ["a cat", "a red cat", "a dog", "dogs"],
        [4, 7],
        columns={"image_id": ["i4", "i7"], "length": [40, 70], "prompt": ["x", "y"]},
        arguments={"prompts": ["a "] * 4, "trainer_state": "state"},
    )


def test_columns_are_repeated_for_each_caption(context):
    given = recorded(context)
    assert given["completions"] == ["a cat", "a red cat", "a dog", "dogs"]
    assert given["length"] == [40, 40, 70, 70]
    assert given["image_id"] == ["i4", "i4", "i7", "i7"]
    assert given["prompts"] == ["a "] * 4
    assert given["trainer_state"] == "state"
    assert [len(ids) for ids in given["completion_ids"]] == [3, 4, 3, 2]  # words and the end token
    assert given["completion_ids"][0] == context.ids[0][context.mask[0]].tolist()
    names = "prompts completions completion_ids trainer_state log_metric log_extra image_id length"
    assert set(given) == set(names.split())  # TRL passes no column `prompt`
    named = WeightedRewards([CompletionReward(lambda length, completions: length)])(context)
    assert named[:, 0].tolist() == [40, 40, 70, 70]


def test_images_are_decoded_only_when_they_are_read(context):
    class Images:
        read = 0

        def __len__(self):
            return 2

        def __getitem__(self, index):
            Images.read += 1
            return f"picture {index}"

    context.columns = {"image": Images()}
    images = recorded(context)["image"]
    assert Images.read == 0
    assert len(images) == 4
    assert list(images) == ["picture 0", "picture 0", "picture 1", "picture 1"]
    assert images[-1] == "picture 1"
    assert images[1:3] == ["picture 0", "picture 1"]
    with pytest.raises(IndexError):
        images[4]


def test_completions_are_text_or_messages(context):
    def plain(completions, **kwargs):
        return [float(isinstance(completion, str)) for completion in completions]

    def of_lists(completions: list[list[dict[str, str]]], **kwargs):
        return [float(len(completion[0]["content"])) for completion in completions]

    def of_strings(completions: "list[str]", **kwargs):
        return plain(completions)

    def quoted(completions: "list[list[dict]]", **kwargs):
        return of_lists(completions)

    def values(reward):
        return WeightedRewards([reward])(context)[:, 0].tolist()

    assert values(CompletionReward(plain)) == values(CompletionReward(of_strings)) == [1.0] * 4
    assert values(CompletionReward(plain, conversational=True)) == [0.0] * 4
    assert values(CompletionReward(of_lists)) == values(CompletionReward(quoted)) == [5.0, 9.0, 5.0, 4.0]
    context.arguments = {"completions": [[{"role": "assistant", "content": "chat"}]] * 4}
    assert values(CompletionReward(plain)) == [0.0] * 4  # as in TRL, whatever the annotation
    assert values(CompletionReward(of_lists)) == [4.0] * 4
    assert values(CompletionReward(plain, conversational=False)) == [1.0] * 4


def test_rewards_of_trl(rollouts):
    context = rollouts.context(["a b c d", "a a a a", "<think>x</think> y"], [0, 1, 2])
    rewards = [think_format_reward, get_repetition_penalty_reward(2), get_soft_overlong_punishment(5, 2)]
    values = resolve_rewards(rewards)(context)
    ids = [row[mine].tolist() for row, mine in zip(context.ids, context.mask, strict=True)]
    assert values[:, 0].tolist() == [0.0, 0.0, 1.0]
    assert values[:, 1].tolist() == pytest.approx(rewards[1](completion_ids=ids))
    assert values[:, 2].tolist() == pytest.approx(rewards[2](completion_ids=ids))
    assert values[1, 1] < 0
    assert values[0, 2] < 0


def test_missing_columns_are_found_before_training(rollouts):
    rewards = resolve_rewards(lambda completions, length, **kwargs: length)
    with pytest.raises(ValueError, match=r"requires \['length'\].*they have \['captions', 'image'\]"):
        rewards.prepare(rollouts.data([["a"]], columns=["image", "captions"]))
    rewards.prepare(rollouts.data([["a"]], columns=["length"]))


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (None, "returned None"),
        ("1234", "returned '1234'"),
        ({"a": 1, "b": 2, "c": 3, "d": 4}, "returned {'a'"),
        ([1.0, 2.0, 3.0], r"returned shape \(3,\) for 4 captions"),
        (torch.zeros(4, 1), r"returned shape \(4, 1\) for 4 captions"),
        (["1", 2.0, 3.0, 4.0], "returned"),
        ([1.0, [2.0], 3.0, 4.0], "returned"),
    ],
)
def test_wrong_results_are_refused(context, returned, named):
    def reward(completions, **kwargs):
        return returned

    with pytest.raises(ValueError, match=f"'reward' {named}"):
        resolve_rewards(reward)(context)


@pytest.mark.parametrize(
    "returned",
    [
        [1, 2.0, True, None],
        np.array([1.0, 2.0, 1.0, np.nan]),
        torch.tensor([1.0, 2.0, 1.0, torch.nan], dtype=torch.float64),
        [torch.tensor(1.0), np.float32(2.0), 1, float("inf")],
        (float(value) for value in (1, 2, 1, "nan")),
    ],
)
def test_sequences_of_numbers_are_rewards(context, returned):
    values = resolve_rewards(lambda completions, **kwargs: returned)(context)
    assert values[:3, 0].tolist() == [1.0, 2.0, 1.0]
    assert values[3].isnan().all()  # as in TRL
    assert context.statistics["rewards/<lambda>/undefined"] == 1.0


def test_warning_for_captions_without_any_reward(context, caplog):
    def first(completions, **kwargs):
        return [1.0, None, None, None]

    def second(completions):
        return [None, 2.0, None, None]

    assert resolve_rewards([first, second])(context).nansum(1).tolist() == [1.0, 2.0, 0.0, 0.0]
    assert "2 of 4 captions got no number from any reward (first, second)" in caplog.text
    assert "'a dog'" in caplog.text
    caplog.clear()
    # Beside a reward that always applies, a function may return None for any caption.
    resolve_rewards([lambda completions: [None] * 4, LengthPenalty()])(context)
    assert not caplog.text
    # Another process may hold the images of another task.
    none = resolve_rewards(lambda completions, **kwargs: [None] * 4)
    values = none(context)
    assert values.isnan().all()
    assert not caplog.text
    with pytest.raises(ValueError, match="<lambda>"):
        none.refuse_unscored(values)


def test_asynchronous_functions_run_at_the_same_time(context):
    started = []

    def waiting_for(other, value):
        async def reward(completions, **kwargs):
            started.append(value)
            mine.set()
            await asyncio.wait_for(theirs.wait(), 20)  # neither ends before the other has begun
            return [value] * len(completions)

        mine, theirs = other
        reward.__name__ = f"reward_{value}"
        return reward

    a, b = asyncio.Event(), asyncio.Event()
    values = resolve_rewards([waiting_for((a, b), 1), waiting_for((b, a), 2), async_of_completions])(context)
    assert values.tolist() == [[1.0, 2.0, 1.0]] * 4
    assert sorted(started) == [1, 2]


@pytest.mark.parametrize(
    "function",
    [
        async_of_completions,
        functools.partial(async_of_completions, extra=1),
        lambda **kwargs: async_of_completions(**kwargs),
    ],
)
def test_every_kind_of_asynchronous_callable(context, function):
    assert resolve_rewards(function)(context)[:, 0].tolist() == [1.0] * 4


def test_asynchronous_functions_share_one_loop_also_inside_another(context):
    loops = []

    async def reward(completions, **kwargs):
        loops.append((asyncio.get_running_loop(), threading.current_thread()))
        return [0.0] * len(completions)

    async def notebook():  # whose main thread already runs a loop
        return resolve_rewards(reward)(context)

    asyncio.run(notebook())
    resolve_rewards(reward)(context)
    assert loops[0] == loops[1]
    assert loops[0][1] is not threading.main_thread()

    async def wrong(completions, **kwargs):
        raise KeyError("solution")

    with pytest.raises(KeyError, match="solution"):
        resolve_rewards(wrong)(context)


def test_functions_log_metrics_and_columns(context):
    def reward(completions, log_metric, log_extra, **kwargs):
        log_metric("long", 1)
        log_metric("long", 0)
        log_extra("words", [len(completion.split()) for completion in completions])
        return [0.0] * len(completions)

    resolve_rewards(reward)(context)
    assert context.statistics["long"] == [1.0, 0.0]
    assert context.extra == {"words": [2, 3, 2, 1]}
    with pytest.raises(ValueError, match="1 values for 4 captions"):
        context.log_extra("words", [1])
