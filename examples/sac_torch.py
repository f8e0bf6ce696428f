"""SAC on Pendulum-v1 (or any env of Box observations and actions) with torch, in one file.

    python examples/sac_torch.py
    python examples/sac_torch.py --env HalfCheetah-v5 --hidden 256 --total-steps 1000000 --start-steps 5000

Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", 2018: twin critics, learned temperature. `Transitions` puts
the records of each slot together, whatever comes between them. The `discount` of a row is gamma to the number of its steps, 0
after a termination but not after a truncation, so the target of a value is one line for all of them.
"""

import argparse
import copy
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from slotloader import Acted, SlotLoader, Transitions, evaluate, to_torch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--env", default="Pendulum-v1", help="a gymnasium id with Box observations and actions")
parser.add_argument("--num-envs", type=int, default=4)
parser.add_argument("--num-workers", type=int, default=1)
parser.add_argument("--total-steps", type=int, default=12_000)
parser.add_argument("--start-steps", type=int, default=1_000, help="random actions at first")
parser.add_argument("--updates-per-step", type=float, default=1.0)
parser.add_argument("--replay-size", type=int, default=100_000)
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--n-step", type=int, default=1)
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--tau", type=float, default=0.005, help="how fast the target critics follow")
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--device", default="cpu")
parser.add_argument("--eval-episodes", type=int, default=100)
parser.add_argument("--curve", type=Path, default=Path("sac_torch.png"))
parser.add_argument("--tensorboard", type=Path, help="a folder for the loader's figures and the returns")
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)  # the other cores are the environments'
writer = None
if args.tensorboard:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SystemExit("--tensorboard needs tensorboard: pip install tensorboard") from error
    writer = SummaryWriter(args.tensorboard)


def network(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, args.hidden),
        nn.ReLU(),
        nn.Linear(args.hidden, args.hidden),
        nn.ReLU(),
        nn.Linear(args.hidden, outputs),
    )


class Actor(nn.Module):
    """A Gaussian squashed by tanh, scaled to the bounds of the actions."""

    def __init__(self, observation_space, action_space):
        super().__init__()
        self.body = network(int(np.prod(observation_space.shape)), 2 * int(np.prod(action_space.shape)))
        low, high = (torch.as_tensor(bound, dtype=torch.float32) for bound in (action_space.low, action_space.high))
        self.register_buffer("center", (high + low) / 2)
        self.register_buffer("scale", (high - low) / 2)

    def forward(self, obs):
        mean, log_std = self.body(obs.float().flatten(1)).chunk(2, -1)
        return mean, log_std.clamp(-5.0, 2.0)

    def scaled(self, squashed):
        return squashed.unflatten(-1, self.scale.shape) * self.scale + self.center

    def sample(self, obs, generator=None):
        """Actions (N, ...) and the logarithm of their density (N,), up to that of the constant scale."""
        mean, log_std = self(obs)
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        raw = mean + log_std.exp() * noise
        log_prob = -0.5 * noise.square() - log_std - 0.5 * np.log(2 * np.pi)
        log_slope = 2.0 * (np.log(2.0) - raw - nn.functional.softplus(-2.0 * raw))  # of tanh
        return self.scaled(raw.tanh()), (log_prob - log_slope).sum(-1)

    def best(self, obs):
        return self.scaled(self(obs)[0].tanh())


class Critics(nn.Module):
    """Two estimates of the value of an action, (2, N)."""

    def __init__(self, observation_space, action_space):
        super().__init__()
        inputs = int(np.prod(observation_space.shape)) + int(np.prod(action_space.shape))
        self.both = nn.ModuleList([network(inputs, 1), network(inputs, 1)])

    def forward(self, obs, action):
        x = torch.cat([obs.float().flatten(1), action.float().flatten(1)], -1)
        return torch.stack([critic(x).squeeze(-1) for critic in self.both])


class Replay:
    """The newest transitions: a ring of one table per column, made with the first of them."""

    def __init__(self, size):
        self.size, self.added, self.tables = size, 0, {}

    def extend(self, found):
        at = torch.arange(self.added, self.added + found.size) % self.size
        for name in ("obs", "action", "reward", "discount", "next_obs"):
            rows = getattr(found, name)[: found.size]
            if name not in self.tables:
                self.tables[name] = rows.new_zeros(self.size, *rows.shape[1:])
            self.tables[name][at] = rows
        self.added += found.size

    def sample(self, count):
        rows = torch.randint(min(self.added, self.size), (count,))
        return [self.tables[name][rows] for name in ("obs", "action", "reward", "discount", "next_obs")]


