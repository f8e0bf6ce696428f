"""One worker process from its order to its end: the states of an incarnation, and what belongs to it alone.

A worker index is served by one incarnation after the other. Whatever arrives about a process, its own words, its pid, its
stack, its exit, names its incarnation by `serial`, so what is late about one never touches the next. docs/control_plane.md
has the table of moves.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from slotloader.messages.stream import Stream


class Phase(enum.IntEnum):
    """How far a worker process has come."""

    QUEUED = 0  # to be started when there is room in the window
    STARTING = 1  # the nursery has been asked to fork it
    BUILDING = 2  # it has a pid and builds its envs
    SERVING = 3  # it has been handed the region
    CONDEMNED = 4  # it is being killed, for a hang or for what it sent
    GONE = 5  # it has ended and been reaped, or was given up


# Who has gone stays gone; everybody can be condemned once there is a process.
LEGAL = frozenset(
    {
        (Phase.QUEUED, Phase.STARTING),
        (Phase.STARTING, Phase.BUILDING),
        (Phase.STARTING, Phase.SERVING),  # its envs were built before the nursery's word of its pid was read
        (Phase.BUILDING, Phase.SERVING),
        (Phase.STARTING, Phase.CONDEMNED),
        (Phase.BUILDING, Phase.CONDEMNED),
        (Phase.SERVING, Phase.CONDEMNED),
    }
    | {(phase, Phase.GONE) for phase in Phase if phase != Phase.GONE}
)


class Incarnation:
    """What is known of one worker process. The fleet's lock covers `phase`; the watching thread writes the rest.

    Attributes:
      serial: number of the incarnation, over all workers of the fleet.
      index: of the worker that it is.
      phase: see `Phase`.
      pid: of the process; 0 before it is known.
      stream: our end of its socket; None while it is queued.
      limit: monotonic time by which its envs must exist; None for no limit of its own.
      why: why it was condemned, and `since` when.
      stack: what faulthandler has written of it, if it was asked for.
    """

    def __init__(self, serial: int, index: int) -> None:
        self.serial, self.index = serial, index
        self.phase = Phase.QUEUED
        self.pid = 0
        self.stream: Stream | None = None
        self.limit: float | None = None
        self.why, self.since = "", 0.0
        self.stack: str | None = None
        self._early: list[tuple[bytes, tuple[int, ...], Callable[[], None] | None]] = []

    def enter(self, phase: Phase) -> None:
        """Moves on."""
        if (self.phase, phase) not in LEGAL:
            raise RuntimeError(f"worker {self.index}, incarnation {self.serial}: {self.phase.name} -> {phase.name}")
        self.phase = phase

    @property
    def gone(self) -> bool:
        """Whether it has ended."""
        return self.phase is Phase.GONE

    def connect(self, stream: Stream, first: bytes) -> None:
        """Its socket exists: `first` is sent first, then what was put meanwhile."""
        stream.put(first)
        for payload, fds, begun in self._early:
            stream.put(payload, fds, begun)
        self._early.clear()
        self.stream = stream

    def put(self, payload: bytes, fds: tuple[int, ...] = (), begun: Callable[[], None] | None = None) -> None:
        """See `Stream.put`; kept until there is a socket."""
        if self.stream is None:
            self._early.append((payload, fds, begun))
        else:
            self.stream.put(payload, fds, begun)
