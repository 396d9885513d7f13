r"""A bank of image features: distractors that do not depend on the batch.

Legend: B targets, G captions per target, N = B * G captions, M images in the bank, K compared with a target, D features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.retrieval import NeighbourFile, nearest_neighbours
from hf_captionrl.retrieval.neighbours import normalised
from hf_captionrl.retrieval.row_lookup import RowLookup

__all__ = ["BANK_IMAGES", "BANK_WEIGHTINGS", "ImageBank", "check_weighting", "training_bank"]

BANK_IMAGES: tuple[str, ...] = ("random", "nearest", "nearest_and_random")
BANK_WEIGHTINGS: tuple[str, ...] = ("equal", "importance")
_SEED = 0  # of random images: the same on every process and in a resumed run
_NEAR = 0.999  # cosine that copies exceed even after rounding
_COPY = 1e-5  # largest difference between the features of copies: rounding, in units of a vector of length 1


class ImageBank:
    r"""Cached image features of a scorer, with which any caption can be compared.

    The captions of a target are never compared with the target or its copies (images with the same features) as distractors.

    Args:
        features (array or tensor of shape `(M, D)`): Image features, e.g. of a [`FeatureCache`].
        image_ids (`Sequence[str]`): Ids of the M images.
        signature (`str`): `signature` of the scorer that computed them.
        neighbours ([`NeighbourFile`], *optional*): Nearest images of each target; only they are its distractors. None:
            all images of the bank.
        counts (array of shape `(K,)`, *optional*): How many images of the pool from which batches are drawn each distractor
            stands for, in the order of the neighbours (without them `(M,)`, in the order of the bank): the inverse of its
            probability to be in the bank. 1 for an image that always is; `(P - k) / m` for each of m images drawn from the
            other P - k. None: all distractors of a target stand for the same number.

    Raises:
        ValueError: If there are fewer than two images, an id is missing or occurs twice, or counts are not K positive numbers.

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
        counts: Any = None,
    ) -> None:
        self.features = normalised(features, "features of the bank")  # (M, D)
        is_column = not isinstance(image_ids, list | tuple) and len(image_ids) and isinstance(image_ids[0], str)
        self.image_ids: Sequence[str] = image_ids if is_column else list(map(str, image_ids))
        self.signature = signature
        self._columns = RowLookup(self.image_ids)
        first = self._columns.first_rows()
        distinct = int((first == np.arange(len(first))).sum())
        if not distinct == len(first) == len(self.features):
            raise ValueError(
                f"The bank has features of {len(self.features)} images, {len(first)} ids and {distinct} different ids. Pass one "
                "id per image, each once."
            )
        if len(self.features) < 2:
            raise ValueError("The bank has one image, which is not a distractor of itself. Use 2 or more images.")
        self._nearest: Tensor | None = None
        self._rows = RowLookup([])
        if neighbours is not None:
            columns = torch.from_numpy(self._columns.rows(neighbours.image_ids))
            self._nearest = columns[neighbours.indices]  # (targets, K); -1 where the bank lacks the neighbour
            self._rows = RowLookup(neighbours.image_ids)
        self.counts = self._checked_counts(counts)

    def _checked_counts(self, counts: Any) -> Tensor | None:
        """`(K,)` in fp32, or None."""
        if counts is None:
            return None
        values = torch.as_tensor(counts, dtype=torch.float32, device=self.features.device)
        number = len(self) if self._nearest is None else self._nearest.size(1)
        if values.shape != (number,) or not bool((values.isfinite() & (values > 0)).all()):
            raise ValueError(
                f"counts has shape {tuple(values.shape)}, but a target is compared with {number} images. Pass {number} positive "
                "numbers."
            )
        return values

    @property
    def has_neighbours(self) -> bool:
        """Whether each target has its own distractors."""
        return self._nearest is not None

    def __len__(self) -> int:
        return len(self.features)

    def to(self, device: torch.device | str) -> ImageBank:
        """Move the features.

        Args:
            device (`torch.device`): Device of the training.

        Returns:
            [`ImageBank`]: This bank.
        """
        self.features = self.features.to(device)
        self._nearest = None if self._nearest is None else self._nearest.to(device)
        self.counts = None if self.counts is None else self.counts.to(device)
        return self

    def check(self, signature: str, num_features: int, image_ids: Sequence[str]) -> None:
        """Refuse a bank that does not match a scorer and targets.

        Args:
            signature (`str`): Signature of the scorer.
            num_features (`int`): D of the targets.
            image_ids (`Sequence[str]`): Ids of all targets.

        Raises:
            ValueError: If another scorer computed the bank, or the bank lacks neighbours of a target.
        """
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
                f"The bank has no neighbours for {len(unknown)} of {len(image_ids)} images (first: {unknown[0]!r}). Use "
                "neighbours of all training images, or a bank without neighbours."
            )
        missing = (self._nearest < 0).sum(1).cpu().numpy()[self._rows.rows(image_ids)]
        lacking = np.flatnonzero(missing)
        if len(lacking):
            raise ValueError(
                f"The bank has no features of {missing[lacking[0]]} neighbours of the image {image_ids[int(lacking[0])]!r} "
                f"({len(lacking)} of {len(image_ids)} images lack some). Add the features of all neighbours to the bank."
            )

    def compare(
        self, text: Tensor, targets: Tensor, image_ids: Sequence[str], batch_size: int
    ) -> tuple[Tensor, Tensor]:
        """Cosines of captions with their targets and distractors, and weights that stand for a batch.

        Args:
            text (`torch.Tensor` of shape `(N, D)`): Features of the captions; the captions of a target are adjacent.
            targets (`torch.Tensor` of shape `(B, D)`): Features of the targets.
            image_ids (`Sequence[str]`): Ids of the targets.
            batch_size (`int`): C, the images of a batch, the target included.

        Returns:
            `tuple` of two tensors of shape `(N, 1 + K)`, the target first: the cosines, and the weights for
            [`retrieval_rewards`]: 1 for the target, 0 for itself and its copies in the bank, and for each distractor C - 1
            times its share of all counts, which is `(C - 1) / number` where the bank has no counts.

        Raises:
            ValueError: If a target has no distractor.
        """
        group_size = len(text) // len(targets)
        itself = torch.from_numpy(self._columns.rows(image_ids)).to(self.features.device)
        if self._nearest is None:
            cosines = text @ self.features.T  # (N, M)
            columns = torch.arange(len(self), device=itself.device)[None]  # (1, M)
            far = self._far(targets)
        else:
            columns = self._nearest[torch.from_numpy(self._rows.rows(image_ids))]  # (B, K)
            images = self.features[columns]  # (B, K, D)
            grouped = text.view(len(targets), group_size, -1)  # (B, G, D)
            cosines = torch.einsum("bgd,bkd->bgk", grouped, images).flatten(0, 1)  # (N, K)
            far = (images - targets[:, None]).abs().amax(2) > _COPY
        is_distractor = far & (columns != itself[:, None])  # (B, K)
        number = is_distractor.sum(1, keepdim=True)  # (B, 1)
        if not number.all():
            alone = image_ids[int((number == 0).nonzero()[0, 0])]
            raise ValueError(
                f"The bank holds no other image than the image {alone!r} and copies of it. Use a larger bank."
            )
        # The sum of the counts estimates the images of the pool that are not copies: k + (P - k) = P without copies.
        counts = is_distractor.float() if self.counts is None else is_distractor * self.counts  # (B, K)
        weights = (batch_size - 1) * counts / counts.sum(1, keepdim=True)  # (B, K)
        weights = weights.repeat_interleave(group_size, dim=0)  # (N, K)
        of_target = (text * targets.repeat_interleave(group_size, dim=0)).sum(1, keepdim=True)  # (N, 1)
        return torch.cat([of_target, cosines], dim=1), torch.cat([torch.ones_like(of_target), weights], dim=1)

    def _far(self, targets: Tensor) -> Tensor:
        """`(B, M)`: False where an image is a copy of the target. All D features are compared only if the cosine is near 1."""
        near = targets @ self.features.T > _NEAR
        rows, columns = near.nonzero(as_tuple=True)
        near[rows, columns] = (self.features[columns] - targets[rows]).abs().amax(1) <= _COPY
        return ~near


