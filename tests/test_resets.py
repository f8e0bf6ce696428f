"""`loader.reset`: episodes begin anew on the trainer's wish, with exactly the seed that was asked for."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
import pytest
from checks import until
from toys import Counting, Endless, Working

from slotloader import LeaseExpired, SlotLoader, SlotLoaderError, StepType
from slotloader.table.slots import SlotState

pytestmark = pytest.mark.usefixtures("clean")


def steps(loader: SlotLoader, count: int) -> list[Any]:
    found = []
    for _ in range(count):
        batch = loader.recv(min_get=loader.num_envs, timeout=None)
        found.append(batch)
        batch.send(np.zeros(batch.size, np.int64))
    return found


def test_every_next_record_is_first_with_exactly_its_seed_and_options(packed: dict[str, Any]) -> None:
    with SlotLoader(Counting, 4, seed=7, **packed) as loader:
        steps(loader, 3)
        loader.reset(seed=100, options={"level": 3})
        batch = loader.recv(min_get=4, timeout=None)
        assert batch.is_first.all()
        assert [seeds[-1] for seeds in loader.get_attr("seeds")] == [100, 101, 102, 103]
        assert loader.get_attr("options") == [{"level": 3}] * 4
        batch.send(np.zeros(4, np.int64))
        loader.reset(seed=[5, None, 6, 7])
        loader.recv(min_get=4, timeout=None)
        seeds = [seeds[-1] for seeds in loader.get_attr("seeds")]
        assert seeds[0] == 5 and seeds[2:] == [6, 7] and seeds[1] not in (None, 5)


def test_the_cut_episode_is_told_with_its_reason_and_ended_ones_are_not_told_twice(how: dict[str, Any]) -> None:
    with SlotLoader(Counting, 3, **how) as loader:
        told = []
        for _ in range(30):
            batch = loader.recv(min_get=3, timeout=None)
            told += batch.episodes
            open_slots = batch.env_indices[~batch.is_last].tolist()
            lengths = dict(zip(batch.env_indices.tolist(), batch.obs[:, 0] % 1000, strict=True))
            batch.send(np.zeros(3, np.int64))
            loader.reset()
            batch = loader.recv(min_get=3, timeout=None)
            cut = [episode for episode in batch.episodes if episode.interrupted]
            assert sorted(episode.slot for episode in cut) == open_slots
            assert all(episode.reason == "reset" and episode.length == lengths[episode.slot] for episode in cut)
            assert batch.is_first.all()
            batch.send(np.zeros(3, np.int64))


def test_a_reset_that_ran_ahead_is_discarded(how: dict[str, Any]) -> None:
    with SlotLoader(Counting, 2, **how) as loader:
        while True:
            batch = loader.recv(min_get=2, timeout=None)
            if batch.is_last.any():
                break
            batch.send(np.zeros(2, np.int64))
        time.sleep(0.05)  # the worker has reset ahead, most likely
        loader.reset(seed=40)
        batch = loader.recv(min_get=2, timeout=None)
        assert batch.is_first.all() and [seeds[-1] for seeds in loader.get_attr("seeds")] == [40, 41]


def test_only_the_slots_that_are_named_begin_anew(how: dict[str, Any]) -> None:
    with SlotLoader("CartPole-v1", 3, seed=0, **how) as loader:
        steps(loader, 4)
        loader.reset(seed=9, slots=[1])
        batch = loader.recv(min_get=3, timeout=None)
        assert batch.step_type.tolist() == [StepType.MID, StepType.FIRST, StepType.MID]
        env = gymnasium.make("CartPole-v1")
        np.testing.assert_array_equal(batch.obs[1], env.reset(seed=10)[0])
        batch.send(np.zeros(3, np.int64))
        np.testing.assert_array_equal(loader.recv(min_get=3, timeout=None).obs[1], env.step(0)[0])
        env.close()


def test_rows_in_unanswered_batches_count_as_answered(how: dict[str, Any]) -> None:
    with SlotLoader(Counting, 3, **how) as loader:
        steps(loader, 1)
        batch = loader.recv(min_get=3, timeout=None)
        loader.reset(slots=[0, 2])
        with pytest.raises(LeaseExpired):
            batch.send(np.zeros(3, np.int64))
        loader.send(np.zeros(1, np.int64), [1])
        assert loader.recv(min_get=3, timeout=None).step_type.tolist() == [
            StepType.FIRST,
            loader.table.step_type[1],
            StepType.FIRST,
        ]


def test_a_step_that_takes_too_long_changes_nothing() -> None:
    with SlotLoader(Working, 2, backend="thread") as loader:
        steps(loader, 1)
        loader.recv(min_get=2, timeout=None).send(np.zeros(2, np.int64))
        until(lambda: loader.table.state[0] == SlotState.WRITING)
        with pytest.raises(TimeoutError, match=r"reset: slots \[0"):
            loader.reset(timeout=0.0)
        assert loader.recv(min_get=2, timeout=None).step_type.tolist() == [StepType.MID] * 2


def test_wrong_seeds_and_options_are_refused_before_anything_changes(how: dict[str, Any]) -> None:
    with SlotLoader(Endless, 2, **how) as loader:
        first = steps(loader, 2)
        for wrong in ({"seed": -1}, {"seed": [1]}, {"seed": [1, 2.5]}, {"options": [1]}, {"slots": [5]}):
            with pytest.raises((ValueError, TypeError)):
                loader.reset(**wrong)
        assert not loader.recv(min_get=2, timeout=None).is_first.any() and len(first) == 2


@pytest.mark.parametrize("name", ["reset", "step"])
def test_call_refuses_what_would_begin_episodes_behind_the_back_of_the_records(name: str, how: dict[str, Any]) -> None:
    with SlotLoader(Counting, 2, **how) as loader, pytest.raises((ValueError, SlotLoaderError), match=r"loader\.reset"):
        loader.call(name)


def test_what_was_asked_for_holds_with_spares_too() -> None:
    with SlotLoader(Counting, 2, spares=1, backend="thread") as loader:
        steps(loader, 20)
        loader.reset(seed=50)
        assert loader.recv(min_get=2, timeout=None).is_first.all()
        assert [seeds[-1] for seeds in loader.get_attr("seeds")] == [50, 51]
