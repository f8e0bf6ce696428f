"""Leases: which slots of a share are out, in which batches, and how they come back.

Only this module ends a lease. Its lock covers the trainer's moves of slots, READY -> LEASED -> ACTED or back to READY, and
the books about them; no lock is held while somebody waits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from time import monotonic_ns
from typing import Any

import numpy as np

from slotloader.batching.batches import Batch
from slotloader.batching.episodes import Episode, read_episodes
from slotloader.batching.exchange import Exchange
from slotloader.batching.meters import Meter
from slotloader.errors import ActionError, LeaseExpired, LoaderClosed
from slotloader.fleet.supervisor import Cut
from slotloader.records.specs import Array
from slotloader.table.engine import Engine
from slotloader.table.layout import PROGRESS
from slotloader.table.slots import SlotState

_READY, _LEASED, _DEAD = int(SlotState.READY), int(SlotState.LEASED), int(SlotState.DEAD)
_TERMINATION, _TRUNCATION = b"\x02", b"\x03"
_NO_EPISODE = np.array((0.0, 0, -1, 1), PROGRESS)  # a row of `progress` of a slot that has handed out nothing: none is open


class Leases:
    """The books of the slots `[first, end)`.

    Args:
      exchange: of the loader.
      engine: of these slots.
      index: of the receiver.
      first: the first slot.
      end: the one after the last.
      whole: the leases of all slots, if this is a share after `split`.

    Attributes:
      leased: slots that are in a batch.
      promised: those of them whose actions are on their way from a device.
      alive: slots that have an env, or a record of one.
      meter: the figures.
      last: `progress` of the last record of each slot that was handed out, `PROGRESS` (num_slots,).
    """

    def __init__(
        self, exchange: Exchange, engine: Engine, index: int, first: int, end: int, whole: Leases | None = None
    ) -> None:
        table = exchange.table
        self.exchange, self._engine, self._first, self._end = exchange, engine, first, end
        self._check, self._fleet, self._table = exchange.scatterer.check, exchange.fleet, table
        self._state = table.state
        self.lock = threading.Lock()
        # The rows of `last` as opaque bytes, too: numpy copies those four times faster.
        self.last: Array = np.full(table.num_slots, _NO_EPISODE) if whole is None else whole.last
        self._last_rows, self._progress_rows = _as_rows(self.last), _as_rows(table.progress)
        self.leased = self.promised = 0
        self.alive = int(np.count_nonzero(table.state[first:end] != _DEAD))
        # READY or LEASED slots whose env has ended: DEAD once answered.
        self._doomed: set[int] = set() if whole is None else {slot for slot in whole._doomed if first <= slot < end}
        self._unanswered: dict[int, Batch] = {}  # by the identity of `env_indices`, oldest first
        self._rank = np.full(table.num_slots, -1)  # scratch of `send`: a number for each slot that is named
        self._ranked = 0
        self._buried = False
        self._place = table.meters[index], table.dwells[index]
        self.meter = Meter(*self._place)

    # Taking.

    def take(self, max_get: int) -> Batch:
        """Leases the READY records that wait longest, at most `max_get`, to a new batch; there is one."""
        with self.lock:
            slots, step_type, reward, published = self._engine.take(max_get)
            self.leased += slots.size
            kinds = step_type.tobytes()
            episodes: list[Episode] = []
            if self._fleet.cuts and 0 in kinds:
                episodes.extend(self._interrupted(slots[step_type == 0].tolist()))
            self._last_rows[slots] = self._progress_rows[slots]
            if _TERMINATION in kinds or _TRUNCATION in kinds:
                ended = read_episodes(self._table, slots[step_type >= 2].tolist())
                self.meter.episodes += len(ended)
                episodes.extend(ended)
            now = monotonic_ns()
            most = min(max_get, self.alive)  # slots without an env cannot fill a batch
            batch = Batch(self, most, now, slots, reward, step_type, episodes)
            self._unanswered[id(slots)] = batch
            self.meter.batch_taken(now, slots.size, most, kinds.count(0), published)
            return batch

    def _interrupted(self, firsts: list[int]) -> list[Episode]:
        """The episodes that failures have cut and whose slots now begin a new life."""
        found = []
        for slot in firsts:
            episode_return, length, life, ended = self.last[slot].tolist()
            cut = self._fleet.take_cut(slot, life, int(self._table.life[slot]))
            if cut is None or ended:
                continue  # nothing was cut, or the episode had ended by itself before the failure
            seed = None if cut.seed < 0 else cut.seed
            found.append(
                Episode(slot, cut.life, cut.episode, episode_return, length, seed, interrupted=True, info={}, reason=cut.reason)
            )
        return found

    # Answering.

    def answer(self, batch: Batch, actions: Any) -> None:
        """`Batch.send`."""
        slots = batch.env_indices
        self.require_whole(batch)
        arrays = self._check(actions, slots.size)
        try:  # spelled out: this is the hot path
            with self.lock:
                self.require_whole(batch)
                self._hand_over(slots, arrays)
                self._close(batch, answered=True)
        except BaseException:
            self.repair()
            raise

    def send(self, actions: Any, env_indices: Any) -> None:
        """`Receiver.send`. The indices of one batch, as it has them, cost no more than `Batch.send`."""
        batch = self._unanswered.get(id(env_indices))
        if batch is not None and batch.left == batch.env_indices.size:
            self.answer(batch, actions)
            return
        self.exchange.status.require_open()
        slots = self._checked(env_indices)
        arrays = self._check(actions, slots.size)
        with self._moving():
            repeated = self._named(slots)
            if repeated.size:
                raise ActionError(f"env_indices: expected each slot once, found repeated {sorted(set(repeated.tolist()))[:8]}")
            free = slots[self._state[slots] != _LEASED]
            if free.size:
                raise ActionError(
                    f"env_indices: expected leased slots, found {free.tolist()[:8]} not leased (their batch has been "
                    "answered, or they are in none)"
                )
            self._hand_over(slots, arrays)
            self._close_named(slots.size)

    def _named(self, slots: Array) -> Array:
        """Numbers `slots`, so that `_close_named` finds them; returns those that are named again."""
        self._ranked += slots.size
        ranks = np.arange(self._ranked - slots.size, self._ranked)
        self._rank[slots] = ranks
        return np.asarray(slots[self._rank[slots] != ranks])

    def _close_named(self, count: int) -> None:
        """Closes the rows of the `count` slots that were named last, in whatever batches they are."""
        began, left = self._ranked - count, count
        for batch in list(self._unanswered.values()):
            own = batch.open_slots()
            named = self._rank[own] >= began
            found = int(np.count_nonzero(named))
            if found:
                self._close_some(batch, own[~named], found)
                left -= found
                if not left:
                    break

    def _checked(self, env_indices: Any) -> Array:
        slots = np.asarray(env_indices)
        if slots.ndim != 1 or slots.dtype.kind not in "iu":
            raise ActionError(f"env_indices: expected integers (N,), found {slots.dtype} {slots.shape}")
        slots = slots.astype(np.int64)
        unknown = slots[(slots < self._first) | (slots >= self._end)]
        if unknown.size:
            raise ActionError(
                f"env_indices: expected slots from {self._first} to {self._end - 1}, found {unknown.tolist()[:8]}"
            )
        return slots

    def answer_some(self, batch: Batch, actions: Any, rows: Array) -> None:
        """`Batch.send` for some rows of a batch, bool (size,); the others stay leased. `actions` has all of them."""
        self.require_whole(batch)
        arrays = self._check(actions, batch.size)
        with self._moving():
            self.require_whole(batch)
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
            self._close_some(batch, batch.env_indices[~rows], slots.size)

    def require_whole(self, batch: Batch) -> None:
        """Raises `LeaseExpired` or `LoaderClosed` if a batch can no longer be answered as a whole."""
        if batch.left == batch.env_indices.size:
            if self.exchange.status.closed:
                raise LoaderClosed("this loader was closed; the actions have not been sent")
            return
        raise LeaseExpired(
            "this batch has been answered already"
            if batch.left == 0
            else f"{batch.size - batch.left} rows of this batch have been answered; send the rest with loader.send"
        )

    def _hand_over(self, slots: Array, arrays: Sequence[Array]) -> None:
        """Stores actions, moves the slots LEASED -> ACTED and wakes their workers; the rest of the books can wait.

        Only what `recv` counts with comes before that: the next record may be there at once.
        """
        self.leased -= slots.size
        if self._doomed:
            slots, arrays = self._without_doomed(slots, arrays)
        self._engine.act(slots, arrays)

    def _without_doomed(self, slots: Array, arrays: Sequence[Array]) -> tuple[Array, Sequence[Array]]:
        """Drops the actions of slots whose env has ended, which are DEAD then."""
        lost: Array = np.array([slot in self._doomed for slot in slots.tolist()], bool)
        if not lost.any():
            return slots, arrays
        self._engine.end(slots[lost].tolist())
        self.alive -= int(lost.sum())
        self.meter.dropped_actions += int(lost.sum())
        self._doomed.difference_update(slots[lost].tolist())
        self._buried = True
        return slots[~lost], [array[~lost] for array in arrays]

    def _close_some(self, batch: Batch, still: Array, answered: int) -> None:
        if still.size == 0:
            self._close(batch, answered=True)
            return
        self._keep_promise(batch, answered)
        batch.leave_open(still)

    def _close(self, batch: Batch, answered: bool) -> None:
        self._keep_promise(batch, batch.left)
        batch.close()
        del self._unanswered[id(batch.env_indices)]
        self.meter.batch_closed(monotonic_ns(), batch.taken_ns, answered)

    def _keep_promise(self, batch: Batch, rows: int) -> None:
        if batch.promised:
            kept = min(rows, batch.promised)
            batch.promised -= kept
            self.promised -= kept
            if self._buried:
                self._engine.wake()  # a recv that sleeps may count on the slots that have none any more
        self._buried = False

    # Giving back.

    def release(self, batch: Batch) -> None:
        """`Batch.release`."""
        with self._moving():
            slots = batch.open_slots()
            if slots.size == 0:
                return
            self.leased -= slots.size
            self._engine.give_back(slots)
            self._close(batch, answered=False)
            batch.released = True
            held = set(slots.tolist())
            for episode in reversed(batch.episodes):
                if episode.interrupted and episode.slot in held:  # to be told again with the record
                    self._fleet.give_back_cut(episode.slot, cut_of(episode))
                    self.last[episode.slot] = (episode.episode_return, episode.length, episode.life, 0)
            episodes = sum(episode.slot in held and not episode.interrupted for episode in batch.episodes)
            kinds = batch.step_type[np.isin(batch.env_indices, slots)]
            self.meter.batch_released(batch.size, batch.max_get, kinds, episodes)
        self._engine.wake()  # a recv in another thread may be waiting for just these

    # Beginning anew.

    def seize(self, slots: Array) -> None:
        """Leases those of some slots that are READY to nobody: their records are discarded. `discard` or `repair` follows."""
        with self._moving():
            ready = slots[self._state[slots] == _READY]
            self._engine.seize(ready)
            self.leased += ready.size

    def discard(self, slots: Array) -> None:
        """Answers LEASED slots, those of batches too, with the actions as they are; their envs begin another life with it."""
        with self._moving():
            self._named(slots)
            self._hand_over(slots, [column[slots] for column in self._table.action])
            self._close_named(slots.size)

    def open_cut(self, slot: int, reason: str) -> Cut | None:
        """The episode that is open for whoever receives, if there is one."""
        _, _, life, ended = self.last[slot].tolist()
        table = self._table
        return None if ended else Cut(life, int(table.episode[slot]), int(table.episode_seed[slot]), reason)

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Holds the lock while slots are moved; Ctrl-C in the middle leaves books that fit the states."""
        try:
            with self.lock:
                yield
        except BaseException:
            self.repair()
            raise

    def repair(self) -> None:
        """Makes the books fit the state words after Ctrl-C has struck between two of their stores.

        Slots that were leased for a batch which nobody got are ready again; batches keep the slots that are still leased.
        """
        with self.lock:
            held: set[int] = set()
            for key, batch in list(self._unanswered.items()):
                own = batch.open_slots()  # what was answered may be leased by a later batch
                still = own[self._state[own] == _LEASED]
                batch.promised = min(still.size, batch.promised)
                held.update(still.tolist())
                if still.size == 0:
                    batch.close()
                    del self._unanswered[key]
                elif still.size != batch.left:
                    batch.leave_open(still)
            self.promised = sum(batch.promised for batch in self._unanswered.values())
            leased = np.flatnonzero(self._state[self._first : self._end] == _LEASED) + self._first
            self._engine.give_back(np.array([slot for slot in leased.tolist() if slot not in held], np.int64))
            self.leased = len(held)
            self.meter.set_open(len(self._unanswered), monotonic_ns())
        self._engine.wake_workers()  # an action may have been stored and its worker not woken

    # What can become ready.

    @property
    def unanswered(self) -> list[Batch]:
        """The batches that hold slots now, oldest first."""
        return list(self._unanswered.values())

    @property
    def expected(self) -> int:
        """How many slots can become ready: neither lost nor leased for longer than their actions are on their way."""
        return self.alive - self.leased + self.promised

    def promise(self, batch: Batch, rows: int) -> None:
        """So many rows of a batch will be answered without further ado, so that many slots can become ready."""
        with self.lock:
            self.promised += rows - batch.promised
            batch.promised = rows
        if not rows:
            self._engine.wake()  # a recv that sleeps counts on these slots

    def lose(self, slots: Sequence[int]) -> None:
        """Those envs have ended for good and their writers are gone: finished records are still delivered."""
        with self.lock:
            for slot in slots:
                if not self.owns(slot) or slot in self._doomed or self._state[slot] == _DEAD:
                    continue
                self._table.resetting[slot] = 0
                if self._state[slot] in (_READY, _LEASED):
                    self._doomed.add(slot)
                else:
                    self._engine.end([slot])
                    self.alive -= 1
        self._engine.wake()  # a recv that sleeps counts on these slots

    def gain(self, slot: int) -> None:
        """A new env will serve a slot that nobody served."""
        with self.lock:
            self._engine.begin(slot)
            self.last[slot] = _NO_EPISODE
            self.alive += 1

    def owns(self, slot: int) -> bool:
        """Whether the slot is one of these."""
        return self._first <= slot < self._end

    def is_doomed(self, slot: int) -> bool:
        """Whether the env of a slot that is ready or leased has ended for good."""
        return slot in self._doomed

    # Figures.

    def restart_meter(self) -> None:
        """Begins new figures; batches that are out count in the new ones."""
        with self.lock:
            fresh = Meter(*self._place)
            fresh.adopt_open(len(self._unanswered))
            self.meter = fresh

    def current_meter(self) -> Meter:
        """The figures, with every batch counted that has been handed out."""
        with self.lock:
            self.meter.fold()
        return self.meter

    def exchange_meter(self, meter: Meter) -> Meter:
        """Goes on with other figures; returns those so far, with every batch counted."""
        with self.lock:
            self.meter.fold()
            before, self.meter = self.meter, meter
            return before


def cut_of(episode: Episode) -> Cut:
    """The cut that an interrupted episode was told from."""
    return Cut(episode.life, episode.index, -1 if episode.seed is None else episode.seed, episode.reason)


def _as_rows(array: Array) -> Array:
    """A (N,) array of structured rows as opaque rows over the same memory."""
    return array.view(np.dtype((np.void, array.itemsize)))
