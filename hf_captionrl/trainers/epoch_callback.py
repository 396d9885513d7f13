"""The epoch of the training data."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__all__ = ["EpochCallback"]


class EpochCallback(TrainerCallback):
    """Sets the epoch of the training data, so that each epoch draws another caption of every image.

    Accelerate forwards the epoch to the sampler or to the data set, never to both, and a run resumed within an epoch on
    several processes restarts at epoch 0. This callback uses the trainer's state instead.

    Args:
        dataset ([`CaptionDataset`]): The training data, or a sampler: anything with `set_epoch`.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # The epoch is a sum of fractions: 0.9999999 means 1.
        self.dataset.set_epoch(int((state.epoch or 0.0) + 1e-6))
