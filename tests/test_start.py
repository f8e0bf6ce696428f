"""FAULTS 29 and 30: whatever a user writes, from wherever he writes it, starts; and says nothing that is not asked for."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import MARK, Once, child_environment, drive, quiet, run_script, started, until
from toys import Counting

from slotloader import SlotLoader, SlotLoaderError, WorkerDied

pytestmark = pytest.mark.usefixtures("clean")

HEAD = """
import numpy as np
from slotloader import SlotLoader
from toys import Counting

with open("main-runs", "a") as file:  # a script must run once: no worker may execute it again
    file.write("x")
"""


# 29: factories by value.


def test_a_lambda_a_closure_and_a_local_class_work_as_factories(how: dict[str, Any]) -> None:
    class Local(Counting):
        secret = [5]

    def closure(extra: int) -> Any:
        def make(context: Any) -> Any:
            env = Local(context)
            env.secret = [*env.secret, extra]
            return env

        return make

    with SlotLoader([lambda context: Local(context), closure(7), Local], **how) as loader:
        assert loader.get_attr("secret") == [[5], [5, 7], [5]]
        drive(loader, Once(3), 100, np.random.default_rng(0))


BODIES = {
    "no main guard, class of __main__": """
class Mine(Counting):
    def secret(self):
        return helper(7)
def helper(x):
    return 6 * x
loader = SlotLoader([Mine, lambda context: Mine(context)])
print(loader.call("secret"))
loader.close()
""",
    "env registered in __main__": """
import gymnasium as gym
class Mine(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        return np.ones(2, np.float32), 1.0, False, False, {}
    def secret(self):
        return 42
gym.register("Mine-v0", Mine, max_episode_steps=3)
with SlotLoader("Mine-v0", num_envs=2) as loader:
    print(loader.call("secret"))
    for batch in loader.episodes(4):
        batch.send([0] * batch.size)
""",
    "with a main guard": """
if __name__ == "__main__":
    with SlotLoader(Counting, 2, min_get=2) as loader:
        print([int(x) + 42 for x in loader.recv().obs[:, 1]])
""",
    "dataclass and generic of __main__": """
from dataclasses import dataclass
@dataclass
class Settings:
    level: int = 41
class Mine(Counting):
    def __init__(self, context, settings):
        super().__init__(context)
        self.settings = settings
    def secret(self):
        return self.settings.level + 1
from functools import partial
with SlotLoader(partial(Mine, settings=Settings()), 2) as loader:
    print(loader.call("secret"))
""",
}


@pytest.mark.parametrize("body", BODIES)
def test_a_script_works_with_and_without_a_main_guard_and_runs_once(body: str, tmp_path: Path) -> None:
    ran = run_script(tmp_path, HEAD + BODIES[body])
    quiet(ran)
    assert ran.out == "[42, 42]\n"
    assert (tmp_path / "main-runs").read_text() == "x"


def test_the_scripts_own_folder_and_sys_path_reach_the_workers(tmp_path: Path) -> None:
    (tmp_path / "my_envs.py").write_text("from toys import Counting\nclass Mine(Counting):\n    secret = 42\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "my_other.py").write_text("def value():\n    return 42\n")
    code = """
import os, sys
sys.path.append("more")
import my_envs, my_other
os.environ["LATE"] = "42"
def make(context):
    env = my_envs.Mine(context)
    env.late = int(os.environ["LATE"]) + my_other.value()
    return env
with SlotLoader(make, 2) as loader:
    print(loader.get_attr("secret"), loader.get_attr("late"))
"""
    ran = run_script(tmp_path, HEAD + code)
    quiet(ran)
    assert ran.out == "[42, 42] [84, 84]\n"


REPL = """
from slotloader import SlotLoader
from toys import Counting
class Mine(Counting):
    def secret(self):
        return 42

loader = SlotLoader([Mine, lambda context: Mine(context)], min_get=2)
print(loader.call("secret"))
batch = loader.recv()
batch.send([1, 2])
print(loader.recv().obs[:, 2])
loader.close()
print("done")
"""


def test_a_repl_fed_by_a_pipe(tmp_path: Path) -> None:
    ran = run_script(tmp_path, "", "-i", "-q", stdin=REPL)
    assert ran.code == 0
    assert ran.out == "[42, 42]\n[1 2]\ndone\n"
    assert "Traceback" not in ran.err
    assert set(ran.err.replace("...", "").split()) == {">>>"}


TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # not by preexec_fn: that runs the hooks of a fork, and jax warns of it
os.execv(sys.executable, [sys.executable, "-i", "-q"])
"""


def test_a_repl_on_a_terminal_with_ctrl_c_in_recv_and_going_on(tmp_path: Path, clean: None) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINAL],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=child_environment(os.environ[MARK], TERM="dumb"),
        cwd=tmp_path,
        start_new_session=True,
    )
    os.close(theirs)
    seen = bytearray()

    def reader() -> None:
        try:
            while part := os.read(ours, 4096):
                seen.extend(part)
        except OSError:
            return

    thread = threading.Thread(target=reader)
    thread.start()
    try:

        def say(line: str, expect: str) -> None:
            at = len(seen)
            os.write(ours, line.encode())
            until(lambda: expect in seen[at:].decode(errors="replace"), 30, f"{expect!r} after {line!r}: {bytes(seen)!r}")

        until(lambda: b">>>" in seen)
        say("from slotloader import SlotLoader; from toys import Gated\n", ">>>")
        say(f"loader = SlotLoader(lambda context: Gated(context, {str(tmp_path)!r}), 2, min_get=2)\n", ">>>")
        (tmp_path / "hold-0").touch()
        say("loader.recv().send([1, 2]); print('wait' + 'ing', flush=True); loader.recv(stall_timeout=None)\n", "waiting")
        until((tmp_path / "began-0").exists)
        say("\x03", "KeyboardInterrupt")  # Ctrl-C in the terminal reaches the trainer only
        (tmp_path / "hold-0").unlink()
        say("batch = loader.recv(); print('si' + 'ze', batch.size)\n", "size 2")
        say("loader.close(); print('clo' + 'sed')\n", "closed")
        os.write(ours, b"exit()\n")
        process.wait(20)
        assert bytes(seen).count(b"Traceback") == 1
    finally:
        process.kill()
        process.wait()
        thread.join(10)
        os.close(ours)


