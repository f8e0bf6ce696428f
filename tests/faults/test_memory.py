"""FAULTS 25 to 28: shared memory and limits. Too little of anything is an error at construction, and no name is ever left."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import posix_ipc
import pytest
from checks import NOISE, child_environment, names_of, require_gone, until
from play import Play
from sick import PRELOAD, Alive

from slotloader import SlotLoader
from slotloader.table.signals import _namespace

pytestmark = pytest.mark.usefixtures("clean")

HERE = Path(__file__).resolve().parent
PROCESS: dict[str, Any] = {"preload": PRELOAD}


def unshared(path: Path, code: str, shm: str, timeout: float = 90.0) -> tuple[str, str, list[str]]:
    """Runs a script in a mount namespace with a /dev/shm of its own of size `shm`; its output and what it leaves there.

    Skips the test where the machine does not let us mount.
    """
    allowed = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, text=True)
    if allowed.returncode:
        pytest.skip(f"cannot mount a /dev/shm of its own here: {allowed.stderr.strip()}")
    script = path / "script.py"
    script.write_text(code)
    mark = os.urandom(8).hex()
    environment = child_environment(mark)
    environment["PYTHONPATH"] += os.pathsep + str(HERE)
    command = f"mount -t tmpfs -o size={shm} tmpfs /dev/shm && {sys.executable} {script}; echo status $?; ls /dev/shm"
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, env=environment, cwd=path, timeout=timeout
    )
    require_gone(mark, set(), 10)
    out, _, left = ran.stdout.partition("status ")
    return out, ran.stderr, left.split()[1:]


def limited(path: Path, code: str, timeout: float = 100.0) -> str:
    """Runs a script; what it prints. It may say nothing else, and must leave nothing."""
    script = path / "script.py"
    script.write_text(code)
    mark = os.urandom(8).hex()
    environment = child_environment(mark)
    environment["PYTHONPATH"] += os.pathsep + str(HERE)
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, cwd=path, timeout=timeout
    )
    require_gone(mark, set(), 10)
    assert ran.returncode == 0, ran.stderr
    assert not [word for word in NOISE if word in ran.stderr], ran.stderr
    return ran.stdout


# 25: memory.

BIG = """
import os
import numpy as np
from gymnasium.spaces import Box, Discrete
from slotloader import SlotLoader

class Big:
    observation_space = Box(0, 255, (4, 1024, 1024), np.uint8)
    action_space = Discrete(2)

    def __init__(self, context):
        self.slot, self.t = context.slot, 0

    def reset(self, seed=None):
        return np.full((4, 1024, 1024), self.slot, np.uint8), {}

    def step(self, action):
        self.t += 1
        return np.full((4, 1024, 1024), self.slot + self.t, np.uint8), 0.0, False, False, {}

shm = os.statvfs("/dev/shm")
assert shm.f_blocks * shm.f_frsize <= 64 << 20
with SlotLoader(Big, 50, num_workers=2, timeout=None) as loader:
    assert loader.table.layout.nbytes > 200 << 20
    for t in range(3):
        batch = loader.recv()
        assert (batch.obs == (np.arange(50, dtype=np.uint8) + t)[:, None, None, None]).all()
        batch.send(np.zeros(50, np.int64))
print("works")
"""


def test_a_table_of_200_mib_works_with_a_dev_shm_of_64_mib(tmp_path: Path) -> None:
    out, err, left = unshared(tmp_path, BIG, "64m")
    assert (out, err, left) == ("works\n", "", [])


TOO_LITTLE = """
import errno, json, resource
from functools import partial
from slotloader import SlotLoader
from sick import Wide

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))  # should the check fail, the machine must not pay for it
try:
    SlotLoader(partial(Wide, 1 << 40), 2)
except OSError as error:
    print(json.dumps([error.errno == errno.ENOMEM, error.__cause__ is None, str(error)]))
