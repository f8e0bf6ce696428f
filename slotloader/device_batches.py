"""DeviceBatches: what `to_numpy`, `to_torch` and `to_jax` return, the loader's twin on a device."""

from __future__ import annotations

from typing import Any

from slotloader.device.batches import DeviceSource
from slotloader.learning.background import Background, OnFull
from slotloader.learning.learners import Unrolls
from slotloader.learning.rollouts import Rollouts


class DeviceBatches(DeviceSource):
    """A loader's batches on a device, with what learners ask for.

        with to_torch(loader, device="cuda") as batches:
            for batch in batches:
                batch.send(policy(batch.obs))

    Arguments are those of `DeviceSource`.
    """

    def rollout(self, policy: Any, *, length: int, quorum: float | None = None) -> Rollouts:
        """Rollouts for on-policy learners: an iterator of one unroll of all slots after the other.

            for unroll in itertools.islice(batches.rollout(policy, length=128), 100):
                learn(unroll)

        Args:
          policy: from `policy` or `compile`, or anything that `policy` takes.
          length: T, transitions of each slot per rollout.
          quorum: share of the slots that ends a rollout, so that stragglers do not hold it up; None waits for all.
        """
        return Rollouts(self, policy, length, quorum)

    def background(
        self, policy: Any, *, unrolls: Unrolls, queue: int = 2, on_full: OnFull = "block", max_lag: int | None = None
    ) -> Background:
        """An actor in a thread, for a learner that computes meanwhile; see `Background`.

        Args:
          policy: from `policy` or `compile`, or anything that `policy` takes.
          unrolls: what puts the unrolls together, made for this adapter.
          queue: most unrolls that wait for the learner.
          on_full: "block" has the actor wait for the learner; "drop_oldest" keeps the envs going.
          max_lag: unrolls in which a version is more than so many behind the newest weights are left out.
        """
        return Background(self, policy, unrolls, queue, on_full, max_lag)
