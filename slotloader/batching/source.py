"""What hands out batches, and the ways to go through them: one place for the loader, its receivers and devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from slotloader.batching.former import Request
from slotloader.batching.progress import BoundedIterator, Counted
from slotloader.errors import LoaderClosed


class _Default:
    """The value of an argument that was left out."""

    def __repr__(self) -> str:
        return "<the loader's>"


DEFAULT: Any = _Default()

B = TypeVar("B", bound=Counted)


class BatchSource(ABC, Generic[B]):
    """Hands out batches with `recv` and `poll`, and is iterated for them until it is closed."""

    def recv(
        self,
        min_get: int = DEFAULT,
        max_get: int | None = DEFAULT,
        timeout: float | None = DEFAULT,
        stall_timeout: float | None = DEFAULT,
    ) -> B:
        """Waits for the next batch of ready records.

        It returns as soon as at least `min_get` records are ready and either `max_get` are, or nothing more is coming, or
        `timeout` seconds have passed since the oldest of them became ready. Arguments left out take the loader's values.

        Args:
          min_get: fewest records to return; at most the number of slots that can become ready.
          max_get: most records to return, the longest waiting first; None is all slots, or the largest bucket of a device.
          timeout: seconds that a ready record may wait for company: 0 never lingers, None waits for `max_get` or until
            nothing more is coming (lockstep). It never raises.
          stall_timeout: seconds without enough records until `FleetStalled`; None never.

        Returns:
          Batch with `env_indices` int64 (B,) ascending and `obs` a tree of (B, ...) arrays, owned by the batch.

        Raises:
          ValueError: an argument is out of range.
          SlotLoaderError: fewer than `min_get` slots can become ready, since batches are unanswered; at once.
          FleetStalled: fewer than `min_get` records within `stall_timeout`; none were taken.
          EnvFailed, WorkerDied: an env or a worker failed; the other slots can still be used.
          LoaderClosed: the loader is closed.
        """
        request = self.request
        if not (min_get is DEFAULT and max_get is DEFAULT and timeout is DEFAULT and stall_timeout is DEFAULT):
            given = {"min_get": min_get, "max_get": max_get, "timeout": timeout, "stall_timeout": stall_timeout}
            request = request.changed({name: value for name, value in given.items() if value is not DEFAULT}, self.most)
            if max_get is not DEFAULT and max_get is not None:
                self.require_room(max_get)
        return self.receive(request)

    @property
    @abstractmethod
    def request(self) -> Request:
        """What `recv` asks for by default."""

    @property
    @abstractmethod
    def most(self) -> int:
        """Most records that a batch can have."""

    def require_room(self, max_get: int) -> None:
        """Refuses a `max_get` above `most` where that would be a mistake; slots that there are not just never come."""

    @abstractmethod
    def receive(self, request: Request) -> B:
        """Waits for the next batch that `request` asks for; see `recv`."""

    @abstractmethod
    def poll(self) -> B | None:
        """Returns the ready records, at most `max_get`, at once; None if there are none."""

    def __iter__(self) -> Iterator[B]:
        return _Batches(self)

    def steps(self, env_steps: int, progress: bool | None = None) -> BoundedIterator[B]:
        """Yields batches until `env_steps` records that are not FIRST have come in; a bar on a terminal."""
        return BoundedIterator(self, env_steps, "env steps", progress)

    def episodes(self, episodes: int, progress: bool | None = None) -> BoundedIterator[B]:
        """Yields batches until `episodes` episodes have ended. Short episodes come first: not for unbiased returns."""
        return BoundedIterator(self, episodes, "episodes", progress)


class _Batches(Iterator[B]):
    """Yields batches until the source is closed. An object and no generator: after an exception it goes on."""

    def __init__(self, source: BatchSource[B]) -> None:
        self._source = source

    def __next__(self) -> B:
        try:
            return self._source.receive(self._source.request)
        except LoaderClosed:
            raise StopIteration from None
