"""Workers that step each env beside the others, in a lane of its own: a thread here, a chain of tasks in `tasks`."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from slotloader.worker.config import WorkerConfig
from slotloader.worker.loops import Move, T
from slotloader.worker.runner import EnvRunner
from slotloader.worker.worker import Report, Worker

Settle = Callable[[Move[Any]], Any]
OnError = Callable[[BaseException], None]


@contextlib.contextmanager
def reporting(on_error: OnError) -> Iterator[None]:
    """The edge of every thread and task: whatever comes out of it is reported, be it no `Exception`, and ends nothing else."""
    try:
        yield
    except BaseException as error:
        on_error(error)


class Lane(Protocol):
    """Where the moves of one env run, in order, beside those of others."""

    def put(self, move: Callable[[], Move[Any]]) -> None:
        """Begins a move, after those before it. What it raises goes to the lane's `on_error`. From any thread."""

    async def result_of(self, move: Callable[[], Move[T]]) -> T:
        """Runs a move in its turn, and returns or raises what it does."""

    def is_busy(self) -> bool:
        """Whether something runs or waits to run."""

    def end(self) -> None:
        """Takes no further moves."""


class ThreadLane:
    """A thread of its own.

    Args:
      name: of the thread.
      settle: runs a coroutine in the calling thread.
      on_error: takes what a move raises.
    """

    def __init__(self, name: str, settle: Settle, on_error: OnError) -> None:
        self._settle, self._on_error = settle, on_error
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._put = self._done = 0
        self._putting = threading.Lock()  # commands come from threads of their own
        self.thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        while (function := self._work.get()) is not None:
            with reporting(self._on_error):
                function()
            self._done += 1

    def _queue(self, function: Callable[[], None]) -> None:
        with self._putting:
            self._put += 1
        self._work.put(function)

    def put(self, move: Callable[[], Move[Any]]) -> None:
        """See `Lane.put`."""
        self._queue(lambda: self._settle(move()))

    def is_busy(self) -> bool:
        """See `Lane.is_busy`."""
        return self._done != self._put

    async def result_of(self, move: Callable[[], Move[T]]) -> T:
        """See `Lane.result_of`. Blocks the calling thread."""
        done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((self._settle(move()), None))
            except BaseException as error:  # raised by whoever waits
                done.put((None, error))

        self._queue(run)
        result, error = done.get()
        if error is not None:
            raise error
        value: T = result
        return value

    def end(self) -> None:
        """See `Lane.end`. The thread ends after what is queued."""
        self._work.put(None)


class LaneWorker(Worker):
    """Moves each env in a lane. A reset follows the last record at once; the loop only claims slots and sleeps."""

    _lanes: dict[EnvRunner, Lane]

    def start(self) -> None:
        """See `Worker.start`."""
        self.unstarted = []  # lanes begin them
        for runner in self._present():
            self._revive(runner)

    def _revive(self, runner: EnvRunner) -> None:
        runner.started = True
        self._lanes[runner].put(runner.first_record)

    def is_at_rest(self) -> bool:
        """See `Worker.is_at_rest`."""
        return not any(lane.is_busy() for lane in self._lanes.values())

    def advance(self, runner: EnvRunner) -> None:
        """Claims the slot and lets its lane serve it."""
        runner.claim()
        self._lanes[runner].put(partial(_advance_and_reset, runner))

    def reset_one(self) -> bool:
        """Lanes reset by themselves."""
        return False

    async def _within(self, runner: EnvRunner, move: Callable[[], Move[T]]) -> T:
        return await self._lanes[runner].result_of(move)

    def close(self) -> None:
        """See `Worker.close`."""
        super().close()
        for lane in self._lanes.values():
            lane.end()


async def _advance_and_reset(runner: EnvRunner) -> None:
    await runner.advance()
    if runner.wants_reset:
        await runner.reset()


class ThreadedWorker(LaneWorker):
    """Steps every env in a thread of its own, for envs that wait on I/O."""

    def __init__(self, config: WorkerConfig, report: Report, in_process: bool = False) -> None:
        super().__init__(config, report, in_process)
        self._lanes = {
            runner: ThreadLane(f"slotloader-env-{runner.slot}", runner.settle, partial(self._fail, runner))
            for runner in self.everyone()
        }

    def obey(self, message: Sequence[Any]) -> None:
        """See `Worker.obey`. A command waits for the lanes of its envs, and the other envs must not wait for it."""
        threading.Thread(target=self._obey, args=(message,), name="slotloader-call", daemon=True).start()

    def _obey(self, message: Sequence[Any]) -> None:
        with reporting(partial(self._fail_command, message)):
            super().obey(message)

    def _fail_command(self, message: Sequence[Any], error: BaseException) -> None:
        """A command that has no answer, for a reason of ours: its envs have failed, or nobody would hear of it."""
        for runner in self.runners:
            if runner.slot in message[2]:
                self._fail(runner, error)