"""


def test_too_little_memory_is_an_os_error_with_needed_free_and_the_remedy(tmp_path: Path) -> None:
    right_number, before_anything_is_taken, text = json.loads(limited(tmp_path, TOO_LITTLE))
    assert right_number
    assert before_anything_is_taken
    assert "slot table" in text
    needed, slots, per_slot, free = (int(word) for word in text.replace(",", "").split() if word.isdigit())
    assert needed > 2 << 40
    assert (slots, per_slot) == (2, needed // 2)
    with open("/proc/meminfo") as lines:
        total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    assert 0 < free < total
    assert "use fewer slots or smaller observations" in text


ADDRESS_SPACE = """
import resource
from functools import partial
from slotloader import SlotLoader
from sick import Wide

resource.setrlimit(resource.RLIMIT_{limit}, (1 << 30, 1 << 30))
try:
    SlotLoader(partial(Wide, 300 << 20), 4, num_workers=1)
except OSError as error:
    print(error.errno, error)
"""


@pytest.mark.parametrize("limit", ["AS", "FSIZE"])
def test_a_limit_of_the_process_on_memory_is_the_same_error_and_no_signal(limit: str, tmp_path: Path) -> None:
    out = limited(tmp_path, ADDRESS_SPACE.format(limit=limit))
    assert out.startswith(f"{errno.ENOMEM} ")
    assert "slot table: expected 1,258," in out
    assert "use fewer slots or smaller observations" in out


def test_every_page_is_reserved_at_construction_so_that_no_write_can_be_a_sigbus() -> None:
    with SlotLoader(Alive, 512, num_workers=1, **PROCESS) as loader:
        file = os.fstat(loader.fleet._region)
        assert file.st_size == loader.table.layout.nbytes > 1 << 20
        assert file.st_blocks * 512 >= file.st_size
        assert "memfd:slotloader" in os.readlink(f"/proc/self/fd/{loader.fleet._region}")


# 26: names.

FULL = """
import os
from slotloader import SlotLoader
from sick import Alive

