"""Workers: which slots they serve, what they write, and that nothing which an env raises is lost."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
from checks import Once, drive, until
from toys import AsyncPair, Counting, Scripted

import slotloader.loader
from slotloader import EnvFailed, SlotLoader, SlotLoaderError
from slotloader.table.slots import SlotState
from slotloader.worker.config import WorkerConfig
from slotloader.worker.loops import Loop

pytestmark = pytest.mark.usefixtures("clean")

PACKINGS: dict[str, dict[str, Any]] = {
    "process": {"backend": "process", "preload": ["toys"]},
    "process-threads": {"backend": "process", "preload": ["toys"], "worker_threads": True},
    "process-spares": {"backend": "process", "preload": ["toys"], "spares": 1},
    "thread": {"backend": "thread"},
}


def dealt(index: int, slots: tuple[int, ...], factories: Any, *rest: Any) -> WorkerConfig:
    """The configuration of one of two workers over eight slots, dealt like cards: none has neighbours."""
    own = tuple(range(index, 8, 2))
    assert len(own) == len(factories) == len(slots)
    return WorkerConfig(index, own, factories, *rest)


@pytest.fixture(params=PACKINGS)
def apart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of a loader of eight slots whose two workers have every second slot each."""
    monkeypatch.setattr(slotloader.loader, "WorkerConfig", dealt)
    return {"num_workers": 2, **PACKINGS[request.param]}


def test_a_worker_serves_slots_that_are_no_neighbours(apart: dict[str, Any]) -> None:
    with SlotLoader(Counting, 8, **apart) as loader:
        assert loader.table.owner.tolist() == [0, 1] * 4
        if "spares" not in apart:  # whose spares count their own episodes
            drive(loader, Once(8), 1000, np.random.default_rng(0))
        else:
            for batch in loader.steps(500):
                batch.send(np.zeros(batch.size, np.int64))
        assert loader.get_attr("env_id") == list(range(8))
        assert loader.call("_obs", 5, slots=[6, 1])[0].tolist()[0] // 1000 == 6


def test_a_worker_of_async_envs_serves_slots_that_are_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slotloader.loader, "WorkerConfig", dealt)
    slots = [0, 2, 4, 6], [1, 3, 5, 7]
    with SlotLoader(Lonely, 8, backend="process", num_workers=2) as loader:
        for batch in loader.steps(200):
            batch.send(np.zeros(batch.size, np.int64))
        pids = loader.call("pid")
    assert [len({pids[slot] for slot in own}) for own in slots] == [1, 1]


def test_a_restarted_worker_serves_the_same_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slotloader.loader, "WorkerConfig", dealt)
    with SlotLoader(Mortal, 8, backend="process", num_workers=2) as loader:
        for batch in loader.steps(50):
            batch.send(np.zeros(batch.size, np.int64))
        batch = loader.recv(min_get=8, timeout=None)
        batch.send(np.where(batch.env_indices == 3, 999, 0))
        while loader.stats().restarted < 4:
            batch = loader.recv()
            batch.send(np.zeros(batch.size, np.int64))
        assert loader.fleet.lives == {slot: slot % 2 for slot in range(8)}


def test_the_end_of_an_episode_is_a_word_of_its_own_beside_its_length(how: dict[str, Any]) -> None:
    with SlotLoader(partial(Scripted, length=2), 2, timeout=None, **how) as loader:
        found = []
        for _ in range(5):
            batch = loader.recv()
            found.append(loader.table.progress[0].tolist())
            batch.send([0, 0])
    assert found == [(0.0, 0, 0, 0), (1.0, 1, 0, 0), (2.0, 2, 0, 1), (0.0, 0, 0, 0), (1.0, 1, 0, 0)]


class Lonely(AsyncPair):
    """Async, and needs no other env."""

    async def step(self, action: int) -> Any:
        self.t += 1
        return self._obs(int(action)), 1.0, False, False, {}

    def pid(self) -> int:
        return os.getpid()


class Mortal(Counting):
    """Takes its worker with it when told so."""

    def step(self, action: int) -> Any:
        if action == 999:
            os._exit(7)
        return super().step(action)


# Whatever an env raises is a failure of its slot, told to the trainer, and nothing else.


