"""SlotLoader: the data plane between many slow environments and one policy on an accelerator."""

from slotloader.batches import Batch, BytesColumn, Episode
from slotloader.envs import EnvContext, EpisodeKey
from slotloader.errors import (
    ActionError,
    EnvFailed,
    FleetStalled,
    LeaseExpired,
    LoaderClosed,
    RecordMismatch,
    SlotLoaderError,
    SpecMismatch,
    WorkerDied,
)
from slotloader.loader import SlotLoader
from slotloader.receiver import Receiver
from slotloader.slots import SlotState, StepType
from slotloader.stats import Dwell, Stats

__version__ = "0.1.0"

__all__ = [
    "ActionError",
    "Batch",
    "BytesColumn",
    "Dwell",
    "EnvContext",
    "EnvFailed",
    "Episode",
    "EpisodeKey",
    "FleetStalled",
    "LeaseExpired",
    "LoaderClosed",
    "Receiver",
    "RecordMismatch",
    "SlotLoader",
    "SlotLoaderError",
    "SlotState",
    "SpecMismatch",
    "Stats",
    "StepType",
    "WorkerDied",
    "__version__",
]
