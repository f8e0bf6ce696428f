"""Buffers that are used again as soon as nobody holds an array over them."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

from slotloader.records.specs import Array

_LEAST_BYTES = 65536  # smaller ones are served by the allocator's own cache
_MOST_BUFFERS = 8


def _first_free(pool: list[Array], rows: int, free: int) -> Array | None:
    """The first buffer of at least `rows` rows that has just `free` references, all of them the pool's and ours."""
    for buffer in pool:
        if sys.getrefcount(buffer) == free and len(buffer) >= rows:
            return buffer
    return None


def _references_of_a_free_buffer() -> int:
    """Measured with the very loop that uses it, since interpreters count references differently (3 until 3.13, 2 in 3.14)."""
    pool = [np.empty(1)]
    return next(count for count in range(1, 8) if _first_free(pool, 1, count) is not None)


_FREE = _references_of_a_free_buffer()


class BufferPool:
    """Fresh `(rows, *shape)` arrays, owned by whoever holds them.

    numpy views and DLPack consumers all keep a reference to the buffer itself, so its reference count tells when it is free.

    Args:
      shape: shape of one row.
      dtype: of the arrays.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._shape, self._dtype = shape, dtype
        self._row_bytes = int(np.prod(shape, dtype=np.int64)) * self._dtype.itemsize
        self._pool: list[Array] = []
        self._lock = threading.Lock()

    def take(self, rows: int) -> Array:
        """An array of `rows` rows with undefined content."""
        if rows * self._row_bytes < _LEAST_BYTES:
            return np.empty((rows, *self._shape), self._dtype)
        with self._lock:
            free = _first_free(self._pool, rows, _FREE)
            if free is not None:
                return free[:rows]
            buffer = np.empty((1 << (rows - 1).bit_length(), *self._shape), self._dtype)
            if len(self._pool) == _MOST_BUFFERS:
                self._pool.pop(0)  # whoever holds it keeps it; it is only no longer ours to use again
            self._pool.append(buffer)
            return buffer[:rows]
