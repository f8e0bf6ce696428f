"""Kinds of env: how each is called, and that a further kind is one class and one row."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Discrete
from toys import AsyncPair, Counting, DmCountdown

from slotloader import EnvFailed, SlotLoader, StepType
from slotloader.worker import kinds
from slotloader.worker.envs import EnvContext
from slotloader.worker.kinds import KINDS, DmEnv, Env, GymnasiumEnv, PlainEnv, env_of

CONTEXT = EnvContext(0, 0, 0, 0)


class Plain:
    """No base class; takes neither seed nor options."""

    observation_space = action_space = Discrete(9)
    depth = 3

    def reset(self) -> Any:
        return 0, {}

    def step(self, action: int) -> Any:
        return 1, 0.0, False, False, {}


class Agents:
    """Like PettingZoo's parallel envs."""

    possible_agents = ["a", "b"]

    def observation_space(self, agent: str) -> Any:
        return Discrete(2)

    action_space = observation_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return {}, {}

    def step(self, actions: Any) -> Any:
        return {}, {}, {}, {}, {}


@pytest.mark.parametrize(
    ("raw", "kind", "is_async"),
    [
        (lambda: gym.make("CartPole-v1"), GymnasiumEnv, False),
        (lambda: Counting(CONTEXT), GymnasiumEnv, False),
        (lambda: AsyncPair(CONTEXT), GymnasiumEnv, True),
        (DmCountdown, DmEnv, False),
        (Plain, PlainEnv, False),
    ],
)
def test_each_env_is_known_by_one_row(raw: Any, kind: type[Env], is_async: bool) -> None:
    env = env_of(raw())
    assert type(env) is kind and env.is_async == is_async
    assert next(row for row in KINDS if row.knows(env.raw)) is kind


def test_reset_is_given_what_it_takes() -> None:
    class Seeded(Plain):
        def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
            return seed, {}

    class Anything(Plain):
        def reset(self, **keywords: Any) -> Any:
            return keywords, {}

    class DmAnything(DmCountdown):
        def reset(self, **keywords: Any) -> Any:
            assert not keywords
            return super().reset()

    assert env_of(Plain()).reset(7, {"a": 1}) == (0, {})
    assert env_of(Seeded()).reset(7, {"a": 1}) == (7, {})
    assert env_of(Anything()).reset(7, None)[0] == {"seed": 7}
    assert env_of(Anything()).reset(7, {"a": 1})[0] == {"seed": 7, "options": {"a": 1}}
    assert env_of(DmAnything()).reset(7, {"a": 1}).first()


def test_attributes_are_looked_for_below_wrappers_where_there_are_any() -> None:
    env = env_of(gym.wrappers.TimeLimit(Counting(CONTEXT), 5))
    assert env.get_attr("env_id") == 0
    env.set_attr("env_id", 4)
    assert env.raw.unwrapped.env_id == 4
    plain = env_of(Plain())
    plain.set_attr("depth", 5)
    assert plain.get_attr("depth") == 5


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (None, "the factory returned None"),
        (3, "expected an object with reset and step"),
        (Agents(), "Agents, an env of several agents; expected a single env, one per slot"),
        (type("Bare", (), {"reset": Plain.reset, "step": Plain.step})(), "Bare has no observation_space"),
    ],
)
def test_what_is_no_env_is_refused_in_words(raw: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        env_of(raw)
    with pytest.raises(EnvFailed, match=text):
        SlotLoader(lambda: raw, 1, backend="inline")


class Tick:
    """Of a library of its own: `start`s and `tick`s, and returns one number, negative at the end."""

    tock = 3

    def reset(self) -> int:
        self.t = 0
        return 0

    def step(self, action: int) -> int:
        self.t += 1
        return -self.t if self.t == self.tock else self.t


class TickEnv(Env):
    """The kind of `Tick`."""

    @classmethod
    def knows(cls, raw: Any) -> bool:
        return hasattr(raw, "tock")

    def spaces(self) -> tuple[Any, Any]:
        return Discrete(9), Discrete(2)

    def read_reset(self, result: Any) -> tuple[Any, dict[str, Any]]:
        return result, {}

    def read_step(self, result: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return abs(result), 1.0, result < 0, False, {}


@pytest.mark.parametrize("more", [{"backend": "inline"}, {"backend": "thread"}, {"backend": "thread", "spares": 1}], ids=str)
def test_a_further_kind_is_one_class_and_one_row(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "KINDS", (TickEnv, *KINDS))
    with SlotLoader(Tick, 2, timeout=None, **more) as loader:
        found = []
        for _ in range(5):
            batch = loader.recv()
            found.append((int(batch.obs[0]), StepType(int(batch.step_type[0])).name))
            batch.send(np.zeros(2, np.int64))
    assert found == [(0, "FIRST"), (1, "MID"), (2, "MID"), (3, "TERMINATION"), (0, "FIRST")]
