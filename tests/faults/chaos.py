"""Chaos: breaks the workers of a running loader at random, and proves that no record is lost and nothing is left behind.

    python -m tests.faults.chaos --minutes 5 --seed 0 --num-envs 16

From outside it kills, crashes, stops and continues worker processes; from inside its envs raise, dawdle and hang in C code.
Every record says who made it: slot, life, episode, t, the resets of its env and the action that led to it, and a fill that
depends on all of them. So every record can be checked against the one before it (ONCE), and every life that ended in
mid-episode must be told as an interrupted episode of the right length, once and nowhere else. At the end no process, name or
descriptor may be left (CLEAN). The exit status is 0 only if both hold.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.extend(map(str, Path(__file__).resolve().parents[:2]))  # run alone, it finds its neighbours

from checks import clean
from gymnasium.spaces import Box, Discrete
from sick import hang_in_c

from slotloader import Batch, Episode, SlotLoader, StepType

WIDTH = 128  # int64 values of an observation
SLOT, LIFE, EPISODE, T, RESETS, ACTION, FILL = range(7)  # its columns; from FILL on all are one number over the others
WEIGHTS = np.array([1_000_003, 7_919, 104_729, 31, 271, 8_191], np.int64)
STEP_TIMEOUT = 1.0
SETTLE = 60.0  # seconds in which every slot must serve again once the chaos is over
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT)


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
      seconds: how long to break things.
      kills: stop earlier, after so many kills and crashes; 0 is no such limit.
      records: but not before so many records have been checked.
      seed: of the chaos, the envs and the consumer.
      num_envs, envs_per_worker: the fleet.
      spares, spare_processes, recycle_after: as of SlotLoader.
      rate: breakages per second from outside.
      step_ms: milliseconds of one env step.
      trouble: how likely one env step is to raise; a tenth of it hangs, ten times as many dawdle.
    """

    seconds: float = 60.0
    kills: int = 0
    records: int = 0
    seed: int = 0
    num_envs: int = 16
    envs_per_worker: int = 1
    spares: int = 0
    spare_processes: bool = False
    recycle_after: int | None = None
    rate: float = 5.0
    step_ms: float = 1.0
    trouble: float = 0.0005


def length_of(slot: int, life: int, episode: int) -> int:
    """Env steps of an episode that nothing cuts: 1 to 40."""
    return 1 + (31 * slot + 17 * life + 7 * episode) % 40


def name_episode(key: Any) -> dict[str, Any]:
    """`on_reset`: tells the env which episode it plays; with spares it cannot know."""
    return {"options": {"episode": key.episode}}


class Chaotic:
    """An env that tells everything about each record, and now and then dawdles, raises or hangs."""

    observation_space = Box(-(2**62), 2**62, (WIDTH,), np.int64)
    action_space = Discrete(1_000_000)

    def __init__(self, context: Any, seed: int, step_ms: float, trouble: float) -> None:
        self.rng = np.random.default_rng((seed, context.seed))
        self.seconds, self.trouble = step_ms / 1000, trouble
        self.slot, self.life, self.episode, self.t, self.resets = context.slot, context.life, 0, 0, 0

    def _obs(self, action: int) -> np.ndarray:
        row = np.empty(WIDTH, np.int64)
        row[:FILL] = self.slot, self.life, self.episode, self.t, self.resets, action
        row[FILL:] = row[:FILL] @ WEIGHTS
        return row

    def _suffer(self) -> None:
        luck = self.rng.random() / self.trouble if self.trouble else 20.0
        if luck < 0.1:
            hang_in_c()
        elif luck < 1.0:
            raise RuntimeError("chaos")
        elif luck < 10.0:
            time.sleep(self.rng.uniform(0.005, 0.05))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._suffer()
        self.episode, self.t, self.resets = options["episode"], 0, self.resets + 1
        return self._obs(-1), {}

    def step(self, action: int) -> Any:
        time.sleep(self.seconds)
        self._suffer()
        self.t += 1
        ended = self.t == length_of(self.slot, self.life, self.episode)
        even = self.episode % 2 == 0
        return self._obs(int(action)), float(self.t), ended and even, ended and not even, {}


