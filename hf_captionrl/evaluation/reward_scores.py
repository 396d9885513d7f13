"""Rewards of captions that stand in files: there is no policy, so words are the tokens.

Legend: N captions, B groups of captions, C images that are compared, T words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_captionrl.retrieval.ranking import concept_numbers
from hf_captionrl.rewards.base import RewardContext, RewardData, WeightedRewards
from hf_captionrl.text.tokenize import ptb_tokenize_all


def reward_scores(
    rewards: WeightedRewards,
    image_ids: Sequence[str],
    references: Sequence[list[str]],
    image_features: Callable[[Any], Tensor],
    columns: Mapping[str, Sequence[Any]],
    scorer: Any = None,
) -> Callable[[Sequence[str], Sequence[int], Sequence[int]], list[float]]:
    """A function of N captions, the image of each of the B groups, and the images of the rollout: weighted sums of the rewards.

    The arguments are those of [`RewardData`]; `columns` has one value per image.
    """
    numbers: dict[str, int] = {}

    def encode(captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Words as tokens `(N, T)`, with the end token 0, and their mask."""
        rows = [[*(numbers.setdefault(w, len(numbers) + 1) for w in text), 0] for text in ptb_tokenize_all(captions)]
        padded = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=-1)
        return padded.clamp(min=0), padded >= 0

    device = getattr(scorer, "device", torch.device("cpu"))
    more: dict[str, Any] = {"scorer": scorer, "columns": list(columns)}
    more["concepts"] = concept_numbers(columns["concept"]) if "concept" in columns else None
    rewards.prepare(RewardData(image_ids, references, image_features, encode, 0, device, **more))

    def scores(captions: Sequence[str], images: Sequence[int], candidates: Sequence[int]) -> list[float]:
        ids, mask = encode(captions)
        place = {image: at for at, image in enumerate(candidates)}
        context = RewardContext(
            captions=list(captions),
            ids=ids,
            mask=mask,
            ended=torch.ones(len(ids), dtype=torch.bool),
            rows=torch.tensor(images),
            image_ids=[image_ids[image] for image in images],
            references=[references[image] for image in images],
            candidates=torch.tensor(candidates),
            positions=torch.tensor([place[image] for image in images]),
            columns={name: [values[image] for image in images] for name, values in columns.items()},
        )
        values = rewards(context)  # (N, R)
        return (values * torch.tensor(rewards.weights, dtype=values.dtype)).sum(1).tolist()  # type: ignore[no-any-return]

    return scores
