"""Where each word and each array of the shared region lies: pure arithmetic, the same in every process.

The region is: header, control words (one array per word, one entry per slot, worker or receiver), then the request
side (what envs write) and the response side (what the trainer writes), one dense array `[num_slots, *shape]` per part
of each leaf. Every array starts on a 64-byte boundary, so two arrays never share a cache line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotloader.records.specs import Leaf, Tree, leaves, show_path
from slotloader.records.values import parts
from slotloader.table.description import pack_description, unpack_description

MAGIC = b"SLOTLDR\0"
VERSION = 1
HEADER_BYTES = 64
ALIGNMENT = 64
MAX_RECEIVERS = 16
INFO_BYTES = 2048

# Control words: name, dtype, rows ("slot", "worker" or "receiver"). W: who writes it, R: who reads it.
# "env" is the side that owns the slot's environment, a worker or a gateway. What publishes what: see docs/slot_states.md.
CONTROL: tuple[tuple[str, str, str], ...] = (
    ("state", "u1", "slot"),  # SlotState; W: env, trainer or fleet by the table of legal moves; R: all
    ("receiver", "u1", "slot"),  # which receiver to wake; W: trainer; R: env
    ("step_type", "u1", "slot"),  # StepType of the record; W: env before READY; R: trainer after READY
    ("resetting", "u1", "slot"),  # 1 while env.reset runs; W: env; R: trainer, for ages in errors and stats
    ("life", "u4", "slot"),  # lives begun, from 0; W: env before its FIRST record is READY; R: trainer
    ("owner", "u4", "slot"),  # worker index; W: fleet before the worker starts; R: all
    ("sequence", "u8", "slot"),  # records published in all lives; W: env before READY; R: trainer, `Batch.sequence`
    ("reward", "f4", "slot"),  # W: env before READY; R: trainer
    ("publish_ns", "i8", "slot"),  # CLOCK_MONOTONIC when env.step returned; W: env before READY; R: trainer
    # Start of the step or reset now running, W: env; of the wait for the worker while ACTED, W: trainer before ACTED; R: fleet
    ("begin_ns", "i8", "slot"),
    ("episode", "i8", "slot"),  # index within the life; W: env with FIRST; R: trainer
    ("episode_seed", "i8", "slot"),  # seed of the episode's reset, -1 for none; W: env with FIRST; R: trainer
    ("steps", "i8", "slot"),  # env.step calls; W: env; R: trainer, stats
    ("step_ns", "i8", "slot"),  # their total time; W: env; R: trainer, stats
    ("resets", "i8", "slot"),  # env.reset calls; W: env; R: trainer, stats
    ("reset_ns", "i8", "slot"),  # their total time; W: env; R: trainer, stats
    ("info_length", "u4", "slot"),  # bytes of the last record's info; W: env before READY; R: trainer
    ("command", "u1", "worker"),  # 1: messages wait in the command socket; W: trainer sets it, worker clears it first
    ("paused", "u4", "worker"),  # number of the pause: begin no step and no reset, 0: go on; W: trainer; R: worker
    ("resting", "u4", "worker"),  # the pause in which it has come to rest; W: worker; R: trainer, in `drain`
    ("stop", "u1", "worker"),  # 1: end in order; W: trainer, once; R: worker
    ("wanted", "u8", "receiver"),  # 0: awake; else nap << 32 | records that end the sleep; W: receiver; R: env
    ("first_slot", "u4", "receiver"),  # its share of the slots is [first_slot, end_slot); W: trainer; R: env
    ("end_slot", "u4", "receiver"),
)


# What `progress` holds of a slot's episode, up to and with its newest record. W: env before READY; R: trainer after READY.
# Rows of one array, so that the trainer keeps all of it with one gather; copied as opaque bytes.
PROGRESS = np.dtype(
    [
        ("episode_return", "f8"),  # sum of the rewards so far
        ("length", "i8"),  # env steps so far
        ("life", "i8"),  # as in `life`
        ("ended", "i8"),  # 1: the newest record is the episode's last, 0: the episode is open
    ]
)


# The figures of one receiver. W: trainer, under the lock of its leases; R: anybody, see `Meter.read`.
METER = np.dtype(
    [
        ("edition", "i8"),  # odd while the row is being written
        ("start_ns", "i8"),  # since when it counts
        ("shown_ns", "i8"),  # when the row was written
        *((name, "i8") for name in ("batches", "records", "env_steps", "episodes", "partial", "dropped_actions", "wait_ns")),
        ("fill", "f8"),  # sum over the batches of size / max_get
        ("open", "i8"),  # unanswered batches
        ("busy_ns", "i8"),  # time with at least one of them, until the last time there was none
        ("busy_since_ns", "i8"),  # since when there is one
    ]
)
DWELL_BUCKETS = 512  # eight per power of two ns
DWELL_WORDS = DWELL_BUCKETS + 2  # counts, then the sum and the longest; W, R as for METER


@dataclass(frozen=True)
class Field:
    """One array of the region: `shape` includes the leading row count."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The arithmetic of one region, which holds its own description: whoever attaches reads the layout there.

    Attributes:
      num_slots: rows of every slot array.
      num_workers: rows of every worker array.
      observation, action, info: the trees; `info` is a dict of declared columns, perhaps empty.
      fields: every array, in order.
      described_at: where the description begins, after the arrays.
      description: see `description.pack_description`.
      nbytes: size of the whole region.
      digest: 16 bytes over everything that both sides must agree on.
    """

    num_slots: int
    num_workers: int
    observation: Tree
    action: Tree
    info: Tree
    fields: tuple[Field, ...]
    described_at: int
    description: bytes
    nbytes: int
    digest: bytes

    @classmethod
    def plan(cls, num_slots: int, num_workers: int, observation: Tree, action: Tree, info: Tree) -> Layout:
        """Lays out a region for `num_slots` slots served by `num_workers` workers."""
        rows = {"slot": num_slots, "worker": num_workers, "receiver": MAX_RECEIVERS}
        wanted: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = [
            (name, np.dtype(dtype), (rows[per],)) for name, dtype, per in CONTROL
        ]
        wanted.append(("progress", PROGRESS, (num_slots,)))
        wanted.append(("meters", METER, (MAX_RECEIVERS,)))
        wanted.append(("dwells", np.dtype(np.int64), (MAX_RECEIVERS, 2, DWELL_WORDS)))  # obs to batch, batch to action
        wanted.append(("info_data", np.dtype(np.uint8), (num_slots, INFO_BYTES)))
        for tree in (observation, info, action):
            wanted.extend((name, dtype, (num_slots, *shape)) for name, dtype, shape in tree_parts(tree))
        fields, offset = [], HEADER_BYTES
        for name, dtype, shape in wanted:
            field = Field(name, dtype, shape, offset)
            fields.append(field)
            offset = -(-(offset + field.nbytes) // ALIGNMENT) * ALIGNMENT
        trees = {"observation": observation, "action": action, "info": info}
        described = [(field.name, field.dtype, field.shape, field.offset) for field in fields]
        counts = {"version": VERSION, "num_slots": num_slots, "num_workers": num_workers}
        data = pack_description(described, trees, **counts)
        digest = _digest(trees, fields, offset)
        return cls(num_slots, num_workers, observation, action, info, tuple(fields), offset, data, offset + len(data), digest)

    @classmethod
    def read(cls, described_at: int, description: bytes) -> Layout:
        """The layout that a region describes; see `pack_description`."""
        found = unpack_description(description)
        trees = {name: found[name] for name in ("observation", "action", "info")}
        fields = tuple(Field(*field) for field in found["fields"])
        end = described_at + len(description)
        digest = _digest(trees, fields, described_at)
        return cls(
            found["num_slots"], found["num_workers"], **trees, fields=fields, described_at=described_at,
            description=description, nbytes=end, digest=digest,
        )  # fmt: skip


def _digest(trees: dict[str, Tree], fields: Iterable[Field], end: int) -> bytes:
    kinds = [(leaf.kind.value, leaf.detail) for tree in trees.values() for leaf in leaves(tree)]
    text = repr((VERSION, [(f.name, f.dtype.descr, f.shape, f.offset) for f in fields], kinds, end))
    return hashlib.sha256(text.encode()).digest()[:16]


def tree_parts(tree: Tree) -> Iterator[tuple[str, np.dtype[Any], tuple[int, ...]]]:
    """Name, dtype and per-slot shape of each array that holds `tree`, e.g. `obs["cam"]`."""
    leaf: Leaf
    for leaf in leaves(tree):
        for suffix, dtype, shape in parts(leaf):
            yield show_path(leaf.path) + suffix, dtype, shape