@dataclass
class Last:
    """The record of a slot that was handed out last."""

    life: int = -1
    episode: int = -1
    t: int = 0
    ended: bool = True
    total: float = 0.0
    sent: int = -1


class Ledger:
    """ONCE over lives: what must come next in each slot, and which episodes must be told with it.

    Raises AssertionError from `check`, naming slot, what was found and what came before.
    """

    def __init__(self, num_slots: int, stride: int = 1) -> None:
        self.last = [Last() for _ in range(num_slots)]
        self.records = self.env_steps = self.lives = self.interrupted = self.ended = 0
        self.seen = np.zeros(num_slots, np.int64)  # records of each slot
        self._stride = stride

    def check(self, batch: Batch) -> None:
        """Checks every record of a batch, its fill, its step type and reward, and the list of episodes."""
        rows, slots = batch.obs, batch.env_indices.tolist()
        assert slots == sorted(set(slots)), f"rows {slots} are not ascending"
        torn = (rows[:, FILL:] != (rows[:, :FILL] @ WEIGHTS)[:, None]).any(axis=1)
        assert not torn.any(), f"torn rows of slots {batch.env_indices[torn].tolist()}: {rows[torn][:, :8].tolist()}"
        told: dict[int, list[Episode]] = collections.defaultdict(list)
        for episode in batch.episodes:
            told[episode.slot].append(episode)
        kinds, rewards = batch.step_type.tolist(), batch.reward.tolist()
        for slot, row, kind, reward in zip(slots, rows[:, :FILL].tolist(), kinds, rewards, strict=True):
            self._check_row(slot, row, kind, reward, told.pop(slot, []))
        assert not told, f"episodes of slots without a record: {dict(told)}"
        self.records += len(slots)
        self.seen[slots] += 1

    def _check_row(self, slot: int, row: list[int], kind: int, reward: float, told: list[Episode]) -> None:
        last = self.last[slot]
        _, life, episode, t, resets, action = row
        where = f"slot {slot}: found {row} (slot, life, episode, t, resets, action), kind {kind}, {told} after {last}"
        assert row[SLOT] == slot, where
        assert life >= last.life, f"a late record of an old life: {where}"
        expected: list[tuple[int, int, int, float, bool]] = []  # life, index, length, return, interrupted
        if life > last.life:
            assert (episode, t, action) == (0, 0, -1), f"a new life does not begin: {where}"
            self.lives += last.life >= 0
            if not last.ended:
                expected.append((last.life, last.episode, last.t, last.total, True))
        elif last.ended:
            assert (episode, t, action) == (last.episode + 1, 0, -1), f"lost, repeated or swapped: {where}"
        else:
            assert (episode, t, action) == (last.episode, last.t + 1, last.sent), f"lost, repeated or swapped: {where}"
        assert resets == episode // self._stride + 1, f"wrong env or a reset too many: {where}"
        ended = t == length_of(slot, life, episode)
        right = StepType.FIRST if t == 0 else StepType.MID
        if ended:
            right = StepType.TERMINATION if episode % 2 == 0 else StepType.TRUNCATION
        assert kind == right, f"wrong step type: {where}"
        assert reward == t, f"wrong reward {reward}: {where}"
        total = t * (t + 1) / 2
        if ended:
            expected.append((life, episode, t, total, False))
        found = [(e.life, e.index, e.length, e.episode_return, e.interrupted) for e in told]
        assert found == expected, f"expected episodes {expected}: {where}"
        self.env_steps += t > 0
        self.interrupted += sum(entry[4] for entry in expected)
        self.ended += ended
        self.last[slot] = Last(life, episode, t, ended, total)

    def answer(self, slots: Any, rng: np.random.Generator) -> np.ndarray:
        """Actions for `slots`, remembered."""
        actions = rng.integers(0, 1_000_000, len(slots))
        for slot, action in zip(slots, actions.tolist(), strict=True):
            self.last[slot].sent = action
        return actions


