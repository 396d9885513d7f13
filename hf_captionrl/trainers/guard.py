"""Captions of a training: their table for terminal and trackers, their statistics, and the guard against reward hacking.

Legend: N captions of this process, G captions per image, R rewards.
"""

from __future__ import annotations

import copy
import importlib
import logging
import math
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_captionrl.text.degenerate_captions import caption_words, count_words, find_repeats, mark_degenerate
from hf_captionrl.text.ngrams import distinct_share
from hf_captionrl.trainers.checkpoints import trainable_values
from hf_captionrl.utils.io import escape_markdown
from hf_captionrl.utils.options import Fraction, Positive, Range, check_values

logger = logging.getLogger(__name__)


def over_processes(values: Mapping[str, Any]) -> dict[str, float]:
    """Of numbers the sum over processes, of lists the mean of all values, of pairs (sum, number) the quotient of their sums.

    Names may differ between processes.
    """
    pairs = {
        name: (math.fsum(value), len(value))
        if isinstance(value, list)
        else value
        if isinstance(value, tuple)
        else (value, 0)
        for name, value in values.items()
    }
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for process in gather_object([pairs]):
        for name, (total, number) in process.items():
            sums[name][0] += total
            sums[name][1] += number
    return {name: total / max(number, 1) for name, (total, number) in sorted(sums.items())}


# --- A policy's captions with their images and rewards, on the terminal and in trackers ------------------------------


def _printable(value: Any) -> str:
    """One line of text without control characters, which could control the terminal."""
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(str(value).split()))
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)


def show_completions(
    columns: Mapping[str, Sequence[Any]], images: Sequence[Any], *, step: int, report_to: Sequence[str], tag: str
) -> None:
    """Print captions as a table, and send them with their images, one per row, to trackio and wandb.

    Columns are `image_id` and `caption`; maybe `reference`, `rank`, `advantage`, `rewards/NAME` and `extra/NAME`. Captions come
    from a model that may exploit anything, so they are shown as text and never as markup.
    """
    from trl.trainer.utils import print_prompt_completions_sample

    numbers = {name for name in columns if name.startswith("rewards/")} | {"advantage"}
    texts = {name: list(map(_printable, values)) for name, values in columns.items() if name not in numbers}
    print_prompt_completions_sample(
        texts.pop("image_id"),
        texts.pop("caption"),
        {name.removeprefix("rewards/"): list(columns[name]) for name in columns if name.startswith("rewards/")},
        columns.get("advantage"),
        step,
        extra={name.removeprefix("extra/"): values for name, values in texts.items()},
    )
    for name in {"trackio", "wandb"}.intersection(report_to):
        module = importlib.import_module(name)
        if (module.run if name == "wandb" else module.context_vars.current_run.get()) is None:
            continue  # an evaluation before training
        import pandas as pd

        frame = pd.DataFrame({"step": [step] * len(images), **columns})
        if name == "trackio":  # which shows text as Markdown
            frame = frame.map(lambda value: escape_markdown(value) if isinstance(value, str) else value)
        frame["image"] = [module.Image(image.convert("RGB")) for image in images]
        # Without step=: the Trainer's callbacks let the tracker count steps, and wandb drops logs for earlier steps.
        module.log({tag: module.Table(dataframe=frame), "train/global_step": step})


# --- A training that changes nothing ---------------------------------------------------------------------------------


class UnchangedCallback(TrainerCallback):
    """Warns of a training that leaves the captions of evaluations, or the weights, as they were."""

    _has_advantages: bool | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._begin, self._weights = state.global_step, _some_weights(model)
        self._first: dict[str, tuple[int, Sequence[str] | None]] = {}

    def note_advantages(self, advantages: Tensor) -> None:
        """Note whether a rollout has an advantage that is not 0."""
        self._has_advantages = bool(self._has_advantages) or bool(advantages.any())

    def compare(self, name: str, captions: Sequence[str], args: Any, state: TrainerState) -> None:
        """Compare captions with those of the first evaluation of this name; warn once, in the second half of a training."""
        step, first = self._first.setdefault(name, (state.global_step, captions))
        if captions == first and step < state.global_step and 2 * state.global_step >= state.max_steps:
            self._first[name] = step, None
            self._warn(f"The captions of the {len(captions)} evaluated images are still those of step {step}", args)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any) -> None:
        change = (_some_weights(model) - self._weights).norm() / self._weights.norm()
        if state.global_step > self._begin and change < 1e-6:  # a step at 1e-7 changes weights of 0.02 by 5e-6
            self._warn(f"The weights have changed by {change:.1g} of their size", args)

    def _warn(self, fact: str, args: Any) -> None:
        if args.process_index == 0:
            rate = args.learning_rate
            remedy = f"Use a higher learning_rate, such as {max(1e-5, 10 * rate):g}, or train longer."
            if self._has_advantages is False:
                remedy = (
                    "All advantages are 0: the captions of an image have equal rewards. Use more num_generations, a higher "
                    "temperature, or another reward."
                )
            logger.warning("%s with learning_rate=%g. %s", fact, rate, remedy)


