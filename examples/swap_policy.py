"""One running fleet, three frameworks: numpy, torch and jax act in turn, and no environment notices.

    python examples/swap_policy.py --env CartPole-v1 --steps 20000 --policies numpy torch jax numpy

Only the adapter changes. Every env numbers its records, and the consumer counts them: none is lost and none comes twice.
"""

import argparse
import importlib.util
import os
from functools import partial
from typing import Any

import gymnasium
import numpy as np

import slotloader
from slotloader import SlotLoader

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--env", default="CartPole-v1", help="a gymnasium id with a float Box and Discrete actions")
parser.add_argument("--num-envs", type=int, default=8)
parser.add_argument("--steps", type=int, default=20_000, help="env steps per policy")
parser.add_argument("--policies", nargs="+", choices=["numpy", "torch", "jax"], default=["numpy", "torch", "jax"])
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()


# The environment: it numbers what it publishes. `t` travels with each record, as an info column.


class Numbered(gymnasium.Wrapper):
    t = -1

    def reset(self, *, seed=None, options=None):
        obs, info = self.env.reset(seed=seed, options=options)
        self.t += 1
        return obs, {**info, "t": self.t}

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.t += 1
        return obs, reward, terminated, truncated, {**info, "t": self.t}

    def pid(self):
        return os.getpid()


def make_env():
    return Numbered(gymnasium.make(args.env))


# The consumer's side of the proof: what each slot must send next.


class Once:
    def __init__(self, num_slots):
        self.expected = np.zeros(num_slots, np.int64)

    def count(self, batch):
        found, expected = batch.info["t"], self.expected[batch.env_indices]
        assert (found == expected).all(), f"slots {batch.env_indices}: expected records {expected}, found {found}"
        self.expected[batch.env_indices] += 1


# The policy: the same lines in each framework; `xp` is numpy, torch or jax.numpy.


def init_params(inputs, actions, seed, hidden=64):
    rng = np.random.default_rng(seed)
    return {
        "w1": rng.normal(0, inputs**-0.5, (inputs, hidden)).astype(np.float32),
        "b1": np.zeros(hidden, np.float32),
        "w2": rng.normal(0, hidden**-0.5, (hidden, actions)).astype(np.float32),
        "b2": np.zeros(actions, np.float32),
    }


def mlp(xp: Any, params, obs):
    hidden = xp.tanh(obs.reshape(len(obs), -1) @ params["w1"] + params["b1"])
    return (hidden @ params["w2"] + params["b2"]).argmax(-1)


# What differs between the frameworks: which adapter, and that jax is compiled for each bucket size. Only
# observations go to the device.


def numpy_batches(loader, params):
    batches = slotloader.to_numpy(loader, fields=["obs"])
    return batches, batches.policy(partial(mlp, np), params=params)


def torch_batches(loader, params):
    import torch

    torch.set_num_threads(1)  # on a CPU: the other cores are the envs', and torch's threads spin while they wait
    batches = slotloader.to_torch(loader, fields=["obs"])  # the accelerator if there is one, else the CPU
    return batches, batches.policy(partial(mlp, torch), params=params)


def jax_batches(loader, params):
    import jax.numpy

    batches = slotloader.to_jax(loader, fields=["obs"])
    return batches, batches.compile(partial(mlp, jax.numpy), params=params)


MAKERS = {"numpy": numpy_batches, "torch": torch_batches, "jax": jax_batches}


env = gymnasium.make(args.env)
if not (isinstance(env.action_space, gymnasium.spaces.Discrete) and env.observation_space.dtype == np.float32):
    found = f"{env.observation_space} and {env.action_space}"
    raise SystemExit(f"{args.env}: expected a float32 Box to observe and Discrete actions, found {found}")
params = init_params(int(np.prod(env.observation_space.shape)), int(env.action_space.n), args.seed)
env.close()

with SlotLoader(make_env, num_envs=args.num_envs, seed=args.seed, info={"t": np.int64}) as loader:
    once, pids, rows = Once(args.num_envs), loader.call("pid"), []
    for name in args.policies:
        if importlib.util.find_spec(name) is None:
            print(f"{name}: not installed, skipped; pip install 'slotloader[{name}]'", flush=True)
            continue
        print(f"{name} acts", flush=True)
        batches, policy = MAKERS[name](loader, params)
        with batches:  # at its end the slots belong to the loader again, for the next adapter
            run = batches.run(policy, env_steps=args.steps, on_batch=lambda batch, acted: once.count(batch.host))
        rows.append((name, run))
        assert loader.call("pid") == pids, "a worker was restarted"

    once.count(loader.recv(min_get=args.num_envs, timeout=None))  # what the envs made of the last actions
    made = [t + 1 for t in loader.get_attr("t")]  # the envs' own count; they wait for the next action
    assert once.expected.tolist() == made, f"expected {made} records, received {once.expected}"

print("\npolicy   env steps   per second   episodes   mean return")
for name, run in rows:
    returns = np.mean([episode.episode_return for episode in run.episodes]) if run.episodes else np.nan
    print(f"{name:6} {run.env_steps:11,} {run.env_steps_per_second:12,.0f} {len(run.episodes):10,} {returns:13.1f}")
print(f"\nworkers {pids} ran all the time")
print(f"ONCE holds: {sum(made):,} records, none lost or repeated")
