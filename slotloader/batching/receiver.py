"""Receiving and sending over a share of the slots: the trainer's side of the table."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from time import monotonic_ns
from typing import Any

import numpy as np

from slotloader.batching import former, stalls
from slotloader.batching.batches import Batch
from slotloader.batching.exchange import Exchange
from slotloader.batching.former import Request, Wait
from slotloader.batching.leases import Leases
from slotloader.batching.resets import Wish, begin_anew
from slotloader.batching.source import BatchSource
from slotloader.errors import SlotLoaderError
from slotloader.table.engine import Engine
from slotloader.table.signals import SLICE
from slotloader.table.slots import SlotState

_READY, _LEASED, _WRITING, _PARKED = (
    int(state) for state in (SlotState.READY, SlotState.LEASED, SlotState.WRITING, SlotState.PARKED)
)


class Receiver(BatchSource[Batch]):
    """Receives from the slots `[first, end)`; made by `SlotLoader` and by `SlotLoader.split`.

    Iterating yields batches until the loader is closed.

    Attributes:
      exchange: what all receivers of the loader share.
      leases: the books of these slots.
      retired: replaced by `split`.
    """

    def __init__(
        self, exchange: Exchange, request: Request, index: int, first: int, end: int, whole: Receiver | None = None
    ) -> None:
        self.exchange, self._request = exchange, request
        self._first, self._end = first, end
        self._status, self._fleet, self._table = exchange.status, exchange.fleet, exchange.table
        self._engine: Engine = exchange.make_engine(index, first, end, None if whole is None else whole._engine)
        self.leases: Leases = Leases(exchange, self._engine, index, first, end, None if whole is None else whole.leases)
        self._consumer: dict[str, int] = {}  # the thread whose `recv` runs; setdefault on a dict is atomic
        self._failure: BaseException | None = None  # of a thread that sends for us; the next `recv` raises it
        self._warned = False
        self.retired = False

    # Receiving.

    @property
    def request(self) -> Request:
        """See `BatchSource.request`."""
        return self._request

    @property
    def most(self) -> int:
        """See `BatchSource.most`: the number of slots."""
        return self._end - self._first

    def receive(self, request: Request) -> Batch:
        """See `BatchSource.receive`."""
        self._enter()
        try:
            return self._receive(request)
        except BaseException:
            self.leases.repair()
            raise
        finally:
            self._consumer.clear()

    def _enter(self) -> None:
        """Claims the one place of a consumer; a claim that Ctrl-C left behind is the same thread's to take again."""
        me = threading.get_ident()
        if self._consumer.setdefault("thread", me) != me:
            raise SlotLoaderError(
                "recv is already running in another thread: a loader has one consumer; for several, use loader.split(n)"
            )

    def is_receiving(self) -> bool:
        """Whether a `recv` runs."""
        return bool(self._consumer)

    def poll(self, max_get: int | None = None) -> Batch | None:
        """See `BatchSource.poll`; `max_get` None is that of `request`."""
        self._enter()
        try:
            self._require_open()
            ready = self._engine.ready()
            if not ready and self.exchange.inline:
                self._engine.wait(1, 0.0)  # nobody else would ever step these envs
                ready = self._engine.ready()
            if self._fleet.events:
                self.exchange.raise_events()
            return self._take(max_get or self._request.max_get) if ready else None
        except BaseException:
            self.leases.repair()
            raise
        finally:
            self._consumer.clear()

    def _receive(self, request: Request) -> Batch:
        engine, leases, status, fleet = self._engine, self.leases, self._status, self._fleet
        start = changed = 0
        last_ready = -1
        while True:
            if status.closed or self.retired:
                self._require_open()
            if fleet.events:
                self.exchange.raise_events()
            if self._failure is not None:
                self.raise_failure()
            ready = engine.ready()
            expected = leases.expected
            if status.paused:
                expected = self._in_flight(request, ready)
            elif request.min_get > expected:
                request = self._lowered(request, expected)
            coming = expected - ready
            if fleet.may_park and coming > 0:
                coming -= self._parked()
            if ready >= request.min_get and (ready >= request.max_get or request.timeout == 0 or coming <= 0):
                return self._take(request.max_get)
            now = monotonic_ns()
            oldest = engine.oldest() if request.timeout is not None and ready >= request.min_get else None
            wait = former.decide(request, ready, coming, oldest, now)
            if wait is None:
                return self._take(request.max_get)
            start = start or now
            if ready != last_ready:
                last_ready, changed = ready, now
            self._sleep(request, wait, ready, now, changed if request.timeout is None else start)

    def _parked(self) -> int:
        """Slots that are expected and not coming: only where a loader has remote ones."""
        return int(np.count_nonzero(self._table.state[self._first : self._end] == _PARKED))

    def _in_flight(self, request: Request, ready: int) -> int:
        """While the loader is paused only records that are ready or on their way can be expected."""
        states = self._table.state[self._first : self._end]
        moving = (states == _WRITING) | (self._table.resetting[self._first : self._end] == 1)
        expected = ready + int(np.count_nonzero(moving & (states != _READY) & (states != _LEASED)))
        if request.min_get > expected:
            raise SlotLoaderError(
                f"recv: expected at least {request.min_get} records, found {expected} ready or on their way, since the loader "
                "is paused; call loader.resume()"
            )
        return expected

    def _sleep(self, request: Request, wait: Wait, ready: int, now: int, since: int) -> None:
        seconds = SLICE
        if wait.until_ns is not None:
            seconds = min(seconds, (wait.until_ns - now) * 1e-9)
        if request.stall_timeout is not None:
            left = request.stall_timeout - (now - since) * 1e-9
            if left <= 0:
                promised = self.leases.promised
                stalls.require_moving(self.exchange, self._first, self._end, request, ready, promised, now)
                left = SLICE
            seconds = min(seconds, left)
        self._engine.wait(wait.wanted, max(seconds, 0.0))
        self._fleet.tick()
        self.leases.meter.wait_ns += monotonic_ns() - now

    def _require_open(self) -> None:
        self._status.require_open()
        if self.retired:
            raise SlotLoaderError("this loader was split: receive from the receivers that loader.split(n) returned")

    def _lowered(self, request: Request, expected: int) -> Request:
        """`min_get` is above what can come: an error while batches are unanswered, lowered for slots lost for good."""
        leases = self.leases
        if leases.alive == 0:
            last = self._status.last_failure
            raise SlotLoaderError(
                "no slot is left: every env of this loader has failed or was removed; build a new SlotLoader"
                + (f". The last failure: {last}" if last else " or use add_envs")
            )
        if request.min_get > leases.alive:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"min_get={request.min_get} is more than the {leases.alive} slots that are left; it is lowered",
                    RuntimeWarning,
                    stacklevel=6,
                )
            request = Request(leases.alive, max(leases.alive, 1), request.timeout, request.stall_timeout)
        if request.min_get <= expected:
            return request
        self.raise_failure()  # it may be why fewer are expected than a moment ago
        unanswered = leases.unanswered
        held = "; ".join(
            f"batch of {batch.size} with slots {batch.env_indices.tolist()[:8]}{'...' if batch.size > 8 else ''}"
            for batch in unanswered[:4]
        )
        raise SlotLoaderError(
            f"recv: expected at least {request.min_get} slots that can become ready, found {expected}, since {leases.leased} "
            f"of {leases.alive} slots are leased in {len(unanswered)} unanswered batches ({held}); "
            "call batch.send(actions) or batch.release() on them (loader.unanswered has them; `close` of a rollout releases "
            "those at its barrier)"
        )

    def _take(self, max_get: int) -> Batch:
        batch = self.leases.take(max_get)
        if self.exchange.recordings:
            self._record(batch)
        return batch

    def _record(self, batch: Batch) -> None:
        """Shows a batch to the recordings; Ctrl-C meanwhile gives it back, since nobody has got it."""
        try:
            for recording in list(self.exchange.recordings):
                recording.see(batch)
        except BaseException:
            batch.release()
            raise

    # Sending.

    def send(self, actions: Any, env_indices: Any) -> None:
        """Answers some leased slots, of one batch or of several: all or nothing, safe beside `recv`.

        Args:
          actions: tree of (N, ...) arrays, by the action space.
          env_indices: integers (N,), the slots, without repetition. A batch's own `env_indices` are known by their identity.

        Raises:
          ActionError: an index is unknown, repeated or not leased, or the actions do not fit; no env has stepped.
        """
        if self.retired:
            self._require_open()
        self.leases.send(actions, env_indices)

    # What the sender of a device's actions tells us.

    def fail(self, error: BaseException, batch: Batch | None = None) -> None:
        """Has the `recv` that runs, or else the next one, raise `error`, unless it has another to raise already.

        Args:
          error: what is raised.
          batch: what was promised for it is taken back, in one go: whoever sees the error finds the batch unanswered.
        """
        with self.leases.lock:
            if batch is not None:
                self.leases.promised -= batch.promised
                batch.promised = 0
            if self._failure is None:
                self._failure = error
        self._engine.wake()

    def forget(self, error: BaseException) -> None:
        """Takes back what `fail` was told, if nobody has raised it yet."""
        if self._failure is error:
            self._failure = None

    def raise_failure(self) -> None:
        """Raises what `fail` was told, once."""
        with self.leases.lock:
            error, self._failure = self._failure, None
        if error is not None:
            raise error

    # Its share of the slots.

    def begin_anew(self, wishes: Mapping[int, Wish], timeout: float | None) -> None:
        """See `resets.begin_anew`; nobody else may receive meanwhile."""
        self._enter()
        try:
            begin_anew(self.leases, self._engine, wishes, timeout)
        finally:
            self._consumer.clear()

    def take_all(self) -> Batch:
        """Waits until every slot that has an env is ready, and takes them all; none may be leased."""
        return self.recv(min_get=max(self.leases.alive, 1), max_get=None, timeout=None)

    @property
    def closed(self) -> bool:
        """Whether the loader is closed."""
        return self._status.closed

    @property
    def receiver(self) -> Receiver:
        """Itself: what takes a loader, a receiver or an adapter asks for this."""
        return self

    @property
    def first_slot(self) -> int:
        """The first slot of this share."""
        return self._first

    @property
    def num_slots(self) -> int:
        """Number of slots in this share."""
        return self._end - self._first

    @property
    def slots(self) -> Sequence[int]:
        """The slots of this share."""
        return range(self._first, self._end)

    @property
    def unanswered(self) -> list[Batch]:
        """The batches that hold slots now, oldest first: send or release them."""
        return self.leases.unanswered

    @property
    def expected(self) -> int:
        """How many slots can become ready, see `Leases.expected`."""
        return self.leases.expected
