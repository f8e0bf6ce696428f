"""Every fence of the staged path matters: without it an adversarial device gets a wrong action into an env."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
from fake_device import FakeOps

from slotloader import Acted, SlotLoader
from slotloader.device import batches as device_batches
from slotloader.device import completion, policies, staging
from slotloader.device.ops import Stream
from slotloader.device_batches import DeviceBatches

MODULES = (staging, completion, device_batches, policies)
SOURCES = {module: inspect.getsource(module) for module in MODULES}
MODES: list[dict[Stream, str]] = [
    dict.fromkeys(Stream, "late"),
    dict.fromkeys(Stream, "eager"),
    {Stream.H2D: "eager", Stream.COMPUTE: "late", Stream.D2H: "late"},
    {Stream.H2D: "late", Stream.COMPUTE: "eager", Stream.D2H: "late"},
    {Stream.H2D: "late", Stream.COMPUTE: "late", Stream.D2H: "eager"},
    *[dict.fromkeys(Stream, "rand")] * 6,
]
SLOTS, STEPS = 20, 300


class Checking(gymnasium.Env[Any, Any]):
    """Its observation is fresh at every step; the right action is the observation's sum."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (), np.float64)
    wrong = 0

    def __init__(self, number: int) -> None:
        self._rng = np.random.default_rng(number)

    def _observe(self) -> Any:
        self._obs = self._rng.integers(1, 1000, 3).astype(np.float64)
        return self._obs

    def reset(self, **_: Any) -> Any:
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        type(self).wrong += bool(action != self._obs.sum())
        return self._observe(), 0.0, False, False, {}


def answer(params: Any, inputs: Any, state: Any, key: Any) -> Acted:
    """The right action; a wrong one in every row if a row of padding is not clean."""
    padding = inputs.env_indices == SLOTS
    dirty = (inputs.obs[padding] != 0).any()
    return Acted(inputs.obs.sum(-1) + 1e6 * dirty)


class Replayed:
    """Like a CUDA graph: each call writes its results to the same memory."""

    def __init__(self, ops: FakeOps) -> None:
        self._ops = ops
        self._results: dict[int, Any] = {}

    def __call__(self, params: Any, tables: Any, arrays: Any, key: Any) -> Any:
        raise AssertionError("replaced by the compiled steps")

    def compute(self, function: Any, *args: Any) -> Any:
        """Runs through the device, then copies into the static result, also on the device."""
        acted, tables = FakeOps.compute(self._ops, function, *args)
        fresh = acted.action
        static = self._results.setdefault(len(fresh), self._ops._allocate(fresh.nbytes, Stream.COMPUTE).view(fresh.dtype))
        target, source = self._ops._pointer(static), self._ops._pointer(fresh)
        self._ops._submit(Stream.COMPUTE, lambda: np.copyto(target, source))
        return acted._replace(action=static), tables


def wrong_actions(modes: dict[Stream, str], seed: int) -> int:
    """Runs a fleet over the fake device, and returns how many wrong results anybody has seen."""
    Checking.wrong = 0
    ops = FakeOps(modes, seed, ahead=3)
    rng = np.random.default_rng(seed)
    learned: list[tuple[Any, float]] = []
    with SlotLoader([lambda i=i: Checking(i) for i in range(SLOTS)], backend="inline", seed=0, timeout=0) as loader:
        batches = DeviceBatches(loader, ops, buckets=(2, 4), in_flight=3, float64="keep", depth=2)
        ops.in_flight = lambda: len(batches._completer._pending)
        graph = Replayed(ops)
        policy = batches.policy(answer)
        for number in range(STEPS):
            batch = batches.recv(max_get=int(rng.integers(1, 5)))
            policy._static_outputs = number % 2 == 0
            if policy._static_outputs:
                ops.compute = graph.compute  # type: ignore[method-assign]
                own, ops.own = ops.own, lambda array: FakeOps.compute(ops, np.array, array)  # type: ignore[method-assign]
            acted = policy(batch)
            if policy._static_outputs:
                del ops.compute, ops.own  # type: ignore[attr-defined]
                assert own
            expected = float(batch.host.obs.sum())
            batch.send(acted.action)
            learned.append((FakeOps.compute(ops, lambda obs: np.asarray(obs.sum()), batch.obs), expected))
            del batch, acted  # a learner's work on `obs` is still to run when the last array over it goes
        ops.draining = True
        batches.drain()
        ops.host_wait(ops.record(Stream.COMPUTE))
        batches.close()
    return Checking.wrong + sum(float(found) != expected for found, expected in learned)


def fences() -> list[tuple[ModuleType, int]]:
    """Every line that says it is a fence."""
    return [
        (module, number)
        for module, source in SOURCES.items()
        for number, line in enumerate(source.splitlines(), 1)
        if line.endswith("# fence")
    ]


def without(module: ModuleType, line: int) -> tuple[str, str, Callable[..., Any]]:
    """The method around `line`, compiled without that line: its class, its name and the new function."""
    source = SOURCES[module]
    for cls in ast.parse(source).body:
        for function in cls.body if isinstance(cls, ast.ClassDef) else []:
            if isinstance(function, ast.FunctionDef) and function.lineno <= line <= (function.end_lineno or 0):
                lines = source.splitlines()
                text = lines[line - 1]
                lines[line - 1] = text[: len(text) - len(text.lstrip())] + "pass"
                namespace = dict(vars(module))
                exec(compile("\n".join(lines), str(module.__file__), "exec"), namespace)
                return cls.name, function.name, vars(namespace[cls.name])[function.name]
    raise AssertionError(f"{module.__name__}:{line} is in no method")


@pytest.mark.parametrize("case", range(len(MODES)))
def test_every_action_is_right_whatever_the_order_of_the_device(case: int) -> None:
    assert wrong_actions(MODES[case], case) == 0


@pytest.mark.parametrize(("module", "line"), fences(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_without_a_fence_an_action_is_wrong(module: ModuleType, line: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, name, mutated = without(module, line)
    monkeypatch.setattr(getattr(module, cls), name, mutated)
    tries = ((MODES[seed % len(MODES)], seed) for seed in range(4 * len(MODES)))
    assert any(wrong_actions(modes, seed) for modes, seed in tries)


def test_there_are_fences() -> None:
    assert len(fences()) >= 8
