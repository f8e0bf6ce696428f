"""Faults 41 to 46 and 30 of FAULTS.md: memory that must not change, recompilations, padding, layouts, failures on the way."""

from __future__ import annotations

import functools
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from checks import run_script, until
from gymnasium.spaces import Box, Discrete
from policies_toys import NAMES, Adapt, Echo, Layouts, Narrow, Replay, Strict, host, reply
from toys import Gated, episode_length

from slotloader import Acted, ActionError, Inputs, LoaderClosed, SlotLoader
from slotloader.device.ops import HostOps
from slotloader.device_batches import DeviceBatches
from slotloader.learning.learners import Unrolls

INLINE: dict[str, Any] = {"backend": "inline", "timeout": None}


@pytest.fixture(params=NAMES)
def adapt(request: pytest.FixtureRequest) -> Adapt:
    """The adapters."""
    return Adapt(request.param)


class Ragged(gym.Env):
    """Leaves of many sizes, small and above the 64 kB of a pool, so that arrays begin at every alignment."""

    observation_space = gym.spaces.Dict(
        {f"{n}": Box(0, 255, (n,), np.uint8) for n in (1, 3, 64, 4100, 70_000)} | {"f": Box(-np.inf, np.inf, (5,), np.float32)}
    )
    action_space = Discrete(2)

    def __init__(self, context: Any) -> None:
        self.slot = context.slot

    def _see(self) -> dict[str, Any]:
        n = 31 * self.slot + self.t
        sizes = (1, 3, 64, 4100, 70_000)
        return {**{f"{size}": np.full(size, n % 256, np.uint8) for size in sizes}, "f": np.full(5, n, np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._see(), {}

    def step(self, action: int) -> Any:
        self.t += 1
        return self._see(), 0.0, self.t % 17 == 0, False, {}


def forward(xp: Any) -> Any:
    """Hands its inputs on, as they are and computed, as a learner keeps them."""

    def policy(params: Any, inputs: Inputs, state: Any, key: Any) -> Acted:
        h = state["h"] + inputs.obs["f"][:, :1]
        extras = {"obs": inputs.obs, "reward": inputs.reward, "h": h, "old": state["h"], "twice": inputs.obs["f"] * 2}
        return Acted(inputs.obs["1"][:, 0] % 2, {"h": h}, extras)

    return policy


# 41. What was handed out keeps its values.


@pytest.mark.parametrize("how_it_runs", ["compiled", "loop"])
def test_arrays_keep_their_values_after_100_steps_and_after_close(adapt: Adapt, how_it_runs: str) -> None:
    kept: list[tuple[Any, Any]] = []
    state = {"h": np.zeros(1, np.float32)}

    def keep(batch: Any, acted: Any) -> None:
        trees = [batch.arrays, batch.obs, batch.last_action]
        trees += [] if acted is None else [acted.action, acted.extras]
        flat = [leaf for tree in trees for leaf in flatten(tree)]
        kept.extend((leaf, host(leaf).copy()) for leaf in flat)

    with SlotLoader(Ragged, 5, backend="thread", max_get=4) as loader:
        with adapt(loader, buckets=(2, 4)) as batches:
            if how_it_runs == "loop":
                for batch in batches.steps(30):
                    keep(batch, None)
                    batch.send([0] * batch.size)
            else:
                policy = adapt.compile(batches, forward(adapt.xp), state=state)
                batches.run(policy, env_steps=30, on_batch=keep)
                batches.run(policy, env_steps=100)
            for batch in batches.steps(100):
                batch.send([0] * batch.size)
        for leaf, then in kept:
            np.testing.assert_array_equal(host(leaf), then)
    for leaf, then in kept:
        np.testing.assert_array_equal(host(leaf), then)


def flatten(tree: Any) -> list[Any]:
    """The arrays of a tree."""
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in flatten(part)]
    if isinstance(tree, (list, tuple)):
        return [leaf for part in tree for leaf in flatten(part)]
    return [tree]


@pytest.mark.parametrize("name", NAMES[1:])
def test_forwarded_inputs_show_the_records_they_came_with(name: str) -> None:
    adapt = Adapt(name)
    kept: list[tuple[Any, Any]] = []

    def keep(batch: Any, acted: Any) -> None:
        kept.extend((acted.extras["obs"][key], batch.host.obs[key]) for key in batch.host.obs)
        kept.append((acted.extras["twice"], 2 * batch.host.obs["f"]))

    with SlotLoader(Ragged, 3, **INLINE) as loader, adapt(loader, buckets=(3,)) as batches:
        batches.run(
            adapt.compile(batches, forward(adapt.xp), state={"h": np.zeros(1, np.float32)}), env_steps=120, on_batch=keep
        )
    for found, expected in kept:
        np.testing.assert_array_equal(host(found), expected)


# 42. Compilations.


class Mixed(Narrow):
    """An endless env without work, so that any number of slots is ready."""

    def step(self, action: int) -> Any:
        self.t += 1
        return self._obs(int(action)), 0.0, False, False, {}


COMPILED: list[str] = []


@pytest.fixture
def compilations(adapt: Adapt) -> list[str]:
    """Grows by one for each compilation of jax; of torch with `counting` as options."""
    if adapt.name == "jax":
        listen_to_jax()
    COMPILED.clear()
    return COMPILED


@functools.cache
def listen_to_jax() -> None:
    """Once, since a listener cannot be taken away again."""
    import jax

    jax.monitoring.register_event_duration_secs_listener(listen)


def listen(event: str, seconds: float, **more: Any) -> None:
    """For jax.monitoring."""
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(str(more))


def counting(adapt: Adapt, found: list[str]) -> dict[str, Any]:
    """Options of `compile` that count torch's compilations."""

    def counted(graph: Any, examples: Any) -> Any:
        found.append("torch")
        return graph.forward

    return {"backend": counted} if adapt.name == "torch" else {}


@pytest.mark.parametrize(
    ("buckets", "runs", "seen"),
    [((3, 7, 12), 1000, False), (tuple(range(1, 13)), 200, False), ((3, 7, 12), 100, True)],
    ids=["3 buckets", "12 buckets", "seen"],
)
@pytest.mark.parametrize("adapt", NAMES[1:], indirect=True)
def test_every_bucket_is_compiled_once_and_all_in_the_warm_up(
    adapt: Adapt, compilations: list[str], buckets: tuple[int, ...], runs: int, seen: bool
) -> None:
    rng = np.random.default_rng(0)
    sizes: set[int] = set()
    with SlotLoader(Mixed, 12, **INLINE) as loader, adapt(loader, buckets=buckets, fields=("obs", "step_type")) as batches:
        policy = adapt.compile(
            batches,
            lambda params, inputs, state, key: Acted(inputs.obs[:, 0] * 0 + params, state + 1),
            params=np.array(3, np.int32),
            state=np.zeros(2, np.float32),
            **counting(adapt, compilations),
        )
        if adapt.name == "torch":
            assert compilations[-len(buckets) :] == ["torch"] * len(buckets)
        warm = len(compilations)
        for _ in range(runs):
            most = int(rng.integers(1, 13))
            sizes.add(most)
            batches._limits = {"min_get": most, "max_get": most}
            batches.run(policy, env_steps=1, on_batch=(lambda batch, acted: None) if seen else None)
        policy.update(np.array(4, np.int32))
        thread = threading.Thread(target=lambda: batches.run(policy, env_steps=30))
        thread.start()
        thread.join()
        assert len(sizes) == 12
        assert compilations[warm:] == []


@pytest.mark.parametrize("adapt", ["jax"], indirect=True)
def test_jax_compiles_one_step_per_bucket(adapt: Adapt, compilations: list[str]) -> None:
    """The rest of the warm-up compiles nothing that grows with the policies."""
    with SlotLoader(Mixed, 4, **INLINE) as loader, adapt(loader, buckets=(1, 2, 3, 4)) as batches:
        counts = []
        for factor in range(3):
            before = len(compilations)
            batches.compile(lambda obs, factor=factor: obs[:, 0] * factor)
            counts.append(len(compilations) - before)
        assert counts[1:] == [4, 4]


@pytest.mark.parametrize("adapt", NAMES[1:], indirect=True)
def test_stacked_frames_compile_nothing_after_the_warm_up(adapt: Adapt, compilations: list[str]) -> None:
    with SlotLoader(Mixed, 5, **INLINE) as loader, adapt(loader, buckets=(2, 5), frame_stack=3) as batches:
        policy = adapt.compile(batches, lambda obs: obs[:, 0, 0] * 0, **counting(adapt, compilations))
        warm = len(compilations)
        for most in (1, 2, 3, 4, 5, 2, 1):
            batches._limits = {"min_get": most, "max_get": most}
            batches.run(policy, env_steps=1)
        assert compilations[warm:] == []


# 43. Padding.


@pytest.mark.parametrize("fill", [np.nan, 1e30])
def test_what_padding_rows_hold_changes_no_bit_of_the_real_rows(adapt: Adapt, fill: float) -> None:
    rng = np.random.default_rng(0)
    w, u = rng.normal(size=(5, 16)).astype(np.float32), rng.normal(size=(16, 4)).astype(np.float32)

    def policy(params: Any, inputs: Inputs, state: Any, key: Any) -> Acted:
        h = adapt.xp.tanh(inputs.obs @ params[0] + state)
        return Acted((h @ params[1]).argmax(-1), h, {"scores": h @ params[1]})

    def play(dirty: bool) -> tuple[Any, ...]:
        with SlotLoader(Replay, 6, **INLINE) as loader, adapt(loader, buckets=(6,)) as batches:
            bound = adapt.compile(batches, policy, params=(w, u), state=np.zeros(16, np.float32))
            out = []
            for size in (3, 1, 5, 2, 6, 4) * 2:
                batch = batches.recv(size, size)
                arrays = list(batch.arrays)
                at = batches.plan.spans["obs"].start
                if dirty:
                    obs = host(arrays[at]).copy()
                    obs[size:] = fill
                    arrays[at] = adapt.array(obs)
                acted = bound.act(arrays, batch)
                batch.send(acted.action)
                batches.drain()  # else the next batch may have other records
                out.append((host(acted.action)[:size].tobytes(), host(acted.extras["scores"])[:size].tobytes()))
            return (*out, host(bound.state.tables)[:6].tobytes())

    with np.errstate(all="ignore"):
        assert play(False) == play(True)


# 44. Layouts.


def test_observations_in_any_layout_arrive_right(adapt: Adapt) -> None:
    how: dict[str, Any] = {"backend": "process", "preload": ["policies_toys"]} if adapt.name == "torch" else INLINE
    with SlotLoader(Layouts, 2, min_get=2, **how) as loader, adapt(loader) as batches:
        for t in range(5):
            batch = batches.recv()
            for name in Layouts.names:
                found = host(batch.obs[name])
                for row in range(2):
                    np.testing.assert_array_equal(found[row], Layouts.truth(t, name), err_msg=name)
            batch.send([0, 0])


@pytest.mark.parametrize("kind", ["reversed", "fortran", "broadcast", "swapped", "readonly", "strided", "big"])
def test_actions_in_any_layout_arrive_right(adapt: Adapt, kind: str) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4) / 16
    given: Any = {
        "reversed": lambda: values[::-1, ::-1].copy()[::-1, ::-1],
        "fortran": lambda: np.asfortranarray(values),
        "broadcast": lambda: np.broadcast_to(values[0], (3, 4)),
        "swapped": lambda: values.astype(">f4"),
        "readonly": lambda: np.frombuffer(values.tobytes(), np.float32).reshape(3, 4),
        "strided": lambda: np.repeat(np.repeat(values, 2, 0), 2, 1)[::2, ::2],
        "big": lambda: np.concatenate([values, values])[:3],
    }[kind]()
    with SlotLoader(partial(Echo, Box(-1, 1, (4,), np.float32)), 3, **INLINE) as loader, adapt(loader) as batches:
        batches.recv().send(given)
        np.testing.assert_array_equal(batches.recv().host.last_action, given)


