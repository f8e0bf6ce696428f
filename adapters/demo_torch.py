"""The network of `slotloader demo --policy torch`, in the policy contract of the adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from slotloader.adapters.torch_adapter import ops_for, to_torch
from slotloader.device.policies import Acted, Inputs, Policy
from slotloader.device_batches import DeviceBatches
from slotloader.loader import SlotLoader


def start(loader: SlotLoader, params: dict[str, Any], low: int) -> tuple[DeviceBatches, Policy, str]:
    """Batches, the policy, and where it runs.

    Args:
      loader: the fleet.
      params: numpy weights, see `slotloader.tools.demo.make_params`.
      low: the first action.
    """
    device = ops_for(None).device
    batches = to_torch(loader, device, fields=["obs"])
    if device.type == "cpu":
        torch.set_num_threads(1)  # the other cores are the envs'; torch's threads spin while they wait

    def act(params: dict[str, Any], inputs: Inputs, state: Any, generator: Any) -> Acted:
        scores = network(params, inputs.obs)
        noise = -torch.empty_like(scores).exponential_(generator=generator).log()  # Gumbel: a sample of the softmax
        return Acted((scores + noise).argmax(-1) + low)

    return batches, batches.policy(act, params=params), f"torch {torch.__version__} on {device}, eager"


def network(params: dict[str, Any], obs: Any) -> Any:
    """Scores float32 (B, actions) for grey screens uint8 (B, height, width), or for numbers (B, ...)."""
    if "conv1" in params:
        x = obs[:, None, ::2, ::2].float() / 255.0
        x = functional.relu(functional.conv2d(x, params["conv1"], stride=4))
        x = functional.relu(functional.conv2d(x, params["conv2"], stride=2))
    else:
        x = obs.float()
    x = functional.relu(x.reshape(len(x), -1) @ params["hidden"])
    return x @ params["out"]
