"""FAULTS 31, 33 and 34 through a loader, and the first mistakes of a new user: each one sentence that says what to do."""

from __future__ import annotations

import re
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from checks import run_script, started, until
from gymnasium.spaces import Box, Dict, Discrete, Graph, GraphInstance, Sequence, Text
from toys import Counting, Wrong

from slotloader import EnvFailed, SlotLoader, SlotLoaderError, SpecMismatch

pytestmark = pytest.mark.usefixtures("clean")

RIGHT = {"cam": np.zeros((4, 4), np.uint8), "n": np.int16(0)}


def cam(value: Any) -> dict[str, Any]:
    return {**RIGHT, "cam": value}


def number(value: Any) -> dict[str, Any]:
    return {**RIGHT, "n": value}


# 31. What is wrong, and the words that must name leaf, expected and found.
WRONG: dict[str, tuple[Any, list[str]]] = {
    "shape": (cam(np.zeros((4, 4, 1), np.uint8)), ['obs["cam"]', "expected uint8 (4, 4)", "found uint8 (4, 4, 1)"]),
    "shape that would broadcast": (cam(np.zeros((4,), np.uint8)), ['obs["cam"]', "uint8 (4, 4)", "uint8 (4,)"]),
    "scalar that would broadcast": (cam(7), ['obs["cam"]', "expected uint8 (4, 4)", "int64 ()"]),
    "float for uint8": (cam(np.zeros((4, 4), np.float32)), ['obs["cam"]', "expected uint8 (4, 4)", "found float32 (4, 4)"]),
    "integer too large": (cam(np.full((4, 4), 300)), ['obs["cam"]', "expected uint8", "300", "does not fit"]),
    "integer too small": (number(-40_000), ['obs["n"]', "expected int16", "-40000", "does not fit"]),
    "string": (number("three"), ['obs["n"]', "expected int16", "three"]),
    "None": (None, ["obs", "expected", "cam", "None"]),
    "missing key": ({"cam": RIGHT["cam"]}, ["obs", "n", "missing"]),
    "extra key": ({**RIGHT, "depth": 1}, ["obs", "depth"]),
    "array for a dict": (np.zeros(3), ["obs", "expected", "cam"]),
}


@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("case", WRONG)
def test_a_record_that_breaks_the_declared_space_is_a_spec_mismatch_with_its_place(
    how: dict[str, Any], case: str, at: int
) -> None:
    value, words = WRONG[case]
    seen = dict.fromkeys(range(3), 0)
    error: Exception | None = None
    with SlotLoader(partial(Wrong, value=value, at=at), 3, **how) as loader:
        while error is None or min(seen[0], seen[2]) < 30:
            try:
                batch = loader.recv(stall_timeout=20)
            except SlotLoaderError as raised:
                assert error is None, "reported twice"
                error = raised
                continue
            for row, slot in enumerate(batch.env_indices.tolist()):
                assert batch.obs["n"][row] == seen[slot], "other slots lose nothing"
                seen[slot] += 1
            batch.send([0] * batch.size)
    assert seen[1] == at
    text = str(error)
    assert isinstance(error, SpecMismatch), f"expected SpecMismatch, found {type(error).__name__}: {text}"
    assert len(text.encode()) < 1000, text
    assert re.match(rf"slot 1 \(worker \d, pid \d+\), step {at}: ", text), text
    for word in words:
        assert word in text, (word, text)


def test_values_that_fit_pass_whatever_their_dtype(how: dict[str, Any]) -> None:
    fits = {"cam": np.arange(16).reshape(4, 4), "n": 3}
    with SlotLoader(partial(Wrong, value=fits, at=2), 2, timeout=None, **how) as loader:
        for _ in range(2):
            loader.recv().send([0, 0])
        batch = loader.recv()
        assert batch.obs["cam"].dtype == np.uint8
        assert batch.obs["cam"][1].tolist() == np.arange(16).reshape(4, 4).tolist()
        assert batch.obs["n"][1] == 3


class Floats(Counting):
    observation_space = Box(-1, 1, (2,), np.float32)

    def __init__(self, context: Any, value: Any) -> None:
        super().__init__(context)
        self.value = value

    def _obs(self, action: int) -> Any:
        return self.value if self.t == 2 else np.zeros(2)


