"""Columns of data sets that stay in Arrow: read row by row or in batches, and made from iterators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, Generic, TypeVar, overload

import datasets
import numpy as np
import pyarrow as pa
from datasets.fingerprint import Hasher
from datasets.table import InMemoryTable

__all__ = [
    "ChunkView",
    "ColumnView",
    "MappedRows",
    "arrow_column",
    "caption_column",
    "chunk_values",
    "id_column",
    "select_rows",
]

T = TypeVar("T")

_ROWS_AT_ONCE = 1024


class ColumnView(Sequence[T], Generic[T]):
    """Values of a column, read when they are indexed; only a few are Python objects at a time."""

    def __init__(self, ds: datasets.Dataset, name: str, convert: Callable[[Any], T] | None = None) -> None:
        self._rows = ds.select_columns(name).with_format(None)
        self._name, self._convert = name, convert

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int]) -> list[T]: ...
    def __getitem__(self, index: Any) -> Any:
        found = self._rows[index][self._name]
        if self._convert is None:
            return found
        return list(map(self._convert, found)) if isinstance(index, slice | Sequence) else self._convert(found)

    def __iter__(self) -> Iterator[T]:
        for batch in self._rows.iter(_ROWS_AT_ONCE):
            values = batch[self._name]
            yield from values if self._convert is None else map(self._convert, values)


class ChunkView(Sequence[T], Generic[T]):
    """Values of an Arrow column that is not part of a data set, read when they are indexed."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            rows = range(*index.indices(len(self)))
            return self.column.take(pa.array(rows, pa.int64())).to_pylist()
        return self.column[range(len(self))[index]].as_py()

    def __iter__(self) -> Iterator[T]:
        return chunk_values(self.column)


class MappedRows(Sequence[T], Generic[T]):
    """`function(row, value)` of the values of a sequence, computed when they are read."""

    def __init__(self, values: Sequence[Any], function: Callable[[int, Any], T]) -> None:
        self._values, self._function = values, function

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: Any) -> Any:
        rows = range(len(self))[index]
        if isinstance(rows, range):
            return list(map(self._function, rows, self._values[index]))
        return self._function(rows, self._values[rows])

    def __iter__(self) -> Iterator[T]:
        return map(self._function, count(), self._values)


def id_column(ds: datasets.Dataset, name: str = "image_id") -> ColumnView[str]:
    """Ids of the rows, as text."""
    return ColumnView(ds, name, str)


def caption_column(ds: datasets.Dataset, name: str = "captions") -> ColumnView[list[str]]:
    """The captions of each row: a list, a single text, or none."""
    return ColumnView(ds, name, _texts)


def _texts(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def arrow_column(values: Iterable[Any], kind: pa.DataType) -> pa.ChunkedArray:
    """A column of the values of an iterator, in chunks."""
    given = iter(values)
    chunks = []
    while part := list(islice(given, _ROWS_AT_ONCE)):
        chunks.append(pa.array(part, kind))
    return pa.chunked_array(chunks, kind)


def chunk_values(column: pa.ChunkedArray) -> Iterator[Any]:
    """The values of a column; only a few are Python objects at a time."""
    for chunk in column.chunks:
        for start in range(0, len(chunk), _ROWS_AT_ONCE):
            yield from chunk.slice(start, _ROWS_AT_ONCE).to_pylist()


def select_rows(ds: datasets.Dataset, rows: np.ndarray) -> datasets.Dataset:
    """`Dataset.select`, which would make a list of the rows; `(N,)` of them."""
    if not len(rows) or (np.diff(rows) == 1).all():
        return ds.select(range(int(rows[0]), int(rows[-1]) + 1) if len(rows) else range(0))
    chosen: Any = pa.array(rows, pa.uint64())
    fingerprint = Hasher.hash((ds._fingerprint, "select_rows", rows.tobytes()))
    if ds._indices is not None:
        chosen = ds._indices.column(0).take(chosen)
    table = InMemoryTable.from_arrays([chosen], names=["indices"])
    return datasets.Dataset(ds.data, info=ds.info.copy(), split=ds.split, indices_table=table, fingerprint=fingerprint)
