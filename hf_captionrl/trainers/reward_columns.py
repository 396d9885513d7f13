"""Columns of the training data for reward functions, read on access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets

__all__ = ["DecodedColumn", "RowColumns"]

_DECODED = tuple(getattr(datasets, name) for name in ("Image", "Audio", "Video") if hasattr(datasets, name))


class DecodedColumn(Sequence[Any]):
    """Values of a column for some rows of a data set; files are decoded on first access."""

    def __init__(self, dataset: datasets.Dataset, name: str, rows: Sequence[int]) -> None:
        self.name = name
        self.rows = list(rows)
        self._column = dataset.select_columns(name)
        self._decoded: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self.rows[index]
        if row not in self._decoded:
            self._decoded[row] = self._column[row][self.name]
        return self._decoded[row]


class RowColumns(Mapping[str, Sequence[Any]]):
    """The columns of some rows of a data set: lists, and [`DecodedColumn`] for images.

    Rows are found by number, so they match the captions of any process.
    """

    def __init__(self, dataset: datasets.Dataset, rows: Sequence[int]) -> None:
        self._dataset = dataset.with_format(None)
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._dataset.column_names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._dataset.column_names)

    def __getitem__(self, name: str) -> Sequence[Any]:
        if name not in self._dataset.column_names:
            raise KeyError(name)
        if isinstance(self._dataset.features[name], _DECODED):
            return DecodedColumn(self._dataset, name, self._rows)
        return self._dataset.select_columns(name)[self._rows][name]
