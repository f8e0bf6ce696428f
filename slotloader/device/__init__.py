"""The device path: staging, padding, policies, and actions on their way back. What an adapter implements.

An adapter for another framework or device implements `DeviceOps`, most easily as a subclass of `HostOps`, and makes
`DeviceSource(loader, ops)`, or `slotloader.DeviceBatches` with the conveniences for learners.
"""

from slotloader.device.batch import DeviceBatch
from slotloader.device.batches import DeviceSource
from slotloader.device.ops import Adopted, DeviceOps, HostOps, Own, Stream, aligned_buffer, map_tree
from slotloader.device.policies import Acted, Inputs, Policy, RecurrentState
from slotloader.device.preparation import FrameStack

__all__ = [
    "Acted",
    "Adopted",
    "DeviceBatch",
    "DeviceOps",
    "DeviceSource",
    "FrameStack",
    "HostOps",
    "Inputs",
    "Own",
    "Policy",
    "RecurrentState",
    "Stream",
    "aligned_buffer",
    "map_tree",
]
