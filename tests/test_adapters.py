"""One suite for the three adapters: what their batches hold, what they take as an answer, and that no record is lost."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import Once, quiet, run_script
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from policies_toys import NAMES, Adapt, Echo, Everything, Narrow, Narrow10, Strict, host, note, records, reply
from toys import Counting, Scripted, episode_length

import slotloader
from slotloader import ActionError, BytesTensor, LeaseExpired, LoaderClosed, SlotLoader, SlotLoaderError, StepType
from slotloader.batching.gatherer import BytesColumn

INLINE: dict[str, Any] = {"backend": "inline", "timeout": None}
clean = pytest.mark.usefixtures("clean")


@pytest.fixture(params=NAMES)
def adapt(request: pytest.FixtureRequest) -> Adapt:
    """The adapters."""
    return Adapt(request.param)


def ours(how: dict[str, Any]) -> dict[str, Any]:
    """A backend that imports the toys of these tests."""
    return {**how, "preload": ["policies_toys"]} if how["backend"] == "process" else how


def say(size: int, rng: np.random.Generator) -> dict[str, Any]:
    """Random actions for `Everything`."""
    return {
        "move": rng.uniform(-1, 1, (size, 2)).astype(np.float32),
        "keys": (rng.integers(0, 5, size), rng.integers(0, 3, (size, 2))),
        "say": ["é" * int(n) for n in rng.integers(0, 5, size)],
    }


def assert_rows(adapt: Adapt, found: Any, expected: Any, bucket: int) -> None:
    """`found` holds the rows of `expected` bit for bit, in the dtype that the adapter promises, then clean rows."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_rows(adapt, found[key], expected[key], bucket)
    elif isinstance(expected, tuple):
        assert isinstance(found, tuple)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_rows(adapt, one, other, bucket)
    elif isinstance(expected, BytesColumn):
        assert isinstance(found, BytesTensor)
        assert host(found.data).shape == (bucket, *expected.data.shape[1:])
        assert_rows(adapt, found.lengths, expected.lengths.astype(np.int32), bucket)
        for row, length in enumerate(expected.lengths):
            np.testing.assert_array_equal(host(found.data)[row, :length], expected.data[row, :length])
    else:
        assert adapt.is_native(found)
        got, size = host(found), len(expected)
        assert got.shape == (bucket, *expected.shape[1:])
        assert got.dtype == adapt.dtype(expected.dtype)
        np.testing.assert_array_equal(got[:size], expected.astype(got.dtype))
        assert not got[size:].any()


def follow(once: Once, batch: Any, acted: Any) -> None:
    """Of a run: checks a batch and notes its answer."""
    once.check(records(batch))
    note(once, batch, acted.action)


# What a batch holds.


def test_batches_equal_the_hosts_and_padding_is_clean(adapt: Adapt) -> None:
    rng = np.random.default_rng(0)
    with SlotLoader(Everything, 6, info=Everything.info, **INLINE) as loader, adapt(loader) as batches:
        assert batches.buckets == (1, 2, 4, 6)
        for _ in range(25):
            most = int(rng.integers(1, 7))
            batch = batches.recv(most, most)
            core, bucket = batch.host, {1: 1, 2: 2, 3: 4, 4: 4}.get(most, 6)
            assert (len(batch), batch.size, batch.bucket) == (most, most, bucket)
            for name in ("obs", "reward", "step_type", "last_action", "info"):
                assert_rows(adapt, getattr(batch, name), getattr(core, name), bucket)
                assert_rows(adapt, getattr(batch.inputs, name), getattr(core, name), bucket)
            assert host(batch.env_indices).tolist() == core.env_indices.tolist() + [6] * (bucket - most)
            assert host(batch.inputs.env_indices).tolist() == host(batch.env_indices).tolist()
            assert host(batch.valid).tolist() == [True] * most + [False] * (bucket - most)
            for name in ("is_first", "terminated", "truncated", "is_last", "discount"):
                got = host(getattr(batch, name))
                assert got.dtype == getattr(core, name).dtype
                np.testing.assert_array_equal(got[:most], getattr(core, name))
            assert host(batch.inputs.is_first).tolist() == host(batch.is_first).tolist()
            assert batch.episodes == core.episodes
            assert batch.env_steps == core.env_steps
            batch.send(say(bucket, rng))


