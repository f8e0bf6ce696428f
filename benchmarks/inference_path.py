"""Frames per second with a real network in the loop, against TorchRL's batching inference.

Workloads: 8 environments of 1 ms with uint8 3x84x84, episodes of 200; and the same with episodes of 16 where environment 0
resets in 200 ms. One network everywhere: two convolutions and a linear layer, one thread.
Contenders: SlotLoader with `to_torch` (eager, as on a CPU) and `to_jax` (compiled), both by `run`; TorchRL's
AsyncBatchedCollector with its policy in a thread of the driver, and in a process that its workers reach directly; and the
network alone on batches of 8, which nobody can beat.
Bars: at least 3 times the better TorchRL in both workloads, for both adapters.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from benchmarks.contenders import RAW, case, measure, raw, torchrl_env
from benchmarks.harness import Case, Check, Outcome, parse_arguments, ratio, report, run_cases
from benchmarks.workloads import WORKLOADS, Ledger

ENVS = 8
ALONE_TORCH, ALONE_JAX = "network alone, torch", "network alone, jax"
OURS = {"torch": "slotloader to_torch", "jax": "slotloader to_jax"}
THREAD, PROCESS = "TorchRL collector, thread", "TorchRL collector, process"
Figures = dict[str, float]


def weights() -> dict[str, Any]:
    """The weights of the network, for every contender the same."""
    rng = np.random.default_rng(0)
    shapes = {"conv1": (8, 3, 8, 8), "conv2": (16, 8, 4, 4), "linear": (4, 16 * 9 * 9)}
    return {name: (rng.normal(size=shape) / np.prod(shape[1:]) ** 0.5).astype(np.float32) for name, shape in shapes.items()}


def torch_network() -> Any:
    """The network as a torch module: uint8 (B, 3, 84, 84) -> action int64 (B,)."""
    import torch
    from torch import nn
    from torch.nn import functional

    torch.set_num_threads(1)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in weights().items():
                self.register_parameter(name, nn.Parameter(torch.from_numpy(value)))

        def forward(self, obs: Any) -> Any:
            alone = obs.ndim == 3
            x = (obs[None] if alone else obs).float() / 255.0
            x = functional.relu(functional.conv2d(x, self.conv1, stride=4))
            x = functional.relu(functional.conv2d(x, self.conv2, stride=2))
            action = functional.linear(x.flatten(1), self.linear).argmax(-1)
            return action[0] if alone else action

    return Network()


def jax_network(params: Any, obs: Any) -> Any:
    """The network as a function for jax."""
    import jax
    from jax import lax

    x = obs.astype("float32") / 255.0
    x = jax.nn.relu(lax.conv(x, params["conv1"], (4, 4), "VALID"))
    x = jax.nn.relu(lax.conv(x, params["conv2"], (2, 2), "VALID"))
    return (x.reshape(len(x), -1) @ params["linear"].T).argmax(-1)


def alone(framework: str, seconds: float) -> Figures:
    """Frames per second of the network on batches of 8 that are there already."""
    obs = np.zeros((ENVS, 3, 84, 84), np.uint8)
    if framework == "torch":
        import torch

        network, tensor = torch_network(), torch.from_numpy(obs)

        def act() -> Any:
            with torch.no_grad():
                return network(tensor).numpy()
    else:
        import jax

        compiled = jax.jit(jax_network).lower(weights(), obs).compile()

        def act() -> Any:
            return np.asarray(compiled(weights_, obs))

        weights_ = jax.device_put(weights())
    act()
    count, begin = 0, time.monotonic()
    while (passed := time.monotonic() - begin) < seconds:
        act()
        count += ENVS
    return {"steps_per_s": count / passed}


def ours(workload: str, warmup: float, window: float, framework: str, **settings: Any) -> Figures:
    """SlotLoader with an adapter."""
    import slotloader

    spec = WORKLOADS[workload]
    with (
        Ledger(spec.num_envs) as ledger,
        slotloader.SlotLoader(ledger.factories(spec), seed=0, **settings) as loader,
        getattr(slotloader, f"to_{framework}")(loader, fields=["obs"]) as batches,
    ):
        policy = batches.policy(torch_network()) if framework == "torch" else batches.compile(jax_network, params=weights())
        return measure(ledger, lambda: batches.run(policy, env_steps=256, progress=False), warmup, window)


def make_torchrl_policy() -> Any:
    """The network as TorchRL takes it."""
    from tensordict.nn import TensorDictModule

    return TensorDictModule(torch_network(), in_keys=["observation"], out_keys=["action"])


def collector(workload: str, warmup: float, window: float, process: bool) -> Figures:
    """TorchRL's AsyncBatchedCollector."""
    import multiprocessing

    import torch
    from torchrl.collectors import AsyncBatchedCollector
    from torchrl.modules.inference_server import InferenceServerConfig

    torch.set_num_threads(1)
    if not process:
        multiprocessing.set_start_method("fork", force=True)
    spec = WORKLOADS[workload]
    with Ledger(spec.num_envs) as ledger:
        served: dict[str, Any] = (
            {"policy_factory": make_torchrl_policy, "transport": "auto"}
            if process
            else {"policy": make_torchrl_policy(), "transport": "driver"}
        )
        frames = AsyncBatchedCollector(
            [partial(torchrl_env, factory) for factory in ledger.factories(spec)],
            frames_per_batch=256,
            env_backend="multiprocessing",
            server_config=InferenceServerConfig(max_batch_size=spec.num_envs, min_batch_size=1, timeout=0.001),
            **served,
        )
        try:
            batches = iter(frames)
            return measure(ledger, lambda: next(batches), warmup, window)
        finally:
            frames.shutdown()