# 45. Writing.


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_writing_to_what_was_handed_out_changes_no_slot_and_no_other_batch(name: str) -> None:
    adapt = Adapt(name)
    with SlotLoader(Ragged, 4, **INLINE) as loader, adapt(loader) as batches:
        for _ in range(20):
            first = batches.recv(2, 2)
            other = batches.recv(2, 2)
            before = [host(leaf).copy() for leaf in flatten(other.arrays)]
            truth = [host(leaf).copy() for leaf in flatten(first.arrays)]
            core = {key: value.copy() for key, value in first.host.obs.items()}
            for leaf in flatten(first.arrays):
                leaf[...] = 1
            for leaf, then in zip(flatten(other.arrays), before, strict=True):
                np.testing.assert_array_equal(host(leaf), then)
            for key, value in core.items():
                np.testing.assert_array_equal(first.host.obs[key], value)
            first.release()
            again = batches.recv(2, 2)
            for leaf, then in zip(flatten(again.arrays), truth, strict=True):
                np.testing.assert_array_equal(host(leaf), then)
            again.send([0, 0])
            other.send([0, 0])


# 46. Failures on the way.


class Later(HostOps):
    """The host, but no result is there when it is asked for: everything goes through the completion thread."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.error: BaseException | None = None

    def at_once(self, array: Any) -> None:
        return None

    def done(self, event: Any) -> bool:
        return False

    def host_wait(self, event: Any) -> None:
        assert self.go.wait(20)
        if self.error is not None:
            raise self.error


def test_a_failure_on_the_way_back_is_raised_by_the_next_call_and_the_batch_can_be_answered() -> None:
    with (
        SlotLoader(partial(Echo, Discrete(5)), 3, action_bounds="error", **INLINE) as loader,
        DeviceBatches(loader, Later()) as batches,
    ):
        calls = [batches.recv, batches.drain, lambda: next(iter(batches)), lambda: batches.run(lambda obs: obs, env_steps=1)]
        for call in calls:
            batch = batches.recv()
            batch.send(np.array([1, 77, 2]))
            began = time.monotonic()
            with pytest.raises(
                ActionError, match=r"send refused, no env has stepped: action: expected values in \[0, 4\], found 77"
            ):
                call()
            assert time.monotonic() - began < 1
            assert not batch.answered
            batch.send(np.array([1, 4, 2]))
            batches.drain()
            assert batch.answered
            batch = batches.recv()
            assert batch.host.last_action.tolist() == [1, 4, 2]
            batch.send(np.zeros(3, np.int64))
        assert batches.run(lambda obs: (obs[:, 0] > 0) * 1, env_steps=30).env_steps >= 30


def test_a_failure_reaches_a_recv_that_waits_for_slow_envs(tmp_path: Path) -> None:
    (tmp_path / "hold-0").touch()
    with (
        SlotLoader(partial(Gated, directory=str(tmp_path)), 2, backend="thread", min_get=2) as loader,
        DeviceBatches(loader, Later()) as batches,
    ):
        batch = batches.recv()
        batch.release()
        slow, other = sorted((batches.recv(1, 1), batches.recv(1, 1)), key=lambda one: int(one.host.env_indices[0]))
        slow.send(np.array([0]))
        until((tmp_path / "began-0").exists)
        batches.ops.go.clear()
        other.send(np.array([0.5]))
        raised: list[tuple[BaseException, float]] = []

        def wait() -> None:
            try:
                batches.recv(1)
            except BaseException as error:
                raised.append((error, time.monotonic()))

        thread = threading.Thread(target=wait)
        thread.start()
        until(loader.receiver.is_receiving)
        released = time.monotonic()
        batches.ops.go.set()
        thread.join(20)
        ((error, when),) = raised
        assert isinstance(error, ActionError)
        assert when - released < 1
        other.send(np.array([3]))
        (tmp_path / "hold-0").unlink()
        batches.drain()
        assert batches.recv(2).host.last_action.tolist() == [0, 3]


def test_a_recv_that_counts_on_actions_for_an_env_that_has_ended_learns_of_it_when_they_land(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slotloader.batching.receiver.SLICE", 60.0)
    with SlotLoader(Narrow, 2, backend="thread", min_get=2) as loader, DeviceBatches(loader, Later()) as batches:
        batches.recv().release()
        first, _ = batches.recv(1, 1), batches.recv(1, 1)
        batches.ops.go.clear()
        first.send(np.zeros(1, np.int64))
        loader.remove_envs(first.host.env_indices.tolist())
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                batches.recv(1)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: loader.table.wanted[0] != 0)  # it sleeps, or is about to
        batches.ops.go.set()
        thread.join(20)
        assert not thread.is_alive()
        assert "recv: expected at least 1 slots that can become ready, found 0" in str(raised[0])


def test_stopping_a_run_between_two_lines_leaves_nothing_leased(adapt: Adapt, monkeypatch: pytest.MonkeyPatch) -> None:
    from slotloader.batching.progress import BoundedIterator

    following = BoundedIterator.__next__
    calls = 0

    def interrupted(self: Any) -> Any:
        nonlocal calls
        batch, calls = following(self), calls + 1
        if calls % 2 == 0:
            raise KeyboardInterrupt  # the loop has not got the batch yet
        return batch

    with SlotLoader(partial(Echo, Discrete(3)), 4, **INLINE) as loader, adapt(loader, buckets=(4,)) as batches:
        policy = adapt.compile(batches, lambda obs: (obs[:, 0] > 5) * 1)
        monkeypatch.setattr(BoundedIterator, "__next__", interrupted)
        for _ in range(8):  # more than there are stages
            with pytest.raises(KeyboardInterrupt):
                batches.run(policy, env_steps=100)
            batches.drain()
            assert not loader.unanswered
        monkeypatch.undo()
        assert batches.run(policy, env_steps=100).env_steps == 100


class Failing(Later):
    """Loses the results that the test counts out."""

    def __init__(self, failing: set[int]) -> None:
        super().__init__()
        self.failing, self.waits = failing, 0

    def host_wait(self, event: Any) -> None:
        self.waits += 1
        if self.waits in self.failing:
            raise OSError(f"result {self.waits} is lost")


def counted(params: Any, inputs: Inputs, state: Any, key: Any) -> Acted:
    """Sends how many records of the episode it has seen."""
    return Acted(state["n"] + 1, {"n": state["n"] + 1})


class CountsRecords(gym.Env):
    """Fails for an action that is not the number of records of its episode."""

    observation_space, action_space = Box(0, 1, (1,), np.float32), Discrete(1000)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 1
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        assert action == self.t
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == 9, False, {}


@pytest.mark.parametrize("how", ["run", "rollout", "background"])
def test_batches_whose_actions_are_lost_on_their_way_back_are_released_with_their_state(how: str) -> None:
    with (
        SlotLoader(CountsRecords, 4, on_failure="raise", max_get=2, **INLINE) as loader,
        DeviceBatches(loader, Failing({3, 4, 9, 14}), buckets=(2,)) as batches,
    ):
        policy = batches.policy(counted, state={"n": np.zeros((), np.int64)})
        rollouts = batches.rollout(policy, length=5)
        failures = 0
        for _ in range(12):
            try:
                if how == "run":
                    batches.run(policy, env_steps=12)
                elif how == "rollout":
                    unroll = next(rollouts)
                    assert (unroll.valid | unroll.is_first[1:]).all(), "a slot stands still"
                else:
                    with batches.background(policy, unrolls=Unrolls(batches, 5, 4)) as actor:
                        next(actor)
            except OSError:
                failures += 1
            assert how == "rollout" or not loader.unanswered
        rollouts.close()
        assert not loader.unanswered
        assert failures >= 2
        assert batches.run(policy, env_steps=100).env_steps >= 100


def test_rows_that_wait_are_released_when_the_rest_is_still_on_its_way() -> None:
    def stop(batch: Any, acted: Acted) -> None:
        batch.send(acted.action, hold=np.array([True, False, False, False]))
        raise InterruptedError

    with SlotLoader(Narrow, 4, **INLINE) as loader, DeviceBatches(loader, Later(), buckets=(4,)) as batches:
        for _ in range(5):
            with pytest.raises(InterruptedError):
                batches.run(lambda obs: obs[:, 0] * 0, env_steps=100, on_batch=stop)
            assert not loader.unanswered
        batch = batches.recv(4)
        batch.send(np.zeros(4, np.int64), hold=np.ones(4, bool))
        assert not batch.answered
        batch.release()
        assert batches.recv(4).size == 4


def test_a_device_that_fails_raises_its_own_exception_and_close_ends() -> None:
    class DeviceLost(Exception):
        pass

    ops = Later()
    with SlotLoader(Narrow, 4, **INLINE) as loader:
        with DeviceBatches(loader, ops) as batches:
            ops.error = DeviceLost("gone")
            batches.recv(2, 2).send(np.zeros(2, np.int64))
            with pytest.raises(DeviceLost, match="gone"):
                batches.recv(2, 2)
            batches.recv(2, 2).send(np.zeros(2, np.int64))
            with pytest.raises(DeviceLost, match="gone"):
                batches.drain()
            began = time.monotonic()
            batches.close()
            assert time.monotonic() - began < 1
        assert not loader.unanswered
        assert loader.recv(4).size == 4


def test_close_does_not_wait_for_ever_for_a_device_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotloader.device.batches.CLOSE_TIMEOUT", 0.2)
    ops = Later()
    with SlotLoader(Narrow, 2, **INLINE) as loader:
        batches = DeviceBatches(loader, ops)
        ops.go.clear()
        batches.recv().send(np.zeros(2, np.int64))
        with pytest.raises(TimeoutError, match=r"drain: actions are still on their way from the device after 0\.1 s"):
            batches.drain(0.1)
        began = time.monotonic()
        batches.close()
        assert time.monotonic() - began < 5
        assert not loader.unanswered
        again = loader.recv(2)
        ops.go.set()
        until(lambda: not any(thread.name == "slotloader-completion" for thread in threading.enumerate()))
        assert not again.answered  # what the device says too late is for nobody
        again.send(np.ones(2, np.int64))
        assert loader.recv(2).last_action.tolist() == [1, 1]


def test_batches_in_flight_are_bounded_and_answered_in_order_and_the_last_ones_at_close() -> None:
    ops = Later()
    with SlotLoader(Strict, 8, backend="thread", on_failure="raise", max_get=2) as loader:
        with DeviceBatches(loader, ops, in_flight=3) as batches:
            ops.go.clear()
            for _ in range(3):
                batch = batches.recv(2, 2)
                batch.send(reply(batch.obs))
                assert batch.answered
                assert not batch.host.answered
            waiting = threading.Thread(target=lambda: batches.recv().release())
            waiting.start()
            assert len(batches._completer._pending) == 3
            ops.go.set()
            waiting.join(20)
            assert not waiting.is_alive()
            at = dict.fromkeys(range(8), 0)
            for episode in batches.run(reply, env_steps=400).episodes:
                assert (episode.index, episode.length) == (at[episode.slot], episode_length(episode.slot, at[episode.slot]))
                at[episode.slot] += 1
            batch = batches.recv()
            batch.send(reply(batch.obs))
        assert batch.host.answered
        assert not loader.unanswered


def test_a_closed_loader_ends_what_waits_and_what_is_on_its_way() -> None:
    ops = Later()
    loader = SlotLoader(Narrow, 2, **INLINE)
    batches = DeviceBatches(loader, ops, in_flight=1)
    ops.go.clear()
    batch = batches.recv()
    batch.send(np.zeros(2, np.int64))
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(list(batches)))
    thread.start()
    loader.close()
    thread.join(20)
    assert ended == [[]]
    ops.go.set()
    batches.close()
    with pytest.raises(LoaderClosed):
        batches.recv()


# 30, and several devices.


def test_processes_are_built_again_and_again_beside_live_jax_and_torch() -> None:
    jax, torch = Adapt("jax"), Adapt("torch")
    jax.xp.ones((64, 64)).dot(jax.xp.ones((64, 64))).block_until_ready()
    assert float((torch.xp.ones(64, 64) @ torch.xp.ones(64, 64)).sum()) > 0

    class Tiny:  # by value: nothing of these tests is imported
        observation_space, action_space = Box(0, 1, (1,), np.float32), Discrete(20)

        def reset(self, **_: Any) -> Any:
            return np.zeros(1, np.float32), {}

        def step(self, action: int) -> Any:
            return np.zeros(1, np.float32), float(action), False, False, {}

    for number in range(20):
        with SlotLoader(Tiny, 1, backend="process") as loader, (jax, torch)[number % 2](loader) as batches:
            batches.recv().send([number])
            assert host(batches.recv().reward).tolist() == [number]


DEVICES = """
import numpy as np, jax, jax.numpy as jnp, slotloader
from slotloader import Acted, SlotLoader
from policies_toys import Strict, reply
assert len(jax.devices()) == 4
with SlotLoader(Strict, 12, backend="inline", max_get=10, on_failure="raise") as loader:
    for wrong in ((3,), (4, 6), (16,)):
        try:
            slotloader.to_jax(loader, jax.devices(), buckets=wrong)
        except ValueError as error:
            assert "buckets: expected sizes" in str(error), error
        else:
            raise SystemExit(f"{wrong} was accepted")
    with slotloader.to_jax(loader, jax.devices()) as batches:
        assert batches.buckets == (4, 8, 12), batches.buckets
    with slotloader.to_jax(loader, jax.devices(), buckets=(4, 12)) as batches:
        for size in (1, 4, 5, 8, 10):
            batch = batches.recv(size, size)
            assert batch.bucket % 4 == 0 and batch.bucket >= size
            shards = batch.obs.addressable_shards
            assert len(shards) == 4 and {s.device for s in shards} == set(jax.devices())
            assert {s.data.shape for s in shards} == {(batch.bucket // 4, 3)}
            np.testing.assert_array_equal(np.asarray(batch.obs)[:size], batch.host.obs)
            assert not np.asarray(batch.obs)[size:].any()
            batch.send(reply(batch.obs))
        def policy(params, inputs, state, key):
            return Acted(reply(inputs.obs) + params, state + 1, {"n": state})
        for bind in (batches.compile, batches.policy):
            bound = bind(policy, params=np.array(0), state=np.array(0, np.int32))
            assert batches.run(bound, env_steps=100).env_steps >= 100
            bound.update(np.zeros((), np.int32))
            kept = []
            ran = batches.run(bound, env_steps=100, on_batch=lambda batch, acted: kept.append(acted.extras["n"]))
            assert all((np.asarray(n) >= 0).all() for n in kept) and bound.version == 1
        assert batches.run(reply, episodes=10).episodes
    with slotloader.to_jax(loader, jax.devices()[2]) as batches:
        batch = batches.recv()
        assert batch.obs.devices() == {jax.devices()[2]}
        batch.send(reply(batch.obs))
    with slotloader.to_jax(loader, jax.devices(), buckets=(12,), frame_stack=2, dtype="bfloat16") as batches:
        batch = batches.recv()
        assert batch.obs.shape == (batch.bucket, 2, 3)
        batch.send(reply(batch.obs[:, 1]))
        print(batches.run(batches.compile(lambda obs: reply(obs[:, 1])), env_steps=60).batches > 0)
"""


def test_rows_are_divided_over_four_jax_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    ran = run_script(tmp_path, DEVICES, "-W", "error")
    assert (ran.code, ran.out) == (0, "True\n"), ran.err
    assert "Traceback" not in ran.err


def test_a_device_that_takes_longer_than_stall_timeout_is_no_stall_of_the_fleet() -> None:
    with (
        SlotLoader(partial(Echo, Discrete(5)), 2, stall_timeout=0.3, timeout=None, backend="thread") as loader,
        DeviceBatches(loader, Later()) as batches,
    ):
        batch = batches.recv()
        batches.ops.go.clear()
        batch.send(np.array([1, 2]))
        release = threading.Timer(1.0, batches.ops.go.set)
        release.start()
        assert batches.recv().host.last_action.tolist() == [1, 2]
        release.join()


LEARNER = """
import jax, numpy as np
from slotloader import SlotLoader, to_jax

compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))

