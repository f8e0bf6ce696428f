"""One suite for the three backends and their packings: what every SlotLoader does, whoever steps its envs."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from checks import Once, drive, reference_next_step, until
from toys import (
    AsyncPair,
    Bits,
    Counting,
    DmCountdown,
    Endless,
    Gated,
    OneBuffer,
    Rich,
    Scripted,
    ThreadPair,
)

from slotloader import EpisodeKey, LoaderClosed, SlotLoader, SlotLoaderError, StepType

pytestmark = pytest.mark.usefixtures("clean")

FIRST, MID, TERMINATION, TRUNCATION = StepType


def rows(value: Any, row: int) -> Any:
    """Row `row` of a tree of a batch."""
    if isinstance(value, dict):
        return {key: rows(part, row) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(rows(part, row) for part in value)
    return value[row]


def assert_same(found: Any, expected: Any) -> None:
    """Equal trees, matched by key, of equal dtypes."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, str):
        assert found == expected
    else:
        assert found.dtype == np.asarray(expected).dtype
        np.testing.assert_array_equal(found, expected)


# Records: none lost, repeated, swapped or late; contents as from a plain loop.


@pytest.mark.parametrize("seed", [0, 1])
def test_every_record_arrives_once_under_random_policies_and_partial_sends(packed: dict[str, Any], seed: int) -> None:
    with SlotLoader(Counting, 6, seed=seed, **packed) as loader:
        drive(loader, Once(6), 2000, np.random.default_rng(seed))
        assert not loader.unanswered


def test_batches_hold_what_a_plain_loop_over_the_envs_gives(packed: dict[str, Any]) -> None:
    def action(slot: int, record: int) -> dict[str, Any]:
        return {"move": np.float32([slot / 8, -record / 64]), "key": np.int64((slot + record) % 5)}

    plain = [reference_next_step(Rich(type("Context", (), {"slot": slot})), partial(action, slot), 40) for slot in range(4)]
    info = {"good": np.bool_, "mask": (np.int16, (3,))}
    with SlotLoader(Rich, 4, info=info, timeout=None, **packed) as loader:
        for record in range(40):
            batch = loader.recv()
            assert batch.env_indices.tolist() == [0, 1, 2, 3]
            assert batch.env_indices.dtype == np.int64
            assert batch.reward.dtype == np.float32
            assert batch.step_type.dtype == np.uint8
            for slot in range(4):
                obs, reward, kind, infos = next(plain[slot])
                assert_same(rows(batch.obs, slot), obs)
                assert batch.step_type[slot] == kind
                assert batch.reward[slot] == np.float32(reward)
                assert batch.info["good"][slot] == infos.get("good", False)
                np.testing.assert_array_equal(batch.info["mask"][slot], infos.get("mask", np.zeros(3)))
                sent = action(slot, record) if record else {"move": np.zeros(2, np.float32), "key": np.int64(0)}
                assert_same(rows(batch.last_action, slot), sent)
            actions = [action(slot, record + 1) for slot in range(4)]
            batch.send({name: np.stack([one[name] for one in actions]) for name in ("move", "key")})


def test_fields_that_derive_from_the_step_type(how: dict[str, Any]) -> None:
    hows = ("terminated", "truncated")
    factories = [partial(Scripted, length=1, how=hows[0]), partial(Scripted, length=1, how=hows[1]), Scripted]
    with SlotLoader(factories, timeout=None, **how) as loader:
        batch = loader.recv()
        assert batch.is_first.tolist() == [True, True, True]
        assert batch.reward.tolist() == [0, 0, 0]
        batch.send([1, 2, 3])
        batch = loader.recv()
        assert batch.step_type.tolist() == [TERMINATION, TRUNCATION, MID]
        assert batch.discount.tolist() == [0, 1, 1]
        assert batch.discount.dtype == np.float32
        assert batch.is_first.tolist() == [False, False, False]
        assert batch.is_last.tolist() == [True, True, False]
        assert batch.terminated.tolist() == [True, False, False]
        assert batch.truncated.tolist() == [False, True, False]
        assert batch.last_action.tolist() == [1, 2, 3]


