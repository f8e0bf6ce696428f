"""What fails while it runs: envs that raise, workers, nursery and trainer that are killed for real. The rest goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from checks import MARK, TESTS, Once, child_environment, kill_quietly, names_of, started, until
from toys import Counting, Endless, Gated, Raising, Scripted, WithHelper

from slotloader import EnvFailed, SlotLoader, SlotLoaderError, WorkerDied

pytestmark = pytest.mark.usefixtures("clean")

RAISE: dict[str, Any] = {"on_failure": "raise"}  # restarts have tests of their own


def until_raises(loader: SlotLoader, seconds: float = 20.0) -> tuple[SlotLoaderError, int]:
    """Answers batches until `recv` raises; the error and how many records came before it."""
    records = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            batch = loader.recv(stall_timeout=seconds)
        except (EnvFailed, WorkerDied) as error:
            return error, records
        records += batch.size
        batch.send(np.zeros(batch.size, np.int64))
    raise AssertionError(f"nothing was raised within {seconds} s")


def goes_on(loader: SlotLoader, slots: set[int], records: int = 200) -> None:
    """The other slots give every record, each once, and nothing else is raised."""
    last: dict[int, int] = {}
    done = 0
    while done < records or set(last) != slots:
        batch = loader.recv(stall_timeout=20)
        for slot, value in zip(batch.env_indices.tolist(), batch.obs[:, 0].tolist(), strict=True):
            assert slot in slots
            if slot in last:
                assert value == last[slot] + 1
            last[slot] = value
        done += batch.size
        batch.send(np.zeros(batch.size, np.int64))


class Steady(Counting):
    """`Counting` in one endless episode."""

    def step(self, action: int) -> Any:
        self.t += 1
        return self._obs(int(action)), 1.0, False, False, {}


# Envs that raise.


def plain() -> Exception:
    return ValueError("the robot fell over")


def unpicklable() -> Exception:
    class Local(Exception):
        def __init__(self) -> None:
            super().__init__("the robot fell over")
            self.lock = threading.Lock()

        def __reduce__(self) -> Any:
            raise TypeError("cannot be pickled")

    return Local()


def not_unpicklable() -> Exception:
    class TwoArguments(Exception):
        def __init__(self, one: str, two: str) -> None:
            super().__init__(one)

    return TwoArguments("the robot fell over", "hard")


def speechless() -> Exception:
    class Speechless(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text either")

        __repr__ = __str__

    return Speechless()


def huge() -> Exception:
    return ValueError("the robot fell over " * 100_000)


def chained() -> Exception:
    error = ValueError("the robot fell over")
    error.__cause__ = KeyError("left foot")
    return error


def leaving() -> BaseException:
    return SystemExit("the robot fell over")


KINDS: dict[Callable[[], BaseException], str] = {
    plain: "ValueError",
    unpicklable: "Local",
    not_unpicklable: "TwoArguments",
    speechless: "Speechless",
    huge: "ValueError",
    chained: "ValueError",
    leaving: "SystemExit",
}


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_an_env_that_raises_at_step_7_is_named_within_a_second_and_the_others_go_on(
    how: dict[str, Any], make: Callable[[], BaseException]
) -> None:
    with SlotLoader(partial(Raising, make=make), 3, **RAISE, **how) as loader:
        loader.recv(min_get=3).send([0] * 3)
        begin = time.monotonic()
        error, _ = until_raises(loader)
        assert time.monotonic() - begin < 5.0  # 1 s on a quiet machine
        assert isinstance(error, EnvFailed)
        assert error.slots == (1,)
        head = str(error).splitlines()[0]
        assert f"slot 1 (worker {0 if how['backend'] == 'inline' else 1}, pid {error.pid})" in head
        assert f"raised {KINDS[make]} at step 7" in head
        assert len(str(error)) < 30_000
        if make is not speechless:
            assert "the robot fell over" in head
        if how["backend"] == "process":
            assert error.pid == loader.fleet.pids[1] != os.getpid()
            assert "toys.py" in error.remote_traceback
            assert "raise self.make()" in error.remote_traceback
            assert error.remote_traceback in str(error)
            if make is chained:
                assert "KeyError: 'left foot'" in error.remote_traceback
        else:
            assert error.pid == os.getpid()
            assert type(error.__cause__).__name__ == KINDS[make]
        goes_on(loader, {0, 2})
        with pytest.raises(SlotLoaderError):
            loader.call("_obs", 0, slots=[1])


def test_an_env_that_raises_in_reset_is_named_once_its_last_record_was_answered(how: dict[str, Any]) -> None:
    class BadReset(Scripted):
        def reset(self, **keywords: Any) -> Any:
            if hasattr(self, "t"):
                raise OSError("no more levels")
            return super().reset(**keywords)

    with SlotLoader([BadReset, Scripted], min_get=2, timeout=None, **RAISE, **how) as loader:
        for _ in range(3):
            loader.recv().send([0, 0])
        batch = loader.recv()
        assert batch.is_last.all()
        assert len(batch.episodes) == 2
        batch.send([0, 0])
        with pytest.raises(EnvFailed, match=r"slot 0 .*: env\.reset raised OSError: no more levels") as caught:
            loader.recv(min_get=1)
        assert caught.value.slots == (0,)
        assert loader.recv(min_get=1).env_indices.tolist() == [1]


def test_several_envs_that_fail_together_are_all_named(how: dict[str, Any]) -> None:
    factories = [partial(Raising, make=plain, slot=slot, at=3) if slot < 3 else Steady for slot in range(4)]
    with SlotLoader(factories, min_get=4, timeout=None, **RAISE, **how) as loader:
        for _ in range(3):
            loader.recv().send([0] * 4)
        if how["backend"] != "inline":
            until(lambda: len(loader.fleet.events) == 3)
        found: set[int] = set()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            while len(found) < 3:
                with pytest.raises(EnvFailed) as caught:
                    loader.recv()
                found |= set(caught.value.slots)
                assert all(f"slot {slot} " in str(caught.value) for slot in caught.value.slots)
                assert how["backend"] == "inline" or caught.value.slots == (0, 1, 2)
            for _ in range(20):  # min_get=4 is lowered to what is left, with one warning
                batch = loader.recv()
                assert batch.env_indices.tolist() == [3]
                batch.send([0])
        warned = [str(one.message) for one in said if "slots that are left; it is lowered" in str(one.message)]
        assert len(warned) == 1
        assert warned[0].startswith("min_get=4 is more than the ")


def test_when_every_env_has_failed_recv_says_that_no_slot_is_left(how: dict[str, Any]) -> None:
    with SlotLoader(partial(Raising, make=plain, slot=0, at=1), 1, **RAISE, **how) as loader:
        error, records = until_raises(loader)
        assert (error.slots, records) == ((0,), 1)
        for _ in range(2):
            with pytest.raises(SlotLoaderError, match=r"no slot is left.*build a new SlotLoader") as caught:
                loader.recv()
            assert re.search(r"The last failure: slot 0 \(worker 0, pid \d+\): env.step raised ", str(caught.value))


def test_env_close_runs_once_for_every_env_after_anothers_error(packed: dict[str, Any], tmp_path: Path) -> None:
    class Falls(Scripted):
        def step(self, action: int) -> Any:
            raise plain()

    log = partial(Scripted, log=str(tmp_path))
    with (
        pytest.raises(EnvFailed, match="the robot fell over"),
        SlotLoader([log, partial(Falls, log=str(tmp_path)), log, log], **RAISE, **packed) as loader,
    ):
        for batch in loader:
            batch.send([0] * batch.size)
    for slot in range(4):
        assert (tmp_path / f"{slot}.log").read_text().count("close") == 1


# Workers that die.


class Dies(Steady):
    """Slot 1 ends its process in step 7."""

    def __init__(self, context: Any, how: str) -> None:
        super().__init__(context)
        self.how = how

    def step(self, action: int) -> Any:
        if self.env_id == 1 and self.t == 6:
            if self.how == "_exit":
                os._exit(3)
            os.kill(os.getpid(), getattr(signal, self.how))
            time.sleep(60)
        return super().step(action)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "SIGBUS", "SIGTERM", "_exit"])
@pytest.mark.parametrize("per_worker", [1, 2])
def test_a_worker_that_dies_is_reported_with_pid_slots_and_cause_and_the_others_go_on(how: str, per_worker: int) -> None:
    with SlotLoader(partial(Dies, how=how), 4, envs_per_worker=per_worker, preload=["toys"], **RAISE) as loader:
        lost = (1,) if per_worker == 1 else (0, 1)
        worker = 1 // per_worker
        until(lambda: len(loader.fleet.pids) == 4 // per_worker)
        pid = loader.fleet.pids[worker]
        loader.recv(min_get=4).send([0] * 4)
        begin = time.monotonic()
        error, _ = until_raises(loader)
        assert time.monotonic() - begin < 5.0
        assert isinstance(error, WorkerDied)
        assert (error.pid, error.slots) == (pid, lost)
        text = str(error)
        assert "\n" not in text
        assert f"worker {worker}, pid {pid}" in text
        if how == "_exit":
            assert error.exitcode == 3
            assert "exited with status 3" in text
        else:
            assert error.exitcode == -getattr(signal, how)
            assert f"killed by {how}" in text
        assert ("out of memory" in text) == (how == "SIGKILL")
        for slot in lost:
            assert str(slot) in text.split("(")[0]
        goes_on(loader, {0, 1, 2, 3} - set(lost))
        with pytest.raises(WorkerDied, match="ended"):
            loader.get_attr("t", slots=[1])
        assert loader.get_attr("env_id", slots=[3]) == [3]


def test_a_worker_killed_while_its_record_is_leased_keeps_the_record_and_drops_its_action() -> None:
    with SlotLoader(Steady, 2, min_get=2, **RAISE) as loader:
        batch = loader.recv()
        until(lambda: len(loader.fleet.pids) == 2)
        os.kill(loader.fleet.pids[0], signal.SIGKILL)
        until(lambda: loader.fleet.events)
        assert batch.obs[:, 0].tolist() == [0, 1000]
        batch.send([5, 6])
        with pytest.raises(WorkerDied, match="slot 0 "):
            loader.recv(min_get=1)
        batch = loader.recv(min_get=1)
        assert batch.env_indices.tolist() == [1]
        assert batch.last_action.tolist() == [6]
        assert loader.stats().dead == 1


def test_a_ready_record_of_a_killed_worker_is_still_delivered() -> None:
    with SlotLoader(Steady, 2, **RAISE) as loader:
        until(lambda: (loader.table.state == 3).all())
        os.kill(loader.fleet.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            until(lambda: loader.fleet.events)
            loader.recv()
        batch = loader.recv(min_get=2)
        assert batch.obs[:, 0].tolist() == [0, 1000]
        batch.send([0, 0])
        assert loader.recv().env_indices.tolist() == [1]


def test_a_worker_that_dies_in_the_factory_fails_the_constructor(clean: None) -> None:
    def dies(context: Any) -> Any:
        os._exit(7)

    with pytest.raises(WorkerDied, match=r"exited with status 7") as caught:
        SlotLoader([Counting, dies])
    assert caught.value.slots == (1,)


# Helpers, nursery, trainer.


def helpers(directory: Path, count: int) -> list[int]:
    files = [directory / f"helper-{slot}" for slot in range(count)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("leaves", [False, True], ids=["in the group", "in a session of its own"])
def test_helper_processes_of_envs_are_gone_after_close_and_with_their_worker(leaves: bool, tmp_path: Path) -> None:
    factory: Any = partial(WithHelper, directory=str(tmp_path))
    if leaves:
        plain_popen = subprocess.Popen

        def factory(context: Any) -> Any:
            subprocess.Popen = partial(plain_popen, start_new_session=True)  # type: ignore[misc, assignment]
            return WithHelper(context, str(tmp_path))

    with SlotLoader(factory, 2, **RAISE) as loader:
        pids = helpers(tmp_path, 2)
        loader.recv(min_get=2).send([0, 0])
        os.kill(loader.fleet.pids[0], signal.SIGKILL)
        until(lambda: gone(pids[0]), what="the helper of a killed worker lives on")
        assert not gone(pids[1])
    until(lambda: all(map(gone, pids)), what="a helper outlives close")


def test_a_killed_nursery_is_learned_within_seconds_and_everything_is_gone(tmp_path: Path) -> None:
    with SlotLoader(partial(WithHelper, directory=str(tmp_path)), 2, **RAISE) as loader:
        pids = helpers(tmp_path, 2)
        loader.recv(min_get=2).send([0, 0])
        begin = time.monotonic()
        kill_quietly(loader.fleet._nursery.pid)
        error, _ = until_raises(loader)
        assert time.monotonic() - begin < 5.0
        assert isinstance(error, WorkerDied)
        until(lambda: all(map(gone, pids)), what="helpers outlive the nursery")
        until(lambda: not loader.fleet.pids)


TRAINER = """
import sys
from functools import partial
from slotloader import SlotLoader
from toys import WithHelper

