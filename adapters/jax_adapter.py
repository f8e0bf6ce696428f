"""`to_jax`: batches as jax arrays on one or several devices, with one executable per bucket."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from slotloader.batching.receiver import Receiver
from slotloader.device.ops import Adopted, HostOps, Stream, aligned_buffer
from slotloader.device.preparation import FrameStack
from slotloader.device_batches import DeviceBatches
from slotloader.loader import SlotLoader
from slotloader.records.specs import Array


def to_jax(
    loader: SlotLoader | Receiver,
    devices: Any = None,
    *,
    buckets: Sequence[int] | None = None,
    in_flight: int = 2,
    fields: Sequence[str] | None = None,
    float64: str = "float32",
    dtype: Any = None,
    frame_stack: FrameStack | None = None,
    seed: int | None = None,
    cache: str | Path | None = None,
) -> DeviceBatches:
    """Batches as jax arrays.

        with to_jax(loader) as batches:
            policy = batches.compile(apply, params=params)
            batches.run(policy, env_steps=100_000)

    Every array is a copy: none lies over a slot or over memory that is written again. Arrays are committed to their device:
    put the params of a jitted learner there as well, `jax.device_put(params, jax.devices()[0])`, or jax compiles it twice.

    Args:
      loader: a loader, or one of the receivers of `loader.split(n)`.
      devices: a jax device or several, over which the rows of each batch are divided; default the first device.
      buckets: batch sizes to pad to, which divide by the number of devices; default powers of two up to `max_get`.
      in_flight: most batches whose actions are on their way back at a time; 1 for no overlap.
      fields: what travels, of "obs", "reward", "step_type", "last_action" and "info"; default all.
      float64: "float32" halves doubles on the way; "keep" needs jax_enable_x64.
      dtype: for float leaves of the observation, on the device, e.g. `jnp.bfloat16`.
      frame_stack: number of frames to stack on the device, or a dict from key to number; the stack is the first axis of a row.
      seed: of the policies' randomness; default the loader's.
      cache: a folder for jax's persistent compilation cache; it holds for the whole process.

    Returns:
      Batches to iterate, to `run` a policy on, and to close.
    """
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    found = jax.devices()[:1] if devices is None else [devices] if isinstance(devices, jax.Device) else list(devices)
    if not found or not all(isinstance(device, jax.Device) for device in found):
        raise ValueError(f"devices: expected jax devices, e.g. jax.devices(), found {devices!r}")
    if isinstance(buckets, Sequence) and not buckets:
        raise ValueError("buckets: expected at least one size, since jax compiles for each, found ()")
    return DeviceBatches(
        loader,
        JaxOps(found),
        buckets=buckets,
        in_flight=in_flight,
        fields=fields,
        float64=float64,
        dtype=dtype,
        frame_stack=frame_stack,
        seed=seed,
        divisor=len(found),
    )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


def _take_over_on(device: jax.Device) -> Callable[[Array], Any]:
    """`jax.dlpack.from_dlpack`, or its inner half where this version of jax has it as we know it: 10 us instead of 59.

    The rest of it looks for devices and dtypes that cannot come here. The half is tried once, and left alone if it does
    anything unexpected.
    """
    try:
        from jax._src import lib

        inner = lib._jax.dlpack_managed_tensor_to_buffer  # type: ignore[attr-defined]
        probe = aligned_buffer(64).view(np.float32)
        probe[:] = np.arange(16)
        taken = inner(probe.__dlpack__(), device, None)
        same = taken.unsafe_buffer_pointer() == probe.ctypes.data and taken.dtype == probe.dtype
        if same and isinstance(taken, jax.Array) and (np.asarray(taken) == probe).all() and taken.devices() == {device}:
            return lambda array: inner(array.__dlpack__(), device, None)
    except Exception:  # another version
        pass
    return jax.dlpack.from_dlpack


class JaxOps(HostOps):
    """jax, which orders work by its arrays: an event is the arrays that it waits for.

    On one CPU device arrays lie over the buffers that batches are gathered into (`from_dlpack` keeps a reference as long as
    jax or its work needs the memory, and only then is a buffer used again). Elsewhere batches travel through an executable
    that copies, and the stage is written again once its results are there: what `device_put` does with numpy memory, and
    until when, depends on its alignment.
    """

    hidden = True
    traced = True
    xp: Any = jnp

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.devices = tuple(devices)
        self._rows: Any = SingleDeviceSharding(devices[0])  # no mesh for one device: it would cling to what users compute
        self._whole: Any = self._rows
        if len(devices) > 1:
            mesh = Mesh(np.array(devices), ("batch",))
            self._rows, self._whole = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())
        self._remote = any(device.platform != "cpu" for device in devices)
        self.staged = self.devices != tuple(jax.local_devices(backend="cpu")[:1])
        self._take_over = _take_over_on(self.devices[0])
        self._copies: dict[Any, Callable[..., Any]] = {}
        self._last: dict[Stream, Any] = {}

    def dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """What jax makes of it: without jax_enable_x64 at most 32 bits."""
        found = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
        if found != dtype and dtype.kind not in "iu":
            raise ValueError(f"expected a dtype that jax takes, found {dtype}, which needs jax_enable_x64")
        return found

    def _compiled(self, function: Callable[..., Any], examples: Sequence[Any]) -> Callable[..., Any]:
        shapes = [jax.ShapeDtypeStruct(view.shape, view.dtype, sharding=self._rows) for view in examples]
        return jax.jit(function, out_shardings=self._rows).lower(*shapes).compile()

    def h2d(self, source: Array, views: Sequence[Array]) -> list[Any]:
        """Arrays over the views on one CPU device, else copies by one executable per shape."""
        if not self.staged:
            return [self._take_over(view) for view in views]
        key = tuple((view.shape, view.dtype) for view in views)
        if key not in self._copies:
            self._copies[key] = self._compiled(lambda *arrays: tuple(jnp.copy(array) for array in arrays), views)
        found = list(self._copies[key](*views))
        self._last[Stream.H2D] = found
        return found

    def d2h(self, array: Any) -> Any:
        """Begins the copy where there is one to make."""
        if isinstance(array, jax.Array):
            if self._remote:
                array.copy_to_host_async()
            self._last.setdefault(Stream.D2H, []).append(array)
            return array
        return np.asarray(array)

    def landed(self, landing: Any) -> Array:
        """As numpy."""
        found = np.asarray(landing)
        return found if found.dtype.kind != "V" else found.astype(np.float32)  # V: bfloat16 and its like

    def record(self, stream: Stream) -> Any:
        """The arrays that were asked for last."""
        return self._last.pop(stream, None)

    def host_wait(self, event: Any) -> None:
        """`block_until_ready`."""
        if event is not None:
            jax.block_until_ready(event)

    def done(self, event: Any) -> bool:
        """`is_ready` of all."""
        return event is None or all(array.is_ready() for array in event)

    def at_once(self, array: Any) -> Array | None:
        """Arrays of the CPU that are there already."""
        if self.staged or not isinstance(array, jax.Array) or not array.is_ready():  # type: ignore[attr-defined]
            return None
        return self.landed(array)

    def own(self, array: Any) -> Any:
        """Jax arrays never change."""
        return array

    def table(self, row: Any, rows: int) -> Any:
        """On every device."""
        return jax.device_put(jnp.repeat(jnp.asarray(row)[None], rows, axis=0), self._whole)

    def put(self, table: Any, rows: Any, values: Any) -> Any:
        """A new table, in place where it is donated."""
        return table.at[rows].set(values)

    def cast(self, array: Any, dtype: Any) -> Any:
        """`astype`."""
        return array.astype(dtype)

    def compile(self, step: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
        """Ahead of time; the state tables are donated, so they change in place."""
        params, tables, arrays, key = arguments
        rows = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._rows) for array in arrays)
        jitted = jax.jit(step, donate_argnums=(1,))
        return jitted.lower(params, tables, rows, key).compile(compiler_options=options or None)

    def adapt(self, array: Any) -> Any:
        """Copies what is no jax array."""
        return array if isinstance(array, jax.Array) else np.array(array)

    def jit(self, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        """`jax.jit`."""
        return jax.jit(function, donate_argnums=donate)

    def adopt(self, policy: Any, params: Any) -> Adopted:
        """A callable tree of arrays (an equinox module) is called as a function of its arrays, so they can be swapped."""
        if params is not None:
            linen = hasattr(policy, "apply") and not inspect.isroutine(policy)  # a flax module, not a function
            return Adopted(policy.apply if linen else policy, self.snapshot(params))
        leaves, structure = jax.tree.flatten(policy)
        moving = [_is_array(leaf) for leaf in leaves]
        if not any(moving):
            return Adopted(policy, None)

        def call(params: Any, obs: Any) -> Any:
            arrays = iter(jax.tree.leaves(params))
            whole = [next(arrays) if moves else leaf for leaf, moves in zip(leaves, moving, strict=True)]
            return jax.tree.unflatten(structure, whole)(obs)

        def params_of(module: Any) -> Any:
            if str(jax.tree.structure(module)) != str(structure):
                raise ValueError(f"update: expected a module of the structure given at first, found {module!r:.200}")
            return [leaf for leaf in jax.tree.leaves(module) if _is_array(leaf)]

        return Adopted(call, self.snapshot(params_of(policy)), params_of=params_of)

    def keys(self, seed: int, compiled: bool) -> Callable[[], Any]:
        """Seed and number of the call; `key` makes a PRNG key of them inside the step."""
        words = np.array([seed & 0xFFFFFFFF, 0], np.uint32)

        def next_key() -> Array:
            words[1] += 1
            return words.copy()

        return next_key

    def key(self, key: Any) -> Any:
        """A new PRNG key for each call."""
        return jax.random.fold_in(jax.random.key(key[0]), key[1])

    def snapshot(self, params: Any) -> Any:
        """Copies on every device."""
        return jax.tree.map(lambda leaf: jax.device_put(jnp.array(leaf, copy=True), self._whole), params)

    def tree_map(self, function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
        """`jax.tree.map`."""
        return jax.tree.map(function, tree, *rest)
