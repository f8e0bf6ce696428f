"""FAULTS "Leases and data" 8 to 12: what a consumer holds never changes, and what it may not touch it cannot touch."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import MARK, TESTS, Once, child_environment, drive, quiet, run_script
from toys import Counting, Endless, Rich, Scripted

from slotloader import ActionError, LeaseExpired, SlotLoader, SlotLoaderError

pytestmark = pytest.mark.usefixtures("clean")


def flat(value: Any) -> list[Any]:
    """Every leaf of a batch's tree, as lists."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in flat(value[key])]
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in flat(part)]
    return [value.tolist()]


def rich_actions(size: int) -> dict[str, Any]:
    return {"move": np.zeros((size, 2), np.float32), "key": np.zeros(size, np.int64)}


# 8


def test_a_kept_batch_is_the_same_after_100_further_steps(packed: dict[str, Any]) -> None:
    kept = []
    with SlotLoader(Rich, 4, info={"mask": (np.int16, (3,))}, timeout=None, **packed) as loader:
        for step in range(120):
            batch = loader.recv()
            if step % 10 == 3:
                parts = (batch.obs, batch.info, batch.last_action, batch.reward, batch.step_type, batch.env_indices)
                kept.append((parts, [flat(part) for part in parts]))
            batch.send(rich_actions(4))
    assert len(kept) == 12
    for parts, copies in kept:
        assert [flat(part) for part in parts] == copies
        assert parts[0]["text"].tolist() == copies[0][-1]


@pytest.mark.parametrize("width", [3, 20_000])
def test_a_kept_array_or_a_slice_of_it_is_never_written_again(how: dict[str, Any], width: int) -> None:
    """Large observations come from recycled buffers: whoever holds a view of one keeps it from being used again."""
    kept = []
    with SlotLoader(partial(Endless, width=width), 2, timeout=None, **how) as loader:
        for t in range(60):
            batch = loader.recv()
            one = [batch.obs, batch.obs[1], batch.obs.T, memoryview(batch.obs), batch.obs[:, -1:]][t % 5]
            kept.append((t, one))
            batch.send([0, 0])
            del batch, one
            if t % 7 == 0:
                del kept[::2]  # lets some buffers go, for the pool to use again
    for t, array in kept:
        assert set(np.unique(np.asarray(array))) <= {t, 10**9 + t}


def test_large_buffers_are_used_again_once_nobody_holds_them(how: dict[str, Any]) -> None:
    addresses = set()
    with SlotLoader(partial(Endless, width=20_000), 2, timeout=None, **how) as loader:
        for _ in range(50):
            batch = loader.recv()
            addresses.add(batch.obs.ctypes.data)
            batch.send([0, 0])
    assert len(addresses) <= 4


def test_arrays_first_read_after_the_answer_raise(how: dict[str, Any]) -> None:
    with SlotLoader(Counting, 2, min_get=2, **how) as loader:
        batch = loader.recv()
        batch.send([0, 0])
        for name in ("obs", "info", "last_action"):
            with pytest.raises(LeaseExpired, match=rf"batch\.{name} was first read after .* read batch\.{name} before"):
                getattr(batch, name)
        with pytest.raises(LeaseExpired, match="answered already"):
            batch.send([0, 0])
        batch = loader.recv()
        batch.release()
        with pytest.raises(LeaseExpired):
            batch.obs  # noqa: B018
        batch = loader.recv()
        loader.send([0], batch.env_indices[:1])
        with pytest.raises(LeaseExpired, match=r"loader\.send"):
            batch.send([0, 0])


# 9


def test_the_view_shows_the_table_until_the_answer_and_raises_after_it(how: dict[str, Any]) -> None:
    with SlotLoader(Counting, 3, min_get=3, **how) as loader:
        batch = loader.recv()
        with batch.view() as rows:
            assert rows.indices.tolist() == [0, 1, 2]
            assert rows.obs[rows.indices][:, 0].tolist() == [0, 1000, 2000]
            assert np.shares_memory(rows.obs, loader.table.observation[0])
            with pytest.raises(ValueError, match="read-only"):
                rows.obs[0] = 1
            batch.send([0] * 3)
            for name in ("obs", "indices"):
                with pytest.raises(LeaseExpired, match=r"use batch\.obs"):
                    getattr(rows, name)
        batch = loader.recv()
        with batch.view() as rows:
            pass
        with pytest.raises(LeaseExpired):
            rows.obs  # noqa: B018
        with batch.view() as rows:
            loader.send([0], [1])
            with pytest.raises(LeaseExpired):
                rows.obs  # noqa: B018


def test_debug_mode_hands_out_copies_that_are_poisoned_at_the_answer(how: dict[str, Any]) -> None:
    with SlotLoader(Counting, 2, min_get=2, debug=True, **how) as loader:
        batch = loader.recv()
        with batch.view() as rows:
            taken = rows.obs
            assert taken[:, 0].tolist() == [0, 1000]
            assert not np.shares_memory(taken, loader.table.observation[0])
            batch.send([0, 0])
            assert (taken.view(np.uint8) == 0xAA).all()


