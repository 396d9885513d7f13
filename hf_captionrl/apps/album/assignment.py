"""Steps 3 and 4 of an album: scores of candidates, and the choice of one per image so that texts differ and each finds its image.

Legend: M images, N captions, S candidates of all images, G most candidates of one image, k neighbours per image, B images of a
block, E pairs of an image and a text that it may have, D features.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components, maximum_bipartite_matching, reverse_cuthill_mckee
from torch import Tensor

from hf_captionrl.retrieval.ranking import duplicate_images, ranks_from_scores, tie_copies, unit_rows

# --- Scores: similarities of candidates with their image and the images that it may be confused with, in blocks -----

_BLOCK_FLOATS = 2**23  # gathered features or scores per block: 32 MiB
Features = Callable[[np.ndarray], Any]
"""Features `(N, D)` of some captions, by their rows; those of millions of candidates do not fit into memory."""


class CandidateScores(NamedTuple):
    """Scores of every candidate, from which captions are chosen."""

    margin: np.ndarray  # (S,): similarity to its image minus the largest to another image; the first if there is none
    rank: np.ndarray  # (S,): rank of its image among the images compared, 1 = best; ties count against it


def score_candidates(
    features: Features, starts: np.ndarray, images: Tensor, neighbours: Tensor | None = None, progress: Any = None
) -> CandidateScores:
    """Compare every candidate with its image and others: `starts` `(M + 1,)`, `images` `(M, D)`, `neighbours` `(M, k)` or all."""
    margin: np.ndarray = np.empty(int(starts[-1]), np.float32)
    rank: np.ndarray = np.empty(int(starts[-1]), np.int32)
    for rows, scores in _blocks(features, starts, images, neighbours, progress):
        rank[rows] = ranks_from_scores(scores, torch.zeros(len(scores), dtype=torch.long)).numpy()
        margin[rows] = _margins(scores).numpy()
    return CandidateScores(margin, rank)


def confusions_of(
    features: Features, starts: np.ndarray, images: Tensor, neighbours: Tensor | None = None
) -> list[tuple[tuple[int, ...], float]]:
    """For some captions, rows of the other images that each fits at least as well, best first, and its margin."""
    owner = np.arange(len(images)).repeat(np.diff(starts))
    found: list[tuple[tuple[int, ...], float]] = []
    for rows, scores in _blocks(features, starts, images, neighbours, None):
        others = scores[:, 1:]
        better = torch.nonzero(others >= scores[:, :1])
        better = better[others[better[:, 0], better[:, 1]].argsort(descending=True, stable=True)]
        mine: list[list[int]] = [[] for _ in rows]
        for row, column in better.tolist():
            mine[row].append(column)
        for image, columns, margin in zip(owner[rows].tolist(), mine, _margins(scores).tolist(), strict=True):
            if neighbours is not None:
                columns = neighbours[image, columns].tolist()
            else:
                columns = [column + (column >= image) for column in columns]
            found.append((tuple(columns), margin))
    return found


def _margins(scores: Tensor) -> Tensor:
    return scores[:, 0] - scores[:, 1:].amax(1) if scores.shape[1] > 1 else scores[:, 0]


def _blocks(
    features: Features, starts: np.ndarray, images: Tensor, neighbours: Tensor | None, progress: Any
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Rows of candidates and their scores `(rows, 1 + others)`: the target first, equal images tied."""
    number = len(images)
    same = duplicate_images(images)
    most = int(np.diff(starts).max(initial=1))
    width = number * most if neighbours is None else (1 + neighbours.shape[1]) * max(images.shape[1], most)
    size = max(1, _BLOCK_FLOATS // max(width, 1))
    for first in range(0, number, size):
        block = np.arange(first, min(first + size, number))
        rows = np.arange(starts[block[0]], starts[block[-1] + 1])
        counts = np.diff(starts[first : block[-1] + 2])
        text = torch.as_tensor(features(rows)).to(images)  # (rows, D)
        if neighbours is None:
            scores = tie_copies(text @ images.T, same)  # (rows, M)
            # Move the target to the front; the others keep their order.
            owner = torch.from_numpy(block.repeat(counts))[:, None]
            kept = torch.ones_like(scores, dtype=torch.bool).scatter_(1, owner, False)
            others = scores[kept].view(len(scores), number - 1)
            yield rows, torch.cat([scores.gather(1, owner), others], 1).cpu()
        else:
            own = torch.from_numpy(block)
            columns = torch.cat([own[:, None], neighbours[own]], 1)  # (B, 1 + k)
            place = torch.from_numpy(np.arange(counts.max()) < counts[:, None])  # (B, G)
            padded = text.new_zeros(*place.shape, text.shape[1])
            padded[place] = text
            scores = torch.bmm(padded, images[columns].transpose(1, 2)).cpu()  # (B, G, 1 + k)
            equal = same[columns] == same[columns[:, :1]]  # (B, 1 + k)
            if int(equal.sum()) > len(block):
                scores = torch.where(equal[:, None], scores[:, :, :1], scores)
            yield rows, scores[place]
        if progress is not None:
            progress(len(block))


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
    """The candidate of each image, and how good the choice is."""

    chosen: np.ndarray  # (M,): row of the candidate
    has_own: np.ndarray  # (M,): whether the text was assigned to this image alone
    gap: int  # upper bound on how many more images could have a distinct caption; 0 if no component was split
    rank_gap: int  # the same for images that this caption ranks first


def choose_candidates(
    starts: np.ndarray,
    texts: np.ndarray,
    scores: CandidateScores,
    *,
    allowed: np.ndarray | None = None,
    max_component: int = 2000,
    exclusive: bool = True,
) -> Choice:
    r"""Choose a candidate for each image.

    An image whose best text no other image may have takes it, which costs no other image anything; the remaining images fall
    into components that share no text, and each is solved exactly. A component of more than `max_component` images is split
    into parts that are solved one after the other; maximum matchings, which ignore margins, give an upper bound on the loss.

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
    if not exclusive:
        return Choice(chosen, has_own, 0, 0)
    rows = np.flatnonzero(fits & (texts >= 0))
    columns = [rows, owner[rows], texts[rows], scores.rank[rows] == 1, scores.margin[rows]]
    # E pairs that images may choose.
    pairs: Any = np.rec.fromarrays(columns, names="row,image,text,first,margin")  # type: ignore[call-overload]
    pairs = pairs[np.lexsort((-pairs.row, pairs.margin, pairs.first, pairs.text, pairs.image))]
    pairs = pairs[_is_last(pairs.image, pairs.text)]  # the best candidate of each pair of image and text
    pairs, taken = _take_uncontested(pairs, number)
    chosen[owner[taken]], has_own[owner[taken]] = taken, True
    gap = rank_gap = 0
    for component in _components(pairs):
        found, cut = _solve(pairs, component, max_component)
        chosen[owner[found]], has_own[owner[found]] = found, True
        gap, rank_gap = gap + cut[0], rank_gap + cut[1]
    return Choice(chosen, has_own, gap, rank_gap)


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


def _solve(pairs: Any, component: np.ndarray, max_component: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Rows of the candidates for the images of a component, and bounds on the texts and ranks that splitting may have lost."""
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
    chosen = pairs[taken]
    if len(component) <= max_component:
        return chosen.row, (0, 0)
    inside = pairs[np.isin(pairs.image, component)]
    return chosen.row, (_most(inside) - len(taken), _most(inside[inside.first]) - int(chosen.first.sum()))


def _most(pairs: Any) -> int:
    """Largest number of images that can have distinct captions."""
    if not len(pairs):
        return 0
    _, image = np.unique(pairs.image, return_inverse=True)
    _, text = np.unique(pairs.text, return_inverse=True)
    graph = coo_array((np.ones(len(image), np.int8), (image, text))).tocsr()
    return int((maximum_bipartite_matching(graph, perm_type="column") >= 0).sum())


# --- One distinct caption per image ----------------------------------------------------------------------------------


def same_text(caption: str) -> str:
    """A caption without case, extra blanks and a final full stop, to compare texts."""
    return " ".join(caption.casefold().split()).rstrip(" .")


def distinct_captions(
    candidates: Sequence[Sequence[str]],
    text_features: Any,
    image_features: Any,
    *,
    neighbours: Tensor | None = None,
    progress: Any = None,
    **settings: Any,
) -> tuple[list[str], Choice]:
    r"""Choose one candidate for each image so that the texts differ and each retrieves its target.

    The margin of a caption t of image i is `m_i(t) = s(t, i) - max_{j != i} s(t, j)`; it is positive exactly if the rank
    is 1. The choice is the exact optimum of, in this order:

    1. the number of different texts, each used by one image,
    2. the number of these texts with rank 1,
    3. the sum of their margins.

    See [`choose_candidates`], which gets the settings. An image for which no text is left gets its candidate with the largest
    margin. This text is blank or belongs to another image as well. In an album of one image the similarity replaces the margin.

    Shapes: `text_features` `(S, D)` or a function that computes them, `image_features` `(M, D)`, `neighbours` `(M, k)`.
    """
    images = unit_rows(image_features, "image_features").float()
    features: Features = text_features
    if not callable(text_features):
        features = unit_rows(text_features, "text_features").float().__getitem__
    starts = np.cumsum([0, *map(len, candidates)])
    flat = [text for texts in candidates for text in texts]
    keys = [same_text(text) for text in flat]
    number_of = {"": -1}
    for key in keys:
        number_of.setdefault(key, len(number_of) - 1)
    scores = score_candidates(features, starts, images, neighbours, progress)
    choice = choose_candidates(starts, np.array([number_of[key] for key in keys], np.int64), scores, **settings)
    return [flat[i] for i in choice.chosen.tolist()], choice
