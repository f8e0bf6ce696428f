"""`spare_processes`: envs that cannot share a process with their spares, each in a process of its own beside its worker."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from checks import run_script, until
from gymnasium.spaces import Box, Discrete

from slotloader import EnvFailed, SlotLoader

pytestmark = pytest.mark.usefixtures("clean")
APART: dict[str, Any] = {"spares": 1, "spare_processes": True}


class Alone(gym.Env):
    """Refuses to be the second of its kind in a process, as simulators with global state do."""

    observation_space, action_space = Box(0, 1e9, (2,), np.float64), Discrete(1000)
    built = False

    def __init__(self, context: Any) -> None:
        if Alone.built:
            raise RuntimeError("there is a simulator in this process already")
        Alone.built, self.slot, self.factor = True, context.slot, 1.0

    def _see(self) -> Any:
        return np.array([os.getpid(), self.t * self.factor])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._see(), {"seed": seed}

    def step(self, action: int) -> Any:
        if action == 999:
            raise EOFError("the map ends here")
        if action == 998:
            return self._see(), 0.0, False, False, {"what": lambda: 1}, "six"
        if action == 997:
            os._exit(3)
        self.t += 1
        return self._see(), float(action), self.t == 3, False, {"double": 2.0 * action}

    def pid_and(self, *more: Any, **named: Any) -> Any:
        return os.getpid(), more, named

    def close(self) -> None:
        type(self).built = False


class Awaited(Alone):
    """The same with coroutines."""

    async def reset(self, **keywords: Any) -> Any:  # type: ignore[override]
        return super().reset(**keywords)

    async def step(self, action: int) -> Any:  # type: ignore[override]
        return super().step(action)


def fleet(env: Any = Alone, num_envs: int = 2, **options: Any) -> SlotLoader:
    return SlotLoader(env, num_envs, **{**APART, **options})


@pytest.mark.parametrize("env", [Alone, Awaited])
def test_each_env_has_a_process_of_its_own_and_its_records_are_its_own(env: Any) -> None:
    with pytest.raises(EnvFailed, match="a simulator in this process already"):
        SlotLoader(env, 2, spares=1)
    with fleet(env, info={"double": np.float32}, timeout=None) as loader:
        pids: dict[int, list[int]] = {0: [], 1: []}
        for _ in range(3):  # episodes, played in turns
            for t in range(4):
                batch = loader.recv(2)
                assert batch.obs[:, 1].tolist() == [t, t]
                assert batch.info["double"].tolist() == ([0, 0] if t == 0 else [2 * t, 4 * t])
                assert batch.reward.tolist() == ([0, 0] if t == 0 else [t, 2 * t])
                if t == 0:
                    for slot in range(2):
                        pids[slot].append(int(batch.obs[slot, 0]))
                batch.send(np.array([t + 1, 2 * t + 2]))
        assert pids[0][0] == pids[0][2] and pids[1][0] == pids[1][2]
        assert len({pid for found in pids.values() for pid in found}) == 4
        assert not {*loader.fleet.pids.values()} & {pid for found in pids.values() for pid in found}


def test_calls_and_attributes_reach_the_env_in_its_process() -> None:
    with fleet() as loader:
        loader.recv(2)
        (pid, more, named), _ = loader.call("pid_and", 1, two=2)
        assert (more, named) == ((1,), {"two": 2})
        assert pid not in (os.getpid(), *loader.fleet.pids.values())
        assert loader.get_attr("slot") == [0, 1]
        loader.set_attr("factor", [2.0, 3.0])
        assert loader.get_attr("factor") == [2.0, 3.0]
        with pytest.raises(EnvFailed, match=r"AttributeError.*nothing_like_it"):
            loader.get_attr("nothing_like_it")


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (999, r"env.step raised EOFError at step 1: the map ends here.*in step\n.*the map ends here"),
        (998, r"step\(\): expected \(observation, reward, terminated, truncated, info\)"),
        (997, r"the env's own process \(pid \d+\) exited with status 3"),
        (None, r"the env's own process \(pid \d+\) was killed by SIGKILL"),
    ],
)
def test_what_goes_wrong_in_the_process_is_told_with_its_traceback_and_costs_its_slot_only(action: Any, text: str) -> None:
    with fleet(on_failure="raise") as loader:
        batch = loader.recv(2)
        if action is None:
            os.kill(int(batch.obs[0, 0]), signal.SIGKILL)
        batch.send(np.array([action or 0, 0]))
        with pytest.raises(EnvFailed) as caught:
            while True:
                batch = loader.recv(stall_timeout=20)
                batch.send(np.zeros(batch.size, np.int64))
        assert re.search(text, str(caught.value), re.S), str(caught.value)
        assert caught.value.slots == (0,)
        for _ in range(8):
            loader.recv(1).send(np.zeros(1, np.int64))


def test_a_process_that_dies_gives_its_slot_a_new_life() -> None:
    with fleet(on_failure="restart", num_workers=1) as loader:
        first = loader.recv(2)
        os.kill(int(first.obs[0, 0]), signal.SIGKILL)
        first.send(np.zeros(2, np.int64))
        lives = []
        while len(lives) < 1:
            batch = loader.recv(stall_timeout=20)
            lives += [episode for episode in batch.episodes if episode.interrupted]
            batch.send(np.zeros(batch.size, np.int64))
        assert [(episode.slot, episode.life) for episode in lives] == [(0, 0)]
        assert loader.stats().restarted == 1


def test_results_that_cannot_travel_and_factories_that_fail_say_so() -> None:
    class Local(Alone):
        def step(self, action: int) -> Any:
            *record, _ = super().step(action)
            return *record, {"lock": threading.Lock()}

    with fleet(Local, on_failure="raise") as loader:
        loader.recv(2).send(np.zeros(2, np.int64))
        with pytest.raises(EnvFailed, match=r"env.step raised TypeError.*pickle"):
            loader.recv(2)
    with pytest.raises(EnvFailed, match=r"the factory raised ZeroDivisionError"):
        fleet(lambda: 1 // 0)
    with pytest.raises(ValueError, match=r"spare_processes: expected False without spares on the process backend, found True"):
        SlotLoader(Alone, 2, spare_processes=True)
    with pytest.raises(ValueError, match=r"found True with spares=1 and backend='thread'"):
        fleet(backend="thread")


def test_a_stuck_process_goes_with_its_worker() -> None:
    class Stuck(Alone):
        def step(self, action: int) -> Any:
            if action == 1:
                time.sleep(60)
            return super().step(action)

    with fleet(Stuck, on_failure="restart", step_timeout=0.3, num_workers=2) as loader:
        batch = loader.recv(2)
        old = int(batch.obs[0, 0])
        batch.send(np.array([1, 0]))
        until(lambda: loader.stats().restarted == 1)
        until(lambda: not os.path.exists(f"/proc/{old}"))
        begun = loader.recv(stall_timeout=20)
        while 0 not in begun.env_indices.tolist():
            begun.send(np.zeros(begun.size, np.int64))
            begun = loader.recv(stall_timeout=20)
        assert begun.is_first[begun.env_indices.tolist().index(0)]
        stuck = loader.recv(1) if begun.size == 1 else begun
        stuck.send(np.ones(stuck.size, np.int64))
        began = time.monotonic()
        loader.close()
        assert time.monotonic() - began < 5.5


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from slotloader import SlotLoader
from test_isolation import Alone, APART
loader = SlotLoader(Alone, 2, **APART)
loader.recv(2)
print("up", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "sys.exit()", "loader.close()"])
def test_no_process_is_left_however_the_trainer_ends(end: str, tmp_path: Path) -> None:
    ran = run_script(tmp_path, SCRIPT.format(tests=os.path.dirname(__file__), end=end))
    assert ran.out == "up\n", ran.err
