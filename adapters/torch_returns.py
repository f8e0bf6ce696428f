"""V-trace, GAE, n-step and lambda returns on torch tensors: those of `learning.returns`, on the tensors' device.

Results are constants: no gradient flows through them. `torch.compile` takes these functions as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from slotloader.learning import returns
from slotloader.learning.returns import Advantages, VTrace

Tensor = torch.Tensor


class _Torch:
    """`Maths` of torch."""

    xp: Any = torch

    def float_type(self, values: Any) -> torch.dtype:
        return torch.promote_types(torch.as_tensor(values).dtype, torch.float32)

    def array(self, value: Any, dtype: torch.dtype | None) -> Tensor:
        return torch.as_tensor(value, dtype=torch.bool if dtype is None else dtype)

    def exp(self, array: Tensor) -> Tensor:
        return torch.exp(array)

    def at_most(self, array: Tensor, limit: float | None) -> Tensor:
        return array if limit is None else array.clamp(max=limit)

    def backwards(self, terms: Tensor, decays: Tensor, last: Tensor) -> Tensor:
        found = []
        for t in reversed(range(len(terms))):
            last = terms[t] + decays[t] * last
            found.append(last)
        return torch.stack(found[::-1])


_TORCH = _Torch()


@torch.no_grad()
def vtrace(
    behaviour_log_probs: Tensor,
    target_log_probs: Tensor,
    rewards: Tensor,
    discounts: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    *,
    clip_rho: float | None = 1.0,
    clip_c: float | None = 1.0,
    clip_pg_rho: float | None = 1.0,
    lambda_: float = 1.0,
    valid: Tensor | None = None,
) -> VTrace:
    """V-trace targets and advantages (Espeholt et al. 2018); see `learning.returns.vtrace` for arguments and shapes."""
    return returns.vtrace_with(
        _TORCH, behaviour_log_probs, target_log_probs, rewards, discounts, values, bootstrap_value,
        clip_rho, clip_c, clip_pg_rho, lambda_, valid,
    )  # fmt: skip


@torch.no_grad()
def gae(
    rewards: Tensor,
    discounts: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    lambda_: float = 0.95,
    valid: Tensor | None = None,
) -> Advantages:
    """Generalised advantage estimates (Schulman et al. 2016); see `learning.returns.gae` for arguments and shapes."""
    return returns.gae_with(_TORCH, rewards, discounts, values, bootstrap_value, lambda_, valid)


@torch.no_grad()
def lambda_returns(
    rewards: Tensor,
    discounts: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    lambda_: float = 1.0,
    valid: Tensor | None = None,
) -> Tensor:
    """Lambda returns (T, B); see `slotloader.learning.returns.lambda_returns`."""
    found: Tensor = returns.lambda_returns_with(_TORCH, rewards, discounts, values, bootstrap_value, lambda_, valid)
    return found


@torch.no_grad()
def n_step_returns(
    rewards: Tensor,
    discounts: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    n: int,
    valid: Tensor | None = None,
) -> Tensor:
    """n-step returns (T, B); see `slotloader.learning.returns.n_step_returns`."""
    found: Tensor = returns.n_step_returns_with(_TORCH, rewards, discounts, values, bootstrap_value, n, valid)
    return found
