"""Health figures of a loader, put together from its meters and its table, and shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

import numpy as np

from slotloader.batching.meters import Dwell, Meter, merged
from slotloader.batching.verdict import judge
from slotloader.records.specs import Array
from slotloader.table.slots import SlotState, Table


@dataclass(frozen=True)
class Stats:
    """What `loader.stats()` returns. Times are in seconds, rates per second, shares between 0 and 1.

    Attributes:
      seconds: time measured, since construction or `reset_stats`.
      batches: batches handed out.
      records: records in them.
      env_steps: records that are not FIRST.
      env_steps_per_second: their rate.
      episodes: episodes completed.
      batch_fill_ratio: mean of batch size over `max_get`.
      partial_batch_fraction: share of batches smaller than `max_get`.
      obs_to_batch_dwell: from a record's publish to its batch.
      batch_to_action_dwell: from a batch to its `send`, once per batch.
      consumer_busy_fraction: share of time with at least one unanswered batch.
      receive_wait_fraction: share of time that `recv` slept.
      dropped_actions: actions for envs that had ended meanwhile.
      ready, leased, stepping, resetting, starting, dead: slots in each state now.
      restarted: lives begun beyond the first.
      step_seconds, reset_seconds: mean time of `env.step` and `env.reset` per slot, float64 (num_slots,); NaN before
        the first.
      slowest_slot: the slot with the longest mean time per record, resets included.
      verdict: "env-bound", "inference-bound", "balanced" or "straggler"; "starting" before there is enough to say.
      reason: the verdict in one sentence.
    """

    seconds: float
    batches: int
    records: int
    env_steps: int
    env_steps_per_second: float
    episodes: int
    batch_fill_ratio: float
    partial_batch_fraction: float
    obs_to_batch_dwell: Dwell
    batch_to_action_dwell: Dwell
    consumer_busy_fraction: float
    receive_wait_fraction: float
    dropped_actions: int
    ready: int
    leased: int
    stepping: int
    resetting: int
    starting: int
    dead: int
    restarted: int
    step_seconds: Array
    reset_seconds: Array
    slowest_slot: int
    verdict: str
    reason: str

    def __str__(self) -> str:
        return table_text(self)

    def as_dict(self) -> dict[str, float]:
        """Flat numbers for a logger: dwells as `obs_to_batch_dwell/p99`, no arrays, no texts."""
        flat: dict[str, float] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Dwell):
                flat.update({f"{field.name}/{name}": number for name, number in dataclasses.asdict(value).items()})
            elif isinstance(value, (int, float)):
                flat[field.name] = value
        return flat


def snapshot(table: Table, meters: Sequence[Meter], restarted: int) -> Stats:
    """Puts the figures of all receivers and of the table together; `restarted` is counted by the fleet."""
    dead = table.state == SlotState.DEAD
    now = monotonic_ns()
    seconds = max((now - min(meter.start_ns for meter in meters)) * 1e-9, 1e-9)
    batches, records, env_steps, episodes, partial, dropped = (
        sum(getattr(meter, name) for meter in meters)
        for name in ("batches", "records", "env_steps", "episodes", "partial", "dropped_actions")
    )
    states = np.bincount(table.state, minlength=len(SlotState))
    with np.errstate(invalid="ignore", divide="ignore"):
        step_seconds = table.step_ns / table.steps * 1e-9
        reset_seconds = table.reset_ns / table.resets * 1e-9
        per_record = (table.step_ns + table.reset_ns) / np.maximum(table.steps, 1) * 1e-9
    busy = float(np.mean([meter.busy_ns(now) for meter in meters])) * 1e-9 / seconds
    waiting = float(np.mean([meter.wait_ns for meter in meters])) * 1e-9 / seconds
    fill = sum(meter.fill for meter in meters) / max(batches, 1)
    slowest = int(np.argmax(per_record))
    obs_to_batch = merged([meter.obs_to_batch for meter in meters])
    batch_to_action = merged([meter.batch_to_action for meter in meters])
    verdict, reason = judge(busy, waiting, per_record, env_steps, obs_to_batch, batch_to_action)
    return Stats(
        seconds=seconds,
        batches=batches,
        records=records,
        env_steps=env_steps,
        env_steps_per_second=env_steps / seconds,
        episodes=episodes,
        batch_fill_ratio=fill,
        partial_batch_fraction=partial / max(batches, 1),
        obs_to_batch_dwell=obs_to_batch,
        batch_to_action_dwell=batch_to_action,
        consumer_busy_fraction=min(busy, 1.0),
        receive_wait_fraction=min(waiting, 1.0),
        dropped_actions=dropped,
        ready=int(states[SlotState.READY]),
        leased=int(states[SlotState.LEASED]),
        stepping=int(states[SlotState.ACTED] + states[SlotState.WRITING]),
        resetting=int(np.count_nonzero(table.resetting[~dead])),
        starting=int(states[SlotState.STARTING]),
        dead=int(np.count_nonzero(dead)),
        restarted=restarted,
        step_seconds=step_seconds,
        reset_seconds=reset_seconds,
        slowest_slot=slowest,
        verdict=verdict,
        reason=reason,
    )


def table_text(stats: Stats) -> str:
    """The figures as a table for people."""

    def dwell(value: Dwell) -> str:
        return " / ".join(f"{number * 1e3:.3g}" for number in (value.mean, value.p50, value.p99, value.max)) + " ms"

    step, reset = (np.nan_to_num(times) * 1e3 for times in (stats.step_seconds, stats.reset_seconds))
    rows: list[tuple[str, Any]] = [
        ("env steps", f"{stats.env_steps:,} in {stats.seconds:.1f} s"),
        ("env steps/s", f"{stats.env_steps_per_second:,.0f}"),
        ("episodes", f"{stats.episodes:,}"),
        ("batches", f"{stats.batches:,} of {stats.records / max(stats.batches, 1):.1f} records"),
        ("batch_fill_ratio", f"{stats.batch_fill_ratio:.2f}"),
        ("partial_batch_fraction", f"{stats.partial_batch_fraction:.2f}"),
        ("obs_to_batch_dwell  mean/p50/p99/max", dwell(stats.obs_to_batch_dwell)),
        ("batch_to_action_dwell", dwell(stats.batch_to_action_dwell)),
        ("consumer_busy_fraction", f"{stats.consumer_busy_fraction:.2f}"),
        ("env.step per slot    median/slowest", f"{np.median(step):.3g} / {step.max():.3g} ms"),
        ("env.reset per slot", f"{np.median(reset):.3g} / {reset.max():.3g} ms"),
        ("slots ready/leased/stepping/dead", f"{stats.ready} / {stats.leased} / {stats.stepping} / {stats.dead}"),
        ("restarted", f"{stats.restarted}"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join([*lines, "", f"  {stats.verdict}: {stats.reason}."])
