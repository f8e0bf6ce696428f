"""Batches: records gathered out of the table, and the lease that a consumer holds on their slots until it answers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slotloader.batching.buffers import BufferPool
from slotloader.errors import LeaseExpired
from slotloader.records import values
from slotloader.records.specs import Array, Kind, Leaf, Tree, build, leaves
from slotloader.records.step_type import StepType

if TYPE_CHECKING:
    from slotloader.batching.receiver import Receiver
    from slotloader.loader import SlotLoader

_FIRST, _TERMINATION, _TRUNCATION = (
    int(StepType.FIRST),
    int(StepType.TERMINATION),
    int(StepType.TRUNCATION),
)  # numpy is slow with enums
_SMALL_BYTES = 65536  # smaller gathers need no pool


@dataclass(frozen=True)
class Episode:
    """One episode that has ended.

    Attributes:
      slot: its slot.
      life: its env's life.
      index: count within the life, from 0.
      episode_return: sum of rewards; a wrapper's `info["episode"]["r"]` if there is one.
      length: env steps; a wrapper's `info["episode"]["l"]` if there is one.
      seed: seed of its reset, None if it was reset without one.
      interrupted: cut by a failure rather than ended by the env.
      info: the info dict of the last record, sequences as tuples.
      info_dropped: keys of that dict that could not be packed or did not fit.
    """

    slot: int
    life: int
    index: int
    episode_return: float
    length: int
    seed: int | None
    interrupted: bool
    info: dict[str, Any]
    info_dropped: tuple[str, ...] = ()


class BytesColumn:
    """Text, Sequence, Graph or OneOf values of a batch, decoded on access.

    Attributes:
      data: uint8 (B, capacity); bytes beyond a row's length are undefined.
      lengths: uint32 (B,), bytes used in each row.
    """

    def __init__(self, leaf: Leaf, data: Array, lengths: Array) -> None:
        self._leaf = leaf
        self.data = data
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: Any) -> Any:
        """The value of one row; for a slice, a mask or indices a `BytesColumn` of those rows."""
        try:
            row = operator.index(row)
        except TypeError:
            return BytesColumn(self._leaf, self.data[row], self.lengths[row])
        return values.decode(self._leaf, self.data[row, : self.lengths[row]].tobytes())

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def tolist(self) -> list[Any]:
        """Every value, decoded."""
        return list(self)

    def __repr__(self) -> str:
        return f"BytesColumn({len(self)} values of {self._leaf})"


class Gatherer:
    """Copies rows of a tree's columns into buffers that belong to the batch."""

    def __init__(self, tree: Tree, columns: Sequence[Array]) -> None:
        self._tree = tree
        self._leaves = list(leaves(tree))
        self._columns = list(columns)
        self._pools = [BufferPool(column.shape[1:], column.dtype) for column in columns]
        self._single = len(columns) == 1 and isinstance(tree, Leaf)

    def __call__(self, slots: Array) -> Any:
        """Gathers `slots` (int64 (B,)) into a tree of (B, ...) arrays."""
        if self._single:
            return self._take(0, slots)
        arrays = (self._take(at, slots) for at in range(len(self._columns)))
        return build(self._tree, (self._value(leaf, arrays) for leaf in self._leaves))

    def empty(self) -> bool:
        """True for a tree without leaves."""
        return not self._columns

    @staticmethod
    def _value(leaf: Leaf, arrays: Iterator[Array]) -> Any:
        if leaf.kind is Kind.ARRAY:
            return next(arrays)
        return BytesColumn(leaf, next(arrays), next(arrays))

    def _take(self, at: int, slots: Array) -> Array:
        column = self._columns[at]
        if column.ndim == 1:
            return column[slots]
        if slots.size * column.strides[0] < _SMALL_BYTES:
            return column.take(slots, axis=0, mode="clip")  # clip: indices are ours, no bounds check needed
        return np.take(column, slots, axis=0, mode="clip", out=self._pools[at].take(slots.size))


