"""Health figures of a loader: what is counted, how it is kept cheap, and the verdict.

Per batch only a few numbers are stored; they are folded into histograms when a buffer is full or someone looks.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

import numpy as np

from slotloader.records.specs import Array
from slotloader.table.slots import SlotState, Table

_BUFFER = 8192
_SUB = 8  # buckets per power of two: a percentile is exact to 12 %
_BUCKETS = 64 * _SUB

# Thresholds of the verdict (docs/metrics.md): shares of the measured time.
BUSY_HIGH = 0.80  # the consumer holds an unanswered batch for this share or more: inference-bound
BUSY_LOW = 0.50  # for less than this: env-bound
STRAGGLER_RATIO = 3.0  # the slowest slot against the median slot
STRAGGLER_FLOOR = 0.001  # seconds per record below which no slot is called slow


@dataclass(frozen=True)
class Dwell:
    """A distribution of times, in seconds."""

    count: int
    mean: float
    p50: float
    p99: float
    max: float


@dataclass(frozen=True)
class Stats:
    """What `loader.stats()` returns. Times are in seconds, rates per second, shares between 0 and 1.

    Attributes:
      seconds: time measured, since construction or `reset_stats`.
      batches: batches handed out.
      records: records in them.
      env_steps: records that are not FIRST.
      env_steps_per_second: their rate.
      episodes: episodes completed.
      batch_fill_ratio: mean of batch size over `max_get`.
      partial_batch_fraction: share of batches smaller than `max_get`.
      obs_to_batch_dwell: from a record's publish to its batch.
      batch_to_action_dwell: from a batch to its `send`, once per batch.
      consumer_busy_fraction: share of time with at least one unanswered batch.
      receive_wait_fraction: share of time that `recv` slept.
      dropped_actions: actions for envs that had ended meanwhile.
      ready, leased, stepping, resetting, starting, dead: slots in each state now.
      restarted: lives begun beyond the first.
      step_seconds, reset_seconds: mean time of `env.step` and `env.reset` per slot, float64 (num_slots,); NaN before
        the first.
      slowest_slot: the slot with the longest mean time per record, resets included.
      verdict: "env-bound", "inference-bound", "balanced" or "straggler"; "starting" before there is enough to say.
      reason: the verdict in one sentence.
    """

    seconds: float
    batches: int
    records: int
    env_steps: int
    env_steps_per_second: float
    episodes: int
    batch_fill_ratio: float
    partial_batch_fraction: float
    obs_to_batch_dwell: Dwell
    batch_to_action_dwell: Dwell
    consumer_busy_fraction: float
    receive_wait_fraction: float
    dropped_actions: int
    ready: int
    leased: int
    stepping: int
    resetting: int
    starting: int
    dead: int
    restarted: int
    step_seconds: Array
    reset_seconds: Array
    slowest_slot: int
    verdict: str
    reason: str

    def __str__(self) -> str:
        return table_text(self)

    def as_dict(self) -> dict[str, float]:
        """Flat numbers for a logger: dwells as `obs_to_batch_dwell/p99`, no arrays, no texts."""
        flat: dict[str, float] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Dwell):
                flat.update({f"{field.name}/{name}": number for name, number in dataclasses.asdict(value).items()})
            elif isinstance(value, (int, float)):
                flat[field.name] = value
        return flat


class Histogram:
    """Counts of times in ns in buckets of equal ratio (as HdrHistogram), folded from a buffer.

    Any thread may add and read.
    """

    def __init__(self) -> None:
        self._buffer = np.empty(_BUFFER, np.int64)
        self._used = 0
        self._counts = np.zeros(_BUCKETS, np.int64)
        self._total = 0
        self._max = 0
        self._lock = threading.Lock()

    def add(self, times: Array) -> None:
        """Adds int64 ns."""
        count = times.size
        with self._lock:
            if self._used + count > _BUFFER:
                self._fold()
                if count > _BUFFER:
                    self._count(times)
                    return
            self._buffer[self._used : self._used + count] = times
            self._used += count

    def add_one(self, time_ns: int) -> None:
        """Adds a single time."""
        with self._lock:
            if self._used == _BUFFER:
                self._fold()
            self._buffer[self._used] = time_ns
            self._used += 1

    def fold(self) -> None:
        """Moves the buffer into the counts."""
        with self._lock:
            self._fold()

    def _fold(self) -> None:
        self._count(self._buffer[: self._used])
        self._used = 0

    def _count(self, times: Array) -> None:
        if times.size == 0:
            return
        times = np.maximum(times, 1)
        self._counts += np.bincount((np.log2(times) * _SUB).astype(np.int64), minlength=_BUCKETS)
        self._total += int(times.sum())
        self._max = max(self._max, int(times.max()))

    def summary(self) -> Dwell:
        """Mean, percentiles and maximum in seconds."""
        self.fold()
        with self._lock:
            count = int(self._counts.sum())
            if count == 0:
                return Dwell(0, 0.0, 0.0, 0.0, 0.0)
            ranks = np.searchsorted(np.cumsum(self._counts), [np.ceil(count * 0.5), np.ceil(count * 0.99)])
            p50, p99 = (min(2.0 ** ((rank + 0.5) / _SUB), self._max) * 1e-9 for rank in ranks.tolist())
            return Dwell(count, self._total / count * 1e-9, p50, p99, self._max * 1e-9)

    def buckets(self) -> tuple[Array, Array]:
        """Upper edges in seconds (float64) and counts (int64), for plots."""
        self.fold()
        return 2.0 ** (np.arange(1, _BUCKETS + 1) / _SUB) * 1e-9, self._counts.copy()


class Meter:
    """Keeps the figures of one receiver. The receiver's lock covers every method but `snapshot`."""

    def __init__(self) -> None:
        self.obs_to_batch = Histogram()
        self.batch_to_action = Histogram()
        self.start_ns = monotonic_ns()
        self.batches = self.records = self.env_steps = self.episodes = 0
        self.partial = self.dropped_actions = 0
        self.fill = 0.0
        self.wait_ns = 0
        self._open = 0
        self._busy_ns = 0
        self._busy_since = 0

    def batch_taken(self, now: int, size: int, max_get: int, first_records: int, dwell: Array) -> None:
        """A batch was handed out at `now`; `dwell` is int64 ns (size,)."""
        self.batches += 1
        self.records += size
        self.env_steps += size - first_records
        self.fill += size / max_get
        if size < max_get:
            self.partial += 1
        if self._open == 0:
            self._busy_since = now
        self._open += 1
        self.obs_to_batch.add(dwell)

    def batch_closed(self, now: int, taken_ns: int, answered: bool) -> None:
        """A batch that was taken at `taken_ns` has no leased row left."""
        self._open -= 1
        if self._open == 0:
            self._busy_ns += now - self._busy_since
        if answered:
            self.batch_to_action.add_one(now - taken_ns)

    def batch_released(self, size: int, max_get: int, step_types: Array, episodes: int) -> None:
        """Records of a batch of `size` went back unanswered: they will be handed out, and counted, again."""
        self.records -= step_types.size
        self.env_steps -= int(np.count_nonzero(step_types))
        self.episodes -= episodes
        if step_types.size == size:  # none of it was answered
            self.batches -= 1
            self.fill -= size / max_get
            self.partial -= size < max_get

    def set_open(self, batches: int, now: int) -> None:
        """Says how many batches are unanswered, after an interrupt."""
        if self._open and not batches:
            self._busy_ns += now - self._busy_since
        elif batches and not self._open:
            self._busy_since = now
        self._open = batches

    def adopt_open(self, batches: int) -> None:
        """Takes over batches that are unanswered when the figures start anew."""
        self._open, self._busy_since = batches, self.start_ns

    def busy_ns(self, now: int) -> int:
        """Time with at least one unanswered batch."""
        return self._busy_ns + (now - self._busy_since if self._open else 0)


