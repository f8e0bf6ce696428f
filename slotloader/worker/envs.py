"""Where environments come from: factories, what they are told, and seeds."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from slotloader.arguments import require_count
from slotloader.records.specs import show_value

EnvFactory = Callable[..., Any]

# Packages that register a family of ids when imported; gymnasium no longer imports them by itself.
_NAMESPACES = {"ALE": "ale_py", "dm_control": "shimmy", "miniwob": "miniwob", "procgen_gym": "procgen_gym"}


@dataclass(frozen=True)
class EnvContext:
    """What a factory with one parameter is told.

    Attributes:
      slot: the slot that the env will own.
      life: 0 for the first env of the slot, +1 each time it is rebuilt.
      worker: index of the worker that hosts it.
      seed: seed of this life's first reset.
    """

    slot: int
    life: int
    worker: int
    seed: int


@dataclass(frozen=True)
class EpisodeKey:
    """Names one episode for `on_reset`: `episode` counts from 0 within its `life`."""

    slot: int
    life: int
    episode: int


def life_seed(seed: int, slot: int, life: int, spare: int = 0) -> int:
    """The seed of an env's first reset: `seed + slot` at first, as gymnasium's vector envs do, then well spread."""
    if spare:
        return int(np.random.SeedSequence((seed, slot, life, spare)).generate_state(1)[0])
    if life == 0:
        return seed + slot
    return int(np.random.SeedSequence((seed, slot, life)).generate_state(1)[0])


def plan_seed(seed: int, spare: int) -> int:
    """The seeds of a slot's envs where the first reset of a life was given one: it goes to the env that plays first."""
    return int(np.random.SeedSequence((seed, spare)).generate_state(1)[0]) if spare else seed


def evaluation_seed(seed: int, slot: int, episode: int) -> int:
    """The seed of one episode of `evaluate`; never that of a life, whatever the loader's own seed is."""
    return int(np.random.SeedSequence((seed, slot, episode), spawn_key=(1,)).generate_state(1)[0])


def factories(envs: Any, num_envs: int | None = None, env_kwargs: dict[str, Any] | None = None) -> list[EnvFactory]:
    """Turns what a user passes to `SlotLoader` into one factory per env.

    Args:
      envs: a gymnasium id or EnvSpec, one factory, or a list of factories and ids.
      num_envs: how many; required for one id or factory, checked against a list's length.
      env_kwargs: keyword arguments for `gymnasium.make`, or for the factory.

    Raises:
      TypeError: something is not a factory.
      ValueError: `num_envs` is missing, below 1, or not the length of the list.
    """
    if isinstance(envs, (list, tuple)):
        if num_envs is not None and num_envs != len(envs):
            raise ValueError(f"num_envs: expected {len(envs)}, the length of the list of envs, found {num_envs}")
        found = [_factory(env, env_kwargs, f"envs[{index}]") for index, env in enumerate(envs)]
        if not found:
            raise ValueError("envs: expected at least one env, found an empty list")
        return found
    factory = _factory(envs, env_kwargs, "envs")
    if num_envs is None:
        raise ValueError("num_envs: expected how many copies of the env to run, found None; pass num_envs=8, say")
    return [factory] * require_count("num_envs", num_envs)


def _factory(env: Any, kwargs: dict[str, Any] | None, where: str) -> EnvFactory:
    if isinstance(env, str):
        return partial(make_registered, env, _registration(env), kwargs or {})
    if hasattr(env, "entry_point") and hasattr(env, "id"):
        return partial(make_registered, env.id, env, kwargs or {})
    if hasattr(env, "step") and hasattr(env, "reset") and not isinstance(env, type):
        raise TypeError(
            f"{where}: expected a factory, found an environment ({type(env).__name__}); "
            f"pass a function that makes it, e.g. lambda: {type(env).__name__}(), so that each worker builds its own"
        )
    if not callable(env):
        raise TypeError(f"{where}: expected a factory or a gymnasium id, found {show_value(env)}")
    return partial(env, **kwargs) if kwargs else env


def _registration(env_id: str) -> Any:
    """The EnvSpec of an id registered in this process (in `__main__`, say), to take along to the workers."""
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None:
        return None
    return gymnasium.registry.get(env_id)


def make_registered(env_id: str, spec: Any, kwargs: dict[str, Any]) -> Any:
    """Builds a gymnasium env by id in the worker, where its package may not have been imported yet."""
    gymnasium = import_for(env_id)
    if spec is not None and spec.id not in gymnasium.registry:
        gymnasium.registry[spec.id] = spec
    return gymnasium.make(env_id, **kwargs)


def import_for(env_id: str) -> Any:
    """Imports gymnasium and the package that registers `env_id`'s namespace; returns gymnasium."""
    gymnasium = importlib.import_module("gymnasium")
    package = _NAMESPACES.get(env_id.rpartition(":")[2].partition("/")[0])
    if package is not None and package not in sys.modules:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{env_id}: its package {package} is not installed; pip install {package.replace('_', '-')}"
            ) from error
    return gymnasium


def preloads(found: Sequence[EnvFactory]) -> list[str]:
    """Modules that every worker will need anyway: importing them once, before workers fork, saves time and memory."""
    ids = {factory.args[0] for factory in found if isinstance(factory, partial) and factory.func is make_registered}
    packages = {_NAMESPACES.get(env_id.rpartition(":")[2].partition("/")[0]) for env_id in ids}
    gymnasium = ids or "gymnasium" in sys.modules  # a factory of a trainer that has it most likely needs it too
    return (["gymnasium"] if gymnasium else []) + sorted(package for package in packages if package)


def call_factory(factory: EnvFactory, context: EnvContext) -> Any:
    """Calls a factory, with the context if it has one required parameter."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return factory()
    required = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return factory(context) if len(required) == 1 else factory()
