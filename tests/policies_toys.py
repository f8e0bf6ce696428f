"""What the adapter tests share: one face for the three adapters, environments that check their own actions, and policies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Text, Tuple
from toys import Counting, Scripted

import slotloader
from slotloader.device.batch import DeviceBatch
from slotloader.device.policies import Policy
from slotloader.device_batches import DeviceBatches

NAMES = ("numpy", "torch", "jax")


class Adapt:
    """One adapter: `adapt(loader, ...)` is `slotloader.to_<name>(loader, ...)`.

    Attributes:
      xp: the framework's namespace.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.xp: Any = pytest.importorskip({"jax": "jax.numpy"}.get(name, name))
        if name == "torch":
            self.xp.set_num_threads(1)

    def __call__(self, loader: Any, **options: Any) -> DeviceBatches:
        made: DeviceBatches = getattr(slotloader, f"to_{self.name}")(loader, **options)
        return made

    def array(self, value: Any) -> Any:
        """A numpy array as an array of the framework; trees by their leaves."""
        if isinstance(value, dict):
            return {key: self.array(part) for key, part in value.items()}
        if isinstance(value, tuple):
            return tuple(self.array(part) for part in value)
        if self.name == "numpy" or not isinstance(value, np.ndarray):
            return value
        return self.xp.from_numpy(value.copy()) if self.name == "torch" else self.xp.array(value)

    def compile(self, batches: DeviceBatches, policy: Any, **options: Any) -> Policy:
        """`batches.compile`, for torch without the C++ compiler."""
        if self.name == "torch":
            options.setdefault("backend", "eager")
        return batches.compile(policy, **options)

    def dtype(self, dtype: Any) -> np.dtype[Any]:
        """In which dtype values of `dtype` arrive."""
        dtype = np.dtype(np.float32) if dtype == np.float64 else np.dtype(dtype)
        return np.dtype(f"{dtype.kind}4") if self.name == "jax" and dtype.kind in "iu" and dtype.itemsize == 8 else dtype

    def is_native(self, array: Any) -> bool:
        """Whether it is an array of the framework."""
        kinds = {"numpy": lambda: np.ndarray, "torch": lambda: self.xp.Tensor, "jax": lambda: self.xp.ndarray}
        return isinstance(array, kinds[self.name]())


def host(array: Any) -> np.ndarray:
    """An array of any framework as numpy."""
    if hasattr(array, "detach"):
        array = array.detach()
        array = array.float() if str(array.dtype) == "torch.bfloat16" else array
    return np.asarray(array)


def records(batch: DeviceBatch) -> Any:
    """The real rows of a device batch, as `Once.check` reads them."""
    names = ("env_indices", "obs", "reward", "step_type")
    return SimpleNamespace(**{name: host(getattr(batch, name))[: batch.size] for name in names})


def note(once: Any, batch: DeviceBatch, action: Any) -> None:
    """Tells a `Once` what a batch was answered with."""
    once.sent.update(zip(batch.host.env_indices.tolist(), host(action)[: batch.size].tolist(), strict=True))


class Narrow(Counting):
    """`Counting` with integers that fit into 32 bits, as jax has them."""

    observation_space = Box(-1, 2**31 - 1, (3,), np.int64)


class Narrow10(Scripted):
    """`Scripted` that takes ten actions."""

    action_space = Discrete(10)


def reply(obs: Any) -> Any:
    """The action that `Strict` wants for its observation; every adapter computes the same."""
    return (7 * obs[..., 0] + 3 * obs[..., 1] + obs[..., 2]) % 1000


class Strict(Narrow):
    """Fails unless every action is the `reply` to the record before: a lost, late, doubled or swapped action shows."""

    def _obs(self, action: int) -> np.ndarray:
        self.last = super()._obs(action)
        return self.last

    def step(self, action: int) -> Any:
        if action != reply(self.last):
            raise AssertionError(f"slot {self.env_id}: expected {reply(self.last)} for {self.last}, found {action}")
        return super().step(action)


NUMBERS = ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")


