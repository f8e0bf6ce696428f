"""Environments with faults, each one real: crashes of the process, hangs in C code, exceptions, long resets, helper processes.

Imported once by the nursery: `preload=["sick"]`. `Alive` says in every record who made it, so that a test sees lives change.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from dm_env import specs
from gymnasium.spaces import Box, Discrete

from slotloader.table.slots import SlotState
from slotloader.table.writer import SlotWriter

PRELOAD = ["sick"]
SLOT, LIFE, EPISODE, T, ACTION, SEED = range(6)  # columns of `Alive`'s observation

Ill = tuple[int | None, str, str, int]  # life (None: every one), a key of `TROUBLES`, where, in which call of the life from 1


class Alive(gym.Env):
    """Obs is (slot, life, own count of episodes, t, the action that led here or -1, the seed of the context).

    The reward is t; episodes have `length` steps, 0 is endless.
    """

    observation_space = Box(-1, 2**62, (6,), np.int64)
    action_space = Discrete(1000)

    def __init__(self, context: Any, length: int = 0) -> None:
        self.context, self.slot, self.life, self.episode, self.t = context, context.slot, context.life, -1, 0
        self.length, self.seeds, self.pid = length, [], os.getpid()

    def _obs(self, action: int) -> np.ndarray:
        return np.array([self.slot, self.life, self.episode, self.t, action, self.context.seed])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.t = self.episode + 1, 0
        self.seeds.append(seed)
        return self._obs(-1), {}

    def step(self, action: int) -> Any:
        self.t += 1
        return self._obs(int(action)), float(self.t), self.t == self.length, False, {}


class Sick(Alive):
    """The env of slot `victim` falls `ill` in some lives, in its factory, a reset or a step."""

    def __init__(self, context: Any, ills: Sequence[Ill], victim: int = 1, length: int = 0) -> None:
        super().__init__(context, length)
        self.ills = [ill[1:] for ill in ills if context.slot == victim and ill[0] in (None, context.life)]
        self.calls = {"factory": 0, "reset": 0, "step": 0}
        self._call("factory")

    def _call(self, where: str) -> None:
        self.calls[where] += 1
        for trouble, place, at in self.ills:
            if (place, at) == (where, self.calls[where]):
                TROUBLES[trouble]()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._call("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> Any:
        self._call("step")
        return super().step(action)


class DiesPublishing(Alive):
    """Its process is killed while it publishes record `t` of life 1, at a `point`; life 2 is killed in its third step.

    Points: "before" any word of the record, "unready" after all words but READY, "unposted" after READY and before the post.
    """

    def __init__(self, context: Any, point: str, t: int) -> None:
        super().__init__(context)
        self.point, self.at = point, t

    def _obs(self, action: int) -> np.ndarray:
        if self.slot == 0 and self.life == 1 and self.t == self.at:
            point = self.point

            whole = SlotWriter.publish

            def publish(writer: SlotWriter) -> None:
                def hand_over(slot: int) -> None:
                    if point == "unposted":
                        writer._state[slot] = int(SlotState.READY)
                    kill_nine()

                writer._hand_over = hand_over
                whole(writer)

            SlotWriter.publish = publish  # type: ignore[method-assign]
            if point == "before":
                SlotWriter.write_step = lambda writer, obs, *words: kill_nine(writer._write_observation(obs))  # type: ignore[method-assign,func-returns-value]
                SlotWriter._write_first_words = lambda *words: kill_nine()  # type: ignore[method-assign]
        if self.slot == 0 and self.life == 2 and self.t == 3:
            kill_nine()
        return super()._obs(action)


class ReportsThePast(Alive):
    """Leaves its pid in `directory`; `overlaps` is true if the process of an earlier life was still there at the factory."""

    def __init__(self, context: Any, directory: str) -> None:
        super().__init__(context)
        own = Path(directory, f"pids-{self.slot}")
        pids = own.read_text().split() if own.exists() else []
        self.overlaps = any(Path(f"/proc/{pid}").exists() for pid in pids if int(pid) != os.getpid())
        with own.open("a") as file:
            file.write(f"{os.getpid()}\n")


class Paced(Alive):
    """A step takes `seconds` of sleep."""

    def __init__(self, context: Any, seconds: float) -> None:
        super().__init__(context)
        self.seconds = seconds

    def step(self, action: int) -> Any:
        time.sleep(self.seconds)
        return super().step(action)


class LongReset(Alive):
    """Waits in each reset after the first until `go-on` exists in `directory`, and makes `resetting-SLOT` before."""

    def __init__(self, context: Any, directory: str, length: int = 5) -> None:
        super().__init__(context, length)
        self.directory = Path(directory)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.seeds:
            (self.directory / f"resetting-{self.slot}").touch()
            wait_for(self.directory / "go-on")
        return super().reset(seed=seed, options=options)


class Closing(Alive):
    """Writes a line to `closed-SLOT` in `directory` for each `close`."""

    def __init__(self, context: Any, directory: str) -> None:
        super().__init__(context)
        self.log = Path(directory, f"closed-{self.slot}")

    def close(self) -> None:
        with self.log.open("a") as file:
            file.write(f"{self.life}\n")


class Stuck(Alive):
    """Hangs in C code in its first step, after making `stuck-SLOT` in `directory`; its close would hang too."""

    def __init__(self, context: Any, directory: str) -> None:
        super().__init__(context)
        self.flag = Path(directory, f"stuck-{self.slot}")

    def step(self, action: int) -> Any:
        self.flag.touch()
        hang_in_c()

    def close(self) -> None:
        hang_in_c()


class Browser(Alive):
    """Starts helpers as a browser does: `depth` processes, each the child of the last, in sessions of their own if `drifts`.

    The pid of each is in `directory`, in files `helper-SLOT-LEVEL-PID`.
    """

    def __init__(self, context: Any, directory: str, depth: int = 3, drifts: bool = True) -> None:
        super().__init__(context)
        command = [sys.executable, "-S", "-c", _HELPER, directory, str(self.slot), str(depth), str(int(drifts))]
        self.helper = subprocess.Popen(command, start_new_session=drifts)


_HELPER = """
import os, signal, subprocess, sys, time
directory, slot, depth, drifts = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1"
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if depth > 1:
    code = open("/proc/self/cmdline").read().split(chr(0))[3]
    arguments = [directory, slot, str(depth - 1), sys.argv[4]]
    subprocess.Popen([sys.executable, "-S", "-c", code, *arguments], start_new_session=drifts)
