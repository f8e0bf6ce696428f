"""The nursery: a small single-threaded process that forks, watches and reaps the workers of one loader.

It is started in a fresh interpreter, never imports the user's main module, and ends when the trainer does,
taking every worker's process group with it. Nothing of the trainer (jax, CUDA or gRPC threads) is ever forked.

A `serial` names one process, see `incarnations`.
Messages from the trainer: `("setup", sys_path, preload, semaphore_names)`, `("spawn", serial)` with the worker's end of its
socket, `("stack", serial)`, `("condemn", serial)` (stack, then kill), `("kill", serials)`.
Messages to it: `("ready", failed_preloads)`, `("spawned", serial, pid)`,
`("stack", serial, text)`, `("exit", serial, pid, status)`, `("unspawned", serial, text)`.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import importlib
import os
import pickle
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
from slotloader.messages.stream import Stream
from slotloader.table import slots  # noqa: F401  imported here once, shared by every fork
from slotloader.worker import process as worker_process
from slotloader.worker.processes import LINUX, end_with, prctl

_PR_SET_CHILD_SUBREAPER = 36
_STACK_LIMIT = 0.5  # seconds that a worker may take to write its stack
_STACK_LOOK_MS = 20


class _Worker:
    """A process that it has forked."""

    def __init__(self, serial: int, stack: IO[bytes]) -> None:
        self.serial, self.stack = serial, stack
        self.asked_until = 0.0  # monotonic time until which its stack is awaited; 0 if nobody asks
        self.size = 0  # of the stack at the last look
        self.kill = False  # once the stack is there


class Nursery:
    """The loop of the nursery process: it never waits for anything but its next event."""

    def __init__(self, control: Stream, trainer: int) -> None:
        self._control = control
        self._trainer = trainer
        self._pid = os.getpid()
        self._workers: dict[int, _Worker] = {}  # by pid
        self._semaphores: list[posix_ipc.Semaphore] = []
        self._preloaded: set[int] = set()
        self._to_spawn: list[int] = []  # ends of the sockets of workers that are not forked yet

    def run(self) -> None:
        """Serves until the trainer is gone or has closed the socket; then nothing of the fleet is left."""
        prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of a worker become ours, so that they can be found
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if LINUX else _pipe()
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the trainer's own mask is no wish about its workers
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        if hasattr(os, "pidfd_open"):
            try:
                poll.register(os.pidfd_open(self._trainer), select.POLLIN)
            except OSError:  # no such process any more; elsewhere the end of the socket says the same
                return
        self._own_fds = (wake_read, wake_write)
        try:
            while True:
                self._control.flush()
                poll.modify(self._control.fileno(), select.POLLIN | (select.POLLOUT if self._control.has_output() else 0))
                asking = any(worker.asked_until for worker in self._workers.values())
                for fd, events in poll.poll(_STACK_LOOK_MS if asking else None):
                    if fd == wake_read:
                        with contextlib.suppress(BlockingIOError):
                            os.read(wake_read, 4096)
                        self._reap()
                    elif fd == self._control.fileno():
                        if events & ~select.POLLOUT:
                            self._obey_all()
                    else:
                        return  # the trainer has died
                if asking:
                    self._look_at_stacks()
        except EOFError:
            return
        finally:
            self._kill({worker.serial for worker in self._workers.values()})
            self._workers.clear()  # dead or dying: they are reaped like strays, and so is what they leave behind
            self._kill_strays()

    def _say(self, *message: Any) -> None:
        self._control.put(pickle.dumps(message))

    def _obey_all(self) -> None:
        frames = list(self._control.receive())
        self._to_spawn = [fd for _, fds in frames for fd in fds if fd >= 0]
        for payload, fds in frames:
            verb, *args = pickle.loads(payload)
            if verb == "setup":
                self._setup(*args)
            elif verb == "spawn":
                try:
                    self._spawn(args[0], fds[0])
                except OSError as error:  # no descriptor or no process left: the other workers go on
                    self._say("unspawned", args[0], str(error))
                finally:
                    for fd in fds:
                        if fd >= 0:
                            self._to_spawn.remove(fd)
                            os.close(fd)
            elif verb in ("stack", "condemn"):
                self._ask_for_stack(args[0], kill=verb == "condemn")
            elif verb == "kill":
                self._kill(set(args[0]))

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
        self._say("ready", failed)

    def _spawn(self, serial: int, fd: int) -> None:
        if fd < 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        stack = tempfile.TemporaryFile()  # noqa: SIM115  kept open as long as the worker lives
        try:
            pid = os.fork()
        except OSError:
            stack.close()
            raise
        if pid == 0:
            code = 1
            try:
                self._become_worker(fd, stack)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        self._workers[pid] = _Worker(serial, stack)
        self._say("spawned", serial, pid)

    def _become_worker(self, fd: int, stack: IO[bytes]) -> None:
        nursery = self._pid
        os.setsid()  # a process group of its own: it is killed with everything that its envs start
        end_with(nursery)  # it has only one thread
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        others = [other for other in self._to_spawn if other != fd]  # of workers that are forked after it
        for own in (*self._own_fds, self._control.fileno(), *others):
            os.close(own)
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        worker_process.main(Channel(socket.socket(fileno=fd)), self._semaphores)

    def _ask_for_stack(self, serial: int, kill: bool) -> None:
        """Has a worker write its stack; `_look_at_stacks` sends it on, and then kills if that was asked for."""
        found = next(((pid, worker) for pid, worker in self._workers.items() if worker.serial == serial), None)
        if found is None:
            self._say("stack", serial, "")
            return
        pid, worker = found
        worker.kill = worker.kill or kill
        worker.asked_until, worker.size = time.monotonic() + _STACK_LIMIT, 0
        worker.stack.truncate(0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)

    def _look_at_stacks(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers.values() if worker.asked_until]:
            size = os.fstat(worker.stack.fileno()).st_size
            if now < worker.asked_until and not (size and size == worker.size):  # written by the handler: complete once
                worker.size = size  # it no longer grows
                continue
            worker.asked_until = 0.0
            text = os.pread(worker.stack.fileno(), 16384, 0).strip(b"\0").decode(errors="replace")
            self._say("stack", worker.serial, text)
            if worker.kill:
                self._kill({worker.serial})

    def _kill(self, serials: set[int]) -> None:
        for pid, worker in self._workers.items():
            if worker.serial in serials:
                for kill in (os.killpg, os.kill):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        ended = []
        while pid_and_status := self._reap_one():
            pid, status = pid_and_status
            worker = self._workers.pop(pid, None)
            if worker is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # what the worker's envs started goes with it
                worker.stack.close()
                ended.append((worker.serial, pid, os.waitstatus_to_exitcode(status)))
        self._kill_strays()
        for message in ended:
            self._say("exit", *message)

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
    """Entry point: the socket's descriptor and the trainer's pid."""
    Nursery(Stream(socket.socket(fileno=int(fd))), int(trainer)).run()