def _some_weights(model: Any) -> Tensor:
    """Up to 128 values of each trainable weight."""
    parts = (values.flatten() for _, values in trainable_values(model))
    return torch.cat([part[:: max(1, len(part) // 64)].float().cpu() for part in parts])


# --- Statistics of the captions of one training step -----------------------------------------------------------------


def describe_completions(captions: Sequence[str], ended: Tensor | None = None) -> tuple[dict[str, float], str]:
    """Statistics of the captions of one step, and an example of what is wrong: a degenerate caption, else the longest one.

    Lengths and phrases are in words; `distinct_1` and `distinct_2` are the mean shares of distinct words and word pairs per
    caption. `ended` `(N,)` is False where the length limit truncated a caption.
    """
    batch = caption_words(captions)
    counts = count_words(batch)
    number, lengths = len(batch), batch.lengths
    repeats, doubled = find_repeats(batch)
    bad = mark_degenerate(captions, counts, repeats, doubled)
    p10, p50, p90 = torch.quantile(lengths.double(), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    statistics = {"length_p10": p10, "length_p50": p50, "length_p90": p90}
    for order in (1, 2):
        long_enough = lengths >= order
        shares = distinct_share(counts, order, number, per="ngrams")[long_enough]
        # An empty caption repeats nothing; `empty` counts it.
        statistics[f"distinct_{order}"] = float(shares.mean()) if len(shares) else 1.0
    statistics |= {
        "distinct_captions": len(set(captions)) / number,
        "longest_repeat_max": float(repeats.max()),
        "longest_repeat_mean": float(repeats.double().mean()),
        "degenerate": float(bad.double().mean()),
        "empty": float((lengths == 0).double().mean()),
    }
    if ended is not None:
        statistics["clipped_ratio"] = float((~ended.detach().cpu().bool()).double().mean())
    return statistics, captions[int(bad.nonzero()[0] if bad.any() else lengths.argmax())]


# --- The guard against reward hacking: it detects captions that exploit the scorer -----------------------------------
# Self-retrieval rewards loops ("a blue and blue blue blue and yellow blue"), repeated phrases and truncated captions. The guard
# warns, stops or rolls back when the mean of a statistic over the last steps exceeds a limit. It also checks the captions of
# every evaluation: samples may be fine while beam search repeats itself. A checkpoint that it refuses is never selected.

GuardAction = Literal["off", "warn", "stop", "rollback"]
Growth = Annotated[float, Range(at_least=0)]


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

    window: Positive = 10
    max_degenerate: Fraction | None = 0.1
    max_length_growth: Growth | None = 2.0
    min_distinct: Fraction | None = 0.8
    max_clipped_ratio: Fraction | None = 0.25
    max_truncated_by_scorer: Fraction | None = 0.1
    max_gap_growth: Growth | None = 0.2

    def __post_init__(self) -> None:
        check_values(self)


_REMEDY = "Use a lower learning_rate, smaller bags, cider_weight, or beta."
_FAULTS = {
    "truncated_by_scorer": (
        "The captions are longer than the reward scorer reads",
        "Use a lower max_completion_length, length_weight, another scorer, or a higher max_truncated_by_scorer.",
    ),
    "reward_minus_held_out": ("The reward seems to be hacked", _REMEDY),
}
# For each limit, the statistic that it bounds.
_RULES = {
    "max_degenerate": "degenerate",
    "max_length_growth": "length_p90",
    "min_distinct": "distinct_2",
    "max_clipped_ratio": "clipped_ratio",
    "max_truncated_by_scorer": "truncated_by_scorer",
    "max_gap_growth": "reward_minus_held_out",
}


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


class GuardCallback(TrainerCallback):
    """Acts when captions exploit the reward, and records which checkpoints are good.

    `trips` says when a limit was broken, `refused` which evaluations select no checkpoint. On `rollback`, `load` loads the
    newest good checkpoint, `rolled_back_to`. Lengths are compared with `reference_captions`, or with the first window.
    """

    def __init__(
        self,
        thresholds: GuardThresholds = GuardThresholds(),
        action: GuardAction = "warn",
        load: Callable[[str], None] | None = None,
        reference_captions: Sequence[str] | None = None,
    ) -> None:
        self.thresholds, self.action, self.load = thresholds, action, load
        self.rolled_back_to: str | None = None
        self._against: list[str] = []  # reasons against the captions of the current evaluation
        self._good: list[int] = []  # steps of checkpoints, ascending
        self._tripped = False
        self._reference_length: float | None = None
        if reference_captions:
            lengths = caption_words(reference_captions).lengths.double()
            # torch.quantile refuses more than 16 million values.
            self._reference_length = float(lengths.kthvalue(max(math.ceil(0.9 * len(lengths)), 1)).values)
        self.load_state_dict({})

    def observe(
        self,
        captions: Sequence[str],
        *,
        ended: Tensor | None = None,
        truncated_by_scorer: float | None = None,
        reward: float | None = None,
        held_out_scorer: float | None = None,
    ) -> dict[str, float]:
        """Record the captions of one step on all processes; returns its statistics. Rewards of both scorers have the same units."""
        step, example = describe_completions(captions, ended)
        if truncated_by_scorer is not None:
            step["truncated_by_scorer"] = float(truncated_by_scorer)
        if reward is not None:
            step["nonfinite_reward"] = float(not math.isfinite(reward))
            if held_out_scorer is not None:
                step["reward_minus_held_out"] = reward - held_out_scorer
        # Without a finite reward there is no gap, and JSON has no NaN.
        step = {name: value for name, value in step.items() if math.isfinite(value)}
        self._window.append((step, example))
        for name, values in self._start.items():
            if name in step and len(values) < self.thresholds.window:
                values.append(step[name])
        return {f"guard/{name}": value for name, value in step.items()}

    def _reason(self, steps: Sequence[tuple[Mapping[str, float], str]], where: str = "") -> str | None:
        """The first rule that the mean over the steps breaks, with value, limit, the example of the worst step and remedy."""
        starts = {name: _mean(values) for name, values in self._start.items()}
        for rule, name in _RULES.items():
            limit = threshold = getattr(self.thresholds, rule)
            pairs = [(step[name], example) for step, example in steps if name in step]
            value = _mean([one for one, _ in pairs])
            if threshold is not None and rule == "max_length_growth":
                length = self._reference_length or starts["length_p90"]
                limit = None if length is None else threshold * max(length, 1.0)
            elif threshold is not None and rule == "max_gap_growth":
                start = starts["reward_minus_held_out"]
                limit = None if start is None else start + threshold
            if limit is None or value is None or (value >= limit if rule == "min_distinct" else value <= limit):
                continue
            _, example = (min if rule == "min_distinct" else max)(pairs)
            fault, remedy = _FAULTS.get(name, ("The captions have collapsed", _REMEDY))
            broken = f"{name} is {value:.3g} in {where or f'the last {len(steps)} steps'} (limit {limit:.3g}, {rule}={threshold:g})"
            return f"{fault}: {broken}, for example {example!r}. {remedy}"
        return None

    @property
    def reason(self) -> str | None:
        """The broken limit with value and example; None if no limit is broken or the first window is not full."""
        return self._reason(self._window) if len(self._window) == self.thresholds.window else None

    @property
    def doubt(self) -> str | None:
        """Why a checkpoint saved now is not good: the window or its newest quarter breaks a limit; None if it is good.

        The mean over the whole window reacts a few steps late.
        """
        return self.reason or self._reason(list(self._window)[-math.ceil(self.thresholds.window / 4) :])

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Forget an earlier training: another train() of the same trainer may save again.
        self.rolled_back_to = None
        self._against = []
        if state.global_step == 0:
            self.load_state_dict({})
        # The resumed checkpoint's own state was saved before it was known to be good.
        self.on_save(args, state, control)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The new checkpoint is good if no limit is broken. After a resume, later ones belong to the previous attempt.
        self._good = [step for step in self._good if step < state.global_step]
        if state.global_step > 0 and self.doubt is None and self.refusal(state.global_step) is None:
            self._good.append(state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._against = []
        reason = self.reason
        tripped, self._tripped = self._tripped, reason is not None
        # A run that was stopped and resumes stops again.
        if reason is None or (tripped and self.action == "warn"):
            return
        if self.action == "rollback":
            self._roll_back(args, control)
        control.should_training_stop |= self.action != "warn"
        name = None if self.rolled_back_to is None else Path(self.rolled_back_to).name
        self.trips.append({"step": state.global_step, "reason": reason, "action": self.action, "rolled_back_to": name})
        if state.is_world_process_zero:
            outcome = f"guard={self.action!r}" + ("" if name is None else f", the weights are those of {name}")
            logger.warning("Step %d: the guard tripped (%s). %s", state.global_step, outcome, reason)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Prevent what "epoch" strategies would cause at the stop after a rollback.
        if self.rolled_back_to is not None:
            control.should_save = control.should_evaluate = False

    def _roll_back(self, args: TrainingArguments, control: TrainerControl) -> None:
        """Load the newest good checkpoint that still exists."""
        folders = [Path(args.output_dir) / f"checkpoint-{step}" for step in reversed(self._good)]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        if folder is None or self.load is None:
            return
        self.load(str(folder))
        self.rolled_back_to = str(folder)
        # A checkpoint of this step would combine the old weights with the optimizer of the hacked policy, and its
        # evaluation would be that of another step.
        control.should_save = control.should_evaluate = False

    def check_captions(self, captions: Sequence[str], ended: Any | None = None) -> dict[str, float]:
        """Check the captions of one evaluated data set, as they were generated; returns `degenerate` and `clipped_ratio`."""
        statistics, reason = self.judge(captions, ended)
        self._against += [] if reason is None else [reason]
        return {name: statistics[name] for name in ("degenerate", "clipped_ratio") if name in statistics}

    def judge(self, captions: Sequence[str], ended: Any | None = None) -> tuple[dict[str, float], str | None]:
        """Statistics of captions of an evaluation, and the limit that they break, with value and example."""
        if not captions:
            return {}, None
        statistics, example = describe_completions(captions, None if ended is None else torch.as_tensor(ended))
        return statistics, self._reason([(statistics, example)], f"{len(captions)} evaluated captions")

    def accepts(self, state: TrainerState) -> bool:
        """Whether the evaluation of this step may select its checkpoint; a refused one is recorded."""
        reason = next(iter(self._against), None) or self.doubt
        self._against = []
        if reason is None:
            return True
        self.refused.append({"step": state.global_step, "reason": reason})
        if state.is_world_process_zero:
            logger.warning("Step %d: the guard refuses this evaluation. %s", state.global_step, reason)
        return False

    def refusal(self, step: int) -> str | None:
        """Why the evaluation of a step was refused; None if it was not."""
        return next((entry["reason"] for entry in self.refused if entry["step"] == step), None)

    def fault_of_kept_weights(self, args: TrainingArguments, state: TrainerState) -> str | None:
        """Why weights that no evaluation selected must not be delivered; None if they may."""
        if args.load_best_model_at_end and state.best_model_checkpoint is None and self.refused:
            return str(self.refused[-1]["reason"])
        if self.rolled_back_to is not None:
            return None
        return self.refusal(state.global_step) or self.doubt

    def state_dict(self) -> dict[str, Any]:
        """State for an exact resume."""
        state = {"window": list(self._window), "start": self._start, "good": self._good}
        return copy.deepcopy({**state, "tripped": self._tripped, "trips": self.trips, "refused": self.refused})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; an empty one is that of a new training."""
        state = copy.deepcopy(dict(state))
        # Of each step its statistics and an example.
        self._window: deque[Any] = deque(state.get("window", []), self.thresholds.window)
        # The first values, as many as the window has steps.
        self._start: dict[str, list[float]] = state.get("start", {"length_p90": [], "reward_minus_held_out": []})
        self._good = state.get("good", [])
        self._tripped = bool(state.get("tripped", False))
        self.trips: list[dict[str, Any]] = state.get("trips", [])
        self.refused: list[dict[str, Any]] = state.get("refused", [])
