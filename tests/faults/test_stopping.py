"""FAULTS 19 to 24: however it ends, everything ends, in time, once, and nothing is left.

Tested elsewhere: one KeyboardInterrupt in a hung `recv`, in a terminal and in a notebook; scripts that end without close, by an
exception, by SIGTERM with a handler, by `del`, with a loader made in a thread (`test_start`); a close in mid-step, helpers
after close, `env.close` after another env's error (`test_failures`) and after a normal end (`test_conformance`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import MARK, child_environment, kill_quietly, names_of, run_script, started, until
from play import Play, gone
from sick import PRELOAD, Alive, Browser, Closing, LongReset, Sick, Stuck

from slotloader import LoaderClosed, SlotLoader, SlotLoaderError, WorkerDied

pytestmark = pytest.mark.usefixtures("clean")

HERE = Path(__file__).resolve().parent
PROCESS: dict[str, Any] = {"preload": PRELOAD}
DEADLINE = 5.0
SLACK = 2.0  # seconds that a busy machine may add


class Script:
    """A script of ours that runs: its output line by line, and everything that it has started by its mark."""

    def __init__(self, path: Path, code: str, *arguments: str) -> None:
        self.mark = os.urandom(8).hex()
        environment = child_environment(self.mark)
        environment["PYTHONPATH"] += os.pathsep + str(HERE)
        script = path / f"script-{self.mark}.py"
        script.write_text(code)
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=path,
        )

    def line(self) -> str:
        """The next line that it prints; fails if it ends instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line and self.process.stderr is not None:
            raise AssertionError(f"the script ended: {self.process.stderr.read()}")
        return line.strip()

    def end(self, timeout: float = 30.0) -> str:
        """Waits for its end; its stderr."""
        _, err = self.process.communicate(timeout=timeout)
        return err

    def all_gone(self, seconds: float = DEADLINE + SLACK) -> None:
        """Nothing that it has started is left, and no name."""
        until(lambda: not started(self.mark), seconds, f"left: {started(self.mark)}")
        assert not names_of(self.process.pid)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        for line in started(self.mark):  # first: they hold the ends of its pipes
            kill_quietly(int(line.split()[0]))
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        self.process.wait()


# 19: close.


def test_close_with_64_stuck_workers_and_dead_ones_called_three_times_ends_within_one_deadline(tmp_path: Path) -> None:
    loader = SlotLoader(partial(Stuck, directory=str(tmp_path)), 64, start_timeout=100, **PROCESS)
    loader.recv(min_get=64).send(np.zeros(64, np.int64))
    until(lambda: len(list(tmp_path.glob("stuck-*"))) == 64, 60)
    pids = dict(loader.fleet.pids)
    for worker in range(8):
        kill_quietly(pids[worker])
    until(lambda: len(loader.fleet.pids) == 56)
    begin = time.monotonic()
    for _ in range(3):
        loader.close()
    assert time.monotonic() - begin < DEADLINE + SLACK
    assert all(map(gone, pids.values()))
    with pytest.raises(LoaderClosed):
        loader.recv()


def test_close_with_all_results_unread_or_leased_is_quick(how: dict[str, Any]) -> None:
    loader = SlotLoader(Alive, 8, **how)
    batch = loader.recv(min_get=4)
    if how["backend"] != "inline":
        until(lambda: (loader.table.state == 3).sum() + batch.size == 8)
    begin = time.monotonic()
    loader.close()
    assert time.monotonic() - begin < SLACK
    with pytest.raises(LoaderClosed):
        batch.send(np.zeros(batch.size, np.int64))


def test_close_from_several_threads_at_once_ends_for_all_of_them_when_it_is_done() -> None:
    loader = SlotLoader(Alive, 4, **PROCESS)
    pids = until(lambda: len(loader.fleet.pids) == 4 and list(loader.fleet.pids.values()))
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda _: (loader.close(), all(map(gone, pids))), range(4)):
            assert _ == (None, True)


