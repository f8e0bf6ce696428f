"""`slotloader demo`: a fleet of real environments, live rates, and what they mean."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import numpy as np

from slotloader.envs import import_for
from slotloader.errors import SlotLoaderError
from slotloader.loader import SlotLoader
from slotloader.progress import ProgressBar
from slotloader.specs import Array, Kind, Tree, build, leaves
from slotloader.stats import table_text


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
        scores = np.maximum(pixels @ self._hidden, 0.0) @ self._out
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


def run(env_id: str, num_envs: int, seconds: float, num_workers: int | None, seed: int, progress: bool | None) -> None:
    """Runs the fleet for `seconds` and prints the table."""
    atari = env_id.rpartition(":")[2].startswith("ALE/")
    envs: Any = partial(make_atari, env_id) if atari else env_id
    preload = ["gymnasium", "ale_py"] if atari else []
    began = time.monotonic()
    print(f"slotloader demo: {num_envs} x {env_id}, starting ...", file=sys.stderr, flush=True)
    with SlotLoader(envs, num_envs, num_workers=num_workers, seed=seed, preload=preload) as loader:
        layout = loader.table.layout
        print(
            f"ready after {time.monotonic() - began:.1f} s: {len(loader.fleet.configs)} workers, "
            f"{layout.nbytes / 2**20:.1f} MiB of shared slots",
            file=sys.stderr,
        )
        random_policy = RandomPolicy(layout.action, seed)
        pixel_policy = PixelPolicy(layout.action, seed) if atari else None
        loader.reset_stats()
        bar = ProgressBar(progress)
        start = time.monotonic()
        returns: list[float] = []
        while (passed := time.monotonic() - start) < seconds:
            batch = loader.recv()
            batch.send(pixel_policy(batch.obs) if pixel_policy else random_policy(batch.size))
            returns.extend(episode.episode_return for episode in batch.episodes)
            bar.update(passed / seconds, lambda: _live(loader))
        bar.close(1.0, _live(loader))
        stats = loader.stats()
    print(table_text(stats))
    if returns:
        print(f"\n  {len(returns)} episodes, mean return {np.mean(returns):.1f} (this policy learns nothing)")


def _live(loader: SlotLoader) -> str:
    stats = loader.stats()
    return (
        f"{stats.env_steps_per_second:,.0f} env steps/s, {stats.episodes} episodes, "
        f"batch {stats.records / max(stats.batches, 1):.1f}, policy busy {stats.consumer_busy_fraction:.0%}"
    )
