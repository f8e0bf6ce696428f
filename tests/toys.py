"""Environments for the tests, each with one trait. Imported once by the nursery: see `PRELOAD`."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import dm_env
import gymnasium as gym
import numpy as np
from dm_env import specs
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Text, Tuple

PRELOAD = ["toys"]
ENDS = ("terminated", "truncated")


def episode_length(env_id: int, episode: int) -> int:
    """Env steps of an episode of `Counting`: between 1 and 11, different for neighbours."""
    return 1 + (7 * env_id + 5 * episode) % 11


class Counting(gym.Env):
    """For ONCE: obs is `(1000 * env_id + t, episode, the action that led here or -1)`; t counts within the episode."""

    observation_space = Box(-1, 2**40, (3,), np.int64)
    action_space = Discrete(1000)

    def __init__(self, context: Any) -> None:
        self.env_id, self.episode, self.t = context.slot, -1, 0
        self.context, self.options, self.seeds = context, None, []

    def _obs(self, action: int) -> np.ndarray:
        return np.array([1000 * self.env_id + self.t, self.episode, action])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.t, self.options = self.episode + 1, 0, options
        self.seeds.append(seed)
        return self._obs(-1), {}

    def step(self, action: int) -> Any:
        self.t += 1
        ended = self.t == episode_length(self.env_id, self.episode)
        even = self.episode % 2 == 0
        return self._obs(int(action)), float(1000 * self.env_id + self.t), ended and even, ended and not even, {"t": self.t}


class Endless(Counting):
    """`Counting` without an end, with `width` copies of its counter as observation; used for torn rows too."""

    def __init__(self, context: Any, width: int = 3) -> None:
        super().__init__(context)
        self.observation_space = Box(-1, 2**40, (width,), np.int64)
        self._buffer = np.zeros(width, np.int64)

    def _obs(self, action: int) -> np.ndarray:
        self._buffer[:] = self.env_id * 10**9 + self.t
        return self._buffer

    def step(self, action: int) -> Any:
        self.t += 1
        return self._obs(action), float(self.t), False, False, {}


class Working(Endless):
    """`Endless` whose step takes 10 ms."""

    def step(self, action: int) -> Any:
        time.sleep(0.01)
        return super().step(action)


class Rich(gym.Env):
    """A tree of every kind of leaf, filled from (slot, episode, t); `Rich.values` is the truth to compare with."""

    observation_space = Dict(
        {
            "b": Tuple((Box(0, 255, (2, 3), np.uint8), Box(-np.inf, np.inf, (), np.float64))),
            "a": Dict({"x": Box(-1e9, 1e9, (2,), np.float32), "flag": MultiBinary(4)}),
            "kind": Discrete(1000, start=5),
            "text": Text(40, min_length=0),
        }
    )
    action_space = Dict({"move": Box(-1, 1, (2,), np.float32), "key": Discrete(5)})

    def __init__(self, context: Any) -> None:
        self.slot, self.episode, self.t = context.slot, -1, 0

    @staticmethod
    def values(slot: int, episode: int, t: int) -> dict[str, Any]:
        n = 100 * slot + 10 * episode + t
        return {
            "kind": np.int64(5 + n % 900),
            "text": f"slot {slot} é {n}",
            "a": {"flag": np.array([n & 1, n & 2, n & 4, n & 8], bool).astype(np.int8), "x": np.float32([n, -n])},
            "b": (np.full((2, 3), n % 256, np.uint8), np.float64(n / 7)),
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.t = self.episode + 1, 0
        return self.values(self.slot, self.episode, 0), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        reward = float(action["move"].sum() + action["key"])
        info = {"good": self.t % 2 == 0, "mask": np.arange(3, dtype=np.int16) + self.t}
        return self.values(self.slot, self.episode, self.t), reward, self.t == 5, False, info


class OneBuffer(gym.Env):
    """Reuses one observation buffer, and its reset overwrites it at once."""

    observation_space = Box(-1e6, 1e6, (64,), np.float32)
    action_space = Discrete(2)

    def __init__(self) -> None:
        self.buffer = np.zeros(64, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.buffer[:] = -1
        self.t = 0
        return self.buffer, {}

    def step(self, action: int) -> Any:
        self.t += 1
        self.buffer[:] = self.t
        return self.buffer, 1.0, self.t == 3, False, {}


class Scripted(gym.Env):
    """obs = V = time within the episode, reward 1; ends after `length` steps in the `how` way; logs what it is called with.

    The log is a file per env, so that a test can read what really reached `env.step` in another process.
    """

    observation_space = Box(-1e6, 1e6, (1,), np.float32)
    action_space = Discrete(1000)

    def __init__(self, context: Any, length: int = 3, how: str = "terminated", log: str = "") -> None:
        self.length, self.how = length, how
        self.log = Path(log) / f"{context.slot}.log" if log else None

    def _say(self, line: str) -> None:
        if self.log:
            with self.log.open("a") as file:
                file.write(f"{line}\n")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._say(f"reset {threading.get_ident()}")
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        self._say(f"step {int(action)}")
        self.t += 1
        ended = self.t == self.length
        obs = np.full(1, self.t, np.float32)
        return obs, 1.0, ended and self.how == "terminated", ended and self.how == "truncated", {}

    def close(self) -> None:
        self._say(f"close {threading.get_ident()}")


class Gated(Counting):
    """A step of slot i begins by making `began-i` and waits while `hold-i` exists in `directory`: a slow env on demand."""

    def __init__(self, context: Any, directory: str) -> None:
        super().__init__(context)
        self.began, self.hold = (Path(directory) / f"{name}-{self.env_id}" for name in ("began", "hold"))
        self.mark = 0

    def double(self, value: int) -> int:
        return 2 * value + self.mark

    def step(self, action: int) -> Any:
        if self.hold.exists():
            self.began.touch()
        deadline = time.monotonic() + 20  # a test that fails must not leave a thread for ever
        while self.hold.exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        return super().step(action)


class DmCountdown(dm_env.Environment):
    """Episodes of 3 steps; odd ones end with discount 0, even ones with 1 (a time limit)."""

    def __init__(self) -> None:
        self.episode = -1

    def observation_spec(self) -> Any:
        return {"t": specs.Array((2,), np.float32)}

    def action_spec(self) -> Any:
        return specs.BoundedArray((), np.int32, 0, 4)

    def reset(self) -> dm_env.TimeStep:
        self.t, self.episode = 0, self.episode + 1
        return dm_env.restart({"t": np.zeros(2, np.float32)})

    def step(self, action: Any) -> dm_env.TimeStep:
        self.t += 1
        obs = {"t": np.full(2, self.t, np.float32)}
        if self.t < 3:
            return dm_env.transition(float(action), obs, discount=0.9)
        return dm_env.termination(5.0, obs) if self.episode % 2 else dm_env.truncation(5.0, obs)


class AsyncPair(Counting):
    """Async; every step waits until a step of the other env of its pair is under way too, so it ends only if both overlap."""

    waiting: dict[int, asyncio.Future[None]] = {}

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await asyncio.sleep(0)
        return Counting.reset(self, seed=seed, options=options)

    async def step(self, action: int) -> Any:
        pair = self.env_id // 2
        other = self.waiting.pop(pair, None)
        if other is None:
            self.waiting[pair] = asyncio.get_running_loop().create_future()
            await self.waiting[pair]
        else:
            other.set_result(None)
        self.t += 1
        return self._obs(int(action)), 1.0, False, False, {}

    async def ask(self, value: int) -> int:
        await asyncio.sleep(0)
        return value + self.env_id


class ThreadPair(Counting):
    """Every step meets the other env of its pair at a barrier: ends only if both run at once, in threads of one worker."""

    barriers: dict[int, threading.Barrier] = {}
    lock = threading.Lock()

    def step(self, action: int) -> Any:
        with self.lock:
            barrier = self.barriers.setdefault(self.env_id // 2, threading.Barrier(2))
        barrier.wait(30)
        self.t += 1
        return self._obs(int(action)), 1.0, False, False, {}


class Bits(gym.Env):
    """Float observations with NaN payloads, -0.0 and denormals, which must arrive bit for bit."""

    observation_space = Dict({"f4": Box(-np.inf, np.inf, (4,), np.float32), "f8": Box(-np.inf, np.inf, (4,), np.float64)})
    action_space = Discrete(2)
    f4 = np.array([0x7FC12345, 0x80000000, 0x00000001, 0xFFC00001], np.uint32)
    f8 = np.array([0x7FF8000000ABCDEF, 1 << 63, 1, 0xFFF8000000000001], np.uint64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"f4": self.f4.view(np.float32), "f8": self.f8.view(np.float64)}, {}

    def step(self, action: int) -> Any:
        return *self.reset()[:1], 0.0, False, False, {}


class Raising(Counting):
    """Raises `make()` in the given step of the env of slot `slot`."""

    def __init__(self, context: Any, make: Any, slot: int = 1, at: int = 7) -> None:
        super().__init__(context)
        self.make, self.slot, self.at, self.calls = make, slot, at, 0

    def step(self, action: int) -> Any:
        self.calls += 1
        if self.env_id == self.slot and self.calls == self.at:
            raise self.make()
        self.t += 1
        return self._obs(int(action)), 1.0, False, False, {}


class Wrong(Counting):
    """Returns `value` in step `at` (0: reset) of slot `slot`, whatever is declared."""

    observation_space = Dict({"cam": Box(0, 255, (4, 4), np.uint8), "n": Box(-100, 100, (), np.int16)})

    def __init__(self, context: Any, value: Any, at: int, slot: int = 1) -> None:
        super().__init__(context)
        self.value, self.at, self.slot = value, at, slot

    def _obs(self, action: int) -> Any:
        if self.env_id == self.slot and self.t == self.at:
            return self.value
        return {"cam": np.full((4, 4), self.t % 256, np.uint8), "n": np.int16(self.t % 100)}

    def step(self, action: int) -> Any:
        self.t += 1
        return self._obs(int(action)), 0.0, False, False, {}


class WithHelper(Counting):
    """Starts a helper process that would live for ever, as a browser env does, and writes its pid to `directory`."""

    def __init__(self, context: Any, directory: str) -> None:
        import subprocess

        super().__init__(context)
        self.helper = subprocess.Popen(["sleep", "1000"])
        Path(directory, f"helper-{self.env_id}").write_text(str(self.helper.pid))
        Path(directory, f"worker-{self.env_id}").write_text(str(os.getpid()))


class LongOrShort(gym.Env):
    """One step or 21, as its seed decides, and so much return. obs is `(t, length)`, the info of an end has the length."""

    observation_space = Box(0, 100, (2,), np.float32)
    action_space = Discrete(1000)
    lengths = (1, 21)

    def __init__(self) -> None:
        self.steps = self.resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.resets += 1
        self.t, self.length = 0, self.lengths[self.np_random.integers(2)]
        return np.float32([0, self.length]), {}

    def step(self, action: int) -> Any:
        self.t, self.steps = self.t + 1, self.steps + 1
        assert action == self.t + self.length, f"{action} for t={self.t}"  # of the obs that came before, and of no other
        ended = self.t == self.length
        return np.float32([self.t, self.length]), 1.0, ended, False, {"length": self.length} if ended else {}


class RaisesOnce(LongOrShort):
    """Raises in the third step of its life while the file is there; it takes the file away."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def step(self, action: int) -> Any:
        if self.t == 2 and self.mark.exists():
            self.mark.unlink()
            raise RuntimeError("once")
        return super().step(action)


