"""Which wake-up carries more steps between processes: POSIX semaphores, or eventfd with poll?

Workload: 8 workers play ping-pong with one consumer through a shared array of state words; no environments, no payload.
The consumer takes all states that are READY, stores ACTED and wakes their workers; each worker stores READY and wakes
the consumer. Both contenders run the very same loop and every wait has a bound, as in the library; only the wake-up
differs. There is no bar: the figures justify the choice in `docs/decisions/`.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from benchmarks.harness import Case, parse_arguments, ratio, report, run_cases

ACTED, READY = 0, 1
WAIT_S = 0.25
WORKLOAD, SEMAPHORE, EVENTFD = "8 workers", "posix_ipc semaphore", "eventfd + poll"


class Signal(Protocol):
    """A wake-up that lives across a fork."""

    def post(self) -> None:
        """Wakes the waiter."""

    def wait(self) -> None:
        """Waits for a post, at most `WAIT_S` seconds, and takes all posts there are."""


class Semaphore:
    """A POSIX semaphore that is unlinked at once; the forked workers inherit it."""

    def __init__(self) -> None:
        import posix_ipc

        self._busy = posix_ipc.BusyError
        self._semaphore = posix_ipc.Semaphore(None, posix_ipc.O_CREX, initial_value=0)
        self._semaphore.unlink()
        self.post = self._semaphore.release

    def wait(self) -> None:
        try:
            self._semaphore.acquire(WAIT_S)
            while self._semaphore.value:
                self._semaphore.acquire(0)
        except self._busy:
            pass


class Eventfd:
    """An eventfd; one read takes all posts."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def post(self) -> None:
        os.eventfd_write(self._fd, 1)

    def wait(self) -> None:
        if self._poll.poll(WAIT_S * 1000):
            os.eventfd_read(self._fd)


KINDS: dict[str, Callable[[], Signal]] = {SEMAPHORE: Semaphore, EVENTFD: Eventfd}


def ping_pong(kind: str, workers: int, warmup: float, window: float) -> dict[str, float]:
    """Runs the ping-pong and returns its steps per second and the consumer's CPU per step."""
    consumer = KINDS[kind]()
    signals = [KINDS[kind]() for _ in range(workers)]
    words = memoryview(mmap.mmap(-1, (workers + 1) * 4)).cast("I")  # one state per worker, then the word that stops all
    states = np.frombuffer(words, np.uint32)[:workers]
    pids = []
    for index, signal in enumerate(signals):
        pid = os.fork()
        if pid == 0:
            try:
                _work(words, index, signal, consumer)
            finally:
                os._exit(0)
        pids.append(pid)
    try:
        _consume(states, words, consumer, signals, warmup)
        cpu, begin = time.process_time(), time.monotonic()
        steps = _consume(states, words, consumer, signals, window)
        elapsed = time.monotonic() - begin
        return {"steps_per_s": steps / elapsed, "consumer_us": (time.process_time() - cpu) / steps * 1e6}
    finally:
        words[workers] = 1
        for signal in signals:
            signal.post()
        for pid in pids:
            os.waitpid(pid, 0)


def _consume(states: np.ndarray, words: memoryview, consumer: Signal, signals: Sequence[Signal], seconds: float) -> int:
    steps, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        ready = np.flatnonzero(states == READY).tolist()
        if not ready:
            consumer.wait()
            continue
        for index in ready:
            words[index] = ACTED
            signals[index].post()
        steps += len(ready)
    return steps


def _work(words: memoryview, index: int, signal: Signal, consumer: Signal) -> None:
    while not words[-1]:
        if words[index] == ACTED:
            words[index] = READY
            consumer.post()
        signal.wait()


def main() -> None:
    options = parse_arguments(__doc__)
    times = {"workers": 8, "warmup": 0.5, "window": 1.0 if options.quick else 5.0}
    cases = [Case(WORKLOAD, kind, f"{__package__}.signals:ping_pong", {"kind": kind, **times}) for kind in KINDS]
    outcomes = run_cases(cases, options)
    columns = [("steps/s", "steps_per_s", ",.0f"), ("consumer us/step", "consumer_us", ".2f")]
    report("signals", outcomes, [], columns, options)
    value = ratio(outcomes, "steps_per_s", (WORKLOAD, SEMAPHORE), (WORKLOAD, EVENTFD))
    if value is not None:
        print(f"\n{SEMAPHORE} / {EVENTFD}: {value:.2f}x")


if __name__ == "__main__":
    main()