def test_nan_payloads_and_negative_zero_arrive_bit_for_bit(how: dict[str, Any]) -> None:
    with SlotLoader(Bits, 2, timeout=None, **how) as loader:
        for _ in range(3):
            batch = loader.recv()
            for row in range(2):
                assert batch.obs["f4"][row].view(np.uint32).tolist() == Bits.f4.tolist()
                assert batch.obs["f8"][row].view(np.uint64).tolist() == Bits.f8.tolist()
            batch.send([0, 0])


# Autoreset.


def test_terminal_record_shows_the_terminal_observation_of_an_env_that_reuses_its_buffer(packed: dict[str, Any]) -> None:
    expected = [-1, 1, 2, 3] * 5
    with SlotLoader(OneBuffer, 4, timeout=None, **packed) as loader:
        for t in expected:
            batch = loader.recv()
            assert (batch.obs == t).all()
            assert batch.is_last.all() == (t == 3)
            batch.send([0] * 4)


def test_100_episodes_of_3_steps_are_300_transitions_and_no_action_after_an_end_reaches_step(
    packed: dict[str, Any], tmp_path: Path
) -> None:
    sent: dict[int, list[str]] = {slot: [] for slot in range(4)}
    steps = ends = firsts = 0
    with SlotLoader(partial(Scripted, log=str(tmp_path)), 4, min_get=4, **packed) as loader:
        while ends < 100:
            batch = loader.recv()
            steps += int((~batch.is_first).sum())
            firsts += int(batch.is_first.sum())
            ends += int(batch.is_last.sum())
            actions = np.where(batch.is_last, 999, steps % 900)
            for slot, action, last in zip(batch.env_indices, actions, batch.is_last, strict=True):
                if not last and ends < 100:
                    sent[int(slot)].append(f"step {action}")
            if ends < 100:
                batch.send(actions)
    assert (steps, firsts, ends) == (300, 100, 100)
    for slot in range(4):
        assert [line for line in (tmp_path / f"{slot}.log").read_text().splitlines() if line.startswith("step")] == sent[slot]


def test_streams_equal_gymnasiums_sync_vector_env_for_1000_steps(how: dict[str, Any]) -> None:
    vector = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)
    rng = np.random.default_rng(3)
    obs, _ = vector.reset(seed=11)
    reward, terminated, truncated = np.zeros(3), np.zeros(3, bool), np.zeros(3, bool)
    ended = np.ones(3, bool)
    with SlotLoader("CartPole-v1", 3, seed=11, timeout=None, **{**how, "preload": []}) as loader:
        for _ in range(1000):
            batch = loader.recv()
            np.testing.assert_array_equal(batch.obs, obs)
            np.testing.assert_array_equal(batch.reward, reward)
            np.testing.assert_array_equal(batch.terminated, terminated)
            np.testing.assert_array_equal(batch.truncated, truncated)
            np.testing.assert_array_equal(batch.is_first, ended)
            ended = terminated | truncated
            actions = rng.integers(0, 2, 3)
            batch.send(actions)
            obs, reward, terminated, truncated, _ = vector.step(actions)
    vector.close()


@pytest.mark.parametrize("end", ["truncated", "terminated"])
def test_the_bootstrap_gives_r_plus_gamma_v_on_truncation_and_r_on_termination(how: dict[str, Any], end: str) -> None:
    gamma = 0.5
    targets = []
    with SlotLoader(partial(Scripted, length=4, how=end), 1, **how) as loader:
        last = None
        for _ in range(10):
            batch = loader.recv()
            value = float(batch.obs[0, 0])
            if last is not None and not batch.is_first[0]:
                targets.append(float(batch.reward[0] + gamma * batch.discount[0] * value))
            last = None if batch.is_last[0] else value
            batch.send([0])
    episode = [1.5, 2.0, 2.5, 3.0 if end == "truncated" else 1.0]  # 1 + gamma * V(t), V(t) = t; without V at the end
    assert targets == episode * 2


