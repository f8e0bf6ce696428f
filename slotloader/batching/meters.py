"""Meters: what is counted while a loader runs, kept cheap, and shown in the region for other processes.

Per batch one row is noted; the rows are folded into counts and histograms when there are many, a while has passed, or
someone looks. Folding writes to `meters` and `dwells` of the region, if the meter has a place there.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import monotonic_ns

import numpy as np

from slotloader.records.specs import Array
from slotloader.table.layout import DWELL_BUCKETS, DWELL_WORDS, MAX_RECEIVERS, METER
from slotloader.table.slots import Table

_SUB = 8  # buckets per power of two: a percentile is exact to 12 %
_MANY = 256  # batches that are noted before they are folded
_SHOW_NS = 100_000_000  # the region is at most so far behind while batches come
_COUNTED = ("batches", "records", "env_steps", "episodes", "partial", "dropped_actions", "wait_ns")


@dataclass(frozen=True)
class Dwell:
    """A distribution of times, in seconds."""

    count: int
    mean: float
    p50: float
    p99: float
    max: float


class Histogram:
    """Counts of times in ns in buckets of equal ratio (as HdrHistogram). Any thread may add and read.

    Args:
      data: int64 (DWELL_WORDS,), counts, then the sum and the longest; None makes one.
    """

    def __init__(self, data: Array | None = None) -> None:
        self._data = np.zeros(DWELL_WORDS, np.int64) if data is None else data
        self._counts = self._data[:DWELL_BUCKETS]
        self._lock = threading.Lock()

    def add(self, times: Array) -> None:
        """Adds int64 ns."""
        if times.size == 0:
            return
        times = np.maximum(times, 1)
        found = np.bincount((np.log2(times) * _SUB).astype(np.int64), minlength=DWELL_BUCKETS)
        with self._lock:
            self._counts += found
            self._data[DWELL_BUCKETS] += times.sum()
            self._data[DWELL_BUCKETS + 1] = max(self._data[DWELL_BUCKETS + 1], times.max())

    def include(self, other: Histogram) -> None:
        """Adds the times of another."""
        with other._lock:
            data = other._data.copy()
        with self._lock:
            self._data[: DWELL_BUCKETS + 1] += data[: DWELL_BUCKETS + 1]
            self._data[DWELL_BUCKETS + 1] = max(self._data[DWELL_BUCKETS + 1], data[DWELL_BUCKETS + 1])

    def summary(self) -> Dwell:
        """Mean, percentiles and maximum in seconds."""
        with self._lock:
            counts, (total, longest) = self._counts.copy(), self._data[DWELL_BUCKETS:].tolist()
        count = int(counts.sum())
        if count == 0:
            return Dwell(0, 0.0, 0.0, 0.0, 0.0)
        ranks = np.searchsorted(np.cumsum(counts), [np.ceil(count * 0.5), np.ceil(count * 0.99)])
        p50, p99 = (min(2.0 ** ((rank + 0.5) / _SUB), longest) * 1e-9 for rank in ranks.tolist())
        return Dwell(count, total / count * 1e-9, p50, p99, longest * 1e-9)

    def buckets(self) -> tuple[Array, Array]:
        """Upper edges in seconds (float64) and counts (int64), for plots."""
        return 2.0 ** (np.arange(1, DWELL_BUCKETS + 1) / _SUB) * 1e-9, self._counts.copy()


def merged(histograms: list[Histogram]) -> Dwell:
    """The summary of all times of some histograms."""
    if len(histograms) == 1:
        return histograms[0].summary()
    both = Histogram()
    for histogram in histograms:
        both.include(histogram)
    return both.summary()


class Meter:
    """Keeps the figures of one receiver. The lock of its leases covers every method but `busy_ns`.

    Args:
      shown: the receiver's row of the region's `meters`; None keeps them to this process.
      dwells: its rows of `dwells`, int64 (2, DWELL_WORDS).

    Attributes:
      obs_to_batch, batch_to_action: times of records until their batch, and of batches until their answer.
      start_ns: since when it counts.
      batches, records, env_steps, episodes, partial, fill, dropped_actions, wait_ns: see `Stats`; folded first by `fold`.
    """

    def __init__(self, shown: Array | None = None, dwells: Array | None = None) -> None:
        self._shown = np.zeros(1, METER)[0] if shown is None else shown
        if dwells is not None:
            dwells[:] = 0
        self.obs_to_batch, self.batch_to_action = (Histogram(None if dwells is None else dwells[at]) for at in range(2))
        self.start_ns = monotonic_ns()
        self.batches = self.records = self.env_steps = self.episodes = 0
        self.partial = self.dropped_actions = 0
        self.fill = 0.0
        self.wait_ns = 0
        self._taken: list[tuple[int, int, int, int, Array]] = []
        self._answered: list[int] = []
        self._show_at = 0
        self._open = 0
        self._busy_ns = 0
        self._busy_since = 0
        self._show()

    def batch_taken(self, now: int, size: int, max_get: int, first_records: int, published: Array) -> None:
        """A batch was handed out at `now`; `published` has the publish times of its records, int64 ns (size,)."""
        self._taken.append((now, size, max_get, first_records, published))
        if self._open == 0:
            self._busy_since = now
        self._open += 1
        if now >= self._show_at or len(self._taken) >= _MANY:
            self.fold()

    def batch_closed(self, now: int, taken_ns: int, answered: bool) -> None:
        """A batch that was taken at `taken_ns` has no leased row left."""
        self._open -= 1
        if self._open == 0:
            self._busy_ns += now - self._busy_since
        if answered:
            self._answered.append(now - taken_ns)

    def batch_released(self, size: int, max_get: int, step_types: Array, episodes: int) -> None:
        """Records of a batch of `size` went back unanswered: they will be handed out, and counted, again."""
        self.fold()
        self.records -= step_types.size
        self.env_steps -= int(np.count_nonzero(step_types))
        self.episodes -= episodes
        if step_types.size == size:  # none of it was answered
            self.batches -= 1
            self.fill -= size / max_get
            self.partial -= size < max_get

    def fold(self) -> None:
        """Counts what has been noted, and shows it."""
        if self._taken:
            noted, self._taken = self._taken, []
            times, sizes, most, firsts, published = zip(*noted, strict=True)
            size, limit = np.array(sizes), np.array(most)
            records = int(size.sum())
            self.batches += len(noted)
            self.records += records
            self.env_steps += records - sum(firsts)
            self.fill += float((size / limit).sum())
            self.partial += int(np.count_nonzero(size < limit))
            self.obs_to_batch.add(np.repeat(np.array(times), size) - np.concatenate(published))
        if self._answered:
            answers, self._answered = self._answered, []
            self.batch_to_action.add(np.array(answers))
        self._show()

    def _show(self) -> None:
        """Writes the counts to the region: an odd `edition` says that it is being done."""
        now, shown = monotonic_ns(), self._shown
        self._show_at = now + _SHOW_NS
        shown["edition"] += 1
        for name in _COUNTED:
            shown[name] = getattr(self, name)
        shown["start_ns"], shown["fill"], shown["shown_ns"] = self.start_ns, self.fill, now
        shown["open"], shown["busy_ns"], shown["busy_since_ns"] = self._open, self._busy_ns, self._busy_since
        shown["edition"] += 1

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

    @classmethod
    def read(cls, table: Table, index: int) -> Meter:
        """The figures of receiver `index` as the region shows them: a copy, for another process."""
        meter = cls()
        for _ in range(100):
            edition = int(table.meters[index]["edition"])
            row, dwells = table.meters[index].copy(), table.dwells[index].copy()
            if edition % 2 == 0 and edition == int(table.meters[index]["edition"]):
                break
        for name in (*_COUNTED, "start_ns"):
            setattr(meter, name, int(row[name]))
        meter.fill = float(row["fill"])
        meter._open, meter._busy_ns, meter._busy_since = (int(row[n]) for n in ("open", "busy_ns", "busy_since_ns"))
        meter.obs_to_batch, meter.batch_to_action = Histogram(dwells[0]), Histogram(dwells[1])
        return meter


def meters_of(table: Table) -> list[Meter]:
    """The figures of every receiver that is in use, read from the region."""
    return [Meter.read(table, at) for at in range(MAX_RECEIVERS) if table.end_slot[at] > table.first_slot[at]]
