"""Steps 3 and 4 of an album: scores of candidates, and the choice of one per image so that texts differ and each finds its image.

Legend: M images, S candidates of all images, B candidates of a block, E pairs of an image and a text that it may have, D features.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components, reverse_cuthill_mckee
from torch import Tensor

from hf_captionrl.retrieval.ranking import duplicate_images, tie_copies, unit_rows

# --- Scores: similarities of candidates with their image and with all others, in blocks ------------------------------

_BLOCK_FLOATS = 2**23  # scores per block: 32 MiB
_MOST_CONFUSED = 5  # images that a caption is listed to fit, too
Features = Callable[[np.ndarray], Any]
"""Features `(N, D)` of some captions, by their rows; those of millions of candidates do not fit into memory."""


class CandidateScores(NamedTuple):
    """Scores of every candidate, from which captions are chosen."""

    margin: np.ndarray  # (S,): similarity to its image minus the largest to another image; the first if there is none
    rank: np.ndarray  # (S,): rank of its image among all images, 1 = best; ties count against it


def score_candidates(features: Features, starts: np.ndarray, images: Tensor) -> CandidateScores:
    """Compare every candidate with all images: `starts` `(M + 1,)`, `images` `(M, D)`."""
    blocks = [
        (_margins(target, others), 1 + (others >= target[:, None]).sum(1))
        for _, target, others in _blocks(features, starts, images)
    ]
    margins, ranks = zip(*blocks, strict=True)
    return CandidateScores(torch.cat(margins).numpy(), torch.cat(ranks).numpy())


def confusions_of(features: Features, starts: np.ndarray, images: Tensor) -> list[tuple[int, float, tuple[int, ...]]]:
    """For some captions: rank, margin, and the first rows of the other images that each fits at least as well, best first."""
    found: list[tuple[int, float, tuple[int, ...]]] = []
    for rows, own, others in _blocks(features, starts, images):
        better = torch.nonzero(others >= own[:, None])
        better = better[others[better[:, 0], better[:, 1]].argsort(descending=True, stable=True)]
        columns: list[list[int]] = [[] for _ in rows]
        for row, column in better.tolist():
            columns[row].append(column)
        for listed, margin in zip(columns, _margins(own, others).tolist(), strict=True):
            found.append((1 + len(listed), margin, tuple(listed[:_MOST_CONFUSED])))
    return found


def _margins(own: Tensor, others: Tensor) -> Tensor:
    return own - others.amax(1) if others.shape[1] > 1 else own


def _blocks(features: Features, starts: np.ndarray, images: Tensor) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
    """Rows of candidates, their similarity to their image `(B,)`, and to all others `(B, M)`, -inf at their own; equal images tie."""
    number = len(images)
    same = duplicate_images(images)
    owner = np.arange(number).repeat(np.diff(starts))
    size = max(1, _BLOCK_FLOATS // (number * int(np.diff(starts).max(initial=1))))
    for first in range(0, number, size):
        last = min(first + size, number)
        rows = np.arange(starts[first], starts[last])
        text = torch.as_tensor(features(rows)).to(images)  # (B, D)
        scores = tie_copies(text @ images.T, same).cpu()  # (B, M)
        column = torch.from_numpy(owner[rows])[:, None]
        yield rows, scores.gather(1, column)[:, 0], scores.scatter(1, column, -torch.inf)


# --- Assignment of columns to rows with the largest sum of gains: exact, sparse, in integers -------------------------
# Not scipy's linear_sum_assignment: it computes in float64, which breaks ties by rounding and gave other captions in 14 of
# 600 albums with copies. Integers compare ties exactly.


def best_assignment(gains: Sequence[dict[int, int]]) -> list[int | None]:
    """Assign each row a different column, or none with a gain of 0, so that the sum of the gains is the largest.

    The Hungarian method with potentials, one row at a time along the cheapest augmenting path, found by Dijkstra's
    algorithm over the allowed pairs: O(N E log E). Gains are integers, so that sums of very different magnitudes are exact.
    Reference: Kuhn 1955, "The Hungarian Method for the Assignment Problem"; Jonker and Volgenant 1987.
    """
    rows = len(gains)
    # Column -1 - row stands for the row staying without a column.
    costs = [{**{c: -g for c, g in mine.items()}, -1 - row: 0} for row, mine in enumerate(gains)]
    row_price = [0] * rows
    column_price: dict[int, int] = {}
    owner: dict[int, int] = {}
    column_of = [-1 - row for row in range(rows)]
    for new in range(rows):
        distance: dict[int, int] = {}
        came_from: dict[int, int] = {}  # the row from which a column was reached
        done: dict[int, int] = {}
        heap: list[tuple[int, int]] = []
        row, base = new, 0
        while True:
            for column, cost in costs[row].items():
                if column in done:
                    continue
                found = base + cost - row_price[row] - column_price.get(column, 0)
                if column not in distance or found < distance[column]:
                    distance[column], came_from[column] = found, row
                    heapq.heappush(heap, (found, column))
            base, column = heapq.heappop(heap)
            while column in done:
                base, column = heapq.heappop(heap)
            if column not in owner:
                break
            done[column] = base
            row = owner[column]
        for reached, at in done.items():
            column_price[reached] = column_price.get(reached, 0) + at - base
            row_price[owner[reached]] += base - at
        row_price[new] += base
        while True:
            row = came_from[column]
            owner[column] = row
            column_of[row], column = column, column_of[row]
            if row == new:
                break
    return [column if column >= 0 else None for column in column_of]


# --- Choice of one candidate per image -------------------------------------------------------------------------------

_MARGIN_BITS = 40
"""Margins are compared as integer multiples of 2^-40, which is finer than the resolution of fp32."""


class Choice(NamedTuple):
    """The candidate of each image."""

    chosen: np.ndarray  # (M,): row of the candidate
    has_own: np.ndarray  # (M,): whether the text was assigned to this image alone


def choose_candidates(
    starts: np.ndarray,
    texts: np.ndarray,
    scores: CandidateScores,
    *,
    allowed: np.ndarray | None = None,
    max_component: int = 2000,
) -> Choice:
    r"""Choose a candidate for each image.

    An image whose best text no other image may have takes it, which costs no other image anything; the remaining images fall
    into components that share no text, and each is solved exactly. A component of more than `max_component` images is split
    into parts that are solved one after the other, each without the texts that earlier parts have taken.

    Shapes: `starts` `(M + 1,)`. Equal `texts` have equal numbers, blank ones -1; candidates not `allowed` are used
    only for an image without others.
    """
    number = len(starts) - 1
    owner = np.arange(number).repeat(np.diff(starts))
    fits = np.ones(len(texts), bool) if allowed is None else allowed.copy()
    fits |= (np.bincount(owner[fits & (texts >= 0)], minlength=number) == 0)[owner]
    # The candidate with the largest margin of each image, for images that get no distinct caption.
    order = np.lexsort((-np.arange(len(owner)), scores.margin, texts >= 0, fits, owner))
    chosen = order[np.searchsorted(owner[order], np.arange(number), side="right") - 1]
    has_own: np.ndarray = np.zeros(number, bool)
    rows = np.flatnonzero(fits & (texts >= 0))
    columns = [rows, owner[rows], texts[rows], scores.rank[rows] == 1, scores.margin[rows]]
    # E pairs that images may choose.
    pairs: Any = np.rec.fromarrays(columns, names="row,image,text,first,margin")  # type: ignore[call-overload]
    pairs = pairs[np.lexsort((-pairs.row, pairs.margin, pairs.first, pairs.text, pairs.image))]
    pairs = pairs[_is_last(pairs.image, pairs.text)]  # the best candidate of each pair of image and text
    pairs, taken = _take_uncontested(pairs, number)
    chosen[owner[taken]], has_own[owner[taken]] = taken, True
    for component in _components(pairs):
        rows = _solve(pairs, component, max_component)
        chosen[owner[rows]], has_own[owner[rows]] = rows, True
    return Choice(chosen, has_own)


def _is_last(*columns: np.ndarray) -> np.ndarray:
    """Mask of the rows whose successor has other values; equal rows are neighbours."""
    last: np.ndarray = np.ones(len(columns[0]), bool)
    last[:-1] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return last


def _take_uncontested(pairs: Any, number: int) -> tuple[Any, np.ndarray]:
    """Remove images that can have their best text at no cost to others, and pairs worse than a text no other image may have."""
    taken: list[np.ndarray] = [np.empty(0, np.int64)]
    while len(pairs):
        _, text, holders = np.unique(pairs.text, return_inverse=True, return_counts=True)
        private = holders[text] == 1
        # Best pair of each image: rank, margin, and a private text before a shared one.
        order = np.lexsort((-pairs.row, private, pairs.margin, pairs.first, pairs.image))
        best = order[_is_last(pairs.image[order])]
        finished = best[private[best]]
        taken.append(pairs.row[finished])
        done: np.ndarray = np.zeros(number, bool)
        done[pairs.image[finished]] = True
        # Of an image's private texts only the best is needed, and nothing below it.
        value = np.lexsort((-pairs.row, private, pairs.margin, pairs.first))
        height: np.ndarray = np.empty(len(value), np.int64)
        height[value] = np.arange(len(value))
        floor = np.full(number, -1)
        np.maximum.at(floor, pairs.image[private], height[private])
        keep = ~done[pairs.image] & (height >= floor[pairs.image])
        if keep.all():
            break
        pairs = pairs[keep]
    return pairs, np.concatenate(taken)


def _components(pairs: Any) -> list[np.ndarray]:
    """Images that share texts directly or through others; neighbours in a component are close in its order."""
    if not len(pairs):
        return []
    images, place = np.unique(pairs.image, return_inverse=True)
    _, text = np.unique(pairs.text, return_inverse=True)
    size = len(images) + int(text.max()) + 1
    graph = coo_array((np.ones(len(place), np.int8), (place, len(images) + text)), shape=(size, size)).tocsr()
    _, label = connected_components(graph, directed=False)
    order: np.ndarray = np.asarray(reverse_cuthill_mckee((graph + graph.T).tocsr(), symmetric_mode=True))
    order = order[order < len(images)]
    order = order[np.argsort(label[order], kind="stable")]
    bounds: np.ndarray = np.flatnonzero(np.diff(label[order])) + 1
    return [images[part] for part in np.split(order, bounds)]


def _solve(pairs: Any, component: np.ndarray, max_component: int) -> np.ndarray:
    """Rows of the candidates for the images of a component."""
    one_margin = 1 << _MARGIN_BITS
    one_first = (4 * len(component) + 1) * one_margin
    one_text = (4 * len(component) + 1) * one_first
    first: np.ndarray = np.asarray(np.searchsorted(pairs.image, component))
    last: np.ndarray = np.asarray(np.searchsorted(pairs.image, component, side="right"))
    place: list[dict[int, int]] = []  # of each image, its pairs by text
    gains: list[dict[int, int]] = []
    for low, high in zip(first.tolist(), last.tolist(), strict=True):
        mine = pairs[low:high]
        place.append(dict(zip(mine.text.tolist(), range(low, high), strict=True)))
        values = zip(mine.text.tolist(), mine.first.tolist(), mine.margin.tolist(), strict=True)
        gains.append({text: one_text + one * one_first + round(margin * one_margin) for text, one, margin in values})
    free: set[int] = {text for mine in gains for text in mine}
    taken: list[int] = []
    for start in range(0, len(component), max_component):
        part = range(start, min(start + max_component, len(component)))
        left = [{text: gain for text, gain in gains[i].items() if text in free} for i in part]
        for i, text in zip(part, best_assignment(left), strict=True):
            if text is not None:
                taken.append(place[i][text])
                free.discard(text)
    return pairs.row[taken]


# --- One distinct caption per image ----------------------------------------------------------------------------------


def same_text(caption: str) -> str:
    """A caption without case, extra blanks and a final full stop, to compare texts."""
    return " ".join(caption.casefold().split()).rstrip(" .")


def distinct_captions(
    candidates: Sequence[Sequence[str]],
    features: Features,
    image_features: Any,
    *,
    allowed: np.ndarray | None = None,
) -> list[str]:
    r"""Choose one candidate for each image so that the texts differ and each retrieves its target.

    The margin of a caption t of image i is `m_i(t) = s(t, i) - max_{j != i} s(t, j)`; it is positive exactly if the rank
    is 1. The choice is the exact optimum of, in this order:

    1. the number of different texts, each used by one image,
    2. the number of these texts with rank 1,
    3. the sum of their margins.

    See [`choose_candidates`]. An image for which no text is left gets its candidate with the largest margin. This text is blank
    or belongs to another image as well. In an album of one image the similarity replaces the margin.

    Shapes: `image_features` `(M, D)`, `allowed` `(S,)`.
    """
    starts = np.cumsum([0, *map(len, candidates)])
    flat = [text for texts in candidates for text in texts]
    keys = [same_text(text) for text in flat]
    number_of = {"": -1}
    for key in keys:
        number_of.setdefault(key, len(number_of) - 1)
    scores = score_candidates(features, starts, unit_rows(image_features, "image_features").float())
    texts = np.array([number_of[key] for key in keys], np.int64)
    return [flat[i] for i in choose_candidates(starts, texts, scores, allowed=allowed).chosen.tolist()]
