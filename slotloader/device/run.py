"""Driving a policy: batch N + 1 forms and travels while N computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slotloader.batching.episodes import Episode
from slotloader.batching.progress import BoundedIterator
from slotloader.device.batch import DeviceBatch
from slotloader.device.binding import bound
from slotloader.device.policies import Acted
from slotloader.errors import LoaderClosed

if TYPE_CHECKING:
    from slotloader.device.batches import DeviceSource


@dataclass(frozen=True)
class Run:
    """What `run` did; `print` it.

    Attributes:
      env_steps: records that were not FIRST.
      batches: number of batches.
      seconds: how long it took.
      episodes: those that ended, in order of their end; short ones come first, so their mean return is biased.
    """

    env_steps: int
    batches: int
    seconds: float
    episodes: list[Episode]

    @property
    def env_steps_per_second(self) -> float:
        """Rate over the whole run."""
        return self.env_steps / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        whole = [episode.episode_return for episode in self.episodes if not episode.interrupted]
        returns = f", mean return {np.mean(whole):.1f}" if whole else ""
        return (
            f"{self.env_steps:,} env steps in {self.seconds:.1f} s ({self.env_steps_per_second:,.0f}/s), "
            f"{self.batches:,} batches, {len(whole):,} episodes{returns}"
        )


def run(
    batches_of: DeviceSource,
    policy: Any,
    env_steps: int | None,
    episodes: int | None,
    progress: bool | None,
    on_batch: Callable[[DeviceBatch, Acted], None] | None,
) -> Run:
    """See `DeviceSource.run`."""
    if (env_steps is None) == (episodes is None):
        raise ValueError(f"run: expected one of env_steps and episodes, found env_steps={env_steps}, episodes={episodes}")
    acting = bound(batches_of, policy)
    hides = batches_of.hides and acting.is_compiled and on_batch is None
    unit, total = ("env steps", env_steps) if episodes is None else ("episodes", episodes)
    began, batches, steps = time.monotonic(), 0, 0
    ended: list[Episode] = []
    with batches_of.released_on_error():
        source = BoundedIterator(_Hidden(batches_of, acting.names) if hides else batches_of, total, unit, progress)
        for batch in source:
            acted = acting.act(batch.hidden if hides else batch.select(acting.names), batch)
            if on_batch is not None:
                on_batch(batch, acted)
            batch.send(acted.action)
            batches, steps = batches + 1, steps + batch.env_steps
            ended.extend(batch.episodes)
        if not source.complete:
            raise LoaderClosed(f"run: the loader or this adapter was closed after {source.done:,} of {total:,} {unit}")
        batches_of.drain()
    return Run(steps, batches, time.monotonic() - began, ended)


class _Hidden(Iterator[DeviceBatch]):
    """Yields batches whose inputs stay in the stage for a compiled policy; an object, so it goes on after an exception."""

    def __init__(self, batches: DeviceSource, names: tuple[str, ...]) -> None:
        self._batches, self._names = batches, names

    def __next__(self) -> DeviceBatch:
        try:
            return self._batches.receive(self._batches.request, self._names)
        except LoaderClosed:
            raise StopIteration from None