def act(params, inputs, state, key):  # the module itself: learning and acting take turns here
    return Acted(actor.sample(inputs.obs, key)[0])


def act_randomly(params, inputs, state, key):
    noise = torch.rand(len(inputs.obs), actor.scale.numel(), generator=key, device=actor.scale.device)
    return Acted(actor.scaled(2.0 * noise - 1.0))


def minimise(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def learn():
    """One update of the critics, the actor, the temperature and the target critics."""
    obs, action, reward, discount, next_obs = replay.sample(args.batch_size)
    temperature = log_temperature.detach().exp()
    with torch.no_grad():
        next_action, next_log_prob = actor.sample(next_obs)
        next_value = targets(next_obs, next_action).min(0).values - temperature * next_log_prob
        target = reward + discount * next_value
    minimise((critics(obs, action) - target).square().mean(-1).sum(), critics_optimizer)
    critics.requires_grad_(False)
    new_action, log_prob = actor.sample(obs)
    minimise((temperature * log_prob - critics(obs, new_action).min(0).values).mean(), actor_optimizer)
    critics.requires_grad_(True)
    minimise(-log_temperature.exp() * (log_prob.detach().mean() - actor.scale.numel()), temperature_optimizer)
    with torch.no_grad():
        torch._foreach_lerp_(list(targets.parameters()), list(critics.parameters()), args.tau)


def save_curve(points, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, returns = zip(*points, strict=True)
    pyplot.figure(figsize=(6, 4))
    pyplot.plot(steps, returns, linewidth=0.5, alpha=0.4)
    window = min(10, len(returns))
    pyplot.plot(steps[window - 1 :], np.convolve(returns, np.ones(window) / window, "valid"))
    pyplot.xlabel("env steps"), pyplot.ylabel("episode return"), pyplot.title(f"SAC (torch), {args.env}, seed {args.seed}")
    pyplot.tight_layout(), pyplot.savefig(path, dpi=110)


began, points, env_steps, owed, updates = time.time(), [], 0, 0.0, 0
with SlotLoader(args.env, args.num_envs, num_workers=args.num_workers, seed=args.seed) as loader:
    spaces = loader.observation_space, loader.action_space
    actor, critics = Actor(*spaces).to(args.device), Critics(*spaces).to(args.device)
    targets = copy.deepcopy(critics).requires_grad_(False)
    log_temperature = torch.zeros((), device=args.device, requires_grad=True)
    actor_optimizer, critics_optimizer, temperature_optimizer = (
        torch.optim.Adam(parameters, lr=args.learning_rate)
        for parameters in (actor.parameters(), critics.parameters(), [log_temperature])
    )
    replay = Replay(args.replay_size)
    with to_torch(loader, args.device) as batches:
        transitions = Transitions(batches, n_step=args.n_step, gamma=args.gamma)
        policy, random_policy = batches.policy(act), batches.policy(act_randomly)
        for batch in batches.steps(args.total_steps, progress=False):
            action = (random_policy if env_steps < args.start_steps else policy)(batch).action
            replay.extend(transitions.add(batch, action))
            batch.send(action)  # the envs step while we learn
            env_steps += batch.env_steps
            if env_steps >= args.start_steps:
                owed += args.updates_per_step * batch.env_steps
            while owed >= 1.0:
                owed, updates = owed - 1.0, updates + 1
                learn()
            for episode in batch.episodes:
                points.append((env_steps, episode.episode_return))
                recent = np.mean([value for _, value in points[-10:]])
                rate = env_steps / (time.time() - began)
                print(f"\r{env_steps:9,} env steps  {rate:6,.0f}/s  {updates:8,} updates  ", end="")
                print(f"mean return {recent:8.1f}  temperature {log_temperature.exp():.3f}", end="", flush=True)
                if writer:  # for W&B: `wandb.log(loader.stats().as_dict(), step=env_steps)`
                    writer.add_scalar("episode_return", episode.episode_return, env_steps)
                    for name, value in loader.stats().as_dict().items():
                        writer.add_scalar(f"loader/{name}", value, env_steps)
        print(f"\ntrained for {time.time() - began:.0f} s")
        result = evaluate(batches, actor.best, episodes=args.eval_episodes, seed=args.seed)
print(result)
if writer:
    writer.close()
if points:
    save_curve(points, args.curve)
    print(f"curve in {args.curve}")
