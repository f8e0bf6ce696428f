"""What does one record cost the consumer, and does the cost grow with the number of slots?

Workload: environments without work in 2 workers, batches of at least 32 and at most 64 records; the process CPU time of
the trainer alone, over recv, the look at the observations and send. Small observations (int32 (1,)) with 8 to 4,096
slots, and uint8 84x84x4 with 64 slots, where the bare `np.take(mode="clip", out=)` of every other batch is timed beside
it. With 8 slots no batch of 32 exists: that row is there to show the fixed cost of a small batch.
Contender: SlotLoader only.
Bars: at most 1.5 us per record with 64 slots; with 4,096 at most twice the figure of 64; with 84x84x4 at most the
figure of 64 small ones plus 1.5 times the bare take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Case, Check, median_of, parse_arguments, ratio, report, run_cases
from benchmarks.workloads import BenchEnv, Workload

if TYPE_CHECKING:
    from slotloader import SlotLoader

SMALL, PIXELS, OURS = "int32 (1,)", "uint8 84x84x4", "slotloader"
SPECS = {SMALL: ((1,), "int32"), PIXELS: ((84, 84, 4), "uint8")}
SLOTS = (8, 64, 256, 1024, 4096)


def consume(workload: str, slots: int, min_get: int, max_get: int, seconds: float, by_index: bool = False) -> dict[str, float]:
    """Runs the loop and returns CPU microseconds per record, and those of the bare take where it is measured."""
    from slotloader import SlotLoader

    shape, dtype = SPECS[workload]
    spec = Workload(slots, shape, dtype)
    actions = np.zeros(slots, np.int64)
    policy: dict[str, Any] = {"min_get": min_get, "max_get": max_get, "timeout": 0.0}
    with SlotLoader(lambda: BenchEnv(spec), num_envs=slots, num_workers=2, seed=0, **policy) as loader:

        def turn() -> int:
            batch = loader.recv()
            batch.obs  # noqa: B018  the gather is part of the figure
            records = len(batch.env_indices)
            if by_index:
                loader.send(actions[:records], batch.env_indices)
            else:
                batch.send(actions[:records])
            return records

        _until(seconds / 2, turn)
        begin_ns = time.process_time_ns()
        records, batches, elapsed = _until(seconds, turn)
        used_ns = time.process_time_ns() - begin_ns
        figures = {
            "us_per_record": used_ns / records / 1e3,
            "batch": records / batches,
            "records_per_s": records / elapsed,
            "busy": used_ns / 1e9 / elapsed,
        }
        if workload == PIXELS:
            figures["take_us_per_record"] = _bare_take(loader, actions, seconds)
        return figures


def _until(seconds: float, turn: Callable[[], int]) -> tuple[int, int, float]:
    """Calls `turn` for some seconds; returns (records, batches, seconds)."""
    records = batches = 0
    begin = time.monotonic()
    while (elapsed := time.monotonic() - begin) < seconds:
        records += turn()
        batches += 1
    return records, batches, elapsed


def _bare_take(loader: SlotLoader, actions: NDArray[np.int64], seconds: float) -> float:
    """CPU microseconds per record of gathering just published batches by hand out of the table, in the same loop."""
    used_ns = records = 0
    out = np.empty((loader.num_slots, *SPECS[PIXELS][0]), np.uint8)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        batch = loader.recv()
        with batch.view() as rows:
            table, indices = rows.obs, rows.indices
            begin_ns = time.thread_time_ns()
            np.take(table, indices, axis=0, mode="clip", out=out[: len(indices)])
            used_ns += time.thread_time_ns() - begin_ns
        records += len(indices)
        batch.send(actions[: len(indices)])
    return used_ns / records / 1e3


def main() -> None:
    options = parse_arguments(__doc__)
    seconds = 0.5 if options.quick else 1.5
    cases = [_case(SMALL, slots, seconds) for slots in SLOTS] + [_case(PIXELS, 64, seconds)]
    cases.append(_case(SMALL, 64, seconds, by_index=True))
    outcomes = run_cases(cases, options)

    def us(workload: str, slots: int) -> float | None:
        return median_of(outcomes, workload, _name(slots), "us_per_record")

    small, pixels = us(SMALL, 64), us(PIXELS, 64)
    take = median_of(outcomes, PIXELS, _name(64), "take_us_per_record")
    growth = ratio(outcomes, "us_per_record", (SMALL, _name(4096)), (SMALL, _name(64)))
    checks = [
        Check("64 slots, small", small, 1.5, at_least=False, unit=" us"),
        Check("4096 slots / 64 slots, small", growth, 2.0, at_least=False, unit="x"),
    ]
    index = ratio(outcomes, "us_per_record", (SMALL, _name(64, True)), (SMALL, _name(64)))
    checks.append(Check("64 slots, small: by index / by batch", index, 1.05, at_least=False, unit="x"))
    if small is not None and take is not None:
        name = "64 slots, 84x84x4 (bar: small + 1.5 takes)"
        checks.append(Check(name, pixels, small + 1.5 * take, at_least=False, unit=" us"))
    columns = [
        ("us/record", "us_per_record", ".3f"),
        ("bare take us", "take_us_per_record", ".3f"),
        ("mean batch", "batch", ".1f"),
        ("records/s", "records_per_s", ",.0f"),
        ("consumer busy", "busy", ".0%"),
    ]
    report("consumer_cpu", outcomes, checks, columns, options)


def _name(slots: int, by_index: bool = False) -> str:
    return f"{OURS} {slots} slots{' by index' if by_index else ''}"


def _case(workload: str, slots: int, seconds: float, by_index: bool = False) -> Case:
    policy = {"min_get": min(32, slots // 2), "max_get": min(64, slots)}
    shown = ", ".join(f"{name}={value}" for name, value in {"num_workers": 2, **policy, "timeout": 0.0}.items())
    arguments = {"workload": workload, "slots": slots, "seconds": seconds, **policy}
    if by_index:
        arguments["by_index"] = True
    return Case(workload, _name(slots, by_index), f"{__package__}.consumer_cpu:consume", arguments, shown)


if __name__ == "__main__":
    main()
