"""FAULTS 13 to 18: envs and workers that raise, crash, hang and are killed, for real. The rest goes on, and nothing is lost.

Tested elsewhere: every kind of exception, several at once, what is said of a death (`test_failures`); factories that fail
(`test_bad_input`) or block (`test_start`).
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import statistics
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import chaos
import numpy as np
import pytest
from checks import kill_quietly, until
from play import Play, gone, reaped
from sick import (
    EPISODE,
    LIFE,
    PRELOAD,
    SEED,
    Alive,
    Closing,
    DiesPublishing,
    LongReset,
    Paced,
    ReportsThePast,
    Sick,
    T,
    wait_for,
)

from slotloader import EnvFailed, SlotLoader, SlotLoaderError, WorkerDied
from slotloader.fleet import process as process_fleet
from slotloader.fleet.supervision import Limits, RestartPolicy
from slotloader.table.slots import SlotState
from slotloader.worker.envs import life_seed

pytestmark = pytest.mark.usefixtures("clean")

CRASHES = ["SIGKILL", "SIGSEGV", "SIGFPE", "SIGBUS"]
SOON = 5.0  # seconds; 1 on a quiet machine
RESTART: dict[str, Any] = {"on_failure": "restart"}
PROCESS: dict[str, Any] = {"preload": PRELOAD}


# 15: real crashes.


@pytest.mark.parametrize("where", ["step", "reset"])
@pytest.mark.parametrize("crash", CRASHES)
def test_a_real_crash_in_step_or_reset_is_worker_died_with_pid_slots_and_signal_name(crash: str, where: str) -> None:
    ill = (0, crash, where, 7 if where == "step" else 3)
    with SlotLoader(partial(Sick, ills=[ill], length=4), 3, on_failure="raise", **PROCESS) as loader:
        play = Play(loader)
        pid = until(lambda: loader.fleet.pids.get(1))
        with pytest.raises(WorkerDied) as caught:
            play.until(lambda: False)
        assert time.monotonic() - play.answered[1] < SOON
        error = caught.value
        assert (error.pid, error.slots, error.exitcode) == (pid, (1,), -getattr(signal, crash))
        assert f"slot 1 (worker 1, pid {pid}): the worker was killed by {crash}" in str(error)
        assert ("out of memory" in str(error)) == (crash == "SIGKILL")
        play.steps(50, [0, 2])
        assert play.interrupted() == []  # nobody goes on after it


@pytest.mark.parametrize("where", ["factory", "reset", "step"])
@pytest.mark.parametrize("crash", ["SIGKILL", "SIGSEGV"])
def test_a_crash_at_any_point_of_a_new_life_costs_that_life_only(crash: str, where: str) -> None:
    ills = [(0, crash, "step", 7), (1, crash, where, 1), (2, crash, "step", 3)]
    with SlotLoader(partial(Sick, ills=ills), 2, **PROCESS) as loader:  # "auto": the env has worked before
        play = Play(loader)
        play.until(lambda: play.life(1) == 3)
        play.steps(20)
        last = 0.0  # a first record only: an episode without a step
        cuts = [(1, 0, 0, 6, 21.0), *([(1, 1, 0, 0, last)] if where == "step" else []), (1, 2, 0, 2, 3.0)]
        assert play.interrupted() == cuts
        assert play.lives(0) == [0]
        assert loader.stats().restarted == 3


# 16: restarts.


@pytest.mark.parametrize("trouble", ["raise", "exit", "SIGSEGV"])
def test_a_new_life_begins_first_and_the_cut_episode_is_told_with_it(how: dict[str, Any], trouble: str) -> None:
    if trouble != "raise" and how["backend"] != "process":
        pytest.skip("it would end this process")
    with SlotLoader(partial(Sick, ills=[(0, trouble, "step", 7)], length=4), 3, seed=5, **how) as loader:
        play = Play(loader)
        play.until(lambda: play.life(1) < 1 and len(play.rows[1]) == 8)  # 5 of episode 0, then t = 0 to 2
        play.until(lambda: play.life(1) == 1)
        assert play.interrupted() == [(1, 0, 1, 2, 3.0)]
        seconds = time.monotonic() - play.answered[1]
        assert seconds < SOON
        play.steps(30)
        assert play.lives(0) == play.lives(2) == [0]
        assert [len(play.interrupted()), loader.stats().restarted] == [1, 1]
        assert loader.get_attr("seeds", slots=[1])[0][:2] == [life_seed(5, 1, 1), None]
        ended = [(e.life, e.index, e.length, e.seed) for e in play.episodes if e.slot == 1 and not e.interrupted]
        assert ended[:3] == [(0, 0, 4, 6), (1, 0, 4, life_seed(5, 1, 1)), (1, 1, 4, None)]


def test_an_episode_that_had_ended_by_itself_is_not_interrupted(how: dict[str, Any]) -> None:
    with SlotLoader(partial(Sick, ills=[(0, "raise", "reset", 3)], length=4), 2, **how) as loader:
        play = Play(loader)
        play.until(lambda: play.life(1) == 1)
        assert play.interrupted() == []
        assert [(e.life, e.index) for e in play.episodes if e.slot == 1] == [(0, 0), (0, 1)]
        play.steps(20)


def storm(steps: int) -> float:
    """The rate of the survivors while two workers are killed over and over, as a share of their rate before."""
    survivors = range(4)
    with SlotLoader(partial(Paced, seconds=0.01), 6, max_restarts=10**6, **PROCESS, **RESTART) as loader:
        play = Play(loader)
        play.steps(20)
        begin = time.monotonic()
        play.steps(steps, survivors)
        calm = time.monotonic() - begin
        over, kills = threading.Event(), itertools.count()

        def kill() -> None:
            while not over.wait(0.05):
                for worker in (4, 5):
                    if pid := loader.fleet.pids.get(worker):
                        kill_quietly(pid)  # reaped a moment ago, perhaps
                        next(kills)

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            begin = time.monotonic()
            play.steps(steps, survivors)
            stormy = time.monotonic() - begin
        finally:
            over.set()
            thread.join()
        assert all(play.lives(slot) == [0] for slot in survivors)
        play.until(lambda: play.life(4) and play.life(5))
        assert next(kills) >= 5
    return calm / stormy


def test_survivors_keep_their_rate_during_a_restart_storm() -> None:
    assert any(storm(100) > 0.5 for _ in range(3))  # 0.9 on a quiet machine: the soak test


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_survivors_keep_90_percent_of_their_rate_during_a_restart_storm() -> None:
    assert statistics.median(storm(500) for _ in range(5)) > 0.9


def test_an_old_process_is_reaped_before_the_next_life_begins(tmp_path: Path) -> None:
    with SlotLoader(partial(ReportsThePast, directory=str(tmp_path)), 2, max_restarts=100, **PROCESS, **RESTART) as loader:
        play = Play(loader)
        for life in range(8):
            play.until(lambda: play.life(0) == life)
            assert loader.get_attr("overlaps", slots=[0]) == [False]
            pid = play.kill(0)
            assert reaped(pid)
        assert len(set((tmp_path / "pids-0").read_text().split())) >= 8


@pytest.mark.parametrize("trouble", ["raise", "SIGKILL"])
def test_a_permanent_failure_ends_after_max_restarts_with_the_count(how: dict[str, Any], trouble: str) -> None:
    if trouble != "raise" and how["backend"] != "process":
        pytest.skip("it would end this process")
    with SlotLoader(partial(Sick, ills=[(None, trouble, "step", 3)]), 2, max_restarts=3, **how) as loader:
        play = Play(loader)
        with pytest.raises((EnvFailed, WorkerDied)) as caught:
            play.until(lambda: False)
        assert "gave up: slot 1 was restarted 3 times in 300 s (max_restarts=3)" in str(caught.value)
        assert caught.value.slots == (1,)
        assert play.lives(1) == [0, 1, 2, 3]
        assert play.interrupted() == [(1, life, 0, 2, 3.0) for life in range(3)]
        play.steps(30, [0])
        assert len(play.rows[1]) == 4 * 3


def test_a_factory_that_fails_in_every_new_life_ends_after_max_restarts_too(how: dict[str, Any]) -> None:
    ills = [(0, "raise", "step", 3), *((life, "raise", "factory", 1) for life in range(1, 50))]
    with SlotLoader(partial(Sick, ills=ills), 2, max_restarts=3, **how) as loader:
        play = Play(loader)
        with pytest.raises(EnvFailed, match=r"(?s)gave up: slot 1 was restarted 3 times") as caught:
            play.until(lambda: False)
        assert "the robot fell over" in str(caught.value)
        play.steps(30, [0])


def test_restarts_older_than_the_window_do_not_count() -> None:
    policy = RestartPolicy(Limits(on_failure="restart", max_restarts=2, restart_window=10.0))
    assert [policy.refuse([0], True, now) is None for now in (0.0, 1.0, 2.0, 9.9, 10.5, 11.5, 12.0)] == [
        True, True, False, False, True, True, False,
    ]  # fmt: skip
    assert policy.refuse([1], True, 12.0) is None
    assert "slot 0 was restarted 2 times in 10 s (max_restarts=2)" in str(policy.refuse([1, 0], True, 12.0))
    assert policy.count(1) == 1  # a refusal counts for nobody
    assert policy.refuse([3], True, 0.0) is None
    assert RestartPolicy(Limits(on_failure="raise")).refuse([0], True, 0.0) == ""
    assert RestartPolicy(Limits()).refuse([0], False, 0.0) == ""
    assert RestartPolicy(Limits()).refuse([0], True, 0.0) is None
    assert RestartPolicy(Limits(on_failure="restart")).refuse([0], False, 0.0) is None


@pytest.mark.parametrize("per_worker", [1, 4])
def test_all_workers_killed_at_once_all_come_back(per_worker: int) -> None:
    with SlotLoader(Alive, 8, envs_per_worker=per_worker, **PROCESS, **RESTART) as loader:
        play = Play(loader)
        play.steps(5)
        pids = list(loader.fleet.pids.values())
        assert len(pids) == 8 // per_worker
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        play.until(lambda: all(play.life(slot) == 1 for slot in range(8)))
        play.steps(20)
        assert sorted(entry[:2] for entry in play.interrupted()) == [(slot, 0) for slot in range(8)]
        assert loader.stats().restarted == 8
        assert all(map(gone, pids))


PACKINGS: dict[str, dict[str, Any]] = {
    "one after another": {"envs_per_worker": 3, **PROCESS},
    "in threads": {"envs_per_worker": 3, "worker_threads": True, **PROCESS},
    "threads in a thread": {"envs_per_worker": 3, "worker_threads": True, "backend": "thread"},
    "a thread": {"envs_per_worker": 3, "backend": "thread"},
    "inline": {"backend": "inline"},
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_exception_gives_its_own_slot_a_new_life_and_no_sibling(packing: str) -> None:
    with SlotLoader(partial(Sick, ills=[(0, "raise", "step", 7)]), 6, **PACKINGS[packing]) as loader:
        play = Play(loader)
        play.until(lambda: play.life(1) == 1)
        play.steps(20)
        assert [play.lives(slot) for slot in range(6)] == [[0], [0, 1], [0], [0], [0], [0]]
        assert play.interrupted() == [(1, 0, 0, 6, 21.0)]
        assert loader.stats().restarted == 1


@pytest.mark.parametrize("packing", ["one after another", "in threads"])
def test_a_death_gives_all_slots_of_its_worker_a_new_life_and_no_other(packing: str) -> None:
    with SlotLoader(partial(Sick, ills=[(0, "SIGKILL", "step", 7)]), 6, **PACKINGS[packing]) as loader:
        play = Play(loader)
        play.until(lambda: all(play.life(slot) == 1 for slot in range(3)))
        play.steps(20)
        assert [play.lives(slot) for slot in range(6)] == [[0, 1]] * 3 + [[0]] * 3
        assert [entry[:3] for entry in sorted(play.interrupted())] == [(slot, 0, 0) for slot in range(3)]
        for slot, _, _, length, total in play.interrupted():
            assert length == max(row[T - 1] for row in play.rows[slot] if row[0] == 0)
            assert total == length * (length + 1) / 2
        assert loader.stats().restarted == 3


def new_process_is_up(loader: SlotLoader, worker: int, old: int) -> int:
    """Waits for another process of the worker, with its env built and waiting; its pid."""
    pid = until(lambda: loader.fleet.pids.get(worker) not in (None, old) and loader.fleet.pids[worker])
    until(lambda: worker not in loader.fleet.starting())
    return int(pid)


@pytest.mark.parametrize("when", ["before the new life is up", "after"])
def test_an_action_for_a_record_whose_env_died_is_dropped_and_the_next_record_is_first(when: str) -> None:
    with SlotLoader(Alive, 2, min_get=2, timeout=None, **PROCESS, **RESTART) as loader:
        play = Play(loader)
        play.steps(5)
        batch = loader.recv()
        play.take(batch)
        pid = play.kill(0)
        assert loader.table.state[0] == SlotState.LEASED
        assert batch.obs[0, T] == play.rows[0][-1][2]  # the row is untouched
        if when == "after":
            new_process_is_up(loader, 0, pid)
        batch.send([7, 8])
        batch = loader.recv()
        assert batch.step_type.tolist() == [0, 1]
        assert batch.obs[:, [LIFE, EPISODE, T]].tolist() == [[1, 0, 0], [0, 0, play.rows[1][-1][2] + 1]]
        assert batch.obs[:, 4].tolist() == [-1, 8]
        assert [(e.slot, e.life, e.length, e.interrupted) for e in batch.episodes] == [(0, 0, play.rows[0][-1][2], True)]
        batch.send([3, 4])
        batch = loader.recv()
        assert batch.obs[:, 4].tolist() == [3, 4]  # the env of the new life has been reset once, not twice
        assert batch.obs[0, [LIFE, EPISODE, T]].tolist() == [1, 0, 1]
        assert loader.get_attr("seeds", slots=[0])[0] == [life_seed(loader.seed, 0, 1)]


def test_an_env_that_is_rebuilt_while_its_record_is_leased_is_reset_once(how: dict[str, Any]) -> None:
    # An exception always comes with an action under way, so the failing slot is not leased; its FIRST may be, though.
    with SlotLoader(
        partial(Sick, ills=[(0, "raise", "step", 1), (1, "raise", "step", 1)]), 2, min_get=1, **RESTART, **how
    ) as loader:
        play = Play(loader)
        play.until(lambda: play.life(1) == 2)
        play.steps(10)
        assert loader.get_attr("seeds", slots=[1]) == [[life_seed(loader.seed, 1, 2)]]
        assert [entry[1:4] for entry in play.interrupted()] == [(0, 0, 0), (1, 0, 0)]


def test_a_ready_record_of_a_dead_life_is_delivered_before_the_new_life_begins() -> None:
    with SlotLoader(Alive, 2, **PROCESS, **RESTART) as loader:
        play = Play(loader)
        play.steps(5)
        until(lambda: (loader.table.state == SlotState.READY).all())
        ready = loader.table.observation[0][:, T].tolist()
        pid = play.kill(0)
        new_process_is_up(loader, 0, pid)
        assert loader.table.state[0] == SlotState.READY
        batch = loader.recv(min_get=2)
        assert batch.obs[:, [LIFE, T]].tolist() == [[0, ready[0]], [0, ready[1]]]
        assert batch.episodes == []
        play.take(batch)
        batch.send([1, 2])
        play.until(lambda: play.life(0) == 1)
        play.steps(10)
        assert play.interrupted() == [(0, 0, 0, ready[0], ready[0] * (ready[0] + 1) / 2)]


def test_a_first_record_of_a_life_that_died_at_once_is_delivered_with_the_cut_before_it() -> None:
    with SlotLoader(Alive, 1, **PROCESS, **RESTART) as loader:
        play = Play(loader)
        play.steps(5)
        until(lambda: loader.table.state[0] == SlotState.READY)
        play.take(batch := loader.recv())
        pid = play.kill(0)
        batch.send([0])
        until(lambda: loader.table.state[0] == SlotState.READY)  # FIRST of life 1, not received yet
        new_process_is_up(loader, 0, pid)
        play.kill(0)
        batch = loader.recv()
        play.take(batch)
        assert play.life(0) == 1
        cut = play.rows[0][-2][2]
        assert [(e.life, e.length) for e in batch.episodes] == [(0, cut)]
        batch.send([0])
        play.until(lambda: play.life(0) == 2)
        play.steps(5)
        assert [entry[1:4] for entry in play.interrupted()] == [(0, 0, cut), (1, 0, 0)]


@pytest.mark.parametrize("t", [0, 4])
@pytest.mark.parametrize("point", ["before", "unready", "unposted"])
def test_a_death_at_any_point_of_a_publication_keeps_or_loses_the_whole_record(point: str, t: int) -> None:
    with SlotLoader(partial(DiesPublishing, point=point, t=t), 2, **PROCESS, **RESTART) as loader:
        play = Play(loader)
        play.steps(5)
        play.kill(0)
        play.until(lambda: play.life(0) == 3)
        play.steps(10)
        first = max(row[2] for row in play.rows[0] if row[0] == 0)
        shown = t + 1 if point == "unposted" else t  # records of life 1
        assert [row[2] for row in play.rows[0] if row[0] == 1] == list(range(shown))
        cuts = [(0, 0, 0, first, first * (first + 1) / 2)]
        if shown:
            cuts.append((0, 1, 0, shown - 1, (shown - 1) * shown / 2))
        assert play.interrupted() == [*cuts, (0, 2, 0, 2, 3.0)]
        assert play.lives(1) == [0]


def test_auto_restarts_what_has_worked_and_raises_what_never_has(how: dict[str, Any]) -> None:
    with SlotLoader(partial(Sick, ills=[(None, "raise", "step", 1)]), 2, **how) as loader:
        play = Play(loader)
        with pytest.raises(EnvFailed, match="the robot fell over") as caught:
            play.until(lambda: False)
        assert "gave up" not in str(caught.value)
        assert play.lives(1) == [0]
        play.steps(10, [0])
    with SlotLoader(partial(Sick, ills=[(0, "raise", "step", 2), (1, "raise", "step", 1)]), 2, **how) as loader:
        play = Play(loader)
        play.until(lambda: play.life(1) == 2)


def test_each_restart_is_logged_once_with_its_reason(how: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slotloader")
    with SlotLoader(partial(Sick, ills=[(0, "raise", "step", 3), (1, "raise", "reset", 1)]), 2, **how) as loader:
        play = Play(loader)
        play.until(lambda: play.life(1) == 2)
    messages, more = ([r.getMessage() for r in caplog.records if r.levelname == level] for level in ("WARNING", "INFO"))
    assert len(messages) == len(more) == 2
    assert all(re.search(r"traceback in the worker:\nTraceback .*\n.*line \d+, in (step|reset)\n", text, re.S) for text in more)
    assert "slot 1 " in messages[0]
    assert "env.step raised ValueError at step 3: the robot fell over; restarting (1 of 5 in 300 s)" in messages[0]
    assert "env.reset raised ValueError: the robot fell over; restarting (2 of 5 in 300 s)" in messages[1]


def test_a_new_env_with_other_spaces_is_refused_and_the_rest_goes_on(how: dict[str, Any]) -> None:
    def changing(context: Any) -> Any:
        env = Sick(context, [(0, "raise", "step", 3)])
        if context.life:
            env.observation_space = type(env.observation_space)(-1, 2**40, (9,), np.int64)
        return env

    with SlotLoader(changing, 2, **how) as loader:
        play = Play(loader)
        with pytest.raises(EnvFailed, match=r"slot 1 .*(9,)") as caught:
            play.until(lambda: False)
        assert caught.value.slots == (1,)
        play.steps(20, [0])


def test_calls_reach_the_new_env_and_none_is_lost_or_disturbs_a_worker_that_starts(tmp_path: Path) -> None:
    def slow_to_build(context: Any) -> Any:
        if context.life:
            (tmp_path / f"building-{context.life}").touch()
            wait_for(tmp_path / f"go-on-{context.life}")
        return Alive(context)

    with SlotLoader(slow_to_build, 2, **PROCESS, **RESTART) as loader:
        play = Play(loader)
        play.steps(5)
        pid = play.kill(0)
        play.until((tmp_path / "building-1").exists)
        new_process_is_up_pid = until(lambda: loader.fleet.pids.get(0) not in (None, pid) and loader.fleet.pids[0])
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(loader.get_attr("life", slots=[0]))
            except SlotLoaderError as error:
                answers.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: loader.fleet._pending or answers)
        (tmp_path / "go-on-1").touch()
        play.until(lambda: play.life(0) > 0)
        thread.join(20)
        assert not thread.is_alive()
        assert answers == [[1]] or isinstance(answers[0], WorkerDied)  # it may say that the worker is starting
        assert play.lives(0) == [0, 1], "the call ended the new worker"
        assert loader.fleet.pids[0] == new_process_is_up_pid
        assert loader.get_attr("life") == [1, 0]


def test_a_call_that_waits_for_a_worker_that_dies_says_so(tmp_path: Path) -> None:
    class Waiting(Alive):
        def wait(self) -> None:
            (tmp_path / "waiting").touch()
            wait_for(tmp_path / "never", 60)

    with SlotLoader(Waiting, 2, **PROCESS, **RESTART) as loader:
        play = Play(loader)
        play.steps(5)
        caught: list[BaseException] = []

        def ask() -> None:
            try:
                loader.call("wait", slots=[0])
            except WorkerDied as error:
                caught.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        until((tmp_path / "waiting").exists)
        play.kill(0)
        thread.join(20)
        assert "worker 0 ended before it answered 'call'" in str(caught[0])
        play.until(lambda: play.life(0) == 1)


def test_restarts_go_on_after_a_split_and_reach_the_right_receiver() -> None:
    with SlotLoader(Alive, 4, **PROCESS, **RESTART) as loader:
        left, right = loader.split(2)
        firsts: dict[int, list[int]] = {slot: [] for slot in range(4)}

        def serve(receiver: Any) -> Any:
            batch = receiver.recv(stall_timeout=30)
            for slot, life in zip(batch.env_indices.tolist(), batch.obs[:, LIFE].tolist(), strict=True):
                if life not in firsts[slot]:
                    firsts[slot].append(life)
            batch.send(np.zeros(batch.size, np.int64))
            return batch

        for _ in range(10):
            assert set(serve(left).env_indices.tolist()) <= {0, 1}
            assert set(serve(right).env_indices.tolist()) <= {2, 3}
        os.kill(until(lambda: loader.fleet.pids.get(3)), signal.SIGKILL)
        told = []
        while firsts[3] != [0, 1]:
            serve(left)
            told += serve(right).episodes
        assert [(e.slot, e.life, e.interrupted) for e in told] == [(3, 0, True)]
        assert [firsts[slot] for slot in range(3)] == [[0]] * 3


# 17: chaos.


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [60, pytest.param(500, marks=pytest.mark.soak)])
def test_random_sigkills_under_load_lose_nothing_on_any_slot_and_recv_is_never_late(kills: int) -> None:
    report = chaos.run(chaos.Options(seconds=900, kills=kills, records=20 * kills, seed=kills, num_envs=8, rate=20))
    assert not report.once, report
    assert not report.clean, report
    assert report.kills >= kills
    assert report.restarted >= kills * 0.5
    assert report.interrupted > 0
    assert report.longest_recv < 10.0  # a stop lasts 0.4 s, a hang 1 s
    assert report.settled < 10.0


@pytest.mark.parametrize(
    "options",
    [
        {"envs_per_worker": 3, "trouble": 0.002},
        {"spares": 1, "trouble": 0.002},
        {"spares": 2, "envs_per_worker": 2},
        {"spares": 1, "spare_processes": True, "num_envs": 3, "rate": 2, "kills": 8, "records": 300},
        {"recycle_after": 2, "trouble": 0.002},
    ],
    ids=["packed", "a spare", "packed with two spares", "a spare in a process", "recycled"],
)
def test_chaos_loses_nothing_whatever_the_packing(options: dict[str, Any]) -> None:
    usual = {"seconds": 300, "kills": 20, "records": 2000, "seed": 1, "num_envs": 6, "rate": 10}
    report = chaos.run(chaos.Options(**{**usual, **options}))
    assert not report.once, report
    assert not report.clean, report
    assert report.restarted > 5
    assert report.interrupted > 0


# 18: hangs.


@pytest.mark.parametrize("where", ["step", "reset"])
def test_a_worker_hung_in_c_code_that_ignores_sigterm_is_named_killed_and_reaped(where: str) -> None:
    ills = [(0, "hang", where, 3)]
    with SlotLoader(
        partial(Sick, ills=ills, length=4), 3, on_failure="raise", **{f"{where}_timeout": 0.5}, **PROCESS
    ) as loader:
        play = Play(loader)
        pid = until(lambda: loader.fleet.pids.get(1))
        with pytest.raises(WorkerDied) as caught:
            play.until(lambda: False)
        assert 0.5 <= time.monotonic() - play.answered[1] < 0.5 + SOON + 5 * (where == "reset")
        error = caught.value
        assert (error.pid, error.slots, error.exitcode) == (pid, (1,), -signal.SIGKILL)
        assert f"env.{where} of slot 1 has run for" in str(error)
        assert f"longer than {where}_timeout=0.5 s" in str(error)
        assert "in hang_in_c" in str(error), "the stack is missing"
        assert "out of memory" not in str(error)
        assert reaped(pid)
        play.steps(20, [0, 2])


@pytest.mark.parametrize("where", ["step", "reset", "factory"])
def test_a_worker_that_hangs_in_a_new_life_is_replaced_again(where: str) -> None:
    ills = [(0, "hang", "step", 3), (1, "hang", where, 1)]
    limits = {"step_timeout": 0.4, "reset_timeout": 0.4, "start_timeout": 3.0}
    with SlotLoader(partial(Sick, ills=ills), 2, **limits, **PROCESS) as loader:
        play = Play(loader)
        play.until(lambda: play.life(1) == 2)
        play.steps(20)
        assert play.lives(0) == [0]
        assert play.interrupted()[0] == (1, 0, 0, 2, 3.0)
        assert loader.stats().restarted == 2


def test_an_env_whose_factory_hangs_when_it_is_rebuilt_in_its_worker_is_replaced_after_start_timeout() -> None:
    ills = [(0, "raise", "step", 3), (1, "hang", "factory", 1)]
    with SlotLoader(partial(Sick, ills=ills), 2, start_timeout=2.0, stall_timeout=20.0, **PROCESS) as loader:
        play = Play(loader)
        play.until(lambda: play.life(1) == 2)
        play.steps(20)


def test_siblings_of_a_hung_env_get_new_lives_and_are_told_so() -> None:
    with SlotLoader(partial(Sick, ills=[(0, "hang", "step", 5)]), 4, envs_per_worker=2, step_timeout=0.5, **PROCESS) as loader:
        play = Play(loader)
        play.until(lambda: play.life(0) == play.life(1) == 1)
        play.steps(20)
        assert sorted(entry[:2] for entry in play.interrupted()) == [(0, 0), (1, 0)]
        assert play.lives(2) == play.lives(3) == [0]


def test_a_worker_that_is_frozen_before_it_takes_an_action_is_replaced_too() -> None:
    with SlotLoader(Alive, 2, step_timeout=0.5, stall_timeout=10.0, **PROCESS) as loader:
        play = Play(loader)
        play.steps(5)
        until(lambda: (loader.table.state == SlotState.READY).all())
        os.kill(loader.fleet.pids[0], signal.SIGSTOP)  # nothing of the env's is to blame: a debugger, a cgroup freezer
        play.until(lambda: play.life(0) == 1)
        play.steps(10)


def test_a_slot_that_is_given_up_because_its_nursery_is_frozen_stays_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_fleet, "_REAP_LIMIT", 2.0)
    env = partial(LongReset, directory=str(tmp_path), length=1)
    with SlotLoader(env, 1, reset_timeout=0.5, stall_timeout=30, **PROCESS, **RESTART) as loader:
        pid, nursery = until(lambda: loader.fleet.pids.get(0)), loader.fleet._nursery.pid
        os.kill(nursery, signal.SIGSTOP)  # so that it neither kills nor reaps
        try:
            with pytest.raises(WorkerDied, match="could not be reaped, so its slots are dead for good"):
                Play(loader).until(lambda: False)
            assert gone(pid), "what is not killed may still write"
            (tmp_path / "go-on").touch()
        finally:
            os.kill(nursery, signal.SIGCONT)
        until(lambda: reaped(pid) and not loader.fleet.pids)
        with pytest.raises(SlotLoaderError, match="no slot is left"):
            loader.recv(stall_timeout=1)
        assert loader.table.state.tolist() == [SlotState.DEAD]
        assert loader.stats().restarted == 0


@pytest.mark.parametrize("apart", [False, True], ids=["in a thread", "in a process"])
def test_a_spare_that_hangs_in_its_reset_is_found_and_its_worker_replaced(apart: bool) -> None:
    ills = [(0, "hang", "reset", 3)]
    limits = {"reset_timeout": 0.5, "step_timeout": 0.5, "stall_timeout": 10.0}
    with SlotLoader(partial(Sick, ills=ills, length=4), 2, spares=1, spare_processes=apart, **limits, **PROCESS) as loader:
        play = Play(loader, spares=1)
        play.until(lambda: play.life(1) == 1)
        play.steps(20)


def test_a_hung_thread_is_given_up_with_its_stack_and_writes_nothing_when_it_comes_back(tmp_path: Path) -> None:
    class Late(Alive):
        def step(self, action: int) -> Any:
            if self.slot == 1 and self.t == 4:
                (tmp_path / "hung").touch()
                wait_for(tmp_path / "go-on")
                (tmp_path / "back").touch()
            return super().step(action)

    with SlotLoader(Late, 2, backend="thread", step_timeout=0.3) as loader:
        play = Play(loader)
        with pytest.raises(EnvFailed, match=r"slot 1 .*longer than step_timeout=0.3 s") as caught:
            play.until(lambda: False)
        assert "a thread cannot be killed" in str(caught.value)
        assert "wait_for" in str(caught.value)
        before = loader.table.observation[0][1].copy()
        (tmp_path / "go-on").touch()
        until((tmp_path / "back").exists)
        play.steps(50, [0])
        assert (loader.table.observation[0][1] == before).all()
        assert loader.table.state[1] == SlotState.DEAD


# Spares.


def spare_seeds(seed: int, life: int) -> list[int]:
    return [life_seed(seed, 0, life, spare) for spare in range(3)]


SPARES: dict[str, dict[str, Any]] = {
    "process": {"backend": "process"},
    "thread": {"backend": "thread"},
    "processes": {"backend": "process", "spare_processes": True},
}


@pytest.mark.parametrize("where", SPARES)
def test_spares_take_turns_in_a_fixed_order_with_reproducible_seeds(where: str) -> None:
    def irregular(context: Any) -> Any:
        rng = np.random.default_rng()

        class Irregular(Alive):
            def reset(self, **keywords: Any) -> Any:
                time.sleep(rng.uniform(0, 0.01))
                return super().reset(**keywords)

        return Irregular(context, length=3)

    seeds = spare_seeds(11, 0)
    with SlotLoader(irregular, 1, seed=11, spares=2, **SPARES[where]) as loader:
        rows: list[list[int]] = []
        episodes = []
        while len(episodes) < 12:
            batch = loader.recv()
            rows += batch.obs[:, [EPISODE, T, SEED]].tolist()
            episodes += batch.episodes
            batch.send([0])
    expected = [[episode // 3, t, seeds[episode % 3]] for episode in range(12) for t in range(4)]
    assert rows == expected
    assert [(e.index, e.life, e.length, e.interrupted) for e in episodes] == [(i, 0, 3, False) for i in range(12)]
    assert [e.seed for e in episodes] == [*seeds, *[None] * 9]


def test_a_new_life_gives_every_spare_a_new_seed() -> None:
    with SlotLoader(partial(Alive, length=2), 1, seed=11, spares=2, **PROCESS, **RESTART) as loader:
        play = Play(loader, spares=2)
        loader.recv().send([0])
        play.kill(0)
        found: list[int] = []
        while len(found) < 3:
            batch = loader.recv(stall_timeout=30)
            if batch.obs[0, LIFE] == 1 and batch.is_first[0]:
                found.append(int(batch.obs[0, SEED]))
            batch.send([0])
        assert found == spare_seeds(11, 1)
        assert len(set(found + spare_seeds(11, 0))) == 6


@pytest.mark.parametrize("where", SPARES)
def test_a_long_reset_does_not_stop_its_slot_while_a_spare_is_ready(where: str, tmp_path: Path) -> None:
    with SlotLoader(partial(LongReset, directory=str(tmp_path)), 1, spares=1, **SPARES[where]) as loader:
        ended = []
        while len(ended) < 2:  # the first env cannot play again before the second has ended
            batch = loader.recv(stall_timeout=20)
            ended += batch.episodes
            if not ended or len(ended) < 2:
                batch.send([0])
            if len(ended) == 1:
                until((tmp_path / "resetting-0").exists)
        assert [e.index for e in ended] == [0, 1]
        batch.send([0])
        assert loader.poll() is None  # both envs are in their long resets
        (tmp_path / "go-on").touch()
        batch = loader.recv(stall_timeout=20)
        assert batch.is_first.all()
        assert batch.obs[0, EPISODE] == 1


# Recycling.


def test_recycling_closes_and_rebuilds_an_env_after_so_many_episodes_with_the_next_lifes_seed(
    how: dict[str, Any], tmp_path: Path
) -> None:
    def closing(context: Any) -> Any:
        env = Closing(context, str(tmp_path))
        env.length = 2
        return env

    with SlotLoader(closing, 2, seed=3, recycle_after=3, **how) as loader:
        play = Play(loader)
        play.until(lambda: min(play.life(0), play.life(1)) == 3)
        stats = loader.stats()
    for slot in range(2):
        found = [(e.life, e.index, e.seed) for e in play.episodes if e.slot == slot][:9]
        seeds = [life_seed(3, slot, life) for life in range(3)]
        assert found == [(life, index, None if index else seeds[life]) for life in range(3) for index in range(3)]
        closed = [int(life) for life in (tmp_path / f"closed-{slot}").read_text().split()]
        assert closed == list(range(len(closed)))  # each env once, in order
        assert len(closed) >= 4
    assert play.interrupted() == []
    assert stats.restarted == 0


def test_a_recycled_env_that_dies_goes_on_with_the_life_after() -> None:
    with SlotLoader(partial(Alive, length=2), 1, recycle_after=2, **PROCESS, **RESTART) as loader:
        play = Play(loader)
        play.until(lambda: play.life(0) == 3)
        play.kill(0)
        play.until(lambda: play.life(0) >= 6)
        assert play.lives(0) == list(range(play.life(0) + 1))


# The chaos tool itself.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--minutes", "0"], "--minutes: expected a number above 0, found '0'"),
        (["--num-envs", "many"], "--num-envs: expected an integer of at least 1, found 'many'"),
        (["--seed", "-1"], "--seed: expected an integer of at least 0, found '-1'"),
        (["--spares", "1", "--recycle-after", "2"], "--recycle-after does not go with --spares"),
    ],
)
def test_the_chaos_tool_says_what_is_wrong_with_its_arguments(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        chaos.main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


class FakeBatch:
    """One record of `Chaotic`, and what a test wants to be wrong about it."""

    def __init__(self, slot: int, life: int, episode: int, t: int, action: int = -1, **wrong: Any) -> None:
        row = np.zeros((1, chaos.WIDTH), np.int64)
        row[0, : chaos.FILL] = slot, life, episode, t, wrong.get("resets", episode + 1), action
        row[:, chaos.FILL :] = row[:, : chaos.FILL] @ chaos.WEIGHTS
        row[0, chaos.FILL + 3] += wrong.get("torn", 0)
        last = t == chaos.length_of(slot, life, episode)
        kind = 0 if t == 0 else 1 if not last else 2 if episode % 2 == 0 else 3
        self.obs, self.env_indices = row, np.array([wrong.get("shown_as", slot)])
        self.step_type = np.array([wrong.get("kind", kind)])
        self.reward, self.episodes = np.array([wrong.get("reward", t)], np.float32), wrong.get("episodes", [])


WRONG: dict[str, FakeBatch] = {
    "lost": FakeBatch(1, 0, 0, 3, 5),
    "repeated": FakeBatch(1, 0, 0, 1, 5),
    "swapped": FakeBatch(0, 0, 0, 2, 5, shown_as=1),
    "another action": FakeBatch(1, 0, 0, 2, 6),
    "torn": FakeBatch(1, 0, 0, 2, 5, torn=1),
    "reset twice": FakeBatch(1, 0, 0, 2, 5, resets=2),
    "late": FakeBatch(1, -1, 0, 0),
    "a life that does not begin": FakeBatch(1, 1, 0, 1, 5),
    "a cut that is not told": FakeBatch(1, 1, 0, 0),
    "a wrong step type": FakeBatch(1, 0, 0, 2, 5, kind=2),
    "a wrong reward": FakeBatch(1, 0, 0, 2, 5, reward=1),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_ledger_of_the_chaos_tool_finds_every_kind_of_mistake(wrong: str) -> None:
    ledger = chaos.Ledger(2)
    ledger.check(FakeBatch(1, 0, 0, 0))  # type: ignore[arg-type]
    ledger.last[1].sent = 4
    ledger.check(FakeBatch(1, 0, 0, 1, 4))  # type: ignore[arg-type]
    ledger.last[1].sent = 5
    with pytest.raises(AssertionError):
        ledger.check(WRONG[wrong])  # type: ignore[arg-type]
