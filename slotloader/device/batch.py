"""One batch on a device: the core's batch as padded device arrays, with the same names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slotloader.batching.batches import Batch
from slotloader.batching.episodes import Episode
from slotloader.device.ops import DeviceOps
from slotloader.device.policies import Inputs, RecurrentState, make_inputs
from slotloader.device.preparation import Prepared
from slotloader.device.staging import Stage, Staged
from slotloader.errors import LeaseExpired
from slotloader.records.specs import Array
from slotloader.records.step_type import StepType

if TYPE_CHECKING:
    from slotloader.device.batches import DeviceSource


class Held:
    """What is given back when a batch is released, whoever releases it: a stage, and recurrent states.

    Apart from the `DeviceBatch`, whose arrays must not live until its actions have landed for that.

    Attributes:
      stage: where hidden inputs are, or None.
      states: recurrent states, and their rows before a policy acted.
    """

    __slots__ = ("_bucket", "_host", "_whose", "stage", "states")

    def __init__(self, whose: DeviceSource, host: Batch, bucket: int) -> None:
        self._whose, self._host, self._bucket = whose, host, bucket
        self.stage: Stage | None = None
        self.states: list[tuple[RecurrentState, Any]] = []
        host.holder = self

    def give_back(self) -> bool:
        """See `Holder.give_back`; False while all actions are on their way."""
        host, whose = self._host, self._whose
        if host.promised == host.size:
            return False
        whose.land(host)
        stage, self.stage = self.stage, None
        if stage is not None:
            whose.staging.give_back(stage)
        try:
            states, self.states = self.states, []
            if states and not host.answered:
                slots = whose.slots_of(host, self._bucket, np.isin(host.env_indices, host.open_slots()))
                for state, before in states:
                    state.scatter(None, before, slots)
        except BaseException:
            whose.receiver.leases.release(host)
            raise
        return True


class DeviceBatch:
    """A batch as device arrays with one row per row of its bucket; padding rows come last and are clean.

    Names are those of the core's `Batch`. Arrays belong to whoever holds them: they are never written again. Fields that
    `fields=` left out raise `AttributeError`.

    Attributes:
      host: the core's batch: numpy arrays without padding, to be read before the answer.
      size: number of records.
      bucket: number of rows.
      version: of the policy that acted on it, or None.
      held: what a release gives back.
      hidden: the inputs of a compiled policy, still in the stage; for `run` alone.
      prepared: the observation as it was prepared, or None if it travels as it is.
    """

    __slots__ = ("_arrays", "_trees", "_whose", "bucket", "held", "hidden", "host", "prepared", "version")

    def __init__(self, whose: DeviceSource, host: Batch, bucket: int) -> None:
        self._whose, self.host, self.bucket = whose, host, bucket
        self._arrays: dict[str, Sequence[Any]] = {}  # what is on the device, by attribute
        self.hidden: list[Any] = []
        self.prepared: Prepared | None = None
        self._trees: dict[str, Any] = {}
        self.held = Held(whose, host, bucket)
        self.version: int | None = None

    @property
    def ops(self) -> DeviceOps:
        """The device that it is on."""
        return self._whose.ops

    def _tree(self, name: str) -> Any:
        if name not in self._trees:
            if self.held.stage is not None:
                raise AttributeError(
                    f"batch.{name}: inputs of a compiled policy are hidden while `run` drives it; use batch.host"
                )
            if name not in self._whose.plan.spans:
                raise AttributeError(
                    f"batch.{name}: expected one of the fields that travel, {tuple(self._whose.plan.spans)}; add it to fields="
                )
            if name not in self._arrays:
                self.stage((name,))
            self._trees[name] = self._whose.plan.tree_of(name, self._arrays[name])
        return self._trees[name]

    def hide(self, staged: Staged) -> None:
        """Its inputs stay in the stage until the policy has taken them."""
        self.hidden, self.held.stage = staged.arrays, staged.stage

    def prepare(self, prepared: Prepared) -> None:
        """Its observation is what a preparation has made of it."""
        self.prepared, self._arrays["obs"] = prepared, prepared.obs

    def stage(self, names: tuple[str, ...]) -> None:
        """Brings attributes to the device, together."""
        plan = self._whose.plan
        fields = {name: plan.fields[plan.spans[name]] for name in names}
        late = [name for name in names if self.answered and any(field.column is not None for field in fields[name])]
        if late:
            raise LeaseExpired(
                f"batch.{late[0]} was first read after the batch had been answered, when its slots may hold newer records; "
                f"read batch.{late[0]} before batch.send"
            )
        arrays = iter(self._whose.staging.put(self.host, names).arrays if any(fields.values()) else ())
        for name in names:
            self._arrays[name] = [next(arrays) for _ in fields[name]]

    def select(self, names: tuple[str, ...]) -> list[Any]:
        """The device arrays of some attributes, one per field."""
        missing = tuple(name for name in names if name not in self._arrays)
        if missing:
            self.stage(missing)
        return [array for name in names for array in self._arrays[name]]

    def acted_from(self, state: RecurrentState, rows: Any) -> None:
        """Says what the rows of a recurrent state were before it was acted on; records that are released come again."""
        states = self.held.states
        if all(known is not state for known, _ in states):
            states.append((state, rows))

    def __len__(self) -> int:
        return self.host.size

    @property
    def size(self) -> int:
        """Number of records; rows from here on are padding."""
        return self.host.size

    @property
    def env_indices(self) -> Any:
        """The slots, integers (bucket,); `num_slots` for padding rows."""
        return self._tree("env_indices")

    @property
    def valid(self) -> Any:
        """Bool (bucket,): the row is a record."""
        return self.env_indices < self._whose.table_slots

    @property
    def obs(self) -> Any:
        """Tree of (bucket, ...); `BytesTensor` for Text, Sequence, Graph and OneOf."""
        return self._tree("obs")

    @property
    def reward(self) -> Any:
        """float32 (bucket,)."""
        return self._tree("reward")

    @property
    def step_type(self) -> Any:
        """uint8 (bucket,), `StepType`; FIRST for padding."""
        return self._tree("step_type")

    @property
    def last_action(self) -> Any:
        """The action last sent to each slot, tree of (bucket, ...)."""
        return self._tree("last_action")

    @property
    def info(self) -> Any:
        """Declared info columns, name to (bucket, ...)."""
        return self._tree("info")

    @property
    def is_first(self) -> Any:
        """Bool (bucket,): the record starts an episode."""
        return self.step_type == int(StepType.FIRST)

    @property
    def terminated(self) -> Any:
        """As bool (bucket,)."""
        return self.step_type == int(StepType.TERMINATION)

    @property
    def truncated(self) -> Any:
        """As bool (bucket,)."""
        return self.step_type == int(StepType.TRUNCATION)

    @property
    def is_last(self) -> Any:
        """As bool (bucket,): the action sent to this record is discarded."""
        return self.step_type >= int(StepType.TERMINATION)

    @property
    def discount(self) -> Any:
        """float32 (bucket,): 0 for TERMINATION, 1 otherwise."""
        return self._whose.ops.cast(self.step_type != int(StepType.TERMINATION), "float32")

    @property
    def arrays(self) -> list[Any]:
        """Every array of every field that travels, in the order of the plan."""
        return self.select(tuple(self._whose.plan.spans))

    @property
    def inputs(self) -> Inputs:
        """What the policy contract calls inputs."""
        return make_inputs(self._whose.plan, self.arrays)

    @property
    def episodes(self) -> list[Episode]:
        """As of the core's batch."""
        return self.host.episodes

    @property
    def env_steps(self) -> int:
        """Records that are not FIRST."""
        return self.host.env_steps

    @property
    def released(self) -> bool:
        """The batch was given back by `release`."""
        return self.host.released

    @property
    def answered(self) -> bool:
        """The batch was released, or sent; its actions may still be on their way."""
        return self.host.answered or self.host.promised > 0

    def send(self, actions: Any, hold: Array | None = None) -> None:
        """Answers every record, without waiting for the device.

        Args:
          actions: tree of (bucket, ...) or (size, ...) arrays by the action space: of the framework, or anything that numpy
            can read. Rows of padding and of last records are ignored.
          hold: bool (size,) of numpy: rows that are not answered; they stay leased until `release`.

        Raises:
          ActionError: wrong shape or structure, at once; wrong values or bounds, here or from the next call once the device
            has them. The batch can be answered again.
          LeaseExpired: the batch has been answered already.
        """
        self._whose.answer(self, actions, hold)

    def release(self) -> None:
        """Gives the slots back without an action; their records are ready again."""
        self.host.release()

    def __repr__(self) -> str:
        return f"DeviceBatch({self.size} of {self.bucket} rows, {self.host!r})"
