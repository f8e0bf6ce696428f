"""Runs the contenders of a benchmark, each in its own fresh process, and prints its figures beside their bars.

A benchmark lists `Case`s. They run one after the other, round after round, in alternating order, so that a slow minute
of the machine touches all of them. What is compared is the median of the rounds; a ratio is the median of the ratios
within the rounds. A bar that is missed prints FAIL and changes no exit status: the figures depend on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
CASE_LIMIT_S = 150.0
LOAD_BEFORE = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # of others: nothing of ours runs yet
PEERS = ("gymnasium", "stable-baselines3", "torch", "torchrl", "posix_ipc")


@dataclass(frozen=True)
class Case:
    """One contender on one workload.

    Attributes:
      workload: what is run, for the table.
      contender: who runs it, for the table.
      target: "module:function", called in a fresh process; returns its figures as a dict of floats.
      arguments: keyword arguments of `target`, JSON values only.
      shown: the settings of the contender, for the table.
    """

    workload: str
    contender: str
    target: str
    arguments: dict[str, Any] = field(default_factory=dict)
    shown: str = ""


@dataclass
class Outcome:
    """The figures of one case, one dict per round, or why there are none."""

    case: Case
    runs: list[dict[str, float]] = field(default_factory=list)
    problem: str = ""

    def values(self, name: str) -> list[float]:
        return [run[name] for run in self.runs if name in run]

    def median(self, name: str) -> float | None:
        values = self.values(name)
        return statistics.median(values) if values else None


@dataclass(frozen=True)
class Check:
    """One figure beside its bar. A `value` of None is a figure that could not be taken.

    Attributes:
      name: what is judged.
      value: the figure.
      bar: the bar it is held to.
      at_least: whether the figure must reach the bar; else it must stay below.
      unit: unit of both, for the table.
    """

    name: str
    value: float | None
    bar: float
    at_least: bool = True
    unit: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "-"
        passed = self.value >= self.bar if self.at_least else self.value <= self.bar
        return "PASS" if passed else "FAIL"


def parse_arguments(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short run; the figures are rough")
    parser.add_argument("--runs", type=int, default=None, help="rounds (default 5, with --quick 1)")
    parser.add_argument("--json", metavar="PATH", help="write every figure of every run there")
    parser.add_argument("--only", metavar="TEXT", help="run only the cases whose name contains TEXT")
    options = parser.parse_args(argv)
    options.runs = options.runs or (1 if options.quick else 5)
    return options


def run_cases(cases: Sequence[Case], options: argparse.Namespace) -> list[Outcome]:
    """Runs all cases in `options.runs` rounds and returns their outcomes in the order of `cases`."""
    chosen = [case for case in cases if not options.only or options.only in f"{case.workload}: {case.contender}"]
    outcomes = [Outcome(case) for case in chosen]
    for number in range(options.runs):
        for outcome in outcomes if number % 2 == 0 else outcomes[::-1]:
            if outcome.problem:
                continue
            _progress(f"round {number + 1}/{options.runs}  {outcome.case.workload}: {outcome.case.contender}")
            figures, problem = run_in_fresh_process(outcome.case)
            outcome.problem = problem
            if figures is not None:
                outcome.runs.append(figures)
    _progress("")
    return outcomes


def run_in_fresh_process(case: Case) -> tuple[dict[str, float] | None, str]:
    """Runs one case in a fresh interpreter and returns (its figures or None, its problem or "")."""
    with tempfile.TemporaryDirectory(prefix="slotloader-bench-", ignore_cleanup_errors=True) as folder:
        result, stderr = Path(folder, "result.json"), Path(folder, "stderr.txt")
        command = [sys.executable, "-m", "benchmarks.child", case.target, json.dumps(case.arguments), str(result)]
        with stderr.open("w") as errors:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "TMPDIR": folder},  # what a killed case leaves there goes with the folder
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
            try:
                process.wait(CASE_LIMIT_S)
            except subprocess.TimeoutExpired:
                return None, f"no result within {CASE_LIMIT_S:.0f} s"
            finally:
                _end(process)
        if not result.exists():
            lines = stderr.read_text(errors="replace").strip().splitlines()
            message = lines[-1].replace(str(ROOT), ".") if lines else "no message"
            return None, f"failed ({process.returncode}): {message}"
        answer = json.loads(result.read_text())
        return answer.get("figures"), answer.get("problem", "")


def ratio(outcomes: Sequence[Outcome], name: str, above: tuple[str, str], below: tuple[str, str]) -> float | None:
    """Returns the median over the rounds of `above / below`, each given as (workload, contender)."""
    found = {(outcome.case.workload, outcome.case.contender): outcome for outcome in outcomes}
    if above not in found or below not in found:
        return None
    pairs = list(zip(found[above].values(name), found[below].values(name), strict=False))
    return statistics.median(a / b for a, b in pairs) if pairs else None


def median_of(outcomes: Sequence[Outcome], workload: str, contender: str, name: str) -> float | None:
    """Returns the median of one figure of one case, or None where the case has not run."""
    for outcome in outcomes:
        if (outcome.case.workload, outcome.case.contender) == (workload, contender):
            return outcome.median(name)
    return None


def report(
    title: str,
    outcomes: Sequence[Outcome],
    checks: Sequence[Check],
    columns: Sequence[tuple[str, str, str]],
    options: argparse.Namespace,
) -> None:
    """Prints the tables and writes the JSON file if one is asked for.

    Args:
      title: name of the benchmark.
      outcomes: what `run_cases` returned.
      checks: the figures that have a bar.
      columns: (heading, name of the figure, format spec) of each column of figures.
      options: what `parse_arguments` returned.
    """
    machine = describe_machine()
    print(f"{title}: medians of {options.runs} interleaved run(s){', quick' if options.quick else ''}")
    print(f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, numpy {machine['numpy']}, ", end="")
    print(f"commit {machine['commit']}, load average before {machine['load_before']}\n")
    rows = []
    for outcome in outcomes:
        case = outcome.case
        cells = [_cell(outcome, name, spec) for _, name, spec in columns]
        rows.append([case.workload, case.contender, *cells, outcome.problem or case.shown])
    print_table(["workload", "contender", *(heading for heading, _, _ in columns), "settings"], rows, 2, len(columns))
    if checks:
        print()
        lines = [[check.name, _number(check.value, check.unit), _bar(check), check.verdict] for check in checks]
        print_table(["judged", "figure", "bar", "verdict"], lines, 1, 2)
    if options.json:
        _write_json(options, title, machine, outcomes, checks)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], first_number: int, numbers: int) -> None:
    """Prints aligned columns; `numbers` columns from `first_number` on are aligned to the right."""
    widths = [max(len(row[at]) for row in [headings, *rows]) for at in range(len(headings))]
    for row in [headings, ["-" * width for width in widths], *rows]:
        cells = []
        for at, (cell, width) in enumerate(zip(row, widths, strict=True)):
            right = first_number <= at < first_number + numbers
            cells.append(cell.rjust(width) if right else cell.ljust(width))
        print("  ".join(cells).rstrip())


def describe_machine() -> dict[str, Any]:
    """Returns what is needed to judge the figures: the machine, the versions and the commit."""
    versions = {}
    for name in ("numpy", *PEERS):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_before": None if LOAD_BEFORE is None else round(LOAD_BEFORE, 2),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "versions": versions,
        "commit": _commit(),
    }


def _cell(outcome: Outcome, name: str, spec: str) -> str:
    value = outcome.median(name)
    return "-" if value is None else format(value, spec)


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.3g}{unit}" if abs(value) < 1000 else f"{value:,.0f}{unit}"


def _bar(check: Check) -> str:
    return f"{'>=' if check.at_least else '<='} {_number(check.bar, check.unit)}"


def _write_json(
    options: argparse.Namespace,
    title: str,
    machine: dict[str, Any],
    outcomes: Sequence[Outcome],
    checks: Sequence[Check],
) -> None:
    results = []
    for outcome in outcomes:
        case = outcome.case
        names = sorted({name for run in outcome.runs for name in run})
        medians = {name: outcome.median(name) for name in names}
        entry = {"workload": case.workload, "contender": case.contender, "settings": case.shown}
        results.append({**entry, "medians": medians, "runs": outcome.runs, "problem": outcome.problem})
    judged = [
        {"name": c.name, "value": c.value, "bar": c.bar, "at_least": c.at_least, "unit": c.unit, "verdict": c.verdict}
        for c in checks
    ]
    answer = {"benchmark": title, "quick": options.quick, "machine": machine, "results": results, "checks": judged}
    Path(options.json).write_text(json.dumps(answer, indent=2) + "\n")
    print(f"\nwrote {options.json}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills what a case left behind: its descendants while it still runs, and its process group in any case."""
    trackers: list[psutil.Process] = []
    if process.poll() is None:
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("resource_tracker" in part for part in descendant.cmdline()):
                    trackers.append(descendant)  # ends by itself and unlinks the semaphores of those who can no longer
                else:
                    descendant.kill()
        process.kill()
    psutil.wait_procs(trackers, timeout=5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group is the session that this case was started in
    process.wait()


def _progress(text: str) -> None:
    """Shows on stderr what runs now; on a terminal each text replaces the one before, and "" clears the line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
