"""What is done to observations on the device: narrower floats, and stacks of the last frames of each slot."""

from __future__ import annotations

import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from checks import until
from gymnasium.spaces import Box, Dict, Discrete, Text
from policies_toys import NAMES, Adapt, Replay, host

from slotloader import Acted, ActionError, SlotLoader, StepType
from slotloader.device.ops import HostOps
from slotloader.device_batches import DeviceBatches

SLOTS = 6
INLINE: dict[str, Any] = {"backend": "inline", "timeout": None}


@pytest.fixture(params=NAMES)
def adapt(request: pytest.FixtureRequest) -> Adapt:
    """The adapters."""
    return Adapt(request.param)


class Crash(Exception):
    """Of an env that gets a new life."""


class Frames(gym.Env):
    """Every frame of every slot, life and episode is another; short episodes, some end by a crash."""

    observation_space = Dict(
        {
            "cam": Box(0, 255, (2, 3), np.uint8),
            "deep": Dict({"x": Box(-np.inf, np.inf, (), np.float32)}),
            "flat": Box(-np.inf, np.inf, (2,), np.float32),
            "text": Text(9, min_length=0),
        }
    )
    action_space = Discrete(9)

    def __init__(self, context: Any) -> None:
        self.rng, self.n = np.random.default_rng((context.slot, context.life)), context.slot * 50 + context.life * 7

    def _see(self) -> dict[str, Any]:
        self.n += 1
        x = np.float32(self.n / 8)
        return {"cam": np.full((2, 3), self.n % 256, np.uint8), "deep": {"x": x}, "flat": np.float32([x, -x]), "text": "a"}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._see(), {}

    def step(self, action: int) -> Any:
        draw = self.rng.random()
        if draw < 0.02:
            raise Crash
        return self._see(), 0.0, draw < 0.15, 0.15 < draw < 0.25, {}


class Stacks:
    """The reference: one list of frames per slot; a record counts once it is answered."""

    def __init__(self, frames: int) -> None:
        self.frames, self.kept = frames, dict[int, list[Any]]()

    def of(self, batch: Any, values: Any) -> np.ndarray:
        """What the batch must show, and what its slots will keep if it is answered."""
        self.next = {}
        for row, slot in enumerate(batch.env_indices.tolist()):
            if batch.step_type[row] == StepType.FIRST:
                self.next[slot] = [values[row]] * self.frames
            else:
                self.next[slot] = [*self.kept[slot][1:], values[row]]
        return np.array([self.next[slot] for slot in batch.env_indices.tolist()])

    def answered(self) -> None:
        self.kept.update(self.next)


def fleet(**options: Any) -> SlotLoader:
    return SlotLoader(
        Frames, SLOTS, on_failure="restart", max_restarts=10_000, **{"backend": "inline", "max_get": 4, **options}
    )


def same(found: Any, expected: np.ndarray, rows: int) -> None:
    np.testing.assert_array_equal(host(found)[:rows], expected)


