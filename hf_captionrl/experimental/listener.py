"""A chat model as listener: can it find the image among others from the caption?

Legend: B images, G captions per image, N = B * G captions, K images compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from hf_captionrl.experimental.judges import found_target, listener_log_probs
from hf_captionrl.rewards.base import Reward, RewardContext, RewardData
from hf_captionrl.utils.options import Positive, Range, check_values, documented
from hf_captionrl.utils.prompts import Failure


@dataclass(eq=False)
class ListenerReward(Reward):
    r"""Log-probability that a chat model gives to the caption's image among K images, `log P(image | caption, K images)`.

    The images are the target's bag, or without bags the target and the next `num_images - 1` images of this process's batch.
    The probabilities are those of [`hf_captionrl.experimental.judges.listener_log_probs`]. A caption without a word, or without an answer of the
    listener, gets twice the reward of a caption that fits all images equally, `2 log(1 / K)`, and is counted.

    Args:
        backend ([`Backend`]): A vision-language model whose answers have probabilities, for example
            `TransformersVisionBackend("Qwen/Qwen2.5-VL-3B-Instruct")`, or a [`KeptAnswers`] around it.

    Example:
        >>> trainer = SelfRetrievalTrainer(..., reward_funcs=[ListenerReward(backend)])  # doctest: +SKIP
    """

    name = "listener"
    summary = "the log-probability that a chat model finds the image after reading the caption"

    backend: Any
    num_images: Annotated[int, Range(at_least=2)] = documented(4, "K, the images compared where there are no bags.")
    num_orders: Positive = documented(1, "Rotations of the images in the prompt that are averaged.")

    def __post_init__(self) -> None:
        check_values(self)
        if not getattr(self.backend, "is_multimodal", False):
            name = getattr(self.backend, "model", self.backend)
            raise ValueError(f"backend is {name!r}, which does not see images. Use a vision-language model.")

    def prepare(self, data: RewardData) -> None:
        if "image" not in data.columns:
            raise ValueError(f"The listener needs the column 'image'; the data have {sorted(data.columns)}.")

    def _compared(self, context: RewardContext) -> list[tuple[int, list[int]]]:
        """Of each of the B images its place among the K compared ones, and these as rows of this process's batch."""
        number, size = len(context.rows), context.bag_size
        if not size:
            if number < 2:
                raise ValueError("One image has nothing to compare with. Raise per_device_train_batch_size.")
            return [(0, [(i + k) % number for k in range(min(self.num_images, number))]) for i in range(number)]
        local = {int(position): i for i, position in enumerate(context.positions)}
        found = []
        for position in local:
            bag = range(position - position % size, position - position % size + size)
            if any(other not in local for other in bag):
                raise ValueError(f"per_device_train_batch_size must be a multiple of the bag size, {size}.")
            found.append((position % size, [local[other] for other in bag]))
        return found

    def __call__(self, context: RewardContext) -> Tensor:
        column, G = context.columns["image"], context.group_size
        images = [column[i] for i in range(len(context.rows))]
        compared = self._compared(context)
        asked = [n for n, empty in enumerate(context.is_empty.tolist()) if not empty]
        bags = [[images[row] for row in compared[n // G][1]] for n in asked]
        captions = [context.captions[n] for n in asked]
        by_image = listener_log_probs(captions, bags, self.backend, num_orders=self.num_orders)
        rewards = torch.full((len(context.captions),), math.nan, dtype=torch.float64)
        hits = []
        for n, log_probs in zip(asked, by_image, strict=True):
            if not isinstance(log_probs, Failure):
                place = compared[n // G][0]
                rewards[n] = float(log_probs[place])
                hits.append(found_target(log_probs, place))
        context.statistics["listener/accuracy"] = hits
        context.statistics["listener/failed"] = float(len(asked) - len(hits))
        return rewards

    def undefined(self, context: RewardContext) -> float:
        size = context.bag_size or min(self.num_images, len(context.rows))
        return -2 * math.log(size)