loader = SlotLoader(partial(WithHelper, directory=sys.argv[1]), 3, envs_per_worker=2)
print("up", flush=True)
for batch in loader:
    batch.send([0] * batch.size)
"""
SLOW = """
import time

def slow(context, directory):
    WithHelper(context, directory)
    time.sleep(1000)

loader ="""
STARTING = TRAINER.replace("WithHelper,", "slow,").replace("loader =", SLOW, 1)


@pytest.mark.parametrize("code", [TRAINER, STARTING], ids=["running", "starting"])
@pytest.mark.parametrize("repeats", [1, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_a_killed_trainer_takes_workers_and_their_children_along_within_5_s(
    code: str, repeats: int, tmp_path: Path, clean: None
) -> None:
    for repeat in range(repeats):
        directory = tmp_path / str(repeat)
        directory.mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(directory)], env=child_environment(os.environ[MARK]), cwd=TESTS
        )
        try:
            helpers(directory, 1 if code is STARTING else 3)
        finally:
            process.kill()
            process.wait()
        until(lambda: not started(os.environ[MARK]), 8.0, "something outlives its trainer")
        assert not names_of(process.pid)


def test_close_with_workers_in_mid_step_ends_within_its_deadline(tmp_path: Path) -> None:
    (tmp_path / "hold-0").touch()
    (tmp_path / "hold-1").touch()
    loader = SlotLoader(partial(Gated, directory=str(tmp_path)), 3)
    loader.recv(min_get=3).send([0] * 3)
    until((tmp_path / "began-0").exists)
    begin = time.monotonic()
    loader.close()
    assert time.monotonic() - begin < 6.0
    loader.close()


def test_survivors_of_killed_workers_lose_nothing_under_load() -> None:
    once, rng = Once(6), np.random.default_rng(1)
    with SlotLoader(Counting, 6, preload=["toys"], **RAISE) as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        until(lambda: len(loader.fleet.pids) == 6)
        pids = dict(loader.fleet.pids)
        killed: set[int] = set()
        reported: set[int] = set()
        while once.records < 3000:
            if len(killed) < 4 and once.records > 500 * (len(killed) + 1):
                victim = int(rng.choice([slot for slot in range(6) if slot not in killed]))
                os.kill(pids[victim], signal.SIGKILL)
                killed.add(victim)
            try:
                batch = loader.recv(stall_timeout=20)
            except WorkerDied as error:
                assert set(error.slots) <= killed
                reported |= set(error.slots)
                continue
            once.check(batch)
            batch.send(once.answer(batch.env_indices, rng))
        assert reported == killed


class FailsLater(Endless):
    """The env of slot 1 raises in its third step."""

    def step(self, action: int) -> Any:
        if self.env_id == 1 and self.t == 2:
            raise RuntimeError("for good")
        return super().step(action)


def test_a_failure_for_good_shrinks_num_alive_and_leaves_num_envs_alone(how: dict[str, Any]) -> None:
    with SlotLoader(FailsLater, 3, on_failure="raise", **how) as loader:
        with pytest.raises(EnvFailed):
            while True:
                batch = loader.recv()
                batch.send(np.zeros(batch.size, np.int64))
        assert (loader.num_envs, loader.num_alive, loader.num_slots) == (3, 2, 3)
        assert loader.single_observation_space is loader.observation_space
        assert loader.single_action_space is loader.action_space
