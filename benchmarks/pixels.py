"""How near to the environments' own speed with pixel observations, alike for all and with one straggler?

Workloads: 8 environments, 1 ms step, uint8 3x84x84; "uniform" with episodes of 200 steps, and "one slow" with episodes
of 16 steps where environment 0 resets in 200 ms.
Contenders: raw (the same environments free-running), SlotLoader, gymnasium AsyncVectorEnv, SB3 SubprocVecEnv, TorchRL
AsyncEnvPool(exchange="shm") and ParallelEnv; one process per environment for all.
Bars: SlotLoader at least 0.90 of raw on both.
"""

from __future__ import annotations

from benchmarks.contenders import BY_INDEX, OURS, RAW, case, peer_cases, raw, slotloader
from benchmarks.harness import Case, Check, parse_arguments, ratio, report, run_cases

WORKLOADS = ("pixels uniform", "pixels one slow")


def main() -> None:
    options = parse_arguments(__doc__)
    time_s = (0.5, 1.0) if options.quick else (0.5, 1.2)
    cases: list[Case] = []
    for workload in WORKLOADS:
        cases += [
            case(RAW, raw, workload, time_s, num_workers=8),
            case(OURS, slotloader, workload, time_s, num_workers=8, min_get=1, timeout=0.0),
            case(BY_INDEX, slotloader, workload, time_s, num_workers=8, min_get=1, timeout=0.0, by_index=True),
            *peer_cases(workload, time_s),
        ]
    outcomes = run_cases(cases, options)
    checks = []
    for workload in WORKLOADS:
        value = ratio(outcomes, "steps_per_s", (workload, OURS), (workload, RAW))
        checks.append(Check(f"{workload}: {OURS} / {RAW}", value, 0.90))
        both = ratio(outcomes, "steps_per_s", (workload, BY_INDEX), (workload, OURS))
        checks.append(Check(f"{workload}: {BY_INDEX} / {OURS}", both, 0.95))
    report("pixels", outcomes, checks, [("env steps/s", "steps_per_s", ",.0f")], options)


if __name__ == "__main__":
    main()