def test_stacks_equal_a_plain_reference_over_ends_new_lives_releases_and_padding(adapt: Adapt) -> None:
    rng = np.random.default_rng(0)
    cams, deep = Stacks(4), Stacks(2)
    lives = False
    with fleet() as loader, adapt(loader, frame_stack={"cam": 4, ("deep", "x"): 2}, buckets=(1, 4)) as batches:
        steps = 0
        while steps < 500:
            most = int(rng.integers(1, 5))
            batch = batches.recv(most, most)
            core = batch.host
            assert host(batch.obs["cam"]).shape == (batch.bucket, 4, 2, 3)
            assert host(batch.obs["deep"]["x"]).shape == (batch.bucket, 2)
            assert host(batch.obs["cam"]).dtype == np.uint8
            same(batch.obs["cam"], cams.of(core, core.obs["cam"]), most)
            same(batch.obs["deep"]["x"], deep.of(core, core.obs["deep"]["x"]), most)
            same(batch.obs["flat"], core.obs["flat"], most)
            same(batch.inputs.obs["cam"], host(batch.obs["cam"])[:most], most)
            assert not host(batch.obs["cam"])[most:].any()
            lives = lives or any(episode.interrupted for episode in batch.episodes)
            if rng.random() < 0.2:
                batch.release()
                continue
            steps += batch.env_steps
            if rng.random() < 0.1:
                with pytest.raises(ActionError):
                    batch.send([0.5] * most)
            cams.answered()
            deep.answered()
            batch.send(np.zeros(most, np.int64))
    assert lives


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_sees_the_stacks_too(adapt: Adapt, compiled: bool) -> None:
    stacks, seen = Stacks(3), 0

    def policy(params: Any, inputs: Any, state: Any, key: Any) -> Acted:
        return Acted(inputs.env_indices * 0, extras={"sum": inputs.obs["flat"].sum((1, 2)), "x": inputs.obs["flat"]})

    def check(batch: Any, acted: Acted) -> None:
        nonlocal seen
        expected = stacks.of(batch.host, batch.host.obs["flat"])
        same(batch.obs["flat"], expected, batch.size)
        same(acted.extras["x"], expected, batch.size)
        stacks.answered()
        seen += batch.size

    with fleet() as loader, adapt(loader, frame_stack={"flat": 3}, buckets=(4,)) as batches:
        bound = adapt.compile(batches, policy) if compiled else batches.policy(policy)
        batches.run(bound, env_steps=200, on_batch=check)
        batches.run(bound, env_steps=50)
    assert seen > 200


def test_a_number_stacks_the_only_leaf_and_a_plain_stack_would_fail(adapt: Adapt) -> None:
    stacks = Stacks(3)
    with SlotLoader(Replay, 4, **INLINE) as loader, adapt(loader, frame_stack=3) as batches:
        for step in range(30):
            batch = batches.recv()
            expected = stacks.of(batch.host, batch.host.obs)
            assert host(batch.obs).shape == (4, 3, 5)
            same(batch.obs, expected, 4)
            if step % 3 == 1:
                batch.release()
                again = batches.recv()
                same(again.obs, expected, 4)
                batch = again
            stacks.answered()
            batch.send(np.zeros(4, np.int64))


def test_a_record_whose_action_failed_on_its_way_is_not_pushed_twice() -> None:
    class Later(HostOps):
        def done(self, event: Any) -> bool:
            return False

    stacks = Stacks(3)
    with (
        SlotLoader(Replay, 2, action_bounds="error", **INLINE) as loader,
        DeviceBatches(loader, Later(), frame_stack=3) as batches,
    ):
        for step in range(12):
            batch = batches.recv()
            expected = stacks.of(batch.host, batch.host.obs)
            same(batch.obs, expected, 2)
            if step % 3 == 1:
                batch.send(np.array([77, 77]))
                with pytest.raises(ActionError, match="found 77"):
                    batches.drain()
                batch.release()
                batch = batches.recv()
                same(batch.obs, expected, 2)
            stacks.answered()
            batch.send(np.zeros(2, np.int64))


def test_floats_are_narrowed_on_the_device_and_nothing_else(adapt: Adapt) -> None:
    narrow = "float16" if adapt.name == "numpy" else "bfloat16"
    dtypes: list[Any] = [narrow, *([] if adapt.name == "numpy" else [adapt.xp.bfloat16])]
    for dtype in dtypes:
        with fleet() as loader, adapt(loader, dtype=dtype, buckets=(4,)) as batches:
            policy = adapt.compile(batches, lambda obs: obs["flat"][:, 0] * 0 == 1)
            for _ in range(5):
                batch = batches.recv()
                obs, core = batch.obs, batch.host.obs
                for found, expected in ((obs["flat"], core["flat"]), (obs["deep"]["x"], core["deep"]["x"])):
                    assert str(found.dtype).removeprefix("torch.") == narrow
                    np.testing.assert_allclose(host(found)[: batch.size].astype(np.float32), expected, rtol=2**-8)
                same(obs["cam"], core["cam"], batch.size)
                assert host(batch.reward).dtype == np.float32
                same(obs["text"].lengths, core["text"].lengths, batch.size)
                batch.send(policy(batch).action)