class Batch:
    """Some records and the lease on their slots.

    Rows are ordered by slot. Every array is owned by the batch: what a consumer keeps is never changed. `obs`, `info` and
    `last_action` are gathered when first read, which must be before the answer; the rest is there from the start.

    Attributes:
      env_indices: int64 (B,), the slots, ascending.
      reward: float32 (B,).
      step_type: uint8 (B,), `StepType` of each record.
      episodes: the episodes that failures have cut before these records, then those that these records end, in row order.
      released: the batch was given back by `release`.
      promised: how many of its rows have actions that are on their way from a device.
      before_release: what an adapter does first when the batch is released, until it is answered; says whether to go on.
    """

    __slots__ = (
        "_info", "_last_action", "_left", "_max_get", "_obs", "_open", "_receiver", "_rows", "_sequence", "_serial",
        "_taken_ns", "before_release", "env_indices", "episodes", "promised", "released", "reward", "step_type",
    )  # fmt: skip

    def __init__(
        self,
        receiver: Receiver,
        serial: int,
        max_get: int,
        taken_ns: int,
        env_indices: Array,
        reward: Array,
        step_type: Array,
        episodes: list[Episode],
    ) -> None:
        self._receiver = receiver
        self._serial = serial
        self._max_get = max_get
        self._taken_ns = taken_ns
        self._left = env_indices.size
        self._obs: Any = None
        self._info: Any = None
        self._last_action: Any = None
        self._sequence: Any = None
        self._rows: list[Rows] | None = None
        self._open: Array | None = None  # slots not yet answered, once some have been
        self.released = False
        self.promised = 0
        self.before_release: Callable[[], bool] | None = None
        self.env_indices = env_indices
        self.reward = reward
        self.step_type = step_type
        self.episodes = episodes

    def __len__(self) -> int:
        return self.env_indices.size

    @property
    def loader(self) -> SlotLoader:
        """Whose records these are."""
        return self._receiver.loader

    @property
    def size(self) -> int:
        """Number of records, B."""
        return self.env_indices.size

    @property
    def obs(self) -> Any:
        """Tree of (B, ...) arrays; `BytesColumn` for Text, Sequence, Graph and OneOf. First read before the answer."""
        if self._obs is None:
            self._obs = self._gather("obs", self._receiver.gather_observation)
        return self._obs

    @property
    def info(self) -> dict[str, Any]:
        """Declared info columns, name to (B, ...) array. First read before the answer."""
        if self._info is None:
            self._info = self._gather("info", self._receiver.gather_info)
        return self._info  # type: ignore[no-any-return]

    @property
    def last_action(self) -> Any:
        """The action last sent to each slot, zero before the first; tree of (B, ...). First read before the answer."""
        if self._last_action is None:
            self._last_action = self._gather("last_action", self._receiver.gather_action)
        return self._last_action

    def _gather(self, name: str, gather: Callable[[Array], Any]) -> Any:
        if self._left != self.env_indices.size:
            raise LeaseExpired(
                f"batch.{name} was first read after the batch had been answered, when its slots may hold newer records; "
                f"read batch.{name} before batch.send"
            )
        return gather(self.env_indices)

    @property
    def sequence(self) -> Array:
        """uint64 (B,): how many records each slot had published, with this one; the next record has one more."""
        if self._sequence is None:
            self._sequence = self._gather("sequence", self._receiver.gather_sequence)
        return self._sequence  # type: ignore[no-any-return]

    @property
    def discount(self) -> Array:
        """float32 (B,): 0 for TERMINATION, 1 otherwise."""
        return np.asarray(self.step_type != _TERMINATION, np.float32)

    @property
    def is_first(self) -> Array:
        """Bool (B,): the record starts an episode; its reward is 0."""
        return np.asarray(self.step_type == _FIRST)

    @property
    def terminated(self) -> Array:
        """As bool (B,)."""
        return np.asarray(self.step_type == _TERMINATION)

    @property
    def truncated(self) -> Array:
        """As bool (B,)."""
        return np.asarray(self.step_type == _TRUNCATION)

    @property
    def is_last(self) -> Array:
        """As bool (B,): the episode has ended; the action sent to this record is discarded."""
        return np.asarray(self.step_type >= _TERMINATION)

    @property
    def env_steps(self) -> int:
        """Env steps that the batch brought: its records that are not FIRST."""
        return int(np.count_nonzero(self.step_type))

    @property
    def answered(self) -> bool:
        """True once every row has been sent or released."""
        return self._left == 0

    def send(self, actions: Any) -> None:
        """Answers every record: all or nothing, without a reply.

        Args:
          actions: tree of (B, ...) arrays in row order, by the action space; anything that numpy can read. Rows of last
            records are ignored.

        Raises:
          ActionError: wrong shape, dtype or bounds; no env has stepped and the batch can be answered again.
          LeaseExpired: the batch has been answered already.
        """
        self._receiver.answer(self, actions)

    def release(self) -> None:
        """Gives the slots back without an action; their records are ready again, for this or a later `recv`."""
        if self.before_release is None or self.before_release():
            self._receiver.release(self)

    def open_slots(self) -> Array:
        """Int64 (N,): the slots that have not been answered."""
        return self.env_indices if self._open is None else self._open

    def set_open(self, slots: Array) -> None:
        """Says which slots are still unanswered, after an interrupt; called under the receiver's lock."""
        if slots.size != self._left:
            self._open, self._left = slots, slots.size

    def close_slots(self, answered: Array) -> None:
        """Takes slots out of `open_slots`, bool (N,); called under the receiver's lock."""
        self._open = np.asarray(self.open_slots()[~answered])

    def view(self) -> Rows:
        """Zero copy: a context manager over the whole table's columns, read-only, valid until the answer."""
        rows = Rows(self)
        if self._rows is None:
            self._rows = []
        self._rows.append(rows)
        return rows

    def __repr__(self) -> str:
        state = "answered" if self.answered else f"{self._left} rows unanswered"
        return f"Batch(slots {self.env_indices.tolist()[:16]}{'...' if self.size > 16 else ''}, {state})"


