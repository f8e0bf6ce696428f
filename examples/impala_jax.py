"""IMPALA with a recurrent net on CartPole-v1 (or an ALE game) with jax and optax, in one file.

    python examples/impala_jax.py
    python examples/impala_jax.py --masked              # the velocities are hidden: needs its memory
    python examples/impala_jax.py --masked --no-memory  # and fails without it
    python examples/impala_jax.py --env ALE/Pong-v5 --num-envs 32 --total-steps 20000000

Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures", 2018. A thread
acts while the learner computes; unrolls come through a short queue, weights go back between two batches, and V-trace corrects
for those that were older. The recurrent state of each slot stays on the device; an unroll brings the one that it began with.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

from slotloader import Acted, SlotLoader, Unrolls, evaluate, to_jax, vtrace

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--env", default="CartPole-v1", help="a gymnasium id with Discrete actions")
parser.add_argument("--masked", action="store_true", help="CartPole without velocities")
parser.add_argument("--no-memory", action="store_true", help="zero the recurrent state at every step")
parser.add_argument("--num-envs", type=int, default=16)
parser.add_argument("--num-workers", type=int, default=1)
parser.add_argument("--total-steps", type=int, default=500_000)
parser.add_argument("--length", type=int, default=20, help="transitions per unroll")
parser.add_argument("--batch-size", type=int, default=16, help="unrolls per update")
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--reward-scale", type=float, default=0.1)
parser.add_argument("--value-cost", type=float, default=0.5)
parser.add_argument("--entropy", type=float, default=0.01)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--eval-episodes", type=int, default=100)
parser.add_argument("--curve", type=Path, default=Path("impala_jax.png"))
args = parser.parse_args()

atari = args.env.startswith("ALE/")


def make_env():
    if atari:
        import ale_py

        gymnasium.register_envs(ale_py)
        return gymnasium.make(args.env, obs_type="grayscale", frameskip=4)  # the stack of 4 frames is made on the device
    env = gymnasium.make(args.env)
    if args.masked:
        seen, limits = [0, 2], np.array([2.4, 0.21], np.float32)  # position and angle; an episode ends at their limits
        space = gymnasium.spaces.Box(env.observation_space.low[seen] / limits, env.observation_space.high[seen] / limits)
        env = gymnasium.wrappers.TransformObservation(env, lambda obs: obs[seen] / limits, space)
    return env


def init_layer(key, shape, gain=2**0.5):
    return {"w": jax.nn.initializers.orthogonal(gain)(key, shape), "b": jnp.zeros(shape[-1])}


def init_params(key, observation_space, action_space):
    keys, hidden = iter(jax.random.split(key, 8)), args.hidden
    if atari:
        shapes = [(8, 8, 4, 16), (4, 4, 16, 32), (9 * 9 * 32, hidden)]
    else:
        shapes = [(int(np.prod(observation_space.shape)), hidden)]
    return {
        "body": [init_layer(next(keys), shape) for shape in shapes],
        "gates": init_layer(next(keys), (2 * hidden, 2 * hidden), 1.0),
        "candidate": init_layer(next(keys), (2 * hidden, hidden), 1.0),
        "actor": init_layer(next(keys), (hidden, int(action_space.n)), 0.01),
        "critic": init_layer(next(keys), (hidden, 1), 1.0),
    }


def dense(layer, x):
    return x @ layer["w"] + layer["b"]


def forward(params, obs, state, is_first):
    """Logits (T, B, actions), values (T, B) and the last state (B, hidden) of T records in each of B rows."""
    x = obs.reshape(-1, *obs.shape[2:]).astype(jnp.float32)
    if atari:
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.image.resize(x / 255.0, (*x.shape[:2], 84, 84), "linear").transpose(0, 2, 3, 1)
        for layer, stride in zip(params["body"][:2], (4, 2), strict=True):
            x = jax.lax.conv_general_dilated(x, layer["w"], (stride, stride), "VALID", dimension_numbers=layout)
            x = jax.nn.relu(x + layer["b"])
    x = jnp.tanh(dense(params["body"][-1], x.reshape(len(x), -1)))

    def step(state, row):  # a gated recurrent unit (Cho et al. 2014)
        x, forgets = row
        state = jnp.where(forgets[:, None], 0.0, state)
        update, reset = jnp.split(jax.nn.sigmoid(dense(params["gates"], jnp.concatenate([x, state], -1))), 2, -1)
        candidate = jnp.tanh(dense(params["candidate"], jnp.concatenate([x, reset * state], -1)))
        state = update * state + (1 - update) * candidate
        return state, state

    forget = jnp.ones_like(is_first) if args.no_memory else is_first
    state, y = jax.lax.scan(step, state, (x.reshape(*is_first.shape, -1), forget))
    return dense(params["actor"], y), dense(params["critic"], y)[..., 0], state


def log_prob_of(logits, action):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None].astype(jnp.int32), -1)[..., 0]


def act(params, inputs, state, key):
    logits, _, state = forward(params, inputs.obs[None], state, inputs.is_first[None])
    action = jax.random.categorical(key, logits[0])
    return Acted(action, state, {"log_prob": log_prob_of(logits[0], action)})


def act_greedily(params, inputs, state, key):
    logits, _, state = forward(params, inputs.obs[None], state, inputs.is_first[None])
    return Acted(logits[0].argmax(-1), state)


def loss_of(params, unroll):
    """The net runs over the unroll again, from the state that the actor had, to give it other weights' outputs."""

    def mean(x):
        return jnp.where(unroll.valid, x, 0.0).sum() / jnp.maximum(unroll.valid.sum(), 1)

    logits, values, _ = forward(params, unroll.obs, unroll.initial_state, unroll.is_first)
    logits, action = logits[:-1], unroll.action[:-1]
    log_prob = log_prob_of(logits, action)
    targets = vtrace(
        unroll.extras["log_prob"][:-1], log_prob, args.reward_scale * unroll.reward[1:], args.gamma * unroll.discount[1:],
        values[:-1], values[-1], valid=unroll.valid,
    )  # fmt: skip
    policy_loss = -mean(log_prob * targets.pg_advantages)
    value_loss = 0.5 * mean((targets.vs - values[:-1]) ** 2)
    entropy = -mean((jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1))
    return policy_loss + args.value_cost * value_loss - args.entropy * entropy


optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.scale_by_adam(eps=1e-5))


@partial(jax.jit, donate_argnums=(0, 1))
def learn(params, moments, unroll, learning_rate):
    change, moments = optimizer.update(jax.grad(loss_of)(params, unroll), moments)
    return jax.tree.map(lambda param, change: param - learning_rate * change, params, change), moments


def save_curve(points, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, returns = zip(*points, strict=True)
    pyplot.figure(figsize=(6, 4))
    pyplot.plot(steps, returns, linewidth=0.5, alpha=0.4)
    window = min(50, len(returns))
    pyplot.plot(steps[window - 1 :], np.convolve(returns, np.ones(window) / window, "valid"))
    what = args.env + ", masked" * args.masked + ", no memory" * args.no_memory
    pyplot.xlabel("env steps"), pyplot.ylabel("episode return"), pyplot.title(f"IMPALA (jax), {what}, seed {args.seed}")
    pyplot.tight_layout(), pyplot.savefig(path, dpi=110)


began, points = time.time(), []
with SlotLoader(make_env, args.num_envs, num_workers=args.num_workers, min_get=args.num_envs // 2, seed=args.seed) as loader:
    params = init_params(jax.random.key(args.seed), loader.observation_space, loader.action_space)
    moments = optimizer.init(params)
    buckets = (args.num_envs // 2, args.num_envs)
    with to_jax(loader, buckets=buckets, frame_stack=4 if atari else None) as batches:
        initial = np.zeros(args.hidden, np.float32)
        policy = batches.compile(act, params=params, state=initial)  # it has a copy, so `learn` can donate ours
        unrolls = Unrolls(batches, length=args.length, batch_size=args.batch_size)
        with batches.background(policy, unrolls=unrolls) as actor:
            for update, unroll in enumerate(actor):
                left = 1 - actor.env_steps / args.total_steps
                if left <= 0:
                    break
                lag = actor.version - unroll.versions.min()
                unroll = unroll._replace(slots=None, versions=None)
                params, moments = learn(params, moments, unroll, args.learning_rate * left)
                actor.update(jax.block_until_ready(params))
                points += [(actor.env_steps, episode.episode_return) for episode in actor.episodes()]
                if update % 20 == 0 and points:
                    recent = np.mean([value for _, value in points[-50:]])
                    rate = actor.env_steps / (time.time() - began)
                    print(f"\r{actor.env_steps:9,} env steps  {rate:7,.0f}/s  {update:7,} updates  ", end="")
                    print(f"lag {lag:2}  mean return {recent:7.1f}", end="", flush=True)
                    # for TensorBoard or W&B: `wandb.log(loader.stats().as_dict(), step=actor.env_steps)`
        print(f"\ntrained for {time.time() - began:.0f} s")
        greedy = batches.compile(act_greedily, params=params, state=initial)
        result = evaluate(batches, greedy, episodes=args.eval_episodes, seed=args.seed)
print(result)
if points:
    save_curve(points, args.curve)
    print(f"curve in {args.curve}")
