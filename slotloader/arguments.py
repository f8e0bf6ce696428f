"""The check that most arguments need."""

from __future__ import annotations

from typing import Any, overload

import numpy as np


def is_integer(value: Any) -> bool:
    """Whether it is an integer, Python's or numpy's, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def require_seed(name: str, value: Any) -> int:
    """The seed as Python's integer; every generator takes numbers up to 2**62.

    Raises:
      ValueError: names the argument, what was expected and what was found.
    """
    if not is_integer(value) or not 0 <= value < 2**62:
        raise ValueError(f"{name}: expected a non-negative integer below 2**62, found {value!r}")
    return int(value)


@overload
def require_count(name: str, value: int, least: int = 1) -> int: ...
@overload
def require_count(name: str, value: int | None, least: int = 1, *, optional: bool) -> int | None: ...
def require_count(name: str, value: Any, least: int = 1, *, optional: bool = False) -> int | None:
    """The integer itself, as Python's.

    Args:
      name: of the argument, with its place if it has one.
      value: what was given.
      least: the smallest that is right.
      optional: whether None is right, too.

    Raises:
      ValueError: names the argument, what was expected and what was found.
    """
    if optional and value is None:
        return None
    if not is_integer(value) or value < least:
        expected = f"an integer of at least {least}{' or None' if optional else ''}"
        raise ValueError(f"{name}: expected {expected}, found {value!r}")
    return int(value)