@pytest.mark.parametrize(
    ("value", "check", "words"),
    [
        (np.float32([np.nan, 0]), False, None),
        (np.float32([5, 0]), False, None),
        (np.float64([0.1, 0]), True, None),
        (np.float32([np.nan, 0]), True, ["NaN", "check=True"]),
        (np.float32([0, 5]), True, ["bounds [-1.0, 1.0]", "5.0", "check=True"]),
        (np.float64([0, 1e300]), False, ["float32 (2,)", "1e+300", "too large"]),
    ],
)
def test_nan_and_bounds_pass_unless_checked_and_an_overflow_never_does(
    how: dict[str, Any], value: Any, check: bool, words: list[str] | None
) -> None:
    class Long(Floats):
        def step(self, action: int) -> Any:
            self.t += 1
            return self._obs(action), 0.0, False, False, {}

    with SlotLoader(partial(Long, value=value), 1, check=check, **how) as loader:
        for _ in range(2):
            loader.recv().send([0])
        if words is None:
            np.testing.assert_array_equal(loader.recv().obs[0], value.astype(np.float32))
            return
        with pytest.raises(SpecMismatch) as caught:
            loader.recv()
        assert all(word in str(caught.value) for word in ["slot 0", "obs", *words]), str(caught.value)


@pytest.mark.parametrize("reward", [np.zeros(1), np.zeros(2), "1", 1e300])
def test_a_reward_that_is_no_float32_number_is_named(how: dict[str, Any], reward: Any) -> None:
    class Odd(Counting):
        def step(self, action: int) -> Any:
            return self._obs(action), reward, False, False, {}

    with SlotLoader(Odd, 1, **how) as loader:
        loader.recv().send([0])
        with pytest.raises(SpecMismatch, match=r"slot 0 .*reward: expected a number.*found"):
            loader.recv()


# 33


class Other(Counting):
    observation_space = Box(-1, 2**30, (3,), np.int32)


class OtherActions(Counting):
    action_space = Discrete(7)


@pytest.mark.parametrize("wrong", [Other, OtherActions, lambda context: Wrong(context, None, 9)])
def test_envs_whose_spaces_differ_are_an_error_at_construction_that_shows_both(how: dict[str, Any], wrong: Any) -> None:
    with pytest.raises(SpecMismatch, match="slot 2") as caught:
        SlotLoader([Counting, Counting, wrong], **how)
    text = str(caught.value)
    assert "slot 0" in text
    assert len(text) < 1000
    both = {Other: ("int64", "int32"), OtherActions: ("999", "6")}.get(wrong, ("cam", "int64"))
    assert all(word in text for word in both), text


# 34


class Page(gym.Env):
    observation_space = Dict(
        {
            "html": Text(10**6, min_length=0),
            "links": Sequence(Box(0, 1, (2,), np.float32)),
            "graph": Graph(Box(0, 1, (2,), np.float32), None),
        }
    )
    action_space = Text(8)

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def _obs(self) -> Any:
        text = self.texts[min(self.t, len(self.texts) - 1)]
        links = tuple(np.full(2, i / 8, np.float32) for i in range(self.t % 4))
        graph = GraphInstance(np.full((self.t % 3, 2), 0.5, np.float32), None, None)
        return {"html": text, "links": links, "graph": graph}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._obs(), {}

    def step(self, action: str) -> Any:
        self.t += 1
        return self._obs(), float(action), False, False, {}


def test_text_sequence_and_graph_arrive_up_to_their_capacity_and_one_byte_more_names_the_leaf(how: dict[str, Any]) -> None:
    texts = ["", "é" * 50, "x" * 100, "\N{GRINNING FACE} ok", "é" * 50 + "x"]
    with SlotLoader(lambda: Page(texts), 1, max_bytes={"html": 100, "links": 4000}, **how) as loader:
        for t in range(4):
            batch = loader.recv()
            assert batch.obs["html"].tolist() == [texts[t]]
            assert batch.obs["html"].lengths.tolist() == [len(texts[t].encode())]
            for rows in (slice(0, 1), [0], np.array([True])):
                assert batch.obs["html"][rows].tolist() == [texts[t]]
            assert len(batch.obs["html"][1:]) == 0
            assert batch.obs["html"][np.array(0)] == texts[t]
            assert batch.obs["html"].data.shape == (1, 100)
            links = batch.obs["links"][0]
            assert [link.tolist() for link in links] == [[i / 8] * 2 for i in range(t % 4)]
            assert batch.obs["graph"][0].nodes.shape == (t % 3, 2)
            assert batch.reward[0] == (0 if t == 0 else 2.5)
            batch.send(["2.5"])
        with pytest.raises(SpecMismatch) as caught:
            loader.recv()
    assert 'obs["html"]' in str(caught.value)
    assert "101 bytes" in str(caught.value)
    assert "max_bytes={'html': 101}" in str(caught.value)


