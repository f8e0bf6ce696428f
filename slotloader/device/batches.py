"""Batches on a device: received like the loader's own, padded to buckets, answered while the next one forms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from slotloader.arguments import require_count, require_seed
from slotloader.batching.batches import Batch
from slotloader.batching.former import Request
from slotloader.batching.receiver import Receiver
from slotloader.batching.source import BatchSource
from slotloader.device.batch import DeviceBatch
from slotloader.device.binding import Binder
from slotloader.device.completion import Completer, Pending
from slotloader.device.ops import DeviceOps, Stream
from slotloader.device.policies import Acted, Policy, RecurrentState
from slotloader.device.preparation import FrameStack, Preparation
from slotloader.device.run import Run, run
from slotloader.device.staging import Staging, checked_buckets, make_plan
from slotloader.errors import ActionError, LeaseExpired, LoaderClosed, SpecMismatch
from slotloader.loader import SlotLoader
from slotloader.records.specs import Array, Kind, Leaf, flatten, leaves, show_path

CLOSE_TIMEOUT = 5.0
_MANY = 64  # batches that are remembered before the answered ones are dropped


class DeviceSource(BatchSource[DeviceBatch]):
    """A loader's batches on a device; made by `to_numpy`, `to_torch` and `to_jax`.

        with to_torch(loader, device="cuda") as batches:
            for batch in batches:
                batch.send(policy(batch.obs))

    Args:
      source: a loader, or one of the receivers of `loader.split(n)`.
      ops: the device.
      buckets: fixed batch sizes to pad to; default powers of two up to `max_get`; `()` for no padding. The largest is the most
        that a batch of this adapter has.
      in_flight: most batches whose actions are on their way back at a time; 1 for no overlap.
      fields: what travels, of "obs", "reward", "step_type", "last_action" and "info"; default all.
      float64: "float32" halves doubles on the way, "keep" does not.
      dtype: for float leaves of the observation, on the device, e.g. "bfloat16".
      frame_stack: number of frames to stack on the device, or a dict from key to number; the stack is the first axis of a row.
      seed: of the policies' randomness; default the loader's. Compiled torch policies have none.
      divisor: every bucket divides by it.
    """

    def __init__(
        self,
        source: SlotLoader | Receiver,
        ops: DeviceOps,
        *,
        buckets: Sequence[int] | None = None,
        in_flight: int = 2,
        fields: Sequence[str] | None = None,
        float64: str = "float32",
        dtype: Any = None,
        frame_stack: FrameStack | None = None,
        seed: int | None = None,
        divisor: int = 1,
        depth: int | None = None,
    ) -> None:
        if not isinstance(source, (SlotLoader, Receiver)):
            raise TypeError(f"loader: expected a SlotLoader or a receiver of loader.split, found {source!r:.200}")
        in_flight = require_count("in_flight", in_flight)
        receiver = source.receiver
        if receiver.closed:
            raise LoaderClosed("the loader was closed; build a new SlotLoader")
        self.ops, self._receiver = ops, receiver
        self._seed = receiver.exchange.seed if seed is None else require_seed("seed", seed)
        table = receiver.exchange.table
        self.table_slots = table.num_slots
        most = receiver.request.max_get
        self.buckets = checked_buckets(buckets, most, divisor)
        self._max_get = min(most, self.buckets[-1]) if self.buckets else most
        if receiver.request.min_get > self._max_get:
            raise ValueError(
                f"buckets: expected the largest to be at least min_get={receiver.request.min_get}, found {self.buckets}"
            )
        self.plan = make_plan(table, ops, fields, float64)
        self._action = table.layout.action
        self._action_leaves = list(leaves(self._action))
        self.staging = Staging(ops, self.plan, self.buckets, self._max_get, in_flight + 2 if depth is None else depth)
        self._preparation: Preparation | None = Preparation(ops, self.plan, self.table_slots, dtype, frame_stack)
        if not self._preparation.needed:
            self._preparation = None
        self._single = isinstance(self._action, Leaf) and self._action.kind is Kind.ARRAY
        self._direct = self._single and self._preparation is None  # actions can go from an array straight into their slots
        self.hides = ops.hidden and self._preparation is None  # a compiled policy takes its inputs from the stage
        self._completer = Completer(ops, receiver, self._action, in_flight)
        self._binder = Binder(ops, self.plan, self.staging, self._preparation, self.table_slots, self._seed)
        self._mine: list[Batch] = []  # handed out; those that have been answered are dropped now and then
        self._closed = False

    @property
    def receiver(self) -> Receiver:
        """Where the batches come from."""
        return self._receiver

    # Receiving.

    @property
    def request(self) -> Request:
        """See `BatchSource.request`."""
        request = self._receiver.request
        return request if request.max_get == self._max_get else replace(request, max_get=self._max_get)

    @property
    def most(self) -> int:
        """See `BatchSource.most`: the largest bucket."""
        return self._max_get

    def require_room(self, max_get: int) -> None:
        """See `BatchSource.require_room`.

        Raises:
          ValueError: no bucket is as large.
        """
        if max_get > self._max_get:
            raise ValueError(f"max_get: expected at most {self._max_get}, the largest bucket, found {max_get}")

    def receive(self, request: Request, hidden: tuple[str, ...] = ()) -> DeviceBatch:
        """See `BatchSource.receive`. It raises as well what a batch on its way back has met.

        Args:
          request: what is asked for.
          hidden: attributes that a compiled policy takes from the stage; `DeviceBatch.hidden` has them, and nobody else.
        """
        if self._closed:
            raise LoaderClosed("this adapter was closed; make a new one of the loader")
        self._completer.wait_for_room()
        return self._staged(self._receiver.receive(request), hidden)

    def poll(self) -> DeviceBatch | None:
        """See `BatchSource.poll`; None as well while `in_flight` batches are on their way."""
        if self._closed:
            raise LoaderClosed("this adapter was closed; make a new one of the loader")
        if self._completer.is_full():
            return None
        ready = self._receiver.poll(self._max_get)
        return None if ready is None else self._staged(ready)

    def _staged(self, host: Batch, hidden: tuple[str, ...] = ()) -> DeviceBatch:
        try:
            batch = DeviceBatch(self, host, self.staging.bucket_of(host.size))
            if hidden:
                batch.hide(self.staging.put(host, hidden, hidden=True))
            elif not self.ops.lazy:
                batch.stage(tuple(self.plan.spans))
            if self._preparation is not None:
                batch.prepare(self._preparation(batch.select(self._preparation.names)))
            if len(self._mine) >= _MANY:
                self._mine = [other for other in self._mine if not other.answered]
            self._mine.append(host)
        except BaseException:
            host.release()
            raise
        return batch

    # Sending.

    def answer(self, batch: DeviceBatch, actions: Any, hold: Array | None = None) -> None:
        """`DeviceBatch.send`."""
        host, ops = batch.host, self.ops
        if host.promised:
            raise LeaseExpired("this batch has been answered already; its actions are on their way")
        self._receiver.leases.require_whole(host)
        if hold is not None:
            hold = np.asarray(hold)
            if hold.dtype != np.bool_ or hold.shape != (host.size,):
                raise ActionError(
                    f"send refused, no env has stepped: hold: expected bool ({host.size},), one per record, found {hold.dtype} "
                    f"{hold.shape}"
                )
        if self._direct and hold is None and batch.held.stage is None:  # the common case on a CPU
            array = ops.at_once(actions)
            if array is not None and array.shape[:1] == (batch.bucket,):
                host.send(array[: host.size])  # says what is wrong as the core does
                return
        try:
            parts = [actions] if self._single else list(flatten(self._action, actions, ("action",)))
        except SpecMismatch as error:
            raise ActionError(f"send refused, no env has stepped: {error}") from error
        try:
            ops.wait(Stream.D2H, ops.record(Stream.COMPUTE))  # fence
            landings = [
                ops.d2h(part) if leaf.kind is Kind.ARRAY else _texts(part, (batch.bucket, host.size))
                for leaf, part in zip(self._action_leaves, parts, strict=True)
            ]
        except Exception as error:
            self._receiver.exchange.scatterer.check(actions, host.size)  # says what is wrong, as the core would
            raise ActionError(f"send refused, no env has stepped: the device cannot hand over the actions: {error}") from error
        for leaf, landing in zip(self._action_leaves, landings, strict=True):
            shape = (len(landing), *leaf.shape) if isinstance(landing, list) else tuple(landing.shape)
            if shape not in ((batch.bucket, *leaf.shape), (host.size, *leaf.shape)):
                self._refuse(batch, leaf, shape)
        if hold is not None and hold.all():
            return
        landed = ops.record(Stream.D2H)
        stage, batch.held.stage = batch.held.stage, None
        give_back = None if stage is None else lambda: self.staging.give_back(stage)
        prepared = batch.prepared
        undo = None if prepared is None else prepared.undo
        pending = Pending(host, landings, landed, give_back, undo, None if hold is None else ~hold)
        pending.held = parts  # fence
        if prepared is not None:
            prepared.commit(None if hold is None else self.slots_of(host, batch.bucket, ~hold))
        self._completer.submit(pending)

    def slots_of(self, host: Batch, bucket: int, rows: Array) -> Any:
        """The slots of the chosen rows, bool (size,) of numpy, on the device; the scratch row for all others."""
        slots = np.full(bucket, self.table_slots, np.int64)
        slots[: host.size][rows] = host.env_indices[rows]
        return self.ops.array(slots)

    def _refuse(self, batch: DeviceBatch, leaf: Leaf, shape: tuple[int, ...]) -> None:
        rows = f"({batch.size},)" if batch.bucket == batch.size else f"({batch.size},) or, with padding, ({batch.bucket},)"
        remedy = ""
        if shape[:1] in ((batch.size,), (batch.bucket,)) and shape[1:] == (*leaf.shape, 1):
            remedy = "; drop the last axis with actions[..., 0]"
        elif shape[1:] == leaf.shape:
            remedy = "; one action per record is needed, in row order"
        raise ActionError(
            f"send refused, no env has stepped: {show_path(leaf.path)}: expected {leaf.dtype} of rows {rows} and row "
            f"shape {leaf.shape}, found shape {shape}{remedy}"
        )

    def land(self, host: Batch) -> None:
        """Waits until no row of a batch is on its way."""
        while host.promised and self._completer.drain(CLOSE_TIMEOUT):
            pass

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """If the block raises, every batch that was received in it is released, once those on their way have landed."""
        mine = self._mine = [host for host in self._mine if not host.answered]
        before = set(map(id, mine))
        try:
            yield
        except BaseException:
            self._completer.drain(CLOSE_TIMEOUT)
            for host in self._mine:
                if id(host) not in before:
                    host.release()
            raise

    # Policies.

    def policy(self, policy: Any, *, params: Any = None, state: Any = None, seed: int | None = None) -> Policy:
        """Binds a policy to this device as it is, without compiling it.

        Args:
          policy: `policy(params, inputs, state, key) -> Acted`, `policy(params, obs) -> action`, `policy(obs) -> action`, or a
            module of the framework.
          params: its weights; None if it has its own.
          state: what the recurrent state of one slot is when an episode begins: a tree of arrays without a batch axis,
            usually zeros. None for none.
          seed: of its randomness; default the adapter's.
        """
        return self._binder.bind(policy, params, state, seed, compiled=False)

    def compile(self, policy: Any, *, params: Any = None, state: Any = None, seed: int | None = None, **options: Any) -> Policy:
        """Compiles a policy for every bucket and warms it up; nothing is compiled afterwards.

        Args:
          policy: see `policy`.
          params: see `policy`.
          state: see `policy`.
          seed: see `policy`; torch has none, since torch.compile cannot trace a generator: there `key` is None.
          options: for the framework's compiler; for torch those of `torch.compile`.

        Returns:
          The policy, for `run` or to be called with a batch.

        Raises:
          ValueError: a seed where it would have no effect.
        """
        return self._binder.compile(policy, params, state, seed, options)

    def recurrent_state(self, initial: Any) -> RecurrentState:
        """Recurrent state for a loop of your own: `gather(batch)`, act, `scatter(batch, new)`.

        Args:
          initial: the state of one slot when an episode begins: a tree of arrays without a batch axis, usually zeros.
        """
        return RecurrentState(self.ops, self.table_slots, initial)

    def run(
        self,
        policy: Any,
        *,
        env_steps: int | None = None,
        episodes: int | None = None,
        progress: bool | None = None,
        on_batch: Callable[[DeviceBatch, Acted], None] | None = None,
    ) -> Run:
        """Drives a policy: batch N + 1 forms and travels while N computes.

        Args:
          policy: from `policy` or `compile`, or anything that `policy` takes.
          env_steps: how long; the last batch may go beyond it.
          episodes: how long, said in ended episodes.
          progress: show a bar; None shows it on a terminal.
          on_batch: called with each batch and what the policy returned, before the actions are scattered.

        Returns:
          Counts, rate and episodes.

        Raises:
          ValueError: not exactly one of `env_steps` and `episodes`.
          LoaderClosed: the loader or the adapter was closed before the end.
          And whatever `recv`, the policy and `send` raise; nothing that was received stays leased.
        """
        return run(self, policy, env_steps, episodes, progress, on_batch)

    def drain(self, timeout: float | None = None) -> None:
        """Waits until every action that was sent is in its slot.

        Raises:
          TimeoutError: some are not after `timeout` seconds.
        """
        if not self._completer.drain(timeout):
            raise TimeoutError(f"drain: actions are still on their way from the device after {timeout:g} s")
        self._receiver.raise_failure()

    # The end.

    def close(self) -> None:
        """Completes what is on its way and releases every batch that was not answered; any number of times.

        The loader goes on: its next batches can go to another adapter.
        """
        if self._closed:
            return
        self._closed = True
        self._completer.close(CLOSE_TIMEOUT)
        for host in self._mine:
            if not (host.answered or self._receiver.closed):
                self._receiver.leases.release(host)  # whatever the device still does
        self._mine.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        sizes = self.buckets or "any size"
        return f"{type(self).__name__}({type(self.ops).__name__}, buckets {sizes}, in_flight {self._completer.in_flight})"


def _texts(values: Any, sizes: tuple[int, int]) -> list[Any]:
    """The values of a Text, Sequence, Graph or OneOf action."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__") or len(values) not in sizes:
        raise ValueError(f"expected a list of {sizes[1]} values, found {values!r:.80}")
    return list(values)
