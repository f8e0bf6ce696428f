"""`evaluate`: an exact number of episodes, unbiased by their length, the same ones wherever and whenever they are played."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from toys import Counting, LongOrShort, Mortal, RaisesOnce

import slotloader
from slotloader import Acted, EvalResult, SlotLoader, SlotLoaderError, evaluate, to_numpy
from slotloader.worker.envs import evaluation_seed

pytestmark = pytest.mark.usefixtures("clean")


def follow(obs: np.ndarray) -> np.ndarray:
    """The one policy that `LongOrShort` lets live."""
    return (obs[:, 0] + 1 + obs[:, 1]).astype(np.int64)


def expected_lengths(shares: list[int], seed: int = 0) -> list[int]:
    """What the envs must play, by slot: worked out without a loader."""
    env, found = LongOrShort(), []
    for slot, share in enumerate(shares):
        found += [int(env.reset(seed=evaluation_seed(seed, slot, k))[0][1]) for k in range(share)]
    return found


def is_expected(result: EvalResult, shares: list[int], seed: int = 0) -> bool:
    """Whether these are the episodes of `seed`, in order, each with all that belongs to it."""
    lengths = expected_lengths(shares, seed)
    assert len(result) == len(result.infos) == len(result.seeds) == sum(shares)
    assert result.returns.tolist() == result.lengths.tolist() == [info["length"] for info in result.infos]
    assert result.slots.tolist() == [slot for slot, share in enumerate(shares) for _ in range(share)]
    assert list(result.seeds) == [evaluation_seed(seed, slot, k) for slot, share in enumerate(shares) for k in range(share)]
    return result.lengths.tolist() == lengths


def play(loader: SlotLoader, batches: int) -> None:
    for batch, _ in zip(loader, range(batches), strict=False):
        batch.send(follow(batch.obs))
    for batch in loader.unanswered:
        batch.release()


def test_returns_are_unbiased_by_length_where_the_first_episodes_to_end_are_not() -> None:
    true_mean = float(np.mean(LongOrShort.lengths))
    with SlotLoader(LongOrShort, 32, seed=100, backend="inline", timeout=None) as loader:
        biased = []
        for batch in loader.episodes(8):
            biased += [episode.episode_return for episode in batch.episodes]
            batch.send(follow(batch.obs))
        result = evaluate(loader, follow, episodes=640)
    assert abs(result.mean_return - true_mean) < 2 * result.standard_error < 1.0
    assert np.mean(biased) < true_mean / 2


def test_every_packing_and_backend_plays_the_same_episodes_also_in_the_middle_of_a_run(packed: dict[str, Any]) -> None:
    with SlotLoader(LongOrShort, 4, seed=5, **packed) as loader:
        assert is_expected(evaluate(loader, follow, episodes=10), [3, 3, 2, 2])
        play(loader, 20)
        assert is_expected(evaluate(loader, follow, episodes=10), [3, 3, 2, 2])
        assert is_expected(evaluate(loader, follow, episodes=10, seed=1), [3, 3, 2, 2], seed=1)
        play(loader, 20)


@pytest.mark.parametrize(
    "options", [{"spares": 2}, {"recycle_after": 2}, {"min_get": 4, "timeout": None}, {"max_get": 1}], ids=str
)
def test_the_episodes_do_not_depend_on_how_resets_and_batches_are_made(options: dict[str, Any]) -> None:
    with SlotLoader(LongOrShort, 4, backend="thread", **options) as loader:
        play(loader, 7)
        for _ in range(2):
            assert is_expected(evaluate(loader, follow, episodes=14), [4, 4, 3, 3])
            play(loader, 7)


def test_slots_play_their_share_and_not_a_step_more(how: dict[str, Any]) -> None:
    with SlotLoader(LongOrShort, 4, seed=1, **how) as loader:
        result = evaluate(loader, follow, episodes=3)
        assert is_expected(result, [1, 1, 1, 0])
        assert loader.get_attr("steps") == [*result.lengths.tolist(), 0]
        assert loader.get_attr("resets", slots=[3]) == [1]
        result = evaluate(loader, follow, episodes=9)
        assert is_expected(result, [3, 2, 2, 2])


# Afterwards.


def test_a_run_goes_on_after_an_evaluation_and_is_told_what_was_cut(how: dict[str, Any]) -> None:
    with SlotLoader(Counting, 3, seed=5, **how) as loader:
        open_episodes: dict[int, tuple[float, int]] = {}  # what a consumer has seen of the episode that is under way
        for batch in loader.steps(20):
            for row, slot in enumerate(batch.env_indices.tolist()):
                total, length = open_episodes.get(slot, (0.0, -1))
                open_episodes[slot] = (total + float(batch.reward[row]), length + 1)
                if batch.is_first[row]:
                    open_episodes[slot] = (0.0, 0)
                if batch.is_last[row]:
                    del open_episodes[slot]
            batch.send([0] * batch.size)
        before = loader.state_dict()
        seeds = [set(found) for found in loader.get_attr("seeds")]
        evaluate(loader, lambda obs: np.zeros(len(obs), np.int64), episodes=6)
        after = loader.state_dict()
        assert (after["env_steps"], after["completed_episodes"]) == (before["env_steps"], before["completed_episodes"])
        batch = loader.recv(min_get=3)
        assert batch.is_first.all() and (batch.reward == 0).all()
        cut = {episode.slot: (episode.episode_return, episode.length) for episode in batch.episodes}
        assert cut == open_episodes and all(episode.interrupted for episode in batch.episodes)
        assert {episode.life for episode in batch.episodes} <= {0}
        for slot, found in enumerate(loader.get_attr("seeds")):
            assert found[-1] is not None and found[-1] not in seeds[slot]
        batch.send([0] * 3)
        for batch in loader.episodes(5):  # and ordinary episodes follow
            batch.send([0] * batch.size)
            assert not any(episode.interrupted for episode in batch.episodes)


def test_a_slot_that_takes_no_part_keeps_its_record_and_its_episode() -> None:
    with SlotLoader(Counting, 3, backend="inline", timeout=None) as loader:
        loader.recv().send([0] * 3)
        loader.recv().send([0] * 3)
        evaluate(loader, lambda obs: [0] * len(obs), episodes=2)
        batch = loader.recv(min_get=3)
        assert batch.is_first.tolist() == [True, True, False]
        assert batch.obs[2].tolist() == [2002, 0, 0]
        assert [(episode.slot, episode.length) for episode in batch.episodes] == [(1, 1)]  # that of slot 0 had ended


def test_a_policy_that_raises_leaves_a_loader_that_can_be_used(how: dict[str, Any]) -> None:
    with SlotLoader(LongOrShort, 4, **how) as loader:
        play(loader, 5)
        calls = []

        def broken(obs: np.ndarray) -> np.ndarray:
            calls.append(1)
            if len(calls) == 4:
                raise ZeroDivisionError
            return follow(obs)

        with pytest.raises(ZeroDivisionError):
            evaluate(loader, broken, episodes=12)
        assert loader.unanswered == []
        assert loader.recv(min_get=4).is_first.all()
        loader.unanswered[0].release()
        assert is_expected(evaluate(loader, follow, episodes=12), [3] * 4)
        with pytest.raises(slotloader.ActionError, match="expected"):
            evaluate(loader, lambda obs: follow(obs)[:, None], episodes=12)
        play(loader, 5)


# Failures.


def test_an_episode_that_a_failure_interrupts_does_not_count_and_another_is_played(how: dict[str, Any], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with SlotLoader(partial(RaisesOnce, mark), 2, **how) as loader:
        play(loader, 30)  # on_failure="auto" restarts an env that has worked
        mark.touch()
        result = evaluate(loader, follow, episodes=16)
        assert not mark.exists() and loader.stats().restarted == 1
    whole = [evaluation_seed(0, slot, k) for slot in range(2) for k in range(9)]
    skipped = [seed for seed in whole if seed not in result.seeds]
    assert len(result) == 16 and result.slots.tolist() == [0] * 8 + [1] * 8
    assert len(skipped) == 2 and set(result.seeds) < set(whole)  # one was interrupted, one is the other slot's ninth
    assert result.returns.tolist() == [info["length"] for info in result.infos]


def test_a_worker_that_is_killed_costs_no_episode() -> None:
    with SlotLoader(LongOrShort, 4, envs_per_worker=2, preload=["toys"]) as loader:
        play(loader, 30)
        pid = loader.fleet.pids[0]
        calls = []

        def killing(obs: np.ndarray) -> np.ndarray:
            calls.append(1)
            if len(calls) == 5:
                os.kill(pid, signal.SIGKILL)
            return follow(obs)

        result = evaluate(loader, killing, episodes=40)
        assert len(result) == 40 and np.bincount(result.slots).tolist() == [10] * 4
        assert len(set(result.seeds)) == 40
        assert loader.stats().restarted == 2
        play(loader, 20)
        assert is_expected(evaluate(loader, follow, episodes=4), [1] * 4)


def test_envs_that_fail_for_good_end_an_evaluation_with_their_error(how: dict[str, Any]) -> None:
    with SlotLoader(Mortal, 1, on_failure="raise", **how) as loader:
        with pytest.raises(slotloader.EnvFailed, match="broken"):
            evaluate(loader, follow, episodes=40)
        with pytest.raises(slotloader.SlotLoaderError, match="no slot is left"):
            loader.recv()


# Adapters.


def torch_follow(obs: torch.Tensor) -> torch.Tensor:
    return (obs[:, 0] + 1 + obs[:, 1]).long()


@pytest.mark.parametrize(
    ("adapter", "policy"),
    [("to_numpy", follow), ("to_torch", torch_follow), ("to_jax", lambda obs: (obs[:, 0] + 1 + obs[:, 1]).astype(jnp.int32))],
)
def test_an_adapter_plays_the_same_episodes(adapter: str, policy: Any) -> None:
    with SlotLoader(LongOrShort, 4, backend="thread") as loader:
        with getattr(slotloader, adapter)(loader) as batches:
            for batch in batches.steps(30):
                batch.send(policy(batch.obs))
            assert is_expected(evaluate(batches, policy, episodes=10), [3, 3, 2, 2])
            bound = batches.compile(policy, **({"backend": "eager"} if adapter == "to_torch" else {}))
            assert is_expected(evaluate(batches, bound, episodes=10), [3, 3, 2, 2])
            assert batches.run(bound, env_steps=30).env_steps >= 30
        assert is_expected(evaluate(loader, follow, episodes=4), [1] * 4)


def test_a_recurrent_policy_begins_each_episode_anew() -> None:
    def count(params: Any, inputs: Any, state: torch.Tensor, key: Any) -> Acted:
        return Acted((state + 1 + inputs.obs[:, 1]).long(), state + 1)  # counts the steps by itself

    with SlotLoader(LongOrShort, 3, backend="thread") as loader, slotloader.to_torch(loader, "cpu") as batches:
        policy = batches.policy(count, state=torch.zeros(()))
        for _ in range(2):
            assert is_expected(evaluate(batches, policy, episodes=9), [3] * 3)
            batches.run(policy, env_steps=20)


def test_rollouts_go_on_after_an_evaluation() -> None:
    with SlotLoader(LongOrShort, 3, backend="thread") as loader, to_numpy(loader) as batches:
        rollouts = batches.rollout(follow, length=7)
        next(rollouts)
        with pytest.raises(SlotLoaderError, match=r"`close` of a rollout releases"):
            evaluate(batches, follow)
        rollouts.close()
        assert is_expected(evaluate(batches, follow, episodes=6), [2] * 3)
        for _ in range(3):
            unroll = next(rollouts)
            valid, obs = np.asarray(unroll.valid), np.asarray(unroll.obs)
            assert (obs[1:] - obs[:-1])[valid[: len(obs) - 1]].tolist() == [[1, 0]] * int(valid[: len(obs) - 1].sum())
            assert valid.sum() >= 10


def test_a_receiver_of_a_split_evaluates_on_its_own_slots() -> None:
    with SlotLoader(LongOrShort, 4, backend="thread") as loader:
        first, second = loader.split(2)
        result = evaluate(second, follow, episodes=4)
        assert result.slots.tolist() == [2, 2, 3, 3]
        assert result.lengths.tolist() == expected_lengths([0, 0, 2, 2])
        first.recv(min_get=2).release()


# What people see.


def test_the_result_prints_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    result = EvalResult(np.array([1.0, 3.0]), np.array([10, 2000]), ({}, {}), (1, 2), np.array([0, 1]))
    assert (result.mean_return, result.std_return, result.standard_error) == (2.0, 2**0.5, 1.0)
    lines = str(result).splitlines()
    assert lines[0] == "2 episodes on 2 slots"
    assert lines[1].split() == ["mean", "std", "std", "error", "min", "median", "max"]
    assert lines[2].split() == ["return", "2.00", "1.41", "1.00", "1.00", "2.00", "3.00"]
    assert lines[3].split() == ["length", "1,005.00", "1,407.14", "995.00", "10.00", "1,005.00", "2,000.00"]
    one = EvalResult(np.array([1.0]), np.array([10]), ({},), (1,), np.array([0]))
    assert str(one).splitlines()[2].split() == ["return", "1.00", "-", "-", "1.00", "1.00", "1.00"]
    with SlotLoader(LongOrShort, 2, backend="inline") as loader:
        evaluate(loader, follow, episodes=4, progress=True)
    assert "4/4 episodes, mean return" in capsys.readouterr().err


def test_wrong_arguments_are_named_and_nothing_moves() -> None:
    with SlotLoader(LongOrShort, 2, backend="inline") as loader, slotloader.to_numpy(loader) as batches:
        bound = batches.policy(follow)
        for arguments, error, text in (
            ((loader, follow, 0), ValueError, "episodes: expected an integer of at least 1, found 0"),
            ((loader, follow, 2.5), ValueError, r"episodes: .* found 2\.5"),
            ((loader, follow, 4, -1), ValueError, "seed: expected an integer of at least 0, found -1"),
            ((loader, 3), TypeError, r"policy: expected policy\(obs\) -> action, found 3"),
            ((loader, bound), TypeError, "pass the adapter"),
            ((LongOrShort, follow), TypeError, "loader: expected a SlotLoader, a receiver or an adapter"),
        ):
            with pytest.raises(error, match=text):
                evaluate(*arguments)
        with slotloader.to_numpy(loader) as others, pytest.raises(TypeError, match="another adapter"):
            evaluate(others, bound)
        batch = loader.recv()
        with pytest.raises(SlotLoaderError, match="expected no unanswered batch"):
            evaluate(loader, follow)
        batch.send(follow(batch.obs))
        assert loader.stats().batches == 1
        loader.close()
        with pytest.raises(slotloader.LoaderClosed):
            evaluate(loader, follow)
