"""The control plane: many workers at once, quick deaths, removals that meet failures, an end that can be interrupted."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import kill_quietly, run_script, until
from play import Play
from sick import PRELOAD, Alive, Paced, Sick

from slotloader import EnvFailed, SlotLoader, SlotLoaderError, WorkerDied, evaluate
from slotloader.messages.channel import Channel
from slotloader.messages.stream import HEAD, Stream

pytestmark = pytest.mark.usefixtures("clean")

PROCESS: dict[str, Any] = {"preload": PRELOAD, "timeout": 0.0}


@pytest.fixture
def many_files() -> Iterator[None]:
    """Room for a thousand workers' sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# 1. Many at once.


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("workers", [320, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.timeout(240)
def test_hundreds_of_workers_start_and_one_that_is_killed_comes_back(workers: int) -> None:
    """Before, from some 280 on, the trainer and its nursery both sat in a send for ever."""
    with SlotLoader(Alive, workers, **PROCESS) as loader:
        batch = loader.recv(min_get=workers, timeout=None, stall_timeout=120)
        assert batch.size == workers
        batch.send(np.zeros(workers, np.int64))
        killed = time.monotonic()
        os.kill(until(lambda: loader.fleet.pids.get(7)), signal.SIGKILL)
        back = False
        while not back:
            batch = loader.recv()
            back = 7 in batch.env_indices and int(loader.table.life[7]) == 1
            batch.send(np.zeros(batch.size, np.int64))
        print(f"{workers} workers: one of them was back in {time.monotonic() - killed:.2f} s")


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("workers", [160, pytest.param(300, marks=pytest.mark.soak)])
@pytest.mark.timeout(240)
def test_all_of_many_workers_killed_at_once_come_back(workers: int) -> None:
    with SlotLoader(Alive, workers, on_failure="restart", stall_timeout=120, **PROCESS) as loader:
        loader.recv(min_get=workers, timeout=None).send(np.zeros(workers, np.int64))
        pids = until(lambda: len(found := list(loader.fleet.pids.values())) == workers and found)
        for pid in pids:
            kill_quietly(pid)
        seen: set[int] = set()
        while len(seen) < workers:
            batch = loader.recv()
            seen.update(batch.env_indices[loader.table.life[batch.env_indices] >= 1].tolist())
            batch.send(np.zeros(batch.size, np.int64))


# 2. Two deaths, one after the other.


def test_two_workers_killed_within_milliseconds_are_both_replaced_and_the_rest_goes_on() -> None:
    with SlotLoader(Alive, 4, on_failure="restart", **PROCESS) as loader:
        play = Play(loader)
        for turn in range(6):
            pids = until(lambda: len(found := dict(loader.fleet.pids)) == 4 and found)
            restarts = loader.fleet.restarts
            kill_quietly(pids[turn % 4])
            time.sleep(0.002)
            kill_quietly(pids[(turn + 1) % 4])
            play.until(lambda before=restarts: loader.fleet.restarts >= before + 2)
            for slot in (turn % 4, (turn + 1) % 4):
                play.until(lambda s=slot, p=pids[slot]: loader.fleet.pids.get(s, p) != p)


def test_what_is_late_about_a_worker_does_not_reach_its_successor() -> None:
    """The socket of a dead worker still has events in the round in which its successor's socket takes the same number."""
    with SlotLoader(Alive, 3, on_failure="restart", **PROCESS) as loader:
        play = Play(loader)
        play.steps(20)
        first = dict(loader.fleet._current)
        for pid in list(loader.fleet.pids.values()):
            kill_quietly(pid)
        play.until(lambda: loader.fleet.restarts >= 3)
        play.steps(50)
        assert all(loader.fleet._current[index] is not first[index] and first[index].gone for index in range(3))
        assert all(play.lives(slot)[-1] == 1 for slot in range(3))


# 3. What a call returns.


class Unpicklable(Alive):
    def lock(self) -> Any:
        return threading.Lock()

    def bomb(self) -> Any:
        return Bomb()


class Bomb:
    """Pickles, and cannot be rebuilt anywhere."""

    def __reduce__(self) -> Any:
        return (_explode, ())


def _explode() -> None:
    raise ValueError("boom")


@pytest.mark.parametrize("per_worker", [1, 2])
def test_a_result_that_cannot_travel_is_that_calls_error_and_nothing_else(per_worker: int) -> None:
    with SlotLoader(Unpicklable, 2, envs_per_worker=per_worker, **PROCESS) as loader:
        play = Play(loader)
        play.steps(5)
        pids = loader.fleet.pids
        with pytest.raises(EnvFailed, match=r"expected a result that can be pickled, found lock"):
            loader.call("lock")
        with pytest.raises(SlotLoaderError, match=r"expected a result that can be unpickled here, found ValueError: boom"):
            loader.call("bomb", slots=[1])
        play.steps(20)
        assert loader.fleet.pids == pids and loader.fleet.restarts == 0


def test_arguments_that_cannot_be_rebuilt_in_the_worker_are_that_calls_error() -> None:
    with SlotLoader(Alive, 2, **PROCESS) as loader:
        Play(loader).steps(5)
        with pytest.raises(EnvFailed, match="boom"):
            loader.set_attr("anything", Bomb())
        Play(loader)
        assert loader.get_attr("slot") == [0, 1] and loader.fleet.restarts == 0


@pytest.mark.parametrize("said", [HEAD.pack(4, 0) + b"\xff\xfe\xfd\xfc", b"Traceback (most recent call last)"])
def test_a_worker_that_sends_nonsense_ends_alone(said: bytes) -> None:
    with SlotLoader(partial(Nonsense, said=said), 3, on_failure="restart", **PROCESS) as loader:
        play = Play(loader)
        play.steps(10)
        pids = loader.fleet.pids
        with contextlib.suppress(WorkerDied):
            loader.call("say_nonsense", slots=[1], timeout=10)
        play.until(lambda: loader.fleet.restarts == 1)
        play.steps(20)
        assert loader.fleet.pids[0] == pids[0] and loader.fleet.pids[2] == pids[2]


class Nonsense(Alive):
    def __init__(self, context: Any, said: bytes) -> None:
        super().__init__(context)
        self.said = said

    def say_nonsense(self) -> None:
        """Writes what is no frame to every socket of its process."""
        for fd in range(3, 64):
            with contextlib.suppress(OSError):
                socket.socket(fileno=os.dup(fd)).send(self.said)


# 4. Streams are never torn.


def test_frames_of_every_size_arrive_whole_through_a_socket_that_takes_little() -> None:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    one, other = Stream(ours), Stream(theirs)
    rng = np.random.default_rng(0)
    frames = [rng.bytes(int(n)) for n in (0, 1, 11, 12, 13, 4096, 100_000, 1_000_000, 3)]
    reader, writer = os.pipe()
    for at, frame in enumerate(frames):
        one.put(frame, (writer,) if at in (3, 7) else ())
    got: list[tuple[bytes, list[int]]] = []
    while len(got) < len(frames):
        one.flush()
        got.extend(other.receive())
    assert [frame for frame, _ in got] == frames
    assert [len(fds) for _, fds in got] == [0, 0, 0, 1, 0, 0, 0, 1, 0]
    for fd in (reader, writer, *(fd for _, fds in got for fd in fds)):
        os.close(fd)
    one.close()
    with pytest.raises(EOFError):
        list(other.receive())
    other.close()


def test_a_blocking_channel_and_a_stream_speak_the_same() -> None:
    ours, theirs = socket.socketpair()
    stream, channel = Stream(ours), Channel(theirs)
    stream.put(pickle.dumps({"n": 1}))
    stream.flush()
    assert channel.receive()[0] == {"n": 1}
    channel.send([1, 2])
    assert [pickle.loads(payload) for payload, _ in stream.receive()] == [[1, 2]]
    stream.close()
    channel.close()


def with_ctrl_c(seconds: float, deed: Callable[[], None]) -> None:
    """Runs `deed`, with a KeyboardInterrupt so many seconds after its begin if it still runs then."""
    armed = True

    def strike(number: int, frame: Any) -> None:
        if armed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, strike)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR2))
    try:
        try:
            timer.start()
            deed()
        finally:
            armed = False
    except KeyboardInterrupt:
        pass
    timer.join()
    signal.signal(signal.SIGUSR2, before)


