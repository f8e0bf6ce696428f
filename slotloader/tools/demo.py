"""`slotloader demo`: a fleet of real environments, live rates, and what they mean."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from slotloader.batching.progress import ProgressBar
from slotloader.batching.stats import table_text
from slotloader.device_batches import DeviceBatches
from slotloader.errors import SlotLoaderError
from slotloader.loader import SlotLoader
from slotloader.records.specs import Array, Kind, Leaf, Tree, build, leaves
from slotloader.worker.envs import import_for


def make_atari(env_id: str) -> Any:
    """Makes a grey 210 x 160 ALE env, four frames a step, without its banner."""
    gymnasium = import_for(env_id)
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    return gymnasium.make(env_id, obs_type="grayscale")


class PixelPolicy:
    """A small numpy policy with random weights: one projection of every fourth pixel, a ReLU, and action scores.

    It learns nothing; it costs about what a small network costs, so that the figures mean something.
    """

    def __init__(self, action: Tree, seed: int) -> None:
        (leaf,) = leaves(action)
        assert leaf.high is not None
        inputs, actions = 53 * 40, int(leaf.high) + 1
        rng = np.random.default_rng(seed)
        self._hidden = rng.normal(0, inputs**-0.5, (inputs, 128)).astype(np.float32)
        self._out = rng.normal(0, 128**-0.5, (128, actions)).astype(np.float32)
        self._rng = rng

    def __call__(self, obs: Array) -> Array:
        """Actions int64 (B,) for grey screens uint8 (B, 210, 160)."""
        pixels = obs[:, ::4, ::4].reshape(len(obs), -1).astype(np.float32) / 255.0
        # Not `@`: the threads of a BLAS spin for the cores that the envs need, on a busy machine for most of the time.
        hidden = np.einsum("bi,ih->bh", pixels, self._hidden)
        scores = np.maximum(hidden, 0.0) @ self._out
        return np.asarray((scores + self._rng.gumbel(size=scores.shape)).argmax(-1))


class RandomPolicy:
    """Uniform random actions for any action space of bounded leaves."""

    def __init__(self, action: Tree, seed: int) -> None:
        self._action, self._rng = action, np.random.default_rng(seed)
        for leaf in leaves(action):
            if leaf.kind is not Kind.ARRAY:
                raise SlotLoaderError(f"demo: expected an action space of numbers, found {leaf}")

    def __call__(self, size: int) -> Any:
        """A tree of (B, ...) actions."""
        return build(self._action, (self._sample(leaf, size) for leaf in leaves(self._action)))

    def _sample(self, leaf: Any, size: int) -> Array:
        shape = (size, *leaf.shape)
        low = np.maximum(leaf.low, -1e3) if leaf.low is not None else -1
        high = np.minimum(leaf.high, 1e3) if leaf.high is not None else 1
        if leaf.dtype.kind == "f":
            return self._rng.uniform(low, high, shape).astype(leaf.dtype)
        return self._rng.integers(low, np.asarray(high, np.int64) + 1, shape).astype(leaf.dtype)


def make_params(observation: Tree, action: Tree, seed: int) -> tuple[dict[str, Array], int]:
    """Random weights of the network in `adapters/demo_torch.py` and `adapters/demo_jax.py`.

    Returns:
      "conv1" and "conv2" (out, in, height, width) for grey screens only, "hidden" and "out" (in, out), all float32; and the
      first action, which the first column of "out" stands for.

    Raises:
      SlotLoaderError: not one array of numbers to observe, or not one of so many actions to choose.
    """
    if not (isinstance(observation, Leaf) and observation.kind is Kind.ARRAY and observation.dtype.kind in "fiub"):
        raise SlotLoaderError(f"expected one array of numbers to observe, found {observation}; --policy numpy takes any")
    if not (isinstance(action, Leaf) and action.shape == () and action.low is not None and action.high is not None):
        raise SlotLoaderError(f"expected one Discrete action, found {action}; --policy numpy takes any")
    rng = np.random.default_rng(seed)

    def normal(*shape: int, fan_in: int) -> Array:
        return rng.normal(0, fan_in**-0.5, shape).astype(np.float32)

    params, inputs = {}, int(np.prod(observation.shape))
    if len(observation.shape) == 2 and observation.dtype == np.uint8 and min(observation.shape) >= 40:
        rows, columns = (((-(-side // 2) - 8) // 4 + 1 - 4) // 2 + 1 for side in observation.shape)
        params = {"conv1": normal(16, 1, 8, 8, fan_in=64), "conv2": normal(32, 16, 4, 4, fan_in=256)}
        inputs = 32 * rows * columns
    low, high = int(action.low), int(action.high)
    return {**params, "hidden": normal(inputs, 128, fan_in=inputs), "out": normal(128, high - low + 1, fan_in=128)}, low


def _on_host(action: Tree, atari: bool, seed: int) -> Callable[[Any], Any]:
    """A numpy policy, from a batch to its actions."""
    if atari:
        pixel_policy = PixelPolicy(action, seed)
        return lambda batch: pixel_policy(batch.obs)
    random_policy = RandomPolicy(action, seed)
    return lambda batch: random_policy(batch.size)


def _on_device(name: str, loader: SlotLoader, seed: int) -> tuple[DeviceBatches, Callable[[Any], Any]]:
    """The fleet's batches in a framework, and a small network from a batch to its actions."""
    layout, began = loader.table.layout, time.monotonic()
    try:
        params, low = make_params(layout.observation, layout.action, seed)
    except SlotLoaderError as error:
        raise SlotLoaderError(f"--policy {name}: {error}") from error
    print(f"{name} policy, getting ready ...", file=sys.stderr, flush=True)
    if name == "torch":
        from slotloader.adapters.demo_torch import start
    else:
        from slotloader.adapters.demo_jax import start
    batches, policy, where = start(loader, params, low)
    print(f"policy ready after {time.monotonic() - began:.1f} s: {where}", file=sys.stderr)
    return batches, lambda batch: policy(batch).action