class Breaker(threading.Thread):
    """Breaks workers at random until told to stop; afterwards no worker is left stopped.

    Attributes:
      done: what was done, by name.
    """

    def __init__(self, loader: SlotLoader, seed: int, rate: float) -> None:
        super().__init__(name="chaos")
        self._fleet, self._rate = loader.fleet, rate
        self._rng = np.random.default_rng((seed, 1))
        self._over = threading.Event()
        self._stopped: list[tuple[float, int, bool]] = []  # until when, pidfd, to be killed then
        self.done: collections.Counter[str] = collections.Counter()

    @property
    def kills(self) -> int:
        """Workers killed or crashed so far."""
        return self.done["kill"] + self.done["crash"] + self.done["kill all"]

    def run(self) -> None:
        """The loop of the thread."""
        due = time.monotonic()
        while not self._over.is_set():
            now = time.monotonic()
            self._resume(now)
            if now >= due:
                self._break_something()
                due = now + self._rng.exponential(1 / self._rate)
            ends = [due, *(until for until, _, _ in self._stopped)]
            self._over.wait(max(0.0, min(ends) - time.monotonic()))
        self._resume(float("inf"))

    def stop(self) -> None:
        """Ends the thread."""
        self._over.set()
        self.join()

    def _break_something(self) -> None:
        pids = sorted(self._fleet.pids.values())
        if not pids:
            return
        rng = self._rng
        pid, luck = int(rng.choice(pids)), rng.random()
        if luck < 0.02:
            for one in pids:
                self._send(one, signal.SIGKILL, "kill all")
        elif luck < 0.60:
            self._send(pid, signal.SIGKILL, "kill")
        elif luck < 0.75:
            self._send(pid, CRASHES[rng.integers(len(CRASHES))], "crash")
        else:
            self._send(pid, signal.SIGSTOP, "stop", keep=True)

    def _send(self, pid: int, number: signal.Signals, name: str, keep: bool = False) -> None:
        """Signals one worker, through a descriptor: its number may belong to somebody else by now."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        if self._is_ours(pid) and _signal(fd, number):
            self.done[name] += 1
            if keep:
                self._stopped.append((time.monotonic() + self._rng.uniform(0.01, 0.4), fd, self._rng.random() < 0.25))
                return
        os.close(fd)

    def _is_ours(self, pid: int) -> bool:
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            return False
        return parent == self._fleet._nursery.pid

    def _resume(self, now: float) -> None:
        for entry in [entry for entry in self._stopped if entry[0] <= now]:
            self._stopped.remove(entry)
            _, fd, kill = entry
            if kill and _signal(fd, signal.SIGKILL):
                self.done["kill"] += 1
            elif _signal(fd, signal.SIGCONT):
                self.done["continue"] += 1
            os.close(fd)


def _signal(fd: int, number: signal.Signals) -> bool:
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    return True


class Causes(logging.Handler):
    """Counts the reasons that the loader logs with each restart."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Sorts one message."""
        text = record.getMessage()
        kinds = {"was killed by": "death", "has run for": "hang", "exited with": "exit", "raised": "exception"}
        self.counts[next((kind for words, kind in kinds.items() if words in text), "other")] += 1


@dataclass
class Report:
    """What was done, what was seen, and whether it was right.

    Attributes:
      once, clean: empty if they hold, else what was wrong.
      longest_recv: seconds of the longest `recv`.
      settled: seconds until every slot served again after the chaos.
    """

    options: Options
    seconds: float = 0.0
    done: Mapping[str, int] = field(default_factory=dict)
    causes: Mapping[str, int] = field(default_factory=dict)
    restarted: int = 0
    lives: int = 0
    interrupted: int = 0
    ended: int = 0
    records: int = 0
    env_steps: int = 0
    longest_recv: float = 0.0
    settled: float = 0.0
    once: str = ""
    clean: str = ""

    @property
    def kills(self) -> int:
        """Workers killed or crashed from outside."""
        return sum(self.done.get(name, 0) for name in ("kill", "crash", "kill all"))

    def __str__(self) -> str:
        def count(pairs: Mapping[str, int]) -> str:
            return ", ".join(f"{number} {name}" for name, number in sorted(pairs.items())) or "none"

        lines = {
            "done": count(self.done),
            "restarts logged": count(self.causes),
            "slots restarted": f"{self.restarted:,}",
            "lives begun, seen in records": f"{self.lives:,}",
            "episodes": f"{self.ended:,} ended, {self.interrupted:,} interrupted",
            "records": f"{self.records:,}",
            "env steps/s": f"{self.env_steps / max(self.seconds, 1e-9):,.0f} over {self.seconds:.1f} s",
            "longest recv": f"{self.longest_recv:.3f} s",
            "every slot served again after": f"{self.settled:.3f} s",
            "ONCE": self.once or f"holds for all {self.options.num_envs} slots",
            "CLEAN": self.clean or "holds",
        }
        width = max(map(len, lines))
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