def test_ctrl_c_at_any_moment_of_a_call_tears_no_stream() -> None:
    with SlotLoader(Alive, 2, **PROCESS) as loader:
        play = Play(loader)
        play.steps(5)
        pids, rng = loader.fleet.pids, np.random.default_rng(1)
        for _ in range(150):
            with_ctrl_c(float(rng.uniform(1e-5, 3e-3)), partial(loader.set_attr, "big", b"x" * 200_000))
        assert loader.get_attr("slot") == [0, 1]
        play.steps(20)
        assert loader.fleet.pids == pids and loader.fleet.restarts == 0


def test_a_large_argument_honours_the_timeout_of_its_call() -> None:
    with SlotLoader(Paced, 1, env_kwargs={"seconds": 1.5}, **PROCESS) as loader:
        loader.recv().send([0])
        until(lambda: loader.table.state[0] == 2)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            loader.call("take", b"x" * 50_000_000, timeout=0.2)
        assert time.monotonic() - began < 1.2


# 5. Removals that meet failures.


@pytest.mark.parametrize("how", [{}, {"worker_threads": True}, {"spares": 1}], ids=["plain", "threads", "spares"])
@pytest.mark.parametrize("per_worker", [1, 2])
def test_a_worker_that_dies_after_a_removal_does_not_build_the_removed_env_again(how: dict[str, Any], per_worker: int) -> None:
    with SlotLoader(Alive, 4, envs_per_worker=per_worker, on_failure="restart", **how, **PROCESS) as loader:
        play = Play(loader, how.get("spares", 0))
        play.steps(10)
        loader.remove_envs([1])
        for _ in range(3):
            worker = int(loader.table.owner[0])
            pid = until(lambda w=worker: loader.fleet.pids.get(w))
            kill_quietly(pid)
            play.until(lambda w=worker, p=pid: loader.fleet.pids.get(w, p) != p)
        rows, goal = len(play.rows[1]), len(play.rows[0]) + 60
        play.until(lambda: len(play.rows[0]) >= goal)
        assert len(play.rows[1]) <= rows + 1 and loader.num_envs == 3


