"""The arguments of a configuration that come from rewards: the weight of each reward, and its fields with a help text."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import logging
import math
import os
import re
import threading
import typing
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeVar, get_args, get_origin

import torch
from torch import Tensor

# --- One event loop in a background thread, for asynchronous reward functions ----------------------------------------

_running: dict[int, asyncio.AbstractEventLoop] = {}
_starting = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """The loop of this process. A forked process starts another, because threads do not survive a fork."""
    with _starting:
        if os.getpid() not in _running:
            _running.clear()
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="reward functions", daemon=True).start()
            _running[os.getpid()] = loop
        return _running[os.getpid()]


def run_together(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """Await several calls concurrently.

    The loop is the same for the whole run, so a client that is bound to it can be reused. It runs in a thread, because the
    main thread of a notebook already runs a loop.
    """
    if not awaitables:
        return []

    async def together() -> list[Any]:
        return list(await asyncio.gather(*awaitables))

    return asyncio.run_coroutine_threadsafe(together(), _loop()).result()


# --- The interface of rewards, what they see of a rollout, and their weighted sum ------------------------------------
# Legend: B images of this process, G captions per image, N = B * G captions, R rewards, T tokens, C images of the whole rollout.

logger = logging.getLogger(__name__)


@dataclass
class RewardData:
    """The training data, passed to rewards once before the first step.

    Args:
        image_ids (`Sequence[str]`): Id of each training image.
        references (`Sequence[list[str]]`): Human captions of each training image.
        image_features (`Callable`): From a scorer to its features `(num_images, D)` of all training images, cached.
        encode (`Callable`): From captions to ids and mask, both `(R, T)`, as the policy would generate them: without start
            token and prompt, with the end token.
        eos_token_id (`int`): The policy's end token.
        device (`torch.device`): Device of the training.
        scorer (`Scorer`, *optional*): The trainer's scorer, for rewards that have none.
        max_completion_length (`int`, *optional*): Longest caption in the policy's tokens, the end token included.
        has_bags (`bool`): Whether batches consist of bags.
        columns (`Sequence[str]`): Names of the columns of the training data.
    """

    image_ids: Sequence[str]
    references: Sequence[list[str]]
    image_features: Callable[[Any], Tensor]
    encode: Callable[[Sequence[str]], tuple[Tensor, Tensor]]
    eos_token_id: int
    device: torch.device
    scorer: Any | None = None
    max_completion_length: int | None = None
    has_bags: bool = False
    columns: Sequence[str] = ()


@dataclass
class RewardContext:
    """One rollout of this process; `candidates` and `bag_size` cover all processes.

    Args:
        captions (`list[str]`): N captions; the G captions of an image are adjacent.
        ids (`torch.Tensor` of shape `(N, T)`): Completions, right-padded.
        mask (`torch.Tensor` of shape `(N, T)`): True at the tokens of the caption, the end token included.
        ended (`torch.Tensor` of shape `(N,)`): False where the length limit truncated the caption.
        rows (`torch.Tensor` of shape `(B,)`): Rows of the training data, one per image.
        image_ids (`list[str]`): B ids.
        references (`list[list[str]]`): Human captions of the B images.
        candidates (`torch.Tensor` of shape `(C,)`): Rows of all images of the rollout on all processes: targets and distractors.
        positions (`torch.Tensor` of shape `(B,)`): Positions of the targets among the candidates.
        bag_size (`int`): Every `bag_size` consecutive candidates form a bag of similar images; 0 without bags.
        step (`int`): Optimizer step.
        statistics (`dict[str, float]`): Numbers that rewards log, e.g. counts of captions without a reward.
        ranks (`torch.Tensor` of shape `(N,)`, *optional*): Rank of the target among all candidates for each caption, 1 is
            best; set by a reward that ranks.
        columns (`Mapping[str, Sequence]`): Columns of the data, B values each, one per image.
        prompts (`list`, *optional*): N prompts; text, or messages in a trainer of chat models.
        completions (`list`, *optional*): N completions as lists of messages; only in a trainer of chat models.
        completion_ids (`list[list[int]]`, *optional*): Token ids of the completions, where they are known as lists.
        trainer_state (`TrainerState`, *optional*): State of the trainer.
        metrics (`dict[str, list[float]]`): Values passed to `log_metric`.
        extra (`dict[str, list]`): Columns passed to `log_extra`.
    """

    captions: list[str]
    ids: Tensor
    mask: Tensor
    ended: Tensor
    rows: Tensor
    image_ids: list[str]
    references: list[list[str]]
    candidates: Tensor
    positions: Tensor
    bag_size: int = 0
    step: int = 0
    statistics: dict[str, float] = field(default_factory=dict)
    ranks: Tensor | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    prompts: list[Any] | None = None
    completions: list[Any] | None = None
    completion_ids: list[list[int]] | None = None
    trainer_state: Any | None = None
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """Log a number with the rewards: its mean over calls, processes and the steps between two logs.

        Args:
            name (`str`): Name of the metric.
            value (`float`): Its value for this rollout.
        """
        self.metrics[str(name)].append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the table of completions.

        Args:
            column (`str`): Its name.
            values (`Sequence`): N values.

        Raises:
            ValueError: If there is not one value per caption.
        """
        if len(values) != len(self.captions):
            raise ValueError(
                f"log_extra({column!r}, ...) was given {len(values)} values for {len(self.captions)} captions. Pass one per "
                "caption."
            )
        self.extra[str(column)] = list(values)

    @property
    def group_size(self) -> int:
        """G, captions per image."""
        return len(self.captions) // max(len(self.rows), 1)

    @cached_property
    def is_empty(self) -> Tensor:
        """`(N,)`: captions without a letter or digit."""
        return torch.tensor([not any(c.isalnum() for c in caption) for caption in self.captions], dtype=torch.bool)


