"""`begin_life`: a slot starts over as planned, without its env being built anew. What the trainer's side stands on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from checks import until
from gymnasium.spaces import Box, Discrete

from slotloader import EpisodeKey, SlotLoader
from slotloader.worker.config import LifePlan
from slotloader.worker.envs import evaluation_seed, life_seed, plan_seed

pytestmark = pytest.mark.usefixtures("clean")


class Told:
    """obs is what the last reset was given, and t: (seed or -1, options["level"] or -1, resets so far, t)."""

    observation_space, action_space = Box(-1, 2**40, (4,), np.int64), Discrete(2)
    resets = 0

    def __init__(self, context: Any) -> None:
        self.slot = context.slot

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        self.resets += 1
        self.t = 0
        self.given = -1 if seed is None else seed, (options or {}).get("level", -1)
        return self._obs(), {}

    def _obs(self) -> Any:
        return np.array([*self.given, self.resets, self.t])

    def step(self, action: int) -> Any:
        self.t += 1
        return self._obs(), 1.0, self.t == 3, False, {}


class AsyncTold(Told):
    """The same, async."""

    async def reset(self, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        return super().reset(seed, options)

    async def step(self, action: int) -> Any:  # type: ignore[override]
        return super().step(action)


FLEETS: dict[str, tuple[type[Told], dict[str, Any]]] = {
    "inline": (Told, {"backend": "inline"}),
    "thread": (Told, {"backend": "thread", "num_workers": 1}),
    "process": (Told, {"backend": "process", "num_workers": 1}),
    "process-threads": (Told, {"backend": "process", "num_workers": 1, "worker_threads": True}),
    "process-spares": (Told, {"backend": "process", "num_workers": 1, "spares": 1}),
    "async": (AsyncTold, {"backend": "thread", "num_workers": 1}),
    "async-inline": (AsyncTold, {"backend": "inline"}),
}


@pytest.fixture(params=FLEETS)
def fleet(request: pytest.FixtureRequest) -> tuple[type[Told], dict[str, Any]]:
    return FLEETS[request.param]


def steer(key: EpisodeKey) -> Mapping[str, Any]:
    """An `on_reset` with wishes of its own."""
    return {"seed": 1000 + key.life, "options": {"level": 50 + key.episode}}


def play(loader: SlotLoader, records: int) -> list[list[int]]:
    """The observations of slot 0 in so many further records of all slots."""
    found = []
    for _ in range(records):
        batch = loader.recv(stall_timeout=20)
        found.append(batch.obs[0].tolist())
        batch.send(np.zeros(batch.size, np.int64))
    return found


@pytest.mark.parametrize("at", [0, 1, 2, 3, 5])
def test_a_planned_life_begins_with_the_next_action_whatever_the_slot_was_at(fleet: Any, at: int) -> None:
    """After a FIRST, MID, MID, last and again a MID record; a last one is followed by a reset ahead, which counts no more."""
    env, how = fleet
    with SlotLoader(env, 2, seed=7, timeout=None, **how) as loader:
        play(loader, at)
        batch = loader.recv()
        assert batch.obs[0, 3] == at % 4
        if at == 3 and how["backend"] != "inline" and "spares" not in how:
            until(lambda: (loader.table.resets >= 2).all(), what="the reset ahead has been done")
        loader.fleet.command("begin_life", [0, 1], {slot: LifePlan(5, seed=40 + slot, options={"level": 3}) for slot in (0, 1)})
        batch.send([1, 1])
        batch = loader.recv()
        assert batch.is_first.all() and loader.table.life.tolist() == [5, 5] and loader.table.episode.tolist() == [0, 0]
        assert batch.obs[:, :2].tolist() == [[40, 3], [41, 3]] and batch.obs[:, 3].tolist() == [0, 0]
        assert loader.table.episode_seed.tolist() == [40, 41]
        batch.send([0, 0])
        found = play(loader, 8)
        assert [obs[3] for obs in found] == [1, 2, 3, 0, 1, 2, 3, 0], "and its episodes go on as ever"
        second = plan_seed(40, 1) if "spares" in how else -1
        assert found[3][:2] == [second, -1], "only the first reset of the life is planned; a spare has a seed that follows"


def test_without_a_seed_a_life_has_its_own_and_an_evaluation_those_of_its_episodes(fleet: Any) -> None:
    env, how = fleet
    with SlotLoader(env, 2, seed=7, timeout=None, **how) as loader:
        batch = loader.recv()
        assert batch.obs[:, 0].tolist() == [7, 8]
        loader.fleet.command("begin_life", [0, 1], {0: LifePlan(1), 1: LifePlan(1, evaluation=(9, 4))})
        batch.send([0, 0])
        batch = loader.recv()
        assert batch.obs[:, 0].tolist() == [life_seed(7, 0, 1), evaluation_seed(9, 1, 4)]
        batch.send([0, 0])
        for _ in range(3):
            loader.recv().send([0, 0])
        batch = loader.recv()
        assert batch.is_first.all() and batch.obs[1, 0] == evaluation_seed(9, 1, 5)


@pytest.mark.parametrize(
    ("plan", "seed", "level"),
    [
        (LifePlan(3), 1003, 50),
        (LifePlan(3, seed=11), 11, 50),
        (LifePlan(3, options={"level": 2}), 1003, 2),
        (LifePlan(3, seed=0, options={}), 0, -1),
        (LifePlan(3, evaluation=(9, 4)), 1003, 50),
    ],
    ids=["nothing", "seed", "options", "both, falsy", "evaluation"],
)
def test_on_reset_has_the_last_word_unless_the_plan_says_it(fleet: Any, plan: LifePlan, seed: int, level: int) -> None:
    env, how = fleet
    with SlotLoader(env, 1, seed=7, on_reset=steer, **how) as loader:
        batch = loader.recv()
        loader.fleet.command("begin_life", [0], {0: plan})
        batch.send([0])
        batch = loader.recv()
        assert batch.obs[0, :2].tolist() == [seed, level]
        batch.send([0])
        for _ in range(3):
            loader.recv().send([0])
        batch = loader.recv()
        assert batch.is_first.all() and batch.obs[0, :2].tolist() == [1003, 51], "the episodes after it are on_reset's"


class Late(Told):
    """Every reset but the first of an env takes a while."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if self.resets:
            time.sleep(0.2)
        return super().reset(seed, options)


