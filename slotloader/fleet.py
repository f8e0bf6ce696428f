"""Starting, watching and stopping the workers of one loader: what all backends share, and the two in-process ones."""

from __future__ import annotations

import collections
import itertools
import signal as signals_of_os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slotloader.errors import EnvFailed, LoaderClosed, SlotLoaderError, SpecMismatch, WorkerDied
from slotloader.layout import MAX_RECEIVERS, Layout
from slotloader.signals import Signal, ThreadSignal
from slotloader.slots import Table, create_private
from slotloader.specs import Tree, differences, show_tree
from slotloader.workers import Answer, Built, Failed, Worker, WorkerConfig, choose, make_worker


@dataclass(frozen=True)
class Died:
    """A worker process has ended and been reaped; `exitcode` is negative for a signal."""

    worker: int
    slots: tuple[int, ...]
    pid: int
    exitcode: int


Event = Failed | Died


class Fleet:
    """Base of the backends.

    Reports of workers arrive through `deliver`, in any thread. `events` is what the receivers have not yet looked at.

    Attributes:
      events: failures and deaths, oldest first; appended by the watching thread, taken by a receiver.
      signals: one per receiver, posted by workers and, on every event, by the fleet.
      table: the region, after `attach`.
    """

    signals: Sequence[Signal]
    table: Table

    def __init__(self, configs: Sequence[WorkerConfig], start_timeout: float) -> None:
        self.configs = configs
        self.start_timeout = start_timeout
        self.events: collections.deque[Event] = collections.deque()
        self.closing = False
        self._built: dict[int, Built] = {}
        self._answers: dict[int, Answer] = {}
        self._tickets = itertools.count(1)
        self._gone: set[int] = set()  # workers that have ended
        self._changed = threading.Condition()

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
        return tuple(range(config.first_slot, config.first_slot + len(config.factories)))

    def prepared(self, table: Table) -> Table:
        """Fills in who serves each slot, and one receiver over all of them; before any worker attaches."""
        for config in self.configs:
            table.owner[config.first_slot : config.first_slot + len(config.factories)] = config.index
        table.end_slot[0] = table.num_slots
        return table

    def deliver(self, report: Built | Failed | Answer | Died) -> None:
        """Takes a report from a worker or about one."""
        with self._changed:
            if isinstance(report, Built):
                self._built[report.worker] = report
            elif isinstance(report, Answer):
                self._answers[report.ticket] = report
            else:
                if isinstance(report, Died):
                    self._gone.add(report.worker)
                if not self.closing:
                    self.events.append(report)
            self._changed.notify_all()
        if isinstance(report, (Failed, Died)):
            for signal in self.signals:
                signal.post()

    def wait_built(self) -> tuple[Tree, Tree, Tree, Any]:
        """Waits until every env exists; returns observation, action and info trees and the spaces.

        Raises:
          EnvFailed: a factory raised.
          WorkerDied: a worker ended.
          SlotLoaderError: not ready within `start_timeout`; the text has the stack of a blocked worker.
          SpecMismatch: the envs differ from each other; the text shows both sides.
        """
        deadline = time.monotonic() + self.start_timeout
        with self._changed:
            while len(self._built) < len(self.configs) and not self.events:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(min(remaining, 1.0))
        if self.events:
            raise error_from(self.take_events())
        missing = [config.index for config in self.configs if config.index not in self._built]
        if missing:
            stack = self.stack_of(missing[0])
            raise SlotLoaderError(
                f"slots {list(self.slots_of(missing[0]))} (worker {missing[0]}): expected the env factory to return within "
                f"start_timeout={self.start_timeout:g} s, found it still running ({len(missing)} of {len(self.configs)} "
                f"workers are); raise start_timeout or mend the factory. Its stack:\n{stack or '(not available)'}"
            )
        return (*self._common_spec(), self._built[0].spaces)

    def _common_spec(self) -> tuple[Tree, Tree, Tree]:
        first = self._built[0].specs[0]
        first_slot = self.configs[0].first_slot
        for config in self.configs:
            for at, spec in enumerate(self._built[config.index].specs):
                for name, expected, found in zip(("obs", "action", "info"), first, spec, strict=True):
                    lines = list(differences(expected, found, (name,)))
                    if lines:
                        raise SpecMismatch(
                            f"slot {config.first_slot + at} (worker {config.index}): expected the spaces of slot "
                            f"{first_slot}, found others; all envs of a loader must share them. Differences: "
                            + "; ".join(lines[:4])
                            + f". Slot {first_slot} has {show_tree(expected)[:300]}"
                        )
        return first

    def take_events(self) -> list[Event]:
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
        tickets: dict[int, int] = {}
        for config in self.configs:
            own = sorted(wanted.intersection(self.slots_of(config.index)))
            if own:
                if config.index in self._gone:
                    raise WorkerDied(f"worker {config.index} has ended; its slots {own} take no calls", own)
                ticket = next(self._tickets)
                tickets[ticket] = config.index
                self.send_command(config.index, (ticket, verb, own, *args))
        deadline = None if timeout is None else time.monotonic() + timeout
        results: dict[int, Any] = {}
        failure: Failed | None = None
        with self._changed:
            while tickets:
                for ticket in [ticket for ticket in tickets if ticket in self._answers]:
                    answer = self._answers.pop(ticket)
                    del tickets[ticket]
                    results.update(answer.results)
                    failure = failure or answer.failure
                gone = [worker for worker in tickets.values() if worker in self._gone]
                if gone:
                    raise WorkerDied(f"worker {gone[0]} ended before it answered {verb!r}", self.slots_of(gone[0]))
                if self.closing:
                    raise LoaderClosed("the loader was closed while a call was waiting")
                if not tickets:
                    break
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"{verb}: no answer from worker {next(iter(tickets.values()))} in {timeout:g} s")
                self._wait_for_answer()
        if failure is not None:
            raise error_from([failure])
        return results

    def _wait_for_answer(self) -> None:
        self._changed.wait(0.25)