def test_buckets_are_chosen_by_size(adapt: Adapt) -> None:
    with SlotLoader(Narrow, 12, max_get=9, **INLINE) as loader:
        for buckets, chosen in ((None, (1, 2, 4, 8, 9)), ((9, 3), (3, 9)), ([5, np.int64(5)], (5,)), ((1, 2), (1, 2))):
            with adapt(loader, buckets=buckets) as batches:
                assert batches.buckets == chosen
                for size in range(1, chosen[-1] + 1):
                    batch = batches.recv(size, size)
                    assert batch.bucket == min(bucket for bucket in chosen if bucket >= size)
                    assert host(batch.obs).shape == (batch.bucket, 3)
                    batch.release()
                batch = batches.recv()
                assert batch.size == chosen[-1]
                batch.release()
                with pytest.raises(ValueError, match=rf"max_get: expected at most {chosen[-1]}, the largest bucket, found 10"):
                    batches.recv(max_get=10)
                assert batches.recv(max_get=None).size == chosen[-1]


def test_no_buckets_is_no_padding(adapt: Adapt) -> None:
    with SlotLoader(Narrow, 5, **INLINE) as loader:
        if adapt.name == "jax":
            with pytest.raises(ValueError, match="buckets: expected at least one size, since jax compiles for each"):
                adapt(loader, buckets=())
            return
        with adapt(loader, buckets=()) as batches:
            for size in (3, 1, 5, 2):
                batch = batches.recv(size, size)
                assert (batch.size, batch.bucket) == (size, size)
                assert host(batch.valid).all()
                batch.send(np.zeros(size, np.int64))


WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"buckets": (0, 2)}, r"buckets: expected positive integers, found \[0\]"),
    ({"buckets": (2.5,)}, r"buckets: expected positive integers, found \[2\.5\]"),
    ({"buckets": (True,)}, r"buckets: expected positive integers, found \[True\]"),
    ({"buckets": (2, 7)}, r"buckets: expected sizes up to max_get=6, found 7; a batch never has more rows than max_get"),
    ({"buckets": (1,)}, r"buckets: expected the largest to be at least min_get=2, found \(1,\)"),
    ({"buckets": 4}, "buckets: expected"),
    ({"in_flight": 0}, "in_flight: expected an integer of at least 1, found 0"),
    ({"fields": ("observation",)}, r"fields: expected some of \('obs', .*found \('observation',\)"),
    ({"fields": "obs"}, r"fields: expected some of .*found 'obs'"),
    ({"float64": "half"}, "float64: expected 'float32' or 'keep', found 'half'"),
]


def test_wrong_options_are_refused(adapt: Adapt) -> None:
    with SlotLoader(Narrow, 6, min_get=2, **INLINE) as loader:
        for options, text in WRONG_OPTIONS:
            with pytest.raises((ValueError, TypeError), match=text):
                adapt(loader, **options)
        with adapt(loader) as batches:
            assert batches.recv().size == 6


def test_what_is_no_loader_or_closed_is_refused(adapt: Adapt) -> None:
    with pytest.raises(TypeError, match="loader: expected a SlotLoader or a receiver"):
        adapt([1, 2])
    with SlotLoader(Narrow, 2, **INLINE) as loader:
        batches = adapt(loader)
    with pytest.raises(LoaderClosed):
        adapt(loader)
    with pytest.raises(LoaderClosed):
        batches.recv()
    assert list(batches) == []
    batches.close()


