"""Values in and out of rows: what is checked, what is rounded, and how bytes are packed.

Writing follows one rule: nothing is altered silently. Shapes match exactly; floats may round to the declared width;
integers pass only if every value fits; anything else is a `SpecMismatch` that names leaf, expected and found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np

from slotloader.errors import SpecMismatch
from slotloader.records.specs import Array, Kind, Leaf, Path, Tree, build, flatten, leaves, show_path, show_value

_ARRAY_CODE = 1
_SCALAR_CODE = 2
FLOAT32_MAX = float(np.finfo(np.float32).max)


def pack(value: Any) -> bytes:
    """Turns `value` into msgpack bytes; numpy arrays and scalars keep dtype and shape.

    Raises:
      TypeError: something inside is of a type that msgpack does not know.
    """
    return bytes(msgpack.packb(value, default=_pack_default, use_bin_type=True))


def unpack(data: bytes) -> Any:
    """The way back from `pack`; sequences come back as tuples."""
    return msgpack.unpackb(data, ext_hook=_unpack_ext, use_list=False, strict_map_key=False, raw=False)


def _pack_default(value: Any) -> Any:
    if isinstance(value, np.generic):
        return msgpack.ExtType(_SCALAR_CODE, msgpack.packb((value.dtype.str, value.tobytes())))
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        return msgpack.ExtType(_ARRAY_CODE, msgpack.packb((value.dtype.str, value.shape, value.tobytes())))
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"cannot pack {show_value(value)}")


def _unpack_ext(code: int, data: bytes) -> Any:
    if code == _ARRAY_CODE:
        dtype, shape, raw = msgpack.unpackb(data)
        return np.frombuffer(raw, dtype).reshape(shape).copy()
    if code == _SCALAR_CODE:
        dtype, raw = msgpack.unpackb(data)
        return np.frombuffer(raw, dtype)[0]
    return msgpack.ExtType(code, data)


def fit(leaf: Leaf, value: Any) -> Array:
    """Turns `value` into an array of exactly `leaf.shape` and `leaf.dtype`, or says why it does not fit.

    Raises:
      SpecMismatch: wrong shape, wrong kind of number, or a number that the declared dtype cannot hold.
    """
    try:
        array = np.asarray(value)
    except Exception as error:  # a ragged list, a torch tensor on a device, any __array__ that raises
        raise SpecMismatch(f"{show_path(leaf.path)}: expected {leaf}, found {show_value(value)} ({error!s:.200})") from error
    if array.shape != leaf.shape or array.dtype.kind not in "biufc":
        raise _mismatch(leaf, array if array.dtype.kind in "biufc" else value)
    if array.dtype == leaf.dtype:
        return array
    source, target = array.dtype.kind, leaf.dtype.kind
    if source == "c" and target != "c":
        raise _mismatch(leaf, array)
    with np.errstate(over="ignore", invalid="ignore"):
        converted: Array = array.astype(leaf.dtype)
    if target in "fc" and source in "fc" and (target == "c" or source == "f"):
        if (np.isinf(converted) & np.isfinite(array)).any():
            raise _mismatch(leaf, array, f" with {array[np.isinf(converted) & np.isfinite(array)].flat[0]}, too large")
        return converted
    if source in "biu":
        if array.size and not _holds(leaf.dtype, int(array.min()), int(array.max())):
            wrong = converted.astype(object) != array.astype(object)  # Python integers do not wrap
            if np.any(wrong):
                raise _mismatch(leaf, array, f" with the value {array[wrong].flat[0]}, which does not fit")
        return converted
    raise _mismatch(leaf, array)


def _holds(dtype: np.dtype[Any], low: int, high: int) -> bool:
    """Whether `dtype` is sure to hold every integer from `low` to `high` exactly."""
    if dtype.kind == "b":
        return low >= 0 and high <= 1
    if dtype.kind in "iu":
        return low >= int(np.iinfo(dtype).min) and high <= int(np.iinfo(dtype).max)
    exact = 2 ** (int(np.finfo(dtype).nmant) + 1)
    return bool(-exact <= low and high <= exact)


def _mismatch(leaf: Leaf, value: Any, detail: str = "") -> SpecMismatch:
    return SpecMismatch(f"{show_path(leaf.path)}: expected {leaf}, found {show_value(value)}{detail}")


def fit_reward(reward: Any) -> float:
    """A float that float32 can hold; None (dm_env) is 0.

    Raises:
      SpecMismatch: no number, or one that is too large.
    """
    if reward is None:
        return 0.0
    number = np.asarray(reward)
    if number.shape != () or number.dtype.kind not in "biuf":
        remedy = "; use reward.item()" if number.size == 1 else ""
        raise SpecMismatch(f"reward: expected a number, found {show_value(reward)}{remedy}")
    value = float(number)
    if math.isfinite(value) and abs(value) > FLOAT32_MAX:
        raise SpecMismatch(f"reward: expected a number that float32 can hold, found {value}")
    return value


def require_in_bounds(leaf: Leaf, array: Array) -> None:
    """Refuses NaN and values outside the declared bounds (`check=True`)."""
    if array.dtype.kind in "fc" and np.isnan(array).any():
        raise SpecMismatch(f"{show_path(leaf.path)}: expected {leaf} without NaN, found NaN (check=True)")
    if leaf.low is not None and leaf.high is not None and ((array < leaf.low) | (array > leaf.high)).any():
        low, high = np.min(leaf.low), np.max(leaf.high)
        raise SpecMismatch(
            f"{show_path(leaf.path)}: expected values within the declared bounds [{low}, {high}], "
            f"found {array.min()} to {array.max()} (check=True)"
        )


def encode(leaf: Leaf, value: Any) -> bytes:
    """Bytes of a TEXT or PACKED value.

    Raises:
      SpecMismatch: not a text, not packable, or larger than the leaf's capacity; nothing is ever cut.
    """
    if leaf.kind is Kind.TEXT:
        if not isinstance(value, str):
            raise _mismatch(leaf, value)
        data = value.encode("utf-8", "surrogatepass")
    else:
        try:
            data = pack(leaf.pack(value) if leaf.pack else value)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise SpecMismatch(f"{show_path(leaf.path)}: expected {leaf}, found {show_value(value)}: {error}") from error
    if len(data) > leaf.capacity:
        key = ".".join(str(key) for key in leaf.path[1:]) or leaf.path[0]
        raise SpecMismatch(
            f"{show_path(leaf.path)}: expected {leaf}, found {len(data)} bytes; "
            f"raise its capacity with max_bytes={{{key!r}: {len(data)}}}"
        )
    return data


def decode(leaf: Leaf, data: bytes) -> Any:
    """The value of a TEXT or PACKED leaf from its bytes."""
    if leaf.kind is Kind.TEXT:
        return data.decode("utf-8", "surrogatepass")
    value = unpack(data)
    return leaf.unpack(value) if leaf.unpack else value


def parts(leaf: Leaf) -> tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]:
    """The arrays that hold a leaf: suffix, dtype and per-slot shape of each."""
    if leaf.kind is Kind.ARRAY:
        return (("", leaf.dtype, leaf.shape),)
    return (("", leaf.dtype, leaf.shape), (".length", np.dtype(np.uint32), ()))


def writer(tree: Tree, arrays: Sequence[Array], row: int, root: Path, check: bool = False) -> Callable[[Any], None]:
    """Makes the function that writes one value tree into row `row` of a tree's arrays.

    Args:
      tree: what values look like.
      arrays: the columns of the tree, one per part of each leaf, in order; each `(num_slots, ...)`.
      row: the row to write.
      root: path of the tree, for error texts.
      check: also refuse NaN and values out of bounds.

    Returns:
      A function of one value. It copies, allocates nothing for a value of the declared dtype, and raises
      `SpecMismatch`. A failed write may leave the row half written: publish only after it has returned.
    """
    columns = iter(arrays)
    writers = [_leaf_writer(leaf, [next(columns)[row, ...] for _ in parts(leaf)], check) for leaf in leaves(tree)]
    if isinstance(tree, Leaf):
        return writers[0]

    def write(value: Any) -> None:
        for write_leaf, part in zip(writers, flatten(tree, value, root), strict=True):
            write_leaf(part)

    return write


def _leaf_writer(leaf: Leaf, rows: list[Array], check: bool) -> Callable[[Any], None]:
    row, dtype, shape = rows[0], leaf.dtype, leaf.shape
    if leaf.kind is not Kind.ARRAY:
        length = rows[1]

        def write_bytes(value: Any) -> None:
            data = encode(leaf, value)
            row[: len(data)] = np.frombuffer(data, np.uint8)
            length[...] = len(data)

        return write_bytes

    def write(value: Any) -> None:
        if type(value) is not np.ndarray or value.dtype != dtype or value.shape != shape:
            value = fit(leaf, value)
        if check:
            require_in_bounds(leaf, value)
        row[...] = value

    return write


def reader(tree: Tree, arrays: Sequence[Array], row: int) -> Callable[[], Any]:
    """Makes the function that reads row `row` as one value tree, as the env would get it from gymnasium.

    Returns:
      A function that returns fresh values: numpy scalars for shape `()`, copies of arrays, str for TEXT.
    """
    columns = iter(arrays)
    readers = [_leaf_reader(leaf, [next(columns)[row, ...] for _ in parts(leaf)]) for leaf in leaves(tree)]
    if isinstance(tree, Leaf):
        return readers[0]
    return lambda: build(tree, (read() for read in readers))


def _leaf_reader(leaf: Leaf, rows: list[Array]) -> Callable[[], Any]:
    row = rows[0]
    if leaf.kind is not Kind.ARRAY:
        return lambda: decode(leaf, row[: int(rows[1][()])].tobytes())
    if leaf.shape == ():
        return lambda: row[()]
    return row.copy
