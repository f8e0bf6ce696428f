"""Random spaces and values for the tests, columns to write them into, and what "bit for bit" means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import strategies as st

from slotloader.errors import SpecMismatch
from slotloader.records import values
from slotloader.records.specs import Array, Leaf, Tree, leaves

FLOATS = ("float16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NUMBERS = (*FLOATS, *INTEGERS, "bool")
ROOT = ("obs",)


def full_box(dtype: str, shape: tuple[int, ...]) -> spaces.Box:
    """A Box that holds every value of its dtype."""
    if dtype == "bool":
        return spaces.Box(0, 1, shape, np.bool_)
    if dtype in FLOATS:
        return spaces.Box(-np.inf, np.inf, shape, np.dtype(dtype).type)
    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, shape, np.dtype(dtype).type)


shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
boxes = st.builds(full_box, st.sampled_from(NUMBERS), shapes)
keys = st.text('ab." é', max_size=4)  # dots, quotes and blanks occur in real keys
numeric = st.one_of(
    boxes,
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 9), st.integers(-5, 5)),
    st.builds(
        lambda nvec: spaces.MultiDiscrete(nvec, start=[3] * len(nvec)), st.lists(st.integers(1, 9), min_size=1, max_size=3)
    ),
    st.builds(spaces.MultiBinary, st.one_of(st.integers(1, 4), st.just((2, 3)))),
)
texts = st.builds(
    lambda length, charset: spaces.Text(length, charset=charset), st.integers(1, 9), st.sampled_from(["ab", "aé𝄞"])
)
packed = st.one_of(
    st.builds(lambda child, stack: spaces.Sequence(child, stack=stack), boxes, st.booleans()),
    st.builds(spaces.Sequence, st.builds(lambda a, b: spaces.Dict({"a": a, "b": b}), numeric, texts)),
    st.builds(lambda edge: spaces.Graph(spaces.Box(-1, 1, (2,)), edge), st.sampled_from([None, spaces.Discrete(4)])),
    st.builds(lambda parts: spaces.OneOf(parts), st.lists(numeric, min_size=1, max_size=3)),
)
any_space = st.recursive(
    st.one_of(numeric, numeric, texts, packed),
    lambda child: st.one_of(
        st.dictionaries(keys, child, min_size=1, max_size=3).map(lambda parts: spaces.Dict(parts)),
        st.lists(child, min_size=1, max_size=3).map(lambda parts: spaces.Tuple(parts)),
    ),
    max_leaves=6,
)


def samples(space: spaces.Space[Any], count: int, seed: int) -> list[Any]:
    """Values of `space` whose floats are random bits, signalling NaN and -0.0 among them."""
    space.seed(seed)
    rng = np.random.default_rng(seed)
    return [_scramble(space.sample(), rng) for _ in range(count)]


def _scramble(value: Any, rng: np.random.Generator) -> Any:
    if isinstance(value, dict):
        return {key: _scramble(value[key], rng) for key in reversed(value)}  # values are matched by key, not by position
    if type(value) is tuple:
        return tuple(_scramble(part, rng) for part in value)
    if isinstance(value, (np.ndarray, np.floating)) and value.dtype.kind == "f":
        return random_bits(value.dtype, np.shape(value), rng)
    return value


def random_bits(dtype: Any, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Floats of every kind: any bits, and often a NaN with a payload (quiet or signalling), an infinity or -0.0."""
    dtype = np.dtype(dtype)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    bits = rng.integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True)
    infinity = int(np.asarray(np.inf, dtype).view(unsigned))
    sign = 1 << (dtype.itemsize * 8 - 1)
    special = np.array([sign, infinity, infinity | 1, infinity | sign | 5, infinity | (infinity >> 1) | 3], unsigned)
    picked = np.where(rng.random(shape) < 0.5, special[rng.integers(0, special.size, shape)], bits)
    return np.asarray(picked, unsigned).view(dtype)


def same(a: Any, b: Any) -> bool:
    """Equal down to the bits, dtype and shape included; dicts by key, named tuples by field."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    if a is None or isinstance(a, str):
        return bool(a == b)
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def columns_for(tree: Tree, rows: int) -> list[Array]:
    """Columns of a table with garbage in them, as after many earlier records."""
    return [
        np.frombuffer(bytearray(b"\xab" * (rows * int(np.prod(shape)) * dtype.itemsize)), dtype).reshape(rows, *shape)
        for leaf in leaves(tree)
        for _, dtype, shape in values.parts(leaf)
    ]


def write_and_read(tree: Tree, records: Sequence[Any]) -> list[Any]:
    """Writes one record per row, all of them, then reads all rows."""
    columns = columns_for(tree, len(records))
    for row, record in enumerate(records):
        values.writer(tree, columns, row, ROOT)(record)
    return [values.reader(tree, columns, row)() for row in range(len(records))]


def leaf(dtype: Any = "float32", shape: tuple[int, ...] = (3,), **attributes: Any) -> Leaf:
    """A leaf named `obs["x"]`."""
    return Leaf(("obs", "x"), shape, np.dtype(dtype), **attributes)


def refused(function: Callable[..., Any], *args: Any) -> str:
    """The text of the SpecMismatch that the call must raise; never more than 1 kB."""
    with pytest.raises(SpecMismatch) as caught:
        function(*args)
    assert len(str(caught.value)) < 1024
    return str(caught.value)


def label(value: Any) -> str:
    """A short id for a parametrised test."""
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else " ".join(f"{value!s:.40}".split())
