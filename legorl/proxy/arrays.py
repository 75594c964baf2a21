"""Arrays that a trial's record grows: small ones in one piece, large ones in the blocks they came in.

Invariants: rows are added at the end or cut at the end; adding costs the new rows (amortised); what stays
unused is at most an eighth of the small arrays and nothing of the large ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_SLACK = 8
"""Spare capacity of a `Growing` is one part in so many."""


class Growing:
    """A numpy array that grows along its first axis."""

    def __init__(self, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        self._data: NDArray[Any] = np.empty((0, *row_shape), dtype=dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def view(self) -> NDArray[Any]:
        """The filled part; valid until the next append."""
        return self._data[: self._length]

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows at the end."""
        end = self._reserve(len(rows))
        self._data[self._length : end] = rows
        self._length = end

    def fill(self, count: int, value: object) -> None:
        """Add `count` rows of one value at the end."""
        end = self._reserve(count)
        self._data[self._length : end] = value
        self._length = end

    def cut(self, length: int) -> None:
        """Forget everything from row `length` on."""
        self._length = min(self._length, length)

    def _reserve(self, count: int) -> int:
        end = self._length + count
        if end > len(self._data):
            data = np.empty((end + end // _SLACK + 64, *self._data.shape[1:]), dtype=self._data.dtype)
            data[: self._length] = self._data[: self._length]
            self._data = data
        return end


class Blocks:
    """Rows that are too large to be moved when more come, or copied into a fork."""

    def __init__(self, dtype: DTypeLike, row_shape: tuple[int, ...]) -> None:
        self._blocks: list[NDArray[Any]] = []
        self._length = 0
        self.dtype = np.dtype(dtype)
        self.row_shape = row_shape

    def __len__(self) -> int:
        return self._length

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows at the end. They are copied: they may be a part of something larger."""
        if len(rows):
            self._add(np.array(rows, dtype=self.dtype))

    def fill(self, count: int, value: object) -> None:
        """Add `count` rows of one value at the end."""
        if count:
            self._add(np.full((count, *self.row_shape), value, self.dtype))

    def cut(self, length: int) -> None:
        """Forget everything from row `length` on."""
        while self._length > length:
            last = self._blocks.pop()
            self._length -= len(last)
            if self._length < length:
                self._add(last[: length - self._length].copy())

    def head(self, length: int) -> Blocks:
        """The first `length` rows, shared and not copied."""
        head = Blocks(self.dtype, self.row_shape)
        for block in self._blocks:
            if len(head) < length:
                head._add(block[: length - len(head)])
        return head

    def copy_to(self, out: NDArray[Any]) -> None:
        """Write the first rows, as many as there are and as fit, to `out` [n, *row_shape]."""
        start = 0
        for block in self._blocks:
            end = min(start + len(block), len(out))
            out[start:end] = block[: end - start]
            start = end

    def joined(self) -> NDArray[Any]:
        """All rows in one new array. [len(self), *row_shape]."""
        rows = np.empty((self._length, *self.row_shape), self.dtype)
        self.copy_to(rows)
        return rows

    def _add(self, block: NDArray[Any]) -> None:
        self._blocks.append(block)
        self._length += len(block)