def check_weighting(weighting: str, bank_images: str, reward_kind: str, banks: Sequence[ImageBank]) -> None:
    """Refuse weights that a reward or a bank cannot have; without banks, `bank_images` says which one will be made."""
    if weighting not in BANK_WEIGHTINGS:
        raise ValueError(f"bank_weighting is {weighting!r}. Use one of {BANK_WEIGHTINGS}.")
    if weighting == "equal":
        if any(bank.counts is not None for bank in banks):
            raise ValueError("The bank has counts, and bank_weighting is 'equal'. Use bank_weighting='importance'.")
        return
    if reward_kind == "cosine":
        raise ValueError(
            "bank_weighting='importance' weights the sum over distractors, and reward_kind='cosine' has none. Use "
            "reward_kind='log_prob', or bank_weighting='equal'."
        )
    if not banks and bank_images == "nearest":
        raise ValueError(
            "bank_images='nearest' leaves all other images out, so no weights make it stand for a random batch. Use "
            "bank_images='nearest_and_random', or bank_weighting='equal'."
        )
    if any(bank.has_neighbours and bank.counts is None for bank in banks):
        raise ValueError(
            "bank_weighting='importance' needs the counts of a bank with neighbours. Use ImageBank(..., counts=...), or "
            "bank_weighting='equal'."
        )


