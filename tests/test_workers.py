"""Workers: which slots they serve, and what they write."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import pytest
from checks import Once, drive
from toys import AsyncPair, Counting, Scripted

import slotloader.loader
from slotloader import SlotLoader
from slotloader.worker.worker import WorkerConfig

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
