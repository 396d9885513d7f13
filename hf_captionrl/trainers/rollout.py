r"""From a batch of images to captions, rewards and advantages.

Legend: B images of this process, G captions an image, N = B * G captions, T tokens, R rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_captionrl.captioners.base import Captioner
from hf_captionrl.rewards import Baseline, RewardContext, WeightedRewards

__all__ = ["Completions", "advantages_of", "write_completions"]


@dataclass
class Completions:
    """What the policy wrote for a batch of images.

    Args:
        captions (`list[str]`): N captions, those of an image in a row.
        ids (`torch.Tensor` of shape `(N, T)`): Completions, right-padded.
        mask (`torch.Tensor` of shape `(N, T)`): True up to and including the end token.
        ended (`torch.Tensor` of shape `(N,)`): False where the length limit cut the caption.
    """

    captions: list[str]
    ids: Tensor
    mask: Tensor
    ended: Tensor


def write_completions(
    captioner: Captioner,
    images: Sequence[dict[str, Tensor]],
    *,
    batch_size: int | None = None,
    **generate_kwargs: Any,
) -> Completions:
    """Write captions for the images of several micro-batches.

    Args:
        captioner ([`Captioner`]): The policy; writes in eval mode.
        images (`Sequence[dict]`): For each micro-batch `pixel_values` or `image_features`.
        batch_size (`int`, *optional*): Images in one call of generate; by default a micro-batch.
        generate_kwargs: For the captioner's `generate`.

    Returns:
        [`Completions`]: Of all micro-batches, in order.
    """
    if batch_size is not None:
        (name,) = images[0]
        whole = torch.cat([batch[name] for batch in images])
        images = [{name: part} for part in whole.split(batch_size)]
    outputs = [captioner.generate(**batch, **generate_kwargs) for batch in images]
    longest = max(output.ids.size(1) for output in outputs)
    ids = [_widen(output.ids, longest, captioner.pad_token_id) for output in outputs]
    mask = [_widen(output.mask, longest, False) for output in outputs]
    return Completions(
        captions=[caption for output in outputs for caption in output.captions],
        ids=torch.cat(ids),
        mask=torch.cat(mask),
        ended=torch.cat([output.ended for output in outputs]),
    )


def _widen(rows: Tensor, width: int, value: Any) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.size(1)), value=value)


def advantages_of(
    rewards: WeightedRewards,
    baselines: dict[str, Baseline],
    default: str,
    context: RewardContext,
    greedy: RewardContext | None,
    mean_over_processes: Callable[[float], float],
) -> tuple[Tensor, Tensor]:
    """Rewards of a rollout and the advantages they give.

    Rewards that share a baseline are added up before they are held against it.

    Args:
        rewards ([`WeightedRewards`]): The rewards.
        baselines (`dict[str, Baseline]`): By name; updated here.
        default (`str`): Name of the baseline of rewards that have none of their own.
        context ([`RewardContext`]): What was written.
        greedy ([`RewardContext`], *optional*): The greedy captions of the same images, where a baseline needs them.
        mean_over_processes (`Callable`): Mean of a number over all processes.

    Returns:
        Advantages `(N,)` and rewards `(N, R)`, float64 on the CPU.
    """
    values = rewards(context)  # (N, R)
    names = [reward.baseline or default for reward in rewards.rewards]
    columns_of = {name: [i for i, other in enumerate(names) if other == name] for name in names}
    weights = torch.tensor(rewards.weights, dtype=values.dtype)
    shape = (len(context.rows), context.group_size)
    total = torch.zeros(shape, dtype=values.dtype)
    compared = [i for name, columns in columns_of.items() if baselines[name].needs_greedy for i in columns]
    greedy_values = rewards(greedy, only=compared) if greedy is not None and compared else None  # (B, R)
    for name, columns in columns_of.items():
        baseline = baselines[name]
        if baseline.per_reward:
            for column in columns:
                total += weights[column] * baseline(values[:, column].view(shape))
            continue
        mine = (values[:, columns] * weights[columns]).sum(1).view(shape)  # (B, G)
        theirs = None
        if baseline.needs_greedy:
            assert greedy_values is not None
            theirs = (greedy_values[:, columns] * weights[columns]).sum(1)  # (B,)
        mean = mean_over_processes(float(mine.mean()))
        if baseline.update_first:
            baseline.update(mean)
        total += baseline(mine, theirs)
        if not baseline.update_first:
            baseline.update(mean)
    return total.flatten(), values