def best_torchrl(outcomes: list[Outcome], workload: str) -> str:
    """The TorchRL contender with the higher median."""
    rates = {
        outcome.case.contender: outcome.median("steps_per_s") or 0.0
        for outcome in outcomes
        if outcome.case.workload == workload and outcome.case.contender in (THREAD, PROCESS)
    }
    return max(rates, key=lambda name: rates[name], default=THREAD)


def main() -> None:
    options = parse_arguments(__doc__)
    times = (1.0, 3.0) if options.quick else (2.0, 8.0)
    cases: list[Case] = []
    for workload in ("pixels uniform", "pixels one slow"):
        cases.append(case(RAW, raw, workload, times, num_workers=ENVS))
        for framework, contender in ((name, OURS[name]) for name in OURS):
            cases.append(_case(contender, "ours", workload, times, framework=framework, timeout=0))
        cases.append(_case(THREAD, "collector", workload, times, process=False))
        cases.append(_case(PROCESS, "collector", workload, times, process=True))
        for framework, contender in (("torch", ALONE_TORCH), ("jax", ALONE_JAX)):
            target = f"{__package__}.inference_path:alone"
            cases.append(Case(workload, contender, target, {"framework": framework, "seconds": times[0]}))
    outcomes = run_cases(cases, options)
    checks = []
    for workload in ("pixels uniform", "pixels one slow"):
        best = best_torchrl(outcomes, workload)
        for contender in OURS.values():
            value = ratio(outcomes, "steps_per_s", (workload, contender), (workload, best))
            checks.append(Check(f"{workload}: {contender} / {best}", value, 3.0, unit="x"))
    report("inference_path", outcomes, checks, [("frames/s", "steps_per_s", ",.0f")], options)


def _case(contender: str, function: str, workload: str, times: tuple[float, float], **settings: Any) -> Case:
    shown = ", ".join(f"{name}={value}" for name, value in settings.items())
    arguments = {"workload": workload, "warmup": times[0], "window": times[1], **settings}
    return Case(workload, contender, f"{__package__}.inference_path:{function}", arguments, shown)


if __name__ == "__main__":
    main()
