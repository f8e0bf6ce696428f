"""Checks that the fault tests share: CLEAN and ONCE of FAULTS.md, waiting for conditions, scripts run as users run them."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from toys import episode_length

import slotloader
from slotloader import Batch, SlotLoader, StepType

MARK = "SLOTLOADER_TEST_MARK"  # in the environment of everything that a test starts, however far it has drifted away
ROOT = Path(slotloader.__file__).resolve().parents[1]
TESTS = Path(__file__).resolve().parent
NOISE = ("resource_tracker", "leaked", "Exception ignored", "Traceback", "Warning")


def until(condition: Callable[[], Any], seconds: float = 20.0, what: str = "") -> Any:
    """Waits until `condition()` is true and returns its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or condition}"
        time.sleep(0.005)
    return value


def started(mark: str) -> list[str]:
    """Every process but this one whose environment has `mark`, zombies of ours included."""
    found = []
    own_children = {child.pid for child in psutil.Process().children()}
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid():
                continue
            zombie = process.status() == psutil.STATUS_ZOMBIE
            if (zombie and process.pid in own_children) or (not zombie and process.environ().get(MARK) == mark):
                found.append(f"{process.pid} {process.status()} {' '.join(process.cmdline())[:120]}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def require_gone(mark: str, known: set[str], seconds: float) -> None:
    """Fails if a process with `mark` lives on, and kills it, so that one failure does not disturb other tests."""
    try:
        until(lambda: not set(started(mark)) - known, seconds, "every process of the test is gone")
    except AssertionError as error:
        left = started(mark)
        for line in left:
            kill_quietly(int(line.split()[0]))
        raise AssertionError(f"processes left: {left}") from error


def names_of(pid: int) -> list[str]:
    """Names in /dev/shm that belong to the loader process `pid`."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"sem.slotl-{pid}-")]


def descriptors() -> int:
    """Open descriptors of this process."""
    return psutil.Process().num_fds()


@contextlib.contextmanager
def clean() -> Iterator[str]:
    """CLEAN: after the block no process, zombie, thread, name or descriptor is left of what it started."""
    mark = uuid.uuid4().hex
    before = os.environ.get(MARK)
    gc.collect()
    gc.freeze()  # the many objects of frameworks and of pytest itself make each later `gc.collect` slow
    zombies, fds, threads = set(started("")), descriptors(), set(threading.enumerate())
    os.environ[MARK] = mark
    try:
        yield mark
    finally:
        os.environ.pop(MARK)
        if before is not None:
            os.environ[MARK] = before
    gc.collect()
    settle = 10.0
    require_gone(mark, zombies, settle)
    assert not names_of(os.getpid())
    left = [t for t in threading.enumerate() if t not in threads and t.name.startswith("slotloader")]
    until(lambda: not any(t.is_alive() for t in left), settle, f"threads left: {left}")
    until(lambda: descriptors() <= fds, 3.0, f"descriptors: {fds} before, {descriptors()} after")


class Once:
    """ONCE: follows every slot of a fleet of `Counting` and fails for a record that is lost, repeated, swapped or late."""

    def __init__(self, num_slots: int) -> None:
        self.at = dict.fromkeys(range(num_slots), (-1, 0, True))  # episode, t, ended
        self.sent = dict.fromkeys(range(num_slots), -1)
        self.records = 0

    def check(self, batch: Batch) -> None:
        """Checks the records of a batch against what must come next in each slot."""
        slots = batch.env_indices.tolist()
        assert slots == sorted(set(slots))
        for row, slot in enumerate(slots):
            episode, t, ended = self.at[slot]
            episode, t = (episode + 1, 0) if ended else (episode, t + 1)
            action = -1 if ended else self.sent[slot]
            assert batch.obs[row].tolist() == [1000 * slot + t, episode, action], f"slot {slot}"
            ends = t > 0 and t == episode_length(slot, episode)
            kind = StepType.FIRST if ended else StepType.MID
            if ends:
                kind = StepType.TERMINATION if episode % 2 == 0 else StepType.TRUNCATION
            assert batch.step_type[row] == kind
            assert batch.reward[row] == (0 if ended else 1000 * slot + t)
            self.at[slot] = (episode, t, ends)
        self.records += len(slots)

    def answer(self, slots: Any, rng: np.random.Generator) -> np.ndarray:
        """Actions for `slots`, remembered."""
        actions = rng.integers(0, 1000, len(slots))
        self.sent.update(zip(map(int, slots), actions.tolist(), strict=True))
        return actions


def drive(loader: SlotLoader, once: Once, records: int, rng: np.random.Generator, receiver: Any = None) -> None:
    """Receives `records` records under random batch policies and answers them in random pieces."""
    receiver = receiver or loader
    held: list[int] = []
    slots = set(once.at)
    goal = once.records + records
    while once.records < goal or held:
        free = len(slots) - len(held)
        if free and once.records < goal and (rng.random() < 0.6 or not held):
            least = int(rng.integers(1, free + 1))
            wait = [0, 0.0005, 0.002, None][rng.integers(4)]
            most = None if rng.random() < 0.3 else int(rng.integers(least, len(slots) + 1))
            batch = receiver.poll() if rng.random() < 0.2 else receiver.recv(least, most, wait, 60)
            if batch is None:
                continue
            if rng.random() < 0.1:
                batch.release()  # the same records come again
                continue
            once.check(batch)
            if rng.random() < 0.5:
                batch.send(once.answer(batch.env_indices, rng))
            else:
                held.extend(batch.env_indices.tolist())
        else:
            rng.shuffle(held)
            part, held = held[: int(rng.integers(1, len(held) + 1))], held[:]
            held = [slot for slot in held if slot not in part]
            receiver.send(once.answer(part, rng), part)


@dataclass
class Ran:
    """A script that has ended."""

    code: int
    out: str
    err: str
    pid: int


def child_environment(mark: str = "", **extra: str) -> dict[str, str]:
    """The environment of a script of ours: it finds this package and the toys, and carries the mark."""
    path = os.pathsep.join([str(ROOT), str(TESTS)])
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return {**os.environ, **own, **({MARK: mark} if mark else {}), **extra}


def run_script(path: Path, code: str, *options: str, stdin: str | None = None, timeout: float = 60.0) -> Ran:
    """Runs `code` as a real script file, as a user would; everything it started must be gone when it has ended."""
    script = path / f"script{uuid.uuid4().hex[:6]}.py"
    script.write_text(code)
    command = [sys.executable, *options, *([] if stdin is not None else [str(script)])]
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(mark),
        cwd=path,
    )
    try:
        out, err = process.communicate(stdin, timeout=timeout)
    finally:
        process.kill()
        process.wait()
    require_gone(mark, set(), 10)
    assert not names_of(process.pid)
    return Ran(process.returncode, out, err, process.pid)


def quiet(ran: Ran) -> None:
    """The script ended well and said nothing on stderr."""
    assert ran.code == 0, ran.err
    assert ran.err == ""


def kill_quietly(pid: int) -> None:
    """SIGKILL, if the process is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def reference_next_step(
    env: Any, actions: Callable[[int], Any], records: int
) -> Iterator[tuple[Any, float, int, dict[str, Any]]]:
    """What one slot must publish, record by record: NEXT_STEP autoreset, written as plainly as possible."""
    obs, info = env.reset()
    yield obs, 0.0, StepType.FIRST, info
    ended = False
    for record in range(1, records):
        if ended:
            obs, info = env.reset()
            ended = False
            yield obs, 0.0, StepType.FIRST, info
            continue
        obs, reward, terminated, truncated, info = env.step(actions(record))
        ended = terminated or truncated
        kind = StepType.TERMINATION if terminated else StepType.TRUNCATION if truncated else StepType.MID
        yield obs, reward, kind, info
