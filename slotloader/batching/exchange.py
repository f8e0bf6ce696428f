"""What all receivers of a loader share: the table and what reads and writes it, the fleet behind it, and the loader's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slotloader.batching.actions import Scatterer
from slotloader.batching.gatherer import Gatherer
from slotloader.batching.recording import VideoRecording
from slotloader.errors import LoaderClosed
from slotloader.fleet.supervision import Limits
from slotloader.fleet.supervisor import Fleet
from slotloader.messages.reports import Removed, error_from, summary
from slotloader.records.specs import Array
from slotloader.table.engine import Engine
from slotloader.table.slots import Table

if TYPE_CHECKING:
    from slotloader.batching.leases import Leases


@dataclass
class Status:
    """What becomes of a loader.

    Attributes:
      closed: nothing can be received or sent any more.
      why_closed: the sentence that says so.
      paused: the workers begin nothing new.
      last_failure: what `recv` raised last, in a sentence.
    """

    closed: bool = False
    why_closed: str = "this loader was closed; build a new SlotLoader"
    paused: bool = False
    last_failure: str = ""

    def require_open(self) -> None:
        """Raises `LoaderClosed` if it is closed."""
        if self.closed:
            raise LoaderClosed(self.why_closed)


@dataclass(frozen=True, eq=False)
class Exchange:
    """Made by the loader; receivers and batches use it.

    Attributes:
      table: the slot table.
      fleet: the workers behind it.
      make_engine: `(index, first, end, before) -> Engine` for a share of the slots, see `PythonEngine`.
      scatterer: checks actions.
      observation, info, action: gather columns of the table.
      sequence: gathers the counts of records.
      limits: how long things may take.
      seed: the loader's.
      inline: envs step inside `recv`, so that nobody else moves them.
      debug: what `batch.view` hands out is a copy.
      status: what has become of the loader.
      recordings: that are running.
      leases: one per receiver that is in use.
      vacant: slots that no env has been promised.
    """

    table: Table
    fleet: Fleet
    make_engine: Callable[[int, int, int, Engine | None], Engine]
    scatterer: Scatterer
    observation: Gatherer
    info: Gatherer
    action: Gatherer
    sequence: Callable[[Array], Array]
    limits: Limits
    seed: int
    inline: bool
    debug: bool
    status: Status = field(default_factory=Status)
    recordings: list[VideoRecording] = field(default_factory=list)
    leases: list[Leases] = field(default_factory=list)
    vacant: set[int] = field(default_factory=set)

    def lose(self, slots: Sequence[int]) -> None:
        """The envs of some slots have ended for good."""
        for leases in self.leases:
            leases.lose(slots)

    def raise_events(self) -> None:
        """Takes what has failed, marks the slots, and raises it; other slots go on."""
        events = []
        for event in self.fleet.take_events():
            self.lose(event.slots)
            if isinstance(event, Removed):
                self.vacant.update(event.slots)
            else:
                events.append(event)
        if not events:
            return
        self.status.last_failure = summary(events[-1])
        raise error_from(events)
