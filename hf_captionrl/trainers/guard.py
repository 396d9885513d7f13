"""Statistics of rollouts: logged, checked by the guard, and shown as tables of completions.

Legend: N captions of this process, G captions per image, R rewards.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_captionrl.data import open_still
from hf_captionrl.metrics.table import escape_markdown
from hf_captionrl.rewards import FunctionReward, RewardContext, SelfRetrieval, WeightedRewards
from hf_captionrl.text.degenerate_captions import caption_words, count_words, find_repeats, mark_degenerate
from hf_captionrl.text.ngrams import distinct_share

# --- Logs a policy's captions with their images and rewards, on the terminal and in trackers -------------------------
# Captions come from a model that may exploit anything, so they are always shown as text and never as markup.

TRACKERS: tuple[str, ...] = ("tensorboard", "trackio", "wandb")
"""Trackers that show tables with images; the Trainer handles other names in `report_to`."""

CompletionRow = Mapping[str, Any]

logger = logging.getLogger(__name__)


def _reward_names(rows: Sequence[CompletionRow]) -> list[str]:
    """Names of all rewards, in the order of their first appearance."""
    for index, row in enumerate(rows):
        if missing := [name for name in ("image_id", "caption") if name not in row]:
            raise ValueError(
                f"rows[{index}] lacks {missing}; it has {sorted(row)}. Each row needs an image_id and a caption."
            )
    return list(dict.fromkeys(name for row in rows for name in row.get("rewards") or {}))


def _extra_names(rows: Sequence[CompletionRow]) -> list[str]:
    """Names of all further columns, in the order of their first appearance."""
    return list(dict.fromkeys(str(name) for row in rows for name in row.get("extra") or {}))


def _has_ranks(rows: Sequence[CompletionRow]) -> bool:
    return any(row.get("rank") is not None for row in rows)


def _visible(value: Any) -> str:
    """Text on one line with escaped control characters, which could control the terminal."""
    text = " ".join(str(value).split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _number(value: Any) -> str:
    return "-" if value is None else f"{float(value):.3f}"


def print_completions(rows: Sequence[CompletionRow], *, step: int, console: Console | None = None) -> None:
    """Print captions and their rewards as a table."""
    names = _reward_names(rows)
    console = console or Console()
    encoding = console.encoding

    def cell(value: Any) -> Text:
        # Text and not str, so that [brackets] in a caption are not markup.
        return Text(_visible(value).encode(encoding, errors="backslashreplace").decode(encoding), overflow="fold")

    table = Table(box=box.SIMPLE_HEAD, title=Text(f"Captions of step {step}"), pad_edge=False)
    for heading in ("image", "caption", "reference"):
        table.add_column(heading)
    extra = _extra_names(rows)
    for name in extra:
        table.add_column(cell(name))
    ranked = _has_ranks(rows)
    for name in (*names, "advantage", *(["rank"] if ranked else [])):
        table.add_column(cell(name), justify="right")
    for row in rows:
        rewards = row.get("rewards") or {}
        texts = [row["image_id"], row["caption"], row.get("reference") or ""]
        texts += [(row.get("extra") or {}).get(name, "") for name in extra]
        numbers = [_number(rewards.get(name)) for name in names] + [_number(row.get("advantage"))]
        if ranked:
            numbers.append("-" if row.get("rank") is None else str(row["rank"]))
        table.add_row(*(cell(value) for value in (*texts, *numbers)))
    console.print(table)


@lru_cache(maxsize=64)
def _warn_once(tracker: str, why: str) -> None:
    logger.warning("Captions are not logged to %s: %s", tracker, why)


def _escaped(value: Any) -> str:
    return escape_markdown(str(value))


def _columns(rows: Sequence[CompletionRow], step: int, text: Callable[[Any], str]) -> dict[str, list[Any]]:
    """The columns of the table; `text` escapes strings for the tracker."""
    columns: dict[str, list[Any]] = {
        "step": [step] * len(rows),
        "image_id": [text(row["image_id"]) for row in rows],
        "caption": [text(row["caption"]) for row in rows],
        "reference": [text(row.get("reference") or "") for row in rows],
    }
    for name in _extra_names(rows):
        values = [(row.get("extra") or {}).get(name, "") for row in rows]
        columns[f"extra/{name}"] = [text(value) for value in values]
    for name in _reward_names(rows):
        values = [(row.get("rewards") or {}).get(name) for row in rows]
        columns[f"rewards/{name}"] = [None if value is None else float(value) for value in values]
    advantages = [row.get("advantage") for row in rows]
    columns["advantage"] = [None if value is None else float(value) for value in advantages]
    if _has_ranks(rows):
        ranks = [row.get("rank") for row in rows]
        columns["rank"] = [None if rank is None else int(rank) for rank in ranks]
    return columns


def _log_table(
    module: Any,
    rows: Sequence[CompletionRow],
    images: Sequence[Any],
    step: int,
    text: Callable[[Any], str],
    tag: str,
) -> None:
    """Log a table to wandb, or to trackio, which has the same interface."""
    import pandas as pd

    columns = _columns(rows, step, text)
    if any(image is not None for image in images):
        columns["image"] = [None if image is None else module.Image(image.convert("RGB")) for image in images]
    table = module.Table(dataframe=pd.DataFrame(columns))
    # Without step=: the Trainer's callbacks let the tracker count steps, and wandb drops logs for earlier steps.
    module.log({tag: table, "train/global_step": step})


def _log_tensorboard(writer: Any, rows: Sequence[CompletionRow], images: Sequence[Any], step: int, tag: str) -> None:
    columns = _columns(rows, step, _escaped)
    shown = [name for name in columns if name != "step"]
    lines = ["| " + " | ".join(escape_markdown(name) for name in shown) + " |", "|" + " --- |" * len(shown)]
    for index in range(len(rows)):
        cells = [columns[name][index] for name in shown]
        lines.append("| " + " | ".join(str(c) if isinstance(c, str | int) else _number(c) for c in cells) + " |")
    writer.add_text(tag, "\n".join(lines), step)
    for index, image in enumerate(images):
        if image is not None:
            writer.add_image(f"{tag}/{index}", np.asarray(image.convert("RGB")), step, dataformats="HWC")


def log_completions(
    rows: Sequence[CompletionRow],
    images: Sequence[Any],
    *,
    step: int,
    report_to: str | Sequence[str] | None,
    tensorboard_writer: Any | None = None,
    tag: str = "completions",
) -> list[str]:
    """Send captions with images and rewards to the trackers that a run reports to.

    A requested tracker that is not installed or has no run is skipped with one warning per process: a failed log must not end
    the training.
    """
    _reward_names(rows)
    if len(images) not in (0, len(rows)):
        raise ValueError(
            f"There are {len(images)} images for {len(rows)} rows. Pass one per row (None if unknown), or none."
        )
    wanted = {report_to} if isinstance(report_to, str) else set(report_to or ())
    trackers = [name for name in TRACKERS if rows and (name in wanted or "all" in wanted)]
    written = []
    for name in trackers:
        if name == "tensorboard":
            if tensorboard_writer is None:
                _warn_once(name, "there is no writer. Install tensorboard, and log from the main process.")
                continue
            _log_tensorboard(tensorboard_writer, rows, images, step, tag)
        else:
            try:
                module = importlib.import_module(name)
            except ImportError:
                _warn_once(name, f"it is not installed. Install {name}, or take it out of report_to.")
                continue
            run = module.run if name == "wandb" else module.context_vars.current_run.get()
            if run is None:
                _warn_once(
                    name, f"no run is active. Call {name}.init() before training, or log from the main process."
                )
                continue
            # trackio shows text as Markdown, wandb as plain text.
            _log_table(module, rows, images, step, _escaped if name == "trackio" else str, tag)
        written.append(name)
    return written


# --- Statistics of the captions of one training step: lengths, repetition, truncation --------------------------------
# Legend: N captions.


def caption_flags(name: str, values: Any, number: int) -> Tensor:
    """Booleans `(N,)` on the CPU, checked to be one per caption."""
    flags = torch.as_tensor(values).detach().cpu().bool()
    if flags.shape != (number,):
        raise ValueError(f"{name} has shape {tuple(flags.shape)}. Pass one value for each of the {number} captions.")
    return flags


def describe_completions(captions: Sequence[str], ended: Any) -> tuple[dict[str, float], Tensor, Tensor]:
    """The statistics of [`completion_statistics`], which captions are degenerate `(N,)`, and their words `(N,)`."""
    if not len(captions):
        raise ValueError("There are no captions. Pass at least one.")
    batch = caption_words(captions)
    counts = count_words(batch)
    number, lengths = len(batch), batch.lengths
    repeats, doubled = find_repeats(batch)
    bad = mark_degenerate(counts, repeats, doubled)
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
        statistics["clipped_ratio"] = float((~caption_flags("ended", ended, number)).double().mean())
    return statistics, bad, lengths


def completion_statistics(captions: Sequence[str], *, ended: Any | None = None) -> dict[str, float]:
    """Describe the captions of one step.

    Quantiles of the length in words, the mean share of distinct words and word pairs per caption, the longest phrase
    that occurs twice, in words, and shares in [0, 1]. `ended` `(N,)` is False where the length limit truncated a
    caption.
    """
    return describe_completions(captions, ended)[0]


# --- The guard against reward hacking: it detects captions that exploit the scorer -----------------------------------
# Self-retrieval rewards loops ("a blue and blue blue blue and yellow blue"), repeated phrases ("on a blue background on a blue
# background"), and truncated captions. The guard computes statistics of every step. When their mean over the last steps
# exceeds a limit, it warns, stops training, or rolls back to an earlier checkpoint. It also checks the captions of every
# evaluation: samples may be fine while beam search repeats itself. A checkpoint whose captions it refuses is never selected.
#
# Legend: N captions.

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


# --- What the guard does in a training: it warns, stops or rolls back, and refuses evaluations with degenerate captions ---


class GuardCallback(TrainerCallback):
    """Acts when the guard detects hacking, and records which checkpoints are good.

    `action` is `warn`, `stop`, or `rollback`: load the weights of the newest good checkpoint, `rolled_back_to`, then
    stop. `trips` says when a limit was broken, `refused` which evaluations select no checkpoint.
    """

    def __init__(self, guard: RewardHackingGuard, action: str = "warn", trainer: Any | None = None) -> None:
        if action not in GUARD_ACTIONS or action == "off":
            allowed = tuple(a for a in GUARD_ACTIONS if a != "off")
            raise ValueError(f"action is {action!r}. Use one of {allowed}; leave the callback out for no guard.")
        self.guard = guard
        self.action = action
        self.trainer = trainer
        self.rolled_back_to: str | None = None
        self.trips: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []
        self._against: list[str] = []  # reasons against the captions of the current evaluation
        self._good: list[int] = []  # steps of checkpoints, ascending
        self._tripped = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget an earlier training, and mark the resumed checkpoint as good if it was; its state was saved before that."""
        self.rolled_back_to = None  # another train() of the same trainer may save again
        if state.global_step == 0:
            self.load_state_dict({})
        self.on_save(args, state, control, **kwargs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Mark the new checkpoint as good if no limit is broken."""
        # After a resume from an earlier step, later checkpoints belong to the previous attempt.
        self._good = [step for step in self._good if step < state.global_step]
        if state.global_step > 0 and self.guard.healthy and self.refusal(state.global_step) is None:
            self._good.append(state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Warn, stop or roll back if a limit is broken."""
        reason = self.guard.reason
        tripped, self._tripped = self._tripped, reason is not None
        # A run that was stopped and resumes stops again.
        if reason is None or (tripped and self.action == "warn"):
            return
        message = f"Step {state.global_step}: the reward seems to be hacked. {reason}"
        if self.action == "rollback":
            message += f" {self._roll_back(args, control)}"
        elif self.action == "stop":
            message += " Training stops."
        if self.action != "warn":
            control.should_training_stop = True
        name = None if self.rolled_back_to is None else Path(self.rolled_back_to).name
        self.trips.append({"step": state.global_step, "reason": reason, "action": self.action, "rolled_back_to": name})
        if state.is_world_process_zero:
            logger.warning(message)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prevent what `"epoch"` strategies would cause at the stop after a rollback."""
        if self.rolled_back_to is not None:
            self._skip_this_step(control)

    @staticmethod
    def _skip_this_step(control: TrainerControl) -> None:
        # A checkpoint of this step would combine the old weights with the optimizer of the hacked policy, and its
        # evaluation would be that of another step.
        control.should_save = control.should_evaluate = False

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
        self._skip_this_step(control)
        return f"The policy was rolled back to {folder.name}, the newest good checkpoint. Training stops."

    # Evaluations

    def begin_evaluation(self) -> None:
        """Forget the captions of the last evaluation."""
        self._against = []

    def check_captions(self, captions: Sequence[str], ended: Any | None = None) -> dict[str, float]:
        """Check the captions of one evaluated data set, as they were generated; returns `degenerate` and `clipped_ratio`."""
        if not captions:
            return {}
        reason = self.guard.reason_against(captions, ended)
        if reason is not None:
            self._against.append(reason)
        found = completion_statistics(captions, ended=ended)
        return {name: found[name] for name in ("degenerate", "clipped_ratio") if name in found}

    def accepts(self, step: int) -> bool:
        """Whether the evaluation of this step may select its checkpoint; a refused one is recorded."""
        reason = next(iter(self._against), None) or self.guard.doubt
        if reason is None:
            return True
        self.refused.append({"step": step, "reason": reason})
        if self.trainer is None or self.trainer.is_world_process_zero():
            logger.warning("Step %d: this evaluation is refused and selects no checkpoint. %s", step, reason)
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
        return self.refusal(state.global_step) or self.guard.doubt

    def facts(self) -> dict[str, Any]:
        """Action, trips and refused evaluations, for `selected_checkpoint.json` and reports."""
        return {"action": self.action, "trips": list(self.trips), "refused": list(self.refused)}

    def state_dict(self) -> dict[str, Any]:
        """State for an exact resume, that of the guard included."""
        return {
            "guard": self.guard.state_dict(),
            "good": list(self._good),
            "tripped": self._tripped,
            "trips": list(self.trips),
            "refused": list(self.refused),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; an empty one is that of a new training."""
        self.guard.load_state_dict(state.get("guard", {}))
        self._good = [int(step) for step in state.get("good", [])]
        self._tripped = bool(state.get("tripped", False))
        self.trips = [dict(entry) for entry in state.get("trips", [])]
        self.refused = [dict(entry) for entry in state.get("refused", [])]


# --- Statistics of rollouts: logged, checked by the guard, and shown as tables of completions ------------------------


def completion_rows(
    context: RewardContext, rewards: Tensor, advantages: Tensor, names: Sequence[str], number: int
) -> list[dict[str, Any]]:
    """The first captions of a rollout with rewards `(N, R)` and advantages `(N,)`, as rows for `print_completions`."""
    rows = []
    for n in range(min(number, len(context.captions))):
        image = n // context.group_size
        rows.append(
            {
                "image_id": context.image_ids[image],
                "caption": context.captions[n],
                "reference": next(iter(context.references[image]), ""),
                "rewards": dict(zip(names, rewards[n].tolist(), strict=True)),
                "advantage": float(advantages[n]),
                "rank": None if context.ranks is None else int(context.ranks[n]),
                "extra": {name: values[n] for name, values in context.extra.items()},
            }
        )
    return rows


class RolloutMonitor:
    """Collects the statistics of rollouts until they are logged, and passes each rollout to the guard.

    `held_out` is not a reward; its share of images found is compared with that of the reward scorer.
    """

    def __init__(
        self,
        rewards: WeightedRewards,
        means_over_processes: Callable[[list[float]], list[float]],
        guard: RewardHackingGuard | None = None,
        held_out: SelfRetrieval | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        self.rewards = rewards
        self.means_over_processes = means_over_processes
        self.guard = guard
        self.held_out = held_out
        self.gather = gather
        self._values: dict[str, list[float]] = defaultdict(list)
        self._last: tuple[RewardContext, Tensor, Tensor] | None = None

    def note(self, named: Mapping[str, Any]) -> dict[str, float]:
        """Keep the means over processes for the next log."""
        names = sorted(named)
        means = dict(zip(names, self.means_over_processes([float(named[n]) for n in names]), strict=True))
        for name, value in means.items():
            self._values[name].append(value)
        return means

    def record(self, context: RewardContext, rewards: Tensor, advantages: Tensor) -> dict[str, float]:
        """Record one rollout with rewards `(N, R)` and advantages `(N,)`."""
        total = rewards @ torch.tensor(self.rewards.weights, dtype=rewards.dtype)
        named: dict[str, Any] = {
            "reward": total.mean(),
            "reward_std": total.std(correction=0),
            "advantage_std": advantages.std(correction=0),
            "completions/mean_length": context.mask.sum(1).double().mean(),
            "completions/empty": context.is_empty.double().mean(),
            "completions/clipped_ratio": (~context.ended).double().mean(),
            **context.statistics,
        }
        for index, name in enumerate(self.rewards.names):
            named[f"rewards/{name}/mean"] = rewards[:, index].mean()
        if context.bag_size:
            named["bag_size"] = context.bag_size
        self._last = (context, rewards, advantages)
        means = self.note(named)
        self._note_metrics(context, means)
        # The guard averages over processes itself.
        for name, value in self._watch(context).items():
            self._values[name].append(value)
        return means

    def _note_metrics(self, context: RewardContext, known: Mapping[str, float]) -> None:
        """Keep what reward functions logged; these names may differ between processes."""
        if not any(isinstance(reward, FunctionReward) for reward in self.rewards.rewards):
            return
        mine = {name: (math.fsum(values), len(values)) for name, values in context.metrics.items()}
        everyone = [mine] if self.gather is None else self.gather(mine)
        for name in sorted({name for one in everyone for name in one}):
            if name in known:
                raise ValueError(
                    f"log_metric({name!r}, ...): the trainer logs a number of this name. Use another name."
                )
            sums, counts = zip(*(one[name] for one in everyone if name in one), strict=True)
            self._values[name].append(math.fsum(sums) / sum(counts))

    def _watch(self, context: RewardContext) -> dict[str, float]:
        if self.guard is None:
            return {}
        statistics = context.statistics
        held_out_scorer = None
        if self.held_out is not None and "recall_at_1" in statistics:
            accuracy = self.held_out(replace(context, statistics={}))  # (N,)
            held_out_scorer = float(accuracy.nan_to_num(0.0).mean())
        return self.guard.observe(
            context.captions,
            ended=context.ended,
            truncated_by_scorer=statistics.get("completions/truncated_by_scorer"),
            # Shares of images found, not log-probabilities, whose scales differ between scorers.
            reward=statistics.get("recall_at_1") if held_out_scorer is not None else None,
            held_out_scorer=held_out_scorer,
            mean_over_processes=self.means_over_processes,
        )

    def drain(self) -> dict[str, float]:
        """Means since the last call."""
        means = {name: math.fsum(values) / len(values) for name, values in self._values.items() if values}
        self._values.clear()
        return means

    def show(
        self,
        dataset: datasets.Dataset,
        number: int,
        *,
        step: int,
        report_to: Any = None,
        tensorboard_writer: Any | None = None,
    ) -> None:
        """Print the first captions of the last rollout, and send them with their images to the trackers."""
        if self._last is None:
            return
        context, rewards, advantages = self._last
        rows = completion_rows(context, rewards, advantages, self.rewards.names, number)
        print_completions(rows, step=step)
        if report_to:
            shown = [int(context.rows[n // context.group_size]) for n in range(len(rows))]
            images = [open_still(dataset[row]) for row in shown]
            log_completions(rows, images, step=step, report_to=report_to, tensorboard_writer=tensorboard_writer)