def test_ctrl_c_in_recv_is_one_traceback_and_everything_is_gone(tmp_path: Path, clean: None) -> None:
    code = HEAD + (
        "import time\nclass Stuck(Counting):\n    def step(self, action):\n        time.sleep(1000)\n"
        "with SlotLoader(Stuck, 2, min_get=2) as loader:\n    loader.recv().send([0, 0])\n    print('up', flush=True)\n"
        "    loader.recv()\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(os.environ[MARK]),
        cwd=tmp_path,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert err.count("Traceback") == 1
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert process.returncode in (1, 130, -signal.SIGINT)
        until(lambda: not started(os.environ[MARK]), 10)
    finally:
        process.kill()
        process.wait()


NOTEBOOK = """
import asyncio, json, sys, threading, time
from pathlib import Path
import nbclient, nbformat

cells = json.loads(sys.stdin.readline())
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
client = nbclient.NotebookClient(notebook, timeout=90, kernel_name="python3", allow_errors=True)

def interrupt():
    while not Path("began-0").exists():
        time.sleep(0.005)
    asyncio.run(client.km.interrupt_kernel())

threading.Thread(target=interrupt, daemon=True).start()
client.execute(cwd=".")
for cell in notebook.cells:
    print(json.dumps("".join(out.get("text", "") + out.get("ename", "") for out in cell.outputs)))
"""


def test_a_notebook_runs_and_goes_on_after_an_interrupt_of_recv(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    here = str(tmp_path)
    cells = [
        "from functools import partial\nfrom pathlib import Path\nfrom slotloader import SlotLoader\nfrom toys import Gated\n"
        f"class Mine(Gated):\n    pass\nhere = {here!r}\n"
        "loader = SlotLoader([lambda context: Mine(context, here), partial(Mine, directory=here)], min_get=2)\n"
        "batch = loader.recv()\nprint(batch.size)",
        "Path('hold-0').touch()\nbatch.send([1, 2])\nloader.recv(stall_timeout=None)",
        "print(loader, loader.unanswered)",
        "Path('hold-0').unlink()\nbatch = loader.recv()\nprint(batch.obs[:, 2])\n"
        "batch.send([3, 4])\nprint(loader.recv().obs[1, 2])",
        "loader.close()\nprint(loader)",
    ]
    ran = run_script(tmp_path, NOTEBOOK.replace("sys.stdin.readline()", repr(json.dumps(cells))), timeout=110)
    assert ran.code == 0, ran.err
    outputs = [json.loads(line) for line in ran.out.splitlines()]
    assert outputs[0] == "2\n"
    assert outputs[1] == "KeyboardInterrupt"
    assert "open" in outputs[2]
    assert outputs[2].rstrip().endswith("[]")
    assert outputs[3] == "[1 2]\n4\n"
    assert "closed" in outputs[4]


# 30: nothing of the trainer is ever forked.


def construct_again_and_again(times: int) -> None:
    for number in range(times):
        with SlotLoader(Counting, 2, min_get=2, start_timeout=60) as loader:
            batch = loader.recv()
            assert batch.obs[:, 0].tolist() == [0, 1000], number
            batch.send([0, 0])


BUSY = """
import threading
import numpy as np
from slotloader import SlotLoader
from toys import Counting
{library}
stop = threading.Event()
lock = threading.Lock()

def spin():
    while not stop.is_set():
        with lock:
            work()

threads = [threading.Thread(target=spin, daemon=True) for _ in range(8)]
for thread in threads:
    thread.start()
for number in range({times}):
    with SlotLoader(Counting, 2, min_get=2, start_timeout=60) as loader:
        batch = loader.recv()
        assert batch.obs[:, 0].tolist() == [0, 1000]
        batch.send([0, 0])
stop.set()
for thread in threads:
    thread.join()
print("all", number + 1)
"""
LIBRARIES = {
    "numpy": "a = np.ones((64, 64))\ndef work():\n    (a @ a).sum(); stop.wait(0.02)",
    "torch": (
        "import torch\na = torch.ones(64, 64, requires_grad=True)\ndef work():\n    (a @ a).sum().backward(); stop.wait(0.02)"
    ),
    "jax": (
        "import jax\na = jax.numpy.ones((64, 64))\nf = jax.jit(lambda x: x @ x)\n"
        "def work():\n    f(a).block_until_ready(); stop.wait(0.02)"
    ),
    "grpc": (
        "import grpc\nchannel = grpc.insecure_channel('127.0.0.1:1')\n"
        "def work():\n    channel.subscribe(lambda state: None, try_to_connect=True); stop.wait(0.02)"
    ),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("times", [20, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_every_construction_succeeds_beside_busy_threads_and_libraries_that_hate_fork(
    library: str, times: int, tmp_path: Path
) -> None:
    if library != "numpy" and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    ran = run_script(tmp_path, BUSY.format(library=LIBRARIES[library], times=times), timeout=600 if times > 20 else 90)
    quiet(ran)
    assert ran.out == f"all {times}\n"


# Start-up: limits, preload, quiet.


def test_a_factory_that_blocks_ends_at_start_timeout_with_its_stack(how: dict[str, Any], tmp_path: Path) -> None:
    if how["backend"] == "inline":
        pytest.skip("the caller sees its own stack")
    go_on = tmp_path / "go-on"

    def blocked_for_ever(context: Any) -> Any:
        if context.slot == 1:
            until(go_on.exists, 60)
        return Counting(context)

    begin = time.monotonic()
    starter = threading.Timer(4.0, go_on.touch) if how["backend"] == "thread" else None  # a thread cannot be killed
    if starter:
        starter.start()
    with pytest.raises(SlotLoaderError) as caught:
        SlotLoader(blocked_for_ever, 2, start_timeout=1.5, **how)
    assert 1.5 <= time.monotonic() - begin < 10.0
    head = str(caught.value).splitlines()[0]
    for words in ("[1]", "start_timeout=1.5", "1 of 2 workers", "raise start_timeout or mend the factory"):
        assert words in head, head
    assert "in blocked_for_ever" in str(caught.value)
    if starter:
        starter.join()


def test_preload_imports_once_before_the_workers_fork(tmp_path: Path) -> None:
    (tmp_path / "heavy_module.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "with Path(__file__).with_name('imports').open('a') as file:\n    file.write('x')\nPID = os.getpid()\n"
    )
    code = """
import sys
def make(context):
    import heavy_module
    env = Counting(context)
    env.secret = heavy_module.PID
    return env
with SlotLoader(make, 3, preload=["heavy_module"]) as loader:
    print(len(set(loader.get_attr("secret"))), "heavy_module" in sys.modules)
"""
    ran = run_script(tmp_path, HEAD + code)
    quiet(ran)
    assert ran.out == "1 False\n"
    assert (tmp_path / "imports").read_text() == "x"


def test_a_module_that_the_worker_cannot_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "vanishing.py").write_text("from toys import Counting\nclass Mine(Counting):\n    pass\n")
    code = 'import os, vanishing\nos.remove("vanishing.py")\nimport shutil; shutil.rmtree("__pycache__", ignore_errors=True)\n'
    ran = run_script(tmp_path, f"{HEAD}{code}SlotLoader(vanishing.Mine, 2)\n")
    assert ran.code == 1
    assert "No module named 'vanishing'" in ran.err
    assert "EnvFailed" in ran.err


def test_workers_do_not_inherit_what_the_trainer_has_open(tmp_path: Path) -> None:
    class Listing(Counting):
        def files_now(self) -> list[str]:
            found = []
            for fd in os.listdir("/proc/self/fd"):
                try:
                    found.append(os.readlink(f"/proc/self/fd/{fd}"))
                except OSError:
                    continue
            return found

    with (tmp_path / "secret.txt").open("w"), SlotLoader(Listing, 2) as loader:
        for files in loader.call("files_now"):
            assert not [name for name in files if "secret.txt" in name]


ENDS = {
    "without close": ("", 0),
    "without close, a batch unanswered": ("batch = loader.recv()\n", 0),
    "del and collect": ("import gc\nimport warnings\nwarnings.simplefilter('ignore')\ndel loader\ngc.collect()\n", 0),
    "an exception": ("raise KeyError('mine')\n", 1),
    "an exception in the block": ("with loader:\n    for batch in loader:\n        raise KeyError('mine')\n", 1),
    "sys.exit": ("import sys\nsys.exit(3)\n", 3),
    "SIGTERM with a handler": (
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(3))\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "import time\ntime.sleep(30)\n",
        3,
    ),
    "a loader in a function": ("def main():\n    with loader:\n        return loader.recv()\nmain()\n", 0),
    "in a thread that has ended": (
        "import threading\nmade = []\nt = threading.Thread(target=lambda: made.append(SlotLoader(Counting, 2)))\n"
        "t.start(); t.join()\n"
        "made[0].recv(min_get=2).send([0, 0])\nmade[0].recv(min_get=2)\n",
        0,
    ),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_however_a_script_ends_nothing_is_left_and_nothing_extra_is_said(backend: str, end: str, tmp_path: Path) -> None:
    body, code = ENDS[end]
    start = (
        "from functools import partial\nfrom toys import Scripted\n"
        f"loader = SlotLoader(partial(Scripted, log={str(tmp_path)!r}), 3, backend={backend!r})\n"
        "loader.recv(min_get=3).send([0] * 3)\n"
    )
    ran = run_script(tmp_path, HEAD + start + body)
    assert ran.code == code, ran.err
    if code == 1:
        assert ran.err.count("Traceback") == 1
        assert ran.err.rstrip().endswith("KeyError: 'mine'")
        assert "slotloader" not in ran.err
    else:
        assert ran.err == ""
    assert (tmp_path / "main-runs").read_text() == "x"
    for slot in range(3):
        assert (tmp_path / f"{slot}.log").read_text().count("close") == 1


def test_a_trainer_without_stdin_stdout_and_stderr_works(tmp_path: Path) -> None:
    code = (
        "import os\nfor fd in (0, 1, 2):\n    os.close(fd)\n"
        + HEAD
        + (
            "with SlotLoader(Counting, 2, min_get=2) as loader:\n    loader.recv().send([0, 0])\n    loader.recv()\n"
            "open('worked', 'w').close()\n"
        )
    )
    run_script(tmp_path, code)
    assert (tmp_path / "worked").exists()


def test_a_worker_that_ends_while_it_starts_fails_the_constructor_at_once() -> None:
    def ends(context: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    begin = time.monotonic()
    with pytest.raises(WorkerDied, match="SIGKILL"):
        SlotLoader([Counting, ends])
    assert time.monotonic() - begin < 10
