"""Nearest images of each image, with blocked matrix products; multimodal features.

Legend: N images, D features, k neighbours, M captions per image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_captionrl.retrieval.ranking import best_of_concepts, default_block_size, num_concepts, unit_rows

# Columns per group; only groups with large maxima are searched. A plain top-200 of 118,000 columns takes a sixth of the
# time of the product.
_GROUP = 32


def normalised(features: Any, name: str = "features") -> Tensor:
    """Features `(N, D)` scaled to length 1, in fp32; `name` is theirs in error messages."""
    return unit_rows(features, name).float()  # normalise first: float64 can represent values that float32 cannot


def multimodal_features(image_features: Any, text_features: Any, *, equal_weights: bool = True) -> Tensor:
    """Features of an image and its mean caption: `m = concat(z, t)`, `t = mean_j encode_text(c_j)`.

    Reference: No Detail Left Behind, Algorithm 1, lines 4 to 8. Differs from it by: `z` and `t` are normalised before
    they are concatenated, so that both have equal weight for every scorer; not with `equal_weights=False`, where `t` keeps its
    length: the less the captions of an image agree, the less they count.

    `text_features` are means `(N, D)`, all captions `(N, M, D)`, or N matrices `(M_i, D)`. Returns float32 rows `(N, 2 D)` of
    norm 1, whose products are the mean of the cosine similarities of images and captions.
    """
    images = normalised(image_features, "image_features")
    if isinstance(text_features, Sequence):
        texts = torch.stack([torch.as_tensor(captions).float().mean(dim=0) for captions in text_features])
    else:
        texts = torch.as_tensor(text_features).float()
        texts = texts.mean(dim=1) if texts.ndim == 3 else texts
    unit = normalised(texts, "text_features")
    if len(unit) != len(images):
        raise ValueError(f"There are {len(images)} images and text features of {len(unit)}. Pass the same images.")
    if equal_weights:
        return torch.cat([images, unit.to(images.device)], dim=1) / 2**0.5
    return normalised(torch.cat([images, texts.float().to(images.device)], dim=1))


def nearest_neighbours(
    features: Any,
    k: int,
    *,
    rows: Any = None,
    block_size: int | None = None,
    device: str | torch.device | None = None,
    concepts: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The k most similar other images of each image, exact, without building the N x N matrix.

    Excludes the image itself by its index, not its copies. Equal similarities are in the order of the rows.

    Args:
        features (array or tensor of shape `(N, D)`): Features, not necessarily normalised.
        k: Neighbours per image, from 1 to N - 1; the paper's training bags use 200.
        rows (sequence of `Q` integers, *optional*): Only find the neighbours of these images, among all images.
        block_size: Images per block; by default as many as fit into 64 MiB of scores.
        device: Device of the products; by default that of the features.
        concepts (sequence of `N` integers, *optional*): From [`concept_numbers`]; neighbours are then the nearest image of each other concept.
    Returns:
        `tuple` of two tensors of shape `(N, k)` on the CPU (`(Q, k)` with `rows`): int64 rows of the neighbours, most
        similar first, and their float32 cosine similarities in [-1, 1].
    """
    unit = normalised(features)
    unit = unit if device is None else unit.to(device)
    return rank_rows(unit, k, rows=rows, block_size=block_size, concepts=concepts)


def rank_rows(
    unit: Tensor, k: int, *, rows: Any = None, block_size: int | None = None, concepts: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """[`nearest_neighbours`] of rows from [`normalised`], on their device."""
    count, most = len(unit), num_concepts(len(unit), concepts) - 1
    if not 1 <= k <= most:
        raise ValueError(f"k is {k}, but an image has 1 to {most} neighbours, one per other image or concept.")
    of_image = None if concepts is None else torch.tensor(concepts, device=unit.device)
    block_size = block_size or default_block_size(count)
    queries = torch.arange(count) if rows is None else torch.as_tensor(rows, dtype=torch.long)
    if queries.ndim != 1 or (len(queries) and not 0 <= int(queries.min()) <= int(queries.max()) < count):
        raise ValueError(f"rows must be a list of numbers in [0, {count}), the rows of the features.")
    indices = torch.empty(len(queries), k, dtype=torch.long)
    similarities = torch.empty(len(queries), k)
    buffer = torch.empty(min(block_size, max(len(queries), 1)), count, device=unit.device)
    for start in range(0, len(queries), block_size):
        own = queries[start : start + block_size].to(unit.device)
        block = unit[start : start + len(own)] if rows is None else unit[own]
        scores = torch.mm(block, unit.T, out=buffer[: len(own)])  # (block, N); all blocks use the same buffer
        scores[torch.arange(len(own), device=unit.device), own] = -torch.inf
        if of_image is not None:
            scores.masked_fill_(~_first_of_concepts(scores, of_image), -torch.inf)
            scores.masked_fill_(of_image[own][:, None] == of_image, -torch.inf)
        values, found = _top(scores, k)
        indices[start : start + len(own)], similarities[start : start + len(own)] = found.cpu(), values.cpu()
    return indices, similarities.clamp_(-1.0, 1.0)


def _first_of_concepts(scores: Tensor, concepts: Tensor) -> Tensor:
    """Mask `(B, N)` of the best image of each concept, the first of equal ones."""
    columns = torch.arange(scores.shape[1], device=scores.device, dtype=torch.float64)
    places = columns.expand(scores.shape).masked_fill(
        scores != best_of_concepts(scores, concepts)[:, concepts], torch.inf
    )
    return columns == -best_of_concepts(-places, concepts)[:, concepts]


def _top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores of each row and their columns; of equal scores, those in the first columns."""
    width = k + 1  # the additional one shows whether the last place is tied
    groups = scores.shape[1] // _GROUP
    if groups > 4 * width:
        # Without ties, the `width` largest values are in the `width` groups with the largest maxima. Ties follow below.
        whole = scores[:, : groups * _GROUP].view(len(scores), groups, _GROUP)
        chosen = whole.amax(dim=2).topk(width, dim=1, sorted=False).indices  # (block, width)
        inside = whole.gather(1, chosen[:, :, None].expand(-1, -1, _GROUP)).flatten(1)
        inside = torch.cat([inside, scores[:, groups * _GROUP :]], dim=1)
        values, places = inside.topk(width, dim=1)
        at = (places // _GROUP).clamp(max=width - 1)
        columns = torch.where(
            places < width * _GROUP,
            chosen.gather(1, at) * _GROUP + places % _GROUP,
            places - width * _GROUP + groups * _GROUP,
        )
    else:
        values, columns = scores.topk(width, dim=1)
    for row in torch.nonzero(values[:, k - 1] == values[:, k]).flatten().tolist():
        last = values[row, k - 1]
        above = int((values[row, :k] > last).sum())
        columns[row, above:k] = torch.nonzero(scores[row] == last).flatten()[: k - above]
    values, columns = values[:, :k], columns[:, :k]
    order = columns.argsort(dim=1)
    values, columns = values.gather(1, order), columns.gather(1, order)
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)