def test_close_while_workers_die_and_start_again_leaves_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        loader = SlotLoader(Alive, 4, on_failure="restart", max_restarts=1000, **PROCESS)
        play = Play(loader)
        play.steps(int(rng.integers(1, 10)))
        for pid in list(loader.fleet.pids.values()):
            kill_quietly(pid)
        play.until(lambda: loader.fleet.restarts >= rng.integers(1, 5))
        loader.close()
        assert not loader.fleet.pids or all(map(gone, loader.fleet.pids.values()))


def test_close_with_a_dead_nursery_is_quick() -> None:
    loader = SlotLoader(Alive, 4, **PROCESS)
    kill_quietly(loader.fleet._nursery.pid)
    begin = time.monotonic()
    loader.close()
    assert time.monotonic() - begin < DEADLINE + SLACK


def test_close_with_a_frozen_nursery_and_frozen_workers_ends_within_the_deadline() -> None:
    loader = SlotLoader(Alive, 4, **PROCESS)
    pids = until(lambda: len(loader.fleet.pids) == 4 and list(loader.fleet.pids.values()))
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(loader.fleet._nursery.pid, signal.SIGSTOP)
    begin = time.monotonic()
    loader.close()
    assert time.monotonic() - begin < DEADLINE + SLACK
    until(lambda: all(map(gone, pids)), what="workers outlive a killed nursery")


CLOSE_IN_HANDLER = """
import os, signal, threading, time
from functools import partial
from pathlib import Path
from slotloader import SlotLoader
from sick import Stuck

loader = SlotLoader(partial(Stuck, directory="."), 2)
inner = []

def handler(number, frame):
    loader.close()
    inner.append(number)

signal.signal(signal.SIGTERM, handler)
loader.recv(min_get=2).send([0, 0])
while len(list(Path(".").glob("stuck-*"))) < 2:
    time.sleep(0.01)

def later():
    while not loader.closed:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=later).start()
loader.close()
print("closed", inner, flush=True)
"""


def test_close_in_a_signal_handler_while_close_runs_does_not_wait_for_itself(tmp_path: Path) -> None:
    with Script(tmp_path, CLOSE_IN_HANDLER) as script:
        done: list[str] = []

        def listen() -> None:
            with contextlib.suppress(AssertionError):  # it ended without a word: the assertion below says so
                done.append(script.line())

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        thread.join(3 * DEADLINE)
        assert done == ["closed [15]"], "it waits for itself"
        assert script.end() == ""
        script.all_gone()


# 20: env.close.


def test_env_close_runs_once_for_every_life_of_every_env(how: dict[str, Any], tmp_path: Path) -> None:
    class Both(Sick):
        def close(self) -> None:
            with (tmp_path / f"closed-{self.slot}").open("a") as file:
                file.write(f"{self.life}\n")

    ills = [(0, "raise", "step", 3), (1, "raise", "reset", 1), (2, "raise", "step", 2)]
    with SlotLoader(partial(Both, ills=ills), 3, **how) as loader:
        play = Play(loader)
        play.until(lambda: play.life(1) == 3)
    loader.close()
    closed = [sorted((tmp_path / f"closed-{slot}").read_text().split()) for slot in range(3)]
    assert closed == [["0"], ["0", "1", "2", "3"], ["0"]]


def test_env_close_that_raises_or_hangs_does_not_keep_the_others_open(tmp_path: Path) -> None:
    def closing(context: Any) -> Any:
        env = Closing(context, str(tmp_path))
        if context.slot == 0:
            env.close = lambda: (_ for _ in ()).throw(RuntimeError("cannot close"))
        return env

    begin = time.monotonic()
    with SlotLoader(closing, 4, envs_per_worker=2, **PROCESS) as loader:
        loader.recv(min_get=4)
    assert time.monotonic() - begin < 20
    assert sorted(path.name for path in tmp_path.glob("closed-*")) == ["closed-1", "closed-2", "closed-3"]


