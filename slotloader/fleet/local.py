"""The two backends without processes: workers as threads, and envs stepped inside `recv`."""

from __future__ import annotations

import collections
import dataclasses
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from slotloader.fleet.supervisor import Fleet
from slotloader.messages.reports import Failed
from slotloader.table.layout import MAX_RECEIVERS, Layout
from slotloader.table.signals import ThreadSignal, make_fence
from slotloader.table.slots import Table, create_private
from slotloader.worker.choice import choose, make_worker
from slotloader.worker.config import WorkerConfig
from slotloader.worker.inline import InlineWorker
from slotloader.worker.worker import Worker


class ThreadFleet(Fleet):
    """`backend="thread"`: workers are threads of this process; the table is private memory."""

    def launch(self) -> None:
        """See `Fleet.launch`."""
        self.signals = [ThreadSignal() for _ in range(MAX_RECEIVERS)]
        workers = range(self.max_workers)
        self._wake = [ThreadSignal() for _ in workers]
        self._commands: list[collections.deque[tuple[Any, ...]]] = [collections.deque() for _ in workers]
        self._admitted = [threading.Event() for _ in workers]
        self._workers: dict[int, Worker] = {}
        self._threads: dict[int, threading.Thread] = {}
        for config in self.configs:
            self.start_worker(config)

    def start_worker(self, config: WorkerConfig) -> None:
        """See `Fleet.start_worker`."""
        name = f"slotloader-worker-{config.index}"
        lives = [self.lives[slot] for slot in config.slots]
        config = dataclasses.replace(config, lives=lives)
        self._admitted[config.index].clear()
        self._threads[config.index] = threading.Thread(target=self._main, args=(config,), name=name, daemon=True)
        self._threads[config.index].start()

    def _main(self, config: WorkerConfig) -> None:
        worker = make_worker(config, self.deliver, in_process=True)
        self._workers[config.index] = worker
        try:
            if worker.build():
                worker = choose(worker)
                self._admitted[config.index].wait()
                if self.running and not self.closing and config.index not in self._dismissed:
                    worker.attach(self.table, self.signals, make_fence())
                    commands = self._commands[config.index]
                    worker.run(self._wake[config.index], lambda: commands.popleft() if commands else None)
        finally:
            worker.close()
            with self._changed:
                if config.index in self._dismissed:
                    self._release_worker(config.index)
                    self._changed.notify_all()

    def readmit(self, worker: int) -> None:
        """See `Fleet.readmit`."""
        self._admitted[worker].set()

    def turn_away(self, worker: int) -> None:
        """See `Fleet.turn_away`."""
        self._admitted[worker].set()

    def attach(self, layout: Layout) -> Table:
        """See `Fleet.attach`."""
        self.prepared(Table(layout, create_private(layout)))
        for config in self.configs:
            self.readmit(config.index)
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
        frame = sys._current_frames().get(self._threads[worker].ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else ""

    def tick(self) -> None:
        """See `Fleet.tick`. A hung thread cannot be killed: its slot is given up, and must not write should it come back."""
        if self.limits.step_timeout is None and self.limits.reset_timeout is None:
            return
        for slot, text in self.overdue():
            index = int(self.table.owner[slot])
            worker = self._workers[index]
            runner = worker.runners[worker.position[slot]]
            if not runner.lost:
                runner.lost = runner.failed = True
                stack = self.stack_of(index)
                self.deliver(
                    Failed(
                        index, (slot,), os.getpid(), runner.phase, runner.steps_taken + 1, "TimeoutError", text, stack,
                        note="a thread cannot be killed, the slot is given up; backend='process' could restart it",
                    )
                )  # fmt: skip

    def stop(self, deadline: float) -> None:
        """See `Fleet.stop`. A thread cannot be killed: one that is stuck in its env is left behind as a daemon."""
        if self.running:
            for index, signal in enumerate(self._wake):
                self.table.stop_words[index] = 1
                signal.post()
        for admitted in self._admitted:
            admitted.set()
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))


class InlineSignal:
    """The wait of the inline backend: it steps one env in the caller's thread."""

    def __init__(self, worker: InlineWorker) -> None:
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
        self._worker = InlineWorker(self.configs[0], self.deliver)
        self._worker.build()

    def attach(self, layout: Layout) -> Table:
        """See `Fleet.attach`."""
        self.signals = [InlineSignal(self._worker)] * MAX_RECEIVERS
        self.prepared(Table(layout, create_private(layout)))
        self._worker.attach(self.table, self.signals, make_fence())
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