def test_fields_say_what_travels(adapt: Adapt) -> None:
    with SlotLoader(Narrow, 3, **INLINE) as loader:
        with adapt(loader, fields=("obs",)) as batches:
            batch = batches.recv()
            assert_rows(adapt, batch.obs, batch.host.obs, 3)
            assert host(batch.valid).all()
            for name in ("reward", "step_type", "last_action", "info", "is_first"):
                with pytest.raises(AttributeError, match=r"add it to fields="):
                    getattr(batch, name)
                assert getattr(batch.inputs, name) is None
            with pytest.raises(ValueError, match=r"state: expected 'step_type' among fields="):
                batches.policy(lambda obs: obs, state=np.zeros(1, np.float32))
            with pytest.raises(ValueError, match=r"frame_stack: expected 'step_type' among fields="):
                adapt(loader, fields=("obs",), frame_stack=2)
        with adapt(loader, fields=("reward", "step_type")) as batches:
            batch = batches.recv()
            assert host(batch.reward).tolist() == [0, 0, 0]
            assert host(batch.is_first).all()
            assert batch.inputs.obs is None
            batch.send(np.zeros(3, np.int64))


def test_doubles_are_halved_unless_kept(adapt: Adapt) -> None:
    space = Box(-np.inf, np.inf, (), np.float64)

    class Doubles(Echo):
        observation_space = space

        def reset(self, **_: Any) -> Any:
            return np.float64(1 / 3), {}

    with SlotLoader(partial(Doubles, Discrete(2)), 2, **INLINE) as loader:
        with adapt(loader, float64="float32") as batches:
            assert host(batches.recv().obs).tolist() == [np.float32(1 / 3)] * 2
        if adapt.name == "jax":
            with pytest.raises(ValueError, match=r"obs: expected a dtype that jax takes, found float64.*jax_enable_x64"):
                adapt(loader, float64="keep")
        else:
            with adapt(loader, float64="keep") as batches:
                obs = host(batches.recv().obs)
                assert obs.dtype == np.float64
                assert obs.tolist() == [1 / 3] * 2


def test_integers_that_do_not_fit_the_device_are_refused_when_they_come() -> None:
    adapt = Adapt("jax")

    class Growing(Counting):  # its bounds go beyond 32 bits
        def _obs(self, action: int) -> np.ndarray:
            return np.array([self.env_id, -1, (2**31 - 1) + (self.t == 2 and self.env_id)])

    with SlotLoader(Growing, 2, **INLINE) as loader:
        with adapt(loader) as batches:
            for _ in range(2):
                batch = batches.recv()
                assert host(batch.obs).tolist() == [[0, -1, 2**31 - 1], [1, -1, 2**31 - 1]]
                batch.send([0, 0])
            text = r"obs: expected integers that the device holds as int32, found 2147483648; leave it out with fields=.*x64"
            for _ in range(2):
                batch = batches.recv()
                with pytest.raises(ValueError, match=text):
                    batch.obs  # noqa: B018
                batch.release()
        with adapt(loader, fields=("reward", "step_type")) as batches:
            assert batches.recv().size == 2


def test_what_was_handed_out_keeps_its_values(adapt: Adapt) -> None:
    kept = []
    with SlotLoader(Everything, 4, info=Everything.info, backend="thread") as loader, adapt(loader, buckets=(4,)) as batches:
        for _ in range(30):
            batch = batches.recv()
            seen = {name: getattr(batch.host, name) for name in ("obs", "reward", "step_type", "last_action", "info")}
            _ = batch.obs, batch.last_action, batch.info  # first read before the answer
            kept.append((batch, seen))
            batch.send(say(batch.size, np.random.default_rng(0)))
    for batch, seen in kept:
        for name, expected in seen.items():
            assert_rows(adapt, getattr(batch, name), expected, batch.bucket)


# Answers.