class Reward(ABC):
    """A number for each caption of a rollout; higher is better.

    The rewards of this package are dataclasses under [`register_reward`]. Their weight, and every field with a help text
    in its metadata, become arguments of [`SelfRetrievalConfig`] and [`SelfRetrievalGRPOConfig`].

    Attributes:
        name: Name in the logs.
        baseline: Name of the baseline that is subtracted; None for the trainer's. See `BASELINES`.
        summary: What is rewarded, as a noun phrase, for help texts and model cards.
        default_weight: Weight in a configuration that does not set it.
        weight_argument: Configuration argument that holds the weight; by default `{name}_weight`.
        is_standalone: Whether it may be the only reward. False for penalties, which alone would teach empty captions.
    """

    name: str = "reward"
    baseline: str | None = None
    summary: str = ""
    default_weight: float = 0.0
    weight_argument: str = ""
    is_standalone: bool = True

    def describe(self) -> str:
        """The rewards of these arguments.

        Returns:
            `str`: A noun phrase for the model card.
        """
        return self.summary or f"the reward {self.name!r}"

    def prepare(self, data: RewardData) -> None:  # noqa: B027  (most rewards need nothing)
        """Read and check the training data once, before the first step.

        Args:
            data ([`RewardData`]): The training data.
        """

    @abstractmethod
    def __call__(self, context: RewardContext) -> Tensor:
        """Reward a rollout.

        Args:
            context ([`RewardContext`]): The rollout.

        Returns:
            `torch.Tensor` of shape `(N,)`: NaN where the reward does not apply.
        """

    def undefined(self, context: RewardContext) -> float:
        """Substitute for rewards that are NaN or infinite, which are counted.

        Args:
            context ([`RewardContext`]): The rollout.

        Returns:
            `float`: 0 unless the reward has another floor.
        """
        return 0.0