def test_an_env_that_failed_can_be_removed_and_its_slot_given_to_another() -> None:
    sick = partial(Sick, ills=[(None, "raise", "step", 3)])
    with SlotLoader(sick, 2, on_failure="raise", **PROCESS) as loader:
        with pytest.raises(EnvFailed):
            while True:
                batch = loader.recv()
                batch.send(np.zeros(batch.size, np.int64))
        for batch in loader.unanswered:
            batch.release()
        loader.remove_envs([1])
        assert loader.add_envs(Alive, 1) == [1]
        while loader.table.life[1] < 1 or loader.table.sequence[1] < 5:
            batch = loader.recv()
            batch.send(np.zeros(batch.size, np.int64))


@pytest.mark.parametrize("when", ["told", "not yet told"])
def test_an_env_whose_worker_was_killed_can_be_removed_and_its_slot_given_to_another(when: str) -> None:
    with SlotLoader(Alive, 2, on_failure="raise", **PROCESS) as loader:
        loader.recv(min_get=2).send([0, 0])
        kill_quietly(loader.fleet.pids[1])
        until(lambda: loader.fleet.events)
        if when == "told":
            with pytest.raises(WorkerDied):
                while True:
                    batch = loader.recv()
                    batch.send(np.zeros(batch.size, np.int64))
        for batch in loader.unanswered:
            batch.release()
        loader.remove_envs([1])
        while loader.num_alive == 2:  # its finished record is still delivered
            with contextlib.suppress(WorkerDied):
                batch = loader.recv()
                batch.send(np.zeros(batch.size, np.int64))
        assert loader.add_envs(Alive, 1) == [1]
        while not (loader.table.life[1] >= 1 and loader.table.state[1] in (3, 4)):
            batch = loader.recv()
            batch.send(np.zeros(batch.size, np.int64))


def test_a_removal_that_times_out_is_done_when_the_step_ends_and_can_be_asked_for_again() -> None:
    with SlotLoader(Paced, 2, env_kwargs={"seconds": 1.0}, **PROCESS) as loader:
        loader.recv(min_get=2, timeout=None).send([0, 0])
        until(lambda: loader.table.state[1] == 2)
        with pytest.raises(TimeoutError, match=r"slots \[1\] are still in a step"):
            loader.remove_envs([1], timeout=0.1)
        loader.remove_envs([1], timeout=20)
        while loader.table.state[1] != 6:
            batch = loader.recv()
            batch.send(np.zeros(batch.size, np.int64))
        assert loader.num_envs == 1 and loader.add_envs(Paced, 1, env_kwargs={"seconds": 0.01}) == [1]


