"""Assignment of columns to rows with the largest sum of gains, solved exactly.

Legend: N rows, M columns.
"""

from typing import Any

import numpy as np

__all__ = ["best_assignment"]

# scipy.optimize.linear_sum_assignment reaches the same sums, but chooses another of several equally good assignments. They
# occur in albums with copies of an image, whose captions would change.


def best_assignment(gains: Any) -> np.ndarray:
    """Assign each row a column of its own so that the sum of the gains is the largest.

    The Hungarian method with potentials: rows are added one by one, each along the cheapest augmenting path, in
    O(N^2 M). Reference: Kuhn 1955, "The Hungarian Method for the Assignment Problem"; Jonker and Volgenant 1987.

    Args:
        gains (array of shape `(N, M)`): Gain of a row from a column; minus infinity where it is not allowed. N <= M.

    Returns:
        `numpy.ndarray` of shape `(N,)`: int64, the column of each row.
    """
    cost = -np.asarray(gains, dtype=np.float64)
    if cost.ndim != 2 or cost.shape[0] > cost.shape[1]:
        raise ValueError(f"gains have the shape {cost.shape}, but need at least one row and a column for each row.")
    if np.isnan(cost).any() or np.isneginf(cost).any():
        raise ValueError("gains hold NaN or plus infinity. Use minus infinity where a row cannot have a column.")
    rows, columns = cost.shape
    # Column 0 stands for the new row; rows count from 1, and 0 means no row.
    row_price, column_price = np.zeros(rows + 1), np.zeros(columns + 1)
    owner, came_from = np.zeros(columns + 1, dtype=np.int64), np.zeros(columns + 1, dtype=np.int64)
    for row in range(1, rows + 1):
        owner[0], at = row, 0
        slack = np.full(columns + 1, np.inf)
        seen = np.zeros(columns + 1, dtype=bool)
        while True:
            seen[at] = True
            step = cost[owner[at] - 1] - row_price[owner[at]] - column_price[1:]
            nearer: np.ndarray = np.flatnonzero(~seen[1:] & (step < slack[1:])) + 1
            slack[nearer], came_from[nearer] = step[nearer - 1], at
            following = int(np.argmin(np.where(seen, np.inf, slack)))
            if seen[following] or not np.isfinite(slack[following]):
                raise ValueError(
                    f"Row {row - 1} cannot get a column: other rows need all that it can have. Allow more columns."
                )
            least = slack[following]
            row_price[owner[seen]] += least
            column_price[seen] -= least
            slack[~seen] -= least
            at = following
            if owner[at] == 0:
                break
        while at:
            owner[at], at = owner[came_from[at]], int(came_from[at])
    found = np.empty(rows, dtype=np.int64)
    taken = np.flatnonzero(owner[1:])
    found[owner[1:][taken] - 1] = taken
    return found