@pytest.mark.parametrize("name", ["thread", "process", "process-threads", "process-spares"])
def test_a_reset_that_is_running_when_the_life_is_planned_counts_no_more(name: str) -> None:
    with SlotLoader(Late, 1, seed=7, **FLEETS[name][1]) as loader:
        play(loader, 3)
        batch = loader.recv()
        assert batch.is_last.all()  # its worker resets now
        loader.fleet.command("begin_life", [0], {0: LifePlan(1, seed=99)})
        batch.send([0])
        batch = loader.recv(stall_timeout=20)
        assert batch.is_first.all() and batch.obs[0, 0] == 99


class FailsAhead(Told):
    """Its second reset fails."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if self.resets == 1:
            self.resets += 1
            raise OSError("no more levels")
        return super().reset(seed, options)


def test_a_reset_ahead_that_has_failed_is_forgotten_too() -> None:
    with SlotLoader(FailsAhead, 1, backend="thread", on_failure="raise") as loader:
        play(loader, 3)
        batch = loader.recv()
        until(lambda: loader.fleet._workers[0].runners[0]._reset_error)  # type: ignore[attr-defined]
        loader.fleet.command("begin_life", [0], {0: LifePlan(1, seed=99)})
        batch.send([0])
        assert loader.recv().obs[0, 0] == 99


@pytest.mark.parametrize("name", ["reset", "step"])
def test_reset_and_step_cannot_be_called_behind_the_back_of_the_records(how: dict[str, Any], name: str) -> None:
    with SlotLoader(Told, 2, **{**how, "preload": ()} if how["backend"] == "process" else how) as loader:
        loader.recv(min_get=2)
        with pytest.raises(ValueError, match=rf"call: expected another method than '{name}'.*use loader.reset\(\.\.\.\)"):
            loader.call(name)
        assert loader.get_attr("slot") == [0, 1]
