"""What a record is within its episode."""

from __future__ import annotations

import enum


class StepType(enum.IntEnum):
    """What a record is within its episode. The names are dm_env's, with the two ends told apart."""

    FIRST = 0
    MID = 1
    TERMINATION = 2
    TRUNCATION = 3
