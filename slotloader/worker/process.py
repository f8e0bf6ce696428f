"""What a forked worker process does: builds its envs, attaches to the region, serves until told to stop."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pickle
import select
import traceback
from collections.abc import Sequence
from typing import Any

import cloudpickle
import posix_ipc

from slotloader.messages.channel import Channel
from slotloader.messages.reports import Failed, shortened
from slotloader.table import slots
from slotloader.table.layout import MAX_RECEIVERS, Layout
from slotloader.table.signals import SemaphoreSignal, make_fence
from slotloader.worker import worker as workers

_CROWD = 2  # more workers per core should not preempt the trainer; with fewer it costs (decision 0008)


class PickledSpaces:
    """Spaces as bytes: the trainer unpickles them only if the user asks for them."""

    def __init__(self, spaces: Any) -> None:
        self.data = cloudpickle.dumps(spaces)

    def load(self) -> Any:
        """The spaces; imports the package that they come from."""
        return pickle.loads(self.data)


def main(channel: Channel, semaphores: Sequence[posix_ipc.Semaphore]) -> None:
    """Runs one worker to its end.

    Args:
      channel: the command socket; the first message is a pickled `WorkerConfig` in bytes, the second `(layout,)` with the
        region's descriptor.
      semaphores: one per receiver, then per worker one to wake it and one for its fences.
    """

    def report(message: Any) -> None:
        with contextlib.suppress(EOFError):  # a trainer that is gone is the nursery's business
            channel.send(message)

    try:
        config, affinity = _configuration(channel, report)
    except EOFError:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if affinity:
        os.sched_setaffinity(0, affinity)
    worker = workers.make_worker(config, report)
    worker.pack_spaces = PickledSpaces
    try:
        if worker.build():
            worker = workers.choose(worker, report)
            early: collections.deque[Any] = collections.deque()  # commands that came while the envs were being built
            while True:
                message, fds = channel.receive()
                if isinstance(message[0], Layout):
                    break
                early.append(message)
            table = slots.attach(fds[0])
            os.close(fds[0])
            receivers = [SemaphoreSignal(semaphore) for semaphore in semaphores[:MAX_RECEIVERS]]
            count = (len(semaphores) - MAX_RECEIVERS) // 2  # of workers
            wake, fence = semaphores[MAX_RECEIVERS:][config.index :: count]
            worker.attach(table, receivers, make_fence(fence))
            if count > _CROWD * cores:
                _yield_to_the_trainer()
            worker.run(
                SemaphoreSignal(wake),
                lambda: early.popleft() if early else _next_command(channel),
            )
        else:
            channel.receive()  # wait to be told to end, so that the failure is read before the exit is
    except EOFError:
        pass  # the trainer has closed the socket: end in order
    finally:
        worker.close()


def _yield_to_the_trainer() -> None:
    """A worker that is woken no longer pushes the trainer off its core, in the middle of waking the others.

    SCHED_BATCH changes just that: the share of the CPU is the same. What an env starts from here on is scheduled as usual.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))


def _configuration(channel: Channel, report: Any) -> Any:
    """Unpickles the configuration; a module that cannot be imported here is reported like a factory that raises."""
    (own_slots, index, data, affinity, lives), _ = channel.receive()
    try:
        return dataclasses.replace(pickle.loads(data), lives=lives), affinity
    except Exception as error:
        report(
            Failed(
                index, own_slots[:1], os.getpid(), "unpickling", 0, type(error).__name__, str(error)[:4000],
                shortened(traceback.format_exc()),
            )
        )  # fmt: skip
        channel.receive()
        raise EOFError from error


def _next_command(channel: Channel) -> Any:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    if not poll.poll(0):
        return None
    return channel.receive()[0]
