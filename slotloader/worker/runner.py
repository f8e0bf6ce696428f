"""One environment in one slot: whose turn it is, what its episodes are, and when it steps, resets or is built anew."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

from slotloader.errors import SpecMismatch
from slotloader.messages.reports import Remark
from slotloader.records import values
from slotloader.records.spaces import column_of, tree_of
from slotloader.records.specs import Tree, differences
from slotloader.table.slots import Table
from slotloader.table.writer import SlotWriter
from slotloader.worker.envs import EnvContext, EnvFactory, EpisodeKey, call_factory, evaluation_seed, life_seed
from slotloader.worker.isolation import IsolatedEnv
from slotloader.worker.kinds import env_of

OnReset = Callable[[EpisodeKey], Mapping[str, Any] | None]


@dataclass(frozen=True)
class EnvOptions:
    """What all envs of a loader share.

    Attributes:
      seed: base seed, see `envs.life_seed`.
      on_reset: steers each reset; returns a dict with `seed` and `options`, or None.
      info: declared info columns, name to dtype, `(dtype, shape)` or space.
      max_bytes: capacities of TEXT and PACKED leaves.
      check: also refuse NaN and values out of bounds.
      spares: further envs of each slot, reset in advance.
      spare_processes: each env, spares too, runs in a process of its own.
      recycle_after: episodes after which an env is closed and built anew; None is never.
    """

    seed: int
    on_reset: OnReset | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    max_bytes: Mapping[str, int] = field(default_factory=dict)
    check: bool = False
    spares: int = 0
    spare_processes: bool = False
    recycle_after: int | None = None


class EnvRunner:
    """Owns one env from factory to close; every method runs in one and the same thread.

    Attributes:
      slot: the row that it writes.
      wants_reset: its episode has ended and the reset for the next one has not been done.
      finished: its last record has been published and the next FIRST has not.
      started: its first reset has been begun.
      failed: its env raised; nothing more will be published.
      lost: the fleet has given this env up while it hangs in a thread; should it come back, it must not write.
      removed: the env has been taken out of the loader.
      is_async: its `reset` and `step` are coroutines.
      phase: "factory", "reset", "step" or "close": where an exception came from.
    """

    def __init__(
        self,
        slot: int,
        worker: int,
        factory: EnvFactory,
        options: EnvOptions,
        life: int = 0,
        spare: int = 0,
    ) -> None:
        self.slot, self.worker, self.life, self.spare = slot, worker, life, spare
        self.wants_reset = True
        self.finished = False
        self.started = self.failed = self.lost = self.removed = self.is_async = False
        self.phase = "factory"
        self._factory, self._options = factory, options
        self._ended = True  # the next action only releases the next FIRST record
        self._reset_error: BaseException | None = None
        self._stride = options.spares + 1  # env `spare` plays the episodes spare, spare + stride, ...
        self._episode = spare - self._stride
        self._seed: int | None = None
        self._evaluation: tuple[int, int] | None = None  # seed, and episodes begun before this life
        self._life_began = 0  # steps of the slot before this life
        self._reset_began = 0
        self.remark: Callable[[Remark], None] = lambda remark: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owns_loop = False

    def build(self) -> None:
        """Calls the factory and translates the declared spaces."""
        options = self._options
        seed = life_seed(options.seed, self.slot, self.life, self.spare)
        context = EnvContext(self.slot, self.life, self.worker, seed)
        isolated = options.spare_processes
        self.env = IsolatedEnv(self._factory, context) if isolated else env_of(call_factory(self._factory, context))
        self.is_async, self._step = self.env.is_async, self.env.step
        self.observation = tree_of(self.env.observation_space, ("obs",), options.max_bytes)
        self.action = tree_of(self.env.action_space, ("action",), options.max_bytes)
        self.info: dict[str, Tree] = {
            name: column_of(name, declared, options.max_bytes) for name, declared in options.info.items()
        }

    def attach(self, table: Table, writer: SlotWriter) -> None:
        """Binds the env to its slot; all envs of a slot share its writer."""
        self._writer, self._kept = writer, writer.keeper()
        self._read_action = values.reader(self.action, table.action, self.slot)
        self._life_began = writer.steps

    def rebuild(self, life: int) -> None:
        """Replaces an env that has failed; its first record is due as after a start.

        Raises:
          SpecMismatch: the new env has other spaces; and whatever the factory raises.
        """
        self.settle(self._close_env())
        self._build_again(life)

    async def rebuild_async(self, life: int) -> None:
        """`rebuild` for an async env."""
        await _settle(self._close_env())
        self._build_again(life)

    def _close_env(self) -> Any:
        env = getattr(self, "env", None)
        if env is None:
            return None
        del self.env, self._step
        try:
            return env.close()
        except Exception:  # it has failed already; what matters is the new one
            return None

    def _build_again(self, life: int) -> None:
        before = (self.observation, self.action)
        self.begin_life(life)
        self.phase = "factory"
        self.build()
        for name, old, new in zip(("obs", "action"), before, (self.observation, self.action), strict=True):
            for line in differences(old, new, (name,)):
                raise SpecMismatch(f"life {life} of this env has other spaces than the loader: {line}")
        self.started = self.failed = False

    def claim(self) -> None:
        """Takes an ACTED slot on, before its thread or task gets to it."""
        self._writer.begin(resetting=self._ended and self.wants_reset)  # it waits for a reset that runs, or is about to

    def begin_life(self, life: int, evaluation: tuple[int, int] | None = None) -> None:
        """Starts over with the seeds of another life; takes effect with the slot's next action.

        Args:
          life: which.
          evaluation: `(seed, begun)` to seed every episode of the life by `evaluation_seed`, counted on from `begun`.
        """
        self.life, self._episode, self._evaluation = life, self.spare - self._stride, evaluation
        self._life_began = self._writer.steps
        self.finished = False
        self._ended, self.wants_reset, self._reset_error = True, True, None

    # One move of the slot: the step for its action, or the record that a reset left behind.

    def advance(self) -> None:
        """Serves an ACTED slot: steps, or publishes the FIRST record that answers a terminal one."""
        if self.is_async:
            self._run(self.advance_async())
            return
        self._writer.begin()
        if self._ended:
            if self.wants_reset:
                self._recycle_if_due()
                self._finish_reset(self._start_reset())
            self.publish_first()
            return
        self.phase = "step"
        self._finish_step(self._step(self._read_action()))

    def reset(self) -> None:
        """Resets ahead of time; a failure is kept until the terminal record has been answered."""
        if self.is_async:
            self._run(self.reset_async())
            return
        try:
            self._recycle_if_due()
            self._finish_reset(self._start_reset())
        except (Exception, SystemExit) as error:
            self._keep(error)

    def _recycle_if_due(self) -> None:
        if self._recycling_is_due():
            self._enter_reset()  # building the new env is part of the reset, for `reset_timeout` too
            self.settle(self._close_env())
            self._build_again(self.life + 1)
            self.started = True

    async def _recycle_if_due_async(self) -> None:
        if self._recycling_is_due():
            self._enter_reset()
            await _settle(self._close_env())
            self._build_again(self.life + 1)
            self.started = True

    def _recycling_is_due(self) -> bool:
        limit = self._options.recycle_after
        return limit is not None and self._episode // self._stride + 1 >= limit

    async def advance_async(self) -> None:
        """`advance` for an env whose `reset` and `step` are coroutines."""
        self._writer.begin()
        if self._ended:
            if self.wants_reset:
                await self._recycle_if_due_async()
                self._finish_reset(await _settle(self._start_reset()))
            self.publish_first()
            return
        self.phase = "step"
        self._finish_step(await _settle(self._step(self._read_action())))

    async def reset_async(self) -> None:
        """`reset` for an async env."""
        try:
            await self._recycle_if_due_async()
            self._finish_reset(await _settle(self._start_reset()))
        except (Exception, SystemExit) as error:
            self._keep(error)

    def _run(self, coroutine: Any) -> Any:
        if self._loop is None:
            self._loop, self._owns_loop = asyncio.new_event_loop(), True
        return self._loop.run_until_complete(coroutine)

    def adopt_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Uses the loop of the worker for this env's coroutines; the worker closes it."""
        self._loop, self._owns_loop = loop, False

    def settle(self, result: Any) -> Any:
        """The value of `result`, which may be a coroutine of an async env."""
        return self._run(result) if asyncio.iscoroutine(result) else result

    @property
    def steps_taken(self) -> int:
        """Calls of `env.step` that returned, in this life."""
        return self._writer.steps - self._life_began if hasattr(self, "_writer") else 0

    def _keep(self, error: BaseException) -> None:
        self._reset_error = error
        self._leave_reset()
        self.wants_reset = False

    def _enter_reset(self) -> None:
        self._reset_began = monotonic_ns()
        if self._stride == 1:  # a spare resets behind the back of an env that is stepping: the words are that one's
            self._writer.begin_reset()

    def _leave_reset(self) -> None:
        if self._stride == 1:
            self._writer.end_reset()

    # The parts of a move, shared by both calling styles.

    def _start_reset(self) -> Any:
        episode = self._episode + self._stride  # counted once the reset is done: an interrupted one is done again
        self._enter_reset()
        self.phase = "reset"
        first_of_life = episode == self.spare
        seed = life_seed(self._options.seed, self.slot, self.life, self.spare) if first_of_life else None
        if self._evaluation is not None:
            seed = evaluation_seed(self._evaluation[0], self.slot, self._evaluation[1] + episode)
        options = None
        if self._options.on_reset is not None:
            wish = dict(self._options.on_reset(EpisodeKey(self.slot, self.life, episode)) or {})
            seed, options = wish.pop("seed", seed), wish.pop("options", None)
            if wish:
                raise SpecMismatch(f"on_reset: expected a dict with seed and options, found also {list(wish)}")
        self._seed = seed
        return self.env.reset(seed, options)

    def _finish_reset(self, result: Any) -> None:
        duration = monotonic_ns() - self._reset_began
        self._episode += self._stride
        self._writer.count_reset(duration)
        self._kept.keep(*self.env.read_reset(result))
        self._leave_reset()
        self.wants_reset = False

    def publish_first(self) -> None:
        """Publishes the record that a reset left in private memory; raises what a failed reset raised."""
        if self._reset_error is not None:
            error, self._reset_error = self._reset_error, None
            raise error
        if self.lost:
            return
        self._ended = self.finished = False
        self._writer.write_kept(self._kept, self.life, self._episode, self._seed)
        self._writer.publish()

    def _finish_step(self, result: Any) -> None:
        if self.lost:
            return
        observation, reward, terminated, truncated, info = self.env.read_step(result)
        writer = self._writer
        if writer.write_step(observation, reward, terminated, truncated, info):
            self._ended = self.wants_reset = self.finished = True
            if writer.unseen:
                self._remark_unseen(info)
        writer.publish()

    def _remark_unseen(self, info: Mapping[str, Any]) -> None:
        keys = [key for key in {**self._kept.info, **info} if isinstance(key, str)]
        unseen = [name for name in self._writer.unseen if isinstance(name, str)]
        self._writer.unseen.clear()  # none are looked for after the first episode
        for name in unseen:
            close = difflib.get_close_matches(name, keys, 1)
            meant = f"did you mean {close[0]!r}?" if close else "it is zero until an info has it"
            text = f"info: expected the declared column {name!r} in an episode of slot {self.slot}, found {keys[:16]!r:.600}"
            self.remark(Remark(f"info {name}", f"{text}; {meant}"))

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `env.name(*args, **kwargs)`, looking through wrappers; a value that is not callable is returned."""
        found = self.get_attr(name)
        return found(*args, **kwargs) if callable(found) else found

    def get_attr(self, name: str) -> Any:
        """See `Env.get_attr`."""
        return self.env.get_attr(name)

    def set_attr(self, name: str, value: Any) -> None:
        """See `Env.set_attr`."""
        self.env.set_attr(name, value)

    def put_back(self) -> None:
        """Ctrl-C has struck in `advance`: the action is to be taken again."""
        self._writer.put_back()

    def fail(self) -> None:
        """The env has raised: nothing more is published until it has been rebuilt."""
        self.failed = True
        self._writer.abandon()

    def retire(self) -> None:
        """Takes the slot out of service."""
        self.removed = self.failed = self.started = True
        self.wants_reset = False

    def remove(self) -> Any:
        """Closes the env for good, on the loader's wish; a coroutine for an async env."""
        self.retire()
        return self._close_env()

    def close(self) -> None:
        """Closes the env once; a runner that never built one does nothing."""
        self.phase = "close"
        env, self.failed = getattr(self, "env", None), True
        try:
            if env is not None:
                del self.env, self._step
                self.settle(env.close())
        finally:
            if self._loop is not None and self._owns_loop:
                self._loop.close()
                self._loop = None


async def _settle(result: Any) -> Any:
    return await result if asyncio.iscoroutine(result) or asyncio.isfuture(result) else result
