"""How much is lost when the environments are slow and many, as simulators are?

Workload: 64 environments, 50 ms step.
Contenders: raw (the same environments free-running), SlotLoader, gymnasium AsyncVectorEnv, SB3 SubprocVecEnv, TorchRL
AsyncEnvPool(exchange="shm") and ParallelEnv; one process per environment for all.
Bar: SlotLoader at least 0.98 of raw.
"""

from __future__ import annotations

from benchmarks.contenders import BY_INDEX, OURS, RAW, case, peer_cases, raw, slotloader
from benchmarks.harness import Check, parse_arguments, ratio, report, run_cases

WORKLOAD = "heavy"


def main() -> None:
    options = parse_arguments(__doc__)
    time_s = (1.0, 2.0) if options.quick else (1.0, 2.5)
    cases = [
        case(RAW, raw, WORKLOAD, time_s, num_workers=64),
        case(OURS, slotloader, WORKLOAD, time_s, num_workers=64, min_get=1, timeout=0.0),
        case(BY_INDEX, slotloader, WORKLOAD, time_s, num_workers=64, min_get=1, timeout=0.0, by_index=True),
        *peer_cases(WORKLOAD, time_s),
    ]
    outcomes = run_cases(cases, options)
    value = ratio(outcomes, "steps_per_s", (WORKLOAD, OURS), (WORKLOAD, RAW))
    checks = [Check(f"{WORKLOAD}: {OURS} / {RAW}", value, 0.98)]
    both = ratio(outcomes, "steps_per_s", (WORKLOAD, BY_INDEX), (WORKLOAD, OURS))
    checks.append(Check(f"{WORKLOAD}: {BY_INDEX} / {OURS}", both, 0.95))
    report("heavy", outcomes, checks, [("env steps/s", "steps_per_s", ",.0f")], options)


if __name__ == "__main__":
    main()