# First mistakes. The text must be one sentence (a clause after ';' may say what to do) and no wall of traceback.


def sentence(text: str, *words: str) -> None:
    assert "\n" not in text.strip(), text
    assert len(text) < 500, text
    for word in words:
        assert word in text, (word, text)


def test_forgot_send(how: dict[str, Any]) -> None:
    with SlotLoader(Counting, 4, **how) as loader:
        begin = time.monotonic()
        with pytest.raises(SlotLoaderError) as caught:
            for _ in loader:
                pass
        assert time.monotonic() - begin < 5
    sentence(str(caught.value), "found 0", "unanswered", "call batch.send(actions) or batch.release()")


def test_forgot_with(tmp_path: Path) -> None:
    code = "from slotloader import SlotLoader\nfrom toys import Counting\n"
    ran = run_script(tmp_path, f"{code}def main():\n    SlotLoader(Counting, 2).recv()\nmain()\n", "-Wdefault")
    assert ran.code == 0
    lines = ran.err.strip().splitlines()
    assert "ResourceWarning: a SlotLoader was not closed; use `with SlotLoader(...) as loader:`" in lines[0]
    assert len(lines) <= 2, ran.err  # the warning, and the source line that python shows with it


def test_break_and_iterate_again_names_the_batch_that_was_never_answered(how: dict[str, Any]) -> None:
    with SlotLoader(Counting, 2, min_get=2, **how) as loader:
        for batch in loader:
            assert batch.size == 2
            break
        with pytest.raises(SlotLoaderError) as caught:
            next(iter(loader))
        sentence(
            str(caught.value), "batch of 2 with slots [0, 1]", "batch.send(actions) or batch.release()", "loader.unanswered"
        )
        batch.send([0, 0])
        assert next(iter(loader)).size == 2


def test_float_action_for_discrete(how: dict[str, Any]) -> None:
    with SlotLoader(Counting, 2, min_get=2, **how) as loader:
        with pytest.raises(SlotLoaderError) as caught:
            loader.recv().send(np.random.default_rng(0).random(2))
        sentence(str(caught.value), "int64 (2,)", "float64 (2,)", "argmax")


CONSTRUCTION: dict[str, tuple[Any, dict[str, Any], type[Exception], list[str]]] = {
    "env instance": (gym.make("CartPole-v1"), {"num_envs": 2}, TypeError, ["envs: expected a factory", "lambda: "]),
    "env instance in a list": ([gym.make("CartPole-v1")], {}, TypeError, ["envs[0]: expected a factory", "lambda: "]),
    "no num_envs": ("CartPole-v1", {}, ValueError, ["num_envs: expected", "pass num_envs=8"]),
    "num_envs 0": ("CartPole-v1", {"num_envs": 0}, ValueError, ["num_envs: expected an integer of at least 1, found 0"]),
    "empty list": ([], {}, ValueError, ["at least one env", "empty list"]),
    "length of the list": ([Counting], {"num_envs": 2}, ValueError, ["num_envs: expected 1", "found 2"]),
    "a number": (7, {"num_envs": 2}, TypeError, ["expected a factory or a gymnasium id", "7"]),
    "backend": (Counting, {"num_envs": 1, "backend": "gpu"}, ValueError, ["'process', 'thread' or 'inline'", "'gpu'"]),
    "workers": (Counting, {"num_envs": 2, "num_workers": 3}, ValueError, ["num_workers: expected at most num_envs=2"]),
    "seed": (Counting, {"num_envs": 2, "seed": -1}, ValueError, ["seed: expected a non-negative integer", "-1"]),
    "action_bounds": (
        Counting,
        {"num_envs": 2, "action_bounds": "wrap"},
        ValueError,
        ["'ignore', 'clip' or 'error'", "'wrap'"],
    ),
    "info": (Counting, {"num_envs": 2, "info": {"x": "what"}}, TypeError, ["info['x']: expected", "dtype", "'what'"]),
}


@pytest.mark.parametrize("case", CONSTRUCTION)
def test_a_wrong_constructor_call_says_what_to_pass(case: str) -> None:
    envs, keywords, kind, words = CONSTRUCTION[case]
    with pytest.raises(kind) as caught:
        SlotLoader(envs, **keywords)
    sentence(str(caught.value), *words)


class OldGym(Counting):
    def step(self, action: int) -> Any:
        return self._obs(action), 1.0, False, {}


class OldReset(Counting):
    def reset(self, **keywords: Any) -> Any:
        return self._obs(-1)