def training_bank(
    features: Tensor,
    image_ids: Sequence[str],
    signature: str,
    bank_images: str,
    bank_size: int,
    num_hard: int,
    bank_weighting: str = "equal",
) -> ImageBank:
    """A bank of `bank_size` training images: random ones for all targets, or for each its nearest, or `num_hard` nearest and others."""
    others = len(image_ids) - 1
    most = len(image_ids) if bank_images == "random" else others
    if bank_size > most:
        raise ValueError(
            f"bank_size is {bank_size}, and the {len(image_ids)} training images allow a bank of {most}. Lower bank_size, or "
            "pass SelfRetrieval(scorer, bank=ImageBank(...)) with other images."
        )
    if bank_images != "random":
        number = bank_size if bank_images == "nearest" else num_hard
        if number > bank_size:
            raise ValueError(f"num_hard_distractors is {number}, but bank_size {bank_size}. Use at most bank_size.")
        counts = None
        if bank_weighting == "importance":
            counts = _inclusion_counts(number, bank_size - number, others)
        columns, cosines = nearest_neighbours(features, number)
        if number < bank_size:
            columns = _with_random(columns, bank_size)
            cosines = torch.full(columns.shape, math.nan)  # of no use to the bank
        neighbours = NeighbourFile(columns, cosines, list(image_ids), signature, "image")
        return ImageBank(features, image_ids, signature, neighbours, counts)
    # Each image is drawn with the same probability, so that equal weights are importance weights.
    rows = np.random.default_rng(_SEED).choice(len(image_ids), bank_size, replace=False).tolist()
    return ImageBank(features[rows], [image_ids[row] for row in rows], signature)


def _inclusion_counts(nearest: int, drawn: int, others: int) -> list[float]:
    """Images that each distractor stands for: itself, or its share of the images that are not among the nearest."""
    rest = others - nearest
    if rest and not drawn:
        raise ValueError(
            f"num_hard_distractors is {nearest}, as large as bank_size, so {rest} of {others} images are never in the bank, and "
            "no weights make it stand for a batch. Raise bank_size, or use bank_weighting='equal'."
        )
    return [1.0] * nearest + [rest / drawn] * drawn if drawn else [1.0] * nearest


def _with_random(rows: Tensor, number: int) -> Tensor:
    """Neighbours `(N, k)`, followed by random other images up to `(N, number)`; no image twice in a row."""
    rng = np.random.default_rng(_SEED)
    itself = np.arange(len(rows))[:, None]
    known = np.concatenate([itself, rows.cpu().numpy()], axis=1)  # (N, 1 + k)
    drawn = rng.integers(len(rows), size=(len(rows), number - rows.size(1)))
    while (again := _repeated(np.concatenate([known, drawn], axis=1))[:, known.shape[1] :]).any():
        drawn[again] = rng.integers(len(rows), size=int(again.sum()))
    return torch.cat([rows, torch.from_numpy(drawn).to(rows.device)], 1)


def _repeated(rows: np.ndarray) -> np.ndarray:
    """Where a value stands further left in its row, `(N, K)`."""
    order = np.argsort(rows, axis=1, kind="stable")
    ordered = np.take_along_axis(rows, order, axis=1)
    again = np.zeros(rows.shape, bool)
    np.put_along_axis(again, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    return again
