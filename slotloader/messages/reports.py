"""What workers report to the trainer, and the exceptions that failures become."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slotloader.errors import EnvFailed, RecordMismatch, WorkerDied
from slotloader.messages.pickling import Packed
from slotloader.records.specs import Tree


@dataclass(frozen=True)
class Built:
    """A worker's envs exist: the trees of each, and the first env's spaces for the user; packed between processes."""

    worker: int
    specs: Sequence[tuple[Tree, Tree, Tree]] | Packed
    spaces: Any


@dataclass(frozen=True)
class Failed:
    """Envs that raised; only strings cross, so nothing of the exception has to be picklable.

    Attributes:
      note: what the fleet has to add, e.g. that it gave up restarting.
      cause: the exception itself where worker and trainer are one process.
    """

    worker: int
    slots: tuple[int, ...]
    pid: int
    phase: str
    step: int
    error_type: str
    text: str
    traceback: str
    cause: BaseException | None = None
    note: str = ""


@dataclass(frozen=True)
class Answer:
    """Answer to a control call: `results` by slot, or the failure of one."""

    worker: int
    ticket: int
    results: dict[int, Any]
    failure: Failed | None = None


@dataclass(frozen=True)
class Died:
    """A worker process has ended and been reaped; `exitcode` is negative for a signal.

    Attributes:
      why: why the fleet itself killed it (a hang), with its stack; empty if it did not.
      note: as in `Failed`.
    """

    worker: int
    slots: tuple[int, ...]
    pid: int
    exitcode: int
    why: str = ""
    note: str = ""


@dataclass(frozen=True)
class Remark:
    """Something of an env that is likely a mistake and no failure; logged once for each `topic`."""

    topic: str
    text: str


@dataclass(frozen=True)
class Removed:
    """Envs that were taken out of the loader are closed: nobody writes their slots any more."""

    slots: tuple[int, ...]


Event = Failed | Died


def failure_of(worker: int, slot: int, phase: str, step: int, error: BaseException, keep: bool) -> Failed:
    """Turns an exception of an env into strings; survives exceptions whose `__str__` raises."""
    try:
        text = str(error)
    except BaseException:
        text = "<the exception's __str__ raised>"
    try:
        lines = "".join(traceback.format_exception(error))
    except BaseException:
        lines = "".join(traceback.format_tb(error.__traceback__))
    name, cause = type(error).__name__, error if keep else None
    return Failed(worker, (slot,), os.getpid(), phase, step, name, text[:4000], shortened(lines), cause)


def shortened(lines: str) -> str:
    """A traceback of at most 16,000 characters: where it began and how it ended."""
    return lines if len(lines) <= 16000 else f"{lines[:8000]}\n[...]\n{lines[-8000:]}"


def error_from(events: Sequence[Event]) -> EnvFailed | WorkerDied:
    """One exception for some failures; every failed env is named in it."""
    slots = sorted({slot for event in events for slot in event.slots})
    text = "\n\n".join(describe(event) for event in events[:8])
    if len(events) > 8:
        text += f"\n\nand {len(events) - 8} more; failed slots: {slots}"
    first = events[0]
    if isinstance(first, Died):
        return WorkerDied(text, slots, first.pid, first.exitcode)
    mismatch = all(isinstance(event, Failed) and event.error_type == "SpecMismatch" for event in events)
    error = (RecordMismatch if mismatch else EnvFailed)(text, slots, first.pid, first.traceback)
    error.__cause__ = first.cause
    return error


def describe(event: Event) -> str:
    """What happened, with the traceback of the worker."""
    head = summary(event)
    if isinstance(event, Failed) and event.error_type != "SpecMismatch" and event.cause is None and event.traceback:
        return f"{head}\n\nTraceback in the worker:\n{event.traceback}"
    return head


def summary(event: Event) -> str:
    """What happened, in one sentence: slot, worker, pid, what and why."""
    note = f"; {event.note}" if event.note else ""
    if isinstance(event, Died):
        slots = f"slots {list(event.slots)}" if len(event.slots) > 1 else f"slot {event.slots[0]}"
        how = event.why or f"the worker {how_it_ended(event.exitcode)}"
        return f"{slots} (worker {event.worker}, pid {event.pid}): {how}{note}"
    place = f"slot {event.slots[0]} (worker {event.worker}, pid {event.pid})"
    if event.error_type == "SpecMismatch":
        return f"{place}, step {event.step}: {event.text}{note}"
    what = {"factory": "the factory", "unpickling": "unpickling the factory in the worker"}
    doing = what.get(event.phase, f"env.{event.phase}")
    when = f" at step {event.step}" if event.phase == "step" else ""
    return f"{place}: {doing} raised {event.error_type}{when}: {event.text}{note}"


def how_it_ended(exitcode: int) -> str:
    """What the exit status of a process says, as the end of a sentence."""
    if exitcode >= 0:
        return f"exited with status {exitcode} (os._exit or sys.exit in an env?)"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = "; if nobody sent it, the machine ran out of memory (see dmesg)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
