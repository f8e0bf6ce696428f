"""Recurrent state per slot: a GRU over the fleet equals one loop per env, whatever batches its records come in."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box
from policies_toys import NAMES, Adapt, Replay, host

from slotloader import Acted, Inputs, RecurrentState, SlotLoader
from slotloader.device.ops import HostOps
from slotloader.device_batches import DeviceBatches

WIDTH, HIDDEN, SLOTS = 3, 4, 7


@pytest.fixture(params=NAMES)
def adapt(request: pytest.FixtureRequest) -> Adapt:
    """The adapters."""
    return Adapt(request.param)


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"wz": (WIDTH, HIDDEN), "wr": (WIDTH, HIDDEN), "wn": (WIDTH, HIDDEN)}
    shapes |= {"uz": (HIDDEN, HIDDEN), "ur": (HIDDEN, HIDDEN), "un": (HIDDEN, HIDDEN)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def initial() -> dict[str, Any]:
    """Not zero, of two dtypes and ranks, so that a start from anything else shows."""
    return {"h": np.full(HIDDEN, 0.5, np.float32), "more": (np.array(100, np.int32),)}


def gru(xp: Any, p: Any, x: Any, h: Any) -> Any:
    z = 1 / (1 + xp.exp(-(x @ p["wz"] + h @ p["uz"])))
    r = 1 / (1 + xp.exp(-(x @ p["wr"] + h @ p["ur"])))
    n = xp.tanh(x @ p["wn"] + r * (h @ p["un"]))
    return (1 - z) * n + z * h


def policy(xp: Any) -> Any:
    """The new hidden state is the action, so every env can compare it with its own; the count goes along."""

    def step(params: Any, inputs: Inputs, state: Any, key: Any) -> Acted:
        h = gru(xp, params, inputs.obs, state["h"])
        count = state["more"][0] + 1
        return Acted({"h": h, "count": count}, {"h": h, "more": (count,)}, {"count": count})

    return step


class Crash(Exception):
    """Of an env that gets a new life."""


class Remembering(gym.Env):
    """Computes the GRU over its own observations and counts the actions that differ; short episodes, some end by a crash."""

    observation_space = Box(-10, 10, (WIDTH,), np.float32)
    action_space = gym.spaces.Dict({"h": Box(-np.inf, np.inf, (HIDDEN,), np.float32), "count": Box(0, 1000, (), np.int32)})
    right = wrong = crashes = 0

    def __init__(self, context: Any) -> None:
        self.slot, self.rng = context.slot, np.random.default_rng((context.slot, context.life))
        self.params = weights()

    def _see(self) -> np.ndarray:
        self.obs = self.rng.normal(size=WIDTH).astype(np.float32)
        self.h, self.count = gru(np, self.params, self.obs, self.h), self.count + 1
        return self.obs

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.h, self.count = initial()["h"], 100
        return self._see(), {}

    def step(self, action: Any) -> Any:
        fits = np.allclose(action["h"], self.h, atol=1e-4) and action["count"] == self.count
        kind = type(self)
        kind.right, kind.wrong = kind.right + bool(fits), kind.wrong + (not fits)
        draw = self.rng.random()
        if draw < 0.03:
            kind.crashes += 1
            raise Crash
        return self._see(), 0.0, draw < 0.12, 0.12 < draw < 0.17, {}


@pytest.fixture
def env() -> type[Remembering]:
    """Counters of its own for each test."""
    return type("Remembering", (Remembering,), {})


def fleet(env: Any, **options: Any) -> SlotLoader:
    """An inline fleet: one thread, so the counters are exact. Batches are of at most 5 of 7 slots."""
    options = {"backend": "inline", "max_get": 5, **options}
    return SlotLoader(env, SLOTS, on_failure="restart", max_restarts=10_000, seed=0, **options)


def many(adapt: Adapt) -> int:
    """Env steps; jax without a compiler is slow."""
    return 150 if adapt.name == "jax" else 1000


def settle(env: type[Remembering], least: int = 100) -> None:
    """All of many actions were right, over ends and crashes."""
    assert env.wrong == 0
    assert env.right >= least
    assert env.crashes


def test_run_equals_one_loop_per_env_over_ends_new_lives_and_padding(adapt: Adapt, env: Any) -> None:
    counts: list[int] = []
    with fleet(env) as loader, adapt(loader, buckets=(5,)) as batches:
        bound = adapt.compile(batches, policy(adapt.xp), params=weights(), state=initial())
        assert isinstance(bound.state, RecurrentState)
        batches.run(bound, env_steps=500)  # for jax compiled: hidden inputs, donated tables
        batches.run(bound, env_steps=500, on_batch=lambda batch, acted: counts.extend(host(acted.extras["count"]).tolist()))
        assert host(bound.state.tables["h"]).shape == (SLOTS + 1, HIDDEN)
        assert min(counts) == 101
        assert max(counts) > 105
    settle(env)


def test_random_batches_of_threads_equal_one_loop_per_env(adapt: Adapt, env: Any) -> None:
    with fleet(env, backend="thread", timeout=0) as loader, adapt(loader, buckets=(5,)) as batches:
        bound = adapt.compile(batches, policy(adapt.xp), params=weights(), state=initial())
        batches.run(bound, env_steps=500)
    settle(env)


def test_a_policy_in_a_loop_of_ones_own_equals_one_loop_per_env(adapt: Adapt, env: Any) -> None:
    rng = np.random.default_rng(0)
    with fleet(env) as loader, adapt(loader, buckets=(1, 3, 5)) as batches:
        bound = batches.policy(policy(adapt.xp), params=weights(), state=initial())
        steps = 0
        while steps < many(adapt):
            most = int(rng.integers(1, 6))
            batch = batches.recv(most, most)
            if rng.random() < 0.1:
                batch.release()
                continue
            steps += batch.env_steps
            batch.send(bound(batch).action)
    settle(env)


def test_gather_and_scatter_equal_one_loop_per_env(adapt: Adapt, env: Any) -> None:
    rng = np.random.default_rng(1)
    params = adapt.array(weights())
    with fleet(env) as loader, adapt(loader, buckets=(4, 5)) as batches:
        state = batches.recurrent_state(initial())
        steps = 0
        while steps < many(adapt):
            most = int(rng.integers(1, 6))
            batch = batches.recv(most, most)
            before = state.gather(batch)
            assert host(before["h"]).shape == (batch.bucket, HIDDEN)
            np.testing.assert_array_equal(host(before["h"])[batch.size :], 0.5)  # padding begins anew as well
            if rng.random() < 0.1:  # before the scatter: nothing has changed
                batch.release()
                continue
            acted = policy(adapt.xp)(params, batch.inputs, before, None)
            state.scatter(batch, acted.state)
            steps += batch.env_steps
            batch.send(acted.action)
    settle(env)


def test_state_of_slots_outside_the_batch_does_not_change(adapt: Adapt) -> None:
    with SlotLoader(Replay, 6, backend="inline", timeout=None) as loader, adapt(loader, buckets=(4,)) as batches:
        bound = adapt.compile(
            batches,
            lambda params, inputs, state, key: Acted(inputs.env_indices * 0, state=state + inputs.obs[:, :1]),
            state=np.zeros(1, np.float32),
        )
        first = batches.recv(3, 3)
        bound(first)
        table = host(bound.state.tables).copy()
        np.testing.assert_array_equal(table[:3], first.host.obs[:, :1])
        assert not table[3:6].any()
        second = batches.recv(3, 3)
        bound(second)
        table = host(bound.state.tables).copy()
        np.testing.assert_array_equal(table[:3], first.host.obs[:, :1])
        np.testing.assert_array_equal(table[3:6], second.host.obs[:, :1])


def test_the_reference_sees_a_state_that_is_not_reset(adapt: Adapt, env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test tests: with FIRST records ignored the envs find wrong actions."""
    monkeypatch.setattr(
        "slotloader.device.policies.gather_state",
        lambda ops, tables, initial, indices, is_first: ops.tree_map(lambda table: table[indices], tables),
    )
    with fleet(env) as loader, adapt(loader, buckets=(5,)) as batches:
        batches.run(batches.policy(policy(adapt.xp), params=weights(), state=initial()), env_steps=100)
    assert env.wrong > 10


@pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "compiled"])
def test_the_state_of_released_records_goes_back_to_what_it_was(adapt: Adapt, env: type[Remembering], compiled: bool) -> None:
    rng = np.random.default_rng(1)
    with fleet(env) as loader, adapt(loader) as batches:
        bind = partial(adapt.compile, batches) if compiled else batches.policy
        acting = bind(policy(adapt.xp), params=adapt.array(weights()), state=initial())
        steps = released = 0
        while steps < many(adapt):
            batch = batches.recv()
            acted = acting(batch)
            choice = rng.random()
            if choice < 0.4:
                if choice < 0.1:
                    acting(batch)  # acted on twice, and never answered
                batches.drain()  # else the oldest may be one whose actions are on their way
                (batch, batch.host, loader.unanswered[0])[rng.integers(3)].release()
                assert not loader.unanswered
                released += 1
                continue
            if choice < 0.6:  # some rows wait and come again
                hold = rng.random(batch.size) < 0.5
                batch.send(acted.action, hold=hold)
                batch.release()
            else:
                batch.send(acted.action)
            steps += batch.env_steps
    assert released > 10
    settle(env)


class Replayed(HostOps):
    """Compiled steps write their results to the same memory at each call, as CUDA graphs do."""

    def static_outputs(self, options: dict[str, Any]) -> bool:
        return True

    def compile(self, step: Any, arguments: Any, options: dict[str, Any]) -> Any:
        kept, _ = step(*arguments)

        def replay(*arguments: Any) -> Any:
            acted, tables = step(*arguments)
            self.tree_map(np.copyto, kept, acted)
            return kept, tables

        return replay


def test_the_state_goes_back_also_if_another_batch_was_acted_on_meanwhile_in_the_same_memory() -> None:
    def act(params: Any, inputs: Inputs, state: Any, key: Any) -> Acted:
        return Acted((state["n"] > 99).astype(np.int64), {"n": state["n"] + inputs.env_indices + 1})

    with (
        SlotLoader(Replay, 4, backend="inline", timeout=None, max_get=2) as loader,
        DeviceBatches(loader, Replayed()) as batches,
    ):
        acting = batches.compile(act, state={"n": np.zeros((), np.int64)})
        for _ in range(3):
            batch = batches.recv(2)
            batch.send(acting(batch).action)
        before = acting.state.tables["n"].copy()
        first, second = batches.recv(2), batches.recv(2)
        assert before[first.host.env_indices].tolist() != before[second.host.env_indices].tolist()
        acting(first), acting(second)
        first.release()
        slots = first.host.env_indices
        assert acting.state.tables["n"][slots].tolist() == before[slots].tolist()
        second.release()
        assert acting.state.tables["n"][:4].tolist() == before[:4].tolist()
