"""Choice of one candidate per image so that texts differ and each retrieves its image.

Legend: M images, S candidates of all images, E pairs of an image and a text that it may have.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components, maximum_bipartite_matching, reverse_cuthill_mckee

from hf_captionrl.apps.album.candidates import CandidateScores

# --- Assignment of columns to rows with the largest sum of gains: exact, sparse, in integers -------------------------
# Legend: N rows, E allowed pairs.

# Not scipy's linear_sum_assignment: it computes in float64, which breaks ties by rounding and gave other captions in 14 of
# 600 albums with copies. Integers compare ties exactly.


def best_assignment(gains: Sequence[dict[int, int]], without: int) -> list[int | None]:
    """Assign each row a different column so that the sum of the gains is the largest.

    The Hungarian method with potentials, one row at a time along the cheapest augmenting path, found by Dijkstra's
    algorithm over the allowed pairs: O(N E log E). Gains are integers, so that sums of very different magnitudes are exact.
    Reference: Kuhn 1955, "The Hungarian Method for the Assignment Problem"; Jonker and Volgenant 1987.

    `without` is the gain of a row that stays without a column.
    """
    rows = len(gains)
    # Column -1 - row stands for the row staying without a column.
    costs = [{**{c: -g for c, g in mine.items()}, -1 - row: -without} for row, mine in enumerate(gains)]
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


# --- Choice of one candidate per image so that texts differ and each retrieves its image -----------------------------

_MARGIN_BITS = 40
"""Margins are compared as integer multiples of 2^-40, which is finer than the resolution of fp32."""


@dataclass(frozen=True)
class Choice:
    """The candidate of each image, and how good the choice is."""

    chosen: np.ndarray  # (M,): row of the candidate
    has_own: np.ndarray  # (M,): whether the text was assigned to this image alone
    contested: int  # number of images that had to compete for texts
    gap: int  # upper bound on how many more images could have a distinct caption; 0 if no component was split
    rank_gap: int  # the same for images that this caption ranks first


@dataclass
class _Pairs:
    """Pairs that an image may choose, E of each: row of the candidate, its image, its text, rank 1 or not, margin."""

    row: np.ndarray
    image: np.ndarray
    text: np.ndarray
    first: np.ndarray
    margin: np.ndarray

    def keep(self, mask: np.ndarray) -> _Pairs:
        return _Pairs(*(getattr(self, name)[mask] for name in ("row", "image", "text", "first", "margin")))


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

    The best choice has, in this order, the largest number of images with a distinct caption, of these with rank 1, and sum of
    their margins. Images compete only for texts that several of them may have. An image whose best text no other image
    may have takes it, which costs no other image anything; the remaining images fall into components that share no text,
    and each is solved exactly. A component of more than `max_component` images is split into parts that are
    solved one after the other; maximum matchings, which ignore margins, give an upper bound on the loss.

    Shapes: `starts` `(M + 1,)`. Equal `texts` have equal numbers, blank ones -1; candidates not `allowed` are used
    only for an image without others.
    """
    number = len(starts) - 1
    owner = np.arange(number).repeat(np.diff(starts))
    fits = np.ones(len(texts), bool) if allowed is None else allowed.copy()
    has_any = np.bincount(owner[fits & (texts >= 0)], minlength=number) > 0
    fits |= ~has_any[owner]
    chosen = _fallback(owner, texts, scores, fits, number)
    has_own: np.ndarray = np.zeros(number, bool)
    if not exclusive:
        return Choice(chosen, has_own, 0, 0, 0)
    pairs = _best_pairs(owner, texts, scores, fits)
    pairs, taken = _take_uncontested(pairs, number)
    chosen[owner[taken]], has_own[owner[taken]] = taken, True
    contested = np.unique(pairs.image)
    gaps = [0, 0]
    for component in _components(pairs, contested):
        found, cut = _solve(pairs, component, max_component)
        chosen[owner[found]], has_own[owner[found]] = found, True
        gaps = [total + part for total, part in zip(gaps, cut, strict=True)]
    return Choice(chosen, has_own, len(contested), *gaps)


def _fallback(
    owner: np.ndarray, texts: np.ndarray, scores: CandidateScores, fits: np.ndarray, number: int
) -> np.ndarray:
    """The candidate with the largest margin of each image, for images that get no distinct caption."""
    order = np.lexsort((-np.arange(len(owner)), scores.margin, texts >= 0, fits, owner))
    last = np.searchsorted(owner[order], np.arange(number), side="right") - 1
    return order[last]