class Mortal(LongOrShort):
    """Raises in its third step, for good."""

    def step(self, action: int) -> Any:
        if self.t == 2:
            raise RuntimeError("broken")
        return super().step(action)


class Camera(gym.Env):
    """Uniform grey pictures of brightness 10 * t, episodes of 5 steps; `render` shows the same, 100 brighter and in red."""

    action_space = Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, space: Any = None, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = Box(0, 255, (20, 30), np.uint8) if space is None else space

    def _fill(self, space: Any) -> Any:
        if isinstance(space, Dict):
            return {key: self._fill(part) for key, part in space.items()}
        if len(space.shape) < 3:
            return np.full(space.shape, 10 * self.t, space.dtype)
        obs = np.zeros(space.shape, space.dtype)  # of a stack, or of channels first: the first one is the oldest
        obs[...] = np.reshape(10 * self.t + np.arange(space.shape[0]), (-1,) + (1,) * (len(space.shape) - 1))
        return obs

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._fill(self.observation_space), {}

    def step(self, action: int) -> Any:
        self.t += 1
        return self._fill(self.observation_space), 1.0, self.t == 5, False, {}

    def render(self) -> Any:
        if self.render_mode is None:
            return None
        picture = np.zeros((24, 32, 3), np.uint8)
        picture[..., 0] = 100 + 10 * self.t
        return picture
