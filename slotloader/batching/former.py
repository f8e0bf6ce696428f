"""Whether the ready records form a batch now, and if not, what to wait for: policy without clock, table or sleep.

All state is passed in, so a test can drive it through any interleaving with a simulated clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from slotloader.arguments import is_integer, require_count

_LONGEST = 1e8  # seconds: three years stand for ever, in numbers that ns can hold


@dataclass(frozen=True)
class Request:
    """What one `recv` asks for, validated.

    Attributes:
      min_get: fewest records of a batch.
      max_get: most records of a batch.
      timeout: seconds that a ready record may wait for company; None waits for `max_get`.
      stall_timeout: seconds without enough records until the fleet counts as stalled; None is never.
    """

    min_get: int = 1
    max_get: int = 1
    timeout: float | None = 0.002
    stall_timeout: float | None = 60.0

    @classmethod
    def checked(
        cls, min_get: int, max_get: int | None, timeout: float | None, stall_timeout: float | None, num_slots: int
    ) -> Request:
        """Validates the arguments of `recv`.

        Raises:
          ValueError: names the argument, what was expected and what was found.
        """
        min_get, max_get = require_count("min_get", min_get), require_count("max_get", max_get, optional=True)
        if max_get is not None and max_get < min_get:
            raise ValueError(f"max_get: expected at least min_get={min_get}, found {max_get}")
        if min_get > num_slots:
            raise ValueError(f"min_get: expected at most the number of slots, {num_slots}, found {min_get}")
        for name, seconds in (("timeout", timeout), ("stall_timeout", stall_timeout)):
            number = isinstance(seconds, (int, float, np.number)) and not isinstance(seconds, bool)
            if seconds is not None and not (number and seconds >= 0):  # NaN fails too
                raise ValueError(f"{name}: expected seconds of at least 0 or None, found {seconds!r}")
        longest = [None if seconds is None else min(float(seconds), _LONGEST) for seconds in (timeout, stall_timeout)]
        return cls(min_get, num_slots if max_get is None else min(max_get, num_slots), *longest)

    def changed(self, given: Mapping[str, Any], most: int) -> Request:
        """The request of one `recv`, with the arguments that it was given.

        Args:
          given: some of `min_get`, `max_get`, `timeout` and `stall_timeout`; `max_get` None is `most`.
          most: records that a batch can have.

        Raises:
          ValueError: names the argument, what was expected and what was found.
        """
        wanted = {"min_get": self.min_get, "max_get": self.max_get, "timeout": self.timeout, **given}
        if wanted["min_get"] is None:
            raise ValueError("min_get: expected an integer of at least 1, found None")
        if "max_get" not in given and "min_get" in given and is_integer(given["min_get"]):
            wanted["max_get"] = max(self.max_get, given["min_get"])  # a min_get above the default max_get asks for that many
        if "min_get" not in given and is_integer(given.get("max_get")) and given["max_get"] >= 1:
            wanted["min_get"] = min(self.min_get, given["max_get"])
        stall_timeout = given.get("stall_timeout", self.stall_timeout)
        return Request.checked(wanted["min_get"], wanted["max_get"], wanted["timeout"], stall_timeout, most)


class Wait(NamedTuple):
    """No batch yet; a tuple, since one is made for every sleep.

    Attributes:
      wanted: number of ready records that ends the wait early.
      until_ns: monotonic time in ns at which to decide anew, or None: only `wanted` ends it.
    """

    wanted: int
    until_ns: int | None


TAKE = None


def decide(request: Request, ready: int, coming: int, oldest_ns: int | None, now_ns: int) -> Wait | None:
    """Decides whether the ready records form a batch now.

    Args:
      request: what the consumer asked for.
      ready: number of ready records.
      coming: number of slots whose record will come without anything that the consumer does (`DESIGN` section 2).
      oldest_ns: publish time of the oldest ready record; only looked at when at least `min_get` are ready.
      now_ns: the time.

    Returns:
      `TAKE` (None) to take them, at most `max_get`; else what to wait for.
    """
    if ready < request.min_get:
        # Parked and unclaimed slots may arrive too, so min_get is waited for even if nothing is coming.
        return Wait(request.min_get, None)
    if ready >= request.max_get or coming == 0 or request.timeout == 0:
        return TAKE
    wanted = min(request.max_get, ready + coming)
    if request.timeout is None:
        return Wait(wanted, None)
    assert oldest_ns is not None
    deadline = oldest_ns + int(request.timeout * 1e9)
    return TAKE if now_ns >= deadline else Wait(wanted, deadline)
