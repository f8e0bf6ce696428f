"""Beginning episodes anew on the trainer's wish."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from slotloader.batching.leases import Leases
from slotloader.errors import LoaderClosed, SlotLoaderError
from slotloader.records.specs import Array
from slotloader.table.engine import Engine
from slotloader.table.signals import SLICE
from slotloader.table.slots import SlotState

_AT_REST = (int(SlotState.READY), int(SlotState.LEASED))
Wish = tuple[int | None, Mapping[str, Any] | None]  # seed and options of a reset


def begin_anew(leases: Leases, engine: Engine, wishes: Mapping[int, Wish], timeout: float | None) -> None:
    """Has the envs of some slots begin another life, whose first reset has the seed and options that are wished.

    Waits until their steps have ended. What they have published since is discarded, and so is a reset that ran ahead; rows of
    theirs in unanswered batches count as answered. The episode that was open for the consumer is told as interrupted with the
    first record of the new life.

    Args:
      leases: the books of a share of the slots.
      engine: of the same share.
      wishes: `(seed, options)` by slot.
      timeout: seconds for the steps to end; None waits as long as they take.

    Raises:
      TimeoutError: an env is still in a step or a reset; nothing has changed.
      EnvFailed, WorkerDied: an env has failed for good meanwhile; nothing has changed for the others.
    """
    if leases.promised:
        raise SlotLoaderError("reset: expected no action on its way from a device; call drain() of the adapter first")
    slots = _at_rest(leases, engine, list(wishes), timeout)
    fleet = leases.exchange.fleet
    try:
        leases.seize(slots)
        cuts = {slot: cut for slot in slots.tolist() if (cut := leases.open_cut(slot, "reset")) is not None}
        fleet.begin_lives(slots.tolist(), wishes=wishes)
        leases.discard(slots)
    except BaseException:
        leases.repair()
        raise
    for slot, cut in cuts.items():
        fleet.give_back_cut(slot, cut)


def _at_rest(leases: Leases, engine: Engine, slots: list[int], timeout: float | None) -> Array:
    """Waits until each slot has a record that is ready or leased; returns those that still have an env."""
    exchange = leases.exchange
    table, inline = exchange.table, exchange.inline
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        if exchange.status.closed:
            raise LoaderClosed(exchange.status.why_closed)
        if exchange.fleet.events:
            exchange.raise_events()
        alive = np.array(
            [slot for slot in slots if table.state[slot] != SlotState.DEAD and not leases.is_doomed(slot)], np.int64
        )
        moving = alive[~np.isin(table.state[alive], _AT_REST)]
        if not moving.size:
            return alive
        if exchange.status.paused:
            raise SlotLoaderError("reset: expected a loader that is not paused, since envs are in a step; call loader.resume()")
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"reset: slots {moving.tolist()[:8]} are still in a step or a reset after {timeout:g} s")
        if inline:
            engine.wait(table.num_slots + 1, 0.0)  # one env moves
        else:
            time.sleep(min(SLICE, 0.001))
            exchange.fleet.tick()
