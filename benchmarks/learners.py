"""What does it cost to put transitions together, and does acting in the background keep its pace beside a learner?

Workloads: (a) 32 environments without work, stepped inline, observations int32 (8,): the time of `add` alone per
transition, for `Transitions` of 1 and 3 steps and for `Unrolls` of 20. (b) 64 environments of 50 ms: `run` alone, then
`background` while the main thread learns without a pause (a matrix product that holds no GIL, on one core).
Contender: SlotLoader with `to_numpy` only.
Bars: at most 3 us per transition; with a learner at least 0.9 of the rate of `run`.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.harness import Case, Check, median_of, parse_arguments, ratio, report, run_cases
from benchmarks.workloads import BenchEnv, Workload

SMALL, HEAVY = "32 x int32 (8,), no work", "64 x 50 ms"
ASSEMBLERS = ("Transitions(1)", "Transitions(3)", "Unrolls(20)")
ALONE, BESIDE = "run", "background beside a learner"


def assembly(assembler: str, batches: int) -> dict[str, float]:
    """Microseconds of `add` per transition."""
    from slotloader import SlotLoader, Transitions, Unrolls

    spec = Workload(32, (8,), "int32", episode_length=200)
    actions = np.zeros(32, np.int64)
    with SlotLoader(lambda: BenchEnv(spec), 32, backend="inline", seed=0, timeout=None) as loader:
        made: Any = {
            "Transitions(1)": lambda: Transitions(loader),
            "Transitions(3)": lambda: Transitions(loader, 3),
            "Unrolls(20)": lambda: Unrolls(loader, 20, 32),
        }[assembler]()
        extras = {"log_prob": np.zeros(32, np.float32)}
        used = transitions = 0
        for number in range(batches):
            batch = loader.recv()
            batch.obs  # noqa: B018  the gather is the loop's own
            begin = time.perf_counter_ns()
            made.add(batch, actions, extras)
            if number >= batches // 10:
                used += time.perf_counter_ns() - begin
                transitions += batch.env_steps
            batch.send(actions)
    return {"us": used / transitions / 1e3}


def acting(learns: bool, seconds: float) -> dict[str, float]:
    """Env steps per second of the heavy workload."""
    from slotloader import SlotLoader, Unrolls, to_numpy

    spec = Workload(64, (8,), "int32", step_s=0.05, episode_length=200)
    actions = np.zeros(64, np.int64)
    with (
        SlotLoader(lambda: BenchEnv(spec), 64, seed=0, num_workers=8, worker_threads=True) as loader,
        to_numpy(loader) as batches,
    ):
        policy = batches.policy(lambda obs: actions[: len(obs)])
        batches.run(policy, env_steps=1000, progress=False)
        if not learns:
            return {"steps_per_s": batches.run(policy, env_steps=int(1200 * seconds), progress=False).env_steps_per_second}
        weights, updates = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32), 0
        with batches.background(policy, unrolls=Unrolls(batches, 20, 32), on_full="drop_oldest") as actor:
            begin, first = time.monotonic(), actor.env_steps
            while time.monotonic() - begin < seconds:
                weights = np.tanh(weights @ weights * 0.01)
                updates += 1
            return {"steps_per_s": (actor.env_steps - first) / (time.monotonic() - begin), "updates": updates / seconds}


def main() -> None:
    options = parse_arguments(__doc__)
    count, seconds = (1500, 3.0) if options.quick else (5000, 8.0)
    module = f"{__package__}.learners"
    cases = [Case(SMALL, name, f"{module}:assembly", {"assembler": name, "batches": count}) for name in ASSEMBLERS]
    cases += [
        Case(HEAVY, name, f"{module}:acting", {"learns": learns, "seconds": seconds})
        for name, learns in ((ALONE, False), (BESIDE, True))
    ]
    outcomes = run_cases(cases, options)
    checks = [Check(name, median_of(outcomes, SMALL, name, "us"), 3.0, at_least=False, unit=" us") for name in ASSEMBLERS]
    kept = ratio(outcomes, "steps_per_s", (HEAVY, BESIDE), (HEAVY, ALONE))
    checks.append(Check("background / run", kept, 0.9))
    columns = [("us/transition", "us", ".2f"), ("steps/s", "steps_per_s", ",.0f"), ("learner updates/s", "updates", ",.0f")]
    report("learners", outcomes, checks, columns, options)


if __name__ == "__main__":
    main()
