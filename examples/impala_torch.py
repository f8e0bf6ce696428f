"""IMPALA with a recurrent net on CartPole-v1 (or an ALE game) with torch, in one file.

    python examples/impala_torch.py
    python examples/impala_torch.py --masked              # the velocities are hidden: needs its memory
    python examples/impala_torch.py --masked --no-memory  # and fails without it
    python examples/impala_torch.py --env ALE/Pong-v5 --num-envs 32 --total-steps 20000000

Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures", 2018. A thread
acts while the learner computes; unrolls come through a short queue, weights go back between two batches, and V-trace corrects
for those that were older. The recurrent state of each slot stays on the device; an unroll brings the one that it began with.
"""

import argparse
import copy
import time
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from slotloader import Acted, SlotLoader, Unrolls, evaluate, to_torch, vtrace

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
parser.add_argument("--device", default="cpu")
parser.add_argument("--eval-episodes", type=int, default=100)
parser.add_argument("--curve", type=Path, default=Path("impala_torch.png"))
parser.add_argument("--tensorboard", type=Path, help="a folder for the loader's figures and the returns")
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)  # the other cores are the environments'
atari = args.env.startswith("ALE/")
writer = None
if args.tensorboard:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SystemExit("--tensorboard needs tensorboard: pip install tensorboard") from error
    writer = SummaryWriter(args.tensorboard)


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


def init(layer, gain=2**0.5):
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self, observation_space, action_space):
        super().__init__()
        if atari:
            self.body = nn.Sequential(
                init(nn.Conv2d(4, 16, 8, stride=4)), nn.ReLU(), init(nn.Conv2d(16, 32, 4, stride=2)), nn.ReLU(),
                nn.Flatten(), init(nn.Linear(32 * 9 * 9, args.hidden)), nn.ReLU(),
            )  # fmt: skip
        else:
            inputs = int(np.prod(observation_space.shape))
            self.body = nn.Sequential(nn.Flatten(), init(nn.Linear(inputs, args.hidden)), nn.Tanh())
        self.core = nn.GRUCell(args.hidden, args.hidden)
        self.actor = init(nn.Linear(args.hidden, int(action_space.n)), 0.01)
        self.critic = init(nn.Linear(args.hidden, 1), 1.0)

    def forward(self, obs, state, is_first):
        """Logits (T, B, actions), values (T, B) and the last state (B, hidden) of T records in each of B rows."""
        x = obs.flatten(0, 1).float()
        if atari:
            x = nn.functional.interpolate(x / 255.0, (84, 84), mode="area")
        x = self.body(x).unflatten(0, is_first.shape)
        forget = torch.ones_like(is_first) if args.no_memory else is_first
        outputs = []
        for row, forgets in zip(x, forget, strict=True):
            state = self.core(row, torch.where(forgets[:, None], 0.0, state))
            outputs.append(state)
        y = torch.stack(outputs)
        return self.actor(y), self.critic(y).squeeze(-1), state


def act(params, inputs, state, key):
    logits, _, state = functional_call(shell, params, (inputs.obs[None], state, inputs.is_first[None]))
    log_probs = logits[0].log_softmax(-1)
    action = torch.multinomial(log_probs.exp(), 1, generator=key)
    return Acted(action[:, 0], state, {"log_prob": log_probs.gather(-1, action)[:, 0]})


def act_greedily(params, inputs, state, key):
    logits, _, state = functional_call(shell, params, (inputs.obs[None], state, inputs.is_first[None]))
    return Acted(logits[0].argmax(-1), state)


def learn(unroll):
    """One update: the net runs over the unroll again, from the state that the actor had, to give it other weights' outputs."""
    valid = unroll.valid
    logits, values, _ = agent(unroll.obs, unroll.initial_state, unroll.is_first)
    log_probs = logits[:-1].log_softmax(-1)
    log_prob = log_probs.gather(-1, unroll.action[:-1, :, None])[..., 0]
    targets = vtrace(
        unroll.extras["log_prob"][:-1], log_prob, args.reward_scale * unroll.reward[1:], args.gamma * unroll.discount[1:],
        values[:-1], values[-1], valid=valid,
    )  # fmt: skip
    policy_loss = -(log_prob * targets.pg_advantages)[valid].mean()
    value_loss = 0.5 * (targets.vs - values[:-1])[valid].square().mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1)[valid].mean()
    loss = policy_loss + args.value_cost * value_loss - args.entropy * entropy
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
    what = args.env + ", masked" * args.masked + ", no memory" * args.no_memory
    pyplot.xlabel("env steps"), pyplot.ylabel("episode return"), pyplot.title(f"IMPALA (torch), {what}, seed {args.seed}")
    pyplot.tight_layout(), pyplot.savefig(path, dpi=110)


began, points = time.time(), []
with SlotLoader(make_env, args.num_envs, num_workers=args.num_workers, min_get=args.num_envs // 2, seed=args.seed) as loader:
    agent = Agent(loader.observation_space, loader.action_space).to(args.device)
    shell = copy.deepcopy(agent)  # functional_call puts weights into it for a while, so the learner's own will not do
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    with to_torch(loader, args.device, frame_stack=4 if atari else None) as batches:
        initial = torch.zeros(args.hidden)
        policy = batches.policy(act, params=dict(agent.named_parameters()), state=initial)
        unrolls = Unrolls(batches, length=args.length, batch_size=args.batch_size)
        with batches.background(policy, unrolls=unrolls) as actor:
            for update, unroll in enumerate(actor):
                left = 1 - actor.env_steps / args.total_steps
                if left <= 0:
                    break
                optimizer.param_groups[0]["lr"] = args.learning_rate * left
                lag = actor.version - unroll.versions.min()
                learn(unroll)
                actor.update(dict(agent.named_parameters()))
                points += [(actor.env_steps, episode.episode_return) for episode in actor.episodes()]
                if update % 20 == 0 and points:
                    recent = np.mean([value for _, value in points[-50:]])
                    rate = actor.env_steps / (time.time() - began)
                    print(f"\r{actor.env_steps:9,} env steps  {rate:7,.0f}/s  {update:7,} updates  ", end="")
                    print(f"lag {lag:2}  mean return {recent:7.1f}", end="", flush=True)
                    if writer:  # for W&B: `wandb.log(loader.stats().as_dict(), step=actor.env_steps)`
                        for name, value in {"episode_return": recent, **loader.stats().as_dict()}.items():
                            writer.add_scalar(name, value, actor.env_steps)
        print(f"\ntrained for {time.time() - began:.0f} s")
        greedy = batches.policy(act_greedily, params=dict(agent.named_parameters()), state=initial)
        result = evaluate(batches, greedy, episodes=args.eval_episodes, seed=args.seed)
print(result)
if writer:
    writer.close()
if points:
    save_curve(points, args.curve)
    print(f"curve in {args.curve}")
