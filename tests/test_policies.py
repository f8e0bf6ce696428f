"""Policies on every adapter: the forms they come in, weights that are swapped, seeds, and `run`."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from checks import until
from gymnasium.spaces import Discrete
from policies_toys import NAMES, Adapt, Echo, Everything, Narrow, Replay, Strict, host, reply

from slotloader import Acted, ActionError, Inputs, SlotLoader, SlotLoaderError

INLINE: dict[str, Any] = {"backend": "inline", "timeout": None}


@pytest.fixture(params=NAMES)
def adapt(request: pytest.FixtureRequest) -> Adapt:
    """The adapters."""
    return Adapt(request.param)


def weights(seed: int = 0) -> dict[str, Any]:
    """A small MLP from `Replay`'s observations to its 4 actions."""
    rng = np.random.default_rng(seed)
    return {
        "hidden": (rng.normal(size=(5, 8)).astype(np.float32), rng.normal(size=8).astype(np.float32)),
        "out": {"w": rng.normal(size=(8, 4)).astype(np.float32)},
    }


def scores(xp: Any, params: Any, obs: Any) -> Any:
    w, b = params["hidden"]
    return xp.tanh(obs @ w + b) @ params["out"]["w"]


def mlp(xp: Any) -> Any:
    """The contract's form, with its scores as an extra."""

    def policy(params: Any, inputs: Inputs, state: Any, key: Any) -> Acted:
        found = scores(xp, params, inputs.obs)
        return Acted(found.argmax(-1), extras={"scores": found})

    return policy


# The forms that a policy may have.


def test_functions_of_every_form_act_alike(adapt: Adapt) -> None:
    params = weights()
    own = adapt.array(params)
    forms = {
        "policy(obs)": (lambda obs: scores(adapt.xp, own, obs).argmax(-1), {}),
        "policy(obs, more=)": (lambda obs, more=0: scores(adapt.xp, own, obs).argmax(-1) + more, {}),
        "policy(params, obs)": (lambda params, obs: scores(adapt.xp, params, obs).argmax(-1), {"params": params}),
        "policy(params, obs) -> Acted": (lambda params, obs: Acted(scores(adapt.xp, params, obs).argmax(-1)), {"params": own}),
        "contract": (mlp(adapt.xp), {"params": own}),
        "partial": (partial(lambda one, params, obs: scores(adapt.xp, params, obs).argmax(-1), 1), {"params": own}),
    }
    with SlotLoader(Replay, 5, **INLINE) as loader, adapt(loader, buckets=(5,)) as batches:
        batch = batches.recv()
        expected = scores(np, params, batch.host.obs).argmax(-1).tolist()
        for name, (policy, options) in forms.items():
            for bound in [batches.policy(policy, **options)] + [adapt.compile(batches, policy, **options)] * (
                name == "contract"
            ):
                acted = bound(batch)
                assert isinstance(acted, Acted)
                assert acted.state is None
                assert host(acted.action).tolist() == expected, name
                assert batch.version == 0
        batch.send(acted.action)


