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

import posix_ipc

from slotloader.messages.channel import Channel
from slotloader.messages.pickling import Packed
from slotloader.messages.reports import Answer, Built, Failed, shortened
from slotloader.table import slots
from slotloader.table.layout import MAX_RECEIVERS
from slotloader.table.signals import SemaphoreSignal, make_fence
from slotloader.worker.choice import choose, make_worker

_CROWD = 2  # more workers per core should not preempt the trainer; with fewer it costs (decision 0008)


def main(channel: Channel, semaphores: Sequence[posix_ipc.Semaphore]) -> None:
    """Runs one worker to its end.

    Args:
      channel: the command socket; the first message is a pickled `WorkerConfig` in bytes, the second `("region",)` with
        its descriptor.
      semaphores: one per receiver, then per worker one to wake it and one for its fences.
    """

    def report(message: Any) -> None:
        if isinstance(message, Answer):
            message = _packed(message)
        elif isinstance(message, Built):
            message = dataclasses.replace(message, specs=Packed.of(message.specs), spaces=Packed.of(message.spaces))
        with contextlib.suppress(EOFError):  # a trainer that is gone is the nursery's business
            channel.send(message)

    try:
        config, affinity = _configuration(channel, report)
    except EOFError:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if affinity:
        os.sched_setaffinity(0, affinity)
    worker = make_worker(config, report)
    try:
        if worker.build():
            worker = choose(worker)
            early: collections.deque[Any] = collections.deque()  # commands that came while the envs were being built
            while True:
                message, fds = channel.receive()
                if message[0] == "region":
                    break
                early.append(_command(message))
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
    return _command(channel.receive()[0]) if poll.poll(0) else None


def _command(message: Any) -> Any:
    """A command whose arguments are still pickled: what is wrong with them is an answer to this command, and no more."""
    ticket, verb, own, arguments = message
    return ticket, verb, own, Packed(arguments)


def _packed(answer: Answer) -> Answer:
    """The results as bytes for whoever waits for them; one that cannot be pickled is that call's failure."""
    results = {}
    for slot, result in answer.results.items():
        try:
            results[slot] = Packed.of(result)
        except Exception as error:
            text = f"expected a result that can be pickled, found {type(result).__name__}: {error}"
            failure = Failed(answer.worker, (slot,), os.getpid(), "call", 0, type(error).__name__, text[:4000], "")
            return Answer(answer.worker, answer.ticket, {}, answer.failure or failure)
    return dataclasses.replace(answer, results=results)
