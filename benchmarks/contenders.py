"""Everyone who runs a workload: raw, SlotLoader and its peers, each by the way of use that serves it best.

Every function takes the name of a workload, seconds of warm-up and of the measuring window, and its own settings, and
returns {"steps_per_s": ...}. They are called by the harness, each in its own fresh process.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import Case
from benchmarks.workloads import WORKLOADS, BenchEnv, Ledger

Figures = dict[str, float]
Times = tuple[float, float]  # seconds of warm-up and of the window
STRETCH_S = 20.0  # a window is stretched by up to these seconds until every environment has closed a whole episode


GYMNASIUM = "gymnasium AsyncVectorEnv"
SB3 = "SB3 SubprocVecEnv"
TORCHRL_SHM = "TorchRL AsyncEnvPool shm"
TORCHRL_PARALLEL = "TorchRL ParallelEnv"
OURS = "slotloader"
BY_INDEX = "slotloader by index"  # the same, answered by `loader.send(actions, batch.env_indices)`
RAW = "raw"


def case(contender: str, function: Callable[..., Figures], workload: str, time_s: Times, **settings: Any) -> Case:
    """Builds the case of one contender; its settings are shown in the table."""
    shown = ", ".join(f"{name}={value}" for name, value in settings.items())
    arguments = {"workload": workload, "warmup": time_s[0], "window": time_s[1], **settings}
    return Case(workload, contender, f"{__name__}:{function.__name__}", arguments, shown)


def peer_cases(workload: str, time_s: Times) -> list[Case]:
    """Builds the cases of all peers, each with the settings that gave its best figure here."""
    return [
        case(GYMNASIUM, gymnasium_async, workload, time_s, shared_memory=True, copy=False),
        case(SB3, sb3_subproc, workload, time_s, start_method="fork"),
        case(TORCHRL_SHM, torchrl_async, workload, time_s, exchange="shm", stack="dense"),
        case(TORCHRL_PARALLEL, torchrl_parallel, workload, time_s, mp_start_method="fork"),
    ]


def measure(ledger: Ledger, advance: Callable[[], Any], warmup: float, window: float) -> Figures:
    """Calls `advance` through the warm-up and the window, then reads the ledger.

    Args:
      ledger: where the environments count.
      advance: one turn of the contender's loop.
      warmup: seconds before the window; prolonged until every environment has stepped.
      window: seconds of the window.

    Raises:
      RuntimeError: an environment closed no whole episode, so no rate can be told.
    """
    ready = time.monotonic() + warmup
    while time.monotonic() < ready or not ledger.all_stepped():
        advance()
    begin_ns = time.monotonic_ns()
    soonest, latest = begin_ns + int(window * 1e9), begin_ns + int((window + STRETCH_S) * 1e9)
    while True:
        advance()
        now_ns = time.monotonic_ns()
        if now_ns >= soonest and ledger.whole_episodes(begin_ns, now_ns):
            return {"steps_per_s": ledger.rate(begin_ns, now_ns)}
        if now_ns >= latest:
            raise RuntimeError(f"an environment closed no whole episode within {window + STRETCH_S:.0f} s")


def raw(workload: str, warmup: float, window: float, num_workers: int) -> Figures:
    """The same environments free-running with no exchange, `num_envs / num_workers` of them in turn per process."""
    spec = WORKLOADS[workload]
    context = multiprocessing.get_context("fork")
    start, stop = context.Barrier(num_workers + 1), context.Event()
    with Ledger(spec.num_envs) as ledger:
        factories = ledger.factories(spec)
        shares = [factories[at::num_workers] for at in range(num_workers)]
        processes = [context.Process(target=_run_freely, args=(share, start, stop)) for share in shares]
        for process in processes:
            process.start()
        start.wait()
        try:
            return measure(ledger, lambda: time.sleep(0.01), warmup, window)
        finally:
            stop.set()
            for process in processes:
                process.join()


def _run_freely(factories: list[Callable[[], BenchEnv]], start: Any, stop: Any) -> None:
    envs = [factory() for factory in factories]
    start.wait()
    for env in envs:
        env.reset()
    while not stop.is_set():
        for env in envs:
            _, _, terminated, _, _ = env.step(np.int64(0))
            if terminated:
                env.reset()


def slotloader(workload: str, warmup: float, window: float, by_index: bool = False, **settings: Any) -> Figures:
    """SlotLoader: recv, look at the observations, send; `by_index` by `loader.send(actions, batch.env_indices)`."""
    from slotloader import SlotLoader

    spec = WORKLOADS[workload]
    actions = np.zeros(spec.num_envs, np.int64)
    per_slot = settings.get("spares", 0) + 1
    with Ledger(spec.num_envs * per_slot) as ledger:
        factories = ledger.rotating_factories(spec, per_slot) if per_slot > 1 else ledger.factories(spec)
        with SlotLoader(factories, seed=0, **settings) as loader:
            turn = _turn_by_index if by_index else _turn
            return measure(ledger, lambda: turn(loader, actions), warmup, window)


def _turn(loader: Any, actions: Any) -> None:
    batch = loader.recv()
    batch.obs  # noqa: B018  the gather is part of the figure
    batch.send(actions[: len(batch.env_indices)])


def _turn_by_index(loader: Any, actions: Any) -> None:
    batch = loader.recv()
    batch.obs  # noqa: B018  the gather is part of the figure
    loader.send(actions[: len(batch.env_indices)], batch.env_indices)


def gymnasium_async(workload: str, warmup: float, window: float, **settings: Any) -> Figures:
    """gymnasium's AsyncVectorEnv, observations by shared memory."""
    from gymnasium.vector import AsyncVectorEnv

    spec = WORKLOADS[workload]
    actions = np.zeros(spec.num_envs, np.int64)
    with Ledger(spec.num_envs) as ledger:
        envs = AsyncVectorEnv(ledger.factories(spec), **settings)
        try:
            envs.reset(seed=0)
            return measure(ledger, lambda: envs.step(actions), warmup, window)
        finally:
            envs.close()