HELD = """
import gc, sys
import numpy as np
from slotloader import SlotLoader, LeaseExpired
from toys import Counting

loader = SlotLoader(Counting, 4, backend={backend!r}, debug={debug})
batch = loader.recv(min_get=4)
rows = batch.view()
held = rows.obs, batch.obs, memoryview(rows.obs), rows.obs[1:], np.from_dlpack(batch.obs)
{end}
total = sum(int(np.asarray(part).sum()) for part in held)
del loader, rows, batch
gc.collect()
total += sum(int(np.asarray(part).sum()) for part in held)
print("done", total != 0)
"""
ENDS = {
    "close": "loader.close()",
    "close with a second view and an unanswered batch": "with batch.view() as more:\n    also = more.obs\n    loader.close()",
    "del": "loader.close()\ndel rows\nrows = 1",
}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("backend", ["process", "thread", "inline"])
def test_closing_while_views_are_held_is_safe(backend: str, end: str, debug: bool, tmp_path: Path) -> None:
    if debug and end != "close":
        pytest.skip("the same path as without debug")
    ran = run_script(tmp_path, HELD.format(backend=backend, debug=debug, end=ENDS[end]))
    quiet(ran)
    assert ran.out == "done True\n"


def test_the_first_error_is_the_one_raised_when_a_block_ends_with_views_held(tmp_path: Path) -> None:
    code = HELD.format(backend="process", debug=False, end="with loader:\n    raise KeyError('the user own error')")
    ran = run_script(tmp_path, code)
    assert ran.code == 1
    assert ran.err.count("Traceback") == 1
    assert ran.err.rstrip().endswith("KeyError: 'the user own error'")
    assert not any(noise in ran.err for noise in ("Exception ignored", "BufferError", "leaked", "During handling"))


# 10

REFUSED = [
    (np.zeros((4, 1), np.int64), r"expected int64 \(4,\), found int64 \(4, 1\); drop the last axis"),
    (np.zeros(4), r"expected int64 .*found float64 \(4,\).*argmax"),
    (np.zeros(3, np.int64), r"expected int64 \(4,\), found int64 \(3,\); one action per record"),
    (np.zeros((4, 2), np.int64), r"expected int64 \(4,\), found int64 \(4, 2\)"),
    (np.int64(0), r"expected int64 \(4,\), found int64 \(\)"),
    (["a"] * 4, r"expected int64 \(4,\)"),
    (None, r"expected int64 \(4,\)"),
    (np.full(4, 2**63, np.uint64), "does not fit"),
    ([[1], [2, 3], [4], [5]], r"expected int64 \(4,\)"),
]


@pytest.mark.parametrize(("actions", "text"), REFUSED)
def test_actions_that_do_not_fit_are_refused_and_no_env_has_stepped(
    how: dict[str, Any], actions: Any, text: str, tmp_path: Path
) -> None:
    with SlotLoader(partial(Scripted, log=str(tmp_path)), 4, min_get=4, **how) as loader:
        batch = loader.recv()
        for refuse in (batch.send, lambda wrong: loader.send(wrong, batch.env_indices)):
            with pytest.raises(ActionError, match=text):
                refuse(actions)
        assert not batch.answered
        assert loader.poll() is None
        batch.send([1, 2, 3, 4])
        assert loader.recv().last_action.tolist() == [1, 2, 3, 4]
    for slot in range(4):
        steps = [line for line in (tmp_path / f"{slot}.log").read_text().splitlines() if line.startswith("step")]
        assert steps == [f"step {slot + 1}"]


def test_indices_that_are_unknown_repeated_or_not_leased_are_refused(how: dict[str, Any], tmp_path: Path) -> None:
    with SlotLoader(partial(Scripted, log=str(tmp_path)), 4, **how) as loader:
        batch = loader.recv(min_get=3, max_get=3)
        free = ({0, 1, 2, 3} - set(batch.env_indices.tolist())).pop()
        some = int(batch.env_indices[0])
        refused = [
            ([0, 0], [some, 4], "expected slots from 0 to 3, found .4."),
            ([0], [-1], "expected slots from 0 to 3, found .-1."),
            ([0, 0], [some, some], f"expected each slot once, found repeated .{some}."),
            ([0, 0], [some, free], f"found .{free}. not leased"),
            ([0], [0.0], "expected integers"),
            ([0], some, "expected integers"),
        ]
        for actions, indices, text in refused:
            with pytest.raises(ActionError, match=text):
                loader.send(actions, indices)
        assert not batch.answered
        loader.send([5, 6, 7], batch.env_indices[::-1])
        assert batch.answered
        with pytest.raises(ActionError, match="not leased"):
            loader.send([5], [some])
        batch = loader.recv(min_get=4)
        sent = dict(zip(batch.env_indices.tolist(), batch.last_action.tolist(), strict=True))
        assert sorted(sent.values()) == [0, 5, 6, 7]
        assert sent[some] == 7
        assert sent[free] == 0