SPACES = [
    (Discrete(9), lambda rng, n: rng.integers(0, 9, n)),
    (Box(-1, 1, (2, 3), np.float32), lambda rng, n: rng.uniform(-1, 1, (n, 2, 3)).astype(np.float32)),
    (MultiDiscrete([3, 4]), lambda rng, n: rng.integers(0, 3, (n, 2))),
    (MultiBinary(3), lambda rng, n: rng.integers(0, 2, (n, 3)).astype(np.int8)),
    (
        Dict({"b": Discrete(5), "a": Tuple((Box(-1, 1, (), np.float32), Dict({"x": Discrete(2)})))}),
        lambda rng, n: {
            "a": (rng.uniform(-1, 1, n).astype(np.float32), {"x": rng.integers(0, 2, n)}),
            "b": rng.integers(0, 5, n),
        },
    ),
]


def row(tree: Any, at: int) -> Any:
    """One row of a tree of actions, as lists."""
    if isinstance(tree, dict):
        return {key: row(part, at) for key, part in sorted(tree.items())}
    return tuple(row(part, at) for part in tree) if isinstance(tree, tuple) else tree[at].tolist()


@pytest.mark.parametrize(("space", "draw"), SPACES, ids=[type(space).__name__ for space, _ in SPACES])
def test_actions_of_bucket_size_and_of_record_size_arrive(adapt: Adapt, space: Any, draw: Any) -> None:
    rng = np.random.default_rng(1)
    sent: dict[int, Any] = dict.fromkeys(range(5))
    with SlotLoader(partial(Echo, space), 5, **INLINE) as loader, adapt(loader, buckets=(2, 5)) as batches:
        for number in range(20):
            most = int(rng.integers(1, 6))
            batch = batches.recv(most, most)
            last, slots = batch.host.last_action, batch.host.env_indices.tolist()
            for at, slot in enumerate(slots):
                assert sent[slot] is None or row(last, at) == sent[slot]
            actions = draw(rng, batch.bucket if number % 2 else batch.size)
            sent.update({slot: row(actions, at) for at, slot in enumerate(slots)})
            batch.send(actions if number % 4 < 2 else adapt.array(actions))


def test_text_actions_travel_as_lists(adapt: Adapt) -> None:
    with SlotLoader(partial(Echo, Text(8, min_length=0)), 3, **INLINE) as loader, adapt(loader, buckets=(3,)) as batches:
        batches.recv().send(["a", "bé", ""])
        batch = batches.recv()
        assert batch.host.last_action.tolist() == ["a", "bé", ""]
        assert host(batch.last_action.lengths).tolist() == [1, 3, 0]
        batch.release()
        batch = batches.recv(2, 2)
        batch.send(["x", "y", "padding"])
        batches.drain()
        batch = batches.recv(3, 3)
        assert batch.host.last_action.tolist() == ["x", "y", ""]
        for wrong in ("abc", 5, None, ["a"], ["a"] * 4, ["a", 2, "c"], ["a", "b" * 9, "c"]):
            with pytest.raises(ActionError, match="send refused, no env has stepped: action: expected"):
                batch.send(wrong)
            assert not batch.answered
        batch.send(["1", "2", "3"])
        assert batches.recv().host.last_action.tolist() == ["1", "2", "3"]


WRONG: dict[str, Any] = {
    "too few": np.zeros(2, np.int64),
    "between": np.zeros(5, np.int64),
    "too many": np.zeros(7, np.int64),
    "column": np.zeros((4, 1), np.int64),
    "scalar": np.int64(1),
    "none": None,
    "ragged": [[1], [1, 2], [1], [1]],
    "dict": {"a": np.zeros(4, np.int64)},
    "floats": np.zeros(4, np.float32),
    "bounds": np.array([0, 1, 2, 77]),
}


