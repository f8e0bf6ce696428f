"""What is done to observations on the device before a policy sees them: narrower floats and stacked frames."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from slotloader.arguments import is_integer
from slotloader.device.ops import DeviceOps
from slotloader.device.staging import Plan
from slotloader.records.specs import Kind, Leaf, leaves, show_path

FrameStack = int | Mapping[Any, int]


class Prepared(NamedTuple):
    """The observation of one batch, as a policy gets it.

    Attributes:
      obs: its arrays.
      commit: called before the slots get their actions.
      undo: called if they do not after all. Both take the rows' slots, with the scratch row for those that are not meant.
    """

    obs: list[Any]
    commit: Callable[..., None]
    undo: Callable[..., None]


class Preparation:
    """Casts float leaves and stacks the last frames of each slot, so that only the newest frame travels.

    A stack is `(k, *shape)` per slot, oldest frame first; at a FIRST record it is that frame k times.

    Args:
      ops: the device.
      plan: what travels.
      num_slots: number of slots.
      dtype: for float leaves of the observation, or None.
      frame_stack: number of frames, for the only leaf or by key (a tuple of keys for a nested one), or None.

    Raises:
      ValueError: an unknown key, or no number of frames.
    """

    def __init__(self, ops: DeviceOps, plan: Plan, num_slots: int, dtype: Any, frame_stack: FrameStack | None) -> None:
        self._ops = ops
        span = plan.spans.get("obs", slice(0, 0))
        fields = plan.fields[span]
        kinds = (
            [leaf for leaf in leaves(plan.trees["obs"]) for _ in range(1 if leaf.kind is Kind.ARRAY else 2)] if fields else []
        )
        wanted = _frames_by_leaf(kinds, frame_stack)
        self._casts = [at for at, field in enumerate(fields) if dtype is not None and np.issubdtype(field.dtype, np.floating)]
        self._stacked = [at for at in range(len(fields)) if wanted[at]]
        self.needed = bool(self._casts or self._stacked)
        if self._stacked and "step_type" not in plan.spans:
            raise ValueError("frame_stack: expected 'step_type' among fields=, since a FIRST record begins a new stack")
        self._tables: list[Any] = []
        self._lock = threading.Lock()  # the consumer stores, and a batch that failed is undone by the completion thread
        for at in self._stacked:
            row = np.zeros((wanted[at], *fields[at].shape), fields[at].dtype)
            table = ops.table(row, num_slots + 1)
            self._tables.append(ops.cast(table, dtype) if at in self._casts else table)
        self._dtype = dtype
        if dtype is not None:
            try:
                keeps = float(ops.cast(ops.table(np.float32(0.5), 1), dtype)[0]) == 0.5
            except (TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"dtype: expected a float dtype of the framework or its name, found {dtype!r}") from error
            if not keeps:
                raise ValueError(f"dtype: expected a float dtype of the framework or its name, found {dtype!r}")
        self._prepare, self._store = ops.jit(self._step), ops.jit(self._put)

    def _step(self, tables: Sequence[Any], arrays: Sequence[Any], indices: Any, step_type: Any) -> tuple[list[Any], list[Any]]:
        """The prepared arrays, and the stacks as they were."""
        found = list(arrays)
        stored = []
        for at in self._casts:
            found[at] = self._ops.cast(found[at], self._dtype)
        xp = self._ops.xp
        for at, table in zip(self._stacked, tables, strict=True):
            newest = found[at][:, None]
            is_first = (step_type == 0).reshape((-1,) + (1,) * (table.ndim - 1))
            stored.append(table[indices])
            found[at] = xp.where(is_first, newest, xp.concatenate((stored[-1][:, 1:], newest), 1))
        return found, stored

    def _put(self, tables: Sequence[Any], indices: Any, stacks: Sequence[Any]) -> list[Any]:
        return [self._ops.put(table, indices, stack) for table, stack in zip(tables, stacks, strict=True)]

    @property
    def names(self) -> tuple[str, ...]:
        """The attributes of a batch that it takes, in this order."""
        return ("obs", "env_indices", "step_type") if self._stacked else ("obs", "env_indices")

    def __call__(self, arrays: Sequence[Any]) -> Prepared:
        """Prepares one batch.

        Args:
          arrays: of `names`.

        Returns:
          See `Prepared`. A record that is given back comes again and must not be pushed twice.
        """
        if self._stacked:
            *obs, indices, step_type = arrays
        else:
            (*obs, indices), step_type = arrays, None
        prepared, last = self._ops.compute(self._prepare, self._tables, tuple(obs), indices, step_type)
        stacks = [prepared[at] for at in self._stacked]

        def store(rows: Sequence[Any], slots: Any = None) -> None:
            if self._stacked:
                with self._lock:
                    self._tables = self._ops.compute(self._store, self._tables, indices if slots is None else slots, rows)

        return Prepared(list(prepared), partial(store, stacks), partial(store, last))


def _frames_by_leaf(kinds: Sequence[Leaf], frame_stack: FrameStack | None) -> list[int]:
    """For each array of the observation its number of frames, 0 for none."""
    if frame_stack is None:
        return [0] * len(kinds)
    names = [leaf.path[1:] for leaf in kinds]
    if not isinstance(frame_stack, Mapping):
        if len(kinds) != 1:
            keys = ", ".join(show_path(leaf.path) for leaf in kinds)
            raise ValueError(
                f"frame_stack: expected a number for each key to stack, e.g. {{'cam': 4}}, found {frame_stack!r} for {keys}"
            )
        frame_stack = {names[0]: frame_stack}
    asked = {key if isinstance(key, tuple) else (key,): count for key, count in frame_stack.items()}
    unknown = [key for key in asked if key not in names]
    unknown += [leaf.path[1:] for leaf in kinds if leaf.kind is not Kind.ARRAY and leaf.path[1:] in asked]
    wrong = [count for count in asked.values() if not is_integer(count) or count < 1]
    if unknown or wrong:
        arrays = [leaf.path[1:] for leaf in kinds if leaf.kind is Kind.ARRAY]
        raise ValueError(f"frame_stack: expected keys of {arrays} and numbers of at least 1, found {unknown or wrong}")
    return [asked.get(name, 0) if leaf.kind is Kind.ARRAY else 0 for name, leaf in zip(names, kinds, strict=True)]