@pytest.mark.parametrize("bounds", ["ignore", "clip", "error"])
def test_action_bounds(how: dict[str, Any], bounds: str) -> None:
    with SlotLoader(Counting, 2, action_bounds=bounds, min_get=2, **how) as loader:
        batch = loader.recv()
        if bounds == "error":
            with pytest.raises(ActionError, match=r"expected values in \[0, 999\], found 1000 in row 1"):
                batch.send([3, 1000])
            batch.send([3, 999])
        else:
            batch.send([3, 1000])
        assert loader.recv().obs[:, 2].tolist() == [3, 1000 if bounds == "ignore" else 999]


# 11


def torn(loader: SlotLoader, publishes: int) -> None:
    """Every element of a row must be the one counter of its publish, and the next publish counts one on."""
    at = np.full(loader.num_slots, -1, np.int64)
    done = 0
    actions = [np.zeros(size, np.int64) for size in range(loader.num_slots + 1)]
    while done < publishes:
        batch = loader.recv(timeout=0)
        obs, slots = batch.obs, batch.env_indices
        at[slots] += 1
        assert (obs == (slots * 10**9 + at[slots])[:, None]).all(), "a torn, mixed, lost or repeated row"
        done += slots.size
        batch.send(actions[slots.size])


@pytest.mark.parametrize(("width", "publishes"), [(10_584, 6_000), (64, 40_000)])
def test_no_row_is_ever_torn_or_mixed(width: int, publishes: int) -> None:
    with SlotLoader(partial(Endless, width=width), 4, envs_per_worker=2, preload=["toys"]) as loader:
        torn(loader, publishes)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_row_of_10_million_is_ever_torn_or_mixed() -> None:
    with SlotLoader(partial(Endless, width=64), 16, num_workers=2, preload=["toys"]) as loader:
        torn(loader, 10_000_000)


# 12


def test_loaders_in_one_process_never_see_each_others_data(how: dict[str, Any]) -> None:
    errors: list[BaseException] = []

    def consume(loader: SlotLoader, seed: int) -> None:
        try:
            drive(loader, Once(loader.num_slots), 800, np.random.default_rng(seed))
        except BaseException as error:
            errors.append(error)

    with SlotLoader(Counting, 3, **how) as one, SlotLoader(Counting, 5, backend="process") as two:
        threads = [threading.Thread(target=consume, args=(loader, seed)) for seed, loader in enumerate((one, two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        with SlotLoader(Counting, 2, **how) as three:
            drive(three, Once(2), 300, np.random.default_rng(2))
        drive(one, resumed(one), 300, np.random.default_rng(3))
        two.recv()


def resumed(loader: SlotLoader) -> Once:
    """A follower that takes up a fleet in mid-run, from the records that wait."""
    once = Once(loader.num_slots)
    batch = loader.recv(min_get=loader.num_slots)
    for row, slot in enumerate(batch.env_indices.tolist()):
        value, episode, _ = batch.obs[row].tolist()
        once.at[slot] = (episode, value - 1000 * slot, bool(batch.is_last[row]))
    batch.send(once.answer(batch.env_indices, np.random.default_rng(0)))
    return once


TWO = """
import sys
import numpy as np
from checks import Once, drive
from slotloader import SlotLoader
from toys import Counting

with SlotLoader(Counting, 4) as loader:
    print("up", flush=True)
    sys.stdin.readline()
    drive(loader, Once(4), 2000, np.random.default_rng(int(sys.argv[1])))
print("done")
"""


def test_two_processes_at_once_never_see_each_others_data(clean: None) -> None:
    import os

    command = [sys.executable, "-c", TWO]
    both = [
        subprocess.Popen(
            [*command, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(os.environ[MARK]),
            cwd=TESTS,
        )
        for seed in range(2)
    ]
    try:
        for process in both:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        for process in both:  # released together
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in both:
            out, err = process.communicate(timeout=60)
            assert (out, err, process.returncode) == ("done\n", "", 0)
    finally:
        for process in both:
            process.kill()
            process.wait()


def test_an_error_out_of_recv_leaves_answered_rows_to_the_batch_that_has_them_now() -> None:
    with SlotLoader(Counting, 4, backend="inline", timeout=None) as loader:
        first = loader.recv(min_get=4)
        loader.send(np.zeros(2, np.int64), [0, 1])
        second = loader.recv(min_get=2)
        assert second.env_indices.tolist() == [0, 1]
        with pytest.raises(SlotLoaderError, match="expected at least 3 slots"):
            loader.recv(min_get=3)
        assert first.open_slots().tolist() == [2, 3] and second.open_slots().tolist() == [0, 1]
        second.send(np.zeros(2, np.int64))
        first.release()
        assert loader.recv(min_get=4).env_indices.tolist() == [0, 1, 2, 3]
