"""`backend="process"`: worker processes forked by the loader's private nursery."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import posix_ipc  # noqa: F401  where it does not exist this module must not import: the loader then says so

from slotloader.errors import SlotLoaderError
from slotloader.fleet.supervision import Limits
from slotloader.fleet.supervisor import Fleet
from slotloader.messages import pickling
from slotloader.messages.channel import Channel
from slotloader.messages.reports import Died
from slotloader.table import slots
from slotloader.table.layout import MAX_RECEIVERS, Layout
from slotloader.table.signals import GuardedSignal, SemaphoreSignal, create_semaphore, sweep
from slotloader.worker.processes import command, import_path
from slotloader.worker.worker import WorkerConfig

_BLAS_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_DESCRIPTORS_PER_WORKER = 1  # its command socket; one more while it is started
_DESCRIPTORS_OF_FLEET = 12
_WATCH_INTERVAL = 0.05  # seconds between looks for hung envs, only where a limit is set
_REAP_LIMIT = 10.0  # seconds after SIGKILL until a worker counts as stuck in the kernel
_MARK = "SLOTLOADER_NURSERY"  # environment variable of the nursery and of every process below it
_KILL_RESERVE = 1.0  # seconds of the close deadline that are kept for killing and reaping


def pickle_factories(configs: Sequence[WorkerConfig]) -> list[bytes]:
    """Pickles every worker's configuration before any process or region exists.

    Raises:
      TypeError: a factory cannot travel; the text names its index and the remedy.
    """
    sound: set[int] = set()
    for config in configs:
        for at, factory in enumerate(config.factories):
            if factory is None or id(factory) in sound:
                continue
            try:
                pickling.dumps(factory)
            except Exception as error:
                raise TypeError(
                    f"envs[{config.slots[at]}]: expected a factory that can be pickled for its worker process, found "
                    f"{type(error).__name__}: {error}; create locks, files and connections inside the factory, "
                    'or use backend="thread"'
                ) from error
            sound.add(id(factory))
        try:
            pickling.dumps(config.options)
        except Exception as error:
            raise TypeError(
                f"on_reset, info or max_bytes: expected what can be pickled for the workers, found {type(error).__name__}: "
                f"{error}; create locks, files and connections inside the function"
            ) from error
    return [pickling.dumps(config) for config in configs]


def _require_descriptors(workers: int) -> None:
    """Refuses a fleet for which the descriptors would run out half way.

    Raises:
      OSError: the limit on open files is too low, with needed and found.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        open_now = len(os.listdir("/proc/self/fd"))
    except OSError:  # no /proc: assume few
        open_now = 16
    needed = open_now + workers * _DESCRIPTORS_PER_WORKER + _DESCRIPTORS_OF_FLEET
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise OSError(
            errno.EMFILE,
            f"{workers} workers: expected a limit of at least {needed} open files (ulimit -n), found {limit}; raise it, or "
            "pack more envs into a worker with envs_per_worker",
        )


def _kill_marked(mark: str) -> None:
    """Kills every process whose environment holds our mark, and those that they start meanwhile; for at most a second."""
    wanted = f"{_MARK}={mark}".encode()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.01)