def test_a_wrong_answer_is_refused_and_no_env_has_stepped(adapt: Adapt, tmp_path: Path) -> None:
    with (
        SlotLoader(partial(Narrow10, log=str(tmp_path)), 6, action_bounds="error", **INLINE) as loader,
        adapt(loader) as batches,
    ):
        batch = batches.recv(4, 4)
        for what, wrong in WRONG.items():
            for actions in (wrong, adapt.array(wrong)):
                with pytest.raises(ActionError, match="send refused, no env has stepped: action"):
                    batch.send(actions)
                    batches.drain()
                assert not batch.answered, what
        batch.send(adapt.array(np.array([1, 2, 3, 4])))
        batches.drain()
        with pytest.raises(LeaseExpired, match="answered already"):
            batch.send(np.zeros(4, np.int64))
        assert batches.recv(6, 6).host.last_action.tolist() == [1, 2, 3, 4, 0, 0]
        for slot in range(4):
            steps = [line for line in (tmp_path / f"{slot}.log").read_text().splitlines() if line.startswith("step")]
            assert steps == [f"step {slot + 1}"]


def test_an_answer_of_another_structure_is_refused(adapt: Adapt) -> None:
    with SlotLoader(Everything, 3, **INLINE) as loader, adapt(loader) as batches:
        batch = batches.recv()
        right = say(3, np.random.default_rng(0))
        wrong = {
            "missing key": {key: right[key] for key in ("move", "keys")},
            "extra key": {**right, "x": 1},
            "short tuple": {**right, "keys": right["keys"][:1]},
            "row shape": {**right, "move": np.zeros((3, 3), np.float32)},
            "no dict": right["move"],
        }
        for what, actions in wrong.items():
            with pytest.raises(ActionError, match="send refused, no env has stepped: action"):
                batch.send(adapt.array(actions))
            assert not batch.answered, what
        batch.send(right)
        assert batches.recv().env_steps == 3


def test_torch_tensors_of_any_kind_are_actions_of_the_torch_adapter() -> None:
    adapt = Adapt("torch")
    torch = adapt.xp
    plain = torch.tensor([[0.5, -1.0], [0.25, 0.75], [-0.5, 1.0]])
    kinds = {
        "gradient": plain.clone().requires_grad_(),
        "bfloat16": plain.bfloat16(),
        "bfloat16 with a gradient": plain.bfloat16().requires_grad_(),
        "strided": torch.stack([plain, -plain], -1)[..., 0],
        "negative": torch.complex(torch.zeros(3, 2), -plain).conj().imag,
        "double": plain.double(),
        "half": plain.half(),
    }
    with SlotLoader(partial(Echo, Box(-1, 1, (2,), np.float32)), 3, **INLINE) as loader, adapt(loader) as batches:
        for what, values in kinds.items():
            batches.recv().send(values)
            batch = batches.recv()
            assert batch.host.last_action.tolist() == plain.tolist(), what
            batch.send(torch.zeros(3, 2))


@pytest.mark.parametrize("name", ["numpy", "jax"])
def test_a_tensor_that_numpy_cannot_read_is_an_action_error_elsewhere(name: str) -> None:
    adapt, torch = Adapt(name), pytest.importorskip("torch")
    with SlotLoader(partial(Echo, Box(-1, 1, (), np.float32)), 3, **INLINE) as loader, adapt(loader) as batches:
        batch = batches.recv()
        for wrong in (torch.zeros(3, requires_grad=True), torch.zeros(3, dtype=torch.bfloat16)):
            with pytest.raises(ActionError, match=r"send refused, no env has stepped: action"):
                batch.send(wrong)
            assert not batch.answered
        batch.send(torch.ones(3))
        assert batches.recv().host.last_action.tolist() == [1, 1, 1]


def test_padding_sends_no_action(adapt: Adapt) -> None:
    with SlotLoader(partial(Echo, Discrete(1000)), 6, **INLINE) as loader, adapt(loader, buckets=(6,)) as batches:
        batches.recv().send(np.arange(6) + 1)
        batch = batches.recv(2, 2)
        batch.send(adapt.array(np.array([11, 12, 999, 999, 999, 999])))
        assert batches.recv(6, 6).host.last_action.tolist() == [11, 12, 3, 4, 5, 6]