# 21: Ctrl-C.

CTRL_C = """
import sys
from functools import partial
from slotloader import SlotLoader
from sick import Closing

def main():
    loader = SlotLoader(partial(Closing, directory="."), 3)
    print(loader.fleet._nursery.pid, flush=True)
    if {block}:
        with loader:
            serve(loader)
    else:
        serve(loader)

def serve(loader):
    for count, batch in enumerate(loader):
        if count == 20:
            print("up", flush=True)
        batch.send([0] * batch.size)

main()
"""


@pytest.mark.parametrize("block", [True, False], ids=["in a with block", "without one"])
def test_ctrl_c_in_a_busy_loop_is_one_traceback_each_env_is_closed_and_all_is_gone_in_3_s(block: bool, tmp_path: Path) -> None:
    for repeat in range(3):
        directory = tmp_path / str(repeat)
        directory.mkdir()
        with Script(directory, CTRL_C.format(block=block)) as script:
            script.line()
            assert script.line() == "up"
            begin = time.monotonic()
            script.process.send_signal(signal.SIGINT)
            err = script.end()
            script.all_gone(3.0)
            assert time.monotonic() - begin < 3.0 + SLACK
        assert err.count("Traceback") == 1
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert [(directory / f"closed-{slot}").read_text() for slot in range(3)] == ["0\n"] * 3


IMPATIENT = """
from functools import partial
from slotloader import SlotLoader
from sick import Stuck

with SlotLoader(partial(Stuck, directory="."), 2) as loader:
    loader.recv(min_get=2).send([0, 0])
    try:
        print("up", flush=True)
        loader.recv()
    finally:
        print("closing", flush=True)
"""


def test_ctrl_c_again_while_close_waits_leaves_nothing_either(tmp_path: Path) -> None:
    with Script(tmp_path, IMPATIENT) as script:
        assert script.line() == "up"
        until(lambda: len(list(tmp_path.glob("stuck-*"))) == 2)
        script.process.send_signal(signal.SIGINT)
        assert script.line() == "closing"
        begin = time.monotonic()
        script.process.send_signal(signal.SIGINT)
        err = script.end()
        assert time.monotonic() - begin < DEADLINE + SLACK
        script.all_gone()
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert "Exception ignored" not in err


def test_ctrl_c_in_the_terminal_does_not_reach_workers_or_nursery(tmp_path: Path) -> None:
    with SlotLoader(Alive, 2, **PROCESS) as loader:
        pids = [*until(lambda: len(loader.fleet.pids) == 2 and list(loader.fleet.pids.values())), loader.fleet._nursery.pid]
        own = os.getpgid(0)
        assert all(os.getpgid(pid) != own for pid in pids)
        for pid in pids:  # and by hand it is ignored
            os.kill(pid, signal.SIGINT)
        Play(loader).steps(20)
        assert list(loader.fleet.pids.values()) == pids[:2]


# 22: trainer and nursery killed.

