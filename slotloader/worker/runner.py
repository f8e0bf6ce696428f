"""One environment in one slot: step, reset, publish. The only code that writes the request side of a local slot."""

from __future__ import annotations

import asyncio
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

import numpy as np

from slotloader.errors import SpecMismatch
from slotloader.messages.reports import Remark
from slotloader.records import values
from slotloader.records.spaces import column_of, tree_of
from slotloader.records.specs import Array, Tree, differences, leaves, show_value
from slotloader.records.step_type import StepType
from slotloader.table.layout import INFO_BYTES
from slotloader.table.publisher import Publisher
from slotloader.table.slots import SlotState, Table
from slotloader.worker.envs import Env, EnvContext, EnvFactory, EpisodeKey, call_factory, evaluation_seed, life_seed
from slotloader.worker.isolation import IsolatedEnv

_WRITING = int(SlotState.WRITING)
_FIRST, _MID = int(StepType.FIRST), int(StepType.MID)
_DROPPED_BYTES = 600  # room for the names of what an info had to leave out
_FLOAT32_MAX = float(np.finfo(np.float32).max)

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


class Tally:
    """Running figures of one slot, over all its lives and spares; written by whichever env is stepping."""

    __slots__ = ("reset_ns", "resets", "sequence", "step_ns", "steps")

    def __init__(self) -> None:
        self.sequence = self.steps = self.step_ns = self.resets = self.reset_ns = 0

    def load(self, table: Table, slot: int) -> None:
        """Goes on where an earlier worker of the slot ended."""
        for name in self.__slots__:
            setattr(self, name, int(getattr(table, name)[slot]))


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
        tally: Tally | None = None,
    ) -> None:
        self.slot, self.worker, self.life, self.spare = slot, worker, life, spare
        self.wants_reset = True
        self.finished = False
        self.started = self.failed = self.lost = self.removed = self.is_async = False
        self.phase = "factory"
        self._factory, self._options = factory, options
        self._ended = True  # the next action only releases the next FIRST record
        self._fresh = False  # the reset has been done, its record waits in private memory
        self._reset_error: BaseException | None = None
        self._stride = options.spares + 1  # env `spare` plays the episodes spare, spare + stride, ...
        self._episode = spare - self._stride
        self._seed: int | None = None
        self._evaluation: tuple[int, int] | None = None  # seed, and episodes begun before this life
        self._length, self._return = 0, 0.0
        self._tally = Tally() if tally is None else tally
        self._life_began = 0  # steps of the slot before this life
        self._reset_began = 0
        self._unseen: set[str] = set()  # declared columns that no info has had yet; None are looked for after an episode
        self.remark: Callable[[Remark], None] = lambda remark: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owns_loop = False

    def build(self) -> None:
        """Calls the factory and translates the declared spaces."""
        options = self._options
        seed = life_seed(options.seed, self.slot, self.life, self.spare)
        context = EnvContext(self.slot, self.life, self.worker, seed)
        isolated = options.spare_processes
        self.env = IsolatedEnv(self._factory, context) if isolated else Env(call_factory(self._factory, context))
        self.is_async, self._step = self.env.is_async, self.env.raw.step
        self.observation = tree_of(self.env.observation_space, ("obs",), options.max_bytes)
        self.action = tree_of(self.env.action_space, ("action",), options.max_bytes)
        self.info: dict[str, Tree] = {
            name: column_of(name, declared, options.max_bytes) for name, declared in options.info.items()
        }

    def attach(self, table: Table, publisher: Publisher) -> None:
        """Binds the env to its rows."""
        slot, check = self.slot, self._options.check
        self._publisher = publisher
        self._write_obs = values.writer(self.observation, table.observation, slot, ("obs",), check)
        self._spare = [np.zeros((1, *column.shape[1:]), column.dtype) for column in table.observation]
        self._write_spare = values.writer(self.observation, self._spare, 0, ("obs",), check)
        self._obs_rows = [(c[slot, ...], s[0, ...]) for c, s in zip(table.observation, self._spare, strict=True)]
        self._read_action = values.reader(self.action, table.action, slot)
        self._info_columns = self._attach_info(table)
        self._unseen = set(self.info)
        self._last_info: Mapping[str, Any] = {}
        self._state, self._step_type, self._reward = table.state_words, table.step_type_words, table.reward_words
        self._publish_ns, self._begin_ns = table.publish_ns_words, table.begin_ns_words
        self._sequence_word, self._resetting = table.sequence_words, table.resetting_words
        self._return_word, self._length_word = table.progress_episode_return_words, table.progress_length_words
        self._steps_word, self._step_ns_word = table.steps_words, table.step_ns_words
        self._table = table
        self._tally.load(table, slot)
        self._life_began = self._tally.steps

    def _attach_info(self, table: Table) -> list[tuple[str, Callable[[Any], None], list[Array]]]:
        columns, at = [], 0
        for name, tree in self.info.items():
            count = sum(len(values.parts(leaf)) for leaf in leaves(tree))
            arrays = table.info[at : at + count]
            rows = [array[self.slot, ...] for array in arrays]
            columns.append((name, values.writer(tree, arrays, self.slot, ("info", name), self._options.check), rows))
            at += count
        return columns

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
        self._begin_ns[self.slot] = monotonic_ns()
        if self._ended and self.wants_reset:  # it waits for a reset that is still running, or about to
            self._resetting[self.slot] = 1
        self._state[self.slot] = _WRITING

    def begin_life(self, life: int, evaluation: tuple[int, int] | None = None) -> None:
        """Starts over with the seeds of another life; takes effect with the slot's next action.

        Args:
          life: which.
          evaluation: `(seed, begun)` to seed every episode of the life by `evaluation_seed`, counted on from `begun`.
        """
        self.life, self._episode, self._evaluation = life, self.spare - self._stride, evaluation
        self._life_began = self._tally.steps
        self.finished = False
        self._ended, self._fresh, self.wants_reset, self._reset_error = True, False, True, None

    # One move of the slot: the step for its action, or the record that a reset left behind.

    def advance(self) -> None:
        """Serves an ACTED slot: steps, or publishes the FIRST record that answers a terminal one."""
        if self.is_async:
            self._run(self.advance_async())
            return
        begin = self._begin_ns[self.slot] = monotonic_ns()  # before WRITING: the fleet reads it to find hung steps
        self._state[self.slot] = _WRITING
        if self._ended:
            if self.wants_reset:
                self._recycle_if_due()
                self._finish_reset(self._start_reset())
            self.publish_first()
            return
        self._publisher.order_fence()
        self.phase = "step"
        self._finish_step(self._step(self._read_action()), begin)

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
        begin = self._begin_ns[self.slot] = monotonic_ns()
        self._state[self.slot] = _WRITING
        if self._ended:
            if self.wants_reset:
                await self._recycle_if_due_async()
                self._finish_reset(await _settle(self._start_reset()))
            self.publish_first()
            return
        self._publisher.order_fence()
        self.phase = "step"
        self._finish_step(await _settle(self._step(self._read_action())), begin)

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
        return self._tally.steps - self._life_began

    def _keep(self, error: BaseException) -> None:
        self._reset_error = error
        self._leave_reset(monotonic_ns())
        self.wants_reset = False

    def _enter_reset(self) -> None:
        self._reset_began = monotonic_ns()
        if self._stride == 1:  # a spare resets behind the back of an env that is stepping: the words are that one's
            self._begin_ns[self.slot] = self._reset_began
            self._resetting[self.slot] = 1

    def _leave_reset(self, now: int) -> None:
        if self._stride == 1:
            self._begin_ns[self.slot] = now  # before the word below: nobody may take the reset's time for a step's
            self._resetting[self.slot] = 0

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
        slot = self.slot
        now = monotonic_ns()
        self._episode += self._stride
        tally = self._tally
        tally.resets += 1
        tally.reset_ns += now - self._reset_began
        self._table.resets_words[slot], self._table.reset_ns_words[slot] = tally.resets, tally.reset_ns
        observation, info = self.env.read_reset(result)
        self._write_spare(observation)
        self._last_info = info
        self._leave_reset(now)
        self.wants_reset, self._fresh = False, True

    def publish_first(self) -> None:
        """Publishes the record that a reset left in private memory; raises what a failed reset raised."""
        if self._reset_error is not None:
            error, self._reset_error = self._reset_error, None
            raise error
        if self.lost:
            return
        slot, table = self.slot, self._table
        if self._stride > 1:
            self._begin_ns[slot] = monotonic_ns()
            self._resetting[slot] = 0  # set by `claim` when the slot had to wait for this spare
        for row, spare in self._obs_rows:
            row[...] = spare
        self._write_info(self._last_info)
        self._ended = self._fresh = self.finished = False
        self._length, self._return = 0, 0.0
        table.life_words[slot], table.episode_words[slot] = self.life, self._episode
        table.progress_life_words[slot], table.progress_ended_words[slot] = self.life, 0
        table.episode_seed_words[slot] = -1 if self._seed is None else self._seed
        self._publish(_FIRST, 0.0, monotonic_ns())

    def _finish_step(self, result: Any, begin: int) -> None:
        now = monotonic_ns()
        if self.lost:
            return
        observation, reward, terminated, truncated, info = self.env.read_step(result)
        self._write_obs(observation)
        if type(reward) is not float or not -_FLOAT32_MAX <= reward <= _FLOAT32_MAX:
            reward = _fit_reward(reward)
        if self._info_columns:
            self._write_info(info)
        self._length += 1
        self._return += reward
        if terminated or truncated:
            self._count_step(now - begin)
            self._ended = self.wants_reset = self.finished = True
            self._table.progress_ended_words[self.slot] = 1
            self._write_last_info(info)
            if self._unseen:
                self._remark_unseen(info)
            step_type = int(StepType.TERMINATION if terminated else StepType.TRUNCATION)
            self._publish(step_type, reward, now)
        else:
            self._publish(_MID, reward, now)
            self._count_step(now - begin)  # while the trainer is being woken

    def _count_step(self, duration: int) -> None:
        slot, tally = self.slot, self._tally
        tally.steps += 1
        tally.step_ns += duration
        self._steps_word[slot], self._step_ns_word[slot] = tally.steps, tally.step_ns

    def _publish(self, step_type: int, reward: float, now: int) -> None:
        slot = self.slot
        self._step_type[slot] = step_type
        self._reward[slot] = reward
        self._return_word[slot], self._length_word[slot] = self._return, self._length
        self._tally.sequence += 1
        self._sequence_word[slot] = self._tally.sequence
        self._publish_ns[slot] = now
        self._publisher.publish(slot)

    def _write_info(self, info: Mapping[str, Any]) -> None:
        for name, write, rows in self._info_columns:
            if name in info:
                write(info[name])
                if self._unseen:
                    self._unseen.discard(name)
            else:  # a column that a record lacks is zero, as in gymnasium's vector infos
                for row in rows:
                    row[...] = 0

    def _remark_unseen(self, info: Mapping[str, Any]) -> None:
        keys = [key for key in {**self._last_info, **info} if isinstance(key, str)]
        unseen, self._unseen = [name for name in self._unseen if isinstance(name, str)], set()
        for name in unseen:
            close = difflib.get_close_matches(name, keys, 1)
            meant = f"did you mean {close[0]!r}?" if close else "it is zero until an info has it"
            text = f"info: expected the declared column {name!r} in an episode of slot {self.slot}, found {keys[:16]!r:.600}"
            self.remark(Remark(f"info {name}", f"{text}; {meant}"))

    def _write_last_info(self, info: Mapping[str, Any]) -> None:
        data = pack_info(info)
        self._table.info_data[self.slot, : len(data)] = np.frombuffer(data, np.uint8)
        self._table.info_length_words[self.slot] = len(data)

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


