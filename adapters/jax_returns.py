"""V-trace, GAE, n-step and lambda returns on jax arrays: those of `learning.returns`, to be used inside `jax.jit`.

Results are constants: no gradient flows through them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from slotloader.learning import returns
from slotloader.learning.returns import Advantages, VTrace

Array = jax.Array


class _Jax:
    """`Maths` of jax."""

    xp: Any = jnp

    def float_type(self, values: Any) -> Any:
        return jnp.promote_types(jnp.asarray(values).dtype, jnp.float32)

    def array(self, value: Any, dtype: Any) -> Array:
        return jax.lax.stop_gradient(jnp.asarray(value, jnp.bool_ if dtype is None else dtype))

    def exp(self, array: Array) -> Array:
        return jnp.exp(array)

    def at_most(self, array: Array, limit: Any) -> Array:
        return array if limit is None else jnp.minimum(array, limit)

    def backwards(self, terms: Array, decays: Array, last: Array) -> Array:
        return jax.lax.scan(_step, last, (terms, decays), reverse=True)[1]


def _step(later: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
    found = row[0] + row[1] * later
    return found, found  # a function of the module: outside jit, scan compiles once and not at each call


_JAX = _Jax()


def vtrace(
    behaviour_log_probs: Array,
    target_log_probs: Array,
    rewards: Array,
    discounts: Array,
    values: Array,
    bootstrap_value: Array,
    *,
    clip_rho: float | None = 1.0,
    clip_c: float | None = 1.0,
    clip_pg_rho: float | None = 1.0,
    lambda_: float = 1.0,
    valid: Array | None = None,
) -> VTrace:
    """V-trace targets and advantages (Espeholt et al. 2018); see `learning.returns.vtrace` for arguments and shapes."""
    return returns.vtrace_with(
        _JAX, behaviour_log_probs, target_log_probs, rewards, discounts, values, bootstrap_value,
        clip_rho, clip_c, clip_pg_rho, lambda_, valid,
    )  # fmt: skip


def gae(
    rewards: Array,
    discounts: Array,
    values: Array,
    bootstrap_value: Array,
    lambda_: float = 0.95,
    valid: Array | None = None,
) -> Advantages:
    """Generalised advantage estimates (Schulman et al. 2016); see `learning.returns.gae` for arguments and shapes."""
    return returns.gae_with(_JAX, rewards, discounts, values, bootstrap_value, lambda_, valid)


def lambda_returns(
    rewards: Array,
    discounts: Array,
    values: Array,
    bootstrap_value: Array,
    lambda_: float = 1.0,
    valid: Array | None = None,
) -> Array:
    """Lambda returns (T, B); see `slotloader.learning.returns.lambda_returns`."""
    found: Array = returns.lambda_returns_with(_JAX, rewards, discounts, values, bootstrap_value, lambda_, valid)
    return found


def n_step_returns(
    rewards: Array,
    discounts: Array,
    values: Array,
    bootstrap_value: Array,
    n: int,
    valid: Array | None = None,
) -> Array:
    """n-step returns (T, B); see `slotloader.learning.returns.n_step_returns`. Under `jax.jit`, `n` is static."""
    found: Array = returns.n_step_returns_with(_JAX, rewards, discounts, values, bootstrap_value, n, valid)
    return found
