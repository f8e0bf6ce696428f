"""What staging asks of a device, and the host as the simplest one.

Work on a device goes to three streams. Within a stream it runs in order; between streams nothing is ordered but by
`record` and `wait`. The host sees a result only after `host_wait`. This is CUDA's model; a device that has less order
than this (the adversarial device of the tests) finds every fence that is missing, one that has more (the host, jax)
works as well.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from slotloader.records.specs import Array


class Stream(enum.Enum):
    """Where a piece of work runs."""

    H2D = "h2d"  # host to device copies of records
    COMPUTE = "compute"  # the policy
    D2H = "d2h"  # device to host copies of actions


class Own(NamedTuple):
    """The weights that a policy keeps itself.

    Attributes:
      read: returns them.
      load: puts new ones in their place.
    """

    read: Callable[[], Any]
    load: Callable[[Any], Any]


class Adopted(NamedTuple):
    """A policy taken apart.

    Attributes:
      function: the function that is called.
      params: its weights on the device, or None.
      own: the weights that it keeps itself, or None.
      params_of: turns what `Policy.update` is given into params, or None if it is given params.
    """

    function: Callable[..., Any]
    params: Any
    own: Own | None = None
    params_of: Callable[[Any], Any] | None = None


class DeviceOps(Protocol):
    """The operations of one device; an adapter for a framework implements just these.

    Attributes:
      staged: copies go through a ring of host buffers that are written again; False if arrays are taken over as they are.
      lazy: fields are brought over when they are first used, each by itself; False if all come in one copy.
      hidden: `compute` takes host arrays for a policy's inputs, and has read them once its results are there.
      traced: functions are compiled for each new shape, so sizes are padded to powers of two.
      xp: the namespace of array functions (`where`, `concatenate`, ...): numpy, torch or jax.numpy.
    """

    staged: bool
    lazy: bool
    hidden: bool
    traced: bool
    xp: Any

    def host_buffer(self, nbytes: int) -> Array:
        """uint8 (nbytes,) of host memory, 64-byte aligned, pinned where the device can copy from that faster."""

    def dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype in which the device takes values of `dtype`; raises ValueError for none."""

    def h2d(self, source: Array, views: Sequence[Array]) -> list[Any]:
        """Brings host arrays to the device, on stream H2D: fresh device arrays, one per view.

        Args:
          source: uint8, the memory that all views lie in; not staged, it is never written again.
          views: the arrays.
        """

    def shared(self, arrays: Sequence[Any], stream: Stream) -> None:
        """Says that `stream` uses arrays of `h2d` as well: their memory is free only after its work."""

    def compute(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function` on device arrays, on stream COMPUTE."""

    def d2h(self, array: Any) -> Any:
        """Begins to bring an array to the host, on stream D2H; the source must live until then."""

    def landed(self, landing: Any) -> Array:
        """What `d2h` began, as a host array, after `host_wait`."""

    def record(self, stream: Stream) -> Any:
        """An event: all work that `stream` has so far."""

    def wait(self, stream: Stream, event: Any) -> None:
        """Later work of `stream` begins after the event."""

    def host_wait(self, event: Any) -> None:
        """Blocks, without the GIL, until the event."""

    def done(self, event: Any) -> bool:
        """Whether the event has passed."""

    def at_once(self, array: Any) -> Array | None:
        """An array of the framework as a host array, if that needs neither a wait nor a copy."""

    def own(self, array: Any) -> Any:
        """A copy on stream COMPUTE."""

    def table(self, row: Any, rows: int) -> Any:
        """A device array `(rows, *row.shape)` filled with `row`, a host or device array."""

    def put(self, table: Any, rows: Any, values: Any) -> Any:
        """Stores `values` at `rows` of a table and returns the table, the same or a new one."""

    def cast(self, array: Any, dtype: Any) -> Any:
        """`array` with another dtype, by numpy name or as the framework says it."""

    def compile(self, step: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
        """Compiles `step` for arguments of these shapes and warms it up; runs on stream COMPUTE."""

    def array(self, array: Array) -> Any:
        """A small host array, never written again, as functions from `jit` take it best."""

    def adapt(self, array: Any) -> Any:
        """A device array of anything that the framework or numpy can read; a device array as it is."""

    def jit(self, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        """`function`, compiled at its first call for each shape where the framework is slow otherwise.

        Args:
          function: of device arrays.
          donate: which arguments it may write its results over.
        """

    def static_outputs(self, options: dict[str, Any]) -> bool:
        """Whether steps compiled with these options write their results to the same memory at each call (CUDA graphs)."""

    def adopt(self, policy: Any, params: Any) -> Adopted:
        """Takes a policy as users have it (a function, a module of the framework) apart into function and weights."""

    def keys(self, seed: int, compiled: bool) -> Callable[[], Any]:
        """Makes the source of randomness that steps are called with."""

    def key(self, key: Any) -> Any:
        """What a policy gets as `key`, out of what `keys` made; called inside the step."""

    def snapshot(self, params: Any) -> Any:
        """A copy of parameters that later changes of the original do not touch, on the device."""

    def tree_map(self, function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
        """Maps over the arrays of the framework's trees."""


def map_tree(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Maps over dicts, tuples, named tuples and lists; None stays None, anything else is a leaf.

    Raises:
      ValueError: trees of different structure.
    """
    for other in rest:
        if structure_of(tree) != structure_of(other):
            raise ValueError(f"expected {structure_of(tree)}, found {structure_of(other)}")
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: map_tree(function, child, *(other[key] for other in rest)) for key, child in tree.items()}
    if isinstance(tree, (tuple, list)):
        mapped = [map_tree(function, *children) for children in zip(tree, *rest, strict=True)]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else type(tree)(mapped)
    return function(tree, *rest)


def structure_of(tree: Any) -> str:
    """What the top of a tree is, in words; alike for trees that `map_tree` can go through together."""
    if isinstance(tree, dict):
        return f"a dict with keys {sorted(map(str, tree))}"
    if isinstance(tree, (tuple, list)):
        return f"{len(tree)} entries"
    return "None" if tree is None else "an array"


def kind_of(dtype: Any) -> str:
    """Of a dtype of any framework: "float", "int" (signed or not), "bool" or "complex"; anything else is its own kind."""
    name = str(dtype).removeprefix("torch.").removeprefix("bfloat").removeprefix("u")
    name = "float" if name.isdigit() else name
    return next((kind for kind in ("float", "int", "bool", "complex") if name.startswith(kind)), name)


def aligned_buffer(nbytes: int) -> Array:
    """uint8 (nbytes,), 64-byte aligned, of ordinary memory."""
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


class HostOps:
    """The host as a device: numpy arrays, taken as they are; everything is done when the call returns."""

    staged = False
    lazy = True
    hidden = False
    traced = False
    xp: Any = np

    def host_buffer(self, nbytes: int) -> Array:
        """Ordinary memory."""
        return aligned_buffer(nbytes)

    def dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Any."""
        return dtype

    def h2d(self, source: Array, views: Sequence[Array]) -> list[Any]:
        """The views themselves."""
        return list(views)

    def shared(self, arrays: Sequence[Any], stream: Stream) -> None:
        """Nothing to say."""

    def compute(self, function: Callable[..., Any], *args: Any) -> Any:
        """A call."""
        return function(*args)

    def d2h(self, array: Any) -> Any:
        """A numpy array."""
        return np.asarray(array)

    def landed(self, landing: Any) -> Array:
        """The array itself."""
        return np.asarray(landing)

    def record(self, stream: Stream) -> Any:
        """No event."""

    def wait(self, stream: Stream, event: Any) -> None:
        """Nothing to wait for."""

    def host_wait(self, event: Any) -> None:
        """Nothing to wait for."""

    def done(self, event: Any) -> bool:
        """Always."""
        return True

    def at_once(self, array: Any) -> Array | None:
        """Numpy arrays."""
        return array if type(array) is np.ndarray else None

    def own(self, array: Any) -> Any:
        """A copy."""
        return np.array(array)

    def table(self, row: Any, rows: int) -> Any:
        """A numpy array."""
        return np.repeat(np.asarray(row)[None], rows, axis=0)

    def put(self, table: Any, rows: Any, values: Any) -> Any:
        """In place."""
        table[rows] = values
        return table

    def cast(self, array: Any, dtype: Any) -> Any:
        """`astype`."""
        return np.asarray(array).astype(dtype)

    def compile(self, step: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
        """Nothing to compile; calls it once."""
        if options:
            raise TypeError(f"compile: numpy policies have no options, found {sorted(options)}")
        step(*arguments)
        return step

    def array(self, array: Array) -> Any:
        """The array itself."""
        return array

    def adapt(self, array: Any) -> Any:
        """`np.asarray`."""
        return np.asarray(array)

    def jit(self, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        """The function itself."""
        return function

    def static_outputs(self, options: dict[str, Any]) -> bool:
        """Never."""
        return False

    def adopt(self, policy: Any, params: Any) -> Adopted:
        """The policy itself, with a copy of its weights."""
        return Adopted(policy, None if params is None else self.snapshot(params))

    def keys(self, seed: int, compiled: bool) -> Callable[[], Any]:
        """A `numpy.random.Generator`."""
        generator = np.random.default_rng(seed)
        return lambda: generator

    def key(self, key: Any) -> Any:
        """The generator."""
        return key

    def snapshot(self, params: Any) -> Any:
        """A deep copy of arrays."""
        return map_tree(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, params)

    def tree_map(self, function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
        """`map_tree`."""
        return map_tree(function, tree, *rest)