class Throws(Counting):
    """Raises what its action names, in `step` or else in the next `reset`; once for each life of the slot 1."""

    kinds: tuple[type[BaseException], ...] = (
        asyncio.CancelledError,
        KeyboardInterrupt,
        GeneratorExit,
        SystemExit,
        StopIteration,
    )
    due: type[BaseException] | None = None

    def step(self, action: int) -> Any:
        self.t += 1
        if 100 <= action < 105:
            raise self.kinds[action - 100]("in step")
        if 200 <= action < 205:
            self.due = self.kinds[action - 200]
        return self._obs(int(action)), 1.0, self.due is not None, False, {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.due is not None:
            raise self.due("in reset")
        return super().reset(seed=seed, options=options)


class AsyncThrows(Throws):
    """The same, as coroutines."""

    async def step(self, action: int) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return Throws.step(self, action)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return Throws.reset(self, seed=seed, options=options)


PLAIN: dict[str, dict[str, Any]] = {
    "process": {"backend": "process", "num_workers": 1},
    "process-threads": {"backend": "process", "num_workers": 1, "worker_threads": True},
    "process-spares": {"backend": "process", "num_workers": 1, "spares": 1},
    "thread": {"backend": "thread", "num_workers": 1},
    "thread-threads": {"backend": "thread", "num_workers": 1, "worker_threads": True},
}
EDGES: dict[str, tuple[type[Throws], dict[str, Any]]] = {
    **{name: (Throws, how) for name, how in PLAIN.items()},
    **{f"async-{name}": (AsyncThrows, PLAIN[name]) for name in ("process", "process-threads", "thread")},
}


@pytest.mark.parametrize("where", [100, 200], ids=["step", "reset"])
@pytest.mark.parametrize("edge", EDGES)
def test_an_exception_of_any_kind_is_reported_and_costs_its_slot_a_life_only(edge: str, where: int) -> None:
    env, how = EDGES[edge]
    with SlotLoader(env, 2, on_failure="restart", max_restarts=9, timeout=0, **how) as loader:
        lives = [0, 0]
        for number in range(len(Throws.kinds)):
            to_send = where + number
            deadline = time.monotonic() + 20
            while lives[1] == number:
                batch = loader.recv(stall_timeout=20)
                actions = np.zeros(batch.size, np.int64)
                for row, slot in enumerate(batch.env_indices.tolist()):
                    lives[slot] = int(loader.table.life[slot])
                    if slot == 1 and not batch.is_first[row] and not batch.is_last[row]:
                        actions[row] = to_send if lives[1] == number else 0
                batch.send(actions)
                assert time.monotonic() < deadline, f"{Throws.kinds[number]} was lost"
        assert loader.table.life.tolist() == [0, len(Throws.kinds)]
        assert loader.stats().restarted == len(Throws.kinds)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("number", [0, 1, 4])
def test_an_exception_of_any_kind_is_told_with_its_name(edge: str, number: int) -> None:
    env, how = EDGES[edge]
    with SlotLoader(env, 2, on_failure="raise", **how) as loader:
        loader.recv(min_get=2).send([0, 0])
        loader.recv(min_get=2).send([0, 100 + number])
        with pytest.raises(EnvFailed, match=f"raised .*{Throws.kinds[number].__name__}.*in step") as caught:
            while True:
                loader.recv(stall_timeout=20).send([0])
        assert caught.value.slots == (1,)
        for _ in range(3):
            loader.recv(1).send([0])
        with pytest.raises(SlotLoaderError):
            loader.call("_obs", 0, slots=[1])


def test_inline_a_cancelled_step_is_a_failure_and_ctrl_c_is_the_callers() -> None:
    with SlotLoader(Throws, 2, backend="inline", on_failure="raise") as loader:
        loader.recv(min_get=2).send([0, 0])
        loader.recv(min_get=2).send([0, 101])
        with pytest.raises(KeyboardInterrupt):
            loader.recv(min_get=2)
        assert loader.table.state[1] == SlotState.ACTED, "the step is to be taken again"
        loader.table.action[0][1] = 100
        with pytest.raises(EnvFailed, match="raised CancelledError"):
            loader.recv(min_get=2)
        loader.recv(min_get=1).send([0])


def test_a_loop_that_breaks_in_a_thread_is_told_to_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sees a thread end: a fault of ours in the loop itself must not leave a consumer that waits for ever."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with SlotLoader(Counting, 2, backend="thread", num_workers=1, on_failure="restart") as loader:
        loader.recv(min_get=2)
        worker = loader.fleet._workers[0]  # type: ignore[attr-defined]

        def broken() -> bool:
            raise ZeroDivisionError("of ours")

        monkeypatch.setattr(worker, "serve", broken)
        for batch in loader.unanswered:
            batch.send([0, 0])
        with pytest.raises(EnvFailed, match=r"ZeroDivisionError.*of ours.*its worker has ended"):
            loader.recv(min_get=2, stall_timeout=20)


# Async envs.


class RunsInside(Lonely):
    """Its constructor runs coroutines in a loop of its own, as browser envs do."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.started_at = asyncio.run(asyncio.sleep(0, time.monotonic()))

    async def step(self, action: int) -> Any:
        if action == 9:
            raise RuntimeError("broken")
        obs, reward, _, _, info = await super().step(action)
        return obs, reward, self.t == 2, False, info


@pytest.mark.parametrize("how", [{"backend": "process"}, {"backend": "process", "worker_threads": True}, {"backend": "inline"}])
@pytest.mark.parametrize("why", ["rebuild", "recycle"])
def test_an_async_env_may_run_a_loop_in_its_constructor_every_time_that_it_is_built(how: dict[str, Any], why: str) -> None:
    more: dict[str, Any] = {"recycle_after": 1} if why == "recycle" else {"on_failure": "restart"}
    num_workers = {} if how["backend"] == "inline" else {"num_workers": 1}
    with SlotLoader(RunsInside, 2, timeout=0, **how, **num_workers, **more) as loader:
        for _ in range(60):
            batch = loader.recv(stall_timeout=20)
            broken = why == "rebuild" and loader.fleet.restarts == 0
            batch.send(np.full(batch.size, 9 if broken else 0))
        assert loader.table.life.max() > 0
        assert loader.recv(2, stall_timeout=20).size == 2


class SlowToStart(Lonely):
    """Its resets wait for something that holds on to nobody: a task that waits so is gone unless somebody else holds it."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        known = weakref.ref(future)

        def resolve() -> None:
            gc.collect()
            found = known()
            if found is not None:
                found.set_result(None)

        threading.Timer(0.05, loop.call_soon_threadsafe, (resolve,)).start()
        await future
        return Counting.reset(self, seed=seed, options=options)

    async def step(self, action: int) -> Any:
        if action == 9:
            raise RuntimeError("broken")
        return await super().step(action)


def test_the_first_reset_of_a_rebuilt_async_env_is_held_by_its_worker() -> None:
    with SlotLoader(SlowToStart, 2, backend="thread", num_workers=1, on_failure="restart") as loader:
        for number in range(3):
            batch = loader.recv(min_get=2)
            batch.send([9, 0])
            until(lambda number=number: loader.fleet.restarts == number + 1)  # type: ignore[misc]
        worker = loader.fleet._workers[0]  # type: ignore[attr-defined]
        assert type(worker.runners[0]._loop) is Loop
        assert loader.recv(min_get=2).env_indices.tolist() == [0, 1]


def test_ctrl_c_in_an_async_step_cancels_it_and_it_is_taken_again() -> None:
    class Interrupted(Lonely):
        async def step(self, action: int) -> Any:
            if action == 1 and not hasattr(self, "struck"):
                self.struck = True
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                try:
                    await asyncio.sleep(20)
                finally:
                    self.cancelled = True
            return await super().step(action)

    def strike(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, strike)
    try:
        with SlotLoader(Interrupted, 1, backend="inline") as loader:
            loader.recv().send([1])
            with pytest.raises(KeyboardInterrupt):
                loader.recv()
            assert loader.get_attr("cancelled") == [True]
            assert loader.recv().obs[0].tolist() == [1, 0, 1], "stepped once"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_coroutine_of_an_env_that_is_not_async_is_awaited_too() -> None:
    class Half(Counting):
        async def ask(self, value: int) -> int:
            await asyncio.sleep(0.001)
            return value + self.env_id

        async def close(self) -> None:  # type: ignore[override]
            await asyncio.sleep(0.001)

    for how in PLAIN.values():
        with SlotLoader(Half, 2, **how) as loader:
            loader.recv(min_get=2)
            assert loader.call("ask", 5) == [5, 6]
