"""The interface of rewards, what they see of a rollout, their weighted sum, and functions with TRL's signature.

Legend: B images of this process, G captions per image, N = B * G captions, R rewards, T tokens, C images of the whole rollout.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import inspect
import logging
import math
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
import yaml
from torch import Tensor

from hf_captionrl.utils.options import check_values

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
        concepts (`Sequence[int]`, *optional*): Concept of each training image, of [`concept_numbers`].
        decode (`Callable`, *optional*): From ids and mask, both `(N, T)`, to captions; None in a trainer whose loss has one
            advantage per caption.
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
    concepts: Sequence[int] | None = None
    decode: Callable[[Tensor, Tensor], list[str]] | None = None


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
        statistics (`dict[str, float | list[float]]`): What rewards log: of a number, such as a count, the sum over processes; of a
            list the mean of all its values on all processes.
        ranks (`torch.Tensor` of shape `(N,)`, *optional*): Rank of the target among all candidates for each caption, 1 is
            best; set by a reward that ranks.
        columns (`Mapping[str, Sequence]`): Columns of the data, B values each, one per image.
        arguments (`Mapping[str, Any]`): TRL's arguments of functions: `prompts`, `completions` (messages, in a trainer of chat
            models), `completion_ids` and `trainer_state`, where they are known.
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
    statistics: dict[str, Any] = field(default_factory=dict)
    ranks: Tensor | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """Log a number with the rewards: its mean over calls, processes and the steps between two logs."""
        self.statistics.setdefault(str(name), []).append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column, N values, to the table of completions."""
        if len(values) != len(self.captions):
            raise ValueError(
                f"log_extra({column!r}) got {len(values)} values for {len(self.captions)} captions. Pass one per caption."
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

    The rewards of this package are dataclasses under [`register_reward`].

    Attributes:
        name: Name in the logs.
        baseline: Name of the baseline that is subtracted; None for the trainer's. See `BASELINES`.
        summary: What is rewarded, as a noun phrase, for help texts and model cards.
        is_standalone: Whether it may be the only reward. False for penalties, which alone would teach empty captions.
        reads_only_text: Whether captions and columns of the data suffice, without tokens, siblings and distractors, so that
            `as_function` works.
        gives_token_credit: Whether `token_credit` gives the tokens of a caption different advantages.
    """

    name: str = "reward"
    baseline: str | None = None
    summary: str = ""
    is_standalone: bool = True
    reads_only_text: bool = False
    gives_token_credit: bool = False

    def __post_init__(self) -> None:
        check_values(self)  # the fields of rewards that are dataclasses

    def describe(self) -> str:
        """A noun phrase for the model card."""
        return self.summary or f"the reward {self.name!r}"

    def prepare(self, data: RewardData) -> None:  # noqa: B027  (most rewards need nothing)
        """Read and check the training data once, before the first step."""

    @abstractmethod
    def __call__(self, context: RewardContext) -> Tensor:
        """Rewards `(N,)` of a rollout; NaN where the reward does not apply."""

    def undefined(self, context: RewardContext) -> float:
        """Substitute for rewards that are NaN or infinite, which are counted; NaN: the caption has no reward."""
        return math.nan

    def token_credit(self, context: RewardContext) -> Tensor:
        """Credit `(N, T)` that is added to the advantage of the caption at each token, where `gives_token_credit`."""
        raise NotImplementedError

    def as_function(self) -> RewardFunction:
        """The reward as a function with TRL's signature, for the `reward_funcs` of TRL's own trainers."""
        return RewardFunction(self)


class WeightedRewards:
    """A weighted sum of rewards, each logged under its name.

    Args:
        rewards (`Sequence[Reward]`): The rewards.
        weights (`Sequence[float]`, *optional*): One per reward; 1 by default.
    """

    def __init__(self, rewards: Sequence[Reward], weights: Sequence[float] | None = None) -> None:
        self.rewards = list(rewards)
        self.weights = [1.0] * len(self.rewards) if weights is None else [float(weight) for weight in weights]
        if not self.rewards:
            raise ValueError("There is no reward. Pass reward_funcs, e.g. reward_funcs='self_retrieval'.")
        if len(self.weights) != len(self.rewards) or not all(map(math.isfinite, self.weights)):
            raise ValueError(f"The reward weights are {self.weights}. Pass a finite number for each of {self.names}.")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"Two rewards have the same name: {self.names}. Set the attribute `name` of one of them.")

    @property
    def names(self) -> list[str]:
        """Names in order."""
        return [reward.name for reward in self.rewards]

    def describe(self) -> str:
        """The rewards with a weight other than 0, as noun phrases with weights, for the model card."""
        return ", plus ".join(
            reward.describe() if weight == 1 else f"{weight:g} times {reward.describe()}"
            for reward, weight in zip(self.rewards, self.weights, strict=True)
            if weight
        )

    def prepare(self, data: RewardData) -> None:
        """Let every reward read the training data."""
        for reward in self.rewards:
            reward.prepare(data)

    def token_credit(self, context: RewardContext) -> Tensor | None:
        """The weighted sum of the credits of tokens `(N, T)`; None if every token has the advantage of its caption."""
        pairs = zip(self.rewards, self.weights, strict=True)
        credits = [weight * reward.token_credit(context) for reward, weight in pairs if reward.gives_token_credit]
        return torch.stack(credits).sum(0) if credits else None

    def __call__(self, context: RewardContext, only: Sequence[int] | None = None) -> Tensor:
        """Rewards `(N, R)` of a rollout, unweighted: float64 on the CPU, NaN where there is none; `only` some, others are NaN."""
        columns, number = [], len(context.captions)
        indices = range(len(self.rewards)) if only is None else only
        # Asynchronous functions run concurrently, after the other rewards.
        later: dict[int, Any] = {i: self.rewards[i] for i in indices if getattr(self.rewards[i], "is_async", False)}
        results = {i: self.rewards[i](context) for i in indices if i not in later}
        answers = _run_together([function.call(context) for function in later.values()])
        results |= {i: later[i].read(answer) for i, answer in zip(later, answers, strict=True)}
        for index, reward in enumerate(self.rewards):
            if index not in results:
                columns.append(torch.full((number,), math.nan, dtype=torch.float64))
                continue
            values = results[index].detach().double().cpu()
            if values.shape != (number,):
                shape = tuple(values.shape)
                raise ValueError(
                    f"The reward {reward.name!r} returned shape {shape} for {number} captions. Return ({number},)."
                )
            bad = ~values.isfinite()
            if bad.any():
                values = values.masked_fill(bad, reward.undefined(context))
            context.statistics[f"rewards/{reward.name}/undefined"] = float(bad.sum())
            columns.append(values)
        rewards = torch.stack(columns, dim=1)  # (N, R)
        unscored = rewards.isnan().all(1)  # (N,)
        # With several tasks, a process may hold images of a task without a reward: only a whole rollout of them is refused.
        if only is None and unscored.any() and not unscored.all():
            first = int(unscored.nonzero()[0])
            text = "%d of %d captions got no number from any reward (%s), so their advantage is 0; the first is %r."
            logger.warning(text, int(unscored.sum()), len(unscored), ", ".join(self.names), context.captions[first])
        return rewards

    def total(self, rewards: Tensor, columns: Sequence[int] | None = None) -> Tensor:
        """Weighted sums `(...)` of rewards `(..., R)`, or of some columns, without those that are NaN; NaN if all are, as in TRL."""
        chosen = list(range(len(self.rewards))) if columns is None else list(columns)
        weights = torch.tensor([self.weights[column] for column in chosen], dtype=rewards.dtype)
        return (rewards[..., chosen] * weights).nansum(-1).masked_fill(rewards[..., chosen].isnan().all(-1), math.nan)

    def refuse_unscored(self, rewards: Tensor) -> None:
        """Refuse rewards `(N, R)` of a whole rollout without a number."""
        if rewards.isnan().all():
            raise ValueError(
                f"No caption of this rollout got a number from the reward(s) {self.names}. Return one for at least one."
            )


# --- Functions with the signature that TRL's GRPO calls --------------------------------------------------------------

_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Keyword arguments that TRL passes in addition to the columns of the data."""
_NO_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not pass."""


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One loop for the whole run, to which a client may be bound, in a thread: a notebook's main thread already runs a loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward functions", daemon=True).start()
    return loop


def _run_together(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """Await several calls concurrently."""

    async def together() -> list[Any]:
        return list(await asyncio.gather(*awaitables))

    return asyncio.run_coroutine_threadsafe(together(), _loop()).result() if awaitables else []


class Repeated(Sequence[Any]):
    """Each value several times in a row; a value, such as an image, is read once, on first access."""

    def __init__(self, values: Sequence[Any], times: int) -> None:
        self.values, self.times = values, times
        self._read: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.values) * self.times

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index] // self.times
        if at not in self._read:
            self._read[at] = self.values[at]
        return self._read[at]


def completion_text(completion: Any) -> str:
    """Text of a completion, which may be a list of chat messages."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


class CompletionReward(Reward):
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
        inner: Any = function
        while isinstance(inner, functools.partial):
            inner = inner.func
        self.function = function
        self.name = str(name or getattr(inner, "__name__", type(inner).__name__))
        self.is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
        called = function.forward if isinstance(function, torch.nn.Module) else function
        parameters = inspect.signature(called).parameters.values()
        if any(p.kind == p.POSITIONAL_ONLY and p.default is p.empty for p in parameters):
            raise TypeError(f"{self.name!r} takes parameters by position only; TRL's are keywords. Remove the '/'.")
        keywords = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
        self._names = None if takes_all else {p.name for p in keywords}
        self._required = [p.name for p in keywords if p.default is p.empty]
        self._conversational = conversational
        annotation = next((p.annotation for p in keywords if p.name == "completions"), "")
        written = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        self._takes_messages = bool(re.match(r"[\w.]*(list|sequence)\[\s*[\w.]*(list|sequence)\b", written, re.I))

    def prepare(self, data: RewardData) -> None:
        columns = {name for name in data.columns if name not in _NO_COLUMNS}
        missing = [name for name in self._required if name not in {*_ARGUMENTS, *columns}]
        if missing:
            raise ValueError(
                f"The reward function {self.name!r} requires {missing}, and the data have no such column; they have "
                f"{sorted(columns)}. Add the column(s), or give the parameters a default."
            )

    def call(self, context: RewardContext) -> Any:
        """What the function returns; of an `async` function an awaitable."""
        names, times = self._names, context.group_size
        arguments: dict[str, Any] = {}
        for name in context.columns:
            if name not in _NO_COLUMNS and (names is None or name in names):
                column = context.columns[name]
                is_list = isinstance(column, list)
                arguments[name] = [v for v in column for _ in range(times)] if is_list else Repeated(column, times)
        messages = context.arguments.get("completions")
        completions = (
            messages if messages is not None and self._conversational is not False else list(context.captions)
        )
        if messages is None and (self._takes_messages if self._conversational is None else self._conversational):
            completions = [[{"role": "assistant", "content": caption}] for caption in completions]
        arguments |= {
            "prompts": [""] * len(context.captions),
            "completion_ids": [row[mask].tolist() for row, mask in zip(context.ids, context.mask, strict=True)],
            "trainer_state": None,
            **context.arguments,
            "completions": completions,
            "log_extra": context.log_extra,
            "log_metric": context.log_metric,
        }
        return self.function(**{n: value for n, value in arguments.items() if names is None or n in names})

    def __call__(self, context: RewardContext) -> Tensor:
        return self.read(self.call(context))

    def read(self, values: Any) -> Tensor:
        """The result of the function as float64; NaN for None."""
        if inspect.isawaitable(values):
            values = _run_together([values])[0]
        if isinstance(values, Tensor):
            return values.double()
        try:
            numbers = [math.nan if value is None else value for value in values]
            if isinstance(values, str | Mapping) or any(isinstance(value, str) for value in numbers):
                raise TypeError
            return torch.tensor([float(value) for value in numbers], dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"{self.name!r} returned {repr(values)[:200]}. Return a list with one number, or None, per caption."
            ) from None


def function_context(
    completions: Sequence[Any], rows: Tensor, image_ids: Sequence[Any], columns: Mapping[str, Any]
) -> RewardContext:
    """What a reward sees of the N completions of a function's call, each of them a group; there are no tokens."""
    nothing = torch.empty(len(rows), 0)
    candidates, positions = rows.unique(return_inverse=True)
    return RewardContext(
        captions=[completion_text(completion).strip() for completion in completions],
        ids=nothing.long(),
        mask=nothing.bool(),
        ended=torch.ones(len(rows), dtype=torch.bool),
        rows=rows,
        image_ids=[str(one) for one in image_ids],
        references=columns.get("captions") or [[] for _ in rows],
        candidates=candidates,
        positions=positions,
        columns={name: column for name, column in columns.items() if name not in _ARGUMENTS},
    )


class RewardFunction:
    """A reward as a function with TRL's signature. It can be pickled if the reward can."""

    def __init__(self, reward: Reward) -> None:
        if not reward.reads_only_text:
            raise ValueError(
                f"{reward.name!r} reads more than captions and columns. Use it in SelfRetrievalGRPOTrainer."
            )
        refuse_token_credit([reward])
        self.reward = reward
        self.__name__ = reward.name  # under which TRL logs it

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Rewards of N texts or lists of chat messages; `columns` are those of the data and TRL's other arguments."""
        rows = torch.arange(len(completions))
        context = function_context(completions, rows, columns.get("image_id", rows.tolist()), columns)
        values = WeightedRewards([self.reward])(context)[:, 0].tolist()
        if log_metric := columns.get("log_metric"):
            for name, value in context.statistics.items():
                for number in value if isinstance(value, list) else [value]:
                    log_metric(name, number)
        return values


def refuse_token_credit(rewards: Sequence[Reward]) -> None:
    """Refuse rewards that give credit to tokens, for a loss that has one advantage per caption."""
    if names := [reward.name for reward in rewards if reward.gives_token_credit]:
        raise ValueError(
            f"The reward(s) {names} have credit='claim', and TRL's loss has one advantage per caption. Use credit='caption'."
        )


# --- Rewards by name, and rewards from what a user passes ------------------------------------------------------------

_RewardType = TypeVar("_RewardType", bound=type[Reward])

REWARDS: dict[str, type[Reward] | str] = {
    "self_retrieval": "hf_captionrl.rewards.self_retrieval:SelfRetrieval",
    "cider": "hf_captionrl.rewards.text_rewards:CiderReward",
    "diversity": "hf_captionrl.rewards.text_rewards:PairwiseDiversity",
    "repetition": "hf_captionrl.rewards.text_rewards:RepetitionPenalty",
    "length": "hf_captionrl.rewards.text_rewards:LengthPenalty",
    "truncation": "hf_captionrl.rewards.text_rewards:TruncationPenalty",
    "claim_f1": "hf_captionrl.experimental.claim_rewards:ClaimReward",
    "question_oracle": "hf_captionrl.experimental.question_rewards:QuestionReward",
    "gallery": "hf_captionrl.experimental.gallery:GalleryReward",
}
"""Rewards by name: a class, or "module:class", imported at first use."""

RewardLike = Reward | Callable[..., Any] | str
"""A reward, a function with TRL's signature, or a name."""


def register_reward(reward: _RewardType) -> _RewardType:
    """Class decorator: make a reward with a `name` and a `summary` known by its name, for `reward_funcs="name"`."""
    REWARDS[reward.name] = reward
    return reward


def reward_class(name: str) -> type[Reward]:
    """The reward of a name.

    Raises:
        ValueError: If there is none.
    """
    if name not in REWARDS:
        raise ValueError(f"There is no reward {name!r}. Use one of {sorted(REWARDS)}, or pass a function.")
    kind = REWARDS[name]
    if isinstance(kind, str):
        module, _, attribute = kind.partition(":")
        kind = REWARDS[name] = getattr(importlib.import_module(module), attribute)
    return cast("type[Reward]", kind)


def parse_weighted_reward(text: str) -> tuple[str, dict[str, Any], float]:
    """Name, fields and weight of `NAME=WEIGHT` or `NAME:FIELD=VALUE,...=WEIGHT`."""
    reward, _, weight = text.rpartition("=")
    name, _, fields = reward.partition(":")
    try:
        values = dict(field.split("=", 1) for field in fields.split(",") if field)
        return name, {key: yaml.safe_load(value) for key, value in values.items()}, float(weight)
    except ValueError:
        raise ValueError(f"rewards holds {text!r}. Use NAME=WEIGHT, such as claim_f1=1.") from None


def make_reward(reward: type[Reward], options: Any, **overrides: Any) -> Reward:
    """A reward with its documented fields from a configuration that has them; `overrides` replaces fields by name."""
    names = [field.name for field in dataclasses.fields(reward) if "help" in field.metadata]  # type: ignore[arg-type]
    return reward(**{name: getattr(options, name) for name in names if hasattr(options, name)} | overrides)


def resolve_rewards(
    reward_funcs: RewardLike | Sequence[RewardLike | tuple[RewardLike, float]],
    reward_weights: Sequence[float] | None = None,
    options: Any = None,
) -> WeightedRewards:
    """Weighted rewards from a reward, a function, a name, or a list of them or of pairs `(reward, weight)`.

    A reward given by name has the fields that a configuration, `options`, sets for it. Functions with the same name, such as two lambdas, are numbered: `name`, `name_2`, `name_3`, ...
    """
    if isinstance(reward_funcs, tuple) and len(reward_funcs) == 2 and isinstance(reward_funcs[1], (int, float)):
        reward_funcs = [reward_funcs]  # one reward with its weight
    given = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    items: list[Any] = [item[0] if isinstance(item, tuple) else item for item in given]
    weights: list[Any] = [item[1] if isinstance(item, tuple) else None for item in given]
    if reward_weights is not None and any(weight is not None for weight in weights):
        raise ValueError("Reward weights are given both in reward_funcs and in reward_weights. Pass them once.")
    functions: list[Reward] = []
    for index, item in enumerate(items):
        if isinstance(item, str):
            items[index] = make_reward(reward_class(item), options)
        elif not isinstance(item, Reward):
            is_model = isinstance(item, torch.nn.Module) and hasattr(item, "config")
            if not callable(item) or isinstance(item, type) or is_model:
                raise TypeError(
                    f"{type(item).__name__} is not a reward. Pass a Reward, a function with TRL's signature, or a name."
                )
            items[index] = CompletionReward(item)
            functions.append(items[index])
    # Number equal names of functions; names that the user chose stay.
    taken = {reward.name for reward in items if not any(reward is function for function in functions)}
    for reward in functions:
        base, number = reward.name, 1
        while reward.name in taken:
            number += 1
            reward.name = f"{base}_{number}"
        taken.add(reward.name)
    defaults = [1.0 if weight is None else weight for weight in weights]
    return WeightedRewards(items, defaults if reward_weights is None else reward_weights)
