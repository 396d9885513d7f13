"""Assignment of columns to rows with the largest sum of gains: exact, sparse, in integers.

Legend: N rows, E allowed pairs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["best_assignment"]

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
