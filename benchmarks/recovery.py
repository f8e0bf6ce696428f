"""How soon is a dead worker known and replaced, what do the others lose meanwhile, and how long can a close take?

Cases:
  death      from SIGKILL of a worker to the error out of `recv`, with `on_failure="raise"`: while the others step 1 ms
             each, and while every other env is in one long step, so that `recv` waits for nothing else.
  new life   from SIGKILL to the first record of the new life in a batch, with `on_failure="restart"`, less what the env
             itself took for its build and reset (20 ms each here). With the env's module preloaded, and without: then each
             new worker imports it, and gymnasium, anew; that is shown and not judged.
  storm      env steps per second of 6 workers of 1 ms steps while 2 more are killed again and again, each `rest_s` after
             the first record of its new life, over the rate of the same 6 while nobody is killed; windows of both take
             turns in one run.
  close      `close()` with 64 workers that hang in C code in a step and ignore SIGTERM.
Bars: error and new life within 0.5 s, median and worst of all kills; survivors at least 0.90 of their quiet rate; close
within 5 s and no process left.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.harness import Case, Check, Outcome, median_of, parse_arguments, report, run_cases

DEATH, NEW_LIFE, STORM, CLOSE = "death", "new life", "storm", "close"
BUSY, WAITING, OURS, PLAIN = "slotloader, others step", "slotloader, recv waits", "slotloader", "slotloader, no preload"
PRELOAD = ["benchmarks.recovery"]
SURVIVORS, VICTIMS = 6, 2
STUCK_WORKERS = 64

Info = dict[str, Any]


class Timed(gymnasium.Env[NDArray[np.int64], np.int64]):
    """Sleeps `build_s`, `reset_s` and `step_s`; its records say the life and the nanoseconds of its build and reset."""

    observation_space = gymnasium.spaces.Box(0, 2**62, (2,), np.int64)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, context: Any, build_s: float = 0.0, reset_s: float = 0.0, step_s: float = 0.001) -> None:
        begin = time.monotonic_ns()
        self._reset_s, self._step_s = reset_s, step_s
        time.sleep(build_s)
        self._build_ns = time.monotonic_ns() - begin
        self._obs = np.array([context.life, 0])

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[NDArray[np.int64], Info]:
        begin = time.monotonic_ns()
        time.sleep(self._reset_s)
        self._obs[1] = self._build_ns + time.monotonic_ns() - begin
        return self._obs, {}

    def step(self, action: np.int64) -> tuple[NDArray[np.int64], float, bool, bool, Info]:
        time.sleep(self._step_s)
        return self._obs, 1.0, False, False, {}


class Stuck(Timed):
    """Hangs in C code in its first step, holds the GIL there and ignores SIGTERM."""

    def step(self, action: np.int64) -> tuple[NDArray[np.int64], float, bool, bool, Info]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        libc = ctypes.PyDLL(None)  # unlike CDLL it keeps the GIL
        while True:
            libc.pause()


def death(kills: int, step_s: float) -> dict[str, float]:
    """Kills one worker after the other; returns the seconds until `recv` raised."""
    from slotloader import SlotLoader, WorkerDied

    rng, seconds = random.Random(0), []
    with SlotLoader(
        partial(Timed, step_s=step_s), kills + 1, on_failure="raise", preload=PRELOAD, stall_timeout=None, timeout=0.0
    ) as loader:
        _answer(loader, loader.recv(min_get=kills + 1, timeout=None))
        for victim in range(kills):
            begin = time.monotonic()
            pause = rng.uniform(0.01, 0.03)
            while step_s < pause and time.monotonic() < begin + pause:
                _answer(loader, loader.recv())
            begin = time.monotonic()
            os.kill(loader.fleet.pids[victim], signal.SIGKILL)
            try:
                while True:
                    _answer(loader, loader.recv())
            except WorkerDied as error:
                seconds.append(time.monotonic() - begin)
                assert error.slots == (victim,), error
    return _median_and_worst(seconds)


def new_life(kills: int, preload: Sequence[str]) -> dict[str, float]:
    """Kills the workers in turn; returns the seconds until the first record of the new life, less the env's own."""
    from slotloader import SlotLoader

    rng, seconds = random.Random(0), []
    factory = partial(Timed, build_s=0.02, reset_s=0.02)
    with SlotLoader(
        factory, SURVIVORS + VICTIMS, on_failure="restart", max_restarts=10**6, preload=preload, timeout=0.0
    ) as loader:
        _answer(loader, loader.recv(min_get=loader.num_slots, timeout=None))
        for number in range(kills):
            victim, goal = number % loader.num_slots, number // loader.num_slots + 1
            pause = time.monotonic() + rng.uniform(0.01, 0.03)
            while time.monotonic() < pause:
                _answer(loader, loader.recv())
            begin = time.monotonic()
            os.kill(loader.fleet.pids[victim], signal.SIGKILL)
            while (own_ns := _begun(batch := loader.recv(), victim, goal)) is None:
                _answer(loader, batch)
            seconds.append(time.monotonic() - begin - own_ns * 1e-9)
            _answer(loader, batch)
    return _median_and_worst(seconds)


