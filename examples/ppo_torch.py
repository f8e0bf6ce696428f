"""PPO on CartPole-v1 (or an ALE game) with torch, in one file.

    python examples/ppo_torch.py
    python examples/ppo_torch.py --env ALE/Pong-v5 --num-envs 16 --total-steps 10000000

Schulman et al., "Proximal Policy Optimization Algorithms", 2017. `batches.rollout` hands out T transitions of every slot; each
slot has its own pace, and no action is sent between a rollout and the next weights.
"""

import argparse
import itertools
import time
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from slotloader import Acted, SlotLoader, evaluate, gae, to_torch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--env", default="CartPole-v1", help="a gymnasium id with Discrete actions")
parser.add_argument("--num-envs", type=int, default=8)
parser.add_argument("--num-workers", type=int, default=2)
parser.add_argument("--total-steps", type=int, default=150_000)
parser.add_argument("--length", type=int, default=32, help="transitions per slot and rollout")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--minibatches", type=int, default=1)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--gamma", type=float, default=0.98)
parser.add_argument("--gae-lambda", type=float, default=0.8)
parser.add_argument("--clip", type=float, default=0.2)
parser.add_argument("--entropy", type=float, default=0.0)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--device", default="cpu")
parser.add_argument("--eval-episodes", type=int, default=100)
parser.add_argument("--curve", type=Path, default=Path("ppo_torch.png"))
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)  # the other cores are the environments'
atari = args.env.startswith("ALE/")


def make_env():
    if not atari:
        return gymnasium.make(args.env)
    import ale_py

    gymnasium.register_envs(ale_py)
    return gymnasium.make(args.env, obs_type="grayscale", frameskip=4)  # the stack of 4 frames is made on the device


def init(layer, gain=2**0.5):
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self, observation_space, action_space):
        super().__init__()
        if atari:
            self.body = nn.Sequential(
                init(nn.Conv2d(4, 32, 8, stride=4)), nn.ReLU(), init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(),
                init(nn.Conv2d(64, 64, 3)), nn.ReLU(), nn.Flatten(), init(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(),
            )  # fmt: skip
            width = 512
        else:
            inputs, width = int(np.prod(observation_space.shape)), 64
            self.body = nn.Sequential(
                nn.Flatten(), init(nn.Linear(inputs, width)), nn.Tanh(), init(nn.Linear(width, width)), nn.Tanh()
            )
        self.actor = init(nn.Linear(width, action_space.n), 0.01)
        self.critic = init(nn.Linear(width, 1), 1.0)

    def forward(self, obs):
        x = obs.float()
        if atari:
            x = nn.functional.interpolate(x / 255.0, (84, 84), mode="area")
        x = self.body(x)
        return self.actor(x), self.critic(x).squeeze(-1)


def act(params, inputs, state, key):
    logits, value = agent(inputs.obs)
    distribution = Categorical(logits=logits)
    action = distribution.sample()
    return Acted(action, extras={"log_prob": distribution.log_prob(action), "value": value})


def learn(unroll, clip):
    """One PPO update over all transitions of a rollout that exist."""
    values = unroll.extras["value"]
    advantages, returns = gae(
        unroll.reward[1:], args.gamma * unroll.discount[1:], values[:-1], values[-1], args.gae_lambda, unroll.valid
    )
    obs, action = unroll.obs[:-1][unroll.valid], unroll.action[:-1][unroll.valid]
    old_log_prob = unroll.extras["log_prob"][:-1][unroll.valid]
    advantages, returns = advantages[unroll.valid], returns[unroll.valid]
    for _ in range(args.epochs):
        for rows in torch.randperm(len(obs), device=obs.device).chunk(args.minibatches):
            logits, value = agent(obs[rows])
            distribution = Categorical(logits=logits)
            ratio = (distribution.log_prob(action[rows]) - old_log_prob[rows]).exp()
            advantage = advantages[rows]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            policy_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(1 - clip, 1 + clip)).mean()
            value_loss = 0.5 * (value - returns[rows]).square().mean()
            loss = policy_loss + 0.5 * value_loss - args.entropy * distribution.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def save_curve(points, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, returns = zip(*points, strict=True)
    pyplot.figure(figsize=(6, 4))
    pyplot.plot(steps, returns, linewidth=0.5, alpha=0.4)
    window = min(50, len(returns))
    pyplot.plot(steps[window - 1 :], np.convolve(returns, np.ones(window) / window, "valid"))
    pyplot.xlabel("env steps"), pyplot.ylabel("episode return"), pyplot.title(f"PPO (torch), {args.env}, seed {args.seed}")
    pyplot.tight_layout(), pyplot.savefig(path, dpi=110)


began, points = time.time(), []
with SlotLoader(make_env, args.num_envs, num_workers=args.num_workers, seed=args.seed) as loader:
    agent = Agent(loader.observation_space, loader.action_space).to(args.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    with to_torch(loader, args.device, frame_stack=4 if atari else None) as batches:
        rollouts = batches.rollout(act, length=args.length)
        updates = max(1, args.total_steps // (args.num_envs * args.length))
        for update, unroll in enumerate(itertools.islice(rollouts, updates)):
            left = 1 - update / updates
            optimizer.param_groups[0]["lr"] = args.learning_rate * left
            learn(unroll, args.clip * left)
            points += [(rollouts.env_steps, episode.episode_return) for episode in rollouts.episodes]
            recent = np.mean([value for _, value in points[-20:]]) if points else float("nan")
            rate = rollouts.env_steps / (time.time() - began)
            print(f"\r{rollouts.env_steps:9,} env steps  {rate:7,.0f}/s  mean return {recent:7.1f}", end="", flush=True)
        rollouts.close()
        print(f"\ntrained for {time.time() - began:.0f} s")
        result = evaluate(batches, lambda obs: agent(obs)[0].argmax(-1), episodes=args.eval_episodes, seed=args.seed)
print(result)
if points:
    save_curve(points, args.curve)
    print(f"curve in {args.curve}")
