"""The signature of a reward function is recognised by its parameters."""

import functools

import pytest
import torch
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward

from hf_captionrl.rewards import CompletionReward, FunctionReward, RewardContext, resolve_rewards


def kind_of(function) -> type:
    return type(resolve_rewards(function).rewards[0])


def of_completions(completions):
    return [0.0 for _ in completions]


def of_completions_and_columns(completions, length, **kwargs):
    return [float(value) for value in length]


def of_keywords(**kwargs):
    return [0.0 for _ in kwargs["completions"]]


def of_ids(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def of_context(context):
    return [0.0 for _ in context.captions]


def of_annotated_context(rollout: RewardContext):
    return of_context(rollout)


def of_annotated_context_and_more(rollout: "RewardContext", **settings):
    return of_context(rollout)


def of_context_with_default(c, scale=1.0):
    return of_context(c)


def of_anything(*arguments):
    return of_context(arguments[0])


def of_context_and_limit(limit, context):
    return [float(limit) for _ in context.captions]


def of_limit_and_completions(limit, completions, **kwargs):
    return [float(limit) for _ in completions]


async def async_of_completions(completions, **kwargs):
    return [1.0 for _ in completions]


async def async_of_context(context):
    return [2.0 for _ in context.captions]


class OfCompletions:
    def __call__(self, completions, **kwargs):
        return [3.0 for _ in completions]


class OfContext:
    def __call__(self, context):
        return [4.0 for _ in context.captions]


class AsyncOfCompletions:
    async def __call__(self, completions, **kwargs):
        return [5.0 for _ in completions]

    def method(self, completions):
        return [6.0 for _ in completions]


class Module(torch.nn.Module):
    def forward(self, context):
        return torch.full((len(context.captions),), 7.0)


@functools.wraps(of_context)
def wrapped(*args, **kwargs):
    return of_context(*args, **kwargs)


TRL = (
    of_completions,
    of_completions_and_columns,
    of_keywords,
    of_ids,
    async_of_completions,
    OfCompletions(),
    AsyncOfCompletions(),
    AsyncOfCompletions().method,
    functools.partial(of_limit_and_completions, 2),
    lambda prompts, completions: [0.0],
    think_format_reward,
    get_repetition_penalty_reward(2),
    get_soft_overlong_punishment(5, 2),
)
CONTEXT = (
    of_context,
    of_annotated_context,
    of_annotated_context_and_more,
    of_context_with_default,
    of_anything,
    async_of_context,
    OfContext(),
    Module(),
    wrapped,
    functools.partial(of_context_and_limit, 2),
    lambda c: [0.0],
)


@pytest.mark.parametrize("function", TRL)
def test_trl_signature_is_recognised(function):
    assert kind_of(function) is CompletionReward


@pytest.mark.parametrize("function", CONTEXT)
def test_function_of_a_context_is_recognised(function):
    assert kind_of(function) is FunctionReward


@pytest.mark.parametrize("function", [lambda: [0.0], lambda captions, references: [0.0], lambda c, *, k: [0.0]])
def test_function_with_neither_signature_is_refused(function):
    with pytest.raises(TypeError, match=r"has the parameters \(.*neither of the two signatures. Use `def reward"):
        resolve_rewards(function)


def test_function_without_readable_signature_is_refused():
    with pytest.raises(TypeError, match=r"signature of the reward function 'max' cannot be read. Use FunctionReward"):
        resolve_rewards(max)


def test_positional_only_parameters_are_refused():
    with pytest.raises(TypeError, match="Remove the '/'"):
        CompletionReward(lambda completions, /, **kwargs: [0.0])


def test_functions_are_named_and_equal_names_refused():
    names = [
        resolve_rewards(f).names[0] for f in (of_ids, functools.partial(of_context_and_limit, 2), OfCompletions())
    ]
    assert names == ["of_ids", "of_context_and_limit", "OfCompletions"]
    assert resolve_rewards(CompletionReward(of_ids, name="tokens")).names == ["tokens"]
    with pytest.raises(ValueError, match=r"the same name.*CompletionReward\(function, name=...\)"):
        resolve_rewards([CompletionReward(of_ids), CompletionReward(of_ids)])
    several = [
        lambda c: [0.0],
        functools.partial(of_ids),
        of_ids,
        lambda c: [1.0],
        CompletionReward(of_ids, name="of_ids_2"),
    ]
    assert resolve_rewards(several).names == ["<lambda>", "of_ids", "of_ids_3", "<lambda>_2", "of_ids_2"]
