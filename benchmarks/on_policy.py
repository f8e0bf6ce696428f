"""Does PPO learn the same over `rollout`, where every env has its own pace, as over gymnasium's lockstep SyncVectorEnv?

Workload: CartPole-v1, 8 envs, 60,000 env steps, one PPO (torch, the settings of examples/ppo_torch.py) with the same network,
seeds and update; only who collects T = 32 transitions per env differs. 10 seeds (`--quick`: 3).
Contenders: gymnasium's SyncVectorEnv (autoreset NEXT_STEP); SlotLoader with two workers and default settings.
Bars: the means over the seeds differ by at most two standard errors of their difference, for the return averaged over the whole
training and over its last fifth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import Case, Check, Outcome, parse_arguments, report, run_cases

ENVS, LENGTH, STEPS = 8, 32, 60_000
EPOCHS, LEARNING_RATE, GAMMA, LAMBDA, CLIP = 20, 1e-3, 0.98, 0.8, 0.2
LOCKSTEP, OURS = "SyncVectorEnv", "rollout"


class Data(NamedTuple):
    """One rollout as torch tensors, time-major, as `Unroll` says it; `returns` are those of the episodes that ended."""

    obs: Any
    action: Any
    reward: Any
    discount: Any
    log_prob: Any
    value: Any
    valid: Any
    returns: list[float]


def over_rollout(act: Callable[[Any], Any], seed: int) -> Iterator[Data]:
    """Data by SlotLoader."""
    import gymnasium

    from slotloader import Acted, SlotLoader, to_torch

    def policy(params: Any, inputs: Any, state: Any, key: Any) -> Any:
        action, log_prob, value = act(inputs.obs)
        return Acted(action, extras={"log_prob": log_prob, "value": value})

    with (
        SlotLoader(lambda: gymnasium.make("CartPole-v1"), ENVS, num_workers=2, seed=seed * 1000) as loader,
        to_torch(loader) as batches,
    ):
        rollouts = batches.rollout(policy, length=LENGTH)
        for unroll in rollouts:
            extras, returns = unroll.extras, [episode.episode_return for episode in rollouts.episodes]
            yield Data(
                unroll.obs, unroll.action, unroll.reward, unroll.discount,
                extras["log_prob"], extras["value"], unroll.valid, returns,
            )  # fmt: skip


def over_sync_vector_env(act: Callable[[Any], Any], seed: int) -> Iterator[Data]:
    """The same data by gymnasium, whose step after the end of an episode is the reset."""
    import gymnasium
    import torch

    envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * ENVS)
    obs, _ = envs.reset(seed=seed * 1000)
    reward = discount = np.zeros(ENVS, np.float32)
    ended, totals = np.zeros(ENVS, bool), np.zeros(ENVS)
    while True:
        records, valid, returns = [], [], []
        for step in range(LENGTH + 1):
            records.append(
                (torch.from_numpy(obs), *act(torch.from_numpy(obs)), torch.from_numpy(reward), torch.from_numpy(discount))
            )
            if step == LENGTH:  # the next rollout begins with this record
                break
            valid.append(~ended)
            obs, rewards, terminated, truncated, _ = envs.step(records[-1][1].numpy())
            reward, discount, ended = rewards.astype(np.float32), 1 - terminated.astype(np.float32), terminated | truncated
            totals += reward
            returns += totals[ended].tolist()
            totals[ended] = 0.0
        observed, action, log_prob, value, rewarded, discounts = map(torch.stack, zip(*records, strict=True))
        yield Data(observed, action, rewarded, discounts, log_prob, value, torch.from_numpy(np.stack(valid)), returns)


def learning(contender: str, seed: int, steps: int) -> dict[str, float]:
    """Mean episode returns of one PPO run, over all of it and over its last fifth."""
    import torch
    from torch import nn
    from torch.distributions import Categorical

    from slotloader.adapters.torch_returns import gae

    torch.manual_seed(seed)
    torch.set_num_threads(1)

    def layer(inputs: int, outputs: int, gain: float) -> nn.Linear:
        made = nn.Linear(inputs, outputs)
        nn.init.orthogonal_(made.weight, gain)
        nn.init.zeros_(made.bias)
        return made

    body = nn.Sequential(layer(4, 64, 2**0.5), nn.Tanh(), layer(64, 64, 2**0.5), nn.Tanh())
    actor, critic = layer(64, 2, 0.01), layer(64, 1, 1.0)
    parameters = [*body.parameters(), *actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE, eps=1e-5)

    def forward(obs: Any) -> tuple[Any, Any]:
        hidden = body(obs)
        return Categorical(logits=actor(hidden), validate_args=False), critic(hidden).squeeze(-1)

    @torch.no_grad()
    def act(obs: Any) -> tuple[Any, Any, Any]:
        distribution, value = forward(obs)
        action = distribution.sample()
        return action, distribution.log_prob(action), value

    def learn(data: Data, clip: float) -> None:
        values, valid = data.value, data.valid
        advantages, targets = gae(data.reward[1:], GAMMA * data.discount[1:], values[:-1], values[-1], LAMBDA, valid)
        advantages, targets, obs, action = advantages[valid], targets[valid], data.obs[:-1][valid], data.action[:-1][valid]
        old_log_prob = data.log_prob[:-1][valid]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for _ in range(EPOCHS):
            distribution, value = forward(obs)
            ratio = (distribution.log_prob(action) - old_log_prob).exp()
            gain = torch.min(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()
            loss = 0.25 * (value - targets).square().mean() - gain
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()

    collect = {LOCKSTEP: over_sync_vector_env, OURS: over_rollout}[contender]
    updates = steps // (ENVS * LENGTH)
    curve: list[list[float]] = []  # the returns that ended in each rollout
    data, begun = collect(act, seed), time.monotonic()
    for update in range(updates):
        left = 1 - update / updates
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * left
        rollout = next(data)
        learn(rollout, CLIP * left)
        curve.append(rollout.returns)
    data.close()  # type: ignore[attr-defined]
    elapsed = time.monotonic() - begun
    # a tenth of the training counts as one, however many episodes it had: poor policies have short ones
    tenths = [np.mean(np.concatenate(part)) for part in np.array_split(np.array(curve, object), 10)]
    return {"training": float(np.mean(tenths)), "last": float(np.mean(tenths[-2:])), "seconds": elapsed}


def apart(outcomes: list[Outcome], name: str) -> float | None:
    """How many standard errors of their difference the means of the two contenders lie apart."""
    found = {who: [value for o in outcomes if o.case.contender == who for value in o.values(name)] for who in (LOCKSTEP, OURS)}
    if min(map(len, found.values())) < 2:
        return None
    error = sum(statistics.variance(values) / len(values) for values in found.values()) ** 0.5
    return abs(statistics.mean(found[OURS]) - statistics.mean(found[LOCKSTEP])) / error if error else None


def main() -> None:
    options = parse_arguments(__doc__)
    seeds, options.runs = (3 if options.quick else 10), 1  # a seed is a run
    cases = [
        Case(f"seed {seed}", who, f"{__package__}.on_policy:learning", {"contender": who, "seed": seed, "steps": STEPS})
        for seed in range(seeds)
        for who in (LOCKSTEP, OURS)
    ]
    outcomes = run_cases(cases, options)
    checks = [
        Check(f"{meaning}, difference", apart(outcomes, name), 2.0, at_least=False, unit=" standard errors")
        for meaning, name in (("return over the training", "training"), ("return over its last fifth", "last"))
    ]
    columns = [("return", "training", ".1f"), ("last fifth", "last", ".1f"), ("seconds", "seconds", ".1f")]
    report("on_policy", outcomes, checks, columns, options)
    for name in ("training", "last"):
        for who in (LOCKSTEP, OURS):
            values = [value for o in outcomes if o.case.contender == who for value in o.values(name)]
            if len(values) > 1:
                error = statistics.stdev(values) / len(values) ** 0.5
                print(f"{name}: {who} {statistics.mean(values):.1f} +- {error:.1f} (standard error)")


if __name__ == "__main__":
    main()