def _fit_reward(reward: Any) -> float:
    """A float that float32 can hold; None (dm_env) is 0."""
    if reward is None:
        return 0.0
    number = np.asarray(reward)
    if number.shape != () or number.dtype.kind not in "biuf":
        remedy = "; use reward.item()" if number.size == 1 else ""
        raise SpecMismatch(f"reward: expected a number, found {show_value(reward)}{remedy}")
    value = float(number)
    if math.isfinite(value) and abs(value) > _FLOAT32_MAX:
        raise SpecMismatch(f"reward: expected a number that float32 can hold, found {value}")
    return value


def pack_info(info: Mapping[str, Any]) -> bytes:
    """The info of a last record in at most `INFO_BYTES`: what cannot be packed or does not fit is named, not sent.

    Returns:
      msgpack of `(info, dropped)`: the smallest values are kept, `dropped` names what was left out, shortened if long.
    """
    try:
        data = values.pack((info, ()))
        if len(data) <= INFO_BYTES:
            return data
    except (TypeError, ValueError, OverflowError):
        pass
    sizes: dict[Any, int] = {}
    dropped: list[str] = []
    for key, value in info.items():
        try:
            sizes[key] = len(values.pack((key, value)))
        except (TypeError, ValueError, OverflowError):
            dropped.append(str(key))
    kept, room = set(), INFO_BYTES - _DROPPED_BYTES
    for key in sorted(sizes, key=lambda key: sizes[key]):
        room -= sizes[key]
        if room < 0:
            dropped.append(str(key))
        else:
            kept.add(key)
    names = [_short_name(name) for name in dropped[:16]]
    if len(dropped) > len(names):
        names.append(f"... and {len(dropped) - len(names)} more")
    return values.pack(({key: info[key] for key in info if key in kept}, names))


def _short_name(name: str) -> str:
    """At most 24 bytes of a key, whatever characters it is made of."""
    return name.encode("utf-8", "backslashreplace")[:24].decode("utf-8", "ignore")