for attempt in range(3):
    try:
        SlotLoader(Alive, 4)
    except OSError as error:
        print(error.errno, str(error).replace(chr(10), " "), flush=True)
    print(sorted(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd")), flush=True)
"""


@pytest.mark.parametrize("pages", [1, 10, 18])
def test_creation_that_fails_half_way_leaves_no_name_and_says_what_is_full(pages: int, tmp_path: Path) -> None:
    out, err, left = unshared(tmp_path, FULL, f"{pages * 4}k")  # 20 semaphores need a page each
    assert left == []
    assert err == ""
    lines = out.splitlines()
    assert len(lines) == 6
    assert {line.split("]")[0] for line in lines[1::2]} == {"["}
    assert len(set(lines[1::2])) == 1  # no descriptor is left either
    for line in lines[::2]:
        assert line.startswith(f"{errno.ENOSPC} ")
        assert "/dev/shm" in line


def test_a_dev_shm_that_fills_up_later_costs_the_workers_and_not_the_trainer(tmp_path: Path) -> None:
    code = """
import os
from slotloader import SlotLoader, SlotLoaderError
from sick import Alive
from play import Play

with SlotLoader(Alive, 4) as loader:
    play = Play(loader)
    play.steps(5)
    with open("/dev/shm/filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    play.steps(50)
    os.remove("/dev/shm/filler")
print("works")
"""
    out, err, left = unshared(tmp_path, code, "1m")
    assert (out, err, left) == ("works\n", "", [])


def test_leftovers_of_dead_runs_are_swept_and_names_of_others_are_not_touched() -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    pid, space = int(dead.stdout), _namespace()
    until(lambda: not os.path.exists(f"/proc/{pid}"))
    left = [f"/slotl-{pid}-{space}-{number:06x}" for number in range(3)]
    others = [
        f"/slotl-{os.getpid()}-{space}-abcdef",  # alive
        f"/slotl-1-{space}-abcdef",  # alive, and not ours to signal for most users
        f"/slotl-{pid}-1234-abcdef",  # of another container, where that pid may be alive
        f"/other-{pid}-{space}-abcdef",
        f"/slotl-{pid}",
        f"/slotl-x-{space}-abcdef",
    ]
    for name in left + others:
        posix_ipc.Semaphore(name, posix_ipc.O_CREX)
    file = Path(f"/dev/shm/slotl-{pid}-{space}-abcdef")
    file.write_text("a segment that is not ours")
    try:
        with SlotLoader(Alive, 1, **PROCESS) as loader:
            loader.recv().send([0])
            here = os.listdir("/dev/shm")
        assert not [name for name in left if f"sem.{name[1:]}" in here]
        assert [name for name in others if f"sem.{name[1:]}" not in here] == []
        assert file.exists()
    finally:
        file.unlink(missing_ok=True)
        for name in left + others:
            try:
                posix_ipc.unlink_semaphore(name)
            except posix_ipc.ExistentialError:
                continue


def test_a_running_loader_has_no_name_at_all_also_after_restarts() -> None:
    with SlotLoader(Alive, 4, on_failure="restart", **PROCESS) as loader:
        play = Play(loader)
        play.steps(5)
        assert names_of(os.getpid()) == []
        for worker in range(4):
            play.kill(worker)
        play.until(lambda: all(play.life(slot) == 1 for slot in range(4)))
        play.steps(5)
        mine = [os.getpid(), loader.fleet._nursery.pid, *loader.fleet.pids.values()]
        assert [name for pid in mine for name in names_of(pid)] == []
        for pid in mine:
            with open(f"/proc/{pid}/maps") as maps:
                assert not [line for line in maps if "/dev/shm" in line and "(deleted)" not in line]


@pytest.mark.parametrize("what", ["_order", "_wait_ready", "attach", "wait_built"])
def test_a_constructor_interrupted_at_any_point_leaves_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from slotloader.fleet.process import ProcessFleet

    original, calls = getattr(ProcessFleet, what), []

    def interrupted(self: Any, *args: Any) -> Any:
        calls.append(original(self, *args))
        if len(calls) == (2 if what == "_order" else 1):
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(ProcessFleet, what, interrupted)
    with pytest.raises(KeyboardInterrupt):
        SlotLoader(Alive, 3, **PROCESS)
    calls.clear()  # a table that somebody holds keeps its memory


# 27: descriptors.

DESCRIPTORS = """
import os, resource
from slotloader import SlotLoader
from sick import Alive

resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
try:
    with SlotLoader(Alive, {envs}, start_timeout=90, preload=["sick"], on_failure="restart", timeout=None) as loader:
        for _ in range(3):
            batch = loader.recv()
            assert batch.size == {envs}, batch
            batch.send([0] * batch.size)
        worker = loader.fleet.pids[5]
        os.kill(worker, 9)
        while loader.fleet.restarts < 1:
            pass
        batch = loader.recv()
        assert batch.size == {envs}, batch
        print("works", len(os.listdir("/proc/self/fd")), flush=True)
except OSError as error:
    print(error.errno, error, len(os.listdir("/proc/self/fd")))
"""


def test_200_envs_work_with_1024_descriptors_at_most_3_a_worker(tmp_path: Path) -> None:
    out = limited(tmp_path, "import logging\nlogging.disable()\n" + DESCRIPTORS.format(limit=1024, envs=200))
    words = out.split()
    assert words[0] == "works", out
    assert int(words[1]) < 3 * 200 + 30


@pytest.mark.parametrize(("limit", "envs"), [(256, 400), (256, 250), (64, 50)])
def test_too_few_descriptors_are_an_error_at_construction_that_says_how_many_are_needed(
    limit: int, envs: int, tmp_path: Path
) -> None:
    out = limited(tmp_path, "import logging\nlogging.disable()\n" + DESCRIPTORS.format(limit=limit, envs=envs))
    assert out.startswith(f"{errno.EMFILE} "), out
    assert f"{envs} workers: expected a limit of at least " in out
    needed = int(out.partition("at least ")[2].split()[0])
    assert envs < needed < 3 * envs + 40
    assert f"found {limit}" in out
    assert "envs_per_worker" in out
    assert int(out.split()[-1]) < 10  # none of ours is left open
    if envs < 100:
        out = limited(tmp_path, "import logging\nlogging.disable()\n" + DESCRIPTORS.format(limit=needed, envs=envs))
        assert out.startswith("works"), "so many, it said, would do"


@pytest.mark.parametrize("whose", ["the trainer", "the nursery"])
def test_a_worker_that_cannot_be_started_for_want_of_descriptors_does_not_end_the_others(whose: str, tmp_path: Path) -> None:
    code = f"""
import logging, os, resource, time
logging.disable()
from slotloader import SlotLoader, SlotLoaderError
from sick import Alive

with SlotLoader(Alive, 3, preload=["sick"], on_failure="restart") as loader:
    loader.recv(min_get=3).send([0, 0, 0])
    pid = os.getpid() if {whose!r} == "the trainer" else loader.fleet._nursery.pid
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{{pid}}/fd")) - 2, hard))
    os.kill(loader.fleet.pids[0], 9)
    served, errors, deadline = {{1: 0, 2: 0}}, [], time.monotonic() + 15
    while (min(served.values()) < 200 or not errors) and time.monotonic() < deadline:
        try:
            batch = loader.recv(stall_timeout=20)
        except SlotLoaderError as error:
            errors.append(str(error))
            assert len(errors) < 5, errors
            continue
        for slot in batch.env_indices.tolist():
            if slot:
                served[slot] += 1
        batch.send([0] * batch.size)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
    print(min(served.values()) >= 200, *errors)
"""
    out = limited(tmp_path, code, 60)
    assert out.startswith("True slot 0 "), "either nobody was told, or the others ended too"
    assert "open files" in out


# 28: strangers.

STRANGER = """
import json, sys
from slotloader.table import slots

with open(sys.argv[1], "r+b") as file:
    table = slots.attach(file.fileno())
print(json.dumps([table.num_slots, table.observation[0][:, 0].tolist()]))
"""


@pytest.mark.parametrize("end", ["", "import os; os.kill(os.getpid(), 9)"], ids=["exits", "is killed"])
def test_a_process_that_we_did_not_start_attaches_and_ends_and_the_region_is_still_there(end: str) -> None:
    with SlotLoader(Alive, 3, **PROCESS) as loader:
        play = Play(loader)
        play.steps(5)
        path = f"/proc/{os.getpid()}/fd/{loader.fleet._region}"
        environment = {"PYTHONPATH": child_environment()["PYTHONPATH"], "PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-c", STRANGER + end, path]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        assert json.loads(ran.stdout) == [3, [0, 1, 2]]
        assert not [word for word in NOISE if word in ran.stderr]
        play.steps(50)
        assert all(play.lives(slot) == [0] for slot in range(3))


def test_a_stranger_of_another_version_is_refused_before_it_touches_anything() -> None:
    with SlotLoader(Alive, 3, **PROCESS) as loader:
        path = f"/proc/{os.getpid()}/fd/{loader.fleet._region}"
        newer = "from slotloader.table import slots; slots.VERSION += 1" + STRANGER
        ran = subprocess.run(
            [sys.executable, "-c", newer, path], capture_output=True, text=True, env=child_environment(), timeout=60
        )
        assert ran.returncode == 1
        assert "both sides must match" in ran.stderr
        Play(loader).steps(20)


def test_nobody_can_shrink_or_grow_the_region_under_its_trainer() -> None:
    with SlotLoader(Alive, 2, **PROCESS) as loader, open(f"/proc/{os.getpid()}/fd/{loader.fleet._region}", "r+b") as file:
        for size in (0, 4096, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(file.fileno(), size)
        Play(loader).steps(20)