class Run:
    """One run: a loader, its breaker and a consumer that checks every record.

    Args:
      options: what to run.
      say: takes a progress line about once a second.
    """

    def __init__(self, options: Options, say: Callable[[str], None] | None = None) -> None:
        self._options, self._say = options, say
        self._rng = np.random.default_rng((options.seed, 2))
        self._held: list[int] = []
        self._ledger = Ledger(options.num_envs, options.spares + 1)
        self.report = Report(options)

    def run(self) -> Report:
        """Runs to the end; failures are in the report."""
        report, causes = self.report, Causes()
        log = logging.getLogger("slotloader")
        try:
            with clean(), _logging_to(log, causes):
                try:
                    self._run()
                except Exception as error:
                    report.once = f"{type(error).__name__}: {error}"
        except AssertionError as error:
            report.clean = str(error)
        ledger = self._ledger
        report.causes = dict(causes.counts)
        report.records, report.env_steps, report.lives = ledger.records, ledger.env_steps, ledger.lives
        report.interrupted, report.ended = ledger.interrupted, ledger.ended
        return report

    def _run(self) -> None:
        options = self._options
        with SlotLoader(
            partial(Chaotic, seed=options.seed, step_ms=options.step_ms, trouble=options.trouble),
            options.num_envs,
            envs_per_worker=options.envs_per_worker,
            seed=options.seed,
            on_reset=name_episode,
            on_failure="restart",
            max_restarts=10**9,
            step_timeout=STEP_TIMEOUT,
            reset_timeout=STEP_TIMEOUT,
            spares=options.spares,
            spare_processes=options.spare_processes,
            recycle_after=options.recycle_after,
            stall_timeout=SETTLE,
            preload=["sick"],
        ) as loader:
            breaker = Breaker(loader, options.seed, options.rate)
            begin = time.monotonic()
            breaker.start()
            try:
                self._consume(loader, breaker, begin)
            finally:
                breaker.stop()
                self.report.done = dict(breaker.done)
                self.report.seconds = time.monotonic() - begin
            self._settle(loader)
            self.report.restarted = loader.stats().restarted

    def _consume(self, loader: SlotLoader, breaker: Breaker, begin: float) -> None:
        options, said = self._options, begin
        end = begin + options.seconds
        while (now := time.monotonic()) < end and not self._enough(breaker):
            self._move(loader)
            if self._say and now - said >= 1.0:
                said, ledger = now, self._ledger
                self._say(
                    f"{now - begin:6.0f} s  {breaker.kills:,} kills  {breaker.done['stop']:,} stops  "
                    f"{ledger.lives:,} new lives  {ledger.records:,} records checked  "
                    f"{ledger.env_steps / (now - begin):,.0f} env steps/s  longest recv {self.report.longest_recv:.3f} s"
                )

    def _enough(self, breaker: Breaker) -> bool:
        options = self._options
        return 0 < options.kills <= breaker.kills and self._ledger.records >= options.records

    def _settle(self, loader: SlotLoader) -> None:
        begin = time.monotonic()
        goal = self._ledger.seen + 3
        while (self._ledger.seen < goal).any():
            missing = np.flatnonzero(self._ledger.seen < goal).tolist()
            assert time.monotonic() - begin < SETTLE, f"slots {missing} do not serve {SETTLE} s after the chaos"
            self._move(loader)
        self.report.settled = time.monotonic() - begin

    def _move(self, loader: SlotLoader) -> None:
        """Receives a batch under a random policy, or answers some of the slots that are held."""
        rng, held = self._rng, self._held
        free = self._options.num_envs - len(held)
        if held and (not free or rng.random() < 0.5):
            rng.shuffle(held)
            count = int(rng.integers(1, len(held) + 1))
            part, self._held = held[:count], held[count:]
            loader.send(self._ledger.answer(part, rng), part)
            return
        least = 1 if rng.random() < 0.9 else int(rng.integers(1, free + 1))
        wait = None if rng.random() < 0.02 else float(rng.choice([0.0, 0.0005, 0.002]))
        begin = time.monotonic()
        batch = loader.recv(least, None, wait)
        self.report.longest_recv = max(self.report.longest_recv, time.monotonic() - begin)
        if rng.random() < 0.05:
            batch.release()  # the same records come again, with the same episodes
            return
        self._ledger.check(batch)
        self._held.extend(batch.env_indices.tolist())


