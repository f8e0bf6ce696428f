"""V-trace, GAE, n-step and lambda returns: by hand, against a slow reference, and the three frameworks against each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import Scripted

from slotloader import SlotLoader, gae, lambda_returns, n_step_returns, to_numpy, vtrace
from slotloader.adapters import jax_returns, torch_returns
from slotloader.learning import returns

MODULES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "numpy": (returns, np.asarray),
    "torch": (torch_returns, torch.as_tensor),
    "jax": (jax_returns, jnp.asarray),
}
ALL = ("rewards", "discounts", "values", "bootstrap_value", "valid")
LOGS = ("behaviour_log_probs", "target_log_probs")


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> Any:
    """The four functions of one framework, which take and return numpy arrays."""
    functions, array = MODULES[request.param]

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        kwargs = {key: array(value) if isinstance(value, np.ndarray) else value for key, value in kwargs.items()}
        result = getattr(functions, name)(*args, **kwargs)
        return type(result)(*map(np.asarray, result)) if isinstance(result, tuple) else np.asarray(result)

    names = ("vtrace", "gae", "lambda_returns", "n_step_returns")
    return SimpleNamespace(**{name: partial(call, name) for name in names})


def column(*numbers: float) -> np.ndarray:
    """One slot's numbers over time, (T, 1)."""
    return np.array(numbers, np.float32)[:, None]


def unroll(seed: int, rows: int, slots: int) -> dict[str, np.ndarray]:
    """Random arguments, with garbage wherever there is no transition."""
    rng = np.random.default_rng(seed)
    shape = (rows, slots)
    valid = rng.random(shape) < 0.8
    found = {
        "rewards": rng.normal(size=shape),
        "discounts": np.where(rng.random(shape) < 0.2, 0.0, rng.choice([0.9, 1.0], shape)),
        "values": rng.normal(size=shape),
        "behaviour_log_probs": rng.normal(size=shape) - 1,
        "target_log_probs": rng.normal(size=shape) - 1,
    }
    for name in ("rewards", "discounts", *LOGS):
        found[name][~valid] = rng.choice([np.nan, np.inf, -np.inf, 1e30])
    found = {name: value.astype(np.float32) for name, value in found.items()}
    return {**found, "bootstrap_value": rng.normal(size=slots).astype(np.float32), "valid": valid}


