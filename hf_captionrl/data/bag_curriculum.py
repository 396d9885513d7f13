"""Batch sampler of BagCurri: batches of whole bags of similar images, whose size grows over the epochs.

Legend: N images, k ranked neighbours of an image, B images of a global batch, K images of a bag, P processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from torch.utils.data import Sampler

import hf_captionrl.retrieval as retrieval  # bags are imported with the first neighbours

PAPER_SCHEDULE: dict[int, int] = {3: 2, 8: 3, 10: 5, 12: 7, 14: 10, 17: 15, 20: 20}
"""Last epoch of each bag size: bags of 2 up to epoch 3, of 3 up to epoch 8, and so on."""


def parse_bag_schedule(schedule: Any, names: tuple[str, ...] = ("paper",)) -> dict[int, int] | str | int | None:
    """The `bag_schedule` of a configuration: one of the names, a bag size, `{last epoch: size}`, or None."""
    if schedule is None or schedule in names:
        return schedule
    if isinstance(schedule, Mapping):  # YAML and the command line may give text
        return {int(epoch): int(size) for epoch, size in schedule.items()}
    if not str(schedule).isdigit():
        known = ", ".join(map(repr, names))
        raise ValueError(f"bag_schedule is {schedule!r}. Use {known}, a bag size, or {{last epoch: bag size}}.")
    return schedule


class BagCurriculumSampler(Sampler[list[int]]):
    """Batch sampler whose batches hold `batch_size // bag_size` whole bags, each an image and the images nearest to it.

    Reference: No Detail Left Behind, sections B.2 and B.3, Table 10. Differs from it by: images whose neighbours are
    all taken are also placed in bags; other schedules.

    The bags of an epoch depend only on `(seed, epoch)`, so processes share no state: a resumed run calls `set_epoch(e)`
    and skips the batches already seen. Within a batch, bags are contiguous and begin with their query; no image occurs
    twice in an epoch. Every epoch has `N // batch_size` batches, whatever the bag size; with `batch_size=100` and the
    paper's sizes a batch has 100, 99, 100, 98, 100, 90 or 100 images. The incomplete last batch is dropped; it holds
    different images in each epoch.

    With P processes, each builds the sampler with the same arguments except `process_index`, and gets its part of each
    global batch: bags `p * share` to `(p + 1) * share` with `share = (batch_size // bag_size) // P`. Bags that cannot be
    shared evenly are dropped, so a global batch has `bag_size * share * P` images. `__iter__` does not advance the
    epoch: call `set_epoch` before each.

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
        neighbours (array or tensor of shape `(N, k)`): Ranked rows of the most similar images, without the image
            itself; the first 200 are used. `None` with random distractors.
        batch_size: Largest number of images of a global batch.
        schedule: Bag sizes by the last epoch they are used in, counted from 1 (later epochs keep the last size), or one
            size for all epochs. The paper's by default.
        seed: Seed of queries and batches, at least 0.
        process_index: p, in [0, num_processes).
        num_processes: P.
        distractors: `"nearest"`, or `"random"` for bags of random images of the same sizes.
        num_images: N; required if `neighbours` is None, otherwise checked against its length.
        features (array or tensor of shape `(N, D)`, *optional*): For an exact search of the nearest free images of those
            left over.

    Raises:
        ValueError: If a bag is larger than the batch, than its neighbours can fill or than the processes can share.
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
    ) -> None:
        self._neighbours = None if neighbours is None else retrieval.check_neighbours(neighbours, num_images)
        if self._neighbours is not None:
            num_images = len(self._neighbours)
        if distractors not in ("nearest", "random") or (distractors == "nearest" and neighbours is None):
            raise ValueError(f"distractors is {distractors!r}. Use 'nearest' with neighbours, or 'random'.")
        assert num_images is not None
        if not 1 <= batch_size <= num_images:
            raise ValueError(f"batch_size is {batch_size}, but must be 1 to {num_images}, the number of images.")
        self.num_images, self.batch_size, self.seed = num_images, batch_size, seed
        self.process_index, self.num_processes = process_index, num_processes
        self.distractors = distractors
        schedule = PAPER_SCHEDULE if schedule is None else schedule
        if isinstance(schedule, int):
            schedule = {1: schedule}  # the last size is used for all later epochs
        if not schedule or min(*schedule, *schedule.values()) < 1:
            raise ValueError(
                f"schedule is {schedule!r}. Use {{last epoch, from 1: bag size of at least 1}}, or one size."
            )
        self.schedule = dict(sorted(schedule.items()))  # bag sizes by their last epoch
        self.drop_last = True  # read by accelerate; every batch is full
        self._features = features
        self._epoch = 0
        self._sizes = list(self.schedule.values())
        for size in self._sizes:
            if batch_size // size < num_processes:
                raise ValueError(
                    f"A bag of {size} is larger than the batch of {batch_size} shared by {num_processes} "
                    f"process(es). Raise batch_size to {size * num_processes}, or use a schedule with smaller bags."
                )
            width = retrieval.TOP_NEIGHBOURS if self._neighbours is None else self._neighbours.shape[1]
            if distractors == "nearest" and size - 1 > (width := min(width, retrieval.TOP_NEIGHBOURS)):
                raise ValueError(
                    f"A bag of {size} needs {size - 1} ranked neighbours per image, of which {width} are used. Rank more "
                    f"(at most {retrieval.TOP_NEIGHBOURS}), or choose a schedule with smaller bags."
                )

    def bag_size_at(self, epoch: int) -> int:
        """K in an epoch from 0."""
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
        """Set the epoch, from 0; a running iteration does not change."""
        self._epoch = int(epoch)

    def state_dict(self) -> dict[str, Any]:
        """State for an exact resume: the epoch and the settings."""
        return {"epoch": self._epoch, **self._settings()}

    def _settings(self) -> dict[str, Any]:
        names = ("seed", "num_images", "batch_size", "distractors")
        return {name: getattr(self, name) for name in names} | {"schedule": [*map(list, self.schedule.items())]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the [`state_dict`] of another sampler, which must make the same batches."""
        for name, value in self._settings().items():
            if state.get(name) != value:
                raise ValueError(
                    f"The saved sampler has {name} {state.get(name)!r} and this one {value!r}. Use the saved value."
                )
        self.set_epoch(int(state["epoch"]))

    def _bags(self) -> np.ndarray:
        """Bags of the current epoch in random order, `(N // K, K)`."""
        generator = np.random.default_rng([self.seed, self._epoch])
        order = generator.permutation(self.num_images)
        size = self.bag_size
        if self.distractors == "random" or self._neighbours is None:
            return order[: self.num_images // size * size].reshape(-1, size)
        bags = retrieval.training_bags(
            self._neighbours, size, order=order, features=self._features, check=False
        ).numpy()
        # Without the shuffle, images that are hard to place would always come last and be dropped.
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
