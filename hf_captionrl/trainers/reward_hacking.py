r"""The guard against reward hacking: it detects captions that exploit the scorer.

Self-retrieval rewards loops ("a blue and blue blue blue and yellow blue"), repeated phrases ("on a blue background on a blue
background"), and truncated captions. The guard computes statistics of every step. When their mean over the last steps
exceeds a limit, it warns, stops training, or rolls back to an earlier checkpoint.

Legend: N captions.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_captionrl.text.degenerate_captions import caption_words
from hf_captionrl.trainers.caption_rl_config import GUARD_ACTIONS
from hf_captionrl.trainers.completion_statistics import caption_flags, describe_completions

__all__ = ["GuardCallback", "GuardThresholds", "RewardHackingGuard"]

logger = logging.getLogger(__name__)


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


class RewardHackingGuard:
    """Keeps the statistics of the last steps and compares them with the limits.

    Args:
        thresholds ([`GuardThresholds`]): The limits.
        reference_captions (`Sequence[str]`, *optional*): Human captions of the training data, for the limit on
            lengths. None: lengths are compared with those of the first window.
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

        Args:
            ended (`torch.Tensor` of shape `(N,)`, or a sequence, *optional*): False where the length limit truncated a caption.
            truncated_by_scorer (`float`, *optional*): Share of captions that are longer than the scorer reads.
            reward (`float`, or `torch.Tensor` of shape `(N,)`, *optional*): Rewards of the captions.
            held_out_scorer (`float`, or `torch.Tensor` of shape `(N,)`, *optional*): Rewards by the held-out scorer, in the
                same units. Values that are NaN or infinite are excluded and counted.
        """
        step, bad, lengths = describe_completions(captions, ended)
        number, longest = len(captions), int(lengths.argmax())
        examples = dict.fromkeys(("length_p90", "distinct_2", "truncated_by_scorer", "reward_minus_held_out"), longest)
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            examples |= {"degenerate": first, "distinct_2": first}
        if ended is not None and not bool((flags := caption_flags("ended", ended, number)).all()):
            examples["clipped_ratio"] = int((~flags).nonzero()[0])
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

    @property
    def reason(self) -> str | None:
        """The broken limit with value and example; None if no limit is broken or the first window is not full."""
        broken = self._broken(self._window) if len(self._window) == self.thresholds.window else None
        if broken is None:
            return None
        rule, value, limit = broken
        name, what = _RULES[rule]
        side = "below" if rule == "min_distinct" else "above"
        limit_name = f"{rule}={getattr(self.thresholds, rule):g}"
        sentence = (
            f"Over the last {self.thresholds.window} steps {what} was {value:.3g} on average, {side} the limit of "
            f"{limit:.3g} ({limit_name})"
        )
        return sentence + (f"; for example {self._examples[name]!r}." if name in self._examples else ".")

    @property
    def healthy(self) -> bool:
        """Whether a checkpoint saved now is good: neither the window nor its newest quarter breaks a limit.

        The mean over the whole window reacts a few steps late.
        """
        newest = list(self._window)[-math.ceil(self.thresholds.window / 4) :]
        return self.reason is None and self._broken(newest) is None

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


class GuardCallback(TrainerCallback):
    """Acts when the guard detects hacking, and records which checkpoints are good.

    Args:
        guard ([`RewardHackingGuard`]): The trainer passes it every step.
        action (`str`): `warn` each time a limit is first broken, `stop` training, or `rollback`: load the weights of the
            newest good checkpoint, then stop.
        trainer (`Trainer`, *optional*): For `rollback`; may be set later, as `callback.trainer`.

    Attributes:
        rolled_back_to (`str` or `None`): The checkpoint that was loaded.
    """

    def __init__(self, guard: RewardHackingGuard, action: str = "warn", trainer: Any | None = None) -> None:
        if action == "off" or action not in GUARD_ACTIONS:
            allowed = tuple(a for a in GUARD_ACTIONS if a != "off")
            raise ValueError(f"action is {action!r}. Use one of {allowed}; leave the callback out for no guard.")
        self.guard = guard
        self.action = action
        self.trainer = trainer
        self.rolled_back_to: str | None = None
        self._good: list[int] = []  # steps of checkpoints, ascending
        self._tripped = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Mark the resumed checkpoint as good if it was; its state was saved before that was known."""
        self.rolled_back_to = None  # another train() of the same trainer may save again
        self.on_save(args, state, control, **kwargs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Mark the new checkpoint as good if no limit is broken."""
        # After a resume from an earlier step, later checkpoints belong to the previous attempt.
        self._good = [step for step in self._good if step < state.global_step]
        if state.global_step > 0 and self.guard.healthy:
            self._good.append(state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Warn, stop or roll back if a limit is broken."""
        reason = self.guard.reason
        tripped, self._tripped = self._tripped, reason is not None
        if reason is None or tripped:
            return
        message = f"Step {state.global_step}: the reward seems to be hacked. {reason}"
        if self.action == "rollback":
            message += f" {self._roll_back(args, control)}"
        elif self.action == "stop":
            message += " Training stops."
        if self.action != "warn":
            control.should_training_stop = True
        if state.is_world_process_zero:
            logger.warning(message)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prevent a save after a rollback, which `save_strategy="epoch"` would cause at the stop."""
        if self.rolled_back_to is not None:
            control.should_save = False

    def _roll_back(self, args: TrainingArguments, control: TrainerControl) -> str:
        """Load the newest good checkpoint that still exists; returns a sentence for the log."""
        if self.trainer is None:
            raise RuntimeError("action='rollback' needs the trainer. Pass trainer=..., or set callback.trainer to it.")
        folders = [Path(args.output_dir) / f"checkpoint-{step}" for step in reversed(self._good)]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        if folder is None:
            return (
                "No checkpoint was saved while the captions were good (or save_total_limit removed it), so the policy is "
                "unchanged. Training stops. Lower save_steps next time."
            )
        self.trainer._load_from_checkpoint(str(folder))
        self.rolled_back_to = str(folder)
        # A checkpoint of this step would combine the old weights with the optimizer of the hacked policy.
        control.should_save = False
        return f"The policy was rolled back to {folder.name}, the newest good checkpoint. Training stops."

    def state_dict(self) -> dict[str, Any]:
        """State for an exact resume, that of the guard included."""
        return {"guard": self.guard.state_dict(), "good": list(self._good), "tripped": self._tripped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self.guard.load_state_dict(state.get("guard", {}))
        self._good = [int(step) for step in state.get("good", [])]
        self._tripped = bool(state.get("tripped", False))
