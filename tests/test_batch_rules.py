"""FAULTS "Forming batches" 1 to 7, through real loaders: when `recv` returns, with what, and what it never does."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import Once, drive, until
from toys import Counting, Endless, Gated, Working

from slotloader import FleetStalled, SlotLoader, SlotLoaderError
from slotloader.table.slots import SlotState

pytestmark = pytest.mark.usefixtures("clean")


class Gates:
    """The hold files of a fleet of `Gated` envs: `hold(i)` makes the next step of slot i slow until `let(i)`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.factory = partial(Gated, directory=str(directory))

    def hold(self, *slots: int) -> None:
        for slot in slots:
            (self.directory / f"hold-{slot}").touch()

    def let(self, *slots: int) -> None:
        for slot in slots:
            (self.directory / f"hold-{slot}").unlink()


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path)


@pytest.fixture(params=["process", "thread"])
def outside(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Backends whose envs step outside `recv`; inline has no deadlines to race."""
    return {"backend": request.param, **({"preload": ["toys"]} if request.param == "process" else {})}


def ready(loader: SlotLoader, *slots: int) -> bool:
    return all(loader.table.state[slot] == SlotState.READY for slot in slots)


# 1


def test_a_stall_is_raised_in_time_names_the_slots_and_takes_nothing(outside: dict[str, Any], gates: Gates) -> None:
    with SlotLoader(gates.factory, 8, **outside) as loader:
        batch = loader.recv(min_get=8)
        gates.hold(*range(8))
        batch.send([1] * 8)
        begin = time.monotonic()
        with pytest.raises(FleetStalled) as caught:
            loader.recv(stall_timeout=0.2)
        assert 0.2 <= time.monotonic() - begin < 2.0
        assert isinstance(caught.value, TimeoutError)
        assert sorted(caught.value.slots) == list(range(8))
        text = str(caught.value)
        assert "stall_timeout=0.2" in text
        assert "found 0" in text
        assert all(f"slot {slot} (in step for " in text for slot in range(8))
        gates.let(3, 5)
        until(lambda: ready(loader, 3, 5))
        with pytest.raises(FleetStalled, match=r"at least 4 ready records.*found 2") as caught:
            loader.recv(min_get=4, stall_timeout=0.1)
        assert sorted(caught.value.slots) == [0, 1, 2, 4, 6, 7]
        assert loader.recv().env_indices.tolist() == [3, 5]
        gates.let(0, 1, 2, 4, 6, 7)
        assert loader.recv(min_get=6).obs[:, 0].tolist() == [1000 * slot + 1 for slot in (0, 1, 2, 4, 6, 7)]


def test_the_slowest_slot_is_named_first(gates: Gates) -> None:
    gates.hold(0, 1)
    with SlotLoader(gates.factory, 2, min_get=2) as loader:
        loader.recv()
        loader.send([1], [1])
        until((gates.directory / "began-1").exists)
        loader.send([1], [0])
        until((gates.directory / "began-0").exists)
        with pytest.raises(FleetStalled) as caught:
            loader.recv(stall_timeout=0.05)
        assert caught.value.slots == (1, 0)
        gates.let(0, 1)


def test_lockstep_stalls_when_no_further_record_arrives(gates: Gates) -> None:
    with SlotLoader(gates.factory, 3, timeout=None) as loader:
        batch = loader.recv()
        gates.hold(2)
        batch.send([1] * 3)
        with pytest.raises(FleetStalled) as caught:
            loader.recv(stall_timeout=0.2)
        assert caught.value.slots == (2,)
        assert loader.recv(timeout=0).env_indices.tolist() == [0, 1]
        gates.let(2)


# 2


def test_records_in_hand_at_a_deadline_come_with_the_next_call_at_once(outside: dict[str, Any], gates: Gates) -> None:
    with SlotLoader(gates.factory, 4, **outside) as loader:
        batch = loader.recv(min_get=4)
        gates.hold(3)
        batch.send([9] * 4)
        for _ in range(3):
            with pytest.raises(FleetStalled):
                loader.recv(min_get=4, stall_timeout=0.1)
        begin = time.monotonic()
        batch = loader.recv(min_get=1, max_get=2, timeout=10)
        more = loader.recv(min_get=1, timeout=0)
        assert time.monotonic() - begin < 1.0
        assert sorted([*batch.env_indices, *more.env_indices]) == [0, 1, 2]
        assert batch.obs[:, 2].tolist() == [9, 9]
        gates.let(3)
        assert loader.recv().env_indices.tolist() == [3]


def test_a_record_that_has_waited_longer_than_timeout_is_handed_over_at_once_with_all_that_is_ready(gates: Gates) -> None:
    with SlotLoader(gates.factory, 4) as loader:
        batch = loader.recv(min_get=4)
        gates.hold(3)
        batch.send([9] * 4)
        until(lambda: ready(loader, 0, 1, 2))
        newest = int(loader.table.publish_ns[:3].max())
        until(lambda: time.monotonic_ns() - newest > 300_000_000)
        begin = time.monotonic()
        assert loader.recv(timeout=0.3).env_indices.tolist() == [0, 1, 2]
        assert time.monotonic() - begin < 0.2
        gates.let(3)


def test_a_ready_record_waits_for_company_for_timeout_and_no_longer(outside: dict[str, Any], gates: Gates) -> None:
    with SlotLoader(gates.factory, 2, **outside) as loader:
        batch = loader.recv(min_get=2)
        gates.hold(1)
        batch.send([9] * 2)
        until(lambda: ready(loader, 0))
        published = int(loader.table.publish_ns[0])
        assert loader.recv(timeout=0.4).env_indices.tolist() == [0]
        assert 0.39 < (time.monotonic_ns() - published) / 1e9 < 1.5
        gates.let(1)


# 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"min_get": 5}, "min_get: expected at most the number of slots, 4, found 5"),
        ({"min_get": 0}, "min_get: expected an integer of at least 1, found 0"),
        ({"min_get": 1.5}, "min_get: expected an integer of at least 1, found 1.5"),
        ({"min_get": 3, "max_get": 2}, "max_get: expected at least min_get=3, found 2"),
        ({"timeout": -0.1}, "timeout: expected seconds of at least 0 or None, found -0.1"),
        ({"timeout": float("nan")}, "timeout: expected seconds of at least 0 or None, found nan"),
        ({"stall_timeout": -1}, "stall_timeout: expected seconds of at least 0 or None, found -1"),
        ({"timeout": "1"}, "timeout: expected seconds of at least 0 or None, found '1'"),
    ],
)
def test_wrong_arguments_are_an_error_at_once_and_change_nothing(
    how: dict[str, Any], arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        SlotLoader(Counting, 4, **how, **arguments)
    with SlotLoader(Counting, 4, **how) as loader:
        with pytest.raises(ValueError, match=text):
            loader.recv(**arguments)
        assert loader.recv(min_get=4).size == 4


def test_min_get_above_what_can_come_says_which_batches_are_due_and_never_hangs(how: dict[str, Any]) -> None:
    with SlotLoader(Counting, 4, **how) as loader:
        one, two = loader.recv(min_get=1, max_get=1), loader.recv(min_get=2, max_get=2)
        begin = time.monotonic()
        with pytest.raises(SlotLoaderError) as caught:
            loader.recv(min_get=2)
        assert time.monotonic() - begin < 1.0
        text = str(caught.value)
        assert "at least 2 slots that can become ready, found 1" in text
        assert "3 of 4 slots are leased in 2 unanswered batches" in text
        assert "batch.send" in text
        for batch in (one, two):
            assert str(batch.env_indices.tolist()) in text
        assert loader.unanswered == [one, two]
        assert loader.recv(min_get=1).size == 1
        one.send([0])
        assert loader.recv(min_get=1).env_indices.tolist() == one.env_indices.tolist()


def test_min_get_waits_for_slots_that_still_start(outside: dict[str, Any], tmp_path: Path) -> None:
    class LateReset(Gated):
        def reset(self, **keywords: Any) -> Any:
            if self.episode < 0:
                until(lambda: not self.hold.exists())
            return super().reset(**keywords)

    (tmp_path / "hold-2").touch()
    with SlotLoader(partial(LateReset, directory=str(tmp_path)), 3, **outside) as loader:
        loader.recv(min_get=2)
        with pytest.raises(SlotLoaderError, match="found 1"):
            loader.recv(min_get=2)
        (tmp_path / "hold-2").unlink()
        assert loader.recv(min_get=1).env_indices.tolist() == [2]


# 4


@pytest.mark.parametrize("timeout", [30.0, None])
def test_recv_returns_at_once_when_all_that_can_come_is_in(
    outside: dict[str, Any], timeout: float | None, gates: Gates
) -> None:
    waits = []
    with SlotLoader(Counting, 4, min_get=1, timeout=timeout, **outside) as loader:
        kept = loader.recv(min_get=4, max_get=4)
        loader.send([0] * 3, kept.env_indices[:3])  # one slot stays leased: nothing comes from it
        for _ in range(40):
            batch = loader.recv()
            assert batch.env_indices.tolist() == [0, 1, 2]
            waits.append((time.monotonic_ns() - int(loader.table.publish_ns[:3].max())) / 1e9)
            batch.send([0] * 3)
    assert float(np.median(waits)) < 0.05
    assert max(waits) < 1.0


# 5


def race(backend: dict[str, Any], races: int) -> None:
    """Deadlines from 1 to 200 us against arrivals, on slow and quick machines; ONCE tells lost and repeated records."""
    once, rng = Once(4), np.random.default_rng(7)
    misses = 0
    with SlotLoader(Counting, 4, **backend) as loader:
        while once.records < races:
            least = int(rng.choice((1, 2, 3, 4, 4, 4, 4, 4)))  # the last one is often late
            try:
                timeout, stall_timeout = 10 ** rng.uniform(-6, -3.7, 2)
                batch = loader.recv(least, timeout=float(timeout), stall_timeout=float(stall_timeout))
            except FleetStalled:
                misses += 1
                batch = loader.poll() if rng.random() < 0.5 else loader.recv()
            if batch is not None:
                once.check(batch)
                batch.send(once.answer(batch.env_indices, rng))
    assert misses > races / 1000, "the deadline never lost a race: nothing was tested"


def test_races_of_deadline_against_arrival_lose_and_repeat_nothing(outside: dict[str, Any]) -> None:
    race(outside, 6_000)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_100000_races_of_deadline_against_arrival_lose_and_repeat_nothing(outside: dict[str, Any]) -> None:
    race(outside, 100_000)


def test_deadlines_and_random_policies_in_one_worker(outside: dict[str, Any]) -> None:
    with SlotLoader(Counting, 8, envs_per_worker=8, **outside) as loader:
        drive(loader, Once(8), 3000, np.random.default_rng(5))


# 6


def test_under_saturation_no_slot_starves(how: dict[str, Any]) -> None:
    turns: Counter[int] = Counter()
    with SlotLoader(Endless, 8, max_get=2, **how) as loader:
        if how["backend"] != "inline":
            until(lambda: ready(loader, *range(8)))
        for _ in range(400):
            batch = loader.recv(timeout=0)
            turns.update(batch.env_indices.tolist())
            slots = batch.env_indices.tolist()
            batch.send([0] * batch.size)
            if how["backend"] != "inline":  # always more records ready than fit: order decides who is served
                until(lambda slots=slots: ready(loader, *slots))
    assert set(turns) == set(range(8))
    assert min(turns.values()) >= 0.7 * max(turns.values()), turns


def test_the_first_resets_of_a_busy_worker_are_not_put_off_for_ever(how: dict[str, Any]) -> None:
    seen: set[int] = set()
    with SlotLoader(Working, 5, timeout=0, **{**how, "envs_per_worker": 5}) as loader:
        for _ in range(150):
            batch = loader.recv()
            seen.update(batch.env_indices.tolist())
            batch.send([0] * batch.size)  # at once: while one env steps, the last one has its action already
            if len(seen) == 5:
                break
    assert seen == set(range(5))


def test_of_too_many_ready_records_the_oldest_come_first_in_slot_order(outside: dict[str, Any], gates: Gates) -> None:
    with SlotLoader(gates.factory, 6, **outside) as loader:
        batch = loader.recv(min_get=6)
        gates.hold(*range(6))
        batch.send([0] * 6)
        order = [4, 1, 5, 0, 3, 2]
        for slot in order:
            gates.let(slot)
            until(lambda slot=slot: ready(loader, slot))
        assert loader.recv(max_get=2).env_indices.tolist() == [1, 4]
        assert loader.recv(max_get=3).env_indices.tolist() == [0, 3, 5]
        assert loader.recv(max_get=3).env_indices.tolist() == [2]


# 7


def test_properties_never_wait_behind_a_step(outside: dict[str, Any], gates: Gates) -> None:
    gates.hold(0, 1)
    with SlotLoader(gates.factory, 2, **outside) as loader:
        loader.recv(min_get=2).send([0, 0])
        until(lambda: (gates.directory / "began-0").exists() and (gates.directory / "began-1").exists())
        begin = time.monotonic()
        assert loader.num_envs == loader.num_slots == 2
        assert loader.observation_space.shape == (3,)
        assert loader.action_space.n == 1000
        assert "2 slots" in repr(loader)
        assert loader.unanswered == []
        assert loader.state_dict()["num_slots"] == 2
        assert loader.stats().stepping == 2
        assert loader.poll() is None
        assert time.monotonic() - begin < 1.0
        gates.let(0, 1)
