"""Batches on a device: iterated like the loader itself, padded to buckets, answered while the next one forms."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotloader.arguments import require_count, require_seed
from slotloader.batching.batches import Batch
from slotloader.batching.episodes import Episode
from slotloader.batching.progress import BoundedIterator
from slotloader.batching.receiver import Receiver
from slotloader.batching.source import DEFAULT
from slotloader.device.batch import DeviceBatch
from slotloader.device.completion import Completer, Pending
from slotloader.device.ops import DeviceOps, Stream
from slotloader.device.policies import Acted, Policy, RecurrentState, as_contract, make_step
from slotloader.device.preparation import FrameStack, Preparation
from slotloader.device.staging import Staging, checked_buckets, make_plan
from slotloader.errors import ActionError, LeaseExpired, LoaderClosed, SpecMismatch
from slotloader.learning.background import Background, OnFull
from slotloader.learning.learners import Unrolls
from slotloader.learning.rollouts import Rollouts, bound
from slotloader.loader import SlotLoader
from slotloader.records.specs import Array, Kind, Leaf, flatten, leaves, show_path

CLOSE_TIMEOUT = 5.0
_MANY = 64  # batches that are remembered before the answered ones are dropped


@dataclass(frozen=True)
class Run:
    """What `run` did; `print` it.

    Attributes:
      env_steps: records that were not FIRST.
      batches: number of batches.
      seconds: how long it took.
      episodes: those that ended, in order of their end; short ones come first, so their mean return is biased.
    """

    env_steps: int
    batches: int
    seconds: float
    episodes: list[Episode]

    @property
    def env_steps_per_second(self) -> float:
        """Rate over the whole run."""
        return self.env_steps / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        whole = [episode.episode_return for episode in self.episodes if not episode.interrupted]
        returns = f", mean return {np.mean(whole):.1f}" if whole else ""
        return (
            f"{self.env_steps:,} env steps in {self.seconds:.1f} s ({self.env_steps_per_second:,.0f}/s), "
            f"{self.batches:,} batches, {len(whole):,} episodes{returns}"
        )


class DeviceBatches:
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
        self._limits = {} if self._max_get == most else {"max_get": self._max_get}
        self.plan = make_plan(table, ops, fields, float64)
        self._action = table.layout.action
        self._action_leaves = list(leaves(self._action))
        self.staging = Staging(ops, self.plan, self.buckets, self._max_get, in_flight + 2 if depth is None else depth)
        self._preparation: Preparation | None = Preparation(ops, self.plan, self.table_slots, dtype, frame_stack)
        if not self._preparation.needed:
            self._preparation = None
        self._single = isinstance(self._action, Leaf) and self._action.kind is Kind.ARRAY
        self._direct = self._single and self._preparation is None  # actions can go from an array straight into their slots
        self._hides = ops.hidden and self._preparation is None  # a compiled policy takes its inputs from the stage
        self._completer = Completer(ops, receiver, self._action, in_flight)
        self._mine: list[Batch] = []  # handed out; those that have been answered are dropped now and then
        self._closed = False

    @property
    def receiver(self) -> Receiver:
        """Where the batches come from."""
        return self._receiver

    # Receiving.

    def recv(
        self,
        min_get: int = DEFAULT,
        max_get: int | None = DEFAULT,
        timeout: float | None = DEFAULT,
        stall_timeout: float | None = DEFAULT,
    ) -> DeviceBatch:
        """Waits for the next batch; see `Receiver.recv`. It raises as well what a batch on its way back has met."""
        limits = {"min_get": min_get, "timeout": timeout, "stall_timeout": stall_timeout}
        if max_get is not DEFAULT and (max_get is None or max_get > self._max_get):
            if max_get is not None:
                raise ValueError(f"max_get: expected at most {self._max_get}, the largest bucket, found {max_get}")
            max_get = self._max_get
        given = {name: value for name, value in limits.items() if value is not DEFAULT}
        return self._next({**self._limits, **given, **({} if max_get is DEFAULT else {"max_get": max_get})})

    def _next(self, limits: dict[str, Any], hidden: tuple[str, ...] = ()) -> DeviceBatch:
        if self._closed:
            raise LoaderClosed("this adapter was closed; make a new one of the loader")
        self._completer.wait_for_room()
        host = self._receiver.recv(**limits) if limits else self._receiver.recv()
        try:
            batch = DeviceBatch(self, host, self.staging.bucket_of(host.size))
            if hidden:
                batch._arrays["hidden"], batch.held.stage = self.staging.put(host, hidden, hidden=True)
            elif not self.ops.lazy:
                batch.stage(tuple(self.plan.spans))
            if self._preparation is not None:
                prepared = self._preparation(batch.select(self._preparation.names))
                batch._arrays["obs"], batch._commit, batch._undo = prepared
            if len(self._mine) >= _MANY:
                self._mine = [other for other in self._mine if not other.answered]
            self._mine.append(host)
        except BaseException:
            host.release()
            raise
        return batch

    def __iter__(self) -> Iterator[DeviceBatch]:
        return _Batches(self)

    def steps(self, env_steps: int, progress: bool | None = None) -> BoundedIterator[DeviceBatch]:
        """Yields batches until `env_steps` records that are not FIRST have come in; a bar on a terminal."""
        return BoundedIterator(self, env_steps, "env steps", progress)

    def episodes(self, episodes: int, progress: bool | None = None) -> BoundedIterator[DeviceBatch]:
        """Yields batches until `episodes` episodes have ended. Short episodes come first: not for unbiased returns."""
        return BoundedIterator(self, episodes, "episodes", progress)

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
        pending = Pending(host, landings, landed, give_back, batch._undo, None if hold is None else ~hold)
        pending.held = parts  # fence
        if batch._commit is not None:
            batch._commit() if hold is None else batch._commit(self.slots_of(host, batch.bucket, ~hold))
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
        return self._bind(policy, params, state, seed, compiled=False)

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
        if seed is not None and self.ops.keys(seed, True)() is None:
            raise ValueError(
                f"seed: expected None, since compiled policies of {type(self.ops).__name__} get no key, found {seed}; seed the "
                "framework's global generator, e.g. torch.manual_seed"
            )
        compiled = self._bind(policy, params, state, seed, compiled=True, options=options)
        examples: dict[int, list[Any]] = {}
        for rows in self.staging.sizes():
            examples[rows] = self._examples(rows, compiled.names)
        self.ops.wait(Stream.COMPUTE, self.ops.record(Stream.H2D))
        compiled.compile(examples, options)
        return compiled

    def _bind(
        self, policy: Any, params: Any, state: Any, seed: int | None, compiled: bool, options: dict[str, Any] | None = None
    ) -> Policy:
        if isinstance(policy, Policy):
            raise TypeError("policy: expected a policy that is not bound to an adapter yet, found one that is")
        adopted = self.ops.adopt(policy, params)
        contract, only_obs = as_contract(adopted.function, adopted.params is not None)
        names = ("obs",) if only_obs and "obs" in self.plan.spans and state is None else tuple(self.plan.spans)
        recurrent = None if state is None else RecurrentState(self.ops, self.table_slots, state)
        if recurrent is not None and "step_type" not in self.plan.spans:
            raise ValueError("state: expected 'step_type' among fields=, since a FIRST record begins a new state")
        step = make_step(self.ops, self.plan.part(names), contract, None if recurrent is None else recurrent.initial)
        keys = self.ops.keys(self._seed if seed is None else require_seed("seed", seed), compiled)
        static = compiled and self.ops.static_outputs(options or {})
        return Policy(self.ops, step, names, adopted.params, recurrent, keys, adopted.own, adopted.params_of, static)

    def _examples(self, rows: int, names: tuple[str, ...]) -> list[Any]:
        """Padding rows to compile with; whatever brings batches to the device is warmed up, so nothing is compiled later."""
        groups = [(name,) for name in self.plan.spans] if self.ops.lazy else [tuple(self.plan.spans)]
        found: dict[str, list[Any]] = {}
        for group in groups:
            memory, views = self.staging.examples(rows, group)
            arrays = iter(self.ops.h2d(memory, views) if views else [])
            for name in group:
                found[name] = [next(arrays) for _ in self.plan.fields[self.plan.spans[name]]]
        if self._preparation is not None:
            found["obs"], commit, _ = self._preparation([x for name in self._preparation.names for x in found[name]])
            commit()
        return self.staging.examples(rows, names)[1] if self._hides else [x for name in names for x in found[name]]

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
        if (env_steps is None) == (episodes is None):
            raise ValueError(f"run: expected one of env_steps and episodes, found env_steps={env_steps}, episodes={episodes}")
        acting = bound(self, policy)
        hidden = self._hides and acting.is_compiled and on_batch is None
        unit, total = ("env steps", env_steps) if episodes is None else ("episodes", episodes)
        began, batches, steps = time.monotonic(), 0, 0
        ended: list[Episode] = []
        with self.released_on_error():
            source = BoundedIterator(_Batches(self, acting.names if hidden else ()), total, unit, progress)
            for batch in source:
                acted = acting.act(batch._arrays["hidden"] if hidden else batch.select(acting.names), batch)
                if on_batch is not None:
                    on_batch(batch, acted)
                batch.send(acted.action)
                batches, steps = batches + 1, steps + batch.env_steps
                ended.extend(batch.episodes)
            if not source.complete:
                raise LoaderClosed(f"run: the loader or this adapter was closed after {source.done:,} of {total:,} {unit}")
            self.drain()
        return Run(steps, batches, time.monotonic() - began, ended)

    def rollout(self, policy: Any, *, length: int, quorum: float | None = None) -> Rollouts:
        """Rollouts for on-policy learners: an iterator of one unroll of all slots after the other.

            for unroll in itertools.islice(batches.rollout(policy, length=128), 100):
                learn(unroll)

        Args:
          policy: from `policy` or `compile`, or anything that `policy` takes.
          length: T, transitions of each slot per rollout.
          quorum: share of the slots that ends a rollout, so that stragglers do not hold it up; None waits for all.
        """
        return Rollouts(self, bound(self, policy), length, quorum)

    def background(
        self, policy: Any, *, unrolls: Unrolls, queue: int = 2, on_full: OnFull = "block", max_lag: int | None = None
    ) -> Background:
        """An actor in a thread, for a learner that computes meanwhile; see `Background`.

        Args:
          policy: from `policy` or `compile`, or anything that `policy` takes.
          unrolls: what puts the unrolls together, made for this adapter.
          queue: most unrolls that wait for the learner.
          on_full: "block" has the actor wait for the learner; "drop_oldest" keeps the envs going.
          max_lag: unrolls in which a version is more than so many behind the newest weights are left out.
        """
        return Background(self, bound(self, policy), unrolls, queue, on_full, max_lag)

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

    def __enter__(self) -> DeviceBatches:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        sizes = self.buckets or "any size"
        return f"DeviceBatches({type(self.ops).__name__}, buckets {sizes}, in_flight {self._completer.in_flight})"


class _Batches(Iterator[DeviceBatch]):
    """Yields batches until the loader or the adapter is closed; an object, so it goes on after an exception."""

    def __init__(self, whose: DeviceBatches, hidden: tuple[str, ...] = ()) -> None:
        self._whose, self._hidden = whose, hidden

    def __next__(self) -> DeviceBatch:
        try:
            return self._whose._next(self._whose._limits, self._hidden)
        except LoaderClosed:
            raise StopIteration from None


def _texts(values: Any, sizes: tuple[int, int]) -> list[Any]:
    """The values of a Text, Sequence, Graph or OneOf action."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__") or len(values) not in sizes:
        raise ValueError(f"expected a list of {sizes[1]} values, found {values!r:.80}")
    return list(values)