def test_a_torch_module_is_a_policy_with_its_own_weights_or_with_params() -> None:
    adapt = Adapt("torch")
    torch = adapt.xp

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(5, 4)

        def forward(self, obs: Any) -> Any:
            assert not torch.is_grad_enabled()
            return self.layer(obs).argmax(-1)

    class Whole(Net):
        def forward(self, params: Any, inputs: Inputs, state: Any, key: Any) -> Any:
            return Acted(self.layer(inputs.obs).argmax(-1), state={"n": state["n"] + 1})

    class Sampling(Net):
        def forward(self, obs: Any, mask: Any = None, temperature: float = 1.0, sample: bool = False) -> Any:
            return super().forward(obs / temperature)

    torch.manual_seed(0)
    net, other = Net(), Net()
    whole = Whole()
    whole.load_state_dict(net.state_dict())
    with SlotLoader(Replay, 5, **INLINE) as loader, adapt(loader, buckets=(5,)) as batches:
        batch = batches.recv()
        with torch.no_grad():
            first, second = (one.layer(torch.from_numpy(batch.host.obs)).argmax(-1).tolist() for one in (net, other))
        assert first != second
        stateful = batches.policy(whole, state={"n": np.zeros((), np.int64)})
        assert stateful(batch).action.tolist() == first
        functional = batches.policy(net, params=dict(other.named_parameters()))
        assert functional(batch).action.tolist() == second
        functional.update(net.state_dict())
        assert functional(batch).action.tolist() == first
        both = batches.policy(whole, params=dict(other.named_parameters()), state={"n": np.zeros((), np.int64)})
        assert both(batch).action.tolist() == second
        sampling = batches.policy(Sampling(), params=dict(Sampling().named_parameters()))
        assert sampling(batch).action.shape == (5,)
        with pytest.raises(ValueError, match=r"seed: expected None, since compiled policies of TorchOps get no key, found 3"):
            adapt.compile(batches, net, seed=3)
        own = adapt.compile(batches, net)
        assert own(batch).action.tolist() == first
        state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        short = {"layer.weight": state["layer.weight"]}
        for wrong in (short, {**state, "x": state["layer.bias"]}, {**state, "layer.bias": torch.zeros(3)}):
            with pytest.raises(ValueError, match="update: expected"):
                own.update(wrong)
        assert own(batch).action.tolist() == first
        assert own.version == 0
        own.update(other.state_dict(), version=7)
        assert own(batch).action.tolist() == second
        assert batch.version == own.version == 7


def test_flax_and_equinox_modules_and_jitted_functions_are_policies() -> None:
    adapt = Adapt("jax")
    jax, jnp = pytest.importorskip("jax"), adapt.xp
    linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
    eqx = pytest.importorskip("equinox")

    class Linen(linen.Module):
        @linen.compact
        def __call__(self, obs: Any) -> Any:
            return linen.Dense(4)(jnp.tanh(linen.Dense(8)(obs))).argmax(-1)

    class Nnx(nnx.Module):
        def __init__(self, seed: int) -> None:
            self.layer = nnx.Linear(5, 4, rngs=nnx.Rngs(seed))

        def __call__(self, obs: Any) -> Any:
            return self.layer(obs).argmax(-1)

    class Eqx(eqx.Module):
        layer: Any
        act: Any

        def __call__(self, obs: Any) -> Any:
            return self.act(jax.vmap(self.layer)(obs)).argmax(-1)

    def make(seed: int) -> Any:
        return Eqx(eqx.nn.Linear(5, 4, key=jax.random.key(seed)), jnp.tanh)

    net = Linen()
    variables = [net.init(jax.random.key(seed), jnp.zeros((1, 5))) for seed in range(2)]
    with SlotLoader(Replay, 5, **INLINE) as loader, adapt(loader, buckets=(5,)) as batches:
        batch = batches.recv()
        obs = batch.host.obs

        def check(bind: Any, policy: Any, params: Any, expected: list[Any], new: Any) -> None:
            assert expected[0].tolist() != expected[1].tolist()
            bound = bind(policy, params=params)
            assert host(bound(batch).action).tolist() == expected[0].tolist()
            bound.update(new)
            assert host(bound(batch).action).tolist() == expected[1].tolist()
            assert batch.version == 1

        expected = [net.apply(one, obs) for one in variables]
        check(batches.compile, net, variables[0], expected, variables[1])
        check(batches.policy, net.apply, variables[0], expected, variables[1])
        check(batches.policy, jax.jit(net.apply), variables[0], expected, variables[1])
        for first, second in ((Nnx(0), Nnx(1)), (make(0), make(1))):
            expected = [first(obs), second(obs)]
            check(batches.policy, first, None, expected, second)
            check(batches.compile, first, None, expected, second)
        jitted = batches.policy(jax.jit(lambda obs: obs.sum(-1)))
        np.testing.assert_allclose(host(jitted(batch).action), obs.sum(-1), rtol=1e-5)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (lambda params, obs: obs, {}),
        (lambda obs: obs, {"params": 1}),
        (lambda a, b, c: a, {}),
        (lambda: 1, {}),
        (lambda a, b, c, d, e: a, {"params": 1}),
    ],
)
def test_a_policy_of_a_wrong_signature_is_told_the_right_ones(adapt: Adapt, policy: Any, options: dict[str, Any]) -> None:
    text = r"policy: expected policy\(obs\), policy\(params, obs\) or policy\(params, inputs, state, key\), found .*positional"
    with SlotLoader(Replay, 2, **INLINE) as loader, adapt(loader, buckets=(2,)) as batches:
        for bind in (batches.policy, batches.compile):
            with pytest.raises(TypeError, match=text):
                bind(policy, **options)
        with pytest.raises(TypeError, match="policy: expected a callable, found 5"):
            batches.run(5, env_steps=1)
        bound = batches.policy(lambda obs: (obs[:, 0] > 0) * 1)
        with pytest.raises(TypeError, match="not bound to an adapter yet"):
            batches.policy(bound)


