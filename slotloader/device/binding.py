"""Policies meet a device: which fields they take, their state and randomness, and compiling them for every bucket."""

from __future__ import annotations

from typing import Any

from slotloader.arguments import require_seed
from slotloader.device.ops import DeviceOps, Stream
from slotloader.device.policies import Policy, RecurrentState, as_contract, make_step
from slotloader.device.preparation import Preparation
from slotloader.device.staging import Plan, Staging


class Binder:
    """Binds policies to one adapter.

    Args:
      ops: the device.
      plan: what travels.
      staging: where batches are staged.
      preparation: what is done to observations on the device, or None.
      table_slots: slots of the table; also the scratch row of recurrent states.
      seed: of the policies' randomness by default.
    """

    def __init__(
        self, ops: DeviceOps, plan: Plan, staging: Staging, preparation: Preparation | None, table_slots: int, seed: int
    ) -> None:
        self.ops, self.plan, self.staging, self.table_slots = ops, plan, staging, table_slots
        self._preparation, self._seed = preparation, seed
        self._hides = ops.hidden and preparation is None

    def bind(
        self, policy: Any, params: Any, state: Any, seed: int | None, compiled: bool, options: dict[str, Any] | None = None
    ) -> Policy:
        """See `DeviceSource.policy`; `options` are those of the framework's compiler."""
        if isinstance(policy, Policy):
            raise TypeError("policy: expected a policy that is not bound to an adapter yet, found one that is")
        adopted = self.ops.adopt(policy, params)
        contract, only_obs = as_contract(adopted.function, adopted.params is not None)
        names = ("obs",) if only_obs and "obs" in self.plan.spans and state is None else tuple(self.plan.spans)
        recurrent = None if state is None else RecurrentState(self.ops, self.table_slots, state)
        if recurrent is not None and "step_type" not in self.plan.spans:
            raise ValueError("state: expected 'step_type' among fields=, since a FIRST record begins a new state")
        step = make_step(self.ops, self.plan.part(names), contract, None if recurrent is None else recurrent.initial)
        keys = self.ops.keys(self._seed if seed is None else require_seed("seed", seed), compiled)
        static = compiled and self.ops.static_outputs(options or {})
        return Policy(self.ops, step, names, adopted.params, recurrent, keys, adopted.own, adopted.params_of, static)

    def compile(self, policy: Any, params: Any, state: Any, seed: int | None, options: dict[str, Any]) -> Policy:
        """See `DeviceSource.compile`."""
        if seed is not None and self.ops.keys(seed, True)() is None:
            raise ValueError(
                f"seed: expected None, since compiled policies of {type(self.ops).__name__} get no key, found {seed}; seed the "
                "framework's global generator, e.g. torch.manual_seed"
            )
        compiled = self.bind(policy, params, state, seed, compiled=True, options=options)
        examples: dict[int, list[Any]] = {}
        for rows in self.staging.sizes():
            examples[rows] = self._examples(rows, compiled.names)
        self.ops.wait(Stream.COMPUTE, self.ops.record(Stream.H2D))
        compiled.compile(examples, options)
        return compiled

    def _examples(self, rows: int, names: tuple[str, ...]) -> list[Any]:
        """Padding rows to compile with; whatever brings batches to the device is warmed up, so nothing is compiled later."""
        groups = [(name,) for name in self.plan.spans] if self.ops.lazy else [tuple(self.plan.spans)]
        found: dict[str, list[Any]] = {}
        for group in groups:
            memory, views = self.staging.examples(rows, group)
            arrays = iter(self.ops.h2d(memory, views) if views else [])
            for name in group:
                found[name] = [next(arrays) for _ in self.plan.fields[self.plan.spans[name]]]
        if self._preparation is not None:
            prepared = self._preparation([x for name in self._preparation.names for x in found[name]])
            found["obs"] = prepared.obs
            prepared.commit(None)
        return self.staging.examples(rows, names)[1] if self._hides else [x for name in names for x in found[name]]


def bound(batches: Any, policy: Any) -> Policy:
    """The policy itself, or a plain one bound to the adapter."""
    if not isinstance(policy, Policy):
        made: Policy = batches.policy(policy)
        return made
    if policy.ops is not batches.ops:
        raise TypeError("policy: expected one that this adapter has made, found one of another adapter")
    return policy
