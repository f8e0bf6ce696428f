"""Running what envs do: coroutines for all of them, an event loop only for those that wait.

Whatever a worker does to an env is a coroutine, so that it is written once. Those of a plain env wait for nothing and are run
by `finish`; those of an async env are run by a `Loop`.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
Move = Coroutine[Any, Any, T]

_LEAVE_LIMIT = 1.0  # seconds that tasks which have been cancelled may take to end


def finish(move: Move[T]) -> T:
    """Runs a coroutine that waits for nothing."""
    try:
        move.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    move.close()
    raise RuntimeError("a coroutine of an env that is not async waited for something")


class Loop:
    """An event loop of one thread, which can be left for a moment: see `outside`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._outside: collections.deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = collections.deque()
        self.call_soon_threadsafe = self._loop.call_soon_threadsafe
        self.is_running = self._loop.is_running

    def task(self, move: Move[Any]) -> asyncio.Task[Any]:
        """Begins a coroutine beside others; the caller must hold the task, the loop does not."""
        return self._loop.create_task(move)

    def complete(self, move: Move[T]) -> T:
        """Runs a coroutine to its end, and whatever else the loop has to do meanwhile.

        What ends it before, Ctrl-C that is, cancels it.
        """
        task = self._loop.create_task(move)
        task.add_done_callback(self._stop)
        try:
            while not task.done():
                self._loop.run_forever()
                self._leave()
        except BaseException:
            if not task.done():
                task.remove_done_callback(self._stop)
                task.cancel()
                self._loop.run_until_complete(asyncio.wait([task], timeout=_LEAVE_LIMIT))
            if task.done() and not task.cancelled():
                task.exception()  # it is what is being raised; asyncio shall not complain that nobody has asked
            raise
        return task.result()

    def _stop(self, _: object) -> None:
        self._loop.stop()

    async def outside(self, function: Callable[[], T]) -> T:
        """Calls a function that must not run within an event loop: a factory that uses `asyncio.run` itself.

        It runs in the same thread, between two rounds of the loop; everything else waits for it.
        """
        future: asyncio.Future[Any] = self._loop.create_future()
        self._outside.append((function, future))
        self._loop.stop()
        value, error = await future
        if error is not None:
            raise error
        result: T = value
        return result

    def _leave(self) -> None:
        while self._outside:
            function, future = self._outside.popleft()
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = function(), None
            except BaseException as error:  # raised where `outside` was called
                outcome = None, error
            if not future.done():
                future.set_result(outcome)

    def close(self) -> None:
        """Cancels what still runs, lets it end, and closes the loop."""
        loop = self._loop
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left, timeout=_LEAVE_LIMIT))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()
