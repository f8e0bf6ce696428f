"""Does batch N + 1 form and travel while batch N computes?

Workload: N = 128 environments of 10 ms, batches of B = 32, and a simulated accelerator whose streams keep time like hardware:
H2D 2 ms, inference 5 ms, D2H 2 ms, one after the other within a stream and side by side between streams; nobody holds
the GIL meanwhile. The whole path is real: staging, fences, completion thread, scatter.
Contenders: `run` with in_flight 1, 2 and 3. The device alone allows B / 5 ms, the environments N / 19 ms.
Bars: with in_flight=2 at least 0.95 of the smaller of the two, and at least 1.5 times in_flight=1.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Case, Check, median_of, parse_arguments, ratio, report, run_cases
from benchmarks.workloads import BenchEnv, Workload
from slotloader.device.ops import HostOps, Stream

ENVS, STEP_S, BATCH = 128, 0.010, 32
OVERSLEEP_S = 0.0003
SECONDS = {Stream.H2D: 0.002, Stream.COMPUTE: 0.005, Stream.D2H: 0.002}
LIMIT = min(ENVS / (STEP_S + sum(SECONDS.values())), BATCH / SECONDS[Stream.COMPUTE])
WORKLOAD = f"{ENVS} envs of 10 ms, batches of {BATCH}"


class SimulatedOps(HostOps):
    """A device with three streams that keep time: work begins when its stream is free and its events have passed.

    An event is the time at which the device passes it. Results exist at once, but `host_wait` returns only then.
    """

    staged = True
    lazy = False

    def __init__(self) -> None:
        self._free_at = dict.fromkeys(Stream, 0.0)
        self._lock = threading.Lock()

    def _work(self, stream: Stream) -> None:
        with self._lock:
            self._free_at[stream] = max(self._free_at[stream], time.monotonic()) + SECONDS[stream]

    def h2d(self, source: NDArray[Any], views: Sequence[NDArray[Any]]) -> list[Any]:
        self._work(Stream.H2D)
        return [view.copy() for view in views]

    def compute(self, function: Callable[..., Any], *args: Any) -> Any:
        self._work(Stream.COMPUTE)
        return function(*args)

    def d2h(self, array: Any) -> Any:
        self._work(Stream.D2H)
        return array

    def at_once(self, array: Any) -> None:
        return None

    def record(self, stream: Stream) -> Any:
        return self._free_at[stream]

    def wait(self, stream: Stream, event: Any) -> None:
        with self._lock:
            self._free_at[stream] = max(self._free_at[stream], event)

    def host_wait(self, event: Any) -> None:
        """A device tells its end within microseconds; `time.sleep` here oversleeps by some hundred, so the rest is yielded."""
        time.sleep(max(0.0, event - time.monotonic() - OVERSLEEP_S))
        while time.monotonic() < event:
            time.sleep(0)

    def done(self, event: Any) -> bool:
        return bool(event <= time.monotonic())


def overlap(in_flight: int, seconds: float) -> dict[str, float]:
    """Env steps per second of one setting."""
    from slotloader import SlotLoader
    from slotloader.device_batches import DeviceBatches

    spec = Workload(ENVS, (1,), "int32", step_s=STEP_S)
    actions = np.zeros(BATCH, np.int64)
    fleet: dict[str, Any] = {"max_get": BATCH, "min_get": BATCH, "timeout": 0}
    with (
        SlotLoader(lambda: BenchEnv(spec), ENVS, seed=0, **fleet) as loader,
        DeviceBatches(loader, SimulatedOps(), buckets=(BATCH,), in_flight=in_flight) as batches,
    ):
        policy = batches.policy(lambda obs: actions)
        batches.run(policy, env_steps=int(2000 * seconds), progress=False)
        loader.reset_stats()
        run = batches.run(policy, env_steps=int(6000 * seconds), progress=False)
        stats = loader.stats()
    return {
        "steps_per_s": run.env_steps_per_second,
        "of_limit": run.env_steps_per_second / LIMIT,
        "fill": stats.batch_fill_ratio,
    }


def main() -> None:
    options = parse_arguments(__doc__)
    seconds = 1.0 if options.quick else 4.0
    cases = [
        Case(WORKLOAD, _name(n), f"{__package__}.overlap:overlap", {"in_flight": n, "seconds": seconds}) for n in (1, 2, 3)
    ]
    outcomes = run_cases(cases, options)
    checks = [
        Check(f"in_flight=2 / {LIMIT:,.0f} steps/s", median_of(outcomes, WORKLOAD, _name(2), "of_limit"), 0.95),
        Check(
            "in_flight=2 / in_flight=1",
            ratio(outcomes, "steps_per_s", (WORKLOAD, _name(2)), (WORKLOAD, _name(1))),
            1.5,
            unit="x",
        ),
    ]
    columns = [("steps/s", "steps_per_s", ",.0f"), ("of the limit", "of_limit", ".3f"), ("batch fill", "fill", ".2f")]
    report("overlap", outcomes, checks, columns, options)


def _name(in_flight: int) -> str:
    return f"in_flight={in_flight}"


if __name__ == "__main__":
    main()
