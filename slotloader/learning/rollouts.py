"""Rollouts for on-policy learners: T transitions of every slot, each at its own pace, then one barrier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from slotloader.batching.episodes import Episode
from slotloader.device.batch import DeviceBatch
from slotloader.device.batches import DeviceSource
from slotloader.device.binding import bound
from slotloader.learning.learners import Unroll, Unrolls


class Rollouts(Iterator[Unroll]):
    """Yields one unroll of all slots after the other, for ever; `batches.rollout(...)` makes one, too.

    A slot that has its T transitions waits at the barrier with its last record, and no action is sent to it. Everything that
    the learner does between two rollouts is so done before the first action of the next: the data is on-policy. (With a
    `quorum` the first action of a straggler is still of the policy before; `versions` says so.)

    Args:
      batches: the adapter.
      policy: from `batches.policy` or `compile`, or anything that `policy` takes.
      length: T.
      quorum: share of the slots that ends a rollout, or None for all. What the others lack is not `valid`.

    Attributes:
      episodes: those that ended in the last rollout.
      env_steps: records that were not FIRST, in all rollouts.
    """

    def __init__(self, batches: DeviceSource, policy: Any, length: int, quorum: float | None = None) -> None:
        if quorum is not None and not (isinstance(quorum, (int, float)) and 0.0 < quorum <= 1.0):
            raise ValueError(f"quorum: expected a share above 0 and up to 1, found {quorum!r}")
        self._batches, self._policy, self._quorum = batches, bound(batches, policy), quorum
        self._unrolls = Unrolls(batches, length)
        receiver = batches.receiver
        self._slots = np.arange(receiver.first_slot, receiver.first_slot + receiver.num_slots)
        self._held: list[DeviceBatch] = []
        self.episodes: list[Episode] = []
        self.env_steps = 0

    def __next__(self) -> Unroll:
        self.episodes = []
        self._unrolls.begin(self._slots)
        self._release()
        with self._batches.released_on_error():
            return self._collect()

    def _collect(self) -> Unroll:
        batches, receiver = self._batches, self._batches.receiver
        done = 0
        wanted = len(self._slots) * (1.0 if self._quorum is None else self._quorum)
        while not done or (receiver.expected and done < wanted):
            batch = batches.recv(min_get=min(receiver.request.min_get, max(receiver.expected, 1)))
            fresh = self._unrolls.are_new(batch)  # what waited at the barrier has been counted
            done += self._act(batch)
            known = set(batch.host.env_indices[~fresh].tolist())
            self.episodes.extend(episode for episode in batch.episodes if episode.slot not in known)
            self.env_steps += int(np.count_nonzero(batch.host.step_type[fresh]))
        return self._unrolls.take(self._slots)

    def _act(self, batch: DeviceBatch) -> int:
        """Answers those of a batch that have not reached the barrier; returns how many have."""
        acted = self._policy(batch)
        complete = self._unrolls.push(batch, acted.action, acted.extras, acted.state, batch.version)
        if not complete.size:
            batch.send(acted.action)
            return 0
        waits = np.isin(batch.host.env_indices, complete)
        if not waits.all():
            batch.send(acted.action, hold=waits)
        self._held.append(batch)
        return len(complete)

    def _release(self) -> None:
        """Gives back the records at the barrier: they come again, as the first ones of the next rollout."""
        self._batches.drain()
        for batch in self._held:
            batch.release()
        self._held.clear()

    def close(self) -> None:
        """Gives back what waits at the barrier; rollouts can go on afterwards."""
        self._release()
