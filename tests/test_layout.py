"""Where everything lies in the shared region, who may attach to it, and what it costs to make."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers_values import NUMBERS, ROOT, leaf, same
from hypothesis import given, settings
from hypothesis import strategies as st

from slotloader.errors import SlotLoaderError
from slotloader.records import values
from slotloader.records.spaces import tree_of
from slotloader.records.specs import Kind, Leaf, Tree, build, leaves
from slotloader.records.specs import flatten as flattened
from slotloader.table import layout as layouts
from slotloader.table import slots
from slotloader.table.layout import ALIGNMENT, CONTROL, HEADER_BYTES, INFO_BYTES, MAX_RECEIVERS, Layout

array_leaves = st.builds(
    lambda dtype, shape: leaf(dtype, tuple(shape)), st.sampled_from(NUMBERS), st.lists(st.integers(0, 9), max_size=3)
)
bytes_leaves = st.builds(
    lambda capacity, kind: leaf("uint8", (capacity,), kind=kind), st.integers(1, 99), st.sampled_from([Kind.TEXT, Kind.PACKED])
)
shapes = st.recursive(
    array_leaves | bytes_leaves,
    lambda child: st.dictionaries(st.text('a"]. é', max_size=6), child, max_size=3) | st.lists(child, max_size=3).map(tuple),
    max_leaves=8,
)


def placed(tree: Tree, path: tuple[Any, ...]) -> Tree:
    """The tree with the paths that its leaves have where they are."""
    if isinstance(tree, Leaf):
        return replace(tree, path=path)
    if isinstance(tree, dict):
        return {key: placed(child, (*path, key)) for key, child in tree.items()}
    return tuple(placed(child, (*path, index)) for index, child in enumerate(tree))


plans = st.builds(
    lambda num_slots, num_workers, obs, action, info: (
        num_slots, num_workers, placed(obs, ("obs",)), placed(action, ("action",)), placed(info, ("info",)),
    ),
    st.integers(1, 70), st.integers(1, 5), shapes, shapes, st.dictionaries(st.sampled_from("ab"), shapes, max_size=2),
)  # fmt: skip


OWN_FIELDS = [field.name for field in Layout.plan(1, 1, {}, {}, {}).fields]  # control words and what else is in every region


@given(plans)
@settings(max_examples=150, deadline=None)
def test_fields_are_aligned_do_not_overlap_and_are_all_there(plan: Any) -> None:
    layout = Layout.plan(*plan)
    end = HEADER_BYTES
    for field in layout.fields:  # in order of their offsets
        assert field.offset % ALIGNMENT == 0 and field.offset >= end
        assert field.nbytes == np.empty(field.shape, field.dtype).nbytes
        end = field.offset + field.nbytes
    assert end <= layout.nbytes
    rows = {"slot": plan[0], "worker": plan[1], "receiver": MAX_RECEIVERS}
    fields = [(field.name, field.dtype, field.shape) for field in layout.fields]
    assert fields[: len(CONTROL)] == [(name, np.dtype(dtype), (rows[per],)) for name, dtype, per in CONTROL]
    parts = [(dtype, (plan[0], *shape)) for tree in plan[2:] for leaf in leaves(tree) for _, dtype, shape in values.parts(leaf)]
    assert sorted(map(str, parts)) == sorted(str(field[1:]) for field in fields[len(OWN_FIELDS) :])
    assert len({field.name for field in layout.fields}) == len(layout.fields), "two columns of one name"


def test_no_key_makes_two_columns_of_one_name() -> None:
    """`obs["a"]["b"]` might be a key "b" in a dict "a", or one key of that very text."""
    one, two = leaf(), leaf()
    tree = placed(
        {"a": {"b": one}, 'a"]["b': two, "x": leaf("u1", (4,), kind=Kind.TEXT), 'x"].length': one, 0: one, "0": two}, ROOT
    )
    names = [field.name for field in Layout.plan(1, 1, tree, {}, {}).fields]
    assert len(set(names)) == len(names) == len(OWN_FIELDS) + 7


@given(plans, plans)
@settings(max_examples=150, deadline=None)
def test_equal_plans_have_one_digest_and_different_plans_two(first: Any, second: Any) -> None:
    def meaning(plan: Any) -> Any:
        return plan[:2], [(leaf.path, leaf.shape, leaf.dtype, leaf.kind) for tree in plan[2:] for leaf in leaves(tree)]

    one, again, other = Layout.plan(*first), Layout.plan(*first), Layout.plan(*second)
    assert one.digest == again.digest and one.fields == again.fields
    assert (one.digest == other.digest) == (meaning(first) == meaning(second))


OBS = {"cam": Leaf(("obs", "cam"), (4, 4), np.dtype("u1")), "x": Leaf(("obs", "x"), (4,), np.dtype("f4"))}
BASE: dict[str, Any] = {
    "num_slots": 4, "num_workers": 2, "observation": OBS, "action": Leaf(("action",), (), np.dtype("i8")),
    "info": {"won": Leaf(("info", "won"), (), np.dtype("?"))},
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "more slots": {"num_slots": 5},
    "more workers": {"num_workers": 3},
    "another dtype of one size": {"observation": {**OBS, "x": replace(OBS["x"], dtype=np.dtype("i4"))}},
    "another shape of one size": {"observation": {**OBS, "x": replace(OBS["x"], shape=(2, 2))}},
    "another name": {"observation": {"cam": OBS["cam"], "y": replace(OBS["x"], path=("obs", "y"))}},
    "another order": {"observation": dict(reversed(OBS.items()))},
    "another action": {"action": Leaf(("action",), (), np.dtype("u8"))},
    "no info": {"info": {}},
}


@pytest.mark.parametrize("change", OTHERS)
def test_a_table_of_another_layout_is_refused(change: str) -> None:
    mine, theirs = Layout.plan(**BASE), Layout.plan(**{**BASE, **OTHERS[change]})
    assert mine.digest != theirs.digest
    memory = mmap.mmap(-1, max(mine.nbytes, theirs.nbytes))
    memory[: theirs.nbytes] = slots.create_private(theirs)[: theirs.nbytes]
    with pytest.raises(SlotLoaderError, match=r"expected header .* found .* both sides must match"):
        slots.Table(mine, memory)
    slots.Table(theirs, memory)


@pytest.mark.parametrize("kind", [Kind.TEXT, Kind.PACKED])
def test_bytes_of_another_kind_are_another_layout(kind: Kind) -> None:
    digests = {Layout.plan(1, 1, leaf("u1", (9,), kind=k), OBS["x"], {}).digest for k in (kind, Kind.ARRAY)}
    digests.add(Layout.plan(1, 1, leaf("u1", (9,), kind=Kind.TEXT, detail="other"), OBS["x"], {}).digest)
    assert len(digests) == 3


@pytest.mark.parametrize(("name", "value"), [("VERSION", layouts.VERSION + 1), ("MAGIC", b"SLOTLDR\1")])
def test_a_table_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    layout = Layout.plan(**BASE)
    memory = slots.create_private(layout)
    slots.Table(layout, memory)
    monkeypatch.setattr(slots, name, value)
    with pytest.raises(SlotLoaderError, match="expected header"):
        slots.Table(layout, memory)


def test_a_table_over_memory_that_is_no_table_is_refused() -> None:
    layout = Layout.plan(**BASE)
    with pytest.raises(SlotLoaderError, match="expected header"):
        slots.Table(layout, mmap.mmap(-1, layout.nbytes))


@given(plans, st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_what_is_written_to_one_column_changes_no_other(plan: Any, seed: int) -> None:
    """Every byte of the region is written through one column and one slot; all of them are still there at the end."""
    layout = Layout.plan(*plan)
    memory = slots.create_private(layout)
    table, rng, wrote = slots.Table(layout, memory), np.random.default_rng(seed), []
    for column in (*(getattr(table, name) for name in OWN_FIELDS), *table.observation, *table.info, *table.action):
        assert column.nbytes == 0 or column.ctypes.data % ALIGNMENT == 0
        data = rng.integers(0, 2, column.nbytes, np.uint8)  # 0 and 1 are bytes of every dtype, bool included
        column[...] = np.frombuffer(data, column.dtype).reshape(column.shape)
        wrote.append((column, data))
    assert all(column.tobytes() == data.tobytes() for column, data in wrote)
    slots.Table(layout, memory)  # the header too


def test_words_are_seen_alike_as_array_and_as_memoryview() -> None:
    table = slots.Table(Layout.plan(**BASE), slots.create_private(Layout.plan(**BASE)))
    for number, (name, _, _) in enumerate(CONTROL):
        getattr(table, f"{name}_words")[1] = number
        assert getattr(table, name)[:2].tolist() == [0, number]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def names() -> set[str]:
    return set(os.listdir("/dev/shm"))


linux = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")


@linux
def test_a_shared_region_has_no_name_and_gives_every_descriptor_back() -> None:
    before, named = descriptors(), names()
    memory, fd = slots.create_shared(Layout.plan(**BASE))
    assert names() <= named and descriptors() <= before + 2  # fd, and the one that mmap keeps for itself
    memory.close()
    os.close(fd)
    assert descriptors() == before


@linux
def test_two_sides_of_a_shared_region_see_each_other() -> None:
    layout, before = Layout.plan(**BASE), descriptors()
    memory, fd = slots.create_shared(layout)
    trainer, worker = slots.Table(layout, memory), slots.attach(fd)
    os.close(fd)
    write, read = values.writer(OBS, worker.observation, 3, ROOT), values.reader(OBS, trainer.observation, 3)
    record = {"x": np.arange(4, dtype=np.float32), "cam": np.full((4, 4), 7, np.uint8)}
    write(record)
    assert same(read(), record)
    del trainer, worker, memory, write, read
    assert descriptors() == before


@linux
@pytest.mark.parametrize("failing", ["ftruncate", "posix_fallocate"])
def test_a_creation_that_fails_half_way_leaves_no_descriptor_and_no_name(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    before, named = descriptors(), names()
    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="bytes of memory"):
        slots.create_shared(Layout.plan(**BASE))
    assert descriptors() == before and names() <= named


@linux
@pytest.mark.parametrize("free", [0, 1_000_000])
def test_too_little_memory_is_an_oserror_with_needed_and_free_bytes(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    layout, before = (
        Layout.plan(64, 1, tree_of(spaces.Box(0, 255, (1080, 1920, 3), np.uint8), ROOT), OBS["x"], {}),
        descriptors(),
    )
    monkeypatch.setattr(slots, "free_memory", lambda: free)
    with pytest.raises(OSError) as caught:
        slots.create_shared(layout)
    text = str(caught.value)
    assert f"expected {layout.nbytes:,} bytes" in text and f"found {free:,} bytes free" in text and "fewer slots" in text
    assert descriptors() == before


def test_more_than_this_machine_has_is_refused_before_a_page_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    free = slots.free_memory()
    if free is None:
        pytest.skip("this system does not say how much memory is free")
    monkeypatch.setattr(slots, "_anonymous_file", lambda: pytest.fail("it began to take memory that is not there"))
    huge = Layout.plan(2 * free // 10**9 + 1, 1, Leaf(ROOT, (10**9,), np.dtype("u1")), OBS["x"], {})
    with pytest.raises(OSError, match=re.escape(f"{huge.nbytes:,} bytes")):
        slots.create_shared(huge)


def create_private(layout: Layout) -> tuple[mmap.mmap, None]:
    return slots.create_private(layout), None


@pytest.mark.parametrize(("num_slots", "shape"), [(4096, (84, 84, 4)), (64, (1080, 1920, 3))])
@pytest.mark.parametrize("create", [slots.create_shared, create_private])
def test_large_tables_construct(num_slots: int, shape: tuple[int, ...], create: Callable[[Layout], Any]) -> None:
    layout = Layout.plan(num_slots, 8, tree_of(spaces.Box(0, 255, shape, np.uint8), ROOT), OBS["x"], {})
    memory, fd = create(layout)
    try:
        table = slots.Table(layout, memory)
        table.observation[0][-1] = 255
        assert table.observation[0].shape == (num_slots, *shape) and table.observation[0][-1, -1, -1, -1] == 255
        assert layout.nbytes < num_slots * (int(np.prod(shape)) + INFO_BYTES + 300) + 150_000, (
            "little beside the observations"
        )  # 132 kB of meters
    finally:
        if fd is not None:
            os.close(fd)


def test_leaves_of_a_layout_come_back_in_the_trees_own_shape() -> None:
    tree = placed({"b": (leaf(), leaf()), "a": leaf()}, ROOT)
    numbered = build(tree, iter(range(3)))
    assert numbered == {"b": (0, 1), "a": 2}
    assert list(flattened(tree, {"a": 2, "b": [0, 1]}, ROOT)) == [0, 1, 2]


# What a region says about itself.


@given(plan=plans)
@settings(deadline=None)
def test_a_region_describes_itself_so_that_whoever_attaches_needs_nothing_else(plan: Any) -> None:
    layout = Layout.plan(*plan)
    read = Layout.read(layout.described_at, layout.description)
    assert (read.num_slots, read.num_workers, read.fields, read.digest) == (
        layout.num_slots, layout.num_workers, layout.fields, layout.digest,
    )  # fmt: skip
    for mine, theirs in ((layout.observation, read.observation), (layout.action, read.action), (layout.info, read.info)):
        assert [leaf.signature() for leaf in leaves(mine)] == [leaf.signature() for leaf in leaves(theirs)]


@linux
def test_who_only_looks_can_change_nothing() -> None:
    layout = Layout.plan(**BASE)
    memory, fd = slots.create_shared(layout)
    table = slots.Table(layout, memory)
    table.reward[2] = 5.0
    looking = slots.attach(fd, writable=False)
    os.close(fd)
    assert looking.reward.tolist() == [0.0, 0.0, 5.0, 0.0] and looking.layout.num_workers == 2
    with pytest.raises(ValueError, match="read-only"):
        looking.reward[0] = 1.0
