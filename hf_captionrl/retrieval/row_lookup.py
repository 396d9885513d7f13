"""Rows by id in 16 bytes per row: sorted 64-bit hashes, and a comparison of the ids themselves.

Legend: N ids, M names that are looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from hf_captionrl.retrieval.hash_index import HashIndex, key_hashes

__all__ = ["RowLookup"]

_AT_ONCE = 4096


class RowLookup(Set[str]):
    """The set of the ids of a column, and their rows. The index is made on first use."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self.rows([name])[0] >= 0)

    @classmethod
    def _from_iterable(cls, names: Iterable[Any]) -> set[Any]:  # type: ignore[override]
        return set(names)  # the result of `&`, `-`, ...

    @cached_property
    def _index(self) -> HashIndex:
        return HashIndex(key_hashes(self.ids))

    def _at(self, rows: np.ndarray) -> np.ndarray:
        """Ids of some rows, an array of objects."""
        listed = rows.tolist()
        names = [self.ids[row] for row in listed] if isinstance(self.ids, list | tuple) else self.ids[listed]  # type: ignore[call-overload]
        return np.array(names, dtype=object)

    def rows(self, names: Sequence[str]) -> np.ndarray:
        """First row of each name, int64 `(M,)`; -1 for unknown names."""
        found: np.ndarray = np.empty(len(names), np.int64)
        given = iter(names)
        for start in range(0, len(names), _AT_ONCE):
            part = np.array(list(islice(given, _AT_ONCE)), dtype=object)
            found[start : start + len(part)] = self._find(part)
        return found

    def _find(self, names: np.ndarray) -> np.ndarray:
        def is_same(asked: np.ndarray, rows: np.ndarray) -> np.ndarray:
            return names[asked] == self._at(rows)

        return self._index.find(key_hashes(names), is_same)

    def missing(self, names: Sequence[str]) -> list[str]:
        """The names that are not ids, in their order."""
        return [name for name, row in zip(names, self.rows(names), strict=True) if row < 0]

    def first_rows(self) -> np.ndarray:
        """For each row the first row with the same id, int64 `(N,)`."""
        order, ordered = self._index.order, self._index.sorted
        first = np.arange(len(order))
        is_repeat: np.ndarray = np.zeros(len(order), bool)
        is_repeat[1:] = ordered[1:] == ordered[:-1]
        if not is_repeat.any():
            return first
        begin = np.maximum.accumulate(np.where(is_repeat, 0, np.arange(len(order))))  # of each run of equal hashes
        repeats = np.flatnonzero(is_repeat)
        others: dict[int, dict[str, int]] = {}  # ids whose hash is that of another id
        for start in range(0, len(repeats), _AT_ONCE):
            places = repeats[start : start + _AT_ONCE]
            rows, heads = order[places], order[begin[places]]
            names = self._at(rows)
            same = names == self._at(heads)
            first[rows[same]] = heads[same]
            for row, head, name in zip(rows[~same], heads[~same], names[~same], strict=True):
                first[row] = others.setdefault(int(head), {}).setdefault(name, int(row))
        return first
