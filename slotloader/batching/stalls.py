"""When `recv` has waited too long: which slots are excused, which are overdue, and the sentence that says so."""

from __future__ import annotations

from slotloader.batching.exchange import Exchange
from slotloader.batching.former import Request
from slotloader.errors import FleetStalled
from slotloader.table.slots import SlotState

_SILENT = frozenset(map(int, (SlotState.READY, SlotState.LEASED, SlotState.DEAD)))  # nobody is waited for


def require_moving(exchange: Exchange, first: int, end: int, request: Request, ready: int, promised: int, now: int) -> None:
    """Judges a wait that has reached its `stall_timeout`.

    Slots within their own start or reset limit and parked slots are excused, and so are rows that a device still computes:
    if these could make up what is missing, nothing has stalled.

    Args:
      exchange: of the loader.
      first: the share of slots is `[first, end)`.
      end: see `first`.
      request: what is waited for.
      ready: records that are ready.
      promised: leased rows whose actions are on their way.
      now: monotonic ns.

    Raises:
      FleetStalled: names the slowest slots and their ages; nothing is taken.
    """
    table = exchange.table
    states = table.state[first:end].tolist()
    coming = {first + at: state for at, state in enumerate(states) if state not in _SILENT}

    def age(slot: int) -> float:
        return float(now - table.begin_ns[slot]) * 1e-9

    limit = exchange.limits.reset_timeout or exchange.limits.start_timeout
    excused = {
        slot
        for slot, state in coming.items()
        if state == SlotState.PARKED or ((table.resetting[slot] or state == SlotState.STARTING) and age(slot) < limit)
    }
    if request.timeout is None and ready >= request.min_get:
        if excused or promised:
            return
    elif ready + len(excused) + promised >= request.min_get:  # a slow device is no fault of the fleet
        return
    ages = {slot: age(slot) for slot in coming if slot not in excused}
    slowest = sorted(ages, key=lambda slot: -ages[slot])
    doing = {SlotState.WRITING: "in step", SlotState.STARTING: "starting"}
    named = ", ".join(
        f"slot {slot} ({'in reset' if table.resetting[slot] else doing.get(SlotState(coming[slot]), 'waiting for its worker')} "
        f"for {ages[slot]:.2f} s)"
        for slot in slowest[:8]
    )
    raise FleetStalled(
        f"recv: expected at least {request.min_get} ready records within stall_timeout={request.stall_timeout:g} s, "
        f"found {ready}; the slowest: {named}; nothing was taken, recv may be called again. "
        "Raise stall_timeout if such steps are normal",
        slowest,
    )
