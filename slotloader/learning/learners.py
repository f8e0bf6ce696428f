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

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from slotloader.arguments import require_count
from slotloader.batching.batches import Batch
from slotloader.batching.gatherer import BytesColumn
from slotloader.batching.receiver import Receiver
from slotloader.device.batch import DeviceBatch
from slotloader.device.batches import DeviceSource
from slotloader.device.ops import DeviceOps, HostOps, map_tree
from slotloader.device.staging import BytesTensor
from slotloader.errors import LeaseExpired
from slotloader.learning.history import History, leaves_of, rebuilt
from slotloader.loader import SlotLoader
from slotloader.records.specs import Array, Kind, Leaf, build, flatten, leaves, show_path
from slotloader.records.step_type import StepType

Source: TypeAlias = "SlotLoader | Receiver | DeviceSource"


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


def _ops_of(source: Source) -> tuple[DeviceOps, int]:
    if isinstance(source, (SlotLoader, Receiver)):
        return HostOps(), source.receiver.exchange.table.num_slots
    if hasattr(source, "ops") and hasattr(source, "receiver"):
        return source.ops, source.table_slots
    raise TypeError(f"loader: expected a SlotLoader, a receiver of loader.split or an adapter, found {source!r:.200}")


def _host(batch: Batch | DeviceBatch) -> Batch:
    return batch if isinstance(batch, Batch) else batch.host


