"""The slot table: states and their legal moves, and the shared region that holds them.

`docs/slot_states.md` has the table of who moves a slot where and which store publishes what.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import sys
from typing import Any

import numpy as np

from slotloader.errors import SlotLoaderError
from slotloader.records.specs import Array, Tree
from slotloader.table.layout import HEADER_BYTES, MAGIC, VERSION, Field, Layout, tree_parts


class SlotState(enum.IntEnum):
    """Who may touch a slot's rows now."""

    STARTING = 0  # the env is being built or reset for its first record; rows belong to the env's side
    ACTED = 1  # the action row is valid; rows belong to the env's side
    WRITING = 2  # the env is stepping or its record is being written; rows belong to the env's side
    READY = 3  # the record is complete; the trainer may lease it
    LEASED = 4  # rows belong to the trainer until it stores ACTED, or READY by release
    PARKED = 5  # the remote host is lost and may come back; nobody writes
    DEAD = 6  # no env will write here again


# Moves that each side may make; the fleet moves a slot only once its writer is known to be gone.
LEGAL_MOVES: dict[str, frozenset[tuple[SlotState, SlotState]]] = {
    "env": frozenset(
        {
            (SlotState.STARTING, SlotState.READY),
            (SlotState.ACTED, SlotState.WRITING),
            (SlotState.WRITING, SlotState.READY),
            (SlotState.WRITING, SlotState.ACTED),  # inline only: Ctrl-C in a step, which is then taken again
        }
    ),
    "trainer": frozenset(
        {
            (SlotState.READY, SlotState.LEASED),
            (SlotState.LEASED, SlotState.ACTED),
            (SlotState.LEASED, SlotState.READY),
        }
    ),
    "fleet": frozenset(
        (source, target)
        for source in (SlotState.STARTING, SlotState.ACTED, SlotState.WRITING, SlotState.PARKED)
        for target in (SlotState.STARTING, SlotState.PARKED, SlotState.DEAD)
        if source != target
    )
    | {
        (SlotState.LEASED, SlotState.DEAD),  # at its send, by the trainer's hand
        (SlotState.DEAD, SlotState.STARTING),  # a new env takes a slot that nobody has: `add_envs`
    },
}

_READY = int(SlotState.READY)
_FEW = 512  # up to so many slots bytes.count beats numpy: 0.2 us against 1.1 us at 64
# Magic, version, num_slots, nbytes, where the description begins, digest. The description goes to the end.
_HEADER = struct.Struct("<8sIIQQ16s")
_VIEW_FORMATS = {"u1": "B", "u4": "I", "u8": "Q", "i8": "q", "f4": "f", "f8": "d"}