def test_a_released_batch_comes_again(adapt: Adapt) -> None:
    with SlotLoader(Narrow, 3, **INLINE) as loader, adapt(loader) as batches:
        once, rng = Once(3), np.random.default_rng(0)
        for _ in range(20):
            first = batches.recv()
            obs = host(first.obs).tolist()
            first.release()
            first.release()
            assert (first.released, first.answered) == (True, True)
            batch = batches.recv()
            assert host(batch.obs).tolist() == obs == host(first.obs).tolist()
            once.check(records(batch))
            batch.send(adapt.array(once.answer(batch.host.env_indices, rng)))
            batch.release()
            assert batch.answered


# No record is lost, repeated, swapped or late.


@clean
def test_once_in_loops_of_ones_own(adapt: Adapt, how: dict[str, Any]) -> None:
    once, rng = Once(6), np.random.default_rng(0)
    with SlotLoader(Narrow, 6, max_get=4, **ours(how)) as loader, adapt(loader) as batches:
        for batch in batches.steps(150):
            if rng.random() < 0.1:
                batch.release()
                continue
            once.check(records(batch))
            size = batch.bucket if rng.random() < 0.5 else batch.size
            actions = rng.integers(0, 1000, size)
            note(once, batch, actions)
            batch.send(adapt.array(actions))
        for batch in batches.episodes(15):
            once.check(records(batch))
            batch.send(once.answer(batch.host.env_indices, rng))
        batches.drain()


@clean
def test_once_in_run_and_every_action_answers_its_own_record(adapt: Adapt, how: dict[str, Any]) -> None:
    """`Strict` fails for any other action; seen or hidden, the episodes of each slot come whole and in order."""
    once, at = Once(6), dict.fromkeys(range(6), 0)
    with SlotLoader(Strict, 6, max_get=5, on_failure="raise", **ours(how)) as loader, adapt(loader, buckets=(5,)) as batches:
        compiled = adapt.compile(batches, reply)
        seen = [batches.run(policy, env_steps=120, on_batch=partial(follow, once)) for policy in (reply, compiled)]
        hidden = [batches.run(policy, episodes=15) for policy in (reply, batches.policy(reply), compiled)]
        assert [120 <= ran.env_steps < 125 for ran in seen] == [True, True]
        assert [15 <= len(ran.episodes) < 20 for ran in hidden] == [True, True, True]
        for ran in (*seen, *hidden):
            for episode in ran.episodes:
                assert episode.index == at[episode.slot]
                assert episode.length == episode_length(episode.slot, episode.index)
                at[episode.slot] += 1


@clean
def test_one_running_loader_goes_from_numpy_to_torch_to_jax(how: dict[str, Any]) -> None:
    once, rng = Once(5), np.random.default_rng(0)
    with SlotLoader(Narrow, 5, **ours(how)) as loader:
        for name in NAMES:
            adapt = Adapt(name)
            with adapt(loader, buckets=(5,)) as batches:
                for batch in batches.steps(100):
                    once.check(records(batch))
                    batch.send(adapt.array(once.answer(batch.host.env_indices, rng)))
                batches.run(adapt.compile(batches, reply), env_steps=100, on_batch=partial(follow, once))
                left = batches.recv()
                assert loader.unanswered[-1:] == [left.host]
            assert not loader.unanswered
            assert left.answered
            batches.close()
            with pytest.raises(LoaderClosed, match="this adapter was closed; make a new one"):
                batches.recv()
        batch = loader.recv()
        once.check(batch)


