"""Acting in a thread while a learner computes: unrolls come through a short queue, weights go back between two batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

from slotloader.arguments import require_count
from slotloader.batching.episodes import Episode
from slotloader.device.batches import DeviceSource
from slotloader.device.binding import bound
from slotloader.errors import LoaderClosed, SlotLoaderError
from slotloader.learning.learners import Unroll, Unrolls

OnFull = Literal["block", "drop_oldest"]
_SLICE = 0.5  # seconds between two looks whether the other side still lives


class _Stop(Exception):
    """Ends a `recv` of the acting thread."""


class Background(Iterator[Unroll]):
    """An actor in a thread; `batches.background(...)` makes one, too; used as a context manager and iterated for unrolls.

        with batches.background(policy, unrolls=Unrolls(batches, length=20, batch_size=32)) as actor:
            for unroll in itertools.islice(actor, 1000):
                params = learn(params, unroll)
                actor.update(params)

    The actor calls the policy in its thread, so the learner must not compute with the same torch module: give the policy its
    weights as `params=` and a copy of the module (`copy.deepcopy`), as examples/impala_torch.py does.

    Args:
      batches: the adapter; nobody else may receive from it meanwhile.
      policy: from `batches.policy` or `compile`, or anything that `policy` takes.
      unrolls: what puts the unrolls together, made for this adapter.
      queue: most unrolls that wait for the learner.
      on_full: "block" has the actor wait for the learner, so the envs stand still; "drop_oldest" keeps them going.
      max_lag: unrolls in which a version is more than so many behind the newest weights are left out.

    Attributes:
      env_steps: records that were not FIRST.
      dropped: unrolls that no learner got, for the queue or for their lag.
    """

    def __init__(
        self,
        batches: DeviceSource,
        policy: Any,
        unrolls: Unrolls,
        queue: int = 2,
        on_full: OnFull = "block",
        max_lag: int | None = None,
    ) -> None:
        if on_full not in ("block", "drop_oldest"):
            raise ValueError(f"on_full: expected 'block' or 'drop_oldest', found {on_full!r}")
        if not isinstance(unrolls, Unrolls) or unrolls.ops is not batches.ops:
            raise TypeError(f"unrolls: expected Unrolls(batches, ...) of this adapter, found {unrolls!r:.200}")
        self._batches, self._policy, self._unrolls = batches, bound(batches, policy), unrolls
        self._size, self._blocks = require_count("queue", queue), on_full == "block"
        self._max_lag = require_count("max_lag", max_lag, 0, optional=True)
        self._queue: deque[Unroll] = deque()
        self._episodes: list[Episode] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.env_steps = self.dropped = 0

    @property
    def version(self) -> int:
        """Of the newest weights that were given to `update`."""
        return self._policy.newest_version

    def update(self, params: Any, version: int | None = None) -> None:
        """`Policy.update`: the actor uses the new weights from its next batch on."""
        self._policy.update(params, version)

    def episodes(self) -> list[Episode]:
        """The episodes that ended since this was last asked."""
        with self._changed:
            found, self._episodes = self._episodes, []
        return found

    def __repr__(self) -> str:
        return f"Background({self.env_steps:,} env steps, {len(self._queue)} unrolls wait, {self.dropped} dropped)"

    def __enter__(self) -> Background:
        if self._thread is not None:
            raise SlotLoaderError("background: expected to be entered once; make a new one")
        self._thread = threading.Thread(target=self._run, name="slotloader-actor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread after the batch that it is at; every action that it has sent still counts."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and self._thread.is_alive():
            stop = _Stop()
            self._batches.receiver.fail(stop)
            self._thread.join()
            self._batches.receiver.forget(stop)

    def __next__(self) -> Unroll:
        if self._thread is None:
            raise SlotLoaderError("background: expected to be entered first; use `with batches.background(...) as actor:`")
        while True:
            with self._changed:
                while not self._queue:
                    if self._failure is not None:
                        failure, self._failure = self._failure, None
                        raise failure
                    if not self._thread.is_alive():
                        raise StopIteration
                    self._changed.wait(_SLICE)
                unroll = self._queue.popleft()
                self._changed.notify_all()
            if self._max_lag is None or self.version - int(unroll.versions.min()) <= self._max_lag:
                return unroll
            self.dropped += 1

    def _run(self) -> None:
        try:
            with self._batches.released_on_error():
                while not self._stopping:
                    self._turn()
        except (_Stop, LoaderClosed):
            pass
        except BaseException as error:  # raised to the learner
            self._failure = error
        with self._changed:
            self._changed.notify_all()

    def _turn(self) -> None:
        batch = self._batches.recv()
        batch.host.sequence, batch.obs  # noqa: B018  read while leased: unrolls come after the answer, which wakes envs
        acted = self._policy(batch)
        batch.send(acted.action)
        unrolls = self._unrolls.add(batch, acted.action, acted.extras, acted.state, batch.version)
        with self._changed:
            self.env_steps += batch.env_steps
            self._episodes.extend(batch.episodes)
        for unroll in unrolls:
            self._put(unroll)

    def _put(self, unroll: Unroll) -> None:
        with self._changed:
            if self._blocks:
                while len(self._queue) >= self._size and not self._stopping:
                    self._changed.wait(_SLICE)
            elif len(self._queue) >= self._size:
                self._queue.popleft()
                self.dropped += 1
            self._queue.append(unroll)
            self._changed.notify_all()
