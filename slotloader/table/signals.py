"""Wake-ups and fences between the trainer and its workers.

A wake-up is a hint, the state words are the truth: a lost or an extra post loses nothing, it costs at most one wait
slice or one needless scan. Why semaphores and not eventfd: `docs/decisions/0002-semaphores.md`.
"""

from __future__ import annotations

import functools
import os
import platform
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

if sys.platform != "win32":
    import posix_ipc

# Longest single wait of a receiver in seconds. sem_timedwait runs on the wall clock: a step back makes the wait that is under
# way longer by the step, unless a post ends it; the waits after it are right again.
SLICE = 0.25
_PREFIX = "/slotl-"


class Signal(Protocol):
    """What one side posts and the other waits for."""

    def post(self) -> None:
        """Wakes the waiter, now or at its next wait. Never blocks."""

    def wait(self, timeout: float) -> bool:
        """Sleeps until a post or for at most `timeout` seconds; True if there was a post."""


class SemaphoreSignal:
    """A POSIX semaphore shared by two processes, drained by whoever waits."""

    def __init__(self, semaphore: posix_ipc.Semaphore) -> None:
        self._semaphore = semaphore
        self.post: Callable[[], None] = semaphore.release

    def wait(self, timeout: float) -> bool:
        """See `Signal.wait`. Takes every post there is, so that a surplus never makes later waits spin."""
        semaphore = self._semaphore
        try:
            if posix_ipc.SEMAPHORE_TIMEOUT_SUPPORTED:
                semaphore.acquire(timeout)
            else:  # macOS has no sem_timedwait
                _poll(semaphore, timeout)
            while semaphore.value:
                semaphore.acquire(0)
        except posix_ipc.BusyError:
            return False
        except posix_ipc.SignalError:  # a handled signal ended the wait; KeyboardInterrupt has been raised already
            return False
        return True


class GuardedSignal(SemaphoreSignal):
    """The trainer's wait: an exception that a user's signal handler raises comes out of it.

    posix_ipc runs handlers in mid-wait and then replaces whatever they raised, but for KeyboardInterrupt, by SignalError. So
    the main thread blocks the signals that have handlers while it waits; these run when the slice is over. Whether there are
    any is asked anew every `SLICE`: blocking takes some us.
    """

    def __init__(self, semaphore: posix_ipc.Semaphore) -> None:
        super().__init__(semaphore)
        self._handled = False
        self._ask_again = 0.0

    def wait(self, timeout: float) -> bool:
        """See `Signal.wait`."""
        now = time.monotonic()
        if now >= self._ask_again:
            self._ask_again = now + SLICE
            self._handled = any(callable(signal.getsignal(number)) for number in _HANDLED)
        if not self._handled or threading.get_ident() != _MAIN_THREAD:  # handlers run in the main thread only
            return SemaphoreSignal.wait(self, timeout)  # what super() costs is worth saving here
        before = None
        try:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
            return super().wait(timeout)
        finally:
            how, mask = (signal.SIG_UNBLOCK, _HANDLED) if before is None else (signal.SIG_SETMASK, before)
            try:
                signal.pthread_sigmask(how, mask)
            except BaseException:  # a handler ran on entry, before the mask was set
                signal.pthread_sigmask(how, mask)
                raise


_MAIN_THREAD = threading.main_thread().ident
_HANDLED = frozenset(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCONT") if hasattr(signal, name)
)


def _poll(semaphore: posix_ipc.Semaphore, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            semaphore.acquire(0)
            return
        except posix_ipc.BusyError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.0005)


class ThreadSignal:
    """The same between two threads of one process, also where posix_ipc does not exist."""

    def __init__(self) -> None:
        self._posts: queue.SimpleQueue[None] = queue.SimpleQueue()

    def post(self) -> None:
        """See `Signal.post`."""
        self._posts.put(None)

    def wait(self, timeout: float) -> bool:
        """See `Signal.wait`."""
        try:
            self._posts.get(timeout=timeout)
            while not self._posts.empty():
                self._posts.get_nowait()
        except queue.Empty:
            return False
        return True


def create_semaphore() -> posix_ipc.Semaphore:
    """A new named semaphore with value 0; unlink it as soon as the other side has opened it."""
    while True:
        name = f"{_PREFIX}{os.getpid()}-{_namespace()}-{os.urandom(3).hex()}"  # at most 31 characters on macOS
        try:
            return posix_ipc.Semaphore(name, posix_ipc.O_CREX, initial_value=0)
        except posix_ipc.ExistentialError:
            continue


@functools.cache
def _namespace() -> str:
    """Tells process ids of containers that share /dev/shm apart."""
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino & 0xFFFFFFFF:x}"
    except OSError:
        return "0"


def sweep() -> None:
    """Unlinks semaphores of trainers that were killed while a name of theirs existed. Others' names are not touched."""
    try:
        entries = os.listdir("/dev/shm")
    except OSError:
        return
    for entry in entries:
        parts = entry.split("-")
        if not entry.startswith(f"sem.{_PREFIX[1:]}") or len(parts) != 4 or parts[2] != _namespace():
            continue
        try:
            os.kill(int(parts[1]), 0)
        except (ValueError, PermissionError):
            continue
        except ProcessLookupError:
            try:
                posix_ipc.unlink_semaphore("/" + entry[len("sem.") :])
            except (posix_ipc.ExistentialError, posix_ipc.PermissionsError):
                continue


def make_fence(semaphore: posix_ipc.Semaphore | None = None) -> Callable[[], None]:
    """Makes a full memory barrier for the calling process: no load or store moves across a call, in either direction.

    Args:
      semaphore: the one to use, which no process that runs at the same time may use; default a new one.

    It is needed between a store and a later load of another word (Dekker: "my record is READY" before "is the receiver
    asleep?"). A plain numpy store is no barrier on any machine; an atomic release and acquire of a semaphore that nobody
    else uses is one everywhere. Make it after fork: a fence shared by processes would bounce one cache line among them.
    """
    if sys.platform == "win32":
        lock = threading.Lock()

        def lock_fence() -> None:
            with lock:
                pass

        return lock_fence
    if semaphore is None:
        semaphore = create_semaphore()
        semaphore.unlink()
    release, acquire = semaphore.release, semaphore.acquire

    def semaphore_fence() -> None:
        release()
        acquire(0)

    return semaphore_fence


def make_order_fence(fence: Callable[[], None]) -> Callable[[], None]:
    """Makes the weaker barrier between a payload and its state word: stores stay in order, and so do loads.

    x86-64 promises exactly this by itself (Intel SDM vol. 3, 9.2.2), so there it does nothing; elsewhere it is `fence`.
    """
    if platform.machine().lower() in ("x86_64", "amd64", "i686", "i386"):
        return _nothing
    return fence


def _nothing() -> None:
    pass
