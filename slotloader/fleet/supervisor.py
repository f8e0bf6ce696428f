"""Starting, watching, restarting and stopping the workers of one loader: what all backends share."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotloader.errors import LoaderClosed, SlotLoaderError, SpecMismatch, WorkerDied
from slotloader.fleet.supervision import Limits, RestartPolicy
from slotloader.messages.pickling import loaded
from slotloader.messages.reports import Answer, Built, Died, Event, Failed, Remark, Removed, error_from, how_it_ended, summary
from slotloader.records.specs import Tree, differences, show_tree
from slotloader.table.layout import Layout
from slotloader.table.signals import Signal
from slotloader.table.slots import SlotState, Table
from slotloader.worker.config import EnvOptions, LifePlan, WorkerConfig
from slotloader.worker.envs import EnvFactory

_ENDING_LIMIT = 5.0  # seconds that `add_envs` waits for a dismissed worker to end

log = logging.getLogger("slotloader")


@dataclass(frozen=True)
class Cut:
    """An episode that a failure may have cut: named when the first record of the slot's next life arrives."""

    life: int
    episode: int
    seed: int
    reason: str = ""


class Fleet:
    """Base of the backends.

    Reports of workers arrive through `deliver`, in any thread. `events` is what the receivers have not yet looked at.

    Attributes:
      events: failures and deaths that are to be raised, and envs that have been removed, oldest first;
        appended by the watching thread, taken by a receiver.
      cuts: episodes that a failure may have cut, by slot; added by the watching thread, taken by a receiver.
      lives: the life that each slot is in or about to begin.
      restarts: lives begun after failures, over all slots.
      running: the table exists; before that every failure ends the constructor.
      signals: one per receiver, posted by workers and, on every event, by the fleet.
      table: the region, after `attach`.
    """

    signals: Sequence[Signal]
    table: Table
    may_park = False  # slots may be PARKED: expected, but not coming

    def __init__(self, configs: Sequence[WorkerConfig], limits: Limits, max_workers: int) -> None:
        self.configs = list(configs)
        self.max_workers = max_workers
        self._free_workers: list[int] = []  # indices whose worker has been dismissed and has ended
        self._dismissed: set[int] = set()
        self.limits = limits
        self.policy = RestartPolicy(limits)
        self.lives = {slot: 0 for config in configs for slot in self.slots_of(config.index)}
        self.cuts: dict[int, list[Cut]] = {}
        self.running = False
        self.restarts = 0
        self.events: collections.deque[Event | Removed] = collections.deque()
        self.closing = False
        self._built: dict[int, Built] = {}
        self._answers: dict[int, Answer | None] = {}  # by ticket; None: its worker died first
        self._pending: dict[int, int] = {}  # tickets that somebody waits for -> worker
        # Rebuilds that nobody waits for, by ticket, in the order in which their worker does them: worker, slots, and by when
        # (monotonic) the one that is being done must have ended.
        self.rebuilds: dict[int, tuple[int, tuple[int, ...], float]] = {}
        self._removals: dict[int, tuple[int, tuple[int, ...]]] = {}  # tickets of removals that are not done: worker, slots
        self._tickets = itertools.count(1)
        self._gone: set[int] = set()  # workers that have ended
        self._topics: set[str] = set()  # of remarks that have been logged
        self._changed = threading.Condition(threading.RLock())  # reports of inline workers come from under it

    # What each backend does in its own way.

    def launch(self) -> None:
        """Starts the workers and lets them build their envs."""
        raise NotImplementedError

    def attach(self, layout: Layout) -> Table:
        """Creates the region and hands it to the workers, which then reset and publish."""
        raise NotImplementedError

    def wakers(self) -> list[Callable[[], None]]:
        """One function per worker that wakes it after its slots got actions."""
        raise NotImplementedError

    def send_command(self, worker: int, message: tuple[Any, ...]) -> None:
        """Hands a command to a worker."""
        raise NotImplementedError

    def stack_of(self, worker: int) -> str:
        """The Python stack of a worker that does not answer."""
        raise NotImplementedError

    def stop(self, deadline: float) -> None:
        """Ends every worker, in order while there is time until `deadline` (monotonic), by force after it."""
        raise NotImplementedError

    # Shared.

    def slots_of(self, worker: int) -> tuple[int, ...]:
        """The slots that a worker serves."""
        config = self.configs[worker]
        return tuple(slot for slot, factory in zip(config.slots, config.factories, strict=True) if factory is not None)

    def prepared(self, table: Table) -> Table:
        """Fills in who serves each slot, and one receiver over all of them; before any worker attaches."""
        table.state[:] = SlotState.DEAD  # reserved by `capacity`
        for config in self.configs:
            own = list(config.slots)
            table.owner[own], table.state[own] = config.index, SlotState.STARTING
        table.end_slot[0] = table.num_slots
        self.table, self.running = table, True
        return table

    def deliver(self, report: Built | Failed | Answer | Died | Remark) -> None:
        """Takes a report from a worker or about one; decides about failures."""
        with self._changed:
            if isinstance(report, Built):
                self._built[report.worker] = report
                if self.running and not self.closing:
                    self._admit(report)
            elif isinstance(report, Answer):
                self._take_answer(report)
            elif isinstance(report, Remark):
                if report.topic not in self._topics:
                    self._topics.add(report.topic)
                    log.warning("%s", report.text)
            else:
                self._take_failure(report)
            self._changed.notify_all()

    def _take_answer(self, answer: Answer) -> None:
        if answer.ticket in self._pending:
            self._answers[answer.ticket] = answer
        elif answer.ticket in self._removals:
            self._have_left(*self._removals.pop(answer.ticket))
        elif answer.ticket in self.rebuilds:
            del self.rebuilds[answer.ticket]
            self._next_rebuild_begins(answer.worker)
            if answer.failure is not None:
                self._take_failure(answer.failure)

    def _next_rebuild_begins(self, worker: int) -> None:
        """A worker does one rebuild after the other, so the limit of the next counts from now."""
        for ticket, (index, slots, _) in self.rebuilds.items():
            if index == worker:
                self.rebuilds[ticket] = (index, slots, time.monotonic() + self.limits.start_timeout)
                return

    def late_rebuilds(self, now: float) -> set[int]:
        """Workers whose rebuild has exceeded `start_timeout`; `now` is monotonic."""
        with self._changed:
            first: dict[int, float] = {}
            for worker, _, limit in self.rebuilds.values():
                first.setdefault(worker, limit)
            return {worker for worker, limit in first.items() if now > limit}

    def _take_failure(self, event: Event) -> None:
        """Restarts what may be restarted; the rest becomes an event for the next `recv`. Holds the lock."""
        if isinstance(event, Died):
            self._gone.add(event.worker)
            self.rebuilds = {ticket: build for ticket, build in self.rebuilds.items() if build[0] != event.worker}
            for ticket, worker in self._pending.items():
                if worker == event.worker and ticket not in self._answers:
                    self._answers[ticket] = None
            for ticket, (worker, own) in list(self._removals.items()):
                if worker == event.worker:  # its envs have gone with it
                    del self._removals[ticket]
                    self._have_left(worker, own)
        if isinstance(event, Died) and event.worker in self._dismissed:
            self._release_worker(event.worker)
            return
        if self.closing:
            return
        if self.running:
            kept = tuple(slot for slot in event.slots if slot in self.slots_of(event.worker))
            if not kept:
                return  # all of them have been removed
            event = dataclasses.replace(event, slots=kept)
        refusal: str | None = ""
        if self.running and not event.note:
            # A record that breaks its spaces is a mistake, however long the env has worked.
            mistake = isinstance(event, Failed) and event.error_type == "SpecMismatch"
            has_worked = not mistake and any(int(self.table.steps[slot]) > 0 for slot in event.slots)
            refusal = self.policy.refuse(event.slots, has_worked, time.monotonic())
        if refusal is None:
            self._restart(event)
            return
        self.events.append(dataclasses.replace(event, note=event.note or refusal))
        for signal in self.signals:
            signal.post()

    def _restart(self, event: Event) -> None:
        table, lives = self.table, {}
        for slot in event.slots:
            why = f"{event.error_type}: {event.text}" if isinstance(event, Failed) else event.why
            reason = why or how_it_ended(event.exitcode) if isinstance(event, Died) else why
            seed = int(table.episode_seed[slot])
            cut = Cut(int(table.life[slot]), int(table.episode[slot]), seed, reason.partition("\n")[0][:200])
            cuts = self.cuts.setdefault(slot, [])
            if not cuts or cuts[-1].life < cut.life:  # a life that dies before its first record cuts nothing new
                cuts.append(cut)
            table.resetting[slot] = 0
            self.restarts += 1
            lives[slot] = self.lives[slot] = max(self.lives[slot], int(table.life[slot])) + 1
            if table.state[slot] not in (SlotState.READY, SlotState.LEASED):  # those are still delivered and answered
                table.state[slot] = SlotState.STARTING
        count, limits = self.policy.count(event.slots[0]), self.limits
        log.warning("%s; restarting (%d of %d in %g s)", summary(event), count, limits.max_restarts, limits.restart_window)
        if isinstance(event, Failed) and event.traceback:
            log.info("traceback in the worker:\n%s", event.traceback)
        if isinstance(event, Failed):
            ticket = next(self._tickets)
            self.rebuilds[ticket] = (event.worker, event.slots, time.monotonic() + limits.start_timeout)
            self.send_command(event.worker, (ticket, "rebuild", list(event.slots), lives))
            return
        try:
            self.respawn(event.worker)
        except OSError as error:
            self._gone.add(event.worker)
            self._take_failure(dataclasses.replace(event, note=f"it could not be restarted: {error}"))

    def take_cut(self, slot: int, last_life: int, new_life: int) -> Cut | None:
        """The cut of the life whose record was handed out last, now that a record of `new_life` follows it."""
        with self._changed:
            cuts = self.cuts.pop(slot, [])
            later = [cut for cut in cuts if cut.life >= new_life]
            if later:
                self.cuts[slot] = later
            return next((cut for cut in reversed(cuts) if cut.life == last_life < new_life), None)

    def give_back_cut(self, slot: int, cut: Cut) -> None:
        """Keeps a cut for the next delivery of the record that it came with."""
        with self._changed:
            self.cuts.setdefault(slot, []).insert(0, cut)

    def begin_lives(
        self,
        slots: Sequence[int],
        evaluations: Mapping[int, tuple[int, int]] | None = None,
        wishes: Mapping[int, Any] | None = None,
    ) -> dict[int, int]:
        """Has the envs of `slots` begin another life with their next action, without being rebuilt.

        Args:
          slots: leased, so that none of them moves meanwhile.
          evaluations: `(seed, begun)` by slot, see `LifePlan`.
          wishes: `(seed, options)` of the first reset by slot, see `LifePlan`.

        Returns:
          The life by slot. One whose worker has just died begins a later life than that.
        """
        with self._changed:
            lives = {slot: max(self.lives[slot], int(self.table.life[slot])) + 1 for slot in slots}
            self.lives.update(lives)
        plans = {}
        for slot, life in lives.items():
            seed, options = (wishes or {}).get(slot, (None, None))
            plans[slot] = LifePlan(life, seed, options, (evaluations or {}).get(slot))
        try:
            self.command("begin_life", slots, plans)
        except WorkerDied:
            for slot in slots:
                with contextlib.suppress(WorkerDied):
                    self.command("begin_life", [slot], plans)
        return lives

    def hire(self, slot: int, factory: EnvFactory, options: EnvOptions, threads: bool) -> None:
        """Starts a worker for one more env; its failures come as events."""
        with self._changed:
            # A worker that has just been dismissed is still ending.
            self._changed.wait_for(
                lambda: self._free_workers or len(self.configs) < self.max_workers or not self._dismissed, _ENDING_LIMIT
            )
            if self._free_workers:
                index = self._free_workers.pop()
                self._gone.discard(index)
            elif len(self.configs) < self.max_workers:
                index = len(self.configs)
            else:
                raise SlotLoaderError(f"add_envs: all {self.max_workers} workers of this loader are in use or still ending")
            config = WorkerConfig(index, (slot,), [factory], options, threads)
            before, life = self.configs[index : index + 1], self.lives.get(slot)
            self.configs[index : index + 1] = [config]
            self.table.owner[slot] = index
            self.lives[slot] = self.lives[slot] + 1 if slot in self.lives else 0
            self.cuts.pop(slot, None)
            try:
                self.start_worker(config)
            except BaseException:  # nothing has been started: the worker is as free as it was
                self.configs[index : index + 1] = before
                if before:
                    self._gone.add(index)
                    self._free_workers.append(index)
                if life is None:
                    del self.lives[slot]
                raise

    def start_worker(self, config: WorkerConfig) -> None:
        """Starts a worker while the loader runs."""
        raise NotImplementedError

    def remove(self, slots: Sequence[int], timeout: float | None) -> None:
        """Closes the envs of `slots` between two of their steps; a worker without envs ends.

        The books come first: whatever dies or fails from here on, these envs are not built again. What a worker answers late
        still counts, and asking again waits for the same answer.

        Raises:
          TimeoutError: some are still in a step after `timeout` seconds; they will be closed when it ends.
        """
        with self._changed:
            fresh = [slot for slot in slots if slot in self.slots_of(int(self.table.owner[slot]))]  # the others are leaving
            leaving = {slot for _, own in self._removals.values() for slot in own}
            leaving.update(slot for event in self.events if isinstance(event, Removed) for slot in event.slots)
            unserved = tuple(slot for slot in slots if slot not in fresh and slot not in leaving)
            self._drop_failures(slots)
            if unserved:  # their worker was turned away, and its place has been given to another env
                self.events.append(Removed(unserved))
            for index in sorted({int(self.table.owner[slot]) for slot in fresh}):
                own = tuple(slot for slot in fresh if int(self.table.owner[slot]) == index)
                config = self.configs[index]
                kept = [None if s in own else f for s, f in zip(config.slots, config.factories, strict=True)]
                self.configs[index] = dataclasses.replace(config, factories=kept)
                if index in self._gone or index in self._dismissed:
                    self._have_left(index, own)
                    continue
                self.config_changed(index)
                ticket = next(self._tickets)
                self._removals[ticket] = (index, own)
                self.send_command(index, (ticket, "remove", list(own)))
            deadline = None if timeout is None else time.monotonic() + timeout
            while left := {slot for _, own in self._removals.values() for slot in own}.intersection(slots):
                if self.closing:
                    raise LoaderClosed("the loader was closed while a removal was waiting")
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"remove_envs: the envs of slots {sorted(left)[:8]} are still in a step or a reset after {timeout:g} "
                        "s; they will be closed when it ends"
                    )
                self._changed.wait(0.25 if deadline is None else min(0.25, max(0.0, deadline - time.monotonic())))

    def _drop_failures(self, slots: Sequence[int]) -> None:
        """What has failed of envs that nobody wants any more is not told. Holds the lock."""
        for event in self.take_events():
            if isinstance(event, Removed):
                self.events.append(event)
                continue
            kept = tuple(slot for slot in event.slots if slot not in slots)
            if kept:
                self.events.append(dataclasses.replace(event, slots=kept))

    def config_changed(self, worker: int) -> None:
        """The envs of a worker are others from now on, should it be started again."""

    def _have_left(self, worker: int, slots: Sequence[int]) -> None:
        """The envs of some slots are closed, or have gone with their worker. Holds the lock."""
        self.events.append(Removed(tuple(slots)))
        for signal in self.signals:
            signal.post()
        if self.slots_of(worker):
            return
        if worker in self._gone:
            if worker not in self._free_workers:
                self._release_worker(worker)
        elif worker not in self._dismissed:
            self._dismissed.add(worker)
            self.table.stop_words[worker] = 1
            self.wakers()[worker]()

    def take_removed(self) -> list[int]:
        """The slots whose envs have left since this was last asked; other events stay."""
        with self._changed:
            found = [event for event in self.events if isinstance(event, Removed)]
            for event in found:
                self.events.remove(event)
        return [slot for event in found for slot in event.slots]

    def _release_worker(self, worker: int) -> None:
        """A dismissed worker has ended: its index can be used again."""
        self._dismissed.discard(worker)
        self._gone.add(worker)
        self.table.stop_words[worker] = self.table.command_words[worker] = 0
        self._free_workers.append(worker)

    def _admit(self, built: Built) -> None:
        """Lets a respawned worker attach, if its envs still have the loader's spaces."""
        try:
            self._require_spec(built, self._spec)
        except Exception as error:  # other spaces, or some that cannot be rebuilt here
            slots = self.slots_of(built.worker)
            failed = Failed(built.worker, slots, 0, "factory", 0, "SpecMismatch", str(error), "", note="it stays closed")
            self._take_failure(failed)
            self._dismissed.add(built.worker)
            self.turn_away(built.worker)
            return
        self.readmit(built.worker)

    def turn_away(self, worker: int) -> None:
        """Has a worker that was not admitted end."""
        raise NotImplementedError

    def respawn(self, worker: int) -> None:
        """Replaces a dead worker; its envs begin the lives in `self.lives`. Only for backends with processes."""
        raise NotImplementedError

    def readmit(self, worker: int) -> None:
        """Hands the region to a respawned worker whose envs exist."""
        raise NotImplementedError

    def tick(self) -> None:
        """Called by a waiting receiver a few times a second: looks for hung envs where no thread does."""

    def overdue(self) -> list[tuple[int, str]]:
        """Slots whose step or reset takes longer than its limit, with a sentence each."""
        found = []
        now, table = time.monotonic_ns(), self.table
        for name, limit, busy in (
            ("step", self.limits.step_timeout, (table.state == SlotState.WRITING) & (table.resetting == 0)),
            ("reset", self.limits.reset_timeout, table.resetting == 1),
        ):
            if limit is None:
                continue
            for slot in np.flatnonzero(busy & (now - table.begin_ns > limit * 1e9)).tolist():
                age = (now - int(table.begin_ns[slot])) * 1e-9
                text = f"env.{name} of slot {slot} has run for {age:.1f} s, longer than {name}_timeout={limit:g} s"
                found.append((slot, text))
        limit = self.limits.step_timeout
        if limit is None or table.paused.any():
            return found
        # A worker that does nothing else takes an action within a wake-up: one that does not is frozen or stuck in C code.
        waiting = np.flatnonzero((table.state == SlotState.ACTED) & (now - table.begin_ns > limit * 1e9))
        if waiting.size:
            busy = set(table.owner[(table.state == SlotState.WRITING) | (table.resetting == 1)].tolist())
            busy |= set(self._pending.values()) | self.starting()
            for slot in waiting.tolist():
                worker = int(table.owner[slot])
                if worker not in busy:
                    age = (now - int(table.begin_ns[slot])) * 1e-9
                    found.append((slot, f"worker {worker} has not taken the action of slot {slot} for {age:.1f} s"))
        return found

    def starting(self) -> set[int]:
        """Workers that are building envs now."""
        return set()

    def wait_built(self) -> tuple[Tree, Tree, Tree, Any]:
        """Waits until every env exists; returns observation, action and info trees and the spaces.

        Raises:
          EnvFailed: a factory raised.
          WorkerDied: a worker ended.
          SlotLoaderError: not ready within `start_timeout`; the text has the stack of a blocked worker.
          SpecMismatch: the envs differ from each other; the text shows both sides.
        """
        deadline = time.monotonic() + self.limits.start_timeout
        with self._changed:
            while len(self._built) < len(self.configs) and not self.events:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(min(remaining, 1.0))
        if self.events:
            raise error_from([event for event in self.take_events() if not isinstance(event, Removed)])
        missing = [config.index for config in self.configs if config.index not in self._built]
        if missing:
            stack = self.stack_of(missing[0])
            raise SlotLoaderError(
                f"slots {list(self.slots_of(missing[0]))} (worker {missing[0]}): expected the env factory to return within "
                f"start_timeout={self.limits.start_timeout:g} s, found it still running ({len(missing)} of {len(self.configs)} "
                f"workers are); raise start_timeout or mend the factory. Its stack:\n{stack or '(not available)'}"
            )
        return (*self._common_spec(), self._built[0].spaces)

    def _common_spec(self) -> tuple[Tree, Tree, Tree]:
        first: tuple[Tree, Tree, Tree] = loaded(self._built[0].specs)[0]
        self._spec, self._spec_slot = first, self.configs[0].slots[0]
        for config in self.configs:
            self._require_spec(self._built[config.index], first)
        return first

    def _require_spec(self, built: Built, first: tuple[Tree, Tree, Tree]) -> None:
        for slot, spec in zip(self.slots_of(built.worker), loaded(built.specs), strict=False):
            for name, expected, found in zip(("obs", "action", "info"), first, spec, strict=True):
                lines = list(differences(expected, found, (name,)))
                if lines:
                    raise SpecMismatch(
                        f"slot {slot} (worker {built.worker}): expected the spaces of slot {self._spec_slot}, "
                        f"found others; all envs of a loader must share them. Differences: {'; '.join(lines[:4])}. "
                        f"Slot {self._spec_slot} has {show_tree(expected):.300}"
                    )

    def take_events(self) -> list[Event | Removed]:
        """Removes and returns all events so far."""
        events = []
        while self.events:
            events.append(self.events.popleft())
        return events

    def command(self, verb: str, slots: Sequence[int], *args: Any, timeout: float | None = None) -> dict[int, Any]:
        """Runs a control command on the envs of `slots`, between two of their steps, and waits for the results.

        Raises:
          EnvFailed: an env raised.
          WorkerDied: a worker ended meanwhile.
          TimeoutError: no answer within `timeout` seconds.
        """
        wanted = set(slots)
        tickets: list[int] = []
        try:
            for config in self.configs:
                own = sorted(wanted.intersection(self.slots_of(config.index)))
                if own:
                    tickets.append(self._ask(config.index, verb, own, args))
            answers = self._wait_for_answers(tickets, verb, timeout)
        finally:
            with self._changed:
                for ticket in tickets:  # an answer that comes later is dropped
                    self._pending.pop(ticket, None)
                    self._answers.pop(ticket, None)
        failures = [answer.failure for answer in answers if answer.failure is not None]
        if failures:
            raise error_from(failures)
        found = {}
        for answer in answers:
            for slot, result in answer.results.items():
                try:
                    found[slot] = loaded(result)
                except Exception as error:
                    raise SlotLoaderError(
                        f"{verb}: slot {slot} (worker {answer.worker}): expected a result that can be unpickled here, found "
                        f"{type(error).__name__}: {error}"
                    ) from error
        return found

    def _ask(self, worker: int, verb: str, slots: list[int], args: tuple[Any, ...]) -> int:
        with self._changed:
            if worker in self._gone:
                raise WorkerDied(f"worker {worker} has ended; its slots {slots} take no calls", slots)
            ticket = next(self._tickets)
            self._pending[ticket] = worker
        self.send_command(worker, (ticket, verb, slots, *args))
        return ticket

    def _wait_for_answers(self, tickets: list[int], verb: str, timeout: float | None) -> list[Answer]:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while any(ticket not in self._answers for ticket in tickets):
                if self.closing:
                    raise LoaderClosed("the loader was closed while a call was waiting")
                if deadline is not None and time.monotonic() >= deadline:
                    late = next(self._pending[ticket] for ticket in tickets if ticket not in self._answers)
                    raise TimeoutError(f"{verb}: no answer from worker {late} in {timeout:g} s; its env may be in a long step")
                self._changed.wait(0.25 if deadline is None else min(0.25, max(0.0, deadline - time.monotonic())))
            answers: list[Answer] = []
            for ticket in tickets:
                answer = self._answers[ticket]
                if answer is None:
                    worker = self._pending[ticket]
                    raise WorkerDied(f"worker {worker} ended before it answered {verb!r}", self.slots_of(worker))
                answers.append(answer)
            return answers
