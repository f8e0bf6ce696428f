"""How many env steps per second does the exchange itself carry, when the environments do no work at all?

Workloads: 8 environments without work, observations int32 (1,) and uint8 4x84x84.
Contenders: SlotLoader with 8 workers and with 2 workers x 4 environments; gymnasium AsyncVectorEnv, SB3 SubprocVecEnv,
TorchRL AsyncEnvPool(exchange="shm") and ParallelEnv, each with one process per environment, as they come.
Bars: with 8 workers at least 3x gymnasium and 30x TorchRL shm; with 2 workers at least 4.5x gymnasium; by index at least
0.95 of by batch.
"""

from __future__ import annotations

from benchmarks.contenders import BY_INDEX, GYMNASIUM, OURS, TORCHRL_SHM, case, peer_cases, slotloader
from benchmarks.harness import Case, Check, parse_arguments, ratio, report, run_cases

EIGHT, TWO = f"{OURS} 8 workers", f"{OURS} 2 workers"
INDEX_EIGHT, INDEX_TWO = f"{BY_INDEX} 8 workers", f"{BY_INDEX} 2 workers"


def main() -> None:
    options = parse_arguments(__doc__)
    time_s = (0.3, 1.0) if options.quick else (0.4, 1.2)
    cases: list[Case] = []
    for workload in ("dispatch small", "dispatch pixels"):
        cases += [
            case(EIGHT, slotloader, workload, time_s, num_workers=8, min_get=1, timeout=0.0),
            case(TWO, slotloader, workload, time_s, num_workers=2, min_get=1, timeout=0.0),
            case(INDEX_EIGHT, slotloader, workload, time_s, num_workers=8, min_get=1, timeout=0.0, by_index=True),
            case(INDEX_TWO, slotloader, workload, time_s, num_workers=2, min_get=1, timeout=0.0, by_index=True),
            *peer_cases(workload, time_s),
        ]
    outcomes = run_cases(cases, options)
    checks = []
    for workload in ("dispatch small", "dispatch pixels"):
        for ours, peer, bar in ((EIGHT, GYMNASIUM, 3.0), (EIGHT, TORCHRL_SHM, 30.0), (TWO, GYMNASIUM, 4.5)):
            value = ratio(outcomes, "steps_per_s", (workload, ours), (workload, peer))
            checks.append(Check(f"{workload}: {ours} / {peer}", value, bar, unit="x"))
        for index, batch in ((INDEX_EIGHT, EIGHT), (INDEX_TWO, TWO)):
            value = ratio(outcomes, "steps_per_s", (workload, index), (workload, batch))
            checks.append(Check(f"{workload}: {index} / {batch}", value, 0.95))
    report("dispatch", outcomes, checks, [("env steps/s", "steps_per_s", ",.0f")], options)


if __name__ == "__main__":
    main()
