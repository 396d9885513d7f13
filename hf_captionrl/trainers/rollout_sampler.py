"""Images of a rollout, and its split into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hf_captionrl.data.bag_curriculum import BagCurriculumSampler
from hf_captionrl.trainers.caption_rl_config import CaptionRLConfig
from hf_captionrl.trainers.epoch_callback import EpochCallback

__all__ = ["CurriculumCallback", "RolloutBatches", "RolloutCollator", "batch_sampler_for", "make_bag_sampler"]


class CurriculumCallback(EpochCallback):
    """Sets the epoch of a [`BagCurriculumSampler`], and with it the size of the bags."""


class RolloutCollator:
    """Adds `rows` `(B,)`, the rows of the data set, to the batch of a [`CaptionCollator`]."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, items: Sequence[Any]) -> dict[str, Tensor]:
        return {**self.collator(items), "rows": torch.tensor([item["index"] for item in items])}


class RolloutBatches:
    """Splits each rollout of a batch sampler into the micro-batches of an optimizer step.

    It has neither `set_epoch` nor an attribute `batch_sampler`, which Trainer and accelerate would use to set the epoch too.
    Only [`CurriculumCallback`] sets it.

    The sizes of the `pieces` differ by at most one; `repeats` is the number of optimizer steps per rollout.
    """

    def __init__(self, rollouts: Any, pieces: int, repeats: int = 1) -> None:
        self.rollouts = rollouts
        self.pieces = pieces
        self.repeats = repeats

    def __len__(self) -> int:
        return len(self.rollouts) * self.pieces * self.repeats

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self.rollouts:
            size, rest = divmod(len(rows), self.pieces)
            if not size:
                raise ValueError(
                    f"A rollout of {len(rows)} images cannot be split into {self.pieces} micro-batches. Lower "
                    "gradient_accumulation_steps or raise per_device_train_batch_size."
                )
            ends = [0]
            for piece in range(self.pieces):
                ends.append(ends[-1] + size + (piece < rest))
            for _ in range(self.repeats):
                for start, end in pairwise(ends):
                    yield list(rows[start:end])


def batch_sampler_for(
    number: int, args: CaptionRLConfig, *, neighbours: Any | None, process_index: int, num_processes: int
) -> Any:
    """The sampler of a [`CaptionRLConfig`] for `number` images; `neighbours` has shape `(number, k)`."""
    batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * num_processes
    if number < batch_size:
        raise ValueError(
            f"One optimizer step needs {batch_size} different images (per_device_train_batch_size x "
            f"gradient_accumulation_steps x processes), and there are {number}. Lower one of these."
        )
    return make_bag_sampler(
        args,
        batch_size,
        number,
        neighbours=neighbours,
        random=args.bag_distractors == "random",
        recall_threshold=args.bag_recall_threshold,
        process_index=process_index,
        num_processes=num_processes,
    )


def make_bag_sampler(
    args: Any,
    batch_size: int,
    num_images: int,
    *,
    neighbours: Any | None,
    random: bool = False,
    recall_threshold: float | None = None,
    **processes: int,
) -> BagCurriculumSampler:
    """The sampler for `args.bag_schedule`; an adaptive schedule needs `recall_threshold`."""
    seed = args.seed if args.data_seed is None else args.data_seed
    if args.bag_schedule is None and neighbours is None:
        return BagCurriculumSampler(
            None, batch_size, 1, seed, distractors="random", num_images=num_images, **processes
        )
    if neighbours is None and not random:
        raise ValueError(
            f"bag_schedule is {args.bag_schedule!r}, but there are no neighbours to make bags of. Pass neighbours, which "
            "`captionrl bags` makes, or leave bag_schedule out."
        )
    adaptive = recall_threshold is not None and args.bag_schedule == "adaptive"
    schedule: Any = None if adaptive or args.bag_schedule in (None, "paper") else args.bag_schedule
    return BagCurriculumSampler(
        None if random else neighbours,
        batch_size,
        int(schedule) if isinstance(schedule, str) else schedule,
        seed,
        distractors="random" if random else "nearest",
        num_images=num_images,
        adaptive=recall_threshold if adaptive else None,
        **processes,
    )