def test_stacks_of_narrowed_floats(adapt: Adapt) -> None:
    narrow, stacks = "float16" if adapt.name == "numpy" else "bfloat16", Stacks(2)
    with SlotLoader(Replay, 3, **INLINE) as loader, adapt(loader, dtype=narrow, frame_stack=2) as batches:
        for _ in range(12):
            batch = batches.recv()
            assert str(batch.obs.dtype).removeprefix("torch.") == narrow
            expected = stacks.of(batch.host, batch.host.obs)
            np.testing.assert_allclose(host(batch.obs).astype(np.float32), expected, rtol=2**-7)
            stacks.answered()
            batch.send(np.zeros(3, np.int64))


@pytest.mark.parametrize(
    ("frame_stack", "text"),
    [
        (4, r"frame_stack: expected a number for each key to stack, e\.g\. \{'cam': 4\}, found 4 for obs\[\"cam\"\]"),
        ({"film": 4}, r"frame_stack: expected keys of .*found \[\('film',\)\]"),
        ({"cam": 0}, r"frame_stack: expected .* numbers of at least 1, found \[0\]"),
        ({"cam": True}, r"frame_stack: expected .* numbers of at least 1, found \[True\]"),
        ({"text": 2}, r"frame_stack: expected"),
    ],
)
def test_wrong_frame_stacks_are_refused(adapt: Adapt, frame_stack: Any, text: str) -> None:
    with fleet() as loader, pytest.raises(ValueError, match=text):
        adapt(loader, frame_stack=frame_stack)


def test_an_unknown_dtype_is_refused(adapt: Adapt) -> None:
    with SlotLoader(Replay, 2, **INLINE) as loader, pytest.raises((ValueError, TypeError), match="dtype"):
        adapt(loader, dtype="float17")


def test_handed_out_stacks_keep_their_values(adapt: Adapt) -> None:
    kept = []
    with SlotLoader(Replay, 3, **INLINE) as loader, adapt(loader, frame_stack=4) as batches:
        for _ in range(100):
            batch = batches.recv()
            kept.append((batch.obs, host(batch.obs).copy()))
            batch.send(np.zeros(3, np.int64))
    for found, then in kept:
        np.testing.assert_array_equal(host(found), then)


def test_a_stack_that_is_undone_in_a_thread_loses_none_that_is_stored_meanwhile() -> None:
    """Tables of jax are new ones after each store: two at a time would forget one of them."""
    entered, second, stores = threading.Event(), threading.Event(), list[int]()

    class Functional(HostOps):
        def put(self, table: Any, rows: Any, values: Any) -> Any:
            changed = np.array(table)
            changed[rows] = values
            stores.append(threading.get_ident())
            if len(stores) == 2:
                entered.set()
                second.wait(0.3)  # longer than another store needs to come in between
            second.set()
            return changed

    with SlotLoader(Replay, 2, **INLINE) as loader, DeviceBatches(loader, Functional(), frame_stack=2) as batches:
        made = batches._preparation
        assert made is not None
        zero = np.zeros(1, np.uint8)
        commits = [made([np.full((1, 5), slot + 1, np.float32), np.array([slot]), zero]) for slot in range(2)]
        commits[1][1]()
        second.clear()
        thread = threading.Thread(target=commits[1][2])
        thread.start()
        until(entered.is_set)
        commits[0][1]()
        thread.join()
        assert [made._tables[0][slot].max() for slot in range(2)] == [1, 0]
