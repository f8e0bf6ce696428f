"""`backend="process"`: worker processes forked by the loader's private nursery.

One thread watches all sockets and never blocks in one; everybody else only appends to what it sends. What the phases of a
worker process are and who moves them: docs/control_plane.md.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import os
import pickle
import resource
import select
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
from slotloader.fleet.incarnations import Incarnation, Phase
from slotloader.fleet.supervision import Limits
from slotloader.fleet.supervisor import Fleet
from slotloader.messages import pickling
from slotloader.messages.reports import Died, how_it_ended
from slotloader.messages.stream import Stream
from slotloader.table import slots
from slotloader.table.layout import MAX_RECEIVERS, Layout
from slotloader.table.signals import GuardedSignal, SemaphoreSignal, create_semaphore, sweep
from slotloader.worker.config import WorkerConfig
from slotloader.worker.processes import command, import_path

_BLAS_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_DESCRIPTORS_PER_WORKER = 1  # its command socket; one more while it is started
_DESCRIPTORS_OF_FLEET = 14
_WATCH_INTERVAL = 0.05  # seconds between looks for hung envs, only where a limit is set
_REAP_LIMIT = 10.0  # seconds after SIGKILL until a worker counts as stuck in the kernel
_MARK = "SLOTLOADER_NURSERY"  # environment variable of the nursery and of every process below it
_WINDOW = 16  # processes that the nursery is asked for at a time: each costs a descriptor more until it has been forked
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
    starting = min(workers, _WINDOW)  # the other ends of sockets whose worker is being forked
    needed = open_now + workers * _DESCRIPTORS_PER_WORKER + starting + _DESCRIPTORS_OF_FLEET
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
    """Worker processes, their nursery and the thread that watches both.

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
        self._serials = itertools.count(1)
        self._current: dict[int, Incarnation] = {}  # by worker; under the lock
        self._by_serial: dict[int, Incarnation] = {}  # those that the nursery may speak of; only the watching thread
        self._queue: collections.deque[Incarnation] = collections.deque()  # to be started
        self._asked: set[int] = set()  # serials that the nursery has been asked to fork and has not answered for
        # Whose stream has something new to send; None is the nursery's.
        self._unsent: collections.deque[Incarnation | None] = collections.deque()
        self._ready = self._over = False
        self._region = -1
        self._suspects: dict[int, int] = {}  # overdue slots of the last look, with their begin times
        self._failed_preloads: dict[str, str] = {}
        self._nursery: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()
        self._waking, self._woken = socket.socketpair()
        for end in (self._waking, self._woken):
            end.setblocking(False)

    # What any thread does.

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
        self._control = Stream(ours)
        self._semaphores: list[Any] = []
        try:
            self._create_semaphores()
            names = [semaphore.name for semaphore in self._semaphores]
            self._tell("setup", import_path(), self._helpful + self._preload, names)
            for config in self.configs:
                self._order(config.index)
            self._watcher = threading.Thread(target=self._watch, name="slotloader-watch", daemon=True)
            self._watcher.start()
            self._wait_ready()
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

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self.limits.start_timeout
        with self._changed:
            while not self._ready and not self.events and time.monotonic() < deadline:
                self._changed.wait(0.5)
        if not self._ready and not self.events:
            raise SlotLoaderError(
                f"the nursery process: expected it to be up, with {self._helpful + self._preload} imported, within "
                f"start_timeout={self.limits.start_timeout:g} s, found it still busy; leave out a preload that hangs, or raise "
                "start_timeout"
            )
        for module in self._preload:
            if module in self._failed_preloads:
                raise SlotLoaderError(
                    f"preload: expected modules that can be imported, found {module!r}:\n{self._failed_preloads[module]}"
                )

    def _order(self, index: int, limit: float | None = None) -> None:
        """Has the watching thread start a process for a worker."""
        with self._changed:
            incarnation = Incarnation(next(self._serials), index)
            incarnation.limit = limit
            self._current[index] = incarnation
            self._queue.append(incarnation)
        self._nudge()

    def _nudge(self) -> None:
        """Has the watching thread look; more nudges than it can take are one."""
        with contextlib.suppress(BlockingIOError, OSError):
            self._waking.send(b"!")

    def _tell(self, *message: Any) -> None:
        """Sends a message to the nursery."""
        self._control.put(pickle.dumps(message))
        self._unsent.append(None)
        self._nudge()

    def _put(self, incarnation: Incarnation, payload: bytes, fds: tuple[int, ...] = (), begun: Any = None) -> None:
        with self._changed:
            incarnation.put(payload, fds, begun)
        self._unsent.append(incarnation)
        self._nudge()

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
            for worker in list(self._current):
                self.readmit(worker)
        return table

    def readmit(self, worker: int) -> None:
        """See `Fleet.readmit`."""
        with self._changed:
            incarnation = self._current[worker]
            if incarnation.phase in (Phase.STARTING, Phase.BUILDING):
                incarnation.enter(Phase.SERVING)
                incarnation.limit = None
                self._put(incarnation, pickle.dumps(("region",)), (self._region,))

    def starting(self) -> set[int]:
        """See `Fleet.starting`."""
        with self._changed:
            fresh = {index for index, current in self._current.items() if current.phase < Phase.SERVING}
            return fresh | {worker for worker, _, _ in self.rebuilds.values()}

    def turn_away(self, worker: int) -> None:
        """See `Fleet.turn_away`; the worker waits for the region, and the end of the socket ends it."""
        stream = self._current[worker].stream
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.socket.shutdown(socket.SHUT_WR)

    def respawn(self, worker: int) -> None:
        """See `Fleet.respawn`."""
        self._gone.discard(worker)
        self._order(worker, self.limits.start_timeout)

    def start_worker(self, config: WorkerConfig) -> None:
        """See `Fleet.start_worker`."""
        (self._payloads[config.index],) = pickle_factories([config])
        if self._nursery is None or self._nursery.poll() is not None:
            self._gone.add(config.index)
            raise SlotLoaderError(
                "add_envs: the loader's nursery process has ended, so nothing can be started; build a new SlotLoader"
            )
        self._order(config.index, self.limits.start_timeout)

    def config_changed(self, worker: int) -> None:
        """See `Fleet.config_changed`."""
        self._payloads[worker] = pickling.dumps(self.configs[worker])

    def wakers(self) -> list[Callable[[], None]]:
        """See `Fleet.wakers`."""
        return [wake.post for wake in self._wake]

    def send_command(self, worker: int, message: tuple[Any, ...]) -> None:
        """See `Fleet.send_command`. The message goes first, so that whoever sees the word finds it."""
        ticket, verb, own, *args = message
        payload = pickle.dumps((ticket, verb, own, pickling.quick_dumps(tuple(args))))

        def begun() -> None:
            self.table.command_words[worker] = 1
            self._wake[worker].post()

        with self._changed:
            incarnation = self._current.get(worker)
            if incarnation is not None and not incarnation.gone:  # else its death is told, which answers the ticket
                self._put(incarnation, payload, (), begun)

    def stack_of(self, worker: int) -> str:
        """See `Fleet.stack_of`; the worker's faulthandler writes it, also when it is stuck in C code."""
        with self._changed:
            incarnation = self._current[worker]
            incarnation.stack = None
            self._tell("stack", incarnation.serial)
            self._changed.wait_for(lambda: incarnation.stack is not None, 2.0)
            return incarnation.stack or ""

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each worker by its index."""
        with self._changed:
            return {index: current.pid for index, current in self._current.items() if current.pid and not current.gone}

    # The watching thread: turns what arrives into reports.

    def _watch(self) -> None:
        try:
            self._listen()
        except Exception as error:  # a mistake of ours must not leave everybody waiting for ever
            why = f"the thread that watches the workers has failed: {type(error).__name__}: {error}"
            for worker, incarnation in list(self._current.items()):
                self.deliver(Died(worker, self.slots_of(worker), incarnation.pid, 1, why, note="nothing is watched"))
            raise
        finally:
            if self._over:
                self._close_sockets()

    def _listen(self) -> None:
        limits = self.limits
        watches = limits.step_timeout is not None or limits.reset_timeout is not None
        self._selector.register(self._woken, selectors.EVENT_READ, self._woken)
        self._selector.register(self._control.socket, selectors.EVENT_READ, None)
        while not self._over:
            self._start_queued()
            if not self._flush_unsent():
                self._nursery_gone()
                return
            pause = _WATCH_INTERVAL if watches or self._has_limits() else None
            for key, events in self._selector.select(pause):
                if key.data is self._woken:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                elif key.data is None:
                    if not self._serve_nursery(events):
                        self._nursery_gone()
                        return
                else:
                    self._serve_worker(key.data, events)
            if pause is not None and not self.closing:
                self._condemn_hung()

    def _has_limits(self) -> bool:
        return bool(self.rebuilds) or any(
            incarnation.limit is not None or incarnation.phase is Phase.CONDEMNED for incarnation in self._by_serial.values()
        )

    def _start_queued(self) -> None:
        """Asks the nursery for the next processes, a window of them at a time."""
        while self._queue and len(self._asked) < _WINDOW:
            with self._changed:
                incarnation = self._queue.popleft()
                index = incarnation.index
                if self.closing:
                    incarnation.enter(Phase.GONE)
                    self._gone.add(index)
                    self._changed.notify_all()
                    continue
            try:
                ours, theirs = socket.socketpair()
            except OSError as error:
                with self._changed:
                    incarnation.enter(Phase.GONE)
                note = f"it could not be {'re' if self.running else ''}started: {error}"
                self.deliver(Died(index, self.slots_of(index), 0, 1, f"worker {index} has no process", note=note))
                continue
            affinity = [self._affinity[index % len(self._affinity)]] if self._affinity else None
            config = self.configs[index]
            lives = [self.lives[slot] for slot in config.slots]
            first = pickle.dumps((config.slots, index, self._payloads[index], affinity, lives))
            with self._changed:
                incarnation.connect(Stream(ours), first)
                incarnation.enter(Phase.STARTING)
                if incarnation.limit is not None:
                    incarnation.limit += time.monotonic()
            self._by_serial[incarnation.serial] = incarnation
            self._asked.add(incarnation.serial)
            self._selector.register(ours, selectors.EVENT_READ, incarnation)
            self._unsent.append(incarnation)
            self._control.put(pickle.dumps(("spawn", incarnation.serial)), (theirs.fileno(),), theirs.close)
            self._unsent.append(None)

    def _flush_unsent(self) -> bool:
        """Sends what has been put; False if the nursery is gone."""
        while self._unsent:
            incarnation = self._unsent.popleft()
            if incarnation is None:
                try:
                    self._control.flush()
                except EOFError:
                    return False
                self._listen_for(self._control, None)
            elif incarnation.stream is not None and not incarnation.gone:
                with contextlib.suppress(EOFError):  # its death is on the way
                    incarnation.stream.flush()
                self._listen_for(incarnation.stream, incarnation)
        return True

    def _listen_for(self, stream: Stream, data: Incarnation | None) -> None:
        """Has the selector say when the rest can be sent, if there is any."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.has_output() else 0)
        with contextlib.suppress(KeyError, ValueError):  # it is no longer listened to
            if self._selector.get_key(stream.socket).events != wanted:
                self._selector.modify(stream.socket, wanted, data)

    def _serve_nursery(self, events: int) -> bool:
        if events & selectors.EVENT_WRITE:
            self._unsent.append(None)
        try:
            for payload, _ in self._control.receive():
                self._from_nursery(*pickle.loads(payload))
        except EOFError:
            return False
        return True

    def _serve_worker(self, incarnation: Incarnation, events: int) -> None:
        """Reads what a worker says. Whatever is wrong with that concerns this worker only."""
        if incarnation.gone or incarnation.stream is None:
            return  # its last words have been read; the selector had it in the events of this round
        if events & selectors.EVENT_WRITE:
            self._unsent.append(incarnation)
        try:
            for payload, _ in incarnation.stream.receive():
                self.deliver(pickle.loads(payload))
        except EOFError:
            self._forget(incarnation)
        except Exception as error:
            self._forget(incarnation)
            self._condemn(incarnation, f"the worker sent what cannot be read ({type(error).__name__}: {error})")

    def _forget(self, incarnation: Incarnation) -> None:
        """Stops listening to a worker's socket."""
        if incarnation.stream is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(incarnation.stream.socket)

    def _condemn(self, incarnation: Incarnation, why: str) -> None:
        with self._changed:
            if incarnation.phase not in (Phase.STARTING, Phase.BUILDING, Phase.SERVING):
                return
            incarnation.enter(Phase.CONDEMNED)
            incarnation.why, incarnation.since = why, time.monotonic()
        self._tell("condemn", incarnation.serial)

    def _condemn_hung(self) -> None:
        """Has the nursery kill workers that exceed a limit; what follows is a death like any other."""
        now = time.monotonic()
        hung: dict[int, str] = {}
        if self.running:
            # Believed only when seen twice: without a fence a look may pair a new state with an old time (ARM).
            overdue = dict(self.overdue())
            begun = {slot: int(self.table.begin_ns[slot]) for slot in overdue}
            for slot, text in reversed(overdue.items()):
                if self._suspects.get(slot) == begun[slot]:
                    hung[int(self.table.owner[slot])] = text
            self._suspects = begun
        late = f"the env factory has run for longer than start_timeout={self.limits.start_timeout:g} s"
        hung.update((worker, late) for worker in self.late_rebuilds(now))
        for incarnation in list(self._by_serial.values()):
            if incarnation.limit is not None and now > incarnation.limit and incarnation.phase < Phase.SERVING:
                self._condemn(incarnation, late)
            elif incarnation.phase is Phase.CONDEMNED:
                self._press(incarnation, now)
        for worker, text in hung.items():
            self._condemn(self._current[worker], text)

    def _press(self, incarnation: Incarnation, now: float) -> None:
        """Sees to it that a condemned process ends, or that its slots are given up."""
        if now - incarnation.since > _REAP_LIMIT / 2 and incarnation.pid:
            self._kill_by_hand(incarnation.pid)
        if now - incarnation.since > _REAP_LIMIT:
            note = "it could not be reaped, so its slots are dead for good"
            self._end(incarnation, -signal.SIGKILL, incarnation.why, note)

    @staticmethod
    def _kill_by_hand(pid: int) -> None:
        """For a nursery that is frozen or busy. Nobody else can have the number: the worker has not been reaped."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)

    def _from_nursery(self, kind: str, *args: Any) -> None:
        if kind == "ready":
            with self._changed:
                self._ready, self._failed_preloads = True, args[0]
                self._changed.notify_all()
            return
        incarnation = self._by_serial.get(args[0])
        if incarnation is None:
            return  # it was given up for good, and has been reaped at last
        if kind == "spawned":
            self._asked.discard(incarnation.serial)
            with self._changed:
                incarnation.pid = args[1]
                if incarnation.phase is Phase.STARTING:
                    incarnation.enter(Phase.BUILDING)
                self._changed.notify_all()
        elif kind == "unspawned":
            self._end(incarnation, 1, f"the worker could not be started: {args[1]}")
        elif kind == "stack":
            with self._changed:
                incarnation.stack = args[1]
                self._changed.notify_all()
        elif kind == "exit":
            why = incarnation.why
            if why:
                why += f"; the worker was killed. Its stack was:\n{incarnation.stack or '(not available)'}"
            self._end(incarnation, args[2], why)

    def _end(self, incarnation: Incarnation, exitcode: int, why: str = "", note: str = "") -> None:
        """An incarnation has ended: its last words are read, then its death is told, once."""
        self._asked.discard(incarnation.serial)
        del self._by_serial[incarnation.serial]
        self._read_rest(incarnation)
        with self._changed:
            incarnation.enter(Phase.GONE)
        self._forget(incarnation)
        if incarnation.stream is not None:
            incarnation.stream.close()
        if self._current.get(incarnation.index) is incarnation:
            index = incarnation.index
            self.deliver(Died(index, self.slots_of(index), incarnation.pid, exitcode, why, note))

    def _read_rest(self, incarnation: Incarnation, until: float = 0.0) -> None:
        """Reads what a process still said, so that its own words come before its death.

        Args:
          incarnation: whose.
          until: monotonic time until which its end of the socket is awaited: once it is closed it can write no more.
        """
        if incarnation.stream is None:
            return
        with contextlib.suppress(Exception):
            while True:
                for payload, _ in incarnation.stream.receive():
                    self.deliver(pickle.loads(payload))
                left = until - time.monotonic()
                if left <= 0:
                    return
                select.select([incarnation.stream.socket], [], [], min(left, 0.25))

    def _nursery_gone(self) -> None:
        """Without a nursery nobody reaps or restarts: the workers die with it, their children are killed from here."""
        left = list(self._by_serial.values())
        for incarnation in left:
            if incarnation.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(incarnation.pid, signal.SIGKILL)
        _kill_marked(self._mark)  # helpers of envs in sessions of their own, and workers whose number it had not told yet
        status = self._nursery.wait() if self._nursery else 1
        until = time.monotonic() + 2.0
        for incarnation in left:
            self._read_rest(incarnation, until)
            if incarnation.pid:
                note = "the loader's nursery process has ended, so nothing can be restarted"
                self._end(incarnation, -signal.SIGKILL, note=note)
            else:  # it was about to be started
                why = f"the loader's nursery process ended: it {how_it_ended(status)}; see stderr"
                self._end(incarnation, 1, why, "nothing can be started without it")
        while self._queue:
            incarnation = self._queue.popleft()
            with self._changed:
                incarnation.enter(Phase.GONE)
            index = incarnation.index
            why = f"the loader's nursery process ended: it {how_it_ended(status)}; see stderr"
            self.deliver(Died(index, self.slots_of(index), 0, 1, why, "nothing can be started without it"))

    # The end. Every step may be taken again: Ctrl-C in the middle leaves the rest to the next `close`.

    def stop(self, deadline: float) -> None:
        """See `Fleet.stop`."""
        if self._nursery is None:
            self._close_sockets()
            return
        if self.running:
            for index, wake in enumerate(self._wake):
                self.table.stop_words[index] = 1
                wake.post()
        self._nudge()
        for incarnation in list(self._current.values()):
            if incarnation.stream is not None:
                with contextlib.suppress(OSError):
                    incarnation.stream.socket.shutdown(socket.SHUT_WR)  # ends a worker that waits for a message
        self._wait_gone(deadline - _KILL_RESERVE)
        with self._changed:
            left = [incarnation.serial for incarnation in self._current.values() if not incarnation.gone]
        if left:
            self._tell("kill", left)
            self._wait_gone(deadline - _KILL_RESERVE / 2)
        with contextlib.suppress(OSError):
            self._control.socket.shutdown(socket.SHUT_RDWR)  # the nursery kills what is left and ends
        try:
            self._nursery.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()
        self._over = True
        self._nudge()
        if self._watcher is not None and self._watcher.ident is not None:
            self._watcher.join(1.0)
            if self._watcher.is_alive():
                return  # on a machine that is too busy it closes them by itself, later
        self._close_sockets()

    def _close_sockets(self) -> None:
        if self._nursery is not None:
            self._control.close()
        for incarnation in list(self._current.values()):
            if incarnation.stream is not None:
                incarnation.stream.close()
        self._selector.close()
        self._waking.close()
        self._woken.close()
        region, self._region = self._region, -1
        if region >= 0:
            os.close(region)

    def _wait_gone(self, until: float) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: all(incarnation.gone for incarnation in self._current.values()), max(0.0, until - time.monotonic())
            )