def test_a_removal_whose_answer_comes_after_its_timeout_frees_the_slot_without_being_asked_again() -> None:
    with SlotLoader(Paced, 2, env_kwargs={"seconds": 0.5}, **PROCESS) as loader:
        loader.recv(min_get=2, timeout=None).send([0, 0])
        until(lambda: loader.table.state[1] == 2)
        with pytest.raises(TimeoutError):
            loader.remove_envs([1], timeout=0.05)
        deadline = time.monotonic() + 20
        while loader.num_alive == 2 and time.monotonic() < deadline:
            batch = loader.recv()
            batch.send(np.zeros(batch.size, np.int64))
        assert loader.num_envs == loader.num_alive == 1


def test_removals_adds_and_kills_in_any_order_leave_right_books() -> None:
    rng = np.random.default_rng(3)
    with SlotLoader(Alive, 4, envs_per_worker=2, capacity=6, on_failure="restart", max_restarts=1000, **PROCESS) as loader:
        there = {0, 1, 2, 3}
        for _ in range(60):
            deed = rng.integers(3)
            if deed == 0 and len(there) > 2:
                slot = int(rng.choice(sorted(there)))
                loader.remove_envs([slot])
                there.discard(slot)
            elif deed == 1 and len(there) < 6:
                with contextlib.suppress(ValueError, SlotLoaderError):  # the last record has not been answered yet
                    there.update(loader.add_envs(Alive, 1))
            elif loader.fleet.pids:
                kill_quietly(int(rng.choice(list(loader.fleet.pids.values()))))
            for _ in range(int(rng.integers(1, 20))):
                batch = loader.recv()
                assert batch.obs[:, 0].tolist() == batch.env_indices.tolist()
                batch.send(np.zeros(batch.size, np.int64))
        deadline = time.monotonic() + 30
        seen: set[int] = set()
        while seen != there and time.monotonic() < deadline:
            batch = loader.recv()
            fresh = loader.table.sequence[batch.env_indices]
            assert (fresh > 0).all()
            seen.update(set(batch.env_indices.tolist()) & there)
            batch.send(np.zeros(batch.size, np.int64))
        assert seen == there and loader.num_envs == len(there)


def test_an_add_that_fails_costs_neither_a_worker_nor_its_slot() -> None:
    lock = threading.Lock()
    with SlotLoader(Alive, 2, capacity=3, **PROCESS) as loader:
        for _ in range(3):
            with pytest.raises(TypeError, match="pickled"):
                loader.add_envs(lambda: lock, 1)
        assert loader.num_envs == 2 and loader.add_envs(Alive, 1) == [2]
        while 2 not in (batch := loader.recv()).env_indices:
            batch.send(np.zeros(batch.size, np.int64))


# 6. Slots without an env.


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_calls_without_slots_mean_the_slots_that_have_an_env(backend: str) -> None:
    with SlotLoader(Alive, 2, capacity=4, backend=backend) as loader:
        loader.recv(min_get=2).send([0, 0])
        assert loader.get_attr("slot") == [0, 1] == loader.call("__getattribute__", "slot")
        loader.set_attr("mark", [5, 6])
        assert loader.get_attr("mark") == [5, 6]


@pytest.mark.filterwarnings("error")
def test_reserved_slots_are_no_lost_ones_for_evaluation_and_resuming() -> None:
    with SlotLoader(partial(Alive, length=3), 2, capacity=4, seed=0, **PROCESS) as loader:
        state = loader.state_dict()
    with SlotLoader(partial(Alive, length=3), 2, capacity=4, seed=0, **PROCESS) as loader:
        loader.load_state_dict(state)
        assert (
            evaluate(loader, lambda obs: np.zeros(len(obs), np.int64), episodes=4, progress=False).lengths.tolist() == [3] * 4
        )


def test_a_slot_without_an_env_is_refused_by_name() -> None:
    with SlotLoader(Alive, 2, capacity=4, **PROCESS) as loader:
        with pytest.raises(ValueError, match=r"slots: expected slots that have an env, found \[3\]"):
            loader.get_attr("slot", [0, 3])
        loader.remove_envs([0])
        assert loader.get_attr("slot") == [1]


# 7. An end that is interrupted, or meets a restart.


