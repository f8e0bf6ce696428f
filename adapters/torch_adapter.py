"""`to_torch`: batches as torch tensors on a CPU, a CUDA device, or any other accelerator that torch knows."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from slotloader.batching.receiver import Receiver
from slotloader.device.ops import Adopted, HostOps, Own, Stream, aligned_buffer, map_tree
from slotloader.device.policies import positional
from slotloader.device.preparation import FrameStack
from slotloader.device_batches import DeviceBatches
from slotloader.loader import SlotLoader
from slotloader.records.specs import Array

_DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def to_torch(
    loader: SlotLoader | Receiver,
    device: str | torch.device | None = None,
    *,
    buckets: Sequence[int] | None = None,
    in_flight: int = 2,
    fields: Sequence[str] | None = None,
    float64: str = "float32",
    dtype: torch.dtype | str | None = None,
    frame_stack: FrameStack | None = None,
    seed: int | None = None,
) -> DeviceBatches:
    """Batches as torch tensors.

        with to_torch(loader, device="cuda") as batches:
            for batch in batches:
                batch.send(policy(batch.obs))

    On CUDA each batch goes from pinned memory to the device in one asynchronous copy on a stream of its own; your work on
    the current stream is ordered after it, and `send` does not wait for it. For several GPUs make one adapter per
    receiver of `loader.split(n)`.

    On a CPU call `torch.set_num_threads(1)` first: torch's threads otherwise spin on the cores that the environments need.

    Args:
      loader: a loader, or one of the receivers of `loader.split(n)`.
      device: where tensors live; default the accelerator if there is one, else "cpu".
      buckets: batch sizes to pad to; default powers of two up to `max_get`; `()` for no padding.
      in_flight: most batches whose actions are on their way back at a time; 1 for no overlap.
      fields: what travels, of "obs", "reward", "step_type", "last_action" and "info"; default all.
      float64: "float32" halves doubles on the way, "keep" does not.
      dtype: for float leaves of the observation, on the device, e.g. `torch.bfloat16`.
      frame_stack: number of frames to stack on the device, or a dict from key to number; the stack is the first axis of a row.
      seed: of the randomness of policies that are not compiled; default the loader's.

    Returns:
      Batches to iterate, to `run` a policy on, and to close.
    """
    return DeviceBatches(
        loader,
        ops_for(device),
        buckets=buckets,
        in_flight=in_flight,
        fields=fields,
        float64=float64,
        dtype=dtype,
        frame_stack=frame_stack,
        seed=seed,
    )


def ops_for(device: str | torch.device | None) -> TorchOps:
    """The operations for a device.

    Raises:
      RuntimeError: torch has no such device here.
    """
    if device is None:
        device = torch.accelerator.current_accelerator() if _has_accelerator() else torch.device("cpu")
    found = torch.device(device if device is not None else "cpu")
    if found.type == "cuda":
        return CudaOps(found)
    torch.empty(0, device=found)  # says at once if there is none
    return TorchOps(found)


def _has_accelerator() -> bool:
    return hasattr(torch, "accelerator") and torch.accelerator.is_available()


def _torch_dtype(dtype: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype: expected a torch dtype or its name, found {dtype!r}")
    return found


class TorchOps(HostOps):
    """torch on a CPU, or on an accelerator whose copies are made at once.

    On a CPU tensors lie over the memory that a batch was gathered into; nobody writes it while a tensor is held.
    """

    xp: Any = torch

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_host = device.type == "cpu"

    def dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Any that torch has."""
        if dtype.name not in _DTYPES:
            raise ValueError(f"expected a dtype that torch has, found {dtype}")
        return dtype

    def h2d(self, source: Array, views: Sequence[Array]) -> list[Any]:
        """Tensors over the views, or copies on the device."""
        if self._on_host:
            return [torch.from_numpy(view) for view in views]
        return [torch.from_numpy(view).to(self.device) for view in views]

    def compute(self, function: Callable[..., Any], *args: Any) -> Any:
        """A call without gradients; not in inference mode, so that a learner can use what it keeps."""
        before = torch.is_grad_enabled()
        try:  # not `with torch.no_grad()`: Ctrl-C while that is being entered would leave gradients off for good
            torch._C._set_grad_enabled(False)
            return function(*args)
        finally:
            torch._C._set_grad_enabled(before)

    def d2h(self, array: Any) -> Any:
        """A host tensor."""
        if not isinstance(array, torch.Tensor):
            return np.asarray(array)
        array = array.detach()
        if array.dtype == torch.bfloat16:
            array = array.float()
        return array.resolve_conj().resolve_neg().cpu()

    def landed(self, landing: Any) -> Array:
        """Over the tensor's memory."""
        return landing.numpy() if isinstance(landing, torch.Tensor) else np.asarray(landing)

    def at_once(self, array: Any) -> Array | None:
        """Tensors of the CPU, but for those with a gradient, a pending sign or a dtype that numpy lacks."""
        if type(array) is torch.Tensor and self._on_host:
            with contextlib.suppress(RuntimeError, TypeError):  # one call: each costs microseconds when the cache is cold
                return array.numpy()
        return None

    def own(self, array: Any) -> Any:
        """A clone."""
        return array.clone() if isinstance(array, torch.Tensor) else array

    def table(self, row: Any, rows: int) -> Any:
        """A tensor."""
        start = torch.as_tensor(row, device=self.device)
        return start[None].repeat(rows, *[1] * start.ndim).contiguous()

    def put(self, table: Any, rows: Any, values: Any) -> Any:
        """In place."""
        values, signed = values.to(table.dtype), _SIGNED.get(table.dtype)
        if signed is None:
            return table.index_copy_(0, rows, values)
        table.view(signed).index_copy_(0, rows, values.view(signed))  # the same bits: torch cannot do it for these dtypes
        return table

    def cast(self, array: Any, dtype: Any) -> Any:
        """`Tensor.to`."""
        return array.to(_torch_dtype(dtype))

    def array(self, array: Array) -> Any:
        """A tensor, over the array on a CPU."""
        return torch.from_numpy(array).to(self.device)

    def adapt(self, array: Any) -> Any:
        """Detached; copied if it is no tensor of the device."""
        return (
            array.detach().to(self.device)
            if isinstance(array, torch.Tensor)
            else torch.tensor(np.asarray(array), device=self.device)
        )

    def compile(self, step: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
        """One `torch.compile` per bucket, so that no limit of recompilations is met; called once here, in this thread."""
        known = inspect.signature(torch.compile).parameters
        isolated: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in known else {}
        if not isolated:  # older versions count all specialisations of a function together
            torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 1024)
        compiled: Callable[..., Any] = torch.compile(step, dynamic=False, **{**isolated, **options})
        compiled(*arguments)
        return compiled

    def static_outputs(self, options: dict[str, Any]) -> bool:
        """With CUDA graphs."""
        mode, more = options.get("mode") or "", options.get("options") or {}
        graphs = mode == "reduce-overhead" or mode == "max-autotune" or options.get("backend") == "cudagraphs"
        return self.device.type == "cuda" and bool(graphs or more.get("triton.cudagraphs"))

    def adopt(self, policy: Any, params: Any) -> Adopted:
        """A module is moved to the device; with params it is called as a function of them."""
        if not isinstance(policy, nn.Module):
            return Adopted(policy, None if params is None else self.snapshot(params))
        policy.to(self.device)
        has_contract = positional(policy.forward)[0] == 4
        if params is None:
            own = Own(lambda: dict(policy.state_dict()), policy.load_state_dict)
            if has_contract:
                return Adopted(lambda params, inputs, state, key: policy(params, inputs, state, key), None, own)
            return Adopted(lambda obs: policy(obs), None, own)

        def call(params: Any, obs: Any) -> Any:
            return torch.func.functional_call(policy, params, (obs,))

        def call_contract(params: Any, inputs: Any, state: Any, key: Any) -> Any:
            return torch.func.functional_call(policy, params, (params, inputs, state, key))

        return Adopted(call_contract if has_contract else call, self.snapshot(params))

    def keys(self, seed: int, compiled: bool) -> Callable[[], Any]:
        """A generator on the device; None for compiled steps, since torch.compile cannot trace one."""
        if compiled:
            return lambda: None
        generator = torch.Generator(self.device).manual_seed(seed)
        return lambda: generator

    def snapshot(self, params: Any) -> Any:
        """Clones of tensors."""

        def copy(leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray):
                leaf = torch.from_numpy(leaf)
            return leaf.detach().to(self.device, copy=True) if isinstance(leaf, torch.Tensor) else leaf

        return map_tree(copy, dict(params) if hasattr(params, "_metadata") else params)


