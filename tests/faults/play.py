"""Driving a loader in the fault tests: answer everything, keep what each slot showed, stop at a condition."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
from checks import kill_quietly, until
from sick import EPISODE, LIFE, SLOT, T

from slotloader import Batch, Episode, SlotLoader, StepType

Record = tuple[int, int, int, int]  # life, own count of episodes, t, step type


class Play:
    """Answers batches of a loader of `Alive` envs and checks that every record follows the one before it.

    Attributes:
      rows: the records of each slot.
      episodes: all that were told.
      answered: monotonic seconds of each slot's last answer.
    """

    def __init__(self, loader: SlotLoader, spares: int = 0) -> None:
        self.loader, self._stride = loader, spares + 1
        self._index: dict[int, int] = {}  # episode of each slot within its life
        self.rows: dict[int, list[Record]] = collections.defaultdict(list)
        self.episodes: list[Episode] = []
        self.answered: dict[int, float] = {}

    def take(self, batch: Batch) -> None:
        """Keeps what a batch shows."""
        kinds = batch.step_type.tolist()
        for slot, row, kind in zip(batch.env_indices.tolist(), batch.obs.tolist(), kinds, strict=True):
            assert row[SLOT] == slot
            record = (row[LIFE], row[EPISODE], row[T], kind)
            self._follow(slot, record)
            self.rows[slot].append(record)
        self.episodes.extend(batch.episodes)

    def _follow(self, slot: int, record: Record) -> None:
        life, own, t, kind = record
        before = self.rows[slot][-1] if self.rows[slot] else (-1, 0, 0, 0)
        where = (slot, record, before)
        assert (t == 0) == (kind == StepType.FIRST), where
        if life > before[0]:
            self._index[slot], expected = 0, 0
        elif before[3] >= StepType.TERMINATION:
            self._index[slot], expected = self._index[slot] + 1, 0
        else:
            expected = before[2] + 1
        assert life >= before[0], where
        assert (own, t) == (self._index[slot] // self._stride, expected), where

    def once(self) -> Batch:
        """Receives and answers one batch."""
        batch = self.loader.recv(stall_timeout=30)
        self.take(batch)
        self.answered.update(dict.fromkeys(batch.env_indices.tolist(), time.monotonic()))
        batch.send(np.zeros(batch.size, np.int64))
        return batch

    def until(self, condition: Callable[[], Any], seconds: float = 30.0, what: str = "") -> None:
        """Answers batches until the condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what or condition}"
            self.once()

    def steps(self, count: int, slots: Sequence[int] | None = None) -> None:
        """Goes on until each of the slots has shown so many more records."""
        chosen = range(self.loader.num_slots) if slots is None else slots
        goals = {slot: len(self.rows[slot]) + count for slot in chosen}
        self.until(lambda: all(len(self.rows[slot]) >= goal for slot, goal in goals.items()), what=f"{count} more records")

    def life(self, slot: int) -> int:
        """The life that the slot showed last, -1 before its first record."""
        return self.rows[slot][-1][0] if self.rows[slot] else -1

    def lives(self, slot: int) -> list[int]:
        """The lives that the slot showed, in order."""
        return list(dict.fromkeys(row[0] for row in self.rows[slot]))

    def interrupted(self) -> list[tuple[int, int, int, int, float]]:
        """Slot, life, index, length and return of the episodes that were told as interrupted."""
        return [(e.slot, e.life, e.index, e.length, e.episode_return) for e in self.episodes if e.interrupted]

    def kill(self, worker: int) -> int:
        """SIGKILL to a worker; returns its pid once the loader knows of its end, that is, once it was reaped."""
        pid = until(lambda: self.loader.fleet.pids.get(worker))
        kill_quietly(pid)
        until(lambda: self.loader.fleet.pids.get(worker) != pid)
        return pid


def gone(pid: int) -> bool:
    """No such process, or only a zombie of it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def reaped(pid: int) -> bool:
    """No such process, not even a zombie."""
    return not os.path.exists(f"/proc/{pid}")