open(f"{directory}/helper-{slot}-{depth}-{os.getpid()}", "w").close()
time.sleep(1000)
"""


class Wide:
    """A dm_env env with an observation of `nbytes`; the spec itself takes no memory, and no reset is ever reached."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def observation_spec(self) -> Any:
        return specs.Array((self.nbytes,), np.uint8)

    def action_spec(self) -> Any:
        return specs.BoundedArray((), np.int32, 0, 4)

    def reset(self) -> Any:
        raise AssertionError("no env is reset before there is memory")

    step = reset


def wait_for(path: Path, seconds: float = 30.0) -> None:
    """Waits in an env until `path` exists; not for ever, since a test that fails must not leave a thread."""
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.002)


# Troubles.


def hang_in_c() -> None:
    """Never comes back from C code, holds the GIL there and ignores SIGTERM."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    libc = ctypes.PyDLL(None)  # unlike CDLL it does not release the GIL
    while True:
        libc.pause()


def segfault() -> None:
    """Reads address 8."""
    ctypes.string_at(8)


def divide_by_zero() -> None:
    """An integer division by zero in C code; where the processor does not mind, the signal by hand."""
    ctypes.CDLL(None).div(1, 0)
    os.kill(os.getpid(), signal.SIGFPE)


def bus_error() -> None:
    """Reads a page of a mapped file that has been cut short."""
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        memory[0]


def kill_nine(*_: Any) -> Any:
    """What the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def fall_over() -> None:
    """An ordinary exception."""
    raise ValueError("the robot fell over")


TROUBLES: dict[str, Callable[[], None]] = {
    "SIGKILL": kill_nine,
    "SIGSEGV": segfault,
    "SIGFPE": divide_by_zero,
    "SIGBUS": bus_error,
    "hang": hang_in_c,
    "raise": fall_over,
    "exit": lambda: os._exit(3),
}