def snapshot(table: Table, meters: list[Meter], restarted: int) -> Stats:
    """Puts the figures of all receivers and of the table together; `restarted` is counted by the fleet."""
    dead = table.state == SlotState.DEAD
    now = monotonic_ns()
    seconds = max((now - min(meter.start_ns for meter in meters)) * 1e-9, 1e-9)
    batches, records, env_steps, episodes, partial, dropped = (
        sum(getattr(meter, name) for meter in meters)
        for name in ("batches", "records", "env_steps", "episodes", "partial", "dropped_actions")
    )
    states = np.bincount(table.state, minlength=len(SlotState))
    with np.errstate(invalid="ignore", divide="ignore"):
        step_seconds = table.step_ns / table.steps * 1e-9
        reset_seconds = table.reset_ns / table.resets * 1e-9
        per_record = (table.step_ns + table.reset_ns) / np.maximum(table.steps, 1) * 1e-9
    busy = float(np.mean([meter.busy_ns(now) for meter in meters])) * 1e-9 / seconds
    waiting = float(np.mean([meter.wait_ns for meter in meters])) * 1e-9 / seconds
    fill = sum(meter.fill for meter in meters) / max(batches, 1)
    slowest = int(np.argmax(per_record))
    obs_to_batch = _merged([meter.obs_to_batch for meter in meters])
    batch_to_action = _merged([meter.batch_to_action for meter in meters])
    verdict, reason = judge(busy, waiting, per_record, env_steps, obs_to_batch, batch_to_action)
    return Stats(
        seconds=seconds,
        batches=batches,
        records=records,
        env_steps=env_steps,
        env_steps_per_second=env_steps / seconds,
        episodes=episodes,
        batch_fill_ratio=fill,
        partial_batch_fraction=partial / max(batches, 1),
        obs_to_batch_dwell=obs_to_batch,
        batch_to_action_dwell=batch_to_action,
        consumer_busy_fraction=min(busy, 1.0),
        receive_wait_fraction=min(waiting, 1.0),
        dropped_actions=dropped,
        ready=int(states[SlotState.READY]),
        leased=int(states[SlotState.LEASED]),
        stepping=int(states[SlotState.ACTED] + states[SlotState.WRITING]),
        resetting=int(np.count_nonzero(table.resetting[~dead])),
        starting=int(states[SlotState.STARTING]),
        dead=int(np.count_nonzero(dead)),
        restarted=restarted,
        step_seconds=step_seconds,
        reset_seconds=reset_seconds,
        slowest_slot=slowest,
        verdict=verdict,
        reason=reason,
    )


