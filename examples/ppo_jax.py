"""PPO on CartPole-v1 (or an ALE game) with jax and optax, in one file: ppo_torch.py in the other framework.

    python examples/ppo_jax.py
    python examples/ppo_jax.py --env ALE/Pong-v5 --num-envs 16 --total-steps 10000000

Schulman et al., "Proximal Policy Optimization Algorithms", 2017. `batches.rollout` hands out T transitions of every slot; each
slot has its own pace, and no action is sent between a rollout and the next weights. A rollout always has the same shape, and
`valid` says which transitions exist: so all epochs of an update are one jitted call, compiled once.
"""

import argparse
import itertools
import time
from functools import partial
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

from slotloader import Acted, SlotLoader, evaluate, gae, to_jax

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--env", default="CartPole-v1", help="a gymnasium id with Discrete actions")
parser.add_argument("--num-envs", type=int, default=8)
parser.add_argument("--num-workers", type=int, default=2)
parser.add_argument("--total-steps", type=int, default=150_000)
parser.add_argument("--length", type=int, default=32, help="transitions per slot and rollout")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--minibatches", type=int, default=1, help="a divisor of num_envs * length")
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--gamma", type=float, default=0.98)
parser.add_argument("--gae-lambda", type=float, default=0.8)
parser.add_argument("--clip", type=float, default=0.2)
parser.add_argument("--entropy", type=float, default=0.0)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--eval-episodes", type=int, default=100)
parser.add_argument("--curve", type=Path, default=Path("ppo_jax.png"))
args = parser.parse_args()

atari = args.env.startswith("ALE/")
updates = max(1, args.total_steps // (args.num_envs * args.length))


def make_env():
    if not atari:
        return gymnasium.make(args.env)
    import ale_py

    gymnasium.register_envs(ale_py)
    return gymnasium.make(args.env, obs_type="grayscale", frameskip=4)  # the stack of 4 frames is made on the device


def init_layer(key, shape, gain=2**0.5):
    return {"w": jax.nn.initializers.orthogonal(gain)(key, shape), "b": jnp.zeros(shape[-1])}


def init_params(key, observation_space, action_space):
    keys = iter(jax.random.split(key, 6))
    if atari:
        shapes, width = [(8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64), (7 * 7 * 64, 512)], 512
    else:
        shapes, width = [(int(np.prod(observation_space.shape)), 64), (64, 64)], 64
    return {
        "body": [init_layer(next(keys), shape) for shape in shapes],
        "actor": init_layer(next(keys), (width, int(action_space.n)), 0.01),
        "critic": init_layer(next(keys), (width, 1), 1.0),
    }


def dense(layer, x):
    return x @ layer["w"] + layer["b"]


def forward(params, obs):
    """Logits (N, actions) and values (N,)."""
    x = obs.astype(jnp.float32)
    if atari:
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.image.resize(x / 255.0, (*x.shape[:2], 84, 84), "linear").transpose(0, 2, 3, 1)
        for layer, stride in zip(params["body"][:3], (4, 2, 1), strict=True):
            x = jax.lax.conv_general_dilated(x, layer["w"], (stride, stride), "VALID", dimension_numbers=layout)
            x = jax.nn.relu(x + layer["b"])
        x = jax.nn.relu(dense(params["body"][3], x.reshape(len(x), -1)))
    else:
        x = x.reshape(len(x), -1)
        for layer in params["body"]:
            x = jnp.tanh(dense(layer, x))
    return dense(params["actor"], x), dense(params["critic"], x)[:, 0]


def log_prob_of(logits, action):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None].astype(jnp.int32), 1)[:, 0]


def act(params, inputs, state, key):
    logits, value = forward(params, inputs.obs)
    action = jax.random.categorical(key, logits)
    return Acted(action, extras={"log_prob": log_prob_of(logits, action), "value": value})


