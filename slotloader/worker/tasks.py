"""The worker of async envs: one event loop for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from slotloader.table.signals import Signal
from slotloader.worker.lanes import LaneWorker, OnError, reporting
from slotloader.worker.loops import Loop, Move, T
from slotloader.worker.runner import EnvRunner
from slotloader.worker.worker import IDLE_WAIT, Worker

_LEAVE_LIMIT = 1.0  # seconds that a step which has been cancelled may take to end


class TaskLane:
    """A chain of tasks, each held until it has ended: the loop itself does not hold them.

    Args:
      loop: of the worker.
      on_error: takes what a move raises.
    """

    def __init__(self, loop: Loop, on_error: OnError) -> None:
        self._loop, self._on_error = loop, on_error
        self._order = asyncio.Lock()
        self.tasks: set[asyncio.Task[None]] = set()

    def put(self, move: Callable[[], Move[Any]]) -> None:
        """See `Lane.put`; from the loop's thread."""
        task = self._loop.task(self._run(move))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _run(self, move: Callable[[], Move[Any]]) -> None:
        with reporting(self._on_error):
            async with self._order:
                await move()

    async def result_of(self, move: Callable[[], Move[T]]) -> T:
        """See `Lane.result_of`."""
        async with self._order:
            return await move()

    def is_busy(self) -> bool:
        """See `Lane.is_busy`."""
        return bool(self.tasks) or self._order.locked()

    def end(self) -> None:
        """See `Lane.end`."""


class AsyncWorker(LaneWorker):
    """Serves its slots as tasks of one event loop, for envs with `async def reset` and `step`.

    Args:
      worker: has built the envs, which move over: no env is built twice.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.config, worker._report, worker._in_process)
        self.runners = worker.runners
        self._loop = Loop()
        self._ending = False
        self._commands: set[asyncio.Task[None]] = set()
        self._lanes = {runner: TaskLane(self._loop, partial(self._fail, runner)) for runner in self.everyone()}
        for runner in self.everyone():
            runner.adopt_loop(self._loop)

    def _run(self, signal: Signal, receive: Callable[[], Any]) -> None:
        self._loop.complete(self._serve(signal, receive))

    async def _serve(self, signal: Signal, receive: Callable[[], Any]) -> None:
        """Goes through the passes. A helper thread turns posts into wake-ups of the event loop."""
        woken, ended = asyncio.Event(), threading.Event()
        broken: list[BaseException] = []

        def watch() -> None:
            with reporting(broken.append):
                while not ended.is_set():
                    signal.wait(IDLE_WAIT)
                    self._loop.call_soon_threadsafe(woken.set)  # the loop is only closed once this thread has ended
            self._loop.call_soon_threadsafe(woken.set)

        thread = threading.Thread(target=watch, name="slotloader-wake", daemon=True)
        thread.start()
        try:
            for seconds in self.passes(receive):
                if broken:
                    raise broken[0]
                if seconds < IDLE_WAIT:
                    await asyncio.sleep(seconds)
                else:
                    await woken.wait()
                    woken.clear()
        finally:
            ended.set()
            signal.post()
            thread.join()
            await self._leave()

    async def _leave(self) -> None:
        """Ends what the envs are at. Tasks of their own go on: `close` may need them."""
        self._ending = True
        for runner in self.runners:
            runner.faults = (Exception,)  # a task that is being cancelled ends
        tasks = {task for lane in self._lanes.values() if isinstance(lane, TaskLane) for task in lane.tasks} | self._commands
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LEAVE_LIMIT)

    def _fail(self, runner: EnvRunner, error: BaseException) -> None:
        if not (self._ending and isinstance(error, asyncio.CancelledError)):
            super()._fail(runner, error)

    def obey(self, message: Sequence[Any]) -> None:
        """See `Worker.obey`. The other envs go on meanwhile."""
        task = self._loop.task(self._obey(message))
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)

    async def _obey(self, message: Sequence[Any]) -> None:
        answer = await self.answer(*message)
        if not self._ending:
            self._report(answer)

    async def _within(self, runner: EnvRunner, move: Callable[[], Move[T]]) -> T:
        if self._ending:  # a step that does not let itself be cancelled must not keep the env open
            return await move()
        return await super()._within(runner, move)

    def _settle(self, move: Move[T]) -> T:
        return self._loop.complete(move)

    def close(self) -> None:
        """See `Worker.close`. The envs' loop goes last: their own `close` may need it."""
        super().close()
        with contextlib.suppress(Exception):  # what an env has left behind in it
            self._loop.close()
