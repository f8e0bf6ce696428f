"""What a worker is told: which envs it hosts, what all envs share, and how a life is to begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slotloader.worker.envs import EnvFactory, EpisodeKey

OnReset = Callable[[EpisodeKey], Mapping[str, Any] | None]


@dataclass(frozen=True)
class EnvOptions:
    """What all envs of a loader share.

    Attributes:
      seed: base seed, see `envs.life_seed`.
      on_reset: steers each reset; returns a dict with `seed` and `options`, or None.
      info: declared info columns, name to dtype, `(dtype, shape)` or space.
      max_bytes: capacities of TEXT and PACKED leaves.
      check: also refuse NaN and values out of bounds.
      spares: further envs of each slot, reset in advance.
      spare_processes: each env, spares too, runs in a process of its own.
      recycle_after: episodes after which an env is closed and built anew; None is never.
    """

    seed: int
    on_reset: OnReset | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    max_bytes: Mapping[str, int] = field(default_factory=dict)
    check: bool = False
    spares: int = 0
    spare_processes: bool = False
    recycle_after: int | None = None


@dataclass(frozen=True)
class WorkerConfig:
    """What one worker hosts.

    Attributes:
      index: which worker of the loader it is.
      slots: the slots of its envs, ascending; they need not be neighbours, but a worker looks over neighbours faster.
      factories: one per slot; None where the env has been removed.
      options: what all envs share.
      threads: step each env in a thread of its own.
      lives: life of each env; default all 0.
    """

    index: int
    slots: tuple[int, ...]
    factories: Sequence[EnvFactory | None]
    options: EnvOptions
    threads: bool = False
    lives: Sequence[int] = ()


@dataclass(frozen=True)
class LifePlan:
    """How a slot begins another life without its env being built anew: what the command `begin_life` takes for each slot.

    Attributes:
      life: which.
      seed: of the life's first reset, exactly; None takes that of the life. Wins over `on_reset`.
      options: of the life's first reset; None has none. Wins over `on_reset`.
      evaluation: `(seed, begun)` to seed every episode of the life by `envs.evaluation_seed`, counted on from `begun`.
    """

    life: int
    seed: int | None = None
    options: Mapping[str, Any] | None = None
    evaluation: tuple[int, int] | None = None
