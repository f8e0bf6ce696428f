"""The engine: waiting for records, taking them, gathering rows, handing actions over and waking workers.

There is one per receiver, behind the protocol `Engine`; `PythonEngine` is the default and the reference. What the env's side
needs of it is `Publisher` (`publish`) and a `Signal` to wait for. Everything else in the core is the same for every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Protocol

import numpy as np

from slotloader.records.specs import Array
from slotloader.table.signals import Signal, make_fence, make_order_fence
from slotloader.table.slots import SlotState, Table

_READY, _LEASED, _ACTED = int(SlotState.READY), int(SlotState.LEASED), int(SlotState.ACTED)
_STARTING, _DEAD, _PARKED = int(SlotState.STARTING), int(SlotState.DEAD), int(SlotState.PARKED)
_TAKE_BYTES = 2048  # from this row size on `take` is faster than fancy indexing

# The slots, ascending int64 (B,); `step_type` uint8, `reward` float32 and `publish_ns` int64 of their records. All are fresh.
Taken = tuple[Array, Array, Array, Array]


class Engine(Protocol):
    """What a receiver asks of the table. The receiver's lock covers all but `ready`, `oldest`, `wait` and `wake`."""

    def ready(self) -> int:
        """How many records of the share are READY."""

    def oldest(self) -> int:
        """Publish time, monotonic ns, of the READY record that waits longest; there is one."""

    def wait(self, wanted: int, seconds: float) -> None:
        """Sleeps until `wanted` records are READY or somebody calls `wake`, at most `seconds`; may end early."""

    def wake(self) -> None:
        """Ends the `wait` that runs, or the next one. From any thread."""

    def take(self, most: int) -> Taken:
        """Moves READY slots to LEASED, at most `most`, the longest waiting ones."""

    def gather(self, column: Array, slots: Array, out: Array | None = None) -> Array:
        """Rows of a column, `(num_slots, ...)`, whose slots are leased.

        Args:
          column: of the table.
          slots: int64 (B,).
          out: (B, ...) to write to, of the column's dtype or one that it is cast to; None returns a fresh array.
        """

    def act(self, slots: Array, rows: Sequence[Array]) -> None:
        """Stores actions, one array per action column, moves the slots LEASED -> ACTED and wakes each worker once."""

    def wake_workers(self) -> None:
        """Wakes every worker, in case one missed its wake-up."""

    def seize(self, slots: Array) -> None:
        """Moves READY slots to LEASED without reading their records, which nobody will get."""

    def give_back(self, slots: Array) -> None:
        """Moves slots LEASED -> READY."""

    def end(self, slots: Sequence[int]) -> None:
        """Moves slots that nobody writes to DEAD."""

    def begin(self, slot: int) -> None:
        """Moves a DEAD slot to STARTING: a new env will serve it."""


class PythonEngine:
    """The reference: numpy over the state words, semaphores for the wake-ups.

    Args:
      table: the table.
      wakers: one function per worker that wakes it.
      signal: of this receiver; workers post it.
      index: of this receiver.
      first: its share of the slots is `[first, end)`.
      end: see `first`.
      before: the engine of the receiver that had the slots until now: workers remember the naps that they have ended.
    """

    def __init__(
        self,
        table: Table,
        wakers: Sequence[Callable[[], None]],
        signal: Signal,
        index: int,
        first: int,
        end: int,
        before: PythonEngine | None = None,
    ) -> None:
        self._table, self._signal, self.wakers = table, signal, list(wakers)
        self._index, self._first, self._end = index, first, end
        self._states, self._state, self._count_ready = table.state[first:end], table.state, table.count_ready
        self._wanted, self._begin_ns, self._owner = table.wanted_words, table.begin_ns, table.owner
        self._step_type, self._reward, self._publish_ns = table.step_type, table.reward, table.publish_ns
        self._columns = table.action
        self._fence = make_fence()
        self._order_fence = make_order_fence(self._fence)
        self._naps: int = 0 if before is None else before._naps
        self.wake = signal.post

    def ready(self) -> int:
        """See `Engine.ready`."""
        return self._count_ready(self._first, self._end)

    def _ready_slots(self) -> Array:
        slots: Array = (self._states == _READY).nonzero()[0]
        return slots if self._first == 0 else slots + self._first

    def oldest(self) -> int:
        """See `Engine.oldest`."""
        slots = self._ready_slots()
        self._order_fence()  # states before publish times
        return int(self._publish_ns[slots].min())

    def wait(self, wanted: int, seconds: float) -> None:
        """See `Engine.wait`. A nap begins in this order: say so, fence, look once more; `Publisher` has the other half."""
        self._naps = (self._naps + 1) & 0xFFFFFFFF
        self._wanted[self._index] = self._naps << 32 | wanted
        try:
            self._fence()
            if self._count_ready(self._first, self._end) < wanted:
                self._signal.wait(seconds)
        finally:
            self._wanted[self._index] = 0

    def take(self, most: int) -> Taken:
        """See `Engine.take`."""
        slots = self._ready_slots()
        self._order_fence()  # states before payload
        if slots.size > most:
            slots = choose(slots, self._publish_ns[slots], most)
        self._state[slots] = _LEASED
        return slots, self._step_type[slots], self._reward[slots], self._publish_ns[slots]

    @staticmethod
    def gather(column: Array, slots: Array, out: Array | None = None) -> Array:
        """See `Engine.gather`."""
        if out is None:
            return column[slots] if column.ndim == 1 else column.take(slots, 0, mode="clip")
        if column.strides[0] >= _TAKE_BYTES and column.dtype == out.dtype:
            return column.take(slots, 0, out, "clip")  # clip: the indices are ours, and bounds checks cost a copy
        out[...] = column[slots]
        return out

    def act(self, slots: Array, rows: Sequence[Array]) -> None:
        """See `Engine.act`."""
        self._begin_ns[slots] = monotonic_ns()
        for column, array in zip(self._columns, rows, strict=True):
            column[slots] = array
        self._order_fence()  # actions, and our last reads of the records, before the state
        self._state[slots] = _ACTED
        owners = self._owner[slots].tolist()
        wakers = self.wakers
        for worker in set(owners) if len(owners) > 1 else owners:
            wakers[worker]()

    def wake_workers(self) -> None:
        """See `Engine.wake_workers`."""
        for wake in self.wakers:
            wake()

    def seize(self, slots: Array) -> None:
        """See `Engine.seize`."""
        self._state[slots] = _LEASED

    def give_back(self, slots: Array) -> None:
        """See `Engine.give_back`."""
        self._state[slots] = _READY

    def end(self, slots: Sequence[int]) -> None:
        """See `Engine.end`."""
        self._state[list(slots)] = _DEAD

    def begin(self, slot: int) -> None:
        """See `Engine.begin`."""
        self._begin_ns[slot] = monotonic_ns()
        self._state[slot] = _STARTING


def choose(slots: Array, publish_ns: Array, most: int) -> Array:
    """Picks at most `most` of the ready `slots`: the longest waiting ones, in slot order.

    Oldest first, so that no slot starves however fast the others are.

    Args:
      slots: int64 (R,), ascending.
      publish_ns: int64 (R,), publish time of each.
      most: at least 1.

    Returns:
      int64 (min(R, most),), ascending.
    """
    if slots.size <= most:
        return slots
    oldest = np.argpartition(publish_ns, most - 1)[:most]
    oldest.sort()
    return slots[oldest]
