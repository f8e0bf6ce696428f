"""The figures of a loader: distributions, shares, and the verdict at each of its thresholds."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from slotloader import SlotLoader
from slotloader.batching.meters import Dwell, Histogram, Meter, merged, meters_of
from slotloader.batching.stats import Stats, snapshot
from slotloader.batching.verdict import BUSY_HIGH, BUSY_LOW, STRAGGLER_RATIO, judge
from slotloader.records.specs import Array
from slotloader.table.layout import Layout
from slotloader.table.slots import SlotState, Table, create_private

SHAPES = {
    "log-normal": lambda rng, n: rng.lognormal(13, 2, n),
    "uniform": lambda rng, n: rng.uniform(1e3, 1e9, n),
    "constant": lambda rng, n: np.full(n, rng.integers(1, 10**12)),
    "two humps": lambda rng, n: np.where(rng.random(n) < 0.98, 2e5, 3e9),
    "few ns": lambda rng, n: rng.integers(1, 9, n),
}


def filled(times: Array, rng: np.random.Generator) -> Histogram:
    """Adds in pieces of every size, one by one too, and looks in between."""
    histogram, at = Histogram(), 0
    while at < times.size:
        size = int(rng.choice([1, 1, 7, 300, 5000, 9000]))
        if size == 1:
            histogram.add(times[at : at + 1])
        else:
            histogram.add(times[at : at + size])
        at += size
        if rng.random() < 0.1:
            histogram.summary()
    return histogram


@pytest.mark.parametrize("shape", SHAPES)
@given(count=st.sampled_from([1, 2, 50, 8192, 8193, 60_000]), seed=st.integers(0, 2**32))
@settings(max_examples=12, deadline=None)
def test_mean_and_maximum_are_exact_and_percentiles_are_within_twelve_percent(shape: str, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    times = SHAPES[shape](rng, count).astype(np.int64)
    found = filled(times, rng).summary()
    assert found.count == count
    assert found.mean == pytest.approx(times.mean() * 1e-9, rel=1e-9)
    assert found.max == pytest.approx(times.max() * 1e-9, rel=1e-12)
    for share, percentile in ((50, found.p50), (99, found.p99)):
        assert percentile == pytest.approx(np.percentile(times, share, method="inverted_cdf") * 1e-9, rel=0.12)
    assert found.p50 <= found.p99 <= found.max


def test_no_time_at_all_and_times_of_zero_are_figures_too() -> None:
    histogram = Histogram()
    assert histogram.summary() == Dwell(0, 0.0, 0.0, 0.0, 0.0)
    histogram.add(np.array([0, -5, 0]))  # a clock may stand still, and cores may disagree by some ns
    assert histogram.summary().count == 3 and 0 <= histogram.summary().max <= 2e-9


@pytest.mark.parametrize("time_ns", [1, 2, 2**32, 2**62, 2**63 - 1])
def test_any_time_has_a_bucket(time_ns: int) -> None:
    histogram = Histogram()
    histogram.add(np.array([time_ns]))
    edges, counts = histogram.buckets()
    assert (np.diff(edges) > 0).all() and counts.sum() == 1
    bucket = int(counts.argmax())
    assert edges[bucket] >= time_ns * 1e-9 * (1 - 1e-9) and edges[bucket - 1 if bucket else 0] <= time_ns * 1.1e-9


def test_what_several_threads_add_and_read_is_counted_once() -> None:
    histogram, before = Histogram(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [histogram.add(np.full(3, 1000)) for _ in range(500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            found = histogram.summary()
            assert found.count == 0 or round(found.mean * 1e9) == 1000, "count and sum belong together"
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert (histogram.summary().count, histogram.summary().max) == (6000, pytest.approx(1e-6))


def test_the_figures_of_two_receivers_are_those_of_all_their_times() -> None:
    rng = np.random.default_rng(5)
    first, second = rng.integers(1, 10**6, 20_000), rng.integers(10**6, 10**9, 10_000)
    both = merged([filled(first, rng), filled(second, rng)])
    assert both == filled(np.concatenate([first, second]), rng).summary()


# Shares and sums of a meter.


def test_fill_partial_and_busy_shares_follow_their_definitions() -> None:
    meter = Meter()
    ms = 1_000_000
    meter.batch_taken(10 * ms, size=8, max_get=8, first_records=8, published=np.full(8, 5 * ms))
    meter.batch_taken(15 * ms, size=2, max_get=8, first_records=1, published=np.full(2, 10 * ms))  # two at once are busy once
    meter.batch_closed(18 * ms, 10 * ms, answered=True)
    assert meter.busy_ns(20 * ms) == 10 * ms
    meter.batch_closed(30 * ms, 15 * ms, answered=False)
    assert meter.busy_ns(50 * ms) == 20 * ms
    meter.batch_taken(60 * ms, size=8, max_get=8, first_records=0, published=np.full(8, 55 * ms))
    meter.fold()
    assert meter.busy_ns(61 * ms) == 21 * ms
    assert (meter.batches, meter.records, meter.env_steps, meter.partial, meter.fill) == (3, 18, 9, 1, 2.25)
    answered = meter.batch_to_action.summary()
    assert answered.count == 1 and answered.max == pytest.approx(0.008)  # released batches are no answers
    assert meter.obs_to_batch.summary().count == 18


def test_batches_that_are_out_when_the_figures_start_anew_are_busy_from_then_on() -> None:
    meter = Meter()
    meter.adopt_open(2)
    assert meter.busy_ns(meter.start_ns + 100) == 100
    meter.batch_closed(meter.start_ns + 150, 0, answered=False)
    meter.batch_closed(meter.start_ns + 200, 0, answered=False)
    assert meter.busy_ns(meter.start_ns + 900) == 200


def test_what_a_meter_shows_in_the_region_is_what_another_process_reads() -> None:
    made = table()
    made.end_slot[0] = 4
    meter = Meter(made.meters[0], made.dwells[0])
    for size in (4, 2, 3):
        meter.batch_taken(meter.start_ns + size, size, 4, 1, np.full(size, meter.start_ns))
    meter.batch_closed(meter.start_ns + 10, meter.start_ns + 4, answered=True)
    meter.wait_ns, meter.episodes = 77, 5
    meter.fold()
    (read,) = meters_of(made)
    assert (read.batches, read.records, read.env_steps, read.fill, read.partial) == (3, 9, 6, 2.25, 2)
    assert (read.wait_ns, read.episodes, read.start_ns) == (77, 5, meter.start_ns)
    assert read.busy_ns(meter.start_ns + 30) == meter.busy_ns(meter.start_ns + 30) == 26
    assert read.obs_to_batch.summary() == meter.obs_to_batch.summary() and read.obs_to_batch.summary().count == 9
    assert read.batch_to_action.summary() == meter.batch_to_action.summary()
    Meter(made.meters[0], made.dwells[0])  # begins anew
    assert meters_of(made)[0].records == 0 and meters_of(made)[0].obs_to_batch.summary().count == 0


def test_batches_are_shown_within_a_tenth_of_a_second_while_they_come() -> None:
    made = table()
    meter = Meter(made.meters[0], made.dwells[0])
    meter.batch_taken(meter.start_ns + 1, 4, 4, 0, np.full(4, meter.start_ns))
    assert made.meters[0]["records"] == 0
    meter.batch_taken(meter.start_ns + 2 * 10**8, 4, 4, 0, np.full(4, meter.start_ns))
    assert made.meters[0]["records"] == 8


def table(**words: Any) -> Table:
    layout = Layout.plan(4, 1, {}, {}, {})
    made = Table(layout, create_private(layout))
    for name, values in words.items():
        getattr(made, name)[:] = values
    return made


def test_a_snapshot_counts_slots_and_times_per_slot() -> None:
    state = [SlotState.READY, SlotState.LEASED, SlotState.WRITING, SlotState.DEAD]
    made = table(state=state, resetting=[0, 0, 1, 1], steps=[10, 2, 5, 0], step_ns=[10**9] * 3 + [0])
    made.resets[:], made.reset_ns[:] = [1, 1, 0, 0], [10**9, 0, 0, 0]
    meters = [Meter(), Meter()]
    meters[0].batch_taken(meters[0].start_ns, 2, 2, 1, meters[0].start_ns - np.array([1000, 2000]))
    meters[1].batch_taken(meters[1].start_ns, 1, 2, 0, meters[1].start_ns - np.array([3000]))
    for meter in meters:
        meter.fold()
    meters[1].episodes = 3
    meters[0].wait_ns = meters[1].wait_ns = 10**18
    found = snapshot(made, meters, restarted=7)
    assert (found.ready, found.leased, found.stepping, found.resetting, found.starting, found.dead) == (1, 1, 1, 1, 0, 1)
    assert (found.restarted, found.batches, found.records, found.env_steps, found.episodes) == (7, 2, 3, 2, 3)
    assert (found.batch_fill_ratio, found.partial_batch_fraction) == (0.75, 0.5)
    assert found.obs_to_batch_dwell.count == 3 and found.obs_to_batch_dwell.max == pytest.approx(3e-6)
    np.testing.assert_allclose(found.step_seconds, [0.1, 0.5, 0.2, np.nan])
    np.testing.assert_allclose(found.reset_seconds, [1.0, 0.0, np.nan, np.nan])
    assert found.slowest_slot == 1
    assert found.receive_wait_fraction == 1.0 and 0 < found.consumer_busy_fraction <= 1.0, "a share is never above 1"
    assert found.env_steps_per_second == pytest.approx(found.env_steps / found.seconds)


class Env:
    observation_space = action_space = spaces.Discrete(9)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return 0, 1.0, action == 1, False, {}


def test_a_released_batch_leaves_the_shares_alone() -> None:
    with SlotLoader(Env, num_envs=4, backend="inline", timeout=None, max_get=4) as loader:
        for _ in range(3):
            loader.recv(min_get=4).release()
        loader.recv(min_get=4).send([0] * 4)
        loader.recv(min_get=4).release()
        batch = loader.recv(min_get=4)
        stats = loader.stats()
        batch.send([0] * 4)
    assert (stats.batches, stats.records, stats.env_steps) == (2, 8, 4)
    assert (stats.batch_fill_ratio, stats.partial_batch_fraction) == (1.0, 0.0)


def test_releasing_the_rest_of_a_batch_takes_back_only_the_rest() -> None:
    with SlotLoader(Env, num_envs=4, backend="inline", timeout=None) as loader:
        loader.recv(min_get=4).send([1] * 4)
        last = loader.recv(min_get=4)
        loader.send([0], [2])
        last.release()
        stats = loader.stats()
        assert [stats.records, stats.env_steps, stats.episodes, stats.batches] == [5, 1, 1, 2]
        again = loader.recv(min_get=3)
        assert loader.stats().episodes == 4
        again.send([0] * again.size)


# The verdict, each side of each threshold.

NONE = Dwell(0, 0.0, 0.0, 0.0, 0.0)
EVEN = np.full(4, 0.010)
LITTLE = 1e-9


def slow(ratio: float) -> Array:
    return np.array([0.010, 0.010, 0.010 * ratio, 0.010])


@pytest.mark.parametrize(
    ("busy", "per_record", "env_steps", "verdict"),
    [
        (0.99, EVEN, 7, "starting"),
        (0.99, EVEN, 8, "inference-bound"),
        (BUSY_HIGH, EVEN, 100, "inference-bound"),
        (BUSY_HIGH - LITTLE, EVEN, 100, "balanced"),
        (BUSY_LOW, EVEN, 100, "balanced"),
        (BUSY_LOW - LITTLE, EVEN, 100, "env-bound"),
        (0.0, EVEN, 100, "env-bound"),
        (0.0, slow(STRAGGLER_RATIO + LITTLE), 100, "straggler"),
        (0.0, slow(STRAGGLER_RATIO - LITTLE), 100, "env-bound"),
        (BUSY_LOW, slow(STRAGGLER_RATIO + LITTLE), 100, "straggler"),
        (BUSY_HIGH - LITTLE, slow(STRAGGLER_RATIO + LITTLE), 100, "straggler"),
        (BUSY_HIGH, slow(99), 100, "inference-bound"),
        (0.0, np.array([1.0]), 100, "env-bound"),  # one slot cannot lag behind itself
        (0.0, np.zeros(4), 100, "env-bound"),  # nor can one that has cost nothing yet
    ],
)
def test_the_verdict_turns_at_its_documented_thresholds(busy: float, per_record: Array, env_steps: int, verdict: str) -> None:
    found, reason = judge(busy, 0.2, per_record, env_steps, NONE, NONE)
    assert found == verdict
    assert "\n" not in reason and len(reason) < 400


def test_the_reason_shows_the_figures_that_it_stands_on() -> None:
    answer = Dwell(9, 0.0123, 0.0123, 0.0123, 0.0123)
    assert "slot 2 takes 50 ms per record" in judge(0.1, 0.7, slow(5), 100, NONE, NONE)[1]
    assert "median of 10 ms" in judge(0.1, 0.7, slow(5), 100, NONE, NONE)[1]
    assert "12.3 ms" in judge(0.9, 0.0, EVEN, 100, NONE, answer)[1]
    assert "holds a batch 10% of the time, recv sleeps 70%" in judge(0.1, 0.7, EVEN, 100, NONE, NONE)[1]
    assert "only 3 env steps from 4 slots" in judge(0.1, 0.7, EVEN, 3, NONE, NONE)[1]


# What a user does with a record of figures.


def some_stats() -> Stats:
    made = table(state=[3] * 4, steps=[50, 60, 0, 70], step_ns=[10**8, 10**8, 0, 10**8])
    meter = Meter()
    meter.batch_taken(meter.start_ns, 4, 8, 0, meter.start_ns - np.array([1000, 2000, 3000, 4000]))
    meter.fold()
    return snapshot(made, [meter], restarted=0)


def test_a_logger_gets_flat_numbers_and_nothing_else() -> None:
    stats = some_stats()
    flat = json.loads(json.dumps(stats.as_dict(), allow_nan=False))
    assert all(isinstance(value, (int, float)) for value in flat.values())
    assert flat["obs_to_batch_dwell/p99"] == stats.obs_to_batch_dwell.p99 and flat["batch_fill_ratio"] == 0.5
    fields = {field.name for field in dataclasses.fields(stats)} - {"step_seconds", "reset_seconds", "verdict", "reason"}
    assert {name.partition("/")[0] for name in flat} == fields
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.batches = 5  # type: ignore[misc]


def test_printing_the_figures_gives_a_table_that_ends_with_the_verdict() -> None:
    stats = some_stats()
    lines = str(stats).splitlines()
    assert lines[-1] == f"  {stats.verdict}: {stats.reason}."
    for name in ("env steps/s", "batch_fill_ratio", "obs_to_batch_dwell", "batch_to_action_dwell", "restarted"):
        assert sum(name in line for line in lines) == 1
    assert all(len(line) < 100 for line in lines[:-1]) and "nan" not in "\n".join(lines)
