"""From declared spaces to trees of leaves: gymnasium spaces and dm_env specs, told apart by class name.

The core never imports gymnasium or dm_env; a space is recognised by the names in its class hierarchy, so subclasses
and both generations of the package work.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from slotloader.records.specs import Array, Kind, Leaf, Path, Tree, show_path

DEFAULT_PACKED_BYTES = 16384

Rule = Callable[[Any, Path, Mapping[str, int]], Tree]


def tree_of(space: Any, path: Path, max_bytes: Mapping[str, int] | None = None) -> Tree:
    """Translates a declared space.

    Args:
      space: a gymnasium space, a dm_env spec, or a dict, list or tuple of such.
      path: where this space hangs: the side ("obs", "action"), then keys.
      max_bytes: capacity in bytes of Text, Sequence, Graph and OneOf leaves by their key (`"html"`) or dotted path
        (`"page.html"`). Without it Text holds `max_length` characters and the others 16 KiB.

    Returns:
      Tree whose leaves carry shapes, dtypes and bounds.

    Raises:
      TypeError: the space is of a kind that has no fixed size.
    """
    sizes = {} if max_bytes is None else max_bytes
    if isinstance(space, Leaf):
        return space
    for cls in type(space).__mro__:
        rule = _RULES.get(cls.__name__)
        if rule is not None and cls.__module__.split(".")[0] in ("gymnasium", "gym", "dm_env"):
            return rule(space, path, sizes)
    if isinstance(space, Mapping):
        return {key: tree_of(child, (*path, key), sizes) for key, child in space.items()}
    if isinstance(space, (list, tuple)):
        return tuple(tree_of(child, (*path, index), sizes) for index, child in enumerate(space))
    raise TypeError(
        f"{show_path(path)}: expected a gymnasium space ({', '.join(list(_RULES)[:9])}) or a dm_env spec, "
        f"found {type(space).__module__}.{type(space).__name__}"
    )


def column_of(name: str, declared: Any, max_bytes: Mapping[str, int] | None = None) -> Tree:
    """Translates one entry of `info={...}`: a dtype, a `(dtype, shape)` pair, or a space."""
    if isinstance(declared, tuple) and len(declared) == 2 and isinstance(declared[1], (tuple, list)):
        return _numeric_column(name, declared[0], tuple(declared[1]))
    if not isinstance(declared, (np.dtype, type, str)):  # a numpy scalar type also has a shape and a dtype
        with contextlib.suppress(TypeError):
            return tree_of(declared, ("info", name), max_bytes)
    return _numeric_column(name, declared, ())


def _numeric_column(name: str, dtype: Any, shape: tuple[int, ...]) -> Leaf:
    try:
        native = _native(dtype)
        if dtype is not None and native.kind in "biufc" and native.subdtype is None:
            return Leaf(("info", name), shape, native)
    except TypeError:
        pass
    raise TypeError(f"info[{name!r}]: expected a numeric dtype, a (dtype, shape) pair or a space, found {dtype!r}")


def _native(dtype: Any) -> np.dtype[Any]:
    native: np.dtype[Any] = np.dtype(dtype).newbyteorder("=")
    return native


def _uniform(bound: Any, dtype: np.dtype[Any]) -> Array:
    """Keeps one number where a bound is the same everywhere, so that a pixel space costs no megabytes."""
    array = np.asarray(bound, dtype)
    return array.reshape(-1)[:1].reshape(()) if array.size and (array == array.flat[0]).all() else array


def _box(space: Any, path: Path, sizes: Mapping[str, int]) -> Tree:
    dtype = _native(space.dtype)
    return Leaf(path, tuple(space.shape), dtype, low=_uniform(space.low, dtype), high=_uniform(space.high, dtype))


def _discrete(space: Any, path: Path, sizes: Mapping[str, int]) -> Tree:
    dtype = _native(space.dtype)
    start = int(getattr(space, "start", 0))
    return Leaf(path, (), dtype, low=np.asarray(start, dtype), high=np.asarray(start + int(space.n) - 1, dtype))


def _multi_discrete(space: Any, path: Path, sizes: Mapping[str, int]) -> Tree:
    dtype = _native(space.dtype)
    start = np.asarray(getattr(space, "start", np.zeros_like(space.nvec)), dtype)
    high = (start + space.nvec - 1).astype(dtype)
    return Leaf(path, tuple(space.shape), dtype, low=_uniform(start, dtype), high=_uniform(high, dtype))


def _multi_binary(space: Any, path: Path, sizes: Mapping[str, int]) -> Tree:
    dtype = _native(space.dtype)
    return Leaf(path, tuple(space.shape), dtype, low=np.zeros((), dtype), high=np.ones((), dtype))


def _dict(space: Any, path: Path, sizes: Mapping[str, int]) -> Tree:
    return {key: tree_of(child, (*path, key), sizes) for key, child in space.spaces.items()}


def _tuple(space: Any, path: Path, sizes: Mapping[str, int]) -> Tree:
    return tuple(tree_of(child, (*path, index), sizes) for index, child in enumerate(space.spaces))


def _capacity(path: Path, sizes: Mapping[str, int], default: int) -> int:
    dotted = ".".join(str(key) for key in path[1:])
    return int(sizes.get(dotted, sizes.get(str(path[-1]), default)))


def _text(space: Any, path: Path, sizes: Mapping[str, int]) -> Tree:
    # UTF-8 takes at most four bytes a character, one if the declared alphabet is ASCII.
    width = 1 if all(character.isascii() for character in space.character_set) else 4
    return _bytes_leaf(path, _capacity(path, sizes, int(space.max_length) * width), Kind.TEXT)


def _bytes_leaf(path: Path, capacity: int, kind: Kind, **codec: Any) -> Leaf:
    if capacity < 1:
        raise ValueError(f"max_bytes for {show_path(path)}: expected at least 1, found {capacity}")
    return Leaf(path, (capacity,), np.dtype(np.uint8), kind, **codec)


def _packed(space: Any, path: Path, sizes: Mapping[str, int]) -> Tree:
    capacity = _capacity(path, sizes, DEFAULT_PACKED_BYTES)
    return _bytes_leaf(path, capacity, Kind.PACKED, detail=repr(space))


def _graph(space: Any, path: Path, sizes: Mapping[str, int]) -> Tree:
    capacity = _capacity(path, sizes, DEFAULT_PACKED_BYTES)
    return _bytes_leaf(path, capacity, Kind.PACKED, detail=repr(space), pack=_pack_graph, unpack=_unpack_graph)


class GraphInstance(NamedTuple):
    """A Graph value where gymnasium is not loaded; the same fields as gymnasium's."""

    nodes: Array
    edges: Array | None
    edge_links: Array | None