def _begun(batch: Any, slot: int, life: int) -> int | None:
    """Nanoseconds that the env of `slot` took for its build and reset, if the batch has a record of that life."""
    found = batch.obs[(batch.env_indices == slot) & (batch.obs[:, 0] == life), 1]
    return int(found[0]) if found.size else None


def storm(windows: int, window_s: float, rest_s: float) -> dict[str, float]:
    """Runs quiet and stormy windows in turn; returns the survivors' rates and the median ratio of neighbours."""
    from slotloader import SlotLoader

    rates: dict[bool, list[float]] = {False: [], True: []}
    kills = 0
    with SlotLoader(
        Timed, SURVIVORS + VICTIMS, on_failure="restart", max_restarts=10**6, preload=PRELOAD, timeout=0.0
    ) as loader:
        lives = dict.fromkeys(range(SURVIVORS, SURVIVORS + VICTIMS), 0)  # the life of each victim that is awaited or lives
        due = dict.fromkeys(lives, 0.0)  # when to kill the victims that live

        def run(seconds: float, stormy: bool) -> float:
            nonlocal kills
            begin, records = time.monotonic(), 0
            while (now := time.monotonic()) < begin + seconds:
                for slot in [slot for slot, at in due.items() if at <= now] if stormy else ():
                    if pid := loader.fleet.pids.get(slot):  # its record may come before its number is known
                        os.kill(pid, signal.SIGKILL)
                        del due[slot]
                        lives[slot] += 1
                        kills += 1
                batch = loader.recv()
                slots, found = batch.env_indices, batch.obs[:, 0]
                records += int(np.count_nonzero(slots < SURVIVORS))
                for row in np.flatnonzero(slots >= SURVIVORS).tolist():
                    slot = int(slots[row])
                    if slot not in due and found[row] == lives[slot]:
                        due[slot] = now + rest_s
                _answer(loader, batch)
            return records / (now - begin)

        run(1.0, False)
        for number in range(windows):
            for stormy in (False, True) if number % 2 == 0 else (True, False):
                while len(due) < len(lives):  # a window begins with everybody back
                    run(0.05, False)
                rates[stormy].append(run(window_s, stormy))
    ratios = [stormy / quiet for quiet, stormy in zip(rates[False], rates[True], strict=True)]
    return {
        "quiet": statistics.median(rates[False]),
        "stormy": statistics.median(rates[True]),
        "kept": statistics.median(ratios),
        "kills_per_s": kills / (windows * window_s),
    }


