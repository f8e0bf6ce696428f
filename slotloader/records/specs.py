"""Leaves and trees: what one environment exchanges per step, as pure data.

A *tree* is a `Leaf`, a dict of trees or a tuple of trees. Values are matched to it by key, never by position. A leaf
of kind ARRAY is an array of fixed shape; TEXT is UTF-8 bytes and PACKED is msgpack bytes, both in a fixed capacity
with a length beside them.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slotloader.errors import SpecMismatch

Array = npt.NDArray[Any]
Path = tuple[Any, ...]  # the side, then dict keys and tuple positions


class Kind(enum.Enum):
    """How the bytes of a leaf are to be read."""

    ARRAY = "array"
    TEXT = "text"
    PACKED = "packed"


@dataclass(frozen=True, eq=False)
class Leaf:
    """One array of a tree.

    Attributes:
      path: the side ("obs", "action", "info"), then keys, e.g. `("obs", "cam", 0)`.
      shape: per-slot shape; `(capacity,)` in bytes for TEXT and PACKED.
      dtype: native byte order; uint8 for TEXT and PACKED.
      low: smallest value, an array that broadcasts to `shape`, or None.
      high: largest value, likewise.
      pack: for PACKED, turns a value into what msgpack can write.
      unpack: for PACKED, the way back.
      detail: for PACKED, the declared space in words; leaves of different spaces must not share a column.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: Kind = Kind.ARRAY
    low: Array | None = None
    high: Array | None = None
    pack: Callable[[Any], Any] | None = None
    unpack: Callable[[Any], Any] | None = None
    detail: str = ""

    @property
    def capacity(self) -> int:
        """Bytes that a TEXT or PACKED leaf can hold."""
        return self.shape[0]

    def __str__(self) -> str:
        if self.kind is Kind.ARRAY:
            return f"{self.dtype} {self.shape}"
        detail = f" ({self.detail:.80})" if self.detail else ""
        return f"{self.kind.value} of at most {self.capacity} bytes{detail}"

    def signature(self) -> tuple[Any, ...]:
        """What two leaves must share to live in one column; bounds included."""
        bounds = tuple(None if bound is None else bound.tolist() for bound in (self.low, self.high))
        return (self.shape, self.dtype.str, self.kind.value, self.detail, bounds)


Tree = Leaf | dict[Any, "Tree"] | tuple["Tree", ...]


def leaves(tree: Tree) -> Iterator[Leaf]:
    """Yields the leaves of `tree` in the tree's own order."""
    if isinstance(tree, Leaf):
        yield tree
        return
    for child in tree.values() if isinstance(tree, dict) else tree:
        yield from leaves(child)


def build(tree: Tree, values: Iterator[Any]) -> Any:
    """Puts one value per leaf, in the order of `leaves`, into the shape of `tree`."""
    if isinstance(tree, Leaf):
        return next(values)
    if isinstance(tree, dict):
        return {key: build(child, values) for key, child in tree.items()}
    return tuple(build(child, values) for child in tree)


def flatten(tree: Tree, value: Any, path: Path) -> Iterator[Any]:
    """Yields the part of `value` for each leaf of `tree`, in the order of `leaves`.

    Raises:
      SpecMismatch: a key is missing or too many, or a container is of the wrong kind or length.
    """
    if isinstance(tree, Leaf):
        yield value
    elif isinstance(tree, dict):
        if not isinstance(value, Mapping):
            raise SpecMismatch(f"{show_path(path)}: expected a dict with keys {_show_keys(tree)}, found {show_value(value)}")
        if value.keys() != tree.keys():
            missing = [key for key in tree if key not in value]
            extra = [key for key in value if key not in tree]
            parts = [f"{word} {_show_keys(keys)}" for word, keys in (("missing", missing), ("extra", extra)) if keys]
            raise SpecMismatch(f"{show_path(path)}: expected keys {_show_keys(tree)}, found {' and '.join(parts)}")
        for key, child in tree.items():
            yield from flatten(child, value[key], (*path, key))
    else:
        if not isinstance(value, (tuple, list)) or len(value) != len(tree):
            raise SpecMismatch(f"{show_path(path)}: expected a tuple of {len(tree)}, found {show_value(value)}")
        for index, child in enumerate(tree):
            yield from flatten(child, value[index], (*path, index))


def differences(expected: Tree, found: Tree, path: Path) -> Iterator[str]:
    """Yields one line for each place where two trees differ, with both sides."""
    if isinstance(expected, Leaf) and isinstance(found, Leaf):
        if expected.signature() != found.signature():
            yield f"{show_path(path)}: {show_leaf(expected)} against {show_leaf(found)}"
        return
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        for key in expected:
            yield from differences(expected[key], found[key], (*path, key))
        return
    if isinstance(expected, tuple) and isinstance(found, tuple) and len(expected) == len(found):
        for index, pair in enumerate(zip(expected, found, strict=True)):
            yield from differences(*pair, (*path, index))
        return
    yield f"{show_path(path)}: {show_tree(expected)} against {show_tree(found)}"


def show_path(path: Path) -> str:
    """`("obs", "cam", 0)` as `obs["cam"][0]`, the way a user would index it."""
    return str(path[0]) + "".join(
        f"[{json.dumps(key, ensure_ascii=False) if isinstance(key, str) else repr(key)}]" for key in path[1:]
    )


def _show_keys(keys: Iterable[Any]) -> str:
    names = [f"{key!r:.36}" for key in keys]
    return f"[{', '.join(names[:6])}{f', ... {len(names) - 6} more' if len(names) > 6 else ''}]"


def show_leaf(leaf: Leaf) -> str:
    """A leaf with its bounds, on one line."""
    if leaf.low is None or leaf.high is None:
        return str(leaf)
    low, high = (np.unique(bound) for bound in (leaf.low, leaf.high))
    if low.size == 0 or high.size == 0:
        return str(leaf)
    return f"{leaf} in [{_range(low)}, {_range(high)}]"


def _range(values: Array) -> str:
    return str(values[0]) if values.size == 1 else f"{values[0]}..{values[-1]}"


def show_tree(tree: Tree) -> str:
    """A tree on one line, for error texts."""
    if isinstance(tree, Leaf):
        return show_leaf(tree)
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {show_tree(child)}" for key, child in tree.items()) + "}"
    return "(" + ", ".join(show_tree(child) for child in tree) + ")"


def show_value(value: Any) -> str:
    """What was found, in a few words: dtype and shape for arrays, type and a short repr otherwise."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    if isinstance(value, np.generic):
        return f"{value.dtype} scalar {value!s:.40}"
    try:
        text = repr(value)
    except Exception:  # a broken __repr__ must not hide the mismatch
        text = "?"
    return f"{type(value).__name__} {text:.80}"