def of(given: dict[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    return {name: given[name] for name in names}


# A reference that follows every transition of every slot by itself, in float64 and from the definitions: sums over products.


def runs(valid: np.ndarray, slot: int, start: int) -> int:
    """Number of transitions that follow one another from row `start` on."""
    rows = valid[start:, slot]
    return len(rows) if rows.all() else int(np.argmin(rows))


def slow(given: dict[str, np.ndarray], target: Callable[..., float]) -> np.ndarray:
    """`target(rewards (N,), discounts (N,), values (N + 1,), where)` of the run from each row on; the value if N is 0."""
    wide = {name: value.astype(np.float64) for name, value in given.items() if name != "valid"}
    all_values = np.concatenate((wide["values"], wide["bootstrap_value"][None]))
    found = np.array(wide["values"])
    for t, slot in np.ndindex(found.shape):
        rows = np.arange(t, t + runs(given["valid"], slot, t))
        if rows.size:
            values = all_values[t : t + rows.size + 1, slot]
            found[t, slot] = target(wide["rewards"][rows, slot], wide["discounts"][rows, slot], values, (rows, slot))
    return found


def slow_n_step(rewards: np.ndarray, discounts: np.ndarray, values: np.ndarray, _: Any, n: int) -> float:
    n = min(n, len(rewards))
    return sum(rewards[k] * np.prod(discounts[:k]) for k in range(n)) + np.prod(discounts[:n]) * values[n]


def slow_lambda(rewards: np.ndarray, discounts: np.ndarray, values: np.ndarray, at: Any, lambda_: float) -> float:
    """The weighted mean of all n-step returns: equation 12.3 of Sutton and Barto."""
    count = len(rewards)
    steps = [slow_n_step(rewards, discounts, values, at, n) for n in range(1, count + 1)]
    return (1 - lambda_) * sum(lambda_**k * steps[k] for k in range(count - 1)) + lambda_ ** (count - 1) * steps[-1]


def slow_vs(given: dict[str, np.ndarray], clip_rho: float, clip_c: float, lambda_: float) -> np.ndarray:
    """Equation 1 of Espeholt et al.: a sum of temporal differences, each with the product of the traces before it."""
    with np.errstate(all="ignore"):
        rhos = np.exp(given["target_log_probs"].astype(np.float64) - given["behaviour_log_probs"])

    def target(rewards: np.ndarray, discounts: np.ndarray, values: np.ndarray, at: Any) -> float:
        ratios = rhos[at]
        deltas = np.minimum(clip_rho, ratios) * (rewards + discounts * values[1:] - values[:-1])
        traces = discounts * lambda_ * np.minimum(clip_c, ratios)
        return float(values[0] + sum(np.prod(traces[:k]) * deltas[k] for k in range(len(rewards))))

    return slow(given, target)


# By hand.


def test_gae_by_hand(module: Any) -> None:
    found = module.gae(
        rewards=column(1, 2, 3), discounts=column(0.5, 0.5, 0.5), values=column(10, 20, 30),
        bootstrap_value=np.float32([40]), lambda_=0.5,
    )  # fmt: skip
    # deltas: 1 + 10 - 10 = 1, 2 + 15 - 20 = -3, 3 + 20 - 30 = -7; each trace is 0.25
    np.testing.assert_allclose(found.advantages, column(1 + 0.25 * (-3 + 0.25 * -7), -3 + 0.25 * -7, -7))
    np.testing.assert_allclose(found.returns, found.advantages + column(10, 20, 30))


def test_n_step_returns_by_hand(module: Any) -> None:
    given = {
        "rewards": column(1, 2, 3), "discounts": column(0.5, 0.5, 0.5), "values": column(10, 20, 30),
        "bootstrap_value": np.float32([40]),
    }  # fmt: skip
    np.testing.assert_allclose(module.n_step_returns(**given, n=1), column(1 + 10, 2 + 15, 3 + 20))
    np.testing.assert_allclose(module.n_step_returns(**given, n=2), column(1 + 1 + 7.5, 2 + 1.5 + 10, 3 + 20))
    whole = column(1 + 1 + 0.75 + 5, 2 + 1.5 + 10, 3 + 20)
    np.testing.assert_allclose(module.n_step_returns(**given, n=3), whole)
    np.testing.assert_allclose(module.n_step_returns(**given, n=100), whole)
    np.testing.assert_allclose(module.lambda_returns(**given), whole)


def test_vtrace_by_hand(module: Any) -> None:
    found = module.vtrace(
        behaviour_log_probs=np.log(column(0.5, 0.5)), target_log_probs=np.log(column(0.25, 1.0)),
        rewards=column(1, 2), discounts=column(0.5, 0.5), values=column(10, 20), bootstrap_value=np.float32([40]),
        clip_rho=1.5, clip_c=1.0, clip_pg_rho=None,
    )  # fmt: skip
    # rho: 0.5, 2. deltas: 0.5 * (1 + 10 - 10) = 0.5, 1.5 * (2 + 20 - 20) = 3; trace of row 0: 0.5 * 0.5
    np.testing.assert_allclose(found.rhos, column(0.5, 2), rtol=1e-6)
    np.testing.assert_allclose(found.vs, column(10 + 0.5 + 0.25 * 3, 23), rtol=1e-6)
    # the advantage of row 0 goes to vs[1] = 23: 0.5 * (1 + 11.5 - 10); that of row 1 is 2 * (2 + 20 - 20), without a limit
    np.testing.assert_allclose(found.pg_advantages, column(1.25, 4), rtol=1e-6)


def test_an_invalid_row_keeps_its_value_and_parts_the_episodes(module: Any) -> None:
    given = {
        "rewards": column(1, np.nan, 3), "discounts": column(1, np.inf, 1), "values": column(10, 20, 30),
        "bootstrap_value": np.float32([40]), "valid": column(1, 0, 1).astype(bool),
    }  # fmt: skip
    logs = {"behaviour_log_probs": column(-1, np.nan, -1), "target_log_probs": column(-1, -np.inf, -1)}
    expected = column(21, 20, 43)
    np.testing.assert_allclose(module.n_step_returns(**given, n=3), expected)
    np.testing.assert_allclose(module.lambda_returns(**given), expected)
    found = module.gae(**given, lambda_=1.0)
    np.testing.assert_allclose(found.returns, expected)
    np.testing.assert_allclose(found.advantages, column(11, 0, 13))
    traced = module.vtrace(**logs, **given)
    np.testing.assert_allclose(traced.vs, expected)
    np.testing.assert_allclose(traced.pg_advantages, column(11, 0, 13))
    np.testing.assert_allclose(traced.rhos, column(1, 1, 1))


# Against the reference and each other.

CASES = given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@CASES
def test_numpy_agrees_with_a_reference_that_follows_each_trajectory(seed: int, rows: int, slots: int) -> None:
    given = unroll(seed, rows, slots)
    close = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)
    for n in (1, 3, rows):
        close(n_step_returns(**of(given, *ALL), n=n), slow(given, partial(slow_n_step, n=n)))
    for lambda_ in (0.0, 0.7, 1.0):
        expected = slow(given, partial(slow_lambda, lambda_=lambda_))
        close(lambda_returns(**of(given, *ALL), lambda_=lambda_), expected)
        close(gae(**of(given, *ALL), lambda_=lambda_).returns, expected)
        close(gae(**of(given, *ALL), lambda_=lambda_).advantages, expected - given["values"])
        close(vtrace(**given, lambda_=lambda_, clip_rho=1.2).vs, slow_vs(given, 1.2, 1.0, lambda_))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(1, 1), (6, 2)]))  # few shapes: jax compiles anew for each
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_every_framework_agrees_with_numpy(name: str, seed: int, shape: tuple[int, int]) -> None:
    functions, array = MODULES[name]
    given = unroll(seed, *shape)
    theirs = {key: array(value) for key, value in given.items()}
    options = {"clip_rho": 1.5, "clip_c": None, "clip_pg_rho": 0.5, "lambda_": 0.8}
    for function, names, more in (
        ("n_step_returns", ALL, {"n": 3}),
        ("lambda_returns", ALL, {"lambda_": 0.6}),
        ("gae", ALL, {}),
        ("vtrace", (*ALL, *LOGS), options),
    ):
        expected = getattr(returns, function)(**of(given, *names), **more)
        found = getattr(functions, function)(**of(theirs, *names), **more)
        for one, other in zip(*((r if isinstance(r, tuple) else (r,)) for r in (expected, found)), strict=True):
            assert one.dtype == np.asarray(other).dtype == np.float32
            np.testing.assert_allclose(one, np.asarray(other), rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@CASES
def test_on_policy_vtrace_is_the_lambda_return_and_its_advantage_that_of_gae(seed: int, rows: int, slots: int) -> None:
    given = unroll(seed, rows, slots)
    given["behaviour_log_probs"] = given["target_log_probs"]
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    close(vtrace(**given).vs, n_step_returns(**of(given, *ALL), n=rows))
    for lambda_ in (0.0, 0.5, 1.0):
        found = vtrace(**given, lambda_=lambda_)
        close(found.vs, lambda_returns(**of(given, *ALL), lambda_=lambda_))
        close(found.pg_advantages, gae(**of(given, *ALL), lambda_=lambda_).advantages)


# What a learner relies on.


@pytest.mark.parametrize("how", ["terminated", "truncated"])
def test_a_time_limit_bootstraps_from_the_last_observation_and_a_termination_does_not(how: str, module: Any) -> None:
    """Time limit 4 and V(s) = s, where s is the time within the episode: records 0 1 2 3 4 0 1 ..."""
    gamma, rows, slots = 0.5, 8, 2
    with SlotLoader(partial(Scripted, length=4, how=how), num_envs=slots, backend="inline", timeout=None) as loader:
        records = []
        for batch in loader:
            records.append((batch.obs[:, 0], batch.reward, batch.discount, batch.is_first))
            batch.send(np.zeros(slots, np.int64))
            if len(records) > rows:
                break
    obs, reward, discount, is_first = (np.stack(parts) for parts in zip(*records, strict=True))
    given = {
        "rewards": reward[1:], "discounts": gamma * discount[1:], "values": obs[:-1], "bootstrap_value": obs[-1],
        "valid": ~is_first[1:],
    }  # fmt: skip
    one_step = module.n_step_returns(**given, n=1)
    last = 1 + gamma * 4 if how == "truncated" else 1.0
    expected = [1 + gamma * 1, 1 + gamma * 2, 1 + gamma * 3, last, 4, 1 + gamma * 1, 1 + gamma * 2, 1 + gamma * 3]
    np.testing.assert_allclose(one_step, np.repeat(column(*expected), slots, 1))
    whole = module.lambda_returns(**given)[0, 0]
    np.testing.assert_allclose(whole, 1 + gamma * (1 + gamma * (1 + gamma * last)))
    assert not given["valid"][4].any() and (module.gae(**given).advantages[4] == 0).all()


def test_an_unroll_gives_its_rows_as_they_are() -> None:
    gamma = 0.5
    with (
        SlotLoader(partial(Scripted, length=4, how="truncated"), num_envs=2, backend="inline") as loader,
        to_numpy(loader) as batches,
    ):
        unroll = next(batches.rollout(lambda obs: np.zeros(len(obs), np.int64), length=6))
    values = unroll.obs[..., 0]
    found = n_step_returns(unroll.reward[1:], gamma * unroll.discount[1:], values[:-1], values[-1], 1, unroll.valid)
    expected = column(1.5, 2, 2.5, 1 + gamma * 4, 4, 1.5)  # the row of the last record is its value
    np.testing.assert_allclose(found, np.repeat(expected, 2, 1))


def test_no_gradient_flows_through_torch_targets() -> None:
    given = {key: torch.as_tensor(value) for key, value in unroll(1, 5, 2).items()}
    for name in ("values", "bootstrap_value", "target_log_probs", "rewards"):
        given[name].requires_grad_()
    found = torch_returns.vtrace(**given)
    assert not any(part.requires_grad for part in found)
    assert not torch_returns.n_step_returns(**of(given, *ALL), n=2).requires_grad
    loss = (given["values"] - found.vs).square().sum() / 2 - (given["target_log_probs"] * found.pg_advantages).nansum()
    loss.backward()
    torch.testing.assert_close(given["values"].grad, (given["values"] - found.vs).detach())  # the targets are constants
    assert given["bootstrap_value"].grad is None and given["rewards"].grad is None


def test_no_gradient_flows_through_jax_targets() -> None:
    given = unroll(1, 5, 2)

    def loss(values: Any, bootstrap_value: Any, logs: Any) -> Any:
        found = jax_returns.vtrace(**{**given, "values": values, "bootstrap_value": bootstrap_value, "target_log_probs": logs})
        total = sum(
            part.sum() for part in jax_returns.gae(**of(given, *ALL[:2]), values=values, bootstrap_value=bootstrap_value)
        )
        return found.vs.sum() + found.pg_advantages.sum() + total

    gradients = jax.grad(loss, (0, 1, 2))(*(jnp.asarray(given[n]) for n in ("values", "bootstrap_value", "target_log_probs")))
    assert all((np.asarray(gradient) == 0).all() for gradient in gradients)


def test_jax_functions_compile_with_traced_limits() -> None:
    given = unroll(3, 6, 2)
    compiled = jax.jit(jax_returns.vtrace)
    for expected, found in zip(vtrace(**given, clip_rho=1.5), compiled(**given, clip_rho=1.5), strict=True):
        np.testing.assert_allclose(expected, found, rtol=1e-5, atol=1e-5)
    n_step = jax.jit(jax_returns.n_step_returns, static_argnames="n")
    np.testing.assert_allclose(n_step(**of(given, *ALL), n=2), n_step_returns(**of(given, *ALL), n=2), rtol=1e-5, atol=1e-5)


def test_an_enormous_importance_weight_is_clipped_without_a_warning(module: Any) -> None:
    given = unroll(5, 4, 2)
    valid = np.ones((4, 2), bool)
    given = {**unroll(5, 4, 2), "valid": valid, "rewards": given["values"], "discounts": np.full((4, 2), 0.9, np.float32)}
    logs = {"behaviour_log_probs": np.full((4, 2), -500, np.float32), "target_log_probs": np.zeros((4, 2), np.float32)}
    found = module.vtrace(**{**given, **logs})
    on_policy = module.vtrace(**{**given, **dict.fromkeys(LOGS, logs["target_log_probs"])})
    np.testing.assert_allclose(found.vs, on_policy.vs)
    np.testing.assert_allclose(found.pg_advantages, on_policy.pg_advantages)


def test_half_precision_values_are_computed_in_float32(module: Any) -> None:
    given = {
        name: value.astype(np.float16) if name in ("values", "rewards") else value for name, value in unroll(2, 4, 2).items()
    }
    assert module.gae(**of(given, *ALL)).returns.dtype == np.float32


@pytest.mark.parametrize("name", [*ALL, *LOGS])
def test_a_wrong_shape_is_named(name: str, module: Any) -> None:
    given = unroll(0, 4, 3)
    given[name] = given[name][..., :2]
    wrong = "behaviour_log_probs|target_log_probs|valid|rewards|discounts|bootstrap_value" if name == "values" else name
    with pytest.raises(ValueError, match=rf"({wrong}): expected \(.*\), .*found \("):
        module.vtrace(**given)


def test_wrong_numbers_are_refused(module: Any) -> None:
    given = of(unroll(0, 4, 3), *ALL)
    with pytest.raises(ValueError, match="n: expected an integer of at least 1, found 0"):
        module.n_step_returns(**given, n=0)
    with pytest.raises(ValueError, match=r"lambda_: expected a number from 0 to 1, found 1\.5"):
        module.gae(**given, lambda_=1.5)


def test_what_lies_behind_an_invalid_row_reaches_no_return() -> None:
    ones, valid = np.ones((3, 2), np.float32), np.array([[1, 1], [1, 1], [0, 1]], bool)
    behind = np.array([np.nan, 1.0], np.float32)
    found = lambda_returns(ones, ones, ones, behind, 0.9, valid)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[:, 0], lambda_returns(ones, ones, ones, ones[0], 0.9, valid)[:, 0])