def close() -> dict[str, float]:
    """Closes a fleet that hangs; returns the seconds, and how many processes were left afterwards."""
    from slotloader import SlotLoader

    loader = SlotLoader(Stuck, STUCK_WORKERS, preload=PRELOAD)
    _answer(loader, loader.recv(min_get=STUCK_WORKERS, timeout=None))
    workers = [psutil.Process(pid) for pid in loader.fleet.pids.values()]
    while not all(_ignores_sigterm(worker.pid) for worker in workers):
        time.sleep(0.01)
    begin = time.monotonic()
    loader.close()
    seconds = time.monotonic() - begin
    return {"close_s": seconds, "left": float(sum(worker.is_running() for worker in workers))}


def _ignores_sigterm(pid: int) -> bool:
    """Whether a worker has come to where it hangs, a moment ago or in a moment."""
    with open(f"/proc/{pid}/status") as lines:
        ignored = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    return bool(ignored >> (signal.SIGTERM - 1) & 1)


def _answer(loader: Any, batch: Any) -> None:
    batch.send(np.zeros(batch.size, np.int64))


def _median_and_worst(seconds: Sequence[float]) -> dict[str, float]:
    return {"median_s": statistics.median(seconds), "worst_s": max(seconds), "kills": float(len(seconds))}


def worst_of(outcomes: Sequence[Outcome], workload: str, contender: str) -> float | None:
    """Returns the worst of all kills of all rounds."""
    found = [outcome for outcome in outcomes if (outcome.case.workload, outcome.case.contender) == (workload, contender)]
    return max((value for outcome in found for value in outcome.values("worst_s")), default=None)


def main() -> None:
    options = parse_arguments(__doc__)
    kills = 10 if options.quick else 20
    windows, window_s, rest_s = (3, 1.0, 0.1) if options.quick else (6, 2.0, 0.1)

    def case(workload: str, contender: str, function: Any, shown: str, **arguments: Any) -> Case:
        return Case(workload, contender, f"{__package__}.recovery:{function.__name__}", arguments, shown)

    outcomes = run_cases(
        [
            case(DEATH, BUSY, death, f"{kills} of {kills + 1} workers killed", kills=kills, step_s=0.001),
            case(DEATH, WAITING, death, f"{kills} of {kills + 1} workers killed", kills=kills, step_s=60.0),
            case(NEW_LIFE, OURS, new_life, f"8 workers, {kills} kills, module preloaded", kills=kills, preload=PRELOAD),
            case(NEW_LIFE, PLAIN, new_life, f"8 workers, {kills} kills", kills=kills, preload=[]),
            case(STORM, OURS, storm, "6 + 2 workers", windows=windows, window_s=window_s, rest_s=rest_s),
            case(CLOSE, OURS, close, f"{STUCK_WORKERS} stuck workers"),
        ],
        options,
    )
    checks = []
    for name, workload, contender in (
        ("error, others step", DEATH, BUSY),
        ("error, recv waits", DEATH, WAITING),
        ("new life less the env's own", NEW_LIFE, OURS),
    ):
        median = median_of(outcomes, workload, contender, "median_s")
        checks.append(Check(f"{name}, median", median, 0.5, at_least=False, unit=" s"))
        checks.append(Check(f"{name}, worst", worst_of(outcomes, workload, contender), 0.5, at_least=False, unit=" s"))
    checks += [
        Check("survivors' rate in the storm / quiet", median_of(outcomes, STORM, OURS, "kept"), 0.90),
        Check("close", median_of(outcomes, CLOSE, OURS, "close_s"), 5.0, at_least=False, unit=" s"),
        Check("processes left by close", median_of(outcomes, CLOSE, OURS, "left"), 0.0, at_least=False),
    ]
    columns = [
        ("median s", "median_s", ".3f"),
        ("worst s", "worst_s", ".3f"),
        ("quiet steps/s", "quiet", ",.0f"),
        ("storm steps/s", "stormy", ",.0f"),
        ("kept", "kept", ".3f"),
        ("kills/s", "kills_per_s", ".1f"),
        ("close s", "close_s", ".2f"),
    ]
    report("recovery", outcomes, checks, columns, options)


if __name__ == "__main__":
    main()