def _best_pairs(owner: np.ndarray, texts: np.ndarray, scores: CandidateScores, fits: np.ndarray) -> _Pairs:
    """The best candidate of each pair of image and text."""
    rows = np.flatnonzero(fits & (texts >= 0))
    pairs = _Pairs(rows, owner[rows], texts[rows], scores.rank[rows] == 1, scores.margin[rows])
    order = np.lexsort((-pairs.row, pairs.margin, pairs.first, pairs.text, pairs.image))
    pairs = pairs.keep(order)
    new: np.ndarray = np.ones(len(order), bool)
    new[:-1] = (pairs.image[1:] != pairs.image[:-1]) | (pairs.text[1:] != pairs.text[:-1])
    return pairs.keep(new)


def _take_uncontested(pairs: _Pairs, number: int) -> tuple[_Pairs, np.ndarray]:
    """Remove images that can have their best text at no cost to others, and pairs worse than a text no other image may have."""
    taken: list[np.ndarray] = []
    while len(pairs.row):
        _, text, holders = np.unique(pairs.text, return_inverse=True, return_counts=True)
        private = holders[text] == 1
        # Best pair of each image: rank, margin, and a private text before a shared one.
        order = np.lexsort((-pairs.row, private, pairs.margin, pairs.first, pairs.image))
        is_last: np.ndarray = np.ones(len(order), bool)
        is_last[:-1] = pairs.image[order][1:] != pairs.image[order][:-1]
        best = order[is_last]
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
        pairs = pairs.keep(keep)
    return pairs, np.concatenate(taken) if taken else np.empty(0, np.int64)


def _components(pairs: _Pairs, images: np.ndarray) -> list[np.ndarray]:
    """Images that share texts directly or through others; neighbours in a component are close in its order."""
    if not len(images):
        return []
    place: np.ndarray = np.asarray(np.searchsorted(images, pairs.image))
    _, text = np.unique(pairs.text, return_inverse=True)
    size = len(images) + int(text.max()) + 1
    graph = coo_array((np.ones(len(place), np.int8), (place, len(images) + text)), shape=(size, size)).tocsr()
    _, label = connected_components(graph, directed=False)
    order: np.ndarray = np.asarray(reverse_cuthill_mckee((graph + graph.T).tocsr(), symmetric_mode=True))
    order = order[order < len(images)]
    order = order[np.argsort(label[order], kind="stable")]
    bounds: np.ndarray = np.flatnonzero(np.diff(label[order])) + 1
    return [images[part] for part in np.split(order, bounds)]


def _solve(pairs: _Pairs, component: np.ndarray, max_component: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Rows of the candidates for the images of a component, and bounds on the texts and ranks that splitting may have lost."""
    edges = _edges(pairs, component)
    one_margin = 1 << _MARGIN_BITS
    one_first = (4 * len(component) + 1) * one_margin
    one_text = (4 * len(component) + 1) * one_first
    gains = [
        {text: one_text + first * one_first + round(margin * one_margin) for text, (_, first, margin) in mine.items()}
        for mine in edges
    ]
    free: set[int] = {text for mine in gains for text in mine}
    taken: dict[int, int] = {}
    for start in range(0, len(component), max_component):
        part = range(start, min(start + max_component, len(component)))
        left = [{text: gain for text, gain in gains[i].items() if text in free} for i in part]
        for i, text in zip(part, best_assignment(left, without=0), strict=True):
            if text is not None:
                taken[i] = text
                free.discard(text)
    rows = np.asarray([edges[i][text][0] for i, text in taken.items()], dtype=np.int64)
    if len(component) <= max_component:
        return rows, (0, 0)
    first = sum(edges[i][text][1] for i, text in taken.items())
    inside = np.isin(pairs.image, component)
    return rows, (_most(pairs.keep(inside)) - len(taken), _most(pairs.keep(inside & pairs.first)) - first)


def _most(pairs: _Pairs) -> int:
    """Largest number of images that can have distinct captions."""
    if not len(pairs.row):
        return 0
    _, image = np.unique(pairs.image, return_inverse=True)
    _, text = np.unique(pairs.text, return_inverse=True)
    graph = coo_array((np.ones(len(image), np.int8), (image, text))).tocsr()
    return int((maximum_bipartite_matching(graph, perm_type="column") >= 0).sum())


def _edges(pairs: _Pairs, component: np.ndarray) -> list[dict[int, tuple[int, bool, float]]]:
    """For each image of a component, its texts: row of the candidate, whether its rank is 1, margin."""
    found: Sequence[dict[int, tuple[int, bool, float]]] = [{} for _ in component]
    first: np.ndarray = np.asarray(np.searchsorted(pairs.image, component))
    last: np.ndarray = np.asarray(np.searchsorted(pairs.image, component, side="right"))
    for mine, low, high in zip(found, first.tolist(), last.tolist(), strict=True):
        for at in range(low, high):
            mine[int(pairs.text[at])] = (int(pairs.row[at]), bool(pairs.first[at]), float(pairs.margin[at]))
    return list(found)
