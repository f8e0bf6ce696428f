"""Batches: records gathered out of the table, and the lease that a consumer holds on their slots until it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from slotloader.batching.episodes import Episode
from slotloader.errors import LeaseExpired
from slotloader.records.specs import Array
from slotloader.records.step_type import StepType

if TYPE_CHECKING:
    from slotloader.batching.exchange import Exchange
    from slotloader.batching.leases import Leases

_FIRST, _TERMINATION, _TRUNCATION = (
    int(StepType.FIRST),
    int(StepType.TERMINATION),
    int(StepType.TRUNCATION),
)  # numpy is slow with enums


class Holder(Protocol):
    """What an adapter holds of a batch."""

    def give_back(self) -> bool:
        """Lets go of it, first of all when the batch is released; says whether to go on."""


class Batch:
    """Some records and the lease on their slots.

    Rows are ordered by slot. Every array is owned by the batch: what a consumer keeps is never changed. `obs`, `info` and
    `last_action` are gathered when first read, which must be before the answer; the rest is there from the start.

    Attributes:
      env_indices: int64 (B,), the slots, ascending.
      reward: float32 (B,).
      step_type: uint8 (B,), `StepType` of each record.
      episodes: the episodes that failures have cut before these records, then those that these records end, in row order.
      max_get: most records that it could have had.
      taken_ns: when it was handed out, monotonic ns.
      left: how many of its rows are unanswered.
      released: the batch was given back by `release`.
      promised: how many of its rows have actions that are on their way from a device.
      holder: who else has something that belongs to the batch, until it is answered.
    """

    holder: Holder | None = None
    promised = 0
    released = False
    left = 0
    _obs: Any = None
    _info: Any = None
    _last_action: Any = None
    _sequence: Any = None
    _views: list[Rows] | None = None
    _open: Array | None = None  # slots not yet answered, once some have been

    def __init__(
        self, leases: Leases, max_get: int, taken_ns: int, env_indices: Array, reward: Array, step_type: Array,
        episodes: list[Episode],
    ) -> None:  # fmt: skip
        self._leases, self.max_get, self.taken_ns = leases, max_get, taken_ns
        self.left = env_indices.size
        self.env_indices = env_indices
        self.reward = reward
        self.step_type = step_type
        self.episodes = episodes

    def __len__(self) -> int:
        return self.env_indices.size

    @property
    def exchange(self) -> Exchange:
        """Whose records these are: one object for all batches of a loader."""
        return self._leases.exchange

    @property
    def size(self) -> int:
        """Number of records, B."""
        return self.env_indices.size

    @property
    def obs(self) -> Any:
        """Tree of (B, ...) arrays; `BytesColumn` for Text, Sequence, Graph and OneOf. First read before the answer."""
        if self._obs is None:
            self._obs = self._gather("obs", self.exchange.observation)
        return self._obs

    @property
    def info(self) -> dict[str, Any]:
        """Declared info columns, name to (B, ...) array. First read before the answer."""
        if self._info is None:
            self._info = self._gather("info", self.exchange.info)
        return self._info  # type: ignore[no-any-return]

    @property
    def last_action(self) -> Any:
        """The action last sent to each slot, zero before the first; tree of (B, ...). First read before the answer."""
        if self._last_action is None:
            self._last_action = self._gather("last_action", self.exchange.action)
        return self._last_action

    def _gather(self, name: str, gather: Callable[[Array], Any]) -> Any:
        if self.left != self.env_indices.size:
            raise LeaseExpired(
                f"batch.{name} was first read after the batch had been answered, when its slots may hold newer records; "
                f"read batch.{name} before batch.send"
            )
        return gather(self.env_indices)

    @property
    def sequence(self) -> Array:
        """uint64 (B,): how many records each slot had published, with this one; the next record has one more."""
        if self._sequence is None:
            self._sequence = self._gather("sequence", self.exchange.sequence)
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
        return self.left == 0

    def send(self, actions: Any) -> None:
        """Answers every record: all or nothing, without a reply.

        Args:
          actions: tree of (B, ...) arrays in row order, by the action space; anything that numpy can read. Rows of last
            records are ignored.

        Raises:
          ActionError: wrong shape, dtype or bounds; no env has stepped and the batch can be answered again.
          LeaseExpired: the batch has been answered already.
        """
        self._leases.answer(self, actions)

    def release(self) -> None:
        """Gives the slots back without an action; their records are ready again, for this or a later `recv`."""
        if self.holder is None or self.holder.give_back():
            self._leases.release(self)

    def open_slots(self) -> Array:
        """Int64 (N,): the slots that have not been answered."""
        if self._open is not None:
            return self._open
        return self.env_indices if self.left else self.env_indices[:0]

    def leave_open(self, slots: Array) -> None:
        """Says which slots are still unanswered; called by `Leases`, under its lock."""
        self._open, self.left = slots, slots.size
        self.expire_views()

    def close(self) -> None:
        """Every row has been answered or released; called by `Leases`, under its lock."""
        self._open, self.left = None, 0
        self.holder = None
        self.expire_views()

    def expire_views(self) -> None:
        """Ends what `view` has handed out."""
        if self._views:
            for view in self._views:
                view.expire()
            self._views = None

    def view(self) -> Rows:
        """Zero copy: a context manager over the whole table's columns, read-only, valid until the answer."""
        rows = Rows(self)
        if self._views is None:
            self._views = []
        self._views.append(rows)
        return rows

    def __repr__(self) -> str:
        state = "answered" if self.answered else f"{self.left} rows unanswered"
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
        if batch is None or batch.left != batch.size:
            raise LeaseExpired("this view is over: the batch has been answered or its `with` block has ended; use batch.obs")
        return batch

    @property
    def indices(self) -> Array:
        """int64 (B,): the rows that belong to the batch."""
        return self._held().env_indices

    @property
    def obs(self) -> Any:
        """Tree of read-only (num_slots, ...) arrays."""
        exchange = self._held().exchange
        if self._tree is None:
            self._tree, self._poison = exchange.observation.over_the_table(copied=exchange.debug)
        return self._tree

    def expire(self) -> None:
        """Ends the view; poisons the copies of debug mode."""
        self._batch = None
        for array in self._poison:
            array.view(np.uint8)[...] = 0xAA
        self._poison = []
        self._tree = None
