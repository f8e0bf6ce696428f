"""Actions on their way back from a device: a thread waits for them, scatters them and wakes the envs.

So the next batch forms while the last one computes, also when the main thread sits in `recv`.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from slotloader.batching.batches import Batch
from slotloader.batching.receiver import Receiver
from slotloader.device.ops import DeviceOps
from slotloader.records.specs import Array, Tree, build

_EXIT_TIMEOUT = 60.0  # seconds that the end of the interpreter waits for a device
_SLICE = 0.5  # seconds between two looks whether the wait is still worth it


@dataclass
class Pending:
    """A batch whose actions are on their way.

    Attributes:
      batch: the core's batch.
      landings: what `DeviceOps.d2h` returned, one per leaf of the action; a list for a leaf of texts.
      landed: the event after which they can be read.
      done: called once the slots have their actions, or never will.
      undo: called if they never will.
      rows: which rows of the batch are answered, bool (size,); None is all.
      held: the actions on the device, which must live until they have landed.
    """

    batch: Batch
    landings: list[Any]
    landed: Any
    done: Callable[[], None] | None
    undo: Callable[[], None] | None
    rows: Array | None = None
    held: Any = None


_alive: weakref.WeakSet[Completer] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_alive.clear)  # a child has none of these threads, and must not wait for them


@atexit.register
def _end_threads() -> None:
    """A thread that a framework's C++ code holds while the interpreter ends would abort the process."""
    for completer in list(_alive):
        completer.close(_EXIT_TIMEOUT)


class Completer:
    """Completes batches in the order in which they were submitted; at most `in_flight` are on their way.

    Args:
      ops: the device.
      receiver: whose batches they are.
      action: the action tree.
      in_flight: most batches on their way.
    """

    def __init__(self, ops: DeviceOps, receiver: Receiver, action: Tree, in_flight: int) -> None:
        self._ops, self._receiver, self._action, self.in_flight = ops, receiver, action, in_flight
        self._pending: deque[Pending] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, pending: Pending) -> None:
        """Completes at once what has landed already and has nothing before it; else leaves it to the thread."""
        if not self._pending and self._ops.done(pending.landed):
            try:
                self._complete(pending)
            except BaseException:
                self._leave(pending, failed=True)
                raise
            self._leave(pending)
            return
        try:
            self._receiver.leases.promise(
                pending.batch, pending.batch.size if pending.rows is None else int(pending.rows.sum())
            )
            with self._changed:
                self._pending.append(pending)
                self._changed.notify_all()
            if self._thread is None:
                _alive.add(self)
                self._thread = threading.Thread(target=self._run, name="slotloader-completion", daemon=True)
                self._thread.start()
        except BaseException:  # Ctrl-C: a promise that nobody keeps would have `recv` wait for ever
            self._receiver.leases.promise(pending.batch, 0)
            raise

    def _complete(self, pending: Pending) -> None:
        self._ops.host_wait(pending.landed)  # fence
        batch, rows = pending.batch, pending.rows
        parts = (
            landing[: batch.size] if isinstance(landing, list) else trimmed(self._ops.landed(landing), batch.size)
            for landing in pending.landings
        )
        if rows is None:
            batch.send(build(self._action, parts))
        else:
            self._receiver.leases.answer_some(batch, build(self._action, parts), rows)

    @staticmethod
    def _leave(pending: Pending, failed: bool = False) -> None:
        pending.held = None
        if failed and pending.undo is not None:
            pending.undo()
        if pending.done is not None:
            pending.done()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closed:
                    self._changed.wait()
                if not self._pending:
                    return
                pending = self._pending[0]
            try:
                self._complete(pending)
                self._leave(pending)
            except BaseException as error:  # the next call of the consumer raises it
                self._leave(pending, failed=True)
                if self._closed:
                    self._receiver.leases.promise(pending.batch, 0)
                else:
                    self._receiver.fail(error, pending.batch)
            with self._changed:
                self._pending.popleft()
                self._changed.notify_all()

    def is_full(self) -> bool:
        """Whether `in_flight` batches are on their way."""
        return len(self._pending) >= self.in_flight

    def wait_for_room(self) -> None:
        """Waits until another batch may be sent on its way; returns as well when the loader is closed."""
        if self.is_full():
            self._wait(lambda: len(self._pending) < self.in_flight or self._receiver.closed, None)

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until nothing is on its way; False after `timeout` seconds."""
        return self._wait(lambda: not self._pending, timeout)

    def _wait(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        deadline = None if timeout is None else monotonic() + timeout
        with self._changed:
            while not condition():
                if deadline is not None and monotonic() >= deadline:
                    return False
                self._changed.wait(_SLICE if deadline is None else max(0.0, min(_SLICE, deadline - monotonic())))
        return True

    def close(self, timeout: float) -> None:
        """Completes what is on its way, for at most `timeout` seconds, and ends the thread."""
        drained = self.drain(timeout)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and drained:
            self._thread.join(timeout)


def trimmed(array: Array, size: int) -> Array:
    """The rows of the real records; rows of padding come after them."""
    return array[:size] if array.ndim and len(array) > size else array