def _pack_graph(value: Any) -> Any:
    return {name: getattr(value, name) for name in ("nodes", "edges", "edge_links")}


def _unpack_graph(value: Any) -> Any:
    gymnasium = sys.modules.get("gymnasium")
    return (GraphInstance if gymnasium is None else gymnasium.spaces.GraphInstance)(**value)


def _dm_array(spec: Any, path: Path, sizes: Mapping[str, int]) -> Tree:
    dtype = _native(spec.dtype)
    if dtype.kind not in "biufc":
        raise TypeError(f"{show_path(path)}: expected a numeric dm_env spec, found dtype {spec.dtype}")
    low, high = getattr(spec, "minimum", None), getattr(spec, "maximum", None)
    if low is None or high is None:
        return Leaf(path, tuple(spec.shape), dtype)
    return Leaf(path, tuple(spec.shape), dtype, low=_uniform(low, dtype), high=_uniform(high, dtype))


def _dm_string(spec: Any, path: Path, sizes: Mapping[str, int]) -> Tree:
    if spec.shape != ():
        raise TypeError(f"{show_path(path)}: expected a StringArray of shape (), found {spec.shape}")
    return _bytes_leaf(path, _capacity(path, sizes, DEFAULT_PACKED_BYTES), Kind.TEXT)


_RULES: dict[str, Rule] = {
    "Box": _box,
    "Discrete": _discrete,
    "MultiDiscrete": _multi_discrete,
    "MultiBinary": _multi_binary,
    "Dict": _dict,
    "Tuple": _tuple,
    "Text": _text,
    "Sequence": _packed,
    "Graph": _graph,
    "OneOf": _packed,
    "StringArray": _dm_string,
    "Array": _dm_array,
}