def test_trajectories_do_not_depend_on_backend_or_packing(packed: dict[str, Any]) -> None:
    def stream(options: dict[str, Any]) -> list[list[Any]]:
        out: list[list[Any]] = [[] for _ in range(4)]
        options = {**options, "preload": ["gymnasium"]} if options["backend"] == "process" else options
        with SlotLoader("CartPole-v1", 4, seed=5, **options) as loader:
            while min(map(len, out)) < 120:
                batch = loader.recv()
                actions = np.zeros(batch.size, np.int64)
                for row, slot in enumerate(batch.env_indices):
                    actions[row] = (3 * slot + len(out[slot]) ** 2) % 5 < 2
                    out[slot].append((batch.obs[row].tobytes(), float(batch.reward[row]), int(batch.step_type[row])))
                batch.send(actions)
        return [one[:120] for one in out]

    assert stream(packed) == stream({"backend": "inline"})


# Episodes, seeds, resets, factories.


class Figures(gym.Wrapper):  # type: ignore[misc]
    """Puts figures of its own into the last info, as RecordEpisodeStatistics does, and things of every size."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            big = np.zeros(100_000)
            info |= {"episode": {"r": np.float32(7.5), "l": 70}, "success": True, "why": "end", "big": big, "odd": object()}
        return obs, reward, terminated, truncated, info


def test_episodes_carry_return_length_index_seed_and_info(how: dict[str, Any]) -> None:
    found: dict[int, list[Any]] = {0: [], 1: []}
    with SlotLoader([Counting, Counting], seed=40, **how) as loader:
        for batch in loader.episodes(12):
            assert [episode.slot for episode in batch.episodes] == batch.env_indices[batch.is_last].tolist()
            for episode in batch.episodes:
                found[episode.slot].append(episode)
            batch.send(np.zeros(batch.size, np.int64))
    for slot, episodes in found.items():
        for index, episode in enumerate(episodes):
            length = 1 + (7 * slot + 5 * index) % 11
            assert (episode.index, episode.life, episode.length, episode.interrupted) == (index, 0, length, False)
            assert episode.episode_return == sum(1000 * slot + t for t in range(1, length + 1))
            assert episode.seed == (40 + slot if index == 0 else None)
            assert episode.info == {"t": length}


def test_figures_of_a_wrapper_win_and_too_large_an_info_names_what_it_dropped(how: dict[str, Any]) -> None:
    with SlotLoader(lambda context: Figures(Counting(context)), 1, **how) as loader:
        for batch in loader.episodes(2):
            for episode in batch.episodes:
                assert (episode.episode_return, episode.length) == (7.5, 70)
                assert episode.info["success"] is True
                assert episode.info["why"] == "end"
                assert set(episode.info_dropped) == {"big", "odd"}
            batch.send([0])


def test_record_episode_statistics_agrees_with_our_own_count(how: dict[str, Any]) -> None:
    wrapped = [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))] * 2
    with SlotLoader(wrapped, seed=1, **how) as loader:
        for batch in loader.episodes(6):
            for episode in batch.episodes:
                assert episode.episode_return == episode.length == episode.info["episode"]["l"]
            batch.send(np.ones(batch.size, np.int64))


def test_first_reset_of_env_i_is_seeded_with_seed_plus_i_and_no_other(packed: dict[str, Any]) -> None:
    with SlotLoader(Counting, 4, seed=100, **packed) as loader:
        for batch in loader.episodes(10):
            batch.send(np.zeros(batch.size, np.int64))
        for slot, seeds in enumerate(loader.get_attr("seeds")):
            assert seeds[0] == 100 + slot
            assert set(seeds[1:]) <= {None}


def test_without_a_seed_all_envs_and_all_loaders_differ(how: dict[str, Any]) -> None:
    seen = []
    for _ in range(2):
        with SlotLoader("CartPole-v1", 3, min_get=3, **{**how, "preload": []}) as loader:
            seen.extend(row.tobytes() for row in loader.recv().obs)
    assert len(set(seen)) == 6


def test_on_reset_steers_seed_and_options_of_every_episode(packed: dict[str, Any]) -> None:
    def curriculum(key: EpisodeKey) -> dict[str, Any]:
        return {"seed": 1000 * key.slot + key.episode, "options": {"level": key.episode, "life": key.life}}

    with SlotLoader(Counting, 4, on_reset=curriculum, min_get=4, timeout=None, **packed) as loader:
        for batch in loader.episodes(20):
            for episode in batch.episodes:
                assert episode.seed == 1000 * episode.slot + episode.index
            batch.send(np.zeros(batch.size, np.int64))
        loader.drain(20)  # else an env may reset between the two looks
        for slot, (seeds, options) in enumerate(zip(loader.get_attr("seeds"), loader.get_attr("options"), strict=True)):
            assert seeds == [1000 * slot + episode for episode in range(len(seeds))]
            assert options == {"level": len(seeds) - 1, "life": 0}


def test_a_factory_with_one_parameter_is_told_slot_life_worker_and_seed(packed: dict[str, Any]) -> None:
    with SlotLoader(Counting, 4, seed=9, **packed) as loader:
        per_worker = packed.get("envs_per_worker", 4)
        for slot, context in enumerate(loader.get_attr("context")):
            assert (context.slot, context.life, context.worker, context.seed) == (slot, 0, slot // per_worker, 9 + slot)


def test_env_kwargs_and_lists_that_mix_ids_and_factories(how: dict[str, Any]) -> None:
    envs = ["CartPole-v1", lambda: gym.make("CartPole-v1", sutton_barto_reward=True)]
    with SlotLoader(envs, **{**how, "preload": []}, timeout=None) as loader:
        loader.recv().send([0, 0])
        assert loader.recv().reward.tolist() == [1, 0]
    with SlotLoader("CartPole-v1", 1, env_kwargs={"sutton_barto_reward": True}, **{**how, "preload": []}) as loader:
        loader.recv().send([0])
        assert loader.recv().reward.tolist() == [0]


def test_dm_env_discount_tells_termination_from_truncation(packed: dict[str, Any]) -> None:
    kinds = [FIRST, MID, MID, TRUNCATION, FIRST, MID, MID, TERMINATION] * 2
    with SlotLoader(DmCountdown, 4, timeout=None, **packed) as loader:
        for number, kind in enumerate(kinds):
            batch = loader.recv()
            assert batch.step_type.tolist() == [kind] * 4
            assert (batch.obs["t"] == number % 4).all()
            assert batch.reward.tolist() == [{FIRST: 0, MID: 3}.get(kind, 5)] * 4
            batch.send(np.full(4, 3, np.int32))


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_async_envs_of_one_worker_overlap_on_its_event_loop(backend: str) -> None:
    with SlotLoader(AsyncPair, 4, backend=backend, envs_per_worker=4, timeout=None) as loader:
        for t in range(50):
            batch = loader.recv(stall_timeout=30)
            assert batch.obs[:, 0].tolist() == [1000 * slot + t for slot in range(4)]
            batch.send([7] * 4)
        assert loader.call("ask", 10) == [10, 11, 12, 13]


def test_async_envs_also_step_inline() -> None:
    class Alone(AsyncPair):
        async def step(self, action: int) -> Any:
            return Counting.step(self, action)

    with SlotLoader(Alone, 4, backend="inline") as loader:
        drive(loader, Once(4), 500, np.random.default_rng(0))
        assert loader.call("ask", 10) == [10, 11, 12, 13]


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_worker_threads_step_the_envs_of_a_worker_at_the_same_time(backend: str) -> None:
    with SlotLoader(ThreadPair, 4, backend=backend, envs_per_worker=2, worker_threads=True, timeout=None) as loader:
        for t in range(30):
            batch = loader.recv(stall_timeout=30)
            assert batch.obs[:, 0].tolist() == [1000 * slot + t for slot in range(4)]
            batch.send([7] * 4)


def test_reset_step_and_close_of_an_env_run_in_one_thread_and_close_runs_once(packed: dict[str, Any], tmp_path: Path) -> None:
    with SlotLoader(partial(Scripted, log=str(tmp_path)), 4, **packed) as loader:
        for batch in loader.episodes(12):
            batch.send(np.zeros(batch.size, np.int64))
    loader.close()
    for slot in range(4):
        lines = [line.split() for line in (tmp_path / f"{slot}.log").read_text().splitlines()]
        assert [line[0] for line in lines].count("close") == 1
        assert lines[-1][0] == "close"
        assert len({line[1] for line in lines if line[0] != "step"}) == 1


# The control channel.


def test_call_get_attr_and_set_attr_reach_the_envs_asked_for(packed: dict[str, Any], tmp_path: Path) -> None:
    with SlotLoader(partial(Gated, directory=str(tmp_path)), 4, **packed) as loader:
        assert loader.call("double", 4) == [8] * 4
        loader.set_attr("mark", [1, 2], slots=[3, 1])
        assert loader.call("double", value=10, slots=[0, 1, 3]) == [20, 22, 21]
        loader.set_attr("mark", 5)
        assert loader.get_attr("mark") == [5] * 4
        with pytest.raises(ValueError, match=r"set_attr: expected 4 values, one per slot, found 2"):
            loader.set_attr("mark", [1, 2])
        with pytest.raises(ValueError, match=r"slots: expected 0 to 3, found \[4\]"):
            loader.get_attr("mark", slots=[4])
        with pytest.raises(SlotLoaderError, match="no_such_thing"):
            loader.get_attr("no_such_thing")
        with pytest.raises(SlotLoaderError, match="TypeError"):
            loader.call("double", slots=[2])
        drive(loader, Once(4), 200, np.random.default_rng(0))  # a failed call costs the env nothing


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("packing", [{"envs_per_worker": 1}, {"envs_per_worker": 2, "worker_threads": True}])
def test_nothing_waits_behind_a_long_step_of_another_env(backend: str, packing: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "hold-0").touch()
    with SlotLoader(partial(Gated, directory=str(tmp_path)), 2, backend=backend, min_get=2, **packing) as loader:
        loader.recv().send([1, 2])
        until((tmp_path / "began-0").exists)
        assert loader.num_envs == loader.num_slots == 2
        assert loader.observation_space.shape == (3,)
        assert loader.action_space.n == 1000
        assert loader.stats().env_steps == 0
        assert loader.call("double", 3, slots=[1], timeout=10) == [6]
        with pytest.raises(TimeoutError, match=r"call: no answer from worker 0 in 0\.05 s"):
            loader.call("double", 3, slots=[0], timeout=0.05)
        loader.recv(min_get=1, timeout=0).send([4])
        assert loader.recv(min_get=1, timeout=0, stall_timeout=10).env_indices.tolist() == [1]
        (tmp_path / "hold-0").unlink()
        assert loader.recv(min_get=1).env_indices.tolist() == [0]


# State, bounded iteration, splitting, giving back, the end.


def test_a_resumed_run_does_not_replay_its_seeds(packed: dict[str, Any]) -> None:
    with SlotLoader(Counting, 4, seed=3, **packed) as loader:
        for batch in loader.episodes(6):
            batch.send(np.zeros(batch.size, np.int64))
        state = loader.state_dict()
        first = {seeds[0] for seeds in loader.get_attr("seeds")}
    seen = set(first)
    for life in (1, 2):
        with SlotLoader(Counting, 4, seed=3, **packed) as loader:
            loader.load_state_dict(state)
            batch = loader.recv(min_get=4)
            assert batch.is_first.all()
            assert loader.state_dict()["lives"] == [life] * 4
            seeds = {seeds[-1] for seeds in loader.get_attr("seeds")}
            assert len(seeds) == 4
            assert not seeds & seen
            seen |= seeds
            assert loader.state_dict()["env_steps"] == state["env_steps"] > 0
            assert loader.state_dict()["completed_episodes"] == state["completed_episodes"] >= 6
            batch.send(np.zeros(4, np.int64))
            state = loader.state_dict()
    with SlotLoader(Counting, 4, seed=4, **packed) as loader, pytest.raises(ValueError, match="expected seed=4, found 3"):
        loader.load_state_dict(state)


def test_steps_and_episodes_bound_an_iteration(how: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with SlotLoader(Endless, 4, **how) as loader:
        steps = 0
        for batch in loader.steps(100):
            steps += int((~batch.is_first).sum())
            batch.send([0] * batch.size)
        assert 100 <= steps < 104
        for batch in loader.steps(10, progress=True):
            batch.send([0] * batch.size)
        assert "env steps" in capsys.readouterr().err
        with pytest.raises(ValueError, match="env steps: expected an integer of at least 1, found 0"):
            loader.steps(0)


def test_iteration_goes_on_after_a_break_and_after_an_exception(how: dict[str, Any]) -> None:
    once, rng = Once(4), np.random.default_rng(0)
    with SlotLoader(Counting, 4, **how) as loader:
        batches = iter(loader)
        for _ in range(3):
            for batch in loader:
                once.check(batch)
                break
            batch.send(once.answer(batch.env_indices, rng))
            with pytest.raises(ZeroDivisionError):
                for batch in batches:
                    once.check(batch)
                    1 / 0  # noqa: B018
            assert loader.unanswered == [batch]
            batch.send(once.answer(batch.env_indices, rng))


def test_split_gives_every_receiver_its_own_slots(how: dict[str, Any]) -> None:
    with SlotLoader(Counting, 5, **how) as loader:
        parts = loader.split(2)
        with pytest.raises(SlotLoaderError, match=r"loader\.split"):
            loader.recv()
        once = [Once(5), Once(5)]
        errors: list[BaseException] = []

        def consume(part: int, slots: range) -> None:
            try:
                once[part].at = {slot: once[part].at[slot] for slot in slots}
                drive(loader, once[part], 1000, np.random.default_rng(part), parts[part])
            except BaseException as error:
                errors.append(error)

        if how["backend"] == "inline":  # one thread steps the envs of both
            consume(0, range(2))
            consume(1, range(2, 5))
        else:
            threads = [threading.Thread(target=consume, args=args) for args in ((0, range(2)), (1, range(2, 5)))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not errors
        with pytest.raises(SlotLoaderError, match="split already"):
            loader.split(2)


def test_release_gives_the_same_records_again(how: dict[str, Any]) -> None:
    with SlotLoader(Counting, 4, min_get=4, **how) as loader:
        once, rng = Once(4), np.random.default_rng(0)
        for _ in range(20):
            first = loader.recv()
            obs, kinds = first.obs.copy(), first.step_type.copy()
            first.release()
            first.release()
            again = loader.recv()
            np.testing.assert_array_equal(again.obs, obs)
            np.testing.assert_array_equal(again.step_type, kinds)
            once.check(again)
            again.send(once.answer(again.env_indices, rng))


def test_poll_never_waits(tmp_path: Path) -> None:
    (tmp_path / "hold-0").touch()
    with SlotLoader(partial(Gated, directory=str(tmp_path)), 1, max_get=1, backend="thread") as loader:
        until(loader.poll).send([0])
        assert loader.poll() is None
        (tmp_path / "hold-0").unlink()
        assert until(loader.poll).obs[0, 0] == 1


def test_a_second_recv_at_the_same_time_points_to_split(tmp_path: Path) -> None:
    (tmp_path / "hold-0").touch()
    with SlotLoader(partial(Gated, directory=str(tmp_path)), 1) as loader:
        loader.recv().send([0])
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(loader.recv()))
        thread.start()
        until(loader.receiver.is_receiving)
        for second in (loader.recv, loader.poll):
            with pytest.raises(SlotLoaderError, match=r"another thread.*loader\.split\(n\)"):
                second()
        (tmp_path / "hold-0").unlink()
        thread.join(20)
        assert got[0].obs[0, 0] == 1


def test_close_is_idempotent_and_ends_iteration_and_waiting(how: dict[str, Any], tmp_path: Path) -> None:
    with SlotLoader(Counting, 2, **how) as loader:
        batch = loader.recv(min_get=2)
        batches = iter(loader)
    for _ in range(3):
        loader.close()
    assert list(batches) == []
    with pytest.raises(LoaderClosed, match="new SlotLoader"):
        loader.recv()
    with pytest.raises(LoaderClosed):
        loader.poll()
    with pytest.raises(LoaderClosed):
        batch.send([0, 0])
    with pytest.raises(LoaderClosed):
        loader.call("close")
    with pytest.raises(LoaderClosed), loader:
        pass


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_close_ends_a_recv_that_waits_in_another_thread(backend: str, tmp_path: Path) -> None:
    (tmp_path / "hold-0").touch()
    loader = SlotLoader(partial(Gated, directory=str(tmp_path)), 1, backend=backend)
    loader.recv().send([0])
    until((tmp_path / "began-0").exists)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            loader.recv(stall_timeout=None)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(loader.receiver.is_receiving)
    closer = threading.Thread(target=loader.close)
    closer.start()
    thread.join(20)
    assert [type(error) for error in errors] == [LoaderClosed]
    (tmp_path / "hold-0").unlink()
    closer.join(20)
