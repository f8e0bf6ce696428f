"""The nursery: a small single-threaded process that forks, watches and reaps the workers of one loader.

It is started in a fresh interpreter, never imports the user's main module, and ends when the trainer does,
taking every worker's process group with it. Nothing of the trainer (jax, CUDA or gRPC threads) is ever forked.

Messages from the trainer: `("setup", sys_path, preload, semaphore_names)`, `("spawn", index)` with the worker's end of its
socket, `("stack", index)`, `("condemn", index)` (stack, then kill), `("kill", indices)`.
Messages to it: `("ready", failed_preloads)`, `("spawned", index, pid)`,
`("stack", index, text)`, `("exit", index, pid, status)`, `("unspawned", index, text)`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from typing import IO, Any

import posix_ipc

from slotloader.messages.channel import Channel
from slotloader.table import slots  # noqa: F401  imported here once, shared by every fork
from slotloader.worker import process as worker_process
from slotloader.worker import worker as workers  # noqa: F401  imported here once, shared by every fork
from slotloader.worker.processes import LINUX, end_with, prctl

_PR_SET_CHILD_SUBREAPER = 36


class Nursery:
    """The loop of the nursery process."""

    def __init__(self, channel: Channel, trainer: int) -> None:
        self._channel = channel
        self._trainer = trainer
        self._pid = os.getpid()
        self._workers: dict[int, int] = {}  # pid -> worker index
        self._stacks: dict[int, IO[bytes]] = {}  # worker index -> file that faulthandler writes to
        self._semaphores: list[posix_ipc.Semaphore] = []
        self._preloaded: set[int] = set()

    def run(self) -> None:
        """Serves until the trainer is gone or has closed the channel; then nothing of the fleet is left."""
        prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of a worker become ours, so that they can be found
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if LINUX else _pipe()
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        if hasattr(os, "pidfd_open"):
            try:
                poll.register(os.pidfd_open(self._trainer), select.POLLIN)
            except OSError:  # no such process any more; elsewhere the end of the channel says the same
                return
        self._own_fds = (wake_read, wake_write)
        try:
            while True:
                for fd, _ in poll.poll():
                    if fd == wake_read:
                        with contextlib.suppress(BlockingIOError):
                            os.read(wake_read, 4096)
                        self._reap()
                    elif fd == self._channel.fileno():
                        self._obey(*self._channel.receive())
                    else:
                        return  # the trainer has died
        except EOFError:
            return
        finally:
            self._kill(list(self._workers.values()))
            self._workers.clear()  # dead or dying: they are reaped like strays, and so is what they leave behind
            self._kill_strays()

    def _obey(self, message: Any, fds: list[int]) -> None:
        verb, *args = message
        if verb == "setup":
            self._setup(*args)
        elif verb == "spawn":
            try:
                self._spawn(args[0], fds[0])
            except (OSError, IndexError) as error:  # no descriptor or no process left: the other workers go on
                for fd in fds:
                    os.close(fd)
                self._channel.send(("unspawned", args[0], str(error) or "out of descriptors"))
        elif verb == "stack":
            self._channel.send(("stack", args[0], self._stack_of(args[0])))
        elif verb == "condemn":
            self._channel.send(("stack", args[0], self._stack_of(args[0])))
            self._kill(args)
        elif verb == "kill":
            self._kill(args[0])

    def _setup(self, path: list[str], preload: list[str], semaphore_names: list[str]) -> None:
        sys.path[:] = path
        self._semaphores = [posix_ipc.Semaphore(name) for name in semaphore_names]
        failed: dict[str, str] = {}
        for module in preload:
            try:
                importlib.import_module(module)
            except Exception:
                failed[module] = traceback.format_exc()
        self._preloaded = set(_children())
        gc.collect()
        gc.freeze()  # forked pages stay shared: the collector no longer writes to these objects
        self._channel.send(("ready", failed))

    def _spawn(self, index: int, fd: int) -> None:
        stack = tempfile.TemporaryFile()  # noqa: SIM115  kept open as long as the worker lives
        try:
            pid = os.fork()
        except OSError:
            stack.close()
            raise
        if pid == 0:
            code = 1
            try:
                self._become_worker(index, fd, stack)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        os.close(fd)
        self._workers[pid] = index
        previous = self._stacks.pop(index, None)
        if previous is not None:
            previous.close()
        self._stacks[index] = stack
        self._channel.send(("spawned", index, pid))

    def _become_worker(self, index: int, fd: int, stack: IO[bytes]) -> None:
        nursery = self._pid
        os.setsid()  # a process group of its own: it is killed with everything that its envs start
        end_with(nursery)  # it has only one thread
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for own in (*self._own_fds, self._channel.fileno()):
            os.close(own)
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        worker_process.main(Channel(socket.socket(fileno=fd)), self._semaphores)

    def _stack_of(self, index: int) -> str:
        file = self._stacks.get(index)
        pid = next((pid for pid, worker in self._workers.items() if worker == index), None)
        if file is None or pid is None:
            return ""
        file.truncate(0)
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            return ""
        size, deadline = 0, time.monotonic() + 0.5
        while time.monotonic() < deadline:  # written by the handler: complete once it no longer grows
            time.sleep(0.02)
            grown = os.fstat(file.fileno()).st_size
            if grown and grown == size:
                break
            size = grown
        return os.pread(file.fileno(), 16384, 0).strip(b"\0").decode(errors="replace")

    def _kill(self, indices: list[int]) -> None:
        for pid, index in list(self._workers.items()):
            if index in indices:
                for kill in (os.killpg, os.kill):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        ended = []
        while pid_and_status := self._reap_one():
            pid, status = pid_and_status
            index = self._workers.pop(pid, None)
            if index is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # what the worker's envs started goes with it
                ended.append((index, pid, os.waitstatus_to_exitcode(status)))
        self._kill_strays()
        for message in ended:
            with contextlib.suppress(EOFError):
                self._channel.send(("exit", *message))

    @staticmethod
    def _reap_one() -> tuple[int, int] | None:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        return (pid, status) if pid else None

    def _kill_strays(self) -> None:
        """Kills adopted orphans, processes of an env that left their worker's group, and then the orphans these leave."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            strays = [pid for pid in _children() if pid not in self._workers and pid not in self._preloaded]
            if not strays:
                return
            for pid in strays:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.002)  # once a stray is reaped its own children become ours: look again


def _children() -> list[int]:
    """Process ids of our children, where the kernel says."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _pipe() -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


def main(fd: str, trainer: str) -> None:
    """Entry point: the channel's descriptor and the trainer's pid."""
    Nursery(Channel(socket.socket(fileno=int(fd))), int(trainer)).run()
