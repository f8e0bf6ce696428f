"""Staging: a batch of any size becomes device arrays of one of a few fixed sizes.

Records are gathered from the slots straight into a host buffer, padded with clean rows up to the next bucket, and copied
to the device in one piece. The host buffers of a staged device are a ring: while one is copied, the next is filled.

Lines that end in `# fence` keep an order that the device does not keep by itself; `tests/test_fences.py` takes each
of them away and sees a wrong result.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import field as declare
from typing import Any, NamedTuple

import numpy as np

from slotloader.arguments import is_integer
from slotloader.batching.batches import Batch
from slotloader.batching.buffers import BufferPool
from slotloader.device.ops import DeviceOps, Stream
from slotloader.errors import SpecMismatch
from slotloader.records.specs import Array, Kind, Leaf, Tree, build, leaves, show_path
from slotloader.records.values import parts
from slotloader.table.layout import Layout
from slotloader.table.slots import Table

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
    wrong = [size for size in chosen if not is_integer(size) or size < 1]
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
      lengths: int32 (bucket,), bytes used in each row; 0 for padding.
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

    def part(self, names: Sequence[str]) -> Plan:
        """The plan of some attributes only, in the order of `names`."""
        fields: list[Field] = []
        spans = {}
        for name in names:
            own = self.fields[self.spans[name]]
            spans[name] = slice(len(fields), len(fields) + len(own))
            fields.extend(own)
        return Plan(tuple(fields), spans, {name: self.trees[name] for name in names})

    def tree_of(self, name: str, found: Sequence[Any]) -> Any:
        """The attribute `name` out of its arrays, one per field."""
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
    listed = names is None or (isinstance(names, Iterable) and not isinstance(names, str))
    chosen = FIELDS if names is None or not listed else tuple(names)
    if not listed or any(name not in FIELDS for name in chosen):
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
                if leaf.kind is not Kind.ARRAY and dtype == np.uint32:
                    dtype = np.dtype(np.int32)  # lengths: torch can do little with unsigned numbers
                found, narrowed = _device_dtype(ops, leaf, dtype, float64)
                fill = table.num_slots if name == "env_indices" else 0  # the scratch row of `RecurrentState`
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
    """Where some fields lie in a buffer for some rows: bytes in all; offset, dtype and shape of each."""

    nbytes: int
    places: tuple[tuple[int, np.dtype[Any], tuple[int, ...]], ...]

    def views(self, memory: Array, start: int = 0) -> list[Array]:
        """One array per field over the buffer, from byte `start` on."""
        return [np.ndarray(shape, dtype, memory, start + offset) for offset, dtype, shape in self.places]


def lay_out(fields: Sequence[Field], rows: int) -> BufferLayout:
    """Each field at a multiple of 64 bytes."""
    places, end = [], 0
    for field in fields:
        places.append((end, field.dtype, (rows, *field.shape)))
        end += -(-rows * field.row_bytes // _ALIGN) * _ALIGN
    return BufferLayout(end, tuple(places))


class _Part:
    """Some fields that travel together: where they come from, and where they lie in a buffer."""

    def __init__(self, plan: Plan) -> None:
        self.fields = plan.fields
        # Per field: its name in the batch, or its column and whether `np.take` is the quicker way to its rows.
        self.sources = [
            (
                field.name,
                field.column,
                field.column is not None and field.column.dtype == field.dtype and field.row_bytes >= _TAKE_BYTES,
                field,
            )
            for field in plan.fields
        ]
        self._layouts: dict[int, BufferLayout] = {}

    def layout(self, rows: int) -> BufferLayout:
        """Computed once."""
        if rows not in self._layouts:
            self._layouts[rows] = lay_out(self.fields, rows)
        return self._layouts[rows]


@dataclass
class Stage:
    """One host buffer of the ring.

    Attributes:
      memory: uint8, enough for the largest bucket.
      views: for the names and the size that were used, the bytes and one array per field over them.
      copied: event after which the memory may be written again.
    """

    memory: Array
    views: dict[tuple[Any, int], tuple[Array, list[Array]]] = declare(default_factory=dict)
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
        self._parts: dict[tuple[str, ...], _Part] = {}
        self._free: queue.SimpleQueue[Stage] = queue.SimpleQueue()
        if ops.staged or ops.hidden:
            nbytes = lay_out(plan.fields, self._largest).nbytes
            for _ in range(depth):
                self._free.put(Stage(ops.host_buffer(nbytes)))

    def bucket_of(self, size: int) -> int:
        """The smallest bucket for `size` rows."""
        return self._smallest[size - 1] if self._smallest else size

    def put(self, batch: Batch, names: tuple[str, ...], hidden: bool = False) -> Staged:
        """Stages some attributes of a batch whose slots are leased.

        Args:
          batch: the batch.
          names: the attributes, of the plan.
          hidden: leave the arrays in the stage, for a policy that takes them from there.
        """
        rows, ops = self.bucket_of(batch.size), self._ops
        part = self._parts.get(names)
        if part is None:
            part = self._parts[names] = _Part(self._plan.part(names))
        layout = part.layout(rows)
        if not (hidden or ops.staged):
            memory = self._pool.take(layout.nbytes + _ALIGN)
            views = layout.views(memory, -memory.ctypes.data % _ALIGN)
            self._fill(batch, part, views)
            return Staged(ops.h2d(memory, views), None)
        stage = self._free.get()
        try:
            if stage.copied is not None:
                ops.host_wait(stage.copied)  # fence
                stage.copied = None
            if (names, rows) not in stage.views:
                stage.views[names, rows] = stage.memory[: layout.nbytes], layout.views(stage.memory)
            memory, views = stage.views[names, rows]
            self._fill(batch, part, views)
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

    @staticmethod
    def _fill(batch: Batch, part: _Part, views: Sequence[Array]) -> None:
        size, slots = batch.size, batch.env_indices
        padded = bool(views) and size < len(views[0])
        for (name, column, takes, field), view in zip(part.sources, views, strict=True):
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

    def examples(self, rows: int, names: Sequence[str]) -> tuple[Array, list[Array]]:
        """A host buffer of its own with `rows` padding rows of some attributes, and the arrays over it."""
        fields = self._plan.part(names).fields
        layout = lay_out(fields, rows)
        memory = self._ops.host_buffer(layout.nbytes)
        views = layout.views(memory)
        for field, view in zip(fields, views, strict=True):
            view[...] = field.fill
        return memory, views

    def sizes(self) -> Iterator[int]:
        """Every size that a policy will see, without padding all up to `max_get`."""
        return iter(self._buckets or range(1, self._largest + 1))