class ProcessFleet(Fleet):
    """Worker processes, their nursery and the thread that listens to both.

    Args:
      configs: one per worker.
      limits: how long things may take and how often they may fail.
      max_workers: how many workers there may be once envs have been added.
      preload: modules that the nursery imports before it forks; it is an error if one cannot be imported.
      helpful: likewise, but a failure is left to the workers to explain.
      cpu_affinity: worker w runs on `cpu_affinity[w % len]`; None leaves it to the kernel.
    """

    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        limits: Limits,
        max_workers: int,
        preload: Sequence[str] = (),
        helpful: Sequence[str] = (),
        cpu_affinity: Sequence[int] | None = None,
    ) -> None:
        super().__init__(configs, limits, max_workers)
        self._payloads = dict(enumerate(pickle_factories(configs)))
        self._preload, self._helpful = list(preload), list(helpful)
        self._affinity = cpu_affinity
        self._channels: dict[int, Channel] = {}
        self._pids: dict[int, int] = {}
        self._stacks: dict[int, str] = {}
        self._ready = False
        self._region = -1
        self._suspects: dict[int, int] = {}  # overdue slots of the last look, with their begin times
        self._start_by: dict[int, float] = {}  # respawned workers that are building, with their limit
        self._condemned: dict[int, tuple[str, float]] = {}  # workers being killed for a hang: why, and since when
        self._failed_preloads: dict[str, str] = {}
        self._nursery: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()

    def launch(self) -> None:
        """See `Fleet.launch`."""
        sweep()
        _require_descriptors(self.max_workers)
        ours, theirs = socket.socketpair()
        with theirs:
            self._mark = f"{os.getpid()}-{os.urandom(8).hex()}"
            environment = {**dict.fromkeys(_BLAS_LIMITS, "1"), **os.environ, _MARK: self._mark}
            self._nursery = subprocess.Popen(
                command("slotloader.fleet.nursery", str(theirs.fileno()), str(os.getpid())),
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is the trainer's alone
            )
        self._control = Channel(ours)
        self._selector.register(ours, selectors.EVENT_READ, None)
        self._semaphores: list[Any] = []
        try:
            self._create_semaphores()
            self._control.send(("setup", import_path(), self._helpful + self._preload, [s.name for s in self._semaphores]))
            for config in self.configs:
                self._spawn(config)
            self._watcher = threading.Thread(target=self._watch, name="slotloader-watch", daemon=True)
            self._watcher.start()
            self._wait_ready()
        except EOFError as error:
            status = self._nursery.poll()
            raise SlotLoaderError(f"the nursery process ended while it started, status {status}") from error
        finally:
            for semaphore in self._semaphores:
                semaphore.unlink()

    def _create_semaphores(self) -> None:
        """One per receiver, then per worker one to wake it and one for its fences; nothing is created later."""
        count = MAX_RECEIVERS + 2 * self.max_workers
        try:
            for _ in range(count):
                self._semaphores.append(create_semaphore())
        except OSError as error:
            raise OSError(
                error.errno,
                f"expected room for {count} semaphores in /dev/shm, one page each, found it full after {len(self._semaphores)} "
                f"({error}); free some of it or mount it larger",
            ) from error
        ends = MAX_RECEIVERS, MAX_RECEIVERS + self.max_workers
        self.signals = [GuardedSignal(semaphore) for semaphore in self._semaphores[: ends[0]]]
        self._wake = [SemaphoreSignal(semaphore) for semaphore in self._semaphores[ends[0] : ends[1]]]

    def _spawn(self, config: WorkerConfig) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._control.send(("spawn", config.index), (theirs.fileno(),))
            except EOFError:
                ours.close()
                raise
        channel = Channel(ours)
        affinity = [self._affinity[config.index % len(self._affinity)]] if self._affinity else None
        lives = [self.lives[slot] for slot in config.slots]
        self._channels[config.index] = channel
        self._selector.register(ours, selectors.EVENT_READ, config.index)
        channel.send((config.slots, config.index, self._payloads[config.index], affinity, lives))

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self.limits.start_timeout
        with self._changed:
            while not self._ready and not self.events and time.monotonic() < deadline:
                self._changed.wait(0.5)
        for module in self._preload:
            if module in self._failed_preloads:
                raise SlotLoaderError(
                    f"preload: expected modules that can be imported, found {module!r}:\n{self._failed_preloads[module]}"
                )

    def attach(self, layout: Layout) -> slots.Table:
        """See `Fleet.attach`."""
        memory, fd = slots.create_shared(layout)
        try:
            table = slots.Table(layout, memory)
        except BaseException:
            os.close(fd)
            raise
        self._region = fd  # kept for workers that start later
        with self._changed:
            self.prepared(table)
            for worker in self._channels:
                self.readmit(worker)
        return table

    def readmit(self, worker: int) -> None:
        """See `Fleet.readmit`."""
        self._start_by.pop(worker, None)
        with contextlib.suppress(EOFError):  # a worker that died meanwhile is reported by the nursery
            self._channels[worker].send((self.table.layout,), (self._region,))

    def starting(self) -> set[int]:
        """See `Fleet.starting`."""
        return set(self._start_by)

    def expect_start(self, worker: int, expected: bool) -> None:
        """See `Fleet.expect_start`."""
        self._start_by.pop(worker, None)
        if expected:
            self._start_by[worker] = time.monotonic() + self.limits.start_timeout

    def turn_away(self, worker: int) -> None:
        """See `Fleet.turn_away`; the worker waits for the region, and the end of the socket ends it."""
        with contextlib.suppress(OSError):
            self._channels[worker].socket.shutdown(socket.SHUT_WR)

    def respawn(self, worker: int) -> None:
        """See `Fleet.respawn`."""
        config = self.configs[worker]
        self._drop_channel(worker)
        self._gone.discard(worker)
        with contextlib.suppress(EOFError):  # the nursery has ended, which is reported by itself
            self._spawn(config)
        self._start_by[worker] = time.monotonic() + self.limits.start_timeout

    def _drop_channel(self, worker: int) -> None:
        channel = self._channels.pop(worker, None)
        if channel is not None:
            self._forget(channel.socket)  # before its number can be given to another socket
            channel.close()

    def start_worker(self, config: WorkerConfig) -> None:
        """See `Fleet.start_worker`."""
        (self._payloads[config.index],) = pickle_factories([config])
        self._drop_channel(config.index)
        self._start_by[config.index] = time.monotonic() + self.limits.start_timeout
        try:
            self._spawn(config)
        except EOFError:
            self._gone.add(config.index)
            raise SlotLoaderError(
                "add_envs: the loader's nursery process has ended, so nothing can be started; build a new SlotLoader"
            ) from None

    def remove(self, slots: Sequence[int], timeout: float | None) -> None:
        """See `Fleet.remove`; a worker that dies later must not build these envs again."""
        super().remove(slots, timeout)
        for index in {int(self.table.owner[slot]) for slot in slots}:
            if self.slots_of(index):
                self._payloads[index] = pickling.dumps(self.configs[index])

    def wakers(self) -> list[Callable[[], None]]:
        """See `Fleet.wakers`."""
        return [wake.post for wake in self._wake]

    def send_command(self, worker: int, message: tuple[Any, ...]) -> None:
        """See `Fleet.send_command`. The message goes first, so that whoever sees the word finds it."""
        channel = self._channels.get(worker)
        if channel is None:
            return  # it is being replaced, which answers the ticket
        try:
            channel.send(message)
        except EOFError:
            return  # its death is on the way
        self.table.command_words[worker] = 1
        self._wake[worker].post()

    def stack_of(self, worker: int) -> str:
        """See `Fleet.stack_of`; the worker's faulthandler writes it, also when it is stuck in C code."""
        with self._changed:
            self._stacks.pop(worker, None)
            try:
                self._control.send(("stack", worker))
            except EOFError:
                return ""
            self._changed.wait_for(lambda: worker in self._stacks, 2.0)
            return self._stacks.get(worker, "")

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each worker by its index."""
        return dict(self._pids)

    # The watching thread: turns what arrives into reports.

    def _watch(self) -> None:
        try:
            self._listen()
        except Exception as error:  # a mistake of ours must not leave everybody waiting for ever
            why = f"the thread that watches the workers has failed: {type(error).__name__}: {error}"
            for worker in self._channels:
                self.deliver(Died(worker, self.slots_of(worker), self._pids.get(worker, 0), 1, why, note="nothing is watched"))
            raise

    def _listen(self) -> None:
        limits = self.limits
        watches = limits.step_timeout is not None or limits.reset_timeout is not None
        while True:
            pause = _WATCH_INTERVAL if watches or self._start_by or self._condemned else None
            for key, _ in self._selector.select(pause):
                try:
                    if key.data is None:
                        message, _ = self._control.receive()
                        self._from_nursery(*message)
                    else:
                        message, _ = self._channels[key.data].receive()
                        self.deliver(message)
                except EOFError:
                    self._forget(key.fileobj)
                    if key.data is None:
                        self._nursery_gone()
                        return
            if pause is not None and self.running and not self.closing:
                self._condemn_hung()

    def _condemn_hung(self) -> None:
        """Has the nursery kill workers that exceed a limit; what follows is a death like any other."""
        now = time.monotonic()
        # Believed only when seen twice: without a fence a look may pair a new state with an old time (ARM).
        overdue = dict(self.overdue())
        begun = {slot: int(self.table.begin_ns[slot]) for slot in overdue}
        hung = {
            int(self.table.owner[slot]): text
            for slot, text in reversed(overdue.items())
            if self._suspects.get(slot) == begun[slot]
        }
        self._suspects = begun
        for worker, limit in self._start_by.items():
            if now > limit:
                hung[worker] = f"the env factory has run for longer than start_timeout={self.limits.start_timeout:g} s"
        for worker, text in hung.items():
            if worker not in self._condemned and worker not in self._gone:
                self._condemned[worker] = (text, now)
                with contextlib.suppress(EOFError):
                    self._control.send(("condemn", worker))
        for worker, (text, since) in list(self._condemned.items()):
            if now - since > _REAP_LIMIT / 2 and worker in self._pids:
                self._kill_by_hand(self._pids[worker])
            if now - since > _REAP_LIMIT and worker not in self._gone:
                del self._condemned[worker]
                note = "it could not be reaped, so its slots are dead for good"
                self.deliver(Died(worker, self.slots_of(worker), self._pids.get(worker, 0), -signal.SIGKILL, text, note))

    @staticmethod
    def _kill_by_hand(pid: int) -> None:
        """For a nursery that is frozen or busy. Nobody else can have the number: the worker has not been reaped."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)

    def _from_nursery(self, kind: str, *args: Any) -> None:
        if kind == "unspawned":
            worker, text = args
            self._start_by.pop(worker, None)
            why = f"the worker could not be started: {text}"
            self.deliver(Died(worker, self.slots_of(worker), 0, 1, why))
            return
        if kind == "exit":
            worker, pid, exitcode = args
            self._pids.pop(worker, None)
            if worker in self._gone:
                return  # reaped at last: its slots have been given up for good
            self._drain(worker)
            self._start_by.pop(worker, None)
            why, _ = self._condemned.pop(worker, ("", 0.0))
            if why:
                why += f"; the worker was killed. Its stack was:\n{self._stacks.pop(worker, '') or '(not available)'}"
            self.deliver(Died(worker, self.slots_of(worker), pid, exitcode, why))
            return
        with self._changed:
            if kind == "ready":
                self._ready = True
                self._failed_preloads = args[0]
            elif kind == "spawned":
                self._pids[args[0]] = args[1]
            elif kind == "stack":
                self._stacks[args[0]] = args[1]
            self._changed.notify_all()

    def _drain(self, worker: int) -> None:
        """Reads what a dead worker still said, so that its own words come before its death."""
        channel = self._channels[worker]
        with contextlib.suppress(EOFError):
            while True:
                self.deliver(channel.receive()[0])
        self._forget(channel.socket)

    def _forget(self, sock: Any) -> None:
        """Stops listening to a socket; `select` may still have it in the events of this round."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def _nursery_gone(self) -> None:
        """Without a nursery nobody reaps or restarts: the workers die with it, their children are killed from here."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        _kill_marked(self._mark)  # helpers of envs in sessions of their own, and workers whose number it had not told yet
        for worker in [config.index for config in self.configs if config.index not in self._gone]:
            if worker in self._channels:
                self._channels[worker].socket.settimeout(2.0)
                self._drain(worker)  # until its end of the socket is closed: only then can it write no more
            pid = self._pids.pop(worker, 0)
            if pid:
                note = "the loader's nursery process has ended, so nothing can be restarted"
                self.deliver(Died(worker, self.slots_of(worker), pid, -signal.SIGKILL, note=note))
            else:  # it was about to be started
                status = self._nursery.wait() if self._nursery else "?"
                why = f"the loader's nursery process ended with status {status}; see stderr"
                self.deliver(Died(worker, self.slots_of(worker), 0, 1, why, note="nothing can be started without it"))

    def stop(self, deadline: float) -> None:
        """See `Fleet.stop`."""
        if self._nursery is None:
            return
        if self.running:
            for index, wake in enumerate(self._wake):
                self.table.stop_words[index] = 1
                wake.post()
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.socket.shutdown(socket.SHUT_WR)  # ends a worker that waits for a message
        self._wait_gone(deadline - _KILL_RESERVE)
        left = [index for index in self._channels if index not in self._gone]
        if left:
            with contextlib.suppress(EOFError):
                self._control.send(("kill", left))
            self._wait_gone(deadline - _KILL_RESERVE / 2)
        with contextlib.suppress(OSError):
            self._control.socket.shutdown(socket.SHUT_RDWR)  # the nursery kills what is left and ends
        try:
            self._nursery.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()
        if hasattr(self, "_watcher"):
            self._watcher.join(1.0)
        self._control.close()
        for channel in self._channels.values():
            channel.close()
        self._selector.close()
        if self._region >= 0:
            os.close(self._region)
            self._region = -1

    def _wait_gone(self, until: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._gone.issuperset(self._channels), max(0.0, until - time.monotonic()))
