"""What to do about a failure: pure rules, without processes or clocks of their own."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from slotloader.arguments import require_count

OnFailure = Literal["auto", "raise", "restart"]


@dataclass(frozen=True)
class Limits:
    """How long things may take and how often they may fail.

    Attributes:
      on_failure: "raise", "restart", or "auto": restart an env that has completed a step before, raise otherwise, since a
        factory that never works is a mistake and not a fault, and so is a record that breaks its spaces.
      max_restarts: restarts of one slot within `restart_window`, after which its failure is raised.
      restart_window: seconds.
      start_timeout: seconds for building an env.
      step_timeout: seconds for one `env.step`; None is no limit.
      reset_timeout: seconds for one `env.reset`; None is no limit.
    """

    on_failure: OnFailure = "auto"
    max_restarts: int = 5
    restart_window: float = 300.0
    start_timeout: float = 120.0
    step_timeout: float | None = None
    reset_timeout: float | None = None

    def __post_init__(self) -> None:
        if self.on_failure not in ("auto", "raise", "restart"):
            raise ValueError(f"on_failure: expected 'auto', 'raise' or 'restart', found {self.on_failure!r}")
        require_count("max_restarts", self.max_restarts, 0)
        for name in ("restart_window", "start_timeout", "step_timeout", "reset_timeout"):
            seconds = getattr(self, name)
            optional = name in ("step_timeout", "reset_timeout")
            if seconds is None and optional:
                continue
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
                expected = "seconds above 0 or None" if optional else "seconds above 0"
                raise ValueError(f"{name}: expected {expected}, found {seconds!r}")


class RestartPolicy:
    """Decides for each failure whether its slots get a new life, and counts those lives."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._times: dict[int, collections.deque[float]] = collections.defaultdict(collections.deque)

    def refuse(self, slots: Iterable[int], has_worked: bool, now: float) -> str | None:
        """Says why not to restart; None means restart, which is then counted for every slot.

        Args:
          slots: the slots that would get a new life together.
          has_worked: one of their envs has completed a step, in any life.
          now: monotonic seconds.
        """
        limits, slots = self._limits, list(slots)
        if limits.on_failure == "raise":
            return ""
        if limits.on_failure == "auto" and not has_worked:
            return ""
        for slot in slots:
            times = self._times[slot]
            while times and now - times[0] > limits.restart_window:
                times.popleft()
            if len(times) >= limits.max_restarts:
                return (
                    f"gave up: slot {slot} was restarted {len(times)} times in {limits.restart_window:g} s "
                    f"(max_restarts={limits.max_restarts})"
                )
        for slot in slots:
            self._times[slot].append(now)
        return None

    def count(self, slot: int) -> int:
        """Restarts of a slot that still count."""
        return len(self._times[slot])
