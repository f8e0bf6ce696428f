"""The check that most arguments need."""

from __future__ import annotations

from typing import Any

import numpy as np


def require_count(name: str, value: Any, least: int = 1, optional: bool = False) -> None:
    """Raises ValueError, naming the argument, unless `value` is an integer (numpy's too) of at least `least`.

    Args:
      name: of the argument, with its place if it has one.
      value: what was given.
      least: the smallest that is right.
      optional: whether None is right, too.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        expected = f"an integer of at least {least}{' or None' if optional else ''}"
        raise ValueError(f"{name}: expected {expected}, found {value!r}")