def everything(slot: int, episode: int, t: int) -> dict[str, Any]:
    """The observation of `Everything`."""
    n = 100 * slot + 10 * episode + t
    return {
        "numbers": {name: np.full((2, 3), n % 2 if name == "bool" else n % 100 + 1).astype(name) for name in NUMBERS},
        "tuple": (np.float64(n / 7), np.array([n & 1, n & 2, n & 4], bool).astype(np.int8), np.array([n % 3, n % 4])),
        "text": f"slot {slot} é {n}",
        "many": tuple(np.float32(range(n % 4))),
        "kind": np.int64(5 + n % 900),
    }


class Everything(gym.Env):
    """A tree of every dtype and kind of leaf, with an action tree, an action mask and a text as action."""

    observation_space = Dict(
        {
            "numbers": Dict({name: Box(0, 1 if name == "bool" else 120, (2, 3), np.dtype(name).type) for name in NUMBERS}),
            "tuple": Tuple((Box(-np.inf, np.inf, (), np.float64), MultiBinary(3), MultiDiscrete([3, 4]))),
            "text": Text(40, min_length=0),
            "many": Sequence(Box(-10, 10, (), np.float32)),
            "kind": Discrete(1000, start=5),
        }
    )
    action_space = Dict(
        {
            "move": Box(-1, 1, (2,), np.float32),
            "keys": Tuple((Discrete(5), MultiDiscrete([3, 4]))),
            "say": Text(12, min_length=0),
        }
    )
    info = {"good": np.bool_, "mask": (np.int16, (3,))}

    def __init__(self, context: Any, length: int = 5) -> None:
        self.slot, self.length, self.episode, self.t = context.slot, length, -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.t = self.episode + 1, 0
        return everything(self.slot, self.episode, 0), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        info = {"good": self.t % 2 == 0, "mask": np.arange(3, dtype=np.int16) + self.t}
        return everything(self.slot, self.episode, self.t), len(action["say"]) + 0.5, self.t == self.length, False, info


class Echo(gym.Env):
    """Takes actions of `space`; its observation is the time since its reset. Episodes of `length` steps, 0 for no end."""

    observation_space = Box(-1e6, 1e6, (1,), np.float32)

    def __init__(self, space: Any, length: int = 0) -> None:
        self.action_space, self.length = space, length

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, self.t == self.length, False, {}


class Replay(gym.Env):
    """Plays a recorded stream of vectors, whatever the actions are; episodes of `length` steps."""

    observation_space = Box(-np.inf, np.inf, (5,), np.float32)
    action_space = Discrete(4)

    def __init__(self, context: Any, length: int = 7) -> None:
        self.stream = np.random.default_rng(context.slot).normal(size=(97, 5)).astype(np.float32)
        self.at, self.length = -1, length

    def _next(self) -> np.ndarray:
        self.at += 1
        return self.stream[self.at % len(self.stream)]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._next(), {}

    def step(self, action: int) -> Any:
        self.t += 1
        return self._next(), float(action), False, self.t == self.length, {}


class Layouts(gym.Env):
    """Observations in every layout that an env may return; all hold `Layouts.truth(t)`."""

    names = ("plain", "reversed", "transposed", "fortran", "broadcast", "swapped", "readonly", "strided")
    observation_space = Dict({name: Box(-1e6, 1e6, (3, 4), np.float32) for name in names})
    action_space = Discrete(2)

    @staticmethod
    def truth(t: int, name: str) -> np.ndarray:
        whole = np.arange(12, dtype=np.float32).reshape(3, 4) + 100 * t
        return np.broadcast_to(whole[:1], (3, 4)) if name == "broadcast" else whole

    def _obs(self) -> dict[str, np.ndarray]:
        whole = self.truth(self.t, "plain")
        readonly = whole.copy()
        readonly.flags.writeable = False
        wide = np.zeros((6, 8), np.float32)
        wide[::2, ::2] = whole
        return {
            "plain": whole,
            "reversed": whole[::-1, ::-1].copy()[::-1, ::-1],
            "transposed": whole.T.copy().T,
            "fortran": np.asfortranarray(whole),
            "broadcast": np.broadcast_to(whole[0], (3, 4)),
            "swapped": whole.astype(">f4"),
            "readonly": readonly,
            "strided": wide[::2, ::2],
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._obs(), {}

    def step(self, action: int) -> Any:
        self.t += 1
        return self._obs(), 0.0, False, False, {}
