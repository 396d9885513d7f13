r"""Functions as rewards: functions of a [`RewardContext`], and functions with TRL's signature.

Legend: B images of this process, G captions per image, N = B * G captions.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args, get_origin

import torch
from torch import Tensor

from hf_captionrl.rewards.async_rewards import run_together
from hf_captionrl.rewards.base import Reward, RewardContext, RewardData

__all__ = ["CompletionReward", "FunctionReward", "completion_text", "function_reward"]

_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Keyword arguments that TRL passes in addition to the columns of the data."""
_NO_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not pass."""


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return dict(inspect.signature(called).parameters)
    except (TypeError, ValueError):
        raise TypeError(
            f"The signature of the reward function {callable_name(function)!r} cannot be read. Use "
            "FunctionReward(function) for a function of a RewardContext, or CompletionReward(function) for one with TRL's "
            "signature."
        ) from None


def callable_name(function: Any) -> str:
    """Name of a function, of the function inside a `functools.partial`, or of an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _takes_context(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    named = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return named.strip("'\"").rpartition(".")[2] == RewardContext.__name__


def _has_trl_signature(function: Callable[..., Any]) -> bool:
    """Whether the signature is TRL's."""
    parameters = _parameters(function)
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional and _takes_context(positional[0]):
        return False
    kinds = {p.kind for p in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds or set(parameters) & set(_ARGUMENTS):
        return True
    required = [p for p in parameters.values() if p.default is p.empty and p.kind != p.VAR_POSITIONAL]
    takes_one = bool(positional) or inspect.Parameter.VAR_POSITIONAL in kinds
    if takes_one and len(required) <= 1 and all(p in positional for p in required):
        return False
    raise TypeError(
        f"The reward function {callable_name(function)!r} has the parameters ({', '.join(parameters)}), which are neither of "
        "the two signatures. Use `def reward(context)` for a function of a RewardContext, or `def reward(completions, "
        "**columns)` as in TRL."
    )


def function_reward(function: Callable[..., Any]) -> FunctionReward:
    """The reward that a callable is, by its signature.

    A parameter named as one of TRL's arguments (`completions`, `prompts`, `completion_ids`, `trainer_state`, `log_metric`,
    `log_extra`), or `**kwargs`, makes it a [`CompletionReward`]. A single positional parameter of another name, or a first
    one that is annotated as `RewardContext`, makes it a [`FunctionReward`].
    """
    if hasattr(function, "config") and isinstance(function, torch.nn.Module):
        raise TypeError(
            f"{type(function).__name__} is a model, and models are not called as rewards. Use a function that tokenizes the "
            "completions, calls the model and returns one number per caption."
        )
    return CompletionReward(function) if _has_trl_signature(function) else FunctionReward(function)


class FunctionReward(Reward):
    """Any callable as a reward.

    Args:
        function (`Callable`): From a [`RewardContext`] to N numbers; None or NaN where it does not apply. It may be `async`.
        name (`str`, *optional*): By default the function's.
    """

    def __init__(self, function: Callable[[RewardContext], Any], name: str | None = None) -> None:
        self.function: Callable[..., Any] = function
        self.name = str(name or callable_name(function))
        self.is_async = _is_async(function)

    def call(self, context: RewardContext) -> Any:
        """Call the function.

        Args:
            context ([`RewardContext`]): The rollout.

        Returns:
            What the function returned; of an `async` function an awaitable.
        """
        return self.function(context)

    def __call__(self, context: RewardContext) -> Tensor:
        return self.read(self.call(context))

    def read(self, values: Any) -> Tensor:
        """The result of the function as a tensor.

        Args:
            values: Numbers and None, a tensor, or an awaitable of them.

        Returns:
            `torch.Tensor`: float64; NaN for None.

        Raises:
            ValueError: If it has another type.
        """
        if inspect.isawaitable(values):
            values = run_together([values])[0]
        if isinstance(values, Tensor):
            return values.double()
        if values is None or isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise ValueError(
                f"The reward function {self.name!r} returned {_short(values)}. Return a list with one number, or None, per "
                "caption."
            )
        return torch.tensor([self._number(index, value) for index, value in enumerate(values)], dtype=torch.float64)

    def _number(self, index: int, value: Any) -> float:
        if value is None:
            return math.nan
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"The reward function {self.name!r} returned {_short(value)} for caption {index}. Return one number, or "
                "None, per caption."
            ) from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


class _Repeated(Sequence[Any]):
    """Each value G times in a row; a value is read on access."""

    def __init__(self, values: Sequence[Any], times: int) -> None:
        self.values, self.times = values, times

    def __len__(self) -> int:
        return len(self.values) * self.times

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.values[range(len(self))[index] // self.times]


def repeated(values: Sequence[Any], times: int) -> Sequence[Any]:
    """Each value several times in a row."""
    return [value for value in values for _ in range(times)] if isinstance(values, list) else _Repeated(values, times)


class CompletionReward(FunctionReward):
    """A function with the signature that TRL's `GRPOTrainer` calls: `def reward(completions, **columns)`.

    It is called with keywords: `prompts`, `completions`, `completion_ids` (N each), every column of the data with the value
    of an image repeated for each of its captions, `trainer_state`, `log_metric(name, value)` and `log_extra(column,
    values)`. Without `**kwargs` it gets only the arguments in its signature. Images are decoded on access.

    Args:
        function (`Callable`): Returns N numbers; None where it does not apply. It may be `async`: such functions of one
            rollout run at the same time.
        name (`str`, *optional*): By default the function's.
        conversational (`bool`, *optional*): Whether `completions` are lists of one message, `[{"role": "assistant",
            "content": text}]`, or plain strings. None: messages in a trainer of chat models and for a function whose
            `completions` are annotated as a list of lists, as those of `trl.rewards` are; strings elsewhere.

    Raises:
        TypeError: If the function takes parameters by position only.

    Example:
        >>> def brevity(completions, **columns):
        ...     return [-float(len(completion.split())) for completion in completions]
        >>> CompletionReward(brevity).name
        'brevity'
    """

    def __init__(
        self, function: Callable[..., Any], name: str | None = None, *, conversational: bool | None = None
    ) -> None:
        super().__init__(function, name)
        try:
            parameters = _parameters(function)
        except TypeError:
            parameters = {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}
        kinds = {p.kind for p in parameters.values()}
        if any(p.kind == p.POSITIONAL_ONLY and p.default is p.empty for p in parameters.values()):
            raise TypeError(
                f"The reward function {self.name!r} takes parameters by position only, and TRL's are passed by keyword. "
                "Remove the '/' from its signature."
            )
        keywords = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names: set[str] | None = None
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            self._names = {p.name for p in keywords}
        self._required = [p.name for p in keywords if p.default is p.empty]
        annotated = "completions" in parameters and _is_list_of_lists(parameters["completions"].annotation)
        self._conversational = conversational
        self._annotated = annotated

    def prepare(self, data: RewardData) -> None:
        """Compare the parameters with the columns of the data."""
        clash = sorted(set(data.columns) & (set(_ARGUMENTS) - set(_NO_COLUMNS)))
        if clash:
            raise ValueError(
                f"The data have the column(s) {clash}, which are names of arguments of reward functions. Rename them."
            )
        self._check({name for name in data.columns if name not in _NO_COLUMNS})

    def _check(self, columns: Iterable[str]) -> None:
        known = {*_ARGUMENTS, *columns}
        missing = [name for name in self._required if name not in known]
        if missing:
            raise ValueError(
                f"The reward function {self.name!r} requires {missing}, and the data have no such column; they have "
                f"{sorted(columns)}. Add the column(s) to the data, or give the parameters a default."
            )

    def call(self, context: RewardContext) -> Any:
        columns = [name for name in context.columns if name not in _NO_COLUMNS]
        self._check(columns)
        number, names = len(context.captions), self._names
        ids = context.completion_ids
        if ids is None:
            ids = [row[mine].tolist() for row, mine in zip(context.ids, context.mask, strict=True)]
        arguments: dict[str, Any] = {
            name: repeated(context.columns[name], context.group_size)
            for name in columns
            if names is None or name in names
        }
        arguments |= {
            "prompts": context.prompts if context.prompts is not None else [""] * number,
            "completions": self._completions(context),
            "completion_ids": ids,
            "trainer_state": context.trainer_state,
            "log_extra": context.log_extra,
            "log_metric": context.log_metric,
        }
        return self.function(**{n: value for n, value in arguments.items() if names is None or n in names})

    def _completions(self, context: RewardContext) -> list[Any]:
        wanted = self._conversational
        if context.completions is not None and wanted is not False:
            return context.completions
        if wanted or (wanted is None and self._annotated):
            return [[{"role": "assistant", "content": caption}] for caption in context.captions]
        return list(context.captions)


def completion_text(completion: Any) -> str:
    """Text of a completion, which may be a list of chat messages."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _is_list_of_lists(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return (
            re.match(r"(typing\.)?([Ll]ist|Sequence)\[\s*(typing\.)?([Ll]ist|Sequence)\b", annotation.strip())
            is not None
        )
    inner = get_args(annotation)
    return bool(inner) and (get_origin(inner[0]) or inner[0]) is list