def test_a_policy_of_another_adapter_is_refused(adapt: Adapt) -> None:
    with SlotLoader(Replay, 2, **INLINE) as loader, adapt(loader, buckets=(2,)) as one, adapt(loader) as other:
        policy = one.policy(lambda obs: (obs[:, 0] > 0) * 1)
        with pytest.raises(TypeError, match="policy: expected one that this adapter has made, found one of another"):
            other.run(policy, env_steps=1)
        assert one.run(policy, env_steps=10).env_steps >= 10


def test_a_policy_sees_action_masks_last_actions_and_rewards(adapt: Adapt) -> None:
    seen = []

    def policy(params: Any, inputs: Inputs, state: Any, key: Any) -> Acted:
        move = adapt.xp.stack([inputs.reward, inputs.info["mask"][:, 0] * 1.0], -1) * 0.01
        keys = (inputs.last_action["keys"][0] + 1) % 5
        return Acted({"move": move, "keys": (keys, inputs.last_action["keys"][1]), "say": ["x"] * len(keys)})

    def note(batch: Any, acted: Acted) -> None:
        seen.append((batch.host.last_action, batch.host.reward, batch.host.info["mask"][:, 0]))

    with SlotLoader(Everything, 3, info=Everything.info, **INLINE) as loader, adapt(loader, buckets=(3,)) as batches:
        ran = batches.run(policy, env_steps=30, on_batch=note)
        assert ran.batches == len(seen)
    for (sent, reward, mask), (then, _, _) in itertools.pairwise(seen):
        assert then["keys"][0].tolist() == ((sent["keys"][0] + 1) % 5).tolist()
        np.testing.assert_allclose(then["move"][:, 0], reward * 0.01, rtol=1e-6)
        np.testing.assert_allclose(then["move"][:, 1], mask * 0.01, rtol=1e-6)


def test_one_compiled_policy_gives_the_same_actions_in_every_framework() -> None:
    def play(adapt: Adapt) -> tuple[list[Any], list[Any]]:
        actions: list[Any] = []
        extras: list[Any] = []

        def note(batch: Any, acted: Acted) -> None:
            actions.append((batch.host.env_indices.tolist(), host(acted.action)[: batch.size].tolist()))
            extras.append(host(acted.extras["scores"])[: batch.size])

        with SlotLoader(Replay, 6, max_get=4, **INLINE) as loader, adapt(loader, buckets=(4,)) as batches:
            batches.run(adapt.compile(batches, mlp(adapt.xp), params=weights()), env_steps=1000, on_batch=note)
        return actions, extras

    reference = play(Adapt("numpy"))
    assert len({action for _, row in reference[0] for action in row}) == 4
    for name in NAMES[1:]:
        found = play(Adapt(name))
        assert found[0] == reference[0]
        np.testing.assert_allclose(np.concatenate(found[1]), np.concatenate(reference[1]), rtol=1e-4, atol=1e-5)


