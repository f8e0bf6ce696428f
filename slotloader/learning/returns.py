"""Returns and advantages of unrolls, as pure functions: V-trace, GAE, n-step and lambda returns.

All of them share one convention. An unroll is time-major and holds the records 0..T of B slots:

- `values` (T, B) are those of the records 0..T-1, `bootstrap_value` (B,) is that of record T.
- Row t of `rewards`, `discounts` and `valid` (T, B) belongs to transition t, from record t to record t + 1: it is the reward
  and the discount of record t + 1. `discounts` are already times gamma: `gamma * discount[1:]`, where `discount` of a record
  is 0 for TERMINATION and 1 otherwise.
- `valid[t]` is False where there is no transition t: record t + 1 is FIRST, after a last record or after an interruption. So
  `valid = ~is_first[1:]`. At such a row the target is the value itself, the advantage is 0, and nothing passes from one
  episode to the other. Whatever the other arguments hold there is ignored.

Of an `Unroll` these are `unroll.reward[1:]`, `gamma * unroll.discount[1:]` and `unroll.valid`.

Truncation needs nothing more: the transition into a last record with TRUNCATION has discount 1, so it bootstraps from the
value of that record, which is the true last observation; the row after it is invalid. After TERMINATION the discount is 0.

Results are constants to a learner: no gradient flows through them, as in the papers. They are computed in the dtype of
`values`, at least float32. The same functions for other frameworks are in `slotloader.adapters.torch_returns` and
`slotloader.adapters.jax_returns`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from slotloader.arguments import require_count
from slotloader.records.specs import Array


class VTrace(NamedTuple):
    """What `vtrace` returns; each of shape (T, B).

    Attributes:
      vs: targets of the value function.
      pg_advantages: what the policy gradient `grad log pi(a|x)` is multiplied with.
      rhos: importance weights pi / mu, not clipped; 1 at invalid rows.
    """

    vs: Any
    pg_advantages: Any
    rhos: Any


class Advantages(NamedTuple):
    """What `gae` returns; each of shape (T, B).

    Attributes:
      advantages: estimates of the advantage; 0 at invalid rows.
      returns: targets of the value function, `advantages + values`.
    """

    advantages: Any
    returns: Any


class Maths(Protocol):
    """What differs between the frameworks."""

    @property
    def xp(self) -> Any:
        """Their numpy: `where`, `concatenate`, `zeros_like`, `ones_like`."""

    def float_type(self, values: Any) -> Any:
        """The dtype of `values`, at least float32."""

    def array(self, value: Any, dtype: Any) -> Any:
        """An array of `dtype` without a gradient; of bool for None."""

    def exp(self, array: Any) -> Any:
        """Infinite where it overflows."""

    def at_most(self, array: Any, limit: Any) -> Any:
        """Elementwise minimum; None is no limit."""

    def backwards(self, terms: Any, decays: Any, last: Any) -> Any:
        """`x[t] = terms[t] + decays[t] * x[t + 1]` with `x[T] = last`: (T, B), (T, B), (B,) -> (T, B)."""


class _Unroll:
    """The checked arguments that all functions share: rewards and discounts are 0 at invalid rows."""

    def __init__(self, maths: Maths, rewards: Any, discounts: Any, values: Any, bootstrap_value: Any, valid: Any) -> None:
        self._maths, xp = maths, maths.xp
        self._dtype = maths.float_type(values)
        self.values = maths.array(values, self._dtype)
        self._shape = tuple(self.values.shape)
        if not self._shape or self._shape[0] == 0:
            raise ValueError(f"values: expected (T, B) with at least one row, found {self._shape}")
        self.valid = xp.ones_like(self.values, dtype=bool) if valid is None else maths.array(valid, None)
        self._require("valid", self.valid)
        self.rewards, self.discounts = self.rows("rewards", rewards), self.rows("discounts", discounts)
        self.bootstrap = maths.array(bootstrap_value, self._dtype)
        if tuple(self.bootstrap.shape) != self._shape[1:]:
            raise ValueError(
                f"bootstrap_value: expected {self._shape[1:]}, one value per slot, found {tuple(self.bootstrap.shape)}"
            )
        self.next_values = xp.concatenate((self.values[1:], self.bootstrap[None]))

    def _require(self, name: str, array: Any) -> None:
        if tuple(array.shape) != self._shape:
            raise ValueError(f"{name}: expected {self._shape}, the shape (T, B) of values, found {tuple(array.shape)}")

    def rows(self, name: str, value: Any) -> Any:
        """An argument of shape (T, B), 0 at invalid rows whatever it holds there."""
        array = self._maths.array(value, self._dtype)
        self._require(name, array)
        return self.where_valid(array, 0.0)

    def where_valid(self, array: Any, other: Any) -> Any:
        """`array` at valid rows."""
        return self._maths.xp.where(self.valid, array, other)


def vtrace_with(
    maths: Maths,
    behaviour_log_probs: Any,
    target_log_probs: Any,
    rewards: Any,
    discounts: Any,
    values: Any,
    bootstrap_value: Any,
    clip_rho: Any,
    clip_c: Any,
    clip_pg_rho: Any,
    lambda_: Any,
    valid: Any,
) -> VTrace:
    """`vtrace` in any framework."""
    _require_lambda(lambda_)
    unroll = _Unroll(maths, rewards, discounts, values, bootstrap_value, valid)
    target = unroll.rows("target_log_probs", target_log_probs)
    rhos = maths.exp(target - unroll.rows("behaviour_log_probs", behaviour_log_probs))
    rewards, discounts, values = unroll.rewards, unroll.discounts, unroll.values
    deltas = maths.at_most(rhos, clip_rho) * (rewards + discounts * unroll.next_values - values)
    decays = discounts * lambda_ * maths.at_most(rhos, clip_c)
    zero = maths.xp.zeros_like(unroll.bootstrap)
    errors = maths.backwards(unroll.where_valid(deltas, 0.0), decays, zero)
    next_targets = unroll.next_values + lambda_ * maths.xp.concatenate((errors[1:], zero[None]))
    advantages = maths.at_most(rhos, clip_pg_rho) * (rewards + discounts * next_targets - values)
    return VTrace(values + errors, unroll.where_valid(advantages, 0.0), rhos)


def gae_with(
    maths: Maths, rewards: Any, discounts: Any, values: Any, bootstrap_value: Any, lambda_: Any, valid: Any
) -> Advantages:
    """`gae` in any framework."""
    _require_lambda(lambda_)
    unroll = _Unroll(maths, rewards, discounts, values, bootstrap_value, valid)
    deltas = unroll.where_valid(unroll.rewards + unroll.discounts * unroll.next_values - unroll.values, 0.0)
    advantages = maths.backwards(deltas, unroll.discounts * lambda_, maths.xp.zeros_like(unroll.bootstrap))
    return Advantages(advantages, advantages + unroll.values)


def lambda_returns_with(
    maths: Maths, rewards: Any, discounts: Any, values: Any, bootstrap_value: Any, lambda_: Any, valid: Any
) -> Any:
    """`lambda_returns` in any framework."""
    _require_lambda(lambda_)
    unroll = _Unroll(maths, rewards, discounts, values, bootstrap_value, valid)
    terms = unroll.rewards + unroll.discounts * (1.0 - lambda_) * unroll.next_values
    start = maths.xp.where(unroll.valid[-1], unroll.bootstrap, 0.0)  # else its NaN would come through with a factor of 0
    return maths.backwards(unroll.where_valid(terms, unroll.values), unroll.discounts * lambda_, start)


def n_step_returns_with(
    maths: Maths, rewards: Any, discounts: Any, values: Any, bootstrap_value: Any, n: int, valid: Any
) -> Any:
    """`n_step_returns` in any framework."""
    n = require_count("n", n)
    unroll = _Unroll(maths, rewards, discounts, values, bootstrap_value, valid)
    targets = unroll.values
    for _ in range(min(n, targets.shape[0])):
        later = maths.xp.concatenate((targets[1:], unroll.bootstrap[None]))
        targets = unroll.where_valid(unroll.rewards + unroll.discounts * later, unroll.values)
    return targets


def _require_lambda(lambda_: Any) -> None:
    known = isinstance(lambda_, (int, float, np.number, str)) or lambda_ is None
    if known and not (isinstance(lambda_, (int, float, np.number)) and 0 <= lambda_ <= 1):
        raise ValueError(f"lambda_: expected a number from 0 to 1, found {lambda_!r}")


class _Numpy:
    """`Maths` of numpy."""

    xp: Any = np

    def float_type(self, values: Any) -> Any:
        return np.result_type(np.asarray(values).dtype, np.float32)

    def array(self, value: Any, dtype: Any) -> Any:
        return np.asarray(value, bool if dtype is None else dtype)

    def exp(self, array: Any) -> Any:
        with np.errstate(over="ignore"):
            return np.exp(array)

    def at_most(self, array: Any, limit: Any) -> Any:
        return array if limit is None else np.minimum(array, limit)

    def backwards(self, terms: Any, decays: Any, last: Any) -> Any:
        found = np.empty_like(terms)
        for t in reversed(range(len(terms))):
            last = found[t] = terms[t] + decays[t] * last
        return found


_NUMPY = _Numpy()


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
    """V-trace targets and advantages for records that an older policy acted on.

    Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures",
    https://arxiv.org/abs/1802.01561, section 4.1. With `rho[t] = pi(a|x) / mu(a|x)` of transition t and
    `delta[t] = min(clip_rho, rho[t]) * (reward[t] + discount[t] * value[t+1] - value[t])`,

        vs[t] - value[t] = delta[t] + discount[t] * lambda_ * min(clip_c, rho[t]) * (vs[t+1] - value[t+1])

    The advantage is `min(clip_pg_rho, rho[t]) * (reward[t] + discount[t] * q - value[t])` where q is `vs[t+1]` for the paper's
    `lambda_` of 1, and in general `lambda_ * vs[t+1] + (1 - lambda_) * value[t+1]`, so that it is that of `gae` on-policy.
    On-policy, `vs` are `lambda_returns`. The module says what each row means.

    Args:
      behaviour_log_probs: (T, B), log mu of the actions that were sent, by the policy that chose them.
      target_log_probs: (T, B), log pi of the same actions, by the policy that learns.
      rewards: (T, B).
      discounts: (T, B), already times gamma.
      values: (T, B), of the records 0..T-1, by the policy that learns.
      bootstrap_value: (B,), of record T.
      clip_rho: the paper's rho bar, which decides whose value function is learned; None for no limit.
      clip_c: the paper's c bar, which bounds the variance; at most `clip_rho` in the paper; None for no limit.
      clip_pg_rho: limit of the weight of the advantages; None for no limit.
      lambda_: from 0 (one step) to 1, see the paper's remark 2.
      valid: bool (T, B), the transition exists; default all.

    Returns:
      `VTrace(vs, pg_advantages, rhos)`.

    Raises:
      ValueError: a shape or `lambda_` is wrong.
    """
    return vtrace_with(
        _NUMPY, behaviour_log_probs, target_log_probs, rewards, discounts, values, bootstrap_value,
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
    """Generalised advantage estimates.

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
    https://arxiv.org/abs/1506.02438, equation 16:

        advantage[t] = reward[t] + discount[t] * value[t+1] - value[t] + discount[t] * lambda_ * advantage[t+1]

    Args:
      rewards: (T, B).
      discounts: (T, B), already times gamma.
      values: (T, B), of the records 0..T-1.
      bootstrap_value: (B,), of record T.
      lambda_: from 0 (one step, least variance) to 1 (least bias).
      valid: bool (T, B), the transition exists; default all.

    Returns:
      `Advantages(advantages, returns)`.

    Raises:
      ValueError: a shape or `lambda_` is wrong.
    """
    return gae_with(_NUMPY, rewards, discounts, values, bootstrap_value, lambda_, valid)


def lambda_returns(
    rewards: Array,
    discounts: Array,
    values: Array,
    bootstrap_value: Array,
    lambda_: float = 1.0,
    valid: Array | None = None,
) -> Any:
    """Lambda returns: of 1 the whole discounted return, bootstrapped where the unroll or a truncated episode ends.

    Sutton and Barto 2018, "Reinforcement Learning: An Introduction", second edition, section 12.1, in recursive form:

        G[t] = reward[t] + discount[t] * ((1 - lambda_) * value[t+1] + lambda_ * G[t+1])

    Args:
      rewards: (T, B).
      discounts: (T, B), already times gamma.
      values: (T, B), of the records 0..T-1.
      bootstrap_value: (B,), of record T.
      lambda_: from 0 (one step) to 1.
      valid: bool (T, B), the transition exists; default all.

    Returns:
      (T, B); the value itself at invalid rows.

    Raises:
      ValueError: a shape or `lambda_` is wrong.
    """
    return lambda_returns_with(_NUMPY, rewards, discounts, values, bootstrap_value, lambda_, valid)


def n_step_returns(
    rewards: Array,
    discounts: Array,
    values: Array,
    bootstrap_value: Array,
    n: int,
    valid: Array | None = None,
) -> Any:
    """n-step returns; fewer steps where the unroll or an episode ends before, which then bootstraps from the value there.

    Sutton and Barto 2018, "Reinforcement Learning: An Introduction", second edition, section 7.1:

        G[t] = reward[t] + discount[t] * (reward[t+1] + ... + discount[t+n-1] * value[t+n])

    Args:
      rewards: (T, B).
      discounts: (T, B), already times gamma.
      values: (T, B), of the records 0..T-1.
      bootstrap_value: (B,), of record T.
      n: number of steps; T or more is `lambda_returns` with `lambda_` of 1.
      valid: bool (T, B), the transition exists; default all.

    Returns:
      (T, B); the value itself at invalid rows.

    Raises:
      ValueError: a shape or `n` is wrong.
    """
    return n_step_returns_with(_NUMPY, rewards, discounts, values, bootstrap_value, n, valid)
