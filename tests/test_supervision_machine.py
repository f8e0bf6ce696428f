"""The fleet's books under random schedules: deaths, late answers, removals, new envs, restarts and Ctrl-C in its waits.

No process runs: a simulated backend keeps for each worker index the envs that its living process would have, and its inbox.
What must hold after every deed: no slot has two envs, no removed env comes back, and nothing waits for a worker that is gone.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slotloader.errors import WorkerDied
from slotloader.fleet.supervision import Limits
from slotloader.fleet.supervisor import Fleet
from slotloader.messages.reports import Answer, Built, Died, Failed, Removed
from slotloader.records.specs import Leaf
from slotloader.table.layout import MAX_RECEIVERS, Layout
from slotloader.table.signals import ThreadSignal
from slotloader.table.slots import SlotState, Table, create_private
from slotloader.worker.config import EnvOptions, WorkerConfig

SLOTS, WORKERS = 5, 6
LEAF = Leaf(("obs",), (1,), np.dtype("f4"))
SPEC = (LEAF, Leaf(("action",), (), np.dtype("i8")), {})
OPTIONS = EnvOptions(0)


class Process:
    """What a worker process would be."""

    def __init__(self, slots: tuple[int, ...]) -> None:
        self.slots, self.inbox, self.built = set(slots), deque[tuple[Any, ...]](), False


class Simulated(Fleet):
    """A backend whose processes are sets of slots."""

    def launch(self) -> None:
        self.signals = [ThreadSignal() for _ in range(MAX_RECEIVERS)]
        self.processes: dict[int, Process] = {}
        for config in self.configs:
            self.respawn(config.index)

    def attach(self, layout: Layout) -> Table:
        return self.prepared(Table(layout, create_private(layout)))

    def wakers(self) -> list[Any]:
        return [lambda: None] * self.max_workers

    def send_command(self, worker: int, message: tuple[Any, ...]) -> None:
        if worker in self.processes:
            self.processes[worker].inbox.append(message)

    def respawn(self, worker: int) -> None:
        assert worker not in self.processes, "an old process is reaped before a new one is started"
        self._gone.discard(worker)
        self.processes[worker] = Process(self.slots_of(worker))

    def start_worker(self, config: WorkerConfig) -> None:
        self.respawn(config.index)

    def readmit(self, worker: int) -> None:
        pass

    def turn_away(self, worker: int) -> None:
        pass


def env() -> None:
    """A factory; never called."""


class Books(RuleBasedStateMachine):
    def teardown(self) -> None:
        logging.getLogger("slotloader").setLevel(logging.NOTSET)

    def __init__(self) -> None:
        super().__init__()
        logging.getLogger("slotloader").setLevel(logging.ERROR)
        configs = [WorkerConfig(0, (0, 1), [env, env], OPTIONS), WorkerConfig(1, (2,), [env], OPTIONS)]
        limits = Limits("restart", max_restarts=10**6)
        self.fleet = Simulated(configs, limits, WORKERS)
        self.fleet.launch()
        for worker in (0, 1):
            self.fleet.deliver(Built(worker, [SPEC] * len(self.fleet.slots_of(worker)), None))
        self.fleet.wait_built()
        self.fleet.attach(Layout.plan(SLOTS, WORKERS, *SPEC))
        self.vacant = {3, 4}
        self.asked: set[int] = set()  # to be removed, and not yet told
        self.removed = 0

    # What the trainer does.

    @rule(slot=st.integers(0, SLOTS - 1), interrupted=st.booleans())
    def remove(self, slot: int, interrupted: bool) -> None:
        if slot in self.vacant:
            return
        wait = self.fleet._changed.wait
        if interrupted:
            self.fleet._changed.wait = self._strike  # type: ignore[method-assign]
        try:
            self.fleet.remove([slot], None if interrupted else 0.0)
        except (TimeoutError, KeyboardInterrupt):
            self.asked.add(slot)
        finally:
            self.fleet._changed.wait = wait  # type: ignore[method-assign]
        self._look()

    @staticmethod
    def _strike(timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    @precondition(lambda self: self.vacant)
    @rule(data=st.data())
    def add(self, data: Any) -> None:
        slot = data.draw(st.sampled_from(sorted(self.vacant)))
        fleet = self.fleet
        if not fleet._free_workers and len(fleet.configs) >= WORKERS:
            return
        fleet.hire(slot, env, OPTIONS, False)
        self.vacant.discard(slot)

    @rule(worker=st.integers(0, WORKERS - 1))
    def call(self, worker: int) -> None:
        with contextlib.suppress(TimeoutError, WorkerDied, IndexError):
            self.fleet.command("get_attr", self.fleet.slots_of(worker)[:1], "x", timeout=0.0)

    @rule()
    def look(self) -> None:
        self._look()

    def _look(self) -> None:
        left = self.fleet.take_removed()
        self.vacant.update(left)
        self.asked.difference_update(left)
        self.removed += len(left)

    # What the workers do.

    @rule(data=st.data())
    def a_worker_answers(self, data: Any) -> None:
        busy = sorted(index for index, process in self.fleet.processes.items() if process.inbox)
        if not busy:
            return
        index = data.draw(st.sampled_from(busy))
        process = self.fleet.processes[index]
        ticket, verb, slots, *_ = process.inbox.popleft()
        if verb == "remove":
            process.slots.difference_update(slots)
        failure = None
        if verb == "rebuild" and data.draw(st.booleans()):
            failure = Failed(index, (slots[0],), 1, "rebuild", 0, "RuntimeError", "again", "")
        self.fleet.deliver(Answer(index, ticket, dict.fromkeys(slots, 1), failure))

    @rule(data=st.data(), late=st.booleans())
    def an_env_fails(self, data: Any, late: bool) -> None:
        running = sorted((slot, index) for index, process in self.fleet.processes.items() for slot in process.slots)
        if running:
            slot, index = data.draw(st.sampled_from(running))
            self.fleet.deliver(Failed(index, (slot,), 1, "step", 3, "RuntimeError", "ill", ""))

    @rule(data=st.data())
    def a_process_dies(self, data: Any) -> None:
        if self.fleet.processes:
            index = data.draw(st.sampled_from(sorted(self.fleet.processes)))
            del self.fleet.processes[index]
            self.fleet.deliver(Died(index, self.fleet.slots_of(index), 1, -9))

    @rule()
    def dismissed_processes_end(self) -> None:
        for index in sorted(self.fleet._dismissed):
            if index in self.fleet.processes:
                del self.fleet.processes[index]
                self.fleet.deliver(Died(index, self.fleet.slots_of(index), 1, 0))

    # What must hold.

    @invariant()
    def no_slot_has_two_envs(self) -> None:
        served = [slot for config in self.fleet.configs for slot in self.fleet.slots_of(config.index)]
        assert len(served) == len(set(served))
        running = [slot for process in self.fleet.processes.values() for slot in process.slots]
        assert len(running) == len(set(running)), "two processes would write one slot"

    @invariant()
    def what_was_removed_is_not_built_again(self) -> None:
        waiting = {slot for event in self.fleet.events if isinstance(event, Removed) for slot in event.slots}
        for process in self.fleet.processes.values():
            assert not process.slots & (self.vacant | waiting)
        served = {slot for config in self.fleet.configs for slot in self.fleet.slots_of(config.index)}
        assert not served & (self.vacant | self.asked)

    @invariant()
    def every_env_that_was_not_removed_is_served_or_told_as_lost(self) -> None:
        lost = {slot for event in self.fleet.events if not isinstance(event, Removed) for slot in event.slots}
        running = {slot for process in self.fleet.processes.values() for slot in process.slots}
        wanted = {slot for config in self.fleet.configs for slot in self.fleet.slots_of(config.index)}
        assert wanted <= running | lost

    @invariant()
    def nothing_waits_for_who_is_gone(self) -> None:
        fleet = self.fleet
        for worker, _ in fleet._removals.values():
            assert worker in fleet.processes
        for worker, _, _ in fleet.rebuilds.values():
            assert worker in fleet.processes
        assert len(fleet._free_workers) == len(set(fleet._free_workers))
        assert not set(fleet._free_workers) & set(fleet.processes), "a worker that is free has no process"

    @invariant()
    def a_slot_of_a_new_life_is_starting(self) -> None:
        states = {SlotState(int(state)) for state in self.fleet.table.state}
        assert states <= {SlotState.STARTING, SlotState.DEAD}


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
