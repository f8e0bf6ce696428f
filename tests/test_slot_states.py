"""Slot states: who may move a slot where, and that a real run makes no other move."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

import slotloader
from slotloader.batching import batches, leases, receiver
from slotloader.records.step_type import StepType
from slotloader.table import engine, publisher, writer
from slotloader.table.slots import LEGAL_MOVES, SlotState
from slotloader.worker import worker as workers

S = SlotState
OWNED = {"env": {S.STARTING, S.ACTED, S.WRITING}, "trainer": {S.READY, S.LEASED}}


def test_each_side_leaves_only_states_of_its_own() -> None:
    """So no two sides can move one slot at a time, and no lock is needed."""
    for side, owned in OWNED.items():
        assert {source for source, _ in LEGAL_MOVES[side]} <= owned
    assert not OWNED["env"] & OWNED["trainer"]


def test_a_slot_changes_hands_at_ready_and_at_acted_only() -> None:
    handed = {(side, target) for side, owned in OWNED.items() for _, target in LEGAL_MOVES[side] if target not in owned}
    assert handed == {("env", S.READY), ("trainer", S.ACTED)}


def test_only_the_fleet_makes_a_slot_starting_parked_or_dead() -> None:
    for side, moves in LEGAL_MOVES.items():
        targets = {target for _, target in moves}
        fleet_only = {S.STARTING, S.PARKED, S.DEAD}
        assert targets <= fleet_only if side == "fleet" else not targets & fleet_only


def test_the_fleet_takes_no_record_away_and_wakes_no_dead_slot() -> None:
    """A READY record is still delivered, a LEASED row is untouched until its `send`, DEAD is for good."""
    fleet = LEGAL_MOVES["fleet"]
    assert not [move for move in fleet if move[0] == S.READY]
    assert [move for move in fleet if move[0] == S.DEAD] == [(S.DEAD, S.STARTING)], "only add_envs wakes a dead slot"
    assert [move for move in fleet if move[0] == S.LEASED] == [(S.LEASED, S.DEAD)]


def test_every_move_is_between_two_states() -> None:
    assert all(source != target for moves in LEGAL_MOVES.values() for source, target in moves)
    assert set(LEGAL_MOVES) == {"env", "trainer", "fleet"}


@given(st.data())
def test_from_any_state_the_sides_alone_bring_a_slot_round_or_leave_it_to_the_fleet(data: st.DataObject) -> None:
    """Random legal moves of env and trainer: a slot only ever rests where the fleet has put it."""
    both = sorted(LEGAL_MOVES["env"] | LEGAL_MOVES["trainer"])
    state = data.draw(st.sampled_from(SlotState))
    if state in (S.PARKED, S.DEAD):
        assert not [target for source, target in both if source == state]
        return
    for _ in range(20):
        targets = [target for source, target in both if source == state]
        assert targets, f"{state!r} is a dead end"
        state = data.draw(st.sampled_from(targets))
        assert state in OWNED["env"] | OWNED["trainer"]


def test_every_record_can_be_reached_again() -> None:
    seen, queue = set(), deque([S.READY])
    while queue:
        state = queue.popleft()
        for source, target in LEGAL_MOVES["env"] | LEGAL_MOVES["trainer"]:
            if source == state and target not in seen:
                seen.add(target)
                queue.append(target)
    assert seen == {S.READY, S.LEASED, S.ACTED, S.WRITING}


# The numbers behind the names: hot loops compare bytes and ints.


def test_states_are_the_bytes_that_a_worker_looks_for() -> None:
    states = np.array(list(SlotState), np.uint8)
    assert states.tolist() == list(range(len(SlotState))) and len(SlotState) < 256
    for module in (workers, receiver, leases, engine, publisher, writer):
        for name, value in vars(module).items():
            if re.fullmatch(r"_(STARTING|ACTED|WRITING|READY|LEASED|DEAD)", name):
                assert type(value) is int and value == SlotState[name[1:]], f"{module.__name__}.{name}"
            elif name[1:] in StepType.__members__:
                as_int = value[0] if isinstance(value, bytes) else value
                assert type(value) in (int, bytes) and as_int == StepType[name[1:]], f"{module.__name__}.{name}"
    assert states.tobytes().find(workers._ACTED) == S.ACTED == engine._ACTED


def test_fresh_memory_means_starting_and_first() -> None:
    assert S.STARTING == 0 and StepType.FIRST == 0


def test_last_records_are_those_from_termination_on() -> None:
    """`step_type >= 2` and a count of zero bytes stand for "last" and "FIRST" in the receiver."""
    assert [int(step) for step in StepType] == [0, 1, 2, 3]
    assert [step for step in StepType if step >= 2] == [StepType.TERMINATION, StepType.TRUNCATION]
    batch = batches.Batch.__new__(batches.Batch)
    batch.step_type = np.arange(4, dtype=np.uint8)
    assert batch.is_first.tolist() == [True, False, False, False]
    assert batch.is_last.tolist() == [False, False, True, True]
    assert batch.terminated.tolist() == [False, False, True, False]
    assert batch.truncated.tolist() == [False, False, False, True]
    assert batch.discount.tolist() == [1, 1, 0, 1] and batch.discount.dtype == np.float32


def test_no_module_compares_a_state_with_a_bare_number() -> None:
    bare = re.compile(r"(?<![a-z])states?(_words)?(\[[^\]]*\])?\s*(==|!=|=)\s*\d")
    lines = [
        f"{path.name}: {line.strip()}"
        for path in sorted(Path(slotloader.__file__).parent.rglob("*.py"))
        for line in path.read_text().splitlines()
        if bare.search(line)
    ]
    assert lines == []
    assert bare.search("if self._state[slot] == 3:") and not bare.search("if self._state[slot] == _READY:")


# A real run, watched.


class Watched:
    """The state words of a table; notes each move and who made it."""

    def __init__(self, words: Any, side: str, moves: list[tuple[str, SlotState, SlotState]]) -> None:
        self._words, self._side, self._moves = words, side, moves

    def __getitem__(self, at: Any) -> Any:
        return self._words[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        for old in np.atleast_1d(np.asarray(self._words)[at]):
            self._moves.append((self._side, SlotState(int(old)), SlotState(int(value))))
        self._words[at] = value


class Env:
    observation_space = action_space = spaces.Discrete(9)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        self.t = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        if action == 8:
            raise RuntimeError("broken")
        self.t += 1
        return self.t, 1.0, self.t == 3, self.t == 2 and action == 1, {}


@contextmanager
def watched() -> Iterator[tuple[slotloader.SlotLoader, list[tuple[str, SlotState, SlotState]]]]:
    moves: list[tuple[str, SlotState, SlotState]] = []
    with slotloader.SlotLoader(Env, num_envs=3, backend="inline", timeout=0, on_failure="raise") as loader:
        loader.receiver._engine._state = Watched(loader.table.state, "trainer", moves)  # type: ignore[attr-defined]
        for env_runner in loader.fleet._worker.runners:  # type: ignore[attr-defined]
            slot_writer = env_runner._writer
            slot_writer._state = Watched(loader.table.state_words, "env", moves)
            slot_writer._hand_over.__self__._state = slot_writer._state  # the publisher's
        yield loader, moves


def test_a_run_makes_every_legal_move_and_no_other() -> None:
    with watched() as (loader, moves):
        for number in range(60):
            batch = loader.recv()
            if number % 7 == 3:
                batch.release()
            else:
                batch.send(np.full(batch.size, number % 2))
    made = {(side, source, target) for side, source, target in moves if source != target}
    after_ctrl_c = ("env", S.WRITING, S.ACTED)  # nobody presses it here
    assert made == {(side, *move) for side in ("env", "trainer") for move in LEGAL_MOVES[side]} - {after_ctrl_c}


def test_an_env_that_fails_leaves_its_slot_dead_by_moves_of_the_fleet() -> None:
    with watched() as (loader, moves):
        loader.recv(min_get=3).send(np.array([0, 8, 0]))
        with pytest.raises(slotloader.EnvFailed):
            loader.recv(min_get=3)
        loader.recv(min_get=2).send(np.array([0, 0]))
        assert loader.table.state[1] == S.DEAD
    buried = {(source, target) for side, source, target in moves if side == "trainer" and target == S.DEAD}
    assert buried == {(S.WRITING, S.DEAD)} <= LEGAL_MOVES["fleet"]
    made = {(source, target) for _, source, target in moves if source != target}
    assert made <= LEGAL_MOVES["env"] | LEGAL_MOVES["trainer"] | LEGAL_MOVES["fleet"]
