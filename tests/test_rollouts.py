"""Rollouts and background acting: on-policy data up to one barrier, unrolls beside a learner, nothing lost by kills."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from checks import until
from toys import Counting, Endless, Gated

import slotloader
from slotloader import Acted, SlotLoader, SlotLoaderError, StepType
from slotloader.device.ops import HostOps
from slotloader.device_batches import DeviceBatches
from slotloader.learning.learners import Transitions, Unroll, Unrolls

pytestmark = pytest.mark.usefixtures("clean")
OPTIONS: dict[str, dict[str, Any]] = {"numpy": {}, "torch": {"backend": "eager"}, "jax": {}}


def counting(params: Any, inputs: Any, state: Any, key: Any) -> Acted:
    """Acts by its params, and counts the records of each episode in its state."""
    return Acted(inputs.env_indices * 0 + params, {"n": state["n"] + 1}, {"n": state["n"]})


def recurrent(batches: DeviceBatches, name: str) -> Any:
    return batches.compile(counting, params=np.int32(1), state={"n": np.zeros((), np.int32)}, **OPTIONS[name])


def host(tree: Any) -> Any:
    return {key: host(child) for key, child in tree.items()} if isinstance(tree, dict) else np.asarray(tree)


def require_consistent(unroll: Unroll) -> None:
    """What holds for every unroll of `Counting` envs without failures, whose observation is 1000 * env + t."""
    obs, first, valid = host(unroll.obs)[..., 0], host(unroll.is_first), host(unroll.valid)
    n = host(unroll.extras)["n"]
    assert (valid == ~first[1:]).all()
    assert ((obs[1:] == obs[:-1] + 1) | first[1:]).all() and (obs // 1000 == unroll.slots).all()
    assert (n[first] == 0).all() and ((n[1:] == n[:-1] + 1) | first[1:]).all()
    assert (host(unroll.initial_state)["n"] == n[0]).all()


@pytest.mark.parametrize("name", OPTIONS)
def test_rollouts_hand_over_without_a_hole_and_every_action_is_of_the_newest_weights(name: str) -> None:
    with SlotLoader(Counting, 5, seed=0, backend="thread") as loader, getattr(slotloader, f"to_{name}")(loader) as batches:
        policy = recurrent(batches, name)
        rollouts, last = batches.rollout(policy, length=7), None
        for number, unroll in enumerate(itertools.islice(rollouts, 12)):
            require_consistent(unroll)
            obs = host(unroll.obs)[..., 0]
            assert obs.shape == (8, 5) and unroll.slots.tolist() == list(range(5))
            if last is not None:
                np.testing.assert_array_equal(obs[0], last)
            last = obs[-1]
            assert (unroll.versions == number).all(), "acted on with other weights than those of this rollout"
            assert (host(unroll.action) == number + 1).all()
            policy.update(np.int32(number + 2))
        rollouts.close()
        assert not loader.unanswered


def test_a_straggler_is_cut_by_the_quorum_and_its_transitions_come_once(tmp_path: Any) -> None:
    def make(context: slotloader.EnvContext) -> Gated:
        return Gated(context, directory=str(tmp_path))

    seen: list[Any] = []
    (tmp_path / "hold-0").touch()
    with SlotLoader(make, 4, seed=0) as loader, slotloader.to_numpy(loader) as batches:
        rollouts = batches.rollout(lambda obs: np.zeros(len(obs), np.int64), length=5, quorum=0.75)
        for number, unroll in enumerate(itertools.islice(rollouts, 6)):
            if number == 2:
                (tmp_path / "hold-0").unlink()
            assert unroll.valid[:, 1:].sum() >= 9, "the others have all of theirs"
            seen += map(tuple, unroll.obs[1:, 0, :2][unroll.valid[:, 0]].tolist())
        rollouts.close()
    assert len(seen) == len(set(seen)), "a transition of the straggler came twice"


def test_quorum_and_length_are_checked() -> None:
    with SlotLoader(Counting, 2, backend="inline") as loader, slotloader.to_numpy(loader) as batches:
        with pytest.raises(ValueError, match="quorum: expected a share above 0 and up to 1, found 2"):
            batches.rollout(lambda obs: obs, length=5, quorum=2)
        with pytest.raises(ValueError, match="length: expected an integer of at least 1, found 0"):
            batches.rollout(lambda obs: obs, length=0)


@pytest.mark.parametrize("name", OPTIONS)
def test_background_acts_while_the_learner_computes_and_takes_new_weights(name: str) -> None:
    with SlotLoader(Counting, 5, seed=0, backend="thread") as loader, getattr(slotloader, f"to_{name}")(loader) as batches:
        policy = recurrent(batches, name)
        with batches.background(policy, unrolls=Unrolls(batches, 6, 3)) as actor:
            for number, unroll in enumerate(itertools.islice(actor, 15)):
                require_consistent(unroll)
                assert (host(unroll.action) == unroll.versions + 1).all() and unroll.versions.max() <= actor.version
                actor.update(np.int32(number + 2))
            until(lambda: policy.version >= 10)
        assert actor.env_steps >= 15 * 6 * 3 * 0.7 and actor.episodes() and not actor.episodes()
        batches.run(policy, env_steps=20)


def test_a_full_queue_stops_the_actor_or_drops_the_oldest() -> None:
    with SlotLoader(Endless, 3, seed=0, backend="thread") as loader, slotloader.to_numpy(loader) as batches:
        with batches.background(lambda obs: np.zeros(len(obs), np.int64), unrolls=Unrolls(batches, 4), queue=2) as actor:
            until(lambda: len(actor._queue) == 2)
            stood = until(lambda: (steps := actor.env_steps) and (time.sleep(0.2), actor.env_steps)[1] == steps and steps)
            assert stood <= 60, "the envs went on although nobody learned"
            assert next(actor).obs.shape == (5, 1, 3)
        how: Any = {"unrolls": Unrolls(batches, 4), "queue": 2, "on_full": "drop_oldest"}
        with batches.background(lambda obs: np.zeros(len(obs), np.int64), **how) as actor:
            until(lambda: actor.dropped > 20)
            assert next(actor).obs.min() > 5


def test_unrolls_that_lag_too_far_behind_are_left_out() -> None:
    with SlotLoader(Endless, 2, seed=0, backend="thread") as loader, slotloader.to_numpy(loader) as batches:
        policy = batches.policy(lambda params, obs: np.zeros(len(obs), np.int64), params=np.zeros(1))
        with batches.background(policy, unrolls=Unrolls(batches, 4), queue=3, max_lag=0) as actor:
            until(lambda: len(actor._queue) == 3)
            actor.update(np.ones(1), version=7)
            assert next(actor).versions.min() >= 7 and actor.dropped >= 3


def test_what_fails_in_the_background_is_raised_to_the_learner_and_the_loader_goes_on() -> None:
    def policy(obs: Any) -> Any:
        raise RuntimeError("no such weights")

    with SlotLoader(Counting, 2, seed=0, backend="thread") as loader, slotloader.to_numpy(loader) as batches:
        with batches.background(policy, unrolls=Unrolls(batches, 4)) as actor:
            with pytest.raises(RuntimeError, match="no such weights"):
                next(actor)
            with pytest.raises(StopIteration):
                next(actor)
        with pytest.raises(SlotLoaderError, match="entered once"):
            actor.__enter__()
        assert batches.run(lambda obs: np.zeros(len(obs), np.int64), env_steps=10).env_steps >= 10


def test_closing_ends_an_actor_that_waits_for_a_slow_env(tmp_path: Any) -> None:
    (tmp_path / "hold-0").touch()
    with SlotLoader(partial(Gated, directory=str(tmp_path)), 1, seed=0) as loader, slotloader.to_numpy(loader) as batches:
        actor = batches.background(lambda obs: np.zeros(len(obs), np.int64), unrolls=Unrolls(batches, 4)).__enter__()
        until(lambda: loader.table.state[0] == 2, what="the env is in its step")
        begun = time.monotonic()
        actor.close()
        assert time.monotonic() - begun < 2.0
        (tmp_path / "hold-0").unlink()


@pytest.mark.timeout(120)
def test_once_holds_through_every_assembler_under_random_kills() -> None:
    """Transitions and unrolls of envs that count their steps: what is valid is one step apart, and nothing comes twice."""
    rng, stop = np.random.default_rng(0), threading.Event()
    with SlotLoader(Counting, 6, seed=0, on_failure="restart", max_restarts=10**6, preload=["toys"]) as loader:

        def kill() -> None:
            while not stop.wait(0.03):
                pids = [pid for pid in loader.fleet.pids.values() if pid]  # type: ignore[attr-defined]
                with contextlib.suppress(ProcessLookupError, ValueError):
                    os.kill(int(rng.choice(pids)), signal.SIGKILL)

        transitions, unrolls, lives = Transitions(loader, 2), Unrolls(loader, 5, 2), set()
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            steps: set[tuple[int, int, int]] = set()
            deadline = time.monotonic() + 8.0
            while time.monotonic() < deadline:
                batch = loader.recv()
                tags = {"tag": loader.table.life[batch.env_indices] * 10**6 + batch.sequence.astype(np.int64)}
                lives.update(zip(batch.env_indices.tolist(), loader.table.life[batch.env_indices].tolist(), strict=True))
                actions = np.zeros(batch.size, np.int64)
                done = transitions.add(batch, actions, tags)
                length = done.next_obs[:, 0] - done.obs[:, 0]
                assert ((length >= 1) & (length <= 2)).all() and (done.obs[:, 0] // 1000 == done.slots).all()
                for slot, tag in zip(done.slots.tolist(), done.extras["tag"].tolist(), strict=True):
                    assert (slot, 0, tag) not in steps, "a transition came twice"
                    steps.add((slot, 0, tag))
                for unroll in unrolls.add(batch, actions, tags):
                    gap = unroll.obs[1:, :, 0] - unroll.obs[:-1, :, 0]
                    assert (gap[unroll.valid] == 1).all()
                    assert (unroll.step_type[1:][~unroll.valid] == StepType.FIRST).all()
                    for t, column in zip(*np.nonzero(unroll.valid), strict=True):
                        key = (int(unroll.slots[column]), 1, int(unroll.extras["tag"][t, column]))
                        assert key not in steps, "a transition came twice"
                        steps.add(key)
                batch.send(actions)
        finally:
            stop.set()
            killer.join()
    assert len(lives) > 12, "hardly anybody was killed"
    assert len(steps) > 1000


def test_what_waits_at_the_barrier_is_counted_once() -> None:
    with SlotLoader(Counting, 3, seed=0, backend="thread") as loader, slotloader.to_numpy(loader) as batches:
        rollouts = batches.rollout(lambda obs: np.zeros(len(obs), np.int64), length=1)
        unrolls = list(itertools.islice(rollouts, 30))
        firsts = sum(int((unroll.step_type[1] == 0).sum()) for unroll in unrolls) + 3
        assert rollouts.env_steps == 30 * 3 + 3 - firsts
        rollouts.close()


def test_rollouts_of_a_fleet_that_is_gone_raise_what_recv_raises() -> None:
    with SlotLoader(Counting, 2, seed=0, backend="thread") as loader, slotloader.to_numpy(loader) as batches:
        rollouts = batches.rollout(lambda obs: np.zeros(len(obs), np.int64), length=3)
        next(rollouts)
        rollouts.close()
        loader.remove_envs([0, 1])
        with pytest.raises(SlotLoaderError, match="no slot is left"):
            [next(rollouts) for _ in range(3)]


def test_held_rows_are_given_back_although_the_others_are_on_their_way() -> None:
    class Slow(HostOps):
        def at_once(self, array: Any) -> None:
            return None

        def done(self, event: Any) -> bool:
            return False

        def host_wait(self, event: Any) -> None:
            time.sleep(0.05)

    with SlotLoader(Counting, 3, backend="thread", timeout=None) as loader, DeviceBatches(loader, Slow()) as batches:
        batch = batches.recv(min_get=3)
        batch.send(np.zeros(3, np.int64), hold=np.array([True, False, True]))
        batch.release()
        assert not loader.unanswered
        assert batches.recv(min_get=3).env_indices.tolist() == [0, 1, 2, 3][:3]


def test_a_rollout_in_lockstep_equals_gymnasiums_sync_vector_env_to_the_bit() -> None:
    envs, length, rollouts = 4, 16, 12
    rng = np.random.default_rng(0)

    def draw(obs: Any) -> Any:
        return (obs[:, 2] + 0.3 * rng.normal(size=len(obs)) > 0).astype(np.int64)

    def act(params: Any, inputs: Any, state: Any, key: Any) -> Acted:
        action = draw(inputs.obs)
        return Acted(action, extras={"action": action})

    make = partial(gym.make, "CartPole-v1", max_episode_steps=40)  # both ends: fallen, and out of time
    vector = gym.vector.SyncVectorEnv([make] * envs)
    obs, _ = vector.reset(seed=7)
    record: tuple[Any, ...] = (np.zeros(envs, np.float32), np.zeros(envs, bool), np.zeros(envs, bool), np.ones(envs, bool))
    expected: list[list[tuple[Any, ...]]] = []
    for _ in range(rollouts):
        steps = []
        for t in range(length + 1):
            action = draw(obs)
            steps.append((obs.copy(), action, *record))
            if t < length:
                ended = record[1] | record[2]
                obs, reward, terminated, truncated, _ = vector.step(action)
                record = (reward.astype(np.float32), terminated, truncated, ended)
        expected.append(steps)
    vector.close()

    rng = np.random.default_rng(0)
    ends = np.zeros(2, int)
    with SlotLoader(make, envs, seed=7, num_workers=2, timeout=None) as loader, slotloader.to_numpy(loader) as batches:
        for steps, unroll in zip(expected, batches.rollout(act, length=length), strict=False):
            truth = [np.stack(column) for column in zip(*steps, strict=True)]
            kinds = unroll.discount == 0, unroll.step_type == 3, unroll.is_first
            found = unroll.obs, unroll.extras["action"], unroll.reward, *kinds
            for one, other in zip(found, truth, strict=True):
                np.testing.assert_array_equal(one, other)
            assert (unroll.valid == ~truth[5][1:]).all()
            ends += truth[3].sum(), truth[4].sum()
    assert ends.min() > 0
