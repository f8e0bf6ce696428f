"""The policy contract, recurrent state per slot, and weights that can be swapped between two batches."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from slotloader.arguments import require_count
from slotloader.device.ops import DeviceOps, Own, kind_of
from slotloader.device.staging import Plan
from slotloader.errors import SlotLoaderError

Step = Callable[..., Any]


class Inputs(NamedTuple):
    """What a policy sees of one batch; device arrays with one row per row of the bucket. Fields left out are None.

    Attributes:
      obs: tree of (bucket, ...).
      reward: float32 (bucket,); 0 for FIRST.
      step_type: uint8 (bucket,), `StepType`.
      is_first: bool (bucket,).
      last_action: tree of (bucket, ...), the action last sent to each slot.
      info: declared info columns, name to (bucket, ...), e.g. an action mask.
      env_indices: the slots, (bucket,); `num_slots` for padding rows.
    """

    obs: Any = None
    reward: Any = None
    step_type: Any = None
    is_first: Any = None
    last_action: Any = None
    info: Any = None
    env_indices: Any = None


class Acted(NamedTuple):
    """What a policy returns.

    Attributes:
      action: tree of (bucket, ...), by the action space.
      state: the new recurrent state, a tree of (bucket, ...) like the one given; of arrays of its own, since what was given
        is kept for learners and for records that are released.
      extras: what a learner wants to keep, e.g. log-probabilities and values; a dict of (bucket, ...).
    """

    action: Any
    state: Any = None
    extras: Any = {}


def as_contract(policy: Callable[..., Any], has_params: bool) -> tuple[Callable[..., Acted], bool]:
    """Turns any policy into `(params, inputs, state, key) -> Acted`, and says whether it uses `obs` alone.

    Args:
      policy: `policy(params, inputs, state, key) -> Acted`, `policy(params, obs) -> action` or `policy(obs) -> action`.
      has_params: whether there are params.

    Raises:
      TypeError: not callable, or it takes another number of arguments.
    """
    if not callable(policy):
        raise TypeError(f"policy: expected a callable, found {policy!r:.200}")
    least, most = positional(policy)
    if least == 4:
        return lambda params, inputs, state, key: _as_acted(policy(params, inputs, state, key)), False
    if has_params and least <= 2 <= most:
        return lambda params, inputs, state, key: _as_acted(policy(params, inputs.obs)), True
    if not has_params and least <= 1 <= most:
        return lambda params, inputs, state, key: _as_acted(policy(inputs.obs)), True
    raise TypeError(
        f"policy: expected policy(obs), policy(params, obs) or policy(params, inputs, state, key), found {policy!r:.200} with "
        f"{least} required positional arguments {'and' if has_params else 'and no'} params="
    )


def positional(policy: Callable[..., Any]) -> tuple[int, float]:
    """Fewest and most positional arguments that it takes."""
    try:
        parameters = list(inspect.signature(policy).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return 1, 2
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    unbounded = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return sum(p.default is p.empty for p in places), float("inf") if unbounded else len(places)


def _as_acted(result: Any) -> Acted:
    return result if isinstance(result, Acted) else Acted(result)


class RecurrentState:
    """A tree of recurrent state on the device, one row per slot and a scratch row for padding.

    A slot's rows are the initial state again at every FIRST record, which every episode and every new life begins with.

    Args:
      ops: the device.
      num_slots: number of slots.
      initial: the state of one slot at the start of an episode: a tree of arrays without a batch axis, usually zeros.

    Attributes:
      tables: tree of (num_slots + 1, ...).
      initial: tree of (...) on the device.
    """

    def __init__(self, ops: DeviceOps, num_slots: int, initial: Any) -> None:
        self._ops = ops
        self.tables = ops.tree_map(lambda leaf: ops.table(leaf, num_slots + 1), initial)
        self.initial = ops.tree_map(lambda leaf: ops.table(leaf, 1)[0], initial)
        self._gather, self._scatter = ops.jit(partial(gather_state, ops)), ops.jit(partial(scatter_state, ops))

    def gather(self, batch: Any) -> Any:
        """The rows of a batch from the adapter, tree of (bucket, ...); the initial state where a record is FIRST."""
        return self._ops.compute(self._gather, self.tables, self.initial, batch.env_indices, batch.is_first)

    def scatter(self, batch: Any, state: Any, slots: Any = None) -> None:
        """Stores the new state of the batch's slots, tree of (bucket, ...).

        Args:
          batch: of the adapter.
          state: as `gather` returned it, or newer.
          slots: of each row, where they are not the batch's; `num_slots` for rows that are to be left out.
        """
        indices = batch.env_indices if slots is None else slots
        self.tables = self._ops.compute(self._scatter, self.tables, indices, state)


def gather_state(ops: DeviceOps, tables: Any, initial: Any, indices: Any, is_first: Any) -> Any:
    """Rows `indices` of state tables, reset where `is_first`; pure, so it can be compiled into a step."""

    def rows(table: Any, start: Any) -> Any:
        mask = is_first.reshape((-1,) + (1,) * (table.ndim - 1))
        return ops.xp.where(mask, start, table[indices])

    return ops.tree_map(rows, tables, initial)


def scatter_state(ops: DeviceOps, tables: Any, indices: Any, state: Any) -> Any:
    """Tables with `state` at rows `indices`.

    Raises:
      ValueError: the state has another structure, shape or kind of numbers than the tables.
    """

    def put(table: Any, rows: Any) -> Any:
        shape = (len(indices), *table.shape[1:])
        if tuple(rows.shape) != shape or (rows.dtype != table.dtype and kind_of(rows.dtype) != kind_of(table.dtype)):
            raise ValueError(
                f"policy: expected a new state like the one given, {_name(table.dtype)} {shape}, found {_show(rows)}"
            )
        return ops.put(table, indices, rows)

    return ops.tree_map(put, tables, state)


def make_inputs(plan: Plan, arrays: Sequence[Any]) -> Inputs:
    """The inputs of a policy out of one device array per field."""
    values = {name: plan.tree_of(name, arrays[span]) for name, span in plan.spans.items()}
    if "step_type" in values:
        values["is_first"] = values["step_type"] == 0
    return Inputs(**values)


def make_step(ops: DeviceOps, plan: Plan, contract: Callable[..., Acted], initial: Any) -> Step:
    """The whole step of a policy, to be called as it is or compiled.

    Returns:
      `step(params, tables, arrays, key) -> (Acted, tables)`. With a state, its rows are gathered from the tables and scattered
      back inside; the `Acted` has the rows that the policy acted from, which is what a learner needs.
    """

    def step(params: Any, tables: Any, arrays: Sequence[Any], key: Any) -> tuple[Acted, Any]:
        inputs = make_inputs(plan, arrays)
        if tables is None:
            acted = contract(params, inputs, None, ops.key(key))
            if acted.state is not None:
                raise TypeError(
                    "policy: expected Acted without a state, since none was given, found one; give what it is when an episode "
                    "begins, e.g. batches.policy(act, state=np.zeros(64, np.float32))"
                )
            return acted, None
        state = gather_state(ops, tables, initial, inputs.env_indices, inputs.is_first)
        acted = contract(params, inputs, state, ops.key(key))
        if acted.state is None:
            raise TypeError("policy: expected Acted(action, state) with the new state, since a state was given, found None")
        return acted._replace(state=state), scatter_state(ops, tables, inputs.env_indices, acted.state)

    return step


def _show(leaf: Any) -> str:
    """Dtype and shape, the same words in every framework."""
    return f"{_name(getattr(leaf, 'dtype', type(leaf).__name__))} {tuple(np.shape(leaf))}"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


class Policy:
    """A policy on a device: called with a batch of the adapter, it returns `Acted`.

    Made by `batches.policy(...)` and `batches.compile(...)`. The recurrent state, if any, advances with each
    call; the rows of records that are released go back to what they were.

    Args:
      ops: the device.
      step: from `make_step`.
      names: the attributes of a batch that the step takes.
      params: weights, on the device; None if the policy has its own.
      state: the recurrent state or None.
      next_key: makes the randomness of one call.
      own: how to read and to load the weights of a policy that has its own, or None.
      params_of: turns what `update` is given into params, or None.
      static_outputs: compiled steps write their results to the same memory at each call.

    Attributes:
      version: of the weights, 0 at first; every batch says with which version it was answered.
      state: the recurrent state, a `RecurrentState` or None.
    """

    def __init__(
        self,
        ops: DeviceOps,
        step: Step,
        names: tuple[str, ...],
        params: Any,
        state: RecurrentState | None,
        next_key: Callable[[], Any],
        own: Own | None = None,
        params_of: Callable[[Any], Any] | None = None,
        static_outputs: bool = False,
    ) -> None:
        self.ops, self._step, self.names, self._params = ops, step, names, params
        self.state, self._next_key, self._own = state, next_key, own
        self._params_of, self._static_outputs = params_of, static_outputs
        self._compiled: dict[int, Step] = {}
        self._pending: tuple[Any, int] | None = None
        self._lock = threading.Lock()
        self.version = 0

    @property
    def params(self) -> Any:
        """The weights in use, on the device; None if the policy has its own."""
        return self._params

    @property
    def newest_version(self) -> int:
        """Of the weights that the next batch is acted on with."""
        pending = self._pending
        return self.version if pending is None else pending[1]

    @property
    def is_compiled(self) -> bool:
        """Whether steps are compiled, one per bucket."""
        return bool(self._compiled)

    def compile(self, examples: dict[int, list[Any]], options: dict[str, Any]) -> None:
        """Compiles one step per bucket: `examples` has padding rows by size."""
        for rows, arrays in examples.items():
            tables = None if self.state is None else self.state.tables
            arguments = (self._params, tables, tuple(arrays), self._next_key())
            self._compiled[rows] = self.ops.compute(self.ops.compile, self._step, arguments, options)

    def update(self, params: Any, version: int | None = None) -> None:
        """Swaps the weights, from any thread; they are copied now and used from the next batch on.

        Args:
          params: like the ones given at first: same tree, shapes and dtypes. For a torch module with its own weights a state
            dict, for a jax module without `params=` such a module.
          version: of the new weights; default one more than the last.

        Raises:
          ValueError: another tree, shape or dtype; the old weights stay.
        """
        version = require_count("version", version, 0, optional=True)
        if self._own is None and self._params is None:
            raise SlotLoaderError("update: this policy was made without params; give them as params=")
        if self._params_of is not None:
            params = self._params_of(params)
        copied = self.ops.snapshot(params)
        self._require_alike(self._params if self._own is None else self._own.read(), copied)
        with self._lock:
            self._pending = (copied, self.newest_version + 1 if version is None else version)

    def _require_alike(self, last: Any, params: Any) -> None:
        def check(old: Any, new: Any) -> None:
            if _show(old) != _show(new):
                wrong.append(f"found {_show(new)} for {_show(old)}")

        wrong: list[str] = []
        try:
            self.ops.tree_map(check, last, params)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"update: expected params of the tree given at first: {error}") from error
        if wrong:
            raise ValueError(f"update: expected params like those given at first, {'; '.join(wrong[:4])}")

    def _swap(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is not None:
                self.version = pending[1]
        if pending is not None:
            params = pending[0]
            if self._own is None:
                self._params = params
            else:
                self.ops.compute(self._own.load, params)

    def __call__(self, batch: Any) -> Acted:
        """Acts on a batch of the adapter.

        Returns:
          The action, for `batch.send`; the extras; and as `state` the state that it acted from, for `Unrolls`.
        """
        return self.act(batch.select(self.names), batch)

    def act(self, arrays: Sequence[Any], batch: Any) -> Acted:
        """Acts on staged arrays and notes the version in the batch."""
        if self._pending is not None:
            self._swap()
        batch.version = self.version
        state = self.state
        tables = None if state is None else state.tables
        step = self._compiled.get(batch.bucket, self._step)
        acted, tables = self.ops.compute(step, self._params, tables, tuple(arrays), self._next_key())
        if state is not None:
            state.tables = tables
        if self._static_outputs:
            acted = self.ops.tree_map(self.ops.own, acted)  # fence
        if state is not None:
            batch.acted_from(state, acted.state)
        return acted  # type: ignore[no-any-return]
