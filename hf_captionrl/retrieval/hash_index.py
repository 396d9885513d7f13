"""Digests of keys, and an index of hashes in 16 bytes per row.

Legend: N rows, M hashes that are looked up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from itertools import islice

import numpy as np

__all__ = ["HashIndex", "key_digest", "key_digests", "key_hashes"]

_AT_ONCE = 4096


def key_digest(key: str) -> bytes:
    """16 bytes that represent a key: BLAKE2b of its UTF-8 encoding."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def key_digests(keys: Collection[str]) -> np.ndarray:
    """Digests of N keys, uint64 `(N, 2)`."""
    found: np.ndarray = np.empty((len(keys), 2), "<u8")
    given = iter(keys)
    for start in range(0, len(keys), _AT_ONCE):
        part = b"".join(map(key_digest, islice(given, _AT_ONCE)))
        found[start : start + _AT_ONCE] = np.frombuffer(part, "<u8").reshape(-1, 2)
    return found


def key_hashes(keys: Collection[str]) -> np.ndarray:
    """First halves of the digests of N keys, uint64 `(N,)`."""
    found: np.ndarray = np.empty(len(keys), "<u8")
    given = iter(keys)
    for start in range(0, len(keys), _AT_ONCE):
        found[start : start + _AT_ONCE] = key_digests(list(islice(given, _AT_ONCE)))[:, 0]
    return found


class HashIndex:
    """Rows by 64-bit hash; the caller compares the values that the hashes represent.

    `hashes` `(N,)` are uint64.
    """

    def __init__(self, hashes: np.ndarray) -> None:
        self.order = np.argsort(hashes, kind="stable")  # (N,) rows; those with equal hashes ascend
        self.sorted = hashes[self.order]  # (N,)

    def find(self, hashes: np.ndarray, is_same: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        """For each of M hashes, the first row that represents the same value, `(M,)`; -1 if there is none.

        `hashes` `(M,)` are uint64; `is_same` gets positions in them and rows.
        """
        found: np.ndarray = np.full(len(hashes), -1, np.int64)
        asked: np.ndarray = np.arange(len(hashes))
        place: np.ndarray = np.asarray(np.searchsorted(self.sorted, hashes))
        while True:
            inside = place < len(self.sorted)
            inside[inside] = self.sorted[place[inside]] == hashes[asked[inside]]
            asked, place = asked[inside], place[inside]
            if not len(asked):
                return found
            rows = self.order[place]
            same = is_same(asked, rows)
            found[asked[same]] = rows[same]
            asked, place = asked[~same], place[~same] + 1
