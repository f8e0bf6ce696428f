"""Receiving and sending over a share of the slots: the trainer's side of the table.

The receiver is the only one that moves its slots READY -> LEASED -> ACTED (or back to READY). Its lock covers these moves
and their bookkeeping; no lock is held while it waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from slotloader.batching import batches, former
from slotloader.batching.batches import Batch, Episode
from slotloader.batching.former import Request, Wait
from slotloader.batching.progress import BoundedIterator
from slotloader.batching.stats import Meter
from slotloader.errors import ActionError, FleetStalled, LeaseExpired, LoaderClosed, SlotLoaderError
from slotloader.fleet.supervisor import Cut
from slotloader.records.specs import Array, Tree, build, leaves
from slotloader.table.layout import PROGRESS
from slotloader.table.signals import SLICE, make_fence, make_order_fence
from slotloader.table.slots import SlotState

if TYPE_CHECKING:
    from slotloader.loader import SlotLoader

_READY, _LEASED, _ACTED, _DEAD = (int(s) for s in (SlotState.READY, SlotState.LEASED, SlotState.ACTED, SlotState.DEAD))
_TERMINATION, _TRUNCATION = b"\x02", b"\x03"
_NO_EPISODE = np.array((0.0, 0, -1, 1), PROGRESS)  # a row of `progress` of a slot that has handed out nothing: none is open


class _Default:
    """The value of an argument that was left out."""

    def __repr__(self) -> str:
        return "<the loader's>"


DEFAULT: Any = _Default()


@dataclasses.dataclass(frozen=True)
class Aside:
    """What a receiver knew of its slots and counted before something else used them.

    Attributes:
      meter: its figures.
      last: `progress` of the last record of each slot that was handed out.
      began_ns: when.
    """

    meter: Meter
    last: Array
    began_ns: int


class Receiver:
    """Receives from the slots `[first, end)`; made by `SlotLoader` and by `SlotLoader.split`.

    Iterating yields batches until the loader is closed.
    """

    def __init__(self, loader: SlotLoader, index: int, first: int, end: int, whole: Receiver | None = None) -> None:
        table = loader.table
        self._loader, self._fleet, self._table = loader, loader.fleet, table
        self._index, self._first, self._end = index, first, end
        self.request = loader.request_for(end - first)
        self._signal = loader.fleet.signals[index]
        self._states, self._state, self._count_ready = table.state[first:end], table.state, table.count_ready
        self._fence = make_fence()
        self._order_fence = make_order_fence(self._fence)
        self._wakers, self._worker_of = loader.wakers, table.owner
        self.gather_observation = loader.gatherers[0]
        self.gather_info, self.gather_action = loader.gatherers[1], loader.gatherers[2]
        self.gather_sequence = table.sequence.__getitem__
        self._lock = threading.Lock()  # leases, counters and the trainer's moves of slots
        self._consumer: dict[str, int] = {}  # the thread whose `recv` runs; setdefault on a dict is atomic
        # `progress` of the last record handed out, and the same rows as opaque bytes: numpy copies those four times faster.
        self._last = np.full(table.num_slots, _NO_EPISODE)
        self._recordings = loader.recordings
        self._doomed: set[int] = set()  # READY or LEASED slots whose env has ended; DEAD once answered
        self._serial = self._naps = 0
        self._due: tuple[int, int, int, int, Array] | None = None  # the batch taken last, not yet counted
        self._slept = False  # the last `recv` had to wait
        self._wanted, self._begin_ns = table.wanted_words, table.begin_ns
        if whole is not None:  # a share after `split` goes on where the whole ended
            self._last = whole._last
            self._doomed = {slot for slot in whole._doomed if first <= slot < end}
            self._naps = whole._naps  # workers remember the naps that they have ended
        self._last_rows, self._progress_rows = _as_rows(self._last), _as_rows(table.progress)
        self._leased = 0
        self._promised = 0  # of the leased: rows whose actions are on their way from a device
        self._failure: BaseException | None = None  # of a thread that sends for us; the next `recv` raises it
        self._alive = int(np.count_nonzero(self._states != _DEAD))
        self._unanswered: dict[int, Batch] = {}
        self._warned = self._buried = False
        self.retired = False  # replaced by `split`
        self.meter = Meter()

    # Receiving.

    def recv(
        self,
        min_get: int = DEFAULT,
        max_get: int | None = DEFAULT,
        timeout: float | None = DEFAULT,
        stall_timeout: float | None = DEFAULT,
    ) -> Batch:
        """Waits for the next batch of ready records.

        It returns as soon as at least `min_get` records are ready and either `max_get` are, or nothing more is coming, or
        `timeout` seconds have passed since the oldest of them became ready. Arguments left out take the loader's values.

        Args:
          min_get: fewest records to return; at most the number of slots that can become ready.
          max_get: most records to return, the longest waiting first; None is all slots.
          timeout: seconds that a ready record may wait for company: 0 never lingers, None waits for `max_get` or until
            nothing more is coming (lockstep). It never raises.
          stall_timeout: seconds without enough records until `FleetStalled`; None never.

        Returns:
          Batch with `env_indices` int64 (B,) ascending and `obs` a tree of (B, ...) arrays, owned by the batch.

        Raises:
          ValueError: an argument is out of range.
          SlotLoaderError: fewer than `min_get` slots can become ready, since batches are unanswered; at once.
          FleetStalled: fewer than `min_get` records within `stall_timeout`; none were taken.
          EnvFailed, WorkerDied: an env or a worker failed; the other slots can still be used.
          LoaderClosed: the loader is closed.
        """
        if min_get is DEFAULT and max_get is DEFAULT and timeout is DEFAULT and stall_timeout is DEFAULT:
            request = self.request
        else:
            default = self.request
            if min_get is None:
                raise ValueError("min_get: expected an integer of at least 1, found None")
            if max_get is DEFAULT:  # a min_get of its own above the loader's max_get asks for that many
                max_get = default.max_get if min_get is DEFAULT else max(default.max_get, min_get)
            request = Request.checked(
                min(default.min_get, max_get or default.min_get) if min_get is DEFAULT else min_get,
                max_get,
                default.timeout if timeout is DEFAULT else timeout,
                default.stall_timeout if stall_timeout is DEFAULT else stall_timeout,
                self._end - self._first,
            )
        self._enter()
        try:
            return self._receive(request)
        except BaseException:
            self._repair()
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

    def poll(self) -> Batch | None:
        """Returns the ready records, at most `max_get`, at once; None if there are none."""
        request = Request(1, self.request.max_get, 0, None)
        self._enter()
        try:
            self._require_open()
            ready = self._ready()
            if ready.size == 0 and self._loader.backend == "inline":
                self._signal.wait(0)  # nobody else would ever step these envs
                ready = self._ready()
            if self._fleet.events:
                self._loader.raise_events()
            return self._take(ready, request) if ready.size else None
        except BaseException:
            self._repair()
            raise
        finally:
            self._consumer.clear()

    def _receive(self, request: Request) -> Batch:
        start = changed = monotonic_ns()
        armed = 0
        last_ready = -1
        if self._slept:  # it will have to sleep again, most likely: asking to be woken first saves a look
            armed = self._arm(request.min_get)
        self._slept = False
        try:
            while True:
                self._require_open()
                if self._fleet.events:
                    self._loader.raise_events()
                if self._failure is not None:
                    self.raise_failure()
                count = self._count_ready(self._first, self._end)
                expected = self.expected
                if self._loader.paused:
                    expected = self._in_flight(request, count)
                elif request.min_get > expected:
                    request = self._lowered(request, expected)
                now = monotonic_ns()
                oldest = None
                if request.min_get <= count < request.max_get and request.timeout:
                    ready = self._ready()
                    self._order_fence()
                    oldest = int(self._table.publish_ns[ready].min())
                wait = former.decide(request, count, expected - count, oldest, now)
                if wait is None:
                    return self._take(self._ready(), request)
                if count != last_ready:
                    last_ready, changed = count, now
                if armed != wait.wanted:
                    armed = self._arm(wait.wanted)
                    continue
                self._sleep(request, wait, now, changed if request.timeout is None else start)
                self._slept, armed = True, 0
        finally:
            self._wanted[self._index] = 0

    def _arm(self, wanted: int) -> int:
        """Begins a nap: workers see it, then the states are looked at once more. See `Publisher` for the order."""
        self._naps = (self._naps + 1) & 0xFFFFFFFF
        self._wanted[self._index] = self._naps << 32 | wanted
        self._fence()
        return wanted

    def _ready(self) -> Array:
        ready: Array = (self._states == _READY).nonzero()[0]
        return ready if self._first == 0 else ready + self._first

    def _in_flight(self, request: Request, ready: int) -> int:
        """While the loader is paused only records that are ready or on their way can be expected."""
        moving = (self._states == SlotState.WRITING) | (self._table.resetting[self._first : self._end] == 1)
        expected = ready + int(np.count_nonzero(moving & (self._states != _READY) & (self._states != _LEASED)))
        if request.min_get > expected:
            raise SlotLoaderError(
                f"recv: expected at least {request.min_get} records, found {expected} ready or on their way, since the loader "
                "is paused; call loader.resume()"
            )
        return expected

    def _sleep(self, request: Request, wait: Wait, now: int, since: int) -> None:
        seconds = SLICE
        if wait.until_ns is not None:
            seconds = min(seconds, (wait.until_ns - now) * 1e-9)
        if request.stall_timeout is not None:
            left = request.stall_timeout - (now - since) * 1e-9
            if left <= 0:
                self._raise_if_stalled(request, now, since)
                left = SLICE
            seconds = min(seconds, left)
        self._signal.wait(max(seconds, 0.0))
        self._fleet.tick()
        self.meter.wait_ns += monotonic_ns() - now

    def _require_open(self) -> None:
        if self._loader.closed:
            raise LoaderClosed(self._loader.why_closed)
        if self.retired:
            raise SlotLoaderError("this loader was split: receive from the receivers that loader.split(n) returned")

    def _lowered(self, request: Request, expected: int) -> Request:
        """`min_get` is above what can come: an error while batches are unanswered, lowered for slots lost for good."""
        if self._alive == 0:
            last = self._loader.last_failure
            raise SlotLoaderError(
                "no slot is left: every env of this loader has failed or was removed; build a new SlotLoader"
                + (f". The last failure: {last}" if last else " or use add_envs")
            )
        if request.min_get > self._alive:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"min_get={request.min_get} is more than the {self._alive} slots that are left; it is lowered",
                    RuntimeWarning,
                    stacklevel=5,
                )
            request = Request(self._alive, max(self._alive, 1), request.timeout, request.stall_timeout)
        if request.min_get <= expected:
            return request
        self.raise_failure()  # it may be why fewer are expected than a moment ago
        held = "; ".join(
            f"batch of {batch.size} with slots {batch.env_indices.tolist()[:8]}{'...' if batch.size > 8 else ''}"
            for batch in list(self._unanswered.values())[:4]
        )
        raise SlotLoaderError(
            f"recv: expected at least {request.min_get} slots that can become ready, found {expected}, since {self._leased} "
            f"of {self._alive} slots are leased in {len(self._unanswered)} unanswered batches ({held}); "
            "call batch.send(actions) or batch.release() on them (loader.unanswered has them; `close` of a rollout releases "
            "those at its barrier)"
        )

    def _raise_if_stalled(self, request: Request, now: int, since: int) -> None:
        coming = [slot for slot in range(self._first, self._end) if self._state[slot] not in (_READY, _LEASED, _DEAD)]
        excused = {slot for slot in coming if self._is_excused(slot, now)}
        ready = self._ready().size
        if request.timeout is None and ready >= request.min_get:
            if excused or self._promised:
                return
        elif ready + len(excused) + self._promised >= request.min_get:  # a slow device is no fault of the fleet
            return
        ages = {slot: self._age(slot, now) for slot in coming if slot not in excused}
        slowest = sorted(ages, key=lambda slot: -ages[slot])
        named = ", ".join(f"slot {slot} ({self._doing(slot)} for {ages[slot]:.2f} s)" for slot in slowest[:8])
        raise FleetStalled(
            f"recv: expected at least {request.min_get} ready records within stall_timeout={request.stall_timeout:g} s, "
            f"found {ready}; the slowest: {named}; nothing was taken, recv may be called again. "
            "Raise stall_timeout if such steps are normal",
            slowest,
        )

    def _is_excused(self, slot: int, now: int) -> bool:
        starting = self._table.resetting[slot] or self._state[slot] == SlotState.STARTING
        limits = self._loader.limits
        limit = limits.reset_timeout or limits.start_timeout
        return bool(starting) and self._age(slot, now) < limit

    def _age(self, slot: int, now: int) -> float:
        return float(now - self._table.begin_ns[slot]) * 1e-9

    def _doing(self, slot: int) -> str:
        if self._table.resetting[slot]:
            return "in reset"
        return {SlotState.WRITING: "in step", SlotState.STARTING: "starting"}.get(
            SlotState(self._state[slot]), "waiting for its worker"
        )

    def _take(self, ready: Array, request: Request) -> Batch:
        table = self._table
        self._order_fence()  # states before payload
        with self._lock:
            if ready.size > request.max_get:
                ready = former.choose(ready, table.publish_ns[ready], request.max_get)
            self._serial = serial = self._serial + 1
            self._state[ready] = _LEASED
            self._leased += ready.size
            step_type = table.step_type[ready]
            kinds = step_type.tobytes()
            episodes: list[Episode] = []
            if self._fleet.cuts and 0 in kinds:
                episodes.extend(self._interrupted(ready[step_type == 0].tolist()))
            self._last_rows[ready] = self._progress_rows[ready]
            if _TERMINATION in kinds or _TRUNCATION in kinds:
                ended = batches.read_episodes(table, ready[step_type >= 2].tolist())
                self.meter.episodes += len(ended)
                episodes.extend(ended)
            now = monotonic_ns()
            most = min(request.max_get, self._alive)  # slots without an env cannot fill a batch
            batch = Batch(self, serial, most, now, ready, table.reward[ready], step_type, episodes)
            self._unanswered[serial] = batch
            self._keep_books()
            self._due = (now, ready.size, most, kinds.count(0), table.publish_ns[ready])
        if self._recordings:
            self._record(batch)
        return batch

    def _record(self, batch: Batch) -> None:
        """Shows a batch to the recordings; Ctrl-C meanwhile gives it back, since nobody has got it."""
        try:
            for recording in list(self._recordings):
                recording.see(batch)
        except BaseException:
            batch.release()
            raise

    def _keep_books(self) -> None:
        """Counts the batch taken last: after its workers have been woken, or when somebody looks; under the lock."""
        if self._due is not None:
            now, size, most, firsts, published = self._due
            self._due = None
            self.meter.batch_taken(now, size, most, firsts, now - published)

    def _interrupted(self, firsts: list[int]) -> list[Episode]:
        """The episodes that failures have cut and whose slots now begin a new life."""
        found = []
        for slot in firsts:
            episode_return, length, life, ended = self._last[slot].tolist()
            cut = self._fleet.take_cut(slot, life, int(self._table.life[slot]))
            if cut is None or ended:
                continue  # nothing was cut, or the episode had ended by itself before the failure
            seed = None if cut.seed < 0 else cut.seed
            found.append(Episode(slot, cut.life, cut.episode, episode_return, length, seed, interrupted=True, info={}))
        return found

    # Sending.

    def send(self, actions: Any, env_indices: Any) -> None:
        """Answers some leased slots, of one batch or of several: all or nothing, safe beside `recv`.

        Args:
          actions: tree of (N, ...) arrays, by the action space.
          env_indices: integers (N,), the slots, without repetition.

        Raises:
          ActionError: an index is unknown, repeated or not leased, or the actions do not fit; no env has stepped.
        """
        self._require_open()
        slots = np.asarray(env_indices)
        if slots.ndim != 1 or slots.dtype.kind not in "iu":
            raise ActionError(f"env_indices: expected integers (N,), found {slots.dtype} {slots.shape}")
        slots = slots.astype(np.int64)
        unknown = slots[(slots < self._first) | (slots >= self._end)]
        if unknown.size:
            raise ActionError(
                f"env_indices: expected slots from {self._first} to {self._end - 1}, found {unknown.tolist()[:8]}"
            )
        if np.unique(slots).size != slots.size:
            repeated = [slot for slot, count in zip(*np.unique(slots, return_counts=True), strict=True) if count > 1]
            raise ActionError(f"env_indices: expected each slot once, found repeated {[int(s) for s in repeated[:8]]}")
        arrays = self._loader.scatterer.check(actions, slots.size)
        with self._moving():
            free = slots[self._state[slots] != _LEASED]
            if free.size:
                raise ActionError(
                    f"env_indices: expected leased slots, found {free.tolist()[:8]} not leased (their batch has been "
                    "answered, or they are in none)"
                )
            self._hand_over(slots, arrays)
            for batch in list(self._unanswered.values()):
                own = np.isin(batch.open_slots(), slots)
                if own.any():
                    batch.close_slots(own)
                    self._close(batch, int(own.sum()), answered=True)

    def answer(self, batch: Batch, actions: Any) -> None:
        """`Batch.send`."""
        slots = batch.env_indices
        self.require_unanswered(batch)
        arrays = self._loader.scatterer.check(actions, slots.size)
        try:  # spelled out: this is the hot path
            with self._lock:
                self.require_unanswered(batch)
                self._hand_over(slots, arrays)
                self._close(batch, slots.size, answered=True)
        except BaseException:
            self._repair()
            raise

    def answer_some(self, batch: Batch, actions: Any, rows: Array) -> None:
        """`Batch.send` for some rows of a batch, bool (size,); the others stay leased. `actions` has all of them."""
        self.require_unanswered(batch)
        arrays = self._loader.scatterer.check(actions, batch.size)
        with self._moving():
            self.require_unanswered(batch)
            self._answer_rows(batch, rows, [array[rows] for array in arrays])

    def pass_over(self, batch: Batch, rows: Array | None = None) -> None:
        """Answers a batch, or its rows bool (size,), whose actions will be discarded, with the actions as they are."""
        rows = np.ones(batch.size, bool) if rows is None else rows
        with self._moving():
            self._answer_rows(batch, rows, [column[batch.env_indices[rows]] for column in self._table.action])

    def _answer_rows(self, batch: Batch, rows: Array, arrays: Sequence[Array]) -> None:
        slots = batch.env_indices[rows]
        if slots.size:
            self._hand_over(slots, arrays)
            batch.close_slots(rows)
            self._close(batch, slots.size, answered=True)

    def release(self, batch: Batch) -> None:
        """`Batch.release`."""
        with self._moving():
            slots = batch.open_slots() if batch._left else batch.env_indices[:0]
            if slots.size == 0:
                return
            self._keep_books()
            self._leased -= slots.size
            self._state[slots] = _READY
            self._close(batch, slots.size, answered=False)
            batch.released = True
            held = set(slots.tolist())
            for episode in reversed(batch.episodes):
                if episode.interrupted and episode.slot in held:  # to be told again with the record
                    cut = Cut(episode.life, episode.index, -1 if episode.seed is None else episode.seed)
                    self._fleet.give_back_cut(episode.slot, cut)
                    self._last[episode.slot] = (episode.episode_return, episode.length, episode.life, 0)
            episodes = sum(episode.slot in held and not episode.interrupted for episode in batch.episodes)
            kinds = batch.step_type[np.isin(batch.env_indices, slots)]
            self.meter.batch_released(batch.size, batch._max_get, kinds, episodes)
        self._signal.post()  # a recv in another thread may be waiting for just these

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Holds the lock while slots are moved; Ctrl-C in the middle leaves books that fit the states."""
        try:
            with self._lock:
                yield
        except BaseException:
            self._repair()
            raise

    def _repair(self) -> None:
        """Makes the books fit the state words after Ctrl-C has struck between two of their stores.

        Slots that were leased for a batch which nobody got are ready again; batches keep the slots that are still leased.
        """
        with self._lock:
            self._keep_books()
            held: set[int] = set()
            for serial, batch in list(self._unanswered.items()):
                own = batch.open_slots()  # what was answered may be leased by a later batch
                still = own[self._state[own] == _LEASED]
                batch.set_open(still)
                batch.promised = min(still.size, batch.promised)
                held.update(still.tolist())
                if still.size == 0:
                    batch.before_release = None
                    del self._unanswered[serial]
            self._promised = sum(batch.promised for batch in self._unanswered.values())
            leased = np.flatnonzero(self._states == _LEASED) + self._first
            self._state[[slot for slot in leased.tolist() if slot not in held]] = _READY
            self._leased = len(held)
            self.meter.set_open(len(self._unanswered), monotonic_ns())
        for wake in self._wakers:  # an action may have been stored and its worker not woken
            wake()

    def require_unanswered(self, batch: Batch) -> None:
        """Raises `LeaseExpired` or `LoaderClosed` if a batch can no longer be answered."""
        if batch._left == batch.size:
            if self._loader.closed:
                raise LoaderClosed("this loader was closed; the actions have not been sent")
            return
        raise LeaseExpired(
            "this batch has been answered already"
            if batch._left == 0
            else f"{batch.size - batch._left} rows of this batch have been answered; send the rest with loader.send"
        )

    def _hand_over(self, slots: Array, arrays: Sequence[Array]) -> None:
        """Stores actions, moves the slots LEASED -> ACTED and wakes their workers; the rest of the books can wait.

        Only what `recv` counts with comes before the state word: the next record may be there at once.
        """
        self._leased -= slots.size
        self._begin_ns[slots] = monotonic_ns()
        self._loader.scatterer.write(slots, arrays)
        self._order_fence()  # actions, and our last reads of the rows, before the state
        if self._doomed:
            slots = self._bury(slots)
        self._state[slots] = _ACTED
        owners = self._worker_of[slots].tolist()
        for worker in set(owners) if len(owners) > 1 else owners:
            self._wakers[worker]()
        self._keep_books()

    def _bury(self, slots: Array) -> Array:
        """Drops the actions of slots whose env has ended; returns the others."""
        lost: Array = np.array([slot in self._doomed for slot in slots.tolist()])
        self._state[slots[lost]] = _DEAD
        self._alive -= int(lost.sum())
        self.meter.dropped_actions += int(lost.sum())
        self._doomed.difference_update(slots[lost].tolist())
        self._buried = self._buried or bool(lost.any())
        return np.asarray(slots[~lost])

    def _close(self, batch: Batch, rows: int, answered: bool) -> None:
        batch._left -= rows
        if batch.promised:
            kept = min(rows, batch.promised)
            batch.promised -= kept
            self._promised -= kept
            if self._buried:
                self._signal.post()  # a recv that sleeps may count on the slots that have none any more
        self._buried = False
        if batch._rows:
            for view in batch._rows:
                view.expire()
            batch._rows = None
        if batch._left == 0:
            batch.before_release = None
            del self._unanswered[batch._serial]
            self.meter.batch_closed(monotonic_ns(), batch._taken_ns, answered)

    # What the sender of a device's actions tells us.

    def promise(self, batch: Batch, rows: int) -> None:
        """So many rows of a batch will be answered without further ado, so that many slots can become ready."""
        with self._lock:
            self._promised += rows - batch.promised
            batch.promised = rows
        if not rows:
            self._signal.post()  # a recv that sleeps counts on these slots

    @property
    def expected(self) -> int:
        """How many slots can become ready: neither lost nor leased for longer than their actions are on their way."""
        return self._alive - self._leased + self._promised

    def fail(self, error: BaseException, batch: Batch | None = None) -> None:
        """Has the `recv` that runs, or else the next one, raise `error`, unless it has another to raise already.

        Args:
          error: what is raised.
          batch: what was promised for it is taken back, in one go: whoever sees the error finds the batch unanswered.
        """
        with self._lock:
            if batch is not None:
                self._promised -= batch.promised
                batch.promised = 0
            if self._failure is None:
                self._failure = error
        self._signal.post()

    def forget(self, error: BaseException) -> None:
        """Takes back what `fail` was told, if nobody has raised it yet."""
        if self._failure is error:
            self._failure = None

    def raise_failure(self) -> None:
        """Raises what `fail` was told, once."""
        with self._lock:
            error, self._failure = self._failure, None
        if error is not None:
            raise error

    # What an evaluation in the middle of a run asks.

    def take_all(self) -> Batch:
        """Waits until every slot that has an env is ready, and takes them all; none may be leased."""
        return self.recv(min_get=max(self._alive, 1), max_get=None, timeout=None)

    def set_aside(self) -> Aside:
        """Begins new figures, until `go_back`."""
        with self._lock:
            self._keep_books()
            aside = Aside(self.meter, self._last.copy(), monotonic_ns())
            self.meter = Meter()
            return aside

    def cuts_of(self, aside: Aside, batch: Batch, slots: Sequence[int]) -> dict[int, Cut]:
        """The episodes that are open for whoever received before `aside`, if they go no further than the records of `batch`."""
        interrupted = {episode.slot: episode for episode in batch.episodes if episode.interrupted}
        cuts, table = {}, self._table
        for slot in slots:
            _, _, life, ended = aside.last[slot].tolist()
            episode = interrupted.get(slot)
            if not ended and episode is not None:
                cuts[slot] = Cut(episode.life, episode.index, -1 if episode.seed is None else episode.seed)
            elif not ended:
                cuts[slot] = Cut(life, int(table.episode[slot]), int(table.episode_seed[slot]))
        return cuts

    def go_back(self, aside: Aside, slots: Sequence[int], cuts: Mapping[int, Cut]) -> None:
        """Goes on with the figures from before; the next record of each slot tells of the episode that was cut."""
        with self._lock:
            self._keep_books()
            self.meter = aside.meter
            self.meter.start_ns += monotonic_ns() - aside.began_ns
            self._last[slots] = aside.last[slots]
        for slot, cut in cuts.items():
            self._fleet.give_back_cut(slot, cut)

    # What the loader asks of its receivers.

    def lose(self, slots: Sequence[int]) -> None:
        """Those envs have ended for good and their writers are gone: finished records are still delivered."""
        with self._lock:
            for slot in slots:
                if not self._first <= slot < self._end or slot in self._doomed or self._state[slot] == _DEAD:
                    continue
                self._table.resetting[slot] = 0
                if self._state[slot] in (_READY, _LEASED):
                    self._doomed.add(slot)
                else:
                    self._state[slot] = _DEAD
                    self._alive -= 1
        self._signal.post()  # a recv that sleeps counts on these slots

    def restart_meter(self) -> None:
        """Begins new figures; batches that are out count in the new ones."""
        with self._lock:
            self._due = None
            fresh = Meter()
            fresh.adopt_open(len(self._unanswered))
            self.meter = fresh

    def current_meter(self) -> Meter:
        """The figures, with every batch counted that has been handed out."""
        with self._lock:
            self._keep_books()
        return self.meter

    def gain(self, slot: int) -> None:
        """A new env will serve a slot that nobody served."""
        with self._lock:
            self._state[slot] = SlotState.STARTING
            self._begin_ns[slot] = monotonic_ns()
            self._last[slot] = _NO_EPISODE
            self._alive += 1

    def owns(self, slot: int) -> bool:
        """Whether the slot is in this receiver's share."""
        return self._first <= slot < self._end

    def has_slots(self) -> bool:
        """Whether an env is left, or a record of one."""
        return self._alive > 0

    def is_doomed(self, slot: int) -> bool:
        """Whether the env of a slot that is ready or leased has ended for good."""
        return slot in self._doomed

    def columns_for_view(self) -> tuple[Any, list[Array]]:
        """The observation tree over the table itself, read-only; in debug mode over copies, returned to be poisoned."""
        tree: Tree = self._table.layout.observation
        if self._loader.debug:
            copies = [column.copy() for column in self._table.observation]
            return _tree_of_columns(tree, copies), copies
        views = []
        for column in self._table.observation:
            view = column.view()
            view.flags.writeable = False
            views.append(view)
        return _tree_of_columns(tree, views), []

    def steps(self, env_steps: int, progress: bool | None = None) -> BoundedIterator[Batch]:
        """Yields batches until `env_steps` records that are not FIRST have come in; a bar on a terminal."""
        return BoundedIterator(self, env_steps, "env steps", progress)

    def episodes(self, episodes: int, progress: bool | None = None) -> BoundedIterator[Batch]:
        """Yields batches until `episodes` episodes have ended. Short episodes come first: not for unbiased returns."""
        return BoundedIterator(self, episodes, "episodes", progress)

    @property
    def closed(self) -> bool:
        """Whether the loader is closed."""
        return self._loader.closed

    @property
    def loader(self) -> SlotLoader:
        """The loader whose slots these are."""
        return self._loader

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
    def unanswered(self) -> list[Batch]:
        """The batches that hold slots now, oldest first: send or release them."""
        return list(self._unanswered.values())

    def __iter__(self) -> Iterator[Batch]:
        return BatchIterator(self)


def _as_rows(array: Array) -> Array:
    """A (N,) array of structured rows as opaque rows over the same memory."""
    return array.view(np.dtype((np.void, array.itemsize)))


def _tree_of_columns(tree: Tree, columns: Sequence[Array]) -> Any:
    at = iter(columns)
    return build(tree, (batches.Gatherer._value(leaf, at) for leaf in leaves(tree)))


class BatchIterator(Iterator[Batch]):
    """Yields batches until the loader is closed. An object and no generator: after an exception it goes on."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def __next__(self) -> Batch:
        try:
            return self._receiver.recv()
        except LoaderClosed:
            raise StopIteration from None
