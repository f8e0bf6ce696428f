"""Kinds of env: one class for each convention by which envs are called, and the table that tells them apart.

Whoever adds a kind writes a class and a row of `KINDS`; everything else in the worker knows `Env` only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from slotloader.errors import SpecMismatch
from slotloader.records.specs import show_value


class Env:
    """One environment under one calling convention: gymnasium's, with what is optional filled in. Base of the kinds.

    Attributes:
      observation_space, action_space: as declared, for the user.
      step: the env's own; its result goes through `read_step`.
      is_async: `reset` and `step` are coroutine functions and must be awaited; any kind of env may be so.
    """

    step: Callable[[Any], Any]

    def __init__(self, raw: Any) -> None:
        self.raw, self.step = raw, raw.step
        self.observation_space, self.action_space = self.spaces()
        self.is_async = inspect.iscoroutinefunction(raw.step) or inspect.iscoroutinefunction(raw.reset)
        self._reset_takes = self.reset_parameters()

    @classmethod
    def knows(cls, raw: Any) -> bool:
        """Whether `raw` is of this kind; those before it in `KINDS` have said no."""
        raise NotImplementedError

    def spaces(self) -> tuple[Any, Any]:
        """The declared observation and action spaces."""
        return self.raw.observation_space, self.raw.action_space

    def reset_parameters(self) -> set[str] | None:
        """Which of `seed` and `options` the env's `reset` takes, among other names; None for both."""
        return _parameters(self.raw.reset)

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        """Starts an episode; the result goes through `read_reset`, after awaiting it for an async env."""
        keywords: dict[str, Any] = {"seed": seed, "options": options}
        if self._reset_takes is not None:
            keywords = {name: value for name, value in keywords.items() if name in self._reset_takes}
        elif options is None:
            del keywords["options"]
        return self.raw.reset(**keywords)

    def read_reset(self, result: Any) -> tuple[Any, dict[str, Any]]:
        """`(observation, info)` from what `reset` returned.

        Raises:
          SpecMismatch: it returned something else.
        """
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            return result
        raise SpecMismatch(f"reset(): expected (observation, info), found {show_value(result)}")

    def read_step(self, result: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """`(observation, reward, terminated, truncated, info)` from what `step` returned.

        Raises:
          SpecMismatch: it returned something else.
        """
        if isinstance(result, tuple) and len(result) == 5:
            return result
        old = isinstance(result, tuple) and len(result) == 4
        hint = "; this is the old gym API, wrap the env (shimmy.GymV21CompatibilityV0)" if old else ""
        raise SpecMismatch(
            f"step(): expected (observation, reward, terminated, truncated, info), found {show_value(result)}{hint}"
        )

    def get_attr(self, name: str) -> Any:
        """An attribute of the env."""
        return getattr(self.raw, name)

    def set_attr(self, name: str, value: Any) -> None:
        """Sets an attribute."""
        setattr(self.raw, name, value)

    def close(self) -> Any:
        """Closes the env if it can be closed; may be awaitable."""
        close = getattr(self.raw, "close", None)
        return close() if callable(close) else None


class VectorEnv(Env):
    """gymnasium's vector envs, many envs in one: refused."""

    @classmethod
    def knows(cls, raw: Any) -> bool:
        """See `Env.knows`."""
        return hasattr(raw, "single_observation_space")

    def spaces(self) -> tuple[Any, Any]:
        """See `Env.spaces`."""
        raise TypeError("the factory returned a vector environment; expected a single env, one per slot")


class MultiAgentEnv(Env):
    """PettingZoo's envs, with a dict by agent for everything: refused."""

    @classmethod
    def knows(cls, raw: Any) -> bool:
        """See `Env.knows`."""
        return hasattr(raw, "possible_agents") and callable(getattr(raw, "observation_space", None))  # a method of the agent

    def spaces(self) -> tuple[Any, Any]:
        """See `Env.spaces`."""
        raise TypeError(
            f"the factory returned {type(self.raw).__name__}, an env of several agents; expected a single env, one per slot"
        )


class DmEnv(Env):
    """dm_env's and dm_control's envs: specs for spaces, a TimeStep for everything that is returned."""

    @classmethod
    def knows(cls, raw: Any) -> bool:
        """See `Env.knows`."""
        return not hasattr(raw, "observation_space") and callable(getattr(raw, "observation_spec", None))

    def spaces(self) -> tuple[Any, Any]:
        """See `Env.spaces`."""
        return self.raw.observation_spec(), self.raw.action_spec()

    def reset_parameters(self) -> set[str] | None:
        """See `Env.reset_parameters`. `reset(**kwargs)` hands them on to one that takes none."""
        return _parameters(self.raw.reset) or set()

    def read_reset(self, result: Any) -> tuple[Any, dict[str, Any]]:
        """See `Env.read_reset`."""
        return result.observation, {}

    def read_step(self, result: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """See `Env.read_step`. An end with a discount of 0 is a termination."""
        ended = bool(result.last())
        terminated = ended and result.discount == 0.0
        return result.observation, result.reward, terminated, ended and not terminated, {}


class GymnasiumEnv(Env):
    """gymnasium's envs, whose attributes may lie below wrappers."""

    @classmethod
    def knows(cls, raw: Any) -> bool:
        """See `Env.knows`."""
        return PlainEnv.knows(raw) and callable(getattr(raw, "get_wrapper_attr", None))

    def get_attr(self, name: str) -> Any:
        """An attribute of the env, looking through wrappers."""
        return self.raw.get_wrapper_attr(name)

    def set_attr(self, name: str, value: Any) -> None:
        """Sets an attribute where it exists, else on the outermost env."""
        setter = getattr(self.raw, "set_wrapper_attr", None)  # from gymnasium 1.0 on
        if callable(setter):
            setter(name, value)
        else:
            setattr(self.raw, name, value)


class PlainEnv(Env):
    """Any object with declared spaces that returns what gymnasium's envs return."""

    @classmethod
    def knows(cls, raw: Any) -> bool:
        """See `Env.knows`."""
        return hasattr(raw, "observation_space") and hasattr(raw, "action_space")


# Asked in this order; the first that knows an env takes it.
KINDS: tuple[type[Env], ...] = (VectorEnv, MultiAgentEnv, DmEnv, GymnasiumEnv, PlainEnv)


def env_of(raw: Any) -> Env:
    """What a factory returned, as an `Env` of its kind.

    Raises:
      TypeError: it is no environment, or of a kind that is not supported.
    """
    if raw is None:
        raise TypeError("the factory returned None; expected an environment (is a `return` missing?)")
    if not callable(getattr(raw, "step", None)) or not callable(getattr(raw, "reset", None)):
        raise TypeError(f"the factory returned {show_value(raw)}; expected an object with reset and step")
    for kind in KINDS:
        if kind.knows(raw):
            return kind(raw)
    missing = "observation_space" if not hasattr(raw, "observation_space") else "action_space"
    raise TypeError(f"{type(raw).__name__} has no {missing}; expected a gymnasium or dm_env environment")


def _parameters(function: Callable[..., Any]) -> set[str] | None:
    """Names of the parameters of a function, or None if it takes any keyword or cannot tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}
