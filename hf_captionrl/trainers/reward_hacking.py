r"""The guard against reward hacking: it detects captions that exploit the scorer.

Self-retrieval rewards loops ("a blue and blue blue blue and yellow blue"), repeated phrases ("on a blue background on a blue
background"), and truncated captions. The guard computes statistics of every step. When their mean over the last steps
exceeds a limit, it warns, stops training, or rolls back to an earlier checkpoint. It also checks the captions of every
evaluation: samples may be fine while beam search repeats itself. A checkpoint whose captions it refuses is never selected.

Legend: N captions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from hf_captionrl.text.degenerate_captions import caption_words
from hf_captionrl.trainers.completion_statistics import caption_flags, describe_completions

__all__ = ["GUARD_ACTIONS", "GuardThresholds", "RewardHackingGuard"]

GUARD_ACTIONS: tuple[str, ...] = ("off", "warn", "stop", "rollback")
"""Actions of the guard when the reward is hacked."""


@dataclass(frozen=True)
class GuardThresholds:
    """Limits for the mean over the last steps; `None` disables a limit.

    Args:
        window (`int`): Number of steps of the mean; the guard does not act before it has seen that many.
        max_degenerate (`float`, *optional*): Largest share of degenerate captions. Human captions score below 0.005.
        max_length_growth (`float`, *optional*): Largest growth of the 90th percentile of the words per caption, relative
            to the references, or to the first window without references.
        min_distinct (`float`, *optional*): Smallest share of distinct word pairs in a caption (`distinct_2`). Human
            captions have 0.997.
        max_clipped_ratio (`float`, *optional*): Largest share of truncated captions.
        max_truncated_by_scorer (`float`, *optional*): Largest share of captions that are longer than the scorer reads.
        max_gap_growth (`float`, *optional*): Largest growth of reward minus held-out scorer over the first window, in units of the
            reward.
    """

    window: int = 10
    max_degenerate: float | None = 0.1
    max_length_growth: float | None = 2.0
    min_distinct: float | None = 0.8
    max_clipped_ratio: float | None = 0.25
    max_truncated_by_scorer: float | None = 0.1
    max_gap_growth: float | None = 0.2

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}. Use at least 1 step.")
        for name in (field.name for field in fields(self) if field.name != "window"):
            value = getattr(self, name)
            if value is None:
                continue
            share = name not in ("max_length_growth", "max_gap_growth")
            if not math.isfinite(value) or value < 0 or (share and value > 1):
                allowed = "a share in [0, 1]" if share else "a finite number, 0 or more"
                raise ValueError(f"{name} is {value}. Use {allowed}, or None to switch it off.")


# For each limit, the statistic that it bounds, and a name for messages.
_RULES: dict[str, tuple[str, str]] = {
    "max_degenerate": ("degenerate", "the share of degenerate captions"),
    "max_length_growth": ("length_p90", "the 90th percentile of the length in words"),
    "min_distinct": ("distinct_2", "the share of different word pairs in a caption"),
    "max_clipped_ratio": ("clipped_ratio", "the share of truncated captions"),
    "max_truncated_by_scorer": ("truncated_by_scorer", "the share of captions that the scorer truncates"),
    "max_gap_growth": ("reward_minus_held_out", "reward minus held-out scorer"),
}


def _rewards(name: str, values: Any, number: int) -> Tensor:
    """A number, or one per caption, as `(1,)` or `(N,)` float64."""
    rewards = torch.as_tensor(values).detach().cpu().double().flatten()
    if len(rewards) not in (1, number):
        raise ValueError(
            f"{name} has {len(rewards)} values. Pass their mean, or one for each of the {number} captions."
        )
    return rewards


def _describe(captions: Sequence[str], ended: Any | None) -> tuple[dict[str, float], dict[str, int]]:
    """Statistics of captions, and for each rule the index of a caption that is an example."""
    statistics, bad, lengths = describe_completions(captions, ended)
    longest = int(lengths.argmax())
    examples = dict.fromkeys(("length_p90", "distinct_2", "truncated_by_scorer", "reward_minus_held_out"), longest)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        examples |= {"degenerate": first, "distinct_2": first}
    if ended is not None and not bool((flags := caption_flags("ended", ended, len(captions))).all()):
        examples["clipped_ratio"] = int((~flags).nonzero()[0])
    return statistics, examples


class RewardHackingGuard:
    """Keeps the statistics of the last steps and compares them with the limits.

    Without `reference_captions` lengths are compared with those of the first window.
    """

    def __init__(
        self,
        thresholds: GuardThresholds = GuardThresholds(),
        *,
        reference_captions: Sequence[str] | None = None,
    ) -> None:
        self.thresholds = thresholds
        self._window: deque[dict[str, float]] = deque(maxlen=thresholds.window)
        # The first values, as many as the window has steps.
        self._start: dict[str, list[float]] = {"length_p90": [], "reward_minus_held_out": []}
        self._examples: dict[str, str] = {}  # the newest for each key
        self._reference_length: float | None = None
        if reference_captions is not None:
            lengths = caption_words(reference_captions).lengths.double()
            if not bool((lengths > 0).any()):
                raise ValueError(f"None of the {len(lengths)} reference_captions has a word. Pass captions, or None.")
            # torch.quantile refuses more than 16 million values.
            rank = max(math.ceil(0.9 * len(lengths)), 1)
            self._reference_length = float(lengths.kthvalue(rank).values)

    def observe(
        self,
        captions: Sequence[str],
        *,
        ended: Any | None = None,
        truncated_by_scorer: float | None = None,
        reward: Any | None = None,
        held_out_scorer: Any | None = None,
        mean_over_processes: Callable[[list[float]], list[float]] | None = None,
    ) -> dict[str, float]:
        """Record one step.

        `ended` `(N,)` is False where the length limit truncated a caption. Rewards of both scorers have the same
        units; NaN and infinite ones are excluded and counted.
        """
        step, examples = _describe(captions, ended)
        number = len(captions)
        if truncated_by_scorer is not None:
            step["truncated_by_scorer"] = float(truncated_by_scorer)
        if reward is not None:
            paid = _rewards("reward", reward, number)
            step["nonfinite_reward"] = float((~paid.isfinite()).double().mean())
            if held_out_scorer is not None:
                gaps = paid - _rewards("held_out_scorer", held_out_scorer, number)  # (N,) or (1,)
                known = gaps[gaps.isfinite()]
                step["reward_minus_held_out"] = float(known.mean()) if len(known) else math.nan
                if len(gaps) == number and len(known):
                    examples["reward_minus_held_out"] = int(gaps.where(gaps.isfinite(), -torch.inf).argmax())
        if mean_over_processes is not None:
            step = dict(zip(step, mean_over_processes(list(step.values())), strict=True))
        # Without a finite reward there is no gap, and JSON has no NaN.
        step = {name: value for name, value in step.items() if math.isfinite(value)}
        self._window.append(step)
        for name, values in self._start.items():
            if name in step and len(values) < self.thresholds.window:
                values.append(step[name])
        self._examples |= {name: captions[index] for name, index in examples.items()}
        return {f"guard/{name}": value for name, value in step.items()}

    def reason_against(self, captions: Sequence[str], ended: Any | None = None) -> str | None:
        """The limit that captions of an evaluation break, with value and example; None if they break none.

        Shapes: `ended` `(N,)`. Captions are as they will be written: by beam search or greedy decoding.
        """
        if not len(captions):
            return None
        statistics, examples = _describe(captions, ended)
        texts = {name: captions[index] for name, index in examples.items()}
        return self._sentence(f"In {len(captions)} evaluated captions", self._broken([statistics]), texts)

    @staticmethod
    def _mean(values: Sequence[float]) -> float | None:
        return math.fsum(values) / len(values) if values else None

    def _limit(self, rule: str) -> float | None:
        """The limit on the mean, in its units."""
        value = getattr(self.thresholds, rule)
        if value is None or rule not in ("max_length_growth", "max_gap_growth"):
            return value
        if rule == "max_length_growth":
            length = self._reference_length
            if length is None:
                length = self._mean(self._start["length_p90"])
            return None if length is None else value * max(length, 1.0)
        start = self._mean(self._start["reward_minus_held_out"])
        return None if start is None else start + value

    def _broken(self, steps: Sequence[Mapping[str, float]]) -> tuple[str, float, float] | None:
        """The first rule that the mean over the steps breaks, with mean and limit."""
        for rule, (name, _) in _RULES.items():
            limit, value = self._limit(rule), self._mean([step[name] for step in steps if name in step])
            if (
                limit is not None
                and value is not None
                and (value < limit if rule == "min_distinct" else value > limit)
            ):
                return rule, value, limit
        return None

    def _sentence(
        self, where: str, broken: tuple[str, float, float] | None, examples: Mapping[str, str]
    ) -> str | None:
        """The broken rule with value, limit and example."""
        if broken is None:
            return None
        rule, value, limit = broken
        name, what = _RULES[rule]
        side = "below" if rule == "min_distinct" else "above"
        limit_name = f"{rule}={getattr(self.thresholds, rule):g}"
        sentence = f"{where} {what} was {value:.3g}, {side} the limit of {limit:.3g} ({limit_name})"
        return sentence + (f"; for example {examples[name]!r}." if name in examples else ".")

    def _reason_over(self, steps: Sequence[Mapping[str, float]]) -> str | None:
        return self._sentence(f"On average over the last {len(steps)} steps", self._broken(steps), self._examples)

    @property
    def reason(self) -> str | None:
        """The broken limit with value and example; None if no limit is broken or the first window is not full."""
        return self._reason_over(self._window) if len(self._window) == self.thresholds.window else None

    @property
    def doubt(self) -> str | None:
        """Why a checkpoint saved now is not good: the window or its newest quarter breaks a limit; None if it is good.

        The mean over the whole window reacts a few steps late.
        """
        newest = list(self._window)[-math.ceil(self.thresholds.window / 4) :]
        return self.reason or self._reason_over(newest)

    @property
    def healthy(self) -> bool:
        """Whether a checkpoint saved now is good."""
        return self.doubt is None

    def state_dict(self) -> dict[str, Any]:
        """State for an exact resume."""
        return {
            "window": list(self._window),
            "start": {name: list(values) for name, values in self._start.items()},
            "examples": dict(self._examples),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._window.clear()
        self._window.extend(dict(step) for step in state.get("window", []))
        self._start = {name: list(state.get("start", {}).get(name, [])) for name in self._start}
        self._examples = dict(state.get("examples", {}))