def _merged(histograms: list[Histogram]) -> Dwell:
    if len(histograms) == 1:
        return histograms[0].summary()
    merged = Histogram()
    for histogram in histograms:
        histogram.fold()
        merged._counts += histogram._counts
        merged._total += histogram._total
        merged._max = max(merged._max, histogram._max)
    return merged.summary()


def judge(
    busy: float, waiting: float, per_record: Array, env_steps: int, obs_to_batch: Dwell, batch_to_action: Dwell
) -> tuple[str, str]:
    """Gives the verdict and its sentence.

    The rules, in order:

    1. fewer than two steps per slot: "starting";
    2. the consumer is busy for `BUSY_HIGH` or more: "inference-bound";
    3. it is not, and the slowest slot takes `STRAGGLER_RATIO` times the median slot's time per record,
       and at least `STRAGGLER_FLOOR`: "straggler";
    4. it is busy for less than `BUSY_LOW`: "env-bound"; otherwise "balanced".
    """
    slots = max(int(np.count_nonzero(per_record)), 1)
    if env_steps < 2 * slots:
        return "starting", f"only {env_steps} env steps from {slots} slots so far: too few to say"
    shares = f"the policy holds a batch {busy:.0%} of the time, recv sleeps {waiting:.0%}"
    if busy >= BUSY_HIGH:
        return "inference-bound", (
            f"{shares}; an answer takes {batch_to_action.mean * 1e3:.3g} ms and ready records wait "
            f"{obs_to_batch.mean * 1e3:.3g} ms: a faster policy or larger batches would help, more envs would not"
        )
    stepped = per_record[per_record > 0]  # reserved slots and lost ones have no say
    worst, median = int(np.argmax(per_record)), float(np.median(stepped)) if stepped.size else 0.0
    if slots > 1 and median > 0 and per_record[worst] >= max(STRAGGLER_RATIO * median, STRAGGLER_FLOOR):
        return "straggler", (
            f"slot {worst} takes {per_record[worst] * 1e3:.3g} ms per record, resets included, against a median of "
            f"{median * 1e3:.3g} ms: keep min_get below the number of slots, or speed that env up; {shares}"
        )
    if busy < BUSY_LOW:
        return "env-bound", f"{shares}: more envs or faster ones would help, a faster policy would not"
    return "balanced", f"{shares}: neither side waits much for the other"


def table_text(stats: Stats) -> str:
    """The figures as a table for people."""

    def dwell(value: Dwell) -> str:
        return " / ".join(f"{number * 1e3:.3g}" for number in (value.mean, value.p50, value.p99, value.max)) + " ms"

    step, reset = (np.nan_to_num(times) * 1e3 for times in (stats.step_seconds, stats.reset_seconds))
    rows: list[tuple[str, Any]] = [
        ("env steps", f"{stats.env_steps:,} in {stats.seconds:.1f} s"),
        ("env steps/s", f"{stats.env_steps_per_second:,.0f}"),
        ("episodes", f"{stats.episodes:,}"),
        ("batches", f"{stats.batches:,} of {stats.records / max(stats.batches, 1):.1f} records"),
        ("batch_fill_ratio", f"{stats.batch_fill_ratio:.2f}"),
        ("partial_batch_fraction", f"{stats.partial_batch_fraction:.2f}"),
        ("obs_to_batch_dwell  mean/p50/p99/max", dwell(stats.obs_to_batch_dwell)),
        ("batch_to_action_dwell", dwell(stats.batch_to_action_dwell)),
        ("consumer_busy_fraction", f"{stats.consumer_busy_fraction:.2f}"),
        ("env.step per slot    median/slowest", f"{np.median(step):.3g} / {step.max():.3g} ms"),
        ("env.reset per slot", f"{np.median(reset):.3g} / {reset.max():.3g} ms"),
        ("slots ready/leased/stepping/dead", f"{stats.ready} / {stats.leased} / {stats.stepping} / {stats.dead}"),
        ("restarted", f"{stats.restarted}"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join([*lines, "", f"  {stats.verdict}: {stats.reason}."])
