"""The network of `slotloader demo --policy jax`, in the policy contract of the adapters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from slotloader.adapters.jax_adapter import to_jax
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
    batches = to_jax(loader, fields=["obs"])

    def act(params: dict[str, Any], inputs: Inputs, state: Any, key: Any) -> Acted:
        return Acted(jax.random.categorical(key, network(params, inputs.obs)) + low)

    return batches, batches.compile(act, params=params), f"jax {jax.__version__} on {jax.devices()[0]}, compiled"


def network(params: dict[str, Any], obs: Any) -> Any:
    """Scores float32 (B, actions) for grey screens uint8 (B, height, width), or for numbers (B, ...)."""
    if "conv1" in params:
        x = obs[:, None, ::2, ::2].astype(jnp.float32) / 255.0
        x = jax.nn.relu(jax.lax.conv(x, params["conv1"], (4, 4), "VALID"))
        x = jax.nn.relu(jax.lax.conv(x, params["conv2"], (2, 2), "VALID"))
    else:
        x = obs.astype(jnp.float32)
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["hidden"])
    return x @ params["out"]
