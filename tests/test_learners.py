"""Transitions and unrolls: equal to a slow, obvious reference on random histories, on every device."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import Counting

import slotloader
from slotloader import SlotLoader
from slotloader.batching.batches import Batch
from slotloader.learning.learners import Transitions, Unrolls
from slotloader.records.step_type import StepType

SLOTS, GAMMA = 5, 0.5
EXAMPLES = 10_000 if "--soak" in sys.argv else 150  # random histories
pytestmark = pytest.mark.timeout(120 if EXAMPLES < 1000 else 600)


@dataclass(frozen=True)
class Record:
    """One record of a slot, and what was answered to it."""

    slot: int
    sequence: int
    kind: int
    reward: float
    obs: float
    action: int = 0
    version: int = 0

    @property
    def is_last(self) -> bool:
        return self.kind >= StepType.TERMINATION


def histories(seed: int, batches: int) -> Iterator[tuple[list[Record], bool]]:
    """Random batches and whether the consumer adds them.

    Slots end and begin episodes, are cut (a FIRST out of turn), come again (the same record), and are left out now and then.
    """
    rng = random.Random(seed)
    last: dict[int, Record] = {}
    for number in range(batches):
        records = []
        for slot in sorted(rng.sample(range(SLOTS), rng.randint(1, SLOTS))):
            before = last.get(slot)
            if before is not None and rng.random() < 0.1:
                records.append(replace(before, action=rng.randrange(9), version=number))
                continue
            fresh = before is None or before.is_last or rng.random() < 0.06
            kind = 0 if fresh else rng.choices([1, 2, 3], [6, 1, 1])[0]
            reward = 0.0 if fresh else float(rng.randint(-5, 5))
            sequence = 1 if before is None else before.sequence + 1
            last[slot] = Record(slot, sequence, kind, reward, rng.random(), rng.randrange(9), number)
            records.append(last[slot])
        yield records, rng.random() > 0.05


@pytest.fixture(scope="module")
def loader() -> Iterator[SlotLoader]:
    with SlotLoader([Counting] * SLOTS, backend="inline") as open_loader:
        yield open_loader


def batch_of(loader: SlotLoader, records: list[Record]) -> Batch:
    """The batch that a loader would have made."""
    batch = Batch(
        loader.receiver.leases,
        max_get=SLOTS,
        taken_ns=0,
        env_indices=np.array([r.slot for r in records]),
        reward=np.array([r.reward for r in records], np.float32),
        step_type=np.array([r.kind for r in records], np.uint8),
        episodes=[],
    )
    batch._obs = np.array([[r.obs, r.slot] for r in records])
    batch._sequence = np.array([r.sequence for r in records], np.uint64)
    return batch


class Chains:
    """The reference: for each slot its records in order, each with whether it follows the one before."""

    def __init__(self) -> None:
        self.records: list[list[Record]] = [[] for _ in range(SLOTS)]
        self.follows: list[list[bool]] = [[] for _ in range(SLOTS)]

    def add(self, record: Record) -> None:
        chain = self.records[record.slot]
        if chain and chain[-1].sequence == record.sequence:
            chain[-1] = record
            return
        self.follows[record.slot].append(
            bool(chain) and chain[-1].sequence + 1 == record.sequence and record.kind != StepType.FIRST
        )
        chain.append(record)

    def transitions(self, n: int) -> list[tuple[Any, ...]]:
        """All transitions of up to n steps that are complete."""
        found = []
        for chain, follows in zip(self.records, self.follows, strict=True):
            for i, start in enumerate(chain):
                j, total, weight = i, 0.0, 1.0
                while j + 1 < len(chain) and follows[j + 1] and j - i < n:
                    j += 1
                    total += weight * chain[j].reward
                    weight *= GAMMA * (chain[j].kind != StepType.TERMINATION)
                broken = j + 1 < len(chain) and not follows[j + 1]
                if j > i and not start.is_last and (j - i == n or chain[j].is_last or broken):
                    found.append((start.slot, start.obs, total, weight, chain[j].obs))
        return sorted(found)


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 10**9), n=st.integers(1, 5))
def test_transitions_equal_the_slow_reference(loader: SlotLoader, seed: int, n: int) -> None:
    transitions, chains, found = Transitions(loader, n, GAMMA), Chains(), []
    for records, added in histories(seed, 30):
        if not added:
            continue
        for record in records:
            chains.add(record)
        done = transitions.add(
            batch_of(loader, records), np.array([r.action for r in records]), {"twice": np.array([2 * r.obs for r in records])}
        )
        assert (done.extras["twice"] == 2 * done.obs[:, 0]).all()
        for row, slot in enumerate(done.slots.tolist()):
            figures = float(done.reward[row]), float(done.discount[row])
            found.append((slot, done.obs[row, 0], *figures, done.next_obs[row, 0]))
            assert done.obs[row, 1] == slot == done.next_obs[row, 1]
    assert sorted(found) == chains.transitions(n)


class SlowUnrolls:
    """The reference: an unroll as soon as its last record is there."""

    def __init__(self, length: int, overlap: int) -> None:
        self._length, self._overlap = length, overlap
        self._chains = Chains()
        self._begins = [0] * SLOTS

    def add(self, records: list[Record]) -> list[tuple[int, list[Record], list[bool]]]:
        found = []
        for record in records:
            self._chains.add(record)
            slot = record.slot
            chain, begin = self._chains.records[slot], self._begins[slot]
            if len(chain) == begin + self._length + 1:
                found.append((slot, chain[begin:], self._chains.follows[slot][begin + 1 :]))
                self._begins[slot] += self._length - self._overlap
        return found


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 10**9), length=st.integers(1, 6), size=st.integers(1, 4), data=st.data())
def test_unrolls_equal_the_slow_reference(loader: SlotLoader, seed: int, length: int, size: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, length - 1))
    unrolls, slow = Unrolls(loader, length, size, overlap), SlowUnrolls(length, overlap)
    expected: list[tuple[int, list[Record], list[bool]]] = []
    for records, added in histories(seed, 30):
        if not added:
            continue
        expected += slow.add(records)
        state = {"h": np.array([[3 * r.obs] for r in records])}
        actions, extras = np.array([r.action for r in records]), {"twice": np.array([2 * r.obs for r in records])}
        versions = {r.version for r in records}
        for unroll in unrolls.add(batch_of(loader, records), actions, extras, state, version=min(versions)):
            assert unroll.obs.shape == (length + 1, size, 2)
            for column in range(size):
                slot, chain, follows = expected.pop(0)
                assert unroll.slots[column] == slot
                assert unroll.obs[:, column, 0].tolist() == [r.obs for r in chain]
                assert unroll.action[:, column].tolist() == [r.action for r in chain]
                assert unroll.reward[:, column].tolist() == [r.reward for r in chain]
                assert unroll.step_type[:, column].tolist() == [r.kind for r in chain]
                assert unroll.discount[:, column].tolist() == [float(r.kind != StepType.TERMINATION) for r in chain]
                assert unroll.valid[:, column].tolist() == follows
                assert unroll.extras["twice"][:, column].tolist() == [2 * r.obs for r in chain]
                assert unroll.initial_state["h"][column].tolist() == [3 * chain[0].obs]
                assert (unroll.is_first[:, column] == (unroll.step_type[:, column] == 0)).all()
    assert len(expected) < size


@pytest.mark.parametrize("adapter", ["numpy", "torch", "jax"])
def test_the_records_of_a_device_equal_those_of_the_host(adapter: str) -> None:
    """Two loaders with the same seed, one of them through an adapter whose batches are padded."""
    how = {"backend": "inline", "seed": 3, "timeout": None, "max_get": 3}
    collected: list[list[Any]] = []
    for name in (None, adapter):
        with SlotLoader("CartPole-v1", SLOTS, **how) as loader:
            source = loader if name is None else getattr(slotloader, f"to_{name}")(loader, buckets=(2, 3))
            unrolls, transitions, out = Unrolls(source, 4, 3, 1), Transitions(source, 3), []
            for _ in range(60):
                batch = source.recv(max_get=3)
                host = batch if name is None else batch.host
                actions = (host.obs[:, 2] > 0).astype(np.int64)
                extras = {"angle": batch.obs[:, 2]}
                done = transitions.add(batch, actions, extras)
                out += [np.asarray(x)[: done.size] for x in (done.obs, done.action, done.reward, done.discount, done.next_obs)]
                out += [np.asarray(done.extras["angle"])[: done.size]]
                for unroll in unrolls.add(batch, actions, extras, state=batch.obs[:, 1:3], version=7):
                    out += [np.asarray(leaf) for leaf in unroll[:7]] + [np.asarray(unroll.initial_state), unroll.versions]
                    out += [np.asarray(unroll.extras["angle"]), unroll.slots]
                batch.send(actions)
            collected.append(out)
    assert len(collected[0]) == len(collected[1]) > 400
    for ours, theirs in zip(*collected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
