"""The verdict: which side a run waits for, in one word and one sentence."""

from __future__ import annotations

import numpy as np

from slotloader.batching.meters import Dwell
from slotloader.records.specs import Array

# Thresholds (docs/metrics.md): shares of the measured time.
BUSY_HIGH = 0.80  # the consumer holds an unanswered batch for this share or more: inference-bound
BUSY_LOW = 0.50  # for less than this: env-bound
STRAGGLER_RATIO = 3.0  # the slowest slot against the median slot
STRAGGLER_FLOOR = 0.001  # seconds per record below which no slot is called slow


def judge(
    busy: float, waiting: float, per_record: Array, env_steps: int, obs_to_batch: Dwell, batch_to_action: Dwell
) -> tuple[str, str]:
    """Gives the verdict and its sentence.

    The rules, in order:

    1. fewer than two steps per slot: "starting";
    2. the consumer is busy for `BUSY_HIGH` or more: "inference-bound";
    3. it is not, and the slowest slot takes `STRAGGLER_RATIO` times the median slot's time per record,
       and at least `STRAGGLER_FLOOR`: "straggler";
    4. it is busy for less than `BUSY_LOW`: "env-bound"; otherwise "balanced".
    """
    slots = max(int(np.count_nonzero(per_record)), 1)
    if env_steps < 2 * slots:
        return "starting", f"only {env_steps} env steps from {slots} slots so far: too few to say"
    shares = f"the policy holds a batch {busy:.0%} of the time, recv sleeps {waiting:.0%}"
    if busy >= BUSY_HIGH:
        return "inference-bound", (
            f"{shares}; an answer takes {batch_to_action.mean * 1e3:.3g} ms and ready records wait "
            f"{obs_to_batch.mean * 1e3:.3g} ms: a faster policy or larger batches would help, more envs would not"
        )
    stepped = per_record[per_record > 0]  # reserved slots and lost ones have no say
    worst, median = int(np.argmax(per_record)), float(np.median(stepped)) if stepped.size else 0.0
    if slots > 1 and median > 0 and per_record[worst] >= max(STRAGGLER_RATIO * median, STRAGGLER_FLOOR):
        return "straggler", (
            f"slot {worst} takes {per_record[worst] * 1e3:.3g} ms per record, resets included, against a median of "
            f"{median * 1e3:.3g} ms: keep min_get below the number of slots, or speed that env up; {shares}"
        )
    if busy < BUSY_LOW:
        return "env-bound", f"{shares}: more envs or faster ones would help, a faster policy would not"
    return "balanced", f"{shares}: neither side waits much for the other"
