"""Rows of the table as a tree of arrays that belong to whoever asked for them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from slotloader.batching.buffers import BufferPool
from slotloader.records import values
from slotloader.records.specs import Array, Kind, Leaf, Tree, build, leaves

_SMALL_BYTES = 65536  # smaller gathers need no pool


class BytesColumn:
    """Text, Sequence, Graph or OneOf values of a batch, decoded on access.

    Attributes:
      data: uint8 (B, capacity); bytes beyond a row's length are undefined.
      lengths: uint32 (B,), bytes used in each row.
    """

    def __init__(self, leaf: Leaf, data: Array, lengths: Array) -> None:
        self._leaf = leaf
        self.data = data
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: Any) -> Any:
        """The value of one row; for a slice, a mask or indices a `BytesColumn` of those rows."""
        try:
            row = operator.index(row)
        except TypeError:
            return BytesColumn(self._leaf, self.data[row], self.lengths[row])
        return values.decode(self._leaf, self.data[row, : self.lengths[row]].tobytes())

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def tolist(self) -> list[Any]:
        """Every value, decoded."""
        return list(self)

    def __repr__(self) -> str:
        return f"BytesColumn({len(self)} values of {self._leaf})"


class Gatherer:
    """Copies rows of a tree's columns into buffers that belong to the batch.

    Args:
      tree: of the columns.
      columns: one array `(num_slots, ...)` per part of each leaf.
      gather: `Engine.gather`.
    """

    def __init__(self, tree: Tree, columns: Sequence[Array], gather: Callable[..., Array]) -> None:
        self._tree = tree
        self._leaves = list(leaves(tree))
        self._columns = list(columns)
        self._pools = [BufferPool(column.shape[1:], column.dtype) for column in columns]
        self._gather = gather
        self._single = len(columns) == 1 and isinstance(tree, Leaf)

    def __call__(self, slots: Array) -> Any:
        """Gathers `slots` (int64 (B,)) into a tree of (B, ...) arrays."""
        if self._single:
            return self._take(0, slots)
        arrays = (self._take(at, slots) for at in range(len(self._columns)))
        return build(self._tree, (self._value(leaf, arrays) for leaf in self._leaves))

    def empty(self) -> bool:
        """True for a tree without leaves."""
        return not self._columns

    @staticmethod
    def _value(leaf: Leaf, arrays: Iterator[Array]) -> Any:
        if leaf.kind is Kind.ARRAY:
            return next(arrays)
        return BytesColumn(leaf, next(arrays), next(arrays))

    def _take(self, at: int, slots: Array) -> Array:
        column = self._columns[at]
        if column.ndim == 1 or slots.size * column.strides[0] < _SMALL_BYTES:
            return self._gather(column, slots)
        return self._gather(column, slots, self._pools[at].take(slots.size))

    def over_the_table(self, copied: bool) -> tuple[Any, list[Array]]:
        """The tree over the columns themselves, read-only, without a copy.

        Args:
          copied: over copies instead, which are returned too, to be poisoned.
        """
        if copied:
            copies = [column.copy() for column in self._columns]
            return self._tree_over(copies), copies
        views = []
        for column in self._columns:
            view = column.view()
            view.flags.writeable = False
            views.append(view)
        return self._tree_over(views), []

    def _tree_over(self, columns: Sequence[Array]) -> Any:
        at = iter(columns)
        return build(self._tree, (self._value(leaf, at) for leaf in self._leaves))
