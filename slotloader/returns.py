"""The public return functions: one name each, whatever framework the arrays are of.

They look at the types of their arguments, as einops does, and hand over to the arithmetic of that framework; nothing is
imported that the caller has not imported. The functions themselves are in `learning.returns`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from slotloader.learning import returns

F = TypeVar("F", bound=Callable[..., Any])
_FRAMEWORKS = {"torch": "torch", "jax": "jax", "jaxlib": "jax", "numpy": "numpy"}


def _framework_of(value: Any) -> str | None:
    """Whose array it is, subclasses and tracers included; None for what is no array."""
    for base in type(value).__mro__:
        found = _FRAMEWORKS.get(base.__module__.partition(".")[0])
        if found is not None:
            return None if found == "numpy" and not getattr(value, "ndim", 0) else found  # numpy's scalars go with everything
    return None


def _dispatching(function: F) -> F:
    """`function` for numpy, and its namesakes for torch and jax."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        found: dict[str, str] = {}
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            framework = _framework_of(value)
            if framework is not None:
                found[name] = framework
        kinds = set(found.values())
        if len(kinds) > 1:
            first = next(iter(found.items()))
            odd = next(item for item in found.items() if item[1] != first[1])
            raise TypeError(
                f"{function.__name__}: {odd[0]}: expected an array of {first[1]} like {first[0]}, found one of {odd[1]}; "
                "bring all arguments to one framework"
            )
        if kinds <= {"numpy"}:
            return function(*args, **kwargs)
        module = importlib.import_module(f"slotloader.adapters.{kinds.pop()}_returns")
        return getattr(module, function.__name__)(*args, **kwargs)

    return cast(F, chosen)


gae = _dispatching(returns.gae)
lambda_returns = _dispatching(returns.lambda_returns)
n_step_returns = _dispatching(returns.n_step_returns)
vtrace = _dispatching(returns.vtrace)