@contextlib.contextmanager
def _logging_to(log: logging.Logger, handler: logging.Handler) -> Iterator[None]:
    propagate, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagate


def run(options: Options, say: Callable[[str], None] | None = None) -> Report:
    """Runs the chaos; the report says whether ONCE and CLEAN hold."""
    return Run(options, say).run()


def _number(kind: Callable[[str], float], least: float, above: bool = False) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not (value > least if above else value >= least):
            what = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"expected {what} {'above' if above else 'of at least'} {least:g}, found {text!r}")
        return value

    return parse


def parser() -> argparse.ArgumentParser:
    """The command line."""
    own = Options()
    made = argparse.ArgumentParser(
        prog="python -m tests.faults.chaos",
        description="Breaks the workers of a running SlotLoader at random and checks every record. Exit status 0: no record "
        "was lost, repeated, swapped or late, and nothing is left behind; 1: something was wrong; 2: wrong arguments.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument(
        "--minutes", type=_number(float, 0, above=True), default=own.seconds / 60, help="how long to break things"
    )
    made.add_argument("--kills", type=_number(int, 0), default=own.kills, help="stop after so many kills; 0 is no limit")
    made.add_argument("--seed", type=_number(int, 0), default=own.seed, help="of chaos, envs and consumer")
    made.add_argument("--num-envs", type=_number(int, 1), default=own.num_envs, help="slots")
    made.add_argument("--envs-per-worker", type=_number(int, 1), default=own.envs_per_worker, help="envs of one process")
    made.add_argument("--spares", type=_number(int, 0), default=own.spares, help="spare envs of each slot")
    made.add_argument("--spare-processes", action="store_true", help="each env in a process of its own")
    made.add_argument("--recycle-after", type=_number(int, 1), default=None, help="episodes after which an env is rebuilt")
    made.add_argument("--rate", type=_number(float, 0, above=True), default=own.rate, help="breakages per second from outside")
    made.add_argument("--step-ms", type=_number(float, 0), default=own.step_ms, help="milliseconds of an env step")
    made.add_argument("--trouble", type=_number(float, 0), default=own.trouble, help="how likely an env step is to raise")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Runs from the command line; returns the exit status."""
    made = parser()
    chosen = vars(made.parse_args(arguments))
    if not hasattr(os, "pidfd_open"):
        made.error("expected Linux with pidfd_open, found neither")
    if chosen["recycle_after"] and chosen["spares"]:
        made.error("--recycle-after does not go with --spares, as in SlotLoader")
    options = Options(seconds=60 * chosen.pop("minutes"), **chosen)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    line, end = ("\r", "") if sys.stdout.isatty() else ("", "\n")
    print(", ".join(f"{name} {value}" for name, value in dataclasses.asdict(options).items()), flush=True)
    report = run(options, lambda text: print(f"{line}{text}", end=end, flush=True))
    print(f"{'' if end else chr(10)}{report}", flush=True)
    return 1 if report.once or report.clean else 0


if __name__ == "__main__":
    sys.exit(main())
