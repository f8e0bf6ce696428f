"""SlotLoader: a fleet of environments, iterated like a DataLoader."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, cast

import numpy as np

from slotloader.arguments import is_integer, require_count, require_seed
from slotloader.batching import stats as figures
from slotloader.batching.actions import ActionBounds, Scatterer
from slotloader.batching.batches import Batch
from slotloader.batching.exchange import Exchange, Status
from slotloader.batching.former import Request
from slotloader.batching.gatherer import Gatherer
from slotloader.batching.receiver import Receiver
from slotloader.batching.recording import VideoRecording
from slotloader.batching.source import BatchSource
from slotloader.errors import LoaderClosed, SlotLoaderError
from slotloader.fleet.local import InlineFleet, ThreadFleet
from slotloader.fleet.supervision import Limits, OnFailure
from slotloader.fleet.supervisor import Fleet
from slotloader.messages.pickling import loaded
from slotloader.records.spaces import column_of
from slotloader.table.engine import PythonEngine
from slotloader.table.layout import MAX_RECEIVERS, Layout
from slotloader.table.slots import SlotState
from slotloader.worker import envs as env_sources
from slotloader.worker.config import EnvOptions, LifePlan, OnReset, WorkerConfig

Backend = Literal["process", "thread", "inline"]

CLOSE_TIMEOUT = 5.0


class SlotLoader(BatchSource[Batch]):
    """Runs many environments and hands out their records in batches.

        with SlotLoader("CartPole-v1", num_envs=8) as loader:
            for batch in loader.steps(10_000):
                batch.send(policy(batch.obs))

    Args:
      envs: a gymnasium id, one factory, or a list of factories and ids. A factory takes no argument or an `EnvContext`
        and returns a gymnasium env, a dm_env env, or any object with `reset`, `step` and declared spaces; `reset` and
        `step` may be coroutine functions. Lambdas, closures and classes of `__main__` work.
      num_envs: number of envs, one slot each; left out for a list.
      env_kwargs: keyword arguments for `gymnasium.make` or the factory.
      backend: "process" runs workers as processes, "thread" as threads, "inline" steps the envs inside `recv`.
      num_workers: number of workers; default one per env.
      envs_per_worker: the same said the other way round.
      worker_threads: step each env of a worker in a thread of its own, for envs that wait on I/O.
      min_get, max_get, timeout, stall_timeout: defaults of `recv`, see there.
      seed: env i is first reset with `seed + i`; None draws one.
      on_reset: called in the worker before each reset with an `EpisodeKey`; returns `{"seed": ..., "options": ...}`.
      info: info columns that travel with each record, name to dtype, `(dtype, shape)` or space. Zero where a record's
        info lacks the key.
      max_bytes: capacities of Text, Sequence, Graph and OneOf leaves, by key.
      action_bounds: "ignore", "clip" or "error" for actions outside the declared bounds.
      check: refuse observations with NaN or out of their bounds.
      debug: arrays out of `batch.view()` are copies that are poisoned when the batch is answered.
      preload: modules to import once, before the worker processes fork.
      cpu_affinity: worker w is pinned to CPU `cpu_affinity[w % len]`.
      start_timeout: seconds until every env must exist.
      step_timeout, reset_timeout: seconds that one `env.step` or `env.reset` may take; a worker that takes longer is killed
        with its stack in the error. None is no limit.
      on_failure: "raise" raises `EnvFailed` or `WorkerDied` from `recv`; "restart" gives the slots a new life; "auto" does so
        for an env that has completed a step before.
      max_restarts: restarts of one slot within `restart_window` seconds, after which its failure is raised.
      restart_window: see `max_restarts`.
      spares: further envs per slot that reset in threads while another plays, so that a long reset costs the slot nothing.
        They take turns in a fixed order and are seeded from (slot, life, spare).
      spare_processes: run each env of a slot in a process of its own beside its worker, for envs that cannot share one with
        their spares; costs some 200 us a step and the start of a process. Process backend only.
      capacity: slots to reserve in all, for `add_envs`; default just enough.
      recycle_after: episodes after which an env is closed and built anew, for envs that leak.

    Raises:
      TypeError, ValueError: an argument is wrong; nothing has been started.
      EnvFailed, WorkerDied, SpecMismatch: an env could not be built, or the envs differ; nothing is left running.
      OSError: too little memory, with needed and free bytes.
    """

    _status = Status(closed=True)  # until something runs: __del__ must not warn about a constructor that failed

    def __init__(
        self,
        envs: Any,
        num_envs: int | None = None,
        *,
        env_kwargs: dict[str, Any] | None = None,
        backend: Backend = "process",
        num_workers: int | None = None,
        envs_per_worker: int | None = None,
        worker_threads: bool = False,
        min_get: int = 1,
        max_get: int | None = None,
        timeout: float | None = 0.002,
        stall_timeout: float | None = 60.0,
        seed: int | None = None,
        on_reset: OnReset | None = None,
        info: Mapping[str, Any] | None = None,
        max_bytes: Mapping[str, int] | None = None,
        action_bounds: ActionBounds = "ignore",
        check: bool = False,
        debug: bool = False,
        preload: Sequence[str] = (),
        cpu_affinity: Sequence[int] | None = None,
        start_timeout: float = 120.0,
        step_timeout: float | None = None,
        reset_timeout: float | None = None,
        on_failure: OnFailure = "auto",
        max_restarts: int = 5,
        restart_window: float = 300.0,
        spares: int = 0,
        spare_processes: bool = False,
        recycle_after: int | None = None,
        capacity: int | None = None,
    ) -> None:
        factories = env_sources.factories(envs, num_envs, env_kwargs)
        self._asked = (min_get, max_get, timeout, stall_timeout)
        capacity = require_count("capacity", capacity, len(factories), optional=True)
        self.num_slots = capacity or len(factories)
        self._request_for(self.num_slots)
        self._env_steps = self._episodes = 0  # of the run, before the meters last started anew
        self.seed = secrets.randbits(31) if seed is None else require_seed("seed", seed)
        self.backend = backend
        spares = require_count("spares", spares, 0)
        if spares and backend == "inline":
            raise ValueError("spares: expected 0 with backend='inline', which has no threads; use 'thread' or 'process'")
        if spare_processes and not (spares and backend == "process"):
            raise ValueError(
                f"spare_processes: expected False without spares on the process backend, found True with spares={spares} and "
                f"backend={backend!r}"
            )
        recycle_after = require_count("recycle_after", recycle_after, optional=True)
        if recycle_after is not None and spares:
            raise ValueError("recycle_after: expected None with spares, whose envs would be recycled at different times")
        self.limits = Limits(on_failure, max_restarts, restart_window, start_timeout, step_timeout, reset_timeout)
        if on_reset is not None and not callable(on_reset):
            raise TypeError(f"on_reset: expected a function of an EpisodeKey, found {on_reset!r}")
        if not isinstance(info or {}, Mapping):
            raise TypeError(f'info: expected columns by name, e.g. {{"success": np.bool_}}, found {info!r}')
        for name, declared in (info or {}).items():
            column_of(name, declared, max_bytes)  # a wrong one shows here, before anything runs
        options = EnvOptions(
            self.seed, on_reset, dict(info or {}), dict(max_bytes or {}), check, spares, spare_processes, recycle_after
        )
        sizes = pack(len(factories), num_workers, envs_per_worker, backend)
        ends = np.cumsum(sizes).tolist()
        configs = [
            WorkerConfig(index, tuple(range(end - size, end)), factories[end - size : end], options, worker_threads)
            for index, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ]
        max_workers = len(configs) + self.num_slots - len(factories)
        self.options, self._threads = options, worker_threads
        self._pauses = 0
        self.fleet = _make_fleet(
            backend, configs, self.limits, max_workers, preload, env_sources.preloads(factories), cpu_affinity
        )
        try:
            self.fleet.launch()
            observation, action, info_tree, self._spaces = self.fleet.wait_built()
            scatterer = Scatterer(action, action_bounds)  # wrong bounds show before memory is taken
            layout = Layout.plan(self.num_slots, max_workers, observation, action, info_tree)
            self.table = table = self.fleet.attach(layout)
            self._wakers = wakers = self.fleet.wakers()
            signals, gather = self.fleet.signals, PythonEngine.gather
            self._exchange = Exchange(
                table=table,
                fleet=self.fleet,
                make_engine=lambda index, *rest: PythonEngine(table, wakers, signals[index], index, *rest),
                scatterer=scatterer,
                observation=Gatherer(observation, table.observation, gather),
                info=Gatherer(info_tree, table.info, gather),
                action=Gatherer(action, table.action, gather),
                sequence=table.sequence.__getitem__,
                limits=self.limits,
                seed=self.seed,
                inline=backend == "inline",
                debug=debug,
                vacant=set(range(len(factories), self.num_slots)),
            )
            self._status = self._exchange.status
            self._receivers: list[Receiver] = []
            self._main = self._add_receiver(0, 0, self.num_slots)
        except BaseException:
            self.fleet.closing = True
            self.fleet.stop(time.monotonic() + CLOSE_TIMEOUT)
            raise
        self._ended = False
        self._closing = threading.RLock()  # a signal handler may close while `close` runs
        self._finalizer = weakref.finalize(self, _stop_forgotten, self.fleet)
        _open_loaders.add(self)

    def _add_receiver(self, index: int, first: int, end: int, whole: Receiver | None = None) -> Receiver:
        receiver = Receiver(self._exchange, self._request_for(end - first), index, first, end, whole)
        self._receivers.append(receiver)
        self._exchange.leases.append(receiver.leases)
        return receiver

    # Receiving and sending: the receiver does it.

    @property
    def request(self) -> Request:
        """See `BatchSource.request`."""
        return self._main.request

    @property
    def most(self) -> int:
        """See `BatchSource.most`: the number of slots."""
        return self.num_slots

    def receive(self, request: Request) -> Batch:
        """See `BatchSource.receive`."""
        return self._main.receive(request)

    def poll(self) -> Batch | None:
        """See `BatchSource.poll`."""
        return self._main.poll()

    def send(self, actions: Any, env_indices: Any) -> None:
        """Answers some leased slots, of one batch or of several; see `Receiver.send`."""
        self._main.send(actions, env_indices)

    @property
    def closed(self) -> bool:
        """Whether nothing can be received or sent any more."""
        return self._status.closed

    @property
    def exchange(self) -> Exchange:
        """What its receivers share; for adapters and learners."""
        return self._exchange

    @property
    def unanswered(self) -> list[Batch]:
        """The batches that hold slots now, oldest first: send or release them."""
        return [batch for receiver in self._receivers for batch in receiver.unanswered]

    def split(self, receivers: int) -> list[Receiver]:
        """Divides the slots into fixed shares with a receiver each, e.g. one per GPU; `recv` here ends.

        Args:
          receivers: how many, at most 16 and at most one per slot.

        Raises:
          ValueError: too many or too few.
          SlotLoaderError: the loader has been split already, or a batch is unanswered.
        """
        most = min(MAX_RECEIVERS, self.num_slots)
        if not 1 <= receivers <= most:
            raise ValueError(f"split: expected 1 to {most} receivers, found {receivers}")
        main = self._main
        if main.retired:
            raise SlotLoaderError("split: this loader has been split already")
        if main.unanswered:
            raise SlotLoaderError("split: expected no unanswered batch; send or release them first")
        main.retired = True
        spans = list(itertools.pairwise(np.linspace(0, self.num_slots, receivers + 1).astype(int).tolist()))
        for index, (first, end) in enumerate(spans):
            self.table.first_slot[index], self.table.end_slot[index] = first, end
            self.table.receiver[first:end] = index
        self._keep_totals()
        self._receivers.clear()
        self._exchange.leases.clear()
        return [self._add_receiver(index, first, end, main) for index, (first, end) in enumerate(spans)]

    @property
    def receiver(self) -> Receiver:
        """The receiver of all slots, which `recv` and iteration use; after `split` use the receivers it returned."""
        return self._main

    # The spaces and the envs.

    @property
    def observation_space(self) -> Any:
        """The envs' observation space (of one env), or the dm_env spec."""
        return self._load_spaces()[0]

    @property
    def action_space(self) -> Any:
        """The envs' action space (of one env), or the dm_env spec."""
        return self._load_spaces()[1]

    def _load_spaces(self) -> Any:
        self._spaces = loaded(self._spaces)
        return self._spaces

    @property
    def single_observation_space(self) -> Any:
        """The same as `observation_space`, by the name that gymnasium's vector envs give the space of one env."""
        return self.observation_space

    @property
    def single_action_space(self) -> Any:
        """The same as `action_space`, see `single_observation_space`."""
        return self.action_space

    @property
    def num_envs(self) -> int:
        """Number of envs that the loader was built with, with those added and without those removed since.

        A failure does not change it: see `num_alive`. `num_slots` counts the slots reserved by `capacity`, too.
        """
        return self.num_slots - len(self._exchange.vacant)

    @property
    def num_alive(self) -> int:
        """Number of slots that have an env now, or a record of one; what failed for good is not counted."""
        return int(np.count_nonzero(self.table.state != SlotState.DEAD))

    def call(
        self, name: str, *args: Any, slots: Sequence[int] | None = None, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Calls `env.name(*args, **kwargs)` in the workers, between two steps of each env.

        Args:
          name: a method, or an attribute to read; wrappers are looked through.
          args: positional arguments, pickled.
          slots: which slots; default all that have an env.
          timeout: seconds to wait for the answers; None waits as long as a step takes.
          kwargs: keyword arguments, pickled.

        Returns:
          One result per slot, in the order of `slots`.

        Raises:
          EnvFailed: a call raised; the env itself goes on.
          ValueError: `name` is "reset" or "step", behind whose back records would go on.
        """
        if name in ("reset", "step"):
            raise ValueError(
                f"call: expected another method than {name!r}, which only the worker calls: its next record would belong to "
                "another episode than the one before and not say so; use loader.reset(...) to begin episodes anew"
            )
        return self._command("call", slots, timeout, name, args, kwargs)

    def get_attr(self, name: str, slots: Sequence[int] | None = None) -> list[Any]:
        """Reads an attribute of each env."""
        return self._command("get_attr", slots, None, name)

    def set_attr(self, name: str, values: Any, slots: Sequence[int] | None = None) -> None:
        """Sets an attribute of each env, between two of its steps: one value per slot (list or tuple), or one for all."""
        chosen = self._checked_slots(slots)
        per_slot = list(values) if isinstance(values, (list, tuple)) else [values] * len(chosen)
        if len(per_slot) != len(chosen):
            raise ValueError(f"set_attr: expected {len(chosen)} values, one per slot, found {len(per_slot)}")
        self._command("set_attr", chosen, None, name, dict(zip(chosen, per_slot, strict=True)))

    def _checked_slots(self, slots: Sequence[int] | None) -> list[int]:
        if slots is None:
            alive = (self.table.state != SlotState.DEAD).nonzero()[0].tolist()
            return [slot for slot in alive if slot not in self._exchange.vacant]
        chosen = [int(slot) for slot in ([slots] if isinstance(slots, (int, np.integer)) else slots)]
        wrong = [slot for slot in chosen if not 0 <= slot < self.num_slots]
        if wrong:
            raise ValueError(f"slots: expected 0 to {self.num_slots - 1}, found {wrong[:8]}")
        empty = [slot for slot in chosen if slot in self._exchange.vacant]
        if empty:
            raise ValueError(f"slots: expected slots that have an env, found {empty[:8]}")
        return chosen

    def _command(self, verb: str, slots: Sequence[int] | None, timeout: float | None, *args: Any) -> list[Any]:
        self._status.require_open()
        chosen = self._checked_slots(slots)
        results = self.fleet.command(verb, chosen, *args, timeout=timeout)
        return [results[slot] for slot in chosen]

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: Mapping[str, Any] | None = None,
        slots: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Has envs begin their episodes anew, also in the middle of one; the next record of each slot is FIRST.

        Never needed in a loop: workers reset by themselves. Steps that run are waited for; what they publish is discarded, and
        so is a reset that ran ahead. Rows of these slots in unanswered batches count as answered. The episode that was cut
        comes in `batch.episodes` with `interrupted=True` and `reason="reset"`.

        Args:
          seed: slot i is reset with exactly `seed + i`, or one seed per slot of `slots`; None takes that of a new life.
          options: for `env.reset`.
          slots: which slots; default all that have an env.
          timeout: seconds for running steps to end; None waits as long as they take.

        Raises:
          TimeoutError: an env is still in a step; nothing has changed.
          SlotLoaderError: a `recv` runs in another thread, actions are on their way from a device, or the loader is paused in
            the middle of a step.
        """
        self._status.require_open()
        chosen = self._checked_slots(slots)
        if seed is None or is_integer(seed):
            seeds = [None if seed is None else require_seed("seed", seed) + slot for slot in chosen]
        else:
            seeds = [None if one is None else require_seed("seed", one) for one in cast(Sequence[Any], seed)]
        if len(seeds) != len(chosen):
            raise ValueError(f"seed: expected {len(chosen)} seeds, one per slot, found {len(seeds)}")
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"options: expected a dict for env.reset, found {options!r:.80}")
        wishes = dict(zip(chosen, ((one, options) for one in seeds), strict=True))
        for receiver in self._receivers:
            own = {slot: wish for slot, wish in wishes.items() if receiver.leases.owns(slot)}
            if own:
                receiver.begin_anew(own, timeout)

    # A fleet that changes.

    def add_envs(self, envs: Any, num_envs: int | None = None, env_kwargs: dict[str, Any] | None = None) -> list[int]:
        """Adds envs while the loop runs, one worker each, in slots reserved by `capacity` or given up by `remove_envs`.

        Args:
          envs: as for the constructor.
          num_envs: as for the constructor.
          env_kwargs: as for the constructor.

        Returns:
          Their slots. Their first records come like any others; a factory that raises, or other spaces than the loader's, is
          raised by `recv`.

        Raises:
          ValueError: not enough free slots.
        """
        self._status.require_open()
        if self.backend == "inline":
            raise SlotLoaderError("add_envs: expected backend='process' or 'thread', found 'inline'")
        factories = env_sources.factories(envs, num_envs, env_kwargs)
        free = sorted(slot for slot in self._exchange.vacant if self.table.state[slot] == SlotState.DEAD)
        if len(free) < len(factories):
            raise ValueError(
                f"add_envs: expected at most {len(free)} envs, found {len(factories)}; this loader has "
                f"capacity={self.num_slots} and {self.num_alive} envs: build it with a larger capacity, or remove envs first"
            )
        slots = free[: len(factories)]
        for slot, factory in zip(slots, factories, strict=True):
            leases = next(receiver.leases for receiver in self._receivers if receiver.leases.owns(slot))
            self._exchange.vacant.discard(slot)
            leases.gain(slot)
            try:
                self.fleet.hire(slot, factory, self.options, self._threads)
            except BaseException:
                leases.lose([slot])
                self._exchange.vacant.add(slot)
                raise
        return slots

    def remove_envs(self, slots: Sequence[int], timeout: float | None = None) -> None:
        """Closes the envs of some slots between two of their steps; their finished records are still delivered.

        Args:
          slots: which; their slots can be used by `add_envs` once those records have been answered.
          timeout: seconds to wait for the envs to end their steps; None waits as long as it takes.

        Raises:
          TimeoutError: some are still in a step or a reset after `timeout` seconds. They are closed when it ends, and their
            slots are free then; calling again waits for that.
        """
        self._status.require_open()
        chosen = self._checked_slots(slots)
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"remove_envs: expected slots that have an env, each once, found {chosen}")
        try:
            self.fleet.remove(chosen, timeout)
        finally:
            left = self.fleet.take_removed()
            self._exchange.lose(left)
            self._exchange.vacant.update(left)

    def record_video(
        self,
        slot: int,
        path: str | PathLike[str],
        frames: int | None = None,
        episodes: int | None = None,
        fps: float = 30,
        key: Any = None,
        render: bool | None = None,
    ) -> VideoRecording:
        """Makes a video of a slot from the records that are received from now on; the loop goes on meanwhile.

            with loader.record_video(0, "slot0.mp4", episodes=1):
                for batch in loader.steps(10_000):
                    batch.send(policy(batch.obs))

        Args:
          slot: which.
          path: ends in .gif (needs Pillow) or .mp4 (needs imageio-ffmpeg); `pip install 'slotloader[video]'` has both.
          frames: stop after so many; None goes on until `close`.
          episodes: stop after so many whole episodes, beginning with the next one.
          fps: frames per second of the video, at most 100.
          key: the image leaf, e.g. "cam" or ("robot", "cam"); default the largest uint8 image among the observations. Of a
            stack of frames the newest is taken.
          render: take what `env.render()` returns, from envs built with `render_mode="rgb_array"`; None does so if no
            observation is an image. The frame of a last record is left out, since its env is being reset already.

        Returns:
          The recording, to be closed: a context manager. What goes wrong while it runs is raised by its `close`.
        """
        self._status.require_open()
        (chosen,) = self._checked_slots([slot])
        running = self._exchange.recordings
        recording = VideoRecording(
            self.table, running, self.get_attr, self.call, chosen, path, frames, episodes, fps, key, render
        )
        running.append(recording)
        return recording

    def record(self, *args: Any, **kwargs: Any) -> VideoRecording:
        """The old name of `record_video`."""
        warnings.warn("loader.record is now loader.record_video", DeprecationWarning, stacklevel=2)
        return self.record_video(*args, **kwargs)

    def pause(self) -> None:
        """Has the workers begin no step and no reset; records that are ready or on their way can still be received."""
        self._status.paused = True
        self._pauses += 1
        self.table.paused[:] = self._pauses
        for wake in self._wakers[: len(self.fleet.configs)]:
            wake()

    def drain(self, timeout: float | None = None) -> None:
        """Pauses and waits until no env is stepping or resetting, e.g. to save the envs' own state with `call`.

        Raises:
          TimeoutError: some still are after `timeout` seconds; the loader stays paused.
          EnvFailed, WorkerDied: an env has failed; the loader stays paused, and can be drained again.
        """
        self.pause()
        if self.backend == "inline":  # nothing moves outside recv
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        table = self.table
        while True:
            busy = (table.state == SlotState.WRITING) | (table.resetting == 1) | (table.resting[table.owner] != self._pauses)
            moving = np.flatnonzero(busy & (table.state != SlotState.DEAD)).tolist()
            moving = [slot for slot in moving if not any(leases.is_doomed(slot) for leases in self._exchange.leases)]
            if not moving:
                return
            if self.closed:
                raise LoaderClosed("the loader was closed while it was draining")
            if self.fleet.events:
                self._exchange.raise_events()  # what has failed will never come to rest
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"drain: slots {moving[:8]} are still stepping or resetting after {timeout:g} s")
            time.sleep(0.001)

    def resume(self) -> None:
        """Ends a pause."""
        self.table.paused[:] = 0
        self._status.paused = False
        for wake in self._wakers[: len(self.fleet.configs)]:
            wake()

    # Figures and state.

    def stats(self) -> figures.Stats:
        """Health figures since the start or the last `reset_stats`; `print(loader.stats())` for a table."""
        return figures.snapshot(
            self.table, [receiver.leases.current_meter() for receiver in self._receivers], self.fleet.restarts
        )

    def reset_stats(self) -> None:
        """Starts the figures anew; per-slot times go on."""
        self._keep_totals()
        for receiver in self._receivers:
            receiver.leases.restart_meter()

    def _keep_totals(self) -> None:
        """Adds what the meters have counted to the totals of the run, before they start anew."""
        self._env_steps += sum(receiver.leases.current_meter().env_steps for receiver in self._receivers)
        self._episodes += sum(receiver.leases.meter.episodes for receiver in self._receivers)

    def state_dict(self) -> dict[str, Any]:
        """Seed, lives and counters, for `load_state_dict` of a later run; plain ints and lists."""
        totals = self.stats()
        return {
            "version": 1,
            "num_slots": self.num_slots,
            "seed": self.seed,
            "lives": self.table.life.tolist(),
            "episodes": self.table.episode.tolist(),
            "env_steps": self._env_steps + totals.env_steps,
            "completed_episodes": self._episodes + totals.episodes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state: every slot begins the life after its saved one, with a new seed.

        Call it before the first `recv`; the first records that were made meanwhile are discarded.

        Raises:
          ValueError: the state is of another number of slots or another seed.
          SlotLoaderError: records have been received already.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state_dict: expected what state_dict() returned, found {state!r:.80}")
        expected = {"version": 1, "num_slots": self.num_slots, "seed": self.seed}
        for key, value in expected.items():
            if state.get(key) != value:
                raise ValueError(f"state_dict: expected {key}={value!r}, found {state.get(key)!r}")
        receiver = self._main
        if receiver.retired or receiver.leases.current_meter().batches:
            raise SlotLoaderError("load_state_dict: expected a loader that has not received yet; call it first")
        lives = {slot: life + 1 for slot, life in enumerate(state["lives"])}
        batch = receiver.recv(min_get=receiver.leases.alive, timeout=None, stall_timeout=self.limits.start_timeout)
        self.fleet.lives.update(lives)
        self.fleet.command("begin_life", batch.env_indices.tolist(), {slot: LifePlan(life) for slot, life in lives.items()})
        # Each env now takes its next action as the wish for its new first record, so any action will do.
        receiver.leases.pass_over(batch)
        receiver.leases.restart_meter()
        self._env_steps, self._episodes = int(state["env_steps"]), int(state["completed_episodes"])

    def _request_for(self, num_slots: int) -> Request:
        """The loader's `recv` defaults for a receiver of `num_slots` slots."""
        min_get, max_get, timeout, stall_timeout = self._asked
        if num_slots < getattr(self, "num_slots", num_slots):  # a share after `split`
            min_get = min(min_get, num_slots)
            max_get = None if max_get is None else max(min_get, min(max_get, num_slots))
        return Request.checked(min_get, max_get, timeout, stall_timeout, num_slots)

    # The end.

    def close(self) -> None:
        """Stops and closes every env, within 5 s in all whatever they do; any number of times."""
        with self._closing:
            if self._ended:
                return
            self._status.closed = True
            self.fleet.closing = True
            for signal in self.fleet.signals[: len(self._receivers)]:
                signal.post()
            deadline = time.monotonic() + CLOSE_TIMEOUT
            recordings = list(self._exchange.recordings)
            for recording in recordings:
                recording.finish()
            self.fleet.stop(deadline)
            for recording in recordings:
                recording.wait(max(0.0, deadline - time.monotonic()))
            self._ended = True  # Ctrl-C before this leaves the rest to the next call, or to the end of the interpreter
            self._finalizer.detach()

    def __enter__(self) -> SlotLoader:
        self._status.require_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self.closed:
            warnings.warn(
                "a SlotLoader was not closed; use `with SlotLoader(...) as loader:` or call loader.close()",
                ResourceWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"SlotLoader({self.num_slots} slots, {len(self.fleet.configs)} workers, backend={self.backend!r}, {state})"


_open_loaders: weakref.WeakSet[SlotLoader] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: the loaders stay the parent's; the child must neither use nor stop them."""
    for loader in list(_open_loaders):
        loader._status.closed = True
        loader._status.why_closed = "this loader belongs to the process that this one was forked from; build one here"
        loader._finalizer.detach()
        loader._ended = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _stop_forgotten(fleet: Fleet) -> None:
    """Ends a fleet whose loader was garbage collected or is open when the interpreter exits."""
    fleet.closing = True
    fleet.stop(time.monotonic() + CLOSE_TIMEOUT)


def pack(num_envs: int, num_workers: int | None, envs_per_worker: int | None, backend: str) -> list[int]:
    """Number of envs of each worker, as even as possible; inline has one worker.

    Raises:
      ValueError: the two ways of saying it disagree, or a number is out of range.
    """
    if backend == "inline":
        return [num_envs]
    num_workers = require_count("num_workers", num_workers, optional=True)
    envs_per_worker = require_count("envs_per_worker", envs_per_worker, optional=True)
    if num_workers is not None and envs_per_worker is not None and -(-num_envs // envs_per_worker) != num_workers:
        raise ValueError(
            f"num_workers={num_workers} and envs_per_worker={envs_per_worker}: expected to agree for {num_envs} envs; "
            "pass one of them"
        )
    if num_workers is None:
        num_workers = num_envs if envs_per_worker is None else -(-num_envs // envs_per_worker)
    if num_workers > num_envs:
        raise ValueError(f"num_workers: expected at most num_envs={num_envs}, found {num_workers}")
    if envs_per_worker is not None:
        return [min(envs_per_worker, num_envs - start) for start in range(0, num_envs, envs_per_worker)]
    return [num_envs // num_workers + (worker < num_envs % num_workers) for worker in range(num_workers)]


def _make_fleet(
    backend: str,
    configs: list[WorkerConfig],
    limits: Limits,
    max_workers: int,
    preload: Sequence[str],
    helpful: Sequence[str],
    cpu_affinity: Sequence[int] | None,
) -> Fleet:
    if backend == "inline":
        return InlineFleet(configs, limits, max_workers)
    if backend == "thread":
        return ThreadFleet(configs, limits, max_workers)
    if backend != "process":
        raise ValueError(f"backend: expected 'process', 'thread' or 'inline', found {backend!r}")
    try:
        from slotloader.fleet.process import ProcessFleet
    except ImportError as error:  # Windows has no posix_ipc
        raise SlotLoaderError(
            f"backend='process' needs a POSIX system with posix_ipc ({error}); use backend='thread' or 'inline'"
        ) from error
    return ProcessFleet(configs, limits, max_workers, preload, helpful, cpu_affinity)
