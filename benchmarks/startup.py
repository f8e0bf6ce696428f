"""How soon is a fleet ready, how much memory does it take, and what does it cost while nothing happens?

Cases:
  64 workers   one numpy environment each: time from the constructor's call to the first batch of all 64, private memory
               (USS) of the workers, CPU of all processes together while every record is leased and nobody waits, and
               while a thread is blocked in `recv` for one long step. As it comes, and with `preload=["gymnasium"]`.
  records      2 workers x 32 environments: growth of the trainer's USS over 1,000,000 records.
  quickstart   from `python examples/quickstart.py` to the first line it prints.
  TorchRL      private memory of the workers of an AsyncEnvPool with the same environment, for comparison.
Bars: ready within 2 s; at most 12 MiB per worker, the largest counts; idle below 2 % of a core in total; the trainer's
memory flat (at most 1 MiB more); quickstart within 3 s.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.harness import ROOT, Case, Check, median_of, parse_arguments, report, run_cases
from benchmarks.workloads import BenchEnv, Workload

MIB = 2**20
FLEET, RECORDS, QUICKSTART, MEMORY = "64 workers", "records", "quickstart", "worker memory"
OURS, PRELOADED, TORCHRL = "slotloader", "slotloader preloaded", "TorchRL AsyncEnvPool shm"
NUM_WORKERS = 64


def fleet(preload: Sequence[str], idle_s: float) -> dict[str, float]:
    """Starts 64 workers; returns their start time, their memory and what they cost idle."""
    from slotloader import LoaderClosed, SlotLoader

    spec = Workload(NUM_WORKERS, step_s=idle_s + 1.5)  # one step outlasts the measurement of a blocked recv
    begin = time.monotonic()
    with SlotLoader(partial(BenchEnv, spec), num_envs=NUM_WORKERS, num_workers=NUM_WORKERS, preload=preload) as loader:
        batch = loader.recv(min_get=NUM_WORKERS, timeout=None)
        figures = {"ready_s": time.monotonic() - begin}
        nurseries, workers = _fleet_processes()
        private = [worker.memory_full_info().uss / MIB for worker in workers]
        figures["worker_mib"], figures["largest_mib"] = float(np.mean(private)), max(private)
        figures["nursery_mib"] = sum(nursery.memory_full_info().uss for nursery in nurseries) / MIB
        figures["idle_leased"] = _cpu_share([psutil.Process(), *nurseries, *workers], idle_s)
        loader.send(np.zeros(1, np.int64), batch.env_indices[:1])  # one long step; the others wait for actions

        def block() -> None:
            with contextlib.suppress(LoaderClosed):
                loader.recv(min_get=1, timeout=None)

        blocked = threading.Thread(target=block)
        blocked.start()
        time.sleep(0.5)  # the worker enters its long step, the thread its wait
        figures["idle_blocked"] = _cpu_share([psutil.Process(), *nurseries, *workers], idle_s)
        if not blocked.is_alive():
            raise RuntimeError("recv did not stay blocked through the measurement")
        blocked.join()
    figures["workers"] = float(len(workers))
    return figures


def _fleet_processes() -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Our nurseries, which are the direct children, and their workers, which are all other descendants."""
    nurseries = psutil.Process().children()
    return nurseries, [process for process in psutil.Process().children(recursive=True) if process not in nurseries]


def _cpu_share(processes: Sequence[psutil.Process], seconds: float) -> float:
    """Percent of one core that the processes use together during some seconds of sleep."""
    begin, begin_ns = time.monotonic(), sum(map(_cpu_ns, processes))
    time.sleep(seconds)
    return (sum(map(_cpu_ns, processes)) - begin_ns) / (time.monotonic() - begin) / 1e7


def _cpu_ns(process: psutil.Process) -> int:
    """CPU time in ns; from the scheduler where it tells, because process times come in ticks of 10 ms."""
    try:
        return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat"))
    except OSError:
        times = process.cpu_times()
        return int((times.user + times.system) * 1e9)


