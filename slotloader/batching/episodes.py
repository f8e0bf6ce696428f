"""Episodes that have ended, by themselves or by a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotloader.records import values


@dataclass(frozen=True)
class Episode:
    """One episode that has ended.

    Attributes:
      slot: its slot.
      life: its env's life.
      index: count within the life, from 0.
      episode_return: sum of rewards; a wrapper's `info["episode"]["r"]` if there is one.
      length: env steps; a wrapper's `info["episode"]["l"]` if there is one.
      seed: seed of its reset, None if it was reset without one.
      interrupted: cut by a failure, or by `loader.reset` or an evaluation, rather than ended by the env.
      info: the info dict of the last record, sequences as tuples.
      info_dropped: keys of that dict that could not be packed or did not fit.
      reason: why it was cut, in a few words; empty if the env ended it.
    """

    slot: int
    life: int
    index: int
    episode_return: float
    length: int
    seed: int | None
    interrupted: bool
    info: dict[str, Any]
    info_dropped: tuple[str, ...] = ()
    reason: str = ""


def read_episodes(table: Any, slots: Sequence[int], interrupted: bool = False) -> list[Episode]:
    """The finished episodes of `slots`, read while their last records are leased."""
    episodes = []
    for slot in slots:
        length, row = int(table.info_length[slot]), table.progress[slot]
        info, dropped = values.unpack(table.info_data[slot, :length].tobytes()) if length and not interrupted else ({}, ())
        seed = int(table.episode_seed[slot])
        wrapped = info.get("episode")
        figures = wrapped if isinstance(wrapped, dict) else {}
        episodes.append(
            Episode(
                slot=slot,
                life=int(table.life[slot]),
                index=int(table.episode[slot]),
                episode_return=float(np.asarray(figures.get("r", row["episode_return"])).reshape(-1)[0]),
                length=int(np.asarray(figures.get("l", row["length"])).reshape(-1)[0]),
                seed=None if seed < 0 else seed,
                interrupted=interrupted,
                info=info,
                info_dropped=tuple(dropped),
            )
        )
    return episodes