# Weights.


def test_weights_are_swapped_between_two_batches_and_every_batch_says_its_version(adapt: Adapt) -> None:
    versions, actions = [], []
    with SlotLoader(partial(Echo, Discrete(100)), 3, **INLINE) as loader, adapt(loader, buckets=(3,)) as batches:

        def policy(params: Any, obs: Any) -> Any:
            return adapt.xp.zeros_like(obs[:, 0]) + params["answer"]

        for bind in (batches.policy, partial(adapt.compile, batches)):
            bound = bind(lambda params, obs: (policy(params, obs) + 0.5) // 1 == 1, params={"answer": np.float32(1)})
            assert bound.version == 0
        bound = adapt.compile(batches, lambda p, obs: (obs[:, 0] * 0 == 0) * p["answer"], params={"answer": np.array(1)})

        def on_batch(batch: Any, acted: Acted) -> None:
            versions.append(batch.version)
            actions.extend(host(acted.action).tolist())
            if len(versions) in (3, 5):
                bound.update({"answer": np.array(len(versions))}, version=10 * len(versions) if len(versions) == 5 else None)

        batches.run(bound, env_steps=20, on_batch=on_batch)
    assert versions == [0] * 3 + [1] * 2 + [50] * (len(versions) - 5)
    assert actions == [1] * 9 + [3] * 6 + [5] * (len(actions) - 15)


def test_wrong_weights_are_refused_and_the_old_ones_stay(adapt: Adapt) -> None:
    right = adapt.array(weights(0))
    w, b = weights(1)["hidden"]
    out = weights(1)["out"]
    wrong = [
        {"hidden": (w, b)},
        {"hidden": (w, b), "out": out, "more": b},
        {"hidden": (w,), "out": out},
        {"hidden": (w, b, b), "out": out},
        {"hidden": (w, b[:-1]), "out": out},
        {"hidden": (w.astype(np.float16), b), "out": out},
        {"hidden": (w, b), "out": out["w"]},
        {"hidden": w, "out": out},
        [w, b, out["w"]],
        np.zeros(3, np.float32),
        None,
    ]
    with SlotLoader(Replay, 3, **INLINE) as loader, adapt(loader, buckets=(3,)) as batches:
        batch = batches.recv()
        for bound in (
            batches.policy(mlp(adapt.xp), params=right),
            adapt.compile(batches, mlp(adapt.xp), params=right),
        ):
            before = host(bound(batch).extras["scores"])
            for params in wrong:
                for given in (params, adapt.array(params)):
                    with pytest.raises(ValueError, match="update: expected params"):
                        bound.update(given)
            assert bound.version == 0
            np.testing.assert_array_equal(host(bound(batch).extras["scores"]), before)
            bound.update(adapt.array(weights(1)))
            assert not np.array_equal(host(bound(batch).extras["scores"]), before)
            assert batch.version == 1
        none = batches.policy(lambda obs: (obs[:, 0] > 0) * 1)
        with pytest.raises(SlotLoaderError, match=r"update: .*params="):
            none.update(right)


@pytest.mark.parametrize("as_numpy", [True, False])
def test_later_changes_of_the_callers_weights_do_not_leak_in(adapt: Adapt, as_numpy: bool) -> None:
    if adapt.name == "jax" and not as_numpy:
        pytest.skip("jax arrays do not change")
    given = np.ones(5, np.float32) if as_numpy else adapt.array(np.ones(5, np.float32))
    with SlotLoader(Replay, 3, **INLINE) as loader, adapt(loader, buckets=(3,)) as batches:
        batch = batches.recv()
        for bind in (batches.policy, partial(adapt.compile, batches)):
            given[:] = 1
            bound = bind(lambda params, obs: Acted((obs[:, 0] > 0) * 1, extras={"w": params + obs[0, 0] * 0}), params=given)
            given[:] = 2
            assert host(bound(batch).extras["w"]).tolist() == [1] * 5
            bound.update(given)
            given[:] = 3
            assert host(bound(batch).extras["w"]).tolist() == [2] * 5


def test_weights_that_a_jax_train_step_donates_stay_alive() -> None:
    adapt = Adapt("jax")
    jax, jnp = pytest.importorskip("jax"), adapt.xp
    train = jax.jit(lambda params: params + 1, donate_argnums=0)
    with SlotLoader(Replay, 3, **INLINE) as loader, adapt(loader, buckets=(3,)) as batches:
        batch = batches.recv()
        for bind in (batches.policy, batches.compile):
            params = jnp.ones(5)
            bound = bind(lambda params, obs: Acted((obs[:, 0] > 0) * 1, extras={"w": params}), params=params)
            for version in range(3):
                params = train(params)
                assert host(bound(batch).extras["w"]).tolist() == [1 + version] * 5
                bound.update(params)


def test_update_from_another_thread_takes_effect_during_a_run(adapt: Adapt) -> None:
    with SlotLoader(Narrow, 4, backend="thread") as loader, adapt(loader, buckets=(4,)) as batches:
        bound = adapt.compile(batches, lambda params, obs: (obs[:, 0] * 0 + 1) * params, params=np.array(0))
        seen: dict[int, set[int]] = {}

        def on_batch(batch: Any, acted: Acted) -> None:
            seen.setdefault(batch.version, set()).update(host(acted.action).tolist())

        def learner() -> None:
            for version in range(1, 6):
                until(lambda version=version: version - 1 in seen)
                bound.update(np.array(version), version=version)

        thread = threading.Thread(target=learner)
        thread.start()
        while thread.is_alive():
            batches.run(bound, env_steps=50, on_batch=on_batch)
        batches.run(bound, env_steps=50, on_batch=on_batch)
        assert seen == {version: {version} for version in range(6)}


# Randomness.


def sampler(adapt: Adapt) -> Any:
    """Draws an action for each row, by the key of the call."""

    def policy(params: Any, inputs: Inputs, state: Any, key: Any) -> Acted:
        rows = len(inputs.reward)
        if adapt.name == "numpy":
            return Acted(key.integers(0, 1000, rows))
        if adapt.name == "torch":
            return Acted(adapt.xp.randint(0, 1000, (rows,), generator=key))
        import jax

        return Acted(jax.random.randint(key, (rows,), 0, 1000))

    return policy


def test_the_same_seed_gives_the_same_actions_and_each_call_others(adapt: Adapt) -> None:
    def play(seed: int | None, loader_seed: int | None, compiled: bool = False, own: int | None = None) -> list[list[int]]:
        drawn: list[list[int]] = []
        env = partial(Echo, Discrete(1000))
        with SlotLoader(env, 4, seed=loader_seed, **INLINE) as loader, adapt(loader, seed=seed, buckets=(4,)) as batches:
            bind = batches.compile if compiled else batches.policy
            policy = bind(sampler(adapt), seed=own)
            batches.run(policy, env_steps=20, on_batch=lambda batch, acted: drawn.append(host(acted.action).tolist()))
        return drawn

    first = play(1, 0)
    assert len({tuple(row) for row in first}) == len(first)
    assert play(1, 5) == first != play(2, 0)
    assert play(None, 3) == play(3, 4) == play(8, 9, own=3)
    if adapt.name != "torch":  # torch.compile takes no generator
        first = play(1, 0, compiled=True)
        assert len({tuple(row) for row in first}) == len(first)
        assert play(1, 5, compiled=True) == first != play(2, 0, compiled=True)


# run.


def test_run_wants_one_measure_and_counts_what_it_did(adapt: Adapt, capsys: pytest.CaptureFixture[str]) -> None:
    with SlotLoader(partial(Echo, Discrete(3), length=4), 5, **INLINE) as loader, adapt(loader, buckets=(5,)) as batches:
        policy = batches.policy(lambda obs: (obs[:, 0] > 2) * 1)
        for wrong in ({}, {"env_steps": 5, "episodes": 5}):
            with pytest.raises(ValueError, match="run: expected one of env_steps and episodes, found env_steps="):
                batches.run(policy, **wrong)
        for unit in ("env_steps", "episodes"):
            with pytest.raises(ValueError, match=f"{unit.replace('_', ' ')}: expected an integer of at least 1, found 0"):
                batches.run(policy, **{unit: 0})
        seen: list[int] = []
        ran = batches.run(policy, env_steps=40, on_batch=lambda batch, acted: seen.append(batch.env_steps))
        assert ran.env_steps == sum(seen) == 40
        assert ran.batches == len(seen) == 10
        assert len(ran.episodes) == 10
        assert ran.seconds > 0
        assert ran.env_steps_per_second == pytest.approx(40 / ran.seconds)
        assert str(ran).startswith("40 env steps in ")
        assert str(ran).endswith("/s), 10 batches, 10 episodes, mean return 4.0")
        assert capsys.readouterr().err == ""
        ran = batches.run(policy, episodes=10, progress=True)
        assert len(ran.episodes) == 10
        assert all(episode.episode_return == 4 for episode in ran.episodes)
        assert "episodes" in capsys.readouterr().err
        assert batches.run(lambda obs: (obs[:, 0] > 2) * 1, env_steps=1).env_steps == 5


@pytest.mark.parametrize("compiled", [False, True])
def test_a_policy_or_callback_that_raises_gives_its_batch_back(adapt: Adapt, compiled: bool) -> None:
    class Stop(Exception):
        pass

    def stop(*_: Any) -> Any:
        raise Stop

    with SlotLoader(Strict, 4, on_failure="raise", **INLINE) as loader, adapt(loader, buckets=(4,)) as batches:
        good = adapt.compile(batches, reply) if compiled else batches.policy(reply)
        for _ in range(6):  # more than there are stages
            batches.run(good, env_steps=20)
            for policy, on_batch in ((stop, None), (good, stop)):
                with pytest.raises(Stop):
                    batches.run(policy, env_steps=20, on_batch=on_batch)
                assert not loader.unanswered
            with pytest.raises(ActionError, match="no env has stepped"):
                batches.run(lambda obs: obs, env_steps=20)
            assert not loader.unanswered
        assert batches.run(good, episodes=20).episodes


@pytest.mark.parametrize("compiled", [False, True])
def test_an_action_out_of_bounds_from_a_policy_is_an_error_and_the_loop_goes_on(adapt: Adapt, compiled: bool) -> None:
    with (
        SlotLoader(partial(Echo, Discrete(5)), 4, action_bounds="error", **INLINE) as loader,
        adapt(loader, buckets=(4,)) as batches,
    ):
        policy: Any = lambda obs: (obs[:, 0] * 0 == 0) * 77  # noqa: E731
        wrong = adapt.compile(batches, policy) if compiled else policy
        for _ in range(6):
            with pytest.raises(ActionError, match=r"action: expected values in \[0, 4\], found 77"):
                batches.run(wrong, env_steps=100)
            for batch in loader.unanswered:
                batch.release()
            assert batches.run(lambda obs: (obs[:, 0] > 0) * 1, env_steps=10).env_steps >= 10


def test_a_state_needs_a_new_state(adapt: Adapt) -> None:
    with SlotLoader(Replay, 2, **INLINE) as loader, adapt(loader, buckets=(2,)) as batches:
        policy = batches.policy(lambda params, inputs, state, key: Acted(inputs.reward), state=np.zeros(2, np.float32))
        with pytest.raises(TypeError, match=r"policy: expected Acted\(action, state\)"):
            batches.run(policy, env_steps=3)
        assert not loader.unanswered