def test_close_beside_restarts_ends_clean() -> None:
    for turn in range(4):
        with SlotLoader(Alive, 6, on_failure="restart", max_restarts=100, **PROCESS) as loader:
            play = Play(loader)
            play.steps(5 + turn)
            for pid in list(loader.fleet.pids.values()):
                kill_quietly(pid)
            time.sleep(0.004 * turn)


def test_ctrl_c_in_close_leaves_the_rest_to_the_next_close() -> None:
    for delay in (0.0005, 0.002, 0.005, 0.01, 0.02):
        loader = SlotLoader(Alive, 3, **PROCESS)
        loader.recv(min_get=3).send([0, 0, 0])
        with_ctrl_c(delay, loader.close)
        loader.close()
        assert loader.closed and not loader.fleet.pids


# 8. The trainer's signal mask.

BLOCKED = """
import os, signal, time
from slotloader import SlotLoader
from sick import Alive
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1})
with SlotLoader(Alive, 2, preload=["sick"], on_failure="restart") as loader:
    loader.recv(min_get=2).send([0, 0])
    blocked = open(f"/proc/{loader.fleet.pids[1]}/status").read().split("SigBlk:")[1].split()[0]
    os.kill(loader.fleet.pids[0], 9)
    deadline = time.monotonic() + 20
    while loader.table.life[0] == 0 and time.monotonic() < deadline:
        batch = loader.recv()
        batch.send([0] * batch.size)
    print(loader.table.life[0], int(blocked, 16))
"""


def test_a_signal_mask_of_the_trainer_hides_no_death(tmp_path: Any) -> None:
    here = str(Path(__file__).parent)
    ran = run_script(tmp_path, f"import sys; sys.path.insert(0, {here!r})\n" + BLOCKED)
    assert ran.out.split() == ["1", "0"], ran.err


# 9. The start limit.


class SlowLater(Alive):
    """Its factory takes a second from life 1 on; every env raises in its third step of life 0."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        if context.life:
            time.sleep(1.0 if context.life == 1 else 0.0)

    def step(self, action: int) -> Any:
        if self.life == 0 and self.t == 2:
            raise RuntimeError("again")
        return super().step(action)


def test_each_of_several_rebuilds_in_one_worker_has_the_whole_start_limit() -> None:
    with SlotLoader(SlowLater, 3, num_workers=1, on_failure="restart", start_timeout=1.8, **PROCESS) as loader:
        pid = until(lambda: loader.fleet.pids.get(0))
        play = Play(loader)
        play.until(lambda: (loader.table.life >= 1).all())
        assert loader.fleet.pids[0] == pid, "three rebuilds of a second each are within a limit of 1.8 s each"


class HangsLater(SlowLater):
    """Of three rebuilds in one worker the second hangs."""

    def __init__(self, context: Any) -> None:
        Alive.__init__(self, context)
        if context.life == 1 and context.slot == 1:
            time.sleep(60)


def test_the_second_rebuild_of_a_worker_is_limited_too() -> None:
    with SlotLoader(HangsLater, 3, num_workers=1, on_failure="restart", start_timeout=1.0, **PROCESS) as loader:
        Play(loader).until(lambda: int(loader.table.life[1]) >= 2)


# 10. Waits that see everything.


@pytest.mark.parametrize("ill", ["raise", "kill"])
def test_drain_tells_of_an_env_that_failed_for_good(ill: str) -> None:
    sick = partial(Sick, ills=[(None, "raise", "step", 2)] if ill == "raise" else [])
    with SlotLoader(sick, 2, on_failure="raise", **PROCESS) as loader:
        for _ in range(2):
            loader.recv(min_get=2, timeout=None).send([0, 0])
            until(lambda: (loader.table.state == 3).any())
        if ill == "kill":
            kill_quietly(loader.fleet.pids[1])
        until(lambda: loader.fleet.events)
        with pytest.raises((EnvFailed, WorkerDied)):
            loader.drain(timeout=10)
        loader.drain(timeout=10)
        loader.resume()


def test_drain_ends_beside_removed_envs_whose_records_wait() -> None:
    with SlotLoader(Alive, 3, **PROCESS) as loader:
        loader.recv(min_get=3).send([0, 0, 0])
        until(lambda: (loader.table.state == 3).all())
        loader.remove_envs([2])
        loader.drain(timeout=10)
        loader.resume()