def test_an_env_of_the_old_gym_api(how: dict[str, Any]) -> None:
    with SlotLoader(OldGym, 1, **how) as loader:
        loader.recv().send([0])
        with pytest.raises(SpecMismatch) as caught:
            loader.recv()
        sentence(str(caught.value), "slot 0", "(observation, reward, terminated, truncated, info)", "old gym API, wrap the env")
    with SlotLoader(OldReset, 1, **how) as loader:
        with pytest.raises(SpecMismatch) as caught:
            loader.recv()
        sentence(str(caught.value), "slot 0", "reset(): expected (observation, info), found")


def raises_in_factory() -> Any:
    raise OSError("no display")


FACTORIES: dict[str, tuple[Any, list[str]]] = {
    "returns None": (lambda: None, ["returned None", "is a `return` missing?"]),
    "returns a number": (lambda: 3, ["returned", "3", "expected an object with reset and step"]),
    "returns a vector env": (lambda: gym.make_vec("CartPole-v1", 2), ["vector environment", "expected a single env"]),
    "raises": (raises_in_factory, ["the factory raised OSError: no display"]),
    "unregistered id": ("NoSuchEnv-v7", ["NoSuchEnv"]),
}


@pytest.mark.parametrize("case", FACTORIES)
def test_a_factory_that_does_not_work_fails_the_constructor(how: dict[str, Any], case: str) -> None:
    factory, words = FACTORIES[case]
    with pytest.raises(EnvFailed) as caught:
        SlotLoader([factory] * 2, **how)
    sentence(str(caught.value).splitlines()[0], "slot ", "the factory raised", *words)
    if case == "raises" and how["backend"] == "process":
        assert "in raises_in_factory" in str(caught.value)
        assert "in raises_in_factory" in caught.value.remote_traceback
    if case == "raises" and how["backend"] != "process":
        assert isinstance(caught.value.__cause__, OSError)


def test_a_factory_that_holds_a_lock_is_named_before_any_process_or_region_exists(
    clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = threading.Lock()

    def locked(context: Any) -> Any:
        with lock:
            return Counting(context)

    import subprocess

    begun: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: begun.append(args))
    before = psutil.Process().num_fds()
    with pytest.raises(TypeError) as caught:
        SlotLoader([Counting, Counting, locked])
    sentence(
        str(caught.value), "envs[2]: expected a factory that can be pickled", "lock", "inside the factory", 'backend="thread"'
    )
    assert not begun
    assert not psutil.Process().children()
    assert psutil.Process().num_fds() == before
    with SlotLoader([Counting, Counting, locked], backend="thread") as loader:
        assert loader.recv(min_get=3).size == 3


def test_wrong_max_bytes_or_preload_is_said_at_construction() -> None:
    with pytest.raises(SlotLoaderError, match="preload: expected modules that can be imported, found 'no_such_module_x'"):
        SlotLoader(Counting, 1, preload=["no_such_module_x"])
    assert not started("")


class Informed(gym.Env):
    """Tells of its success at the end of every second episode, and of its speed always."""

    observation_space = Box(0, 1, (1,), np.float32)
    action_space = Discrete(2)
    episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.episode = 0, self.episode + 1
        return np.zeros(1, np.float32), {"start": 1.0}

    def step(self, action: int) -> Any:
        self.t += 1
        late = {"late": True} if self.episode > 1 else {}
        return np.zeros(1, np.float32), 0.0, self.t == 3, False, {"speed": 2.0, "success": self.t == 3, **late}


@pytest.mark.parametrize("how", [{"backend": "inline"}, {"backend": "process", "num_workers": 2}], ids=["inline", "process"])
def test_a_declared_column_that_no_info_has_is_logged_once_with_the_key_that_it_may_have_meant(
    how: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    columns: dict[Any, Any] = dict.fromkeys(("start", "speed", "sucess", "late", 3), np.float32)
    with SlotLoader(Informed, 4, info=columns, timeout=None, **how) as loader:
        for _ in range(12):
            batch = loader.recv(4)
            assert not batch.info["sucess"].any()
            batch.send(np.zeros(4, np.int64))
        until(lambda: len(caplog.records) >= 2)
    first, second = sorted(record.getMessage() for record in caplog.records)
    assert re.fullmatch(
        r"info: expected the declared column 'late' in an episode of slot \d, found \['start', 'speed', 'success'\]; "
        r"it is zero until an info has it",
        first,
    )
    assert re.fullmatch(r"info: .*'sucess'.*; did you mean 'success'\?", second)
