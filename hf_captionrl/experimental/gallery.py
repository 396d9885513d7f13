"""The gallery reward: the images that a caption retrieves should look like its image, and like each other.

Legend: N captions, B images, G captions per image, M images of the gallery, k retrieved images, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.retrieval import load_scorer
from hf_captionrl.retrieval.ranking import unit_length
from hf_captionrl.rewards.base import Reward, RewardContext, RewardData
from hf_captionrl.utils.options import Range, documented

_BLOCK = 65_536  # rows of the gallery that are read at once


def nearest_in_gallery(queries: Tensor, gallery: Any, k: int) -> Tensor:
    """Rows `(N, k)` of the most similar images of a gallery `(M, D)`, which may be a memory-mapped array, best first; exact."""
    scores, rows = queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.long)
    for start in range(0, len(gallery), _BLOCK):
        block = torch.as_tensor(np.array(gallery[start : start + _BLOCK])).float()
        scores = torch.cat([scores, queries @ block.T], dim=1)
        rows = torch.cat([rows, torch.arange(start, start + len(block)).expand(len(queries), -1)], dim=1)
        scores, places = scores.topk(min(k, scores.shape[1]), dim=1)
        rows = rows.gather(1, places)
    return rows


@dataclass(eq=False)
class GalleryReward(Reward):
    r"""Mean cosine of the k images that a caption retrieves with its image, plus their mean cosine with each other.

    Reference: Jia et al. 2026, "Cross-modal Identity Mapping" (arXiv 2603.01696): relevance and consistency. There is no public
    code; k, the weight of the second term and the gallery without the image itself are ours.

    Args:
        scorer (`Scorer` or `str`, *optional*): Encodes captions and images; None for the trainer's.
        gallery (array of shape `(M, D)`, *optional*): Image features of the scorer, of unit length, perhaps memory-mapped. None:
            the training images, of which the caption's own is left out.
        index (*optional*): An approximate index of the gallery with faiss' `search(queries, k)`, for inner products.
    """

    name = "gallery"
    allow_truncation_captions = False
    summary = "the similarity of the images that the caption retrieves to its image and to each other"

    scorer: Any = None
    gallery: Any = None
    index: Any = None
    num_retrieved: Annotated[int, Range(at_least=2)] = documented(10, "k, the retrieved images of the gallery reward.")
    consistency_weight: float = documented(1.0, "Weight of their similarity to each other in the gallery reward.")

    def prepare(self, data: RewardData) -> None:
        if self.scorer is None and data.scorer is None:
            raise ValueError("The gallery reward needs a scorer. Pass GalleryReward(scorer) or the trainer's scorer.")
        self.scorer = load_scorer(data.scorer if self.scorer is None else self.scorer)
        self._targets = unit_length(data.image_features(self.scorer).float().cpu())  # (num_images, D)
        self._images = self._targets if self.gallery is None else self.gallery
        if len(self._images) <= self.num_retrieved:
            raise ValueError(f"num_retrieved is {self.num_retrieved} of {len(self._images)} images. Lower it.")

    def __call__(self, context: RewardContext) -> Tensor:
        text = self.scorer.text_features(context.captions).float().cpu()  # (N, D)
        rows = context.rows.cpu().repeat_interleave(context.group_size)  # (N,)
        k = self.num_retrieved + (self.gallery is None)
        if self.index is None:
            retrieved = nearest_in_gallery(text, self._images, k)  # (N, k)
        else:
            retrieved = torch.as_tensor(self.index.search(text.numpy(), k)[1])
            if (retrieved < 0).any():  # how faiss says that it searched too few lists
                raise ValueError(f"The index finds fewer than {k} images for a caption. Raise its nprobe.")
        if self.gallery is None:  # without the target, or the last
            order = (retrieved == rows[:, None]).int().argsort(dim=1, stable=True)
            retrieved = retrieved.gather(1, order)[:, :-1]
        images = torch.as_tensor(np.array(self._images[retrieved.numpy()])).float()  # (N, k, D)
        relevance = torch.einsum("nkd,nd->nk", images, self._targets[rows]).mean(1)
        pairs = images.sum(1).square().sum(1) - images.square().sum((1, 2))
        consistency = pairs / (self.num_retrieved * (self.num_retrieved - 1))
        context.statistics |= {"gallery/relevance": relevance.tolist(), "gallery/consistency": consistency.tolist()}
        return (relevance + self.consistency_weight * consistency).masked_fill(context.is_empty, 0.0)