def loss_of(params, rows, clip):
    """The loss of a minibatch; `rows["valid"]` weighs its rows, 1 or 0."""

    def mean(x):
        return (x * rows["valid"]).sum() / jnp.maximum(rows["valid"].sum(), 1.0)

    logits, value = forward(params, rows["obs"])
    ratio = jnp.exp(log_prob_of(logits, rows["action"]) - rows["log_prob"])
    advantage = rows["advantage"] - mean(rows["advantage"])
    advantage = advantage / (jnp.sqrt(mean(advantage**2)) + 1e-8)
    policy_loss = -mean(jnp.minimum(advantage * ratio, advantage * jnp.clip(ratio, 1 - clip, 1 + clip)))
    value_loss = 0.5 * mean((value - rows["return"]) ** 2)
    entropy = -mean((jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1))
    return policy_loss + 0.5 * value_loss - args.entropy * entropy


def learning_rate(step):  # annealed once per update
    return args.learning_rate * (1 - step // (args.epochs * args.minibatches) / updates)


optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(learning_rate, eps=1e-5))


@partial(jax.jit, donate_argnums=(0, 1))
def learn(params, moments, unroll, clip, key):
    """One PPO update over all transitions of a rollout that exist."""
    values = unroll.extras["value"]
    advantages, returns = gae(
        unroll.reward[1:], args.gamma * unroll.discount[1:], values[:-1], values[-1], args.gae_lambda, unroll.valid
    )
    rows = {
        "obs": unroll.obs[:-1], "action": unroll.action[:-1], "log_prob": unroll.extras["log_prob"][:-1],
        "advantage": advantages, "return": returns, "valid": unroll.valid.astype(jnp.float32),
    }  # fmt: skip
    rows = {name: x.reshape(-1, *x.shape[2:]) for name, x in rows.items()}

    def minibatch(carry, chosen):
        params, moments = carry
        gradient = jax.grad(loss_of)(params, {name: x[chosen] for name, x in rows.items()}, clip)
        change, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, change), moments), None

    count = len(rows["valid"])
    orders = jax.vmap(lambda key: jax.random.permutation(key, count))(jax.random.split(key, args.epochs))
    (params, moments), _ = jax.lax.scan(minibatch, (params, moments), orders.reshape(args.epochs * args.minibatches, -1))
    return params, moments


def save_curve(points, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, returns = zip(*points, strict=True)
    pyplot.figure(figsize=(6, 4))
    pyplot.plot(steps, returns, linewidth=0.5, alpha=0.4)
    window = min(50, len(returns))
    pyplot.plot(steps[window - 1 :], np.convolve(returns, np.ones(window) / window, "valid"))
    pyplot.xlabel("env steps"), pyplot.ylabel("episode return"), pyplot.title(f"PPO (jax), {args.env}, seed {args.seed}")
    pyplot.tight_layout(), pyplot.savefig(path, dpi=110)


began, points = time.time(), []
with SlotLoader(make_env, args.num_envs, num_workers=args.num_workers, seed=args.seed) as loader:
    init_key, learn_key = jax.random.split(jax.random.key(args.seed))
    params = init_params(init_key, loader.observation_space, loader.action_space)
    moments = optimizer.init(params)
    with to_jax(loader, buckets=[args.num_envs], frame_stack=4 if atari else None) as batches:  # one size, compiled once
        policy = batches.compile(act, params=params)  # it has a copy of its own, so `learn` can donate ours
        rollouts = batches.rollout(policy, length=args.length)
        for update, unroll in enumerate(itertools.islice(rollouts, updates)):
            clip, key = args.clip * (1 - update / updates), jax.random.fold_in(learn_key, update)
            params, moments = learn(params, moments, unroll._replace(slots=None, versions=None), clip, key)
            policy.update(jax.block_until_ready(params))
            points += [(rollouts.env_steps, episode.episode_return) for episode in rollouts.episodes]
            recent = np.mean([value for _, value in points[-20:]]) if points else float("nan")
            rate = rollouts.env_steps / (time.time() - began)
            print(f"\r{rollouts.env_steps:9,} env steps  {rate:7,.0f}/s  mean return {recent:7.1f}", end="", flush=True)
        rollouts.close()
        print(f"\ntrained for {time.time() - began:.0f} s")
        # For TensorBoard or W&B: `wandb.log(loader.stats().as_dict(), step=rollouts.env_steps)` in the loop.
        greedy = batches.compile(lambda params, obs: forward(params, obs)[0].argmax(-1), params=params)
        result = evaluate(batches, greedy, episodes=args.eval_episodes, seed=args.seed)
print(result)
if points:
    save_curve(points, args.curve)
    print(f"curve in {args.curve}")