def records(count: int) -> dict[str, float]:
    """Returns by how much the trainer's private memory grows over `count` records, after a tenth as many to warm up."""
    from slotloader import SlotLoader

    actions = np.zeros(64, np.int64)
    with SlotLoader(partial(BenchEnv, Workload(64)), num_envs=64, num_workers=2, min_get=1, timeout=0.0) as loader:

        def consume(wanted: int) -> float:
            while wanted > 0:
                batch = loader.recv()
                batch.obs  # noqa: B018
                batch.send(actions[: len(batch)])
                wanted -= len(batch)
            return float(psutil.Process().memory_full_info().uss) / MIB

        before = consume(count // 10)
        after = consume(count)
    return {"trainer_mib": after, "growth_mib": after - before}


def quickstart() -> dict[str, float]:
    """Returns the seconds until the quickstart has printed its first line; then ends it."""
    script = ROOT / "examples" / "quickstart.py"
    if not script.exists():
        raise FileNotFoundError("there is no examples/quickstart.py")
    begin = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, str(script)], cwd=ROOT, stdout=subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.monotonic() - begin
        if not line:
            raise RuntimeError("the quickstart ended without printing anything")
        return {"first_line_s": seconds}
    finally:
        process.terminate()
        process.communicate()


def torchrl_memory(num_envs: int) -> dict[str, float]:
    """Returns the private memory of AsyncEnvPool's workers, started as TorchRL starts them."""
    from torchrl.envs import AsyncEnvPool

    from benchmarks.contenders import torchrl_env

    begin = time.monotonic()
    makers = [partial(torchrl_env, partial(BenchEnv, Workload(num_envs)))] * num_envs
    pool = AsyncEnvPool(makers, backend="multiprocessing", exchange="shm")
    try:
        pool.reset()
        ready = time.monotonic() - begin
        pids = {process.pid for process in pool.threads}
        private = [psutil.Process(pid).memory_full_info().uss / MIB for pid in pids]
        return {"worker_mib": float(np.mean(private)), "largest_mib": max(private), "ready_s": ready}
    finally:
        pool.close(raise_if_closed=False)


def main() -> None:
    options = parse_arguments(__doc__)
    count = 200_000 if options.quick else 1_000_000
    idle_s = 2.0 if options.quick else 4.0

    def case(workload: str, contender: str, function: Any, shown: str, **arguments: Any) -> Case:
        return Case(workload, contender, f"{__package__}.startup:{function.__name__}", arguments, shown)

    outcomes = run_cases(
        [
            case(FLEET, OURS, fleet, "preload=()", preload=[], idle_s=idle_s),
            case(FLEET, PRELOADED, fleet, 'preload=["gymnasium"]', preload=["gymnasium"], idle_s=idle_s),
            case(RECORDS, OURS, records, f"2 workers x 32 envs, {count:,} records", count=count),
            case(QUICKSTART, OURS, quickstart, "examples/quickstart.py"),
            case(MEMORY, TORCHRL, torchrl_memory, "2 workers, start method as TorchRL sets it", num_envs=2),
        ],
        options,
    )
    bars = [
        ("ready", FLEET, OURS, "ready_s", 2.0, " s"),
        ("ready, preloaded", FLEET, PRELOADED, "ready_s", 2.0, " s"),
        ("largest worker", FLEET, OURS, "largest_mib", 12.0, " MiB"),
        ("largest worker, preloaded", FLEET, PRELOADED, "largest_mib", 12.0, " MiB"),
        ("idle, all leased, % of a core", FLEET, OURS, "idle_leased", 2.0, " %"),
        ("idle, blocked recv, % of a core", FLEET, OURS, "idle_blocked", 2.0, " %"),
        (f"trainer's growth over {count:,} records", RECORDS, OURS, "growth_mib", 1.0, " MiB"),
        ("quickstart, first line", QUICKSTART, OURS, "first_line_s", 3.0, " s"),
    ]
    checks = [
        Check(name, median_of(outcomes, workload, contender, figure), bar, at_least=False, unit=unit)
        for name, workload, contender, figure, bar, unit in bars
    ]
    columns = [
        ("ready s", "ready_s", ".2f"),
        ("worker MiB", "worker_mib", ".1f"),
        ("largest MiB", "largest_mib", ".1f"),
        ("nursery MiB", "nursery_mib", ".1f"),
        ("idle leased %", "idle_leased", ".2f"),
        ("idle recv %", "idle_blocked", ".2f"),
        ("growth MiB", "growth_mib", ".2f"),
        ("first line s", "first_line_s", ".2f"),
    ]
    report("startup", outcomes, checks, columns, options)


if __name__ == "__main__":
    main()
