"""What does an adapter cost per batch, over the bare gather?

Workload: batches of 32 records of uint8 84x84x4 on the CPU, environments without work stepped inline, so that nothing else
runs. Timed from the return of the core's `recv` to the end of `send`, in turn for the bare core (`batch.obs`, and
`send` of numpy actions) and for the adapter (staging of every field, `batch.obs`, and `send` of its own arrays).
Contenders: to_numpy, to_torch, to_jax; the cost is the difference of the medians.
Bars: at most 60 us for torch, 120 us for jax.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from benchmarks.harness import Case, Check, median_of, parse_arguments, report, run_cases
from benchmarks.workloads import BenchEnv, Workload

SIZE = 32
WORKLOAD = f"{SIZE} x 84x84x4, CPU"
BARS = {"torch": 60.0, "jax": 120.0}


def cost(adapter: str, batches: int) -> dict[str, float]:
    """Medians in microseconds per batch, with and without the adapter."""
    import slotloader

    spec = Workload(SIZE, (84, 84, 4), "uint8")
    actions = np.zeros(SIZE, np.int64)
    with (
        slotloader.SlotLoader(lambda: BenchEnv(spec), SIZE, backend="inline", seed=0, timeout=None) as loader,
        getattr(slotloader, f"to_{adapter}")(loader, buckets=(SIZE,)) as adapted,
    ):
        own = _array(adapter, actions)
        returned = [0]
        receive = loader.receiver.recv

        def recv(**limits: Any) -> Any:
            batch = receive(**limits)
            returned[0] = time.perf_counter_ns()
            return batch

        loader.receiver.recv = recv  # type: ignore[method-assign]
        times: dict[str, list[int]] = {"bare": [], "adapted": []}
        for number in range(2 * batches):
            if number % 2:
                batch = loader.receiver.recv()
                batch.obs  # noqa: B018  the gather is part of the figure
                batch.send(actions)
                times["bare"].append(time.perf_counter_ns() - returned[0])
            else:
                device_batch = adapted.recv()
                device_batch.obs  # noqa: B018
                device_batch.send(own)
                times["adapted"].append(time.perf_counter_ns() - returned[0])
        del loader.receiver.recv  # type: ignore[method-assign]
    medians = {name: statistics.median(values[batches // 5 :]) / 1e3 for name, values in times.items()}
    return {"bare_us": medians["bare"], "adapted_us": medians["adapted"], "cost_us": medians["adapted"] - medians["bare"]}


def _array(adapter: str, actions: Any) -> Any:
    if adapter == "torch":
        import torch

        return torch.from_numpy(actions)
    if adapter == "jax":
        import jax

        return jax.block_until_ready(jax.numpy.asarray(actions))
    return actions


def main() -> None:
    options = parse_arguments(__doc__)
    count = 400 if options.quick else 2000
    target = f"{__package__}.adapter_cost:cost"
    cases = [Case(WORKLOAD, name, target, {"adapter": name, "batches": count}) for name in ("numpy", "torch", "jax")]
    outcomes = run_cases(cases, options)
    checks = [
        Check(f"to_{name} over the bare gather", median_of(outcomes, WORKLOAD, name, "cost_us"), bar, False, " us")
        for name, bar in BARS.items()
    ]
    columns = [("bare us", "bare_us", ".1f"), ("adapter us", "adapted_us", ".1f"), ("cost us", "cost_us", ".1f")]
    report("adapter_cost", outcomes, checks, columns, options)


if __name__ == "__main__":
    main()