class Rows:
    """The table's own memory, for a consumer that gathers by itself.

    `obs` has the columns of all slots, `(num_slots, ...)`; the batch's records are the rows `indices`. Using this object
    after the answer raises `LeaseExpired`. Arrays taken out of it are the caller's own risk: other rows change at any time,
    these rows after the answer. With `SlotLoader(debug=True)` they are copies that are poisoned at the answer.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch: Batch | None = batch
        self._poison: list[Array] = []
        self._tree: Any = None

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *exc: object) -> None:
        self.expire()

    def _held(self) -> Batch:
        batch = self._batch
        if batch is None or batch._left != batch.size:
            raise LeaseExpired("this view is over: the batch has been answered or its `with` block has ended; use batch.obs")
        return batch

    @property
    def indices(self) -> Array:
        """int64 (B,): the rows that belong to the batch."""
        return self._held().env_indices

    @property
    def obs(self) -> Any:
        """Tree of read-only (num_slots, ...) arrays."""
        receiver = self._held()._receiver
        if self._tree is None:
            self._tree, self._poison = receiver.columns_for_view()
        return self._tree

    def expire(self) -> None:
        """Ends the view; poisons the copies of debug mode."""
        self._batch = None
        for array in self._poison:
            array.view(np.uint8)[...] = 0xAA
        self._poison = []
        self._tree = None


def read_episodes(table: Any, slots: Sequence[int], interrupted: bool = False) -> list[Episode]:
    """The finished episodes of `slots`, read while their last records are leased."""
    episodes = []
    for slot in slots:
        length, row = int(table.info_length[slot]), table.progress[slot]
        info, dropped = values.unpack(table.info_data[slot, :length].tobytes()) if length and not interrupted else ({}, ())
        seed = int(table.episode_seed[slot])
        wrapped = info.get("episode")
        figures = wrapped if isinstance(wrapped, dict) else {}
        episodes.append(
            Episode(
                slot=slot,
                life=int(table.life[slot]),
                index=int(table.episode[slot]),
                episode_return=float(np.asarray(figures.get("r", row["episode_return"])).reshape(-1)[0]),
                length=int(np.asarray(figures.get("l", row["length"])).reshape(-1)[0]),
                seed=None if seed < 0 else seed,
                interrupted=interrupted,
                info=info,
                info_dropped=tuple(dropped),
            )
        )
    return episodes
