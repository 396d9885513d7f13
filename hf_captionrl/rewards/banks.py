"""Banks of image features: distractors that do not depend on the batch.

Legend: N captions, K distractors, M images of a bank, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.retrieval import NeighbourFile, nearest_neighbours
from hf_captionrl.retrieval.feature_cache import RowLookup
from hf_captionrl.retrieval.neighbours import normalised
from hf_captionrl.retrieval.ranking import num_concepts

_SEED = 0  # of random images: the same on every process and in a resumed run
_COPY = 1e-5  # largest difference between the features of copies: rounding, in units of a vector of length 1


class ImageBank:
    r"""Cached image features of a scorer, with which any caption can be compared.

    A target and its copies (images with the same features) are never its distractors.

    Args:
        features (array or tensor of shape `(M, D)`): Image features, e.g. of a [`FeatureCache`].
        image_ids (`Sequence[str]`): Ids of the M images.
        signature (`str`): `signature` of the scorer that computed them.
        neighbours ([`NeighbourFile`], *optional*): Nearest images of each target; only they are its distractors. None:
            all images of the bank.
        num_random (`int`): Further distractors of each target, drawn anew at every step from the images that are not its
            neighbours (DiscriTune, Table 12).

    Example:
        >>> keys = [image_hash(image) for image in images]  # doctest: +SKIP
        >>> features = FeatureCache.for_scorer(scorer).get(keys)  # doctest: +SKIP
        >>> bank = ImageBank(features, image_ids, scorer.signature)  # doctest: +SKIP
    """

    def __init__(
        self,
        features: Any,
        image_ids: Sequence[Any],
        signature: str,
        neighbours: NeighbourFile | None = None,
        num_random: int = 0,
    ) -> None:
        self.num_random = num_random
        self.concepts: Tensor | None = None  # (M,), set by the reward
        self.features = normalised(features, "features of the bank")  # (M, D)
        self.image_ids = list(map(str, image_ids))
        self.signature = signature
        self._columns = RowLookup(self.image_ids)
        number, distinct = len(self.image_ids), len(self._columns)
        if not 2 <= distinct == number == len(self.features):
            raise ValueError(
                f"The bank has features of {len(self.features)} images, {number} ids and {distinct} different ids. Pass one "
                "id per image, each once, for 2 or more images."
            )
        self._nearest: Tensor | None = None
        if neighbours is not None:
            columns = torch.from_numpy(self._columns.rows(neighbours.image_ids))
            self._nearest = columns[neighbours.indices]  # (targets, K); -1 where the bank lacks the neighbour
            self._rows = RowLookup(neighbours.image_ids)

    def __len__(self) -> int:
        return len(self.features)

    def to(self, device: torch.device | str) -> ImageBank:
        """Move the features to a device; returns this bank."""
        self.features = self.features.to(device)
        self._nearest = None if self._nearest is None else self._nearest.to(device)
        return self

    def check(self, signature: str, num_features: int, image_ids: Sequence[str]) -> None:
        """Refuse a bank of another scorer or number of features than the targets', or without neighbours of a target."""
        if self.signature != signature or self.features.size(1) != num_features:
            raise ValueError(
                f"The bank has {self.features.size(1)} features per image by {self.signature!r}, and the targets "
                f"{num_features} by the reward scorer {signature!r}. Compute the features of the bank with the reward scorer."
            )
        if self._nearest is None:
            return
        unknown = self._rows.missing(image_ids)
        if unknown:
            raise ValueError(
                f"The bank lacks neighbours of images ({len(unknown)}), such as {unknown[0]!r}. Use all training images."
            )
        lacking = np.flatnonzero((self._nearest < 0).any(1).cpu().numpy()[self._rows.rows(image_ids)])
        if len(lacking):
            raise ValueError(
                f"The bank lacks features of neighbours of {len(lacking)} of {len(image_ids)} images (first: "
                f"{image_ids[int(lacking[0])]!r}). Add the features of all neighbours to the bank."
            )

    def compare(
        self,
        text: Tensor,
        targets: Tensor,
        image_ids: Sequence[str],
        batch_size: int,
        step: int = 0,
        concepts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Cosines `(N, 1 + K)` of captions with their target, first, and its distractors, and weights that stand for a batch.

        Shapes: `text` `(N, D)`, `targets` `(B, D)`, `concepts` of the targets `(B,)`. `batch_size` is C, the images of a batch, the target included. The weights,
        for [`retrieval_rewards`], are 1 for the target, 0 for itself, its copies and its concept in the bank, and `(C - 1) / number` for each
        of its distractors.
        """
        group_size = len(text) // len(targets)
        itself = torch.from_numpy(self._columns.rows(image_ids)).to(self.features.device)
        if self._nearest is None:
            cosines = text @ self.features.T  # (N, M)
            columns = torch.arange(len(self), device=itself.device)[None]  # (1, M)
            # All D features are compared only if the cosine is near 1, which that of copies exceeds even after rounding.
            near = targets @ self.features.T > 0.999
            at, near_columns = near.nonzero(as_tuple=True)
            near[at, near_columns] = (self.features[near_columns] - targets[at]).abs().amax(1) <= _COPY
            far = ~near  # (B, M)
        else:
            columns = self._nearest[torch.from_numpy(self._rows.rows(image_ids))]  # (B, K)
            if self.num_random:
                columns = torch.cat([columns, self._drawn(itself, columns, step)], 1)
            images = self.features[columns]  # (B, K, D)
            grouped = text.view(len(targets), group_size, -1)  # (B, G, D)
            cosines = torch.einsum("bgd,bkd->bgk", grouped, images).flatten(0, 1)  # (N, K)
            far = (images - targets[:, None]).abs().amax(2) > _COPY
        is_distractor = far & (columns != itself[:, None])  # (B, K)
        if concepts is not None and self.concepts is not None:
            is_distractor &= self.concepts[columns] != concepts[:, None]
        number = is_distractor.sum(1, keepdim=True)  # (B, 1)
        if not number.all():
            alone = image_ids[int((number == 0).nonzero()[0, 0])]
            raise ValueError(
                f"The bank holds only the image {alone!r} and copies of it, or its concept. Use a larger bank."
            )
        counts = is_distractor.float()  # (B, K)
        weights = (batch_size - 1) * counts / counts.sum(1, keepdim=True)  # (B, K)
        weights = weights.repeat_interleave(group_size, dim=0)  # (N, K)
        of_target = (text * targets.repeat_interleave(group_size, dim=0)).sum(1, keepdim=True)  # (N, 1)
        return torch.cat([of_target, cosines], dim=1), torch.cat([torch.ones_like(of_target), weights], dim=1)

    def _drawn(self, itself: Tensor, nearest: Tensor, step: int) -> Tensor:
        """Random other images `(B, num_random)`, which depend on step and target alone: the same after resuming."""
        drawn = []
        for known in torch.cat([itself[:, None], nearest], 1).tolist():
            rng = np.random.default_rng([_SEED, step, known[0]])
            # Enough of them, whichever are known.
            candidates = rng.choice(len(self), min(len(self), self.num_random + len(known)), replace=False)
            drawn.append(candidates[~np.isin(candidates, known)][: self.num_random])
        return torch.from_numpy(np.stack(drawn)).to(nearest.device)


def training_bank(
    features: Tensor,
    image_ids: Sequence[str],
    signature: str,
    bank_images: str,
    bank_size: int,
    num_hard: int,
    concepts: Sequence[int] | None = None,
) -> ImageBank:
    """A bank of `bank_size` training images: random ones for all targets, or for each its nearest, or `num_hard` nearest and others."""
    others = num_concepts(len(image_ids), concepts) - 1
    most = len(image_ids) if bank_images == "random" else others
    if bank_size > most:
        raise ValueError(
            f"bank_size is {bank_size}, and {len(image_ids)} training images allow {most}. Lower it, or pass a bank."
        )
    if bank_images == "random":
        rows = np.random.default_rng(_SEED).choice(len(image_ids), bank_size, replace=False).tolist()
        return ImageBank(features[rows], [image_ids[row] for row in rows], signature)
    number = bank_size if bank_images == "nearest" else num_hard
    drawn = bank_size - number
    if drawn < 0:
        raise ValueError(f"num_hard_distractors is {number}, but bank_size {bank_size}. Use at most bank_size.")
    neighbours = NeighbourFile(
        *nearest_neighbours(features, number, concepts=concepts), list(image_ids), signature, "image"
    )
    return ImageBank(features, image_ids, signature, neighbours, drawn)
