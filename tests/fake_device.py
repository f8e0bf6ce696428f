"""An adversarial device: work runs as late, or as early, as the declared order allows, and memory is used again at once.

Each stream is "late" (work runs only when somebody waits for it), "eager" (at once, with what it must follow) or "rand".
Device memory comes from an allocator like CUDA's: a block that nobody holds is given to the next request of the stream that
it was allocated on, whatever other streams still do with it, unless `shared` has named them. Work in flight holds no block
alive, as a kernel has only an address. Fresh memory is poisoned.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slotloader.device.ops import HostOps, Stream, map_tree
from slotloader.records.specs import Array

POISON = 0xFF
PATIENCE = 2.0  # seconds that the completion thread waits for the main thread to run ahead


class Op:
    """A piece of work, the work that it must follow, and whether it has run."""

    def __init__(self, work: Callable[[], None], after: list[Op]) -> None:
        self.work, self.after, self.done = work, after, False


class Block:
    """Device memory, which outlives the arrays over it."""

    def __init__(self, nbytes: int, stream: Stream) -> None:
        self.memory, self.stream = np.full(max(nbytes, 1), POISON, np.uint8), stream
        self.address = self.memory.ctypes.data
        self.users: set[Stream] = set()
        self.blocked_by: list[Op] = []


class FakeOps(HostOps):
    """The device.

    Args:
      modes: mode of each stream.
      seed: of "rand".
      ahead: the completion thread lets nothing run before so many batches are in flight, told by `in_flight`.
    """

    staged = True
    lazy = False

    def __init__(self, modes: dict[Stream, str], seed: int = 0, ahead: int = 1) -> None:
        self.modes, self._random, self._ahead = modes, random.Random(seed), ahead
        self._lock = threading.RLock()
        self._tails: dict[Stream, Op | None] = dict.fromkeys(Stream)
        self._extra: dict[Stream, list[Op]] = {stream: [] for stream in Stream}
        self._pending: list[Op] = []
        self._blocks: list[Block] = []
        self._free: list[Block] = []
        self.in_flight: Callable[[], int] = lambda: ahead
        self.draining = False

    # Memory.

    def _allocate(self, nbytes: int, stream: Stream) -> Array:
        with self._lock:
            for block in self._free:
                if block.stream is stream and block.memory.size == max(nbytes, 1) and all(op.done for op in block.blocked_by):
                    self._free.remove(block)
                    break
            else:
                block = Block(nbytes, stream)
                self._blocks.append(block)
            block.users, block.blocked_by = {stream}, []
        array = np.frombuffer(memoryview(block.memory), np.uint8)[:]
        owner = array.base if isinstance(array.base, np.ndarray) else array
        weakref.finalize(owner, self._release, block)
        return array

    def _release(self, block: Block) -> None:
        with self._lock:
            block.blocked_by = [op for s in block.users - {block.stream} if (op := self._tails[s]) is not None]
            self._free.insert(0, block)

    def _block_of(self, array: Array) -> Block | None:
        address = array.__array_interface__["data"][0]
        return next((b for b in self._blocks if b.address <= address < b.address + b.memory.size), None)

    def _pointer(self, array: Any) -> Any:
        """The same memory without holding it, as a kernel has it."""
        if not isinstance(array, np.ndarray) or (block := self._block_of(array)) is None:
            return array
        offset = array.__array_interface__["data"][0] - block.address
        return np.ndarray(array.shape, array.dtype, block.memory, offset, array.strides)

    # Streams.

    def _submit(self, stream: Stream, work: Callable[[], None]) -> None:
        with self._lock:
            tail = self._tails[stream]
            op = Op(work, ([tail] if tail else []) + self._extra[stream])
            self._tails[stream], self._extra[stream] = op, []
            self._pending.append(op)
            if self.modes[stream] == "eager":
                self._run(op)
            elif self.modes[stream] == "rand":
                while self._pending and self._random.random() < 0.4:
                    self._run(self._random.choice(self._pending))

    def _run(self, op: Op) -> None:
        with self._lock:
            stack = [op]
            while stack:
                top = stack[-1]
                waiting = [before for before in top.after if not before.done]
                if top.done or waiting:
                    stack.extend(waiting)
                    if top.done:
                        stack.pop()
                    continue
                top.work()
                top.done = True
                top.after = []
            self._pending = [other for other in self._pending if not other.done]

    def record(self, stream: Stream) -> Any:
        return self._tails[stream]

    def wait(self, stream: Stream, event: Any) -> None:
        if event is not None:
            with self._lock:
                self._extra[stream].append(event)

    def host_wait(self, event: Any) -> None:
        if threading.current_thread().name == "slotloader-completion":
            pause = threading.Event()
            for _ in range(int(PATIENCE / 0.0005)):
                if self.draining or self.in_flight() >= self._ahead:
                    break
                pause.wait(0.0005)
        if event is not None:
            self._run(event)

    def done(self, event: Any) -> bool:
        return event is None or event.done

    # Work.

    def h2d(self, source: Array, views: Sequence[Array]) -> list[Any]:
        memory = self._allocate(source.size, Stream.H2D)
        target, begin = self._pointer(memory), source.ctypes.data
        self._submit(Stream.H2D, lambda: np.copyto(target, source))
        found = []
        for view in views:
            at = view.ctypes.data - begin
            found.append(memory[at : at + view.nbytes].view(view.dtype).reshape(view.shape))
        return found

    def shared(self, arrays: Sequence[Any], stream: Stream) -> None:
        block = self._block_of(arrays[0])
        if block is not None:
            block.users.add(stream)

    def compute(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs `function` later; a rehearsal on zeros tells the shapes of its results."""
        rehearsed = function(*(map_tree(_blank, arg) for arg in args))
        outputs: list[Array] = []

        def allocate(like: Any) -> Any:
            if not isinstance(like, (np.ndarray, np.generic)):
                return like
            array = self._allocate(like.nbytes, Stream.COMPUTE)[: like.nbytes].view(like.dtype).reshape(like.shape)
            outputs.append(self._pointer(array))
            return array

        results = map_tree(allocate, rehearsed)
        pointers = [map_tree(self._pointer, arg) for arg in args]

        def work() -> None:
            values: list[Any] = []
            map_tree(
                lambda leaf: values.append(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else None, function(*pointers)
            )
            for target, value in zip(outputs, values, strict=True):
                target[...] = value

        self._submit(Stream.COMPUTE, work)
        return results

    def at_once(self, array: Any) -> None:
        return None

    def own(self, array: Any) -> Any:
        return self.compute(np.array, array) if isinstance(array, np.ndarray) else array

    def d2h(self, array: Any) -> Any:
        landing = np.full(array.shape, POISON, np.uint8).astype(array.dtype)
        source = self._pointer(array)
        self._submit(Stream.D2H, lambda: np.copyto(landing, source))
        return landing

    def landed(self, landing: Any) -> Array:
        return np.array(landing)  # what the host sees now

    def put(self, table: Any, rows: Any, values: Any) -> Any:
        changed = np.array(table)
        changed[rows] = values
        return changed


def _blank(leaf: Any) -> Any:
    return np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else leaf
