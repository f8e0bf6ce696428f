"""`to_numpy`: batches as padded numpy arrays; the reference for the other adapters."""

from __future__ import annotations

from typing import Any

from slotloader.batching.receiver import Receiver
from slotloader.device.ops import HostOps
from slotloader.device_batches import DeviceBatches
from slotloader.loader import SlotLoader


def to_numpy(loader: SlotLoader | Receiver, **options: Any) -> DeviceBatches:
    """Batches as numpy arrays of fixed sizes.

    Args:
      loader: a loader, or one of the receivers of `loader.split(n)`.
      options: those of `DeviceBatches`: buckets, in_flight, fields, float64, dtype, frame_stack, seed.

    Returns:
      Batches to iterate, to `run` a policy on, and to close.
    """
    return DeviceBatches(loader, HostOps(), **options)
