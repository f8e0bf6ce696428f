"""Staging: a batch of any size becomes device arrays of one of a few fixed sizes.

Records are gathered from the slots straight into a host buffer, padded with clean rows up to the next bucket, and copied
to the device in one piece. The host buffers of a staged device are a ring: while one is copied, the next is filled.

Lines that end in `# fence` keep an order that the device does not keep by itself; `tests/test_fences.py` takes each
of them away and sees a wrong result.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import field as declare
from typing import Any, NamedTuple

import numpy as np

from slotloader.batches import Batch
from slotloader.buffers import BufferPool
from slotloader.devices import DeviceOps, Stream
from slotloader.errors import SpecMismatch
from slotloader.layout import Layout
from slotloader.slots import Table
from slotloader.specs import Array, Kind, Leaf, Tree, build, leaves, show_path
from slotloader.values import parts

FIELDS = ("obs", "reward", "step_type", "last_action", "info")
_ALIGN = 64
_TAKE_BYTES = 2048  # from this row size on `np.take` is faster than fancy indexing


def checked_buckets(buckets: Sequence[int] | None, max_get: int, divisor: int = 1) -> tuple[int, ...]:
    """The bucket sizes, ascending; powers of two up to `max_get` by default; `()` stays empty: no padding.

    Args:
      buckets: sizes, or None.
      max_get: most rows of a batch; the largest bucket.
      divisor: every bucket must divide by it (the number of devices).

    Raises:
      ValueError: a size is no positive integer, or larger than `max_get`, or does not divide.
    """
    if buckets is None:
        sizes = {max_get} | {1 << bit for bit in range(max_get.bit_length()) if 1 << bit < max_get}
        return tuple(sorted({-(-size // divisor) * divisor for size in sizes}))
    if not isinstance(buckets, Sequence) or isinstance(buckets, str):
        raise TypeError(f"buckets: expected a sequence of sizes, e.g. (8, 32), found {buckets!r}")
    chosen = list(buckets)
    wrong = [size for size in chosen if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1]
    if wrong:
        raise ValueError(f"buckets: expected positive integers, found {wrong[:8]}")
    if chosen and max(chosen) > -(-max_get // divisor) * divisor:
        raise ValueError(
            f"buckets: expected sizes up to max_get={max_get}, found {max(chosen)}; a batch never has more rows than max_get"
        )
    uneven = [size for size in chosen if size % divisor]
    if uneven or (divisor > 1 and not chosen):
        raise ValueError(f"buckets: expected sizes that divide by the {divisor} devices, found {uneven or chosen}")
    return tuple(sorted({int(size) for size in chosen}))


class BytesTensor(NamedTuple):
    """Text, Sequence, Graph or OneOf values of a batch on the device.

    Attributes:
      data: uint8 (bucket, capacity); bytes beyond a row's length are undefined.
      lengths: bytes used in each row, (bucket,); 0 for padding.
    """

    data: Any
    lengths: Any


@dataclass(frozen=True)
class Field:
    """One array that travels.

    Attributes:
      name: of the batch's attribute that it belongs to.
      column: where its rows come from, `(num_slots, ...)`; None if the batch has them gathered already.
      shape: of a row.
      dtype: on the way, and on the device.
      fill: what padding rows hold.
      narrowed: name of the leaf if the device takes fewer bits than it has; every value is checked, then.
    """

    name: str
    column: Array | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: int = 0
    narrowed: str = ""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """Which arrays travel, and how they are put back into trees.

    Attributes:
      fields: the arrays in order; `env_indices` is first.
      spans: for each attribute the part of `fields` that it is made of.
      trees: for each attribute its tree.
    """

    fields: tuple[Field, ...]
    spans: dict[str, slice]
    trees: dict[str, Tree]

    def tree_of(self, name: str, arrays: Sequence[Any]) -> Any:
        """The attribute `name` out of one array per field."""
        found = arrays[self.spans[name]]
        tree = self.trees[name]
        if isinstance(tree, Leaf) and tree.kind is Kind.ARRAY:
            return found[0]
        at = iter(found)
        return build(tree, (next(at) if leaf.kind is Kind.ARRAY else BytesTensor(next(at), next(at)) for leaf in leaves(tree)))


def make_plan(table: Table, ops: DeviceOps, names: Sequence[str] | None, float64: str) -> Plan:
    """Plans what travels.

    Args:
      table: the slot table.
      ops: the device.
      names: of `FIELDS`; None is all.
      float64: "float32" to halve doubles, or "keep".

    Raises:
      ValueError: an unknown name, or a leaf that the device has no dtype for.
    """
    chosen = FIELDS if names is None else tuple(names)
    if isinstance(names, str) or any(name not in FIELDS for name in chosen):
        raise ValueError(f"fields: expected some of {FIELDS}, found {names!r}")
    if float64 not in ("float32", "keep"):
        raise ValueError(f"float64: expected 'float32' or 'keep', found {float64!r}")
    layout: Layout = table.layout
    sources: dict[str, tuple[Tree, Sequence[Array | None]]] = {
        "env_indices": (Leaf(("env_indices",), (), np.dtype(np.int64), high=np.asarray(table.num_slots)), [None]),
        "obs": (layout.observation, table.observation),
        "reward": (Leaf(("reward",), (), np.dtype(np.float32)), [None]),
        "step_type": (Leaf(("step_type",), (), np.dtype(np.uint8)), [None]),
        "last_action": (layout.action, table.action),
        "info": (layout.info, table.info),
    }
    fields: list[Field] = []
    spans: dict[str, slice] = {}
    trees: dict[str, Tree] = {}
    for name, (tree, columns) in sources.items():
        if name != "env_indices" and name not in chosen:
            continue
        begin, at = len(fields), iter(columns)
        for leaf in leaves(tree):
            for _, dtype, shape in parts(leaf):
                found, narrowed = _device_dtype(ops, leaf, dtype, float64)
                fill = table.num_slots if name == "env_indices" else 0  # the scratch row of `SlotState`
                fields.append(Field(name, next(at), shape, found, fill, narrowed))
        spans[name], trees[name] = slice(begin, len(fields)), tree
    return Plan(tuple(fields), spans, trees)


def _device_dtype(ops: DeviceOps, leaf: Leaf, dtype: np.dtype[Any], float64: str) -> tuple[np.dtype[Any], str]:
    """The dtype of a leaf on the device, and its name if its values must be checked, since they may not fit."""
    if dtype == np.float64 and float64 == "float32":
        dtype = np.dtype(np.float32)
    try:
        found = ops.dtype(dtype)
    except ValueError as error:
        raise ValueError(f"{show_path(leaf.path)}: {error}; leave it out with fields=, or declare another dtype") from error
    if found == dtype or dtype.kind not in "iu" or leaf.kind is not Kind.ARRAY or leaf.path == ("env_indices",):
        return found, ""
    bounds = np.iinfo(found)
    fits = leaf.low is not None and leaf.high is not None and np.min(leaf.low) >= bounds.min and np.max(leaf.high) <= bounds.max
    return found, "" if fits else show_path(leaf.path)


def _require_fitting(field: Field, values: Array) -> None:
    bounds = np.iinfo(field.dtype)
    wrong = values[(values < bounds.min) | (values > bounds.max)]
    if wrong.size:
        raise SpecMismatch(
            f"{field.narrowed}: expected integers that the device holds as {field.dtype}, found {wrong[0]}; leave it out with "
            "fields=, or for jax set jax_enable_x64"
        )


class BufferLayout(NamedTuple):
    """Where the fields of one bucket lie in a buffer: bytes in all; offset, dtype and shape of each."""

    nbytes: int
    places: tuple[tuple[int, np.dtype[Any], tuple[int, ...]], ...]


@dataclass
class Stage:
    """One host buffer of the ring.

    Attributes:
      memory: uint8, enough for the largest bucket.
      views: for each size that was used, its bytes and one array per field over them.
      copied: event after which the memory may be written again.
    """

    memory: Array
    views: dict[int, tuple[Array, list[Array]]] = declare(default_factory=dict)
    copied: Any = None


class Staged(NamedTuple):
    """The arrays of one batch: on the device, or (hidden) still in the stage, which is theirs until `Staging.give_back`."""

    arrays: list[Any]
    stage: Stage | None


class Staging:
    """Gathers, pads and copies batches; used by one thread, `give_back` by any.

    Args:
      ops: the device.
      plan: what travels.
      buckets: sizes, ascending; empty for no padding.
      max_get: most rows of a batch.
      depth: number of host buffers in the ring.
    """

    def __init__(self, ops: DeviceOps, plan: Plan, buckets: tuple[int, ...], max_get: int, depth: int) -> None:
        self._ops, self._plan, self._buckets = ops, plan, buckets
        self._largest = buckets[-1] if buckets else max_get
        self._smallest = [next(b for b in buckets if b >= size) for size in range(1, self._largest + 1)] if buckets else []
        self._pool = BufferPool((), np.dtype(np.uint8))
        self._layouts: dict[int, BufferLayout] = {}
        # Per field: its name in the batch, or its column and whether `np.take` is the quicker way to its rows.
        self._sources = [
            (
                field.name,
                field.column,
                field.column is not None and field.column.dtype == field.dtype and field.row_bytes >= _TAKE_BYTES,
                field,
            )
            for field in plan.fields
        ]
        self._free: queue.SimpleQueue[Stage] = queue.SimpleQueue()
        if ops.staged or ops.hidden:
            nbytes = self._layout(self._largest).nbytes
            for _ in range(depth):
                self._free.put(Stage(ops.host_buffer(nbytes)))

    def bucket_of(self, size: int) -> int:
        """The smallest bucket for `size` rows."""
        return self._smallest[size - 1] if self._smallest else size

    def _layout(self, rows: int) -> BufferLayout:
        """Where each field lies in a buffer for `rows` rows; computed once."""
        if rows not in self._layouts:
            places, end = [], 0
            for field in self._plan.fields:
                places.append((end, field.dtype, (rows, *field.shape)))
                end += -(-rows * field.row_bytes // _ALIGN) * _ALIGN
            self._layouts[rows] = BufferLayout(end, tuple(places))
        return self._layouts[rows]

    def _view(self, memory: Array, rows: int) -> list[Array]:
        return [np.ndarray(shape, dtype, memory, offset) for offset, dtype, shape in self._layout(rows).places]

    def put(self, batch: Batch, hidden: bool = False) -> Staged:
        """Stages a batch whose slots are leased.

        Args:
          batch: the batch.
          hidden: leave the arrays in the stage, for a policy that takes them from there.
        """
        rows = self.bucket_of(batch.size)
        ops = self._ops
        if not (hidden or ops.staged):
            memory = self._pool.take(self._layout(rows).nbytes)
            views = self._view(memory, rows)
            self._fill(batch, views)
            return Staged(ops.h2d(memory, views), None)
        stage = self._free.get()
        try:
            if stage.copied is not None:
                ops.host_wait(stage.copied)  # fence
                stage.copied = None
            if rows not in stage.views:
                stage.views[rows] = stage.memory[: self._layout(rows).nbytes], self._view(stage.memory, rows)
            memory, views = stage.views[rows]
            self._fill(batch, views)
            if hidden:
                return Staged(list(views), stage)
            arrays = ops.h2d(memory, views)
            stage.copied = ops.record(Stream.H2D)
        except BaseException:
            self._free.put(stage)
            raise
        self._free.put(stage)
        ops.wait(Stream.COMPUTE, stage.copied)  # fence
        ops.shared(arrays, Stream.COMPUTE)  # fence
        return Staged(arrays, None)

    def give_back(self, stage: Stage) -> None:
        """The stage of a hidden batch may be written again."""
        self._free.put(stage)

    def _fill(self, batch: Batch, views: Sequence[Array]) -> None:
        size, slots = batch.size, batch.env_indices
        padded = size < len(views[0])
        for (name, column, takes, field), view in zip(self._sources, views, strict=True):
            rows = view[:size] if padded else view
            if column is None:
                rows[...] = getattr(batch, name)
            elif takes:
                np.take(column, slots, axis=0, mode="clip", out=rows)
            else:
                found = column[slots]
                if field.narrowed:
                    _require_fitting(field, found)
                rows[...] = found
            if padded:
                view[size:] = field.fill  # fence

    def examples(self, rows: int) -> list[Array]:
        """Host arrays of `rows` padding rows, to compile with."""
        return [np.full((rows, *field.shape), field.fill, field.dtype) for field in self._plan.fields]

    def sizes(self) -> Iterator[int]:
        """Every size that a policy will see, without padding all up to `max_get`."""
        return iter(self._buckets or range(1, self._largest + 1))
