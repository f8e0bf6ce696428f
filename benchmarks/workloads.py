"""The environments of the benchmarks, and the ledger in which they count their own steps.

Every contender steps the very same `BenchEnv`. The environment itself counts `env.step` calls, that is the records that
are not FIRST, in a small memory-mapped file, so no contender's idea of a step (reset rows, folded resets, batches that
are still on their way) enters a figure, and the consumer spends no time on counting.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import gymnasium
import numpy as np
from numpy.typing import NDArray

Info = dict[str, Any]

# A ledger row is int64: [env steps, marks written, then a ring of marks (time in monotonic ns, env steps by then)].
STEPS, MARKS, RING = 0, 1, 2
RING_MARKS = 4096
ROW_WORDS = RING + 2 * RING_MARKS
ENDLESS_MARK_EVERY = 10


@dataclass(frozen=True)
class Workload:
    """What one benchmark environment does.

    Attributes:
      num_envs: how many of them a contender runs.
      shape: shape of the observation.
      dtype: dtype of the observation, "int32" or "uint8".
      step_s: seconds that `step` sleeps; 0 does no work at all.
      episode_length: steps per episode; 0 means that episodes never end.
      reset_s: seconds that `reset` sleeps.
      slow_resets: how many environments, from index 0 on, reset slowly; the others reset at once. -1 means all.
    """

    num_envs: int
    shape: tuple[int, ...] = (1,)
    dtype: str = "int32"
    step_s: float = 0.0
    episode_length: int = 0
    reset_s: float = 0.0
    slow_resets: int = -1

    @property
    def observation_space(self) -> gymnasium.spaces.Box:
        info = np.iinfo(self.dtype)
        return gymnasium.spaces.Box(info.min, info.max, self.shape, np.dtype(self.dtype).type)


# The rows of the table of expected speed, in its order.
WORKLOADS = {
    "dispatch small": Workload(8),
    "dispatch pixels": Workload(8, (4, 84, 84), "uint8"),
    "slow reset": Workload(32, step_s=0.001, episode_length=200, reset_s=0.2),
    "heavy": Workload(64, step_s=0.05),
    "pixels uniform": Workload(8, (3, 84, 84), "uint8", step_s=0.001, episode_length=200),
    "pixels one slow": Workload(8, (3, 84, 84), "uint8", 0.001, episode_length=16, reset_s=0.2, slow_resets=1),
}


class BenchEnv(gymnasium.Env[NDArray[Any], np.int64]):
    """Sleeps as its workload says and returns one and the same array, so that the exchange is all that costs."""

    def __init__(self, workload: Workload, index: int = 0, ledger_path: str | None = None) -> None:
        self.observation_space = workload.observation_space
        self.action_space = gymnasium.spaces.Discrete(4)
        self._obs = np.zeros(workload.shape, workload.dtype)
        self._first = self._obs.reshape(-1)
        self._step_s = workload.step_s
        self._episode_length = workload.episode_length or (1 << 62)
        self._mark_every = 0 if workload.episode_length else ENDLESS_MARK_EVERY
        slow = workload.slow_resets < 0 or index < workload.slow_resets
        self._reset_s = workload.reset_s if slow else 0.0
        self._row = _map_row(ledger_path, index) if ledger_path else None
        self._steps = 0
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[NDArray[Any], Info]:
        if self._row and not self._mark_every:
            self._mark(self._row)
        if self._reset_s:
            time.sleep(self._reset_s)
        self._t = 0
        self._first[0] = 0
        return self._obs, {}

    def step(self, action: np.int64) -> tuple[NDArray[Any], float, bool, bool, Info]:
        if self._step_s:
            time.sleep(self._step_s)
        self._steps += 1
        self._t += 1
        if self._row:
            self._row[STEPS] = self._steps
            if self._mark_every and self._steps % self._mark_every == 0:
                self._mark(self._row)
        self._first[0] = self._t & 127
        return self._obs, 1.0, self._t >= self._episode_length, False, {}

    def _mark(self, row: memoryview) -> None:
        marks = row[MARKS]
        at = RING + 2 * (marks % RING_MARKS)
        row[at] = time.monotonic_ns()
        row[at + 1] = self._steps
        row[MARKS] = marks + 1  # last: the reader takes only what stands before this count


class RotatingFactory:
    """Makes the environments of one slot, main one and spares, each with a row of the ledger to itself."""

    def __init__(self, workload: Workload, slot: int, path: str, per_slot: int) -> None:
        self._workload, self._slot, self._path, self._per_slot = workload, slot, path, per_slot
        self._made = 0

    def __call__(self) -> BenchEnv:
        row = self._slot * self._per_slot + self._made % self._per_slot
        self._made += 1
        return BenchEnv(self._workload, row, self._path)


class Ledger:
    """The counts of all environments of one run, in a file that every process maps; use it as a context manager."""

    def __init__(self, num_envs: int) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="slotloader-bench-")
        os.ftruncate(descriptor, num_envs * ROW_WORDS * 8)
        os.close(descriptor)
        self._rows = np.memmap(self.path, np.int64, "r", shape=(num_envs, ROW_WORDS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.unlink(self.path)

    def factories(self, workload: Workload) -> list[Callable[[], BenchEnv]]:
        """Returns one factory per environment, each bound to its row."""
        return [partial(BenchEnv, workload, index, self.path) for index in range(workload.num_envs)]

    def rotating_factories(self, workload: Workload, per_slot: int) -> list[Callable[[], BenchEnv]]:
        """Returns one factory per slot that makes `per_slot` environments; the ledger needs a row for each of them."""
        return [RotatingFactory(workload, slot, self.path, per_slot) for slot in range(workload.num_envs)]

    @property
    def steps(self) -> int:
        """Env steps of all environments since they were built."""
        return int(self._rows[:, STEPS].sum())

    def all_stepped(self) -> bool:
        """Whether every environment has made its first step."""
        return bool((self._rows[:, STEPS] > 0).all())

    def whole_episodes(self, begin_ns: int, end_ns: int) -> bool:
        """Whether every environment closed at least one whole episode between the two times."""
        return all(len(self._marks(row, begin_ns, end_ns)) >= 2 for row in self._rows)

    def rate(self, begin_ns: int, end_ns: int) -> float:
        """Returns the env steps per second of all environments, each over the whole episodes that it did in a window.

        An environment's episode runs from the start of a reset to the start of the next one, so a slow reset counts
        in full. Environments whose episodes never end are taken from step to step instead.

        Args:
          begin_ns: start of the window, `time.monotonic_ns`; `whole_episodes` must hold for it.
          end_ns: end of the window.
        """
        total = 0.0
        for row in self._rows:
            marks = self._marks(row, begin_ns, end_ns)
            nanoseconds, steps = marks[-1] - marks[0]
            total += 1e9 * float(steps) / float(nanoseconds)
        return total

    def _marks(self, row: NDArray[np.int64], begin_ns: int, end_ns: int) -> NDArray[np.int64]:
        count = int(row[MARKS])
        order = np.arange(max(0, count - RING_MARKS), count) % RING_MARKS
        marks = row[RING:].reshape(-1, 2)[order]
        inside = (marks[:, 0] >= begin_ns) & (marks[:, 0] <= end_ns)
        return np.asarray(marks[inside])


def _map_row(path: str, index: int) -> memoryview:
    """Returns row `index` of a ledger file as a writable view of int64 words."""
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    return memoryview(mapped).cast("q")[index * ROW_WORDS : (index + 1) * ROW_WORDS]
