"""Making records visible to the trainer, and waking it when it asked for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slotloader.table.signals import Signal, make_order_fence
from slotloader.table.slots import SlotState, Table

_READY = int(SlotState.READY)


class Publisher:
    """Makes records visible to the trainer and wakes it when it asked for that.

    Store order: payload, order fence, state word, full fence, look at `wanted`. The receiver stores `wanted`, fences and
    then looks at the states, so one of the two sees the other: a wake-up cannot be lost between them.

    `wanted` has a new nap number each time the receiver goes to sleep, and one post per nap is enough: the receiver wakes,
    and if it still wants more it begins another nap.
    """

    def __init__(self, table: Table, wake: Sequence[Signal], fence: Callable[[], None]) -> None:
        self._state, self._count_ready = table.state_words, table.count_ready
        self._receiver, self._wanted = table.receiver_words, table.wanted_words
        self._first, self._end = table.first_slot_words, table.end_slot_words
        self._post = [signal.post for signal in wake]
        self._posted = [0] * len(self._post)  # the nap for which each receiver has been woken from here
        self._fence, self.order_fence = fence, make_order_fence(fence)

    def publish(self, slot: int) -> None:
        """Hands the slot's finished rows to the trainer."""
        self.order_fence()
        self._state[slot] = _READY
        self._fence()
        receiver = self._receiver[slot]
        wanted = self._wanted[receiver]
        if wanted and wanted != self._posted[receiver]:
            records = wanted & 0xFFFFFFFF
            if records == 1 or self._count_ready(self._first[receiver], self._end[receiver]) >= records:
                self._posted[receiver] = wanted
                self._post[receiver]()
