"""How much of the environments' own speed is left when resets are 200 times slower than steps?

Workload: 32 environments, 1 ms step, 200 ms reset every 200 steps.
Contenders: raw (the same environments free-running), SlotLoader, gymnasium AsyncVectorEnv, SB3 SubprocVecEnv, TorchRL
AsyncEnvPool(exchange="shm") and ParallelEnv; one process per environment for all.
Bars: SlotLoader at least 0.90 of raw; with one warm spare per slot, whose resets run beside the steps, at least 1.4 of raw.
"""

from __future__ import annotations

from benchmarks.contenders import BY_INDEX, OURS, RAW, case, peer_cases, raw, slotloader
from benchmarks.harness import Check, parse_arguments, ratio, report, run_cases

WORKLOAD = "slow reset"
SPARES = f"{OURS} spares=1"


def main() -> None:
    options = parse_arguments(__doc__)
    time_s = (1.0, 2.0) if options.quick else (1.0, 2.5)
    cases = [
        case(RAW, raw, WORKLOAD, time_s, num_workers=32),
        case(OURS, slotloader, WORKLOAD, time_s, num_workers=32, min_get=1, timeout=0.0),
        case(BY_INDEX, slotloader, WORKLOAD, time_s, num_workers=32, min_get=1, timeout=0.0, by_index=True),
        case(SPARES, slotloader, WORKLOAD, time_s, num_workers=32, min_get=1, timeout=0.0, spares=1),
        *peer_cases(WORKLOAD, time_s),
    ]
    outcomes = run_cases(cases, options)
    checks = []
    for ours, bar in ((OURS, 0.90), (SPARES, 1.4)):
        value = ratio(outcomes, "steps_per_s", (WORKLOAD, ours), (WORKLOAD, RAW))
        checks.append(Check(f"{WORKLOAD}: {ours} / {RAW}", value, bar))
    both = ratio(outcomes, "steps_per_s", (WORKLOAD, BY_INDEX), (WORKLOAD, OURS))
    checks.append(Check(f"{WORKLOAD}: {BY_INDEX} / {OURS}", both, 0.95))
    report("slow_reset", outcomes, checks, [("env steps/s", "steps_per_s", ",.0f")], options)


if __name__ == "__main__":
    main()