TRAINER = """
import sys
from functools import partial
from slotloader import SlotLoader
from sick import Browser

print("begin", flush=True)
loader = SlotLoader(partial(Browser, directory=sys.argv[1], depth=2), 3, envs_per_worker=2, on_failure="restart")
print("built", flush=True)
for count, batch in enumerate(loader):
    if count < 20:
        print(count, flush=True)
    batch.send([0] * batch.size)
"""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("runs", [20, pytest.param(100, marks=pytest.mark.soak)])
def test_a_trainer_killed_at_any_moment_leaves_no_process_and_no_name(runs: int, tmp_path: Path) -> None:
    pids: list[int] = []

    def run(number: int) -> None:
        directory = tmp_path / str(number)
        directory.mkdir()
        rng = np.random.default_rng(number)
        with Script(directory, TRAINER, str(directory)) as script:
            pids.append(script.process.pid)
            lines = int(rng.integers(1, 12))
            for _ in range(lines):
                script.line()
            if lines == 1:
                threading.Event().wait(rng.uniform(0, 0.5))  # an instant while it starts, names and all
            script.process.kill()
            script.process.wait()
            until(lambda: not started(script.mark), DEADLINE + SLACK, "something outlives its trainer")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(runs)))
    with SlotLoader(Alive, 1):  # sweeps what a kill between the creation of a name and its unlink has left
        pass
    assert not [name for pid in pids for name in names_of(pid)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("runs", [20, pytest.param(100, marks=pytest.mark.soak)])
def test_a_killed_nursery_is_learned_within_a_second_and_takes_workers_and_helpers_along(runs: int, tmp_path: Path) -> None:
    for number in range(runs):
        directory = tmp_path / str(number)
        directory.mkdir()
        factory = partial(Browser, directory=str(directory), depth=1, drifts=False)
        with SlotLoader(factory, 2, on_failure="restart", **PROCESS) as loader:
            play = Play(loader)
            play.steps(1 + number % 5)
            helpers = until(lambda: len(found := helper_pids(directory)) == 2 and found)
            workers = list(loader.fleet.pids.values())
            begin = time.monotonic()
            kill_quietly(loader.fleet._nursery.pid)
            with pytest.raises(WorkerDied, match="the loader's nursery process has ended, so nothing can be restarted"):
                play.until(lambda: False)
            assert time.monotonic() - begin < 1.0 + SLACK
            until(lambda: all(map(gone, workers + helpers)), DEADLINE, "something outlives the nursery")


def test_a_worker_that_is_just_being_replaced_when_the_nursery_is_killed_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with SlotLoader(Alive, 2, capacity=3, on_failure="restart", **PROCESS) as loader:
        play, fleet = Play(loader), loader.fleet
        play.steps(5, [0, 1])
        respawn, nursery = fleet.respawn, fleet._nursery.pid

        def respawn_too_late(worker: int) -> None:
            kill_quietly(nursery)
            until(lambda: gone(nursery))
            respawn(worker)

        monkeypatch.setattr(fleet, "respawn", respawn_too_late)
        kill_quietly(fleet.pids[1])
        lost: set[int] = set()
        while lost != {0, 1}:
            with pytest.raises(WorkerDied) as caught:
                play.until(lambda: False, 10)
            lost.update(caught.value.slots)
        with pytest.raises(SlotLoaderError, match=r"no slot is left.*nothing can be"):
            loader.recv()
        with pytest.raises(SlotLoaderError, match="add_envs: the loader's nursery process has ended"):
            loader.add_envs(Alive, 1)


def test_trainer_and_nursery_killed_together_take_the_workers_along(tmp_path: Path) -> None:
    code = """
from slotloader import SlotLoader
from sick import Alive

loader = SlotLoader(Alive, 3)
loader.recv(min_get=3).send([0, 0, 0])
print(loader.fleet._nursery.pid, flush=True)
loader.recv(min_get=3, stall_timeout=None)
loader.recv(min_get=3, stall_timeout=None)
"""
    with Script(tmp_path, code) as script:
        nursery = int(script.line())
        os.kill(script.process.pid, signal.SIGSTOP)  # so that neither can clear up after the other
        os.kill(nursery, signal.SIGSTOP)
        kill_quietly(nursery)
        kill_quietly(script.process.pid)
        script.end()
        script.all_gone()


def test_helpers_in_sessions_of_their_own_are_gone_too_when_the_nursery_is_killed(tmp_path: Path) -> None:
    with SlotLoader(partial(Browser, directory=str(tmp_path), depth=2), 2, **PROCESS) as loader:
        helpers = until(lambda: len(found := helper_pids(tmp_path)) == 4 and found)
        kill_quietly(loader.fleet._nursery.pid)
        with pytest.raises(WorkerDied):
            Play(loader).until(lambda: False)
        until(lambda: all(map(gone, helpers)), DEADLINE, "helpers outlive the nursery")


# 23: helper processes.


def helper_pids(directory: Path, slot: int | None = None) -> list[int]:
    name = "helper-*" if slot is None else f"helper-{slot}-*"
    return [int(path.name.rpartition("-")[2]) for path in directory.glob(name)]


@pytest.mark.parametrize("drifts", [False, True], ids=["in the group", "in sessions of their own"])
def test_nested_helpers_of_an_env_are_gone_after_a_kill_a_restart_and_a_close(drifts: bool, tmp_path: Path) -> None:
    factory = partial(Browser, directory=str(tmp_path), depth=3, drifts=drifts)
    with SlotLoader(factory, 2, on_failure="restart", **PROCESS) as loader:
        play = Play(loader)
        first = until(lambda: len(found := helper_pids(tmp_path)) == 6 and found)
        assert not any(map(gone, first))
        mine, others = helper_pids(tmp_path, 0), helper_pids(tmp_path, 1)
        play.kill(0)
        until(lambda: all(map(gone, mine)), DEADLINE, "helpers of a killed worker live on")
        assert not any(map(gone, others))
        play.until(lambda: play.life(0) == 1)
        until(lambda: len(helper_pids(tmp_path, 0)) == 6)
        second = helper_pids(tmp_path)
        assert sum(not gone(pid) for pid in second) == 6
    until(lambda: all(map(gone, second)), SLACK, "helpers outlive close")


def test_helpers_of_a_worker_that_hangs_and_is_condemned_are_gone(tmp_path: Path) -> None:
    class Hung(Browser):
        def step(self, action: int) -> Any:
            if self.life == 0 and self.slot == 0:
                until(lambda: len(helper_pids(tmp_path, 0)) == 2)
                time.sleep(1000)
            return super().step(action)

    with SlotLoader(
        partial(Hung, directory=str(tmp_path), depth=2), 2, step_timeout=2.0, on_failure="restart", **PROCESS
    ) as loader:
        play = Play(loader)
        until(lambda: len(helper_pids(tmp_path, 0)) == 2)
        first = helper_pids(tmp_path, 0)
        play.until(lambda: play.life(0) == 1)
        until(lambda: all(map(gone, first)), DEADLINE)


# 24: ends without close.

ENDS = {
    "SIGTERM without a handler": "os.kill(os.getpid(), signal.SIGTERM)",
    "SIGHUP": "os.kill(os.getpid(), signal.SIGHUP)",
    "os._exit": "os._exit(7)",
    "os.abort": "os.abort()",
    "exec": "os.execv(sys.executable, [sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(1000)'])",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_trainer_that_ends_without_a_chance_to_close_leaves_nothing(end: str, tmp_path: Path) -> None:
    code = f"""
import os, resource, signal, sys
from functools import partial
from slotloader import SlotLoader
from sick import Browser
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
loader = SlotLoader(partial(Browser, directory=".", depth=1), 2)
loader.recv(min_get=2).send([0, 0])
print(*loader.fleet.pids.values(), loader.fleet._nursery.pid, flush=True)
sys.stdin = None
{ENDS[end]}
"""
    with Script(tmp_path, code) as script:
        pids = list(map(int, script.line().split()))
        if end == "exec":  # the process lives on, as another program, and its descriptors of ours are closed
            assert script.line() == "1"
            until(lambda: all(map(gone, pids)), DEADLINE + SLACK, "workers outlive the program that built them")
            script.process.kill()
        script.end()
        script.all_gone()


HANDLER = """
import os, signal, sys
from functools import partial
from slotloader import SlotLoader
from sick import Closing

def handler(number, frame):
    raise SystemExit(3)

signal.signal(signal.SIGTERM, handler)
loader = SlotLoader(partial(Closing, directory="."), 3)
print("up", flush=True)
for batch in loader:
    batch.send([0] * batch.size)
"""


class Alarm(Exception):
    """What a user's handler raises."""


@pytest.mark.parametrize("error", [Alarm, SystemExit, TimeoutError, KeyboardInterrupt])
def test_an_exception_of_a_users_signal_handler_is_raised_out_of_recv(error: type[BaseException], tmp_path: Path) -> None:
    def handler(number: int, frame: Any) -> None:
        raise error("from the handler")

    with SlotLoader(partial(LongReset, directory=str(tmp_path), length=1), 2, **PROCESS) as loader:
        loader.recv(min_get=2).send([0, 0])
        loader.recv(min_get=2).send([0, 0])
        until(lambda: len(list(tmp_path.glob("resetting-*"))) == 2)

        def send() -> None:
            until(lambda: loader.table.wanted[0])  # it sleeps, or is just about to
            for _ in range(20):
                if over.wait(0.1):
                    return
                os.kill(os.getpid(), signal.SIGUSR1)

        over, before = threading.Event(), signal.signal(signal.SIGUSR1, handler)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        thread = threading.Thread(target=send)
        thread.start()
        try:
            with pytest.raises(error, match="from the handler"):
                loader.recv(stall_timeout=5)
        finally:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            over.set()
            thread.join()
            signal.signal(signal.SIGUSR1, before)
            blocked_now = signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert blocked_now == blocked, "signals stay blocked: no SIGTERM would reach this process any more"
        (tmp_path / "go-on").touch()
        assert loader.recv(min_get=2).is_first.all()  # and it goes on


def test_sigterm_with_a_users_handler_in_a_busy_loop_closes_every_env(tmp_path: Path) -> None:
    with Script(tmp_path, HANDLER) as script:
        assert script.line() == "up"
        script.process.send_signal(signal.SIGTERM)
        err = script.end()
        script.all_gone()
    assert script.process.returncode == 3
    assert err == ""
    assert [(tmp_path / f"closed-{slot}").read_text() for slot in range(3)] == ["0\n"] * 3


def test_a_loader_made_in_a_thread_that_has_ended_restarts_its_workers_and_closes() -> None:
    made: list[SlotLoader] = []
    thread = threading.Thread(target=lambda: made.append(SlotLoader(Alive, 3, on_failure="restart", **PROCESS)))
    thread.start()
    thread.join()
    until(lambda: thread.ident not in [int(tid) for tid in os.listdir("/proc/self/task")])
    with made[0] as loader:
        play = Play(loader)
        play.steps(10)
        play.kill(1)
        play.until(lambda: play.life(1) == 1)
        play.steps(10)
        assert play.lives(0) == [0]


def test_a_fork_of_the_trainer_that_ends_does_not_end_the_fleet(tmp_path: Path) -> None:
    code = """
import os
from slotloader import SlotLoader
from sick import Alive

with SlotLoader(Alive, 2) as loader:
    loader.recv(min_get=2).send([0, 0])
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    loader.recv(min_get=2).send([0, 0])
    print("fine")
"""
    with Script(tmp_path, code) as script:
        assert script.line() == "fine"
        script.end()
        script.all_gone()


def test_nothing_is_said_when_a_script_with_restarts_ends_without_close(tmp_path: Path) -> None:
    code = f"""
import logging, os, signal, sys
sys.path.insert(0, {str(HERE)!r})
from slotloader import SlotLoader
from sick import Alive

logging.getLogger("slotloader").setLevel(logging.ERROR)
loader = SlotLoader(Alive, 2, on_failure="restart")
loader.recv(min_get=2).send([0, 0])
while len(loader.fleet.pids) < 2:
    pass
os.kill(loader.fleet.pids[0], signal.SIGKILL)
while loader.stats().restarted < 1:
    pass
"""
    ran = run_script(tmp_path, code)
    assert (ran.code, ran.err) == (0, "")


def test_processes_of_a_test_carry_its_mark() -> None:
    with SlotLoader(Alive, 1, **PROCESS):
        assert len(started(os.environ[MARK])) >= 2  # else CLEAN would prove nothing