@jax.jit
def learn(params, obs):
    return params + obs.mean()

with SlotLoader("CartPole-v1", 2, backend="inline", seed=0) as loader, to_jax(loader) as batches:
    params = jax.device_put(jax.numpy.zeros(()), jax.devices()[0])
    counts = []
    for number, batch in zip(range(4), batches):
        before = sum("backend_compile" in name for name in compiled)
        params = learn(params, batch.obs)
        counts.append(sum("backend_compile" in name for name in compiled) - before)
        batch.send(np.zeros(2, np.int64))
print(counts)
"""

EXIT = """
import threading, time, numpy as np
import slotloader
from slotloader.device_batches import DeviceBatches
from slotloader.device.ops import HostOps

class Slow(HostOps):
    def at_once(self, array):
        return None

    def done(self, event):
        return False

    def host_wait(self, event):
        time.sleep(1.0)
        print("landed", flush=True)

loader = slotloader.SlotLoader("CartPole-v1", 2, backend="inline")
batches = DeviceBatches(loader, Slow())
batches.recv().send(np.zeros(2, np.int64))
"""


def test_a_jitted_learner_of_the_user_is_compiled_once(tmp_path: Path) -> None:
    ran = run_script(tmp_path, LEARNER)
    assert ran.code == 0 and ran.out.split() == ["[1,", "0,", "0,", "0]"], (ran.out, ran.err)


def test_the_end_of_a_script_waits_for_the_completion_thread(tmp_path: Path) -> None:
    ran = run_script(tmp_path, EXIT)
    assert ran.code == 0 and ran.out == "landed\n" and "FATAL" not in ran.err, (ran.out, ran.err)
