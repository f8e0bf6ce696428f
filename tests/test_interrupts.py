"""Ctrl-C at any moment: the loop can go on, as it does in a notebook."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from slotloader import SlotLoader
from tests.checks import ROOT
from tests.toys import Counting


@pytest.fixture
def alarm() -> Iterator[None]:
    """SIGALRM raises KeyboardInterrupt, as SIGINT does, at a moment of our choice."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("backend", ["process", "thread", "inline"])
def test_no_slot_is_lost_to_ctrl_c_at_any_moment(backend: Any, alarm: None) -> None:
    rng = random.Random(0)
    with SlotLoader(Counting, 4, backend=backend, stall_timeout=30) as loader:
        for _ in range(80):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.006))
                while True:
                    batch = loader.recv()
                    batch.send(np.zeros(batch.size, np.int64))
            except KeyboardInterrupt:
                pass
            for batch in loader.unanswered:
                batch.release()
            seen: set[int] = set()
            for batch in loader.steps(40):
                seen.update(batch.env_indices.tolist())
                batch.send(np.zeros(batch.size, np.int64))
            assert seen == {0, 1, 2, 3}
        assert loader.stats().restarted == 0


def test_a_forked_child_neither_uses_nor_stops_the_loader_of_its_parent() -> None:
    script = """
import os, sys, time
from slotloader import LoaderClosed, SlotLoader
from tests.toys import Counting
loader = SlotLoader(Counting, 2, on_failure="raise")
pid = os.fork()
if pid == 0:
    try:
        loader.recv()
    except LoaderClosed as error:
        print(error, flush=True)
    loader.close()
    sys.exit(0)
os.waitpid(pid, 0)
for batch in loader.steps(200):
    batch.send([0] * batch.size)
loader.close()
print("parent goes on")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert "belongs to the process that this one was forked from" in ran.stdout
    assert "parent goes on" in ran.stdout, ran.stderr


def test_a_traceback_from_a_worker_names_the_file_and_the_line_of_the_user(tmp_path: Any) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "from slotloader import EnvFailed, SlotLoader\n"
        "from gymnasium import spaces\n"
        "class Mine:\n"
        "    observation_space = action_space = spaces.Discrete(2)\n"
        "    def reset(self): return 0, {}\n"
        "    def step(self, action): return 1 / 0  # my mistake\n"
        "with SlotLoader(Mine, 1) as loader:\n"
        "    try:\n"
        "        for batch in loader: batch.send([0])\n"
        "    except EnvFailed as error:\n"
        "        print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert f'File "{script}", line 6, in step' in ran.stdout and "# my mistake" in ran.stdout, ran.stdout + ran.stderr