class _Assembler:
    """What `Transitions` and `Unrolls` share: the history and where each slot is in it.

    `add` first checks everything, then writes, and only then moves on: what is refused changes nothing.
    """

    def __init__(self, source: Source, length: int) -> None:
        self.ops, slots = _ops_of(source)
        self._of_loader = isinstance(source, (SlotLoader, Receiver))
        self._exchange = source.receiver.exchange
        self._length = length  # records that are kept per slot
        self._action = self._exchange.table.layout.action
        wrong = [leaf for leaf in leaves(self._action) if leaf.kind is not Kind.ARRAY]
        if wrong:
            raise TypeError(f"{show_path(wrong[0].path)}: expected actions of numbers, found {wrong[0]}")
        declared = [(leaf.shape, self.ops.dtype(leaf.dtype)) for leaf in leaves(self._action)]
        self._history = History(self.ops, slots * length, {"action": declared})
        self._sequence = np.full(
            slots, 1 << 63, np.uint64
        )  # of each slot's newest record; nothing comes near this before the first
        self._newest = np.full(slots, -1, np.int64)  # its place in the slot's ring; -1 before the first
        self._versions = np.full((slots, length), -1, np.int64)
        self._unfinished: Array | None = None  # slots of an `add` that Ctrl-C has left half done

    def _forget(self, slots: Array) -> None:
        """What was under way in some slots is left out: their next record follows none."""
        self._sequence[slots] = 1 << 63
        self._unfinished = None

    def _rows(self, slots: Array, places: Array) -> Array:
        return slots * self._length + places

    def _place(self, batch: Batch | DeviceBatch) -> tuple[Batch, Array, Array, Array]:
        """Finds where the records of a batch belong.

        Returns:
          The core's batch; bool (B,) whether each record follows the slot's newest; bool (B,) whether it is the newest
          again; int64 (B,) its place in the slot's ring.
        """
        host = _host(batch)
        alike = isinstance(batch, Batch) is self._of_loader and getattr(batch, "ops", self.ops) is self.ops
        if not alike or host.exchange is not self._exchange:
            made_for = "the loader" if self._of_loader else "the adapter"
            raise TypeError(f"add: expected a batch of {made_for} that this was made for, found {batch!r:.200}")
        slots = host.env_indices
        try:
            sequence = host.sequence
        except LeaseExpired:
            raise LeaseExpired("add: the batch has been answered already; call add before batch.send") from None
        if self._unfinished is not None:
            self._forget(self._unfinished)
        ahead, newest = sequence - self._sequence[slots], self._newest[slots]
        follows = (ahead == 1) & (host.step_type != _FIRST)
        again = ahead == 0
        newest += ~again
        newest[newest == self._length] = 0
        return host, follows, again, newest

    def _keep(
        self, batch: Batch | DeviceBatch, host: Batch, places: Array, version: int | None, action: Any, **more: Any
    ) -> None:
        """Writes the records of a batch, with what came with its actions, and takes them into account."""
        adapt, version = self.ops.adapt, require_count("version", version, 0, optional=True)
        if isinstance(self._action, Leaf):
            action = adapt(action)
        else:
            action = build(self._action, (adapt(part) for part in flatten(self._action, action, ("action",))))
        records = {"obs": _plain(batch.obs), "action": action}
        for name, value in more.items():
            if name == "extras" and not isinstance(value, dict):
                raise TypeError(f"extras: expected a dict of arrays, found {value!r:.200}")
            records[name] = map_tree(adapt, value)
        found = self._history.checked(records, host.size, getattr(batch, "bucket", host.size))
        slots = host.env_indices
        self._unfinished = slots
        self._history.write(self._rows(slots, places), found)
        self._sequence[slots] = host.sequence
        self._newest[slots] = places
        self._versions[slots, places] = -1 if version is None else version

    def are_new(self, batch: Batch | DeviceBatch) -> Array:
        """Bool (B,): records that have not been added yet; the others were given back and come again."""
        host = _host(batch)
        return np.asarray(host.sequence != self._sequence[host.env_indices])


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
        self._fetch = self.ops.jit(self._gather)
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
        host, follows, again, places = self._place(batch)
        slots, before = host.env_indices, self._newest[host.env_indices]
        self._keep(batch, host, places, version, actions, extras={} if extras is None else extras)
        if self._n == 1:
            self._unfinished = None
            rows = follows.nonzero()[0]
            discount = self._gamma * (host.step_type[rows] != _TERMINATION)
            return self._read(slots[rows], before[rows], places[rows], host.reward[rows], discount)
        rows, starts, reward, discount = self._advance(host, follows, again, places)
        self._unfinished = None
        ends = np.where(follows[rows], places[rows], before[rows])
        return self._read(slots[rows], starts, ends, reward, discount)

    def _forget(self, slots: Array) -> None:
        self._open[slots] = -1.0
        super()._forget(slots)

    def _advance(self, host: Batch, follows: Array, again: Array, places: Array) -> tuple[Array, Array, Array, Array]:
        """Takes the rewards of a batch into the open transitions.

        Returns:
          Those that are complete: row of the batch, place of their start, reward and discount of each.
        """
        step_type, opened = host.step_type, self._open[host.env_indices]
        age, returns, weight = opened[:, 0], opened[:, 1], opened[:, 2]
        cut = ~(follows | again)[:, None]
        alive = (age >= 0) & follows[:, None]
        returns += np.multiply(weight, host.reward[:, None], out=np.zeros_like(returns), where=alive)  # 0 * inf is NaN
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
        rows = size if not self.ops.traced else 1 << max(size - 1, 0).bit_length()
        at = np.zeros((2, rows), np.int64)
        at[0, :size], at[1, :size] = self._rows(slots, starts), self._rows(slots, ends)
        figures = np.zeros((2, rows), np.float32)
        figures[0, :size], figures[1, :size] = reward, discount
        history = self._history
        first, following, *more = history.read(self._fetch, at, figures, np.arange(rows) < size)
        obs, action, extras = (history.tree(name, first[history.spans[name]]) for name in ("obs", "action", "extras"))
        next_obs, versions = history.tree("obs", following), self._versions[slots, starts]
        return Transition(obs, action, more[0], more[1], next_obs, extras, more[2], slots, versions)

    def _gather(self, tables: Sequence[Any], at: Any, figures: Any, valid: Any) -> tuple[Any, ...]:
        """What `Transition` has on the device, with flat trees: a framework may want keys that can be sorted."""
        following = [table[at[1]] for table in tables[self._history.spans["obs"]]]
        return [table[at[0]] for table in tables], following, figures[0], figures[1], valid


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
        self._fetch, self._concatenate = self.ops.jit(self._gather), self.ops.jit(self._concat)

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
            groups = np.split(complete, complete.size) if self.ops.traced else [complete]  # shapes that were compiled before
            self._waiting.extend(self.take(group) for group in groups)
            self._count[complete] = 1 + self.overlap
        return self._full()

    def push(
        self, batch: Batch | DeviceBatch, actions: Any, extras: dict[str, Any] | None, state: Any, version: int | None
    ) -> Array:
        """`add` without taking anything: the slots of the batch that have all records of their unroll now."""
        host, follows, again, places = self._place(batch)
        slots = host.env_indices
        more = {"extras": {} if extras is None else extras, "reward": batch.reward, "step_type": batch.step_type}
        self._keep(batch, host, places, version, actions, **more, **({} if state is None else {"state": state}))
        self._linked[slots, places] = np.where(again, self._linked[slots, places], follows)
        self._count[slots] += ~again
        self._unfinished = None
        return np.asarray(slots[self._count[slots] > self.length])

    def _forget(self, slots: Array) -> None:
        self._count[slots] = 0
        super()._forget(slots)

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
        history = self._history
        records, state, *more = history.read(self._fetch, self._rows(slots, places), valid)
        found = {name: history.tree(name, records[span]) for name, span in history.spans.items() if name != "state"}
        initial = history.tree("state", state) if "state" in history.spans else None
        return Unroll(
            found["obs"], found["action"], found["reward"], more[0], found["step_type"], more[1], more[2], found["extras"],
            initial, self._versions[slots, places], slots,
        )  # fmt: skip

    def _gather(self, tables: Sequence[Any], at: Any, valid: Any) -> tuple[Any, ...]:
        """What `Unroll` has on the device, with flat trees; the state, which comes last, only of record 0."""
        spans = self._history.spans
        state = spans.get("state", slice(len(tables), len(tables)))
        step_type = tables[spans["step_type"]][0][at]
        discount = self.ops.cast(step_type != _TERMINATION, "float32")
        records = [table[at] for table in tables[: state.start]]
        return records, [table[at[0]] for table in tables[state]], discount, step_type == _FIRST, valid

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
        head = len(_ON_DEVICE)
        records, states = [leaves_of(piece[:head]) for piece in pieces], [leaves_of(piece.initial_state) for piece in pieces]
        found, state = self.ops.compute(self._concatenate, records, states)
        fields = rebuilt(pieces[0][:head], iter(found))
        versions = np.concatenate([piece.versions for piece in pieces], 1)
        initial = rebuilt(pieces[0].initial_state, iter(state))
        return Unroll._make((*fields, initial, versions, np.concatenate([piece.slots for piece in pieces])))

    def _concat(self, records: Any, states: Any) -> Any:
        xp = self.ops.xp
        joined = [xp.concatenate(columns, 1) for columns in zip(*records, strict=True)]
        return joined, [xp.concatenate(rows, 0) for rows in zip(*states, strict=True)]

    def _columns(self, unroll: Unroll, begin: int, end: int) -> Unroll:
        fields = map_tree(lambda leaf: leaf[:, begin:end], unroll[: len(_ON_DEVICE)])
        state = map_tree(lambda leaf: leaf[begin:end], unroll.initial_state)
        return Unroll._make((*fields, state, unroll.versions[:, begin:end], unroll.slots[begin:end]))


_ON_DEVICE = Unroll._fields[: Unroll._fields.index("initial_state")]