class Table:
    """One shared region, seen through numpy arrays and memoryviews.

    Each control word `NAME` of `layout.CONTROL` is an attribute twice: `NAME`, a numpy array for work on many rows, and
    `NAME_words`, a memoryview for one row (three times faster for a single word). Of `progress` each field of its rows has
    such words, e.g. `progress_length_words`. Arrays come from `np.frombuffer`, which
    keeps the mapping alive: a view that a user holds can never point at unmapped memory.

    Attributes:
      layout: where everything lies.
      observation, info, action: columns of the trees, one array `(num_slots, ...)` per part of each leaf.
    """

    state: Array
    state_words: memoryview[int]
    receiver: Array
    step_type: Array
    resetting: Array
    life: Array
    owner: Array
    sequence: Array
    reward: Array
    publish_ns: Array
    begin_ns: Array
    episode: Array
    episode_seed: Array
    progress: Array
    steps: Array
    step_ns: Array
    resets: Array
    reset_ns: Array
    info_length: Array
    info_data: Array
    command: Array
    paused: Array
    resting: Array
    stop: Array
    wanted: Array
    first_slot: Array
    end_slot: Array
    meters: Array
    dwells: Array

    def __init__(self, layout: Layout, memory: mmap.mmap) -> None:
        self.layout = layout
        self.num_slots = layout.num_slots
        found = _HEADER.unpack_from(memory)
        expected = (MAGIC, VERSION, layout.num_slots, layout.nbytes, layout.described_at, layout.digest)
        if found != expected:
            raise SlotLoaderError(f"shared region: expected header {expected}, found {found}; both sides must match")
        arrays: dict[str, Array] = {}
        whole = memoryview(memory)
        for field in layout.fields:
            count = field.nbytes // field.dtype.itemsize
            array = np.frombuffer(memory, field.dtype, count, field.offset) if count else np.empty(0, field.dtype)
            arrays[field.name] = array.reshape(field.shape)
            if field.name.isidentifier():
                self._add_words(field, whole[field.offset : field.offset + field.nbytes])
        for name, array in arrays.items():
            if name.isidentifier():
                setattr(self, name, array)
        self.observation = self._columns(arrays, layout.observation)
        self.info = self._columns(arrays, layout.info)
        self.action = self._columns(arrays, layout.action)

    def __getattr__(self, name: str) -> Any:  # only for type checkers: the *_words views are set in __init__
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _add_words(self, field: Field, memory: memoryview[int]) -> None:
        code = field.dtype.str[1:]
        if code in _VIEW_FORMATS:
            setattr(self, f"{field.name}_words", memory.cast(_VIEW_FORMATS[code]))  # type: ignore[call-overload]
        for name, (dtype, offset, *_) in (field.dtype.fields or {}).items():  # of rows: every word of a row has 8 bytes
            words = memory.cast(_VIEW_FORMATS[dtype.str[1:]])  # type: ignore[call-overload]
            setattr(self, f"{field.name}_{name}_words", words[offset // 8 :: field.dtype.itemsize // 8])

    def count_ready(self, first: int, end: int) -> int:
        """How many of the slots `[first, end)` are READY; on the hot path of both sides."""
        if end - first <= _FEW:
            return self.state_words[first:end].tobytes().count(_READY)
        return int(np.count_nonzero(self.state[first:end] == _READY))

    @staticmethod
    def _columns(arrays: dict[str, Array], tree: Tree) -> list[Array]:
        return [arrays[name] for name, _, _ in tree_parts(tree)]


def create_private(layout: Layout) -> mmap.mmap:
    """Memory of this process only, for the thread and inline backends."""
    memory = mmap.mmap(-1, max(layout.nbytes, HEADER_BYTES))
    _write_header(memory, layout)
    return memory


def create_shared(layout: Layout) -> tuple[mmap.mmap, int]:
    """Creates the region that worker processes share; it has no name, so nothing can be left behind.

    Returns:
      The mapping and its file descriptor, owned by the caller.

    Raises:
      OSError: too little memory, with needed and free bytes. Every page is reserved here: a full machine shows now, not
        as a SIGBUS at some later write.
    """
    free = free_memory()
    if free is not None and layout.nbytes > free:
        raise _too_little(layout, free)
    fd = _anonymous_file()
    try:
        os.ftruncate(fd, layout.nbytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, layout.nbytes)
        _seal(fd)
        memory = mmap.mmap(fd, layout.nbytes)
    except OSError as error:
        os.close(fd)
        raise _too_little(layout, free) from error
    _write_header(memory, layout)
    return memory, fd


def attach(fd: int, writable: bool = True) -> Table:
    """Maps an existing region, whose layout it describes itself.

    Args:
      fd: its descriptor; may be closed afterwards.
      writable: False for who only looks.

    Raises:
      SlotLoaderError: it is no region, or of another version.
    """
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    memory = mmap.mmap(fd, 0, access=access)
    header = _HEADER.unpack_from(memory) if len(memory) >= HEADER_BYTES else (b"", 0, 0, 0, 0, b"")
    magic, version, _, nbytes, described_at, _ = header
    if (magic, version) != (MAGIC, VERSION) or nbytes != len(memory):
        raise SlotLoaderError(
            f"shared region: expected header {(MAGIC, VERSION)} and {len(memory)} bytes, found {header}; both sides must match"
        )
    return Table(Layout.read(described_at, memory[described_at:nbytes]), memory)


def _write_header(memory: mmap.mmap, layout: Layout) -> None:
    memory[layout.described_at : layout.nbytes] = layout.description
    header = (MAGIC, VERSION, layout.num_slots, layout.nbytes, layout.described_at, layout.digest)
    _HEADER.pack_into(memory, 0, *header)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("slotloader", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    import posix_ipc  # macOS: a named segment whose name is unlinked at once

    segment = posix_ipc.SharedMemory(None, posix_ipc.O_CREX)
    posix_ipc.unlink_shared_memory(segment.name)
    return int(segment.fd)


def _seal(fd: int) -> None:
    """Nobody who has the descriptor can shrink or grow the region: an env that did would end the trainer with SIGBUS."""
    if hasattr(os, "memfd_create"):
        import fcntl

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def free_memory() -> int | None:
    """Bytes that this process could still take: of the machine, or of its cgroup if that is less. None if unknown."""
    if not sys.platform.startswith("linux"):
        return None
    free = None
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            room = int(limit.read()) - int(current.read())  # "max" raises: no limit
        return room if free is None else min(free, room)
    except (OSError, ValueError):
        return free


def _too_little(layout: Layout, free: int | None) -> OSError:
    import errno

    rows = layout.num_slots
    return OSError(
        errno.ENOMEM,
        f"slot table: expected {layout.nbytes:,} bytes of memory for {rows} slots of {layout.nbytes // rows:,} bytes, "
        f"found {'an unknown amount' if free is None else f'{free:,} bytes'} free; use fewer slots or smaller observations",
    )
