"""Batch forming against its rules (DESIGN section 6), in plain cases and in a simulated world with its own clock."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slotloader.batching.former import TAKE, Request, Wait, decide
from slotloader.records.specs import Array
from slotloader.table.engine import choose

MS = 1_000_000

# The arguments of recv.


SENSELESS: dict[str, list[Any]] = {
    "min_get": [0, -1, 1.0, True, None, "2", 9],
    "max_get": [0, -1, 2.0, True, "4", 1],  # 1 is below min_get
    "timeout": [-0.001, math.nan, "1", True],
    "stall_timeout": [-1, math.nan, [60]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SENSELESS.items() for value in values])
def test_a_senseless_request_is_refused_by_the_name_of_the_argument(name: str, value: Any) -> None:
    arguments = {"min_get": 2, "max_get": None, "timeout": 0.002, "stall_timeout": 60.0, name: value}
    with pytest.raises(ValueError, match=f"^{name}: expected .*found"):
        Request.checked(**arguments, num_slots=8)


def test_max_get_is_at_most_all_slots_and_numpy_numbers_are_numbers() -> None:
    assert Request.checked(1, None, 0, None, 8) == Request(1, 8, 0, None)
    assert Request.checked(1, 99, None, 5, 8) == Request(1, 8, None, 5)
    found = Request.checked(np.int64(2), np.int32(3), np.float32(0.5), np.int64(1), 8)
    assert found == Request(2, 3, 0.5, 1) and type(found.min_get) is int


@pytest.mark.parametrize("timeout", [math.inf, 1e300])
def test_an_endless_timeout_is_a_long_one(timeout: float) -> None:
    wait = decide(Request.checked(1, None, timeout, timeout, 8), ready=1, coming=3, oldest_ns=0, now_ns=3600 * 10**9)
    assert wait is not TAKE and wait.wanted == 4


# Each rule by itself: 2 to 6 records, a record may wait for 10 ms.

RULES: dict[str, tuple[dict[str, Any], int, int, int, Wait | None]] = {
    # request, ready, coming, age of the oldest in ns -> answer
    "min_get comes first": ({}, 1, 5, 999 * MS, Wait(2, None)),
    "min_get is waited for even if nothing is coming": ({}, 1, 0, 999 * MS, Wait(2, None)),
    "min_get comes before a timeout of 0": ({"timeout": 0}, 1, 5, 0, Wait(2, None)),
    "max_get are there": ({}, 6, 5, 0, TAKE),
    "more than max_get are there": ({}, 9, 0, 0, TAKE),
    "nothing more is coming": ({}, 3, 0, 0, TAKE),
    "the oldest has not waited long enough": ({}, 2, 5, 10 * MS - 1, Wait(6, 1)),
    "the oldest has waited long enough": ({}, 2, 5, 10 * MS, TAKE),
    "the oldest has waited much longer": ({}, 5, 5, 999 * MS, TAKE),
    "no more than can come are waited for": ({}, 2, 3, 0, Wait(5, 10 * MS)),
    "0 never lingers": ({"timeout": 0}, 2, 5, 0, TAKE),
    "None waits for max_get however long": ({"timeout": None}, 5, 5, 999 * MS, Wait(6, None)),
    "None waits for all that can come": ({"timeout": None}, 3, 1, 999 * MS, Wait(4, None)),
    "None takes when nothing more is coming": ({"timeout": None}, 3, 0, 0, TAKE),
    "None takes max_get": ({"timeout": None}, 6, 9, 0, TAKE),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_that(rule: str) -> None:
    changes, ready, coming, age, expected = RULES[rule]
    now = 5000 * MS
    answer = decide(replace(Request(2, 6, 0.010, None), **changes), ready, coming, now - age, now)
    if expected is not None and expected.until_ns is not None:
        expected = Wait(expected.wanted, now + expected.until_ns)
    assert answer == expected


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 12), st.integers(1, 3))
def test_the_oldest_are_chosen_in_slot_order(ages: list[int], max_get: int, stride: int) -> None:
    slots, publish_ns = np.arange(len(ages)) * stride + 7, np.array(ages, np.int64)
    chosen = choose(slots, publish_ns, max_get)
    assert chosen.size == min(max_get, slots.size) and (np.diff(chosen) > 0).all()
    taken = np.isin(slots, chosen)
    assert taken.sum() == chosen.size
    assert taken.all() or publish_ns[taken].max() <= publish_ns[~taken].min()


# The world: slots that step, a consumer that receives, threads that answer or release, hosts that are lost and return.


class World:
    """Drives `decide` and `choose` as `Receiver._receive` does, with a clock of its own, and holds them to the rules."""

    def __init__(
        self, seed: int, slots: int, decide: Callable[..., Any] = decide, choose: Callable[..., Array] = choose
    ) -> None:
        self.random = random.Random(seed)
        self.decide, self.choose = decide, choose
        self.now, self._ticks = 0, 0
        self._events: list[tuple[int, int, Callable[..., bool], Any]] = []
        self.state = ["busy"] * slots  # busy, ready, leased or parked
        self.publish_ns = np.zeros(slots, np.int64)
        self.published, self.delivered = [0] * slots, [0] * slots
        self.passed_over = [0] * slots  # batches taken since a slot became ready
        self.unanswered: dict[int, Array] = {}
        self.step_ms = lambda slot: self.random.randint(1, 20)
        for slot in range(slots):
            self.at(self.random.randint(0, 20) * MS, self.publish, slot)

    def at(self, delay: int, event: Callable[..., bool], argument: Any) -> None:
        self._ticks += 1  # ties in time happen in a random order
        heapq.heappush(self._events, (self.now + delay, self.random.randint(0, 99) * 10**9 + self._ticks, event, argument))

    # What happens by itself; each returns whether it wakes the consumer whatever that one is waiting for.

    def publish(self, slot: int) -> bool:
        if self.state[slot] == "parked":
            return False
        assert self.state[slot] == "busy"
        self.state[slot], self.publish_ns[slot] = "ready", self.now
        self.published[slot] += 1
        self.passed_over[slot] = 0
        return False

    def answer(self, serial: int) -> bool:
        if serial in self.unanswered:
            for slot in self.unanswered.pop(serial).tolist():
                self.state[slot] = "busy"
                self.at(self.step_ms(slot) * MS, self.publish, slot)
        return False

    def release(self, serial: int) -> bool:
        for slot in self.unanswered.pop(serial, np.empty(0, int)).tolist():
            self.state[slot] = "ready"
            self.delivered[slot] -= 1
        return True

    def park(self, slot: int) -> bool:
        if self.state[slot] == "busy":
            self.state[slot] = "parked"
            self.at(self.random.randint(21, 90) * MS, self.unpark, slot)  # longer than a step, whose publish is dropped
        return True

    def unpark(self, slot: int) -> bool:
        self.state[slot] = "busy"
        self.at(self.step_ms(slot) * MS, self.publish, slot)
        return True

    # What the consumer does.

    def count(self, state: str) -> int:
        return self.state.count(state)

    def due(self, request: Request) -> float:
        """The rules of DESIGN section 6 in their own words: when a batch is due if nothing else happens."""
        ready, coming = self.count("ready"), self.count("busy")
        if ready < request.min_get:
            return math.inf
        if ready >= request.max_get or coming == 0:
            return self.now
        if request.timeout is None:
            return math.inf
        oldest = min(self.publish_ns[slot] for slot, state in enumerate(self.state) if state == "ready")
        return max(self.now, int(oldest) + int(request.timeout * 1e9))

    def recv(self, request: Request) -> Array:
        naps = disturbances = 0
        while True:
            ready = np.array([slot for slot, state in enumerate(self.state) if state == "ready"], np.int64)
            count, coming = ready.size, self.count("busy")
            if request.min_get > count + coming + self.count("parked"):  # recv raises: answering is due
                self.answer(min(self.unanswered))
                continue
            oldest = None  # Receiver looks it up in these cases only
            if request.min_get <= count < request.max_get and request.timeout:
                oldest = int(self.publish_ns[ready].min())
            wait = self.decide(request, count, coming, oldest, self.now)
            if wait is TAKE:
                return self.take(request, ready)
            naps += 1
            disturbances += self.sleep(request, wait)
            assert naps <= 2 + disturbances, "the consumer was woken for nothing"

    def sleep(self, request: Request, wait: Wait) -> int:
        """Until `wanted` records, `until_ns` or a wake-up; counts what others did meanwhile."""
        until, disturbances = math.inf if wait.until_ns is None else wait.until_ns, 0
        while self.count("ready") < wait.wanted:
            nearest = min(until, self._events[0][0] if self._events else math.inf)
            assert nearest < math.inf, "the consumer sleeps for ever"
            assert self.due(request) >= nearest, "the consumer oversleeps"
            self.now = max(self.now, int(nearest))
            if nearest == until:
                break
            _, _, event, argument = heapq.heappop(self._events)
            disturbances += event != self.publish
            if event(argument):
                break
        return disturbances

    def take(self, request: Request, ready: Array) -> Array:
        assert self.due(request) == self.now, "taken early"
        batch = ready
        if ready.size > request.max_get:
            batch = self.choose(ready, self.publish_ns[ready], request.max_get)
        assert request.min_get <= batch.size <= request.max_get
        assert (np.diff(batch) > 0).all(), "rows are in slot order, each slot once"
        for slot in ready.tolist():
            self.passed_over[slot] += 1
        for slot in batch.tolist():
            assert self.state[slot] == "ready" and self.delivered[slot] == self.published[slot] - 1, "lost or twice"
            self.state[slot] = "leased"
            self.delivered[slot] += 1
        self._ticks += 1
        self.unanswered[self._ticks] = batch
        return batch

    def live(self, receives: int) -> None:
        """Random requests, slow and quick answers, releases, lost hosts."""
        chance = self.random.random
        for _ in range(receives):
            max_get = self.random.randint(1, len(self.state))
            timeout = self.random.choice([None, 0, *(ms * 1e-3 for ms in range(1, 15))])
            self.recv(Request(self.random.randint(1, max_get), max_get, timeout, None))
            serial = max(self.unanswered)
            if chance() < 0.3:
                self.answer(serial)
            elif chance() < 0.9:  # else it stays unanswered until recv asks for it
                self.at(self.random.randint(0, 40) * MS, self.release if chance() < 0.2 else self.answer, serial)
            if chance() < 0.2:
                self.at(self.random.randint(0, 20) * MS, self.park, self.random.randrange(len(self.state)))
            if chance() < 0.3:
                self.now += self.random.randint(0, 30) * MS  # the consumer is busy; what is due happens when it looks
                while self._events and self._events[0][0] <= self.now:
                    _, _, event, argument = heapq.heappop(self._events)
                    event(argument)
        waiting = [self.published[slot] - self.delivered[slot] for slot in range(len(self.state))]
        assert waiting == [int(state == "ready") for state in self.state], "a record was lost or delivered twice"


@given(st.integers(0, 2**32), st.integers(1, 9))
@settings(max_examples=250, deadline=None)
@example(0, 1)
def test_every_batch_comes_exactly_when_it_is_due_and_no_record_is_lost_or_doubled(seed: int, slots: int) -> None:
    World(seed, slots).live(receives=40)


def changed(**changes: Callable[[Request], Any]) -> Callable[..., Wait | None]:
    """`decide` with a request that says something else."""

    def decider(request: Request, ready: int, coming: int, oldest: int | None, now: int) -> Wait | None:
        request = replace(request, **{name: change(request) for name, change in changes.items()})
        return decide(request, ready, coming, now if oldest is None else oldest, now)

    return decider


WRONG_DECIDERS: dict[str, tuple[Callable[..., Wait | None], str]] = {
    "min_get is ignored": (changed(min_get=lambda _: 1), "early|for nothing"),
    "max_get is ignored": (changed(max_get=lambda request: request.max_get + 1), "oversleeps"),
    "it is taken at once": (changed(timeout=lambda _: 0), "early"),
    "lockstep does not wait": (changed(timeout=lambda request: request.timeout or 0), "early"),
    "0 lingers": (changed(timeout=lambda request: 0.001 if request.timeout == 0 else request.timeout), "oversleeps"),
    "the deadline is late": (changed(timeout=lambda request: request.timeout and request.timeout + 1e-6), "oversleeps"),
    "the deadline is early": (changed(timeout=lambda request: request.timeout and request.timeout - 1e-6), "early"),
    "the deadline counts from now": (lambda *state: decide(*state[:3], state[4], state[4]), "oversleeps"),
    "more is waited for than comes": (lambda *state: decide(*state[:2], state[2] + 1, *state[3:]), "oversleeps|for ever"),
    "less is waited for than comes": (lambda *state: decide(*state[:2], max(state[2] - 1, 0), *state[3:]), "early"),
    "it wakes for each record": (lambda *state: (wait := decide(*state)) and Wait(state[1] + 1, wait.until_ns), "for nothing"),
}


@pytest.mark.parametrize("fault", WRONG_DECIDERS)
def test_the_simulated_world_sees_that(fault: str) -> None:
    wrong, seen = WRONG_DECIDERS[fault]

    def live() -> None:
        for seed in range(40):
            World(seed, 5, decide=wrong).live(receives=40)

    with pytest.raises(AssertionError, match=seen):
        live()


def longest_wait(choose: Callable[..., Array], slots: int = 16, max_get: int = 4) -> int:
    """Batches that a ready record has seen go by, its own included, when envs are far faster than the consumer."""
    world, longest = World(1, slots, choose=choose), 0
    world.step_ms = lambda slot: 0
    world.recv(Request(slots, slots, None, None))  # all are there
    for _ in range(500):
        world.answer(max(world.unanswered))
        while world._events:
            world.publish(heapq.heappop(world._events)[3])
        world.now += MS
        world.recv(Request(1, max_get, 0.002, None))
        longest = max(longest, *world.passed_over)
    return longest


def test_no_slot_starves_under_saturation() -> None:
    assert longest_wait(choose) <= 16 / 4 + 1


@pytest.mark.parametrize(
    "pick", [np.sort, lambda order: np.sort(order)[::-1]], ids=["lowest index first", "highest index first"]
)
def test_the_starvation_check_fails_for_an_order_by(pick: Callable[[Array], Array]) -> None:
    assert longest_wait(lambda slots, publish_ns, max_get: np.sort(pick(slots)[:max_get])) > 100


def test_the_starvation_check_fails_for_newest_first() -> None:
    assert longest_wait(lambda slots, publish_ns, max_get: np.sort(slots[np.argsort(-publish_ns)[:max_get]])) > 100