class WeightedRewards:
    """A weighted sum of rewards, each logged under its name.

    Args:
        rewards (`Sequence[Reward]`): The rewards.
        weights (`Sequence[float]`, *optional*): One per reward; 1 by default.

    Raises:
        ValueError: If there is no reward, the numbers of rewards and weights differ, a weight is not finite, or two
            rewards have the same name.
    """

    def __init__(self, rewards: Sequence[Reward], weights: Sequence[float] | None = None) -> None:
        self.rewards = list(rewards)
        self.weights = [1.0] * len(self.rewards) if weights is None else [float(weight) for weight in weights]
        if not self.rewards:
            raise ValueError("There is no reward. Pass reward_funcs, e.g. reward_funcs='self_retrieval'.")
        if len(self.weights) != len(self.rewards):
            raise ValueError(
                f"{len(self.weights)} reward weights for {len(self.rewards)} rewards. Pass one per reward."
            )
        if not all(math.isfinite(weight) for weight in self.weights):
            raise ValueError(f"The reward weights are {self.weights}. Use finite numbers.")
        self._has_warned = False
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names):
            raise ValueError(
                f"Two rewards have the same name: {names}. Set the attribute `name` of one of them; for a function use "
                "FunctionReward(function, name=...) or CompletionReward(function, name=...)."
            )

    @property
    def names(self) -> list[str]:
        """Names in order."""
        return [reward.name for reward in self.rewards]

    def describe(self) -> str:
        """The rewards with a weight other than 0.

        Returns:
            `str`: Noun phrases with weights, for the model card.
        """
        return ", plus ".join(
            reward.describe() if weight == 1 else f"{weight:g} times {reward.describe()}"
            for reward, weight in zip(self.rewards, self.weights, strict=True)
            if weight
        )

    def prepare(self, data: RewardData) -> None:
        """Let every reward read the training data.

        Args:
            data ([`RewardData`]): The training data.
        """
        for reward in self.rewards:
            reward.prepare(data)

    def __call__(self, context: RewardContext, only: Sequence[int] | None = None) -> Tensor:
        """All rewards of a rollout, unweighted.

        Args:
            context ([`RewardContext`]): The rollout.
            only (`Sequence[int]`, *optional*): Compute these; the other columns are 0.

        Returns:
            `torch.Tensor` of shape `(N, R)`: float64 on the CPU, finite.

        Raises:
            ValueError: If a reward does not return one number per caption.
        """
        columns, missing, has_infinite = [], [], False
        found = self._values(context, range(len(self.rewards)) if only is None else only)
        for index, reward in enumerate(self.rewards):
            if index not in found:
                columns.append(torch.zeros(len(context.captions), dtype=torch.float64))
                continue
            values = found[index].detach().double().cpu()
            if values.shape != (len(context.captions),):
                raise ValueError(
                    f"The reward {reward.name!r} returned shape {tuple(values.shape)} for {len(context.captions)} "
                    "captions. Return one number per caption."
                )
            bad = ~values.isfinite()
            has_infinite |= bool(values.isinf().any())
            if bad.any():
                values = torch.where(bad, reward.undefined(context), values)
            context.statistics[f"rewards/{reward.name}/undefined"] = float(bad.sum())
            columns.append(values)
            missing.append(bad)
        if only is None:
            self._check_rewarded(
                context, torch.stack(missing, dim=1).all(1), "None, NaN or infinity" if has_infinite else "None or NaN"
            )
        return torch.stack(columns, dim=1)

    def _values(self, context: RewardContext, wanted: Sequence[int]) -> dict[int, Tensor]:
        """What the rewards return, by index; asynchronous functions run concurrently, after the others."""
        later = [i for i in wanted if getattr(self.rewards[i], "is_async", False)]
        found = {i: self.rewards[i](context) for i in wanted if i not in later}
        functions: list[Any] = [self.rewards[i] for i in later]
        answers = run_together([function.call(context) for function in functions])
        return found | {i: f.read(answer) for i, f, answer in zip(later, functions, answers, strict=True)}

    def _check_rewarded(self, context: RewardContext, unrewarded: Tensor, returned: str) -> None:
        """Warn about captions without a number from any reward, `(N,)`; only once if that is every caption of a rollout."""
        has_floor = any(type(reward).undefined is not Reward.undefined for reward in self.rewards)
        if has_floor or not unrewarded.any():
            return
        if unrewarded.all():
            # As in TRL: with several tasks, a process may hold images of a task without a reward.
            if not self._has_warned:
                logger.warning(
                    "No reward returned a number for any of the %d captions of this rollout: %s returned %s for all of them. "
                    "They count as 0, from which nothing is learned. Return a number for at least one caption. This warning "
                    "is not repeated.",
                    len(unrewarded),
                    self.names,
                    returned,
                )
            self._has_warned = True
            return
        first = int(unrewarded.nonzero()[0])
        image = context.image_ids[first // context.group_size]
        logger.warning(
            "%d of %d captions got %s from every reward (%s) and count as 0; the first is %r of the image %r.",
            int(unrewarded.sum()),
            len(unrewarded),
            returned,
            ", ".join(self.names),
            context.captions[first],
            image,
        )


# --- Functions as rewards: functions of a [`RewardContext`], and functions with TRL's signature ----------------------
# Legend: B images of this process, G captions per image, N = B * G captions.

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


# --- Rewards by name, and rewards from what a user passes ------------------------------------------------------------

_RewardType = TypeVar("_RewardType", bound=type[Reward])

REWARDS: dict[str, type[Reward]] = {}
"""Registered rewards by name: first those that may stand alone, then by their default weights."""

RewardLike = Reward | Callable[..., Any] | str
"""A reward, a function of a [`RewardContext`], a function with TRL's signature, or a name."""


def register_reward(reward: _RewardType) -> _RewardType:
    """Class decorator: make a reward known by its name, and an argument of the self-retrieval configurations.

    Args:
        reward: A dataclass, a subclass of [`Reward`], with a default for each field, a `name` and a `summary`.

    Returns:
        The class.

    Raises:
        TypeError: If it is not such a dataclass.
        ValueError: If another class has the name.
    """
    if not dataclasses.is_dataclass(reward) or not reward.summary:
        raise TypeError(f"{reward.__name__} is not a dataclass with a summary. Use @dataclass below @register_reward.")
    known = REWARDS.get(reward.name)
    if known is not None and known.__qualname__ != reward.__qualname__:
        raise ValueError(f"{known.__name__} has the name {reward.name!r}. Use another name for {reward.__name__}.")
    if not reward.weight_argument:
        reward.weight_argument = f"{reward.name}_weight"
    REWARDS[reward.name] = reward
    # Weighted sums add up in this order, so a new file must not change that of the others.
    ordered = sorted(REWARDS.values(), key=lambda r: (not r.is_standalone, -r.default_weight))
    REWARDS.clear()
    REWARDS.update({r.name: r for r in ordered})
    return reward


def resolve_rewards(
    reward_funcs: RewardLike | Sequence[RewardLike | tuple[RewardLike, float]],
    reward_weights: Sequence[float] | None = None,
) -> WeightedRewards:
    """Weighted rewards from a reward, a callable, a name, or a list of them with or without weights.

    Callables with the same name, such as two lambdas, are numbered: `name`, `name_2`, `name_3`, ...

    Args:
        reward_funcs: One of them, or a list; a list may hold pairs `(reward, weight)`.
        reward_weights (`Sequence[float]`, *optional*): One per reward, instead of weights in the list.

    Returns:
        [`WeightedRewards`]: In the order given.

    Raises:
        ValueError: If a name is unknown, or weights are given twice.
        TypeError: If an item is not a reward, or a function has neither signature.
    """
    if isinstance(reward_funcs, tuple) and len(reward_funcs) == 2 and isinstance(reward_funcs[1], (int, float)):
        reward_funcs = [reward_funcs]  # one reward with its weight
    items = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    weights: list[float] = []
    rewards: list[Reward] = []
    plain: list[FunctionReward] = []
    for item in items:
        item, weight = item if isinstance(item, tuple) else (item, None)
        if weight is not None and reward_weights is not None:
            raise ValueError("Reward weights are given both in reward_funcs and in reward_weights. Pass them once.")
        if isinstance(item, str):
            if item not in REWARDS:
                raise ValueError(f"There is no reward {item!r}. Use one of {sorted(REWARDS)}, or pass a callable.")
            item = REWARDS[item]()
        if not isinstance(item, Reward):
            if not callable(item) or isinstance(item, type):
                raise TypeError(
                    f"{item!r} is not a reward. Pass a Reward, a function of a RewardContext, a function with TRL's signature, "
                    "or a name."
                )
            item = function_reward(item)
            plain.append(item)
        rewards.append(item)
        weights.append(1.0 if weight is None else float(weight))
    _make_unique(rewards, plain)
    return WeightedRewards(rewards, weights if reward_weights is None else reward_weights)


def _make_unique(rewards: Sequence[Reward], plain: Sequence[FunctionReward]) -> None:
    """Number equal names of callables; names that the user chose stay."""
    made = {id(reward) for reward in plain}
    taken = {reward.name for reward in rewards if id(reward) not in made}
    for reward in plain:
        base, number = reward.name, 1
        while reward.name in taken:
            number += 1
            reward.name = f"{base}_{number}"
        taken.add(reward.name)


# --- The arguments of a configuration that come from rewards: the weight of each reward, and its fields with a help text ---


class RewardArguments:
    """Base class of configurations that make rewards from their fields."""

    reward_types: ClassVar[tuple[type[Reward], ...]] = ()

    def reward_weight(self, reward: type[Reward]) -> float:
        """Weight of a reward; 0 leaves it out."""
        return getattr(self, reward.weight_argument)

    def make_rewards(self, **given: Any) -> list[tuple[Reward, float]]:
        """The rewards with a weight above 0, and their weights; `given` replaces fields of the rewards by name."""
        weighted = [(reward, self.reward_weight(reward)) for reward in self.reward_types]
        return [(self._make(reward, given), weight) for reward, weight in weighted if weight]

    def _make(self, reward: type[Reward], given: dict[str, Any]) -> Reward:
        values = {field.name: getattr(self, field.name) for field in _arguments(reward)}
        names = {field.name for field in dataclasses.fields(reward)}  # type: ignore[arg-type]
        return reward(**values | {name: value for name, value in given.items() if name in names})

    def check_rewards(self) -> None:
        """Refuse values that a reward does not accept, and weights that are all 0."""
        for reward in self.reward_types:
            self._make(reward, {})
            weight = self.reward_weight(reward)
            if not 0 <= weight < float("inf"):
                raise ValueError(f"{reward.weight_argument} is {weight}. Use 0 or more.")
        # A configuration may compute its weights from another field, as SLE's alpha.
        alone = [r.weight_argument for r in self.reward_types if r.is_standalone and hasattr(self, r.weight_argument)]
        if alone and not any(getattr(self, name) for name in alone):
            names = " and ".join(alone)
            raise ValueError(f"{names} are all 0, so that nothing is rewarded. Set one of them above 0.")


def reward_arguments(rewards: Iterable[type[Reward]], *, weights: bool = True) -> Any:
    """A dataclass with the arguments of rewards, a base of a configuration; `weights` adds a field per weight."""
    rewards = tuple(rewards)
    made: dict[str, tuple[str, Any, Any]] = {}
    for reward in rewards:
        if weights:
            text = f"Weight of {reward.summary}; 0 leaves it out."
            weight = dataclasses.field(default=reward.default_weight, metadata={"help": text})
            made[reward.weight_argument] = (reward.weight_argument, float, weight)
        for field in _arguments(reward):
            if field.name in made:
                raise TypeError(f"Two rewards have an argument {field.name!r}. Rename that of {reward.__name__}.")
            # The command line gives a value of the default's type, whatever else Python programs may pass.
            hint = type(field.default) if field.default is not None else typing.get_type_hints(reward)[field.name]
            copied = dataclasses.field(default=field.default, metadata=field.metadata)
            made[field.name] = (field.name, hint, copied)
    namespace = {"reward_types": rewards, "__doc__": "Arguments of the rewards."}
    return dataclasses.make_dataclass("_RewardFields", made.values(), bases=(RewardArguments,), namespace=namespace)


def _arguments(reward: type[Reward]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(reward) if "help" in field.metadata]  # type: ignore[arg-type]
