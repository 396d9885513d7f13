"""Batches of whole bags of similar images, the bags growing over the epochs (BagCurri).

Legend: N images, k ranked neighbours of an image, B images of a global batch, K images of a bag, P processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from torch.utils.data import Sampler

from hf_captionrl.retrieval.bags import TOP_NEIGHBOURS, check_neighbours, training_bags

__all__ = ["PAPER_SCHEDULE", "BagCurriculumSampler"]

PAPER_SCHEDULE: dict[int, int] = {3: 2, 8: 3, 10: 5, 12: 7, 14: 10, 17: 15, 20: 20}
"""Bag size by the epoch at whose end it is used up: bags of 2 in the first 3 epochs, of 3 in the next 5, and so on."""


class BagCurriculumSampler(Sampler[list[int]]):
    """Batch sampler: each batch holds `batch_size // bag_size` whole bags of an image and the images nearest to it.

    Reference: No Detail Left Behind, sections B.2 and B.3, Table 10. Differs from it by: images whose neighbours are
    all taken are placed in bags too; `adaptive`; other schedules.

    Every epoch draws other bags from `(seed, epoch)` alone, so that nothing is carried between processes or over a
    crash: `set_epoch(e)` is all that a resumed run needs, and skipping the batches already seen is exact. Within a
    batch, bags are contiguous and begin with their query; in an epoch no image comes twice. The number of batches is
    `N // batch_size` in every epoch, whatever the bag size: 100, 99, 100, 98, 100, 90 and 100 images a batch of 100 for
    the paper's sizes. What is over is dropped, other images each epoch.

    With P processes each builds the sampler with the same arguments but `process_index`, and gets its part of each
    global batch: bags `p * share` to `(p + 1) * share` with `share = (batch_size // bag_size) // P`. The parts in the
    order of the processes are the global batch, of `bag_size * share * P` images: bags that cannot be shared evenly are
    left out of it. `__iter__` never moves to the next epoch by itself: call `set_epoch` before each.

    Table 10 of the paper: `schedule=20` is "Bag20"; `schedule=1` or `distractors="random"` is "Rand".

    Example:

    ```python
    >>> neighbours, _ = nearest_neighbours(multimodal_features(images, captions), 200)
    >>> sampler = BagCurriculumSampler(neighbours, 100)
    >>> sampler.set_epoch(3)
    >>> sampler.bag_size, len(next(iter(sampler)))
    (3, 99)
    >>> loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collator)
    ```

    Args:
        neighbours (array or tensor of shape `(N, k)`): Ranked rows of the most similar images, the image itself left
            out; the first 200 count. `None` with random distractors.
        batch_size: Images of a global batch, at most.
        schedule: Bag sizes by the last epoch they are used in, counted from 1 (the last size stays afterwards), or one
            size for all epochs. The paper's by default.
        seed: Of queries and batches, at least 0.
        process_index: p, in [0, num_processes).
        num_processes: P.
        distractors: `"nearest"`, or `"random"` for groups of random images in the same sizes.
        num_images: N, where `neighbours` is None; elsewhere the size of the data set, to be compared.
        features (array or tensor of shape `(N, D)`, *optional*): Lets leftovers find their nearest free images exactly.
        adaptive: Recall at 1 in [0, 1] from which [`update`] moves on to the next size of the schedule; its epochs then
            do not count, only its sizes. `None`: by epochs.

    Raises:
        ValueError: If neighbours do not fit the data set, a bag is larger than the batch, than its neighbours can fill
            or than the processes can share, the data set is smaller than a batch, or an argument is out of range.
    """

    def __init__(
        self,
        neighbours: Any,
        batch_size: int,
        schedule: Mapping[int, int] | int | None = None,
        seed: int = 0,
        *,
        process_index: int = 0,
        num_processes: int = 1,
        distractors: Literal["nearest", "random"] = "nearest",
        num_images: int | None = None,
        features: Any = None,
        adaptive: float | None = None,
    ) -> None:
        if distractors not in ("nearest", "random"):
            raise ValueError(f"distractors is {distractors!r}, but must be 'nearest' or 'random'.")
        self._neighbours = None if neighbours is None else check_neighbours(neighbours, num_images)
        if self._neighbours is not None:
            num_images = len(self._neighbours)
        elif distractors == "nearest":
            raise ValueError("nearest distractors need neighbours. Pass them, or distractors='random' and num_images.")
        if num_images is None:
            raise ValueError("without neighbours the number of images is unknown. Pass num_images.")
        if num_processes < 1 or not 0 <= process_index < num_processes:
            raise ValueError(
                f"process_index is {process_index}, but must lie in [0, num_processes), which is {num_processes}."
            )
        if seed < 0:
            raise ValueError(f"seed is {seed}, but must be at least 0.")
        if adaptive is not None and not 0 <= adaptive <= 1:
            raise ValueError(
                f"adaptive is {adaptive}, but recall at 1 lies in [0, 1]. Pass .5 for half of the captions."
            )
        if not 1 <= batch_size <= num_images:
            raise ValueError(
                f"batch_size is {batch_size} and the data set has {num_images} images, which is not a batch. Lower it."
            )
        self.num_images, self.batch_size, self.seed = num_images, batch_size, seed
        self.process_index, self.num_processes = process_index, num_processes
        self.distractors, self.adaptive = distractors, adaptive
        self.schedule = _check_schedule(PAPER_SCHEDULE if schedule is None else schedule)
        self.drop_last = True  # accelerate asks; every batch is full
        self._features = features
        self._epoch = 0
        self._raised: list[int] = []  # epochs from which on `adaptive` uses the next size
        for size in self._sizes:
            self._check_size(size)

    @property
    def _sizes(self) -> list[int]:
        return list(self.schedule.values())

    def _check_size(self, size: int) -> None:
        width = None if self._neighbours is None else self._neighbours.shape[1]
        if size > self.batch_size:
            raise ValueError(
                f"a bag of {size} is larger than the batch of {self.batch_size}, and bags stay whole. Raise batch_size "
                "or choose a schedule with smaller bags."
            )
        if self.batch_size // size < self.num_processes:
            raise ValueError(
                f"a batch of {self.batch_size} holds {self.batch_size // size} bags of {size}, which {self.num_processes} "
                f"processes cannot share, and bags stay whole. Raise batch_size to {size * self.num_processes}, or choose "
                "a schedule with smaller bags."
            )
        # Bags are made of the nearest alone, however many are ranked.
        if self.distractors == "nearest" and width is not None and size - 1 > min(width, TOP_NEIGHBOURS):
            raise ValueError(
                f"a bag of {size} needs {size - 1} ranked neighbours per image, and there are {width}, of which "
                f"{TOP_NEIGHBOURS} at most count. Pass more, or choose a schedule with smaller bags."
            )

    def bag_size_at(self, epoch: int) -> int:
        """Images of a bag in an epoch.

        Args:
            epoch: From 0; after the last of the schedule the last size stays.

        Returns:
            `int`: K. Of an adaptive schedule, what is known by now.
        """
        if self.adaptive is not None:
            return self._sizes[sum(start <= epoch for start in self._raised)]
        return next((size for end, size in self.schedule.items() if epoch < end), self._sizes[-1])

    @property
    def bag_size(self) -> int:
        """Images of a bag in the current epoch."""
        return self.bag_size_at(self._epoch)

    @property
    def bags_per_batch(self) -> int:
        """Bags of this process in each batch of the current epoch."""
        return self.batch_size // self.bag_size // self.num_processes

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; a running iteration does not change.

        Args:
            epoch: From 0.

        Raises:
            ValueError: If it is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}, but epochs are counted from 0.")
        self._epoch = int(epoch)

    def update(self, recall_at_1: float) -> int:
        """Tell an adaptive schedule how the current epoch went; the next size holds from the next epoch on.

        Called several times in an epoch, the size still rises by one step. All processes must say the same number.

        Args:
            recall_at_1: Share of the training captions that retrieve their target, in [0, 1].

        Returns:
            `int`: Bag size of the next epoch.

        Raises:
            ValueError: If the schedule is not adaptive, or the number is not in [0, 1].
        """
        if self.adaptive is None:
            raise ValueError("this schedule goes by epochs. Pass adaptive=.5 to let recall raise the bag size.")
        if not 0 <= recall_at_1 <= 1:
            raise ValueError(f"recall_at_1 is {recall_at_1}, but must lie in [0, 1].")
        following = self._epoch + 1
        known = not self._raised or self._raised[-1] < following
        if recall_at_1 >= self.adaptive and known and len(self._raised) < len(self._sizes) - 1:
            self._raised.append(following)
        return self.bag_size_at(following)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; plain numbers and lists.

        Returns:
            `dict`: Epoch, the epochs at which an adaptive size rose, and what must be the same.
        """
        return {"epoch": self._epoch, "raised": list(self._raised), **self._settings()}

    def _settings(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "num_images": self.num_images,
            "batch_size": self.batch_size,
            "distractors": self.distractors,
            "adaptive": self.adaptive,
            "schedule": [[end, size] for end, size in self.schedule.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another sampler.

        Args:
            state: From [`state_dict`].

        Raises:
            ValueError: If that sampler made other batches than this one would.
        """
        for name, value in self._settings().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the saved sampler has {name} {state.get(name)!r} and this one {value!r}, so its batches would be "
                    "different. Build it with the saved value, or start again."
                )
        self._raised = [int(epoch) for epoch in state["raised"]]
        self.set_epoch(int(state["epoch"]))

    def _bags(self) -> np.ndarray:
        """Bags of the current epoch in random order, of shape `(N // K, K)`."""
        generator = np.random.default_rng([self.seed, self._epoch])
        order = generator.permutation(self.num_images)
        size = self.bag_size
        if self.distractors == "random" or self._neighbours is None:
            return order[: self.num_images // size * size].reshape(-1, size)
        bags = training_bags(self._neighbours, size, order=order, features=self._features, check=False).numpy()
        # Shuffled, or the same hard-to-place images would always come last and be dropped.
        return generator.permutation(bags)

    def __len__(self) -> int:
        return self.num_images // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        share = self.bags_per_batch
        first, step = self.process_index * share, self.num_processes * share
        bags = self._bags()
        for batch in range(len(self)):
            start = batch * step + first
            yield bags[start : start + share].ravel().tolist()


def _check_schedule(schedule: Mapping[int, int] | int) -> dict[int, int]:
    """Bag sizes by their last epoch, in the order of the epochs."""
    if isinstance(schedule, int):
        schedule = {1: schedule}  # the last size is used for all later epochs
    if not schedule:
        raise ValueError("schedule is empty. Pass {last epoch: bag size}, or one size.")
    for end, size in schedule.items():
        if not (isinstance(end, int) and isinstance(size, int) and end >= 1 and size >= 1):
            raise ValueError(
                f"schedule holds {end!r}: {size!r}, but must be {{last epoch, counted from 1: bag size of at least 1}}."
            )
    return dict(sorted(schedule.items()))