def sb3_subproc(workload: str, warmup: float, window: float, **settings: Any) -> Figures:
    """Stable-Baselines3's SubprocVecEnv."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    spec = WORKLOADS[workload]
    actions = np.zeros(spec.num_envs, np.int64)
    with Ledger(spec.num_envs) as ledger:
        envs = SubprocVecEnv(list(ledger.factories(spec)), **settings)
        try:
            envs.reset()
            return measure(ledger, lambda: envs.step(actions), warmup, window)
        finally:
            envs.close()


def torchrl_async(workload: str, warmup: float, window: float, **settings: Any) -> Figures:
    """TorchRL's AsyncEnvPool: whatever is ready is received, answered and sent back; resets run beside the steps.

    Steps and resets are asked for one by one: `async_step_and_maybe_reset_send` does both in one call, but reached
    only about 0.7 of this rate here. Only the action is written to an environment, not the whole record.
    """
    import torch
    from tensordict import TensorDict

    spec = WORKLOADS[workload]
    with Ledger(spec.num_envs) as ledger, torch.no_grad():
        pool = open_torchrl_pool(ledger.factories(spec), **settings)
        try:
            pool.reset()
            actions = torch.zeros(spec.num_envs, dtype=torch.int64)
            stepping, resetting = spec.num_envs, 0

            def send(indices: list[int]) -> None:
                pool.async_step_send(TensorDict({"action": actions[: len(indices)]}, [len(indices)]), indices)

            def advance() -> None:
                nonlocal stepping, resetting
                if stepping:
                    records = pool.async_step_recv(min_get=1)
                    records["next", "observation"]
                    indices, done = records["env_index"], records["next", "done"].flatten().tolist()
                    ended = [index for index, over in zip(indices, done, strict=True) if over]
                    if ended:
                        pool.async_reset_send(None, ended)
                        stepping, resetting = stepping - len(ended), resetting + len(ended)
                    if len(ended) < len(indices):
                        send([index for index, over in zip(indices, done, strict=True) if not over])
                if resetting:
                    try:
                        records = pool.async_reset_recv(min_get=1, timeout=0 if stepping else None)
                    except TimeoutError:
                        return
                    indices = records["env_index"]
                    stepping, resetting = stepping + len(indices), resetting - len(indices)
                    send(indices)

            send(list(range(spec.num_envs)))
            return measure(ledger, advance, warmup, window)
        finally:
            pool.close(raise_if_closed=False)


def torchrl_parallel(workload: str, warmup: float, window: float, **settings: Any) -> Figures:
    """TorchRL's ParallelEnv, all environments in step."""
    import torch
    from torchrl.envs import ParallelEnv

    torch.set_num_threads(1)
    spec = WORKLOADS[workload]
    with Ledger(spec.num_envs) as ledger, torch.no_grad():
        makers = [partial(torchrl_env, factory) for factory in ledger.factories(spec)]
        envs = ParallelEnv(spec.num_envs, makers, **settings)
        try:
            actions = torch.zeros(spec.num_envs, dtype=torch.int64)
            state = envs.reset()

            def advance() -> None:
                nonlocal state
                state["observation"]
                _, state = envs.step_and_maybe_reset(state.set("action", actions))

            return measure(ledger, advance, warmup, window)
        finally:
            envs.close()


def open_torchrl_pool(factories: list[Callable[[], BenchEnv]], **settings: Any) -> Any:
    """Opens an AsyncEnvPool; its workers are forked, which starts faster than TorchRL's spawn and steps no slower."""
    import torch
    from torchrl.envs import AsyncEnvPool

    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    return AsyncEnvPool([partial(torchrl_env, factory) for factory in factories], backend="multiprocessing", **settings)


def torchrl_env(factory: Callable[[], BenchEnv]) -> Any:
    import torch
    from torchrl.envs import GymWrapper

    torch.set_num_threads(1)
    return GymWrapper(factory(), categorical_action_encoding=True)