class CudaOps(TorchOps):
    """torch on a CUDA or ROCm device: pinned host memory, asynchronous copies on two streams, fences by events.

    COMPUTE is the stream that is current in the calling thread, so a user's own work is ordered like the policy's.
    """

    staged = True
    lazy = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.init()
        if device.index is None:
            self.device = torch.device(device.type, torch.cuda.current_device())
        self._streams = {stream: torch.cuda.Stream(self.device) for stream in (Stream.H2D, Stream.D2H)}

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        return self._streams[stream] if stream in self._streams else torch.cuda.current_stream(self.device)

    def host_buffer(self, nbytes: int) -> Array:
        """Pinned; the array keeps the tensor alive."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError:  # no memory may be locked
            return aligned_buffer(nbytes)

    def h2d(self, source: Array, views: Sequence[Array]) -> list[Any]:
        """One copy of all bytes into fresh memory; the tensors are views of it."""
        begin = source.ctypes.data
        with torch.cuda.stream(self._streams[Stream.H2D]):
            memory = torch.empty(source.size, dtype=torch.uint8, device=self.device)
            memory.copy_(torch.from_numpy(source), non_blocking=True)
        found = []
        for view in views:
            offset = view.ctypes.data - begin
            found.append(memory[offset : offset + view.nbytes].view(_DTYPES[view.dtype.name]).view(view.shape))
        return found

    def shared(self, arrays: Sequence[Any], stream: Stream) -> None:
        """`record_stream` of the one memory behind all arrays."""
        if arrays:
            arrays[0].record_stream(self._stream(stream))

    def d2h(self, array: Any) -> Any:
        """Into pinned memory, which torch's allocator keeps until the copy is done."""
        if not isinstance(array, torch.Tensor) or array.device.type == "cpu":
            return super().d2h(array)
        array = array.detach()
        with torch.cuda.stream(self._streams[Stream.D2H]):
            if array.dtype == torch.bfloat16:
                array = array.float()
            landing = torch.empty(array.shape, dtype=array.dtype, pin_memory=True)
            return landing.copy_(array, non_blocking=True)

    def record(self, stream: Stream) -> Any:
        """An event of the stream."""
        event = torch.cuda.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, stream: Stream, event: Any) -> None:
        """The stream waits, not the host."""
        self._stream(stream).wait_event(event)

    def host_wait(self, event: Any) -> None:
        """Without the GIL."""
        event.synchronize()

    def done(self, event: Any) -> bool:
        """`Event.query`."""
        return bool(event.query())
