"""One environment in one slot: whose turn it is, what its episodes are, and when it steps, resets or is built anew."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import Any

from slotloader.errors import SpecMismatch
from slotloader.messages.reports import Remark
from slotloader.records import values
from slotloader.records.spaces import column_of, tree_of
from slotloader.records.specs import Tree, differences
from slotloader.table.slots import Table
from slotloader.table.writer import SlotWriter
from slotloader.worker.config import EnvOptions, LifePlan
from slotloader.worker.envs import EnvContext, EnvFactory, EpisodeKey, call_factory, evaluation_seed, life_seed, plan_seed
from slotloader.worker.isolation import IsolatedEnv
from slotloader.worker.kinds import env_of
from slotloader.worker.loops import Loop, Move, T, finish


class EnvRunner:
    """Owns one env from factory to close. What it does to the env are coroutines, each run in one and the same thread.

    Attributes:
      slot: the row that it writes.
      in_episode: the next action is one for `env.step`; else it only asks for the next FIRST record.
      wants_reset: its episode has ended and the reset for the next one has not been done.
      finished: its last record has been published and the next FIRST has not.
      started: its first reset has been begun.
      failed: its env raised; nothing more will be published.
      lost: the fleet has given this env up while it hangs in a thread; should it come back, it must not write.
      removed: the env has been taken out of the loader.
      is_async: its `reset` and `step` are coroutines.
      phase: "factory", "reset", "step" or "close": where an exception came from.
      remark: takes what is to be told once and is no failure.
      faults: what an env may raise; the rest is meant for whoever runs the coroutines, and leaves the env as it was.
    """

    def __init__(self, slot: int, worker: int, factory: EnvFactory, options: EnvOptions, life: int = 0, spare: int = 0) -> None:
        self.slot, self.worker, self.spare = slot, worker, spare
        self.in_episode, self.wants_reset, self.finished = False, True, False
        self.started = self.failed = self.lost = self.removed = self.is_async = False
        self.phase = "factory"
        self.remark: Callable[[Remark], None] = lambda remark: None
        self.faults: tuple[type[BaseException], ...] = (BaseException,)
        self._factory, self._options = factory, options
        self._plan = LifePlan(life)
        self._reset_error: BaseException | None = None
        self._stride = options.spares + 1  # env `spare` plays the episodes spare, spare + stride, ...
        self._episode = spare - self._stride
        self._seed: int | None = None
        self._life_began = 0  # steps of the slot before this life
        self._reset_began = 0
        self._loop: Loop | None = None
        self._owns_loop = False

    @property
    def life(self) -> int:
        """The life that it plays, or is about to begin."""
        return self._plan.life

    # Building and binding.

    async def build(self) -> None:
        """Calls the factory and translates the declared spaces."""
        self.phase = "factory"
        await self._outside(self._build)

    def _build(self) -> None:
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

    async def rebuild(self, life: int) -> None:
        """Replaces an env that has failed; its first record is due as after a start.

        Raises:
          SpecMismatch: the new env has other spaces; and whatever the factory raises.
        """
        await self._close_env()
        before = (self.observation, self.action)
        self.begin_life(LifePlan(life))
        await self.build()
        for name, old, new in zip(("obs", "action"), before, (self.observation, self.action), strict=True):
            for line in differences(old, new, (name,)):
                raise SpecMismatch(f"life {life} of this env has other spaces than the loader: {line}")

    def begin_life(self, plan: LifePlan) -> None:
        """Starts over as planned, with the slot's next action; a reset that was done ahead, or failed, is forgotten."""
        self._plan, self._episode = plan, self.spare - self._stride
        self._life_began = self._writer.steps
        self.in_episode, self.finished, self.wants_reset, self._reset_error = False, False, True, None

    # The moves of the slot.

    def claim(self) -> None:
        """Takes an ACTED slot on, before its thread or task gets to it."""
        self._writer.begin(resetting=self.wants_reset)  # it waits for a reset that runs, or is about to

    async def first_record(self) -> None:
        """Resets for a life's first record, and publishes it unless one of an earlier life has not been answered yet."""
        await self.reset()
        if self._writer.is_starting():
            self._publish_first()

    async def advance(self) -> None:
        """Serves an ACTED slot: steps, or publishes the FIRST record that answers a last one."""
        if self.in_episode:
            self.finish_step(await self._settled(self.begin_step()))
        else:
            self._writer.begin()
            if self.wants_reset:
                await self._reset()
            self._publish_first()

    def begin_step(self) -> Any:
        """The first half of a step: takes the action; returns what `env.step` returned, to be awaited for an async env."""
        self._writer.begin()
        self.phase = "step"
        return self._step(self._read_action())

    def finish_step(self, result: Any) -> None:
        """The other half: publishes the record."""
        if self.lost:
            return
        observation, reward, terminated, truncated, info = self.env.read_step(result)
        writer = self._writer
        if writer.write_step(observation, reward, terminated, truncated, info):
            self.in_episode, self.wants_reset, self.finished = False, True, True
            if writer.unseen:
                self._remark_unseen(info)
        writer.publish()

    def answer_last(self) -> None:
        """`advance` where only the record of a reset that has been done is due."""
        self._writer.begin()
        self._publish_first()

    async def reset(self) -> None:
        """Resets ahead of time; a failure is kept until the last record has been answered."""
        try:
            await self._reset()
        except self.faults as error:
            self._reset_error = error
            self._leave_reset()
            self.wants_reset = False

    async def _reset(self) -> None:
        limit = self._options.recycle_after
        if limit is not None and self._episode // self._stride + 1 >= limit:
            self._enter_reset()  # building the new env is part of the reset, for `reset_timeout` too
            await self.rebuild(self.life + 1)
        episode = self._episode + self._stride
        self._enter_reset()
        self.phase = "reset"
        seed, options = self._wishes(episode)
        result = self.env.reset(seed, options)
        if hasattr(type(result), "__await__"):
            result = await self._settled(result)
        self._writer.count_reset(monotonic_ns() - self._reset_began)
        self._kept.keep(*self.env.read_reset(result))
        self._episode, self._seed = episode, seed  # not before: a reset that was interrupted is done again
        self._leave_reset()
        self.wants_reset = False

    def _enter_reset(self) -> None:
        self._reset_began = monotonic_ns()
        if self._stride == 1:  # a spare resets behind the back of an env that is stepping: the words are that one's
            self._writer.begin_reset()

    def _leave_reset(self) -> None:
        if self._stride == 1:
            self._writer.end_reset()

    def _wishes(self, episode: int) -> tuple[int | None, dict[str, Any] | None]:
        """Seed and options of an episode's reset: the life's, or what `on_reset` wishes, or what the plan says."""
        plan, is_first = self._plan, episode == self.spare
        seed = None
        if is_first and plan.seed is not None:
            seed = plan_seed(plan.seed, self.spare)
        elif is_first:
            seed = life_seed(self._options.seed, self.slot, self.life, self.spare)
        if plan.evaluation is not None:
            seed = evaluation_seed(plan.evaluation[0], self.slot, plan.evaluation[1] + episode)
        options = None
        if self._options.on_reset is not None:
            wish = dict(self._options.on_reset(EpisodeKey(self.slot, self.life, episode)) or {})
            seed, options = wish.pop("seed", seed), wish.pop("options", None)
            if wish:
                raise SpecMismatch(f"on_reset: expected a dict with seed and options, found also {list(wish)}")
        if is_first and self.spare == 0:  # the first reset of the life
            seed = seed if plan.seed is None else plan.seed
            options = options if plan.options is None else dict(plan.options)
        return seed, options

    def _publish_first(self) -> None:
        """Publishes the record that a reset left in private memory; raises what a failed reset raised."""
        if self._reset_error is not None:
            error, self._reset_error = self._reset_error, None
            raise error
        if self.lost:
            return
        self.in_episode, self.finished = True, False
        self._writer.write_kept(self._kept, self.life, self._episode, self._seed)
        self._writer.publish()

    def _remark_unseen(self, info: Mapping[str, Any]) -> None:
        keys = [key for key in {**self._kept.info, **info} if isinstance(key, str)]
        unseen = [name for name in self._writer.unseen if isinstance(name, str)]
        self._writer.unseen.clear()  # none are looked for after the first episode
        for name in unseen:
            close = difflib.get_close_matches(name, keys, 1)
            meant = f"did you mean {close[0]!r}?" if close else "it is zero until an info has it"
            text = f"info: expected the declared column {name!r} in an episode of slot {self.slot}, found {keys[:16]!r:.600}"
            self.remark(Remark(f"info {name}", f"{text}; {meant}"))

    def put_back(self) -> None:
        """Ctrl-C has struck in `advance`: the action is to be taken again."""
        self._writer.put_back()

    def fail(self) -> None:
        """The env has raised: nothing more is published until it has been rebuilt."""
        self.failed = True
        self._writer.abandon()

    @property
    def steps_taken(self) -> int:
        """Calls of `env.step` that returned, in this life."""
        return self._writer.steps - self._life_began if hasattr(self, "_writer") else 0

    # What the trainer asks of an env between two of its steps.

    async def carry_out(self, verb: str, args: Any) -> Any:
        """Runs one command of `worker.Worker.carry_out` on this env."""
        if verb == "call":
            name, positional, keywords = args
            found = self.env.get_attr(name)  # a value that is not callable is what is returned
            return await self._settled(found(*positional, **keywords)) if callable(found) else found
        if verb == "get_attr":
            return self.env.get_attr(args[0])
        if verb == "set_attr":
            return self.env.set_attr(args[0], args[1][self.slot])
        if verb == "rebuild":
            await self.rebuild(args[0][self.slot])
            self.started = self.failed = False
            return None
        if verb == "begin_life":
            return self.begin_life(args[0][self.slot])
        if verb == "remove":
            self.retire()
            return await self._close_env()
        raise ValueError(f"unknown command {verb!r}")

    def retire(self) -> None:
        """Takes the slot out of service."""
        self.removed = self.failed = self.started = True
        self.wants_reset = False

    # The end of the env.

    async def _close_env(self) -> None:
        """Closes the env, if there is one. It has failed, or nobody wants it any more: what it raises is of no interest."""
        env = getattr(self, "env", None)
        if env is None:
            return
        del self.env, self._step
        with contextlib.suppress(*self.faults):
            await self._settled(env.close())

    async def close(self) -> None:
        """Closes the env once; a runner that never built one does nothing."""
        self.phase = "close"
        env, self.failed = getattr(self, "env", None), True
        if env is not None:
            del self.env, self._step
            await self._settled(env.close())

    def end(self) -> None:
        """Ends the event loop that it has made for itself, if any; after `close`."""
        if self._loop is not None and self._owns_loop:
            self._loop.close()
            self._loop = None

    # How its coroutines run.

    def adopt_loop(self, loop: Loop) -> None:
        """Uses the loop of the worker for this env's coroutines; the worker closes it."""
        self._loop, self._owns_loop = loop, False

    def settle(self, move: Move[T]) -> T:
        """Runs one of the coroutines above to its end, in the calling thread."""
        return self._own_loop().complete(move) if self.is_async else finish(move)

    def _own_loop(self) -> Loop:
        if self._loop is None:
            self._loop, self._owns_loop = Loop(), True
        return self._loop

    async def _settled(self, result: Any) -> Any:
        """The value of what an env returned, which may have to be awaited."""
        if not hasattr(type(result), "__await__"):
            return result
        if self._loop is not None and self._loop.is_running():
            return await result
        return self._own_loop().complete(_awaited(result))  # of an env that is not async but for this

    async def _outside(self, function: Callable[[], None]) -> None:
        """Calls a function with no event loop around it."""
        if self._loop is not None and self._loop.is_running():
            await self._loop.outside(function)
        else:
            function()


async def _awaited(result: Any) -> Any:
    return await result