def run(
    env_id: str,
    num_envs: int,
    seconds: float,
    num_workers: int | None,
    seed: int,
    progress: bool | None,
    policy: str = "numpy",
) -> None:
    """Runs the fleet for `seconds` with a policy in "numpy", "torch" or "jax" and prints the table."""
    atari = env_id.rpartition(":")[2].startswith("ALE/")
    envs: Any = partial(make_atari, env_id) if atari else env_id
    preload = ["gymnasium", "ale_py"] if atari else []
    began = time.monotonic()
    print(f"slotloader demo: {num_envs} x {env_id}, starting ...", file=sys.stderr, flush=True)
    with ExitStack() as stack:
        loader = stack.enter_context(SlotLoader(envs, num_envs, num_workers=num_workers, seed=seed, preload=preload))
        layout = loader.table.layout
        print(
            f"ready after {time.monotonic() - began:.1f} s: {len(loader.fleet.configs)} workers, "
            f"{layout.nbytes / 2**20:.1f} MiB of shared slots",
            file=sys.stderr,
        )
        source: Any = loader
        if policy == "numpy":
            act = _on_host(layout.action, atari, seed)
        else:
            source, act = _on_device(policy, loader, seed)
            stack.enter_context(source)
            batch = source.recv(min_get=num_envs, timeout=None)  # of what waited for the framework to be ready
            batch.send(act(batch))
        loader.reset_stats()
        bar = ProgressBar(progress)
        start = time.monotonic()
        returns: list[float] = []
        rows = padding = 0
        while (passed := time.monotonic() - start) < seconds:
            batch = source.recv()
            batch.send(act(batch))
            returns.extend(episode.episode_return for episode in batch.episodes)
            rows, padding = rows + batch.size, padding + getattr(batch, "bucket", batch.size) - batch.size
            bar.update(passed / seconds, lambda: _live(loader))
        bar.close(1.0, _live(loader))
        stats = loader.stats()
    print(table_text(stats))
    if source is not loader:
        sizes, share = ", ".join(map(str, source.buckets)), padding / max(rows + padding, 1)
        print(f"\n  buckets of {sizes} rows: {share:.0%} of all rows were padding")
    if returns:
        print(f"\n  {len(returns)} episodes, mean return {np.mean(returns):.1f} (this policy learns nothing)")


def _live(loader: SlotLoader) -> str:
    stats = loader.stats()
    return (
        f"{stats.env_steps_per_second:,.0f} env steps/s, {stats.episodes} episodes, "
        f"batch {stats.records / max(stats.batches, 1):.1f}, policy busy {stats.consumer_busy_fraction:.0%}"
    )