def error_from(events: Sequence[Event]) -> EnvFailed | WorkerDied:
    """One exception for some failures; every failed env is named in it."""
    slots = sorted({slot for event in events for slot in event.slots})
    text = "\n\n".join(_describe(event) for event in events[:8])
    if len(events) > 8:
        text += f"\n\nand {len(events) - 8} more; failed slots: {slots}"
    first = events[0]
    if isinstance(first, Died):
        return WorkerDied(text, slots, first.pid, first.exitcode)
    error = EnvFailed(text, slots, first.pid, first.traceback)
    error.__cause__ = first.cause
    return error


def _describe(event: Event) -> str:
    if isinstance(event, Died):
        slots = f"slots {list(event.slots)}" if len(event.slots) > 1 else f"slot {event.slots[0]}"
        return f"{slots} (worker {event.worker}, pid {event.pid}): the worker {_how_it_ended(event.exitcode)}"
    place = f"slot {event.slots[0]} (worker {event.worker}, pid {event.pid})"
    if event.error_type == "SpecMismatch":
        return f"{place}, step {event.step}: {event.text}"
    what = {"factory": "the factory", "unpickling": "unpickling the factory in the worker"}
    doing = what.get(event.phase, f"env.{event.phase}")
    when = f" at step {event.step}" if event.phase == "step" else ""
    head = f"{place}: {doing} raised {event.error_type}{when}: {event.text}"
    return f"{head}\n\nTraceback in the worker:\n{event.traceback}" if event.cause is None else head


def _how_it_ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exited with status {exitcode} (os._exit or sys.exit in an env?)"
    try:
        name = signals_of_os.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = "; if nobody sent it, the machine ran out of memory (see dmesg)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


class ThreadFleet(Fleet):
    """`backend="thread"`: workers are threads of this process; the table is private memory."""

    def launch(self) -> None:
        """See `Fleet.launch`."""
        self.signals = [ThreadSignal() for _ in range(MAX_RECEIVERS)]
        self._wake = [ThreadSignal() for _ in self.configs]
        self._commands: list[collections.deque[tuple[Any, ...]]] = [collections.deque() for _ in self.configs]
        self._attached = threading.Event()
        self._threads = [
            threading.Thread(target=self._main, args=(config,), name=f"slotloader-worker-{config.index}", daemon=True)
            for config in self.configs
        ]
        for thread in self._threads:
            thread.start()

    def _main(self, config: WorkerConfig) -> None:
        worker = make_worker(config, self.deliver, in_process=True)
        try:
            if worker.build():
                worker = choose(worker, self.deliver, in_process=True)
                self._attached.wait()
                if hasattr(self, "table"):
                    worker.attach(self.table, self.signals)
                    commands = self._commands[config.index]
                    worker.run(self._wake[config.index], lambda: commands.popleft() if commands else None)
        finally:
            worker.close()

    def attach(self, layout: Layout) -> Table:
        """See `Fleet.attach`."""
        self.table = self.prepared(Table(layout, create_private(layout)))
        self._attached.set()
        return self.table

    def wakers(self) -> list[Callable[[], None]]:
        """See `Fleet.wakers`."""
        return [signal.post for signal in self._wake]

    def send_command(self, worker: int, message: tuple[Any, ...]) -> None:
        """See `Fleet.send_command`."""
        self._commands[worker].append(message)
        self.table.command_words[worker] = 1
        self._wake[worker].post()

    def stack_of(self, worker: int) -> str:
        """See `Fleet.stack_of`."""
        import sys
        import traceback

        frame = sys._current_frames().get(self._threads[worker].ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else ""

    def stop(self, deadline: float) -> None:
        """See `Fleet.stop`. A thread cannot be killed: one that is stuck in its env is left behind as a daemon."""
        if hasattr(self, "table"):
            for index, signal in enumerate(self._wake):
                self.table.stop_words[index] = 1
                signal.post()
        self._attached.set()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class InlineSignal:
    """The wait of the inline backend: it steps one env in the caller's thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def post(self) -> None:
        """Nobody sleeps."""

    def wait(self, timeout: float) -> bool:
        """Serves one slot; sleeps only if no env has anything to do."""
        if self._worker.serve_one():
            return True
        time.sleep(min(timeout, 0.01))
        return False


class InlineFleet(Fleet):
    """`backend="inline"`: envs step inside `recv`, in the caller's thread, so that `breakpoint()` in an env works."""

    def launch(self) -> None:
        """See `Fleet.launch`."""
        self.signals = []
        self._worker = make_worker(self.configs[0], self.deliver, in_process=True)
        self._worker.build()

    def attach(self, layout: Layout) -> Table:
        """See `Fleet.attach`."""
        self.signals = [InlineSignal(self._worker)] * MAX_RECEIVERS
        self.table = self.prepared(Table(layout, create_private(layout)))
        self._worker.attach(self.table, self.signals)
        self._worker.start()
        return self.table

    def wakers(self) -> list[Callable[[], None]]:
        """See `Fleet.wakers`."""
        return [_nothing]

    def send_command(self, worker: int, message: tuple[Any, ...]) -> None:
        """See `Fleet.send_command`; carried out at once."""
        self.deliver(self._worker.carry_out(*message))

    def stack_of(self, worker: int) -> str:
        """See `Fleet.stack_of`; the caller sees its own."""
        return ""

    def stop(self, deadline: float) -> None:
        """See `Fleet.stop`."""
        self._worker.close()


def _nothing() -> None:
    pass
