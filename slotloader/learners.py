"""From records to learning: transitions for replay, and unrolls of fixed length, out of slots that each have their own pace.

Both take every batch that is received, in any loop, and put a slot's records together again. Two records of a slot belong
together if the second is no FIRST and nothing came between (`Batch.sequence`); so episodes, interruptions, new lives
and batches that were left out all end a trajectory where it ends. A record that was given back and comes again takes the
place of its former self.

The records live in a history on the device that the batches come from: numpy for the loader's own batches and `to_numpy`,
else tensors that never leave it. What is computed here about them (where they lie, what belongs together, n-step returns)
is numpy on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from slotloader.arguments import require_count
from slotloader.batches import Batch, BytesColumn
from slotloader.devices import DeviceOps, HostOps, map_tree
from slotloader.loader import SlotLoader
from slotloader.receiver import Receiver
from slotloader.slots import StepType
from slotloader.specs import Array, Kind, Leaf, build, flatten, leaves, show_path
from slotloader.staging import BytesTensor

if TYPE_CHECKING:
    from slotloader.device_batch import DeviceBatch
    from slotloader.device_batches import DeviceBatches

Source: TypeAlias = "SlotLoader | Receiver | DeviceBatches"


class Transition(NamedTuple):
    """Transitions of n or fewer steps; arrays of N rows, on the device of the batches.

    The target of a value is `reward + discount * value(next_obs)`, also at the end of an episode and where one was cut.

    Attributes:
      obs: tree of (N, ...), where it begins.
      action: tree of (N, ...), sent then.
      reward: float32 (N,), the discounted sum of the rewards on the way.
      discount: float32 (N,): gamma to the number of steps, 0 after a termination.
      next_obs: tree of (N, ...), where it ends.
      extras: what was given with the action, tree of (N, ...).
      valid: bool (N,): False for padding rows, which only jax gets, at the end.
      slots: int64 (N,) of numpy, without padding.
      versions: int64 (N,) of numpy, of the policy that acted, -1 if unknown; without padding.
    """

    obs: Any
    action: Any
    reward: Any
    discount: Any
    next_obs: Any
    extras: Any
    valid: Any
    slots: Array
    versions: Array

    @property
    def size(self) -> int:
        """How many transitions these are."""
        return len(self.slots)


class Unroll(NamedTuple):
    """B unrolls of T transitions: T + 1 records of one slot each, time-major, on the device of the batches.

    Transition t begins at record t: it has `obs[t]`, `action[t]`, `reward[t + 1]`, `discount[t + 1]` and ends at `obs[t + 1]`.
    It exists where `valid[t]`; elsewhere record t is the last of an episode or was cut off from record t + 1.

    Attributes:
      obs: tree of (T + 1, B, ...).
      action: tree of (T + 1, B, ...), the action sent to each record.
      reward: float32 (T + 1, B).
      discount: float32 (T + 1, B): 0 for a TERMINATION record, 1 otherwise; no gamma.
      step_type: uint8 (T + 1, B).
      is_first: bool (T + 1, B): where a recurrent state begins anew.
      valid: bool (T, B).
      extras: what was given with the actions, tree of (T + 1, B, ...).
      initial_state: what was given as state with record 0, tree of (B, ...), or None.
      versions: int64 (T + 1, B) of numpy, of the policy that acted on each record, -1 if unknown.
      slots: int64 (B,) of numpy.
    """

    obs: Any
    action: Any
    reward: Any
    discount: Any
    step_type: Any
    is_first: Any
    valid: Any
    extras: Any
    initial_state: Any
    versions: Array
    slots: Array


def _flatten(tree: Any, found: list[Any]) -> list[Any]:
    """The leaves of dicts, tuples and lists in order, appended to `found`."""
    if isinstance(tree, dict):
        for child in tree.values():
            _flatten(child, found)
    elif isinstance(tree, (tuple, list)):
        for child in tree:
            _flatten(child, found)
    elif tree is not None:
        found.append(tree)
    return found


class _History:
    """A table of `rows` records on the device and a scratch row for padding; its leaves are made with the first record."""

    def __init__(self, ops: DeviceOps, rows: int) -> None:
        self._ops, self._rows, self._scratch = ops, rows + 1, rows
        self._tables: list[Any] = []
        self._template: Any = None
        self._store = ops.jit(self._put, donate=(0,))

    def _put(self, tables: Sequence[Any], at: Any, leaves: Sequence[Any]) -> list[Any]:
        return [self._ops.put(table, at[: len(rows)], rows) for table, rows in zip(tables, leaves, strict=True)]

    def write(self, at: Array, records: Any) -> None:
        """Stores a tree of (N, ...) at rows `at`; more rows than those are padding."""
        ops, found = self._ops, _flatten(records, [])
        if not self._tables:
            self._tables = [ops.compute(ops.table, leaf[0], self._rows) for leaf in found]
            self._template = records
        if len(found) != len(self._tables):
            raise ValueError(
                f"add: expected {len(self._tables)} arrays of observations, actions, extras and state, as in the first batch, "
                f"found {len(found)}"
            )
        most = max(map(len, found))
        if most > len(at):
            padded = np.full(most, self._scratch, np.int64)
            padded[: len(at)] = at
            at = padded
        self._tables = ops.compute(self._store, self._tables, ops.array(at), found)

    def tree(self, tables: Sequence[Any]) -> Any:
        """What `write` was given first, with the tables as leaves."""
        found = iter(tables)
        return map_tree(lambda leaf: next(found), self._template)

    def read(self, function: Callable[..., Any], at: Array, *arrays: Array) -> Any:
        """`function(tables, at, *arrays)` on the device."""
        ops = self._ops
        return ops.compute(function, self._tables, ops.array(at), *(ops.array(array) for array in arrays))


def _rows_of(tables: Any, at: Any) -> Any:
    return map_tree(lambda table: table[at], tables)


def _ops_of(source: Source) -> tuple[DeviceOps, int]:
    if isinstance(source, (SlotLoader, Receiver)):
        return HostOps(), source.receiver.loader.num_slots
    if hasattr(source, "ops") and hasattr(source, "receiver"):
        return source.ops, source.table_slots
    raise TypeError(f"loader: expected a SlotLoader, a receiver of loader.split or an adapter, found {source!r:.200}")


def _host(batch: Batch | DeviceBatch) -> Batch:
    return batch if isinstance(batch, Batch) else batch.host


class _Assembler:
    """What `Transitions` and `Unrolls` share: the history and where each slot is in it."""

    def __init__(self, source: Source, length: int) -> None:
        self._ops, slots = _ops_of(source)
        self._of_loader = isinstance(source, (SlotLoader, Receiver))
        self._length = length  # records that are kept per slot
        self._history = _History(self._ops, slots * length)
        self._action = source.receiver.loader.table.layout.action
        wrong = [leaf for leaf in leaves(self._action) if leaf.kind is not Kind.ARRAY]
        if wrong:
            raise TypeError(f"{show_path(wrong[0].path)}: expected actions of numbers, found {wrong[0]}")
        self._sequence = np.full(
            slots, 1 << 63, np.uint64
        )  # of each slot's newest record; nothing comes near this before the first
        self._newest = np.full(slots, -1, np.int64)  # its place in the slot's ring; -1 before the first
        self._versions = np.full((slots, length), -1, np.int64)

    def _rows(self, slots: Array, places: Array) -> Array:
        return slots * self._length + places

    def _begin(self, batch: Batch | DeviceBatch, version: int | None) -> tuple[Batch, Array, Array]:
        """Takes the batch's records into account.

        Returns:
          The core's batch; bool (B,) whether each record follows the slot's newest; bool (B,) whether it is the newest again.
        """
        host = _host(batch)
        if isinstance(batch, Batch) is not self._of_loader or getattr(batch, "ops", self._ops) is not self._ops:
            made_for = "the loader" if self._of_loader else "the adapter that this was made for"
            raise TypeError(f"add: expected a batch of {made_for}, found {batch!r:.200}")
        slots = host.env_indices
        ahead, newest = host.sequence - self._sequence[slots], self._newest[slots]
        follows = (ahead == 1) & (host.step_type != _FIRST)
        again = ahead == 0
        self._sequence[slots] = host.sequence
        newest += ~again
        newest[newest == self._length] = 0
        self._newest[slots] = newest
        self._versions[slots, newest] = -1 if version is None else version
        return host, follows, again

    def are_new(self, batch: Batch | DeviceBatch) -> Array:
        """Bool (B,): records that have not been added yet; the others were given back and come again."""
        host = _host(batch)
        return np.asarray(host.sequence != self._sequence[host.env_indices])

    def _keep(self, batch: Batch | DeviceBatch, host: Batch, action: Any, **more: Any) -> None:
        """Writes the records of a batch, with what came with its actions."""
        adapt = self._ops.adapt
        if isinstance(self._action, Leaf):
            action = adapt(action)
        else:
            action = build(self._action, (adapt(part) for part in flatten(self._action, action, ("action",))))
        records = {"obs": _plain(batch.obs), "action": action}
        for name, value in more.items():
            records[name] = map_tree(adapt, value)
        slots = host.env_indices
        self._history.write(self._rows(slots, self._newest[slots]), records)


def _plain(obs: Any) -> Any:
    """Arrays for what is encoded."""
    if isinstance(obs, np.ndarray):
        return obs
    return map_tree(lambda leaf: BytesTensor(leaf.data, leaf.lengths) if isinstance(leaf, BytesColumn) else leaf, obs)


_BEGUN = (0.0, 0.0, 1.0)  # age, return and weight of a transition that begins
_FIRST, _TERMINATION = int(StepType.FIRST), int(StepType.TERMINATION)  # numpy is slow with enums


class Transitions(_Assembler):
    """Puts transitions together, for replay.

        transitions = Transitions(loader, n_step=3, gamma=0.99)
        for batch in loader:
            actions = policy(batch.obs)
            replay.extend(transitions.add(batch, actions))
            batch.send(actions)

    The n-step return follows Sutton and Barto, "Reinforcement Learning", 2nd ed., section 7.1. Where the episode ends its
    last transitions are shorter; where it was cut they bootstrap from the last observation that there is.

    Args:
      loader: whose batches come: a loader, a receiver of `split`, or an adapter.
      n_step: most steps of a transition.
      gamma: discount per step.
    """

    def __init__(self, loader: Source, n_step: int = 1, gamma: float = 0.99) -> None:
        n_step = require_count("n_step", n_step)
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma: expected 0 to 1, found {gamma!r}")
        super().__init__(loader, n_step + 1)
        self._n, self._gamma = n_step, gamma
        self._fetch = self._ops.jit(self._gather)
        # Per slot and place: steps since the record (-1 if its transition is complete), discounted sum of rewards, discount.
        self._open = np.full((len(self._newest), 3, n_step + 1), -1.0)

    def add(
        self, batch: Batch | DeviceBatch, actions: Any, extras: dict[str, Any] | None = None, version: int | None = None
    ) -> Transition:
        """Takes a batch and the actions to it; call it before `batch.send`.

        Args:
          batch: every batch that is received, in order.
          actions: what will be sent, rows as in the batch.
          extras: what to keep with each action, a dict of arrays with the same rows.
          version: of the policy.

        Returns:
          The transitions that are complete now, none or many.

        Raises:
          LeaseExpired: the batch has been answered already.
          TypeError: a batch of another loader or adapter.
        """
        before = self._newest[_host(batch).env_indices]
        host, follows, again = self._begin(batch, version)
        slots, places = host.env_indices, self._newest[host.env_indices]
        self._keep(batch, host, actions, extras=extras or {})
        if self._n == 1:
            rows = follows.nonzero()[0]
            discount = self._gamma * (host.step_type[rows] != _TERMINATION)
            return self._read(slots[rows], before[rows], places[rows], host.reward[rows], discount)
        rows, starts, reward, discount = self._advance(host, follows, again, places)
        ends = np.where(follows[rows], places[rows], before[rows])
        return self._read(slots[rows], starts, ends, reward, discount)

    def _advance(self, host: Batch, follows: Array, again: Array, places: Array) -> tuple[Array, Array, Array, Array]:
        """Takes the rewards of a batch into the open transitions.

        Returns:
          Those that are complete: row of the batch, place of their start, reward and discount of each.
        """
        step_type, opened = host.step_type, self._open[host.env_indices]
        age, returns, weight = opened[:, 0], opened[:, 1], opened[:, 2]
        cut = ~(follows | again)[:, None]
        alive = (age >= 0) & follows[:, None]
        returns += alive * weight * host.reward[:, None]
        weight[alive] *= self._gamma
        weight[follows & (step_type == _TERMINATION)] = 0.0
        age += alive
        done = alive & ((age == self._n) | (step_type >= _TERMINATION)[:, None])
        done |= cut & (age >= 1)
        rows, starts = done.nonzero()
        complete = rows, starts, returns[rows, starts], weight[rows, starts]
        age[done | cut] = -1
        rows = ((step_type < _TERMINATION) & ~again).nonzero()[0]
        opened[rows, :, places[rows]] = _BEGUN
        self._open[host.env_indices] = opened
        return complete

    def _read(self, slots: Array, starts: Array, ends: Array, reward: Array, discount: Array) -> Transition:
        size = len(slots)
        rows = size if not self._ops.traced else 1 << max(size - 1, 0).bit_length()
        at = np.zeros((2, rows), np.int64)
        at[0, :size], at[1, :size] = self._rows(slots, starts), self._rows(slots, ends)
        figures = np.zeros((2, rows), np.float32)
        figures[0, :size], figures[1, :size] = reward, discount
        fields = self._history.read(self._fetch, at, figures, np.arange(rows) < size)
        return Transition._make((*fields, slots, self._versions[slots, starts]))

    def _gather(self, tables: Sequence[Any], at: Any, figures: Any, valid: Any) -> tuple[Any, ...]:
        """The fields of `Transition` that are on the device, in its order."""
        records = self._history.tree(tables)
        first, next_obs = _rows_of(records, at[0]), _rows_of(records["obs"], at[1])
        return first["obs"], first["action"], figures[0], figures[1], next_obs, first["extras"], valid


class Unrolls(_Assembler):
    """Puts unrolls of fixed length together: IMPALA, SEED, and R2D2 with burn-in.

        unrolls = Unrolls(batches, length=20, batch_size=32)
        for batch in batches:
            acted = policy(batch)
            for unroll in unrolls.add(batch, acted.action, acted.extras, state=acted.state, version=batch.version):
                learn(unroll)
            batch.send(acted.action)

    A slot's unrolls follow one another without a hole: the last `1 + overlap` records of one are the first of the next. An
    unroll goes on over the end of an episode; `valid` says which transitions exist.

    Args:
      loader: whose batches come: a loader, a receiver of `split`, or an adapter.
      length: T, transitions per unroll.
      batch_size: B, unrolls that are handed out together.
      overlap: records that two unrolls of a slot share beside the one that ends the first and begins the second; for
        burn-in (Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning", 2019).
    """

    def __init__(self, loader: Source, length: int, batch_size: int = 1, overlap: int = 0) -> None:
        length, batch_size = require_count("length", length), require_count("batch_size", batch_size)
        overlap = require_count("overlap", overlap, 0)
        if overlap >= length:
            raise ValueError(f"overlap: expected less than length={length}, found {overlap}")
        super().__init__(loader, length + 1)
        self.length, self.batch_size, self.overlap = length, batch_size, overlap
        self._count = np.zeros(len(self._newest), np.int64)  # records of the unroll that each slot is at
        self._linked = np.zeros(self._versions.shape, bool)  # the record follows the one before it
        self._waiting: list[Unroll] = []
        self._fetch, self._concatenate = self._ops.jit(self._gather), self._ops.jit(self._concat)

    def add(
        self,
        batch: Batch | DeviceBatch,
        actions: Any,
        extras: dict[str, Any] | None = None,
        state: Any = None,
        version: int | None = None,
    ) -> list[Unroll]:
        """Takes a batch and the actions to it; call it before `batch.send`.

        Args:
          batch: every batch that is received, in order.
          actions: what will be sent, rows as in the batch.
          extras: what to keep with each action, e.g. its log-probability; a dict of arrays with the same rows.
          state: the recurrent state that the policy acted from, a tree of arrays with the same rows.
          version: of the policy.

        Returns:
          The unrolls that are complete now, `batch_size` at a time; often none.

        Raises:
          LeaseExpired: the batch has been answered already.
          TypeError: a batch of another loader or adapter.
        """
        complete = self.push(batch, actions, extras, state, version)
        if complete.size:
            groups = np.split(complete, complete.size) if self._ops.traced else [complete]  # shapes that were compiled before
            self._waiting.extend(self.take(group) for group in groups)
            self._count[complete] = 1 + self.overlap
        return self._full()

    def push(
        self, batch: Batch | DeviceBatch, actions: Any, extras: dict[str, Any] | None, state: Any, version: int | None
    ) -> Array:
        """`add` without taking anything: the slots of the batch that have all records of their unroll now."""
        host, follows, again = self._begin(batch, version)
        slots, places = host.env_indices, self._newest[host.env_indices]
        more = {"extras": extras or {}, "reward": batch.reward, "step_type": batch.step_type}
        self._keep(batch, host, actions, **more, **({} if state is None else {"state": state}))
        self._linked[slots, places] = np.where(again, self._linked[slots, places], follows)
        self._count[slots] += ~again
        return np.asarray(slots[self._count[slots] > self.length])

    def begin(self, slots: Array) -> None:
        """The newest record of each slot becomes the first of its next unroll, whatever its last one lacks."""
        self._count[slots] = np.minimum(self._count[slots], 1)

    def take(self, slots: Array) -> Unroll:
        """The last T + 1 records of some slots, (T + 1, N); transitions that a slot has not made are not valid."""
        length = self.length
        steps = np.arange(length + 1)[:, None]
        places = (self._newest[slots] - length + steps) % self._length
        made = length - steps[:-1] < self._count[slots]  # transition t needs records t and t + 1 of this unroll
        valid = self._linked[slots, places][1:] & made
        fields = self._history.read(self._fetch, self._rows(slots, places), valid)
        return Unroll._make((*fields, self._versions[slots, places], slots))

    def _gather(self, tables: Sequence[Any], at: Any, valid: Any) -> tuple[Any, ...]:
        """The fields of `Unroll` that are on the device, in its order."""
        table = self._history.tree(tables)
        state = _rows_of(table.pop("state"), at[0]) if "state" in table else None
        records = _rows_of(table, at)
        step_type = records["step_type"]
        discount = self._ops.cast(step_type != _TERMINATION, "float32")
        found = records["obs"], records["action"], records["reward"], discount, step_type, step_type == _FIRST
        return *found, valid, records["extras"], state

    def _full(self) -> list[Unroll]:
        """Hands out whole batches of what is waiting."""
        found = []
        while sum(len(unroll.slots) for unroll in self._waiting) >= self.batch_size:
            pieces, wanted = [], self.batch_size
            while wanted:
                piece = self._waiting.pop(0)
                if len(piece.slots) > wanted:
                    self._waiting.insert(0, self._columns(piece, wanted, len(piece.slots)))
                    piece = self._columns(piece, 0, wanted)
                pieces.append(piece)
                wanted -= len(piece.slots)
            found.append(pieces[0] if len(pieces) == 1 else self._joined(pieces))
        return found

    def _joined(self, pieces: list[Unroll]) -> Unroll:
        states = [piece.initial_state for piece in pieces]
        records = [piece[: len(_ON_DEVICE)] for piece in pieces]
        fields, state = self._ops.compute(self._concatenate, records, states)
        versions = np.concatenate([piece.versions for piece in pieces], 1)
        return Unroll._make((*fields, state, versions, np.concatenate([piece.slots for piece in pieces])))

    def _concat(self, records: Any, states: Any) -> Any:
        ops = self._ops
        joined = ops.tree_map(lambda *leaves: ops.xp.concatenate(leaves, 1), *records)
        return joined, ops.tree_map(lambda *leaves: ops.xp.concatenate(leaves, 0), *states)

    def _columns(self, unroll: Unroll, begin: int, end: int) -> Unroll:
        ops = self._ops
        fields = ops.tree_map(lambda leaf: leaf[:, begin:end], unroll[: len(_ON_DEVICE)])
        state = ops.tree_map(lambda leaf: leaf[begin:end], unroll.initial_state)
        return Unroll._make((*fields, state, unroll.versions[:, begin:end], unroll.slots[begin:end]))


_ON_DEVICE = Unroll._fields[: Unroll._fields.index("initial_state")]