@clean
def test_one_adapter_per_receiver_of_a_split_loader(adapt: Adapt) -> None:
    errors: list[BaseException] = []
    how = ours({"backend": "process" if adapt.name == "torch" else "thread"})
    with SlotLoader(Narrow, 6, **how) as loader:
        parts = loader.split(2)
        with pytest.raises(SlotLoaderError, match=r"loader\.split"):
            adapt(loader).recv()

        def consume(part: int) -> None:
            try:
                once, rng = Once(6), np.random.default_rng(part)
                with adapt(parts[part], buckets=(3,)) as batches:
                    assert batches.buckets == (3,)
                    for batch in batches.steps(150):
                        assert set(batch.host.env_indices.tolist()) <= set(range(3 * part, 3 * part + 3))
                        once.check(records(batch))
                        batch.send(adapt.array(once.answer(batch.host.env_indices, rng)))
                    policy = adapt.compile(batches, reply)
                    batches.run(policy, env_steps=150, on_batch=partial(follow, once))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=consume, args=(part,)) for part in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


def test_iteration_goes_on_after_a_break_and_ends_with_the_adapter(adapt: Adapt) -> None:
    once, rng = Once(3), np.random.default_rng(0)
    with SlotLoader(Narrow, 3, **INLINE) as loader, adapt(loader) as batches:
        iterator = iter(batches)
        for _ in range(5):
            for batch in iterator:
                once.check(records(batch))
                batch.send(once.answer(batch.host.env_indices, rng))
                break
        batches.close()
        assert list(iterator) == []
        assert list(batches) == []


def test_a_terminal_record_and_its_discount_reach_the_device(adapt: Adapt) -> None:
    factories = [partial(Scripted, length=1, how=how) for how in ("terminated", "truncated")] + [partial(Scripted)]
    with SlotLoader(factories, **INLINE) as loader, adapt(loader) as batches:
        batches.recv().send([1, 2, 3])
        batch = batches.recv()
        assert host(batch.step_type)[:3].tolist() == [StepType.TERMINATION, StepType.TRUNCATION, StepType.MID]
        assert host(batch.discount)[:3].tolist() == [0, 1, 1]
        assert host(batch.is_last)[:3].tolist() == [True, True, False]
        assert host(batch.terminated)[:3].tolist() == [True, False, False]
        assert host(batch.truncated)[:3].tolist() == [False, True, False]
        assert host(batch.last_action)[:3].tolist() == [1, 2, 3]
        assert [episode.slot for episode in batch.episodes] == [0, 1]
        assert repr(batch) == f"DeviceBatch(3 of 3 rows, {batch.host!r})"


def test_gymnasiums_own_environments_run_through_every_adapter(adapt: Adapt) -> None:
    with SlotLoader("CartPole-v1", 4, seed=3, **INLINE) as loader, adapt(loader) as batches:
        ran = batches.run(lambda obs: (obs[:, 2] > 0) * 1, episodes=8)
        assert len(ran.episodes) >= 8
        assert all(episode.episode_return == episode.length for episode in ran.episodes)


# Imports.


def test_importing_slotloader_imports_no_framework(tmp_path: Path) -> None:
    quiet(
        run_script(
            tmp_path,
            "import sys, slotloader\n"
            "slotloader.SlotLoader, slotloader.DeviceBatch, slotloader.Policy, slotloader.to_numpy\n"
            "assert not {'torch', 'jax', 'flax'} & set(sys.modules), sorted(sys.modules)\n",
        )
    )


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_an_adapter_without_its_framework_names_the_extra(name: str, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        f"sys.modules['{name}'] = None\n"
        "import slotloader\n"
        "try:\n"
        f"    slotloader.to_{name}\n"
        "except ImportError as error:\n"
        f"    assert \"pip install 'slotloader[{name}]'\" in str(error), error\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
        "assert slotloader.to_numpy\n"
    )
    quiet(run_script(tmp_path, code))


def test_all_names_of_the_package_are_there() -> None:
    for name in ("DeviceBatch", "DeviceBatches", "Policy", "Inputs", "Acted", "RecurrentState", "BytesTensor", "Run"):
        assert hasattr(slotloader, name)