@pytest.mark.parametrize("wrong", [2.0, np.float32(2), -0.1, "0.9", None])
def test_a_lambda_that_is_no_share_is_refused(wrong: Any) -> None:
    ones = np.ones((3, 2), np.float32)
    with pytest.raises(ValueError, match=r"lambda_: expected a number from 0 to 1, found"):
        gae(ones, ones, ones, ones[0], wrong)


# One public name each.


@pytest.mark.parametrize("name", ["gae", "lambda_returns", "n_step_returns", "vtrace"])
def test_the_public_functions_keep_the_framework_of_their_arguments(name: str) -> None:
    import jax
    import jax.numpy as jnp
    import torch

    import slotloader

    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(5, 3)).astype(np.float32) for _ in range(3 if name != "vtrace" else 5)]
    last = rng.normal(size=3).astype(np.float32)
    more = {"n": 2} if name == "n_step_returns" else {}
    function = getattr(slotloader, name)

    def leaves(found: Any) -> list[Any]:
        return list(found) if isinstance(found, tuple) else [found]

    expected = leaves(function(*arrays, last, **more))
    assert all(type(leaf) is np.ndarray for leaf in expected)
    for convert, kind in ((torch.as_tensor, torch.Tensor), (jnp.asarray, jax.Array)):
        given = [convert(array) for array in (*arrays, last)]
        found = leaves(function(*given, **more))
        assert all(isinstance(leaf, kind) for leaf in found)
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.asarray(mine), theirs, rtol=1e-5, atol=1e-5)
    jitted = jax.jit(lambda *given: function(*given, **more))(*map(jnp.asarray, (*arrays, last)))
    np.testing.assert_allclose(np.asarray(leaves(jitted)[0]), expected[0], rtol=1e-5, atol=1e-5)
    parameters = [torch.nn.Parameter(torch.as_tensor(array)) for array in (*arrays, last)]
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves(function(*parameters, **more)))


def test_arrays_of_two_frameworks_are_refused_by_name() -> None:
    import torch

    import slotloader

    zeros = np.zeros((4, 2), np.float32)
    with pytest.raises(TypeError, match=r"gae: discounts: expected an array of torch like rewards, found one of numpy"):
        slotloader.gae(torch.zeros(4, 2), zeros, torch.zeros(4, 2), torch.zeros(2))
    assert isinstance(
        slotloader.gae(torch.zeros(4, 2), torch.zeros(4, 2), torch.zeros(4, 2), torch.zeros(2), np.float32(0.9))[0],
        torch.Tensor,
    )
